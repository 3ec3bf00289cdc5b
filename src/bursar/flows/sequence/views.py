"""A sequence as its caller sees it. Pure: from the record alone."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Any

import msgspec

from bursar.flows.sequence.machine import COMPENSATING, COMPENSATION_FAILED, COMPLETED, MACHINE, REPORTING
from bursar.flows.sequence.steps import Sequence
from bursar.model.machine import Kind
from bursar.model.records import Record
from bursar.model.views import moment


class Result(StrEnum):
    """How far it has come, in the words of specification 004."""

    COMPLETED = "Completed"  # every step is done
    FAILED = "Failed"  # a step was refused, and what was done before it is undone, or given up by two operators
    PAUSED = "Paused"  # neither, yet: it goes on by itself
    COMPENSATION_FAILED = "CompensationFailed"  # it waits for a person


class StepState(StrEnum):
    """What has become of one step."""

    AHEAD = "ahead"
    RUNNING = "running"
    DONE = "done"
    REFUSED = "refused"
    UNDOING = "undoing"
    UNDONE = "undone"
    SKIPPED = "skipped"  # done, and left so by two operators
    DROPPED = "dropped"  # never run: a step before it was refused


class StepView(msgspec.Struct, frozen=True, kw_only=True):
    """One step."""

    step: int  # from 0
    what: str
    state: StepState
    result: dict[str, Any] = {}  # the evidence it answered with
    envelope: int | None = None  # of an entry that was booked


class SequenceView(msgspec.Struct, frozen=True, kw_only=True):
    """A sequence."""

    id: str
    key: str
    owner: str
    state: str
    result: Result
    steps: tuple[StepView, ...]
    error: str  # why it turned round, why its compensation is stuck, or what the last call said
    created: datetime
    updated: datetime
    replayed: bool = False

    @property
    def ended(self) -> bool:
        """Whether it never moves again."""
        return MACHINE.state(self.state).kind is Kind.TERMINAL


def view(record: Record, body: Sequence, envelopes: Mapping[int, int], *, replayed: bool = False) -> SequenceView:
    """A record as its caller sees it; `envelopes` by step."""
    reason = body.stuck or body.refused
    steps = tuple(
        StepView(
            step=place,
            what=str(step),
            state=_state(record.state, body, place),
            result=body.results[place] if place < len(body.results) else {},
            envelope=envelopes.get(place),
        )
        for place, step in enumerate(body.steps)
    )
    return SequenceView(
        id=record.id,
        key=body.key,
        owner=record.owner,
        state=record.state,
        result=_result(record.state),
        steps=steps,
        error=record.error or (reason.why if reason else ""),
        created=moment(record.created_us),
        updated=moment(record.updated_us),
        replayed=replayed,
    )


def _result(state: str) -> Result:
    if state == COMPLETED:
        return Result.COMPLETED
    if state in (REPORTING, COMPENSATION_FAILED):
        return Result.COMPENSATION_FAILED
    return Result.FAILED if MACHINE.state(state).kind is Kind.TERMINAL else Result.PAUSED


def _state(state: str, body: Sequence, place: int) -> StepState:
    if place in body.skipped:
        return StepState.SKIPPED
    if place < body.index:
        undoing = state in (COMPENSATING, REPORTING, COMPENSATION_FAILED) and place == body.index - 1
        return StepState.UNDOING if undoing else StepState.DONE
    if body.refused is None:
        return StepState.RUNNING if place == body.index else StepState.AHEAD
    if place == body.refused.step:
        return StepState.REFUSED
    return StepState.UNDONE if place < body.refused.step else StepState.DROPPED
