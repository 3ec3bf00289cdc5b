"""Moves, operations and limits decided in a batch, with plain values; what makes a flow wrong."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.memory import MemoryLedger
from tests.toy import MACHINE, Order, World

from bursar.engine import SUCCESS, Answer, Flow, FlowRecord, FlowRefused
from bursar.model.accounts import Account, SystemAccount
from bursar.model.entries import Intent, Leg
from bursar.model.errors import (
    IdempotencyKeyReused,
    InsufficientFunds,
    InvalidEntry,
    KeyReused,
    LimitExceeded,
    RecordMoved,
)
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.model.postings import Posting
from bursar.model.records import ExistingEntry, OperationResult, Signal
from bursar.model.retry import Alarm
from bursar.store.batch import LoadedRecords, LoadedState, ReadSet, WriterCache, WriteSet
from bursar.store.sqlite.store import run_sync
from bursar.writer import Change, ChangeResult, Limit, Move, NewTransition, Operation
from bursar.writer.batch import Batch, prepare

ALICE, BOB, TRANSIT = 1, 2, 3
PESSIMISTIC, OPTIMISTIC = True, False
BOTH = pytest.mark.parametrize("pessimistic", [OPTIMISTIC, PESSIMISTIC], ids=["optimistic", "pessimistic"])


class Database(MemoryLedger):
    """What the batch finds if it reads."""

    def __init__(self, *, pessimistic: bool, money: int = 100) -> None:
        accounts = [
            Account(id=ALICE, path="alice"),
            Account(id=BOB, path="bob"),
            Account(id=TRANSIT, path="transit", policy=SystemAccount()),
        ]
        super().__init__(Asset(id=1, code="USD", precision=2), accounts, [Posting(1 << 16, ALICE, 1, money)])
        self.pessimistic = pessimistic
        self.found = LoadedRecords(versions={7: 2, 8: 5}, ids={("orders", "old")}, operations={}, counters={})

    async def load(self, read: ReadSet, cache: WriterCache) -> LoadedState:
        self.number = 100
        loaded = await super().load(read, cache)
        loaded.records = None if read.records is None else self.found
        return loaded

    def decide(self, *changes: Change) -> list[Any]:
        """The results of a batch; its rows are in `rows`."""
        cache = self.cache()
        cache.pessimistic = int(self.pessimistic)
        self.batch = Batch(cache, changes, first_read=2)
        self.rows: WriteSet = run_sync(prepare(self.batch, self)).writes
        return self.batch.results


def move(number: int = 7, version: int = 2, *transitions: NewTransition, **more: Any) -> Move:
    steps = transitions or (NewTransition("A", "GO", "B"),)
    return Move(
        flow="orders",
        id=f"o-{number}",
        number=number,
        version=version,
        transitions=steps,
        actor="w",
        delay_us=5,
        **more,
    )


def made(id: str, **more: Any) -> Move:
    return Move(
        flow="orders", id=id, version=0, transitions=(NewTransition("", "CREATED", "A"),), actor="w", delay_us=5, **more
    )


def pays(key: str, minor: int = 10, target: str = "bob") -> Intent:
    return Intent(scope="s", key=key, legs=(Leg("alice", target, "USD", minor),))


def remember(id: str = "r", what: str = "x", *refusals: str, **more: Any) -> Operation:
    return Operation(scope="s", id=id, op="pay", fingerprint=what, refusals=frozenset(refusals), **more)


def limit(most: int, *, count: int = 1, key: str = "day", amount: int = 0, amount_max: int = 1000) -> Limit:
    return Limit(
        key=key, count_max=most, amount_max=amount_max, count=count, amount=amount, until_us=9, code="TOO_MANY"
    )


def nothing(rows: WriteSet) -> bool:
    return rows.empty and not rows.postings and not rows.spends


# --- moves ---------------------------------------------------------------------------------------------------------


@BOTH
def test_a_move_writes_the_record_and_its_transitions(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic)
    steps = (NewTransition("A", "GO", "B"), NewTransition("B", "NEXT", "C", '{"x":1}'))
    sent: dict[str, Any] = {"timer": -9, "inbox": -1, "signal": Signal(7, "s", "GO", "ann", "{}", 2, 3)}
    (done,) = database.decide(
        Change(moves=(move(7, 2, *steps, attempt=3, in_flight_posting=66, body="{}", error="e", **sent),))
    )
    assert (done.records, done.postings) == ((7,), (66,))
    records = database.rows.records
    assert records is not None
    assert records.moves == [(7, 2, "C", 4, 3, 66, 5, "", "{}", "e", -9, -1)]
    assert records.signals == [(7, "s", "GO", "ann", "{}", 2, 3)]
    assert records.transitions == [(7, 3, "A", "GO", "B", 3, "w", "{}"), (7, 4, "B", "NEXT", "C", 3, "w", '{"x":1}')]


@BOTH
def test_two_movers_of_one_record_in_one_batch(pessimistic: bool) -> None:
    """One wins; the other alone gets `RecordMoved`; a third record beside them moves."""
    database = Database(pessimistic=pessimistic)
    one, two, other = database.decide(
        Change(moves=(move(7),)), Change((pays("k"),), moves=(move(7),)), Change(moves=(move(8, 5),))
    )
    assert isinstance(one, ChangeResult)
    assert isinstance(two, RecordMoved)
    assert isinstance(other, ChangeResult)
    assert database.rows.envelopes == []  # the loser's entry has left no trace
    assert database.rows.records is not None
    assert [row[0] for row in database.rows.records.moves] == [7, 8]


def test_a_stale_mover_is_refused_when_read_and_accepted_when_optimistic() -> None:
    stale = Change(moves=(move(7, 1),))
    (found,) = Database(pessimistic=PESSIMISTIC).decide(stale)
    assert isinstance(found, RecordMoved)
    (optimistic,) = Database(pessimistic=OPTIMISTIC).decide(stale)
    assert isinstance(optimistic, ChangeResult)  # the write notices


def test_a_record_that_is_nowhere_does_not_move() -> None:
    (found,) = Database(pessimistic=PESSIMISTIC).decide(Change(moves=(move(99, 1),)))
    assert isinstance(found, RecordMoved)


@BOTH
def test_records_are_made_once(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic)
    one, two, three = database.decide(*[Change(moves=(made(id),)) for id in ("new", "new", "newer")])
    assert (one.records, three.records) == ((100,), (101,))
    assert isinstance(two, RecordMoved)


def test_an_existing_record_is_refused_when_read() -> None:
    (found,) = Database(pessimistic=PESSIMISTIC).decide(Change(moves=(made("old"),)))
    assert isinstance(found, RecordMoved)


def test_rows_come_in_the_order_of_their_locks() -> None:
    database = Database(pessimistic=OPTIMISTIC)
    changes = [Change(moves=(move(number, 1),)) for number in (9, 3, 7)]
    changes += [Change(operation=remember(id), limits=(limit(9, key=id),)) for id in ("z", "a", "m")]
    database.decide(*changes)
    records = database.rows.records
    assert records is not None
    assert [row[0] for row in records.moves] == [3, 7, 9]
    assert [row[1] for row in records.operations] == ["a", "m", "z"]
    assert [row[0] for row in records.counters] == ["a", "m", "z"]


# --- the posting in transit ------------------------------------------------------------------------------------------


@BOTH
def test_a_move_keeps_the_posting_that_its_entry_makes(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic)
    change = Change((pays("other", 1),))
    keeps = Change((pays("k", 10, "transit"),), moves=(move(7, in_flight_account="transit"),))
    _, done = database.decide(change, keeps)
    (posting,) = [p for p, _ in database.rows.postings if p.account == TRANSIT]
    assert (done.postings, posting.amount) == ((posting.id,), 10)
    assert database.rows.records is not None
    assert database.rows.records.moves[0][5] == posting.id


@BOTH
@pytest.mark.parametrize("account", ["bob", "nowhere"])
def test_what_is_kept_must_be_made(pessimistic: bool, account: str) -> None:
    database = Database(pessimistic=pessimistic)
    (found,) = database.decide(Change((pays("k", 10, "transit"),), moves=(move(7, in_flight_account=account),)))
    assert isinstance(found, InvalidEntry)
    assert nothing(database.rows)


@BOTH
def test_a_record_does_not_move_on_an_entry_made_by_another(pessimistic: bool) -> None:
    """Given a key that was used before, or by another in the batch, then the record stays: its money never moved."""
    database = Database(pessimistic=pessimistic)
    first = Change((pays("k", 10, "transit"),), moves=(move(7, in_flight_account="transit"),))
    second = Change((pays("k", 10, "transit"),), moves=(move(8, 5, in_flight_account="transit"),))
    one, two = database.decide(first, second)
    assert isinstance(one, ChangeResult)
    assert isinstance(two, KeyReused)
    (row,) = database.rows.envelopes
    database.entries["s", "k"] = ExistingEntry(row[0], row[1], 1, row[7])
    (late,) = database.decide(second)
    assert isinstance(late, KeyReused)
    assert nothing(database.rows)


# --- operations ------------------------------------------------------------------------------------------------------


@BOTH
def test_an_operation_twice_in_a_batch_is_answered_once(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic)
    wanted = Change((pays("k"),), operation=remember(in_flight_account="bob", detail='{"a":1}'))
    one, two = database.decide(wanted, wanted)
    assert (one.operation.outcome, one.operation.replayed) == (Outcome.SUCCESS, False)
    assert two.operation == msgspec.structs.replace(one.operation, replayed=True)
    assert (two.receipts, two.records) == ((), ())
    assert msgspec.json.decode(one.operation.detail) == {"a": 1, "posting": (100 << 16) + 1}
    assert len(database.rows.envelopes) == 1
    assert database.rows.records is not None
    assert len(database.rows.records.operations) == 1


@BOTH
def test_other_parameters_under_the_same_name_are_refused(pessimistic: bool) -> None:
    one, two = Database(pessimistic=pessimistic).decide(
        Change((pays("k"),), operation=remember(what="x")), Change((pays("k2"),), operation=remember(what="y"))
    )
    assert isinstance(one, ChangeResult)
    assert isinstance(two, IdempotencyKeyReused)


@BOTH
def test_a_refusal_on_the_list_is_remembered_with_its_facts(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic, money=5)
    wanted = Change((pays("k"),), operation=remember("r", "x", "INSUFFICIENT_BALANCE"))
    one, two = database.decide(wanted, wanted)
    assert (one.operation.outcome, one.operation.code) == (Outcome.EXPLICIT_FAIL, "INSUFFICIENT_BALANCE")
    assert msgspec.json.decode(one.operation.detail)["available"] == "0.05"
    assert two.operation.replayed
    assert database.rows.envelopes == []
    assert database.rows.records is not None
    assert [row[4:6] for row in database.rows.records.operations] == [("EXPLICIT_FAIL", "INSUFFICIENT_BALANCE")]


@BOTH
def test_a_refusal_off_the_list_is_not_remembered(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic, money=5)
    (found,) = database.decide(Change((pays("k"),), operation=remember("r", "x", "ACCOUNT_FROZEN")))
    assert isinstance(found, InsufficientFunds)
    assert nothing(database.rows)


@BOTH
def test_an_answer_of_long_ago_counts_for_more_than_any_refusal_now(pessimistic: bool) -> None:
    """Also in an optimistic batch: a refusal is never written, so the write can't notice; it is read instead."""
    database = Database(pessimistic=pessimistic, money=5)
    database.found.operations["s", "r", "pay"] = OperationResult(fingerprint="x", outcome=Outcome.SUCCESS, detail="{}")
    poor = Change((pays("k"),), operation=remember())
    limited = Change(operation=remember(), limits=(limit(0),))
    other = Change((pays("k2"),), operation=remember(what="y"))
    one, two, three = database.decide(poor, limited, other)
    assert one.operation.replayed
    assert two.operation.replayed
    assert isinstance(three, IdempotencyKeyReused)
    assert nothing(database.rows)


