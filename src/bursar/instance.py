"""Opening Bursar: a store, the ledger on it, and a worker for the flows that it is given."""

from __future__ import annotations

import asyncio
import hashlib
import platform
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from bursar.engine import Engine, Flow, FlowRecord, FlowRefused, Operators, Sink, Worker, to_log
from bursar.engine.background import finish, running, usual_jobs
from bursar.engine.blocking import Threads, in_threads
from bursar.engine.flow import by_name
from bursar.ledger import Ledger, keep_expiring_holds
from bursar.model.errors import Refusal
from bursar.model.machine import Kind
from bursar.model.records import Transition
from bursar.ports import Ports, SystemPorts
from bursar.stopping import Stopping
from bursar.store import connect
from bursar.store.protocol import USUAL, Options
from bursar.worker_names import held_name
from bursar.writer import Limit, Operation

B = TypeVar("B", bound=msgspec.Struct)

STOP_S = 10.0  # how long closing may take; what is not done by then is found by the next worker
WAIT_S = 10.0  # how long a caller waits for a record
LOOK_S = 0.05  # between two looks at a record that is driven elsewhere, or has to be called again
PAUSED_S = 3_600.0  # after which a pause raises an alert
HOLDS_S = 5.0  # between two looks for holds whose time is up
NAME_CHARACTERS = 8
SQLITE = "sqlite:///"
SINKS: Mapping[str, Sink] = {"log": to_log}


