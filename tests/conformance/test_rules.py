"""Rules: freeze, close, policies, books, pins and suspension, and what each forbids from the moment it returns."""

from __future__ import annotations

from typing import Any

import pytest
from tests.builders import BANK, Place, balance, scenario, seed

from bursar import (
    Account,
    AccountStatus,
    AssetStatus,
    CappedOverdraft,
    ExternalAccount,
    NoOverdraft,
    SystemAccount,
    UncappedOverdraft,
    deposit,
    pay,
)
from bursar.ledger import Ledger
from bursar.model.accounts import Policy
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    AccountNotEmpty,
    AlreadyExists,
    AssetSuspended,
    FloorExceeded,
    InsufficientFunds,
    InvalidName,
    PrecisionOverflow,
    Refusal,
    UnknownAccount,
    UnknownAsset,
    UnknownBook,
)


@scenario
async def test_of_a_frozen_or_closed_account_it_is_not_the_balance_that_is_told(ledger: Ledger) -> None:
    """Though it has too little, too: more money would not help."""
    await ledger.freeze("alice")
    with pytest.raises(AccountFrozen):
        await ledger.commit(pay("alice", "bob", "USDT", "1"))
    await ledger.close("carol")
    with pytest.raises(AccountClosed):
        await ledger.commit(pay("carol", "bob", "USDT", "1"))


# --- accounts --------------------------------------------------------------------------------------------------------


@scenario
async def test_an_account_is_created_once(ledger: Ledger) -> None:
    first = await ledger.create_account("dora", policy=UncappedOverdraft())

    assert await ledger.create_account("dora", policy=UncappedOverdraft()) == first
    with pytest.raises(AlreadyExists):
        await ledger.create_account("dora")


@pytest.mark.parametrize("path", ["", "A", "a::b", ":a", "a:", "a b", "ä", "a" * 129, "a\n"])
@scenario
async def test_a_malformed_path_is_refused(ledger: Ledger, path: str) -> None:
    with pytest.raises(InvalidName):
        await ledger.create_account(path)


@scenario
async def test_freeze_and_unfreeze_append_versions(ledger: Ledger) -> None:
    frozen = await ledger.freeze("alice")
    thawed = await ledger.unfreeze("alice")

    history = await ledger.account_history("alice")
    assert [found.account.status for found in history] == [
        AccountStatus.ACTIVE,
        AccountStatus.FROZEN,
        AccountStatus.ACTIVE,
    ]
    assert (frozen.version, thawed.version) == (2, 3)
    await seed(ledger, "alice", "1")


@scenario
async def test_freezing_twice_is_once(ledger: Ledger) -> None:
    assert (await ledger.freeze("alice")).version == 2
    assert (await ledger.freeze("alice")).version == 2


@scenario
async def test_rules_of_an_unknown_account(ledger: Ledger) -> None:
    for change in (ledger.freeze, ledger.unfreeze, ledger.close, ledger.account_history):
        with pytest.raises(UnknownAccount):
            await change("nobody")


@scenario
async def test_the_account_of_held_money_is_nobodys_to_change(ledger: Ledger) -> None:
    with pytest.raises(InvalidName):
        await ledger.freeze("held")
    with pytest.raises(InvalidName):
        await ledger.close("held")
    with pytest.raises(InvalidName):
        await ledger.change_policy("held", SystemAccount())


