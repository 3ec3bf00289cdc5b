"""Somebody holds rows in a transaction of his own and takes his time: whoever needs them is told before long, or waits
and goes through; whoever does not need them hardly notices. Only PostgreSQL: a SQLite file has one writer at a time.

How the waiting is organised is tried in virtual time (unit/test_blocked_lane.py); here the locks are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import pytest
from tests.builders import BANK, Place, all_at_once, balance, outcome, receipts, scenario, seed

from bursar import Bursar, Receipt, deposit, pay
from bursar.ledger import Ledger
from bursar.model.errors import Conflict, InsufficientFunds
from bursar.store.batch import Lane
from bursar.store.postgres.store import PostgresStore

pytestmark = pytest.mark.parametrize("mode", ["postgres"], indirect=True)

CALLERS = 64
MEASURED_S = 1.5
TOLD_S = 10.0  # a busy machine; on an idle one, two


@contextlib.asynccontextmanager
async def transaction(place: Place) -> AsyncIterator[Any]:
    """A user's own, rolled back in the end unless it has ended before."""
    connection = await asyncpg.connect(place.url)
    try:
        await connection.execute("BEGIN")
        yield connection
        await connection.execute("ROLLBACK")
    finally:
        await connection.close()


async def crowd(ledger: Ledger, names: list[str]) -> None:
    for name in names:
        await ledger.create_account(name)
    assert len(receipts(await ledger.commit_many([deposit(BANK, name, "USDT", "1000") for name in names]))) == len(
        names
    )


async def rate(ledger: Ledger, names: list[str], victims: list[str]) -> tuple[float, list[float]]:
    """Payments a second of those who are not concerned, while others ask again and again; and how long those wait."""
    until = time.monotonic() + MEASURED_S
    done, waits = [0], []

    async def pays(name: str) -> None:
        while time.monotonic() < until:
            await ledger.commit(pay(name, "bob", "USDT", "0.01"))
            done[0] += 1

    async def asks(name: str) -> None:
        while time.monotonic() < until:
            began = time.monotonic()
            with pytest.raises(Conflict, match="holds"):
                await ledger.commit(pay(name, "bob", "USDT", "0.01"))
            waits.append(time.monotonic() - began)

    asking = [asyncio.create_task(asks(name)) for name in victims]
    began = time.monotonic()
    await asyncio.gather(*[pays(name) for name in names])
    took = time.monotonic() - began
    await asyncio.gather(*asking)
    return done[0] / took, waits


@pytest.mark.parametrize("held", [1, 3])
@scenario
async def test_others_hardly_notice(ledger: Ledger, place: Place, held: int) -> None:
    """Given rows that somebody holds, and callers who ask for them again and again, then all others keep most of their
    rate (a quarter here, whatever else the machine does), and those callers are told every time."""
    names, victims = [f"u{n}" for n in range(CALLERS)], [f"v{n}" for n in range(held)]
    await crowd(ledger, names + victims)
    await rate(ledger, names, [])  # warm
    async with transaction(place) as theirs:
        for victim in victims:
            await ledger.commit(pay(victim, "bob", "USDT", "1"), connection=theirs)
        free, _ = await rate(ledger, names, [])
        beside, waits = await rate(ledger, names, victims)
    assert beside > free / 4, f"{beside:.0f}/s beside {held} held, {free:.0f}/s without"
    assert len(waits) >= held
    assert max(waits) < TOLD_S


async def in_a_siding(ledger: Ledger) -> None:
    """Wait until somebody is known to be blocked."""
    async with asyncio.timeout(TOLD_S):
        while not ledger.writer._blocked.held:  # noqa: ASYNC110 (nobody tells; locks are let go and taken again)
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@scenario
async def test_whoever_waits_is_answered_by_what_became_of_it(ledger: Ledger, place: Place, end: str) -> None:
    """Given a payment that waits, when the transaction ends, then it goes through, once, or there is no money left."""
    await seed(ledger, "alice", "10")
    async with transaction(place) as theirs:
        await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        entry = pay("alice", "carol", "USDT", "4", key="k")
        waiting = asyncio.create_task(outcome(ledger.commit(entry)))
        await in_a_siding(ledger)
        await theirs.execute(end)
        told = await waiting
    if end == "COMMIT":
        assert isinstance(told, InsufficientFunds)
    else:
        assert isinstance(told, Receipt)
        assert not told.replayed
        assert (await ledger.commit(entry)).envelope == told.envelope
    assert await balance(ledger, "carol") == ("0.000000" if end == "COMMIT" else "4.000000")


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
@scenario
async def test_the_same_key_inside_and_outside(ledger: Ledger, place: Place, end: str) -> None:
    """Told `Conflict` while nobody knows; afterwards it happens once, by the one or the other."""
    await seed(ledger, "alice", "10")
    entry = pay("alice", "bob", "USDT", "4", key="k")
    async with transaction(place) as theirs:
        await ledger.commit(entry, connection=theirs)
        async with asyncio.timeout(TOLD_S):
            assert isinstance(await outcome(ledger.commit(entry)), Conflict)
        waiting = asyncio.create_task(ledger.commit(entry))
        await asyncio.sleep(0.1)
        await theirs.execute(end)
        assert (await waiting).replayed is (end == "COMMIT")
    assert await balance(ledger, "bob") == "4.000000"


