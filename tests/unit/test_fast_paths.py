"""Most entries take short cuts through `resolve` and `validate_and_plan`. They must lead to the same place.

The short cuts are switched off, and everything is compared: the same envelope, the same id, the same refusal.
"""

from __future__ import annotations

from typing import Any

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
    UncappedOverdraft,
)
from bursar.model.entries import Intent, Kind, Leg
from bursar.model.envelope import Envelope
from bursar.model.errors import Refusal
from bursar.model.ground import MINUS, PLUS, Ground
from bursar.model.money import MINOR_MAX, Asset, AssetStatus
from bursar.model.postings import Posting

USD = Asset(id=1, code="USD", precision=2)
policies: st.SearchStrategy[Policy] = st.sampled_from(
    [NoOverdraft(), NoOverdraft(), UncappedOverdraft(), ExternalAccount(), CappedOverdraft("-50.00", "USD")]
)
amounts = st.one_of(st.integers(1, 200), st.sampled_from([2**63 - 1, 2**63, MINOR_MAX]))


@st.composite
def grounds(draw: st.DrawFn) -> Ground:
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
    ground = Ground(accounts, {"USD": asset}, books)
    for account in accounts.values():
        plus = [
            Posting(account.id << 20 | n, account.id, 1, x) for n, x in enumerate(draw(st.lists(amounts, max_size=4)))
        ]
        ground.learn(plus, key=(account.id, 1, PLUS))
        ground.learn([], key=(account.id, 1, MINUS))
        ground.balances[account.id, 1] = sum(p.amount for p in plus)
    return ground


@st.composite
def intents(draw: st.DrawFn) -> Intent:
    """One movement between two of them, now and then in the other book or as a return."""
    source, target = draw(st.permutations(["a", "b", "c:d"]))[:2]
    return Intent(
        scope="user",
        key="k",
        legs=(Leg(source, target, "USD", draw(amounts)),),
        book=draw(st.sampled_from(["main", "main", "other"])),
        kind=draw(st.sampled_from([Kind.ENTRY, Kind.ENTRY, Kind.RETURN])),
    )


def outcome(intent: Intent, ground: Ground) -> Any:
    """The envelope and its plan, or the refusal with its facts."""
    try:
        envelope = resolving.resolve(intent, ground, 7)
        plan = planning.validate_and_plan(envelope, ground)
    except Refusal as refusal:
        return type(refusal), refusal.facts
    return plan


def without_short_cuts(intent: Intent, ground: Ground) -> Any:
    """The same, the long way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resolving, "_payment", lambda *_: None)
        patch.setattr(planning, "_plainly_right", lambda *_: False)
        return outcome(intent, ground)


@settings(max_examples=600)
@given(grounds(), intents())
def test_the_short_way_and_the_long_way_lead_to_the_same_place(ground: Ground, intent: Intent) -> None:
    """Given any small ground and any payment, then both ways give the same plan or the same refusal."""
    assert outcome(intent, ground) == without_short_cuts(intent, ground)


def plain() -> tuple[Envelope, Ground]:
    """A payment of 30 out of a posting of 100: what the short cut is for."""
    accounts = {path: Account(id=n, path=path) for n, path in enumerate(("a", "b"), start=1)}
    ground = Ground(accounts, {"USD": USD}, {"main": Book(id=1, name="main")})
    ground.learn([Posting(9, 1, 1, 100)], key=(1, 1, PLUS))
    intent = Intent(scope="user", key="k", legs=(Leg("a", "b", "USD", 30),))
    return resolving.resolve(intent, ground, 7), ground


def test_the_short_cut_is_taken_for_a_plain_payment() -> None:
    """Otherwise the comparison above would prove nothing."""
    assert planning._plainly_right(*plain())


forgeries: dict[str, dict[str, Any]] = {
    "consumes what is not live": {"consumes": (Posting(8, 1, 1, 100),)},
    "consumes another amount than the ledger knows": {"consumes": (Posting(9, 1, 1, 101),)},
    "pays more than it says": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 2, 1, 31))},
    "keeps more change": {"creates": (Posting(7 << 16, 1, 1, 71), Posting(7 << 16 | 1, 2, 1, 30))},
    "pays another account": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 3, 1, 30))},
    "gives the change away": {"creates": (Posting(7 << 16, 2, 1, 70), Posting(7 << 16 | 1, 2, 1, 30))},
    "another asset": {"creates": (Posting(7 << 16, 1, 1, 70), Posting(7 << 16 | 1, 2, 2, 30))},
    "a third account": {"accounts": (Account(id=1, path="a"), Account(id=3, path="x"))},
    "an old version of an account": {"accounts": (Account(id=1, path="a", version=2), Account(id=2, path="b"))},
}


@pytest.mark.parametrize("what", forgeries)
def test_a_forged_envelope_never_takes_the_short_cut(what: str) -> None:
    """Given a plain payment with one thing changed, then it is refused the long way."""
    envelope, ground = plain()
    fields = {name: getattr(envelope, name) for name in envelope.__struct_fields__} | forgeries[what]
    forged = Envelope(**fields)
    assert not planning._plainly_right(forged, ground)
    with pytest.raises(Refusal):
        planning.validate_and_plan(forged, ground)