@scenario
async def test_close(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")
    await ledger.commit(pay("alice", "bob", "USDT", "1"))

    assert (await ledger.close("alice")).status is AccountStatus.CLOSED
    for change in (ledger.freeze, ledger.unfreeze, ledger.close):
        with pytest.raises(AccountClosed):
            await change("alice")


@scenario
async def test_an_account_with_a_balance_can_not_close(ledger: Ledger) -> None:
    await seed(ledger, "alice", "0.000001")

    with pytest.raises(AccountNotEmpty):
        await ledger.close("alice")
    assert (await ledger.account("alice")).status is AccountStatus.ACTIVE


@scenario
async def test_an_account_that_owes_can_not_close(ledger: Ledger) -> None:
    await ledger.create_account("loose", policy=UncappedOverdraft())
    for _ in range(2):
        await ledger.commit(pay("loose", "bob", "USDT", "1"))

    with pytest.raises(AccountNotEmpty):
        await ledger.close("loose")


@scenario
async def test_plus_and_minus_are_netted_before_closing(ledger: Ledger) -> None:
    """L7: an overdraft account that has as much as it owes, in several postings, is empty."""
    await ledger.create_account("loose", policy=UncappedOverdraft())
    for _ in range(9):
        await ledger.commit(pay("loose", "bob", "USDT", "1"))
    await seed(ledger, "loose", "9")

    assert (await ledger.close("loose")).status is AccountStatus.CLOSED
    assert await ledger.postings("loose") == []


@scenario
async def test_a_system_account_closes_when_its_postings_add_up_to_nothing(ledger: Ledger) -> None:
    await seed(ledger, "alice", "5")
    await ledger.commit(pay("alice", "fees", "USDT", "5"))
    await ledger.commit(pay("fees", "bob", "USDT", "5"))

    assert (await ledger.close("fees")).status is AccountStatus.CLOSED


@scenario
async def test_a_frozen_account_can_close(ledger: Ledger) -> None:
    await ledger.freeze("alice")

    assert (await ledger.close("alice")).status is AccountStatus.CLOSED


# --- policies --------------------------------------------------------------------------------------------------------


@scenario
async def test_a_new_policy_counts_from_the_next_entry(ledger: Ledger) -> None:
    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("alice", "bob", "USDT", "1"))

    await ledger.change_policy("alice", UncappedOverdraft())

    await ledger.commit(pay("alice", "bob", "USDT", "1"))
    assert await balance(ledger, "alice") == "-1.000000"


@scenario
async def test_a_floor_counts_what_the_account_had_before_it(ledger: Ledger) -> None:
    await ledger.change_policy("alice", UncappedOverdraft())
    await ledger.commit(pay("alice", "bob", "USDT", "4"))

    await ledger.change_policy("alice", CappedOverdraft(floor="-5", asset="USDT"))

    await ledger.commit(pay("alice", "bob", "USDT", "1"))
    with pytest.raises(FloorExceeded):
        await ledger.commit(pay("alice", "bob", "USDT", "0.000001"))


@scenario
async def test_a_floor_that_comes_back_counts_what_moved_meanwhile(ledger: Ledger) -> None:
    capped = CappedOverdraft(floor="-5", asset="USDT")
    await ledger.change_policy("alice", capped)
    await ledger.commit(pay("alice", "bob", "USDT", "1"))
    await ledger.change_policy("alice", UncappedOverdraft())
    await ledger.commit(pay("alice", "bob", "USDT", "3"))

    await ledger.change_policy("alice", capped)

    await ledger.commit(pay("alice", "bob", "USDT", "1"))
    with pytest.raises(FloorExceeded):
        await ledger.commit(pay("alice", "bob", "USDT", "0.000001"))


@scenario
async def test_below_a_stricter_floor_one_may_only_pay_in(ledger: Ledger) -> None:
    await ledger.change_policy("alice", UncappedOverdraft())
    await ledger.commit(pay("alice", "bob", "USDT", "10"))
    await ledger.change_policy("alice", CappedOverdraft(floor="-5", asset="USDT"))

    with pytest.raises(FloorExceeded):
        await ledger.commit(pay("alice", "bob", "USDT", "0.000001"))
    await seed(ledger, "alice", "1")

    assert await balance(ledger, "alice") == "-9.000000"


@pytest.mark.parametrize("policy", [NoOverdraft(), CappedOverdraft(floor="-1", asset="BTC")])
@scenario
async def test_a_policy_that_forbids_owing_is_refused_while_the_account_owes(ledger: Ledger, policy: Policy) -> None:
    await ledger.change_policy("alice", UncappedOverdraft())
    await ledger.commit(pay("alice", "bob", "USDT", "1"))

    with pytest.raises(AccountNotEmpty):
        await ledger.change_policy("alice", policy)
    await seed(ledger, "alice", "1")
    await ledger.change_policy("alice", policy)


@scenario
async def test_a_policy_that_forbids_owing_counts_the_sum_not_the_postings(ledger: Ledger) -> None:
    """What came in and what was paid stand side by side in a system account; it owes nothing."""
    await seed(ledger, "fees", "5", "2", "1")
    await ledger.commit(pay("fees", "bob", "USDT", "7"))
    assert min(p.amount.minor for p in await ledger.postings("fees")) < 0

    await ledger.change_policy("fees", NoOverdraft())

    assert await balance(ledger, "fees") == "1.000000"
    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("fees", "bob", "USDT", "1.000001"))


@pytest.mark.parametrize("policy", [SystemAccount(), ExternalAccount()])
@scenario
async def test_an_account_that_stops_selecting_keeps_its_balance(ledger: Ledger, policy: Policy) -> None:
    await seed(ledger, "alice", "5")

    await ledger.change_policy("alice", policy)
    assert await balance(ledger, "alice") == "5.000000"
    await ledger.commit(pay("alice", "bob", "USDT", "7"))
    assert await balance(ledger, "alice") == "-2.000000"


