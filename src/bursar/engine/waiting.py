"""Records that only wait: nobody is called, so nobody would notice how long it takes. Their alarms see to that.

A waiting record is due when its next alarm would ring; a worker that claims it looks at its age, tells people if it is
time, and puts it back. After its last alarm it is due no more: each rings once per stay, whatever is acknowledged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from bursar.engine.flow import Flow
from bursar.model.records import Record
from bursar.model.retry import until_alarm_us

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

LOOK_S_MAX = 300.0  # until somebody looks again: due much later would count as a clock that jumped (L24)


async def look(engine: Engine, flow: Flow[Any], record: Record) -> None:
    """A worker has claimed a record that only waits: is it time to tell people?"""
    now_us = engine.ports.now_us()
    age_us, life_us = now_us - record.since_us, now_us - record.created_us
    for alarm in flow.alarms:
        if alarm.rings(record.state, 0, age_us, None, life_us):
            awaits = flow.machine.state(record.state).awaits
            message = f"{record.flow} {record.id} is {record.state}: it waits for {awaits} since {age_us // 10**6} s"
            await engine.alert(record, alarm.reason, alarm.severity, message)
    await engine.store.single().records.look_again(record, next_look_us(flow, record.state, age_us, life_us))


def next_look_us(flow: Flow[Any], state: str, age_us: int, life_us: int) -> int | None:
    """When to look at it again; None: not before somebody speaks."""
    next_us = until_alarm_us(flow.alarms, state, age_us, life_us)
    return None if next_us is None else min(next_us, int(LOOK_S_MAX * 1e6))
