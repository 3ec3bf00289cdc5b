"""Deciding a batch with plain values and no store: what each change comes to, and which rows all of them make."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.memory import MemoryLedger

from bursar.model.accounts import Account, CappedOverdraft, ExternalAccount, UncappedOverdraft
from bursar.model.entries import HoldChange, HoldState, Intent, Leg
from bursar.model.envelope import BookedLeg, Receipt, encode_legs
from bursar.model.errors import (
    FloorExceeded,
    InsufficientFunds,
    KeyReused,
    PostingNotLive,
    Refusal,
    TooManyPostings,
    UnknownAccount,
    UnknownBook,
)
from bursar.model.money import Asset
from bursar.model.postings import Posting, posting_id
from bursar.model.records import ExistingEntry
from bursar.store.batch import READ_MAX, WriteSet
from bursar.store.sqlite.store import run_sync
from bursar.writer import Change, ChangeResult
from bursar.writer.batch import Batch, prepare
from bursar.writer.decision import Result

FIRST_READ = 2

ACCOUNTS = [
    Account(id=1, path="held"),
    Account(id=11, path="alice"),
    Account(id=12, path="bob"),
    Account(id=13, path="carol"),
    Account(id=14, path="bank", policy=ExternalAccount()),
    Account(id=15, path="credit", policy=CappedOverdraft(floor="-0.000005", asset="USDT")),
    Account(id=16, path="loose", policy=UncappedOverdraft()),
]
ID = {account.path: account.id for account in ACCOUNTS}
USDT = Asset(id=1, code="USDT", precision=6)
COIN = Posting(posting_id(50, 0), ID["alice"], USDT.id, 100)


def pay(source: str, target: str, amount: int, key: str = "") -> Intent:
    legs = (Leg(source, target, "USDT", amount),)
    return Intent(scope="user", key=key or f"{source}-{target}-{amount}", legs=legs)


class Group:
    """A batch on its way, against live postings that the test holds in its hand."""

    def __init__(
        self,
        *changes: Intent | tuple[Intent, ...],
        live: tuple[Posting, ...] = (COIN,),
        first_read: int = FIRST_READ,
    ) -> None:
        self.ledger = MemoryLedger(USDT, ACCOUNTS, live)
        self.cache = self.ledger.cache()
        found = [Change(c if isinstance(c, tuple) else (c,)) for c in changes]
        self.batch = Batch(self.cache, found, first_read=first_read)

    def decide(self) -> tuple[list[Result], WriteSet]:
        writes = run_sync(prepare(self.batch, self.ledger)).writes
        return self.batch.results, writes


def refusals(outcomes: list[Result]) -> list[type[Refusal] | None]:
    return [type(found) if isinstance(found, Refusal) else None for found in outcomes]


def only(outcome: Result) -> Receipt:
    assert isinstance(outcome, ChangeResult)
    assert len(outcome.receipts) == 1
    return outcome.receipts[0]


# --- one after the other ---------------------------------------------------------------------------------------------


def test_a_chain_inside_a_batch_spends_what_it_has_just_received() -> None:
    outcomes, rows = Group(pay("alice", "bob", 100), pay("bob", "carol", 100), pay("carol", "alice", 100)).decide()

    assert refusals(outcomes) == [None, None, None]
    assert [(p.account, live) for p, live in rows.postings] == [(12, False), (13, False), (11, True)]
    assert rows.spent_live == [COIN.id]
    assert rows.spends == [(COIN.id, 100), (posting_id(100, 0), 101), (posting_id(101, 0), 102)]


def test_the_order_of_callers_decides() -> None:
    outcomes, _ = Group(pay("bob", "carol", 100), pay("alice", "bob", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]


def test_two_spenders_of_one_posting_get_what_they_would_have_got_alone() -> None:
    outcomes, rows = Group(pay("alice", "bob", 60), pay("alice", "carol", 60), pay("alice", "carol", 40)).decide()

    assert refusals(outcomes) == [None, InsufficientFunds, None]
    assert {p.account: p.amount for p, live in rows.postings if live} == {12: 60, 13: 40}


def test_a_refusal_leaves_no_trace() -> None:
    _, alone = Group(pay("alice", "bob", 30)).decide()
    _, beside = Group(pay("alice", "unknown", 1), pay("alice", "bob", 30), pay("alice", "carol", 500)).decide()

    assert [row[3] for row in beside.envelopes] == [row[3] for row in alone.envelopes]
    assert [(p.account, p.amount, live) for p, live in beside.postings] == [
        (p.account, p.amount, live) for p, live in alone.postings
    ]
    assert (beside.spent_live, beside.guarded, beside.holds) == (alone.spent_live, alone.guarded, alone.holds)


def test_a_batch_of_refusals_writes_nothing() -> None:
    outcomes, rows = Group(pay("bob", "alice", 1), pay("alice", "unknown", 1)).decide()

    assert refusals(outcomes) == [InsufficientFunds, UnknownAccount]
    assert rows == WriteSet()


def test_an_unknown_book_is_refused_alone() -> None:
    lost = Intent(scope="user", key="k", legs=(Leg("alice", "bob", "USDT", 1),), book="nowhere")
    outcomes, _ = Group(lost, pay("alice", "bob", 1)).decide()

    assert refusals(outcomes) == [UnknownBook, None]


# --- all or nothing --------------------------------------------------------------------------------------------------


def test_a_change_is_all_or_nothing() -> None:
    outcomes, rows = Group((pay("alice", "bob", 60), pay("alice", "carol", 60)), pay("alice", "carol", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert [row[3] for row in rows.envelopes] == ["alice-carol-100"]
    assert rows.spent_live == [COIN.id]


def test_what_is_undone_can_be_spent_again_and_what_it_made_can_not() -> None:
    undone = (pay("alice", "bob", 100), pay("bob", "carol", 50), pay("alice", "bob", 1))
    outcomes, rows = Group(undone, pay("bob", "carol", 1), pay("alice", "carol", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, InsufficientFunds, None]
    assert [(p.account, p.amount) for p, _ in rows.postings] == [(13, 100)]


def test_what_is_undone_moves_no_floor() -> None:
    group = Group((pay("credit", "bob", 5), pay("bob", "alice", 99)), pay("credit", "bob", 5, key="again"), live=())
    outcomes, rows = group.decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert rows.guarded == [(ID["credit"], USDT.id, 0, -5)]


def test_the_key_of_what_is_undone_is_free() -> None:
    undone = (pay("alice", "bob", 100, key="k"), pay("alice", "bob", 1))
    outcomes, _ = Group(undone, pay("alice", "carol", 7, key="k")).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert not only(outcomes[1]).replayed


def test_the_parts_of_a_change_see_each_other() -> None:
    outcomes, _ = Group((pay("bank", "bob", 5), pay("bob", "carol", 5)), live=()).decide()

    assert refusals(outcomes) == [None]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_the_same_key_twice_in_a_batch_is_one_entry() -> None:
    outcomes, rows = Group(*[pay("alice", "bob", 30, key="k")] * 3).decide()

    assert [only(found).replayed for found in outcomes] == [False, True, True]
    assert len({only(found).id for found in outcomes}) == 1
    assert len(rows.envelopes) == 1


def test_the_same_key_with_another_intent_in_a_batch_is_refused() -> None:
    outcomes, rows = Group(pay("alice", "bob", 30, key="k"), pay("alice", "bob", 31, key="k")).decide()

    assert refusals(outcomes) == [None, KeyReused]
    assert len(rows.envelopes) == 1


def test_a_key_that_was_refused_may_be_used_by_the_next() -> None:
    outcomes, _ = Group(pay("bob", "carol", 1, key="k"), pay("alice", "carol", 1, key="k")).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]


def test_a_key_that_is_taken_is_replayed_without_looking_at_the_money() -> None:
    group = Group(pay("bob", "carol", 1, key="k"), live=())
    legs = encode_legs((BookedLeg(ID["bob"], ID["carol"], USDT.id, 1),))
    group.ledger.entries["user", "k"] = ExistingEntry(42, b"\x05" * 32, 1, legs)

    outcomes, rows = group.decide()

    assert only(outcomes[0]) == Receipt(envelope=42, id="05" * 32, key="k", replayed=True)
    assert rows.envelopes == []


def test_keys_are_always_written_in_one_order() -> None:
    """Two batches with the same keys must not wait for each other."""
    _, rows = Group(*[pay("bank", "alice", 1, key=key) for key in ("b", "c", "a")], live=()).decide()

    assert [row[3] for row in rows.envelopes] == ["a", "b", "c"]


# --- floors, pools, named postings -----------------------------------------------------------------------------------


def test_a_floor_is_counted_through_the_batch() -> None:
    group = Group(*[pay("credit", "bob", 2, key=f"{i}") for i in range(4)], live=())
    group.ledger.guarded[ID["credit"], USDT.id] = (1, 9)
    outcomes, rows = group.decide()

    assert refusals(outcomes) == [None, None, None, FloorExceeded]
    assert rows.guarded == [(ID["credit"], USDT.id, 9, -5)]


def test_a_payment_in_makes_room_above_the_floor() -> None:
    changes = (pay("credit", "bob", 5), pay("bank", "credit", 3), pay("credit", "bob", 3))
    outcomes, rows = Group(*changes, live=()).decide()

    assert refusals(outcomes) == [None, None, None]
    assert rows.guarded == [(ID["credit"], USDT.id, 0, -5)]


@pytest.mark.parametrize(("postings", "more"), [(FIRST_READ, 1), (FIRST_READ * 8 - 1, 1), (FIRST_READ * 8, 2)])
def test_more_postings_are_read_until_it_is_known(postings: int, more: int) -> None:
    """One more than there are is needed, so all have to be read before that can be said."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, 1) for i in range(postings))
    group = Group(pay("alice", "bob", postings + 1), live=live)

    outcomes, _ = group.decide()

    assert refusals(outcomes) == [InsufficientFunds]
    assert (group.ledger.loads, group.ledger.pool_reads) == (1, more)


