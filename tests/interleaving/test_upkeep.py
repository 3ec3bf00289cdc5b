"""Upkeep against entries, in every order: compact, rebuild, the balance cache. No balance changes."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import Account, CappedOverdraft, Receipt, SystemAccount, UncappedOverdraft, deposit, pay

FOLDING = frozenset({"take_cache_parts", "add_to_cache"})
REBUILDING = frozenset({"bump_rules", "clear_live", "rebuild_live", "clear_cache", "clear_guarded", "insert_cache"})
WIDENING = frozenset({"bump_rules", "balances", "clear_cache_of", "insert_cache"})


def paying(source: str, target: str, amount: str, key: str) -> Operation:
    return lambda actor: actor.ledger.commit(pay(source, target, ASSET, amount, key=key))


def folding(actor: Actor) -> Any:
    return actor.ledger.writer.consolidate(above=1)


async def fee_parts(world: World) -> str:
    """A system account whose cached balance is a sum and two changes."""
    fees, a = await world.account("fees", policy=SystemAccount()), await world.account("a", "10")
    for amount in ("1", "2"):
        await world.ledger.writer.consolidate(above=1)
        for _ in range(2):
            await world.ledger.commit(pay(a, fees, ASSET, amount))
    return fees


def test_compact_against_pay(empty_postgres: str) -> None:
    """A payer is never refused because of a compaction."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "5", "3", "2", "1"), await world.account("b")
        return [paying(a, b, "9", world.key("k")), lambda actor: actor.ledger.compact(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, merged = outcomes
        assert isinstance(paid, Receipt)
        assert merged in (0, 2, 4)
        assert [await world.balance(name) for name in "ab"] == ["2.00", "9.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=10))


def test_compact_against_compact(empty_postgres: str) -> None:
    """The same postings are merged once."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "5", "3", "2")
        return [lambda actor: actor.ledger.compact(a)] * 2

    async def check(world: World, outcomes: list[Any]) -> None:
        assert sorted(outcomes) == [0, 3]
        assert await world.balance("a") == "10.00"

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=10))


def test_rebuild_against_commit(empty_postgres: str) -> None:
    """What was read before the rebuild is read again after it."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10", policy=CappedOverdraft("-10", ASSET))
        b = await world.account("b")
        return [paying(a, b, "15", world.key("k")), lambda actor: actor.ledger.rebuild()]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, live = outcomes
        assert isinstance(paid, Receipt)
        assert isinstance(live, int), live
        assert [await world.balance(name) for name in "ab"] == ["-5.00", "15.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | REBUILDING, at_least=20))


def test_consolidation_against_consolidation(empty_postgres: str) -> None:
    """Two consolidations take different parts: nothing is added twice."""

    async def prepare(world: World) -> list[Operation]:
        await fee_parts(world)
        return [folding, folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert all(isinstance(o, int) for o in outcomes), outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=FOLDING, at_least=5))


def test_consolidation_against_commit(empty_postgres: str) -> None:
    """A change written while the cache is consolidated is in it exactly once."""

    async def prepare(world: World) -> list[Operation]:
        fees = await fee_parts(world)
        return [paying(world.path("a"), fees, "1", world.key("k")), folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Receipt)
        assert isinstance(outcomes[1], int), outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | FOLDING, at_least=20))


def test_consolidation_against_commit_against_consolidation(empty_postgres: str) -> None:
    """Three at once."""

    async def prepare(world: World) -> list[Operation]:
        fees = await fee_parts(world)
        return [folding, paying(world.path("a"), fees, "1", world.key("k")), folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[1], Receipt)
        assert isinstance(outcomes[0], int), outcomes
        assert isinstance(outcomes[2], int), outcomes

    gates = frozenset({"batch_write_entries", "take_cache_parts"})
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=50))


def test_enabling_the_balance_cache_against_commit(empty_postgres: str) -> None:
    """A cache begins with the sum, and every commit after that is in it."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        head = await world.ledger.account(a)
        return [paying(a, b, "4", world.key("k")), lambda actor: actor.ledger.widen(head)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Receipt)
        assert outcomes[1] is None

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | WIDENING, at_least=20))


def test_enabling_the_balance_cache_against_consolidation(empty_postgres: str) -> None:
    """The cache is started over while it is consolidated: neither waits for the other for ever."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        head = await world.ledger.account(a)
        await world.ledger.widen(head)
        await world.ledger.writer.consolidate(above=1)
        for _ in range(2):
            await world.ledger.commit(deposit(BANK, a, ASSET, "1"))
        return [lambda actor: actor.ledger.widen(head), folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert outcomes[0] is None
        assert isinstance(outcomes[1], int), outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=WIDENING | FOLDING, at_least=4))


def test_rebuild_against_consolidation(empty_postgres: str) -> None:
    """The whole cache is rebuilt while it is consolidated."""

    async def prepare(world: World) -> list[Operation]:
        await fee_parts(world)
        return [lambda actor: actor.ledger.rebuild(), folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], int), outcomes
        assert isinstance(outcomes[1], int), outcomes

    gates = frozenset({"bump_rules", "clear_cache", "insert_cache"}) | FOLDING
    asyncio.run(every_order(empty_postgres, prepare, check, gates=gates, at_least=4))


def test_new_kind_of_account_against_consolidation(empty_postgres: str) -> None:
    """An account becomes a system account (its cache starts) while the cache is consolidated."""

    async def prepare(world: World) -> list[Operation]:
        fees = await fee_parts(world)
        return [lambda actor: actor.ledger.change_policy(fees, UncappedOverdraft()), folding]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Account), outcomes
        assert isinstance(outcomes[1], int), outcomes

    asyncio.run(every_order(empty_postgres, prepare, check, gates=WIDENING | FOLDING, at_least=4))