# --- limits ----------------------------------------------------------------------------------------------------------


@BOTH
def test_a_limit_is_met_exactly_and_then_exceeded_within_a_batch(pessimistic: bool) -> None:
    database = Database(pessimistic=pessimistic)
    found = database.decide(*[Change(limits=(limit(3),)) for _ in range(4)])
    assert [type(f) for f in found] == [ChangeResult, ChangeResult, ChangeResult, LimitExceeded]
    assert database.rows.records is not None
    assert database.rows.records.counters == [("day", 3, 0, 3, 1000, 9)]


@BOTH
def test_amounts_are_limited_like_counts(pessimistic: bool) -> None:
    found = Database(pessimistic=pessimistic).decide(
        *[Change(limits=(limit(9, amount=part),)) for part in (999, 2, 1, 1)]
    )
    assert [type(f) for f in found] == [ChangeResult, LimitExceeded, ChangeResult, LimitExceeded]


def test_what_is_used_up_already_counts_when_read() -> None:
    database = Database(pessimistic=PESSIMISTIC)
    database.found.counters["day"] = (2, 990)
    found = database.decide(*[Change(limits=(limit(3, amount=part),)) for part in (11, 10, 0)])
    assert [type(f) for f in found] == [LimitExceeded, ChangeResult, LimitExceeded]


