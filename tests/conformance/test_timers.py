"""Timers: a waiting record leaves its state when its time has come, once, and costs nothing until then."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.builders import MovablePorts, Place, scenario
from tests.crashing import dies
from tests.timed_payouts import (
    HOUR_S,
    Bank,
    at,
    behind,
    in_s,
    look,
    path,
    program,
    start,
    time_passes,
    until,
)

from bursar.engine import Engine, Operators, Worker
from bursar.ledger import Ledger
from bursar.model.errors import InvalidState, RecordMoved
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Alarm

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

DAY_S = 86_400
WHY: dict[str, Any] = {"actor": "ann", "reason": "because"}


async def outcome(word: Any) -> Any:
    try:
        return await word
    except (InvalidState, RecordMoved) as error:
        return error


async def booked(engine: Engine) -> int:
    """How many units have moved: bob's balance."""
    return (await Ledger(engine.store).balance("bob", "USDT")).minor


@scenario
async def test_a_record_leaves_its_state_when_its_time_has_come_and_not_before(place: Place) -> None:
    """Also days ahead, where a retry would count as a clock that had jumped (L24). Nobody looks at it meanwhile."""
    async with program(place, Bank()) as engine:
        expires = in_s(30 * DAY_S)
        record = await start(engine, expires=expires)
        found = await at(engine)
        assert found.timer_us == record.timer_us == int(expires.timestamp()) * 10**6 + expires.microsecond
        assert found.due_us is None
        worker = Worker(engine)
        assert [await worker.look() for _ in range(3)] == [0, 0, 0]
        before = await booked(engine)
        await time_passes(place)
        assert await worker.look() == 1
        await engine.finish(30)
        found = await at(engine)
        assert (found.state, found.timer_us, found.due_us) == ("GONE", None, None)
        assert await path(engine) == ["CREATED", "EXPIRED"]
        history = await engine.store.read.records.history(found.number)
        assert history[-1].actor == "local"
        assert await booked(engine) == before + 1, "with its entries, in the same transaction"
        assert await worker.look() == 0


@scenario
async def test_a_state_with_seconds_of_its_own_counts_from_when_the_record_came_there(place: Place) -> None:
    """By the database's clock, whatever this process's clock says."""
    ports = MovablePorts()
    ports.ahead_us = -7 * HOUR_S * 10**6 if place.engine == "postgres" else 0
    async with program(place, Bank(), ports=ports) as engine:
        record = await start(engine)
        assert record.timer_us is None, "no expiry, no timer"
        await engine.signal(record, "APPROVE", "ann", {})
        found = await until(engine, "SETTLING")
        assert found.timer_us is not None
        assert abs(found.timer_us - await engine.store.now_us() - HOUR_S * 10**6) < 20e6
        await time_passes(place)
        await look(engine)
        assert (await path(engine))[-2:] == ["LATE", "SUCCESS"], "it was chased, and waits again"
        again = await at(engine)
        assert again.timer_us is not None and again.timer_us > found.timer_us, "each stay has a timer of its own"


@scenario
async def test_a_signal_that_comes_first_wins(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine, expires=in_s(HOUR_S))
        after = await engine.signal(record, "APPROVE", "ann", {})
        assert after.timer_us is None
        await time_passes(place)
        await until(engine, "SETTLING")
        assert "EXPIRED" not in await path(engine)


@scenario
async def test_a_timer_that_comes_first_wins(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine, expires=in_s(-1))
        await until(engine, "GONE")
        assert isinstance(await outcome(engine.signal(record, "APPROVE", "ann", {})), RecordMoved)
        assert isinstance(await outcome(Operators(engine).signal("payouts", "p-1", "APPROVE", **WHY)), InvalidState)
        assert await path(engine) == ["CREATED", "EXPIRED"]


@scenario
async def test_a_timer_and_a_signal_at_once_are_one_transition(place: Place) -> None:
    async with program(place, Bank()) as one, program(place, Bank(), worker="two") as two:
        wins = set()
        for n in range(8):
            record = await start(one, f"p-{n}", expires=in_s(-1))
            heard, _ = await asyncio.gather(outcome(one.signal(record, "APPROVE", "ann", {})), look(two))
            events = await path(one, f"p-{n}")
            wins.add(events[1])
            assert (events[1] == "APPROVE") == isinstance(heard, Record)
            assert events.count("APPROVE") + events.count("EXPIRED") == 1
        assert wins <= {"APPROVE", "EXPIRED"}


@scenario
async def test_two_workers_fire_a_timer_once(place: Place) -> None:
    async with program(place, Bank()) as one, program(place, Bank(), worker="two") as two:
        before = await booked(one)
        record = await start(one, expires=in_s(-1))
        seen = await asyncio.gather(
            *(
                engine.store.single().records.claim_due(["payouts"], engine.worker, 9, 30 * 10**6, 10**9)
                for engine in (one, two)
            )
        )
        assert sum(len(page) for page in seen) == 1, "the other skips what is claimed"
        claimed = [r for page in seen for r in page] * 2  # and if it did not, the compare-and-set decides
        done = await asyncio.gather(*(e.step(r) for e, r in zip((one, two), claimed, strict=True)))
        assert {r.state for r in done if r is not None} == {"GONE"}
        assert await path(one) == ["CREATED", "EXPIRED"]
        assert await booked(one) == before + 1
        assert record.number == claimed[0].number


@scenario
async def test_a_timer_that_came_while_no_process_ran_fires_at_the_next_start(place: Place) -> None:
    async with program(place, Bank()) as engine:
        await start(engine, expires=in_s(DAY_S))
    await time_passes(place)
    async with program(place, Bank(), worker="two") as engine:
        worker = Worker(engine)
        await worker.look()  # its first look takes over what others left
        await worker.look()
        await engine.finish(30)
        assert (await at(engine)).state == "GONE"


