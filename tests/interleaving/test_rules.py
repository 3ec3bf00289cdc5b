"""Rules against entries, in every order: freeze, close, new policy, new account; and rules against each other.

What has returned holds: after the COMMIT of a freeze or a close no entry of that account is committed, and an entry
that was validated before it is decided again.
"""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import pytest
from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import (
    Account,
    AccountStatus,
    CappedOverdraft,
    ExternalAccount,
    NoOverdraft,
    Receipt,
    UncappedOverdraft,
    deposit,
    pay,
)
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    AccountNotEmpty,
    AlreadyExists,
    FloorExceeded,
    InsufficientFunds,
    Refusal,
    UnknownAccount,
)

RULES = GROUP | {"bump_rules", "insert_account"}


def paying(source: str, target: str, amount: str, key: str) -> Operation:
    return lambda actor: actor.ledger.commit(pay(source, target, ASSET, amount, key=key))


@pytest.mark.parametrize("side", ["payer", "payee"])
def test_freeze_against_commit(empty_postgres: str, side: str) -> None:
    """Freeze during commit: whichever COMMIT comes first decides."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        frozen = a if side == "payer" else b
        return [paying(a, b, "4", world.key("k")), lambda actor: actor.ledger.freeze(frozen)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, frozen = outcomes
        assert isinstance(frozen, Account)
        assert frozen.status is AccountStatus.FROZEN
        if world.stage.commits[0] == "b":
            assert isinstance(paid, AccountFrozen)
        else:
            assert isinstance(paid, Receipt)
            assert await world.pinned(paid, "a" if side == "payer" else "b") == 1

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES, at_least=8))


def test_unfreeze_against_commit(empty_postgres: str) -> None:
    """An entry committed after the unfreeze is pinned to the version that allows it."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        await world.ledger.freeze(a)
        return [paying(a, b, "4", world.key("k")), lambda actor: actor.ledger.unfreeze(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, _ = outcomes
        if isinstance(paid, Receipt):
            assert world.stage.commits == ["b", "a"]
            assert await world.pinned(paid, "a") == 3
        else:
            assert isinstance(paid, AccountFrozen)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES, at_least=4))


CLOSING = RULES | {"balances", "holds_of_account"}


async def close_against_deposit(url: str, *, reads: bool) -> None:
    """An account that only receives is not read, unless the writer is pessimistic."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a")
        incoming = deposit(BANK, a, ASSET, "7", key=world.key("k"))

        async def receive(actor: Actor) -> Receipt:
            actor.ledger.writer.cache.pessimistic = int(reads)
            return await actor.ledger.commit(incoming)

        return [receive, lambda actor: actor.ledger.close_empty(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, closed = outcomes
        if isinstance(closed, Account):
            assert isinstance(paid, AccountClosed), "money went into a closed account"
            assert await world.balance("a") == "0.00"
        else:
            assert isinstance(closed, AccountNotEmpty)
            assert isinstance(paid, Receipt)

    await every_order(url, prepare, check, gates=CLOSING, at_least=15 if reads else 7)


@pytest.mark.parametrize("reads", [False, True])
def test_close_against_incoming(empty_postgres: str, reads: bool) -> None:
    """Close against an incoming commit: a closed account stays empty."""
    asyncio.run(close_against_deposit(empty_postgres, reads=reads))


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("isolation", ["repeatable read", "serializable"])
def test_close_against_incoming_where_the_database_defaults_to_another_isolation(
    fresh_postgres: str, isolation: str, reads: bool
) -> None:
    """A snapshot taken before the wait for commits in flight would show the account still empty."""

    async def body() -> None:
        connection = await asyncpg.connect(fresh_postgres)
        name = await connection.fetchval("SELECT current_database()")
        await connection.execute(f"ALTER DATABASE {name} SET default_transaction_isolation = '{isolation}'")
        await connection.close()
        await close_against_deposit(fresh_postgres, reads=reads)

    asyncio.run(body())


def test_close_with_netting_against_incoming(empty_postgres: str) -> None:
    """`close` first merges what cancels out (L7); money that arrives in between stops it."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "5", policy=UncappedOverdraft())
        b = await world.account("b")
        await world.ledger.commit(pay(a, b, ASSET, "5"))
        incoming = pay(b, a, ASSET, "2", key=world.key("k"))
        return [lambda actor: actor.ledger.commit(incoming), lambda actor: actor.ledger.close(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, closed = outcomes
        assert isinstance(closed, Account) is isinstance(paid, AccountClosed)
        assert isinstance(paid, Receipt | AccountClosed)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES, at_least=10))


