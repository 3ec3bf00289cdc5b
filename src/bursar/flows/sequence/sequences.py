"""Sequences: what a program calls. It checks, writes the record down, and has it driven.

    async with Sequences(b.ledger, own={"ship": Pair(do=ship, undo=recall)}) as sequences:
        steps = [Pay("alice", "shop", "USDT", "9.99"), Own("ship", {"book": "Dune"})]
        done = await sequences.start(steps, key="order-7")

The same key and steps get the first sequence again, from any process; the same key with other steps is refused. What
has not ended when `start` returns goes on: by the task that drives it, or by whichever worker finds it.
"""

from __future__ import annotations

import asyncio
import builtins
import collections.abc
import hashlib
from collections.abc import Mapping
from typing import Self

import msgspec

from bursar.engine import AlertDispatcher, Engine, Flow, Operators, Worker
from bursar.engine.background import background
from bursar.flows.sequence.checks import check_ground, define
from bursar.flows.sequence.flow import SCOPE, entry_key, sequence_flow
from bursar.flows.sequence.machine import COMPENSATION_FAILED, MACHINE, RETRY, SKIP
from bursar.flows.sequence.steps import EntryStep, OwnStep, Sequence, Step, StoredStep
from bursar.flows.sequence.views import SequenceView, view
from bursar.ledger import Ledger
from bursar.model.entries import check_key
from bursar.model.errors import IdempotencyKeyReused
from bursar.model.machine import Kind
from bursar.model.records import Record
from bursar.model.retry import USUAL_RETRY
from bursar.model.retry import Retry as Backoff
from bursar.writer import Operation

CALL_TIMEOUT_S = 10.0
WAIT_S = 2.0  # how long a caller waits for its sequence
PARTING_S = 10.0  # how long what is under way may take when the program ends
LEASE_S = 30.0
NEWEST = 2**63 - 1
CREATE = "create"


