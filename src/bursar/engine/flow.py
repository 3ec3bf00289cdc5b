"""What a flow is: a machine, an action for every call state, and what accompanies its arrows.

    flow = Flow(machine=MACHINE, body=Order, actions={"charge": charge, "ship": ship})

An action gets the record and calls a system, always with the same idempotent operation, because it may be called again
at any time; it returns what that system said. Everything else (persisting first, retrying, recovering, alerting) is
the engine's. An exception that an action lets slip is `UNKNOWN`: it is not known what happened.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

import msgspec

from bursar.model.entries import Intent
from bursar.model.flow_rows import RowKind, RowOperation
from bursar.model.machine import NAME, Arrow, ImpossibleEvent, Kind, Machine, MachineError, State
from bursar.model.outcome import Outcome
from bursar.model.records import Priority, Record
from bursar.model.retry import USUAL_ALARMS, USUAL_RETRY, Alarm, Retry, until_alarm_us
from bursar.model.views import microseconds
from bursar.writer import NO_TIMER, NewTransition, Operation

B = TypeVar("B", bound=msgspec.Struct)

CALL_TIMEOUT_S = 10.0
LOOK_S_MAX = 300.0  # until a worker looks again: due much later would count as a clock that jumped (L24)
EVIDENCE_LENGTH_MAX = 16_384
ERROR_LENGTH_MAX = 500
PREFIX = re.compile(r"[a-z][a-z0-9]*(?:-[a-z0-9]+)*-", re.ASCII)  # of a flow's ids; digits follow
PREFIX_LENGTH_MAX = 80

_evidence = msgspec.json.Encoder(enc_hook=repr)


class FlowRefused(MachineError):
    """The flow's actions don't fit its machine."""

    flow: str
    why: str
    code = "FLOW_REFUSED"
    text = "flow {flow!r} is refused: {why}"


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What the called system said."""

    outcome: Outcome
    event: str = ""  # a finer kind of that outcome, where the machine has one
    code: str = ""  # of a refusal
    message: str = ""
    evidence: dict[str, Any] = {}  # stored with the transition: a reply, a receipt, a proof
    body: msgspec.Struct | None = None  # the record's body from now on
    in_flight_posting: int | None = None  # the posting in transit that belongs to the record from now on
    rows: tuple[RowOperation, ...] = ()  # of the flow's own, written with the answer, also if it stays
    decision: bool = False  # the action's own choice, not a fact: true only if this compare-and-set wins (W46)
    unchanged: bool = False  # a poll that says nothing new: no row of history, no count of calls, no general alarm
    retry_after_s: float | None = None  # instead of the state's or the flow's delay, if the record stays
    high_water: tuple[tuple[str, int], ...] = ()  # peers, and the sequence in its own log at which each did this (T33)

    def as_json(self) -> str:
        """The evidence as it is stored. Whatever it is, it can be: an answer must not be lost for how it is written."""
        told: dict[str, Any] = {"outcome": self.outcome.value}
        if self.code:
            told["code"] = self.code
        if self.message:
            told["message"] = self.message
        try:
            text = _evidence.encode(told | self.evidence).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = ""
        if text and len(text) <= EVIDENCE_LENGTH_MAX:
            return text
        cut = storable(text or repr(self.evidence))[:EVIDENCE_LENGTH_MAX]
        return msgspec.json.encode({"outcome": self.outcome.value, "cut": cut}).decode()

    @property
    def error(self) -> str:
        """In a line, what it said; nothing if it was a success."""
        if self.outcome is Outcome.SUCCESS:
            return ""
        said = ": ".join(part for part in (self.code or self.outcome.value, self.message) if part)
        return storable(said)[:ERROR_LENGTH_MAX]


def storable(text: str) -> str:
    """Text from outside, without what PostgreSQL refuses to store: NUL, and halves of characters."""
    return text.replace("\x00", "\ufffd").replace("\x1f", "\ufffd").encode("utf-8", "replace").decode()


SUCCESS = Answer(outcome=Outcome.SUCCESS)


class FlowRecord(msgspec.Struct, Generic[B], frozen=True):
    """A record with its body decoded: what actions get."""

    record: Record
    body: B

    @property
    def id(self) -> str:
        """The flow's id of the record: the key of every operation made for it."""
        return self.record.id

    @property
    def state(self) -> str:
        """Where it is."""
        return self.record.state

    @property
    def key(self) -> str:
        """The idempotency key of the call that its state makes: the same at every retry, another in every state."""
        return f"{self.record.id}:{self.record.state}"


class NewRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Another record that an arrow starts. Its id is the flow's choice, and makes it start once."""

    flow: str
    id: str
    body: msgspec.Struct
    owner: str = ""


