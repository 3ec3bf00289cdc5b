"""Reversal and holds: giving back what was moved, and setting money aside."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from typing import Any

import pytest
from tests.builders import BANK, balance, outcome, receipts, scenario, seed

from bursar import CappedOverdraft, Conflict, Entry, Movement, UncappedOverdraft, deposit, pay
from bursar.ledger import Ledger
from bursar.model.entries import EntryKind, HoldState
from bursar.model.errors import (
    AccountFrozen,
    AccountNotEmpty,
    FloorExceeded,
    HoldClosed,
    HoldTooSmall,
    InsufficientFunds,
    InvalidAmount,
    InvalidName,
    KeyReused,
    Refusal,
    UnknownEnvelope,
    UnknownHold,
)
from bursar.model.money import AssetStatus

A_MOMENT = timedelta(microseconds=1)  # over by the time anybody looks again


# --- reversal --------------------------------------------------------------------------------------------------------


@scenario
async def test_reverse(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))

    reversal = await ledger.reverse(paid.envelope, metadata={"why": "mistake"})

    view = await ledger.envelope(reversal.envelope)
    assert (view.kind, view.reverses, view.metadata) == (EntryKind.RETURN, paid.envelope, {"why": "mistake"})
    assert (await balance(ledger, "alice"), await balance(ledger, "bob")) == ("10.000000", "0.000000")


@scenario
async def test_reverse_again_is_the_same_receipt(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))
    first = await ledger.reverse(paid.envelope)
    await seed(ledger, "bob", "4")

    second = await ledger.reverse(paid.envelope)

    assert (second.envelope, second.replayed) == (first.envelope, True)
    assert await balance(ledger, "bob") == "4.000000"


@scenario
async def test_reverse_concurrently_happens_once(ledger: Ledger) -> None:
    (paid,) = await seed(ledger, "alice", "10")

    outcomes = await asyncio.gather(*[outcome(ledger.reverse(paid.envelope)) for _ in range(4)])

    assert len({found.envelope for found in receipts(outcomes)}) == 1
    assert {type(found) for found in outcomes if found not in receipts(outcomes)} <= {Conflict}
    assert await balance(ledger, "alice") == "0.000000"


@scenario
async def test_reverse_by_content_hash(ledger: Ledger) -> None:
    (paid,) = await seed(ledger, "alice", "10")

    await ledger.reverse(paid.id)

    assert await balance(ledger, "alice") == "0.000000"


@scenario
async def test_reverse_consumes_the_very_postings_where_they_are_live(ledger: Ledger) -> None:
    await seed(ledger, "bob", "100")
    paid = (await seed(ledger, "bob", "4"))[0]
    created = {p.id for p in (await ledger.envelope(paid.envelope)).creates}

    reversal = await ledger.reverse(paid.envelope)

    assert {p.id for p in (await ledger.envelope(reversal.envelope)).consumes} == created


@scenario
async def test_reverse_after_the_posting_was_spent_takes_the_value(ledger: Ledger) -> None:
    """L22: compact, or any payment, must not make reversal impossible."""
    (paid,) = await seed(ledger, "alice", "10")
    await seed(ledger, "alice", "5")
    await ledger.compact("alice")

    await ledger.reverse(paid.envelope)

    assert await balance(ledger, "alice") == "5.000000"


@scenario
async def test_reverse_after_the_money_was_spent_is_refused(ledger: Ledger) -> None:
    (paid,) = await seed(ledger, "alice", "10")
    await ledger.commit(pay("alice", "bob", "USDT", "0.000001"))

    with pytest.raises(InsufficientFunds):
        await ledger.reverse(paid.envelope)


@scenario
async def test_reverse_obeys_the_floor_of_who_gives_back(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-3", asset="USDT"))
    (paid,) = await seed(ledger, "credit", "10")
    await ledger.commit(pay("credit", "bob", "USDT", "4"))

    with pytest.raises(FloorExceeded):
        await ledger.reverse(paid.envelope)
    await ledger.commit(pay("bob", "credit", "USDT", "1"))
    await ledger.reverse(paid.envelope)

    assert await balance(ledger, "credit") == "-3.000000"


@scenario
async def test_reverse_several_movements_and_assets(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    await seed(ledger, "bob", "1", asset="BTC")
    swap = await ledger.commit(
        Entry(
            movements=(
                Movement("alice", "bob", "USDT", "10"),
                Movement("bob", "alice", "BTC", "0.25"),
                Movement("bob", "carol", "USDT", "4"),
            )
        )
    )

    await ledger.reverse(swap.envelope)

    assert await balance(ledger, "alice") == "10.000000"
    assert await balance(ledger, "bob", "BTC") == "1.00000000"
    assert await balance(ledger, "carol") == "0.000000"


@scenario
async def test_a_reversal_can_be_reversed(ledger: Ledger) -> None:
    (paid,) = await seed(ledger, "alice", "10")
    reversal = await ledger.reverse(paid.envelope)

    await ledger.reverse(reversal.envelope)

    assert await balance(ledger, "alice") == "10.000000"


@scenario
async def test_reverse_into_a_frozen_account_goes_through(ledger: Ledger) -> None:
    """T35: a freeze does not stop what is given back."""
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))
    await ledger.freeze("alice")

    await ledger.reverse(paid.envelope)

    assert await balance(ledger, "alice") == "10.000000"


@scenario
async def test_reverse_out_of_a_frozen_account_is_refused(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))
    await ledger.freeze("bob")

    with pytest.raises(AccountFrozen):
        await ledger.reverse(paid.envelope)


@scenario
async def test_a_suspended_asset_is_still_given_back(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))
    hold = await ledger.authorize("alice", "USDT", "1")
    await ledger.change_asset("USDT", status=AssetStatus.SUSPENDED)

    await ledger.reverse(paid.envelope)
    await ledger.void(hold.id)

    assert await balance(ledger, "alice") == "10.000000"


@pytest.mark.parametrize("envelope", [4711, "ab" * 32, "no hash", 2**63, 10**30])
@scenario
async def test_reverse_of_an_unknown_envelope(ledger: Ledger, envelope: int | str) -> None:
    with pytest.raises(UnknownEnvelope):
        await ledger.reverse(envelope)


@scenario
async def test_what_only_merged_postings_is_not_reversed(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1", "2")
    await ledger.compact("alice")
    merged = (await ledger.history("alice"))[0]

    with pytest.raises(Refusal):
        await ledger.reverse(merged.envelope)


@scenario
async def test_a_hold_is_voided_not_reversed(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    with pytest.raises(Refusal):
        await ledger.reverse(hold.id)


# --- holds -----------------------------------------------------------------------------------------------------------


@scenario
async def test_hold(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")

    hold = await ledger.authorize("alice", "USDT", "4")

    assert (hold.state, str(hold.amount), str(hold.remaining)) == (HoldState.OPEN, "4.000000", "4.000000")
    assert await balance(ledger, "alice") == "6.000000"
    assert [h.id for h in await ledger.holds("alice")] == [hold.id]


@scenario
async def test_held_money_can_not_be_spent(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    await ledger.authorize("alice", "USDT", "4")

    with pytest.raises(InsufficientFunds):
        await ledger.commit(pay("alice", "bob", "USDT", "6.000001"))


@scenario
async def test_confirm_all(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    await ledger.confirm(hold.id, "bob")

    assert await balance(ledger, "bob") == "4.000000"
    assert (await ledger.hold(hold.id)).state is HoldState.CONFIRMED
    assert await ledger.holds("alice") == []


@scenario
async def test_confirm_in_part_then_the_rest(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    await ledger.confirm(hold.id, "bob", "1.5")
    left = await ledger.hold(hold.id)
    assert (left.state, str(left.remaining)) == (HoldState.OPEN, "2.500000")
    await ledger.confirm(hold.id, "carol")

    assert (await balance(ledger, "bob"), await balance(ledger, "carol")) == ("1.500000", "2.500000")
    assert (await ledger.hold(hold.id)).state is HoldState.CONFIRMED


@scenario
async def test_over_confirm_is_refused(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await ledger.confirm(hold.id, "bob", "1")

    with pytest.raises(HoldTooSmall) as refused:
        await ledger.confirm(hold.id, "bob", "3.000001")

    assert (refused.value.remaining, refused.value.needed) == ("3.000000", "3.000001")
    assert await balance(ledger, "bob") == "1.000000"


@scenario
async def test_concurrent_confirmations_never_pay_more_than_is_held(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    outcomes = await asyncio.gather(*[outcome(ledger.confirm(hold.id, "bob", "1.5")) for _ in range(5)])

    paid = len(receipts(outcomes))
    assert 1 <= paid <= 2
    assert {type(found) for found in outcomes if found not in receipts(outcomes)} <= {HoldTooSmall, Conflict}
    assert (await ledger.hold(hold.id)).remaining.minor == 4_000_000 - paid * 1_500_000


@scenario
async def test_void(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    await ledger.void(hold.id)

    assert await balance(ledger, "alice") == "10.000000"
    assert (await ledger.hold(hold.id)).state is HoldState.VOIDED


@scenario
async def test_void_again_is_the_same_receipt(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    first = await ledger.void(hold.id)

    second = await ledger.void(hold.id)

    assert (second.envelope, second.replayed) == (first.envelope, True)


@scenario
async def test_void_after_part_gives_back_the_rest(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await ledger.confirm(hold.id, "bob", "1.5")

    await ledger.void(hold.id)

    assert await balance(ledger, "alice") == "8.500000"
    assert await balance(ledger, "bob") == "1.500000"


@pytest.mark.parametrize("end", ["confirm", "void"])
@scenario
async def test_what_is_over_is_over(ledger: Ledger, end: str) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await (ledger.confirm(hold.id, "bob") if end == "confirm" else ledger.void(hold.id))
    if end == "confirm":
        with pytest.raises(HoldClosed):
            await ledger.void(hold.id)
    with pytest.raises(HoldClosed):
        await ledger.confirm(hold.id, "carol", "1")

    assert await balance(ledger, "carol") == "0.000000"


@scenario
async def test_confirm_against_void_has_one_winner(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")

    outcomes = await asyncio.gather(outcome(ledger.confirm(hold.id, "bob")), outcome(ledger.void(hold.id)))

    assert len(receipts(outcomes)) == 1
    got = {name: (await ledger.balance(name, "USDT")).minor for name in ("alice", "bob")}
    assert got in ({"alice": 6_000_000, "bob": 4_000_000}, {"alice": 10_000_000, "bob": 0})


@scenario
async def test_expiry_gives_back_what_remains(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4", expires_in=A_MOMENT)
    lasting = await ledger.authorize("alice", "USDT", "1", expires_in=timedelta(days=1))

    assert len(await ledger.expire_holds()) == 1
    assert await ledger.expire_holds() == []
    assert (await ledger.hold(hold.id)).state is HoldState.EXPIRED
    assert (await ledger.hold(lasting.id)).state is HoldState.OPEN
    assert await balance(ledger, "alice") == "9.000000"


@scenario
async def test_an_expired_hold_is_not_confirmed_even_before_it_is_reaped(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4", expires_in=A_MOMENT)

    with pytest.raises(HoldClosed):
        await ledger.confirm(hold.id, "bob")


@pytest.mark.parametrize("number", [4711, 2**63, 10**30])
@scenario
async def test_unknown_hold(ledger: Ledger, number: int) -> None:
    with pytest.raises(UnknownHold):
        await ledger.hold(number)
    with pytest.raises(UnknownHold):
        await ledger.void(number)
    with pytest.raises(UnknownHold):
        await ledger.confirm(number, "bob")


@scenario
async def test_an_envelope_that_is_no_hold_is_an_unknown_hold(ledger: Ledger) -> None:
    (paid,) = await seed(ledger, "alice", "10")

    with pytest.raises(UnknownHold):
        await ledger.void(paid.envelope)


@scenario
async def test_a_failed_authorization_leaves_nothing(ledger: Ledger) -> None:
    """L8: no orphaned hold, no held posting."""
    await seed(ledger, "alice", "1")
    with pytest.raises(InsufficientFunds):
        await ledger.authorize("alice", "USDT", "2")

    assert await ledger.holds("alice") == []
    assert await ledger.balances("held") == {}


@pytest.mark.parametrize("amount", ["0", "-1", "abc"])
@scenario
async def test_a_hold_needs_an_amount_above_zero(ledger: Ledger, amount: str) -> None:
    with pytest.raises(InvalidAmount):
        await ledger.authorize("alice", "USDT", amount)


@scenario
async def test_a_confirmation_needs_an_amount_above_zero(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")
    hold = await ledger.authorize("alice", "USDT", "1")

    with pytest.raises(InvalidAmount):
        await ledger.confirm(hold.id, "bob", "0")


@scenario
async def test_authorize_with_the_same_key_is_the_same_hold(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    first = await ledger.authorize("alice", "USDT", "4", key="k")

    assert (await ledger.authorize("alice", "USDT", "4", key="k")).id == first.id
    with pytest.raises(KeyReused):
        await ledger.authorize("alice", "USDT", "5", key="k")
    assert await balance(ledger, "alice") == "6.000000"


@scenario
async def test_authorize_tells_what_is_there(ledger: Ledger) -> None:
    """The first time as it was written; again, as it stands by then."""
    await seed(ledger, "alice", "10")
    first = await ledger.authorize("alice", "USDT", "4", key="k", expires_in=timedelta(hours=1))

    assert first == await ledger.hold(first.id)
    assert [first] == await ledger.holds("alice")
    await ledger.confirm(first.id, "bob", "1")
    again = await ledger.authorize("alice", "USDT", "4", key="k", expires_in=timedelta(hours=1))
    assert (again.id, str(again.remaining)) == (first.id, "3.000000")


@scenario
async def test_confirm_again_although_too_little_remains_is_the_same_receipt(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    first = await ledger.confirm(hold.id, "bob", "3", key="k")

    second = await ledger.confirm(hold.id, "bob", "3", key="k")

    assert (second.envelope, second.replayed) == (first.envelope, True)
    with pytest.raises(HoldTooSmall):
        await ledger.confirm(hold.id, "bob", "3", key="other")
    assert await balance(ledger, "bob") == "3.000000"


@scenario
async def test_confirm_all_with_the_key_of_a_part_is_that_part(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    first = await ledger.confirm(hold.id, "bob", "1", key="k")

    second = await ledger.confirm(hold.id, "bob", key="k")

    assert (second.envelope, second.replayed) == (first.envelope, True)
    assert await balance(ledger, "bob") == "1.000000"


@pytest.mark.parametrize("amount", ["1", None])
@scenario
async def test_confirm_with_the_same_key_happens_once(ledger: Ledger, amount: str | None) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    first = await ledger.confirm(hold.id, "bob", amount, key="k")

    second = await ledger.confirm(hold.id, "bob", amount, key="k")

    assert (second.envelope, second.replayed) == (first.envelope, True)
    assert await balance(ledger, "bob") == ("4.000000" if amount is None else "1.000000")


@scenario
async def test_confirm_with_the_same_key_but_another_intent_is_refused(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await ledger.confirm(hold.id, "bob", "1", key="k")

    with pytest.raises(KeyReused):
        await ledger.confirm(hold.id, "carol", "1", key="k")
    with pytest.raises(KeyReused):
        await ledger.confirm(hold.id, "bob", "2", key="k")


@scenario
async def test_confirm_with_the_key_of_another_hold_is_refused(ledger: Ledger) -> None:
    """To be told "done" about a hold that stays open would lose the payee's money without a word."""
    await seed(ledger, "alice", "10")
    first, second = await ledger.authorize("alice", "USDT", "4"), await ledger.authorize("alice", "USDT", "4")
    await ledger.confirm(first.id, "bob", key="k")

    with pytest.raises(KeyReused):
        await ledger.confirm(second.id, "bob", key="k")


