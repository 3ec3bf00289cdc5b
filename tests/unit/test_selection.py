"""Selection: the largest postings pay, no more than needed, and a shortage is only believed of a complete pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.selection import NeedMorePostings, Pool


def pool(*amounts: int, complete: bool = True) -> Pool:
    """Postings numbered 1, 2, 3, … in the order given."""
    return Pool([(amount, -number) for number, amount in enumerate(amounts, 1)], complete)


def test_the_largest_pays_alone_if_it_can() -> None:
    assert pool(5, 100, 20).pick(60) == ([2], 100)


def test_no_more_are_taken_than_needed() -> None:
    assert pool(5, 100, 20).pick(101) == ([2, 3], 120)


def test_exactly_enough_is_enough() -> None:
    assert pool(5, 100, 20).pick(125) == ([2, 3, 1], 125)


def test_of_equals_the_oldest_pays_first() -> None:
    assert pool(7, 7, 7).pick(14) == ([1, 2], 14)


def test_nothing_is_needed_for_nothing() -> None:
    assert pool(5).pick(0) == ([], 0)


def test_a_complete_pool_says_what_it_has() -> None:
    assert pool(5, 6).pick(100) == ([2, 1], 11)


def test_an_incomplete_pool_asks_for_more_instead() -> None:
    shallow = pool(5, 6, complete=False)
    with pytest.raises(NeedMorePostings) as short:
        shallow.pick(12)

    assert short.value.pool is shallow


def test_an_incomplete_pool_that_suffices_suffices() -> None:
    assert pool(5, 6, complete=False).pick(11) == ([2, 1], 11)


def test_what_is_skipped_does_not_pay() -> None:
    assert pool(5, 100, 20).pick(20, skip={2}) == ([3], 20)


def test_what_has_become_live_pays() -> None:
    after = pool(5)
    after.put(50, 9)

    assert after.pick(40) == ([9], 50)


def test_what_is_spent_does_not_pay_again() -> None:
    after = pool(5, 100)
    after.drop(100, 2)

    assert after.pick(5) == ([1], 5)


def test_to_drop_the_unknown_changes_nothing() -> None:
    after = pool(5, 100)
    after.drop(100, 7)
    after.drop(100, 1)
    after.drop(6, 1)

    assert after.pick(105) == ([2, 1], 105)


@given(st.lists(st.integers(1, 2**127 - 1), max_size=30), st.integers(1, 2**128))
def test_any_choice_is_sufficient_minimal_and_distinct(amounts: list[int], target: int) -> None:
    chosen, total = pool(*amounts).pick(target)

    assert len(set(chosen)) == len(chosen)
    assert total == sum(amounts[number - 1] for number in chosen)
    if total >= target:
        assert total - min(amounts[number - 1] for number in chosen) < target
    else:
        assert total == sum(amounts)


@given(st.lists(st.integers(1, 9), max_size=20), st.data())
def test_dropping_and_putting_back_leaves_the_pool_as_it_was(amounts: list[int], data: st.DataObject) -> None:
    before = pool(*amounts)
    expected = list(before.items)
    numbers = data.draw(st.permutations(range(1, len(amounts) + 1)))
    for number in numbers:
        before.drop(amounts[number - 1], number)
    assert before.items == []
    for number in numbers:
        before.put(amounts[number - 1], number)

    assert before.items == expected
