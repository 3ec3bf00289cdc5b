"""A simulated operating-system process: tasks that die together, and the doors through which they reach out.

A crash is not a cancellation. Nothing in the process runs again, no `except` and no `finally`; what it had asked of a
port and had not happened does not happen; what had happened stays, and its reply is never heard. The next incarnation
is a new `Process` of the same name, with new ports; a task that still holds the old ones is fenced.

Port calls are counted per name, over all incarnations, so that "the 17th port call of the worker" is one place in a
run. Whether a call is where the process dies is the kernel's to say (`kernel.Kernel.fate`).

Not here: the world beyond the ports. Files and networks are a `SimHost`'s; chains and rails are simulated on top.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections import deque
from collections.abc import Callable, Coroutine
from contextvars import Context
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

from bursar.ports import Files, Listener, SerialExecutor, Stream
from bursar.sim.disk import SimDisk
from bursar.sim.loop import OWNER, Fenced, Owner
from bursar.sim.net import SimHost

if TYPE_CHECKING:
    from bursar.sim.kernel import Kernel

T = TypeVar("T")

# Virtual time at zero: 2023-11-14T22:13:20Z. Any constant will do.
EPOCH_US: Final = 1_700_000_000_000_000

# Delays are whole ticks. Two lanes are therefore often due at the same moment, where chance orders effects and
# replies freely; delays from a continuum would never put one call's effect between another's effect and its reply.
# A power of two, so that sums are exact and moments that should be equal are.
TICK_S: Final = 2.0**-13

# A fenced port raises. In code that swallows even that, in a loop, it stops raising and never returns instead, so that
# closing such a coroutine ends.
FENCES_MAX: Final = 1_000


class Moment(Enum):
    """Where, in a port call, the process dies."""

    BEFORE = "before"  # the effect never happens
    AFTER = "after"  # the effect has happened, and its reply is lost


class Process(Owner):
    """One incarnation. Made by `Kernel.start`."""

    __slots__ = ("clock_offset_us", "context", "disk", "incarnation", "kernel", "name", "port_calls", "ports", "who")

    def __init__(self, kernel: Kernel, name: str, disk: SimDisk, predecessor: Process | None) -> None:
        super().__init__()
        self.kernel = kernel
        self.name = name
        self.disk = disk
        self.incarnation: int = 1 if predecessor is None else predecessor.incarnation + 1
        # The clock is the machine's, not the process's: it stays wrong over a restart.
        self.clock_offset_us: int = 0 if predecessor is None else predecessor.clock_offset_us
        self.port_calls: int = 0 if predecessor is None else predecessor.port_calls
        self.who = f"{name}.{self.incarnation}"
        self.context = Context()  # empty: a new process inherits nothing
        self.context.run(OWNER.set, self)
        self.ports = SimPorts(self)

    def spawn(self, coro: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
        """Start a task of this process. Tasks that it creates in turn belong to the process by themselves."""
        if not self.alive:
            coro.close()
            raise RuntimeError(f"{self.who} is dead")
        return self.kernel.loop.create_task(coro, name=name, context=self.context.copy())

    def crash(self) -> None:
        """Die now. For the scenario; a process cannot crash itself, since its own code would go on running."""
        if OWNER.get() is self:
            raise RuntimeError(f"{self.who} cannot crash itself: its code would run on")
        if self.alive:
            self.kernel.kill(self, self.port_calls, "killed", None)

    def __repr__(self) -> str:
        return self.who


class SimPorts:
    """`bursar.ports.Ports` of one incarnation."""

    __slots__ = ("_fences", "_process")

    def __init__(self, process: Process) -> None:
        self._process = process
        self._fences = 0

    def now_us(self) -> int:
        process = self._living()
        return EPOCH_US + int(process.kernel.loop.now * 1e6) + process.clock_offset_us

    def monotonic(self) -> float:
        return self._living().kernel.loop.now

    def random(self) -> float:
        return self._living().kernel.values.random()

    def token(self) -> str:
        return f"{self._living().kernel.values.getrandbits(128):032x}"

    async def sleep(self, seconds: float) -> None:
        process = self._process
        if not process.alive:
            await self.fence()
        kernel = process.kernel
        loop = kernel.loop
        process.port_calls = number = process.port_calls + 1
        kernel.port_calls += 1
        kernel.trace.event(process.who, "sleep", "", "begin")
        woken: asyncio.Future[None] = loop.create_future()
        if kernel.armed and kernel.fate(process, number, only_before=True) is Moment.BEFORE:
            # Not from here: the process's own code is on the stack, and would run on.
            loop.call_soon(kernel.kill, process, number, "sleep", Moment.BEFORE, context=process.context)
            await woken
        timer = loop.call_at(loop.now + seconds, self._wake, woken, context=process.context)
        try:
            await woken
        finally:
            timer.cancel()

    def lane(self, name: str) -> SerialExecutor:
        return SimLane(self._living(), name)

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        return self._living().disk.open(path)

    def identity(self, path: str) -> tuple[int, int] | None:
        return (0, 0)

    def free_bytes(self, path: str) -> int:
        return 2**40

    def files(self) -> Files:
        return self._host().files(self._process)

    async def connect(self, address: str) -> Stream:
        if not self._process.alive:
            await self.fence()
        return await self._host().net.connect(self._process, address)

    async def listen(
        self,
        address: str,
        accept: Callable[[Stream], object],
        trouble: Callable[[OSError], object] = lambda _: None,
    ) -> Listener:
        return self._host().net.listen(self._process, address, accept)

    async def fence(self) -> NoReturn:
        """Never return to dead code."""
        self._fences += 1
        if self._fences > FENCES_MAX:
            await self._process.kernel.loop.create_future()
        raise Fenced(self._process.who)

    def _wake(self, woken: asyncio.Future[None]) -> None:
        self._process.kernel.trace.event(self._process.who, "sleep", "", "end")
        if not woken.done():
            woken.set_result(None)

    def _host(self) -> SimHost:
        disk = self._living().disk
        if not isinstance(disk, SimHost):
            raise RuntimeError(f"{self._process.who} was started on a bare disk: files and networks need a SimHost")
        return disk

    def _living(self) -> Process:
        if not self._process.alive:
            raise Fenced(self._process.who)
        return self._process


class SimLane:
    """`bursar.ports.SerialExecutor`: work takes a few ticks and happens in the order in which it was given."""

    __slots__ = ("_closed", "_free_at", "_name", "_process", "_queue")

    def __init__(self, process: Process, name: str) -> None:
        self._process = process
        self._name = name
        self._queue: deque[tuple[Callable[[], Any], asyncio.Future[Any], int, str]] = deque()
        self._free_at = 0.0
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        process = self._process
        if not process.alive:
            await process.ports.fence()
        if self._closed:
            raise RuntimeError(f"lane {self._name} is closed")
        kernel = process.kernel
        loop = kernel.loop
        process.port_calls = number = process.port_calls + 1
        kernel.port_calls += 1
        label = _label(work)
        kernel.trace.event(process.who, self._name, label, "begin")
        reply: asyncio.Future[T] = asyncio.Future(loop=loop)
        self._queue.append((work, reply, number, label))
        free_at = self._free_at
        self._free_at = due = (free_at if free_at > loop.now else loop.now) + kernel.latency()
        # In the process's context: a dead process's calls are dropped by the loop like all else of it. Which call is
        # performed is the queue's to say, so that chance among timers due at one moment cannot reorder a lane.
        loop.call_at(due, self._perform, context=process.context)
        return await reply

    def close(self) -> None:
        """Take nothing more. What is queued still happens, at its time (a real lane's `close` waits for it)."""
        self._closed = True

    def _perform(self) -> None:
        work, reply, number, label = self._queue.popleft()
        process = self._process
        kernel = process.kernel
        moment = kernel.fate(process, number) if kernel.armed else None
        if moment is Moment.BEFORE:
            kernel.kill(process, number, f"{self._name} {label}", moment)
            return
        error: BaseException | None = None
        value: Any = None
        try:
            value = work()
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:
            error = raised
        kernel.trace.event(process.who, self._name, label, "end" if error is None else type(error).__name__)
        if moment is Moment.AFTER:
            kernel.kill(process, number, f"{self._name} {label}", moment)
        elif reply.done():
            pass  # the caller was cancelled meanwhile: the work has happened, unheard
        elif error is None:
            reply.set_result(value)
        else:
            reply.set_exception(error)
        del error, reply  # a traceback holds this frame, and this frame would hold the traceback


def _label(work: Callable[[], Any]) -> str:
    """What a trace calls a piece of work: the same in every run, unlike its repr."""
    function = work.func if type(work) is partial else work
    label: str = getattr(function, "__qualname__", "") or type(function).__qualname__
    return label
