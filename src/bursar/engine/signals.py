"""Signals: events that records are sent, by operators, programs and other records. Each record has a durable inbox.

A signal is a row under the sender's id of it: sent again, it is the same one. A record that waits for the event is
moved by it in the transaction that writes the signal. Where the flow says so (`Flow.inbox_events`), a signal may come
before the record waits for it: then it stays in the inbox, and the record consumes it when it comes to a state that
waits for it, in the order of arrival. Meanwhile it may change the body (`Flow.on_signal`). An event that no state waits
for changes the body and is consumed by that. A record that is calling is due at once, so that the action sees the new
body; it leaves its call state by the action's answer alone.

Every signal comes with a compare-and-set of the record's version, and the row that is compared has the number of
signals in the inbox. So a transaction that moves the record into a waiting state, by its own compare-and-set, knows of
every signal that was there before; and a signal that loses against such a move is decided again, in the waiting state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import EVIDENCE_LENGTH_MAX, NOTHING, Booking, Flow
from bursar.model.entries import check_key
from bursar.model.errors import Conflict, IdempotencyKeyReused, InvalidEntry, InvalidState, RecordMoved
from bursar.model.machine import Kind
from bursar.model.proof import PROOF
from bursar.model.records import Record, Signal
from bursar.writer import Move

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

INBOX_MAX = 100  # signals of one record that wait to be consumed
TRIES = 20


def takes(flow: Flow[Any], record: Record, event: str) -> bool:
    """Whether the record waits for this event now."""
    leaving = flow.machine.arrows_from(record.state)
    return flow.machine.state(record.state).kind is Kind.WAIT and any(arrow.event == event for arrow in leaving)


def check_possible(flow: Flow[Any], record: Record, event: str) -> None:
    """`InvalidState` unless the record waits for this event, or may be sent it before it does."""
    machine = flow.machine
    state = machine.state(record.state)
    if state.kind is Kind.TERMINAL:
        why = f"it has ended, and waits for {event} no more"
    elif event in machine.timeout_events:
        why = f"the engine sends {event} when the time has come"
    elif takes(flow, record, event):
        return
    elif event in flow.inbox_events and (is_consumed_at_once(flow, event) or machine.can_await(state.name, event)):
        if is_consumed_at_once(flow, event) or record.inbox < INBOX_MAX:
            return
        why = f"{record.inbox} signals wait in its inbox already"
    else:
        why = f"it does not wait for {event}, which cannot happen there"
    raise InvalidState(record.flow, record.id, record.state, why)


def is_consumed_at_once(flow: Flow[Any], event: str) -> bool:
    """Whether no state ever waits for this event: it changes the body, and that is all that it is for."""
    return event not in flow.machine.events


def find(sent: Sequence[Signal], sender: str, event: str, evidence: dict[str, Any]) -> Signal | None:
    """The signal that this sender's id stands for already; a refusal if that is another one."""
    for signal in sent:
        if signal.sender == sender:
            if signal.event != event or _request(signal.evidence) != _request(_text(evidence)):
                raise IdempotencyKeyReused(f"signals of record {signal.record}", sender, signal.event)
            return signal
    return None


def arrive(
    engine: Engine,
    record: Record,
    sent: Sequence[Signal],
    event: str,
    evidence: dict[str, Any],
    *,
    sender: str,
    actor: str,
) -> tuple[Booking, Move]:
    """What a signal does to a record that was `sent` others before: it moves it, changes it, or stays in its inbox."""
    flow = engine.require(record.flow)
    check_possible(flow, record, event)
    at = record.version + 1
    signal = Signal(record.number, sender, event, actor or engine.worker, _text(evidence), at)
    if takes(flow, record, event) and not awaited(flow, record, sent):
        consumed = msgspec.structs.replace(signal, consumed=at)
        return engine.moves.signalled(flow, record, event, evidence, actor, signal=consumed)
    if is_consumed_at_once(flow, event):
        signal = msgspec.structs.replace(signal, consumed=at)
    return NOTHING, engine.moves.kept(flow, record, signal, evidence)


async def send(
    engine: Engine, record: Record, event: str, evidence: dict[str, Any], *, sender: str, actor: str
) -> Record:
    """Send a signal to a record as the caller has seen it. `RecordMoved` if it has left that state meanwhile."""
    sender, seen, moved = check_key(sender) if sender else "", record.state, RecordMoved("", "", 0)
    name = sender or engine.ports.token()
    for attempt in range(TRIES):
        sent = await engine.store.read.records.signals(record.number) if sender or record.inbox or attempt else ()
        if find(sent, name, event, evidence) is not None:
            return await engine.get(record.flow, record.id) or record
        if record.state != seen:
            raise moved
        booking, move = arrive(engine, record, sent, event, evidence, sender=name, actor=actor)
        try:
            done = await engine.commit(record, move, booking)
        except RecordMoved as error:
            moved, record = error, await engine.get(record.flow, record.id) or record
            continue
        assert isinstance(done, Record)  # it has no operation that could have been answered before
        return done
    raise Conflict(f"record {record.id} is being driven", TRIES)


def awaited(flow: Flow[Any], record: Record, sent: Sequence[Signal]) -> list[Signal]:
    """The signals in the inbox that the record waits for, in the order of arrival."""
    return [s for s in sent if s.consumed is None and takes(flow, record, s.event)]


def _request(evidence: str) -> dict[str, Any]:
    """What the sender has asked for: without the proof, which is how the engine came to allow it (S44)."""
    return {key: value for key, value in msgspec.json.decode(evidence).items() if key != PROOF}


def _text(evidence: dict[str, Any]) -> str:
    text = msgspec.json.encode(evidence, enc_hook=repr, order="sorted").decode()
    if len(text) > EVIDENCE_LENGTH_MAX:
        raise InvalidEntry(f"the evidence of a signal has {len(text)} characters; at most {EVIDENCE_LENGTH_MAX}")
    return text
