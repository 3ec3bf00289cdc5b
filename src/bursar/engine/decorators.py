"""A flow in a few lines: each action says, where it is written, in which state it is called and where its answers lead.

    @call("CHARGING", then="SHIPPING", refused="FAILED")
    async def charge(order: FlowRecord[Order]) -> Answer:
        receipt = await card.charge(order.body.cents, idempotency_key=order.key)
        return done({"receipt": receipt})

    orders = flow("orders", Order, charge, ship, refund, succeeded="DONE", failed="FAILED")

This makes a `Machine` and a `Flow` and nothing else, so whatever those can do is reached by their own fields, and a
wrong flow is refused on import. An action speaks in three ways: it returns `done(…)`, it returns `pending(…)`, or it
raises `Refused`. Everything else (another exception, None, a bool, a reply that was not looked at) is not knowing: the
call is made again. So money can be neither moved on nor given back by an action that forgot to say what happened.
"""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import msgspec

from bursar.engine.blocking import BlockingAction
from bursar.engine.flow import Action, Answer, B, Flow, FlowRecord, FlowRefused
from bursar.model.machine import Arrow, Flaw, Kind, Machine, MachineRefused, Problem, State
from bursar.model.outcome import Outcome

R = TypeVar("R", Answer, Awaitable[Answer])
Function = Callable[[FlowRecord[Any]], Answer | Awaitable[Answer]]

SAY = "return bursar.done(…) or bursar.pending(), or raise bursar.Refused(…)"
WORDS = {Outcome.SUCCESS.value: "then", Outcome.EXPLICIT_FAIL.value: "refused"}  # how an arrow is written here


class Body(msgspec.Struct):
    """What a flow keeps of a record: a class with typed fields, stored as JSON. Any `msgspec.Struct` will do."""


class Refused(Exception):
    """It did not happen and never will: a refusal on the other side's written list. Only this gives money back."""

    def __init__(
        self, code: str, message: str = "", *, evidence: Mapping[str, Any] | None = None, event: str = ""
    ) -> None:
        super().__init__(f"{code}: {message}" if message else code)
        self.answer = Answer(
            outcome=Outcome.EXPLICIT_FAIL, code=code, message=message, evidence=dict(evidence or {}), event=event
        )


def done(evidence: Mapping[str, Any] | None = None, *, body: msgspec.Struct | None = None, event: str = "") -> Answer:
    """It happened, durably. `evidence` is kept in the history; `body` is the record's body from now on."""
    return Answer(outcome=Outcome.SUCCESS, evidence=dict(evidence or {}), body=body, event=event)


def pending(
    evidence: Mapping[str, Any] | None = None, *, after_s: float | None = None, unchanged: bool = False
) -> Answer:
    """The other side is still working on it: call again after `after_s`, or the state's `poll_s`, or the back-off.

    `unchanged`: a poll that says nothing new. It leaves no row of history, and only alarms that name its state ring.
    """
    return Answer(outcome=Outcome.PENDING, evidence=dict(evidence or {}), unchanged=unchanged, retry_after_s=after_s)


@dataclass(frozen=True, eq=False)
class StateWithArrows:
    """A state in which nothing is called, and the arrows out of it."""

    state: State
    arrows: tuple[Arrow, ...]


@dataclass(frozen=True, eq=False)
class CallState(Generic[B, R]):
    """A decorated action: its state, the arrows out of it, and the function, which can still be called as ever."""

    state: State
    arrows: tuple[Arrow, ...]
    function: Callable[[FlowRecord[B]], R]
    rail: str | Callable[[FlowRecord[B]], str]
    cancel: Function | None
    query: Function | None

    def __call__(self, item: FlowRecord[B]) -> R:
        return self.function(item)


def call(
    state: str,
    *,
    then: str,
    refused: str,
    in_flight: bool = False,
    compensating: bool = False,
    poll_s: float | None = None,
    rail: str | Callable[[FlowRecord[Any]], str] = "",
    cancel: Function | None = None,
    query: Function | None = None,
    **more: Any,
) -> Callable[[Callable[[FlowRecord[B]], R]], CallState[B, R]]:
    """Decorate the action of a call state.

    `then` and `refused` name the states after a success and after an explicit refusal; naming the state itself, it
    stays and is called again. `in_flight`: money has left its owner and not arrived. `compensating`: money is on its
    way back, so that no success leads here. `rail` names what is called, to be paused. `cancel` and `query` are
    used when operators force the call's end. `more` are further fields of `State`.
    """
    fields = {"in_flight": in_flight, "compensating": compensating, "poll_s": poll_s, **more}
    arrows = (Arrow(state, Outcome.SUCCESS, then), Arrow(state, Outcome.EXPLICIT_FAIL, refused))

    def decorate(function: Callable[[FlowRecord[B]], R]) -> CallState[B, R]:
        action = (getattr(function, "__name__", "") or type(function).__name__).strip("_")
        return CallState(State(state, Kind.CALL, action=action, **fields), arrows, function, rail, cancel, query)

    return decorate


def wait(state: str, *, awaits: str, on: Mapping[str, str], **more: Any) -> StateWithArrows:
    """A state that is left when `awaits` (an approver, another record) sends one of the events `on`: event → state."""
    return StateWithArrows(State(state, Kind.WAIT, awaits=awaits, **more), _leads(state, on))


def automatic(state: str, *, on: Mapping[str, str], **more: Any) -> StateWithArrows:
    """A state that is left at once: by its only event, or by the one that the flow's `choose` names."""
    return StateWithArrows(State(state, Kind.AUTOMATIC, **more), _leads(state, on))


