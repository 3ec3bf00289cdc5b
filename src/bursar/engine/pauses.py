"""What is switched off: whole flows, or rails. Obeyed by every process; what a call does decides which switch stops it.

A pause stops first sends, and neither confirmations nor what gives money back (W15); it is known here a moment late. A
halt stops every signature (W21): the database is asked right before each call that signs, so none begins after the halt
was written. A call that is under way by then is not taken back.

And what had to be left meanwhile, for this or because the database was away: due again as soon as it can go on, not
only when its lease is over.

Who sets a switch and who lifts it say why, and it is kept (T47). Two operators lift a halt; a pause may need two:
the first one proposes, and another one, for whom a look-alike name does not pass, agrees. A new cause for a switch that
is set already is added to it, and ends the proposal, which was not about that.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import Flow, FlowRecord
from bursar.model.actors import REASON_LENGTH_MAX, check_actor, check_reason, same_person
from bursar.model.errors import InvalidState
from bursar.model.machine import Effect, State
from bursar.model.records import Pause
from bursar.store import Store

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

PAUSES_S = 2.0  # how old what we know may be when a call is made
WAKE_MAX = 500  # records made due in one statement, which has a limit of time

LOOK_S = 60.0  # at most, between two looks for forgotten pauses

HALT = "halt"  # how the kind of a switch begins that stops signatures, of a flow, of a rail, or all
ALL_SIGNING = (f"{HALT} all", "signing")
PAUSED, HARDENED, PROPOSED, RESUMED = "paused", "two people needed", "resume proposed", "resumed"
HALTED = {PAUSED: "halted", HARDENED: "halted again", PROPOSED: "unhalt proposed", RESUMED: "unhalted"}


def described(kind: str, name: str) -> str:
    """A switch that is set, for operators. Pure."""
    return f"{kind.removeprefix(HALT).strip()} {name} is {'halted' if kind.startswith(HALT) else 'paused'}"


def _action(kind: str, action: str) -> str:
    return HALTED[action] if kind.startswith(HALT) else action


class Lift(StrEnum):
    """What became of a request to lift a pause."""

    LIFTED = "lifted"
    PROPOSED = "proposed"  # another person must say the same
    NOT_PAUSED = "not paused"


async def set_pause(store: Store, kind: str, name: str, *, actor: str, reason: str, two_people: bool = False) -> bool:
    """Switch a flow or a rail off; whether it was on. `actor` is a person, or what a program calls itself.

    With `two_people`, it takes two to lift it, also if it was set before by an operator who can lift it alone.
    """
    async with store.transaction() as unit:
        if await unit.pauses.add(kind, name, actor, reason, two_people=two_people):
            await unit.actions.note(_action(kind, PAUSED), kind, name, actor=actor, reason=reason)
            return True
        before = await unit.pauses.lock(kind, name)
        after = None if before is None or not two_people else hardened(before, reason)
        if after is not None:
            await unit.pauses.change(after)
            await unit.actions.note(_action(kind, HARDENED), kind, name, actor=actor, reason=reason)
        return False


def hardened(pause: Pause, reason: str) -> Pause | None:
    """A pause to which a cause is added that needs two operators; None if it has it already. Pure."""
    known = reason in pause.reason or len(pause.reason) > REASON_LENGTH_MAX  # bad enough, whatever else comes
    if pause.two_people and known:
        return None
    text = pause.reason if known else f"{pause.reason}; {reason}"
    return msgspec.structs.replace(pause, reason=text, two_people=True, proposed_by="", proposed_reason="")


async def lift_pause(store: Store, kind: str, name: str, *, actor: str, reason: str) -> Lift:
    """Switch it on again; or, where two operators are needed and this is the first, write the proposal down."""
    person, why = check_actor(actor), check_reason(reason)
    async with store.transaction() as unit:
        pause = await unit.pauses.lock(kind, name)
        if pause is None:
            return Lift.NOT_PAUSED
        if pause.two_people and not pause.proposed_by:
            await unit.pauses.change(msgspec.structs.replace(pause, proposed_by=person, proposed_reason=why))
            await unit.actions.note(_action(kind, PROPOSED), kind, name, actor=person, reason=why)
            return Lift.PROPOSED
        if pause.two_people and same_person(pause.proposed_by, person):
            of, state = kind.removeprefix(HALT).strip(), described(kind, name).rpartition(" ")[2]
            raise InvalidState(of, name, state, f"{pause.proposed_by} has proposed to lift it; another must agree")
        await unit.pauses.drop(kind, name)
        did = _action(kind, RESUMED)
        await unit.actions.note(did, kind, name, actor=person, reason=why, proposed_by=pause.proposed_by)
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
        reason = described(pause.kind, pause.name)
        message = f"{reason} since {pause.age_us // 10**6} s by {pause.actor}: {pause.reason};"
        message += " lift it, or acknowledge this; it is raised again when it has lasted twice as long"
        await engine.store.single().alerts.raise_since(0, reason, "warning", message, since_us)


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
        self.age_s_max = PAUSES_S
        self._read_s = -PAUSES_S
        self._held: set[int] = set()  # records that were not called for
        self._left: set[int] = set()  # records that can go on

    async def stop(self, flow: Flow[Any], state: State, item: FlowRecord[Any], *, called: bool) -> bool:
        """Whether a switch holds this call back. `called`: the record has called in this state before."""
        if self._store.ports.monotonic() - self._read_s >= self.age_s_max:
            await self.read()
        # Nothing is awaited between this and the call. What takes a nonce must not rely on an old answer either (W37).
        now = await self._switches() if state.signs or state.effect is Effect.PREPARE else self.now
        if not now:
            return False
        named = {("flow", flow.name), ("rail", flow.rail(item, state.action or ""))}
        halts = {(f"{HALT} {kind}", name) for kind, name in named} | {ALL_SIGNING}
        return state.is_held(paused=not named.isdisjoint(now), halted=not halts.isdisjoint(now), called=called)

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
        self.now = await self._switches()
        if before - self.now:
            self._left |= self._held
            self._held.clear()
        while self._left:
            left = sorted(self._left)[:WAKE_MAX]
            await self._store.single().records.wake_held(left, self._worker)
            self._left.difference_update(left)

    async def _switches(self) -> frozenset[tuple[str, str]]:
        return frozenset((pause.kind, pause.name) for pause in await self._store.read.pauses.list())
