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
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass, field

from bursar.ledger import Ledger
from bursar.model.accounts import CappedOverdraft, ExternalAccount, SystemAccount, UncappedOverdraft
from bursar.model.entries import Entry, Movement, deposit, pay, withdraw
from bursar.model.envelope import Receipt
from bursar.model.errors import AccountFrozen, Conflict, KeyReused, Refusal
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, Kernel, Run, run
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.process import Moment, Process
from bursar.store import connect

PATH = "funds.db"
URL = f"sqlite:///{PATH}"
CALLERS = 8
ENTRIES_EACH = 8
COMMITS_MIN = 60  # per seed, of callers; refusals are made up for at the end
CRASHES = 3
USERS = 6
JUMP_US = 60_000_000
RESTART_S_MAX = 0.05
# Within how many port calls the crashes fall. A run that is over before its third crash dies once more at its end.
SPREAD = {True: 900, False: 150}
IN_FLIGHT = 16
SPLIT_SHARE = 0.1  # of the seeds commit by saga; each of those has seven times the port calls of a seed by group

Step = Callable[["Client", Ledger], Awaitable[None]]


@dataclass
class Client:
    """One caller: a script, how far it has come, and what it was told."""

    name: str
    oracle: Oracle
    steps: list[Step] = field(default_factory=list)
    done: int = 0
    told: dict[tuple[str, str], Receipt] = field(default_factory=dict)
    refused: set[tuple[str, str]] = field(default_factory=set)
    holds: dict[str, int] = field(default_factory=dict)

    def hear(self, scope: str, key: str, receipt: Receipt) -> None:
        """A receipt: it must never be another one for the same key."""
        before = self.told.setdefault((scope, key), receipt)
        if (before.envelope, before.id) != (receipt.envelope, receipt.id):
            raise Violation(f"key {key} had receipt {before.envelope}, now {receipt.envelope}")


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

    def __init__(self, kernel: Kernel, split: bool, size: Size, crashes: int) -> None:
        self.kernel = kernel
        self.crashes = crashes
        self.split = split
        self.rng = kernel.rng
        self.disk = SimDisk()
        self.disk.install(PATH, template())
        self.oracle = Oracle(self.disk.open(PATH))
        self.clients = [Client(f"c{n}", self.oracle) for n in range(size.callers)]
        self.finished = asyncio.Event()
        for number, client in enumerate(self.clients):
            client.steps = script(client, number, self.rng, size.entries_each)

    async def play(self) -> Outcome:
        """Start, crash, restart, until everybody has been answered; then judge."""
        self.kernel.on_crash = self.crashed
        self.boot()
        await self.finished.wait()
        self.judge()
        envelopes = len(self.oracle.keys())
        refusals = sum(len(c.refused) for c in self.clients)
        return Outcome(split=self.split, commits=envelopes, refusals=refusals, checks=self.oracle.checks)

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
        if self.split:
            process.clock_offset_us += JUMP_US  # the dead one's leases have run out by the time we are back
            found = await ledger.recover()
            if found["broken"]:
                raise Violation(f"recovery set something aside: {found}")
            self.oracle.everything()
        async with asyncio.TaskGroup() as group:
            for client in self.clients:
                group.create_task(self.call(client, ledger), name=client.name)
            if self.split:
                group.create_task(self.meddle(process, ledger), name="meddle")
        await self.top_up(ledger)
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
        await ledger.writer.fold(above=1)
        if self.rng.random() < 0.2:
            before = self.oracle.balances()
            await ledger.rebuild()
            if self.oracle.balances() != before:
                raise Violation("rebuilding the live table changed a balance")
        self.finished.set()

    async def call(self, client: Client, ledger: Ledger) -> None:
        while client.done < len(client.steps):
            try:
                await client.steps[client.done](client, ledger)
            except Conflict:
                continue  # contention is not an answer: ask again, with the same key
            client.done += 1
            self.oracle.look()

    async def top_up(self, ledger: Ledger) -> None:
        """Many refusals make a short run: deposits, which always succeed, until it is long enough."""
        client = self.clients[0]
        missing = COMMITS_MIN - sum(len(c.told) for c in self.clients)
        if len(self.clients) == CALLERS and missing > 0:
            keys = range(len(client.steps), len(client.steps) + missing)
            client.steps += [commit(deposit("external:bank", "user:0", "USD", "1.00", key=f"top-{k}")) for k in keys]
            await self.call(client, ledger)

    async def meddle(self, process: Process, ledger: Ledger) -> None:
        """Recovery beside living commits, on a clock that says their leases are long over."""
        for _ in range(2):
            await process.ports.sleep(0.002 + self.rng.random() * 0.05)
            process.clock_offset_us += JUMP_US
            await ledger.recover()

    def judge(self) -> None:
        """Everything that was told is true, and nothing else happened."""
        self.oracle.everything()
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
        if +self.oracle.moved() != +self.oracle.balances() or -self.oracle.moved() != -self.oracle.balances():
            raise Violation("balances are not what the movements add up to")


