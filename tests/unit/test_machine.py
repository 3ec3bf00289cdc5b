"""Machines, as specifications: what a state machine promises, what it refuses to be, and how it draws itself.

The machine of transfers is specification 000 §2.1 to the letter; `SMALL` is the least that has every kind of arrow, and
each refusal is one change to it.
"""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.flows.transfers import MACHINE as TRANSFERS
from bursar.model.machine import (
    ARROWS_MAX,
    NAME_LENGTH_MAX,
    STATES_MAX,
    Arrow,
    Effect,
    Flaw,
    ImpossibleEvent,
    Kind,
    Machine,
    MachineRefused,
    Problem,
    State,
    UnknownState,
)
from bursar.model.outcome import UNKNOWNS, Outcome

REST, CALL, WAIT, TERMINAL = Kind.AUTOMATIC, Kind.CALL, Kind.WAIT, Kind.TERMINAL
SUCCESS, EXPLICIT_FAIL, TIMEOUT = Outcome.SUCCESS, Outcome.EXPLICIT_FAIL, Outcome.TIMEOUT

SMALL = (
    State("BEGUN", REST),
    State("ASKING", CALL, action="ask"),
    State("DONE", TERMINAL),
    State("RETURNED", TERMINAL, compensating=True),
)
SMALL_ARROWS = (
    Arrow("BEGUN", "GO", "ASKING"),
    Arrow("ASKING", SUCCESS, "DONE"),
    Arrow("ASKING", EXPLICIT_FAIL, "RETURNED"),
)


def build(**change: Any) -> Machine:
    small = {"name": "small", "initial": "BEGUN", "states": SMALL, "arrows": SMALL_ARROWS, "events": ("GO",)}
    return Machine(**{**small, **change})


def refusal(**change: Any) -> list[str]:
    """What is wrong with the machine, as "FLAW STATE EVENT"."""
    with pytest.raises(MachineRefused) as error:
        build(**change)
    return [" ".join(filter(None, (x.flaw.name, x.state, x.event))) for x in error.value.problems]


def put(name: str, **fields: Any) -> dict[str, Any]:
    """Other fields in one of the states."""
    return {"states": tuple(replace(state, **fields) if state.name == name else state for state in SMALL)}