def test_new_floor_against_commit(empty_postgres: str) -> None:
    """Policy change to capped against a commit: the guarded balance is right from its first moment."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", policy=UncappedOverdraft()), await world.account("b")
        await world.ledger.commit(pay(a, b, ASSET, "2"))
        capped = CappedOverdraft("-10", ASSET)
        return [paying(a, b, "8", world.key("k")), lambda actor: actor.ledger.change_policy(a, capped)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert isinstance(outcomes[0], Receipt)
        assert isinstance(outcomes[1], Account)
        assert await world.balance("a") == "-10.00"
        with pytest.raises(FloorExceeded):
            await world.ledger.commit(pay(world.path("a"), world.path("b"), ASSET, "0.01"))

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES | {"balances", "put_head"}, at_least=15))


def test_overdraft_taken_away_against_commit(empty_postgres: str) -> None:
    """No account without overdraft ever owns a negative posting, whichever comes first."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", policy=CappedOverdraft("-10", ASSET)), await world.account("b")
        return [paying(a, b, "8", world.key("k")), lambda actor: actor.ledger.change_policy(a, NoOverdraft())]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, changed = outcomes
        if isinstance(changed, Account):
            assert isinstance(paid, InsufficientFunds)
        else:
            assert isinstance(changed, AccountNotEmpty)
            assert isinstance(paid, Receipt)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES | {"balances"}, at_least=15))


def test_two_rules_of_one_account(empty_postgres: str) -> None:
    """Freeze against a new policy: both stand, no version is lost."""

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a")
        policy = CappedOverdraft("-10", ASSET)
        return [lambda actor: actor.ledger.freeze(a), lambda actor: actor.ledger.change_policy(a, policy)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert all(isinstance(o, Account) for o in outcomes)
        head = await world.ledger.account(world.path("a"))
        assert (head.version, head.status) == (3, AccountStatus.FROZEN)
        assert head.policy == CappedOverdraft("-10", ASSET)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=RULES, at_least=4))


CREATING = GROUP | {"heads_by_path", "insert_account", "insert_event"}


def test_an_account_is_created_twice(empty_postgres: str) -> None:
    """Account creation race: one account, one event, both callers get it."""

    async def prepare(world: World) -> list[Operation]:
        path = world.path("new")
        return [lambda actor: actor.ledger.create_account(path)] * 2

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = outcomes
        assert isinstance(one, Account)
        assert isinstance(two, Account)
        assert one.id == two.id
        assert len(await world.ledger.account_history(world.path("new"))) == 1

    asyncio.run(every_order(empty_postgres, prepare, check, gates=CREATING, at_least=10))


def test_an_account_is_created_twice_with_different_policies(empty_postgres: str) -> None:
    """The second one gets `AlreadyExists`."""

    async def prepare(world: World) -> list[Operation]:
        path = world.path("new")
        return [
            lambda actor: actor.ledger.create_account(path),
            lambda actor: actor.ledger.create_account(path, policy=ExternalAccount()),
        ]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert [type(o) for o in outcomes if isinstance(o, Refusal)] == [AlreadyExists]

    asyncio.run(every_order(empty_postgres, prepare, check, gates=CREATING, at_least=10))


def test_an_account_is_created_while_it_is_paid(empty_postgres: str) -> None:
    """That an account does not exist is never remembered."""

    async def prepare(world: World) -> list[Operation]:
        a, new = await world.account("a", "10"), world.path("new")

        return [paying(a, new, "4", world.key("k")), lambda actor: actor.ledger.create_account(new)]

    async def check(world: World, outcomes: list[Any]) -> None:
        paid, _ = outcomes
        assert isinstance(paid, Receipt | UnknownAccount)
        if isinstance(paid, UnknownAccount):
            entry = pay(world.path("a"), world.path("new"), ASSET, "4", key=world.key("k"))
            assert isinstance(await world.ledger.commit(entry), Receipt)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | {"insert_account"}, at_least=2))


def test_an_asset_is_created_twice(empty_postgres: str) -> None:
    """One asset, one event."""

    async def prepare(world: World) -> list[Operation]:
        code = f"X{world.stage.scenes}"
        return [lambda actor: actor.ledger.create_asset(code, 2)] * 2

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two = outcomes
        assert one == two

    gates = frozenset({"insert_asset", "insert_event", "bump_rules"})
    asyncio.run(every_order(empty_postgres, prepare, check, gates=gates, at_least=5))