@scenario
async def test_void_into_a_frozen_account_goes_through(ledger: Ledger) -> None:
    """T35."""
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await ledger.freeze("alice")

    await ledger.void(hold.id)

    assert await balance(ledger, "alice") == "10.000000"


@scenario
async def test_confirm_to_a_frozen_account_is_refused(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "4")
    await ledger.freeze("bob")

    with pytest.raises(AccountFrozen):
        await ledger.confirm(hold.id, "bob")
    assert (await ledger.hold(hold.id)).state is HoldState.OPEN


@scenario
async def test_a_frozen_account_pays_from_no_hold(ledger: Ledger) -> None:
    """What was set aside is still its money: it may come back, but not leave. What was confirmed before stays so."""
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5")
    first = await ledger.confirm(hold.id, "bob", "1", key="first")
    await ledger.freeze("alice")
    with pytest.raises(AccountFrozen):
        await ledger.confirm(hold.id, "bob", "2", key="second")
    assert (await ledger.confirm(hold.id, "bob", "1", key="first")).envelope == first.envelope
    await ledger.unfreeze("alice")
    await ledger.confirm(hold.id, "bob", "2", key="second")
    await ledger.freeze("alice")
    await ledger.void(hold.id)
    assert await balance(ledger, "bob") == "3.000000"
    assert await balance(ledger, "alice") == "7.000000"