class RecordSignal(msgspec.Struct, frozen=True, kw_only=True):
    """An event for another record, which waits for it or keeps it in its inbox (signals)."""

    flow: str
    id: str
    event: str
    evidence: dict[str, Any] = {}


class Booking(msgspec.Struct, frozen=True):
    """Entries that accompany an arrow, in the transaction of its transition."""

    intents: tuple[Intent, ...] = ()
    in_flight_account: str = ""  # the account in which they make the posting that belongs to the record from now on
    rows: tuple[RowOperation, ...] = ()  # of the flow's own, written with the arrow
    starts: tuple[NewRecord, ...] = ()  # other records, in the same transaction
    signals: tuple[RecordSignal, ...] = ()  # to other records, in the same transaction
    clears_in_flight: bool = False  # they consume it: none belongs to it any more
    # Where the entries are not the echo of something that happened outside but the operation itself, a refusal is its
    # answer: by the refusal's code, what that stands for. Any other refusal is a mistake: an alert is raised.
    refused: Mapping[str, Outcome] = {}


class InlineCall(msgspec.Struct, frozen=True):
    """A call that is only rows of this database: it is made in the transaction that reaches its state (ADR 14)."""

    answer: Answer  # what it says, if nothing is refused
    operations: tuple[Operation, ...]  # answered once and for all, as if they had been called
    booking: Booking  # its entries, and those of the arrow that leads to its state


NOTHING = Booking()
Action = Callable[[FlowRecord[Any]], Awaitable[Answer]]


class Dispute(msgspec.Struct, frozen=True):
    """What accompanies a late answer: entries that put the books right, and the body from then on."""

    intents: tuple[Intent, ...] = ()
    body: msgspec.Struct | None = None


UNDISPUTED = Dispute()


