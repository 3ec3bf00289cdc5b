"""Records that wait: a signal in their inbox moves them, then their timer, and their alarms say that they wait for
long.

A waiting record is claimed for one of three reasons. It came into its state with signals in its inbox: the first one
that it waits for is consumed. Its timer has come: the engine sends the event that the state names, once, by a compare-
and-set like any; a signal that was faster wins. Or its next alarm would ring: a worker looks at its age, alerts
operators if it is time, and puts it back. After its last alarm it is due no more: each rings once per stay, whatever is
acknowledged.

A timer is a moment of the database's clock, in a column of its own, and nothing moves it: not a lease, and not a clock
that is set back (L24 is about retries). It fires when that clock has reached it, never before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine import signals
from bursar.engine.flow import Flow
from bursar.model.errors import Refusal
from bursar.model.proof import PROOF, never_issued
from bursar.model.records import Record, Signal
from bursar.model.retry import until_alarm_us
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

LOOK_S_MAX = 300.0  # until a worker looks again: due much later would count as a clock that jumped (L24)


async def step(engine: Engine, flow: Flow[Any], record: Record) -> Record | None:
    """A worker has claimed a record that waits: move it, if there is a signal or its time has come."""
    ways: list[tuple[str, dict[str, Any], Signal | None]] = []
    held = False
    if record.inbox:
        for signal in signals.awaited(flow, record, await engine.store.read.records.signals(record.number)):
            consumed = msgspec.structs.replace(signal, consumed=record.version + 1)
            ways.append((signal.event, msgspec.json.decode(signal.evidence), consumed))
    event = flow.machine.state(record.state).timeout_event
    if event is not None and record.timer_us is not None and record.timer_us <= await engine.store.now_us():
        held = ("flow", flow.name) in engine.pauses.now
        if held:
            engine.pauses.hold(record.number)  # until the end of the pause
        else:
            ways.append((event, {"timer": moment(record.timer_us)}, None))
    for way in ways:
        try:
            return await _move(engine, flow, record, *way)
        except Refusal as refusal:  # by the ledger, or for want of a proof: tried again when the lease is over
            message = f"{record.flow} {record.id} is {record.state}, and {way[0]} is refused: {refusal}"
            await engine.alert(record, "signal refused", "critical", message)
    if not ways and not held:
        await _look(engine, flow, record)
    return None


async def _move(
    engine: Engine, flow: Flow[Any], record: Record, event: str, evidence: dict[str, Any], consumed: Signal | None
) -> Record | None:
    """Leave the state; the worker that has claimed the record goes on with it."""
    inbox = 0 if consumed is None else -1
    booking, move = engine.moves.signalled(flow, record, event, evidence, "", signal=consumed, inbox=inbox)
    path = [record.state, *(transition.target for transition in move.transitions)]
    if PROOF not in evidence and flow.machine.needs_proof(path):  # which the engine compares with the history (S50)
        proved = evidence | never_issued()
        booking, move = engine.moves.signalled(flow, record, event, proved, "", signal=consumed, inbox=inbox)
    if consumed is not None:
        move = msgspec.structs.replace(move, actor=consumed.actor)
    return await engine.write(flow.item(record), move, booking, None, None)


async def _look(engine: Engine, flow: Flow[Any], record: Record) -> None:
    """Is it time to alert operators?"""
    now_us = engine.ports.now_us()
    age_us, life_us = now_us - record.since_us, now_us - record.created_us
    for alarm in flow.alarms:
        if alarm.rings(record.state, 0, age_us, None, life_us):
            awaits = flow.machine.state(record.state).awaits
            message = f"{record.flow} {record.id} is {record.state}: it waits for {awaits} since {age_us // 10**6} s"
            await engine.alert(record, alarm.reason, alarm.severity, message)
    await engine.store.single().records.look_again(record, next_look_us(flow, record.state, age_us, life_us))


def next_look_us(flow: Flow[Any], state: str, age_us: int, life_us: int) -> int | None:
    """When to look at it again; None: not before it gets a signal."""
    next_us = until_alarm_us(flow.alarms, state, age_us, life_us)
    return None if next_us is None else min(next_us, int(LOOK_S_MAX * 1e6))
