"""Building a record's move: the compare-and-set with its transitions, when it is due next, and its rows. No IO."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from bursar.engine import waiting
from bursar.engine.arrows import automatic
from bursar.engine.flow import Answer, Booking, Flow, FlowRecord
from bursar.model.entries import check_key
from bursar.model.flow_rows import RowOperation
from bursar.model.machine import Kind
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.ports import Ports
from bursar.writer import Move, NewTransition

CREATED = "CREATED"


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
        )

    def begin(
        self, flow: Flow[Any], record: Record, body: msgspec.Struct, actor: str
    ) -> tuple[FlowRecord[Any], Booking, Move]:
        """A new record in the state that it comes to by itself, what accompanies its start, and its move there."""
        first = NewTransition("", CREATED, record.state)
        transitions = (first, *automatic(flow, FlowRecord(record, body), record.state))
        there = FlowRecord(msgspec.structs.replace(record, state=transitions[-1].target), body)
        booking = flow.book_start(there)
        return there, booking, self.move(record, transitions, actor, booking, body=record.body)

    def signalled(
        self, flow: Flow[Any], record: Record, event: str, evidence: dict[str, Any], actor: str
    ) -> tuple[Booking, Move]:
        """What accompanies an event that a waiting record gets, and its move."""
        item = flow.item(record)
        target = flow.machine.next(record.state, event).name
        answer = Answer(outcome=Outcome.SUCCESS, event=event, evidence=evidence)
        answer = msgspec.structs.replace(answer, body=flow.next_body(item, event, answer))
        body = item.body if answer.body is None else answer.body
        told = NewTransition(record.state, event, target, answer.as_json())
        booking = flow.book(item, event, answer)
        transitions = (told, *automatic(flow, FlowRecord(record, body), target))
        return booking, self.apply(item, transitions, booking, answer, actor=actor)

    def apply(
        self,
        item: FlowRecord[Any],
        transitions: tuple[NewTransition, ...],
        booking: Booking,
        answer: Answer | None,
        *,
        actor: str = "",
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
        )
        if actor and move.delay_us is not None:  # a person's process may be gone in a moment: a worker goes on at once
            return msgspec.structs.replace(move, delay_us=0, worker="")
        return move

    def move(
        self,
        record: Record,
        transitions: tuple[NewTransition, ...],
        actor: str,
        booking: Booking,
        *,
        body: str | None,
        answered: tuple[RowOperation, ...] = (),
        **more: Any,
    ) -> Move:
        """A move along some arrows, with the rows of its booking and of the answer."""
        flow = self.flows[record.flow]
        state = flow.machine.state(transitions[-1].target)
        ends = state.kind in (Kind.TERMINAL, Kind.WAIT)
        delay_us: int | None = None if ends else self.lease_us
        if state.kind is Kind.WAIT:
            life_us = self.ports.now_us() - record.created_us
            delay_us = waiting.next_look_us(flow, state.name, 0, life_us)
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
            **more,
        )

    def after(self, record: Record, move: Move, number: int, posting: int) -> Record:
        """The record as a move leaves it."""
        now_us = self.ports.now_us()
        return msgspec.structs.replace(
            record,
            number=number,
            state=move.transitions[-1].target,
            version=move.version + len(move.transitions),
            attempt=move.attempt,
            in_flight_posting=posting,
            due_us=None if move.delay_us is None else now_us + move.delay_us,
            worker=move.worker,
            body=record.body if move.body is None else move.body,
            error=move.error,
            since_us=record.since_us if move.transitions[-1].target == record.state else now_us,
            updated_us=now_us,
        )
