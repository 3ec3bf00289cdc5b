"""Deciding a group with plain values and no store: what each change comes to, and which rows all of them make."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.model.accounts import Account, Book, CappedOverdraft, ExternalAccount, UncappedOverdraft
from bursar.model.entries import HoldChange, HoldState, Intent, Leg
from bursar.model.envelope import BookedLeg, Receipt, encode_legs
from bursar.model.errors import (
    FloorExceeded,
    InsufficientFunds,
    KeyReused,
    PostingNotLive,
    Refusal,
    UnknownAccount,
    UnknownBook,
)
from bursar.model.ground import Ground
from bursar.model.money import Asset
from bursar.model.postings import Posting, posting_id
from bursar.model.records import Taken
from bursar.model.selection import Short
from bursar.store.group import FIRST_READ, READ_MAX, Heads, Known, PoolKey, Rows
from bursar.writer import Change, Done
from bursar.writer.decide import GroupJob, Outcome

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
    """A group on its way, against live postings that the test holds in its hand."""

    def __init__(self, *changes: Intent | tuple[Intent, ...], live: tuple[Posting, ...] = (COIN,)) -> None:
        self.heads = Heads()
        self.heads.reset(1, {"USDT": USDT}, {"main": Book(id=1, name="main")}, set())
        self.heads.accounts = {account.path: account for account in ACCOUNTS}
        self.changes = [Change(c if isinstance(c, tuple) else (c,)) for c in changes]
        self.live = live
        self.taken: dict[tuple[str, str], Taken] = {}
        self.floors: dict[tuple[int, int], tuple[int, int]] = {}
        self.rounds = 0
        self.reads_on = False  # a store that can be asked again in between
        self.job = GroupJob(self.heads, self.changes)

    def pool(self, key: PoolKey, most: int) -> list[Posting]:
        """The largest of a pool, as a store would find them: it knows nothing of what the group has decided so far."""
        account, asset, sign = key
        mine = [p for p in self.live if (p.account, p.asset) == (account, asset) and p.amount * sign > 0]
        return sorted(mine, key=lambda p: -abs(p.amount))[:most]

    def known(self) -> Known:
        """What a store would answer."""
        ask = self.job.ask()
        return Known(
            numbers=itertools.count(100) if self.reads_on else [100 + i for i in range(ask.intents)],
            taken={key: found for key, found in self.taken.items() if key in ask.keys},
            pools={key: self.pool(key, most) for key, most in ask.pools.items()},
            named=[p for p in self.live if p.id in ask.named],
            floors={key: found for key, found in self.floors.items() if key in ask.floors},
            more=self.pool if self.reads_on else None,
        )

    def decide(self) -> tuple[list[Outcome], Rows]:
        rows = None
        while rows is None:
            self.rounds += 1
            rows = self.job.decide(self.known())
        return self.job.outcomes, rows


def refusals(outcomes: list[Outcome]) -> list[type[Refusal] | None]:
    return [type(found) if isinstance(found, Refusal) else None for found in outcomes]


def only(outcome: Outcome) -> Receipt:
    assert isinstance(outcome, Done)
    assert len(outcome.receipts) == 1
    return outcome.receipts[0]


# --- one after the other ---------------------------------------------------------------------------------------------


def test_a_chain_inside_a_group_spends_what_it_has_just_got() -> None:
    outcomes, rows = Group(pay("alice", "bob", 100), pay("bob", "carol", 100), pay("carol", "alice", 100)).decide()

    assert refusals(outcomes) == [None, None, None]
    assert [(p.account, live) for p, live in rows.postings] == [(12, False), (13, False), (11, True)]
    assert rows.dead == [COIN.id]
    assert rows.spends == [(COIN.id, 100), (posting_id(100, 0), 101), (posting_id(101, 0), 102)]


def test_the_order_of_callers_decides() -> None:
    outcomes, _ = Group(pay("bob", "carol", 100), pay("alice", "bob", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]


def test_two_who_want_the_same_posting_get_what_they_would_have_got_alone() -> None:
    outcomes, rows = Group(pay("alice", "bob", 60), pay("alice", "carol", 60), pay("alice", "carol", 40)).decide()

    assert refusals(outcomes) == [None, InsufficientFunds, None]
    assert {p.account: p.amount for p, live in rows.postings if live} == {12: 60, 13: 40}


def test_a_refusal_leaves_no_trace() -> None:
    _, alone = Group(pay("alice", "bob", 30)).decide()
    _, beside = Group(pay("alice", "nobody", 1), pay("alice", "bob", 30), pay("alice", "carol", 500)).decide()

    assert [row[3] for row in beside.envelopes] == [row[3] for row in alone.envelopes]
    assert [(p.account, p.amount, live) for p, live in beside.postings] == [
        (p.account, p.amount, live) for p, live in alone.postings
    ]
    assert (beside.dead, beside.floors, beside.holds) == (alone.dead, alone.floors, alone.holds)


def test_a_group_of_refusals_writes_nothing() -> None:
    outcomes, rows = Group(pay("bob", "alice", 1), pay("alice", "nobody", 1)).decide()

    assert refusals(outcomes) == [InsufficientFunds, UnknownAccount]
    assert rows == Rows(envelopes=[], postings=[], spends=[], dead=[], involved=[], floors=[], cache=[], holds=[])


def test_an_unknown_book_is_refused_alone() -> None:
    lost = Intent(scope="user", key="k", legs=(Leg("alice", "bob", "USDT", 1),), book="nowhere")
    outcomes, _ = Group(lost, pay("alice", "bob", 1)).decide()

    assert refusals(outcomes) == [UnknownBook, None]


# --- all or nothing --------------------------------------------------------------------------------------------------


def test_a_change_is_all_or_nothing() -> None:
    outcomes, rows = Group((pay("alice", "bob", 60), pay("alice", "carol", 60)), pay("alice", "carol", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert [row[3] for row in rows.envelopes] == ["alice-carol-100"]
    assert rows.dead == [COIN.id]


def test_what_is_undone_can_be_spent_again_and_what_it_made_can_not() -> None:
    undone = (pay("alice", "bob", 100), pay("bob", "carol", 50), pay("alice", "bob", 1))
    outcomes, rows = Group(undone, pay("bob", "carol", 1), pay("alice", "carol", 100)).decide()

    assert refusals(outcomes) == [InsufficientFunds, InsufficientFunds, None]
    assert [(p.account, p.amount) for p, _ in rows.postings] == [(13, 100)]


def test_what_is_undone_moves_no_floor() -> None:
    group = Group((pay("credit", "bob", 5), pay("bob", "alice", 99)), pay("credit", "bob", 5, key="again"), live=())
    outcomes, rows = group.decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert rows.floors == [(ID["credit"], USDT.id, 0, -5)]


def test_the_key_of_what_is_undone_is_free() -> None:
    undone = (pay("alice", "bob", 100, key="k"), pay("alice", "bob", 1))
    outcomes, _ = Group(undone, pay("alice", "carol", 7, key="k")).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]
    assert not only(outcomes[1]).replayed


def test_the_parts_of_a_change_see_each_other() -> None:
    outcomes, _ = Group((pay("bank", "bob", 5), pay("bob", "carol", 5)), live=()).decide()

    assert refusals(outcomes) == [None]


# --- keys ------------------------------------------------------------------------------------------------------------


def test_the_same_key_twice_in_a_group_is_one_entry() -> None:
    outcomes, rows = Group(*[pay("alice", "bob", 30, key="k")] * 3).decide()

    assert [only(found).replayed for found in outcomes] == [False, True, True]
    assert len({only(found).id for found in outcomes}) == 1
    assert len(rows.envelopes) == 1


def test_the_same_key_with_another_intent_in_a_group_is_refused() -> None:
    outcomes, rows = Group(pay("alice", "bob", 30, key="k"), pay("alice", "bob", 31, key="k")).decide()

    assert refusals(outcomes) == [None, KeyReused]
    assert len(rows.envelopes) == 1


def test_a_key_that_was_refused_may_be_used_by_the_next() -> None:
    outcomes, _ = Group(pay("bob", "carol", 1, key="k"), pay("alice", "carol", 1, key="k")).decide()

    assert refusals(outcomes) == [InsufficientFunds, None]


def test_a_key_that_is_taken_is_replayed_without_looking_at_the_money() -> None:
    group = Group(pay("bob", "carol", 1, key="k"), live=())
    legs = encode_legs((BookedLeg(ID["bob"], ID["carol"], USDT.id, 1),))
    group.taken["user", "k"] = Taken(42, b"\x05" * 32, 1, legs)

    outcomes, rows = group.decide()

    assert only(outcomes[0]) == Receipt(envelope=42, id="05" * 32, key="k", replayed=True)
    assert rows.envelopes == []


def test_keys_are_written_in_one_order_by_everybody() -> None:
    """Two groups with the same keys must not wait for each other."""
    _, rows = Group(*[pay("bank", "alice", 1, key=key) for key in ("b", "c", "a")], live=()).decide()

    assert [row[3] for row in rows.envelopes] == ["a", "b", "c"]


# --- floors, pools, named postings -----------------------------------------------------------------------------------


def test_a_floor_is_counted_through_the_group() -> None:
    group = Group(*[pay("credit", "bob", 2, key=f"{i}") for i in range(4)], live=())
    group.floors[ID["credit"], USDT.id] = (1, 9)
    outcomes, rows = group.decide()

    assert refusals(outcomes) == [None, None, None, FloorExceeded]
    assert rows.floors == [(ID["credit"], USDT.id, 9, -5)]


def test_a_payment_in_makes_room_above_the_floor() -> None:
    changes = (pay("credit", "bob", 5), pay("bank", "credit", 3), pay("credit", "bob", 3))
    outcomes, rows = Group(*changes, live=()).decide()

    assert refusals(outcomes) == [None, None, None]
    assert rows.floors == [(ID["credit"], USDT.id, 0, -5)]


@pytest.mark.parametrize(("postings", "rounds"), [(FIRST_READ, 2), (FIRST_READ * 8 - 1, 2), (FIRST_READ * 8, 3)])
def test_more_postings_are_read_until_it_is_known(postings: int, rounds: int) -> None:
    """One more than there are is needed, so all have to be read before that can be said."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, 1) for i in range(postings))
    group = Group(pay("alice", "bob", postings + 1), live=live)

    outcomes, _ = group.decide()

    assert refusals(outcomes) == [InsufficientFunds]
    assert group.rounds == rounds