async def _admits_all(_body: Any, _id: str) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Flow(Generic[B]):
    """A machine that can be driven. Checked when it is built."""

    machine: Machine
    body: type[B]
    actions: Mapping[str, Action]  # by the name in the machine's call states
    # What a record is checked for before any caller starts it: raises the refusal.
    admit: Callable[[Any, str], Awaitable[None]] = _admits_all
    active: Callable[[Any], tuple[str, ...]] = lambda _body: ()  # pure: accounts that must be active when it starts
    book: Callable[[FlowRecord[Any], str, Answer], Booking] = lambda *_: NOTHING  # pure
    # What accompanies the start of a record, in its transaction: if it is refused, nothing was started. Pure.
    book_start: Callable[[FlowRecord[Any]], Booking] = lambda _item: NOTHING
    # The body from an arrow on, whatever led along it; None: as it was. Not asked if the answer brings one; pure.
    next_body: Callable[[FlowRecord[Any], str, Answer], msgspec.Struct | None] = lambda *_: None
    # A call that can be part of the transaction; None: it is made by itself. Pure.
    inline_call: Callable[[FlowRecord[Any], Booking], InlineCall | None] = lambda *_: None
    # An answer (the third) to the call that the first was making contradicts what was decided; the second is how the
    # record stands by now. The disputed amount goes to `suspense:{flow}`, so that the books show it (T34); pure.
    dispute: Callable[[FlowRecord[Any], FlowRecord[Any], Answer], Dispute] = lambda *_: UNDISPUTED
    # The same for a late answer that contradicts nothing: what operators did not know when they decided; pure.
    learned: Callable[[FlowRecord[Any], FlowRecord[Any], Answer], Dispute] = lambda *_: UNDISPUTED
    choose: Callable[[FlowRecord[Any]], str] | None = None  # the event of a rest state that has several ways on; pure
    cancels: Mapping[str, Action] = field(default_factory=dict)  # per action: make sure it never happens (T34)
    # Per action: what the rail has on record of it, without making it happen: asked after its end was forced (T34).
    queries: Mapping[str, Action] = field(default_factory=dict)
    # Per action: the rail it calls, to be paused by name; where that depends on the record, a function (pure), and then
    # `rail_names` says which names there are.
    rails: Mapping[str, str | Callable[[FlowRecord[Any]], str]] = field(default_factory=dict)
    rail_names: frozenset[str] = frozenset()
    local_rails: frozenset[str] = frozenset()  # which can always be asked: operators can't force their answer
    second_person: frozenset[str] = frozenset()  # events that only two operators together can send
    row_kinds: tuple[RowKind, ...] = ()  # of rows of its own: those that its bookings may name
    # Events that only the flow's own code may send, which checks more than a machine can → what an operator does
    # instead. `Operators.signal` refuses them.
    reserved_events: Mapping[str, str] = field(default_factory=dict)
    # When a record leaves the waiting state that it comes to, if that has a `timeout_event` and no `timeout_s`; None:
    # not by itself. Pure.
    timer: Callable[[FlowRecord[Any]], datetime | None] | None = None
    # Events that a record may be sent before it waits for them: they stay in its inbox. Also those that no state waits
    # for: they only change the body, and are consumed by that. Any other is refused unless the record waits for it.
    inbox_events: frozenset[str] = frozenset()
    # The body once a signal has come that moves nothing, from its event and evidence; None: as it was. Pure.
    on_signal: Callable[[FlowRecord[Any], str, dict[str, Any]], msgspec.Struct | None] = lambda *_: None
    priority: Callable[[Any], Priority] = lambda _body: Priority.NORMAL  # by the body that it starts with; pure
    share: float = 1.0  # the largest part of a worker's places and queue that records of this flow may take
    retry: Retry = USUAL_RETRY
    alarms: tuple[Alarm, ...] = USUAL_ALARMS
    call_timeout_s: float = CALL_TIMEOUT_S
    # Ids that the engine makes are this and a Snowflake, so that an operator sees whose they are; "": 32 random digits.
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.prefix and (len(self.prefix) > PREFIX_LENGTH_MAX or not PREFIX.fullmatch(self.prefix)):
            why = f"prefix {self.prefix!r}: lower-case letters and digits in words joined by '-', and a '-' at the end"
            raise FlowRefused(self.name, why)
        wanted = {state.action for state in self.machine.calls if state.action}
        if missing := sorted(wanted - self.actions.keys()):
            raise FlowRefused(self.name, f"no action {', '.join(missing)}")
        named = self.actions.keys() | self.cancels.keys() | self.queries.keys() | self.rails.keys()
        if stray := sorted(named - wanted):
            raise FlowRefused(self.name, f"no call state names {', '.join(stray)}")
        for state in self.machine.states:
            if state.kind is Kind.AUTOMATIC and len(self.machine.arrows_from(state.name)) > 1 and self.choose is None:
                raise FlowRefused(
                    self.name, f"automatic state {state.name} has several ways on; say which with `choose`"
                )
        if not self.rail_names and any(callable(rail) for rail in self.rails.values()):
            raise FlowRefused(self.name, "a rail that depends on the record: say with `rail_names` which there are")
        if len({kind.name for kind in self.row_kinds}) < len(self.row_kinds):
            raise FlowRefused(self.name, "two kinds of rows have one name; their rows would be mixed up")
        if stray := sorted(self.second_person - set(self.machine.events)):
            raise FlowRefused(self.name, f"{', '.join(stray)} needs two operators, but is no event")
        if stray := sorted(self.reserved_events.keys() - set(self.machine.events) - self.inbox_events):
            raise FlowRefused(self.name, f"{', '.join(stray)} is reserved, but is no event")
        self._check_scheduling()
        states = {state.name for state in self.machine.states}
        if stray := sorted({alarm.state for alarm in self.alarms if alarm.state} - states):
            raise FlowRefused(self.name, f"an alarm watches {', '.join(stray)}, which is no state")

    def _check_scheduling(self) -> None:
        open_ended = [s.name for s in self.machine.states if s.timeout_event is not None and s.timeout_s is None]
        if open_ended and self.timer is None:
            raise FlowRefused(self.name, f"{', '.join(open_ended)} times out; say when with `timeout_s` or `timer`")
        if self.timer is not None and not open_ended:
            raise FlowRefused(self.name, "no waiting state needs `timer`: none times out, or each has its `timeout_s`")
        awaited = {
            a.event for s in self.machine.states if s.kind is Kind.WAIT for a in self.machine.arrows_from(s.name)
        }
        for event in sorted(self.inbox_events):
            known = event in self.machine.events or event in Outcome.__members__
            if event in self.machine.timeout_events or (known and event not in awaited) or not NAME.fullmatch(event):
                raise FlowRefused(
                    self.name, f"{event!r} can't be a signal: no state waits for it, or the engine sends it"
                )
        if not 0 < self.share <= 1:
            raise FlowRefused(self.name, f"a share of {self.share} is not above 0 and at most 1")

    def timer_of(self, state: State, record: Record) -> int:
        """The timer of a record that comes to a state, as a move has it."""
        if state.timeout_event is None:
            return NO_TIMER
        if state.timeout_s is not None:
            return -int(state.timeout_s * 1e6)
        at = None if self.timer is None else self.timer(self.item(msgspec.structs.replace(record, state=state.name)))
        if at is not None and at.tzinfo is None:
            raise FlowRefused(self.name, f"the timer of {record.id} has no time zone")
        return NO_TIMER if at is None else max(1, microseconds(at))

    @property
    def name(self) -> str:
        """The machine's name: how records and pauses name the flow."""
        return self.machine.name

    def mermaid(self) -> str:
        """The picture of its machine as Mermaid text."""
        return self.machine.mermaid()

    def delay_us(self, state: State, answer: Answer, attempt: int, chance: float) -> int:
        """How long until a record that stays is called for again: the answer's word, the state's, or the flow's."""
        asked_s = answer.retry_after_s
        if asked_s is None and answer.outcome is Outcome.PENDING:
            asked_s = state.poll_s
        if asked_s is None:
            return self.retry.delay_us(attempt, chance)
        return int(min(max(asked_s, 0.0), self.delay_s_max) * 1e6)

    @property
    def delay_s_max(self) -> float:
        """The longest delay until a call: due later than that is a clock that jumped (L24)."""
        return max([self.retry.cap_s, *(state.poll_s or 0.0 for state in self.machine.states)])

    def next_look_us(self, state: str, age_us: int, life_us: int) -> int | None:
        """When a worker looks at a waiting record again, for its alarms; None: not before it gets a signal."""
        next_us = until_alarm_us(self.alarms, state, age_us, life_us)
        return None if next_us is None else min(next_us, int(LOOK_S_MAX * 1e6))

    def own_rows(self, rows: tuple[RowOperation, ...]) -> tuple[RowOperation, ...]:
        """The same rows, all of kinds that the flow has declared."""
        for operation in rows:
            if operation.kind not in self.row_kinds:
                raise FlowRefused(self.name, f"rows of kind {operation.kind.name!r} are not declared in `row_kinds`")
        return rows

    @property
    def known_rails(self) -> frozenset[str]:
        """All rails that can be paused."""
        return self.rail_names | {rail for rail in self.rails.values() if isinstance(rail, str)}

    def rail(self, item: FlowRecord[B], action: str) -> str:
        """The rail that an action calls for this record; "" if it has no name."""
        rail = self.rails.get(action, "")
        return rail if isinstance(rail, str) else rail(item)

    def item(self, record: Record) -> FlowRecord[B]:
        """A record with its body decoded."""
        return FlowRecord(record, msgspec.json.decode(record.body, type=self.body))

    def way_on(self, record: Record, state: str, body: B) -> Arrow:
        """The arrow by which a record leaves a rest state that it comes to."""
        arrows = self.machine.arrows_from(state)
        if self.choose is None or len(arrows) == 1:
            return arrows[0]
        return self.machine.arrow(state, self.choose(FlowRecord(msgspec.structs.replace(record, state=state), body)))

    def validated(self, state: State, answer: Answer) -> Answer:
        """An event that the machine does not know here, or that is not of the outcome it came with, is no answer."""
        event = answer.event or answer.outcome.value
        try:
            arrow = self.machine.arrow(state.name, event)
        except ImpossibleEvent as error:
            return Answer(outcome=Outcome.UNKNOWN, message=str(error), evidence=answer.evidence)
        if arrow.answer is not answer.outcome:
            message = f"event {event} stands for {arrow.answer}, but the call said {answer.outcome}"
            return Answer(outcome=Outcome.UNKNOWN, message=message, evidence=answer.evidence)
        return answer

    def turns_back(self, record: Record, transitions: tuple[NewTransition, ...]) -> bool:
        """Whether a waiting record that takes these turns to giving money back, which needs a proof (proofs). Pure."""
        source = transitions[0].source
        if not record.version or self.machine.state(source).kind is Kind.CALL:
            return False  # most moves: it has just begun, or an answer decides
        return self.machine.needs_proof([source, *(transition.target for transition in transitions)])


def by_name(flows: Iterable[Flow[Any]]) -> dict[str, Flow[Any]]:
    """Flows, each under a name of its own."""
    found: dict[str, Flow[Any]] = {}
    for flow in flows:
        if flow.name in found:
            raise FlowRefused(flow.name, "another flow has that name; their records would be mixed up")
        twin = next((other for other in found.values() if flow.prefix and other.prefix == flow.prefix), None)
        if twin is not None:
            raise FlowRefused(flow.name, f"flow {twin.name!r} has the prefix {flow.prefix!r} already")
        found[flow.name] = flow
    return found


def flow_of(id_: str, flows: Iterable[Flow[Any]]) -> Flow[Any] | None:
    """The flow that an id was made for, by its prefix; None if it has none of these."""
    prefix = id_.rstrip("0123456789")
    return next((flow for flow in flows if flow.prefix and flow.prefix == prefix != id_), None)
