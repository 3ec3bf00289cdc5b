"""The engine, as specifications: a toy flow gets crash safety for free.

Here: every state and every outcome, answers that are none, and entries that accompany a transition. Starting, races,
workers, people and crashes have files of their own beside this one.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec
import pytest
from tests.builders import MovablePorts, Place, check_sound, outcome, scenario, seed
from tests.rows import Rows
from tests.toy import HAPPY, MACHINE, Order, World, book, program

from bursar.engine import Answer, Booking, Engine, FlowRecord, FlowRefused, Worker
from bursar.model.errors import DatabaseUnavailable, InvalidName, RecordMoved, UnknownFlow
from bursar.model.machine import Kind
from bursar.model.outcome import UNKNOWNS, Outcome
from bursar.model.retry import Alarm

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

CALLS = {state.name: str(state.action) for state in MACHINE.calls}


@scenario
async def test_a_record_goes_from_its_beginning_to_its_end(place: Place) -> None:
    async with program(place, World()) as p:
        ended = await p.now(await p.order("o-1"))
        assert await p.path(ended) == HAPPY
        found = await p.engine.get("orders", "o-1")
        assert found is not None
        assert (found.state, found.version, found.due_us, found.worker) == ("DONE", 5, None, "")
        assert (found.owner, found.attempt, found.error) == ("alice", 0, "")
        assert p.engine.settled == {("orders", "DONE"): 1}


def script(state: str, said: object) -> World:
    """A world in which a record comes to a call state and hears that there."""
    before = {"REFUNDING": {"ship": [Outcome.EXPLICIT_FAIL]}}.get(state, {})
    return World(**before, **{CALLS[state]: [said]})


@pytest.mark.parametrize("state", CALLS)
@pytest.mark.parametrize("outcome", Outcome)
@scenario
async def test_every_state_and_every_outcome(place: Place, state: str, outcome: Outcome) -> None:
    """Given a record that is calling somebody, when that says something, then it is where the machine says."""
    async with program(place, script(state, outcome)) as p:
        record = await p.now(await p.order())
        arrow = MACHINE.arrow(state, outcome)
        assert f"{state}-{outcome.value}>{arrow.target}" in await p.path(record)
        if arrow.target == state:  # it stays, and is due again soon
            assert (record.state, record.attempt) == (state, 1)
            assert record.due_us is not None
            assert record.due_us < p.engine.ports.now_us() + 1e6
            assert outcome.value in record.error
            record = await p.now(record)  # the second call hears SUCCESS
        assert MACHINE.state(record.state).kind is Kind.TERMINAL
        assert await p.at(record) == msgspec.structs.replace(await p.at(record), due_us=None, attempt=0, worker="")


@pytest.mark.parametrize("outcome", UNKNOWNS)
@scenario
async def test_every_unknown_is_called_again_by_the_worker(place: Place, outcome: Outcome) -> None:
    world = World(ship=[outcome, outcome])
    async with program(place, world) as p:
        record = await p.order()
        worker = Worker(p.engine, scan_s=0.01)
        running = asyncio.create_task(worker.run())
        await p.until(record, "DONE")
        worker.stop()
        await running
        assert world.calls == {"charge": 1, "ship": 3}
        assert (await p.path(record))[4:6] == [f"SHIPPING-{outcome.value}>SHIPPING"] * 2


@pytest.mark.parametrize("end", ["DONE", "FAILED", "REJECTED"])
@scenario
async def test_terminal_states_do_not_move(place: Place, end: str) -> None:
    world = World(charge=[Outcome.EXPLICIT_FAIL] if end == "FAILED" else [])
    async with program(place, world) as p:
        record = await p.order(ask=end == "REJECTED")
        if end == "REJECTED":
            record = await p.people.signal("orders", record.id, "REJECT", actor="ann", reason="no")
        record = await p.now(record)
        assert record.state == end
        before, calls = await p.at(record), world.calls.copy()
        assert await p.engine.step(record) is None
        assert (await p.now(record)).state == end
        assert await Worker(p.engine).look() == 0
        assert (await p.at(record), world.calls) == (before, calls)


async def _inner_cancellation() -> Answer:
    task = asyncio.ensure_future(asyncio.sleep(1000))
    task.cancel()
    await task
    raise AssertionError


NO_ANSWERS = {
    "an exception": ValueError("what?"),
    "an exception group": ExceptionGroup("many", [ValueError("what?")]),
    "a cancellation that is not ours": _inner_cancellation,
    "nothing": None,
    "text": "SUCCESS",
    "an outcome that is text": Answer(outcome="SUCCESS"),  # type: ignore[arg-type]
    "an event that nobody knows": Answer(outcome=Outcome.SUCCESS, event="NEVER HEARD"),
    "an event of another state": Answer(outcome=Outcome.SUCCESS, event="GO"),
    "a failure under the name of a success": Answer(outcome=Outcome.EXPLICIT_FAIL, event="LEFT"),
    "a success under the name of a failure": Answer(outcome=Outcome.SUCCESS, event="EXPLICIT_FAIL"),
    "a failure that is a success by name": Answer(outcome=Outcome.EXPLICIT_FAIL, event="SUCCESS"),
}


@pytest.mark.parametrize("what", NO_ANSWERS)
@scenario
async def test_what_is_no_answer_is_unknown_and_stays(place: Place, what: str) -> None:
    said = NO_ANSWERS[what]

    async def say() -> object:
        return await said() if callable(said) else said

    async with program(place, World(ship=[say])) as p:
        record = await p.now(await p.order())
        assert (record.state, record.attempt) == ("SHIPPING", 1)
        assert (await p.path(record))[-1] == "SHIPPING-UNKNOWN>SHIPPING"
        assert (await p.at(record)).error.startswith("UNKNOWN")
        assert (await p.now(record)).state == "DONE"


@scenario
async def test_a_finer_event_leads_where_it_says(place: Place) -> None:
    async with program(place, World(ship=[Answer(outcome=Outcome.SUCCESS, event="LEFT")])) as p:
        assert (await p.path(await p.now(await p.order())))[-1] == "SHIPPING-LEFT>DONE"


STRANGE = {
    "a NUL": {"said": "a\x00b"},
    "half a character": {"said": "\ud800"},
    "an object": {"said": object()},
    "a set in a list": {"said": [{1, 2}]},
    "a number past 64 bits": {"said": 2**70},
    "a megabyte": {"said": "x" * 1_000_000},
    "keys that are no text": {(1, 2): 3},
}


@pytest.mark.parametrize("what", STRANGE)
@scenario
async def test_an_answer_is_never_lost_for_how_it_is_told(place: Place, what: str) -> None:
    """Given an answer that no database could store as it is, then it counts, and others beside it are not disturbed."""
    evidence: Any = STRANGE[what]
    strange = Answer(outcome=Outcome.SUCCESS, evidence=evidence)
    unknown = Answer(outcome=Outcome.UNKNOWN, message=str(evidence.get("said")), evidence=evidence)
    world = World(charge=[unknown, Outcome.SUCCESS, strange])
    async with program(place, world) as p:
        one, other = await p.order(), await p.order()
        await asyncio.gather(p.now(one), p.now(other))
        again = await p.now(await p.at(one if (await p.at(one)).state == "CHARGING" else other))
        assert again.state == "DONE"
        assert {(await p.at(record)).state for record in (one, other)} == {"DONE"}
        assert await p.reasons() == []


@scenario
async def test_a_call_that_hangs_is_given_up_and_made_again(place: Place) -> None:
    world = World(ship=[lambda: asyncio.sleep(1000)])
    world.flow_options["call_timeout_s"] = 0.02
    async with program(place, world) as p:
        record = await p.now(await p.order())
        assert (await p.path(record))[-1] == "SHIPPING-TIMEOUT>SHIPPING"
        assert (await p.now(record)).state == "DONE"


# --- entries that accompany a transition ---------------------------------------------------------------------------


@scenario
async def test_entries_are_booked_with_their_transition(place: Place) -> None:
    """Given an order with an amount, then in flight the record owns the posting in transit, and at its end nothing."""
    async with program(place, World(ship=[Outcome.TIMEOUT])) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.now(await p.order("o-1", minor=3_000_000))
        assert record.state == "SHIPPING"
        assert await p.balances() == [7_000_000, 3_000_000, 0]
        (owned,) = await Rows(p.engine.store.read).live([record.in_flight_posting])
        assert owned.amount == 3_000_000
        assert (await p.at(record)).in_flight_posting == record.in_flight_posting
        record = await p.now(record)
        assert (record.state, record.in_flight_posting, (await p.at(record)).in_flight_posting) == ("DONE", 0, 0)
        assert await p.balances() == [7_000_000, 0, 3_000_000]
        await check_sound(p.ledger)


@scenario
async def test_what_is_given_back_is_the_posting_that_was_taken(place: Place) -> None:
    async with program(place, World(ship=[Outcome.EXPLICIT_FAIL], refund=[Outcome.EXPLICIT_FAIL] * 2)) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.order(minor=3_000_000)
        for _ in range(3):
            record = await p.now(record)
        assert (record.state, record.in_flight_posting) == ("FAILED", 0)
        assert await p.balances() == [10_000_000, 0, 0]
        assert len(await p.ledger.history("alice")) == 3


@scenario
async def test_a_refused_booking_leaves_no_trace_but_an_alert(place: Place) -> None:
    """Given an outside fact that the ledger refuses to book, then nothing moves, people are told, and it is retried."""
    async with program(place, World()) as p:
        record = await p.now(await p.order("o-1", minor=3_000_000))  # alice has nothing
        assert (record.state, record.attempt, record.in_flight_posting) == ("CHARGING", 1, 0)
        assert "INSUFFICIENT" in record.error or "available" in record.error
        assert await p.reasons() == [("critical", "booking refused")]
        assert await p.balances() == [0, 0, 0]
        await seed(p.ledger, "alice", "3")
        assert (await p.now(record)).state == "DONE"
        assert await p.balances() == [0, 0, 3_000_000]


@scenario
async def test_a_booking_whose_key_is_taken_moves_nothing(place: Place) -> None:
    """Given an entry that somebody else has made under the key, then the record must not move without its own."""
    async with program(place, World()) as p:
        await seed(p.ledger, "alice", "10")
        first = await p.now(await p.order("o-1", minor=3_000_000))
        assert first.state == "DONE"
        world = World()
        world.flow_options["book"] = lambda item, event, answer: book(
            FlowRecord(msgspec.structs.replace(item.record, id="o-1"), item.body), event, answer
        )
        other = Engine(p.engine.store, p.engine.writer, [world.flow()])
        second = (await other.start("orders", Order(minor=3_000_000), id="o-2")).record
        second = await other.process_now(second, 20)
        assert second.state == "CHARGING"
        assert await p.balances() == [7_000_000, 0, 3_000_000]
        assert ("critical", "booking refused") in await p.reasons()


@pytest.mark.parametrize("keeps", ["carol", "nobody:knows"])
@scenario
async def test_a_booking_that_keeps_what_it_does_not_make_is_refused(place: Place, keeps: str) -> None:
    world = World()

    def wrong(item: FlowRecord[Order], event: str, answer: Answer) -> Booking:
        return msgspec.structs.replace(book(item, event, answer), in_flight_account=keeps)

    world.flow_options["book"] = wrong
    async with program(place, world) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.now(await p.order(minor=3_000_000))
        assert (record.state, await p.balances()) == ("CHARGING", [10_000_000, 0, 0])


@scenario
async def test_a_flow_that_fails_is_put_aside_with_an_alert(place: Place) -> None:
    """Given a `book` that raises, then only that record is affected, and people are told once."""
    world = World()

    def broken(item: FlowRecord[Order], event: str, answer: Answer) -> Booking:
        return Booking() if item.id == "good" else Booking((1 / 0,))  # type: ignore[arg-type]

    world.flow_options["book"] = broken
    async with program(place, world) as p:
        good, bad = await p.order("good"), await p.order("bad")
        await asyncio.gather(p.now(good), p.now(bad))
        await p.now(await p.at(bad))
        assert [(await p.at(r)).state for r in (good, bad)] == ["DONE", "CHARGING"]
        assert await p.reasons() == [("critical", "can't be driven")]


@scenario
async def test_an_answer_may_change_the_body_and_bring_a_posting(place: Place) -> None:
    """Given a rail that books by itself, then the record owns the posting it made, and the next call sees the body."""
    seen: list[str] = []

    async def shipped() -> Answer:
        seen.append((await p.at(record)).body)
        return Answer(outcome=Outcome.SUCCESS)

    world = World(ship=[Outcome.TIMEOUT, shipped])
    world.flow_options["book"] = lambda item, _event, _answer: Booking(clears_in_flight=item.record.state == "SHIPPING")
    async with program(place, world) as p:
        (receipt,) = await seed(p.ledger, "alice", "1")
        posting = receipt.envelope << 16
        world.says["charge"] = [Answer(outcome=Outcome.SUCCESS, body=Order("hat"), in_flight_posting=posting)]
        record = await p.now(await p.order(what="book"))
        assert (record.state, record.in_flight_posting, (await p.at(record)).in_flight_posting) == (
            "SHIPPING",
            posting,
            posting,
        )
        record = await p.now(record)
        assert (record.state, record.in_flight_posting) == ("DONE", 0)
        assert [msgspec.json.decode(body, type=Order).what for body in seen] == ["hat"]


# --- alarms --------------------------------------------------------------------------------------------------------


@scenario
async def test_alarms_ring_once_until_somebody_acknowledges(place: Place) -> None:
    world = World(ship=[Outcome.TIMEOUT] * 6)
    world.flow_options["alarms"] = (Alarm(reason="slow", tries=2), Alarm(reason="very slow", tries=5))
    async with program(place, world) as p:
        record = await p.order()
        seen = []
        for _ in range(4):
            record = await p.now(record)
            seen.append(await p.reasons())
        assert seen == [[], *[[("warning", "slow")]] * 3]
        assert await p.people.acknowledge(record.number, "slow", actor="ann")
        assert not await p.people.acknowledge(record.number, "slow", actor="ann")
        assert await p.reasons() == []
        record = await p.now(record)
        assert await p.reasons() == [("warning", "slow"), ("warning", "very slow")]


@scenario
async def test_an_alarm_rings_by_age_too(place: Place) -> None:
    world, clock = World(ship=[Outcome.TIMEOUT] * 3), MovablePorts()
    world.flow_options["alarms"] = (Alarm(reason="old", seconds=3_000, severity="critical"),)
    async with program(place, world, ports=clock) as p:
        record = await p.now(await p.order())
        assert await p.reasons() == []
        clock.ahead_us += 3_600_000_000
        await p.now(record)
        assert await p.reasons() == [("critical", "old")]


# --- what can't be started -----------------------------------------------------------------------------------------


@scenario
async def test_what_can_not_be_started(place: Place) -> None:
    async with program(place, World()) as p:
        with pytest.raises(UnknownFlow):
            await p.engine.start("nothing", Order())
        await p.order("o-1")
        with pytest.raises(RecordMoved):
            await p.order("o-1")
        for id in ("", "a\x00b", "\ud800", "x" * 129):
            with pytest.raises(InvalidName):
                await p.order(id)
        with pytest.raises(FlowRefused):
            Engine(p.engine.store, p.engine.writer, [World().flow(), World().flow()])
        assert (await p.engine.store.read.records.counts()).keys() == {("orders", "CHARGING")}


@scenario
async def test_split_mode_is_for_the_ledger_alone(place: Place) -> None:
    """Given a store without real units, then a record is refused rather than written in pieces."""
    if place.engine == "sqlite":
        async with place.bursar(split=True) as bursar:
            engine = Engine(bursar.store, bursar.ledger.writer, [World().flow()])
            assert isinstance(await outcome(engine.start("orders", Order())), DatabaseUnavailable)


@scenario
async def test_records_are_listed_newest_first_by_page_owner_and_state(place: Place) -> None:
    async with program(place, World()) as p:
        started = [(await p.engine.start("orders", Order(), owner=f"u{n % 2}")).record for n in range(6)]
        await p.now(started[0])
        numbers = [record.number for record in started][::-1]
        records = p.engine.store.read.records
        page = await records.list("orders", limit=4)
        assert [record.number for record in page] == numbers[:4]
        rest = await records.list("orders", before=page[-1].number, limit=4)
        assert [record.number for record in rest] == numbers[4:]
        assert [record.number for record in await records.list("orders", owner="u1")] == numbers[::2]
        assert [record.number for record in await records.list("orders", states=("DONE",))] == [started[0].number]
        assert await records.list("others") == []
        assert {state: count for (_, state), (count, _) in (await records.counts()).items()} == {
            "DONE": 1,
            "CHARGING": 5,
        }


@scenario
async def test_the_first_unknown_outcome_in_a_state_is_logged_as_critical(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """T38: at once, and once per state; later ones count towards the alert."""
    world = World(charge=[Outcome.UNKNOWN, Outcome.TIMEOUT], ship=[Outcome.NETWORK_ERROR])
    async with program(place, world) as p:
        record = await p.order("o-1")
        with caplog.at_level(logging.CRITICAL, logger="bursar.engine"):
            while (record := await p.engine.step(record) or record).state != "DONE":
                pass
        lines = [line.getMessage() for line in caplog.records if line.levelno == logging.CRITICAL]
        assert [line.split(":")[0] for line in lines] == ["orders o-1 is CHARGING", "orders o-1 is SHIPPING"]
