"""What people do to records. How they are told: test_alerts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.builders import Place, outcome, scenario, seed
from tests.toy import Program, World, program, waits

from bursar.engine import Lift, Worker
from bursar.model.errors import InvalidName, InvalidState, RecordMoved, UnknownFlow, UnknownRecord
from bursar.model.outcome import Outcome
from bursar.model.proof import never_issued
from bursar.model.records import Record
from bursar.model.retry import Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY: dict[str, Any] = {"actor": "ann", "reason": "the bank called"}
ALSO: dict[str, Any] = {"actor": "ben", "reason": "I have seen the receipt"}
LATER = Retry(first_s=500, cap_s=500)


async def stuck(p: Program, state: str = "SHIPPING", **body: Any) -> Record:
    """An order whose last call had no answer."""
    record = await p.now(await p.order("o-1", **body))
    assert (record.state, record.attempt) == (state, 1)
    return record


async def events(p: Program, record: Record) -> list[tuple[str, str]]:
    history = await p.engine.store.read.records.history(record.number)
    return [(t.event, t.actor) for t in history]


# --- retry, pause ------------------------------------------------------------------------------------------------


@scenario
async def test_retry_now_makes_it_due_at_once(place: Place) -> None:
    world = World(ship=[Outcome.TIMEOUT, Outcome.TIMEOUT])
    world.flow_options["retry"] = LATER
    async with program(place, world) as p:
        worker = Worker(p.engine)
        await worker.look()
        record = await stuck(p)
        assert await worker.look() == 0
        noted = await p.people.retry_now("orders", "o-1", **WHY)
        assert (noted.state, noted.attempt) == ("SHIPPING", 1)
        assert await worker.look() == 1
        assert (await p.now(record)).state in ("SHIPPING", "DONE")
        assert ("RETRY ASKED", "ann") in await events(p, record)


@scenario
async def test_a_back_off_longer_than_the_usual_cap_is_no_clock_that_jumped(place: Place) -> None:
    world = World(ship=[Outcome.TIMEOUT] * 3)
    world.flow_options["retry"] = Retry(first_s=86_400, cap_s=86_400)
    async with program(place, world) as p:
        worker = Worker(p.engine)
        await worker.look()
        await stuck(p)
        assert [await worker.look() for _ in range(3)] == [0, 0, 0]
        assert world.calls["ship"] == 1


@scenario
async def test_where_people_can_do_nothing(place: Place) -> None:
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        people = p.people
        ended = await p.now(await p.order("done"))
        ended = await p.now(ended)
        assert ended.state == "DONE"
        await p.order("waiting", ask=True)

        def force(flow: str, id: str, **who: Any) -> Any:
            return people.force(flow, id, "SUCCESS", **who)

        for call in (people.retry_now, force):
            assert isinstance(await outcome(call("orders", "done", **WHY)), InvalidState)
            assert isinstance(await outcome(call("orders", "waiting", **WHY)), InvalidState)
            assert isinstance(await outcome(call("orders", "nobody", **WHY)), UnknownRecord)
            assert isinstance(await outcome(call("nothing", "done", **WHY)), UnknownFlow)
        assert isinstance(await outcome(people.signal("orders", "done", "APPROVE", **WHY)), InvalidState)
        assert isinstance(await outcome(people.signal("orders", "waiting", "GO", **WHY)), InvalidState)
        waiting = await p.engine.get("orders", "waiting")
        assert waiting is not None
        assert (waiting.state, waits(waiting), waiting.version) == ("ASKING", True, 2)


@pytest.mark.parametrize("who", [("", "why"), ("  ", "why"), ("ann", ""), ("ann", " \n"), ("ann", "x" * 1001)])
@scenario
async def test_everything_needs_a_name_and_a_reason(place: Place, who: tuple[str, str]) -> None:
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        record = await stuck(p)
        more: dict[str, Any] = {"actor": who[0], "reason": who[1]}
        people = p.people
        for call in (
            people.retry_now("orders", "o-1", **more),
            people.force("orders", "o-1", "SUCCESS", **more),
            people.signal("orders", "o-1", "APPROVE", **more),
            people.pause("flow", "orders", **more),
            people.resume("flow", "orders", **more),
        ):
            assert isinstance(await outcome(call), InvalidName)
        assert await p.at(record) == record or (await p.at(record)).version == record.version


@scenario
async def test_a_paused_flow_makes_no_calls_until_it_is_resumed(place: Place) -> None:
    world = World()
    async with program(place, world, lease_s=0.05) as p:
        worker = Worker(p.engine, scan_s=0.01)
        record = await p.order()
        assert await p.people.pause("flow", "orders", **WHY)
        assert not await p.people.pause("flow", "orders", **ALSO)
        await worker.look()
        assert (await p.now(record)).state == "CHARGING"
        assert world.calls == {}
        assert await p.people.resume("flow", "orders", **WHY) is Lift.LIFTED
        assert await p.people.resume("flow", "orders", **WHY) is Lift.NOT_PAUSED
        running = asyncio.create_task(worker.run())
        await p.until(record, "DONE")
        worker.stop()
        await running


@pytest.mark.parametrize(("kind", "name"), [("flow", "orders"), ("rail", "shop")])
@scenario
async def test_what_a_pause_held_up_goes_on_with_its_end_and_not_with_the_end_of_its_lease(
    place: Place, kind: str, name: str
) -> None:
    world = World()
    async with program(place, world, lease_s=600) as p:
        await p.people.pause(kind, name, **WHY)
        worker = Worker(p.engine, scan_s=0.01)
        record = await p.now(await p.order())
        assert record.state == ("CHARGING" if kind == "flow" else "SHIPPING")
        running = asyncio.create_task(worker.run())
        await asyncio.sleep(0.05)
        assert (await p.at(record)).version == record.version
        await p.people.resume(kind, name, **WHY)
        await p.until(record, "DONE")
        worker.stop()
        await running


@scenario
async def test_a_process_without_a_worker_obeys_a_pause(place: Place) -> None:
    world = World()
    async with program(place, world) as p:
        await p.people.pause("flow", "orders", **WHY)
        assert (await p.now(await p.order())).state == "CHARGING"
        assert world.calls == {}


@scenario
async def test_a_paused_rail_stops_only_its_own_calls(place: Place) -> None:
    world = World()
    async with program(place, world, lease_s=0.05) as p:
        await p.people.pause("rail", "shop", **WHY)
        worker = Worker(p.engine, scan_s=0.01)
        await worker.look()
        running = asyncio.create_task(worker.run())
        record = await p.order()
        await p.until(record, "SHIPPING")
        await asyncio.sleep(0.15)  # longer than its lease: it is looked at again, and again not called
        assert world.calls == {"charge": 1}
        assert (await p.at(record)).attempt == 0
        await p.people.resume("rail", "shop", **WHY)
        await p.until(record, "DONE")
        worker.stop()
        await running


@pytest.mark.parametrize(("kind", "name"), [("flow", "orders"), ("rail", "card")])
@scenario
async def test_a_pause_still_gives_money_back(place: Place, kind: str, name: str) -> None:
    """W15: nothing new is charged, and refunds go on."""
    world = World(ship=[Outcome.EXPLICIT_FAIL])
    async with program(place, world) as p:
        refunding = await p.order("o-1")
        await p.engine.step(refunding)
        await p.engine.step(await p.at(refunding))
        assert (await p.at(refunding)).state == "REFUNDING"
        await p.people.pause(kind, name, **WHY)
        assert (await p.now(await p.at(refunding))).state == "FAILED"
        assert (await p.now(await p.order("o-2"))).state == "CHARGING"
        assert world.calls == {"charge": 1, "ship": 1, "refund": 1}


@scenario
async def test_a_rail_that_depends_on_the_record(place: Place) -> None:
    """Given a flow that says per record whom it calls, then pausing one stops those records and no others."""
    world = World()
    world.flow_options |= {
        "rails": {"ship": lambda item: f"shop-{item.body.what}"},
        "rail_names": frozenset({"shop-book", "shop-pen"}),
    }
    async with program(place, world) as p:
        await p.people.pause("rail", "shop-pen", **WHY)
        refused = await outcome(p.people.pause("rail", "shop-ink", **WHY))
        assert isinstance(refused, InvalidName)
        assert "shop-book, shop-pen" in str(refused)
        assert (await p.now(await p.order(what="pen"))).state == "SHIPPING"
        assert (await p.now(await p.order(what="book"))).state == "DONE"
        assert world.calls["ship"] == 1


@pytest.mark.parametrize(("kind", "name"), [("flow", "ordres"), ("rail", "shoop"), ("rial", "shop"), ("", "")])
@scenario
async def test_a_pause_of_nothing_is_refused(place: Place, kind: str, name: str) -> None:
    async with program(place, World()) as p:
        assert isinstance(await outcome(p.people.pause(kind, name, **WHY)), InvalidName)
        assert await p.engine.store.read.pauses.list() == []


# --- tell --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("event", "end"), [("APPROVE", "DONE"), ("REJECT", "REJECTED")])
@scenario
async def test_telling_moves_what_waits(place: Place, event: str, end: str) -> None:
    async with program(place, World()) as p:
        worker = Worker(p.engine)
        await worker.look()
        record = await p.now(await p.order("o-1", ask=True))
        assert (record.state, waits(record)) == ("ASKING", True)
        told = await p.people.signal("orders", "o-1", event, **WHY)
        assert told == await p.at(told) or told.version == (await p.at(told)).version
        await worker.look()  # due at once: nobody waits for a lease
        assert (await p.until(record, end)).state == end
        assert (event, "ann") in await events(p, record)


@scenario
async def test_two_who_tell_at_once(place: Place) -> None:
    """Given one who approves and one who rejects, then one is heard, and the other learns that it was not."""
    async with program(place, World()) as p, program(place, World(), worker="two") as q:
        for n in range(5):
            record = await p.order(f"o-{n}", ask=True)
            seen = [await p.at(record)] * 2
            words = [
                outcome(p.engine.signal(seen[0], "APPROVE", "ann", {})),
                outcome(q.engine.signal(seen[1], "REJECT", "ben", never_issued())),
            ]
            found = await asyncio.gather(*words)
            assert sorted(type(f).__name__ for f in found) == ["Record", "RecordMoved"]
            (heard,) = [f for f in found if isinstance(f, Record)]
            assert (await p.at(record)).state == heard.state
            assert isinstance(await outcome(p.engine.signal(seen[0], "APPROVE", "ann", {})), RecordMoved)


# --- force -------------------------------------------------------------------------------------------------------


@scenario
async def test_one_person_alone_forces_nothing(place: Place) -> None:
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        record = await stuck(p)
        for again in ("ann", "ann", "A.nn", "ANN"):
            asked = await p.people.force("orders", "o-1", "SUCCESS", actor=again, reason="I say so")
            assert (asked.state, asked.attempt) == ("SHIPPING", 1)
        assert [e for e, _ in await events(p, record)].count("FORCE ASKED") == 4


@scenario
async def test_a_second_person_who_says_the_same_decides(place: Place) -> None:
    world = World(ship=[Outcome.TIMEOUT])
    async with program(place, world) as p:
        await seed(p.ledger, "alice", "1")
        record = await stuck(p, minor=1_000_000)
        await p.people.force("orders", "o-1", "SUCCESS", **WHY)
        forced = await p.people.force("orders", "o-1", "SUCCESS", **ALSO)
        assert forced.state == "DONE"
        assert (await events(p, record))[-2:] == [("FORCE ASKED", "ann"), ("SUCCESS", "ben")]
        assert await p.balances() == [0, 0, 1_000_000]
        assert world.calls == {"charge": 1, "ship": 1}


@scenario
async def test_two_who_disagree_decide_nothing(place: Place) -> None:
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        await stuck(p)
        await p.people.force("orders", "o-1", "SUCCESS", **WHY)
        assert (await p.people.force("orders", "o-1", "EXPLICIT_FAIL", **ALSO)).state == "SHIPPING"
        assert (await p.people.force("orders", "o-1", "SUCCESS", actor="cat", reason="x")).state == "SHIPPING"
        assert (await p.people.force("orders", "o-1", "SUCCESS", **WHY)).state == "DONE"  # cat and ann


@scenario
async def test_what_was_asked_in_another_state_does_not_count(place: Place) -> None:
    async with program(place, World(charge=[Outcome.TIMEOUT], ship=[Outcome.TIMEOUT])) as p:
        record = await stuck(p, "CHARGING")
        await p.people.force("orders", "o-1", "SUCCESS", **WHY)
        record = await p.now(await p.at(record))
        assert record.state == "SHIPPING"
        assert (await p.people.force("orders", "o-1", "SUCCESS", **ALSO)).state == "SHIPPING"


@pytest.mark.parametrize("event", ["TIMEOUT", "UNKNOWN", "GO", "NEVER HEARD", ""])
@scenario
async def test_only_what_leads_on_can_be_forced(place: Place, event: str) -> None:
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        await stuck(p)
        assert isinstance(await outcome(p.people.force("orders", "o-1", event, **WHY)), InvalidState)


@pytest.mark.parametrize(
    ("rail", "state"),
    [
        (Outcome.EXPLICIT_FAIL, "REFUNDING"),  # it promises that it never happened
        (Outcome.SUCCESS, "DONE"),  # it did happen, whatever people say
        (Outcome.TIMEOUT, "SHIPPING"),
        (Outcome.UNKNOWN, "SHIPPING"),
        (ValueError("what?"), "SHIPPING"),
        (ConnectionResetError("gone"), "SHIPPING"),
    ],
)
@scenario
async def test_money_is_forced_back_only_as_the_rail_says(place: Place, rail: Any, state: str) -> None:
    """T34: the rail's own answer decides, not the people's."""
    world = World(ship=[Outcome.TIMEOUT])
    world.cancel_says["ship"] = rail
    async with program(place, world) as p:
        await seed(p.ledger, "alice", "1")
        await stuck(p, minor=1_000_000)
        await p.people.force("orders", "o-1", "EXPLICIT_FAIL", **WHY)
        assert world.calls["cancel ship"] == 0
        forced = await p.people.force("orders", "o-1", "EXPLICIT_FAIL", **ALSO)
        assert (forced.state, world.calls["cancel ship"]) == (state, 1)
        assert sum(await p.balances()) == 1_000_000


@scenario
async def test_what_no_rail_can_promise_is_not_forced_back(place: Place) -> None:
    """Given a rail without a way to cancel, then two people are not enough."""
    async with program(place, World(refund=[Outcome.TIMEOUT], ship=[Outcome.EXPLICIT_FAIL])) as p:
        await stuck(p, "REFUNDING")
        refused = await outcome(p.people.force("orders", "o-1", "EXPLICIT_FAIL", **WHY))
        assert isinstance(refused, InvalidState)  # it leads nowhere from here
        await p.people.force("orders", "o-1", "SUCCESS", **WHY)
        assert (await p.people.force("orders", "o-1", "SUCCESS", **ALSO)).state == "FAILED"


@scenario
async def test_forcing_against_a_worker_that_keeps_calling(place: Place) -> None:
    """Given a worker whose every try moves the version, then two people still get their way."""
    world = World(ship=[Outcome.TIMEOUT] * 100_000)
    async with program(place, world) as p, program(place, world, worker="two") as q:
        record = await stuck(p)
        worker = Worker(q.engine, scan_s=0.001)
        running = asyncio.create_task(worker.run())
        for who in (WHY, ALSO, WHY, ALSO, WHY, ALSO):
            while isinstance(found := await outcome(p.people.force("orders", "o-1", "SUCCESS", **who)), RecordMoved):
                pass
            if isinstance(found, InvalidState):
                break
        worker.stop()
        await running
        assert (await p.at(record)).state == "DONE"
