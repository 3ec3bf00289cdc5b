"""Most entries take short cuts through `resolve` and `validate_and_plan`. They must lead to the same place.

The short cuts are switched off, and everything is compared: the same envelope, the same id, the same refusal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.model import plan as planning
from bursar.model import resolve as resolving
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
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.envelope import BookedLeg, Envelope
from bursar.model.errors import Refusal
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.money import MINOR_MAX, Asset, AssetStatus
from bursar.model.postings import Posting

USD = Asset(id=1, code="USD", precision=2)
policies: st.SearchStrategy[Policy] = st.sampled_from(
    [NoOverdraft(), NoOverdraft(), UncappedOverdraft(), ExternalAccount(), CappedOverdraft("-50.00", "USD")]
)
amounts = st.one_of(st.integers(1, 4), st.integers(1, 200), st.sampled_from([2**63 - 1, 2**63, MINOR_MAX]))


@st.composite
def grounds(draw: st.DrawFn) -> LedgerState:
    """Three accounts of any policy and status, with a few postings; a book that may or may not admit them."""
    accounts = {}
    for number, path in enumerate(("a", "b", "c:d"), start=1):
        status = draw(st.sampled_from([AccountStatus.ACTIVE, AccountStatus.ACTIVE, *AccountStatus]))
        book = draw(st.sampled_from(["", "", "other"]))
        accounts[path] = Account(id=number, path=path, policy=draw(policies), status=status, book=book)
    books = {
        "main": Book(id=1, name="main"),
        "other": Book(id=2, name="other", assets=draw(st.sampled_from([(), ("EUR",)])), accounts=("a", "c")),
    }
    status = draw(st.sampled_from([AssetStatus.ACTIVE, AssetStatus.ACTIVE, AssetStatus.SUSPENDED]))
    asset = Asset(id=1, code="USD", precision=2, status=status)
    state = LedgerState(accounts, {"USD": asset}, books)
    for account in accounts.values():
        plus = [
            Posting(account.id << 20 | n, account.id, 1, x) for n, x in enumerate(draw(st.lists(amounts, max_size=4)))
        ]
        state.add_postings(plus, key=(account.id, 1, PLUS))
        state.add_postings([], key=(account.id, 1, MINUS))
        state.balances[account.id, 1] = sum(p.amount for p in plus)
    return state


@st.composite
def intents(draw: st.DrawFn) -> Intent:
    """One movement between two of them, now and then in the other book or as a return."""
    source, target = draw(st.permutations(["a", "b", "c:d"]))[:2]
    owner = draw(st.integers(1, 3))
    named = draw(st.sampled_from([(), (), (owner << 20,), (owner << 20, owner << 20 | 1)]))
    return Intent(
        scope="user",
        key="k",
        legs=(Leg(source, target, "USD", draw(amounts)),),
        consume=named,
        book=draw(st.sampled_from(["main", "main", "other"])),
        kind=draw(st.sampled_from([EntryKind.ENTRY, EntryKind.ENTRY, EntryKind.RETURN])),
    )


def outcome(intent: Intent, state: LedgerState) -> Any:
    """The envelope and its plan, or the refusal with its facts."""
    try:
        envelope = resolving.resolve(intent, state, 7)
        plan = planning.validate_and_plan(envelope, state)
    except Refusal as refusal:
        return type(refusal), refusal.facts
    return plan


def without_short_cuts(intent: Intent, state: LedgerState) -> Any:
    """The same, the long way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "_payment", lambda *_: None)
        patch.setattr(planning, "_fast_path_valid", lambda *_: False)
        return outcome(intent, state)


@settings(max_examples=600)
@given(grounds(), intents())
def test_fast_path_resolves_as_the_general_one_does(state: LedgerState, intent: Intent) -> None:
    """Given any small state and any payment, then both ways give the same plan or the same refusal."""
    assert outcome(intent, state) == without_short_cuts(intent, state)


