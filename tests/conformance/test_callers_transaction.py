"""An entry in a transaction that the caller owns: it happens if and when the caller commits."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from typing import Any

import asyncpg
import pytest
from tests.builders import BANK, Place, balance, dust, scenario, seed

from bursar import deposit, pay
from bursar.ledger import Ledger
from bursar.ledger.reads import WIDE
from bursar.model.accounts import AccountStatus
from bursar.model.errors import Conflict, DatabaseUnavailable, InsufficientFunds, UnknownEnvelope


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
async def test_the_number_of_a_receipt_that_was_rolled_back_is_nobodys(ledger: Ledger, place: Place) -> None:
    """Whoever reverses by it must not undo a stranger's entry."""
    await seed(ledger, "alice", "10")
    theirs = await Theirs(place).begin()
    gone = await ledger.commit(pay("alice", "bob", "USDT", "4"), connection=theirs.connection)
    await theirs.end("ROLLBACK")
    await seed(ledger, "carol", "7")

    with pytest.raises(UnknownEnvelope):
        await ledger.reverse(gone.envelope)
    assert await balance(ledger, "carol") == "7.000000"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@pytest.mark.parametrize("key", ["paid", "unpaid"])
@scenario
async def test_a_refusal_that_rests_on_what_was_long_ago_is_none(ledger: Ledger, place: Place, key: str) -> None:
    """Given a transaction that sees only what was there when it began, when it asks again for what has happened since,
    or pays with what has come since, then it is told to begin anew, not that there is no money."""
    if place.engine == "sqlite":
        connection: Any = sqlite3.connect(place.path, isolation_level=None)
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM envelopes").fetchone()
    else:
        connection = await asyncpg.connect(place.url)
        await connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
        await connection.fetchval("SELECT count(*) FROM bursar.envelopes")
    entry = pay("alice", "bob", "USDT", "5", key=key)
    await seed(ledger, "alice", "5")
    if key == "paid":
        await ledger.commit(entry)
    with pytest.raises(Conflict):
        await ledger.commit(entry, connection=connection)
    closing = connection.close()
    if closing is not None:
        await closing
    assert (await ledger.commit(entry)).replayed is (key == "paid")


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_transaction_that_was_begun_by_hand_is_one(ledger: Ledger, place: Place) -> None:
    connection = await asyncpg.connect(place.url)
    await connection.execute("BEGIN")
    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("alice", "bob", "USDT", "1"), connection=connection)
    await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
    await connection.execute("COMMIT")
    await connection.close()
    assert await balance(ledger, "alice") == "1.000000"


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_connection_that_is_busy_or_given_back_is_said_to_be(ledger: Ledger, place: Place) -> None:
    pool = await asyncpg.create_pool(place.url, min_size=1, max_size=1)
    async with pool.acquire() as connection, connection.transaction():
        sleeping = asyncio.create_task(connection.execute("SELECT pg_sleep(0.2)"))
        await asyncio.sleep(0.05)
        with pytest.raises(DatabaseUnavailable, match="can't be used"):
            await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
        await sleeping
    with pytest.raises(DatabaseUnavailable, match="can't be used"):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
    await pool.close()


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_balance_waits_for_nobody(ledger: Ledger, place: Place) -> None:
    """Given an account with many postings and somebody's open transaction, also one's own, when its balance is read for
    the first time, then it is told at once."""
    await dust(ledger, "carol", WIDE + 1)
    theirs = await Theirs(place).begin()
    await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=theirs.connection)
    async with asyncio.timeout(2):
        assert (await ledger.balance("carol", "USDT")).minor == WIDE + 1
    await theirs.end("COMMIT")


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_freeze_has_its_turn_and_gives_up_for_none_but_a_transaction_left_open(
    ledger: Ledger, place: Place
) -> None:
    """Given callers whose transactions overlap, so that there is always one, when an account is frozen, then that
    happens before long; but one that is left open stops the freeze, with a word, and no commit."""
    await seed(ledger, "alice", *["1"] * 40)
    over = asyncio.Event()

    async def calls() -> None:
        while not over.is_set():
            theirs = await Theirs(place).begin()
            await ledger.commit(deposit(BANK, "bob", "USDT", "1"), connection=theirs.connection)
            await asyncio.sleep(0.1)
            await theirs.end("COMMIT")

    callers = [asyncio.create_task(calls()) for _ in range(3)]
    await asyncio.sleep(0.15)
    async with asyncio.timeout(5):
        assert (await ledger.freeze("alice")).status is AccountStatus.FROZEN
    over.set()
    await asyncio.gather(*callers)

    idle = await Theirs(place).begin()
    await ledger.commit(deposit(BANK, "bob", "USDT", "1"), connection=idle.connection)
    freezing = asyncio.create_task(ledger.unfreeze("alice"))
    async with asyncio.timeout(15):
        await ledger.commit(deposit(BANK, "carol", "USDT", "1"))
        with pytest.raises(Conflict, match="pg_stat_activity"):
            await freezing
    await idle.end("COMMIT")
    assert await balance(ledger, "carol") == "1.000000"


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_a_connection_may_have_its_own_ways(ledger: Ledger, place: Place) -> None:
    """Rows as dictionaries, texts as bytes: theirs before and after."""
    connection = sqlite3.connect(place.path, isolation_level=None)
    connection.row_factory = lambda cursor, row: {c[0]: value for c, value in zip(cursor.description, row, strict=True)}
    connection.text_factory = bytes
    connection.execute("BEGIN IMMEDIATE")
    await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
    assert connection.execute("SELECT 'x' AS a").fetchone() == {"a": b"x"}
    connection.execute("COMMIT")
    connection.close()
    assert await balance(ledger, "alice") == "1.000000"


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_a_connection_to_another_file_is_refused(ledger: Ledger, place: Place) -> None:
    """It would get the entry, and a receipt for it, and this ledger would know nothing of it."""
    shutil.copyfile(place.path, place.path + ".other")
    connection = sqlite3.connect(place.path + ".other", isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="another file"):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=connection)
    connection.close()


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_whoever_waited_for_the_file_came_later(ledger: Ledger, place: Place) -> None:
    """Given a transaction that holds the file, when a payment waits for it and then pays with what came in meanwhile,
    then at no moment of the past was that money in two places."""
    theirs = await Theirs(place).begin()
    paying = asyncio.create_task(ledger.commit(pay("alice", "bob", "USDT", "3")))
    await asyncio.sleep(0.05)
    came = (await ledger.commit(deposit(BANK, "alice", "USDT", "3"), connection=theirs.connection)).envelope
    await theirs.end("COMMIT")
    went = (await paying).envelope

    moments = [(await ledger.envelope(number)).at for number in (came, went)]
    assert moments == sorted(moments)


@scenario
async def test_a_connection_of_another_kind_is_refused(ledger: Ledger) -> None:
    with pytest.raises(DatabaseUnavailable, match="expected"):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"), connection=object())
