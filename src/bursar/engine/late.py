"""Answers that come too late: the record has left the state they belong to, and what they say is kept (T34).

Harmless if whoever was faster heard the same. If not, it is a contradiction: a passage, and a critical alert.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from bursar.engine.flow import Answer, Item
from bursar.model.errors import RecordMoved
from bursar.model.records import Record
from bursar.writer import Change, Move, Passage

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

log = logging.getLogger("bursar.engine")


async def hear(engine: Engine, item: Item[Any], record: Record, answer: Answer) -> None:
    """A known answer to the call that `item` was making, whose compare-and-set was lost; `record`: as it is by now."""
    machine = engine.require(record.flow).machine
    left = item.record.state
    for passage in await engine.store.read.records.history(record.number):
        # A passage that stays is a call without an answer, or a note: it says nothing.
        if passage.version > item.record.version and passage.source == left != passage.target:
            heard = machine.arrow(left, passage.event)
            meant = machine.arrow(left, answer.event or answer.outcome.value)
            if (heard.answer, heard.target) == (meant.answer, meant.target):
                return
            break
    else:
        return  # it has not left that state: whoever drives it will hear the same
    late = Move(
        flow=record.flow,
        id=record.id,
        number=record.number,
        version=record.version,
        passages=(Passage(record.state, f"LATE {answer.outcome.value}", record.state, answer.as_json()),),
        actor=engine.worker,
        attempt=record.attempt,
        delay_us=-1,
        worker=record.worker,
        transit=record.transit,
        error=record.error,
    )
    message = f"{record.flow} {record.id} left {left}, and then {answer.outcome.value} was heard of it"
    await engine.alert(record, "contradiction", "critical", message)
    try:
        await engine.writer.apply(Change(moves=(late,)))
    except RecordMoved:
        log.warning("%s %s moved again; the alert carries what was heard", record.flow, record.id)
