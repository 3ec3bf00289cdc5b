"""What is switched off: whole flows, or rails. Known here a moment late, and obeyed by every process.

And what had to be left meanwhile, for this or because the database was away: due again as soon as it can go on, not
only when its lease is over.

Who sets a pause and who lifts it say why, and it is kept (T47). A pause may need two people to be lifted: the first one
proposes, and another one, for whom a look-alike name does not pass, agrees. A new cause for a pause that is set already
is added to it, and ends the proposal: nobody has agreed to that.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import Flow, FlowRecord
from bursar.model.actors import REASON_LENGTH_MAX, check_actor, check_reason, same_person
from bursar.model.errors import InvalidState
from bursar.model.machine import State
from bursar.model.records import Pause
from bursar.store import Store

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

PAUSES_S = 2.0  # how old what we know may be when somebody is called

LOOK_S = 60.0  # at most, between two looks for forgotten pauses

PAUSED, HARDENED, PROPOSED, RESUMED = "paused", "two people needed", "resume proposed", "resumed"


class Lift(StrEnum):
    """What became of somebody's wish to lift a pause."""

    LIFTED = "lifted"
    PROPOSED = "proposed"  # another person must say the same
    NOT_PAUSED = "not paused"


async def set_pause(store: Store, kind: str, name: str, *, actor: str, reason: str, two_people: bool = False) -> bool:
    """Switch a flow or a rail off; whether it was on. `actor` is a person, or what a program calls itself.

    With `two_people`, it takes two to lift it, also if it was set before by somebody who can lift it alone.
    """
    async with store.transaction() as unit:
        if await unit.pauses.add(kind, name, actor, reason, two_people=two_people):
            await unit.actions.note(PAUSED, kind, name, actor=actor, reason=reason)
            return True
        before = await unit.pauses.lock(kind, name)
        after = None if before is None or not two_people else hardened(before, reason)
        if after is not None:
            await unit.pauses.change(after)
            await unit.actions.note(HARDENED, kind, name, actor=actor, reason=reason)
        return False


def hardened(pause: Pause, reason: str) -> Pause | None:
    """A pause to which a cause is added that needs two people; None if it has it already. Pure."""
    known = reason in pause.reason or len(pause.reason) > REASON_LENGTH_MAX  # bad enough, whatever else comes
    if pause.two_people and known:
        return None
    text = pause.reason if known else f"{pause.reason}; {reason}"
    return msgspec.structs.replace(pause, reason=text, two_people=True, proposed_by="", proposed_reason="")


async def lift_pause(store: Store, kind: str, name: str, *, actor: str, reason: str) -> Lift:
    """Switch it on again; or, where two people are needed and this is the first one, write the proposal down."""
    person, why = check_actor(actor), check_reason(reason)
    async with store.transaction() as unit:
        pause = await unit.pauses.lock(kind, name)
        if pause is None:
            return Lift.NOT_PAUSED
        if pause.two_people and not pause.proposed_by:
            await unit.pauses.change(msgspec.structs.replace(pause, proposed_by=person, proposed_reason=why))
            await unit.actions.note(PROPOSED, kind, name, actor=person, reason=why)
            return Lift.PROPOSED
        if pause.two_people and same_person(pause.proposed_by, person):
            raise InvalidState(
                kind, name, "paused", f"{pause.proposed_by} has proposed to resume it; another must agree"
            )
        await unit.pauses.drop(kind, name)
        await unit.actions.note(RESUMED, kind, name, actor=person, reason=why, proposed_by=pause.proposed_by)
        return Lift.LIFTED


async def watch_pauses(engine: Engine, after_s: float) -> None:
    """Until cancelled: raise an alert for pauses that were forgotten. 0 seconds: never."""
    while after_s:
        await alert_forgotten(engine, after_s)
        await engine.ports.sleep(min(after_s / 4, LOOK_S))


async def alert_forgotten(engine: Engine, after_s: float) -> None:
    """Raise an alert for each pause that has lasted for so long, and again when it has lasted twice as long."""
    for pause in await engine.store.read.pauses.list():
        since_us = overdue_us(pause.age_us, int(after_s * 1e6))
        if since_us is None:
            continue
        message = f"{pause.kind} {pause.name} has been paused for {pause.age_us // 10**6} s by {pause.actor}:"
        message += f" {pause.reason}; resume it, or acknowledge this and be told again when it has lasted twice as long"
        alerts = engine.store.single().alerts
        await alerts.raise_since(0, f"{pause.kind} {pause.name} is paused", "warning", message, since_us)


def overdue_us(age_us: int, after_us: int) -> int | None:
    """For how long it has been older than the last of after, 2 after, 4 after, …; None if it is younger. Pure."""
    if age_us < after_us:
        return None
    step_us = after_us
    while 2 * step_us <= age_us:
        step_us *= 2
    return age_us - step_us


class Pauses:
    """As one process knows them, and what they hold up there."""

    def __init__(self, store: Store, worker: str) -> None:
        self.now: frozenset[tuple[str, str]] = frozenset()  # (kind, name)
        self._store = store
        self._worker = worker
        self._read_s = -PAUSES_S
        self._held: set[int] = set()  # records that were not called for
        self._left: set[int] = set()  # records that can go on

    async def stop(self, flow: Flow[Any], state: State, item: FlowRecord[Any]) -> bool:
        """Whether this call is switched off. A rail's pause spares what gives money back (W15)."""
        if self._store.ports.monotonic() - self._read_s >= PAUSES_S:
            await self.read()
        if not self.now or ("flow", flow.name) in self.now:
            return bool(self.now)
        return not state.compensating and ("rail", flow.rail(item, state.action or "")) in self.now

    def hold(self, number: int) -> None:
        """A record that is not called for now: it goes on with the end of a pause, not with that of its lease."""
        self._held.add(number)

    def leave(self, number: int) -> None:
        """A record that could not be written down: it goes on as soon as the database answers."""
        self._left.add(number)

    async def read(self) -> None:
        """Learn what is switched off, and make due what can go on; if that can't be said now, next time."""
        self._read_s = self._store.ports.monotonic()
        before = self.now
        self.now = frozenset((pause.kind, pause.name) for pause in await self._store.read.pauses.list())
        if before - self.now:
            self._left |= self._held
            self._held.clear()
        if self._left:
            left = sorted(self._left)
            await self._store.single().records.wake_held(left, self._worker)
            self._left.difference_update(left)
