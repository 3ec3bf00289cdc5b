"""One group is decided while the one before it is written: the outcome must be as if they had come one after the other.

First with plain values: what is read before the first group's commit and what is read after it lead to the same
decision. Then on PostgreSQL with many callers, while writes get lost, or happen and seem not to have happened.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory import MemoryLedger

import bursar
from bursar import CappedOverdraft, Conflict, ExternalAccount, InsufficientFunds, Receipt, Refusal, deposit, pay
from bursar.audit import audit
from bursar.model.accounts import Account
from bursar.model.entries import Intent, Leg
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.store.batch import CommitUnknown, PreparedBatch, WriteConflict, WriteSet
from bursar.store.postgres.batches import PostgresBatchSession
from bursar.store.sqlite.store import run_sync
from bursar.writer import Change
from bursar.writer.batch import Batch, prepare

USERS = ["a", "b", "c", "d"]


def picture() -> MemoryLedger:
    """Four accounts with 1.00 each, one of which may owe up to 0.50."""
    policies = {"d": CappedOverdraft("-0.50", "USD")}
    accounts = [
        Account(id=n, path=path, **({"policy": policies[path]} if path in policies else {}))  # type: ignore[arg-type]
        for n, path in enumerate(USERS, start=1)
    ]
    live = [Posting(n << 16, n, 1, 100) for n in range(1, len(USERS) + 1)]
    made = MemoryLedger(Asset(id=1, code="USD", precision=2), accounts, live)
    made.guarded[4, 1] = (100, 1)
    return made


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


def decided(batch: Batch, picture: MemoryLedger, first: int) -> WriteSet:
    picture.number = first
    return run_sync(prepare(batch, picture)).writes


def told(batch: Batch) -> list[object]:
    """Results that can be compared."""
    return [(type(r), r.facts) if isinstance(r, Refusal) else r for r in batch.results]


@settings(max_examples=300)
@given(groups(), groups())
def test_reading_before_or_after_the_commit_in_flight_leads_to_the_same_decision(
    first: list[Change], second: list[Change]
) -> None:
    """Given a batch in flight, when the next is decided on what was read before or after it, then nothing differs."""
    database = picture()
    one = Batch(database.cache(), first, first_read=2)
    writes = decided(one, database, 1000)
    early = Batch(database.cache(), second, after=one.effects, first_read=2)
    early_writes = decided(early, database, 2000)
    database.put(writes)
    late = Batch(database.cache(), second, after=one.effects, first_read=2)
    late_writes = decided(late, database, 2000)
    alone = Batch(database.cache(), second, first_read=2)
    alone_writes = decided(alone, database, 2000)
    assert told(early) == told(late) == told(alone)
    assert early_writes == late_writes == alone_writes


class Mishaps:
    """Writes conflict before they happen, or happen and their answer is lost."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._dice = random.Random(7)
        self._write = PostgresBatchSession.write

    def method(self) -> Any:
        """The method of a session: this one's `write`, with that session before it."""

        async def write(session: PostgresBatchSession, prepared: PreparedBatch) -> None:
            await self.write(session, prepared)

        return write

    async def write(self, session: PostgresBatchSession, prepared: PreparedBatch) -> None:
        luck = self._dice.random()
        if luck < 0.15:
            self.counts["lost"] += 1
            raise WriteConflict("bad luck")
        await self._write(session, prepared)
        if luck < 0.30:
            self.counts["unheard"] += 1
            raise CommitUnknown("bad luck")


def test_many_callers_while_writes_get_lost_or_are_not_heard_of(
    fresh_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given 200 callers on a few accounts, when a third of the writes go wrong, then every promise holds, once."""

    async def body() -> None:
        mishaps = Mishaps()
        b = bursar.Bursar(fresh_postgres)
        async with b:
            await b.ledger.create_asset("USD", precision=2)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            for user in USERS:
                await b.ledger.create_account(user)
                await b.ledger.commit(deposit("bank", user, "USD", "100", key=f"seed-{user}"))
            monkeypatch.setattr(PostgresBatchSession, "write", mishaps.method())
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
                        again = await b.ledger.commit(entry)  # often part of the very next group
                    except InsufficientFunds:
                        continue
                    assert again.replayed
                    assert again.envelope == receipt.envelope
                    receipts[key] = receipt
                    moved[source] -= cents
                    moved[target] += cents

            await asyncio.gather(*[caller(number) for number in range(200)])
            monkeypatch.undo()
            balances = {user: (await b.ledger.balance(user, "USD")).minor for user in USERS}
            assert balances == dict(moved)
            assert sum(balances.values()) == 40_000
            assert all(finding.ok for finding in await audit(b.store))
            assert min(mishaps.counts.values()) > 0
            assert len(mishaps.counts) == 2
            assert len(receipts) > 200

    asyncio.run(body())


def test_a_batch_that_fails_takes_the_next_decision_with_it(
    fresh_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a hot account with money for ten, when every second write is lost, then exactly ten payments happen."""

    async def body() -> None:
        async with bursar.Bursar(fresh_postgres) as b:
            await b.ledger.create_asset("USD", precision=2)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            for user in ("hot", "cold"):
                await b.ledger.create_account(user)
            await b.ledger.commit(deposit("bank", "hot", "USD", "10"))
            plain, count = PostgresBatchSession.write, 0

            async def write(session: PostgresBatchSession, prepared: PreparedBatch) -> None:
                nonlocal count
                count += 1
                if count % 2:
                    raise WriteConflict("every second one")
                await plain(session, prepared)

            monkeypatch.setattr(PostgresBatchSession, "write", write)
            results = await b.ledger.commit_many([pay("hot", "cold", "USD", "1") for _ in range(150)])
            assert sum(isinstance(r, Receipt) for r in results) == 10
            assert all(isinstance(r, Receipt | Refusal) for r in results), [
                r for r in results if isinstance(r, Conflict)
            ]
            assert (await b.ledger.balance("cold", "USD")).minor == 1000

    asyncio.run(body())
