"""Flows made of decorated actions: the machine they make, what counts as an answer, and what is refused on import."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

import bursar
from bursar.engine import FlowRefused
from bursar.engine.blocking import BlockingAction, Threads
from bursar.engine.flow import by_name, flow_of
from bursar.model.machine import Arrow, Flaw, Kind, Machine, MachineRefused, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.ports import SystemPorts


class Order(bursar.Body):
    book: str = "Dune"


Item = bursar.FlowRecord[Order]


def item(state: str = "CHARGING") -> Item:
    record = Record(
        number=1,
        flow="orders",
        id="orders-7",
        owner="",
        state=state,
        version=1,
        attempt=0,
        in_flight_posting=0,
        due_us=None,
        worker="",
        body="{}",
        error="",
        since_us=0,
        created_us=0,
        updated_us=0,
    )
    return bursar.FlowRecord(record, Order())


@bursar.call("CHARGING", then="SHIPPING", refused="FAILED")
async def charge(order: Item) -> bursar.Answer:
    return bursar.done({"key": order.key})


@bursar.call("SHIPPING", then="DONE", refused="REFUNDING", in_flight=True, rail="shop")
def ship(_order: Item) -> bursar.Answer:
    raise bursar.Refused("SOLD_OUT", "none left", evidence={"shelf": 0})


@bursar.call("REFUNDING", then="FAILED", refused="REFUNDING", in_flight=True, compensating=True)
async def refund(_order: Item) -> bursar.Answer:
    return bursar.done()


def made(*states: Any, **more: Any) -> bursar.Flow[Order]:
    wanted: dict[str, Any] = {"succeeded": "DONE", "failed": "FAILED", **more}
    return bursar.flow("orders", Order, *states, **wanted)


def called(function: Callable[[Item], Any]) -> Any:
    """What the engine would get of an action made of this function."""
    state = bursar.call("CHARGING", then="DONE", refused="FAILED")(function)
    action = made(state).actions[state.state.action or ""]
    if isinstance(action, BlockingAction):
        return action.function(item())

    async def run() -> bursar.Answer:
        return await action(item())

    return asyncio.run(run())


# --- what it makes -------------------------------------------------------------------------------------------------


def test_the_machine_is_the_one_that_would_be_written_by_hand() -> None:
    by_hand = Machine(
        name="orders",
        initial="CHARGING",
        states=(
            State("CHARGING", Kind.CALL, action="charge"),
            State("SHIPPING", Kind.CALL, action="ship", in_flight=True),
            State("REFUNDING", Kind.CALL, action="refund", in_flight=True, compensating=True),
            State("DONE", Kind.TERMINAL),
            State("FAILED", Kind.TERMINAL, compensating=True),
        ),
        arrows=(
            Arrow("CHARGING", Outcome.SUCCESS, "SHIPPING"),
            Arrow("CHARGING", Outcome.EXPLICIT_FAIL, "FAILED"),
            Arrow("SHIPPING", Outcome.SUCCESS, "DONE"),
            Arrow("SHIPPING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
            Arrow("REFUNDING", Outcome.SUCCESS, "FAILED"),
            Arrow("REFUNDING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
        ),
    )
    flow = made(charge, ship, refund)
    assert flow.machine == by_hand
    assert flow.mermaid() == by_hand.mermaid()
    assert flow.rails == {"ship": "shop"}


def test_waiting_and_automatic_states_declare_their_events() -> None:
    flow = made(
        bursar.automatic("NEW", on={"GO": "CHARGING", "ASK": "ASKING"}),
        bursar.wait("ASKING", awaits="approver", on={"APPROVE": "CHARGING", "REJECT": "FAILED"}),
        charge,
        ship,
        refund,
        choose=lambda _item: "GO",
        second_person=frozenset({"APPROVE"}),
    )
    assert flow.machine.initial == "NEW"
    assert flow.machine.events == ("GO", "ASK", "APPROVE", "REJECT")
    assert flow.machine.next("ASKING", "APPROVE").name == "CHARGING"
    assert flow.second_person == {"APPROVE"}


def test_fields_of_state_machine_and_flow_are_handed_through() -> None:
    polled = bursar.call("CHARGING", then="DONE", refused="FAILED", poll_s=15, code=3)(charge.function)
    finer = Arrow("CHARGING", "LEFT", "DONE", outcome=Outcome.SUCCESS)
    flow = made(polled, arrows=(finer,), events=("LEFT",), call_timeout_s=3.0)
    assert (flow.machine.state("CHARGING").poll_s, flow.machine.state("CHARGING").code) == (15, 3)
    assert flow.machine.next("CHARGING", "LEFT").name == "DONE"
    assert flow.call_timeout_s == 3.0


def test_a_decorated_function_can_still_be_called() -> None:
    with pytest.raises(bursar.Refused, match="SOLD_OUT: none left"):
        ship(item())


# --- what an action says -------------------------------------------------------------------------------------------


def test_done_is_a_success_with_its_evidence_and_body() -> None:
    async def action(order: Item) -> bursar.Answer:
        return bursar.done({"receipt": order.key}, body=Order("Emma"))

    answer = called(action)
    assert (answer.outcome, answer.evidence, answer.body) == (
        Outcome.SUCCESS,
        {"receipt": "orders-7:CHARGING"},
        Order("Emma"),
    )


@pytest.mark.parametrize("blocking", [False, True])
def test_only_refused_is_an_explicit_failure(blocking: bool) -> None:
    async def waits(_order: Item) -> bursar.Answer:
        raise bursar.Refused("SOLD_OUT", "none left", evidence={"shelf": 0})

    answer = called(ship.function if blocking else waits)
    assert (answer.outcome, answer.code, answer.message) == (Outcome.EXPLICIT_FAIL, "SOLD_OUT", "none left")
    assert answer.evidence == {"shelf": 0}


def test_pending_counts_as_a_call_unless_it_says_that_nothing_has_changed() -> None:
    """Otherwise no alarm would ring for an action that waits for ever."""
    assert bursar.pending().outcome is Outcome.PENDING
    assert not bursar.pending({"seen": 1}).unchanged
    assert bursar.pending(unchanged=True).unchanged
    assert bursar.pending(after_s=7).retry_after_s == 7


@pytest.mark.parametrize("blocking", [False, True])
@pytest.mark.parametrize("said", [None, True, {}, "ok", 1, bursar.Refused("NO")], ids=repr)
def test_whatever_else_is_returned_is_no_answer_and_says_what_to_return(said: object, blocking: bool) -> None:
    def blocks(_order: Item) -> Any:
        return said

    async def waits(_order: Item) -> Any:
        return said

    with pytest.raises(TypeError, match=r"which says nothing.*return bursar\.done"):
        called(blocks if blocking else waits)


def test_a_body_of_another_type_is_no_answer() -> None:
    """Stored, it could not be read again, and the record would never be driven again."""

    async def action(_order: Item) -> bursar.Answer:
        return bursar.done(body=bursar.Body())

    with pytest.raises(TypeError, match="returned a Body for a body, not Order"):
        called(action)


def test_another_exception_is_handed_to_the_engine_as_it_is() -> None:
    async def breaks(_order: Item) -> bursar.Answer:
        raise ConnectionResetError("the reply is lost")

    with pytest.raises(ConnectionResetError):
        called(breaks)


# --- refused on import ---------------------------------------------------------------------------------------------


def returns_none(_order: Item) -> None: ...


async def returns_dict(_order: Item) -> dict[str, str]:
    return {}


async def returns_perhaps(_order: Item) -> bursar.Answer | None:
    return None


def takes_nothing() -> bursar.Answer:
    return bursar.done()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (returns_none, r"returns_none\(\) returns None, .* says nothing; return bursar.done"),
        (returns_dict, r"returns_dict\(\) returns dict, which is no answer"),
        (returns_perhaps, r"returns_perhaps\(\) returns None"),
        (takes_nothing, r"takes_nothing\(\) must take one argument"),
    ],
)
@pytest.mark.parametrize("role", ["action", "cancel", "query"])
def test_a_function_that_can_give_no_answer_is_refused(function: Any, why: str, role: str) -> None:
    roles = {} if role == "action" else {role: function}
    decorate = bursar.call("CHARGING", then="DONE", refused="FAILED", **roles)
    with pytest.raises(FlowRefused, match=why):
        made(decorate(function if role == "action" else charge.function))


def problems(*states: Any, **more: Any) -> str:
    with pytest.raises(MachineRefused) as caught:
        made(*states, **more)
    return str(caught.value)


def test_a_misspelt_state_is_no_end_and_the_message_names_the_function() -> None:
    """Were it taken for an end, a record would stop there with the money."""
    misspelt = bursar.call("SHIPPING", then="DONE", refused="REFUNDNG", in_flight=True)(ship.function)
    text = problems(charge, misspelt, refund)
    assert "state 'REFUNDNG', event 'refused': named by @call of ship()" in text
    assert "state 'REFUNDING'" in text  # which nothing reaches


def test_a_success_does_not_lead_to_giving_money_back() -> None:
    wrong = bursar.call("SHIPPING", then="REFUNDING", refused="REFUNDING", in_flight=True)(ship.function)
    text = problems(charge, wrong, refund, succeeded=())
    assert f"state 'SHIPPING', event 'then': @call of ship(), to 'REFUNDING': {Flaw.SUCCESS_COMPENSATES.value}" in text


def test_all_problems_come_at_once() -> None:
    stuck = bursar.call("SHIPPING", then="SHIPPING", refused="SHIPPING")(ship.function)
    text = problems(charge, stuck)
    assert "state 'SHIPPING'" in text
    assert "state 'DONE'" in text


def test_two_functions_of_one_name_are_refused() -> None:
    other = bursar.call("SHIPPING", then="DONE", refused="FAILED")

    def twin() -> Any:
        async def charge(_order: Item) -> bursar.Answer:
            return bursar.done()

        return charge

    with pytest.raises(FlowRefused, match=r"two actions are called charge\(\)"):
        made(charge, other(twin()))


def test_one_function_can_serve_two_states() -> None:
    again = bursar.call("SHIPPING", then="DONE", refused="FAILED")(charge.function)
    assert set(made(charge, again).actions) == {"charge"}


# --- ids -----------------------------------------------------------------------------------------------------------


def named(name: str, prefix: str = "") -> bursar.Flow[Order]:
    state = bursar.call("CHARGING", then="DONE", refused="FAILED")(charge.function)
    return bursar.flow(name, Order, state, succeeded="DONE", failed="FAILED", prefix=prefix)


def test_ids_begin_with_the_flows_name_or_its_prefix() -> None:
    assert named("card_orders").prefix == "card-orders-"
    assert named("orders", "ord-").prefix == "ord-"


@pytest.mark.parametrize("prefix", ["ord", "Ord-", "-", "1-", "a--", "ö-", "a b-", "a" * 90 + "-"])
def test_a_prefix_that_could_be_misread_is_refused(prefix: str) -> None:
    with pytest.raises(FlowRefused, match="prefix"):
        named("orders", prefix)


def test_two_flows_of_an_engine_have_two_prefixes() -> None:
    with pytest.raises(FlowRefused, match="flow 'orders' has the prefix 'ord-' already"):
        by_name([named("orders", "ord-"), named("returns", "ord-")])


def test_an_id_tells_its_flow() -> None:
    flows = [named("orders", "ord-"), named("express", "ord-express-")]
    assert flow_of("ord-17", flows) is flows[0]
    assert flow_of("ord-express-17", flows) is flows[1]
    for other in ("ord-", "ord-x", "17", "wire-1", ""):
        assert flow_of(other, flows) is None


# --- threads -------------------------------------------------------------------------------------------------------


def test_a_thread_is_used_again_only_when_its_function_has_returned() -> None:
    """A caller that gives up leaves the function running: a second one in that thread would wait behind it unseen."""
    release = threading.Event()
    ran: list[str] = []

    def hangs(_item: Item) -> bursar.Answer:
        release.wait(30)
        ran.append("first")
        return bursar.done()

    def quick(_item: Item) -> bursar.Answer:
        ran.append("second")
        return bursar.done()

    async def main() -> None:
        threads = Threads(SystemPorts(), most=1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(threads.run(hangs, item()), 0.02)
        with pytest.raises(TimeoutError):  # there is no room for it, and it is not called
            await asyncio.wait_for(threads.run(quick, item()), 0.02)
        assert ran == []
        release.set()
        assert (await threads.run(quick, item())).outcome is Outcome.SUCCESS
        threads.close()

    asyncio.run(main())
    assert ran == ["first", "second"]


def test_a_bare_engine_does_not_run_a_plain_function_on_its_event_loop() -> None:
    blocking = made(charge, ship, refund).actions["ship"]

    async def main() -> None:
        await blocking(item())

    with pytest.raises(TypeError, match=r"bursar\.open"):
        asyncio.run(main())
