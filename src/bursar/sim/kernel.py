"""The kernel of the simulator: one seed, one loop, some processes, and the places where they crash.

`run` is the way in: it makes a `Kernel`, runs the scenario's main coroutine on it, and disposes of what is left. The
scenario starts processes (`Kernel.start`), and restarts them from `Kernel.on_crash`. Where they crash is a plan:
"the worker, at its 17th port call, after the effect" when every place is tried in turn, or a chance per call when
swarms of seeds look for what is not enumerated.

Chance comes in separate streams, all from the seed: the order of events, the values that programs see, the faults,
and the scenario's own. So the run up to a planned crash is the run without it, and a scenario that draws one number
more does not reshuffle everything else.

Not here: what a run is for. Workloads, faults beyond crashes and oracles belong to scenarios.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
import traceback
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from bursar.sim.disk import SimDisk
from bursar.sim.loop import Fenced, SimLoop
from bursar.sim.process import TICK_S, Moment, Process
from bursar.sim.teardown import close_all
from bursar.sim.trace import Trace

T = TypeVar("T")

CALLBACKS_MAX: Final = 1_000_000
LATENCY_TICKS_MAX: Final = 8
LINES_NOTED_MAX: Final = 50


class SimFailure(ExceptionGroup[Exception]):
    """Unhandled errors of a run: of tasks that were not awaited, and of callbacks."""


@dataclass(frozen=True, slots=True)
class CrashAt:
    """Crash a process at its n-th port call, counted from 1 over all incarnations of that name."""

    process: str
    call: int
    moment: Moment


@dataclass(frozen=True, slots=True, kw_only=True)
class CrashSwarm:
    """Crash at each port call with a probability, at most `budget` times in a run."""

    probability: float
    budget: int
    processes: frozenset[str] | None = None  # None: any


@dataclass(frozen=True, slots=True)
class Crash:
    """A crash that happened. A sleep has no effect to die after: a plan that says so fires before it."""

    process: str
    incarnation: int
    call: int  # the last one begun, if killed by the scenario
    where: str
    moment: Moment | None  # None: killed by the scenario
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Generic[T]):
    """What a run that did not fail has to say."""

    value: T
    trace_hash: str
    lines: list[str]  # empty unless verbose
    callbacks: int
    port_calls: int
    port_calls_by: dict[str, int]
    crashable_by: dict[str, int]  # those of them that were made before the time to heal, after which nothing crashes
    crashes: list[Crash]
    virtual_s: float
    # Errors of tasks that ended before their process crashed, and were not retrieved by then. Not a failure,
    # since a task may have been about to; a scenario that knows better can make it one.
    lost_errors: list[BaseException]


class Kernel:
    """One run of one seed. Everything a scenario needs is here; it is the argument of its main coroutine."""

    def __init__(
        self,
        seed: int,
        *,
        crashes: Iterable[CrashAt],
        swarm: CrashSwarm | None,
        on_crash: Callable[[Process], object] | None,
        shuffle: bool,
        max_callbacks: int,
        verbose: bool,
    ) -> None:
        self.seed = seed
        order = random.Random(seed)
        self.values = random.Random(f"{seed} values")
        self.faults = random.Random(f"{seed} faults")
        self.rng = random.Random(f"{seed} scenario")
        loop: SimLoop = SimLoop(  # type: ignore[abstract]  # what it leaves out is what a simulation must not touch
            order, shuffle=shuffle, max_callbacks=max_callbacks
        )
        self.loop = loop
        self.trace = Trace(loop, verbose=verbose)
        self.on_crash = on_crash
        self.latency_ticks_max = LATENCY_TICKS_MAX  # a scenario may change it, also half-way
        self.port_calls = 0
        self.crashes: list[Crash] = []
        self.processes: dict[str, Process] = {}  # the last incarnation of each name
        self._order = order.random
        self._plan = {(crash.process, crash.call): crash.moment for crash in crashes}
        self._swarm = swarm
        self._budget = 0 if swarm is None else swarm.budget
        self.armed = bool(self._plan) or self._budget > 0
        self._crashable: dict[str, int] | None = None  # port calls made before `calm`

    def start(self, name: str, *, disk: SimDisk | None = None) -> Process:
        """The next incarnation of `name`. A restart finds the disk of its predecessor unless it is given another."""
        if self.loop.closing:
            raise Fenced
        predecessor = self.processes.get(name)
        if predecessor is not None and predecessor.alive:
            raise RuntimeError(f"{predecessor.who} is still alive")
        if disk is None:
            disk = SimDisk() if predecessor is None else predecessor.disk
        process = self.processes[name] = Process(self, name, disk.drive(name), predecessor)
        self.trace.event(process.who, "", "", "start")
        return process

    def latency(self) -> float:
        """How long the next piece of work takes, in virtual seconds."""
        return (int(self._order() * self.latency_ticks_max) + 1) * TICK_S

    def fate(self, process: Process, call: int, *, only_before: bool = False) -> Moment | None:
        """Whether, and when, this port call is the one at which its process dies. Asked once per call, if `armed`."""
        planned = self._plan.get((process.name, call))
        if planned is not None:
            return Moment.BEFORE if only_before else planned
        swarm = self._swarm
        if swarm is None or self._budget == 0:
            return None
        if swarm.processes is not None and process.name not in swarm.processes:
            return None
        if self.faults.random() >= swarm.probability:
            return None
        self._budget -= 1
        return Moment.BEFORE if only_before or self.faults.random() < 0.5 else Moment.AFTER

    def pause(self, process: Process, seconds: float) -> None:
        """Let nothing of a process happen for some virtual time: its leases run out, and it does not notice."""
        if process.alive and process.stopped is None:
            self.trace.event(process.who, "", "", "pause")
            self.loop.suspend(process)
            # In a context of its own: the process that asked may be dead by then.
            self.loop.call_later(seconds, self._resume, process, context=Context())

    def _resume(self, process: Process) -> None:
        self.trace.event(process.who, "", "", "resume")
        self.loop.resume(process)

    def calm(self) -> None:
        """No more crashes, from the plan or by chance: the time to heal."""
        self._plan.clear()
        self._budget = 0
        self.armed = False
        if self._crashable is None:
            self._crashable = self._calls()

    def _calls(self) -> dict[str, int]:
        return {name: process.port_calls for name, process in self.processes.items()}

    def kill(self, process: Process, call: int, where: str, moment: Moment | None) -> None:
        """The crash itself: dead, disk rolled back, on record, and the scenario called."""
        if not process.alive:
            return  # two of its sleeps were to be its last
        process.alive = False
        process.disk.power_cut()
        self.crashes.append(Crash(process.name, process.incarnation, call, where, moment, self.loop.now))
        self.trace.event(process.who, where, "crash", "" if moment is None else moment.value)
        if self.on_crash is not None:
            # In a context of its own: what the scenario starts from here must not belong to the dead.
            Context().run(self.on_crash, process)

    def errors(self) -> tuple[list[BaseException], list[BaseException]]:
        """What is unhandled, and what can't be handled any more because the process has crashed since."""
        unhandled = list(self.loop.errors)
        lost: list[BaseException] = []
        for owner, error in self.loop.unretrieved():
            (unhandled if owner is None or owner.alive else lost).append(error)
        return unhandled, lost

    def report(self, value: T) -> Run[T]:
        """What the run has to say, or SimFailure."""
        errors, lost = self.errors()
        if errors:
            raise SimFailure(f"{len(errors)} unhandled errors", [_ordinary(error) for error in errors])
        return Run(
            value=value,
            trace_hash=self.trace.digest(),
            lines=self.trace.lines(),
            callbacks=self.loop.callbacks,
            port_calls=self.port_calls,
            port_calls_by=self._calls(),
            crashable_by=self._calls() if self._crashable is None else self._crashable,
            crashes=self.crashes,
            virtual_s=self.loop.now,
            lost_errors=lost,
        )

    def dispose(self) -> list[str]:
        """Fence every port, close every coroutine. Returns the names of tasks that would not end."""
        self.trace.seal()
        self.on_crash = None
        for process in self.processes.values():
            process.alive = False
        return close_all(self.loop)


