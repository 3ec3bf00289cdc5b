"""Commit: what an entry does to the postings, and what is refused instead."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from itertools import pairwise
from typing import Any

import asyncpg
import pytest
from tests.builders import BANK, Place, all_at_once, balance, dust, receipts, scenario, seed

from bursar import (
    CappedOverdraft,
    Entry,
    Money,
    Movement,
    SystemAccount,
    UncappedOverdraft,
    deposit,
    pay,
    withdraw,
)
from bursar.ledger import Ledger
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    AmountTooLarge,
    BookRefuses,
    DuplicateConsume,
    FloorExceeded,
    InsufficientFunds,
    InvalidAmount,
    InvalidEntry,
    InvalidName,
    KeyReused,
    PostingNotLive,
    PrecisionOverflow,
    Refusal,
    SelfMovement,
    StalePin,
    TooManyPostings,
    UnknownAccount,
    UnknownAsset,
    UnknownBook,
)
from bursar.model.money import MINOR_MAX
from bursar.model.postings import POSTINGS_MAX
from bursar.sim.split import SplitLedger
from bursar.writer import Change


async def live(ledger: Ledger, account: str, asset: str = "USDT") -> list[int]:
    """The amounts of an account's live postings, oldest first."""
    return [p.amount.minor for p in await ledger.postings(account, asset, limit=1000)]


async def written(ledger: Ledger) -> int:
    return (await ledger.store.read.checks.counts())["envelopes"]


# --- value moves -----------------------------------------------------------------------------------------------------


@scenario
async def test_deposit(ledger: Ledger) -> None:
    await ledger.commit(deposit(BANK, "alice", "USDT", "100.00"))

    assert await balance(ledger, "alice") == "100.000000"
    assert await balance(ledger, BANK) == "-100.000000"


