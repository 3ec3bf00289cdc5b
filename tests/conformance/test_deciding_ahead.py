"""One group is decided while the one before it is written: the outcome must be as if they had come one after the other.

First with plain values: what is read before the first group's commit and what is read after it lead to the same
decision. Then on PostgreSQL with many callers, while writes get lost, or happen and seem not to have happened.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import ClassVar

from hypothesis import given, settings
from hypothesis import strategies as st

import bursar
from bursar import CappedOverdraft, Conflict, ExternalAccount, InsufficientFunds, Receipt, Refusal, deposit, pay
from bursar.audit import audit
from bursar.model.accounts import Account, Book
from bursar.model.entries import Intent, Leg
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.model.records import Taken
from bursar.store.group import Broken, Decided, Heads, Known, Lost, Rows
from bursar.store.postgres.store import PostgresStore
from bursar.writer import Change
from bursar.writer.decide import GroupJob

USERS = ["a", "b", "c", "d"]


class Picture:
    """A database in a dictionary: enough of one for groups of payments."""

    def __init__(self) -> None:
        self.live = {n << 16: Posting(n << 16, n, 1, 100) for n in range(1, len(USERS) + 1)}
        self.taken: dict[tuple[str, str], Taken] = {}
        self.floors: dict[tuple[int, int], tuple[int, int]] = {}

    def read(self, job: GroupJob, first: int) -> Known:
        """What the store would say."""
        ask = job.ask()
        pools = {}
        for key, most in ask.pools.items():
            mine = [p for p in self.live.values() if (p.account, p.asset) == key[:2] and p.amount * key[2] > 0]
            pools[key] = sorted(mine, key=lambda p: -abs(p.amount))[:most]
        taken = {key: self.taken[key] for key in ask.keys if key in self.taken}
        floors = {key: self.floors[key] for key in ask.floors if key in self.floors}
        return Known(list(range(first, first + ask.intents)), taken, pools, [], floors)

    def write(self, rows: Rows) -> None:
        """What the store would do."""
        for number in rows.dead:
            del self.live[number]
        self.live |= {p.id: p for p, live in rows.postings if live}
        self.taken |= {(r[2], r[3]): Taken(r[0], r[1], r[4], r[7]) for r in rows.envelopes}
        self.floors |= {(a, s): (balance, turn + 1) for a, s, turn, balance in rows.floors}


def heads() -> Heads:
    """Four accounts, one of which may owe up to 50."""
    found = Heads()
    policies = {"d": CappedOverdraft("-0.50", "USD")}
    found.accounts = {
        path: Account(id=n, path=path, **({"policy": policies[path]} if path in policies else {}))  # type: ignore[arg-type]
        for n, path in enumerate(USERS, start=1)
    }
    found.assets = {"USD": Asset(id=1, code="USD", precision=2)}
    found.books = {"main": Book(id=1, name="main")}
    return found


@st.composite
def groups(draw: st.DrawFn) -> list[Change]:
    """Payments among the four; keys from a small set, so that some are sent again."""
    changes = []
    for _ in range(draw(st.integers(1, 6))):
        source, target = draw(st.permutations(USERS))[:2]
        key = f"{source}{target}{draw(st.integers(0, 3))}"
        leg = Leg(source, target, "USD", draw(st.integers(1, 90)))
        changes.append(Change((Intent(scope="user", key=key, legs=(leg,)),)))
    return changes


def decided(job: GroupJob, picture: Picture, first: int) -> Rows:
    """Decide, reading deeper as often as it asks."""
    while True:
        rows = job.decide(picture.read(job, first))
        if rows is not None:
            return rows


def told(job: GroupJob) -> list[object]:
    """Outcomes that can be compared."""
    return [(type(o), o.facts) if isinstance(o, Refusal) else o for o in job.outcomes]


@settings(max_examples=300)
@given(groups(), groups())
def test_reading_before_or_after_the_commit_in_flight_leads_to_the_same_decision(
    first: list[Change], second: list[Change]
) -> None:
    """Given a group in flight, when the next is decided on what was read before or after it, then nothing differs."""
    picture = Picture()
    picture.floors[4, 1] = (100, 1)
    one = GroupJob(heads(), first)
    rows = decided(one, picture, 1000)
    early = GroupJob(heads(), second, one.delta)
    early_rows = decided(early, picture, 2000)
    picture.write(rows)
    late = GroupJob(heads(), second, one.delta)
    late_rows = decided(late, picture, 2000)
    alone = GroupJob(heads(), second)
    alone_rows = decided(alone, picture, 2000)
    assert told(early) == told(late) == told(alone)
    assert early_rows == late_rows == alone_rows


class UnluckyStore(PostgresStore):
    """Writes get lost before they happen, or happen and are not heard of."""

    dice = random.Random(7)
    mishaps: ClassVar[Counter[str]] = Counter()

    async def write(self, decided: Decided) -> None:
        luck = self.dice.random()
        if luck < 0.15:
            self.mishaps["lost"] += 1
            raise Lost("bad luck")
        await super().write(decided)
        if luck < 0.30:
            self.mishaps["unheard"] += 1
            raise Broken("bad luck")


def test_many_callers_while_writes_get_lost_or_are_not_heard_of(fresh_postgres: str) -> None:
    """Given 200 callers on a few accounts, when a third of the writes go wrong, then every promise holds, once."""

    async def body() -> None:
        UnluckyStore.mishaps.clear()
        b = bursar.Bursar(fresh_postgres)
        async with b:
            await b.ledger.create_asset("USD", precision=2)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            for user in USERS:
                await b.ledger.create_account(user)
                await b.ledger.commit(deposit("bank", user, "USD", "100", key=f"seed-{user}"))
            b.store.__class__ = UnluckyStore
            rng = random.Random(3)
            receipts: dict[str, Receipt] = {}
            moved: Counter[str] = Counter(dict.fromkeys(USERS, 10_000))

            async def caller(number: int) -> None:
                for turn in range(4):
                    source, target = rng.sample(USERS, 2)
                    cents, key = rng.randrange(1, 2000), f"{number}-{turn}"
                    entry = pay(source, target, "USD", f"{cents / 100:.2f}", key=key)
                    try:
                        receipt = await b.ledger.commit(entry)
                        again = await b.ledger.commit(entry)  # often rides in the very next group
                    except InsufficientFunds:
                        continue
                    assert again.replayed
                    assert again.envelope == receipt.envelope
                    receipts[key] = receipt
                    moved[source] -= cents
                    moved[target] += cents

            await asyncio.gather(*[caller(number) for number in range(200)])
            b.store.__class__ = PostgresStore
            balances = {user: (await b.ledger.balance(user, "USD")).minor for user in USERS}
            assert balances == dict(moved)
            assert sum(balances.values()) == 40_000
            assert all(finding.ok for finding in await audit(b.store))
            assert min(UnluckyStore.mishaps.values()) > 0
            assert len(UnluckyStore.mishaps) == 2
            assert len(receipts) > 200

    asyncio.run(body())


def test_a_group_that_fails_takes_the_next_decision_with_it(fresh_postgres: str) -> None:
    """Given a hot account with money for ten, when every second write is lost, then exactly ten payments happen."""

    async def body() -> None:
        async with bursar.Bursar(fresh_postgres) as b:
            await b.ledger.create_asset("USD", precision=2)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            for user in ("hot", "cold"):
                await b.ledger.create_account(user)
            await b.ledger.commit(deposit("bank", "hot", "USD", "10"))
            plain, count = b.store.write, 0

            async def write(decided: Decided) -> None:
                nonlocal count
                count += 1
                if count % 2:
                    raise Lost("every second one")
                await plain(decided)

            b.store.write = write  # type: ignore[method-assign]
            results = await b.ledger.commit_many([pay("hot", "cold", "USD", "1") for _ in range(150)])
            assert sum(isinstance(r, Receipt) for r in results) == 10
            assert all(isinstance(r, Receipt | Refusal) for r in results), [
                r for r in results if isinstance(r, Conflict)
            ]
            assert (await b.ledger.balance("cold", "USD")).minor == 1000

    asyncio.run(body())