class Bursar:
    """An open database. Use it as `async with bursar.open(url) as b:`."""

    def __init__(
        self,
        url: str,
        *,
        ports: Ports | None = None,
        migrate: bool = False,
        options: Options = USUAL,
        flows: Sequence[Flow[Any]] = (),
        sinks: Mapping[str, Sink] = SINKS,
        worker_name: str = "",
        stop_s: float = STOP_S,
    ) -> None:
        self.url = url
        self._ports = SystemPorts() if ports is None else ports
        self._migrate = migrate
        self._options = options
        self.flows: Mapping[str, Flow[Any]] = by_name(flows)
        self._sinks = sinks
        self._worker_name = worker_name
        self._stopping = Stopping(self._ports, stop_s)
        self._writer_s: float | None = None  # how long what is being written may take when it is closed
        self._engine: Engine | None = None
        self._opened: AsyncExitStack | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:  # also if it is cancelled: whatever is open by then is let go
            self.store = connect(self.url, self._ports, options=self._options)
            stack.push_async_callback(self.store.close)
            await self.store.open(migrate=self._migrate)
            self.ledger = Ledger(self.store)
            stack.push_async_callback(self._close_writer)
            if self.flows:
                await self._run_flows(stack)
            self._opened = stack.pop_all()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def close(self, timeout_s: float | None = None) -> None:
        """Stop the worker, finish what is being written (in `timeout_s`, if given), let go. Again: nothing happens."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._writer_s = timeout_s
            await opened.aclose()

    async def _close_writer(self) -> None:
        left_s = self._stopping.left_s() if self.flows and self._writer_s is None else self._writer_s
        await self.ledger.writer.close(left_s)

    # --- flows -------------------------------------------------------------------------------------------------

    async def start(
        self, flow: Flow[B], body: B, *, key: str, owner: str = "", limits: tuple[Limit, ...] = ()
    ) -> FlowRecord[B]:
        """Start a record, once per owner and key, and have it driven.

        It is on disk when this returns. The same key and body again return the first record, from any process; the same
        key with another body is refused (`IdempotencyKeyReused`). If flow or ledger refuse it, nothing is started.
        """
        engine = self._engine_of(flow)
        if not isinstance(body, flow.body):
            raise TypeError(f"flow {flow.name!r} keeps {flow.body.__name__}, not {type(body).__name__}")
        fingerprint = hashlib.sha256(msgspec.json.encode(body, order="deterministic")).hexdigest()
        operation = Operation(scope=f"start:{flow.name}:{owner}", id=key, op="create", fingerprint=fingerprint)
        try:
            started = await engine.start(flow.name, body, owner=owner, operation=operation, limits=limits)
        except Refusal:  # of no account if the same request was taken before
            first = await self.store.read.operations.get(*operation.key)
            if first is None or first.fingerprint != fingerprint:
                raise
            return await self.get(flow, msgspec.json.decode(first.detail)["record"])
        if not started.replayed:
            engine.drive(started.record)
        return flow.item(started.record)

    async def wait(self, record: FlowRecord[B], timeout_s: float = WAIT_S) -> FlowRecord[B]:
        """The record once it has ended or waits for an event, or as it is after that time; it goes on."""
        engine = self.engine
        flow = engine.require(record.record.flow)
        now, deadline_s = record.record, self._ports.monotonic() + timeout_s
        while flow.machine.state(now.state).kind not in (Kind.TERMINAL, Kind.WAIT):
            left_s = deadline_s - self._ports.monotonic()
            if left_s <= 0:
                break
            task = engine.driving(now)
            if task is not None:
                await asyncio.wait([task], timeout=left_s)
            else:  # another process has it, or it is called again later
                await self._ports.sleep(min(LOOK_S, left_s))
            now = await self.store.read.records.by_number(now.number) or now
        return flow.item(now)

    async def get(self, flow: Flow[B], id: str) -> FlowRecord[B]:
        """A record as it stands."""
        return flow.item(await self._engine_of(flow).record(flow.name, id))

    async def history(self, record: FlowRecord[Any]) -> Sequence[Transition]:
        """Every transition of a record and every call without an answer, with its evidence, oldest first."""
        return await self.store.read.records.history(record.record.number)

    @property
    def engine(self) -> Engine:
        """What drives the flows."""
        if self._engine is None:
            raise FlowRefused("", "no flow runs here: give them to `bursar.open(url, flows=[…])`")
        return self._engine

    @property
    def operators(self) -> Operators:
        """What people do to records: signal, retry, pause, force."""
        return Operators(self.engine)

    def _engine_of(self, flow: Flow[Any]) -> Engine:
        known = self.flows.get(flow.name)
        if known is None or known.machine is not flow.machine:
            raise FlowRefused(flow.name, "it does not run here: give it to `bursar.open(url, flows=[…])`")
        return self.engine

    async def _run_flows(self, stack: AsyncExitStack) -> None:
        """An engine that drives the flows; its worker, alerts, forced calls and holds, each in a supervised task."""
        threads = Threads(self._ports)
        stack.callback(threads.close)
        flows = [in_threads(flow, threads) for flow in self.flows.values()]
        engine = self._engine = Engine(self.store, self.ledger.writer, flows, worker=self._held_name(stack))
        stack.push_async_callback(finish, engine, self._stopping)
        jobs = usual_jobs(engine, self._sinks, PAUSED_S)
        jobs["bursar-holds"] = partial(keep_expiring_holds, self.ledger, HOLDS_S)
        self.worker = Worker(engine)
        await stack.enter_async_context(running(self.worker, jobs, self._stopping))

    def _held_name(self, stack: AsyncExitStack) -> str:
        """The worker's name. Beside a SQLite file it is kept across restarts, and what this program held before is
        its own at once; elsewhere, unless a name is given, a dead process's records wait for its lease to end."""
        if self.url.startswith(SQLITE):
            file = Path(self.url.removeprefix(SQLITE))
            return stack.enter_context(held_name(self._ports, str(file.parent), file.name, self._worker_name))
        return self._worker_name or f"{platform.node()}:{self._ports.token()[:NAME_CHARACTERS]}"


def open(
    url: str,
    *,
    flows: Sequence[Flow[Any]] = (),
    migrate: bool = False,
    require_synchronous: bool = False,
    sinks: Mapping[str, Sink] = SINKS,
    worker_name: str = "",
    stop_s: float = STOP_S,
) -> Bursar:
    """Open `sqlite:///funds.db` or `postgresql://…`. A new database is set up; an older one is refused, unless
    `migrate` is given or `bursar migrate` was run. With `require_synchronous`, a PostgreSQL server is refused whose
    commits are not at a synchronous standby before they are reported.

    With `flows`, a worker drives their records until it is closed, also those that a dead process left; alerts go to
    the `sinks`. `worker_name` is a name of this process alone that is the same after a restart; `stop_s` is how long
    closing waits for what is under way. What is not done by then is picked up by the next worker."""
    return Bursar(
        url,
        migrate=migrate,
        options=Options(require_synchronous=require_synchronous),
        flows=flows,
        sinks=sinks,
        worker_name=worker_name,
        stop_s=stop_s,
    )
