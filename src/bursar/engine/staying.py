"""A record that stays in its call state: no definite answer, or a poll that says nothing new. Call again later."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import NOTHING, Answer, Flow, FlowRecord
from bursar.model.machine import Arrow
from bursar.model.records import Record
from bursar.model.retry import until_alarm_us
from bursar.writer import Move, NewTransition

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
    move = Move(
        flow=record.flow,
        id=record.id,
        number=record.number,
        version=record.version,
        transitions=(NewTransition(record.state, str(arrow.event), record.state, answer.as_json()),),
        actor=actor or engine.worker,
        attempt=attempt,
        # Not past an alarm: a call is made when it is due to ring, or it would ring a whole back-off late.
        delay_us=min(delay_us, until_alarm_us(flow.alarms, record.state, age_us, life_us) or delay_us),
        in_flight_posting=record.in_flight_posting,
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
    await engine.store.single().records.look_again(record, min(delay_us, until_us))
    return None
