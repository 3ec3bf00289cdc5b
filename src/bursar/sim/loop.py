"""The simulator's event loop: asyncio on a virtual clock, in an order that a seed decides.

Time starts at 0 and moves only when nothing is ready to run: then it jumps to the next timer. Among the callbacks
that are ready, seeded chance picks the next, so that a seed is one interleaving and the same seed is the same
interleaving. (asyncio promises first come, first served; code that needs that promise between two tasks has a bug
that only shows under load, and here it shows.) Timers that are due at the same moment become ready together, in the
order in which they were set.

Everything that is scheduled belongs to an `Owner` (a simulated process; none, for the scenario itself), found
through the contextvars context that asyncio hands along with every callback: a task's steps carry the context of the
task, a future's callbacks that of the waiting task. Once an owner is dead, what belongs to it is never run again and is
kept, unfinished, until the end: dropping it would run its `finally` blocks, which a power cut does not. An owner can
also be stopped for a while, as a process that the machine has no time for.

Order never comes from memory addresses: tasks hash by their number, because `TaskGroup`, `asyncio.wait` and
`all_tasks` iterate over sets of them. Bare futures and coroutines keep asyncio's hash (awaiting a subclass of Future
is slow), so simulated code must not iterate over a set of those; `as_completed` does when it is given coroutines.

Not here: sockets, threads, signals, subprocesses. The base class raises NotImplementedError for each, which is what a
simulated program that reaches around its ports deserves. Ending a loop quietly is `teardown`'s job.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from contextlib import suppress
from contextvars import Context, ContextVar, copy_context
from heapq import heappop, heappush
from typing import Any, Final, TypeVar, TypeVarTuple, Unpack, cast

import msgspec

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

TASKS_LISTED_MAX: Final = 20


class SimDeadlock(Exception):
    """Nothing is ready, no timer is set, and the main coroutine is not done: it waits for what will never come."""


class SimLivelock(Exception):
    """The run has used up its callbacks: something goes round in circles."""


class Fenced(BaseException):
    """A port was used by code whose process is dead, or whose run is over. Not an Exception: nothing may handle it."""


class Owner:
    """Whom a callback belongs to. Once `alive` is False, none of its callbacks ever runs again."""

    __slots__ = ("alive", "stopped")

    def __init__(self) -> None:
        self.alive = True
        self.stopped: list[SimHandle] | None = None  # what it would have run, while it is stopped


OWNER: Final[ContextVar[Owner | None]] = ContextVar("bursar_sim_owner", default=None)


class SimTask(asyncio.Task[T]):
    """A task that knows its owner and hashes by its number in the run, so that sets of tasks iterate alike always."""

    __slots__ = ("_number", "owner")

    _number: int
    owner: Owner | None

    def __hash__(self) -> int:
        # asyncio hashes a task inside its constructor, before anything could be set on it: number it on first use.
        try:
            return self._number
        except AttributeError:
            self._number = cast(SimLoop, self.get_loop()).next_number()
            return self._number


class SimHandle(msgspec.Struct, eq=False):
    """A scheduled callback: an `asyncio.TimerHandle` by what it can do. A struct, since a seed makes thousands."""

    callback: Callable[..., object] | None  # None: cancelled
    args: tuple[Any, ...]
    context: Context
    due: float

    def cancel(self) -> None:
        """Never run it."""
        self.callback = None
        self.args = ()

    def cancelled(self) -> bool:
        """Whether it was cancelled."""
        return self.callback is None

    def when(self) -> float:
        """The virtual time at which it is due."""
        return self.due

    def __repr__(self) -> str:
        return f"<SimHandle {'cancelled' if self.callback is None else self.callback} at {self.due:.6f}>"


class SimLoop(asyncio.AbstractEventLoop):
    """Virtual time, seeded order, no outside world. Made, run and disposed of by `kernel.run`."""

    def __init__(self, rng: random.Random, *, shuffle: bool, max_callbacks: int) -> None:
        self.now = 0.0
        self.callbacks = 0
        self.errors: list[BaseException] = []  # raised by callbacks, or by futures that were not awaited
        self.tasks: list[SimTask[Any]] = []  # every task of the run: this reference is what keeps the dead ones
        self.dead_handles: list[SimHandle] = []
        self.closing = False
        self._random = rng.random
        self._shuffle = shuffle
        self._max_callbacks = max_callbacks
        self._ready: list[SimHandle] = []
        self._timers: list[tuple[float, int, SimHandle]] = []
        self._timer_number = 0
        self._task_number = 0
        self._running = False

    # --- scheduling

    def call_soon(
        self, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Make `callback` ready; chance decides which of the ready callbacks comes next."""
        handle = SimHandle(callback, args, copy_context() if context is None else context, self.now)
        if not self.closing:
            self._ready.append(handle)
        return handle  # type: ignore[return-value]  # it can do what a Handle can

    call_soon_threadsafe = call_soon

    def call_at(
        self, when: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Make `callback` ready at the virtual time `when`."""
        handle = SimHandle(callback, args, copy_context() if context is None else context, when)
        if not self.closing:
            self._timer_number = number = self._timer_number + 1
            heappush(self._timers, (when, number, handle))
        return handle  # type: ignore[return-value]  # it can do what a TimerHandle can

    def call_later(
        self, delay: float, callback: Callable[[Unpack[Ts]], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Make `callback` ready `delay` virtual seconds from now."""
        return self.call_at(self.now + delay, callback, *args, context=context)

    def time(self) -> float:
        """Virtual seconds since the run began."""
        return self.now

    # --- futures and tasks

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        """A task of its creator's owner, unless `context` carries another owner."""
        if self.closing:
            coro.close()
            raise Fenced
        owner = OWNER.get()
        if context is not None:
            if owner is not None and OWNER not in context:
                context.run(OWNER.set, owner)  # an empty context is no way out of a process
            owner = context.get(OWNER)
        # asyncio's default name counts over all runs of the interpreter, and names end up in traces.
        label = f"task-{len(self.tasks)}" if name is None else name
        task: SimTask[T] = SimTask(coro, loop=self, name=label, context=context)
        task.owner = owner
        self.tasks.append(task)
        return task

    def next_number(self) -> int:
        """The next task's number, which is also its hash."""
        self._task_number += 1
        return self._task_number

    def release_agen(self, agen: AsyncGenerator[Any, Any]) -> None:
        """Close an async generator that its program has dropped half-way: the hook asyncio's own loops install too."""
        if not self.closing:
            self.create_task(agen.aclose(), name="aclose")
            return
        with suppress(BaseException):  # Fenced, or whatever its finally blocks make of the end of the world
            agen.aclose().send(None)

    # --- running

    def run_until_complete(self, future: Generator[Any, None, T] | Awaitable[T]) -> T:
        """Run until `future`, a task or future of this loop, is done; deadlock and livelock are errors."""
        if self._running or self.closing:
            raise RuntimeError("a SimLoop runs once")
        main = cast(asyncio.Future[T], future)
        done, ready, chance, shuffle = main.done, self._ready, self._random, self._shuffle
        callbacks, callbacks_max = self.callbacks, self._max_callbacks
        owner_var, dead, errors = OWNER, self.dead_handles, self.errors
        self._running = True
        try:
            while not done():
                if not ready:
                    self._advance()
                count = len(ready)
                if not shuffle:
                    handle = ready.pop(0)
                elif count == 1:
                    handle = ready.pop()
                else:
                    # Swap with the last and pop: constant time, and the order of the rest carries no meaning.
                    index = int(chance() * count)
                    handle = ready[index]
                    ready[index] = ready[-1]
                    ready.pop()
                callback = handle.callback
                if callback is None:
                    continue  # cancelled
                context = handle.context
                owner = context.get(owner_var)
                if owner is not None:
                    if not owner.alive:
                        dead.append(handle)
                        continue
                    if owner.stopped is not None:
                        owner.stopped.append(handle)
                        continue
                callbacks += 1
                if callbacks > callbacks_max:
                    raise SimLivelock(f"over {callbacks_max} callbacks at {self.now:.6f} s\n{self._unfinished()}")
                try:
                    context.run(callback, *handle.args)
                except Exception as error:
                    errors.append(error)
        finally:
            self.callbacks = callbacks
            self._running = False
        return main.result()

    def suspend(self, owner: Owner) -> None:
        """Run nothing of an owner until it is continued, however much becomes due: what SIGSTOP does."""
        if owner.stopped is None:
            owner.stopped = []

    def resume(self, owner: Owner) -> None:
        """Go on with an owner: all that became due meanwhile is ready now. The dead stay where they are."""
        stopped, owner.stopped = owner.stopped, None
        self._ready += stopped or ()

    def _advance(self) -> None:
        """Jump to the next timer that still means anything, and make all that are due ready."""
        timers, ready = self._timers, self._ready
        while True:
            if not timers:
                raise SimDeadlock(f"nothing is ready and no timer is set at {self.now:.6f} s\n{self._unfinished()}")
            when, _, handle = heappop(timers)
            # A cancelled timer, or one of a dead process, must not move the clock.
            if handle.callback is not None:
                owner = handle.context.get(OWNER)
                if owner is None or owner.alive:
                    break
                self.dead_handles.append(handle)
        if when > self.now:
            self.now = when
        else:
            when = self.now
        ready.append(handle)
        while timers and timers[0][0] <= when:
            ready.append(heappop(timers)[2])

    def _unfinished(self) -> str:
        """Which living tasks wait, and where: what a reader needs to know of a run that is stuck."""
        waiting = [t for t in self.tasks if not t.done() and (t.owner is None or t.owner.alive)]
        lines = [f"  {t.get_name()} of {t.owner or 'the scenario'}: {_place(t)}" for t in waiting[:TASKS_LISTED_MAX]]
        return "\n".join([f"{len(waiting)} tasks are unfinished:", *lines])

    # --- errors and state

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What asyncio would log and forget is kept, and fails the run."""
        if not self.closing:
            self.errors.append(context.get("exception") or RuntimeError(context["message"]))

    def unretrieved(self) -> list[tuple[Owner | None, BaseException]]:
        """Exceptions that ended a task and were not retrieved, with the owner of the task."""
        # _log_traceback is asyncio's own mark for just that: set with the exception, cleared by the retrieval.
        failed = [t for t in self.tasks if t.done() and t._log_traceback]
        return [(t.owner, error) for t in failed if (error := t.exception()) is not None]

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return self.closing

    get_debug = bool  # False; asyncio asks whenever it makes a future, and a call into Python would cost as much again

    def close(self) -> None:
        """Schedule nothing more, and let go of what was scheduled. Call it once every coroutine is closed."""
        self.closing = True
        for pending in (self.tasks, self.dead_handles, self._ready, self._timers):
            pending.clear()


def _place(task: asyncio.Task[Any]) -> str:
    """The innermost line that a suspended task waits at."""
    awaited: Any = task.get_coro()
    name = getattr(awaited, "__qualname__", repr(awaited))
    frame = None
    while (inner := getattr(awaited, "cr_frame", None)) is not None:
        frame, awaited = inner, awaited.cr_await
    return name if frame is None else f"{name} at {frame.f_code.co_filename}:{frame.f_lineno} ({frame.f_code.co_name})"