@scenario
async def test_a_freeze_that_comes_while_a_hold_is_confirmed_stops_it(ledger: Ledger) -> None:
    """Given the moment between the look and the entry, when the account is frozen there, then nothing leaves."""
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5")
    apply = ledger.writer.apply

    async def freeze_first(change: Any) -> Any:
        ledger.writer.apply = apply  # type: ignore[method-assign]
        await ledger.freeze("alice")
        return await apply(change)

    ledger.writer.apply = freeze_first  # type: ignore[method-assign]
    with pytest.raises(AccountFrozen):
        await ledger.confirm(hold.id, "bob")
    assert await balance(ledger, "bob") == "0.000000"


@scenario
async def test_a_frozen_account_authorizes_nothing(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    await ledger.freeze("alice")

    with pytest.raises(AccountFrozen):
        await ledger.authorize("alice", "USDT", "4")


@scenario
async def test_an_account_with_open_holds_can_not_close(ledger: Ledger) -> None:
    await seed(ledger, "alice", "4")
    hold = await ledger.authorize("alice", "USDT", "4")

    with pytest.raises(AccountNotEmpty):
        await ledger.close("alice")
    await ledger.confirm(hold.id, "bob")
    await ledger.close("alice")


@scenario
async def test_an_overdraft_may_be_held(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=UncappedOverdraft())
    hold = await ledger.authorize("credit", "USDT", "4")
    assert await balance(ledger, "credit") == "-4.000000"

    await ledger.void(hold.id)

    assert await balance(ledger, "credit") == "0.000000"


@scenario
async def test_money_of_an_account_that_belongs_to_a_book_can_be_held(ledger: Ledger) -> None:
    await ledger.create_book("retail")
    await ledger.create_account("shop", book="retail")
    await ledger.commit(deposit(BANK, "shop", "USDT", "10", book="retail"))

    hold = await ledger.authorize("shop", "USDT", "4")
    await ledger.void(hold.id)

    assert await balance(ledger, "shop") == "10.000000"


@scenario
async def test_a_wide_amount_may_be_held_and_confirmed_in_part(ledger: Ledger) -> None:
    wide = "100000000000000000000"
    await seed(ledger, "alice", wide, asset="ETH")
    hold = await ledger.authorize("alice", "ETH", wide)
    await ledger.confirm(hold.id, "bob", "0.000000000000000001")

    assert str((await ledger.hold(hold.id)).remaining) == "99999999999999999999.999999999999999999"


# --- reversing what was paid from a hold -----------------------------------------------------------------------------


@scenario
async def test_reverse_a_confirmation_gives_back_to_who_was_held(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5")
    paid = await ledger.confirm(hold.id, "bob")

    reversal = await ledger.reverse(paid.envelope, metadata={"why": "returned"})

    view = await ledger.envelope(reversal.envelope)
    assert (view.reverses, view.metadata) == (paid.envelope, {"why": "returned"})
    assert [(m.source, m.target, str(m.amount)) for m in view.movements] == [("bob", "alice", "5.000000")]
    assert (await balance(ledger, "alice"), await balance(ledger, "bob")) == ("10.000000", "0.000000")
    assert (await ledger.hold(hold.id)).state is HoldState.CONFIRMED
    assert (await ledger.reverse(paid.envelope)).replayed


@scenario
async def test_reverse_a_part_leaves_the_rest_held(ledger: Ledger) -> None:
    """The same envelope has made the posting that is held still: it is not touched."""
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5")
    first = await ledger.confirm(hold.id, "bob", "2")
    second = await ledger.confirm(hold.id, "bob", "1")

    await ledger.reverse(second.envelope)
    await ledger.reverse(first.envelope)

    assert str((await ledger.hold(hold.id)).remaining) == "2.000000"
    await ledger.confirm(hold.id, "carol")
    found = [await balance(ledger, name) for name in ("alice", "bob", "carol")]
    assert found == ["8.000000", "0.000000", "2.000000"]


@scenario
async def test_reverse_a_confirmation_of_a_frozen_account(ledger: Ledger) -> None:
    """What is given back still arrives; who has it may not be frozen."""
    await seed(ledger, "alice", "5")
    paid = await ledger.confirm((await ledger.authorize("alice", "USDT", "5")).id, "bob")
    await ledger.freeze("alice")
    await ledger.reverse(paid.envelope)
    assert await balance(ledger, "alice") == "5.000000"


@scenario
async def test_reversals_of_holds_that_make_no_sense_say_what_to_do(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5")
    with pytest.raises(InvalidName, match=f"void hold {hold.id}"):
        await ledger.reverse(hold.id)
    back = await ledger.confirm(hold.id, "alice", "1")
    with pytest.raises(InvalidName, match="back to alice itself"):
        await ledger.reverse(back.envelope)
    given_back = await ledger.void(hold.id)
    with pytest.raises(InvalidName, match="authorize it again"):
        await ledger.reverse(given_back.envelope)


# --- a key stands for one request ------------------------------------------------------------------------------------


@scenario
async def test_authorize_again_is_the_same_hold_as_it_is_by_now(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    hour = timedelta(hours=1)
    first = await ledger.authorize("alice", "USDT", "5", key="k", expires_in=hour)
    await ledger.confirm(first.id, "bob", "2")

    again = await ledger.authorize("alice", "USDT", "5", key="k", expires_in=hour)

    assert (again.id, again.expires, str(again.remaining)) == (first.id, first.expires, "3.000000")


@pytest.mark.parametrize(
    ("first", "second"),
    [(timedelta(hours=1), timedelta(hours=1, microseconds=1)), (None, timedelta(hours=1)), (timedelta(days=1), None)],
    ids=["longer", "expires", "for ever"],
)
@scenario
async def test_authorize_with_another_duration_is_another_request(
    ledger: Ledger, first: timedelta | None, second: timedelta | None
) -> None:
    """The caller believes that the money is held until then. It is not."""
    await seed(ledger, "alice", "10")
    hold = await ledger.authorize("alice", "USDT", "5", key="k", expires_in=first)

    with pytest.raises(KeyReused):
        await ledger.authorize("alice", "USDT", "5", key="k", expires_in=second)

    assert (await ledger.hold(hold.id)).expires == hold.expires
    assert await balance(ledger, "alice") == "5.000000"
