"""The order of entries where several programs commit: the entry with the later number may be committed first.

A follower that goes on after the last envelope it has seen misses none, and a history is in one order, newest first,
whichever page of it is read (L16, decision 5).
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
from tests.interleaving.stage import GROUP
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import Bursar, ExternalAccount, Receipt, deposit

NUMBERED = GROUP | {"batch_numbers"}  # a number is taken, and only later is anything written under it


def paying_in(account: str, key: str) -> Operation:
    return lambda actor: actor.ledger.commit(deposit(BANK, account, ASSET, "1", key=key))


class Follower:
    """Reads envelopes on from the last one it has seen, in the middle of everything."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.after = 0
        self.seen: list[int] = []

    async def look(self) -> None:
        while page := await self.world.ledger.envelopes(after=self.after, limit=3):
            self.seen += [view.envelope for view in page]
            self.after = page[-1].envelope


async def announced(connection: asyncpg.Connection) -> list[int]:
    """All envelopes in the order of their events."""
    rows = await connection.fetch("SELECT subject FROM bursar.events WHERE kind = 1 ORDER BY epoch, xid, seq")
    return [row[0] for row in rows]


def test_follower_of_envelopes_never_skips_one(empty_postgres: str) -> None:
    followers: list[Follower] = []
    overtaken = 0

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a")
        if not followers:
            follower, look = Follower(world), world.look

            async def both() -> None:
                await look()
                await follower.look()

            world.look = both  # type: ignore[method-assign]
            followers.append(follower)
        return [paying_in(a, world.key("one")), paying_in(a, world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        nonlocal overtaken
        assert all(isinstance(outcome, Receipt) for outcome in outcomes)
        await followers[0].look()
        seen = followers[0].seen
        assert seen == await announced(world.stage.observer), world.stage.script
        overtaken += seen != sorted(seen)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=NUMBERED, at_least=10))
    assert overtaken, "the later number was never committed first: nothing was tried"


def test_history_is_in_the_order_of_the_events(empty_postgres: str) -> None:
    """In every order of two commits; read at once, and line by line."""
    by_number = 0

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "5")
        return [paying_in(a, world.key("one")), paying_in(a, world.key("two"))]

    async def check(world: World, _outcomes: list[Any]) -> None:
        nonlocal by_number
        a = world.path("a")
        whole = [line.envelope for line in await world.ledger.history(a)]
        ours = set(whole)
        newest_first = [number for number in reversed(await announced(world.stage.observer)) if number in ours]
        assert whole == newest_first, world.stage.script
        paged: list[int] = []
        while page := await world.ledger.history(a, before=paged[-1] if paged else None, limit=1):
            paged.append(page[0].envelope)
        assert paged == newest_first, world.stage.script
        by_number += whole == sorted(whole, reverse=True)

    scenes = asyncio.run(every_order(empty_postgres, prepare, check, gates=NUMBERED, at_least=10))
    assert by_number < scenes, "the later number was never committed first: nothing was tried"


def test_follower_waits_for_an_entry_in_an_open_transaction(empty_postgres: str) -> None:
    """A caller's own transaction takes an earlier number and commits last."""

    async def scene() -> None:
        async with Bursar(empty_postgres) as b:
            await b.ledger.create_asset(ASSET, 2)
            await b.ledger.create_account(BANK, policy=ExternalAccount())
            for name in ("early", "late"):
                await b.ledger.create_account(name)
            connection = await asyncpg.connect(empty_postgres)
            try:
                async with connection.transaction():
                    first = await b.ledger.commit(deposit(BANK, "early", ASSET, "1"), connection=connection)
                    second = await b.ledger.commit(deposit(BANK, "late", ASSET, "1"))
                    assert first.envelope < second.envelope
                    assert await b.ledger.envelopes() == []
                    assert [line.envelope for line in await b.ledger.history("late")] == [second.envelope]
            finally:
                await connection.close()
            found = [view.envelope for view in await b.ledger.envelopes()]
            assert found == [first.envelope, second.envelope]

    asyncio.run(scene())