def add(*more: State | Arrow) -> dict[str, Any]:
    """States and arrows besides; the arrows' own event is MORE."""
    states = tuple(item for item in more if isinstance(item, State))
    arrows = tuple(item for item in more if isinstance(item, Arrow))
    return {"states": SMALL + states, "arrows": SMALL_ARROWS + arrows, "events": ("GO", "MORE")}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines of every shape that is allowed: a chain, so that all is reachable, and arrows across it at random."""
    count = draw(st.integers(2, 9))
    names = [f"STATE_{'LONG_' * draw(st.integers(0, 3))}{number}" for number in range(count)]
    states, arrows = [], []
    for number, name in enumerate(names[:-1]):
        kind = draw(st.sampled_from([REST, CALL, WAIT]))
        call, wait = "act" if kind is CALL else None, "person" if kind is WAIT else None
        states.append(State(name, kind, action=call, awaits=wait, in_flight=draw(st.booleans())))
        arrows.append(Arrow(name, SUCCESS if kind is CALL else "GO", names[number + 1]))
        # A rest state may only lead on; elsewhere a way back is fine.
        targets = names[number + 1 :] if kind is REST else names
        if kind is CALL or draw(st.booleans()):
            arrows.append(Arrow(name, EXPLICIT_FAIL if kind is CALL else "TURN", draw(st.sampled_from(targets))))
    events = tuple(sorted({arrow.event for arrow in arrows} - {*Outcome}))
    states.append(State(names[-1], TERMINAL))
    return build(states=tuple(states), arrows=tuple(arrows), events=events, initial=names[0])


# -------------------------------------------------------------------------------------------------------- what it does


def test_only_a_definite_answer_moves_a_record_and_only_a_definite_no_gives_back() -> None:
    """Given every outcome, then two are known, and one of those allows giving money back (000 §2.3)."""
    assert [outcome for outcome in Outcome if outcome.is_known] == [SUCCESS, EXPLICIT_FAIL]
    assert [outcome for outcome in Outcome if outcome.may_give_back] == [EXPLICIT_FAIL]
    assert UNKNOWNS == (TIMEOUT, Outcome.PENDING, Outcome.NETWORK_ERROR, Outcome.UNKNOWN)


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (("SOURCE_CALL", SUCCESS, "TARGET_CALL", SUCCESS), "COMMITTED"),
        (("SOURCE_CALL", EXPLICIT_FAIL), "FAILED"),
        (("SOURCE_CALL", SUCCESS, "TARGET_CALL", EXPLICIT_FAIL, SUCCESS), "ROLLED_BACK"),
        (("SOURCE_CALL", SUCCESS, "TARGET_CALL", EXPLICIT_FAIL, EXPLICIT_FAIL), "COMPENSATING"),
        (("SOURCE_CALL", *UNKNOWNS, SUCCESS, "TARGET_CALL", *UNKNOWNS), "TARGET_PENDING"),
    ],
)
def test_a_transfer_goes_where_specification_000_says(events: tuple[str, ...], end: str) -> None:
    """Given a new transfer, when these events happen, then it is in this state."""
    assert reduce(lambda state, event: TRANSFERS.next(state, event).name, events, "INIT") == end


def test_an_event_that_cannot_happen_is_refused_with_those_that_can() -> None:
    """Given a state, when an event of another state happens, then the error says what was possible."""
    with pytest.raises(ImpossibleEvent) as error:
        TRANSFERS.next("SOURCE_DONE", SUCCESS)
    assert (error.value.state, error.value.event, error.value.possible) == ("SOURCE_DONE", "SUCCESS", ("TARGET_CALL",))
    assert "'SOURCE_DONE'" in str(error.value) and "'SUCCESS'" in str(error.value)


def test_a_state_that_does_not_exist_is_refused() -> None:
    """Given a name of no state, when it is looked up, then the error carries it."""
    with pytest.raises(UnknownState, match="'LOST'"):
        TRANSFERS.next("LOST", SUCCESS)


def test_states_are_found_by_name_and_by_kind() -> None:
    assert all(TRANSFERS.state(state.name) is state for state in TRANSFERS.states)
    assert TRANSFERS.state("INIT").code == 0
    assert [state.name for state in TRANSFERS.terminal] == ["COMMITTED", "FAILED", "ROLLED_BACK"]
    assert [state.action for state in TRANSFERS.calls] == ["withdraw", "deposit", "refund"]
    assert [str(arrow.event) for arrow in TRANSFERS.arrows_from("INIT")] == ["SOURCE_CALL"]


def test_states_are_never_ordered() -> None:
    """Given two states with codes, when code asks which is further, then there is no answer (T4)."""
    with pytest.raises(TypeError):
        sorted(TRANSFERS.states)  # type: ignore[type-var]


def test_a_machine_never_changes() -> None:
    """Given a machine, when code adds a state or an arrow, then it is refused; a changed copy is checked again."""
    with pytest.raises(FrozenInstanceError):
        TRANSFERS.arrows = ()  # type: ignore[misc]
    assert replace(TRANSFERS, name="copy").arrows == TRANSFERS.arrows
    with pytest.raises(MachineRefused):
        replace(TRANSFERS, arrows=())


def test_a_finer_event_says_which_outcome_it_is_a_kind_of() -> None:
    """Given a call that can be refused in two ways, then each has its event, and the arrow knows the outcome."""
    machine = build(**add(Arrow("ASKING", "MORE", "BEGUN", EXPLICIT_FAIL)))
    assert machine.next("ASKING", "MORE").name == "BEGUN"
    assert machine.arrow("ASKING", "MORE").answer is EXPLICIT_FAIL
    assert machine.arrow("ASKING", TIMEOUT).answer is TIMEOUT


def test_a_record_can_await_an_event_where_it_is_and_where_it_can_come_to() -> None:
    """Given two approvals with a call between them, then each event can be awaited until its last state is left."""
    machine = build(
        initial="FIRST",
        events=("YES", "LAST"),
        states=(
            State("FIRST", WAIT, awaits="clerk", timeout_event="LAST", timeout_s=3650 * 86_400.0),
            State("CHECKING", CALL, action="check"),
            State("SECOND", WAIT, awaits="boss"),
            State("DONE", TERMINAL),
        ),
        arrows=(
            Arrow("FIRST", "YES", "CHECKING"),
            Arrow("FIRST", "LAST", "DONE"),
            Arrow("CHECKING", SUCCESS, "SECOND"),
            Arrow("CHECKING", EXPLICIT_FAIL, "DONE"),
            Arrow("SECOND", "YES", "DONE"),
        ),
    )
    awaited = {e: [s.name for s in machine.states if machine.can_await(s.name, e)] for e in ("YES", "LAST", SUCCESS)}
    assert awaited == {"YES": ["FIRST", "CHECKING", "SECOND"], "LAST": ["FIRST"], SUCCESS: []}
    assert machine.timeout_events == {"LAST"}


@given(machines(), st.data())
def test_next_leads_to_a_state_or_refuses_and_no_unknown_ever_moves(machine: Machine, data: st.DataObject) -> None:
    """Given any machine, when anything happens in any state, then it moves by an arrow or refuses; unknowns stay."""
    for state in machine.states:
        event = data.draw(st.sampled_from([*Outcome, *machine.events, "NEVER_HEARD_OF"]))
        possible = {arrow.event: arrow.target for arrow in machine.arrows if arrow.source == state.name}
        if event in possible:
            assert machine.next(state.name, event) is machine.state(possible[event])
        else:
            with pytest.raises(ImpossibleEvent):
                machine.next(state.name, event)
        assert (state.kind is TERMINAL) == (not possible)
        for unknown in UNKNOWNS:
            assert state.kind is not CALL or machine.next(state.name, unknown) is state


@given(
    st.sampled_from([*UNKNOWNS, "MORE"]), st.sampled_from([None, *Outcome]), st.sampled_from([s.name for s in SMALL])
)
def test_no_machine_can_be_built_in_which_an_unknown_moves(event: str, kind_of: Outcome | None, target: str) -> None:
    """Given any further arrow out of a call, when the machine accepts it, then what it answers to stays or is known."""
    change = add(Arrow("ASKING", event, target, kind_of))
    try:
        machine = build(**change | {"events": ("GO", "MORE")[: 1 + (event == "MORE")]})
    except MachineRefused:
        return
    assert target == "ASKING" or (event == "MORE" and kind_of in (SUCCESS, EXPLICIT_FAIL))
    assert all(machine.next("ASKING", unknown).name == "ASKING" for unknown in UNKNOWNS)


# ----------------------------------------------------------------------------------------------------- what it refuses


HELD, AGAIN = State("HELD", WAIT, awaits="operator"), State("AGAIN", REST)
LATE = replace(HELD, timeout_event="MORE")
OUT = Arrow("HELD", "MORE", "DONE")
TO_HELD = {"arrows": (*SMALL_ARROWS, Arrow("BEGUN", "MORE", "HELD"), Arrow("HELD", "GO", "DONE"))}
PING, PONG = State("PING", CALL, action="ping"), State("PONG", CALL, action="pong")
CIRCLE = [Arrow(a, outcome, b) for a, b in (("PING", "PONG"), ("PONG", "PING")) for outcome in (SUCCESS, EXPLICIT_FAIL)]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("BAD_NAME", {"name": "a/b"}),
    *((f"BAD_NAME {name}", add(State(name, TERMINAL))) for name in ("9", "A__B", " A", "A-B", "A\n", "É", "A" * 65)),
    ("BAD_NAME ASKING", put("ASKING", action="a.b")),
    ("BAD_NAME G:O", {"events": ("GO", "G:O")}),
    ("DUPLICATE_NAME DONE", add(State("do ne", TERMINAL))),
    ("DUPLICATE_NAME go", {"events": ("GO", "go")}),
    ("DUPLICATE_NAME Success", {"events": ("GO", "Success")}),
    ("DUPLICATE_CODE DONE", {"states": tuple(replace(state, code=-5) for state in SMALL)}),
    ("BAD_CODE DONE", put("DONE", code=2**15)),
    ("BAD_POLL ASKING", put("ASKING", poll_s=0.0)),
    ("BAD_POLL ASKING", put("ASKING", poll_s=30 * 86_400.0 + 1)),
    ("STRAY_FIELD DONE", put("DONE", poll_s=5.0)),
    ("BAD_TIMEOUT HELD MORE", add(LATE) | TO_HELD),
    ("BAD_TIMEOUT HELD MORE", add(LATE, Arrow("BEGUN", "MORE", "HELD"), Arrow("HELD", "MORE", "HELD"))),
    ("BAD_TIMEOUT HELD", add(replace(LATE, timeout_s=0.0), OUT)),
    ("BAD_TIMEOUT HELD", add(replace(LATE, timeout_s=3650 * 86_400.0 + 1), OUT)),
    ("BAD_TIMEOUT HELD", add(replace(HELD, timeout_s=5.0), OUT)),
    ("BAD_NAME HELD", add(replace(LATE, timeout_event="a.b"), OUT)),
    ("STRAY_FIELD ASKING", put("ASKING", timeout_event="GO")),
    ("STRAY_FIELD BEGUN", put("BEGUN", timeout_s=5.0)),
    ("STRAY_FIELD DONE", put("DONE", effect=Effect.CONFIRM)),
    ("BAD_EFFECT ASKING", put("ASKING", effect=Effect.SEND | Effect.CONFIRM)),
    ("RETURN_PAUSED ASKING", put("ASKING", effect=Effect.SEND, compensating=True)),
    ("TOO_LARGE", {"arrows": SMALL_ARROWS * 134}),
    ("NO_INITIAL ELSEWHERE", {"initial": "ELSEWHERE"}),
    ("NO_INITIAL DONE", {"initial": "DONE"}),
    ("NO_TERMINAL", {"states": (), "arrows": ()}),
    ("NO_TERMINAL", {"states": (HELD, replace(HELD, name="ALSO")), "arrows": (Arrow("HELD", "GO", "ALSO"),)}),
    ("NO_ACTION ASKING", put("ASKING", action=None)),
    ("NOBODY_AWAITED BEGUN", put("BEGUN", kind=WAIT)),
    ("STRAY_FIELD BEGUN", put("BEGUN", action="ask")),
    ("STRAY_FIELD ASKING", put("ASKING", awaits="approver")),
    ("FUNDS_AT_THE_END DONE", put("DONE", in_flight=True)),
    ("LEAVES_THE_END DONE MORE", add(Arrow("DONE", "MORE", "RETURNED"))),
    ("UNKNOWN_STATE NOWHERE MORE", add(Arrow("BEGUN", "MORE", "NOWHERE"))),
    ("UNKNOWN_STATE NOWHERE MORE", add(Arrow("NOWHERE", "MORE", "DONE"))),
    ("AMBIGUOUS BEGUN GO", add(Arrow("BEGUN", "GO", "DONE"))),
    ("UNDECLARED_EVENT BEGUN MOER", add(Arrow("BEGUN", "MOER", "DONE"))),
    ("UNHANDLED_EVENT CANCELLED", {"events": ("GO", "CANCELLED")}),
    ("UNHANDLED_OUTCOME ASKING SUCCESS", {"arrows": (SMALL_ARROWS[0], SMALL_ARROWS[2])}),
    ("UNHANDLED_OUTCOME ASKING EXPLICIT_FAIL", {"arrows": SMALL_ARROWS[:2]}),
    ("NO_OUTCOME ASKING MORE", add(Arrow("ASKING", "MORE", "DONE"))),
    ("STRAY_OUTCOME BEGUN TIMEOUT", add(Arrow("BEGUN", TIMEOUT, "DONE"))),
    ("STRAY_OUTCOME BEGUN MORE", add(Arrow("BEGUN", "MORE", "DONE", SUCCESS))),
    ("STRAY_OUTCOME ASKING TIMEOUT", add(Arrow("ASKING", TIMEOUT, "ASKING", SUCCESS))),
    ("UNKNOWN_MOVES ASKING TIMEOUT", add(Arrow("ASKING", TIMEOUT, "RETURNED"))),
    ("UNKNOWN_MOVES ASKING TIMEOUT", add(Arrow("ASKING", TIMEOUT, "RETURNED", EXPLICIT_FAIL))),
    ("UNKNOWN_MOVES ASKING MORE", add(Arrow("ASKING", "MORE", "DONE", Outcome.PENDING))),
    ("SUCCESS_COMPENSATES ASKING MORE", add(Arrow("ASKING", "MORE", "RETURNED", SUCCESS))),
    (
        "SUCCESS_COMPENSATES ASKING MORE",
        add(AGAIN, Arrow("ASKING", "MORE", "AGAIN", SUCCESS), Arrow("AGAIN", "GO", "RETURNED")),
    ),
    ("NO_WAY_ON HELD", add(HELD, Arrow("BEGUN", "MORE", "HELD"), Arrow("HELD", "MORE", "HELD"))),
    ("CYCLE_OF_AUTOMATIC_STATES AGAIN", add(AGAIN, Arrow("BEGUN", "MORE", "AGAIN"), Arrow("AGAIN", "MORE", "BEGUN"))),
    ("CYCLE_OF_AUTOMATIC_STATES AGAIN", add(AGAIN, Arrow("BEGUN", "MORE", "AGAIN"), Arrow("AGAIN", "MORE", "AGAIN"))),
    ("UNREACHABLE HELD", add(HELD, Arrow("HELD", "MORE", "DONE"))),
    ("NO_END PING", add(PING, PONG, Arrow("BEGUN", "MORE", "PING"), *CIRCLE)),
]


@pytest.mark.parametrize(("problem", "change"), REFUSED, ids=[problem for problem, _ in REFUSED])
def test_refused(problem: str, change: dict[str, Any]) -> None:
    """Given a machine that is wrong in this way, when it is built, then that is said, with the state and the event."""
    assert problem in refusal(**change)


def test_every_flaw_has_its_refusal() -> None:
    """Given the list of flaws, then each of them is shown above."""
    assert {problem.split()[0] for problem, _ in REFUSED} == {flaw.name for flaw in Flaw}


def test_a_person_in_the_circle_makes_it_an_end() -> None:
    """Given a call that leads nowhere but to a person who can only retry it, then a person decides: allowed."""
    person = State("PONG", WAIT, awaits="operator")
    build(**add(PING, person, Arrow("BEGUN", "MORE", "PING"), *CIRCLE[:2], Arrow("PONG", "MORE", "PING")))


def test_a_kind_that_is_only_text_is_a_kind_all_the_same() -> None:
    """Given "call" instead of Kind.CALL, then the rules of call states hold; given nonsense, it is refused at once."""
    assert State("A", "call").kind is CALL  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="perhaps"):
        State("A", "perhaps")  # type: ignore[arg-type]


def test_a_refusal_lists_everything_that_is_wrong() -> None:
    """Given a machine with several flaws, when it is built, then one error has them all, each with its place."""
    assert refusal(**put("DONE", in_flight=True), arrows=(*SMALL_ARROWS[1:], Arrow("ASKING", TIMEOUT, "DONE"))) == [
        *("FUNDS_AT_THE_END DONE", "UNHANDLED_EVENT GO", "UNKNOWN_MOVES ASKING TIMEOUT", "NO_WAY_ON BEGUN"),
        *("UNREACHABLE ASKING", "UNREACHABLE DONE", "UNREACHABLE RETURNED"),
    ]
    with pytest.raises(MachineRefused, match="state 'ASKING', event 'TIMEOUT': to 'DONE': an unknown outcome stays"):
        build(**add(Arrow("ASKING", TIMEOUT, "DONE")))


def chain(count: int) -> dict[str, Any]:
    """So many states, one after the other."""
    names = [f"S{number}" for number in range(count)]
    states = [State(name, WAIT, awaits="person") for name in names[:-1]] + [State(names[-1], TERMINAL)]
    arrows = tuple(Arrow(one, "GO", other) for one, other in pairwise(names))
    return {"states": tuple(states), "arrows": arrows, "initial": "S0"}


def test_a_machine_has_at_most_forty_states() -> None:
    assert len(build(**chain(STATES_MAX)).states) == STATES_MAX == 40
    assert refusal(**chain(STATES_MAX + 1)) == ["TOO_LARGE"]


def test_a_machine_has_at_most_four_hundred_arrows() -> None:
    """Those of unknown outcomes included: 2 that are written, 4 that are not, and 394 besides."""
    events = tuple(f"E{number}" for number in range(ARROWS_MAX - 6))
    more = tuple(Arrow("ASKING", event, "DONE", SUCCESS) for event in events)
    small = {"states": SMALL[1:], "initial": "ASKING"}

    full = build(**small, arrows=SMALL_ARROWS[1:] + more, events=events)
    assert len(full.arrows) == ARROWS_MAX == 400
    extra = Arrow("ASKING", "MORE", "DONE", SUCCESS)
    assert refusal(**small, arrows=(*SMALL_ARROWS[1:], *more, extra), events=(*events, "MORE")) == ["TOO_LARGE"]


@pytest.mark.parametrize("code", [-(2**15), -1, 0, 2**15 - 1])
def test_a_code_is_any_integer_of_sixteen_bits(code: int) -> None:
    assert build(**put("DONE", code=code)).state("DONE").code == code


@pytest.mark.parametrize("poll_s", [0.001, 30 * 86_400.0])
def test_a_poll_within_its_bounds_is_taken(poll_s: float) -> None:
    assert build(**put("ASKING", poll_s=poll_s)).state("ASKING").poll_s == poll_s


@pytest.mark.parametrize("code", [-(2**15) - 1, 2**15])
def test_a_code_of_more_than_sixteen_bits_is_refused(code: int) -> None:
    assert refusal(**put("DONE", code=code)) == ["BAD_CODE DONE"]


def test_a_name_has_at_most_sixty_four_characters() -> None:
    assert build(name="a" * NAME_LENGTH_MAX).name == "a" * 64
    assert refusal(name="a" * 65) == ["BAD_NAME"]


def test_names_that_read_the_same_are_both_named() -> None:
    states = (*SMALL, State("do_ne", TERMINAL))
    arrows = (*SMALL_ARROWS, Arrow("BEGUN", "MORE", "do_ne"))
    assert refusal(states=states, arrows=arrows, events=("GO", "MORE")) == [
        "DUPLICATE_NAME DONE",
        "DUPLICATE_NAME do_ne",
    ]


def test_codes_that_are_the_same_are_both_named_and_states_without_a_code_are_not() -> None:
    states = tuple(replace(state, code=7) if state.kind is TERMINAL else state for state in SMALL)
    assert refusal(states=states) == ["DUPLICATE_CODE DONE", "DUPLICATE_CODE RETURNED"]


def test_the_party_that_is_awaited_has_a_name_too() -> None:
    assert refusal(**put("BEGUN", kind=WAIT, awaits="a.b")) == ["BAD_NAME BEGUN"]


def test_a_refusal_that_gives_money_back_may_lead_to_a_success_that_does() -> None:
    """Given a call that returns the money, when it succeeds, then the money may be back: that is its point."""
    back = State("BACK", CALL, action="refund", compensating=True)
    machine = build(
        states=(*SMALL, back),
        arrows=(
            *SMALL_ARROWS[:2],
            Arrow("ASKING", EXPLICIT_FAIL, "BACK"),
            Arrow("BACK", SUCCESS, "RETURNED"),
            Arrow("BACK", EXPLICIT_FAIL, "BACK"),
        ),
    )
    assert machine.next("BACK", SUCCESS).name == "RETURNED"


def test_a_problem_says_where_it_is_as_far_as_it_is_anywhere() -> None:
    assert str(Problem(Flaw.NO_TERMINAL)) == Flaw.NO_TERMINAL.value
    assert str(Problem(Flaw.NO_WAY_ON, state="A")) == f"state 'A': {Flaw.NO_WAY_ON.value}"
    assert str(Problem(Flaw.UNHANDLED_EVENT, event="GO")) == f"event 'GO': {Flaw.UNHANDLED_EVENT.value}"


# ------------------------------------------------------------------------------------------------- what a call does

PREPARE, SEND, SIGN, CONFIRM, RETURN = Effect


@pytest.mark.parametrize(
    ("effect", "first_paused", "again_paused", "halted"),
    [
        (PREPARE, True, True, False),
        (SEND, True, False, False),
        (SIGN, True, False, True),
        (SIGN | SEND, True, False, True),
        (CONFIRM, False, False, False),
        (RETURN, False, False, False),
        (SIGN | RETURN, False, False, True),
    ],
)
def test_switches_follow_from_the_effect(effect: Effect, first_paused: bool, again_paused: bool, halted: bool) -> None:
    """A pause stops the first send or signature, never confirmation or return (W15); a halt stops signatures (W21)."""
    state = build(**put("ASKING", effect=effect)).state("ASKING")
    assert state.signs is halted
    assert state.is_held(paused=True, halted=False, called=False) is first_paused
    assert state.is_held(paused=True, halted=False, called=True) is again_paused
    for called in (False, True):
        assert state.is_held(paused=False, halted=True, called=called) is halted
    assert state.is_held(paused=True, halted=True, called=True) is (again_paused or halted)
    assert state.is_held(paused=True, halted=True, called=False) is (first_paused or halted)
    assert not any(state.is_held(paused=False, halted=False, called=called) for called in (False, True))


@pytest.mark.parametrize(
    "effect",
    [
        PREPARE | SEND,
        PREPARE | SIGN,
        SEND | RETURN,
        SEND | CONFIRM,
        SIGN | CONFIRM,
        CONFIRM | RETURN,
        SIGN | SEND | RETURN,
    ],
)
def test_a_call_has_one_effect_beside_signing(effect: Effect) -> None:
    assert refusal(**put("ASKING", effect=effect)) == ["BAD_EFFECT ASKING"]


def test_a_call_that_says_nothing_sends_or_returns() -> None:
    """The safe side: what gives money back is never paused, anything else is."""
    assert State("A", CALL, action="a").effect is SEND
    assert State("A", CALL, action="a", compensating=True).effect is RETURN
    assert [State("A", kind).effect for kind in (REST, WAIT, TERMINAL)] == [None] * 3
    assert not State("A", REST).is_held(paused=True, halted=True, called=False)
    assert not State("A", WAIT).signs


@pytest.mark.parametrize("effect", [PREPARE, SEND, SIGN, SIGN | SEND])
def test_a_pause_can_not_stop_what_gives_money_back(effect: Effect) -> None:
    assert refusal(**put("ASKING", effect=effect, compensating=True))[:1] == ["RETURN_PAUSED ASKING"]
    assert "RETURN_PAUSED RETURNED" not in refusal(**put("ASKING", effect=effect, compensating=True))


# ---------------------------------------------------------------------------- giving money back out of a waiting state

BACK = State("BACK", CALL, action="refund", compensating=True)
WAITS = (
    Arrow("ASKING", SUCCESS, "HELD"),
    Arrow("ASKING", EXPLICIT_FAIL, "RETURNED"),
    Arrow("HELD", "GO", "AGAIN"),
    Arrow("HELD", "MORE", "RETURNED"),
    Arrow("AGAIN", "GO", "DONE"),
    Arrow("AGAIN", "MORE", "BACK"),
    Arrow("BACK", SUCCESS, "RETURNED"),
    Arrow("BACK", EXPLICIT_FAIL, "BACK"),
)


@pytest.mark.parametrize(
    ("path", "needed"),
    [
        (["HELD", "RETURNED"], True),
        (["HELD", "AGAIN", "BACK"], True),
        (["AGAIN", "BACK"], True),
        (["HELD", "AGAIN", "DONE"], False),
        (["HELD", "AGAIN", "ASKING", "RETURNED"], False),
        (["ASKING", "RETURNED"], False),
        (["ASKING", "HELD"], False),
        (["BACK", "RETURNED"], False),
        (["WAITS_BACK", "RETURNED"], False),
        (["HELD"], False),
    ],
)
def test_a_waiting_record_turns_back_with_proof_only(path: list[str], needed: bool) -> None:
    """Given the states of one move, then proof is needed if it turns to giving back before any call (S44)."""
    waits_back = State("WAITS_BACK", WAIT, awaits="person", compensating=True)
    more = (Arrow("BEGUN", "GO", "ASKING"), Arrow("BEGUN", "MORE", "WAITS_BACK"), Arrow("WAITS_BACK", "GO", "RETURNED"))
    states = (*SMALL, HELD, AGAIN, BACK, waits_back)
    machine = build(states=states, arrows=(*more, *WAITS), events=("GO", "MORE"))
    assert machine.needs_proof(path) is needed


def test_what_may_have_been_issued_is_told_by_the_state() -> None:
    """A call issues, unless it only confirms; a state that this machine does not know may have."""
    machine = build(**put("ASKING", effect=CONFIRM))
    assert [machine.issues(state.name) for state in machine.states] == [False] * 4
    for effect in (SEND, SIGN, RETURN, SIGN | RETURN):
        assert build(**put("ASKING", effect=effect)).issues("ASKING")
    assert machine.issues("GONE")


def test_a_success_may_lead_by_itself_to_an_end_and_a_refusal_back() -> None:
    """Automatic states after a success lead on; after a refusal, and out of a compensation, they may lead back."""
    arrows = (*SMALL_ARROWS[:2], Arrow("ASKING", EXPLICIT_FAIL, "AGAIN"), Arrow("AGAIN", "GO", "RETURNED"))
    assert build(states=(*SMALL, AGAIN), arrows=arrows).next("AGAIN", "GO").name == "RETURNED"
    back = (*arrows[:3], Arrow("AGAIN", "GO", "BACK"), Arrow("BACK", SUCCESS, "ENDING"))
    more = (Arrow("BACK", EXPLICIT_FAIL, "BACK"), Arrow("ENDING", "GO", "RETURNED"))
    states = (*SMALL, AGAIN, BACK, State("ENDING", REST, compensating=True))
    assert build(states=states, arrows=(*back, *more)).next("ENDING", "GO").name == "RETURNED"


# -------------------------------------------------------------------------------------------------------- how it looks

TRANSFERS_MERMAID = """\
stateDiagram-v2
    state "INIT<br/>0 · moves on" as INIT
    state "SOURCE_PENDING<br/>10 · calls withdraw" as SOURCE_PENDING
    state "SOURCE_DONE<br/>20 · moves on<br/>money in flight" as SOURCE_DONE
    state "TARGET_PENDING<br/>30 · calls deposit<br/>money in flight" as TARGET_PENDING
    state "COMMITTED<br/>40 · end" as COMMITTED
    state "FAILED<br/>-10 · end" as FAILED
    state "COMPENSATING<br/>-20 · calls refund<br/>money in flight" as COMPENSATING
    state "ROLLED_BACK<br/>-30 · end" as ROLLED_BACK

    [*] --> INIT
    INIT --> SOURCE_PENDING: SOURCE_CALL
    SOURCE_PENDING --> SOURCE_DONE: SUCCESS
    SOURCE_PENDING --> FAILED: EXPLICIT_FAIL
    SOURCE_DONE --> TARGET_PENDING: TARGET_CALL
    TARGET_PENDING --> COMMITTED: SUCCESS
    TARGET_PENDING --> COMPENSATING: EXPLICIT_FAIL
    COMPENSATING --> ROLLED_BACK: SUCCESS
    COMPENSATING --> COMPENSATING: retry, EXPLICIT_FAIL too
    SOURCE_PENDING --> SOURCE_PENDING: retry
    TARGET_PENDING --> TARGET_PENDING: retry
    classDef rest fill:#f1f5f9,stroke:#94a3b8,color:#1f2937
    class INIT,SOURCE_DONE rest
    classDef call fill:#dbeafe,stroke:#3b82f6,color:#1f2937
    class SOURCE_PENDING,TARGET_PENDING,COMPENSATING call
    classDef end fill:#dcfce7,stroke:#16a34a,color:#1f2937
    class COMMITTED end
    classDef back fill:#ede9fe,stroke:#8b5cf6,color:#1f2937
    class FAILED,ROLLED_BACK back
