"""Which arrows a record takes by itself, which with an inline call, and on which answers. Pure."""

from __future__ import annotations

from typing import Any

from bursar.engine.flow import Answer, Flow, FlowRecord, InlineCall
from bursar.model.machine import ImpossibleEvent, Kind, State
from bursar.model.outcome import Outcome
from bursar.writer import NewTransition


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


def validate_answer(flow: Flow[Any], state: State, answer: Answer) -> Answer:
    """An event that the machine does not know here, or that is not of the outcome it came with, is no answer."""
    event = answer.event or answer.outcome.value
    try:
        arrow = flow.machine.arrow(state.name, event)
    except ImpossibleEvent as error:
        return Answer(outcome=Outcome.UNKNOWN, message=str(error), evidence=answer.evidence)
    if arrow.answer is not answer.outcome:
        message = f"event {event} stands for {arrow.answer}, but the call said {answer.outcome}"
        return Answer(outcome=Outcome.UNKNOWN, message=message, evidence=answer.evidence)
    return answer
