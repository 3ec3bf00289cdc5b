"""The engine scenario: two processes on one disk, clients with keys of their own, a rail that breaks, crashes anywhere.

The process `engine` takes orders, as an API does, and drives them; `engine-2` is a worker beside it. Clients are
outside: they remember what they asked for and what was answered, and ask again with the same key. An office beside
them approves orders or lets them lapse, and sends signals: early, late, twice, in call states. The oracle looks after
every commit. After a while nothing breaks any more; then every order must come to its end in bounded time, with each
transition, each entry and each effect exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bursar.engine import Engine, Flow, Operators, Worker
from bursar.ledger import Ledger
from bursar.model.accounts import ExternalAccount, SystemAccount
from bursar.model.entries import deposit
from bursar.model.errors import Conflict, HoldOwned, LimitExceeded, RecordMoved, Refusal
from bursar.model.proof import ProofMissing, dead, never_issued
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, Kernel, Run, run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.orders import LOST, MACHINE, RAILS, SHOP, TRANSIT, Order, OrderOracle, Rail
from bursar.sim.process import Process
from bursar.sim.switches import AGE_S, Switches
from bursar.sim.two_process import LEASE_S, PATH, SCAN_S, Client, TwoProcessRun, WatchedStore, play_out
from bursar.store import connect
from bursar.writer import Limit, Operation

PROCESSES: Final = ("engine", "engine-2")
USERS: Final = 4
ORDERS_EACH: Final = 3
LIMIT: Final = 3  # orders per user; some users want more
SWITCHED_EVERY: Final = 3  # to one seed in so many, operators come
FOREVER_US: Final = 2**60


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # transitions
    orders: int
    refused: int
    calls: int  # of the rail
    switched: Counter[str]  # what operators paused and halted
    meddled: int  # refused tries of others to settle the holds of orders
    unproved: int  # events that would have given money back without proof, and were refused
    checks: int
    lapsed: int  # by a timer
    early: int  # signals that came before they were awaited, and were consumed
    parcels: int


ENDED: Final = "('DONE', 'FAILED', 'LAPSED', 'RECALLED')"
OPEN: Final = f"SELECT id, state, attempt, worker, error, timer, inbox FROM records WHERE state NOT IN {ENDED}"
OFFICE_S: Final = 0.4
LAPSES_S_MAX: Final = 2.0


class Scenario(TwoProcessRun[Outcome]):
    """One run."""

    processes = PROCESSES
    open = OPEN
    meddled = 0
    unproved = 0
    oracle: OrderOracle
    switches: Switches | None = None

    async def play(self) -> Outcome:
        """On some seeds, operators pause and halt meanwhile."""
        if self.kernel.seed % SWITCHED_EVERY == 0:
            self.switches = Switches(self.kernel, self.oracle.db, MACHINE, RAILS)
            self.switches.violations = self.violations
            self.rail.on_call = self.switches.judge
        return await super().play()

    def heal(self) -> None:
        """From now on nothing breaks, and nothing stays switched off."""
        super().heal()
        if self.switches is not None:
            self.switches.end()

    def make_rail(self) -> Rail:
        return Rail(self.kernel, random.Random(f"{self.kernel.seed} rail"))

    def make_oracle(self) -> OrderOracle:
        return OrderOracle(self.disk.open(PATH), self.rail, beginning()[1])

    def make_client(self, number: int, how_many: int) -> Client:
        count = how_many + self.rng.randrange(2)
        wants = {f"c{number}-{n}": self.rng.randrange(1, 3000) for n in range(count)}
        return Client(f"user:{number % USERS}", wants)

    async def serve(self, process: Process) -> None:
        """One life of a process."""
        store = WatchedStore(process.ports, PATH)
        store.watch = self.watch
        await store.open()
        ledger = Ledger(store)
        flows: list[Flow[Any]] = [self.rail.flow(process), self.rail.parcels(process)]
        engine = Engine(store, ledger.writer, flows, worker=process.name, lease_s=LEASE_S)
        engine.pauses.age_s_max = AGE_S
        async with asyncio.TaskGroup() as group:
            group.create_task(Worker(engine, scan_s=SCAN_S, queue_max=8, concurrency=6).run(), name="worker")
            if process.name == PROCESSES[1]:
                group.create_task(self.search(engine), name="searcher")
            if process.name == PROCESSES[0]:
                group.create_task(self.office(engine), name="office")
                for client in self.clients:
                    group.create_task(self.order(client, engine, ledger), name=client.user)

    async def order(self, client: Client, engine: Engine, ledger: Ledger) -> None:
        """One order after the other; after a crash again, also what was answered, to get the same answer."""
        for key, minor in client.wants.items():
            if key in client.told and self.rng.random() < 0.7:
                continue
            told = await self.start(client, engine, key, minor)
            if client.told.setdefault(key, told) != told:
                raise Violation(f"{key} was answered {client.told[key]!r}, and now {told!r}")
            record = await engine.get(MACHINE.name, told) if told else None
            if record is None:
                continue
            if self.rng.random() < 0.3:
                await self.meddle(ledger, client.user)
            if self.rng.random() < 0.6:
                await engine.process_now(record, self.rng.random())
            elif self.rng.random() < 0.3:
                with contextlib.suppress(Refusal, Conflict):  # it has moved, or has ended
                    await Operators(engine).retry_now(MACHINE.name, told, actor="ann", reason="impatience")

    async def office(self, engine: Engine) -> None:
        """Send signals to orders, as each order's dice say; once nothing breaks any more, all that are awaited."""
        while True:
            await engine.ports.sleep(OFFICE_S * self.rng.random())
            states = ("ASKING", "CHARGING", "SHIPPING", "DELIVERING", "REFUNDING")
            for record in await engine.store.read.records.list(MACHINE.name, states=states):
                order = msgspec.json.decode(record.body, type=Order)
                dice = random.Random(f"{self.kernel.seed} {record.id}").random()
                far = (record.timer_us or 0) > engine.ports.now_us() + int(5e6)
                events = ["RUSH"] * (self.rng.random() < 0.2)
                if record.state == "ASKING" and (far if self.rail.trouble == 0 else dice < 0.5):
                    events.append("APPROVE")
                if not order.parcel and (self.rail.trouble == 0 or self.rng.random() < 0.3):
                    events.append("RECALL" if dice < 0.2 else "DELIVERED")
                for event in events:
                    await self.send(engine, record.id, event)

    async def send(self, engine: Engine, id: str, event: str) -> None:
        """A signal, sometimes twice; a sender that got no answer sends it again, as the same one."""
        sender = f"{event} {self.rng.randrange(3)}" if event == "RUSH" else event
        for _ in range(1 + (self.rng.random() < 0.3)):
            record = await engine.get(MACHINE.name, id)
            assert record is not None
            with contextlib.suppress(Refusal, Conflict):  # it has moved, or has ended
                await engine.signal(record, event, "office", {"event": event}, sender=sender)

    async def search(self, engine: Engine) -> None:
        """Prove of what the shop has lost that it is lost; a wrong proof, and none, must be refused (S44)."""
        while True:
            for id in self.oracle.waiting():
                record = await engine.get(MACHINE.name, id)
                if record is None or record.state != "SEARCHING":
                    continue
                evidence = self.rng.choice(({}, never_issued(), dead(), dead(**LOST.facts)))
                with contextlib.suppress(RecordMoved, Conflict):
                    try:
                        await engine.signal(record, "LOST", "searcher", evidence)
                    except ProofMissing:
                        self.unproved += 1
            await engine.ports.sleep(SCAN_S)

    async def meddle(self, ledger: Ledger, user: str) -> None:
        """Somebody who is not the record tries to settle its hold (W34)."""
        for hold in await ledger.holds(user):
            attempt = ledger.void(hold.id) if self.rng.random() < 0.5 else ledger.confirm(hold.id, SHOP)
            try:
                await attempt
            except HoldOwned:
                self.meddled += 1
                continue
            raise Violation(f"W34: hold {hold.id} of {hold.owner} was settled by hand")

    async def start(self, client: Client, engine: Engine, key: str, minor: int) -> str:
        request = Operation(scope=f"orders:{client.user}", id=key, op="create", fingerprint=str(minor))
        limit = Limit(key=client.user, count_max=LIMIT, amount_max=10**9, amount=minor, until_us=FOREVER_US, code="X")
        while True:
            try:
                held, asks, parcel = minor % 2 == 0, minor % 6 in (1, 3), minor % 5 < 2
                until_us = engine.ports.now_us() + int(LAPSES_S_MAX * self.rng.random() * 1e6)
                order = Order(client.user, minor, held=held, asks_until_us=until_us * asks, parcel=parcel)
                started = await engine.start(MACHINE.name, order, owner=client.user, operation=request, limits=(limit,))
            except LimitExceeded:
                return ""
            except Conflict:
                continue  # contention is not an answer: ask again, with the same key
            return started.record.id

    def judge(self) -> Outcome:
        """Every answer is true, and nothing else happened."""
        oracle = self.oracle
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        if differing := oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")
        owners = dict(oracle.db.execute("SELECT id, owner FROM records WHERE flow = 'orders'").fetchall())
        told = [id for client in self.clients for id in client.told.values() if id]
        if sorted(told) != sorted(owners):
            raise Violation(f"orders that no client knows, or that are not there: {set(told) ^ set(owners)}")
        counts = Counter(owners.values())
        for client in self.clients:
            count = counts[client.user]
            if count > LIMIT or ("" in client.told.values() and count < LIMIT):
                raise Violation(f"{client.user} has {count} orders of {LIMIT}, and got {client.told}")
        (commits,) = oracle.db.execute("SELECT count(*) FROM transitions").fetchone()
        (lapsed,) = oracle.db.execute("SELECT count(*) FROM transitions WHERE event = 'EXPIRED'").fetchone()
        (early,) = oracle.db.execute("SELECT count(*) FROM signals WHERE consumed > arrived").fetchone()
        (parcels,) = oracle.db.execute("SELECT count(*) FROM records WHERE flow = 'parcels'").fetchone()
        refused = sum(list(client.told.values()).count("") for client in self.clients)
        return Outcome(
            commits=commits,
            orders=len(told),
            refused=refused,
            calls=self.rail.calls,
            switched=Counter() if self.switches is None else self.switches.happened,
            meddled=self.meddled,
            unproved=self.unproved,
            checks=oracle.checks,
            lapsed=lapsed,
            early=early,
            parcels=parcels,
        )