# --- what callers do -------------------------------------------------------------------------------------------------


def script(client: Client, number: int, rng: random.Random, entries: int) -> list[Step]:
    """A caller's entries, decided by the seed. Each can be asked any number of times."""
    steps: list[Step] = []
    while len(steps) < entries:
        key = f"{client.name}-{len(steps)}"
        dice = rng.random()
        if dice < 0.80:
            steps.append(commit(random_entry(rng, key)))
        elif dice < 0.85:
            steps += twice(random_entry(rng, key), rng)
        elif dice < 0.91:
            steps += hold(key, rng)
        elif dice < 0.95:
            steps += undo(random_entry(rng, key), again=rng.random() < 0.3)
        elif dice < 0.98:
            steps += freeze(f"frost:{number}", key)
        else:
            steps.append(compact(f"user:{rng.randrange(USERS)}"))
    return steps


def random_entry(rng: random.Random, key: str) -> Entry:
    """One of the shapes that entries have."""
    a, b = rng.sample(range(USERS), 2)
    asset = "USD" if rng.random() < 0.8 else "EUR"
    amount = f"{rng.randrange(1, 400)}.{rng.randrange(100):02}"
    small = f"{rng.randrange(1, 30)}.00"
    shapes: list[Callable[[], Entry]] = [
        lambda: pay(f"user:{a}", f"user:{b}", asset, amount, key=key),
        lambda: pay(f"user:{a}", f"user:{b}", asset, small, key=key),
        lambda: pay("user:0", f"user:{1 + b % (USERS - 1)}", "USD", small, key=key),  # hot source
        lambda: pay(f"user:{1 + a % (USERS - 1)}", "user:0", "USD", small, key=key),  # hot target
        lambda: deposit("external:bank", f"user:{a}", asset, amount, key=key),
        lambda: withdraw(f"user:{a}", "external:bank", asset, small, key=key),
        lambda: pay("credit", f"user:{a}", "USD", small, key=key),  # races to the floor
        lambda: pay(f"user:{a}", "credit", "USD", small, key=key),
        lambda: pay("line", f"user:{a}", "USD", small, key=key),
        lambda: pay(f"user:{a}", "line", "USD", small, key=key),
        lambda: Entry(
            movements=(
                Movement(f"user:{a}", f"user:{b}", "USD", amount),
                Movement(f"user:{b}", f"user:{a}", "EUR", small),
                Movement(f"user:{a}", "fees", "USD", "0.10"),
            ),
            key=key,
        ),
    ]
    return rng.choice(shapes)()


