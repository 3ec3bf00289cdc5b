"""Which arrows a record takes by itself, and which with a call that is part of the unit. Pure."""

from __future__ import annotations

from typing import Any

from bursar.engine.flow import Flow, Item, Ride
from bursar.model.machine import Kind
from bursar.writer import Passage


def onward(flow: Flow[Any], item: Item[Any], state: str) -> tuple[Passage, ...]:
    """The arrows out of rest states, which are taken in the unit that reaches them (both rows are written)."""
    passages: list[Passage] = []
    while flow.machine.state(state).kind is Kind.REST:
        arrow = flow.way_on(item.record, state, item.body)
        passages.append(Passage(state, str(arrow.event), arrow.target))
        state = arrow.target
    return tuple(passages)


def ridden(flow: Flow[Any], item: Item[Any], ride: Ride) -> tuple[Passage, ...]:
    """The arrows that a call takes which is part of the unit: it happens with all of it, or not at all."""
    state, answer = item.record.state, ride.answer
    event = answer.event or answer.outcome.value
    told = Passage(state, event, flow.machine.arrow(state, event).target, answer.as_json())
    return (told, *onward(flow, item, told.target))
