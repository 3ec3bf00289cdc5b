"""How far a core's floors may be raised (T32), and which ids a new transfer may have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.engine.clock import EPOCH_US, first_id_at, made_at_us
from bursar.flows.transfers.checks import Horizons, is_fresh
from bursar.flows.transfers.pruning import floors

HOUR_US = 3_600_000_000
NOW_US = EPOCH_US + 60_000 * HOUR_US
HORIZONS = Horizons(room_after_s=3_600, forget_after_s=7 * 86_400)
NEWEST = first_id_at(NOW_US)

moments = st.integers(EPOCH_US, EPOCH_US + 10**17)


def test_room_is_set_free_after_an_hour_and_nothing_is_forgotten_before_a_week() -> None:
    found = floors(NOW_US, None, NEWEST, HORIZONS)
    assert NOW_US - made_at_us(found.room) == HOUR_US
    assert NOW_US - made_at_us(found.forget) == 7 * 24 * HOUR_US


def test_the_oldest_open_transfer_holds_the_floors_down() -> None:
    oldest = first_id_at(NOW_US - 3 * HOUR_US)
    found = floors(NOW_US, oldest, NEWEST, HORIZONS)
    assert (found.room, found.forget) == (oldest, floors(NOW_US, None, NEWEST, HORIZONS).forget)
    ancient = first_id_at(NOW_US - 30 * 24 * HOUR_US)
    assert floors(NOW_US, ancient, NEWEST, HORIZONS).forget == ancient


def test_a_core_that_has_seen_nothing_new_is_not_asked_for_more_than_it_has_seen() -> None:
    """It refuses a floor above its highest id, which could only be a mistake."""
    assert floors(NOW_US, None, 500, HORIZONS).room == 500
    assert floors(NOW_US, None, 0, HORIZONS).room == 1


@given(moments, st.none() | moments, moments)
def test_no_open_and_no_new_transfer_is_ever_below_a_floor(now_us: int, opened_us: int | None, highest_us: int) -> None:
    oldest = None if opened_us is None else first_id_at(opened_us)
    found = floors(now_us, oldest, first_id_at(highest_us), HORIZONS)
    assert 1 <= found.forget <= found.room
    assert oldest is None or found.room <= oldest
    # Written at the end of the longest time that an id stays fresh, it is not below what the floors can be by then.
    new = first_id_at(now_us)
    late_us = made_at_us(new) + HOUR_US // 2
    assert is_fresh(new, late_us, HORIZONS)
    assert new >= floors(late_us, None, first_id_at(highest_us), HORIZONS).room


def test_an_old_id_is_not_taken_for_a_new_transfer() -> None:
    assert is_fresh(NEWEST, NOW_US, HORIZONS)
    assert is_fresh(first_id_at(NOW_US - HOUR_US // 2), NOW_US, HORIZONS)
    assert not is_fresh(first_id_at(NOW_US - HOUR_US // 2 - 1_000_000), NOW_US, HORIZONS)
    assert not is_fresh(1, NOW_US, HORIZONS)


def test_horizons_that_would_forget_before_room_is_free_are_refused() -> None:
    with pytest.raises(ValueError, match="room is set free"):
        Horizons(room_after_s=10, forget_after_s=9)


@given(moments)
def test_an_id_carries_its_moment(us: int) -> None:
    assert 0 <= us - made_at_us(first_id_at(us)) < 1_000 or us - EPOCH_US < 1_000
