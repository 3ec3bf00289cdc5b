"""A run in which payouts leave: two servers on one disk, a signer on another, and a chain with its nodes.

What the scenarios share that pay out: how everything starts, dies and comes back, a backup of the database that is put
back, healing, and the wait until all has ended. What is asked for, and what must be true, is each scenario's own.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, TypeVar

from bursar.ledger import Ledger
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, CrashSwarm, Kernel, Run, run
from bursar.sim.ledger import Size
from bursar.sim.net import SimHost
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_faults import Plan
from bursar.sim.payout_town import Town
from bursar.sim.process import Process
from bursar.sim.two_process import PATH, TwoProcessRun, quiet
from bursar.store import connect

CHAOS_S: Final = 25.0
HEALED_S: Final = 2_000.0  # within which everything must have ended: back-off is up to a quarter of an hour
REST_S: Final = 6.0  # until what took effect last is final, and booked
# What people have decided, or a chain has taken back, and its nodes were not asked about since. Of a payment that moved
# something else they never say which it was.
OPEN_QUESTIONS: Final = """
    SELECT record, state, said FROM forced_calls f WHERE due IS NOT NULL AND said NOT LIKE '%Mismatch%' AND EXISTS (
        SELECT 1 FROM transitions t WHERE t.record = f.record AND t.version > f.version AND t.source <> t.target)"""
UNNOTICED: Final = """SELECT 'chain', 'unnoticed', '' WHERE NOT EXISTS (
    SELECT 1 FROM alerts WHERE reason LIKE 'final block of % reorganised' AND severity = 'critical')"""

T = TypeVar("T")


class PayoutRun(TwoProcessRun[T]):
    """One run."""

    plan: Plan
    trouble = 0.12  # of the requests to nodes
    cuts = 0.01  # of what is sent to the signer
    chaos_s: float = CHAOS_S  # while it breaks
    healed_s: float = HEALED_S

    def __init__(self, kernel: Kernel, town: Town, image: bytes, size: Size) -> None:
        self.town = town
        self.plan = town.plan
        host = SimHost(self.town.net, f"{kernel.seed} servers")
        host.install(PATH, image)
        self.host = host
        self.restored = 0
        self.lied_by_then = 0  # when the last payout had ended
        self.backup: bytes = b""
        super().__init__(kernel, host, size)
        if self.plan.watched:
            self.open = f"{self.open} UNION ALL {OPEN_QUESTIONS}"
        self.town.depths.read_up_to = self.read_up_to
        if not self.plan.small:
            self.town.nodes.trouble = self.trouble
            self.town.net.cut_probability = self.cuts

    @abstractmethod
    def forget(self) -> None:
        """The database was put back: what was answered since the backup is no promise."""

    def remember(self) -> None:
        """It is about to be put back: what is in it now is seen for the last time."""

    def make_rail(self) -> Any:
        return self.town.nodes

    # --- life --------------------------------------------------------------------------------------------------------

    async def play(self) -> T:
        """Chaos, healing, judgement."""
        self.kernel.on_crash = self.crashed
        self.town.start_signer()
        self.town.tick()
        for name in self.processes:
            self.boot(name)
        loop = self.kernel.loop
        if self.plan.behind:
            self.town.old_disk.begin()
        if self.plan.restored:
            loop.call_later(0.2 + self.rng.random() * 5, self.back_up, context=Context())
        if not await self.over_by(self.chaos_s):
            self.heal()
            if not await self.over_by(self.chaos_s + self.healed_s):
                raise Violation(f"not ended in time: {self.oracle.db.execute(self.open).fetchall()}")
        self.heal()
        while self.plan.deep and not self.town.depths.happened:  # the worst of times: when all of them have ended
            await self.rest()
            self.town.depths.turn()
        if self.town.depths.happened:
            await self.noticed()
        self.lied_by_then = self.town.liar.shortened
        await self.rest()
        while (
            not self.can_look() or self.oracle.db.execute(self.open).fetchall()
        ):  # put back from the signer's log, after a restore
            if not await self.over_by(self.kernel.loop.now + self.healed_s):
                raise Violation(f"not ended in time: {self.oracle.db.execute(self.open).fetchall()}")
            await self.rest()
        await self.last_look()
        return self.judge()

    async def last_look(self) -> None:
        """What is looked at before it is judged, and takes time."""

    def read_up_to(self) -> int:
        """How far the watcher of the chain has come, by what it has written down."""
        if not self.can_look():
            return -1
        read = "SELECT coalesce(max(body ->> '$.block'), -1) FROM records WHERE flow = 'chains'"
        return int(self.oracle.db.execute(read).fetchone()[0])

    async def noticed(self) -> None:
        """A reorganisation of what was final opens an incident (W19); then all questions about it are answered."""
        self.open = f"{self.open} UNION ALL {UNNOTICED}"
        if not await self.over_by(self.chaos_s + self.healed_s):
            raise Violation(f"W19: not noticed, or open: {self.oracle.db.execute(self.open).fetchall()}")

    async def rest(self, seconds: float = REST_S) -> None:
        """Let time pass."""
        later: asyncio.Future[None] = self.kernel.loop.create_future()
        self.kernel.loop.call_later(seconds, later.set_result, None)
        await later

    def heal(self) -> None:
        """From now on nothing breaks."""
        self.kernel.calm()
        self.town.heal()

    def crashed(self, process: Process) -> None:
        """The signer comes back as the others do."""
        if process.name == "signer":
            delay = 0.05 + self.rng.random()
            self.kernel.loop.call_later(delay, self.town.start_signer, context=Context())
            return
        super().crashed(process)

    def back_up(self) -> None:
        """A copy of the database between two transactions; it is put back later."""
        if self.town.calm:
            return
        db, loop = self.host.open(PATH), self.kernel.loop
        if self.host.held() or db.in_transaction:
            loop.call_later(0.003, self.back_up, context=Context())
            return
        self.backup = self.host.image(PATH)
        loop.call_later(1 + self.rng.random() * 8, self.restore, context=Context())

    def restore(self) -> None:
        """All servers stop, and an older database is put back."""
        if self.town.calm or self.town.old_disk.forked:
            return
        if self.town.old_disk.newest:  # the signer forgets as well: not before that was noticed, or nothing would know
            self.kernel.loop.call_later(1.0, self.restore, context=Context())
            return
        self.restored += 1
        self.town.forgetful = True
        for name in self.processes:
            process = self.kernel.processes[name]
            if process.alive:
                process.crash()
        self.remember()
        self.host.restore(PATH, self.backup)
        self.forget()

    def restart(self) -> None:
        """Every server ends, and comes back."""
        for name in self.processes:
            self.kernel.loop.call_soon(self.kernel.processes[name].crash, context=Context())


Beginning = tuple[bytes, Oracle]


def prepared(furnish: Callable[[Ledger], Coroutine[Any, Any, None]]) -> Beginning:
    """A database that is furnished, and what the oracle has to say about it."""
    disk = SimDisk()

    async def prepare(kernel: Kernel) -> None:
        store = connect(f"sqlite:///{PATH}", kernel.start("prepare", disk=disk).ports)
        await store.open()
        await furnish(Ledger(store))

    run(prepare, 0)
    oracle = Oracle(disk.open(PATH))
    oracle.everything()
    return disk.image(PATH), oracle


def play_out(
    scenario: Callable[[Kernel], PayoutRun[T]],
    seed: int,
    crashes: list[CrashAt] | None,
    swarm: CrashSwarm,
    *,
    split: bool | None,
    verbose: bool,
) -> Run[T]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere."""
    if split:
        raise ValueError("records need a store with real transactions: there is no split mode here")
    scenes: list[PayoutRun[T]] = []

    async def main(kernel: Kernel) -> T:
        scenes.append(scenario(kernel))
        return await scenes[0].play()

    try:
        with quiet():
            return run(main, seed, crashes=crashes or (), swarm=swarm if crashes is None else None, verbose=verbose)
    finally:
        for scene in scenes:
            scene.host.close()
