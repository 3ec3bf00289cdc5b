"""Rows of a flow's own, decided with plain values: what each operation does, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.errors import InvalidEntry, InvalidName
from bursar.model.flow_rows import (
    KEY_LENGTH_MAX,
    BoundExceeded,
    Claim,
    FlowRow,
    Form,
    GiveBack,
    Next,
    Put,
    Release,
    Reserve,
    RowKey,
    RowKind,
    RowMoved,
    RowNotOwned,
    RowOperation,
    RowState,
    RowTaken,
    apply,
    keys_read,
    number_of,
)

HASH = RowKind("hash", Form.UNIQUE)
SEAT = RowKind("seat", Form.UNIQUE, releasable=True)
NONCE = RowKind("nonce", Form.SEQUENCE)
GAS = RowKind("gas", Form.AMOUNT)
NOTE = RowKind("note", Form.VALUE)


class Rows(dict[RowKey, FlowRow]):
    """Rows as operations leave them."""

    def do(self, operation: RowOperation, record: int = 1) -> list[FlowRow]:
        found = apply("payouts", f"p{record}", record, operation, self.get)
        for row in found:
            self[row.row_key] = row
        return found

    def refuses(self, error: type[Exception], operation: RowOperation, record: int = 1) -> Any:
        before = dict(self)
        with pytest.raises(error) as caught:
            self.do(operation, record)
        assert self == before
        return caught.value


@pytest.mark.parametrize("kind", [HASH, SEAT])
def test_a_unique_value_has_one_owner(kind: RowKind) -> None:
    rows = Rows()
    (row,) = rows.do(Claim(kind, "0xabc", {"n": 1}))
    assert (row.record, row.state, row.version, row.body) == (1, RowState.HELD, 1, '{"n":1}')
    assert row.permanent is not kind.releasable
    taken = rows.refuses(RowTaken, Claim(kind, "0xabc"), record=2)
    assert (taken.key, taken.record) == ("0xabc", 1)
    rows.refuses(RowTaken, Claim(kind, "0xabc"))  # nor twice by the same record


def test_a_releasable_value_can_be_claimed_by_another_record_after_its_release() -> None:
    rows = Rows()
    rows.do(Claim(SEAT, "12A"))
    rows.refuses(RowNotOwned, Release(SEAT, "12A"), record=2)
    (row,) = rows.do(Release(SEAT, "12A"))
    assert (row.state, row.version) == (RowState.RELEASED, 2)
    rows.refuses(RowNotOwned, Release(SEAT, "12A"))
    (row,) = rows.do(Claim(SEAT, "12A", {"again": True}), record=2)
    assert (row.record, row.state, row.version, row.body) == (2, RowState.HELD, 3, '{"again":true}')


def test_a_permanent_value_is_never_released() -> None:
    rows = Rows()
    rows.do(Claim(HASH, "0xabc"))
    assert "permanent" in str(rows.refuses(RowNotOwned, Release(HASH, "0xabc")))
    rows.refuses(RowNotOwned, Release(HASH, "0xdef"))  # nor one that was never claimed


def test_numbers_are_contiguous_and_each_belongs_to_its_record() -> None:
    rows = Rows()
    taken = [rows.do(Next(NONCE, "bsc/0x1", at_least=7), record=record)[1] for record in (1, 2, 3)]
    assert [(number_of(row), row.record, row.permanent) for row in taken] == [(7, 1, True), (8, 2, True), (9, 3, True)]
    assert rows["payouts", "nonce", "bsc/0x1"].amount == 10
    assert rows.do(Next(NONCE, "bsc/0x1", at_least=50))[1].amount == 50  # used elsewhere up to 49
    assert rows.do(Next(NONCE, "bsc/0x1", at_least=7))[1].amount == 51
    assert rows.do(Next(NONCE, "bsc/0x1", at_least=52, exact=True))[1].amount == 52
    moved = rows.refuses(RowMoved, Next(NONCE, "bsc/0x1", at_least=52, exact=True))
    assert isinstance(moved, RowMoved) and (moved.expected, moved.found) == (52, 53), "another record has it"
    assert sorted(rows) == sorted(rows, key=lambda key: (key[2] != "bsc/0x1", key[2])), "keys sort as numbers do"
    assert rows.do(Next(NONCE, "bsc/0x2"))[1].amount == 0  # another wallet counts by itself


@pytest.mark.parametrize(
    "operation",
    [
        Next(NONCE, "w", at_least=10**18),
        Reserve(GAS, "w", 2**127 - 1, bound=2**127 - 1),
        Put(NOTE, "w", 0, amount=2**127 - 1),
        Put(NOTE, "w", 0, amount=1 - 2**127),
        Put(NOTE, "w", 0, {"note": "x" * (65_536 - len('{"note":""}'))}),
    ],
)
def test_the_last_number_amount_and_length_within_the_bounds_are_kept(operation: RowOperation) -> None:
    rows = Rows()
    rows.do(operation)
    assert rows


@pytest.mark.parametrize("at_least", [-1, 10**18 + 1])
def test_a_sequence_stays_within_its_bounds(at_least: int) -> None:
    Rows().refuses(InvalidEntry, Next(NONCE, "w", at_least=at_least))


def test_amounts_are_reserved_up_to_the_bound_and_given_back_once() -> None:
    rows = Rows()
    rows.do(Reserve(GAS, "w", 60, bound=100))
    refused = rows.refuses(BoundExceeded, Reserve(GAS, "w", 41, bound=100), record=2)
    assert (refused.reserved, refused.amount, refused.bound) == (60, 41, 100)
    rows.do(Reserve(GAS, "w", 40, bound=100), record=2)
    assert rows["payouts", "gas", "w"].amount == 100
    rows.refuses(RowTaken, Reserve(GAS, "w", 1, bound=1000))  # once per record
    rows.do(GiveBack(GAS, "w"))
    assert (rows["payouts", "gas", "w"].amount, rows["payouts", "gas", "w/p1"].amount) == (40, 0)
    rows.refuses(RowNotOwned, GiveBack(GAS, "w"))  # what is given back is given back
    rows.refuses(RowNotOwned, GiveBack(GAS, "w"), record=3)  # nor by a record that reserved nothing
    rows.do(Reserve(GAS, "w", 60, bound=100))  # and again, after that
    assert rows["payouts", "gas", "w"].amount == 100


def test_the_only_reserved_amount_is_given_back_whole() -> None:
    rows = Rows()
    rows.do(Reserve(GAS, "w", 60, bound=100))
    rows.do(GiveBack(GAS, "w"))
    assert rows["payouts", "gas", "w"].amount == 0


@pytest.mark.parametrize("amount", [0, -1, 2**127])
def test_only_amounts_can_be_reserved(amount: int) -> None:
    Rows().refuses(InvalidEntry, Reserve(GAS, "w", amount, bound=2**128))


def test_a_total_that_says_less_than_is_given_back_is_refused() -> None:
    rows = Rows()
    rows.do(Reserve(GAS, "w", 60, bound=100))
    del rows["payouts", "gas", "w"]
    rows.refuses(RowNotOwned, GiveBack(GAS, "w"))


def test_a_cursor_moves_by_compare_and_set() -> None:
    rows = Rows()
    rows.do(Put(NOTE, "cursor", 0, {"height": 5}, shared=True))
    moved = rows.refuses(RowMoved, Put(NOTE, "cursor", 0, {"height": 9}, shared=True), record=2)
    assert (moved.expected, moved.found) == (0, 1)
    (row,) = rows.do(Put(NOTE, "cursor", 1, {"height": 9}, amount=-3, shared=True), record=2)
    assert (row.record, row.version, row.amount, row.body) == (0, 2, -3, '{"height":9}')
    rows.refuses(RowMoved, Put(NOTE, "cursor", 3, shared=True))


def test_an_item_of_a_list_is_its_records_alone() -> None:
    rows = Rows()
    rows.do(Put(NOTE, "p1/1", 0, {"fee": "7"}))
    assert "belongs to record 1" in str(rows.refuses(RowNotOwned, Put(NOTE, "p1/1", 1, {}), record=2))
    rows.refuses(RowNotOwned, Put(NOTE, "p1/1", 1, {}, shared=True))
    rows.do(Put(NOTE, "p1/1", 1, {"fee": "9"}))


def test_an_operation_is_for_kinds_of_its_form_only() -> None:
    wrong: list[RowOperation] = [
        Claim(NONCE, "k"),
        Release(GAS, "k"),
        Next(HASH, "k"),
        Reserve(NOTE, "k", 1, 1),
        GiveBack(HASH, "k"),
    ]
    for operation in [*wrong, Put(GAS, "k", 0)]:
        assert "is not for" in str(Rows().refuses(InvalidEntry, operation))


@pytest.mark.parametrize("key", ["", "a\n", "a\x1fb", "x" * (KEY_LENGTH_MAX + 1)])
def test_a_malformed_key_is_refused(key: str) -> None:
    Rows().refuses(InvalidName, Claim(HASH, key))


def test_a_key_that_becomes_too_long_with_its_record_is_refused() -> None:
    Rows().refuses(InvalidName, Reserve(GAS, "x" * KEY_LENGTH_MAX, 1, 1))
    Rows().refuses(InvalidName, Next(NONCE, "x" * KEY_LENGTH_MAX))


@pytest.mark.parametrize("body", [{"x": object()}, {"x": "\x00"}, {"x": "y" * 70_000}])
def test_a_body_that_no_store_takes_is_refused(body: dict[str, Any]) -> None:
    Rows().refuses(InvalidEntry, Put(NOTE, "k", 0, body))


@pytest.mark.parametrize("amount", [2**127, -(2**127)])
def test_an_amount_that_does_not_fit_is_refused(amount: int) -> None:
    Rows().refuses(InvalidEntry, Put(NOTE, "k", 0, amount=amount))


operations = st.one_of(
    st.builds(Claim, st.sampled_from([HASH, SEAT]), st.sampled_from("ab")),
    st.builds(Release, st.just(SEAT), st.sampled_from("ab")),
    st.builds(Next, st.just(NONCE), st.sampled_from("ab"), st.integers(0, 5)),
    st.builds(Reserve, st.just(GAS), st.sampled_from("ab"), st.integers(1, 9), st.integers(1, 20)),
    st.builds(GiveBack, st.just(GAS), st.sampled_from("ab")),
    st.builds(Put, st.just(NOTE), st.sampled_from("ab"), st.integers(0, 2), shared=st.booleans()),
)


@given(st.lists(st.tuples(operations, st.integers(1, 3)), max_size=30))
def test_whatever_happens_rows_add_up_and_nothing_is_read_that_was_not_asked_for(
    steps: list[tuple[RowOperation, int]],
) -> None:
    rows = Rows()
    for operation, record in steps:
        declared = set(keys_read("payouts", f"p{record}", operation))
        read: set[RowKey] = set()

        def find(key: RowKey, read: set[RowKey] = read) -> FlowRow | None:
            read.add(key)
            return rows.get(key)

        try:
            found = apply("payouts", f"p{record}", record, operation, find)
        except (RowTaken, RowMoved, RowNotOwned, BoundExceeded):
            found = []
        assert read <= declared, "the writer reads exactly what is declared"
        for row in found:
            before = rows.get(row.row_key)
            assert row.version == (1 if before is None else before.version + 1)
            rows[row.row_key] = row
    for key in "ab":
        held = [r.amount for r in rows.values() if r.kind == "gas" and r.key.startswith(f"{key}/")]
        total = rows.get(("payouts", "gas", key))
        assert (0 if total is None else total.amount) == sum(held)
        numbers = [r.amount for r in rows.values() if r.kind == "nonce" and r.key.startswith(f"{key}/")]
        assert len(numbers) == len(set(numbers))
