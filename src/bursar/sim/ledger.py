"""The ledger scenario: eight callers, some sixty entries, three crashes, one oracle.

A seed decides everything: whether the store commits by group or by saga, what each caller does, where the process
dies. Callers are outside the process: they remember what they asked for and what was answered, and after a
crash they ask again with the same key. In the end every answer must be true, and nothing else.

The process is restarted after each crash, recovers, and goes on. In split mode there is a second one on the same disk,
which has callers of its own. Each of the two now and then recovers beside living commits, on a clock that has jumped
past their leases, while the other may be stopped: it wakes up to find its commits finished, and others built on them.
A crash of one may be a power cut for both.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from contextvars import Context
from dataclasses import dataclass

from bursar.ledger import Ledger
from bursar.model.accounts import CappedOverdraft, ExternalAccount, SystemAccount, UncappedOverdraft
from bursar.model.entries import deposit
from bursar.model.envelope import Receipt
from bursar.model.errors import Conflict
from bursar.sim.callers import UNTOLD, USERS, Client
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, Kernel, Run, run
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.process import TICK_S, Moment, Process
from bursar.sim.sharing import SharedPorts
from bursar.sim.split import SplitLedger
from bursar.store import connect

PATH = "funds.db"
URL = f"sqlite:///{PATH}"
CALLERS = 8
ENTRIES_EACH = 8
COMMITS_MIN = 60  # that callers get answers to, per seed
CRASHES = 3
JUMP_US = 60_000_000
RESTART_S_MAX = 0.05
# Within how many port calls the crashes fall. A run that is over before its third crash dies once more at its end.
SPREAD = {True: 900, False: 84}
IN_FLIGHT = 16
LEDGER, RIVAL = "ledger", "rival"  # in split mode there are two processes on one disk
SHARING = 4  # every so manieth caller is the rival's
PROWLS = 8  # recoveries beside living commits, per seed
PROWL_S = 0.12
PAUSE_SHARE = 0.4  # of them stop the other process
PAUSE_S = 0.08
WORST_MOMENT_SHARE = 0.45  # of them wait for the worst moment
TAKE_S = 0.003
BRINK_TRIES = 30
BRINK = (
    "SELECT 1 FROM sagas s JOIN live_postings l ON l.reservation = s.id "
    "WHERE s.phase = 'finalizing' AND NOT EXISTS (SELECT 1 FROM spends WHERE posting = l.posting)"
)
POWER_CUT_SHARE = 0.5  # of crashes take the rival along
TURN_S = 0.002
CALLBACKS_MAX = 200_000  # thirty times what a run takes: it goes round in circles
FOLD_SHARE = 0.25  # of the seeds end with upkeep of one kind
REBUILD_SHARE = 0.2  # or the other
SPLIT_SHARE = 0.03  # of the seeds commit by saga: each has twenty times the port calls of one by group


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
        self.clients = [Client(number) for number in range(size.callers)]
        self.commits_min = min(COMMITS_MIN, size.callers * size.entries_each)
        self.clock_us = 0  # how far the machine's clock has jumped
        self.prowls = PROWLS if split else 0  # yet to come
        self.closing = False
        self.retired: Process | None = None  # the rival, once it has nothing more to do
        self.finished = asyncio.Event()

    async def play(self) -> Outcome:
        """Start, crash, restart, until every caller has been answered; then judge."""
        self.kernel.on_crash = self.crashed
        self.boot(LEDGER)
        await self.finished.wait()
        self.judge()
        commits = sum(len(c.told) for c in self.clients)
        refusals = sum(len(c.refused) for c in self.clients)
        return Outcome(split=self.split, commits=commits, refusals=refusals, checks=self.oracle.checks)

    def boot(self, name: str) -> None:
        """Start a process, unless it is there already. The rival waits until the ledger has recovered."""
        living = self.living()
        if name in living or (name == RIVAL and (self.closing or LEDGER not in living)):
            return
        process = self.kernel.start(name, disk=self.disk)
        process.clock_offset_us = self.clock_us
        process.spawn(self.serve(process) if name == LEDGER else self.compete(process), name=name)

    def living(self) -> dict[str, Process]:
        """The processes that run."""
        return {name: process for name, process in self.kernel.processes.items() if process.alive}

    def crashed(self, process: Process) -> None:
        if not self.split:
            self.oracle.everything()  # a power cut between two transactions: all must be true at once
        rival = self.living().get(RIVAL)
        if rival is not None and self.rng.random() < POWER_CUT_SHARE:
            rival.crash()  # the whole machine
        self.kernel.loop.call_later(self.rng.random() * RESTART_S_MAX, self.boot, process.name)

    def jump(self) -> None:
        """The machine's clock jumps past every lease."""
        self.clock_us += JUMP_US
        for process in self.kernel.processes.values():
            process.clock_offset_us = self.clock_us

    async def open(self, process: Process) -> Ledger:
        """A ledger on the disk that all processes share."""
        store = connect(URL, SharedPorts(process) if self.split else process.ports)
        await store.open()
        ledger = SplitLedger(store) if self.split else Ledger(store)
        await ledger.known_assets("")  # once, instead of by each caller
        return ledger

    async def serve(self, process: Process) -> None:
        """One life of the ledger: open, recover, serve the callers, tidy up."""
        ledger = await self.open(process)
        if isinstance(ledger, SplitLedger):
            self.jump()  # the dead one's leases have run out by the time we are back
            await self.recover(ledger)
            self.boot(RIVAL)
        mine = [client for client in self.clients if not self.split or client.number % SHARING != SHARING - 1]
        while self.working():
            async with asyncio.TaskGroup() as group:
                for client in mine:
                    group.create_task(self.call(client, ledger), name=f"c{client.number}")
                if isinstance(ledger, SplitLedger):
                    group.create_task(self.prowl(process, ledger, RIVAL), name="prowl")
                    await process.ports.sleep(TURN_S)
        if sum(crash.process == LEDGER for crash in self.kernel.crashes) < self.crashes:
            self.kernel.loop.call_soon(process.crash, context=Context())
            await asyncio.Event().wait()
        self.kernel.calm()
        self.closing = True
        while self.living().get(RIVAL) not in (None, self.retired):
            await process.ports.sleep(TURN_S)
        await ledger.writer.close()
        if isinstance(ledger, SplitLedger):
            self.jump()
            await self.recover(ledger)
            again = await ledger.recover()
            if any(again.values()):
                raise Violation(f"a second recovery found something to do: {again}")
        upkeep = self.rng.random()
        if upkeep < FOLD_SHARE:
            await ledger.writer.consolidate(above=1)
        if upkeep > 1 - REBUILD_SHARE:
            await ledger.rebuild()  # the last judgement compares every row of what it made
        self.finished.set()

    async def compete(self, process: Process) -> None:
        """One life of a second process on the same disk: some callers are its, and it finishes what others began."""
        ledger = await self.open(process)
        assert isinstance(ledger, SplitLedger)  # only there is a second process
        mine = [client for client in self.clients if client.number % SHARING == SHARING - 1]
        while not self.closing:
            async with asyncio.TaskGroup() as group:
                for client in mine:
                    group.create_task(self.call(client, ledger), name=f"c{client.number}")
                group.create_task(self.prowl(process, ledger, LEDGER), name="prowl")
                await process.ports.sleep(TURN_S)
        self.retired = process

    def working(self) -> bool:
        """Whether any caller has anything to do."""
        return self.missing() > 0 or any(client.busy for client in self.clients)

    def missing(self) -> int:
        """How many commits the callers still need an answer to, if nothing that they are doing is refused."""
        return self.commits_min - sum([len(client.told) + len(client.steps) - client.done for client in self.clients])

    async def call(self, client: Client, ledger: Ledger) -> None:
        """One errand after the other, until there are enough."""
        while client.busy or self.missing() > 0:
            if not client.busy:
                client.draw(self.rng, lively=self.split)
            try:
                await client.steps[client.done](client, ledger)
            except Conflict:
                continue  # contention is not an answer: ask again, with the same key
            client.next()
            if not self.split:
                self.oracle.look()
            elif not self.disk.held():
                self.oracle.look(others=True)

    async def prowl(self, process: Process, ledger: SplitLedger, other: str) -> None:
        """Recovery beside living commits, whose leases are over by the clock.

        Now and then their process is stopped first, and goes on while its commits are being finished for it, or after
        they are and others have built on them. Or else they are met just past their point of no return, and it is the
        prowler who is stopped, with a commit in hand that neither of the two has finished.
        """
        while self.prowls > 0 and self.working():
            await process.ports.sleep(self.rng.random() * PROWL_S)
            self.prowls -= 1
            dice, seconds = self.rng.random(), self.rng.random() * PAUSE_S
            victim = self.living().get(other)
            if dice < PAUSE_SHARE and victim is not None:
                self.kernel.pause(victim, seconds)
            elif dice > 1 - WORST_MOMENT_SHARE:
                await self.brink(process)
                delay = self.rng.random() * TAKE_S
                self.kernel.loop.call_later(delay, self.kernel.pause, process, seconds / 4, context=Context())
            self.jump()
            await self.recover(ledger)
            with contextlib.suppress(Conflict):
                await ledger.expire_holds()

    async def brink(self, process: Process) -> None:
        """Wait, but not for ever, until a commit has passed its point of no return and has not spent anything yet."""
        for _ in range(BRINK_TRIES):
            if not self.unsettled() and self.oracle.db.execute(BRINK).fetchone():
                return
            await process.ports.sleep(2 * TICK_S)

    def unsettled(self) -> bool:
        """Whether a transaction is open, so that what there is to see may never have been."""
        return self.oracle.db.in_transaction or self.disk.held()

    async def recover(self, ledger: SplitLedger) -> None:
        """Recover, and judge all there is if nothing is half done."""
        found = await ledger.recover()
        if found["broken"]:
            raise Violation(f"recovery set something aside: {found}")
        if not self.unsettled() and not self.oracle.db.execute("SELECT 1 FROM sagas").fetchone():
            self.oracle.everything()

    def judge(self) -> None:
        """Every answer is true, and nothing else happened."""
        self.oracle.everything(every_column=True)
        committed = self.oracle.keys()
        told: dict[tuple[str, str], Receipt] = {}
        for client in self.clients:
            for key, receipt in client.told.items():
                envelope, hash_ = committed.get(key, (0, ""))
                if envelope != receipt.envelope or receipt.id not in (hash_, UNTOLD):
                    raise Violation(f"{key} was acknowledged as {receipt.envelope} but is {committed.get(key)}")
                told[key] = receipt
            for key in client.refused:
                if key in committed:
                    raise Violation(f"{key} was refused, and is there")
        expiring = {("void", number) for client in self.clients for number in client.expiring}
        asked = told.keys() | expiring | beginning()[1].keys().keys()
        unasked = [key for key in committed if key not in asked and key[0] != "compact"]
        if unasked:
            raise Violation(f"no caller asked for {unasked}")
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
    calls = [1 + dice.randrange(span)]
    while len(calls) < CRASHES:
        calls.append(calls[-1] + IN_FLIGHT + dice.randrange(span - IN_FLIGHT))
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

    points = crash_points(dice, mode) if crashes is None else crashes
    try:
        return run(main, seed, crashes=points, max_callbacks=CALLBACKS_MAX, verbose=verbose)
    finally:
        disk.close()
