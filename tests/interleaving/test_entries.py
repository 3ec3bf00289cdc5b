"""Entry against entry, in every order: one posting, one key, one floor, and batches that take the same locks in
opposite order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, Operation, World, every_order

from bursar import CappedOverdraft, Entry, Movement, Receipt, pay
from bursar.model.entries import Intent, Leg
from bursar.model.errors import FloorExceeded, InsufficientFunds, KeyReused
from bursar.writer import Change, ChangeResult

ORDERS_OF_TWO_COMMITS = 20  # read, write, COMMIT of each, if none waits or conflicts


class RolledBackError(Exception):
    """The user changed their mind."""


def paying(source: str, target: str, amount: str, key: str) -> Operation:
    return lambda actor: actor.ledger.commit(pay(source, target, ASSET, amount, key=key))


def receipts(outcomes: list[Any]) -> list[Receipt]:
    return [o for o in outcomes if isinstance(o, Receipt)]


def test_disjoint_commits_never_get_in_each_others_way(empty_postgres: str) -> None:
    """Disjoint commits all succeed."""

    async def prepare(world: World) -> list[Operation]:
        a, b, c, d = [await world.account(name, "10") for name in "abcd"]
        return [paying(a, c, "4", world.key("one")), paying(b, d, "4", world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert len(receipts(outcomes)) == 2
        assert world.stage.script.count("a:batch_read") == world.stage.script.count("b:batch_read") == 1

    assert asyncio.run(every_order(empty_postgres, prepare, check)) == ORDERS_OF_TWO_COMMITS


def test_two_spend_one_posting(empty_postgres: str) -> None:
    """Spend against spend of one posting: one winner, the other is refused."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        b, c = await world.account("b"), await world.account("c")
        return [paying(a, b, "10", world.key("one")), paying(a, c, "10", world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert len(receipts(outcomes)) == 1
        (refused,) = [o for o in outcomes if not isinstance(o, Receipt)]
        assert isinstance(refused, InsufficientFunds)
        assert sorted([await world.balance(name) for name in "abc"]) == ["0.00", "0.00", "10.00"]

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_two_share_one_posting(empty_postgres: str) -> None:
    """Both can be paid out of one posting, the second from the first one's change."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        b, c = await world.account("b"), await world.account("c")
        return [paying(a, b, "4", world.key("one")), paying(a, c, "5", world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert len(receipts(outcomes)) == 2
        assert [await world.balance(name) for name in "abc"] == ["1.00", "4.00", "5.00"]

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_two_draw_on_one_floor(empty_postgres: str) -> None:
    """Write skew on a capped overdraft: each alone is above the floor, both together are not."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", policy=CappedOverdraft("-10", ASSET))
        b, c = await world.account("b"), await world.account("c")
        return [paying(a, b, "6", world.key("one")), paying(a, c, "6", world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if not isinstance(o, Receipt)] == [FloorExceeded]
        assert await world.balance("a") == "-6.00"

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_two_draw_on_one_floor_with_different_postings(empty_postgres: str) -> None:
    """Write skew proper: no posting in common, only the floor. One pays in cash, the other on credit."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", policy=CappedOverdraft("-10", ASSET))
        b = await world.account("b", "3")
        await world.ledger.commit(pay(a, b, ASSET, "1", key=world.key("first")))  # the floor's row is there
        one = paying(b, a, "3", world.key("in"))
        return [one, paying(a, b, "12", world.key("out"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Receipt)
        first = world.stage.commits[0]
        assert isinstance(outcomes[1], FloorExceeded | Receipt)
        if isinstance(outcomes[1], Receipt):
            assert first == "a", "12 can be paid only after 3 came in"

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 4


def test_two_floors_in_opposite_order(empty_postgres: str) -> None:
    """Two credit accounts, moved by both entries, named in opposite order: never below, and no deadlock."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", policy=CappedOverdraft("-10", ASSET))
        b = await world.account("b", policy=CappedOverdraft("-10", ASSET))
        c = await world.account("c")
        if world.stage.scenes % 2:  # with and without rows of guarded balances
            await world.ledger.commit(pay(a, c, ASSET, "1"))
            await world.ledger.commit(pay(c, a, ASSET, "1"))

        def both(first: str, second: str, key: str) -> Operation:
            moves = (Movement(first, c, ASSET, "6"), Movement(second, c, ASSET, "6"))
            return lambda actor: actor.ledger.commit(Entry(movements=moves, key=key))

        return [both(a, b, world.key("one")), both(b, a, world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if not isinstance(o, Receipt)] == [FloorExceeded]
        assert [await world.balance(name) for name in "abc"] == ["-6.00", "-6.00", "12.00"]

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_different_floors_do_not_meet(empty_postgres: str) -> None:
    """Two different credit accounts pay one target: neither waits, neither tries twice."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", policy=CappedOverdraft("-10", ASSET))
        b = await world.account("b", policy=CappedOverdraft("-10", ASSET))
        c = await world.account("c")
        return [paying(a, c, "10", world.key("one")), paying(b, c, "10", world.key("two"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert len(receipts(outcomes)) == 2
        assert await world.balance("c") == "20.00"

    assert asyncio.run(every_order(empty_postgres, prepare, check)) == ORDERS_OF_TWO_COMMITS


def test_one_key_one_intent(empty_postgres: str) -> None:
    """Same key, same intent, at once: it happens once and both get the same receipt."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        return [paying(a, b, "3", world.key("k")), paying(a, b, "3", world.key("k"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = receipts(outcomes)
        assert (one.envelope, one.id) == (two.envelope, two.id)
        assert {one.replayed, two.replayed} == {False, True}
        assert await world.balance("b") == "3.00"

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_one_key_two_intents(empty_postgres: str) -> None:
    """Same key, other intent, no posting in common: one happens, the other is refused."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b", "10")
        c = await world.account("c")
        return [paying(a, c, "3", world.key("k")), paying(b, c, "4", world.key("k"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if not isinstance(o, Receipt)] == [KeyReused]
        assert await world.balance("c") in ("3.00", "4.00")

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_one_key_thrice(empty_postgres: str) -> None:
    """Three senders of one key."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        return [paying(a, b, "3", world.key("k"))] * 3

    async def check(world: World, outcomes: list[Any]) -> None:
        assert len({r.envelope for r in receipts(outcomes)}) == 1
        assert len(receipts(outcomes)) == 3
        assert await world.balance("b") == "3.00"

    gates = frozenset({"batch_write_entries"})
    assert asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates)) >= 10


