"""Crash a flow everywhere, in a few lines of your own test.

    async def order_dune(b: bursar.Bursar) -> bursar.FlowRecord[Order]:
        return await b.wait(await b.start(orders, Order("Dune", 999), key="order-7"))

    def check(shop: Shop, order: bursar.FlowRecord[Order]) -> None:
        assert order.state == "DONE"
        assert shop.shipped == ["Dune"]

    def test_orders_survive_every_crash() -> None:
        crash_everywhere(order_dune, flows=[orders], world=Shop, check=check)

The client runs on the simulator: an event loop on a virtual clock, a disk in memory, and nothing of the outside world.
First it runs undisturbed, and every call is counted: to the database, to the clock, and the calls of actions. Then it
runs once for every call and moment: the process is killed before the call has its effect, or after the effect and
before it hears of it, or it is stopped at that call. Killed is as by a power cut: no `except` and no `finally`
runs. The program is started again, and the client asks again, with the same keys. In the end every record must have
ended, no critical alert may be open, the ledger's audit must find nothing, and `check` must agree. A call is the same
place in every run: a failure names it, and `at=` runs it alone.

Not here: faults of the other sides. Those are fakes that `world` makes: have one lose a reply, or refuse.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, TypeVar

from bursar.audit import audit
from bursar.engine import Answer, Flow, FlowRecord
from bursar.engine.blocking import BlockingAction
from bursar.engine.flow import Action
from bursar.instance import Bursar
from bursar.model.machine import Kind
from bursar.ports import SerialExecutor
from bursar.sim import CrashAt, Kernel, Moment, Process, SimHost, SimNet, SimPorts, run
from bursar.sim.two_process import quiet

W = TypeVar("W")
R = TypeVar("R")
T = TypeVar("T")

When = Literal["before", "after", "stop"]
At = tuple[int, When]

PATH = "crashed.db"
PROGRAM = "program"
RESTART_S = 0.1  # virtual, as all times here
LOOK_S = 0.1
PATIENCE_S = 3_600.0  # within which every record must have ended
CALLBACKS_MAX = 10_000_000
RECORDS_MAX = 1_000


class NotRecovered(AssertionError):
    """A run did not end as it should; the message says at which call it was killed or stopped."""


def crash_everywhere(
    client: Callable[[Bursar], Awaitable[R]],
    *,
    flows: Sequence[Flow[Any]] | Callable[[W], Sequence[Flow[Any]]],
    world: Callable[[], W],
    check: Callable[[W, R], object],
    setup: Callable[[Bursar], Awaitable[object]] | None = None,
    at: At | None = None,
) -> int:
    """Run `client` on `flows`, killed or stopped at every call; returns how many places there were.

    `client` starts records and waits for them, always under the same keys: it is run again after each restart, and once
    more when every record has ended. `world` makes the other sides, anew for each run; where flows are made for them,
    `flows` is a function of the world. `check` gets the world, and what the client returned in the end; it raises if
    something is wrong. `setup` prepares the ledger, once. `at` is the place that a failure has named, to run it alone.
    Raises `NotRecovered`.
    """
    image = _prepared(setup)
    with quiet():
        undisturbed = _Run(client, flows, world, check, image, None)
        undisturbed.play()
        places = undisturbed.places() if at is None else [at]
        for place in places:
            _Run(client, flows, world, check, image, place).play()
    return len(places)


def _prepared(setup: Callable[[Bursar], Awaitable[object]] | None) -> bytes:
    """The database that every run begins with."""

    async def main(kernel: Kernel) -> bytes:
        host = SimHost(SimNet(kernel), "disk")
        async with Bursar(f"sqlite:///{PATH}", ports=kernel.start(PROGRAM, disk=host).ports) as b:
            if setup is not None:
                await setup(b)
        return host.image(PATH)

    return run(main, 0).value


@dataclass
class _Run(Generic[W, R]):
    """One run: undisturbed, or disturbed at one place."""

    client: Callable[[Bursar], Awaitable[R]]
    make_flows: Sequence[Flow[Any]] | Callable[[W], Sequence[Flow[Any]]]
    make_world: Callable[[], W]
    check: Callable[[W, R], object]
    image: bytes
    at: At | None
    flows: Sequence[Flow[Any]] = ()
    first: int = 0  # the last call before the client begins
    last: int = 0  # the last call before everything has ended
    reached: bool = False  # whether the place was come to
    labels: dict[int, str] = field(default_factory=dict)  # of calls of actions
    naps: set[int] = field(default_factory=set)  # calls of the clock: they have no effect to die after

    def places(self) -> list[At]:
        """Every place at which a run like this one can be disturbed."""
        moments: tuple[When, ...] = ("before", "after", "stop")
        calls = range(self.first + 1, self.last + 1)
        return [(call, when) for call in calls for when in moments if when != "after" or call not in self.naps]

    def play(self) -> None:
        """To its end, or `NotRecovered`."""
        crashes = []
        if self.at is not None and self.at[1] != "stop":
            crashes = [CrashAt(PROGRAM, self.at[0], Moment(self.at[1]))]
        try:
            run(self.main, 0, crashes=crashes, max_callbacks=CALLBACKS_MAX)
        except Exception as error:
            raise NotRecovered(f"{self.where()}: {type(error).__name__}: {error}") from error
        if self.at is not None and not self.reached:
            why = "there is no such call; is the client, or an action, not the same in every run?"
            raise NotRecovered(f"{self.where()}: {why}")

    def where(self) -> str:
        """What was done to it, in words."""
        if self.at is None:
            return "undisturbed"
        call, when = self.at
        did = "told to stop at" if when == "stop" else f"killed {when}"
        label = self.labels.get(call, "")
        return f"{did} call {call}{f' ({label})' if label else ''}; crash_everywhere(…, at={self.at}) runs it alone"

    async def main(self, kernel: Kernel) -> None:
        """Start the program, start it again when it has died, and judge."""
        host = SimHost(SimNet(kernel), "disk")
        host.install(PATH, self.image)
        world = self.make_world()
        self.flows = self.make_flows(world) if callable(self.make_flows) else self.make_flows
        ended: asyncio.Future[R] = kernel.loop.create_future()

        def boot() -> None:
            process = kernel.start(PROGRAM, disk=host)
            process.spawn(self.live(process, ended), name=PROGRAM)

        kernel.on_crash = lambda _process: kernel.loop.call_later(RESTART_S, boot)
        try:
            boot()
            self.check(world, await ended)
        finally:
            host.close()

    async def live(self, process: Process, ended: asyncio.Future[R]) -> None:
        """One life of the program."""
        ports = _Ports(process, self)
        flows = [self.visible(flow, ports) for flow in self.flows]
        try:
            async with Bursar(f"sqlite:///{PATH}", ports=ports, flows=flows, sinks={}) as b:
                self.first = self.first or process.port_calls
                work = asyncio.ensure_future(self.work(b, ports))
                stop = asyncio.ensure_future(ports.stop.wait())
                await asyncio.wait([work, stop], return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                if not work.done():
                    work.cancel()
                await asyncio.wait([work])
        except Exception as error:
            ended.set_exception(error)
            return
        if work.cancelled():  # it has stopped, and is started again
            process.kernel.loop.call_soon(process.crash, context=Context())
        elif (failure := work.exception()) is not None:
            ended.set_exception(failure)
        else:
            ended.set_result(work.result())

    async def work(self, b: Bursar, ports: _Ports) -> R:
        """What the client does, until every record has ended."""
        await self.client(b)
        waited_s = LOOK_S
        while left := await self.open(b):
            if waited_s > PATIENCE_S:
                raise NotRecovered(f"not ended: {', '.join(left)}")
            await ports.sleep(waited_s)  # as long again as it has waited in all
            waited_s *= 2
        self.last = self.last or ports.process.port_calls
        result = await self.client(b)
        if alerts := [alert for alert in await b.store.read.alerts.open() if alert.severity == "critical"]:
            raise NotRecovered(f"alerts: {'; '.join(f'{alert.reason}: {alert.message}' for alert in alerts)}")
        if broken := [finding for finding in await audit(b.store) if not finding.ok]:
            raise NotRecovered(f"audit: {'; '.join(f'{one.meaning}: {one.broken}' for one in broken)}")
        return result

    async def open(self, b: Bursar) -> list[str]:
        """Records that have not ended."""
        found = []
        for flow in self.flows:
            for record in await b.store.read.records.list(flow.name, limit=RECORDS_MAX):
                if flow.machine.state(record.state).kind is not Kind.TERMINAL:
                    found.append(f"{record.flow} {record.id} is {record.state} {record.error}".rstrip())
        return found

    def visible(self, flow: Flow[Any], ports: _Ports) -> Flow[Any]:
        """The same flow, whose actions are calls at which a run can be disturbed."""

        def seen(actions: Mapping[str, Action]) -> dict[str, Action]:
            return {name: _seen(name, action, ports) for name, action in actions.items()}

        return replace(flow, actions=seen(flow.actions), cancels=seen(flow.cancels), queries=seen(flow.queries))


class _Ports(SimPorts):
    """The simulator's ports, which know the calls of a run by number."""

    __slots__ = ("_run", "process", "stop")

    def __init__(self, process: Process, of: _Run[Any, Any]) -> None:
        super().__init__(process)
        self.process = process
        self.stop = asyncio.Event()
        self._run = of

    def begin(self, label: str) -> None:
        """A call is about to be made."""
        number = self.process.port_calls + 1
        if label:
            self._run.labels[number] = label
        if self._run.at is not None and number == self._run.at[0]:
            self._run.reached = True
            if self._run.at[1] == "stop":
                self.stop.set()

    async def sleep(self, seconds: float, label: str = "") -> None:
        self.begin(label)
        self._run.naps.add(self.process.port_calls + 1)
        await super().sleep(seconds)

    def lane(self, name: str) -> SerialExecutor:
        return _Lane(super().lane(name), self, name)


class _Lane:
    """A lane whose calls are known by number."""

    def __init__(self, inner: SerialExecutor, ports: _Ports, name: str) -> None:
        self._inner = inner
        self._ports = ports
        self._name = name

    async def run(self, work: Callable[[], T]) -> T:
        self._ports.begin(self._name)
        return await self._inner.run(work)

    def close(self) -> None:
        self._inner.close()


def _seen(name: str, action: Action, ports: _Ports) -> Action:
    """An action between two calls of the clock: killed at the first it has no effect, at the second no reply."""
    if isinstance(action, BlockingAction):
        return action  # it is run by a lane, whose call is one

    async def call(item: FlowRecord[Any]) -> Answer:
        await ports.sleep(0, f"before {name} is called")
        try:
            answer = await action(item)
        except Exception:
            await ports.sleep(0, f"after {name} has raised")
            raise
        await ports.sleep(0, f"after {name} has answered")
        return answer

    return call
