"""What operators do to records: retry now, pause, send the signal that is waited for, force. All with a reason.

Forcing says how a call ended whose answer is unknown. It needs two operators, who say the same; and money is only ever
forced *back* by making sure at the rail that it never went (T34): the rail's own answer then decides, not theirs.
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.engine import signals
from bursar.engine.engine import Engine
from bursar.engine.flow import Answer
from bursar.engine.forced import has_left, watch_later
from bursar.engine.moves import staying_move
from bursar.engine.pauses import ALL_SIGNING, HALT, Lift, lift_pause, set_pause
from bursar.model import proof
from bursar.model.actors import check_actor, check_reason, same_person
from bursar.model.errors import Conflict, InvalidName, InvalidState
from bursar.model.machine import ImpossibleEvent, Kind
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.writer import KEEP_DUE, Change

RETRY_ASKED = "RETRY ASKED"
FORCE_ASKED = "FORCE ASKED"
TELL_ASKED = "TELL ASKED"
FORCED_BY = "forced_by"  # in the evidence of a call whose end two operators decided
DECLARED_DEAD = "declared_dead"  # in the evidence of that
TRIES = 20


class Operators:
    """The operations of operators."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def retry_now(self, flow: str, id: str, *, actor: str, reason: str) -> Record:
        """Due at once, whatever its back-off says."""
        actor = check_actor(actor)
        record = await self._open(flow, id, reason)
        if self._engine.require(flow).machine.state(record.state).kind is Kind.WAIT:
            raise InvalidState(flow, id, record.state, "it calls no system, it waits for a signal; send it one")
        return await self._note(record, RETRY_ASKED, actor, {"reason": reason}, delay_us=0)

    async def pause(self, kind: str, name: str, *, actor: str, reason: str) -> bool:
        """Send nothing new for a flow, or at a rail. Whether it was on.

        What was sent before is asked about until its outcome is known, and what gives money back goes on (W15).
        """
        await self._require(kind, name)
        return await self._set(kind, name, actor, reason)

    async def resume(self, kind: str, name: str, *, actor: str, reason: str) -> Lift:
        """And on again; where two operators are needed, the first one only proposes it."""
        if not any((kind, name) == (pause.kind, pause.name) for pause in await self._engine.store.read.pauses.list()):
            await self._require(kind, name)
        return await self._lift(kind, name, actor, reason)

    async def halt(self, kind: str = "", name: str = "", *, actor: str, reason: str) -> bool:
        """Make nothing that signs, for a flow or at a rail; without a name, nowhere (W21). Whether it was made before.

        It is obeyed by each call that begins after this has returned, in whatever process.
        """
        if kind:
            await self._require(kind, name)
            flows = [
                f for f in self._engine.flows.values() if name == f.name or (kind == "rail" and name in f.known_rails)
            ]
            if flows and not any(state.signs for flow in flows for state in flow.machine.states):
                raise InvalidName(kind, name, "nothing there signs, so a halt would stop nothing; pause it")
        return await self._set(*_halt(kind, name), actor, reason, two_people=True)

    async def unhalt(self, kind: str = "", name: str = "", *, actor: str, reason: str) -> Lift:
        """Sign again: the first person proposes it, another one agrees."""
        return await self._lift(*_halt(kind, name), actor, reason)

    async def _set(self, kind: str, name: str, actor: str, reason: str, *, two_people: bool = False) -> bool:
        person, why = check_actor(actor), check_reason(reason)
        was_on = await set_pause(self._engine.store, kind, name, actor=person, reason=why, two_people=two_people)
        await self._engine.pauses.read()  # here it is obeyed at once
        return was_on

    async def _lift(self, kind: str, name: str, actor: str, reason: str) -> Lift:
        lift = await lift_pause(self._engine.store, kind, name, actor=actor, reason=reason)
        await self._engine.pauses.read()
        return lift

    async def acknowledge(self, record: int, reason: str, *, actor: str) -> bool:
        """A person has seen an alert. Whether there was one."""
        return await self._engine.store.single().alerts.acknowledge(record, check_reason(reason), check_actor(actor))

    async def signal(
        self,
        flow: str,
        id: str,
        event: str,
        *,
        actor: str,
        reason: str,
        sender: str = "",
        declared_dead: bool = False,
    ) -> Record:
        """Send a signal to a record. Where the flow wants two operators, the first one only asks.

        `sender` is an id for it: sent again under that, it is the same signal, and nothing happens. An event that gives
        money back is taken if nothing was ever issued for the record. If something was, two operators may declare it
        dead: it is given back on their word, and stays watched (S44).
        """
        actor = check_actor(actor)
        check_reason(reason)
        record = await self._engine.record(flow, id)
        driven, evidence = self._engine.require(flow), {"reason": reason}
        if sender:
            sent = await self._engine.store.read.records.signals(record.number)
            if signals.find(sent, sender, event, evidence) is not None:
                return record
        signals.check_possible(driven, record, event)
        if event in driven.reserved_events:
            raise InvalidState(flow, id, record.state, driven.reserved_events[event])
        if declared_dead and not signals.takes(driven, record, event):
            raise InvalidState(flow, id, record.state, f"it does not wait for {event}: declare it dead when it does")
        two = declared_dead or event in driven.second_person
        first = await self._asked(record, event, actor, declared_dead) if two else ""
        if two and not first:
            note = {"reason": reason, "event": event} | ({DECLARED_DEAD: "yes"} if declared_dead else {})
            return await self._note(record, TELL_ASKED, actor, note, delay_us=KEEP_DUE)
        told: dict[str, Any] = evidence | (proof.declared_dead(first, actor) if declared_dead else {})
        try:
            return await self._engine.signal(record, event, actor, told, sender=sender)
        except proof.ProofMissing:
            if declared_dead:
                raise
            return await self._engine.signal(record, event, actor, told | proof.never_issued(), sender=sender)

    async def force(self, flow: str, id: str, event: str, *, actor: str, reason: str) -> Record:
        """Say how a call ended. The first person asks, another who says the same decides.

        `SUCCESS` is taken at their word, with what the rail can say of it. Anything that gives money back goes to the
        rail first, which must promise that it never happened and never will; if it says that it did, that counts.
        """
        actor = check_actor(actor)
        record = await self._open(flow, id, reason)
        driven = self._engine.require(flow)
        state = driven.machine.state(record.state)
        if state.kind is not Kind.CALL:
            raise InvalidState(flow, id, record.state, "it makes no call just now")
        try:
            arrow = driven.machine.arrow(record.state, event)
        except ImpossibleEvent as error:
            raise InvalidState(flow, id, record.state, str(error)) from None
        if arrow.answer is None or not arrow.answer.is_known or arrow.target == record.state:
            raise InvalidState(flow, id, record.state, f"{event} leads nowhere; force SUCCESS or EXPLICIT_FAIL")
        if (
            arrow.answer is Outcome.SUCCESS
            and driven.rail(driven.item(record), state.action or "") in driven.local_rails
        ):
            raise InvalidState(
                flow, id, record.state, "its rail can always be asked, and only its answer counts; retry it"
            )
        if not await self._asked(record, event, actor):
            note = {"reason": reason, "event": event}
            return await self._note(record, FORCE_ASKED, actor, note, delay_us=KEEP_DUE)
        forced = {FORCED_BY: actor, "reason": reason}
        await watch_later(self._engine, driven, record)
        if arrow.answer is Outcome.SUCCESS:
            answer = Answer(outcome=Outcome.SUCCESS, event=event, evidence=forced)
            if (query := driven.queries.get(state.action or "")) is not None:
                said = await self._engine.call(driven, query, driven.item(record))
                if said.outcome is Outcome.SUCCESS:  # its facts, for the books: which transaction, and what it cost
                    answer = msgspec.structs.replace(answer, body=said.body, evidence=said.evidence | forced)
        else:
            cancel = driven.cancels.get(state.action or "")
            if cancel is None:
                raise InvalidState(flow, id, record.state, "its rail can't promise that it never happened")
            item = driven.item(record)
            if await self._engine.pauses.stop(driven, state, item, called=True):
                raise InvalidState(
                    flow, id, record.state, "signing is halted, and its cancellation may sign; unhalt it"
                )
            said = await self._engine.call(driven, cancel, item)
            # The rail agrees, in its own words or none: then the operators' finer word for it counts.
            agreed = event if said.outcome is arrow.answer else ""
            answer = msgspec.structs.replace(said, event=said.event or agreed, evidence=said.evidence | forced)
        return await self._settle(record, answer, actor)

    async def _settle(self, record: Record, answer: Answer, actor: str) -> Record:
        """Workers go on calling meanwhile, and each call without an answer moves the record's version under us."""
        for _ in range(TRIES):
            after = await self._engine.apply_answer(record, answer, actor=actor)
            if after is None or not answer.outcome.is_known:
                return record if after is None else after
            # It may be in that state again: that is another call's answer.
            if has_left(await self._engine.store.read.records.history(record.number), record.version):
                return after
            record = after
        raise Conflict(f"record {record.id} is being driven", TRIES)

    async def _asked(self, record: Record, event: str, actor: str, declared_dead: bool = False) -> str:
        """Who else has asked for the same since it came into this state; "" for none."""
        for transition in reversed(await self._engine.store.read.records.history(record.number)):
            if transition.target != record.state or transition.source != record.state:
                return ""
            if transition.event in (FORCE_ASKED, TELL_ASKED) and not same_person(transition.actor, actor):
                said = msgspec.json.decode(transition.evidence)
                same = said.get("event") == event and (DECLARED_DEAD in said) is declared_dead
                return transition.actor if same else ""
        return ""

    async def _open(self, flow: str, id: str, reason: str) -> Record:
        check_reason(reason)
        record = await self._engine.record(flow, id)
        machine = self._engine.require(flow).machine
        if machine.state(record.state).kind is Kind.TERMINAL:
            raise InvalidState(flow, id, record.state, "it has ended")
        return record

    async def _require(self, kind: str, name: str) -> None:
        """A pause with a typing error would pause nothing, without notice. Another program's flow has records here."""
        flows = self._engine.flows
        known = {"flow": set(flows), "rail": {rail for flow in flows.values() for rail in flow.known_rails}}
        if name in known.get(kind, ()) or (
            kind == "flow" and await self._engine.store.read.records.list(name, limit=1)
        ):
            return
        text = "; ".join(f"{what}s: {', '.join(sorted(names))}" for what, names in known.items())
        raise InvalidName(kind, name, f"nothing of that name can be paused here. Known {text}")

    async def _note(self, record: Record, event: str, actor: str, evidence: dict[str, str], *, delay_us: int) -> Record:
        text, worker = msgspec.json.encode(evidence).decode(), "" if delay_us >= 0 else record.worker
        move = staying_move(record, event, text, actor=actor, delay_us=delay_us, worker=worker)
        await self._engine.writer.apply(Change(moves=(move,)))
        return await self._engine.record(record.flow, record.id)


def _halt(kind: str, name: str) -> tuple[str, str]:
    """The switch that stops the signatures of a flow or a rail; of all, if none is named."""
    return (f"{HALT} {kind}", name) if kind else ALL_SIGNING