@scenario
async def test_pay_with_change(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    await ledger.commit(pay("alice", "bob", "USDT", "30"))

    assert await live(ledger, "alice") == [70_000_000]
    assert await live(ledger, "bob") == [30_000_000]


@scenario
async def test_pay_exactly_leaves_no_change(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    await ledger.commit(pay("alice", "bob", "USDT", "100"))

    assert await live(ledger, "alice") == []


@scenario
async def test_the_largest_posting_pays(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1", "10", "2")

    await ledger.commit(pay("alice", "bob", "USDT", "4"))

    assert await live(ledger, "alice") == [1_000_000, 2_000_000, 6_000_000]


@scenario
async def test_withdraw(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    await ledger.commit(withdraw("alice", BANK, "USDT", "40"))

    assert await balance(ledger, "alice") == "60.000000"
    assert await balance(ledger, BANK) == "-60.000000"


@scenario
async def test_round_trip_to_zero(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")
    await ledger.commit(pay("alice", "bob", "USDT", "100"))
    await ledger.commit(withdraw("bob", BANK, "USDT", "100"))

    for account in ("alice", "bob", BANK):
        assert await balance(ledger, account) == "0.000000"


@scenario
async def test_many_hops(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")
    route = ["alice", "bob", "carol"] * 5
    for source, target in pairwise(route):
        await ledger.commit(pay(source, target, "USDT", "100"))

    assert await balance(ledger, route[-1]) == "100.000000"


@scenario
async def test_several_assets_in_one_envelope(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")
    await seed(ledger, "bob", "2", asset="BTC")

    receipt = await ledger.commit(
        Entry(movements=(Movement("alice", "bob", "USDT", "60"), Movement("bob", "alice", "BTC", "0.5")))
    )

    assert [str(m.amount) for m in (await ledger.envelope(receipt.envelope)).movements] == ["60.000000", "0.50000000"]
    assert await balance(ledger, "alice", "BTC") == "0.50000000"
    assert await balance(ledger, "bob", "USDT") == "60.000000"


@scenario
async def test_several_assets_fail_together(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    with pytest.raises(InsufficientFunds) as refused:
        await ledger.commit(
            Entry(movements=(Movement("alice", "bob", "USDT", "60"), Movement("bob", "alice", "BTC", "0.5")))
        )

    assert (refused.value.account, refused.value.asset) == ("bob", "BTC")
    assert await balance(ledger, "alice") == "100.000000"


@scenario
async def test_fx_through_a_market_account(ledger: Ledger) -> None:
    """The market is a system account: it goes negative in what it sells and positive in what it buys."""
    await ledger.create_account("market:btc-usdt", policy=SystemAccount())
    await seed(ledger, "alice", "60000")

    await ledger.commit(
        Entry(
            movements=(
                Movement("alice", "market:btc-usdt", "USDT", "60000"),
                Movement("market:btc-usdt", "alice", "BTC", "1"),
            )
        )
    )

    assert {c: str(m) for c, m in (await ledger.balances("market:btc-usdt")).items()} == {
        "USDT": "60000.000000",
        "BTC": "-1.00000000",
    }
    assert await balance(ledger, "alice", "BTC") == "1.00000000"


@scenario
async def test_value_that_passes_through_needs_no_funds_of_its_own(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    await ledger.commit(
        Entry(movements=(Movement("alice", "bob", "USDT", "100"), Movement("bob", "carol", "USDT", "100")))
    )

    assert await live(ledger, "bob") == []
    assert await balance(ledger, "carol") == "100.000000"


@scenario
async def test_several_debits_of_one_account_share_one_selection(ledger: Ledger) -> None:
    await seed(ledger, "alice", "100")

    await ledger.commit(
        Entry(movements=(Movement("alice", "bob", "USDT", "60"), Movement("alice", "fees", "USDT", "40")))
    )

    assert (await balance(ledger, "bob"), await balance(ledger, "fees")) == ("60.000000", "40.000000")


@scenario
async def test_system_accounts_pay_without_selecting(ledger: Ledger) -> None:
    """A million small fees never make one large payment impossible."""
    for _ in range(3):
        await ledger.commit(deposit(BANK, "fees", "USDT", "1"))

    receipt = await ledger.commit(pay("fees", "alice", "USDT", "2"))

    assert (await ledger.envelope(receipt.envelope)).consumes == ()
    assert await balance(ledger, "fees") == "1.000000"


@scenario
async def test_metadata_comes_back(ledger: Ledger) -> None:
    note = {"order": "ü-1", "lines": [1, 2.5, None, {"deep": True}]}
    receipt = await ledger.commit(deposit(BANK, "alice", "USDT", "1", metadata=note))

    assert (await ledger.envelope(receipt.envelope)).metadata == note


@pytest.mark.parametrize("amount", ["1.5", Decimal("1.50"), Money("USDT", 6, 1_500_000)])
@scenario
async def test_amounts_as_text_decimal_or_money(ledger: Ledger, amount: Any) -> None:
    await ledger.commit(deposit(BANK, "alice", "USDT", amount))

    assert await balance(ledger, "alice") == "1.500000"


# --- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("movement", "error"),
    [
        (Movement("alice", "alice", "USDT", "1"), SelfMovement),
        (Movement("alice", "bob", "USDT", "0"), InvalidAmount),
        (Movement("alice", "bob", "USDT", "-1"), InvalidAmount),
        (Movement("alice", "bob", "USDT", Decimal(-1)), InvalidAmount),
        (Movement("alice", "bob", "USDT", Money("USDT", 6, 0)), InvalidAmount),
        (Movement("alice", "bob", "USDT", Money("BTC", 8, 1)), InvalidAmount),
        (Movement("alice", "bob", "USDT", 1), InvalidAmount),  # type: ignore[arg-type]
        (Movement("alice", "bob", "USDT", "0.0000001"), PrecisionOverflow),
        (Movement("alice", "bob", "USDT", str(2**127)), AmountTooLarge),
        (Movement("alice", "bob", "DOGE", "1"), UnknownAsset),
        (Movement("alice", "Bob", "USDT", "1"), InvalidName),
        (Movement("alice", "nobody", "USDT", "1"), UnknownAccount),
        (Movement("nobody", "alice", "USDT", "1"), UnknownAccount),
        (Movement("alice", "held", "USDT", "1"), InvalidEntry),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else None,
)
@scenario
async def test_a_senseless_movement_is_refused(ledger: Ledger, movement: Movement, error: type[Refusal]) -> None:
    await seed(ledger, "alice", "100")
    before = await written(ledger)

    with pytest.raises(error):
        await ledger.commit(Entry(movements=(movement,)))

    assert await written(ledger) == before


@scenario
async def test_money_beyond_128_bits_is_refused(ledger: Ledger) -> None:
    with pytest.raises(AmountTooLarge):
        await ledger.commit(deposit(BANK, "alice", "USDT", Money("USDT", 6, 2**127)))


@scenario
async def test_an_empty_entry_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidEntry):
        await ledger.commit(Entry(movements=()))


@scenario
async def test_movements_that_cancel_out_are_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidEntry):
        await ledger.commit(
            Entry(movements=(Movement("alice", "bob", "USDT", "1"), Movement("bob", "alice", "USDT", "1")))
        )


@scenario
async def test_an_unknown_book_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownBook):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", book="retail"))


@pytest.mark.parametrize("consume", ["twice", "spent", "never there", "somebody else's"])
@scenario
async def test_postings_named_by_number_must_be_ours_and_live(ledger: Ledger, consume: str) -> None:
    """Duplicate consume among them."""
    (first,) = await seed(ledger, "alice", "10")
    await seed(ledger, "bob", "10")
    mine = (await ledger.envelope(first.envelope)).creates[1].id
    if consume == "spent":
        await ledger.commit(pay("alice", "bob", "USDT", "10"))
    theirs = (await ledger.postings("bob", "USDT"))[0].id
    numbers, error = {
        "twice": ((mine, mine), DuplicateConsume),
        "spent": ((mine,), PostingNotLive),
        "never there": ((4711,), PostingNotLive),
        "somebody else's": ((theirs,), InvalidEntry),
    }[consume]
    intent = Intent(
        scope="test", key="k", legs=(Leg("alice", "carol", "USDT", 1),), kind=EntryKind.ENTRY, consume=numbers
    )

    with pytest.raises(error):
        await ledger.writer.apply(Change((intent,)))


# --- who may -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "target"), [("alice", "bob"), ("bob", "alice")])
@scenario
async def test_a_frozen_account_neither_pays_nor_is_paid(ledger: Ledger, source: str, target: str) -> None:
    await seed(ledger, source, "10")
    await ledger.freeze("alice")

    with pytest.raises(AccountFrozen) as refused:
        await ledger.commit(pay(source, target, "USDT", "1"))

    assert refused.value.account == "alice"
    assert await balance(ledger, source) == "10.000000"


@pytest.mark.parametrize(("source", "target"), [("alice", "bob"), ("bob", "alice")])
@scenario
async def test_a_closed_account_neither_pays_nor_is_paid(ledger: Ledger, source: str, target: str) -> None:
    await ledger.change_policy("alice", UncappedOverdraft())
    await seed(ledger, "bob", "10")
    await ledger.close("alice")

    with pytest.raises(AccountClosed):
        await ledger.commit(pay(source, target, "USDT", "1"))


@scenario
async def test_a_book_refuses_assets_it_does_not_list(ledger: Ledger) -> None:
    await ledger.create_book("dollars", assets=("USDT",))
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", book="dollars"))

    with pytest.raises(BookRefuses) as refused:
        await ledger.commit(deposit(BANK, "alice", "BTC", "1", book="dollars"))

    assert (refused.value.what, refused.value.name) == ("asset", "BTC")


@scenario
async def test_a_book_refuses_accounts_it_does_not_list(ledger: Ledger) -> None:
    await ledger.create_account("alice:spot")
    await ledger.create_book("private", accounts=("alice", BANK))
    await ledger.commit(deposit(BANK, "alice:spot", "USDT", "1", book="private"))

    with pytest.raises(BookRefuses) as refused:
        await ledger.commit(deposit(BANK, "bob", "USDT", "1", book="private"))

    assert (refused.value.what, refused.value.name) == ("account", "bob")


@scenario
async def test_an_account_of_a_book_takes_part_in_that_book_only(ledger: Ledger) -> None:
    await ledger.create_book("retail")
    await ledger.create_account("shop", book="retail")
    await ledger.commit(deposit(BANK, "shop", "USDT", "1", book="retail"))

    with pytest.raises(BookRefuses):
        await ledger.commit(deposit(BANK, "shop", "USDT", "1"))


@scenario
async def test_a_stale_snapshot_pin_is_refused(ledger: Ledger) -> None:
    seen = (await ledger.account("alice")).snapshot
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", pins={"alice": seen}))
    await ledger.freeze("alice")
    await ledger.unfreeze("alice")

    with pytest.raises(StalePin):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", pins={"alice": seen}))


@scenario
async def test_an_entry_never_makes_a_pin_stale(ledger: Ledger) -> None:
    seen = (await ledger.account("alice")).snapshot
    for _ in range(2):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", pins={"alice": seen}))

    assert await balance(ledger, "alice") == "2.000000"


@scenario
async def test_a_pin_may_name_an_account_that_takes_no_part(ledger: Ledger) -> None:
    seen = (await ledger.account("carol")).snapshot
    await ledger.freeze("carol")

    with pytest.raises(StalePin):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1", pins={"carol": seen}))


# --- how much --------------------------------------------------------------------------------------------------------


@scenario
async def test_insufficient_by_one_unit(ledger: Ledger) -> None:
    await seed(ledger, "alice", "60", "40")

    with pytest.raises(InsufficientFunds) as refused:
        await ledger.commit(pay("alice", "bob", "USDT", "100.000001"))

    assert (refused.value.available, refused.value.needed) == ("100.000000", "100.000001")
    assert await balance(ledger, "alice") == "100.000000"


@scenario
async def test_an_overdraft_without_a_cap_pays_what_it_does_not_have(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=UncappedOverdraft())
    await seed(ledger, "credit", "10")

    await ledger.commit(pay("credit", "bob", "USDT", "1000000"))

    assert await live(ledger, "credit") == [-999_990_000_000]


@scenario
async def test_a_floor_exactly_met(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-500.00", asset="USDT"))
    await seed(ledger, "credit", "100")

    await ledger.commit(pay("credit", "bob", "USDT", "600"))

    assert await balance(ledger, "credit") == "-500.000000"


@scenario
async def test_a_floor_exceeded_by_one_unit(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-500.00", asset="USDT"))
    await seed(ledger, "credit", "100")

    with pytest.raises(FloorExceeded) as refused:
        await ledger.commit(pay("credit", "bob", "USDT", "600.000001"))

    assert (refused.value.floor, refused.value.balance) == ("-500.000000", "100.000000")
    assert await balance(ledger, "credit") == "100.000000"


@scenario
async def test_a_floor_reached_in_steps_holds_and_opens_again(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-5", asset="USDT"))
    for _ in range(5):
        await ledger.commit(pay("credit", "bob", "USDT", "1"))
    with pytest.raises(FloorExceeded):
        await ledger.commit(pay("credit", "bob", "USDT", "0.000001"))

    await ledger.commit(deposit(BANK, "credit", "USDT", "2"))
    await ledger.commit(pay("credit", "bob", "USDT", "2"))

    assert await balance(ledger, "credit") == "-5.000000"


@scenario
async def test_a_capped_overdraft_is_in_one_asset_only(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-5", asset="USDT"))

    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("credit", "bob", "BTC", "0.1"))


@scenario
async def test_paying_in_pays_off_what_is_owed_first(ledger: Ledger) -> None:
    """L7: a negative posting and a positive one do not lie beside each other for ever."""
    await ledger.create_account("credit", policy=UncappedOverdraft())
    await ledger.commit(pay("credit", "bob", "USDT", "10"))

    await seed(ledger, "credit", "4")
    assert await live(ledger, "credit") == [-6_000_000]
    await seed(ledger, "credit", "10")
    assert await live(ledger, "credit") == [4_000_000]


@pytest.mark.parametrize("amount", [MINOR_MAX, MINOR_MAX - 1, 2**64, 2**63, 2**63 - 1])
@scenario
async def test_wide_amounts_move_exactly(ledger: Ledger, amount: int) -> None:
    """Up to 2^127 - 1 smallest units of an asset with 18 decimals."""
    money = Money("ETH", 18, amount)
    await ledger.commit(deposit(BANK, "alice", "ETH", money))
    await ledger.commit(pay("alice", "bob", "ETH", money))
    await ledger.commit(pay("bob", "alice", "ETH", "0.000000000000000001"))

    assert (await ledger.balance("bob", "ETH")).minor == amount - 1
    assert (await ledger.balance(BANK, "ETH")).minor == -amount
    assert (await ledger.history("bob"))[-1].movements[0].amount == money


@scenario
async def test_a_posting_that_would_not_fit_is_an_overflow(ledger: Ledger) -> None:
    largest = Money("ETH", 18, MINOR_MAX)
    with pytest.raises(AmountTooLarge):
        await ledger.commit(
            Entry(movements=(Movement(BANK, "alice", "ETH", largest), Movement(BANK, "bob", "ETH", largest)))
        )

    assert await ledger.balances(BANK) == {}


@scenario
async def test_a_balance_may_be_wider_than_any_posting(ledger: Ledger) -> None:
    largest = Money("ETH", 18, MINOR_MAX)
    for _ in range(3):
        await ledger.commit(deposit(BANK, "alice", "ETH", largest))

    assert (await ledger.balance("alice", "ETH")).minor == 3 * MINOR_MAX
    assert (await ledger.balance(BANK, "ETH")).minor == -3 * MINOR_MAX
    await ledger.commit(pay("alice", "bob", "ETH", largest))
    assert (await ledger.balance("alice", "ETH")).minor == 2 * MINOR_MAX


# --- how many postings -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", [8, 9, 64, 65, 520])
@scenario
async def test_a_payment_may_need_more_postings_than_are_read_first(ledger: Ledger, needed: int) -> None:
    """8 are read at first, then 64, then 512."""
    await dust(ledger, "alice", needed)

    receipt = await ledger.commit(pay("alice", "bob", "USDT", Money("USDT", 6, needed)))

    assert len((await ledger.envelope(receipt.envelope)).consumes) == needed
    assert await balance(ledger, "alice") == "0.000000"


@scenario
async def test_a_shortage_is_only_believed_after_all_postings_were_read(ledger: Ledger) -> None:
    await dust(ledger, "alice", 70)

    with pytest.raises(InsufficientFunds) as refused:
        await ledger.commit(pay("alice", "bob", "USDT", Money("USDT", 6, 71)))

    assert refused.value.available == "0.000070"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_too_many_postings_until_compacted(ledger: Ledger) -> None:
    """65,535 postings may pay at once, one more may not; after compact any amount can be paid."""
    have = POSTINGS_MAX + 500
    await dust(ledger, "alice", have)
    with pytest.raises(TooManyPostings):
        await ledger.commit(pay("alice", "bob", "USDT", Money("USDT", 6, POSTINGS_MAX + 1)))
    with pytest.raises(TooManyPostings):
        await ledger.commit(pay("alice", "bob", "USDT", Money("USDT", 6, have)))

    assert await ledger.compact("alice", most=1_000) == 1_000
    await ledger.commit(pay("alice", "bob", "USDT", Money("USDT", 6, have)))

    assert (await ledger.balance("bob", "USDT")).minor == have


@scenario
async def test_too_many_movements_are_refused(ledger: Ledger) -> None:
    movement = Movement(BANK, "alice", "USDT", "1")
    with pytest.raises(InvalidEntry):
        await ledger.commit(Entry(movements=(movement,) * (POSTINGS_MAX + 1)))


@scenario
async def test_an_envelope_may_have_thousands_of_movements(ledger: Ledger) -> None:
    movements = tuple(Movement(BANK, name, "USDT", "1") for name in ("alice", "bob", "carol") * 1000)

    await ledger.commit(Entry(movements=movements))

    assert await balance(ledger, "carol") == "1000.000000"


# --- groups ----------------------------------------------------------------------------------------------------------


@scenario
async def test_a_group_with_one_bad_entry_commits_the_others(ledger: Ledger) -> None:
    entries = [deposit(BANK, "alice", "USDT", "1") for _ in range(10)]
    entries[4] = pay("bob", "alice", "USDT", "1")

    outcomes = await all_at_once(ledger, entries)

    assert [type(found).__name__ for found in outcomes].index("InsufficientFunds") == 4
    assert len(receipts(outcomes)) == 9
    assert await balance(ledger, "alice") == "9.000000"


@scenario
async def test_a_chain_in_one_group_spends_what_it_has_just_got(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")
    outcomes = []
    if isinstance(ledger, SplitLedger):  # changes are not grouped there: one after the other
        for source, target in (("alice", "bob"), ("bob", "carol"), ("carol", "alice")):
            outcomes.append(await ledger.commit(pay(source, target, "USDT", "1")))
    else:
        groups = ledger.writer.batches
        chain = [pay("alice", "bob", "USDT", "1"), pay("bob", "carol", "USDT", "1"), pay("carol", "alice", "USDT", "1")]
        outcomes = await all_at_once(ledger, chain)
        assert ledger.writer.batches == groups + 1

    assert len(receipts(outcomes)) == 3
    assert await balance(ledger, "alice") == "1.000000"


@scenario
async def test_commit_many_puts_each_error_in_its_place(ledger: Ledger) -> None:
    outcomes = await ledger.commit_many(
        [
            deposit(BANK, "alice", "USDT", "1"),
            deposit(BANK, "alice", "DOGE", "1"),
            deposit(BANK, "nobody", "USDT", "1"),
            deposit(BANK, "alice", "USDT", "2"),
        ]
    )

    assert [type(found).__name__ for found in outcomes] == ["Receipt", "UnknownAsset", "UnknownAccount", "Receipt"]
    assert await balance(ledger, "alice") == "3.000000"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_commit_many_atomic_is_all(ledger: Ledger) -> None:
    outcomes = await ledger.commit_many(
        [deposit(BANK, "alice", "USDT", "1"), pay("alice", "bob", "USDT", "1")], atomic=True
    )

    assert len(receipts(outcomes)) == 2
    assert await balance(ledger, "bob") == "1.000000"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_commit_many_atomic_is_or_nothing(ledger: Ledger) -> None:
    before = await written(ledger)
    with pytest.raises(InsufficientFunds):
        await ledger.commit_many(
            [deposit(BANK, "alice", "USDT", "1", key="k"), pay("alice", "bob", "USDT", "2")], atomic=True
        )

    assert await written(ledger) == before
    assert not (await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))).replayed


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_a_key_used_twice_in_one_request_names_no_envelope(ledger: Ledger) -> None:
    """The other entry is refused with it: whoever looked for its number would find nothing, or something else."""
    await seed(ledger, "bob", "1")
    with pytest.raises(KeyReused) as refused:
        await ledger.commit_many(
            [deposit(BANK, "alice", "USDT", "1", key="k"), deposit(BANK, "alice", "USDT", "2", key="k")], atomic=True
        )
    assert (refused.value.envelope, "two different entries of one request" in str(refused.value)) == (0, True)
    first = await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))
    with pytest.raises(KeyReused) as refused:
        await ledger.commit_many(
            [deposit(BANK, "bob", "USDT", "1"), deposit(BANK, "alice", "USDT", "2", key="k")], atomic=True
        )
    assert refused.value.envelope == first.envelope
    assert f"envelope {first.envelope}" in str(refused.value)


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_commit_many_atomic_is_refused_where_it_could_not_be_kept(ledger: Ledger) -> None:
    with pytest.raises(InvalidEntry):
        await ledger.commit_many([deposit(BANK, "alice", "USDT", "1")] * 2, atomic=True)


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_cancelling_a_caller_does_not_cancel_its_unit(ledger: Ledger) -> None:
    await seed(ledger, "bob", "1")
    caller = asyncio.create_task(ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k")))
    companion = asyncio.create_task(ledger.commit(deposit(BANK, "bob", "USDT", "1")))
    await asyncio.sleep(0)  # both wait for the same unit now
    caller.cancel()
    await companion
    await asyncio.wait([caller])

    assert caller.cancelled()
    assert (await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))).replayed
    assert await balance(ledger, "alice") == "1.000000"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_closing_waits_for_what_is_on_its_way(place: Place) -> None:
    async with place.bursar() as bursar:
        await seed(bursar.ledger, "bob", "1")
        work = asyncio.gather(*[bursar.ledger.commit(deposit(BANK, "alice", "USDT", "1")) for _ in range(20)])
        await asyncio.sleep(0)  # all of them wait now
    await work
    async with place.bursar() as again:
        assert await balance(again.ledger, "alice") == "20.000000"


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_connection_that_was_lost_is_made_anew(ledger: Ledger, place: Place) -> None:
    """However far the news has come: the first call after it may find the connection closed, closing or half dead."""
    administrator = await asyncpg.connect(place.url)
    for _ in range(8):
        await ledger.commit(deposit(BANK, "alice", "USDT", "1"))
        await administrator.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'bursar'"
        )
    await administrator.close()

    await ledger.commit(deposit(BANK, "alice", "USDT", "1"))

    assert await balance(ledger, "alice") == "9.000000"


@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)  # by saga there are no groups
@scenario
async def test_a_taken_key_deep_in_a_large_group_leaves_nothing_of_it_behind(ledger: Ledger) -> None:
    """Rows are written many at a time: those before the one that fails are gone, too, and written by the next try."""
    await seed(ledger, "alice", "1000")
    entries = [pay("alice", "bob", "USDT", "1", key=f"k-{n:03}") for n in range(100)]
    first = await ledger.commit(entries[70])

    found = await asyncio.gather(*[ledger.commit(entry) for entry in entries])

    assert [n for n, receipt in enumerate(found) if receipt.replayed] == [70]
    assert (found[70].id, len({receipt.envelope for receipt in found})) == (first.id, 100)
    assert (await balance(ledger, "alice"), await balance(ledger, "bob")) == ("900.000000", "100.000000")
    assert len(await ledger.history("bob", limit=200)) == 100


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_groups_and_sagas_on_one_file_never_share_a_number(place: Place) -> None:
    """A saga takes numbers ahead; a group looks at the tables for those that are used, and at what sagas have taken."""
    numbers = []
    async with place.bursar(split=True) as sagas, place.bursar(split=False) as groups:
        for program in [groups, sagas, groups, groups, sagas, sagas, groups] * 8:
            numbers += [receipt.envelope for receipt in await seed(program.ledger, "alice", "1")]
        assert await balance(groups.ledger, "alice") == await balance(sagas.ledger, "alice") == "56.000000"
    assert len(set(numbers)) == len(numbers) == 56
