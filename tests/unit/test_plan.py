"""validate_and_plan on hand-made envelopes: each refusal, and which one comes first when there are several."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bursar.model.accounts import (
    Account,
    AccountStatus,
    Book,
    CappedOverdraft,
    ExternalAccount,
    NoOverdraft,
    Policy,
    SystemAccount,
    UncappedOverdraft,
)
from bursar.model.entries import EntryKind
from bursar.model.envelope import BookedLeg, Envelope, booked_amount
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    AmountTooLarge,
    AssetSuspended,
    BalanceNotGuarded,
    BookRefuses,
    ConservationBroken,
    DuplicateConsume,
    FloorExceeded,
    InsufficientFunds,
    InvalidEntry,
    NegativePosting,
    PostingNotLive,
    Refusal,
    StalePin,
    TooManyPostings,
    UnknownAccount,
)
from bursar.model.ledger_state import LedgerState
from bursar.model.money import MINOR_MAX, MINOR_MIN, Asset, AssetStatus
from bursar.model.plan import validate_and_plan
from bursar.model.postings import POSTINGS_MAX, Posting, posting_id

USDT = Asset(id=1, code="USDT", precision=6)
BTC = Asset(id=2, code="BTC", precision=8)
ALICE = Account(id=11, path="alice")
BOB = Account(id=12, path="bob")
BANK = Account(id=13, path="bank", policy=ExternalAccount())
MAIN = Book(id=1, name="main")
COIN = Posting(posting_id(1, 0), ALICE.id, USDT.id, 100)
SEQ = 7


def made(index: int, account: Account, amount: int, asset: Asset = USDT) -> Posting:
    return Posting(posting_id(SEQ, index), account.id, asset.id, amount)


# Alice pays bob 30 of her 100.
RIGHT = Envelope(
    seq=SEQ,
    scope="user",
    key="k",
    book=MAIN,
    kind=EntryKind.ENTRY,
    reverses=0,
    legs=(BookedLeg(ALICE.id, BOB.id, USDT.id, 30),),
    accounts=(ALICE, BOB),
    assets=(USDT,),
    consumes=(COIN,),
    creates=(made(0, ALICE, 70), made(1, BOB, 30)),
    metadata="{}",
)


def but(**changes: Any) -> Envelope:
    """The right envelope, with something wrong."""
    return msgspec.structs.replace(RIGHT, **changes)


def state(*accounts: Account, live: tuple[Posting, ...] = (COIN,), **balances: int) -> LedgerState:
    """Alice, bob and the bank as they are, unless given otherwise."""
    heads = {a.path: a for a in (ALICE, BOB, BANK, *accounts)}
    found = LedgerState(heads, {a.code: a for a in (USDT, BTC)}, {MAIN.name: MAIN})
    found.add_postings(list(live), key=None)
    for path, balance in balances.items():
        found.balances[heads[path].id, USDT.id] = balance
    return found


def changed(account: Account, **changes: Any) -> Account:
    return msgspec.structs.replace(account, version=account.version + 1, **changes)


def test_a_right_envelope_is_planned() -> None:
    plan = validate_and_plan(RIGHT, state())

    assert (plan.envelope, plan.id, plan.floors) == (RIGHT, RIGHT.id(), ())


# --- 1 and 2: shape --------------------------------------------------------------------------------------------------


def test_nothing_consumed_and_nothing_created() -> None:
    with pytest.raises(InvalidEntry, match="nothing would move"):
        validate_and_plan(but(consumes=(), creates=()), state())


@pytest.mark.parametrize("side", ["consumes", "creates"])
def test_what_is_only_consumed_or_only_created_moves_something(side: str) -> None:
    """It is refused for the value that it loses or makes."""
    with pytest.raises(ConservationBroken):
        validate_and_plan(but(**{side: ()}), state())


@pytest.mark.parametrize("side", ["consumes", "creates"])
def test_too_many_postings(side: str) -> None:
    many = tuple(Posting(i, BOB.id, USDT.id, 1) for i in range(POSTINGS_MAX + 1))
    with pytest.raises(TooManyPostings) as refused:
        validate_and_plan(but(**{side: many}), state())

    assert (refused.value.count, refused.value.limit) == (POSTINGS_MAX + 1, POSTINGS_MAX)


def test_as_many_postings_as_an_envelope_can_hold() -> None:
    coins = tuple(Posting(posting_id(1, i), ALICE.id, USDT.id, 1) for i in range(POSTINGS_MAX))
    legs = (BookedLeg(ALICE.id, BOB.id, USDT.id, POSTINGS_MAX),)

    assert validate_and_plan(
        but(legs=legs, consumes=coins, creates=(made(0, BOB, POSTINGS_MAX),)), state(live=coins)
    ).id


def test_duplicate_consume() -> None:
    """Otherwise conservation would hold: 200 consumed, 200 created."""
    twice = but(consumes=(COIN, COIN), creates=(made(0, ALICE, 170), made(1, BOB, 30)))
    with pytest.raises(DuplicateConsume) as refused:
        validate_and_plan(twice, state())

    assert refused.value.posting == COIN.id


# --- 3: book and asset -----------------------------------------------------------------------------------------------


def test_the_book_does_not_admit_the_asset() -> None:
    with pytest.raises(BookRefuses):
        validate_and_plan(but(book=Book(name="b", assets=("BTC",))), state())


def test_the_book_does_not_admit_the_account() -> None:
    with pytest.raises(BookRefuses):
        validate_and_plan(but(book=Book(name="b", accounts=("alice",))), state())


@pytest.mark.parametrize("book", [Book(name="b", assets=("USDT",)), Book(name="b", accounts=("alice", "bob"))])
def test_the_book_admits_what_it_lists(book: Book) -> None:
    assert validate_and_plan(but(book=book), state()).id


def test_the_account_belongs_to_this_book() -> None:
    bob = msgspec.structs.replace(BOB, book="main")

    assert validate_and_plan(but(accounts=(ALICE, bob)), state(bob)).id


def test_the_account_belongs_to_another_book() -> None:
    bob = msgspec.structs.replace(BOB, book="retail")
    with pytest.raises(BookRefuses):
        validate_and_plan(but(accounts=(ALICE, bob)), state(bob))


@pytest.mark.parametrize("kind", [EntryKind.ENTRY, EntryKind.COMPACT])
def test_a_suspended_asset_does_not_move(kind: EntryKind) -> None:
    suspended = msgspec.structs.replace(USDT, status=AssetStatus.SUSPENDED)
    with pytest.raises(AssetSuspended):
        validate_and_plan(but(assets=(suspended,), kind=kind), state())


def test_a_suspended_asset_is_given_back() -> None:
    suspended = msgspec.structs.replace(USDT, status=AssetStatus.SUSPENDED)

    assert validate_and_plan(but(assets=(suspended,), kind=EntryKind.RETURN), state()).id


# --- 4: accounts -----------------------------------------------------------------------------------------------------


def test_an_account_that_is_not_there() -> None:
    bare = LedgerState({"alice": ALICE}, {"USDT": USDT}, {"main": MAIN})
    bare.add_postings([COIN], key=None)
    with pytest.raises(UnknownAccount):
        validate_and_plan(RIGHT, bare)


def test_a_pin_that_is_stale() -> None:
    with pytest.raises(StalePin):
        validate_and_plan(RIGHT, state(), (("bank", bytes(32)),))


def test_a_pin_that_holds() -> None:
    assert validate_and_plan(RIGHT, state(), (("bank", BANK.snapshot),)).id


def test_a_pin_of_an_unknown_account() -> None:
    with pytest.raises(UnknownAccount):
        validate_and_plan(RIGHT, state(), (("unknown", bytes(32)),))


def test_an_envelope_made_against_an_equal_version_that_was_read_again() -> None:
    assert validate_and_plan(RIGHT, state(msgspec.structs.replace(ALICE))).id


def test_an_envelope_made_against_an_older_version() -> None:
    with pytest.raises(StalePin):
        validate_and_plan(RIGHT, state(changed(ALICE, policy=UncappedOverdraft())))


@pytest.mark.parametrize("kind", list(EntryKind))
@pytest.mark.parametrize("who", [ALICE, BOB], ids=["source", "target"])
def test_a_closed_account_never_moves_again(who: Account, kind: EntryKind) -> None:
    closed = changed(who, status=AccountStatus.CLOSED)
    accounts = tuple(closed if a is who else a for a in (ALICE, BOB))
    with pytest.raises(AccountClosed):
        validate_and_plan(but(accounts=accounts, kind=kind), state(closed))


@pytest.mark.parametrize("who", [ALICE, BOB], ids=["source", "target"])
def test_a_frozen_account_takes_no_part(who: Account) -> None:
    frozen = changed(who, status=AccountStatus.FROZEN)
    accounts = tuple(frozen if a is who else a for a in (ALICE, BOB))
    with pytest.raises(AccountFrozen):
        validate_and_plan(but(accounts=accounts), state(frozen))


def test_a_return_reaches_a_frozen_account() -> None:
    frozen = changed(BOB, status=AccountStatus.FROZEN)

    assert validate_and_plan(but(accounts=(ALICE, frozen), kind=EntryKind.RETURN), state(frozen)).id


def test_a_return_passes_through_a_frozen_account() -> None:
    frozen = changed(BANK, status=AccountStatus.FROZEN)
    legs = (BookedLeg(ALICE.id, BANK.id, USDT.id, 30), BookedLeg(BANK.id, BOB.id, USDT.id, 30))

    assert validate_and_plan(but(accounts=(ALICE, frozen, BOB), legs=legs, kind=EntryKind.RETURN), state(frozen)).id


def test_a_return_does_not_leave_a_frozen_account() -> None:
    frozen = changed(ALICE, status=AccountStatus.FROZEN)
    with pytest.raises(AccountFrozen):
        validate_and_plan(but(accounts=(frozen, BOB), kind=EntryKind.RETURN), state(frozen))


def test_a_frozen_account_may_be_compacted() -> None:
    frozen = changed(ALICE, status=AccountStatus.FROZEN)
    merge = but(accounts=(frozen,), kind=EntryKind.COMPACT, legs=(), creates=(made(0, ALICE, 100),))

    assert validate_and_plan(merge, state(frozen)).id


# --- 5: what is consumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claimed",
    [
        Posting(posting_id(9, 0), ALICE.id, USDT.id, 100),
        msgspec.structs.replace(COIN, amount=101),
        msgspec.structs.replace(COIN, account=BOB.id),
        msgspec.structs.replace(COIN, asset=BTC.id),
    ],
    ids=["number", "amount", "owner", "asset"],
)
def test_a_posting_that_the_ledger_does_not_have_like_that(claimed: Posting) -> None:
    with pytest.raises(PostingNotLive):
        validate_and_plan(but(consumes=(claimed,)), state())


def test_a_posting_of_an_account_that_takes_no_part() -> None:
    """Were it not named, its status and policy would go unchecked."""
    with pytest.raises(UnknownAccount, match=f"#{ALICE.id}"):
        validate_and_plan(but(accounts=(BOB,), creates=(made(0, BOB, 100),)), state())


def test_a_posting_of_an_asset_that_takes_no_part() -> None:
    """Were it not named, whether it is suspended would go unchecked."""
    coin = Posting(posting_id(1, 0), ALICE.id, BTC.id, 100)
    with pytest.raises(UnknownAccount):
        validate_and_plan(but(consumes=(coin,)), state(live=(coin,)))


# --- 6: what is created ----------------------------------------------------------------------------------------------


def test_an_empty_posting() -> None:
    with pytest.raises(InvalidEntry):
        validate_and_plan(but(creates=(*RIGHT.creates, made(2, BOB, 0))), state())


def test_a_posting_that_does_not_fit() -> None:
    with pytest.raises(AmountTooLarge):
        validate_and_plan(but(creates=(made(0, ALICE, 2**127), made(1, BOB, 30))), state())


@pytest.mark.parametrize(("owed", "amount"), [(0, MINOR_MAX), (1, MINOR_MAX)], ids=["most", "least"])
def test_the_largest_and_the_smallest_posting_fit(owed: int, amount: int) -> None:
    """Given a bank that owes so much, when it pays all that fits into one posting, then it owes all that fits, too."""
    debt = (Posting(posting_id(1, 0), BANK.id, USDT.id, -owed),) if owed else ()
    legs = (BookedLeg(BANK.id, BOB.id, USDT.id, booked_amount(amount)),)
    creates = (made(0, BANK, -owed - amount), made(1, BOB, amount))

    assert validate_and_plan(but(accounts=(BANK, BOB), legs=legs, consumes=debt, creates=creates), state(live=debt)).id


def test_a_posting_that_is_too_small_to_fit() -> None:
    with pytest.raises(AmountTooLarge):
        validate_and_plan(but(accounts=(BANK, BOB), consumes=(), creates=(made(0, BANK, MINOR_MIN - 1),)), state())


def test_an_overdraft_in_one_asset_allows_no_debt_in_another() -> None:
    alice = msgspec.structs.replace(ALICE, policy=CappedOverdraft(floor="-1", asset="BTC"))
    with pytest.raises(NegativePosting):
        validate_and_plan(but(accounts=(alice, BOB), creates=(made(0, ALICE, -30), made(1, BOB, 130))), state(alice))


def test_a_negative_posting_where_the_policy_forbids_it() -> None:
    with pytest.raises(NegativePosting) as refused:
        validate_and_plan(but(creates=(made(0, ALICE, -30), made(1, BOB, 130))), state())

    assert refused.value.account == "alice"


def test_a_created_posting_of_an_account_that_takes_no_part() -> None:
    with pytest.raises(UnknownAccount):
        validate_and_plan(but(creates=(made(0, ALICE, 70), made(1, BANK, 30))), state())


# --- 7 and 8: conservation, and the intent ---------------------------------------------------------------------------


@pytest.mark.parametrize("got", [29, 31, 130])
def test_conservation_broken_by_a_hand_made_envelope(got: int) -> None:
    with pytest.raises(ConservationBroken) as refused:
        validate_and_plan(but(creates=(made(0, ALICE, 70), made(1, BOB, got))), state())

    assert (refused.value.asset, refused.value.consumed, refused.value.created) == ("USDT", 100, 70 + got)


def test_conservation_is_per_asset() -> None:
    """As much of one as is missing of the other is no consolation."""
    crossed = but(assets=(USDT, BTC), creates=(made(0, ALICE, 70), made(1, BOB, 30, BTC)))
    with pytest.raises(ConservationBroken):
        validate_and_plan(crossed, state())


def test_value_from_nothing() -> None:
    with pytest.raises(ConservationBroken):
        validate_and_plan(but(consumes=(), creates=(made(0, BOB, 30),)), state())


@pytest.mark.parametrize(("alice", "bob"), [(69, 31), (71, 29), (100, 0)])
def test_an_envelope_that_does_not_do_what_its_movements_say(alice: int, bob: int) -> None:
    creates = tuple(made(i, who, v) for i, (who, v) in enumerate(((ALICE, alice), (BOB, bob))) if v)
    with pytest.raises(InvalidEntry):
        validate_and_plan(but(creates=creates), state())


# --- 9: floors -------------------------------------------------------------------------------------------------------


def overdraw(amount: int, floor: str) -> tuple[Envelope, Account]:
    """Alice has a balance of 100 in one posting and pays so much."""
    policy = CappedOverdraft(floor=floor, asset="USDT")
    alice = msgspec.structs.replace(ALICE, policy=policy)
    creates = (made(0, ALICE, 100 - amount), made(1, BOB, amount))
    legs = (BookedLeg(ALICE.id, BOB.id, USDT.id, amount),)
    return but(accounts=(alice, BOB), creates=creates, legs=legs), alice


def test_a_floor_exactly_met() -> None:
    envelope, alice = overdraw(105, "-0.000005")

    assert validate_and_plan(envelope, state(alice, alice=100)).floors == ((ALICE.id, USDT.id, 100, -5),)


def test_a_floor_exceeded_by_one_unit() -> None:
    envelope, alice = overdraw(106, "-0.000005")
    with pytest.raises(FloorExceeded) as refused:
        validate_and_plan(envelope, state(alice, alice=100))

    error = refused.value
    assert (error.floor, error.balance, error.needed) == ("-0.000005", "0.000100", "0.000106")


def test_the_floor_is_about_the_whole_balance_not_about_what_is_consumed() -> None:
    envelope, alice = overdraw(101, "-0.000005")
    with pytest.raises(FloorExceeded):
        validate_and_plan(envelope, state(alice, alice=95))


def test_paying_in_is_welcome_below_the_floor() -> None:
    bob = msgspec.structs.replace(BOB, policy=CappedOverdraft(floor="0", asset="USDT"))

    assert validate_and_plan(but(accounts=(ALICE, bob)), state(bob, bob=-500)).floors == (
        (BOB.id, USDT.id, -500, -470),
    )


# --- the order -------------------------------------------------------------------------------------------------------


def broken(*faults: str) -> tuple[Envelope, LedgerState]:
    """The right envelope with every one of these faults at once."""
    envelope, heads = RIGHT, [ALICE, BOB]
    live: tuple[Posting, ...] = (COIN,)
    policy: Policy = NoOverdraft()
    if "floor" in faults:
        policy = CappedOverdraft(floor="0", asset="USDT")
    if "frozen" in faults:
        heads[0] = changed(ALICE, status=AccountStatus.FROZEN, policy=policy)
    elif "floor" in faults:
        heads[0] = changed(ALICE, policy=policy)
    envelope = msgspec.structs.replace(envelope, accounts=tuple(heads))
    if "not live" in faults:
        live = ()
    if "intent" in faults:
        envelope = msgspec.structs.replace(envelope, legs=(BookedLeg(ALICE.id, BOB.id, USDT.id, 31),))
    if "conservation" in faults:
        envelope = msgspec.structs.replace(envelope, creates=(made(0, ALICE, 70), made(1, BOB, 35)))
    if "too large" in faults:
        envelope = msgspec.structs.replace(envelope, creates=(made(0, ALICE, 2**127), made(1, BOB, 30)))
    if "book" in faults:
        envelope = msgspec.structs.replace(envelope, book=Book(name="b", accounts=("alice",)))
    if "suspended" in faults:
        envelope = msgspec.structs.replace(
            envelope, assets=(msgspec.structs.replace(USDT, status=AssetStatus.SUSPENDED),)
        )
    if "duplicate" in faults:
        envelope = msgspec.structs.replace(envelope, consumes=(COIN, COIN))
    return envelope, state(*heads, live=live, alice=10)


ORDER: list[tuple[str, type[Refusal]]] = [
    ("duplicate", DuplicateConsume),
    ("suspended", AssetSuspended),
    ("book", BookRefuses),
    ("frozen", AccountFrozen),
    ("not live", PostingNotLive),
    ("too large", AmountTooLarge),
    ("conservation", ConservationBroken),
    ("intent", InvalidEntry),
    ("floor", FloorExceeded),
]


@pytest.mark.parametrize("first", range(len(ORDER)), ids=[fault for fault, _ in ORDER])
def test_the_first_check_that_fails_names_the_refusal(first: int) -> None:
    """However many others would fail after it."""
    envelope, where = broken(*[fault for fault, _ in ORDER[first:]])
    with pytest.raises(ORDER[first][1]):
        validate_and_plan(envelope, where)


# --- the payer's balance must cover it (T42) -------------------------------------------------------------------------


def paid_by(policy: Policy, amount: int = 30) -> tuple[Envelope, Account]:
    """Alice, who has 100 in one posting, pays so much under this policy."""
    alice = msgspec.structs.replace(ALICE, policy=policy)
    creates = [made(0, ALICE, 100 - amount)] if amount != 100 else []
    creates.append(made(len(creates), BOB, amount))
    legs = (BookedLeg(ALICE.id, BOB.id, USDT.id, amount),)
    return but(accounts=(alice, BOB), creates=tuple(creates), legs=legs), alice


@pytest.mark.parametrize("policy", [UncappedOverdraft(), SystemAccount(), ExternalAccount()])
def test_a_balance_that_nothing_guards_covers_nothing(policy: Policy) -> None:
    envelope, alice = paid_by(policy)

    assert validate_and_plan(envelope, state(alice)).id
    with pytest.raises(BalanceNotGuarded) as refused:
        validate_and_plan(envelope, state(alice), no_overdraft=True)
    assert refused.value.account == "alice"


@pytest.mark.parametrize("policy", [UncappedOverdraft(), SystemAccount(), ExternalAccount()])
def test_an_account_that_is_paid_needs_no_guard(policy: Policy) -> None:
    bob = msgspec.structs.replace(BOB, policy=policy)

    assert validate_and_plan(but(accounts=(ALICE, bob)), state(bob), no_overdraft=True).id


def test_an_account_whose_value_only_passes_through_needs_no_guard() -> None:
    """Given the bank between alice and bob, when it gains nothing and loses nothing, then it pays nothing."""
    legs = (BookedLeg(ALICE.id, BANK.id, USDT.id, 30), BookedLeg(BANK.id, BOB.id, USDT.id, 30))
    coin = Posting(posting_id(2, 0), BANK.id, USDT.id, -5)
    passing = but(
        accounts=(ALICE, BANK, BOB), legs=legs, consumes=(COIN, coin), creates=(*RIGHT.creates, made(2, BANK, -5))
    )

    assert validate_and_plan(passing, state(live=(COIN, coin)), no_overdraft=True).id


def test_an_account_without_overdraft_pays_what_it_has() -> None:
    assert validate_and_plan(RIGHT, state(), no_overdraft=True).id


def test_a_guarded_balance_pays_down_to_zero() -> None:
    envelope, alice = paid_by(CappedOverdraft(floor="-1", asset="USDT"), 100)

    plan = validate_and_plan(envelope, state(alice, alice=100), no_overdraft=True)
    assert plan.floors == ((ALICE.id, USDT.id, 100, 0),)


def test_a_guarded_balance_does_not_pay_below_zero_where_it_must_be_covered() -> None:
    """Given a debt elsewhere, so that of its 100 only 99 are its own: it may overdraw, but not for this."""
    envelope, alice = paid_by(CappedOverdraft(floor="-1", asset="USDT"), 100)

    assert validate_and_plan(envelope, state(alice, alice=99)).floors == ((ALICE.id, USDT.id, 99, -1),)
    with pytest.raises(InsufficientFunds) as refused:
        validate_and_plan(envelope, state(alice, alice=99), no_overdraft=True)
    error = refused.value
    assert (error.account, error.asset, error.needed, error.available) == ("alice", "USDT", "0.000100", "0.000099")


def test_who_owes_may_be_paid_without_being_covered() -> None:
    bob = msgspec.structs.replace(BOB, policy=CappedOverdraft(floor="-1", asset="USDT"))

    plan = validate_and_plan(but(accounts=(ALICE, bob)), state(bob, bob=-500), no_overdraft=True)
    assert plan.floors == ((BOB.id, USDT.id, -500, -470),)


# --- what has happened outside (T35) ---------------------------------------------------------------------------------


@pytest.mark.parametrize("who", [ALICE, BOB], ids=["source", "target"])
def test_a_freeze_does_not_undo_what_has_happened_outside(who: Account) -> None:
    frozen = changed(who, status=AccountStatus.FROZEN)
    accounts = tuple(frozen if a is who else a for a in (ALICE, BOB))

    assert validate_and_plan(but(accounts=accounts), state(frozen), outside=True).id


def test_a_suspended_asset_does_not_undo_what_has_happened_outside() -> None:
    suspended = msgspec.structs.replace(USDT, status=AssetStatus.SUSPENDED)

    assert validate_and_plan(but(assets=(suspended,)), state(), outside=True).id


def test_a_closed_account_never_moves_again_whatever_has_happened_outside() -> None:
    closed = changed(BOB, status=AccountStatus.CLOSED)
    with pytest.raises(AccountClosed):
        validate_and_plan(but(accounts=(ALICE, closed)), state(closed), outside=True)