def test_reading_on_in_between_finds_what_is_left_and_not_what_the_group_has_spent() -> None:
    """5, 4 and 3: the first takes the 5, the second needs both others, for the third nothing is left."""
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, amount) for i, amount in enumerate((5, 4, 3)))
    group = Group(pay("alice", "bob", 5), pay("alice", "bob", 7), pay("alice", "bob", 1), live=live)
    group.reads_on, group.job.first_read = True, 1

    outcomes, rows = group.decide()

    assert refusals(outcomes) == [None, None, InsufficientFunds]
    assert (rows.dead, group.rounds) == ([p.id for p in live], 1)


@given(data=st.data())
@settings(max_examples=200)
def test_reading_on_in_between_and_deciding_anew_come_to_the_same(data: st.DataObject) -> None:
    amounts = data.draw(st.lists(st.integers(1, 9), max_size=12))
    live = tuple(Posting(posting_id(50 + i, 0), ID["alice"], USDT.id, amount) for i, amount in enumerate(amounts))
    ways = st.tuples(st.sampled_from(["alice", "bob"]), st.integers(1, 30))
    wishes = data.draw(st.lists(ways, min_size=1, max_size=8))
    changes = [pay(who, "carol", amount, key=f"{i}") for i, (who, amount) in enumerate(wishes)]
    changes += [pay("carol", "alice", 2, key="back")]
    one, other = Group(*changes, live=live), Group(*changes, live=live)
    one.reads_on, one.job.first_read = True, 1

    here, there = one.decide()[0], other.decide()[0]

    assert refusals(here) == refusals(there)


