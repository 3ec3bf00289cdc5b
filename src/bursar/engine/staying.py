"""Records that stay where they are: in a call state without a definite answer, or waiting.

A record that calls is called for again later: there was no answer, or a poll said nothing new.

A waiting record is claimed for one of three reasons. It came into its state with signals in its inbox: the first one
that it waits for is consumed. Its timer has come: the engine sends the event that the state names, once, by a compare-
and-set like any; a signal that was faster wins. Or its next alarm would ring: a worker looks at its age, alerts
operators if it is time, and puts it back. After its last alarm it is due no more: each rings once per stay, whatever is
acknowledged.

A timer is a moment of the database's clock, in a column of its own, and nothing moves it: not a lease, and not a clock
that is set back (L24 is about retries). It fires when that clock has reached it, never before.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine import signals
from bursar.engine.flow import NOTHING, Answer, Flow, FlowRecord
from bursar.engine.moves import staying_move
from bursar.model.errors import BursarError, Refusal
from bursar.model.machine import Arrow
from bursar.model.outcome import Outcome
from bursar.model.proof import PROOF, never_issued
from bursar.model.records import Record, Signal
from bursar.model.retry import until_alarm_us
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

log = logging.getLogger("bursar.engine")


async def stay(
    engine: Engine, flow: Flow[Any], item: FlowRecord[Any], arrow: Arrow, answer: Answer, *, actor: str = ""
) -> Record | None:
    """No answer, or one that leaves it where it is: call again later."""
    record = item.record
    attempt = record.attempt + 1
    now_us = engine.ports.now_us()
    age_us, life_us = now_us - record.since_us, now_us - record.created_us
    delay_us = flow.delay_us(flow.machine.state(record.state), answer, attempt, engine.ports.random())
    move = staying_move(
        record,
        str(arrow.event),
        answer.as_json(),
        actor=actor or engine.worker,
        attempt=attempt,
        # Not past an alarm: a call is made when it is due to ring, or it would ring a whole back-off late.
        delay_us=min(delay_us, until_alarm_us(flow.alarms, record.state, age_us, life_us) or delay_us),
        worker="",
        error=answer.error,
        body=None if answer.body is None else msgspec.json.encode(answer.body).decode(),
        rows=flow.own_rows(answer.rows),
    )
    # T38: the first one is worth a line that stands out, unless the action itself has decided to wait.
    if attempt == 1 and not answer.outcome.is_known and not answer.unchanged and not answer.decision:
        log.critical("%s %s is %s: %s", record.flow, record.id, record.state, answer.error)
    after = await engine.write(item, move, NOTHING, answer, answer)
    if after is None:
        return None
    for alarm in flow.alarms:
        if alarm.rings(record.state, attempt, age_us, answer.outcome, life_us):
            message = f"{record.flow} {record.id} is {record.state} after {attempt} calls, {life_us // 10**6} s"
            message += f" after it was created: {answer.error}"
            await engine.alert(record, alarm.reason, alarm.severity, message)
    return after


async def poll(
    engine: Engine, flow: Flow[Any], item: FlowRecord[Any], arrow: Arrow, answer: Answer, *, actor: str = ""
) -> Record | None:
    """A poll that says nothing new: it is due again after a while, and that is all. Alarms of this state ring."""
    record = item.record
    state = flow.machine.state(record.state)
    paused = [state.is_held(paused=True, halted=False, called=called) for called in (False, True)]
    # The first one in a state that sends is news: that it was called. A pause must not stop the second (W15).
    first = not record.attempt and paused == [True, False]
    if first or answer.rows or answer.body is not None or answer.high_water:
        return await stay(engine, flow, item, arrow, answer, actor=actor)
    now_us = engine.ports.now_us()
    age_us, life_us = now_us - record.since_us, now_us - record.created_us
    for alarm in flow.alarms:
        if alarm.state and alarm.rings(record.state, 0, age_us, answer.outcome, life_us):
            message = f"{record.flow} {record.id} is {record.state} since {age_us // 10**6} s: {answer.error}"
            await engine.alert(record, alarm.reason, alarm.severity, message)
    own = tuple(alarm for alarm in flow.alarms if alarm.state)
    delay_us = flow.delay_us(state, answer, 1, engine.ports.random())
    until_us = until_alarm_us(own, record.state, age_us, life_us) or delay_us
    await engine.store.single().records.look_again([(record.number, record.version, min(delay_us, until_us))])
    return None


async def step_waiting(engine: Engine, flow: Flow[Any], record: Record) -> Record | None:
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
    after_us = flow.next_look_us(record.state, age_us, life_us)
    await engine.store.single().records.look_again([(record.number, record.version, after_us)])


def surprised(flow: Flow[Any], item: FlowRecord[Any], error: BaseException) -> Answer:
    """A call has ended in an error: what happened on the other side is unknown."""
    unexpected = not isinstance(error, BursarError | OSError)
    log.log(logging.WARNING, "a call for %s %s: %s", flow.name, item.id, error, exc_info=unexpected)
    return Answer(outcome=Outcome.UNKNOWN, message=f"{type(error).__name__}: {error}")