"""


def test_the_mermaid_of_transfers() -> None:
    """Given the machine of transfers, then its Mermaid text is this one."""
    assert TRANSFERS.mermaid() == TRANSFERS_MERMAID


def test_mermaid_is_not_tripped_by_its_own_words_or_by_blanks() -> None:
    """Given states called like Mermaid's keywords, or in two words, then they get an id that it can read."""
    states = (State("state", WAIT, awaits="operator"), State("all done", TERMINAL))
    text = build(states=states, arrows=(Arrow("state", "GO", "all done"),), initial="state").mermaid()
    assert "    state_ --> all_done: GO\n" in text
    assert 'state "all done<br/>end" as all_done' in text


def test_all_ways_of_not_knowing_are_one_loop() -> None:
    """Given three call states with four unknowns each, then three loops say "retry"."""
    text = TRANSFERS.mermaid()
    assert text.count("retry") == len(TRANSFERS.calls)
    assert "TIMEOUT" not in text and "NETWORK_ERROR" not in text


@settings(max_examples=30)
@given(machines())
def test_every_picture_names_every_state_and_is_the_same_each_time(machine: Machine) -> None:
    text = machine.mermaid()
    assert all(f'"{state.name}<br/>' in text for state in machine.states)
    assert replace(machine).mermaid() == text