def run(
    main: Callable[[Kernel], Coroutine[Any, Any, T]],
    seed: int,
    *,
    crashes: Iterable[CrashAt] = (),
    swarm: CrashSwarm | None = None,
    on_crash: Callable[[Process], object] | None = None,
    shuffle: bool = True,
    max_callbacks: int = CALLBACKS_MAX,
    verbose: bool = False,
) -> Run[T]:
    """Run `main(kernel)` to its end on a virtual clock, then dispose of everything else that still ran.

    Raises what `main` raises, SimDeadlock, SimLivelock, or SimFailure for unhandled errors; each carries
    the seed, the trace's hash and, if verbose, its last lines as notes. What processes still do when `main` returns is
    left undone, as if the power were cut. Databases stay readable until their disk is closed.
    """
    kernel = Kernel(
        seed,
        crashes=crashes,
        swarm=swarm,
        on_crash=on_crash,
        shuffle=shuffle,
        max_callbacks=max_callbacks,
        verbose=verbose,
    )
    loop = kernel.loop
    with _installed(loop):
        try:
            try:
                report = kernel.report(_value(kernel, main))
            finally:
                stubborn = kernel.dispose()
            if stubborn:
                why = [RuntimeError("swallows GeneratorExit, so it would swallow being cancelled too")]
                raise SimFailure(f"tasks that would not end: {', '.join(stubborn)}", why)
        except Exception as error:
            error.add_note(f"seed {seed}, trace {kernel.trace.digest()}, at {loop.now:.6f} virtual seconds")
            for line in kernel.trace.lines()[-LINES_NOTED_MAX:]:
                error.add_note(line)
            raise
    return report