def small_envelopes() -> Iterator[tuple[Envelope, LedgerState]]:
    """Every small envelope: one movement between two accounts, at most one posting consumed, at most two created."""
    some: tuple[Policy, ...] = (NoOverdraft(), SystemAccount(), UncappedOverdraft(), CappedOverdraft("-50.00", "USD"))
    live = [Posting(1, 1, 1, 2), Posting(2, 1, 1, 3), Posting(3, 1, 1, -1), Posting(4, 2, 1, 3)]
    consumed: list[tuple[Posting, ...]] = [(), *[(p,) for p in live], (Posting(2, 1, 1, 4),), (Posting(9, 1, 1, 3),)]
    made = [Posting(0, account, 1, amount) for account in (1, 2, 3) for amount in (-3, -2, -1, 0, 1, 2)]
    creates = [(), *[(one,) for one in made], *[(one, two) for one in made for two in made]]
    book = Book(id=1, name="main")
    for policies_ in itertools.product(some, repeat=2):
        accounts = tuple(Account(id=n, path=f"a{n}", policy=policy) for n, policy in enumerate(policies_, start=1))
        state = LedgerState({a.path: a for a in accounts}, {"USD": USD}, {"main": book})
        state.add_postings(live, key=None)
        state.balances = {(1, 1): 4, (2, 1): 3}
        for minor, consumes, created in itertools.product((2, 0), consumed, creates):
            envelope = Envelope(
                seq=7,
                scope="user",
                key="k",
                book=book,
                kind=EntryKind.ENTRY,
                reverses=0,
                legs=(BookedLeg(1, 2, 1, minor),),
                accounts=accounts,
                assets=(USD,),
                consumes=consumes,
                creates=created,
                metadata="",
            )
            yield envelope, state


def test_what_takes_the_fast_path_would_have_passed_every_check() -> None:
    """Given every small envelope, then the short cut is taken only by those that the long way lets through as well."""
    short = [made for made in small_envelopes() if planning._fast_path_valid(*made)]
    assert len(short) > 10
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_fast_path_valid", lambda *_: False)
        for envelope, state in short:
            assert planning.validate_and_plan(envelope, state).floors == ()


def moved_on() -> tuple[Envelope, LedgerState]:
    """What is in transit goes to an account of ours: the very posting, and nothing is left."""
    system = [Account(id=n, path=path, policy=SystemAccount()) for n, path in enumerate(("a", "b"), start=1)]
    state = LedgerState({a.path: a for a in system}, {"USD": USD}, {"main": Book(id=1, name="main")})
    state.add_postings([Posting(9, 1, 1, 30)], key=None)
    intent = Intent(scope="user", key="k", legs=(Leg("a", "b", "USD", 30),), consume=(9,))
    return resolving.resolve(intent, state, 7), state


def come_in() -> tuple[Envelope, LedgerState]:
    """The outside pays a user, out of nothing."""
    accounts = {"out": Account(id=1, path="out", policy=ExternalAccount()), "u": Account(id=2, path="u")}
    state = LedgerState(accounts, {"USD": USD}, {"main": Book(id=1, name="main")})
    intent = Intent(scope="user", key="k", legs=(Leg("out", "u", "USD", 30),))
    return resolving.resolve(intent, state, 7), state


def plain() -> tuple[Envelope, LedgerState]:
    """A payment of 30 out of a posting of 100: what the short cut is for."""
    accounts = {path: Account(id=n, path=path) for n, path in enumerate(("a", "b"), start=1)}
    state = LedgerState(accounts, {"USD": USD}, {"main": Book(id=1, name="main")})
    state.add_postings([Posting(9, 1, 1, 100)], key=(1, 1, PLUS))
    intent = Intent(scope="user", key="k", legs=(Leg("a", "b", "USD", 30),))
    return resolving.resolve(intent, state, 7), state


def to_the_last() -> tuple[Envelope, LedgerState]:
    """A payment of a whole posting: nothing is left."""
    _, state = plain()
    intent = Intent(scope="user", key="k", legs=(Leg("a", "b", "USD", 100),))
    return resolving.resolve(intent, state, 7), state