def test_a_pool_is_never_read_beyond_what_an_envelope_could_list() -> None:
    group = Group(pay("alice", "bob", 1))
    for _ in range(10):
        ground = group.job.fill(Ground(group.job.heads.accounts, {}, {}), group.known())
        group.job.deepen(ground, Short(ground.pools[ID["alice"], USDT.id, 1]))

    assert group.job.ask().pools == {(ID["alice"], USDT.id, 1): READ_MAX}


def test_a_posting_named_by_two_goes_to_the_first() -> None:
    named = [
        Intent(scope="t", key=key, legs=(Leg("alice", "bob", "USDT", 100),), consume=(COIN.id,)) for key in ("a", "b")
    ]
    outcomes, rows = Group(*named).decide()

    assert refusals(outcomes) == [None, PostingNotLive]
    assert rows.dead == [COIN.id]


def test_a_posting_named_by_one_does_not_pay_for_another() -> None:
    named = Intent(scope="t", key="a", legs=(Leg("alice", "bob", "USDT", 100),), consume=(COIN.id,))
    outcomes, _ = Group(named, pay("alice", "carol", 1)).decide()

    assert refusals(outcomes) == [None, InsufficientFunds]


def test_an_overdraft_pays_off_what_an_earlier_one_in_the_group_owes() -> None:
    _, rows = Group(pay("loose", "bob", 5), pay("bank", "loose", 7), live=()).decide()

    assert [(p.account, p.amount) for p, live in rows.postings if live and p.account == ID["loose"]] == [(16, 2)]


# --- what goes with it -----------------------------------------------------------------------------------------------


def test_cached_balances_change_by_one_row_per_group() -> None:
    _, rows = Group(pay("bank", "alice", 3), pay("bank", "bob", 4), pay("alice", "bank", 1), live=()).decide()

    assert rows.cache == [(ID["bank"], USDT.id, 102, -6)]


def test_an_account_that_was_made_wide_is_cached_too() -> None:
    group = Group(pay("alice", "bob", 30))
    group.heads.wide.add(ID["alice"])
    _, rows = group.decide()

    assert rows.cache == [(ID["alice"], USDT.id, 100, -30)]


def test_everybody_who_took_part_is_involved() -> None:
    _, rows = Group(pay("alice", "bob", 30), pay("bob", "carol", 1)).decide()

    assert sorted(rows.involved) == [(11, 100), (12, 100), (12, 101), (13, 101)]


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