@contextmanager
def _installed(loop: SimLoop) -> Iterator[None]:
    """Make `loop` the interpreter's, and keep from it what the interpreter remembers of earlier runs."""
    if asyncio._get_running_loop() is not None:
        raise RuntimeError("a simulation cannot run inside another event loop")
    # asyncio's register of all tasks is one set for ever, and the order of a set depends on all it ever held.
    internals = vars(asyncio.tasks)
    register: Any = internals["_scheduled_tasks"] if "_scheduled_tasks" in internals else internals["_all_tasks"]
    entries, register.data = register.data, set()
    hooks = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(firstiter=None, finalizer=loop.release_agen)
    # The collector comes when it pleases, and would call finalizers in the middle of a run. What a seed leaves in
    # cycles is collected between seeds.
    collecting = gc.isenabled()
    gc.disable()
    asyncio._set_running_loop(loop)
    try:
        yield
    finally:
        asyncio._set_running_loop(None)
        if collecting:
            gc.enable()
        sys.set_asyncgen_hooks(*hooks)
        register.data = entries


def _value(kernel: Kernel, main: Callable[[Kernel], Coroutine[Any, Any, T]]) -> T:
    """Run `main`. If it fails, say with it what else did: a task that died alone is often why the rest is stuck."""
    try:
        return kernel.loop.run_until_complete(kernel.loop.create_task(main(kernel), name="main"))
    except Exception as error:
        for other in kernel.errors()[0]:
            error.add_note("and unhandled: " + "".join(traceback.format_exception(other)))
        raise


def _ordinary(error: BaseException) -> Exception:
    """An exception group of Exceptions cannot hold Fenced or GeneratorExit: say which it was."""
    if isinstance(error, Exception):
        return error
    wrapped = RuntimeError(f"{type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
