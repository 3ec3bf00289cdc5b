"""Two processes on one disk: what the scenarios of the engine and of its flows share.

The first process takes what clients ask for, as an API does, and drives it; the second is a worker beside it. Both die
anywhere and come back; now and then the clock has jumped meanwhile. The oracle looks after every commit. After a while
nothing breaks any more; then everything must come to rest in bounded time, and is judged.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeVar

from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, CrashSwarm, Kernel, Run, run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Violation
from bursar.sim.orders import Rail
from bursar.sim.process import EPOCH_US, Process
from bursar.sim.records import RecordOracle
from bursar.store.batch import Lane
from bursar.store.protocol import Work
from bursar.store.sqlite.store import SqliteStore

PATH: Final = "funds.db"
LEASE_S: Final = 2.0
SCAN_S: Final = 0.25
LOOK_S: Final = 0.1
CHAOS_S: Final = 6.0
HEALED_S: Final = 60.0  # within which everything must have ended
RESTART_S_MAX: Final = 0.5
JUMP_SHARE: Final = 0.1  # of the restarts find another time
JUMPS_S: Final = (-36_000, -3_600, -5, 5, 3_600, 36_000)  # far enough to count as a jump, or too near to matter
SET_BACK_S: Final = 300.0  # further than nothing, and not so far that it counts as a jump by itself
SET_BACK_EVERY: Final = 7  # to one seed in so many that happens while processes run
SWARM: Final = CrashSwarm(probability=0.012, budget=6)

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class Client:
    """One who orders. Outlives every process."""

    user: str
    wants: dict[str, Any]  # key → amount, or whatever is wanted
    told: dict[str, str] = field(default_factory=dict)  # key → the order's id, or "" if it was refused


class WatchedStore(SqliteStore):
    """A store whose every commit is looked at."""

    watch: Callable[[], None]

    async def run_batch(self, work: Work[R], lane: Lane = Lane.WRITE) -> R:
        """Write a batch, then judge."""
        result = await super().run_batch(work, lane)
        self.watch()
        return result


class TwoProcessRun(ABC, Generic[T]):
    """One run."""

    processes: tuple[str, ...]
    open: str  # a query: what has not come to rest
    look_s: ClassVar[float] = LOOK_S  # between two looks whether everything has

    def __init__(self, kernel: Kernel, disk: SimDisk, size: Size) -> None:
        self.kernel = kernel
        self.disk = disk
        self.rng = kernel.rng
        self.ahead_us = 0
        self.violations: list[Violation] = []
        self.rail = self.make_rail()
        self.oracle = self.make_oracle()
        self.clients = [self.make_client(n, size.entries_each) for n in range(size.callers)]

    @abstractmethod
    def make_rail(self) -> Rail:
        """The other side."""

    @abstractmethod
    def make_oracle(self) -> RecordOracle:
        """What must be true."""

    @abstractmethod
    def make_client(self, number: int, how_many: int) -> Client:
        """A client with a list of requests."""

    @abstractmethod
    async def serve(self, process: Process) -> None:
        """One life of a process."""

    @abstractmethod
    def judge(self) -> T:
        """Every answer is true, and nothing else happened."""

    async def play(self) -> T:
        """Chaos, healing, judgement."""
        self.kernel.on_crash = self.crashed
        for name in self.processes:
            self.boot(name)
        if self.kernel.seed % SET_BACK_EVERY == SET_BACK_EVERY - 1:
            at_s = CHAOS_S * random.Random(f"{self.kernel.seed} clock").random()
            self.kernel.loop.call_later(at_s, self.set_back)
        if not await self.over_by(CHAOS_S):
            self.heal()
            if not await self.over_by(CHAOS_S + HEALED_S):
                raise Violation(f"not ended in time: {self.oracle.db.execute(self.open).fetchall()}")
        return self.judge()

    def heal(self) -> None:
        """From now on nothing breaks."""
        self.kernel.calm()
        self.rail.trouble = 0.0

    def set_back(self) -> None:
        """The clock goes back under running processes, by more than everything has to come to its end in (L24)."""
        self.read_clock()
        self.ahead_us -= int(SET_BACK_S * 1e6)
        for each in self.kernel.processes.values():
            each.clock_offset_us = self.ahead_us

    def read_clock(self) -> None:
        """Remember how far the clock has come, before it is set back."""
        now_us = EPOCH_US + int(self.kernel.loop.now * 1e6) + self.ahead_us
        self.oracle.latest_us = max(self.oracle.latest_us, now_us)

    def watch(self) -> None:
        """Look, and keep what is wrong: raised here, it would be one more error that an engine survives."""
        self.read_clock()
        if not self.can_look():
            return
        try:
            self.oracle.look()
        except Violation as violation:
            self.violations.append(violation)

    async def over_by(self, deadline_s: float) -> bool:
        """Whether, by then, every client was answered and every order has ended."""
        db, loop = self.oracle.db, self.kernel.loop
        while loop.now < deadline_s:
            later: asyncio.Future[None] = loop.create_future()
            loop.call_later(self.look_s, later.set_result, None)  # we are no process, and have no ports
            await later
            if self.violations:
                raise self.violations[0]
            told = all(client.told.keys() == client.wants.keys() for client in self.clients)
            if told and self.can_look() and not db.execute(self.open).fetchall():
                return True
        return False

    def can_look(self) -> bool:
        """Whether no process is in the middle of a transaction."""
        return not self.oracle.db.in_transaction and not self.disk.held()

    def boot(self, name: str) -> None:
        process = self.kernel.start(name, disk=self.disk)
        self.read_clock()
        if self.rng.random() < JUMP_SHARE:
            self.ahead_us += self.rng.choice(JUMPS_S) * 1_000_000
        for each in self.kernel.processes.values():
            each.clock_offset_us = self.ahead_us  # one machine, one clock
        process.spawn(self.serve(process), name="serve")

    def crashed(self, process: Process) -> None:
        self.read_clock()  # what it has just written may rest on the clock of this moment
        if self.can_look():
            self.oracle.everything()
            self.oracle.records()
        self.kernel.loop.call_later(self.rng.random() * RESTART_S_MAX, self.boot, process.name)


def play_out(
    scenario: Callable[[Kernel, SimDisk, Size], TwoProcessRun[T]],
    image: bytes,
    size: Size,
    seed: int,
    crashes: list[CrashAt] | None,
    *,
    split: bool | None,
    verbose: bool,
) -> Run[T]:
    """Run one seed on a copy of a database. Without `crashes`, a swarm of them falls anywhere."""
    if split:
        raise ValueError("records need a store with real units: there is no split mode here")
    disk = SimDisk()
    disk.install(PATH, image)

    async def main(kernel: Kernel) -> T:
        return await scenario(kernel, disk, size).play()

    try:
        with quiet():
            swarm = SWARM if crashes is None else None
            return run(main, seed, crashes=crashes or (), swarm=swarm, verbose=verbose)
    finally:
        disk.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """The engine and its flows say a lot about calls without an answer, and here they are the point."""
    log = logging.getLogger("bursar")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)