def intent(key: str, source: str, target: str, minor: int) -> Intent:
    return Intent(scope="user", key=key, legs=(Leg(source, target, ASSET, minor),))


def test_two_batches_with_the_same_keys_and_postings_in_opposite_order(empty_postgres: str) -> None:
    """A deadlock attempt: same keys, same postings, opposite order. Sorted locks make it a queue."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10", "9", "8"), await world.account("b", "10", "9", "8")
        c = await world.account("c")
        intents = [intent(world.key(f"k{i}"), a if i % 2 else b, c, 900) for i in range(4)]

        def together(mine: list[Intent]) -> Operation:
            return lambda actor: actor.ledger.writer.apply(Change(tuple(mine)))

        return [together(intents), together(intents[::-1])]

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = outcomes
        assert sorted(r.envelope for r in one.receipts) == sorted(r.envelope for r in two.receipts)
        assert await world.balance("c") == "36.00"

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


def test_two_batches_that_share_postings_but_no_keys(empty_postgres: str) -> None:
    """A deadlock attempt without keys in common: each needs what the other is spending, in opposite order."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b", "10")
        c = await world.account("c")

        def together(name: str, first: str, second: str) -> Operation:
            intents = (intent(world.key(name + "1"), first, c, 500), intent(world.key(name + "2"), second, c, 500))
            return lambda actor: actor.ledger.writer.apply(Change(intents))

        return [together("x", a, b), together("y", b, a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert all(isinstance(o, ChangeResult) for o in outcomes)
        assert [await world.balance(name) for name in "abc"] == ["0.00", "0.00", "20.00"]

    assert asyncio.run(every_order(empty_postgres, prepare, check)) >= 10


@pytest.mark.parametrize("locks", ["keys", "postings", "floors"])
def test_two_batches_stopped_between_their_locks(empty_postgres: str, locks: str) -> None:
    """A third holds what both need in the middle. Taken in sorted order, that comes first, and the rest is free.

    A batch takes its locks within one statement, so this is the only way to stop it between two of them.
    """

    async def prepare(world: World) -> list[Operation]:
        policy = CappedOverdraft("-10", ASSET) if locks == "floors" else None
        names = [await world.account(name, "10", policy=policy) for name in ("m", "x", "y")]  # m: the lowest numbers
        target = await world.account("c")
        spare = await world.account("spare", "10")
        m, x, y = names
        middle = pay(
            spare if locks == "keys" else m, target, ASSET, "1", key=world.key("1m" if locks == "keys" else "t")
        )

        async def holding(actor: Actor) -> None:
            async with actor.connection.transaction():
                await actor.ledger.commit(middle, connection=actor.connection)
                await actor.gate("ROLLBACK")
                raise RolledBackError

        def group(who: str, order: list[str]) -> Operation:
            own = "" if locks == "keys" else who
            keys = {x: f"2x{own}", m: f"1m{own}", y: f"3y{own}"}
            intents = tuple(intent(world.key(keys[path]), path, target, 300) for path in order)
            return lambda actor: actor.ledger.writer.apply(Change(intents))

        return [holding, group("a", [x, m, y]), group("b", [y, m, x])]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert all(isinstance(o, ChangeResult) for o in outcomes[1:]), outcomes
        assert await world.balance("c") == ("9.00" if locks == "keys" else "18.00")

    gates = frozenset({"batch_write_entries", "ROLLBACK"})
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=20))


def test_a_batch_is_decided_again_with_its_refusals(empty_postgres: str) -> None:
    """A refusal decided in a batch that conflicts is decided again: money that came in meanwhile counts (L17)."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")

        async def two(actor: Actor) -> list[Any]:
            await actor.ledger.known_assets(ASSET)  # so that both reach the writer at once and share a batch
            first = actor.ledger.commit(pay(a, b, ASSET, "4", key=world.key("one")))
            second = actor.ledger.commit(pay(b, a, ASSET, "9", key=world.key("two")))
            return list(await asyncio.gather(first, second, return_exceptions=True))

        return [two, paying(a, b, "6", world.key("other"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        (first, second), other = outcomes
        assert isinstance(first, Receipt)
        if isinstance(other, InsufficientFunds):
            assert isinstance(second, InsufficientFunds), "10 - 4 + 9 would have been enough for 6"
        elif world.stage.commits[0] == "b":
            assert isinstance(second, Receipt), "b had 6 + 4 when the group was written"
        else:
            assert isinstance(second, InsufficientFunds), "b had only 4"

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP)) >= 10
