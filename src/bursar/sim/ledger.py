"""The ledger scenario: eight callers, some eighty entries, three crashes, one oracle.

A seed decides everything: whether the store commits by group or by saga, what each caller does, where the process
dies. Callers are people outside the process: they remember what they asked for and what they were told, and after a
crash they ask again with the same key. In the end everything they were told must be true, and nothing else.

The process is restarted after each crash, recovers, and goes on. In split mode recovery also runs now and then beside
living commits, with a clock that has jumped past their leases.
"""

from __future__ import annotations

import asyncio
import random
from contextvars import Context
from dataclasses import dataclass

from bursar.ledger import Ledger
from bursar.model.accounts import CappedOverdraft, ExternalAccount, SystemAccount, UncappedOverdraft
from bursar.model.entries import deposit
from bursar.model.envelope import Receipt
from bursar.model.errors import Conflict
from bursar.sim.callers import USERS, Client
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, Kernel, Run, run
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.process import Moment, Process
from bursar.store import connect

PATH = "funds.db"
URL = f"sqlite:///{PATH}"
CALLERS = 8
ENTRIES_EACH = 8
COMMITS_MIN = 60  # that callers are told of, per seed
CRASHES = 3
JUMP_US = 60_000_000
RESTART_S_MAX = 0.05
# Within how many port calls the crashes fall. A run that is over before its third crash dies once more at its end.
SPREAD = {True: 900, False: 105}
IN_FLIGHT = 16
FOLD_SHARE = 0.25  # of the seeds end with upkeep of one kind
REBUILD_SHARE = 0.2  # or the other
SPLIT_SHARE = 0.1  # of the seeds commit by saga; each of those has seven times the port calls of a seed by group


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    split: bool
    commits: int
    refusals: int
    checks: int


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much one seed does."""

    callers: int = CALLERS
    entries_each: int = ENTRIES_EACH


class Scenario:
    """One run."""

    def __init__(self, kernel: Kernel, disk: SimDisk, split: bool, size: Size, crashes: int) -> None:
        self.kernel = kernel
        self.crashes = crashes
        self.split = split
        self.rng = kernel.rng
        self.disk = disk
        self.oracle = Oracle(disk.open(PATH), beginning()[1])
        self.clients = [Client(number, self.oracle) for number in range(size.callers)]
        self.commits_min = min(COMMITS_MIN, size.callers * size.entries_each)
        self.finished = asyncio.Event()

    async def play(self) -> Outcome:
        """Start, crash, restart, until everybody has been answered; then judge."""
        self.kernel.on_crash = self.crashed
        self.boot()
        await self.finished.wait()
        self.judge()
        commits = sum(len(c.told) for c in self.clients)
        refusals = sum(len(c.refused) for c in self.clients)
        return Outcome(split=self.split, commits=commits, refusals=refusals, checks=self.oracle.checks)

    def boot(self) -> None:
        process = self.kernel.start("ledger", disk=self.disk)
        process.spawn(self.serve(process), name="serve")

    def crashed(self, _process: Process) -> None:
        if not self.split:
            self.oracle.everything()  # a power cut between two transactions: all must be true at once
        self.kernel.loop.call_later(self.rng.random() * RESTART_S_MAX, self.boot)

    async def serve(self, process: Process) -> None:
        """One life of the process: open, recover, serve the callers, tidy up."""
        store = connect(URL, process.ports, split=self.split)
        await store.open()
        ledger = Ledger(store)
        await ledger.known_assets("")  # once, instead of by each caller
        if self.split:
            process.clock_offset_us += JUMP_US  # the dead one's leases have run out by the time we are back
            found = await ledger.recover()
            if found["broken"]:
                raise Violation(f"recovery set something aside: {found}")
            self.oracle.everything()
        while self.missing() > 0 or any(client.busy for client in self.clients):
            async with asyncio.TaskGroup() as group:
                for client in self.clients:
                    group.create_task(self.call(client, ledger), name=f"c{client.number}")
                if self.split:
                    group.create_task(self.meddle(process, ledger), name="meddle")
        if len(self.kernel.crashes) < self.crashes:
            self.kernel.loop.call_soon(process.crash, context=Context())
            await asyncio.Event().wait()
        self.kernel.calm()
        await ledger.writer.close()
        if self.split:
            process.clock_offset_us += JUMP_US
            await ledger.recover()
            again = await ledger.recover()
            if any(again.values()):
                raise Violation(f"a second recovery found something to do: {again}")
        upkeep = self.rng.random()
        if upkeep < FOLD_SHARE:
            await ledger.writer.fold(above=1)
        if upkeep > 1 - REBUILD_SHARE:
            await ledger.rebuild()  # the last judgement compares every row of what it made
        self.finished.set()

    def missing(self) -> int:
        """How many commits the callers have yet to be told of, if nothing that they are doing is refused."""
        return self.commits_min - sum([len(client.told) + len(client.steps) - client.done for client in self.clients])

    async def call(self, client: Client, ledger: Ledger) -> None:
        """One errand after the other, until there are enough."""
        while client.busy or self.missing() > 0:
            if not client.busy:
                client.draw(self.rng)
            try:
                await client.steps[client.done](client, ledger)
            except Conflict:
                continue  # contention is not an answer: ask again, with the same key
            client.next()
            self.oracle.look()

    async def meddle(self, process: Process, ledger: Ledger) -> None:
        """Recovery beside living commits, on a clock that says their leases are long over."""
        for _ in range(2):
            await process.ports.sleep(0.002 + self.rng.random() * 0.05)
            process.clock_offset_us += JUMP_US
            await ledger.recover()

    def judge(self) -> None:
        """Everything that was told is true, and nothing else happened."""
        self.oracle.everything(every_column=True)
        committed = self.oracle.keys()
        told: dict[tuple[str, str], Receipt] = {}
        for client in self.clients:
            for key, receipt in client.told.items():
                if committed.get(key) != (receipt.envelope, receipt.id):
                    raise Violation(f"{key} was acknowledged as {receipt.envelope} but is {committed.get(key)}")
                told[key] = receipt
            for key in client.refused:
                if key in committed:
                    raise Violation(f"{key} was refused, and is there")
        unasked = [
            key for key in committed if key not in told and key[0] != "compact" and not key[1].startswith("seed")
        ]
        if unasked:
            raise Violation(f"nobody was told of {unasked}")
        if differing := self.oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")


# --- the beginning of every seed -----------------------------------------------------------------------------------


_beginning: list[tuple[bytes, Oracle]] = []


def template() -> bytes:
    """A database with assets, accounts and some money."""
    return beginning()[0]


def beginning() -> tuple[bytes, Oracle]:
    """The template and what the oracle has to say about it, made once."""
    if not _beginning:
        disk = SimDisk()

        async def prepare(kernel: Kernel) -> None:
            store = connect(URL, kernel.start("prepare", disk=disk).ports)
            await store.open()
            await furnish(Ledger(store))

        run(prepare, 0)
        oracle = Oracle(disk.open(PATH))
        oracle.everything()
        _beginning.append((disk.image(PATH), oracle))
    return _beginning[0]


async def furnish(ledger: Ledger) -> None:
    """Assets, accounts, and money to begin with."""
    for code in ("USD", "EUR"):
        await ledger.create_asset(code, precision=2)
    await ledger.create_account("external:bank", policy=ExternalAccount())
    await ledger.create_account("fees", policy=SystemAccount())
    await ledger.create_account("credit", policy=CappedOverdraft("-60.00", "USD"))
    await ledger.create_account("line", policy=UncappedOverdraft())
    for n in range(CALLERS):
        await ledger.create_account(f"frost:{n}")
    for n in range(USERS):
        await ledger.create_account(f"user:{n}")
        for code in ("USD", "EUR"):
            await ledger.commit(deposit("external:bank", f"user:{n}", code, "500.00", key=f"seed-{n}-{code}"))


def crash_points(dice: random.Random, split: bool) -> list[CrashAt]:
    """Three port calls, far enough apart that each crash has happened before the next call is even asked for."""
    span = SPREAD[split] // CRASHES
    calls = [1 + n * span + dice.randrange(span - IN_FLIGHT) for n in range(CRASHES)]
    return [CrashAt("ledger", call, dice.choice((Moment.BEFORE, Moment.AFTER))) for call in calls]


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, the seed decides where the three of them fall."""
    disk = SimDisk()
    disk.install(PATH, template())
    dice = random.Random(f"{seed} shape")
    mode = dice.random() < SPLIT_SHARE
    mode = mode if split is None else split

    async def main(kernel: Kernel) -> Outcome:
        return await Scenario(kernel, disk, mode, size or Size(), CRASHES if crashes is None else 0).play()

    try:
        return run(main, seed, crashes=crash_points(dice, mode) if crashes is None else crashes, verbose=verbose)
    finally:
        disk.close()
