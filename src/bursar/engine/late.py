"""Answers that come too late: the record has left the state they belong to, and what they say is kept (T34).

Harmless if it is what is believed already; a flow may still learn something from it. If not, it is a contradiction: a
critical alert, a transition, and with it the entries that put the books right: the disputed amount goes to
`suspense:{flow}`, where operators see it. What is believed of a call is what the record left its state with, and after
a contradiction what that said; so each is booked once, however often it is heard, and one that is taken back is booked
back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import UNDISPUTED, Answer, Dispute, Flow, FlowRecord
from bursar.engine.moves import staying_move
from bursar.model.errors import Conflict, RecordMoved, Refusal
from bursar.model.machine import Kind
from bursar.model.outcome import Outcome
from bursar.model.proof import was_declared_dead
from bursar.model.records import Record, Transition
from bursar.writer import Change

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

LATE = "LATE"
TRIES = 20


async def record_answer(engine: Engine, called: FlowRecord[Any], answer: Answer) -> None:
    """A known answer to the call that `called` was making, whose compare-and-set was lost."""
    flow = engine.require(called.record.flow)
    for _ in range(TRIES):
        record = await engine.store.read.records.by_number(called.record.number)
        assert record is not None  # records are never deleted
        left, said = called.record.state, answer.outcome.value
        message = f"{record.flow} {record.id} left {left}, and then {said} was heard of it"
        if _contradicts(flow, called.record, answer, await engine.store.read.records.history(record.number)):
            await engine.alert(record, "contradiction", "critical", message)
            dispute = flow.dispute(called, flow.item(record), answer)
        elif (dispute := flow.learned(called, flow.item(record), answer)) == UNDISPUTED:
            return
        try:
            await _write(engine, called, record, answer, dispute)
        except RecordMoved:
            continue  # it goes on meanwhile, or another caller has heard the same
        except Refusal as refusal:  # a mistake in the flow or in the ledger's set-up: what was heard is kept at least
            await engine.alert(record, "booking refused", "critical", f"{message}; its booking is refused: {refusal}")
            await _write(engine, called, record, answer, UNDISPUTED)
        return
    raise Conflict(f"record {called.id} is being driven", TRIES)


async def moved_meanwhile(engine: Engine, called: FlowRecord[Any], heard: Answer | None) -> Record | None:
    """The record, if another worker has moved it: then what is refused is refused for what that one has booked."""
    now = await engine.store.read.records.by_number(called.record.number)
    if now is None or now.version == called.record.version:
        return None
    if heard is not None and heard.outcome.is_known:
        await record_answer(engine, called, heard)
    return now


def _contradicts(flow: Flow[Any], called: Record, answer: Answer, history: Sequence[Transition]) -> bool:
    """Whether this is not what is believed of that call. Not if the record is there still: it will be asked again."""
    left, machine = called.state, flow.machine
    meant = machine.arrow(left, answer.event or answer.outcome.value)
    if meant.target == left:
        return False  # a refusal that leaves it there to be tried again is no last word: another call had more luck
    if machine.state(left).compensating and answer.outcome is Outcome.EXPLICIT_FAIL:
        return False  # nor is one of a compensation, which is always tried again (T31, L15)
    believed: tuple[object, str] | None = None
    if was_declared_dead(history, called.version):
        believed = (Outcome.EXPLICIT_FAIL, meant.target if meant.answer is Outcome.EXPLICIT_FAIL else "")
    for transition, after in pairwise((*history, None)):
        assert transition is not None
        if after is not None and after.target == left and machine.state(after.source).kind is Kind.AUTOMATIC:
            continue  # it went through, and came back in the same transaction: it is asked again
        # A transition that stays is a call without an answer, or a note: it says nothing.
        if transition.version > called.version and transition.source == left != transition.target and believed is None:
            arrow = machine.arrow(left, transition.event)
            believed = (arrow.answer, arrow.target)
        elif transition.event.startswith(LATE) and (late := _late(transition)).get("of") == left:
            arrow = machine.arrow(left, late.get("event") or transition.event.removeprefix(f"{LATE} "))
            believed = (arrow.answer, arrow.target)
    return believed is not None and believed != (meant.answer, meant.target)


def _late(transition: Transition) -> dict[str, str]:
    found: dict[str, Any] = msgspec.json.decode(transition.evidence)
    return found.get("late") or {}


async def _write(engine: Engine, called: FlowRecord[Any], record: Record, answer: Answer, dispute: Dispute) -> None:
    # Beside what was said, which may be cut for its length: what is believed from now on rests on it.
    told = msgspec.json.decode(answer.as_json()) | {"late": {"of": called.record.state, "event": answer.event}}
    evidence = msgspec.json.encode(told).decode()
    body = None if dispute.body is None else msgspec.json.encode(dispute.body).decode()
    move = staying_move(record, f"{LATE} {answer.outcome.value}", evidence, actor=engine.worker, body=body)
    change = Change(intents=dispute.intents, moves=(move,), high_water=engine.relied_on(answer))
    await engine.writer.apply(change)
