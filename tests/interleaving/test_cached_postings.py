"""Postings cached by one process, while another one spends them, adds more or freezes their owner.

Each first actor pays twice: the first time it reads, the second time it relies on its cache. In every order, no payment
is made twice or refused without a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from tests.interleaving.stage import GROUP, Actor
from tests.interleaving.world import ASSET, BANK, Operation, World, every_order

from bursar import Receipt, deposit, pay
from bursar.model.errors import AccountFrozen, InsufficientFunds, Refusal


def paying_twice(source: str, target: str, first: str, second: str, key: str) -> Operation:
    async def play(actor: Actor) -> list[Any]:
        entries = [
            pay(source, target, ASSET, amount, key=f"{key}/{turn}") for turn, amount in enumerate((first, second))
        ]
        return [await outcome(actor.ledger.commit(entry)) for entry in entries]

    return play


async def outcome(commit: Awaitable[Receipt]) -> Receipt | Refusal:
    try:
        return await commit
    except Refusal as refusal:
        return refusal


def test_another_process_spends_cached_postings(empty_postgres: str) -> None:
    """Payments of 3, 3 and 5 out of 10: two go through, in every order, and in some of them the cache was stale."""
    used, stale = [0], [0]

    async def prepare(world: World) -> list[Operation]:
        a = await world.account("a", "10")
        b, c = await world.account("b"), await world.account("c")
        once = pay(a, c, ASSET, "5", key=world.key("two"))
        return [paying_twice(a, b, "3", "3", world.key("one")), lambda actor: outcome(actor.ledger.commit(once))]

    async def check(world: World, outcomes: list[Any]) -> None:
        both, other = outcomes
        paid = sum(isinstance(o, Receipt) for o in both)
        refused = [o for o in (*both, other) if not isinstance(o, Receipt)]
        assert [type(o) for o in refused] == [InsufficientFunds]
        left, got = (4, "0.00") if paid == 2 else (2, "5.00")
        assert [await world.balance(name) for name in "abc"] == [f"{left}.00", f"{3 * paid}.00", got]
        steps = [step for step in world.stage.script if step.startswith("a:")]
        second = steps[steps.index("a:COMMIT") + 1 :] if "a:COMMIT" in steps else []
        used[0] += second == ["a:batch_write_entries", "a:COMMIT"]
        stale[0] += second[:2] == ["a:batch_write_entries", "a:batch_read"]

    asyncio.run(every_order(empty_postgres, prepare, check, at_least=20))
    assert used[0]
    assert stale[0]


def test_postings_of_another_process_are_found(empty_postgres: str) -> None:
    """10, pay 1, then 14: refused only if what came meanwhile was not there yet."""

    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        incoming = deposit(BANK, a, ASSET, "5", key=world.key("in"))
        return [paying_twice(a, b, "1", "14", world.key("out")), lambda actor: actor.ledger.commit(incoming)]

    async def check(world: World, outcomes: list[Any]) -> None:
        (first, second), came = outcomes
        assert isinstance(first, Receipt)
        assert isinstance(came, Receipt)
        script, commits = world.stage.script, world.stage.commits
        if isinstance(second, Receipt):
            assert await world.balance("a") == "0.00"
            assert commits.index("b") < len(commits) - 1
        else:
            assert isinstance(second, InsufficientFunds)
            looked = [place for place, step in enumerate(script) if step == "a:batch_read"]
            assert script.index("b:COMMIT") > looked[-1], "refused, although it was there when it looked"

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP, at_least=5))


def test_frozen_account_does_not_pay_with_cached_postings(empty_postgres: str) -> None:
    async def prepare(world: World) -> list[Operation]:
        a, b = await world.account("a", "10"), await world.account("b")
        return [paying_twice(a, b, "1", "2", world.key("out")), lambda actor: actor.ledger.freeze(a)]

    async def check(world: World, outcomes: list[Any]) -> None:
        both = outcomes[0]
        frozen_at = world.stage.commits.index("b")
        assert sum(isinstance(o, Receipt) for o in both) == frozen_at, "paid after it was frozen, or refused before"
        assert all(isinstance(o, Receipt | AccountFrozen) for o in both)

    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | {"bump_rules"}, at_least=5))