@pytest.mark.parametrize("made", [plain, to_the_last, moved_on, come_in])
def test_the_fast_paths_are_taken_for_usual_payments(made: Callable[[], tuple[Envelope, LedgerState]]) -> None:
    """Otherwise the comparisons above would prove nothing."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(resolving, "_deltas")  # the long way goes by it
        envelope, state = made()
    assert planning._fast_path_valid(envelope, state)


forgeries: dict[str, dict[str, Any]] = {
    "consumes what is not live": {"consumes": (Posting(8, 1, 1, 100),)},
    "consumes another amount than the ledger knows": {"consumes": (Posting(9, 1, 1, 101),)},
    "pays more than it says": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 2, 1, 31))},
    "keeps more change": {"creates": (Posting(7 << 16, 1, 1, 71), Posting(7 << 16 | 1, 2, 1, 30))},
    "pays another account": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 3, 1, 30))},
    "gives the change away": {"creates": (Posting(7 << 16, 2, 1, 70), Posting(7 << 16 | 1, 2, 1, 30))},
    "another asset": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 2, 2, 30))},
    "a third account": {"accounts": (Account(id=1, path="a"), Account(id=3, path="x"))},
    "pays an account that takes no part": {
        "legs": (BookedLeg(1, 3, 1, 30),),
        "creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 3, 1, 30)),
    },
    "moves another asset than it says": {"legs": (BookedLeg(1, 2, 2, 30),)},
    "a payment to oneself": {
        "legs": (BookedLeg(1, 1, 1, 30),),
        "creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 1, 1, 30)),
    },
    "an old version of an account": {"accounts": (Account(id=1, path="a", version=2), Account(id=2, path="b"))},
}


@pytest.mark.parametrize("what", forgeries)
def test_a_forged_envelope_never_takes_the_fast_path(what: str) -> None:
    """Given a plain payment with one thing changed, then it is refused the long way."""
    envelope, state = plain()
    fields = {name: getattr(envelope, name) for name in envelope.__struct_fields__} | forgeries[what]
    forged = Envelope(**fields)
    assert not planning._fast_path_valid(forged, state)
    with pytest.raises(Refusal):
        planning.validate_and_plan(forged, state)


def test_an_account_that_is_listed_twice_does_not_pay_itself() -> None:
    """Otherwise payer and payee would both be found."""
    envelope, state = plain()
    alice = state.accounts["a"]
    creates = (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 1, 1, 30))
    forged = msgspec.structs.replace(envelope, accounts=(alice, alice), legs=(BookedLeg(1, 1, 1, 30),), creates=creates)
    assert not planning._fast_path_valid(forged, state)
    with pytest.raises(Refusal):
        planning.validate_and_plan(forged, state)


def test_an_account_that_is_listed_and_does_not_move_is_checked_like_the_others() -> None:
    """Given a third account in a plain payment, then the long way looks at it too."""
    envelope, state = plain()
    frozen = Account(id=3, path="c", status=AccountStatus.FROZEN)
    state.accounts["c"] = frozen
    with pytest.raises(Refusal):
        planning.validate_and_plan(msgspec.structs.replace(envelope, accounts=(*envelope.accounts, frozen)), state)


@pytest.mark.parametrize(
    ("spent", "minor", "taken"),
    [
        (0, MINOR_MAX, True),
        (0, MINOR_MAX + 1, False),
        (-1, MINOR_MAX, True),  # and MINOR_MIN is left
        (-2, MINOR_MAX, False),
        (MINOR_MAX + 30, 30, True),  # and MINOR_MAX is left
        (MINOR_MAX + 31, 30, False),
        (31, 30, True),
        (30, 30, False),  # nothing is left, and it makes a posting of that
    ],
)
def test_the_fast_path_takes_what_fits(spent: int, minor: int, taken: bool) -> None:
    """Given the outside as the payer, with one posting or none, then the largest amounts are still plain."""
    _, state = come_in()
    debt = Posting(9, 1, 1, spent)
    state.add_postings([debt], key=None)
    envelope = Envelope(
        seq=7,
        scope="user",
        key="k",
        book=Book(id=1, name="main"),
        kind=EntryKind.ENTRY,
        reverses=0,
        legs=(BookedLeg(1, 2, 1, minor),),
        accounts=(state.accounts["out"], state.accounts["u"]),
        assets=(USD,),
        consumes=(debt,) if spent else (),
        creates=(Posting(7 << 16, 1, 1, spent - minor), Posting(7 << 16 | 1, 2, 1, minor)),
        metadata="{}",
    )
    assert planning._fast_path_valid(envelope, state) is taken


@pytest.mark.parametrize(("made", "taken"), [(plain, True), (moved_on, False), (come_in, False)])
def test_what_must_be_covered_is_plain_only_where_postings_cover_it(
    made: Callable[[], tuple[Envelope, LedgerState]], taken: bool
) -> None:
    envelope, state = made()
    assert planning._fast_path_valid(envelope, state, no_overdraft=True) is taken