def commit(entry: Entry) -> Step:
    """Commit once, and remember what one was told."""

    async def step(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        try:
            client.hear("user", entry.key, await ledger.commit(entry))
        except Refusal:
            client.refused.add(("user", entry.key))

    return step


def twice(entry: Entry, rng: random.Random) -> list[Step]:
    """The same key from two hands at once; then with another amount, which must be refused."""
    other = rng.random() < 0.5

    async def step(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        results = await asyncio.gather(ledger.commit(entry), ledger.commit(entry), return_exceptions=True)
        receipts = [r for r in results if isinstance(r, Receipt)]
        for receipt in receipts:
            client.hear("user", entry.key, receipt)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Refusal):
                raise result
        if not receipts:
            client.refused.add(("user", entry.key))

    async def misuse(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        if not other or ("user", entry.key) not in client.told:
            return
        try:
            await ledger.commit(pay("external:bank", "user:1", "USD", "0.01", key=entry.key))
        except KeyReused:
            return
        raise Violation(f"key {entry.key} was accepted for another intent")

    return [step, misuse]


def hold(key: str, rng: random.Random) -> list[Step]:
    """Authorize, confirm a part, then confirm or void the rest."""
    user, payee = (f"user:{n}" for n in rng.sample(range(USERS), 2))
    part, void = f"{rng.randrange(1, 9)}.00", rng.random() < 0.5

    async def authorize(client: Client, ledger: Ledger) -> None:
        try:
            held = await ledger.authorize(user, "USD", "10.00", key=f"{key}-auth")
        except Refusal:
            client.refused.add(("user", f"{key}-auth"))
            return
        client.holds[key] = held.id
        client.hear("user", f"{key}-auth", client.oracle.receipt(held.id, f"{key}-auth"))

    async def confirm(client: Client, ledger: Ledger) -> None:
        if key in client.holds:
            receipt = await ledger.confirm(client.holds[key], payee, part, key=f"{key}-part")
            client.hear("user", f"{key}-part", receipt)

    async def end(client: Client, ledger: Ledger) -> None:
        if key not in client.holds:
            return
        number = client.holds[key]
        if void:
            client.hear("void", str(number), await ledger.void(number))
        else:
            client.hear("user", f"{key}-rest", await ledger.confirm(number, payee, key=f"{key}-rest"))

    return [authorize, confirm, end]


def undo(entry: Entry, *, again: bool) -> list[Step]:
    """Commit and reverse; now and then twice, which is once."""

    async def reverse(client: Client, ledger: Ledger) -> None:
        assert entry.key is not None
        told = client.told.get(("user", entry.key))
        if told is None:
            return
        try:
            for _ in range(2 if again else 1):
                client.hear("reverse", str(told.envelope), await ledger.reverse(told.envelope))
        except Refusal:
            return  # the money has been spent since

    return [commit(entry), reverse]


def freeze(account: str, key: str) -> list[Step]:
    """Once a freeze has returned, nothing goes out or in, until the account is thawed."""

    async def cold(client: Client, ledger: Ledger) -> None:
        await ledger.freeze(account)
        try:
            await ledger.commit(deposit("external:bank", account, "USD", "1.00", key=f"{key}-ice"))
        except AccountFrozen:
            client.refused.add(("user", f"{key}-ice"))
            return
        raise Violation(f"{account} was frozen and took money")

    async def thaw(_client: Client, ledger: Ledger) -> None:
        await ledger.unfreeze(account)

    return [cold, thaw, commit(deposit("external:bank", account, "USD", "1.00", key=f"{key}-thaw"))]


def compact(account: str) -> Step:
    """Merge small postings while others pay with them."""

    async def step(_client: Client, ledger: Ledger) -> None:
        await ledger.compact(account)

    return step


# --- the beginning of every seed -----------------------------------------------------------------------------------


_template: list[bytes] = []


def template() -> bytes:
    """A database with assets, accounts and some money, made once."""
    if not _template:
        disk = SimDisk()

        async def prepare(kernel: Kernel) -> None:
            store = connect(URL, kernel.start("prepare", disk=disk).ports)
            await store.open()
            await furnish(Ledger(store))

        run(prepare, 0)
        _template.append(disk.image(PATH))
    return _template[0]


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
    template()  # made outside the run: a simulation can't run inside another
    dice = random.Random(f"{seed} shape")
    mode = dice.random() < SPLIT_SHARE
    mode = mode if split is None else split

    async def main(kernel: Kernel) -> Outcome:
        return await Scenario(kernel, mode, size or Size(), CRASHES if crashes is None else 0).play()

    return run(main, seed, crashes=crash_points(dice, mode) if crashes is None else crashes, verbose=verbose)
