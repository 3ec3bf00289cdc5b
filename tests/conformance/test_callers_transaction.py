"""An entry in a transaction that the caller owns: it happens if and when the caller commits."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import asyncpg
import pytest
from tests.builders import BANK, Place, balance, scenario, seed

from bursar import deposit, pay
from bursar.ledger import Ledger
from bursar.model.errors import DatabaseUnavailable, InsufficientFunds


class Theirs:
    """A caller's own connection with a transaction open, on either engine."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.connection: Any = None
        self._transaction: Any = None

    async def begin(self) -> Theirs:
        if self.place.engine == "sqlite":
            self.connection = sqlite3.connect(self.place.path, isolation_level=None)
            self.connection.execute("BEGIN IMMEDIATE")
        else:
            self.connection = await asyncpg.connect(self.place.url)
            self._transaction = self.connection.transaction()
            await self._transaction.start()
        return self

    async def execute(self, statement: str) -> None:
        if self.place.engine == "sqlite":
            self.connection.execute(statement)
        else:
            await self.connection.execute(statement)

    async def end(self, how: str) -> None:
        if self.place.engine == "sqlite":
            self.connection.execute(how)
            self.connection.close()
        else:
            await (self._transaction.commit() if how == "COMMIT" else self._transaction.rollback())
            await self.connection.close()


@scenario
async def test_an_entry_happens_when_the_caller_commits(
    own_place: Place,
) -> None:
    """An order row and its entry, together or not at all."""
    async with own_place.bursar() as bursar:
        await seed(bursar.ledger, "alice", "10")
        theirs = await Theirs(own_place).begin()
        await theirs.execute("CREATE TABLE orders (id INTEGER)")
        receipt = await bursar.ledger.commit(pay("alice", "bob", "USDT", "4"), connection=theirs.connection)
        assert await balance(bursar.ledger, "bob") == "0.000000"
        await theirs.end("COMMIT")

        assert await balance(bursar.ledger, "bob") == "4.000000"
        assert (await bursar.ledger.envelope(receipt.envelope)).id == receipt.id


@scenario
async def test_an_entry_is_rolled_back_with_it(ledger: Ledger, place: Place) -> None:
    await seed(ledger, "alice", "10")
    theirs = await Theirs(place).begin()
    await ledger.commit(pay("alice", "bob", "USDT", "4", key="k"), connection=theirs.connection)
    await theirs.end("ROLLBACK")

    assert await balance(ledger, "alice") == "10.000000"
    assert not (await ledger.commit(pay("alice", "bob", "USDT", "4", key="k"))).replayed


@scenario
async def test_a_refusal_leaves_the_transaction_usable(ledger: Ledger, place: Place) -> None:
    await seed(ledger, "alice", "10")
    theirs = await Theirs(place).begin()
    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("alice", "bob", "USDT", "11"), connection=theirs.connection)
    await ledger.commit(pay("alice", "bob", "USDT", "4"), connection=theirs.connection)
    await theirs.end("COMMIT")

    assert await balance(ledger, "bob") == "4.000000"


@scenario
async def test_later_entries_see_earlier_ones(ledger: Ledger, place: Place) -> None:
    theirs = await Theirs(place).begin()
    await ledger.commit(deposit(BANK, "alice", "USDT", "3"), connection=theirs.connection)
    await ledger.commit(pay("alice", "bob", "USDT", "3"), connection=theirs.connection)
    await theirs.end("COMMIT")

    assert await balance(ledger, "bob") == "3.000000"


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_what_is_paid_in_an_old_transaction_was_not_there_before_it_came(ledger: Ledger, place: Place) -> None:
    """Given a transaction that began long ago, when it pays with money that came since, then at no moment of the past
    was that money in two places: an entry's time is when it was written, not when its transaction began."""
    theirs = await Theirs(place).begin()
    came = (await ledger.commit(deposit(BANK, "alice", "USDT", "3"))).envelope
    went = (await ledger.commit(pay("alice", "bob", "USDT", "3"), connection=theirs.connection)).envelope
    await theirs.end("COMMIT")

    moments = [(await ledger.envelope(number)).at for number in (came, went)]
    assert moments == sorted(moments)
    for at in moments:
        minor = [(await ledger.balance(account, "USDT", at=at)).minor for account in (BANK, "alice", "bob")]
        assert sum(minor) == 0


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_lost_race_is_decided_again(ledger: Ledger, place: Place) -> None:
    """Both saw the same posting; the one who is later finds it spent, and pays with what is left."""
    await seed(ledger, "alice", "10", "3")
    first, second = await Theirs(place).begin(), await Theirs(place).begin()
    await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=first.connection)
    waiting = asyncio.create_task(ledger.commit(pay("alice", "carol", "USDT", "2"), connection=second.connection))
    await blocked(place)
    await first.end("COMMIT")
    await waiting
    await second.end("COMMIT")

    assert [str(p.amount) for p in await ledger.postings("alice")] == ["1.000000"]
    assert await balance(ledger, "carol") == "2.000000"


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_lost_race_may_end_in_a_refusal(ledger: Ledger, place: Place) -> None:
    await seed(ledger, "alice", "10")
    theirs = await Theirs(place).begin()
    await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs.connection)
    waiting = asyncio.create_task(ledger.commit(pay("alice", "carol", "USDT", "2")))
    await blocked(place)
    await theirs.end("COMMIT")

    with pytest.raises(InsufficientFunds):
        await waiting
    assert await balance(ledger, "carol") == "0.000000"


async def blocked(place: Place) -> None:
    """Wait until somebody waits for somebody."""
    connection = await asyncpg.connect(place.url)
    try:
        while not await connection.fetchval("SELECT count(*) FROM pg_locks WHERE NOT granted"):
            pass
    finally:
        await connection.close()


@scenario
async def test_the_connection_must_be_in_a_transaction(ledger: Ledger, place: Place) -> None:
    connection = (
        sqlite3.connect(place.path) if place.engine == "sqlite" else await asyncpg.connect(place.url, timeout=5)
    )
    with pytest.raises(DatabaseUnavailable, match="transaction"):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
    if isinstance(connection, sqlite3.Connection):
        connection.close()
    else:
        await connection.close()


@scenario
async def test_a_connection_of_another_kind_is_refused(ledger: Ledger) -> None:
    with pytest.raises(DatabaseUnavailable, match="expected"):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=object())