@scenario
async def test_an_account_that_starts_selecting_keeps_its_balance(ledger: Ledger) -> None:
    await seed(ledger, "fees", "5")

    await ledger.change_policy("fees", NoOverdraft())

    assert await balance(ledger, "fees") == "5.000000"
    await ledger.commit(pay("fees", "bob", "USDT", "4"))
    assert await balance(ledger, "fees") == "1.000000"


@pytest.mark.parametrize("floor", ["1", "abc", "", "-1e", "NaN", "-Infinity", "-0.0000001"])
@scenario
async def test_a_malformed_floor_is_refused(ledger: Ledger, floor: str) -> None:
    with pytest.raises((InvalidName, PrecisionOverflow)):
        await ledger.create_account("credit", policy=CappedOverdraft(floor=floor, asset="USDT"))


@scenario
async def test_a_floor_in_an_unknown_asset_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownAsset):
        await ledger.create_account("credit", policy=CappedOverdraft(floor="-1", asset="DOGE"))


@scenario
async def test_a_pin_names_one_version(ledger: Ledger) -> None:
    before = (await ledger.account("alice")).snapshot
    await ledger.freeze("alice")
    frozen = (await ledger.account("alice")).snapshot
    await ledger.unfreeze("alice")
    after = (await ledger.account("alice")).snapshot

    assert len({before, frozen, after}) == 3
    history = await ledger.account_history("alice")
    assert [found.account.snapshot for found in history] == [before, frozen, after]


# --- books -----------------------------------------------------------------------------------------------------------


@scenario
async def test_a_book_is_created_once(ledger: Ledger) -> None:
    first = await ledger.create_book("retail", assets=("USDT",))

    assert await ledger.create_book("retail", assets=("USDT",)) == first
    with pytest.raises(AlreadyExists):
        await ledger.create_book("retail", assets=("BTC",))


@scenario
async def test_a_book_never_partitions_a_balance(ledger: Ledger) -> None:
    await ledger.create_book("retail")
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", book="retail"))
    await ledger.commit(deposit(BANK, "alice", "USDT", "1"))

    await ledger.commit(pay("alice", "bob", "USDT", "2", book="retail"))


@scenario
async def test_a_book_of_unknown_assets_or_malformed_names_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownAsset):
        await ledger.create_book("retail", assets=("DOGE",))
    with pytest.raises(InvalidName):
        await ledger.create_book("Retail")
    with pytest.raises(InvalidName):
        await ledger.create_book("retail", accounts=("Alice",))


@scenario
async def test_an_account_of_an_unknown_book_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownBook):
        await ledger.create_account("shop", book="nowhere")


# --- assets ----------------------------------------------------------------------------------------------------------


