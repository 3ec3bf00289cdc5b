"""Resolve: which postings an intent consumes and which it creates, account by account."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from bursar.model import resolve as resolving
from bursar.model.accounts import (
    Account,
    AccountStatus,
    Book,
    CappedOverdraft,
    ExternalAccount,
    SystemAccount,
    UncappedOverdraft,
)
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.envelope import BookedLeg, Envelope, booked_amount
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    BalanceNotGuarded,
    InsufficientFunds,
    InvalidEntry,
    PostingNotLive,
    TooManyPostings,
    UnknownBook,
)
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.money import Asset
from bursar.model.postings import Posting, posting_id
from bursar.model.resolve import NETTING_MAX, booked_legs, resolve

USDT, BTC = Asset(id=1, code="USDT", precision=2), Asset(id=2, code="BTC", precision=8)
SEQ = 7
ACCOUNTS = [
    Account(id=11, path="alice"),
    Account(id=12, path="bob"),
    Account(id=13, path="bank", policy=ExternalAccount()),
    Account(id=14, path="fees", policy=SystemAccount()),
    Account(id=15, path="loose", policy=UncappedOverdraft()),
    Account(id=16, path="credit", policy=CappedOverdraft(floor="-5.00", asset="USDT")),
]
NAMES = {account.id: account.path for account in ACCOUNTS}


def state(*changed: Account, **owned: list[int]) -> LedgerState:
    """These accounts; of USDT each owns such amounts, numbered account * 100 + 0, 1, 2, …"""
    heads = {account.path: account for account in (*ACCOUNTS, *changed)}
    found = LedgerState(heads, {"USDT": USDT, "BTC": BTC}, {"main": Book(id=1, name="main")})
    for account in heads.values():
        postings = [Posting(account.id * 100 + n, account.id, 1, v) for n, v in enumerate(owned.get(account.path, []))]
        for asset in (USDT, BTC):
            for sign in (PLUS, MINUS):
                pool = [p for p in postings if p.asset == asset.id and p.amount * sign > 0]
                found.add_postings(pool, key=(account.id, asset.id, sign))
    return found


def intent(*legs: tuple[str, str, int], **more: Any) -> Intent:
    """Movements of USDT, in smallest units."""
    return Intent(scope="user", key="k", legs=tuple(Leg(a, b, "USDT", minor) for a, b, minor in legs), **more)


def consumed(envelope: Envelope) -> list[int]:
    return [posting.id for posting in envelope.consumes]


def created(envelope: Envelope) -> list[tuple[str, int]]:
    """Who gets which amounts; the numbers are those of their places in the envelope."""
    assert [posting.id for posting in envelope.creates] == [posting_id(SEQ, n) for n in range(len(envelope.creates))]
    return [(NAMES[posting.account], posting.amount) for posting in envelope.creates]


# --- paying ----------------------------------------------------------------------------------------------------------


def test_the_largest_posting_pays_and_the_payer_keeps_the_change() -> None:
    envelope = resolve(intent(("alice", "bob", 30)), state(alice=[5, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1101], [("alice", 70), ("bob", 30)])


def test_nothing_is_left_of_what_was_exactly_enough() -> None:
    envelope = resolve(intent(("alice", "bob", 120)), state(alice=[5, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1101, 1102], [("bob", 120)])


@pytest.mark.parametrize("payer", ["bank", "fees"])
def test_an_account_that_is_not_a_users_just_goes_negative(payer: str) -> None:
    """Even if it owns a posting: it never looks for any."""
    envelope = resolve(intent((payer, "alice", 30)), state(bank=[100], fees=[100]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([], [(payer, -30), ("alice", 30)])


def test_an_overdraft_account_goes_negative_by_what_is_missing() -> None:
    envelope = resolve(intent(("loose", "alice", 30)), state(loose=[5, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1501, 1500], [("loose", -5), ("alice", 30)])


def test_movements_of_one_account_share_one_selection() -> None:
    legs = ("alice", "bob", 30), ("alice", "bank", 60)
    envelope = resolve(intent(*legs), state(alice=[50, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1101], [("alice", 10), ("bob", 30), ("bank", 60)])


@pytest.mark.parametrize("through", ["bob", "loose"])
def test_value_that_passes_through_needs_no_postings(through: str) -> None:
    """Given an account of which no postings were read, when what it gets goes on at once, then none are missed."""
    where = state(alice=[30])
    for sign in (PLUS, MINUS):
        del where.pools[where.accounts[through].id, USDT.id, sign]
    envelope = resolve(intent(("alice", through, 30), (through, "bank", 30)), where, SEQ)

    assert (consumed(envelope), created(envelope)) == ([1100], [("bank", 30)])
    assert [account.path for account in envelope.accounts] == ["alice", "bank", through]


def test_each_asset_is_settled_by_itself() -> None:
    where = state(alice=[30])
    where.add_postings([coin := Posting(9, 12, BTC.id, 2)], key=(12, BTC.id, PLUS))
    legs = (Leg("alice", "bob", "USDT", 30), Leg("bob", "alice", "BTC", 2))
    envelope = resolve(Intent(scope="user", key="k", legs=legs), where, SEQ)

    assert consumed(envelope) == [1100, coin.id]
    assert [(NAMES[p.account], p.asset, p.amount) for p in envelope.creates] == [("bob", 1, 30), ("alice", 2, 2)]
    assert envelope.assets == (USDT, BTC)


def test_the_envelope_carries_what_the_intent_says() -> None:
    wanted = intent(("bob", "alice", 30), metadata='{"a":1}', kind=EntryKind.RETURN, reverses=3)
    envelope = resolve(wanted, state(bob=[30]), SEQ)

    assert (envelope.seq, envelope.scope, envelope.key, envelope.kind) == (SEQ, "user", "k", EntryKind.RETURN)
    assert (envelope.reverses, envelope.metadata, envelope.book.name) == (3, '{"a":1}', "main")
    assert envelope.legs == (BookedLeg(12, 11, 1, 30),)
    assert [account.path for account in envelope.accounts] == ["alice", "bob"]


def test_a_book_that_does_not_exist() -> None:
    with pytest.raises(UnknownBook):
        resolve(intent(("alice", "bob", 30), book="retail"), state(alice=[30]), SEQ)


@pytest.mark.parametrize("amount", [2**63 - 1, 2**63, 2**127 - 1])
def test_movements_are_booked_by_row_numbers(amount: int) -> None:
    """What is compared with the ledger when a key comes again is what was written the first time."""
    wanted = intent(("alice", "bob", amount), ("bob", "bank", 1))

    expected = BookedLeg(11, 12, 1, booked_amount(amount)), BookedLeg(12, 13, 1, 1)
    assert booked_legs(wanted, state()) == expected
    assert resolve(wanted, state(alice=[amount]), SEQ).legs == expected


# --- falling short ---------------------------------------------------------------------------------------------------


def test_what_is_missing_is_said_in_the_assets_own_decimals() -> None:
    with pytest.raises(InsufficientFunds) as refused:
        resolve(intent(("alice", "bob", 126)), state(alice=[5, 100, 20]), SEQ)

    error = refused.value
    assert (error.account, error.asset, error.needed, error.available) == ("alice", "USDT", "1.26", "1.25")


def test_an_overdraft_in_one_asset_is_none_in_another() -> None:
    wanted = Intent(scope="user", key="k", legs=(Leg("credit", "bob", "BTC", 1),))
    with pytest.raises(InsufficientFunds):
        resolve(wanted, state(credit=[100]), SEQ)


@pytest.mark.parametrize(("status", "refusal"), [("frozen", AccountFrozen), ("closed", AccountClosed)])
def test_of_an_account_that_may_not_pay_it_is_not_what_it_has_that_stops_it(status: str, refusal: Any) -> None:
    alice = msgspec.structs.replace(ACCOUNTS[0], status=AccountStatus(status))
    with pytest.raises(refusal):
        resolve(intent(("alice", "bob", 126)), state(alice, alice=[100]), SEQ)


# --- the payer's balance must cover it (T42) -------------------------------------------------------------------------


@pytest.mark.parametrize("payer", ["bank", "fees", "loose"])
def test_a_balance_that_nothing_guards_covers_nothing(payer: str) -> None:
    wanted = intent((payer, "alice", 30), no_overdraft=True)
    with pytest.raises(BalanceNotGuarded) as refused:
        resolve(wanted, state(**{payer: [100]}), SEQ)

    assert refused.value.account == payer


@pytest.mark.parametrize(("status", "refusal"), [("frozen", AccountFrozen), ("closed", AccountClosed)])
def test_of_an_account_that_may_not_pay_it_is_not_its_policy_that_stops_it(status: str, refusal: Any) -> None:
    fees = msgspec.structs.replace(ACCOUNTS[3], status=AccountStatus(status))
    with pytest.raises(refusal):
        resolve(intent(("fees", "bob", 30), no_overdraft=True), state(fees), SEQ)


def test_a_balance_that_nothing_guards_may_be_paid() -> None:
    envelope = resolve(intent(("alice", "fees", 30), no_overdraft=True), state(alice=[30]), SEQ)

    assert created(envelope) == [("fees", 30)]


@pytest.mark.parametrize("through", ["bank", "loose"])
def test_a_balance_that_nothing_guards_may_be_passed_through(through: str) -> None:
    legs = ("alice", through, 30), (through, "bob", 30)
    envelope = resolve(intent(*legs, no_overdraft=True), state(alice=[30]), SEQ)

    assert created(envelope) == [("bob", 30)]


@pytest.mark.parametrize("payer", ["alice", "credit"])
def test_what_is_there_pays_without_the_overdraft(payer: str) -> None:
    envelope = resolve(intent((payer, "bob", 30), no_overdraft=True), state(alice=[30], credit=[30]), SEQ)

    assert created(envelope) == [("bob", 30)]


def test_an_overdraft_covers_nothing_that_must_be_there() -> None:
    assert created(resolve(intent(("credit", "bob", 31)), state(credit=[30]), SEQ)) == [("credit", -1), ("bob", 31)]
    with pytest.raises(InsufficientFunds):
        resolve(intent(("credit", "bob", 31), no_overdraft=True), state(credit=[30]), SEQ)


# --- being paid ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("payee", ["loose", "credit"])
def test_an_overdraft_account_pays_off_the_largest_debt_first(payee: str) -> None:
    """Given debts of 4, 30 and 7, when 32 come in, then 30 and 7 are paid off, and 5 of that is owed again (L7)."""
    where = state(loose=[-4, -30, -7], credit=[-4, -30, -7])
    envelope = resolve(intent(("bank", payee, 32)), where, SEQ)

    number = where.accounts[payee].id * 100
    assert (consumed(envelope), created(envelope)) == ([number + 1, number + 2], [("bank", -32), (payee, -5)])


def test_a_debt_that_is_paid_off_exactly_leaves_the_others_alone() -> None:
    envelope = resolve(intent(("bank", "loose", 30)), state(loose=[-4, -30]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1501], [("bank", -30)])


def test_what_is_left_after_the_debts_is_one_new_posting() -> None:
    envelope = resolve(intent(("bank", "loose", 40)), state(loose=[-4, -30]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1501, 1500], [("bank", -40), ("loose", 6)])


def test_one_payment_pays_off_a_limited_number_of_debts() -> None:
    envelope = resolve(intent(("bank", "loose", 1000)), state(loose=[-1] * (NETTING_MAX + 1)), SEQ)

    assert len(envelope.consumes) == NETTING_MAX
    assert created(envelope) == [("bank", -1000), ("loose", 1000 - NETTING_MAX)]


def test_a_debt_in_an_asset_without_overdraft_is_not_looked_for() -> None:
    where = state()
    del where.pools[16, BTC.id, MINUS]
    envelope = resolve(Intent(scope="user", key="k", legs=(Leg("bank", "credit", "BTC", 3),)), where, SEQ)

    assert created(envelope) == [("bank", -3), ("credit", 3)]


@pytest.mark.parametrize("payee", ["alice", "fees", "bank"])
def test_other_accounts_just_get_a_posting(payee: str) -> None:
    """Also one that owes: what a system account owes is its other side, not a debt."""
    legs = ("bob", payee, 20), ("bob", "loose", 10)
    envelope = resolve(intent(*legs), state(bob=[30], fees=[-8], bank=[-8]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1200], [(payee, 20), ("loose", 10)])


# --- postings named by number ----------------------------------------------------------------------------------------


def test_the_named_posting_pays_and_no_larger_one() -> None:
    envelope = resolve(intent(("alice", "bob", 20), consume=(1102,)), state(alice=[5, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1102], [("bob", 20)])


def test_change_of_a_named_posting_goes_back_to_its_owner() -> None:
    envelope = resolve(intent(("alice", "bob", 15), consume=(1102,)), state(alice=[5, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1102], [("alice", 5), ("bob", 15)])


def test_what_the_named_postings_lack_the_largest_others_pay() -> None:
    envelope = resolve(intent(("alice", "bob", 40), consume=(1100, 1102)), state(alice=[5, 100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1100, 1102, 1101], [("alice", 85), ("bob", 40)])


def test_a_named_posting_does_not_pay_twice() -> None:
    with pytest.raises(InsufficientFunds) as refused:
        resolve(intent(("alice", "bob", 126), consume=(1101, 1102)), state(alice=[5, 100, 20]), SEQ)

    assert (refused.value.needed, refused.value.available) == ("0.06", "0.05")


def test_a_named_posting_of_a_system_account_is_moved_on() -> None:
    envelope = resolve(intent(("fees", "bob", 20), consume=(1401,)), state(fees=[100, 20]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1401], [("bob", 20)])


def test_a_named_debt_is_not_paid_off_a_second_time() -> None:
    envelope = resolve(intent(("bank", "loose", 40), consume=(1501,)), state(loose=[-4, -30]), SEQ)

    assert (consumed(envelope), created(envelope)) == ([1501, 1500], [("bank", -40), ("loose", 6)])


@pytest.mark.parametrize("consume", [(999,), (1102, 999)])
def test_a_named_posting_that_is_not_live(consume: tuple[int, ...]) -> None:
    with pytest.raises(PostingNotLive) as refused:
        resolve(intent(("alice", "bob", 20), consume=consume), state(alice=[5, 100, 20]), SEQ)

    assert refused.value.posting == 999


@pytest.mark.parametrize("consume", [(1200,), (1100, 1200)])
def test_a_named_posting_of_an_account_that_takes_no_part(consume: tuple[int, ...]) -> None:
    with pytest.raises(InvalidEntry, match="does not take part"):
        resolve(intent(("alice", "bank", 20), consume=consume), state(alice=[20], bob=[20]), SEQ)


# --- merging ---------------------------------------------------------------------------------------------------------


def merge(account: str, *numbers: int) -> Intent:
    return Intent(scope="compact", key="k", legs=(), kind=EntryKind.COMPACT, merge=account, consume=numbers)


@pytest.mark.parametrize(
    ("account", "owned", "left"),
    [("alice", [5, 100, 20], [("alice", 105)]), ("loose", [5, -8, 20], [("loose", -3)]), ("loose", [5, -5], [])],
)
def test_named_postings_become_one_and_no_others_are_touched(account: str, owned: list[int], left: Any) -> None:
    where = state(**{account: owned})
    number = where.accounts[account].id * 100
    envelope = resolve(merge(account, number, number + 1), where, SEQ)

    assert (consumed(envelope), created(envelope)) == ([number, number + 1], left)
    assert (envelope.legs, [a.path for a in envelope.accounts]) == ((), [account])


# --- how many --------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_at_most() -> Iterator[None]:
    """An envelope that holds three postings on each side, in place of 65,535."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "POSTINGS_MAX", 3)
        yield


