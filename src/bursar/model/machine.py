"""Machines: the states and arrows of a flow, as data that refuses to be wrong.

A flow says here what can happen to one of its records, and nothing else does: the engine asks `next`, the scanner asks
which states are open, the docs and the console ask for the picture. A machine that could lose money by its shape (an
unknown outcome that moves, a state without a way out, an end that still holds funds) raises `MachineRefused` when it
is built, with everything that is wrong with it, so a bad flow fails on import and not at night.

States are never ordered, whatever their codes (T4). Not here: the actions of call states (flows/), what drives a record
(engine/), how the picture is laid out (drawing).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from functools import cached_property
from itertools import pairwise

from bursar.model import drawing
from bursar.model.errors import BursarError
from bursar.model.outcome import UNKNOWNS, Outcome
from bursar.model.retry import CAP_MAX_S

NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[ _][A-Za-z0-9]+)*", re.ASCII)
NAME_LENGTH_MAX = 64
CODE_MIN, CODE_MAX = -(2**15), 2**15 - 1  # SMALLINT, as in specification 000 §7.1
STATES_MAX = 40
ARROWS_MAX = 400
TIMEOUT_MAX_S = 3650 * 86_400.0


class Kind(StrEnum):
    """What a record in a state is waiting for."""

    AUTOMATIC = "automatic"  # nothing: it moves on by itself, by compare-and-set
    CALL = "call"  # another system, which is called only after this state is on disk
    WAIT = "wait"  # a signal: of a person who decides, or of another record that ends
    TERMINAL = "terminal"  # nothing, for ever


class Effect(Flag):
    """What the call of a state does outside, also in the hands of operators who cancel it. Switches follow from it."""

    PREPARE = auto()  # nothing leaves: it looks and chooses. A pause stops every call
    SEND = auto()  # something leaves, or is asked to: a pause stops the first call, and no later one (W15)
    SIGN = auto()  # a key signs, alone or for what is sent or returned: a halt stops every call (W21)
    CONFIRM = auto()  # it only looks at what was sent: nothing stops it
    RETURN = auto()  # it gives money back, or claims it: no pause stops it


EFFECTS = (*Effect, Effect.SIGN | Effect.SEND, Effect.SIGN | Effect.RETURN)
UNPAUSED = Effect.CONFIRM | Effect.RETURN


@dataclass(frozen=True)
class State:
    """One place in which a record can be."""

    name: str
    kind: Kind
    code: int | None = None  # a number for rows and APIs that want one; an identity, never an order
    in_flight: bool = False  # money has left its owner and not arrived: it is in transit while a record is here
    compensating: bool = False  # money is on its way back, or is back, or never left: a success may not lead here
    action: str | None = None  # CALL: the name of what is called
    awaits: str | None = None  # WAIT: who is to speak ("approver", "payout")
    poll_s: float | None = None  # CALL: after PENDING, call again so long after; None: by the flow's back-off
    timeout_event: str | None = None  # WAIT: the event that the engine sends when its time has come
    timeout_s: float | None = None  # WAIT: so long after the record came here; None: when the flow says (`Flow.timer`)
    effect: Effect | None = None  # CALL: what that does; not said, it returns where money is given back, else it sends

    def __post_init__(self) -> None:
        object.__setattr__(self, "kind", Kind(self.kind))  # a kind that is only text would slip through every check
        if self.effect is None and self.kind is Kind.CALL:
            object.__setattr__(self, "effect", Effect.RETURN if self.compensating else Effect.SEND)

    @property
    def signs(self) -> bool:
        """Whether its call makes a key sign."""
        return self.effect is not None and Effect.SIGN in self.effect

    def is_held(self, *, paused: bool, halted: bool, called: bool) -> bool:
        """Whether switches hold its call back. What was `called` before may have happened: its outcome is learned."""
        if self.effect is None:
            return False
        pausable = self.effect is Effect.PREPARE or not (called or self.effect & UNPAUSED)
        return (halted and self.signs) or (paused and pausable)


@dataclass(frozen=True)
class Arrow:
    """From a state, on an event, to a state. Out of a call state the event is an outcome, or a finer kind of one."""

    source: str
    event: str
    target: str
    outcome: Outcome | None = None  # of a finer event in a call state: the outcome it is a kind of

    @property
    def answer(self) -> Outcome | None:
        """The outcome that this arrow answers to. A name counts for more than a claim: "TIMEOUT" is always TIMEOUT."""
        return Outcome(self.event) if self.event in Outcome.__members__ else self.outcome


class Flaw(StrEnum):
    """The ways in which a machine can be wrong."""

    BAD_NAME = "names are 1 to 64 ASCII letters and digits, in words joined by one blank or underscore"
    DUPLICATE_NAME = "two names that read the same are one too many"
    BAD_CODE = "a code must fit a 16-bit integer"
    DUPLICATE_CODE = "a code names one state"
    TOO_LARGE = "nobody can review a machine this large"
    NO_INITIAL = "a record must begin somewhere, and not at its end"
    NO_TERMINAL = "a record must be able to end"
    NO_ACTION = "a call state must name what it calls"
    NOBODY_AWAITED = "a waiting state must name who is to speak"
    STRAY_FIELD = (
        "only call states act, have an effect and are polled, only waiting states name who is awaited and time out"
    )
    BAD_TIMEOUT = "a waiting state times out on an event that leads out of it, after at most ten years"
    BAD_EFFECT = "a call has one effect; only signing goes with another, sending or returning"
    RETURN_PAUSED = "a pause must not stop giving money back: a compensating call returns or confirms"
    BAD_POLL = "a delay between two polls is longer than nothing, and at most thirty days"
    FUNDS_AT_THE_END = "money in flight in a terminal state is lost"
    LEAVES_THE_END = "terminal states don't move"
    UNKNOWN_STATE = "arrows join states of the machine"
    AMBIGUOUS = "one state and one event lead to one state"
    UNDECLARED_EVENT = "events are declared, so that a typing error is not an event"
    UNHANDLED_EVENT = "an event that is declared must lead somewhere"
    UNHANDLED_OUTCOME = "a call state must handle every outcome"
    NO_OUTCOME = "a call state hears outcomes, and finer kinds of them, only"
    STRAY_OUTCOME = "only call states hear outcomes, and an event is one outcome at most"
    UNKNOWN_MOVES = "an unknown outcome stays where it is"
    SUCCESS_COMPENSATES = "only an explicit failure may lead towards giving money back"
    NO_WAY_ON = "a state that is not terminal must be left some day"
    CYCLE_OF_AUTOMATIC_STATES = "automatic states must not lead round to themselves: nothing would stop them"
    UNREACHABLE = "every state must be reachable from the initial one"
    NO_END = "every state must lead to a terminal or a waiting state"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a machine, and where."""

    flaw: Flaw
    state: str = ""
    event: str = ""
    detail: str = ""

    def __str__(self) -> str:
        where = ", ".join(f"{what} '{name}'" for what, name in (("state", self.state), ("event", self.event)) if name)
        return ": ".join(part for part in (where, self.detail, self.flaw.value) if part)