def test_reading_more_finds_what_is_left_and_not_what_the_batch_has_spent() -> None:
    """5, 4 and 3: the first takes the 5, the second needs both others, for the third nothing is left."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, amount) for i, amount in enumerate((5, 4, 3)))
    group = Group(pay("alice", "bob", 5), pay("alice", "bob", 7), pay("alice", "bob", 1), live=live, first_read=1)

    outcomes, rows = group.decide()

    assert refusals(outcomes) == [None, None, InsufficientFunds]
    assert (rows.spent_live, group.ledger.loads) == ([p.id for p in live], 1)


def test_a_change_that_is_decided_again_keeps_its_number() -> None:
    """Given two entries of which the second needs more postings than were read, then no number is lost."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, 3) for i in range(4))
    outcomes, rows = Group((pay("bank", "bob", 1), pay("alice", "bob", 12)), live=live, first_read=1).decide()

    assert refusals(outcomes) == [None]
    assert [row[0] for row in rows.envelopes] == [101, 100]  # by key: alice's is the second


@given(data=st.data())
@settings(max_examples=200)
def test_how_many_postings_are_read_at_first_changes_nothing(data: st.DataObject) -> None:
    amounts = data.draw(st.lists(st.integers(1, 9), max_size=12))
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, amount) for i, amount in enumerate(amounts))
    ways = st.tuples(st.sampled_from(["alice", "bob"]), st.integers(1, 30))
    payments = data.draw(st.lists(ways, min_size=1, max_size=8))
    changes = [pay(who, "carol", amount, key=f"{i}") for i, (who, amount) in enumerate(payments)]
    changes += [pay("carol", "alice", 2, key="back")]
    one, all_of_them = Group(*changes, live=live, first_read=1), Group(*changes, live=live, first_read=READ_MAX)

    here, there = one.decide()[0], all_of_them.decide()[0]

    assert refusals(here) == refusals(there)


