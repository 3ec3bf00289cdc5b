"""Timers, signals and priorities, as far as they are decided without a database: what a flow may say, who is next."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest

from bursar.engine import Answer, Flow, FlowRecord, FlowRefused
from bursar.engine.queue import BY_AGE_EVERY, Queue
from bursar.engine.signals import INBOX_MAX, awaited, check_possible, find
from bursar.model.errors import IdempotencyKeyReused, InvalidEntry, InvalidState
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Priority, Record, Signal
from bursar.writer import NO_TIMER

MACHINE = Machine(
    name="quotes",
    initial="OFFERED",
    events=("ACCEPT", "EXPIRED", "PAID", "CANCEL"),
    states=(
        State("OFFERED", Kind.WAIT, awaits="buyer", timeout_event="EXPIRED"),
        State("SENDING", Kind.CALL, action="send"),
        State("SENT", Kind.WAIT, awaits="bank", timeout_event="EXPIRED", timeout_s=60.5),
        State("HELD", Kind.WAIT, awaits="operator"),
        State("DONE", Kind.TERMINAL),
        State("GONE", Kind.TERMINAL),
    ),
    arrows=(
        Arrow("OFFERED", "ACCEPT", "SENDING"),
        Arrow("OFFERED", "EXPIRED", "GONE"),
        Arrow("OFFERED", "CANCEL", "GONE"),
        Arrow("SENDING", Outcome.SUCCESS, "SENT"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "GONE"),
        Arrow("SENT", "PAID", "DONE"),
        Arrow("SENT", "EXPIRED", "HELD"),
        Arrow("HELD", "PAID", "DONE"),
    ),
)


class Quote(msgspec.Struct):
    expires: datetime | None = None


async def send(_item: FlowRecord[Quote]) -> Answer:
    return Answer(outcome=Outcome.SUCCESS)


def flow(**more: Any) -> Flow[Quote]:
    options: dict[str, Any] = {
        "timer": lambda item: item.body.expires,
        "inbox_events": frozenset({"PAID", "CANCEL", "BUMP"}),
    }
    return Flow(machine=MACHINE, body=Quote, actions={"send": send}, **(options | more))


def record(state: str = "OFFERED", number: int = 1, **more: Any) -> Record:
    return Record(
        number=number,
        flow=more.pop("flow", "quotes"),
        id=f"q-{number}",
        owner="",
        state=state,
        version=1,
        attempt=0,
        in_flight_posting=0,
        due_us=None,
        worker="",
        body=more.pop("body", "{}"),
        error="",
        since_us=0,
        created_us=0,
        updated_us=0,
        **more,
    )


# --- timers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "expires", "timer"),
    [
        ("SENT", None, -60_500_000),
        ("OFFERED", None, NO_TIMER),
        ("OFFERED", datetime(1970, 1, 1, 0, 0, 7, 5, tzinfo=UTC), 7_000_005),
        ("OFFERED", datetime(1970, 1, 1, 1, 0, 7, tzinfo=timezone(timedelta(hours=1))), 7_000_000),
        ("OFFERED", datetime(1960, 1, 1, tzinfo=UTC), 1),
        ("HELD", datetime(1970, 1, 2, tzinfo=UTC), NO_TIMER),
        ("SENDING", datetime(1970, 1, 2, tzinfo=UTC), NO_TIMER),
    ],
)
def test_a_timer_is_a_moment_or_a_time_from_now(state: str, expires: datetime | None, timer: int) -> None:
    body = msgspec.json.encode(Quote(expires)).decode()
    assert flow().timer_of(MACHINE.state(state), record(body=body)) == timer


def test_a_timer_without_a_time_zone_is_refused() -> None:
    naive = flow(timer=lambda _item: datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(FlowRefused, match="time zone"):
        naive.timer_of(MACHINE.state("OFFERED"), record())


def test_the_timer_sees_the_state_that_the_record_comes_to() -> None:
    seen: list[str] = []

    def timer(item: FlowRecord[Quote]) -> None:
        seen.append(item.record.state)

    flow(timer=timer).timer_of(MACHINE.state("OFFERED"), record("SENDING"))
    assert seen == ["OFFERED"]


# --- what a flow may say -------------------------------------------------------------------------------------------

FIXED = Machine(
    name="fixed",
    initial="SENT",
    events=("PAID",),
    states=(State("SENT", Kind.WAIT, awaits="bank"), State("DONE", Kind.TERMINAL)),
    arrows=(Arrow("SENT", "PAID", "DONE"),),
)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"timer": None}, "OFFERED times out"),
        ({"machine": FIXED, "actions": {}, "inbox_events": frozenset()}, "no waiting state needs `timer`"),
        ({"inbox_events": frozenset({"EXPIRED"})}, "'EXPIRED' can't be a signal"),
        ({"inbox_events": frozenset({"SUCCESS"})}, "'SUCCESS' can't be a signal"),
        ({"inbox_events": frozenset({"a.b"})}, "'a.b' can't be a signal"),
        ({"share": 0.0}, "share of 0.0"),
        ({"share": 1.01}, "share of 1.01"),
    ],
)
def test_a_flow_that_could_not_be_scheduled_is_refused(change: dict[str, Any], why: str) -> None:
    usual: dict[str, Any] = {"machine": MACHINE, "actions": {"send": send}, "timer": lambda _item: None}
    with pytest.raises(FlowRefused, match=why):
        Flow(body=Quote, **(usual | change))


# --- signals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "event", "possible"),
    [
        ("OFFERED", "ACCEPT", True),
        ("OFFERED", "PAID", True),  # early
        ("SENDING", "PAID", True),
        ("SENDING", "BUMP", True),  # no state waits for it: it changes the body
        ("SENDING", "ACCEPT", False),  # is not kept
        ("SENDING", "CANCEL", False),  # no state that it can come to waits for it
        ("SENDING", "SUCCESS", False),
        ("OFFERED", "EXPIRED", False),  # the engine's own
        ("SENT", "EXPIRED", False),
        ("DONE", "PAID", False),
        ("DONE", "BUMP", False),
        ("SENT", "NONSENSE", False),
    ],
)
def test_which_signals_a_record_takes(state: str, event: str, possible: bool) -> None:
    if possible:
        check_possible(flow(), record(state), event)
        return
    with pytest.raises(InvalidState):
        check_possible(flow(), record(state), event)


def test_an_inbox_is_bounded_and_a_full_one_still_moves_its_record() -> None:
    check_possible(flow(), record("SENDING", inbox=INBOX_MAX - 1), "PAID")
    with pytest.raises(InvalidState, match="100 signals"):
        check_possible(flow(), record("SENDING", inbox=INBOX_MAX), "PAID")
    check_possible(flow(), record("SENT", inbox=INBOX_MAX), "PAID")
    check_possible(flow(), record("SENDING", inbox=INBOX_MAX), "BUMP")  # no state waits for it: it never stays


def test_a_sender_id_stands_for_one_signal() -> None:
    sent = [Signal(1, "s-1", "PAID", "ann", '{"a":1,"b":2}', 2)]
    assert find(sent, "s-1", "PAID", {"b": 2, "a": 1}) is sent[0]
    assert find(sent, "s-2", "PAID", {"a": 9}) is None
    for event, evidence in (("CANCEL", {"a": 1, "b": 2}), ("PAID", {"a": 1})):
        with pytest.raises(IdempotencyKeyReused):
            find(sent, "s-1", event, evidence)


def test_evidence_that_is_too_long_is_refused_and_not_cut() -> None:
    with pytest.raises(InvalidEntry, match="at most 16384"):
        find([Signal(1, "s-1", "PAID", "ann", "{}", 2)], "s-1", "PAID", {"a": "x" * 20_000})


def test_signals_are_consumed_in_the_order_of_arrival_and_once() -> None:
    sent = [
        Signal(1, "a", "BUMP", "ann", "{}", 2),
        Signal(1, "b", "PAID", "ann", "{}", 3, 4),
        Signal(1, "c", "PAID", "ann", "{}", 5),
        Signal(1, "d", "PAID", "ann", "{}", 6),
    ]
    assert awaited(flow(), record("SENT"), sent) == sent[2:]
    assert awaited(flow(), record("SENDING"), sent) == []
    assert awaited(flow(), record("OFFERED"), sent) == []


# --- the queue of a worker -----------------------------------------------------------------------------------------


def fill(queue: Queue, *lots: tuple[str, Priority, int]) -> None:
    number = 0
    for name, priority, count in lots:
        for _ in range(count):
            number += 1
            queue.add([record(number=number, flow=name, priority=priority)])


def taken(queue: Queue, count: int) -> list[Record]:
    found = [queue.take(lambda _flow: True) for _ in range(count)]
    return [one for one in found if one is not None]


def test_the_higher_priority_goes_first_and_in_the_order_of_arrival() -> None:
    queue = Queue()
    fill(queue, ("a", Priority.LOW, 2), ("a", Priority.NORMAL, 2), ("b", Priority.HIGH, 2))
    assert (len(queue), queue.of("a"), queue.of("b"), queue.of("c")) == (6, 4, 2, 0)
    assert [one.number for one in taken(queue, 9)] == [5, 6, 3, 4, 1, 2]
    assert len(queue) == 0


def test_low_priority_is_not_starved() -> None:
    """However many high ones come, every eighth turn is for the oldest."""
    queue = Queue()
    fill(queue, ("a", Priority.LOW, 3), ("a", Priority.HIGH, 100))
    found = taken(queue, 3 * BY_AGE_EVERY)
    assert [place for place, one in enumerate(found, 1) if one.priority is Priority.LOW] == [8, 16, 24]


def test_a_flow_without_a_place_holds_up_no_other() -> None:
    queue = Queue()
    fill(queue, ("hangs", Priority.HIGH, 1000), ("works", Priority.LOW, 2))
    found = [queue.take(lambda flow: flow == "works") for _ in range(3)]
    assert [one and one.flow for one in found] == ["works", "works", None]
    assert queue.of("hangs") == 1000


def test_a_record_that_is_claimed_again_keeps_its_place_with_what_is_known_of_it_now() -> None:
    queue = Queue()
    fill(queue, ("a", Priority.NORMAL, 2))
    queue.add([record(number=1, flow="a", state="SENT")])
    assert [(one.number, one.state) for one in taken(queue, 5)] == [(1, "SENT"), (2, "OFFERED")]