@scenario
async def test_a_worker_that_dies_after_its_claim_delays_a_timer_by_its_lease(place: Place) -> None:
    async with program(place, Bank()) as engine:
        await start(engine, expires=in_s(-1))
        (claimed,) = await engine.store.single().records.claim_due(["payouts"], "dead", 9, 30 * 10**6, 10**9)
        assert claimed.worker == "dead"
        assert await Worker(engine).look() == 0
        await behind(place, f"UPDATE {{s}}records SET due = {'to_timestamp(1)' if place.engine == 'postgres' else 1}")
        await until(engine, "GONE")


@scenario
async def test_timers_of_a_paused_flow_wait(place: Place) -> None:
    """A paused flow starts no sends by itself; its signals are an operator's own doing."""
    async with program(place, Bank()) as engine:
        people = Operators(engine)
        await start(engine, expires=in_s(-1))
        await people.pause("flow", "payouts", **WHY)
        await look(engine)
        assert (await at(engine)).state == "APPROVING"
        await people.resume("flow", "payouts", **WHY)
        await until(engine, "GONE")


@scenario
async def test_a_timer_at_a_paused_rail_moves_its_record_and_calls_nobody(place: Place) -> None:
    bank = Bank()
    async with program(place, bank) as engine:
        await engine.signal(await start(engine), "APPROVE", "ann", {})
        await until(engine, "SETTLING")
        await Operators(engine).pause("rail", "bank", **WHY)
        await time_passes(place)
        await look(engine)
        assert (await at(engine)).state == "CHASING"
        assert [name for _, name, _, _ in bank.offers] == ["send"]


@scenario
async def test_alarms_ring_beside_a_timer_and_fire_it_no_earlier(place: Place) -> None:
    bank = Bank()
    bank.options["alarms"] = (Alarm(reason="old", seconds=0.001),)
    async with program(place, bank) as engine:
        await start(engine, expires=in_s(HOUR_S))
        async with asyncio.timeout(30):
            while not await engine.store.read.alerts.open():
                await look(engine)
        found = await at(engine)
        assert (found.state, found.due_us, found.worker) == ("APPROVING", None, "")
        await time_passes(place)
        await until(engine, "GONE")


@scenario
async def test_a_note_in_the_history_keeps_the_timer(place: Place) -> None:
    bank = Bank()
    bank.options["second_person"] = frozenset({"APPROVE"})
    async with program(place, bank) as engine:
        record = await start(engine, expires=in_s(HOUR_S))
        asked = await Operators(engine).signal("payouts", "p-1", "APPROVE", **WHY)
        assert (asked.version, asked.timer_us) == (record.version + 1, record.timer_us)


@scenario
async def test_nobody_but_the_engine_sends_a_timeout(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine, expires=in_s(HOUR_S))
        for word in (
            engine.signal(record, "EXPIRED", "ann", {}),
            Operators(engine).signal("payouts", "p-1", "EXPIRED", **WHY),
        ):
            assert isinstance(await outcome(word), InvalidState)
        assert (await at(engine)).version == 1


@scenario
async def test_a_clock_that_is_set_back_moves_no_timer(place: Place) -> None:
    """A timer is a moment, not a delay: the clock has to come to it. Retries are brought forward (L24)."""
    async with program(place, Bank(send=[Outcome.UNKNOWN])) as engine:
        waits = await start(engine, expires=in_s(600))
        tried = await engine.signal(await start(engine, "p-2"), "APPROVE", "ann", {})
        tried = await engine.step(tried) or tried
        assert await engine.store.single().clock.set_back(300 * 10**6) <= 1
        assert (await at(engine)).timer_us == waits.timer_us


@pytest.mark.parametrize("seconds", [300, DAY_S])
@scenario
async def test_on_a_clock_that_was_set_back_a_timer_fires_when_that_clock_has_come_to_it(
    place: Place, seconds: int
) -> None:
    if place.engine == "postgres":
        pytest.skip("a test can't set the server's clock")
    ports = MovablePorts()
    async with program(place, Bank(), ports=ports) as engine:
        await start(engine, expires=in_s(60))
        worker = Worker(engine)
        await worker.look()
        ports.ahead_us -= seconds * 10**6
        ports.ahead_us += 59 * 10**6
        await worker.look()
        await engine.finish(30)
        assert (await at(engine)).state == "APPROVING"
        ports.ahead_us += seconds * 10**6  # and forward again: not earlier than the clock says
        await worker.look()
        await engine.finish(30)
        assert (await at(engine)).state == "APPROVING"
        ports.ahead_us += 2 * 10**6
        await worker.look()
        await engine.finish(30)
        assert (await at(engine)).state == "GONE"


# --- crashes -------------------------------------------------------------------------------------------------------


async def run(engine: Engine) -> None:
    for id in ("p-1", "p-2"):
        if await engine.get("payouts", id) is None:
            await start(engine, id, expires=in_s(-1))
        await until(engine, "GONE", id)


@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_at_every_call_fires_each_timer_once(place: Place, fault: str, tmp_path: Path) -> None:
    if place.engine == "postgres":
        pytest.skip("only on SQLite does every call pass the ports")
    async with program(place, Bank()) as engine:
        before = await booked(engine)
    call, reached = 0, True
    while reached:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        reached = await dies(copy, [Bank().flow()], run, fault, call)
        ports = MovablePorts()
        ports.ahead_us = HOUR_S * 10**6
        async with program(copy, Bank(), ports=ports) as engine:
            await run(engine)
            for id in ("p-1", "p-2"):
                assert await path(engine, id) == ["CREATED", "EXPIRED"]
            assert await booked(engine) == before + 2
    assert call > 8