def test_a_pool_is_never_read_beyond_what_an_envelope_could_list() -> None:
    """Given more postings than that, when they don't suffice, then no more are read."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, 1) for i in range(READ_MAX + 10))
    group = Group(pay("alice", "bob", 10**6), live=live, first_read=READ_MAX - 1)

    assert refusals(group.decide()[0]) == [TooManyPostings]
    assert group.ledger.pool_reads == 1


def test_a_posting_named_by_two_goes_to_the_first() -> None:
    named = [
        Intent(scope="t", key=key, legs=(Leg("alice", "bob", "USDT", 100),), consume=(COIN.id,)) for key in ("a", "b")
    ]
    outcomes, rows = Group(*named).decide()

    assert refusals(outcomes) == [None, PostingNotLive]
    assert rows.spent_live == [COIN.id]


def test_a_posting_named_by_one_does_not_pay_for_another() -> None:
    named = Intent(scope="t", key="a", legs=(Leg("alice", "bob", "USDT", 100),), consume=(COIN.id,))
    outcomes, _ = Group(named, pay("alice", "carol", 1)).decide()

    assert refusals(outcomes) == [None, InsufficientFunds]


def test_an_overdraft_pays_off_what_an_earlier_entry_in_the_batch_owes() -> None:
    _, rows = Group(pay("loose", "bob", 5), pay("bank", "loose", 7), live=()).decide()

    assert [(p.account, p.amount) for p, live in rows.postings if live and p.account == ID["loose"]] == [(16, 2)]


# --- what goes with it -----------------------------------------------------------------------------------------------


def test_cached_balances_change_by_one_row_per_batch() -> None:
    _, rows = Group(pay("bank", "alice", 3), pay("bank", "bob", 4), pay("alice", "bank", 1), live=()).decide()

    assert rows.cached_balances == [(ID["bank"], USDT.id, 102, -6)]


def test_cached_balance_of_an_ordinary_account_changes_too() -> None:
    group = Group(pay("alice", "bob", 30))
    group.cache.cached_accounts.add(ID["alice"])
    _, rows = group.decide()

    assert rows.cached_balances == [(ID["alice"], USDT.id, 100, -30)]


def test_every_account_that_took_part_is_in_the_history() -> None:
    _, rows = Group(pay("alice", "bob", 30), pay("bob", "carol", 1)).decide()

    assert sorted(rows.account_history) == [(11, 100), (12, 100), (12, 101), (13, 101)]


def test_a_hold_is_named_after_its_envelope_and_follows_its_posting() -> None:
    change = HoldChange(account="alice", asset="USDT", amount=40, remaining=40, state=HoldState.OPEN)
    intent = Intent(scope="user", key="k", legs=(Leg("alice", "held", "USDT", 40),), hold=change)
    _, rows = Group(intent).decide()

    (hold,) = rows.holds
    (held,) = [p for p, _ in rows.postings if p.account == ID["held"]]
    assert (hold.id, hold.posting, hold.remaining) == (100, held.id, 40)


def test_a_hold_that_is_refused_leaves_none() -> None:
    change = HoldChange(account="bob", asset="USDT", amount=40, remaining=40, state=HoldState.OPEN)
    intent = Intent(scope="user", key="k", legs=(Leg("bob", "held", "USDT", 40),), hold=change)
    outcomes, rows = Group(intent).decide()

    assert (refusals(outcomes), rows.holds) == ([InsufficientFunds], [])