class MachineError(BursarError):
    """A mistake in a flow's code: nothing that a user did, nothing that a retry could mend."""


class MachineRefused(MachineError):
    """The machine would be wrong. `problems` has everything that is, not only the first thing."""

    machine: str
    problems: tuple[Problem, ...]
    code = "MACHINE_REFUSED"

    def __str__(self) -> str:
        return f"machine {self.machine!r} is refused:" + "".join(f"\n  - {problem}" for problem in self.problems)


class UnknownState(MachineError):
    """The machine has no such state."""

    machine: str
    state: str
    code = "UNKNOWN_STATE"
    text = "machine {machine!r} has no state {state!r}"


class ImpossibleEvent(MachineError):
    """The event cannot happen in this state."""

    machine: str
    state: str
    event: str
    possible: tuple[str, ...]
    code = "IMPOSSIBLE_EVENT"
    text = "machine {machine!r}: event {event!r} cannot happen in state {state!r}; possible there: {possible}"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """States and arrows, checked. A call state's unknown outcomes stay put without an arrow having to say so."""

    name: str
    initial: str
    states: tuple[State, ...]
    arrows: tuple[Arrow, ...]  # complete once built: the arrows of unknown outcomes are added
    events: tuple[str, ...] = ()  # the flow's own; outcomes need no declaring
    _states: dict[str, State] = field(init=False, repr=False, compare=False)
    _arrows: dict[str, dict[str, Arrow]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arrows = (*self.arrows, *_stays(self.states, self.arrows))
        if problems := tuple(_problems(self, arrows)):
            raise MachineRefused(self.name, problems)
        leaving = {s.name: {a.event: a for a in arrows if a.source == s.name} for s in self.states}
        # The class is frozen: these are set once, here, and never again.
        object.__setattr__(self, "states", tuple(self.states))
        object.__setattr__(self, "arrows", arrows)
        object.__setattr__(self, "events", tuple(self.events))
        object.__setattr__(self, "_states", {state.name: state for state in self.states})
        object.__setattr__(self, "_arrows", leaving)

    def next(self, state: str, event: str) -> State:
        """Where `event` leads from `state`; `ImpossibleEvent` if nowhere."""
        return self._states[self.arrow(state, event).target]

    def arrow(self, state: str, event: str) -> Arrow:
        """The arrow itself, for callers that must see that its `answer` is what the rail really said."""
        try:
            return self._arrows[state][event]
        except KeyError:
            leaving = self._arrows[self.state(state).name]
            raise ImpossibleEvent(self.name, state, str(event), tuple(map(str, leaving))) from None

    def arrows_from(self, state: str) -> tuple[Arrow, ...]:
        """Everything that can happen in `state`, in the order in which it was written."""
        return tuple(self._arrows[self.state(state).name].values())

    def state(self, name: str) -> State:
        """The state of that name, or `UnknownState`."""
        try:
            return self._states[name]
        except KeyError:
            raise UnknownState(self.name, name) from None

    def can_await(self, state: str, event: str) -> bool:
        """Whether a record in `state` waits for `event`, or can come to a state that does."""
        onward: dict[str, list[str]] = {
            name: [a.target for a in leaving.values()] for name, leaving in self._arrows.items()
        }
        return any(
            self.state(name).kind is Kind.WAIT and event in self._arrows[name]
            for name in {state} | _reach(onward, state)
        )

    @cached_property
    def timeout_events(self) -> frozenset[str]:
        """What only the engine sends, when the time has come."""
        return frozenset(state.timeout_event for state in self.states if state.timeout_event)

    def needs_proof(self, path: Sequence[str]) -> bool:
        """Whether a record that passes these states in one move turns to giving money back without a refusal (S44)."""
        for before, after in pairwise(map(self.state, path)):
            if before.kind is Kind.CALL:
                return False  # its answer decides
            if after.compensating and not before.compensating:
                return True
        return False

    def issues(self, state: str) -> bool:
        """Whether something may have been issued for a record that was in this state; one that is gone counts too."""
        found = self._states.get(state)
        return found is None or found.effect not in (None, Effect.CONFIRM, Effect.PREPARE)

    @property
    def terminal(self) -> tuple[State, ...]:
        """States that never move again."""
        return tuple(state for state in self.states if state.kind is Kind.TERMINAL)

    @property
    def calls(self) -> tuple[State, ...]:
        """States that call another system, each with its action."""
        return tuple(state for state in self.states if state.kind is Kind.CALL)

    def mermaid(self) -> str:
        """The picture as Mermaid text, for the docs."""
        return drawing.mermaid(_picture(self))


def _stays(states: tuple[State, ...], arrows: tuple[Arrow, ...]) -> Iterator[Arrow]:
    """The arrows that need not be written: in a call state, an unknown outcome leads to the same state."""
    written = {(arrow.source, arrow.event) for arrow in arrows}
    calls = [state.name for state in states if state.kind is Kind.CALL]
    return (Arrow(name, outcome, name) for name in calls for outcome in UNKNOWNS if (name, outcome) not in written)


def _problems(machine: Machine, arrows: tuple[Arrow, ...]) -> Iterator[Problem]:
    """Everything that is wrong. Questions of paths are asked only of arrows whose ends exist."""
    states = {state.name: state for state in machine.states}
    if len(machine.states) > STATES_MAX or len(arrows) > ARROWS_MAX:
        yield Problem(Flaw.TOO_LARGE, detail=f"{len(machine.states)} states, {len(arrows)} arrows")
        return
    yield from _wrong_names(machine)
    for state in machine.states:
        yield from _wrong_state(state)
    yield from _wrong_arrows(machine, states, arrows)
    sound = [arrow for arrow in arrows if arrow.source in states and arrow.target in states]
    for arrow in sound:
        yield from _wrong_answer(arrow, states[arrow.source], states[arrow.target])
    yield from _wrong_paths(machine, states, sound)


def _wrong_names(machine: Machine) -> Iterator[Problem]:
    """Names are stored in rows, shown to operators and put into pictures: plain, and different at a glance."""
    if not _is_name(machine.name):
        yield Problem(Flaw.BAD_NAME, detail=repr(machine.name))
    for state in machine.states:
        for text in (state.name, state.action, state.awaits, state.timeout_event):
            if text is not None and not _is_name(text):
                yield Problem(Flaw.BAD_NAME, state=state.name, detail=repr(text))
    yield from (Problem(Flaw.BAD_NAME, event=event) for event in machine.events if not _is_name(event))
    looks = Counter(_look(state.name) for state in machine.states)
    yield from (Problem(Flaw.DUPLICATE_NAME, state=s.name) for s in machine.states if looks[_look(s.name)] > 1)
    looks = Counter(_look(event) for event in (*machine.events, *Outcome))
    yield from (Problem(Flaw.DUPLICATE_NAME, event=event) for event in machine.events if looks[_look(event)] > 1)
    codes = Counter(state.code for state in machine.states)
    for state in machine.states:
        if state.code is not None and codes[state.code] > 1:
            yield Problem(Flaw.DUPLICATE_CODE, state=state.name, detail=f"code {state.code}")


def _is_name(text: str) -> bool:
    return len(text) <= NAME_LENGTH_MAX and NAME.fullmatch(text) is not None


def _look(name: str) -> str:
    """What is left of a name for a reader in a hurry."""
    return name.casefold().replace("_", "").replace(" ", "")


def _wrong_state(state: State) -> Iterator[Problem]:
    """What a state can have wrong all by itself."""
    if state.code is not None and not CODE_MIN <= state.code <= CODE_MAX:
        yield Problem(Flaw.BAD_CODE, state=state.name, detail=f"code {state.code}")
    if state.kind is Kind.CALL and not state.action:
        yield Problem(Flaw.NO_ACTION, state=state.name)
    if state.kind is Kind.WAIT and not state.awaits:
        yield Problem(Flaw.NOBODY_AWAITED, state=state.name)
    called = bool(state.action) or state.poll_s is not None or state.effect is not None
    waits = bool(state.awaits or state.timeout_event) or state.timeout_s is not None
    if (called and state.kind is not Kind.CALL) or (waits and state.kind is not Kind.WAIT):
        yield Problem(Flaw.STRAY_FIELD, state=state.name)
    if state.timeout_s is not None and not (state.timeout_event and 0 < state.timeout_s <= TIMEOUT_MAX_S):
        yield Problem(Flaw.BAD_TIMEOUT, state=state.name, detail=f"{state.timeout_s} s")
    if state.poll_s is not None and not 0 < state.poll_s <= CAP_MAX_S:
        yield Problem(Flaw.BAD_POLL, state=state.name, detail=f"{state.poll_s} s")
    if state.effect is not None and state.effect not in EFFECTS:
        yield Problem(Flaw.BAD_EFFECT, state=state.name, detail=str(state.effect))
    elif state.compensating and state.is_held(paused=True, halted=False, called=False):
        yield Problem(Flaw.RETURN_PAUSED, state=state.name)
    if state.kind is Kind.TERMINAL and state.in_flight:
        yield Problem(Flaw.FUNDS_AT_THE_END, state=state.name)


def _wrong_arrows(machine: Machine, states: Mapping[str, State], arrows: tuple[Arrow, ...]) -> Iterator[Problem]:
    """What the arrows have wrong as a set: ends, doubles, events that are missing on either side."""
    for arrow in arrows:
        for end in (arrow.source, arrow.target):
            if end not in states:
                yield Problem(Flaw.UNKNOWN_STATE, state=end, event=arrow.event)
        if arrow.event not in machine.events and arrow.event not in Outcome.__members__:
            yield Problem(Flaw.UNDECLARED_EVENT, state=arrow.source, event=arrow.event)
    for (source, event), count in Counter((arrow.source, str(arrow.event)) for arrow in arrows).items():
        if count > 1:
            yield Problem(Flaw.AMBIGUOUS, state=source, event=event, detail=f"{count} arrows")
    used = {str(arrow.event) for arrow in arrows}
    yield from (Problem(Flaw.UNHANDLED_EVENT, event=event) for event in machine.events if event not in used)
    left = {(arrow.source, str(arrow.event)) for arrow in arrows if arrow.target != arrow.source}
    for state in machine.states:
        if state.timeout_event is not None and (state.name, state.timeout_event) not in left:
            yield Problem(Flaw.BAD_TIMEOUT, state=state.name, event=state.timeout_event)
    answered = {(arrow.source, arrow.answer) for arrow in arrows}
    for state in machine.states:
        for outcome in Outcome:
            if state.kind is Kind.CALL and (state.name, outcome) not in answered:
                yield Problem(Flaw.UNHANDLED_OUTCOME, state=state.name, event=outcome)


def _wrong_answer(arrow: Arrow, source: State, target: State) -> Iterator[Problem]:
    """What one arrow has wrong. The rules by which money is neither lost nor doubled are here."""
    answer = arrow.answer
    if source.kind is Kind.TERMINAL:
        yield Problem(Flaw.LEAVES_THE_END, state=source.name, event=arrow.event)
    if arrow.outcome is not None and arrow.outcome is not answer:
        yield Problem(Flaw.STRAY_OUTCOME, state=source.name, event=arrow.event, detail=f"called {arrow.outcome}")
    if source.kind is not Kind.CALL:
        if answer is not None:
            yield Problem(Flaw.STRAY_OUTCOME, state=source.name, event=arrow.event)
    elif answer is None:
        yield Problem(Flaw.NO_OUTCOME, state=source.name, event=arrow.event)
    elif not answer.is_known and target is not source:
        yield Problem(Flaw.UNKNOWN_MOVES, state=source.name, event=arrow.event, detail=f"to {target.name!r}")
    elif not answer.may_give_back and target.compensating and not source.compensating:
        yield Problem(Flaw.SUCCESS_COMPENSATES, state=source.name, event=arrow.event, detail=f"to {target.name!r}")


def _wrong_paths(machine: Machine, states: Mapping[str, State], arrows: list[Arrow]) -> Iterator[Problem]:
    """What only the whole shows: where records would begin, pile up, turn in circles, or never come."""
    onward: dict[str, list[str]] = {name: [] for name in states}
    passing: dict[str, list[str]] = {name: [] for name in states}  # out of automatic states
    for arrow in arrows:
        if states[arrow.source].kind is Kind.AUTOMATIC:
            passing[arrow.source].append(arrow.target)
        if arrow.target != arrow.source:
            onward[arrow.source].append(arrow.target)
    for arrow in arrows:
        succeeds = arrow.answer is Outcome.SUCCESS and not states[arrow.source].compensating
        if succeeds and any(states[name].compensating for name in _reach(passing, arrow.target)):
            yield Problem(Flaw.SUCCESS_COMPENSATES, state=arrow.source, event=arrow.event, detail="by itself")
    if machine.initial not in states or states[machine.initial].kind is Kind.TERMINAL:
        yield Problem(Flaw.NO_INITIAL, state=machine.initial)
    if not any(state.kind is Kind.TERMINAL for state in states.values()):
        yield Problem(Flaw.NO_TERMINAL)
    reachable = _reach(onward, machine.initial) | {machine.initial}
    ends = {name for name, state in states.items() if state.kind in (Kind.TERMINAL, Kind.WAIT)}
    for name, state in states.items():
        if state.kind is not Kind.TERMINAL and not onward[name]:
            yield Problem(Flaw.NO_WAY_ON, state=name)
        elif name not in ends and not ends & _reach(onward, name):
            yield Problem(Flaw.NO_END, state=name)
        if name in _reach(passing, name):
            yield Problem(Flaw.CYCLE_OF_AUTOMATIC_STATES, state=name)
        if name not in reachable:
            yield Problem(Flaw.UNREACHABLE, state=name)


def _reach(steps: Mapping[str, list[str]], start: str) -> set[str]:
    """Every name that one step or more from `start` leads to."""
    found: set[str] = set()
    ahead = list(steps.get(start, ()))
    while ahead:
        name = ahead.pop()
        if name not in found:
            found.add(name)
            ahead.extend(steps[name])
    return found


def _picture(machine: Machine) -> drawing.Picture:
    """The machine in the words of `drawing`. Arrows between the same two states are one line with several labels."""
    together: dict[tuple[str, str], list[str]] = {}
    for arrow in machine.arrows:
        together.setdefault((arrow.source, arrow.target), []).append(str(arrow.event))
    return drawing.Picture(
        start=machine.initial,
        boxes=tuple(_box(state) for state in machine.states),
        lines=tuple(drawing.Line(*ends, _labels(events)) for ends, events in together.items()),
    )


def _box(state: State) -> drawing.Box:
    """A state as it looks: its kind by colour, what it does in small print, and its code if it has one."""
    look, note = {
        Kind.AUTOMATIC: ("rest", "moves on"),
        Kind.CALL: ("call", f"calls {state.action}"),
        Kind.WAIT: ("wait", f"waits for {state.awaits}"),
        Kind.TERMINAL: ("back" if state.compensating else "end", "end"),
    }[state.kind]
    return drawing.Box(state.name, look, note if state.code is None else f"{state.code} · {note}", state.in_flight)


def _labels(events: list[str]) -> tuple[str, ...]:
    """What is written on a line: the unknown outcomes, which all stay, are one word."""
    named = [event for event in events if event not in UNKNOWNS]
    return tuple(named) if len(named) == len(events) else ("retry", *(f"{event} too" for event in named))
