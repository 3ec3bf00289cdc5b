"""The sequence scenario: two processes on one disk run sequences of random steps; everything breaks that can.

The process `sequence` takes sequences from clients, as a program does, and drives them; `sequence-2` is a worker beside
it, which now and then comes up without one of the own steps. Clients ask again with the same key, and must get the
same answer. A refused compensation waits for operators: in most seeds one looks after the queue, and says retry, or two
say skip; in the others none ever comes. The oracle looks after every commit. After a while nothing breaks; then
every sequence must come to its end, or wait for a person, in bounded time, with each step's effect exactly once or
fully compensated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from bursar.engine import Worker
from bursar.flows.sequence import Own, OwnStep, SequenceRefused, Sequences
from bursar.flows.sequence.machine import COMPENSATION_FAILED
from bursar.ledger import Ledger
from bursar.model.errors import Conflict, IdempotencyKeyReused, Refusal
from bursar.sim.disk import SimDisk
from bursar.sim.engine import USERS, beginning
from bursar.sim.kernel import CrashAt, Kernel, Run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Violation
from bursar.sim.orders import CALL_TIMEOUT_S, RETRY
from bursar.sim.process import Process
from bursar.sim.sequence_model import ENDS, OWN, Depot, SequenceOracle, wishes
from bursar.sim.two_process import LEASE_S, PATH, SCAN_S, Client, TwoProcessRun, WatchedStore, play_out

PROCESSES: Final = ("sequence", "sequence-2")
CALLERS: Final = 4
SEQUENCES_EACH: Final = 3
MISSING_SHARE: Final = 0.25  # of the lives of the second process
NOBODY_COMES: Final = 4  # to one seed in so many
QUEUE_S: Final = 0.3
RESTING: Final = ", ".join(f"'{state}'" for state in ENDS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # transitions
    states: Counter[str]
    undone: int  # steps
    skipped: int
    refused: int  # starts
    calls: int  # of own steps
    checks: int


class Scenario(TwoProcessRun[Outcome]):
    """One run."""

    processes = PROCESSES

    def __init__(self, kernel: Kernel, disk: SimDisk, size: Size) -> None:
        super().__init__(kernel, disk, size)
        self.attended = kernel.seed % NOBODY_COMES != 0
        waits = "" if self.attended else f", '{COMPENSATION_FAILED}'"
        self.open = f"SELECT id, state, attempt, worker, error FROM records WHERE state NOT IN ({RESTING}{waits})"
        self.registries: list[tuple[dict[str, OwnStep], dict[str, Any]]] = []

    def make_rail(self) -> Depot:
        self.depot = Depot(self.kernel, random.Random(f"{self.kernel.seed} depot"))
        return self.depot

    def make_oracle(self) -> SequenceOracle:
        self.follower = SequenceOracle(self.disk.open(PATH), self.depot, beginning()[1])
        return self.follower

    def make_client(self, number: int, how_many: int) -> Client:
        wants: dict[str, Any] = {f"c{number}-{n}": wishes(self.rng, USERS) for n in range(how_many)}
        if number == 0:
            wants["bad"] = [*wishes(self.rng, USERS)[:3], Own("nobody knows")]
        return Client(f"user:{number % USERS}", wants)

    def heal(self) -> None:
        """From now on nothing breaks, and every process has all steps."""
        super().heal()
        for registry, steps in self.registries:
            registry.update(steps)

    async def serve(self, process: Process) -> None:
        """One life of a process."""
        store = WatchedStore(process.ports, PATH)
        store.watch = self.watch
        await store.open()
        own = self.depot.own(process)
        sequences = Sequences(
            Ledger(store), own=own, retry=RETRY, call_timeout_s=CALL_TIMEOUT_S, worker=process.name, lease_s=LEASE_S
        )
        self.registries.append((sequences.own, own))
        first = process.name == PROCESSES[0]
        if not first and self.kernel.armed and self.rng.random() < MISSING_SHARE:
            del sequences.own[self.rng.choice(OWN)]
        async with asyncio.TaskGroup() as group:
            group.create_task(Worker(sequences.engine, scan_s=SCAN_S, queue_max=8, concurrency=6).run(), name="worker")
            if first:
                for client in self.clients:
                    group.create_task(self.ask(client, sequences), name=client.user)
                if self.attended:
                    group.create_task(self.look_after(sequences, process), name="people")

    async def ask(self, client: Client, sequences: Sequences) -> None:
        """One sequence after the other; after a crash again, also what was answered, to get the same answer."""
        for key, steps in client.wants.items():
            if key in client.told and self.rng.random() < 0.7:
                continue
            told = await self.start(client, sequences, key, steps)
            if client.told.setdefault(key, told) != told:
                self.violations.append(Violation(f"{key} was answered {client.told[key]!r}, and now {told!r}"))
            if told and self.rng.random() < 0.3:
                await self.differ(client, sequences, key, steps)

    async def start(self, client: Client, sequences: Sequences, key: str, steps: list[Any]) -> str:
        wait_s = self.rng.choice((0, 1)) * self.rng.random()
        while True:
            try:
                return (await sequences.start(steps, key=key, owner=client.user, wait_s=wait_s)).id
            except SequenceRefused:
                return ""
            except Conflict:
                continue  # contention is not an answer: ask again, with the same key

    async def differ(self, client: Client, sequences: Sequences, key: str, steps: list[Any]) -> None:
        """The same key with other steps is refused, always."""
        with contextlib.suppress(IdempotencyKeyReused, Conflict):
            await sequences.start([*steps, Own(OWN[0])], key=key, owner=client.user, wait_s=0)
            self.violations.append(Violation(f"{key} was started with other steps"))

    async def look_after(self, sequences: Sequences, process: Process) -> None:
        """Ann and Ben take turns at the queue."""
        while True:
            await process.ports.sleep(QUEUE_S)
            for view in await sequences.queue():
                say = sequences.retry if self.rng.random() < 0.4 else sequences.skip
                with contextlib.suppress(Refusal, Conflict):  # it has moved meanwhile
                    await say(view.id, actor=self.rng.choice(("ann", "ben")), reason="my turn")

    def judge(self) -> Outcome:
        """Every answer is true, and nothing else happened."""
        oracle = self.follower
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        if differing := oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")
        states = dict(oracle.db.execute("SELECT id, state FROM records").fetchall())
        told = [id for client in self.clients for id in client.told.values() if id]
        if sorted(told) != sorted(states):
            raise Violation(f"sequences that no client knows, or that are not there: {set(told) ^ set(states)}")
        (commits,) = oracle.db.execute("SELECT count(*) FROM transitions").fetchone()
        courses = oracle.courses()
        return Outcome(
            commits=commits,
            states=Counter(states.values()),
            undone=sum(len(course.undone) for course in courses),
            skipped=sum(len(course.skipped) for course in courses),
            refused=sum(list(client.told.values()).count("") for client in self.clients),
            calls=self.rail.calls,
            checks=oracle.checks,
        )


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere."""
    wanted = size or Size(callers=CALLERS, entries_each=SEQUENCES_EACH)
    return play_out(Scenario, beginning()[0], wanted, seed, crashes, split=split, verbose=verbose)
