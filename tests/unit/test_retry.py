"""Back-off and alarms: when a call is made again, and when a person is called."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.model.outcome import Outcome
from bursar.model.retry import ATTEMPTS_MAX, CAP_MAX_S, FACTOR_MAX, USUAL_ALARMS, Alarm, Retry, until_alarm_us

S = 1_000_000  # microseconds

# --- back-off --------------------------------------------------------------------------------------------------------


@given(st.floats(0.001, 100), st.floats(1, 1000), st.floats(100, CAP_MAX_S), st.floats(0, 0.99), st.floats(0, 0.999))
def test_back_off_stays_within_its_bounds(
    first: float, factor: float, cap: float, jitter: float, chance: float
) -> None:
    retry = Retry(first_s=first, factor=factor, cap_s=cap, jitter=jitter)
    for attempt in (0, 1, 2, 10, 63, 64, 65, 10**6):
        delay = retry.delay_us(attempt, chance)
        assert int(first * (1 - jitter) * 1e6) <= delay <= cap * 1e6
        assert delay < 2**63


def test_back_off_doubles_up_to_its_cap() -> None:
    retry = Retry(first_s=0.5, cap_s=3, jitter=0)
    assert [retry.delay_us(n, 0.7) / 1e6 for n in (1, 2, 3, 4, 5)] == [0.5, 1, 2, 3, 3]


def test_before_the_first_call_the_delay_is_that_after_it() -> None:
    retry = Retry(first_s=0.5, jitter=0)
    assert [retry.delay_us(n, 0) for n in (-1, 0, 1)] == [500_000] * 3


def test_a_slow_back_off_stops_growing_all_the_same() -> None:
    retry = Retry(first_s=1, factor=1.01, jitter=0)
    last = retry.delay_us(ATTEMPTS_MAX + 1, 0)
    assert retry.delay_us(ATTEMPTS_MAX, 0) < last == retry.delay_us(ATTEMPTS_MAX + 2, 0)


def test_jitter_takes_away_and_never_adds() -> None:
    retry = Retry(first_s=1, jitter=0.5)
    assert [retry.delay_us(1, chance) / 1e6 for chance in (0, 0.5, 0.99)] == [1, 0.75, 0.505]


@pytest.mark.parametrize(
    "wrong",
    [
        {"first_s": 0},
        {"first_s": -1},
        {"first_s": 61},
        {"factor": 0.9},
        {"factor": FACTOR_MAX + 1},
        {"factor": float("nan")},
        {"cap_s": float("inf")},
        {"cap_s": CAP_MAX_S + 1},
        {"jitter": 1},
        {"jitter": -0.1},
    ],
)
def test_a_back_off_that_would_wait_for_ever_or_not_at_all_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="would wait"):
        Retry(**wrong)


@pytest.mark.parametrize(
    "right", [{"first_s": 60}, {"factor": 1}, {"factor": FACTOR_MAX}, {"cap_s": CAP_MAX_S}, {"jitter": 0}]
)
def test_the_bounds_of_a_back_off_belong_to_it(right: dict[str, float]) -> None:
    assert Retry(**right).delay_us(1, 0) > 0


def test_the_longest_wait_is_thirty_days() -> None:
    assert CAP_MAX_S == 30 * 24 * 60 * 60


# --- alarms ----------------------------------------------------------------------------------------------------------


def test_alarms_ring_at_the_earlier_of_tries_and_age() -> None:
    alarm = Alarm(reason="stuck", tries=3, seconds=60)
    assert not alarm.rings("A", 2, 60 * S - 1, None)
    assert alarm.rings("A", 3, 0, None)
    assert alarm.rings("A", 0, 60 * S, None)


def test_an_alarm_that_asks_for_nothing_never_rings() -> None:
    assert not Alarm(reason="never").rings("A", 10**6, 10**15, None)


def test_an_alarm_of_one_state_and_one_answer_rings_for_those_alone() -> None:
    only = Alarm(reason="stuck", state="B", tries=1, outcome=Outcome.EXPLICIT_FAIL)
    assert only.rings("B", 1, 0, Outcome.EXPLICIT_FAIL)
    assert not only.rings("B", 1, 0, Outcome.TIMEOUT)
    assert not only.rings("B", 1, 0, None)
    assert not only.rings("A", 1, 0, Outcome.EXPLICIT_FAIL)


def test_an_alarm_of_any_answer_rings_for_each() -> None:
    alarm = Alarm(reason="stuck", tries=1)
    assert all(alarm.rings("A", 1, 0, outcome) for outcome in (None, *Outcome))


def test_a_clock_that_was_set_back_rings_too_early_rather_than_never() -> None:
    alarm = Alarm(reason="stuck", seconds=60)
    assert not alarm.rings("A", 0, -60 * S + 1, None)
    assert alarm.rings("A", 0, -60 * S, None)


def test_an_alarm_of_the_whole_life_counts_from_the_creation() -> None:
    alarm = Alarm(reason="stuck", seconds=60, whole_life=True)
    assert alarm.rings("A", 0, 0, None, life_us=60 * S)
    assert alarm.rings("A", 0, 60 * S, None, life_us=0)  # a record without a creation, as old as its state
    assert not Alarm(reason="stuck", seconds=60).rings("A", 0, 0, None, life_us=60 * S)


def test_the_usual_alarm_is_ten_calls_or_five_minutes() -> None:
    (usual,) = USUAL_ALARMS
    assert [usual.rings("A", tries, 0, None) for tries in (9, 10)] == [False, True]
    assert [usual.rings("A", 0, age, None) for age in (300 * S - 1, 300 * S)] == [False, True]


@pytest.mark.parametrize(
    ("state", "age_s", "left_s"),
    [("A", 0, 5), ("A", 4.5, 0.5), ("A", 5, 15), ("A", 19, 1), ("A", 20, None), ("B", 0, 20), ("B", 99, None)],
)
def test_how_long_until_the_next_alarm(state: str, age_s: float, left_s: float | None) -> None:
    """Of age alone: those that want a number of calls or an answer ring when that comes."""
    alarms = (
        Alarm(reason="a", state="A", seconds=5, tries=3),
        Alarm(reason="any", seconds=20),
        Alarm(reason="tries", tries=1),
        Alarm(reason="answer", seconds=1, outcome=Outcome.TIMEOUT),
    )
    left_us = until_alarm_us(alarms, state, int(age_s * 1e6))
    assert left_us == (None if left_s is None else left_s * 1e6)


def test_how_long_until_an_alarm_of_the_whole_life() -> None:
    alarms = (Alarm(reason="old", seconds=60, whole_life=True),)
    assert until_alarm_us(alarms, "A", 0, life_us=45 * S) == 15 * S
