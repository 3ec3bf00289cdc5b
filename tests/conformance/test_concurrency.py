"""Concurrency within one program (and two on one database): races have one winner, and floors hold."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
from tests.builders import BANK, Place, all_at_once, balance, outcome, receipts, scenario, seed

from bursar import CappedOverdraft, Conflict, Entry, UncappedOverdraft, deposit, pay, withdraw
from bursar.ledger import Ledger
from bursar.model.errors import AccountFrozen, FloorExceeded, InsufficientFunds


async def persistent(ledger: Ledger, entry: Entry) -> Any:
    """Commit, and again if others were faster too often: what `Conflict` asks a caller to do."""
    while isinstance(found := await outcome(ledger.commit(entry)), Conflict):
        pass
    return found


async def race(ledgers: list[Ledger], entries: list[Entry]) -> list[Any]:
    """All at once, dealt out to the ledgers in turn. Every entry has its own key, so trying again is safe."""
    work = [persistent(ledgers[i % len(ledgers)], entry) for i, entry in enumerate(entries)]
    return list(await asyncio.gather(*work))


@scenario
async def test_eight_racers_for_one_posting_have_one_winner(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")

    outcomes = await race([ledger], [pay("alice", "bob", "USDT", "1", key=f"{i}") for i in range(8)])

    assert len(receipts(outcomes)) == 1
    assert sum(isinstance(found, InsufficientFunds) for found in outcomes) == 7
    assert await balance(ledger, "bob") == "1.000000"


@scenario
async def test_ten_times_1000_against_5000_is_exactly_five(ledger: Ledger) -> None:
    await seed(ledger, "alice", "5000")

    outcomes = await race([ledger], [pay("alice", "bob", "USDT", "1000", key=f"{i}") for i in range(10)])

    assert len(receipts(outcomes)) == 5
    assert await balance(ledger, "bob") == "5000.000000"


@scenario
async def test_two_programs_race_for_one_balance(ledger: Ledger, place: Place) -> None:
    await seed(ledger, "alice", "5000")
    async with place.bursar() as other:
        outcomes = await race(
            [ledger, other.ledger], [pay("alice", "bob", "USDT", "1000", key=f"{i}") for i in range(10)]
        )

    assert len(receipts(outcomes)) == 5
    assert await balance(ledger, "alice") == "0.000000"


@scenario
async def test_two_capped_accounts_racing_to_the_floor_never_go_below(ledger: Ledger, place: Place) -> None:
    for name in ("left", "right"):
        await ledger.create_account(name, policy=CappedOverdraft(floor="-5", asset="USDT"))
    entries = [pay(source, "bob", "USDT", "1", key=f"{source}-{i}") for i in range(8) for source in ("left", "right")]

    async with place.bursar() as other:
        outcomes = await race([ledger, other.ledger], entries)

    assert len(receipts(outcomes)) == 10
    assert sum(isinstance(found, FloorExceeded) for found in outcomes) == 6
    assert [await balance(ledger, name) for name in ("left", "right")] == ["-5.000000", "-5.000000"]


@scenario
async def test_capped_accounts_paying_each_other_never_go_below(ledger: Ledger, place: Place) -> None:
    for name in ("left", "right"):
        await ledger.create_account(name, policy=CappedOverdraft(floor="-3", asset="USDT"))
    entries = [pay(*(("left", "right") if i % 3 else ("right", "left")), "USDT", "1", key=f"{i}") for i in range(18)]

    async with place.bursar() as other:
        await race([ledger, other.ledger], entries)

    for name in ("left", "right"):
        assert (await ledger.balance(name, "USDT")).decimal >= -3


@scenario
async def test_freeze_during_commit_holds_from_the_moment_it_returns(ledger: Ledger, place: Place) -> None:
    """Commits keep coming from two programs; what was not committed when the freeze returned never is."""
    await seed(ledger, "alice", "100")
    async with place.bursar() as other:
        payers = [
            asyncio.create_task(persistent(who, pay("alice", "bob", "USDT", "1", key=f"{i}")))
            for i, who in enumerate([ledger, other.ledger] * 20)
        ]
        await asyncio.wait(payers, return_when=asyncio.FIRST_COMPLETED)
        while isinstance(await outcome(ledger.freeze("alice")), Conflict):
            pass
        at_freeze = await balance(ledger, "bob")
        outcomes = await asyncio.gather(*payers)

    assert await balance(ledger, "bob") == at_freeze
    assert {type(found) for found in outcomes if found not in receipts(outcomes)} <= {AccountFrozen}
    assert at_freeze == f"{len(receipts(outcomes))}.000000"


@scenario
async def test_disjoint_commits_all_succeed(ledger: Ledger) -> None:
    pairs = [(f"user:{i}:a", f"user:{i}:b") for i in range(12)]
    for source, target in pairs:
        await ledger.create_account(source)
        await ledger.create_account(target)
        await seed(ledger, source, "1")

    outcomes = await all_at_once(ledger, [pay(source, target, "USDT", "1") for source, target in pairs])

    assert len(receipts(outcomes)) == len(pairs)


@scenario
async def test_a_hot_account_as_only_source(ledger: Ledger) -> None:
    await seed(ledger, "alice", "30")
    targets = ["bob", "carol", "fees"]

    outcomes = await race([ledger], [pay("alice", targets[i % 3], "USDT", "1", key=f"{i}") for i in range(30)])

    assert len(receipts(outcomes)) == 30
    assert await balance(ledger, "alice") == "0.000000"


@scenario
async def test_a_hot_account_as_only_target(ledger: Ledger) -> None:
    outcomes = await race([ledger], [deposit(BANK, "alice", "USDT", "1", key=f"{i}") for i in range(30)])

    assert len(receipts(outcomes)) == 30
    assert await balance(ledger, "alice") == "30.000000"


@scenario
async def test_a_hot_overdraft_account_in_both_directions(ledger: Ledger, place: Place) -> None:
    await ledger.create_account("credit", policy=UncappedOverdraft())
    entries = [pay("credit", "fees", "USDT", "1", key=f"out-{i}") for i in range(10)]
    entries += [deposit(BANK, "credit", "USDT", "1", key=f"in-{i}") for i in range(10)]
    random.Random(7).shuffle(entries)

    async with place.bursar() as other:
        outcomes = await race([ledger, other.ledger], entries)

    assert len(receipts(outcomes)) == 20
    assert await balance(ledger, "credit") == "0.000000"


@scenario
async def test_rules_changed_by_one_program_bind_the_other(ledger: Ledger, place: Place) -> None:
    """Heads are cached; a freeze elsewhere must not be missed because of that."""
    async with place.bursar() as other:
        await other.ledger.commit(deposit(BANK, "alice", "USDT", "1"))
        await ledger.freeze("alice")

        assert isinstance(await outcome(other.ledger.commit(deposit(BANK, "alice", "USDT", "1"))), AccountFrozen)
        await ledger.unfreeze("alice")
        await other.ledger.commit(deposit(BANK, "alice", "USDT", "1"))


@scenario
async def test_what_one_program_creates_the_other_may_use_at_once(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        await outcome(other.ledger.commit(deposit(BANK, "dora", "EUR", "1")))
        await ledger.create_asset("EUR", 2)
        await ledger.create_account("dora")

        await other.ledger.commit(deposit(BANK, "dora", "EUR", "1"))
        assert await balance(other.ledger, "dora", "EUR") == "1.00"


@scenario
async def test_accounts_created_at_the_same_moment_are_one(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        accounts = await asyncio.gather(*[who.create_account("dora") for who in (ledger, other.ledger) * 3])

    assert len({account.id for account in accounts}) == 1


@scenario
async def test_rule_changes_at_the_same_moment_all_happen(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        await asyncio.gather(
            ledger.freeze("alice"),
            other.ledger.freeze("bob"),
            ledger.freeze("carol"),
            other.ledger.create_asset("EUR", 2),
        )

    assert [(await ledger.account(name)).version for name in ("alice", "bob", "carol")] == [2, 2, 2]


@pytest.mark.parametrize("seed_number", [1, 2])
@scenario
async def test_the_cache_equals_the_sum_under_concurrency(ledger: Ledger, place: Place, seed_number: int) -> None:
    """Deposits, payments and withdrawals from two programs, with folding in between: every cached sum is the sum.

    The books are checked when the test is over; here, that reads of cached accounts add up too.
    """
    chance = random.Random(seed_number)
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-10", asset="USDT"))
    names = ["alice", "bob", "credit", "fees"]
    for name in names:
        await seed(ledger, name, "5")

    def entry(i: int) -> Entry:
        source, target = chance.sample([*names, BANK], 2)
        return (withdraw if target == BANK else pay)(source, target, "USDT", str(chance.randint(1, 4)), key=f"{i}")

    async with place.bursar() as other:
        for turn in range(3):
            await race([ledger, other.ledger], [entry(100 * turn + i) for i in range(16)])
            await ledger.writer.consolidate(above=2)

    total = sum([(await ledger.balance(name, "USDT")).minor for name in [*names, BANK]])
    assert total == 0
