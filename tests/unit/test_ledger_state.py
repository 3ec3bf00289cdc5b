"""The state: the next entry sees what the accepted one has left; of one that is withdrawn no trace is left."""

from __future__ import annotations

from typing import Any

import pytest

from bursar.model.accounts import Account, Book, CappedOverdraft
from bursar.model.entries import EntryKind
from bursar.model.envelope import Envelope, Plan
from bursar.model.errors import UnknownAccount, UnknownAsset, UnknownBook
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.money import Asset
from bursar.model.postings import INDEX_BITS, POSTINGS_MAX, SEQ_MAX, Posting, posting_id

USDT = Asset(id=1, code="USDT", precision=6)
ALICE = Account(id=11, path="alice", policy=CappedOverdraft(floor="-1", asset="USDT"))
MAIN = Book(id=1, name="main")
PAYS, DEBT = (ALICE.id, USDT.id, PLUS), (ALICE.id, USDT.id, MINUS)


def coin(number: int, amount: int) -> Posting:
    return Posting(number, ALICE.id, USDT.id, amount)


FIFTY, TWENTY, OWED, OWED_MORE = coin(1, 50), coin(2, 20), coin(3, -5), coin(4, -30)


def state(*, pools: bool = True) -> LedgerState:
    """Alice has 50 and 20 and owes 5 and 30."""
    found = LedgerState({"alice": ALICE}, {"USDT": USDT}, {"main": MAIN})
    found.add_postings([FIFTY, TWENTY], key=PAYS if pools else None)
    found.add_postings([OWED, OWED_MORE], key=DEBT if pools else None)
    found.balances[ALICE.id, USDT.id] = 35
    return found


def plan(consumes: tuple[Posting, ...] = (), creates: tuple[Posting, ...] = (), floors: Any = ()) -> Plan:
    envelope = Envelope(
        seq=7,
        scope="user",
        key="k",
        book=MAIN,
        kind=EntryKind.ENTRY,
        reverses=0,
        legs=(),
        accounts=(ALICE,),
        assets=(USDT,),
        consumes=consumes,
        creates=creates,
        metadata="{}",
    )
    return Plan(envelope, bytes(32), floors)


def content(of: LedgerState) -> Any:
    """Everything that an entry could see."""
    return of.live, {key: pool.items for key, pool in of.pools.items()}, of.balances


def test_what_is_not_there_is_refused_by_its_name() -> None:
    assert (state().account("alice"), state().asset("USDT"), state().book("main")) == (ALICE, USDT, MAIN)
    with pytest.raises(UnknownAccount, match="bob"):
        state().account("bob")
    with pytest.raises(UnknownAsset, match="BTC"):
        state().asset("BTC")
    with pytest.raises(UnknownBook, match="retail"):
        state().book("retail")


def test_a_pool_knows_magnitudes_whatever_the_sign() -> None:
    assert state().pools[PAYS].pick(60) == ([FIFTY.id, TWENTY.id], 70)
    assert state().pools[DEBT].pick(30) == ([OWED_MORE.id], 30)


def test_postings_learnt_without_a_pool_are_live_and_in_none() -> None:
    bare = state(pools=False)

    assert (set(bare.live), bare.pools) == ({1, 2, 3, 4}, {})


def test_a_deeper_pool_has_what_it_had_and_more() -> None:
    deep = state()
    deep.extend_pool(DEBT, [coin(5, -7)], complete=True)

    assert deep.pools[DEBT].pick(42) == ([OWED_MORE.id, 5, OWED.id], 42)
    assert deep.live[5] == coin(5, -7)


@pytest.mark.parametrize("complete", [True, False])
def test_whether_the_store_has_more_is_what_it_said_last(complete: bool) -> None:
    deep = state()
    deep.extend_pool(PAYS, [], complete=complete)

    assert deep.pools[PAYS].complete is complete


def test_what_is_consumed_pays_no_more_and_what_is_created_does() -> None:
    after = state()
    after.apply(plan((FIFTY, OWED), (coin(8, 40), coin(9, -1)), ((ALICE.id, USDT.id, 35, 24),)))

    assert set(after.live) == {TWENTY.id, OWED_MORE.id, 8, 9}
    assert after.pools[PAYS].pick(60) == ([8, TWENTY.id], 60)
    assert after.pools[DEBT].pick(31) == ([OWED_MORE.id, 9], 31)
    assert after.balances == {(ALICE.id, USDT.id): 24}


@pytest.mark.parametrize("pools", [True, False], ids=["with pools", "without pools"])
def test_an_entry_that_is_withdrawn_leaves_no_trace(pools: bool) -> None:
    after = state(pools=pools)
    withdrawn = plan((FIFTY, OWED), (coin(8, 40), coin(9, -1)), ((ALICE.id, USDT.id, 35, 24),))
    after.apply(withdrawn)
    assert content(after) != content(state(pools=pools))
    after.undo(withdrawn)

    assert content(after) == content(state(pools=pools))


# --- the numbers of postings -----------------------------------------------------------------------------------------


def test_a_posting_says_which_envelope_made_it() -> None:
    last = Posting(posting_id(7, POSTINGS_MAX), ALICE.id, USDT.id, 1)

    assert (last.id, last.envelope) == (7 * 65_536 + 65_535, 7)
    assert Posting(posting_id(8, 0), ALICE.id, USDT.id, 1).envelope == 8


def test_the_last_posting_of_the_last_envelope_fits_a_signed_64_bit_column() -> None:
    assert POSTINGS_MAX == 65_535
    assert posting_id(SEQ_MAX, 2**INDEX_BITS - 1) == 2**63 - 1
