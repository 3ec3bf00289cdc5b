"""Calls whose end two operators decided: their rail is asked until it says what really happened (T34).

Operators may be wrong, and a rail may still do what they said it had not. So each forced call is a row, written
before the decision, and its rail is queried (which makes nothing happen) with back-off until the answer is definite.
An answer that contradicts the decision goes the way of every late answer: a critical alert, and the books are put right
against suspense (late). A rail that has nothing definite to say for long raises an alert too.

What operators declared dead (model/proof) is watched the same way, by the query of its last call. If it still arrives,
the flow is halted, or paused if it signs nothing (S44).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine import late
from bursar.engine.flow import ERROR_LENGTH_MAX, Flow, storable
from bursar.engine.pauses import HALT, set_pause
from bursar.model.errors import BursarError
from bursar.model.outcome import Outcome
from bursar.model.proof import was_declared_dead
from bursar.model.records import ForcedCall, Record, Transition
from bursar.model.retry import Retry

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

FIRST_S = 2.0  # after the decision
BACK_OFF = Retry(first_s=5.0, cap_s=300.0)
SCAN_S = 5.0
LEASE_S = 60.0
PAGE = 100
QUESTIONS_MAX = 5  # without a definite answer, and an alert is raised
UNCONFIRMED = "forced and unconfirmed"
ACTOR = "engine"  # who switches a flow off when what was declared dead arrives

log = logging.getLogger("bursar.engine")


async def watch_later(engine: Engine, flow: Flow[Any], record: Record) -> None:
    """Have the rail asked about a call whose end is about to be forced; before it is, or a crash would forget it."""
    if flow.machine.state(record.state).action in flow.queries:
        calls = engine.store.single().forced_calls
        await calls.add(record.number, record.version, record.state, int(FIRST_S * 1e6))


async def keep_asking(engine: Engine) -> None:
    """Until cancelled: ask the rails about forced calls that are due."""
    while True:
        await ask_due(engine)
        await engine.ports.sleep(SCAN_S)


async def ask_due(engine: Engine) -> int:
    """Ask about what is due; returns how many answers were definite."""
    cap_us = int((BACK_OFF.cap_s + LEASE_S) * 1e6)
    definite = 0
    for call in await engine.store.single().forced_calls.claim(PAGE, int(LEASE_S * 1e6), cap_us):
        try:
            definite += await _ask(engine, call)
        except Exception as error:  # it must not stop the others, and is due again when its lease is over
            surprise = not isinstance(error, BursarError)
            log.error("the rail of forced record %s could not be asked: %s", call.record, error, exc_info=surprise)
    return definite


async def _ask(engine: Engine, call: ForcedCall) -> bool:
    calls = engine.store.single().forced_calls
    record = await engine.store.read.records.by_number(call.record)
    flow = None if record is None else engine.flows.get(record.flow)
    if record is None or flow is None:
        return False  # another program's flow: a worker that knows it claims it when the lease is over
    history = await engine.store.read.records.history(call.record)
    if not has_left(history, call.version):
        await calls.ask_again(call, "", int(BACK_OFF.cap_s * 1e6))  # the operators have not decided, or not yet
        return False
    item = flow.item(msgspec.structs.replace(record, state=call.state, version=call.version))
    answer = await engine.call(flow, flow.queries[flow.machine.state(call.state).action or ""], item)
    if answer.outcome.is_known:
        if answer.outcome is Outcome.SUCCESS and was_declared_dead(history, call.version):
            await _stop(engine, flow, record)  # first: a second crash must not leave it running
        await late.record_answer(engine, item, answer)
        await calls.ask_again(call, answer.outcome.value, None)
        return True
    said = storable(answer.error)[:ERROR_LENGTH_MAX]
    if call.attempt >= QUESTIONS_MAX:
        message = f"{record.flow} {record.id} left {call.state} because operators forced it; its rail, asked"
        message += f" {call.attempt} times, can't confirm it: {said}"
        await engine.alert(record, UNCONFIRMED, "critical", message)
    await calls.ask_again(call, said, BACK_OFF.delay_us(call.attempt, engine.ports.random()))
    return False


async def _stop(engine: Engine, flow: Flow[Any], record: Record) -> None:
    """What was declared dead has arrived, and was given back: whatever else was declared dead may do the same (S44)."""
    kind = f"{HALT} flow" if any(state.signs for state in flow.machine.states) else "flow"
    reason = f"{record.id} was declared dead, and has arrived"
    await set_pause(engine.store, kind, flow.name, actor=ACTOR, reason=reason, two_people=True)


def has_left(history: Sequence[Transition], version: int) -> bool:
    """Whether a record has left the state in which it was seen with this version. Pure."""
    return any(row.version > version and row.source != row.target for row in history)