class Sequences:
    """Compositions of steps. As a context it has a worker, which goes on with what a dead process left; unless it was
    given an engine, which has a worker already."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        own: Mapping[str, OwnStep] | None = None,
        retry: Backoff = USUAL_RETRY,
        call_timeout_s: float = CALL_TIMEOUT_S,
        worker: str = "local",
        lease_s: float = LEASE_S,
        dispatcher: AlertDispatcher | None = None,  # delivers alerts while the context is open; without it they wait
        engine: Engine | None = None,
    ) -> None:
        """`engine`: the one of the process, which drives other flows too; its owner runs its worker, and `worker` and
        `lease_s` are the engine's. Without it sequences get an engine of their own, and the context runs a worker."""
        self.ledger = ledger
        self.own: dict[str, OwnStep] = dict(own or {})
        self.engine = engine or Engine(ledger.store, ledger.writer, (), worker=worker, lease_s=lease_s)
        self.flow: Flow[Sequence] = sequence_flow(
            ledger.store, self.own, self.engine.alert, retry=retry, call_timeout_s=call_timeout_s
        )
        self.engine.register(self.flow)
        self._owns_engine = engine is None
        self._dispatcher = dispatcher
        self._worker: Worker | None = None
        self._working: asyncio.Task[None] | None = None
        self._dispatching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self._owns_engine:
            self._worker = Worker(self.engine)
            self._working = background(self.engine, "bursar-sequences", self._worker.run)
        if self._dispatcher is not None:
            self._dispatching = background(self.engine, "bursar-alerts", self._dispatcher.run)
        return self

    async def __aexit__(self, *_error: object) -> None:
        if self._worker is not None and self._working is not None:
            self._worker.stop()
            await self._working
            await self.engine.finish(PARTING_S)
        if self._dispatching is not None:
            self._dispatching.cancel()
            await asyncio.gather(self._dispatching, return_exceptions=True)

    # --- callers -----------------------------------------------------------------------------------------------

    async def start(
        self, steps: collections.abc.Sequence[Step], *, key: str = "", owner: str = "", wait_s: float = WAIT_S
    ) -> SequenceView:
        """Check, write down, drive; the sequence has ended, or goes on. Bad input is refused, and nothing written."""
        if key:
            check_key(key)
        if owner:
            check_key(owner)
        wanted = define(steps, await self.ledger.assets())
        same = fingerprint(wanted)
        record = await self._first(owner, key, same) if key else None
        replayed = record is not None
        if record is None:
            await self._check_ground(wanted)
            remember = None
            if key:
                remember = Operation(scope=_scope(owner), id=key, op=CREATE, fingerprint=same)
            body = Sequence(key=key, steps=wanted)
            started = await self.engine.start(self.flow.name, body, owner=owner, operation=remember)
            record, replayed = started.record, started.replayed
        return await self._view(await self._drive(record, wait_s), replayed=replayed)

    async def wait(self, id: str, wait_s: float = WAIT_S) -> SequenceView:
        """Drive it and wait for so long; whatever has not ended by then goes on."""
        return await self._view(await self._drive(await self.engine.record(self.flow.name, id), wait_s))

    async def get(self, id: str) -> SequenceView:
        """A sequence as it stands."""
        return await self._view(await self.engine.record(self.flow.name, id))

    async def find(self, key: str, *, owner: str = "") -> SequenceView | None:
        """The sequence that was started under this key."""
        answer = await self.ledger.store.read.operations.get(_scope(owner), key, CREATE)
        return None if answer is None else await self.get(msgspec.json.decode(answer.detail)["record"])

    async def list(
        self, *, owner: str = "", state: str = "", before: int = NEWEST, limit: int = 100
    ) -> list[SequenceView]:
        """Sequences, newest first: of all owners, or of one; in any state, or in one."""
        records = self.ledger.store.read.records
        states = (state,) if state else ()
        found = await records.list(self.flow.name, owner=owner, states=states, before=before, limit=limit)
        return [await self._view(record) for record in found]

    # --- operators ---------------------------------------------------------------------------------------------

    async def queue(self, limit: int = 100) -> builtins.list[SequenceView]:
        """Those whose compensation was refused, and that wait for a person."""
        return await self.list(state=COMPENSATION_FAILED, limit=limit)

    async def retry(self, id: str, *, actor: str, reason: str) -> SequenceView:
        """Try the compensation again."""
        return await self._view(await self.people.signal(self.flow.name, id, RETRY, actor=actor, reason=reason))

    async def skip(self, id: str, *, actor: str, reason: str) -> SequenceView:
        """Give one compensation up and go on with the next. The first person asks, another one decides."""
        return await self._view(await self.people.signal(self.flow.name, id, SKIP, actor=actor, reason=reason))

    @property
    def people(self) -> Operators:
        """What else operators can do: retry now, pause, force."""
        return Operators(self.engine)

    # --- the small parts ---------------------------------------------------------------------------------------

    async def _drive(self, record: Record, wait_s: float) -> Record:
        still = MACHINE.state(record.state).kind in (Kind.TERMINAL, Kind.WAIT)
        return record if still or wait_s <= 0 else await self.engine.process_now(record, wait_s)

    async def _first(self, owner: str, key: str, same: str) -> Record | None:
        """The sequence that this key stands for already."""
        answer = await self.ledger.store.read.operations.get(_scope(owner), key, CREATE)
        if answer is None:
            return None
        if answer.fingerprint != same:
            raise IdempotencyKeyReused(_scope(owner), key, CREATE)
        return await self.engine.get(self.flow.name, msgspec.json.decode(answer.detail)["record"])

    async def _check_ground(self, steps: tuple[StoredStep, ...]) -> None:
        entries = [step for step in steps if isinstance(step, EntryStep)]
        paths = sorted({path for step in entries for path in (step.source, step.target)})
        heads = await self.ledger.store.read.accounts.heads(paths) if paths else {}
        check_ground(steps, heads, await self.ledger.books(), self.own)

    async def _view(self, record: Record, *, replayed: bool = False) -> SequenceView:
        body = self.flow.item(record).body
        places = {(SCOPE, entry_key(record.id, n)): n for n, s in enumerate(body.steps) if isinstance(s, EntryStep)}
        taken = await self.ledger.store.read.envelopes.existing(list(places)) if places else {}
        return view(record, body, {places[key]: found.seq for key, found in taken.items()}, replayed=replayed)


def fingerprint(steps: tuple[StoredStep, ...]) -> str:
    """Two sequences are the same if their steps are."""
    return hashlib.sha256(msgspec.json.encode(steps, order="deterministic")).hexdigest()


def _scope(owner: str) -> str:
    return f"{SCOPE}:{owner}"
