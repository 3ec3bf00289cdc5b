"""Building a record's move: which arrows it takes, the compare-and-set with its transitions, when it is due next, and
its rows. No IO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bursar.engine.flow import Answer, Booking, Flow, FlowRecord, InlineCall
from bursar.model.entries import check_key
from bursar.model.flow_rows import RowOperation
from bursar.model.machine import Kind
from bursar.model.outcome import Outcome
from bursar.model.records import Record, Signal
from bursar.ports import Ports
from bursar.writer import KEEP_DUE, Move, NewTransition

CREATED = "CREATED"
SIGNAL = "SIGNAL"  # before the event of one that stays in the inbox


class Moves:
    """Moves of the records that one process drives."""

    def __init__(self, flows: Mapping[str, Flow[Any]], ports: Ports, worker: str, lease_us: int) -> None:
        self.flows = flows
        self.ports = ports
        self.worker = worker
        self.lease_us = lease_us

    def new_record(self, flow: str, id_: str, owner: str, body: msgspec.Struct) -> Record:
        """A record that is not written yet."""
        now_us = self.ports.now_us()
        return Record(
            number=0,
            flow=flow,
            id=id_,
            owner=owner and check_key(owner),
            state=self.flows[flow].machine.initial,
            version=0,
            attempt=0,
            in_flight_posting=0,
            due_us=now_us + self.lease_us,
            worker=self.worker,
            body=msgspec.json.encode(body).decode(),
            error="",
            since_us=now_us,
            created_us=now_us,
            updated_us=now_us,
            priority=self.flows[flow].priority(body),
        )

    def begin(
        self, flow: Flow[Any], record: Record, body: msgspec.Struct
    ) -> tuple[FlowRecord[Any], Booking, tuple[NewTransition, ...]]:
        """A new record in the state that it comes to by itself, what accompanies its start, and its way there."""
        first = NewTransition("", CREATED, record.state)
        transitions = (first, *automatic(flow, FlowRecord(record, body), record.state))
        there = FlowRecord(msgspec.structs.replace(record, state=transitions[-1].target), body)
        return there, flow.book_start(there), transitions

    def signalled(
        self,
        flow: Flow[Any],
        record: Record,
        event: str,
        evidence: dict[str, Any],
        actor: str,
        *,
        signal: Signal | None,
        inbox: int = 0,
    ) -> tuple[Booking, Move]:
        """What accompanies an event that a waiting record gets, and its move; `signal` is what that consumes."""
        item = flow.item(record)
        target = flow.machine.next(record.state, event).name
        answer = Answer(outcome=Outcome.SUCCESS, event=event, evidence=evidence)
        answer = msgspec.structs.replace(answer, body=flow.next_body(item, event, answer))
        body = item.body if answer.body is None else answer.body
        told = NewTransition(record.state, event, target, answer.as_json())
        booking = flow.book(item, event, answer)
        transitions = (told, *automatic(flow, FlowRecord(record, body), target))
        return booking, self.apply(item, transitions, booking, answer, actor=actor, signal=signal, inbox=inbox)

    def kept(self, flow: Flow[Any], record: Record, signal: Signal, evidence: dict[str, Any]) -> Move:
        """A signal that moves nothing: the body may change, and a record that calls is due at once.

        It stays in the inbox unless it is consumed by that.
        """
        kind = flow.machine.state(record.state).kind
        body = flow.on_signal(flow.item(record), signal.event, evidence)
        note = msgspec.json.encode({"sender": signal.sender}).decode()
        wakes = kind is Kind.CALL or (kind is Kind.WAIT and record.inbox > 0)
        return staying_move(
            record,
            f"{SIGNAL} {signal.event}",
            note,
            actor=signal.actor,
            delay_us=0 if wakes else KEEP_DUE,
            worker="" if wakes else record.worker,
            body=None if body is None else msgspec.json.encode(body).decode(),
            inbox=0 if signal.consumed else 1,
            signal=signal,
        )

    def apply(
        self,
        item: FlowRecord[Any],
        transitions: tuple[NewTransition, ...],
        booking: Booking,
        answer: Answer | None,
        *,
        actor: str = "",
        **more: Any,
    ) -> Move:
        """The move along some arrows, with what a booking does to the posting in transit."""
        record = item.record
        body = None if answer is None or answer.body is None else msgspec.json.encode(answer.body).decode()
        transit = (
            record.in_flight_posting if answer is None or answer.in_flight_posting is None else answer.in_flight_posting
        )
        move = self.move(
            record,
            transitions,
            actor,
            booking,
            body=body,
            answered=() if answer is None else answer.rows,
            in_flight_posting=0 if booking.clears_in_flight else transit,
            error="" if answer is None else answer.error,
            **more,
        )
        return for_any_worker(move, actor)

    def move(
        self,
        record: Record,
        transitions: tuple[NewTransition, ...],
        actor: str,
        booking: Booking,
        *,
        body: str | None,
        answered: tuple[RowOperation, ...] = (),
        inbox: int = 0,
        **more: Any,
    ) -> Move:
        """A move along some arrows, with the rows of its booking and of the answer."""
        flow = self.flows[record.flow]
        state = flow.machine.state(transitions[-1].target)
        waits = state.kind is Kind.WAIT and record.inbox + inbox == 0
        ends = waits or state.kind is Kind.TERMINAL  # with signals in its inbox, the worker goes on: it may consume one
        delay_us: int | None = None if ends else self.lease_us
        if waits:
            life_us = self.ports.now_us() - record.created_us
            delay_us = flow.next_look_us(state.name, 0, life_us)
        return Move(
            flow=record.flow,
            id=record.id,
            number=record.number,
            version=record.version,
            transitions=transitions,
            actor=actor or self.worker,
            delay_us=delay_us,
            worker="" if ends else self.worker,
            body=body,
            owner=record.owner,
            in_flight_account=booking.in_flight_account,
            rows=flow.own_rows(booking.rows + answered),
            timer=flow.timer_of(state, record if body is None else msgspec.structs.replace(record, body=body)),
            priority=record.priority,
            inbox=inbox,
            **more,
        )

    def after(self, record: Record, move: Move, number: int, posting: int) -> Record:
        """The record as a move leaves it."""
        now_us = self.ports.now_us()
        timer = move.timer
        return msgspec.structs.replace(
            record,
            number=number,
            state=move.transitions[-1].target,
            version=move.version + len(move.transitions),
            attempt=move.attempt,
            in_flight_posting=posting,
            due_us=record.due_us
            if move.delay_us == KEEP_DUE
            else None
            if move.delay_us is None
            else now_us + move.delay_us,
            worker=move.worker,
            body=record.body if move.body is None else move.body,
            error=move.error,
            since_us=record.since_us if move.transitions[-1].target == record.state else now_us,
            updated_us=now_us,
            timer_us=record.timer_us if timer is None else now_us - timer if timer < 0 else timer or None,
            inbox=record.inbox + move.inbox,
        )


def for_any_worker(move: Move, actor: str) -> Move:
    """A person's process may be gone in a moment: what a person's word moves is due at once, for any worker."""
    return msgspec.structs.replace(move, delay_us=0, worker="") if actor and move.delay_us is not None else move


def staying_move(record: Record, event: str, evidence: str, *, actor: str, **changes: Any) -> Move:
    """A move that leaves a record in its state, and as it is but for these changes."""
    kept: dict[str, Any] = {
        "attempt": record.attempt,
        "delay_us": KEEP_DUE,
        "worker": record.worker,
        "in_flight_posting": record.in_flight_posting,
        "error": record.error,
    }
    return Move(
        flow=record.flow,
        id=record.id,
        number=record.number,
        version=record.version,
        transitions=(NewTransition(record.state, event, record.state, evidence),),
        actor=actor,
        **(kept | changes),
    )


def automatic(flow: Flow[Any], item: FlowRecord[Any], state: str) -> tuple[NewTransition, ...]:
    """The arrows out of automatic states, taken in the transaction that reaches them (both rows are written)."""
    transitions: list[NewTransition] = []
    while flow.machine.state(state).kind is Kind.AUTOMATIC:
        arrow = flow.way_on(item.record, state, item.body)
        transitions.append(NewTransition(state, str(arrow.event), arrow.target))
        state = arrow.target
    return tuple(transitions)


def inline(flow: Flow[Any], item: FlowRecord[Any], inlined: InlineCall) -> tuple[NewTransition, ...]:
    """The arrows that an inline call takes: it happens with all of its transaction, or not at all."""
    state, answer = item.record.state, inlined.answer
    event = answer.event or answer.outcome.value
    told = NewTransition(state, event, flow.machine.arrow(state, event).target, answer.as_json())
    return (told, *automatic(flow, item, told.target))


def remembered(detail: str, record: str) -> str:
    """What is remembered of a request: which record it made, whatever else the caller wants to operation."""
    return msgspec.json.encode({**msgspec.json.decode(detail), "record": record}).decode()