@pytest.mark.usefixtures("three_at_most")
@pytest.mark.parametrize("before", [[], [("bank", "fees", 1)]], ids=["alone", "after another"])
def test_an_account_that_would_pay_with_too_many_postings(before: list[tuple[str, str, int]]) -> None:
    """It is the one to compact, whichever others pay."""
    where = state(alice=[1, 1, 1, 1])

    assert len(resolve(intent(*before, ("alice", "bank", 3)), where, SEQ).consumes) == 3
    with pytest.raises(TooManyPostings) as refused:
        resolve(intent(*before, ("alice", "bank", 4)), where, SEQ)
    assert (refused.value.account, refused.value.count, refused.value.limit) == ("alice", 4, 3)


@pytest.mark.usefixtures("three_at_most")
def test_accounts_that_would_pay_with_too_many_postings_together() -> None:
    legs = ("alice", "bank", 2), ("bob", "bank", 1)
    where = state(alice=[1, 1], bob=[1, 1])

    assert len(resolve(intent(*legs), where, SEQ).consumes) == 3
    with pytest.raises(TooManyPostings) as refused:
        resolve(intent(*legs, ("bob", "bank", 1)), where, SEQ)
    assert (refused.value.account, refused.value.count) == ("alice", 4)


@pytest.mark.usefixtures("three_at_most")
def test_too_many_postings_to_merge() -> None:
    where = state(alice=[1, 1, 1, 1])

    assert len(resolve(merge("alice", 1100, 1101, 1102), where, SEQ).consumes) == 3
    with pytest.raises(TooManyPostings) as refused:
        resolve(merge("alice", 1100, 1101, 1102, 1103), where, SEQ)
    assert refused.value.account == "alice"


@pytest.mark.usefixtures("three_at_most")
def test_too_many_postings_to_create() -> None:
    three = ("bank", "alice", 1), ("bank", "bob", 1)

    assert len(resolve(intent(*three), state(), SEQ).creates) == 3
    with pytest.raises(TooManyPostings) as refused:
        resolve(intent(*three, ("bank", "fees", 1)), state(), SEQ)
    assert (refused.value.account, refused.value.count, refused.value.limit) == ("fees", 4, 3)
