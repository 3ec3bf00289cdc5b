"""Entries in the user's own transaction, in every order with other transactions: together or not at all, and an event
is never skipped, however long its transaction stays open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import Account, CappedOverdraft, Entry, Receipt, deposit, pay
from bursar.model.errors import AccountFrozen, Conflict, FloorExceeded, InsufficientFunds

ENDING = GROUP | {"ROLLBACK"}


class RolledBackError(Exception):
    """The user changed their mind."""


def in_own_transaction(entries: list[Entry], *, commit: bool, isolation: str = "read_committed") -> Operation:
    async def work(actor: Actor) -> list[Receipt]:
        async with actor.connection.transaction(isolation=isolation):
            receipts = [await actor.ledger.commit(entry, connection=actor.connection) for entry in entries]
            if not commit:
                await actor.gate("ROLLBACK")
                raise RolledBackError
            return receipts

    return work


def paying(source: str, target: str, amount: str, key: str) -> Operation:
    return lambda actor: actor.ledger.commit(pay(source, target, ASSET, amount, key=key))


@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read", "serializable"])
def test_own_transaction_against_spend(empty_postgres: str, commit: bool, isolation: str) -> None:
    """Both want the same posting: the user's entry happens if and when the user commits."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        b, c = await world.account("b"), await world.account("c")
        mine = in_own_transaction([pay(a, b, ASSET, "10", key=world.key("m"))], commit=commit, isolation=isolation)
        return [mine, paying(a, c, "10", world.key("k"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        mine, other = outcomes
        balances = [await world.balance(name) for name in "abc"]
        if isinstance(mine, list):
            assert isinstance(other, InsufficientFunds), repr(other)
            assert balances == ["0.00", "10.00", "0.00"]
        else:
            # Under a fixed snapshot a conflict can't be retried inside the same transaction.
            assert isinstance(mine, RolledBackError | InsufficientFunds | Conflict), repr(mine)
            assert isinstance(other, Receipt), repr(other)
            assert balances == ["0.00", "0.00", "10.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=ENDING, at_least=5))


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read"])
def test_own_transaction_against_freeze(empty_postgres: str, isolation: str) -> None:
    """A freeze waits for the user's transaction, or the transaction sees the freeze; also on an old snapshot."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        mine = in_own_transaction([pay(a, b, ASSET, "4", key=world.key("m"))], commit=True, isolation=isolation)
        return [mine, lambda actor: actor.ledger.freeze(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        mine, frozen = outcomes
        assert isinstance(frozen, Account)
        if world.stage.commits[0] == "b":
            assert isinstance(mine, AccountFrozen | Conflict), repr(mine)
        else:
            assert isinstance(mine, list)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=ENDING | {"bump_rules"}, at_least=4))


@pytest.mark.parametrize("isolation", ["read_committed", "repeatable_read"])
def test_own_transaction_against_floor(empty_postgres: str, isolation: str) -> None:
    """Write skew from a transaction with an old snapshot: never below the floor."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", policy=CappedOverdraft("-10", ASSET)), await world.account("b")
        mine = in_own_transaction([pay(a, b, ASSET, "6", key=world.key("m"))], commit=True, isolation=isolation)
        return [mine, paying(a, b, "6", world.key("k"))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert await world.balance("a") == "-6.00"
        refused = [o for o in outcomes if isinstance(o, Exception)]
        assert len(refused) == 1
        assert isinstance(refused[0], FloorExceeded | Conflict)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=ENDING, at_least=5))


def test_own_transaction_with_the_same_key(empty_postgres: str) -> None:
    """The same key inside and outside: once, whether the user's transaction is rolled back or not."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        entry = pay(a, b, ASSET, "4", key=world.key("k"))
        mine = in_own_transaction([entry], commit=bool(world.stage.scenes % 2))
        return [mine, lambda actor: actor.ledger.commit(entry)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[1], Receipt)
        assert await world.balance("b") == "4.00"

    asyncio.run(every_order(empty_postgres, prepare, check, gates=ENDING, at_least=5))


def test_entries_in_one_transaction_build_on_each_other(empty_postgres: str) -> None:
    """The second spends what the first created, while others pay into the same account."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a"), await world.account("b")
        mine = [deposit(BANK, a, ASSET, "5", key=world.key("m1")), pay(a, b, ASSET, "5", key=world.key("m2"))]
        other = deposit(BANK, a, ASSET, "1", key=world.key("k"))

        async def receive(actor: Actor) -> Receipt:
            actor.ledger.writer.cache.pessimistic = 1  # or it would read nothing
            return await actor.ledger.commit(other)

        return [in_own_transaction(mine, commit=True), receive]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], list)
        assert isinstance(outcomes[1], Receipt)
        assert [await world.balance(name) for name in "ab"] == ["1.00", "5.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=ENDING, at_least=20))


def test_two_transactions_in_opposite_order(empty_postgres: str) -> None:
    """Two users who take several locks in their own transactions may deadlock: one gets `Conflict`, nothing is half
    done."""

    async def prepare(world: World) -> list[Operation]:
        a, b, c = await world.account("a", "10"), await world.account("b", "10"), await world.account("c")

        def both(name: str, first: str, second: str) -> Operation:
            entries = [pay(first, c, ASSET, "10", key=world.key(name + "1"))]
            entries += [pay(second, c, ASSET, "10", key=world.key(name + "2"))]
            return in_own_transaction(entries, commit=True)

        return [both("x", a, b), both("y", b, a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert sum(isinstance(o, list) for o in outcomes) == 1
        (lost,) = [o for o in outcomes if not isinstance(o, list)]
        assert isinstance(lost, Conflict | InsufficientFunds), repr(lost)
        assert [await world.balance(name) for name in "abc"] == ["0.00", "0.00", "20.00"]

    gates = frozenset({"batch_write_entries"})
    asyncio.run(every_order(empty_postgres, prepare, check, gates=gates, deadlocks=True, at_least=5))


def test_a_reader_never_skips_what_a_long_transaction_commits_late(empty_postgres: str) -> None:
    """Events of a long-open transaction and of two quick ones: the follower, who looks at every step, sees them all."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a")
        mine = in_own_transaction([deposit(BANK, a, ASSET, "1", key=world.key("m"))], commit=True)
        quick = [deposit(BANK, a, ASSET, "2", key=world.key(f"k{i}")) for i in range(2)]
        return [mine, lambda actor: actor.ledger.commit(quick[0]), lambda actor: actor.ledger.commit(quick[1])]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert not [o for o in outcomes if isinstance(o, Exception)]

    gates = frozenset({"batch_write_entries"})
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=90))