def test_a_change_that_is_refused_uses_nothing_up() -> None:
    database = Database(pessimistic=OPTIMISTIC, money=5)
    both = (limit(1), limit(0, key="other"))
    found = database.decide(
        Change(limits=both), Change((pays("k"),), limits=(limit(1),)), Change(moves=(move(7),), limits=(limit(1),))
    )
    assert [type(f) for f in found] == [LimitExceeded, InsufficientFunds, ChangeResult]
    assert database.rows.records is not None
    assert [row[:2] for row in database.rows.records.counters] == [("day", 1)]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 3)), min_size=1, max_size=6), st.integers(0, 8))
def test_the_row_is_written_exactly_if_every_change_is_allowed_on_what_was_used_before(
    wanted: list[tuple[int, int]], before: int
) -> None:
    """Given changes that disagree about the maximum, then the one condition of the write is all of theirs together."""
    database = Database(pessimistic=OPTIMISTIC)
    changes = [Change(limits=(limit(most, count=count),)) for most, count in wanted]
    accepted = [
        pair for pair, found in zip(wanted, database.decide(*changes), strict=True) if isinstance(found, ChangeResult)
    ]
    if not accepted:
        assert database.rows.empty
        return
    assert database.rows.records is not None
    ((_, count, _, count_max, _, _),) = database.rows.records.counters
    used, allowed = before, True
    for most, part in accepted:
        used += part
        allowed &= used <= most
    assert (before + count <= count_max) == allowed


