"""The engine: drives records of any flow. Write down what you are about to do, do it, write down what was said.

    rest state → compare-and-set to the next state, in the transaction that reached it
    call state → it is on disk already: make the call, then compare-and-set on the event that the answer maps to

No lock is held across a call. A lost compare-and-set means that the record has moved: read again and go on. What the
machine dies on, at any line here, is found by the scanner and called again; the operation is the same, so it happens
once. Only `EXPLICIT_FAIL` leads towards giving money back; the machine saw to that when it was built, and
`Flow.validated` sees to it that an answer is what it claims to be.

Not here: who looks for records that are due (worker), what operators do (operators).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Iterable
from functools import cached_property, partial
from typing import Any, Self

import msgspec

from bursar.deadlines import Deadlines
from bursar.engine import late, signals, staying
from bursar.engine.clock import Snowflakes
from bursar.engine.flow import NOTHING, Action, Answer, Booking, Flow, FlowRecord, InlineCall, by_name, storable
from bursar.engine.moves import Moves, automatic, inline, remembered
from bursar.engine.others import Turns, gather
from bursar.engine.pauses import Pauses
from bursar.engine.proofs import check_proof, with_starts
from bursar.model.entries import check_key
from bursar.model.errors import (
    AlreadyExists,
    Conflict,
    RecordMoved,
    Refusal,
    StoreError,
    UnknownFlow,
    UnknownRecord,
)
from bursar.model.machine import Kind, State
from bursar.model.outcome import Outcome
from bursar.model.records import OperationResult, Record
from bursar.store import Store
from bursar.writer import Change, Limit, Move, NewTransition, Operation, Writer

LEASE_S = 30.0  # how long the worker that drives a record has it alone; an optimisation, not a lock
TRIES = 8  # to write a change whose other records are being moved
PARTING_S = 1.0  # how long calls that were given up may take to notice

log = logging.getLogger("bursar.engine")


class Started(msgspec.Struct, frozen=True):
    """A record that was started now, or long ago by the same request."""

    record: Record
    replayed: bool = False


class Engine:
    """Flows on a store."""

    def __init__(
        self,
        store: Store,
        writer: Writer,
        flows: Iterable[Flow[Any]],
        *,
        worker: str = "local",
        lease_s: float = LEASE_S,
    ) -> None:
        self.store = store
        self.writer = writer
        self.ports = store.ports
        self.flows: dict[str, Flow[Any]] = by_name(flows)
        self.worker = worker
        self.lease_us = int(lease_s * 1e6)
        self.pauses = Pauses(store, worker)
        self.moves = Moves(self.flows, self.ports, worker, self.lease_us)
        self.logs_alerts = True  # unless a dispatcher does
        self.settled: Counter[tuple[str, str]] = Counter()  # records that reached an end here, by flow and state
        self.ended: dict[int, int] | None = None  # while a worker claims: what was driven here meanwhile, → version
        self._driving: dict[int, asyncio.Task[Record]] = {}
        self._places: Counter[str] = Counter()  # of those, by flow
        self._newest: dict[int, Record] = {}  # of those: as they were seen last
        self._deadlines = Deadlines()
        self._turns = Turns()

    def register(self, flow: Flow[Any]) -> Self:
        """Drive one more flow: one engine, one worker and one cache of pauses for all flows of a process.

        Register before a worker runs on it: its first look, which takes over what a dead process left, covers the flows
        that are there by then.
        """
        self.flows.update(by_name([*self.flows.values(), flow]))  # the same dict: moves are built by it too
        return self

    # --- starting ----------------------------------------------------------------------------------------------

    async def start(
        self,
        flow: str,
        body: msgspec.Struct,
        *,
        id: str | None = None,
        owner: str = "",
        operation: Operation | None = None,
        limits: tuple[Limit, ...] = (),
        actor: str = "",
        require_inline: bool = False,
    ) -> Started:
        """Write a record down in its first state, and in those it passes through by itself, before any call.

        With `operation`, a repeated request gets the record of the first one; a refusal is never stored, because
        nothing was started (T41). The record is driven by `process_now`, or by a worker once its lease is over. It is
        started only if the flow admits it and the accounts that the flow names are active; with `require_inline`,
        only if its first call can be part of the transaction. If not, a refusal says why.
        """
        driven = self.require(flow)
        name = await self.new_id(flow) if id is None else check_key(id)
        await driven.admit(body, name)
        if operation is not None:
            check_key(operation.id)
            operation = msgspec.structs.replace(
                operation, refusals=frozenset(), detail=remembered(operation.detail, name)
            )
        record = self.moves.new_record(flow, name, owner, body)
        there, booking, steps = self.moves.begin(driven, record, body)
        more = {"operation": operation, "limits": limits, "active": driven.active(body)}
        inlined = await self._inline_call(driven, there, booking)
        if inlined is not None:
            whole = (*steps, *inline(driven, there, inlined))
            move = self.moves.move(record, whole, actor, inlined.booking, body=record.body)
            try:
                return await self._started(record, move, inlined.booking, inline_operations=inlined.operations, **more)
            except Refusal:  # whatever it is, it is raised again below, or by the system that is called
                if require_inline:
                    raise
        elif require_inline:
            raise Conflict(f"the first call of {flow} has to be made by itself", 1)
        move = self.moves.move(record, steps, actor, booking, body=record.body)
        try:
            return await self._started(record, move, booking, **more)
        except RecordMoved:
            if id is not None:
                raise
            found = await self._written(flow, name)  # ours, if the reply to its COMMIT was lost (L18)
            if driven.prefix and (found.owner, found.body) != (record.owner, record.body):
                raise Conflict(f"the id {name} is taken", 1) from None  # two processes had one node number (L6)
            return Started(found)

    async def new_id(self, flow: str) -> str:
        """An id that no record has: the flow's prefix and a Snowflake, or random digits if it has no prefix."""
        prefix = self.require(flow).prefix
        return f"{prefix}{await self._ids.next()}" if prefix else self.ports.token()

    @cached_property
    def _ids(self) -> Snowflakes:
        return Snowflakes(self.store)

    async def _started(self, record: Record, move: Move, booking: Booking, **more: Any) -> Started:
        done = await self.commit(record, move, booking, **more)
        if isinstance(done, OperationResult):
            first = msgspec.json.decode(done.detail)["record"]
            return Started(await self._written(record.flow, first), replayed=first != record.id)
        return Started(done)

    async def _written(self, flow: str, id: str) -> Record:
        found = await self.get(flow, id)
        if found is None:
            raise Conflict("the record of that request can't be read yet", 1)
        return found

    async def get(self, flow: str, id: str) -> Record | None:
        """A record as it stands."""
        return await self.store.read.records.get(flow, id)

    async def record(self, flow: str, id: str) -> Record:
        """The same; a refusal if there is none, which names the flows that there are if that is no flow of ours."""
        found = await self.get(flow, id)
        if found is None:
            self.require(flow)
            raise UnknownRecord(flow, id)
        return found

    async def hand_over(self, record: Record) -> None:
        """Let any worker go on at once with a record that was started here; else it waits until our lease is over."""
        with contextlib.suppress(StoreError):
            await self.store.single().records.look_again([(record.number, record.version, 0)])

    # --- driving -----------------------------------------------------------------------------------------------

    async def process_now(self, record: Record, timeout_s: float) -> Record:
        """Drive a record and wait, but not for ever: what has not ended by then goes on in the background."""
        task = self.drive(record)
        await self._deadlines.wait(task, timeout_s)
        return self.newest(record, task)

    def newest(self, record: Record, task: asyncio.Task[Record]) -> Record:
        """A record as the task that drives it has seen it last. Nothing is read: the database may be what hangs."""
        if task.done() and not task.cancelled():
            return task.result()
        return self._newest.get(record.number, record)

    def driving(self, record: Record) -> asyncio.Task[Record] | None:
        """The task that drives a record here, if one does."""
        return self._driving.get(record.number)

    def drive(self, record: Record) -> asyncio.Task[Record]:
        """Drive a record in a task of its own, which no waiting caller cancels; once per process at a time."""
        before = self._driving.get(record.number)
        driving = self._drive(record) if before is None else self._drive_after(before, record)
        task = asyncio.get_running_loop().create_task(driving, name=f"bursar-{record.flow}-{record.id}")
        self._driving[record.number] = task
        self._places[record.flow] += before is None
        task.add_done_callback(partial(self._driven, record.flow, record.number))
        return task

    def _driven(self, flow: str, number: int, task: asyncio.Task[Record]) -> None:
        if self._driving.get(number) is task:
            del self._driving[number]
            self._places[flow] -= 1
            self._newest.pop(number, None)
        if self.ended is not None and not task.cancelled():
            self.ended[number] = task.result().version

    async def _drive_after(self, before: asyncio.Task[Record], record: Record) -> Record:
        """The task that drives it may be about to end: no other worker comes before the lease is over."""
        done = await before
        return done if done.version > record.version else await self._drive(record)

    @property
    def in_progress(self) -> int:
        """How many records are being driven here."""
        return len(self._driving)

    def in_progress_of(self, flow: str) -> int:
        """How many of them are of one flow."""
        return self._places[flow]

    async def finish(self, timeout_s: float) -> int:
        """Wait for what is being driven; returns how many were left where they are, for the next worker."""
        if self._driving:
            await asyncio.wait(list(self._driving.values()), timeout=timeout_s)
        left = list(self._driving.values())
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=PARTING_S)
        return len(left)

    async def _drive(self, record: Record) -> Record:
        """Step until it ends, waits for a signal, or has to wait. Never raises: the scanner meets it again."""
        try:
            while True:
                after = await self.step(record)
                if after is None:
                    return record
                if after.state == record.state and after.attempt and after.worker != self.worker:
                    return after  # called again later, or by the worker that has it; what is ours still, goes on
                record = self._newest[record.number] = after
        except (StoreError, Conflict) as error:
            log.error("%s %s stays %s until the database takes it: %s", record.flow, record.id, record.state, error)
            self.pauses.leave(record.number)
        except Exception as error:  # one record that can't be read or driven must not stop the others
            log.exception("%s %s stays %s", record.flow, record.id, record.state)
            message = f"{record.flow} {record.id} can't be driven: {type(error).__name__}: {error}"
            with contextlib.suppress(Exception):  # the log has it; a task that fails here would never be driven again
                await self.alert(record, "can't be driven", "critical", message)
        return record

    async def step(self, record: Record) -> Record | None:
        """One step; None if there is nothing to do: it has ended, waits for a signal, or is paused."""
        flow = self.require(record.flow)
        state = flow.machine.state(record.state)
        if state.kind is Kind.TERMINAL or (state.kind is Kind.WAIT and not record.worker):
            return None
        if state.kind is Kind.WAIT:
            return await staying.step_waiting(self, flow, record)
        item = flow.item(record)
        if state.kind is Kind.AUTOMATIC:
            move = self.moves.apply(item, automatic(flow, item, record.state), NOTHING, None)
            return await self.write(item, move, NOTHING, None, None)
        if await self.pauses.stop(flow, state, item, called=record.attempt > 0):
            self.pauses.hold(record.number)
            return None
        answer = flow.validated(state, await self.call(flow, flow.actions[state.action or ""], item))
        return await self._settle(flow, item, state, answer)

    async def call(self, flow: Flow[Any], action: Action, item: FlowRecord[Any]) -> Answer:
        """Call an action, for at most `call_timeout_s`. Whatever happens, it comes back as an answer."""
        try:
            answer: object = await self._deadlines.keep(flow.call_timeout_s, action(item))
            if not isinstance(answer, Answer) or not isinstance(answer.outcome, Outcome):
                raise TypeError(f"{answer!r} is not an Answer with an Outcome")
        except TimeoutError:
            return Answer(outcome=Outcome.TIMEOUT, message=f"no answer within {flow.call_timeout_s} s")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # we are to stop; the next worker calls again for the record
            return staying.surprised(flow, item, error)  # something inside the action was cancelled, not we
        except Exception as error:  # whatever it is: what happened on the other side is unknown (T26)
            return staying.surprised(flow, item, error)
        return answer

    async def apply_answer(self, record: Record, answer: Answer, *, actor: str = "") -> Record | None:
        """Settle a record in a call state on an answer that came another way: from operators, or late."""
        flow = self.require(record.flow)
        state = flow.machine.state(record.state)
        return await self._settle(flow, flow.item(record), state, flow.validated(state, answer), actor=actor)

    async def signal(
        self, record: Record, event: str, actor: str, evidence: dict[str, Any], *, sender: str = ""
    ) -> Record:
        """Send a signal to a record that waits for it, or keeps it in its inbox (signals). Due at once.

        `sender` is the sender's id of it: sent again, it is the same signal. `RecordMoved` if the record has left the
        state in which the caller saw it.
        """
        return await signals.send(self, record, event, evidence, sender=sender, actor=actor)

    # --- settling ----------------------------------------------------------------------------------------------

    async def _settle(
        self,
        flow: Flow[Any],
        item: FlowRecord[Any],
        state: State,
        answer: Answer,
        *,
        actor: str = "",
        fact: bool = True,
    ) -> Record | None:
        """Write down what was said, with its arrow and entries. No `fact`: true only if this compare-and-set wins."""
        event = answer.event or answer.outcome.value
        arrow = flow.machine.arrow(state.name, event)
        if arrow.target == state.name:
            stays = staying.poll if answer.unchanged and not answer.outcome.is_known else staying.stay
            return await stays(self, flow, item, arrow, answer, actor=actor)
        booking = flow.book(item, event, answer)
        fact = fact and not booking.refused and not answer.decision
        if answer.body is None and (after := flow.next_body(item, event, answer)) is not None:
            answer = msgspec.structs.replace(answer, body=after)
        body = item.body if answer.body is None else answer.body
        told = NewTransition(state.name, event, arrow.target, answer.as_json())
        transitions = (told, *automatic(flow, FlowRecord(item.record, body), arrow.target))
        transit = item.record.in_flight_posting if answer.in_flight_posting is None else answer.in_flight_posting
        landed = FlowRecord(
            msgspec.structs.replace(item.record, state=transitions[-1].target, in_flight_posting=transit), body
        )
        inlined = await self._inline_call(flow, landed, booking)
        if inlined is not None:
            move = self.moves.apply(
                item, (*transitions, *inline(flow, landed, inlined)), inlined.booking, answer, actor=actor
            )
            move = msgspec.structs.replace(move, error=inlined.answer.error)
            heard, done = answer if fact else None, inlined.operations
            with contextlib.suppress(Refusal):  # the call is made later, by itself, and hears it
                return await self.write(item, move, inlined.booking, answer, heard, inline_operations=done)
        move = self.moves.apply(item, transitions, booking, answer, actor=actor)
        try:
            return await self.write(item, move, booking, answer, answer if fact else None)
        except Refusal as refusal:
            said = booking.refused.get(refusal.code)
            if said is not None and said is not answer.outcome:
                no = Answer(
                    outcome=said,
                    code=refusal.code,
                    message=str(refusal),
                    evidence=refusal.facts,
                    unchanged=answer.decision and not said.is_known,  # decided again, on what the faster one has left
                    retry_after_s=flow.retry.first_s if answer.decision else None,
                )
                return await self._settle(flow, item, state, no, actor=actor, fact=False)
            if (now := await late.moved_meanwhile(self, item, answer if fact else None)) is not None:
                return now
            # An outside fact whose booking is refused: a mistake in the flow or in the ledger's set-up, no answer.
            message = f"the booking of {event} is refused: {refusal}"
            await self.alert(item.record, "booking refused", "critical", message)
            unbooked = Answer(outcome=Outcome.UNKNOWN, message=message, evidence=answer.evidence)
            unknown = flow.machine.arrow(state.name, Outcome.UNKNOWN)
            return await staying.stay(self, flow, item, unknown, unbooked, actor=actor)

    async def _inline_call(self, flow: Flow[Any], item: FlowRecord[Any], booking: Booking) -> InlineCall | None:
        """What the call of the state it comes to amounts to, if that can be part of the transaction."""
        state = flow.machine.state(item.record.state)
        if state.kind is not Kind.CALL or await self.pauses.stop(flow, state, item, called=False):
            return None
        return flow.inline_call(item, booking)

    async def write(
        self,
        item: FlowRecord[Any],
        move: Move,
        booking: Booking,
        answer: Answer | None,
        heard: Answer | None,
        **more: Any,
    ) -> Record | None:
        """The compare-and-set. Lost: another process moved it, and what we heard must not be forgotten (T34)."""
        if answer is not None:
            more["high_water"] = self.relied_on(answer)
        try:
            done = await self.commit(item.record, move, booking, **more)
        except RecordMoved:
            if heard is not None and heard.outcome.is_known:
                await late.record_answer(self, item, heard)
            return await self.store.read.records.by_number(item.record.number)
        assert isinstance(done, Record)  # no operation of a caller's goes with it
        return done

    async def commit(
        self, record: Record, move: Move, booking: Booking, *, active: tuple[str, ...] = (), **more: Any
    ) -> Record | OperationResult:
        """Write a move with all that its booking names, in one transaction, and with the moves of all records that it
        starts or signals. The answer to an operation, if it has one.

        Raises `RecordMoved` for this record only: another one that has moved meanwhile is read again.
        """
        move = with_starts(move, booking.starts)
        if not booking.signals:
            return await self._commit(record, move, booking, active, **more)
        async with self._turns.of(booking.signals):
            return await self._commit(record, move, booking, active, **more)

    async def _commit(
        self, record: Record, move: Move, booking: Booking, active: tuple[str, ...], **more: Any
    ) -> Record | OperationResult:
        for _ in range(TRIES):
            try:
                others = await gather(self, record, booking, "" if move.actor == self.worker else move.actor)
                records, moves = (record, *others.records), (move, *others.moves)
                for moved_record, its_move in zip(records, moves, strict=True):
                    if self.flows[moved_record.flow].turns_back(moved_record, its_move.transitions):
                        await check_proof(self, moved_record, its_move)
            except Refusal as refusal:
                return await self._written_before(record, more.get("operation"), refusal)
            intents = (*booking.intents, *others.intents)
            try:
                done = await self.writer.apply(Change(intents, moves, active=(*active, *others.active), **more))
            except RecordMoved as moved:
                if (moved.flow, moved.id) == (record.flow, record.id):
                    raise
                if moved.version == 0:
                    raise AlreadyExists(f"record of {moved.flow}", moved.id, "a record is started once") from moved
                continue
            if not done.records:
                assert done.operation is not None  # the only other way for a change to end
                return done.operation
            after, *moved_too = map(self._moved, records, moves, done.records, done.postings)
            for other in moved_too:
                if other.worker and self.flows[other.flow].machine.state(other.state).kind in (Kind.CALL, Kind.WAIT):
                    self.drive(other)
            return after
        raise Conflict(f"records that {record.flow} {record.id} starts or signals are being moved", TRIES)

    async def _written_before(self, record: Record, operation: Operation | None, refusal: Refusal) -> OperationResult:
        """The answer that the caller's operation got before; `RecordMoved` if the record is not where it was seen. Then
        the refusal is of no account: all of it was written, by another worker or an earlier request."""
        if operation is not None:
            found = await self.store.read.operations.get(*operation.key)
            if found is not None and found.fingerprint == operation.fingerprint:
                return msgspec.structs.replace(found, replayed=True)
        now = await self.get(record.flow, record.id)
        if (0 if now is None else now.version) != record.version:
            raise RecordMoved(record.flow, record.id, record.version)
        raise refusal

    def _moved(self, record: Record, move: Move, number: int, posting: int) -> Record:
        after = self.moves.after(record, move, number, posting)
        if self.flows[after.flow].machine.state(after.state).kind is Kind.TERMINAL:
            self.settled[after.flow, after.state] += 1
        return after

    def relied_on(self, answer: Answer) -> tuple[tuple[str, str, int], ...]:
        """How far the logs of peers are known once this answer is written down, in the same transaction (T33)."""
        return tuple((peer, self.worker, sequence) for peer, sequence in answer.high_water)

    # --- the small parts ---------------------------------------------------------------------------------------

    def require(self, name: str) -> Flow[Any]:
        """The flow of that name."""
        flow = self.flows.get(name)
        if flow is None:
            raise UnknownFlow(name, ", ".join(sorted(self.flows)))
        return flow

    async def alert(self, record: Record | None, reason: str, severity: str, message: str) -> None:
        """Raise an alert, once per record and reason until it is acknowledged."""
        number = 0 if record is None else record.number
        message = storable(message)
        new = await self.store.single().alerts.raise_once(number, reason, severity, message)
        if new and self.logs_alerts:
            log.log(logging.CRITICAL if severity == "critical" else logging.WARNING, "%s: %s", reason, message)