# --- the beginning of every seed -----------------------------------------------------------------------------------


_beginning: list[tuple[bytes, Oracle]] = []


def beginning() -> tuple[bytes, Oracle]:
    """A database with accounts and money, and what the oracle has to say about it; made once."""
    if not _beginning:
        disk = SimDisk()

        async def prepare(kernel: Kernel) -> None:
            store = connect(f"sqlite:///{PATH}", kernel.start("prepare", disk=disk).ports)
            await store.open()
            await furnish(Ledger(store))

        run(prepare, 0)
        oracle = Oracle(disk.open(PATH))
        oracle.everything()
        _beginning.append((disk.image(PATH), oracle))
    return _beginning[0]


async def furnish(ledger: Ledger) -> None:
    """An asset, accounts, and money to order with."""
    await ledger.create_asset("USD", precision=2)
    await ledger.create_account("external:bank", policy=ExternalAccount())
    await ledger.create_account(TRANSIT, policy=SystemAccount())
    await ledger.create_account(SHOP)
    for n in range(USERS):
        await ledger.create_account(f"user:{n}")
        await ledger.commit(deposit("external:bank", f"user:{n}", "USD", "500.00", key=f"seed-{n}"))


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere."""
    wanted = size or Size(callers=USERS, entries_each=ORDERS_EACH)
    return play_out(Scenario, beginning()[0], wanted, seed, crashes, split=split, verbose=verbose)