# --- flows -----------------------------------------------------------------------------------------------------------


async def call(_item: FlowRecord[Order]) -> Answer:
    return SUCCESS


ACTIONS = dict.fromkeys(("charge", "ship", "refund"), call)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"actions": {"charge": call, "ship": call}}, "no action refund"),
        ({"actions": {}}, "no action charge, refund, ship"),
        ({"actions": ACTIONS | {"shpi": call}}, "no call state names shpi"),
        ({"cancels": {"chrage": call}}, "no call state names chrage"),
        ({"rails": {"shop": "ship"}}, "no call state names shop"),
        ({"rails": {"ship": lambda _: "shop"}}, "say with `rail_names` which there are"),
        ({"choose": None}, "NEW has several ways on"),
        ({"alarms": (Alarm(reason="x", state="NOWHERE", tries=1),)}, "NOWHERE, which is no state"),
    ],
)
def test_a_flow_that_does_not_fit_its_machine_is_refused(wrong: dict[str, Any], why: str) -> None:
    right: dict[str, Any] = {"actions": ACTIONS, "choose": lambda _item: "GO"}
    Flow(machine=MACHINE, body=Order, **right)
    with pytest.raises(FlowRefused, match=why):
        Flow(machine=MACHINE, body=Order, **(right | wrong))


def test_an_automatic_state_with_one_way_on_needs_no_choice() -> None:
    machine = Machine(
        name="m",
        initial="A",
        events=("GO",),
        states=(State("A", Kind.AUTOMATIC), State("B", Kind.TERMINAL)),
        arrows=(Arrow("A", "GO", "B"),),
    )
    assert Flow(machine=machine, body=Order, actions={}).name == "m"
    assert World().flow().name == "orders"


def test_an_answer_says_in_a_line_what_it_was() -> None:
    assert SUCCESS.error == ""
    assert Answer(outcome=Outcome.EXPLICIT_FAIL, code="NO", message="never").error == "NO: never"
    assert Answer(outcome=Outcome.TIMEOUT).error == "TIMEOUT"
    assert len(Answer(outcome=Outcome.UNKNOWN, message="x" * 10_000).error) == 500
    assert "\x00" not in Answer(outcome=Outcome.UNKNOWN, message="a\x00\ud800").error