def _leads(state: str, on: Mapping[str, str]) -> tuple[Arrow, ...]:
    return tuple(Arrow(state, event, target) for event, target in on.items())


def flow(
    name: str,
    body: type[B],
    *states: CallState[B, Any] | StateWithArrows | State,
    succeeded: str | Iterable[str],
    failed: str | Iterable[str],
    prefix: str = "",
    arrows: tuple[Arrow, ...] = (),
    events: tuple[str, ...] = (),
    **more: Any,
) -> Flow[B]:
    """Build a flow; a record starts in the first of the states.

    `succeeded` and `failed` name its ends; to a failed one no success leads, unless it gave money back. `prefix` begins
    its ids; unless given, it is the flow's name. `arrows` and `events` are further ones of the machine, `more` are
    further fields of `Flow`: `book`, `retry`, `alarms`, `second_person`, …
    """
    calls = [part for part in states if isinstance(part, CallState)]
    for part in calls:
        for function in (part.function, part.cancel, part.query):
            if function is not None:
                _check(name, function)
    ends = [State(end, Kind.TERMINAL) for end in _names(succeeded)]
    ends += [State(end, Kind.TERMINAL, compensating=True) for end in _names(failed)]
    leading = [arrow for part in states if not isinstance(part, State) for arrow in part.arrows]
    places = [part if isinstance(part, State) else part.state for part in states]
    own = [arrow.event for part in states if isinstance(part, StateWithArrows) for arrow in part.arrows]
    try:
        machine = Machine(
            name=name,
            initial=places[0].name if places else "",
            states=(*places, *ends),
            arrows=(*leading, *arrows),
            events=tuple(dict.fromkeys((*own, *events))),
        )
    except MachineRefused as refused:
        raise MachineRefused(name, tuple(_as_written(problem, calls) for problem in refused.problems)) from None
    actions: dict[str, Function] = {}
    for part in calls:
        action = part.state.action or ""
        if actions.setdefault(action, part.function) is not part.function:
            raise FlowRefused(name, f"two actions are called {action}(); rename one")
    return Flow(
        machine=machine,
        body=body,
        actions={action: _action(function, body) for action, function in actions.items()},
        cancels={part.state.action or "": _action(part.cancel, body) for part in calls if part.cancel is not None},
        queries={part.state.action or "": _action(part.query, body) for part in calls if part.query is not None},
        rails={part.state.action or "": part.rail for part in calls if part.rail},
        prefix=prefix or re.sub("[ _]", "-", name.lower()) + "-",
        **more,
    )


def _names(ends: str | Iterable[str]) -> list[str]:
    return [ends] if isinstance(ends, str) else list(ends)


def _as_written(problem: Problem, calls: list[CallState[Any, Any]]) -> Problem:
    """A problem of the machine in the words of the decorators, and with the function that it is about."""
    action = next((part.state.action for part in calls if part.state.name == problem.state), None)
    details = [f"@call of {action}()" if action else "", problem.detail]
    if problem.flaw is Flaw.UNKNOWN_STATE:
        named_by = [part.state.action for part in calls if problem.state in [arrow.target for arrow in part.arrows]]
        details += [f"named by @call of {action}()" for action in named_by]
        details.append("declare it by a decorated action or in succeeded= or failed=")
    event = WORDS.get(problem.event, problem.event)
    return replace(problem, event=event, detail=", ".join(part for part in details if part))


def _check(name: str, function: Function) -> None:
    """Refuse what can never give an answer: a function that says that it returns something else, or takes no record."""
    action = _named(function)
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise FlowRefused(name, f"{action} must take one argument, the record") from None
    try:
        returned = typing.get_type_hints(function).get("return", Any)
    except (NameError, TypeError, AttributeError):  # names that only a type checker can resolve
        returned = getattr(function, "__annotations__", {}).get("return", Any)
    if returned in (None, "None") or types.NoneType in (returned, *typing.get_args(returned)):
        raise FlowRefused(name, f"{action} returns None, and an action that returns nothing says nothing; {SAY}")
    kind = typing.get_origin(returned) or returned
    if isinstance(kind, type) and kind is not Any and not issubclass(kind, Answer | Awaitable | types.UnionType):
        raise FlowRefused(name, f"{action} returns {kind.__name__}, which is no answer; {SAY}")


def _action(function: Function, body: type[msgspec.Struct]) -> Action:
    """The function as the engine calls it: whatever it does becomes an answer, or an exception, which is none."""
    if not inspect.iscoroutinefunction(function) and not inspect.iscoroutinefunction(type(function).__call__):

        def block(item: FlowRecord[Any]) -> Answer:
            try:
                return _said(function, body, function(item))
            except Refused as refused:
                return refused.answer

        return BlockingAction(block)

    async def act(item: FlowRecord[Any]) -> Answer:
        try:
            said = function(item)
            return _said(function, body, await said if inspect.isawaitable(said) else said)
        except Refused as refused:
            return refused.answer

    return act


def _said(function: Function, body: type[msgspec.Struct], answer: object) -> Answer:
    if not isinstance(answer, Answer):
        raise TypeError(f"{_named(function)} returned {answer!r:.100}, which says nothing about what happened; {SAY}")
    if answer.body is not None and not isinstance(answer.body, body):  # it could not be read again
        raise TypeError(f"{_named(function)} returned a {type(answer.body).__name__} for a body, not {body.__name__}")
    return answer


def _named(function: Function) -> str:
    return f"{getattr(function, '__qualname__', '') or type(function).__qualname__}()"
