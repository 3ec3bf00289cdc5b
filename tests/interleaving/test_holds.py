"""Holds and reversals against each other, in every order: a hold ends once, an envelope is reversed once."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import Hold, Receipt, deposit, pay
from bursar.model.entries import HoldState
from bursar.model.errors import HoldClosed, HoldTooSmall, InsufficientFunds

HOLDS = GROUP | {"holds_by_id"}
TIME_IS_UP = "time is up"


async def held(world: World, amount: str = "10") -> Hold:
    a = await world.account("a", "10")
    await world.account("shop")
    return await world.ledger.authorize(a, ASSET, amount)


def confirming(world: World, hold: Hold, amount: str | None = None, key: str = "c") -> Operation:
    shop, key = world.path("shop"), world.key(key)
    return lambda actor: actor.ledger.confirm(hold.id, shop, amount, key=key)


def expiring(hold: Hold) -> Operation:
    """The hold has expired, and the expiry job runs."""

    async def reap(actor: Actor) -> Any:
        await actor.gate(TIME_IS_UP)
        await actor.real.execute("UPDATE bursar.holds SET expires_us = 1 WHERE id = $1", hold.id)
        return await actor.ledger.expire_holds()

    return reap


async def check_ended_once(world: World, hold: Hold, outcomes: list[Any]) -> None:
    ended = await world.ledger.hold(hold.id)
    assert len(world.stage.commits) == 1, "a hold ends once"
    paid, left = await world.balance("shop"), await world.balance("a")
    if ended.state is HoldState.CONFIRMED:
        assert (paid, left) == ("10.00", "0.00")
    else:
        assert ended.state in (HoldState.VOIDED, HoldState.EXPIRED)
        assert (paid, left) == ("0.00", "10.00")
    for outcome in outcomes:
        assert isinstance(outcome, Receipt | HoldClosed | list), repr(outcome)


def test_confirm_against_void(empty_postgres: str) -> None:
    """Confirm and void are one compare-and-set on the hold (L21)."""
    holds: list[Hold] = []

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        holds.append(hold)
        return [confirming(world, hold), lambda actor: actor.ledger.void(hold.id)]

    async def check(world: World, outcomes: list[Any]) -> None:
        await check_ended_once(world, holds[-1], outcomes)
        assert sum(isinstance(o, Receipt) for o in outcomes) == 1

    asyncio.run(every_order(empty_postgres, prepare, check, gates=HOLDS, at_least=20))


def test_confirm_against_void_against_expiry(empty_postgres: str) -> None:
    """Three ways to end it, one of them happens."""
    holds: list[Hold] = []

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        holds.append(hold)
        return [confirming(world, hold), lambda actor: actor.ledger.void(hold.id), expiring(hold)]

    async def check(world: World, outcomes: list[Any]) -> None:
        await check_ended_once(world, holds[-1], outcomes)

    gates = frozenset({"batch_write_entries", TIME_IS_UP, "holds_due"})
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=40))


def test_void_against_void_against_expiry(empty_postgres: str) -> None:
    """Given back once; the caller who asked for what has happened gets its receipt."""
    holds: list[Hold] = []

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        holds.append(hold)
        return [lambda actor: actor.ledger.void(hold.id)] * 2 + [expiring(hold)]

    async def check(world: World, outcomes: list[Any]) -> None:
        await check_ended_once(world, holds[-1], outcomes)

    gates = frozenset({"batch_write_entries", TIME_IS_UP, "holds_due"})
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=40))


def test_confirm_in_part_against_confirm_in_part(empty_postgres: str) -> None:
    """Two parts that do not fit together: one is refused, and what remains is right."""
    holds: list[Hold] = []

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        holds.append(hold)
        return [confirming(world, hold, "6", "one"), confirming(world, hold, "5", "two")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if not isinstance(o, Receipt)] == [HoldTooSmall]
        hold = await world.ledger.hold(holds[-1].id)
        assert hold.state is HoldState.OPEN
        paid = await world.balance("shop")
        assert str(hold.remaining.decimal) == {"6.00": "4.00", "5.00": "5.00"}[paid]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP, at_least=10))


def test_confirm_in_part_against_void(empty_postgres: str) -> None:
    """The part is paid and the rest given back, or all is given back."""
    holds: list[Hold] = []

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        holds.append(hold)
        return [confirming(world, hold, "6"), lambda actor: actor.ledger.void(hold.id)]

    async def check(world: World, outcomes: list[Any]) -> None:
        confirmed, voided = outcomes
        assert isinstance(voided, Receipt)
        paid = "6.00" if isinstance(confirmed, Receipt) else "0.00"
        assert await world.balance("shop") == paid
        assert await world.balance("a") == ("4.00" if paid == "6.00" else "10.00")

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP, at_least=10))


def test_one_confirmation_sent_twice(empty_postgres: str) -> None:
    """Same key: confirmed once, both get the receipt."""

    async def prepare(world: World) -> list[Operation]:
        hold = await held(world)
        return [confirming(world, hold), confirming(world, hold)]

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = outcomes
        assert isinstance(one, Receipt), repr(one)
        assert isinstance(two, Receipt), repr(two)
        assert one.envelope == two.envelope
        assert await world.balance("shop") == "10.00"

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=10))


def test_authorize_against_close(empty_postgres: str) -> None:
    """A closed account has no open hold."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        return [lambda actor: actor.ledger.authorize(a, ASSET, "10"), lambda actor: actor.ledger.close_empty(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Hold)
        assert not isinstance(outcomes[1], Receipt)

    gates = GROUP | {"bump_rules", "balances", "holds_of_account"}
    asyncio.run(every_order(empty_postgres, prepare, check, gates=gates, at_least=5))


def test_reverse_against_spend(empty_postgres: str) -> None:
    """The money is given back or spent, never both."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a"), await world.account("b")
        receipt = await world.ledger.commit(deposit(BANK, a, ASSET, "10"))
        spending = pay(a, b, ASSET, "10", key=world.key("k"))
        return [lambda actor: actor.ledger.commit(spending), lambda actor: actor.ledger.reverse(receipt.envelope)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if not isinstance(o, Receipt)] == [InsufficientFunds]
        spent = isinstance(outcomes[0], Receipt)
        assert [await world.balance(name) for name in "ab"] == ["0.00", "10.00" if spent else "0.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | {"live_by_id"}, at_least=10))


def test_reverse_by_value_against_spend(empty_postgres: str) -> None:
    """Where the account has other money, both happen (L22)."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        receipt = await world.ledger.commit(deposit(BANK, a, ASSET, "12"))
        spending = pay(a, b, ASSET, "10", key=world.key("k"))
        return [lambda actor: actor.ledger.commit(spending), lambda actor: actor.ledger.reverse(receipt.envelope)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert all(isinstance(o, Receipt) for o in outcomes), outcomes
        assert [await world.balance(name) for name in "ab"] == ["0.00", "10.00"]

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=10))


def test_reverse_against_reverse(empty_postgres: str) -> None:
    """Reverse once and again: one envelope, one receipt."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "5")
        receipt = await world.ledger.commit(deposit(BANK, a, ASSET, "10"))
        return [lambda actor: actor.ledger.reverse(receipt.envelope)] * 2

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = outcomes
        assert isinstance(one, Receipt), repr(one)
        assert isinstance(two, Receipt), repr(two)
        assert one.envelope == two.envelope
        assert await world.balance("a") == "5.00"

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=10))