@scenario
async def test_who_pays_from_the_same_account_with_something_else_never_hangs(ledger: Ledger, place: Place) -> None:
    """Given a held posting, when others pay from its account, then each goes through or is told so."""
    await seed(ledger, "alice", "10", *["3"] * 20)
    async with transaction(place) as theirs:
        await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        entries = [pay("alice", "carol", "USDT", "0.5") for _ in range(20)]
        async with asyncio.timeout(TOLD_S):
            told = await all_at_once(ledger, entries)
            coming = await outcome(ledger.commit(deposit(BANK, "alice", "USDT", "1")))
    assert isinstance(coming, Receipt)
    assert all(isinstance(one, Receipt | Conflict) for one in told), told
    assert await balance(ledger, "carol") == f"{len(receipts(told)) / 2:.6f}"


@scenario
async def test_a_server_that_stops_statements_before_we_do_fails_nobody_else(own_place: Place) -> None:
    """Given a `statement_timeout` shorter than our own patience, then only who is blocked is told so."""
    connection = await asyncpg.connect(own_place.url)
    await connection.execute(
        f"ALTER DATABASE {await connection.fetchval('SELECT current_database()')} SET statement_timeout = '200ms'"
    )
    await connection.close()
    async with own_place.bursar() as bursar, transaction(own_place) as theirs:
        ledger = bursar.ledger
        names = [f"u{n}" for n in range(20)]
        await crowd(ledger, names)
        await seed(ledger, "alice", "10")
        await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        for _ in range(3):
            entries = [pay(name, "carol", "USDT", "1") for name in names]
            async with asyncio.timeout(TOLD_S):
                told = await all_at_once(ledger, [*entries, pay("alice", "carol", "USDT", "1")])
            assert len(receipts(told)) == len(names)
            assert isinstance(told[-1], Conflict)


@scenario
async def test_closing_waits_for_whoever_waits(place: Place) -> None:
    async with Bursar(place.url) as other, transaction(place) as theirs:
        await seed(other.ledger, "alice", "10")
        await other.ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        async with asyncio.timeout(TOLD_S):
            async with place.bursar() as bursar:
                waiting = asyncio.create_task(outcome(bursar.ledger.commit(pay("alice", "carol", "USDT", "1"))))
                await in_a_siding(bursar.ledger)
            assert waiting.done()
        assert isinstance(await waiting, Conflict)


@scenario
async def test_a_caller_who_has_gone_is_carried_out_once(ledger: Ledger, place: Place) -> None:
    """Cancelling a caller cancels nothing that it is part of (L18), also here."""
    await seed(ledger, "alice", "10")
    entry = pay("alice", "carol", "USDT", "4", key="k")
    async with transaction(place) as theirs:
        await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        waiting = asyncio.create_task(ledger.commit(entry))
        await in_a_siding(ledger)
        waiting.cancel()
        await theirs.execute("ROLLBACK")
        await ledger.writer.close()
    assert (await ledger.commit(entry)).replayed
    assert await balance(ledger, "carol") == "4.000000"


@scenario
async def test_a_server_that_has_no_connection_left(ledger: Ledger, place: Place) -> None:
    """Then those who are set aside go the same way as all others, slower: nobody fails for it."""
    names = [f"u{n}" for n in range(6)]
    await crowd(ledger, names)
    await seed(ledger, "alice", "10")
    assert isinstance(ledger.store, PostgresStore)
    alive = ledger.store._alive

    async def none_left(lane: Lane) -> asyncpg.Connection:
        if lane is Lane.BLOCKED:
            raise asyncpg.TooManyConnectionsError("sorry, too many clients already")
        return await alive(lane)

    async with transaction(place) as theirs:
        await ledger.commit(pay("alice", "bob", "USDT", "10"), connection=theirs)
        ledger.store._alive = none_left  # type: ignore[method-assign]
        entries = [pay(name, "carol", "USDT", "1") for name in [*names, "alice"]]
        async with asyncio.timeout(2 * TOLD_S):
            told = await all_at_once(ledger, entries)
        ledger.store._alive = alive  # type: ignore[method-assign]
    assert len(receipts(told)) == len(names)
    assert isinstance(told[-1], Conflict)