@scenario
async def test_a_suspended_asset_does_not_move_until_it_is_resumed(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")
    await ledger.change_asset("USDT", status=AssetStatus.SUSPENDED)

    with pytest.raises(AssetSuspended):
        await ledger.commit(pay("alice", "bob", "USDT", "1"))
    with pytest.raises(AssetSuspended):
        await ledger.authorize("alice", "USDT", "1")
    await seed(ledger, "alice", "1", asset="BTC")
    await ledger.change_asset("USDT", status=AssetStatus.ACTIVE)
    await ledger.commit(pay("alice", "bob", "USDT", "1"))


@scenario
async def test_a_suspension_binds_every_program(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        await seed(other.ledger, "alice", "1")
        await ledger.change_asset("USDT", status=AssetStatus.SUSPENDED)

        with pytest.raises(AssetSuspended):
            await seed(other.ledger, "alice", "1")


@scenario
async def test_an_asset_keeps_its_precision(ledger: Ledger) -> None:
    assert (await ledger.create_asset("USDT", 6)).precision == 6
    with pytest.raises(AlreadyExists):
        await ledger.create_asset("USDT", 2)


@scenario
async def test_transfer_limits_are_kept_in_smallest_units(ledger: Ledger) -> None:
    asset = await ledger.change_asset("USDT", min_transfer="0.5", max_transfer="1000")

    assert (asset.min_transfer, asset.max_transfer) == (500_000, 1_000_000_000)
    assert (await ledger.asset("USDT")) == asset
    with pytest.raises(InvalidName):
        await ledger.change_asset("USDT", max_transfer="0.4")
    with pytest.raises(InvalidName):
        await ledger.create_asset("EUR", 2, min_transfer="0")


@pytest.mark.parametrize(
    ("code", "precision"), [("usdt", 6), ("", 6), ("A" * 17, 6), ("EU R", 2), ("EUR", -1), ("EUR", 31), ("EUR", True)]
)
@scenario
async def test_a_malformed_asset_is_refused(ledger: Ledger, code: str, precision: int) -> None:
    with pytest.raises(InvalidName):
        await ledger.create_asset(code, precision)


@scenario
async def test_a_change_of_an_unknown_asset_is_refused(ledger: Ledger) -> None:
    with pytest.raises(UnknownAsset):
        await ledger.change_asset("DOGE", status=AssetStatus.SUSPENDED)


@scenario
async def test_a_refused_change_leaves_no_version(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")
    with pytest.raises(Refusal):
        await ledger.close_empty("alice")

    history = await ledger.account_history("alice")
    assert [type(found.account) for found in history] == [Account]


# --- what is asked for again -----------------------------------------------------------------------------------------


OTHER_ASSETS: dict[str, dict[str, Any]] = {
    "precision": {"precision": 3},
    "min_transfer": {"min_transfer": "0.02"},
    "max_transfer": {"max_transfer": "50.01"},
    "internal_transfer_enabled": {"internal_transfer_enabled": False},
}


@pytest.mark.parametrize("what", OTHER_ASSETS)
@scenario
async def test_an_asset_created_again_with_other_values_is_refused(ledger: Ledger, what: str) -> None:
    """Ignored, an operator would believe in a bound that nobody keeps."""
    made = await ledger.create_asset("EUR", 2, min_transfer="0.01", max_transfer="50")
    before = await ledger.events(limit=1000)
    asked: dict[str, Any] = {"precision": 2} | OTHER_ASSETS[what]

    with pytest.raises(AlreadyExists, match="EUR already exists with other properties: it") as refused:
        await ledger.create_asset("EUR", **asked)

    assert ("never changes" if what == "precision" else f"its {what} is") in str(refused.value)
    assert await ledger.asset("EUR") == made
    assert await ledger.events(limit=1000) == before


@scenario
async def test_an_asset_created_again_is_the_same_whatever_was_not_said(ledger: Ledger) -> None:
    made = await ledger.create_asset("EUR", 2, min_transfer="0.01", max_transfer="50", internal_transfer_enabled=False)
    assert await ledger.create_asset("EUR", 2) == made
    assert await ledger.create_asset("EUR", 2, max_transfer="50.00") == made
    changed = await ledger.change_asset("EUR", min_transfer="1", max_transfer="2", internal_transfer_enabled=True)
    assert (changed.min_transfer, changed.max_transfer, changed.internal_transfer_enabled) == (100, 200, True)
    assert await ledger.create_asset("EUR", 2) == changed
    with pytest.raises(InvalidName):
        await ledger.create_asset("EUR", 2, internal_transfer_enabled=1)  # type: ignore[arg-type]


@scenario
async def test_a_changed_asset_says_so_in_the_events(ledger: Ledger) -> None:
    await ledger.create_asset("EUR", 2)
    await ledger.change_asset("EUR", max_transfer="2")
    await ledger.change_asset("EUR", internal_transfer_enabled=False)

    told = [(e.kind.name, e.name) for e in await ledger.events(limit=1000) if e.name == "EUR"]

    assert told == [("ASSET_CREATED", "EUR"), ("ASSET_CHANGED", "EUR"), ("ASSET_CHANGED", "EUR")]


@scenario
async def test_a_book_and_an_account_asked_for_again_are_compared_by_what_they_mean(ledger: Ledger) -> None:
    book = await ledger.create_book("retail", assets=("USDT", "BTC"), accounts=("user", "bank"))
    assert await ledger.create_book("retail", assets=("BTC", "USDT"), accounts=("bank", "user")) == book
    with pytest.raises(AlreadyExists, match="admits assets USDT, BTC; books never change"):
        await ledger.create_book("retail", assets=("USDT",), accounts=("user", "bank"))
    made = await ledger.create_account("credit", policy=CappedOverdraft("-5.00", "USDT"), book="retail")
    assert await ledger.create_account("credit", policy=CappedOverdraft("-5", "USDT"), book="retail") == made
    with pytest.raises(AlreadyExists, match=r"its policy is .*-5\.00.*bursar account policy credit"):
        await ledger.create_account("credit", policy=CappedOverdraft("-6", "USDT"), book="retail")
    with pytest.raises(AlreadyExists, match="bound to book retail, and that never changes"):
        await ledger.create_account("credit", policy=CappedOverdraft("-5", "USDT"))
