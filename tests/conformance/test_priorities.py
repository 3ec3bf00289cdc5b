"""Priorities and shares: high before low, low not starved, and a flow whose rail hangs delays no other."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.timed_payouts import Bank, at, behind, program, start

from bursar.engine import Answer, Booking, Flow, FlowRecord, NewRecord, Worker
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Priority, Record

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

PATIENCE_S = 30.0
MANY = 10_000


class Job(msgspec.Struct):
    priority: Priority = Priority.NORMAL


class Jobs:
    """A flow of one call; each waits until the test lets it go on."""

    def __init__(self, name: str, *, hangs: bool = False, **options: Any) -> None:
        self.name = name
        self.gate = asyncio.Event()
        self.called: list[str] = []
        if not hangs:
            self.gate.set()
        self.options = options

    def flow(self) -> Flow[Job]:
        async def call(item: FlowRecord[Job]) -> Answer:
            self.called.append(item.id)
            await self.gate.wait()
            return Answer(outcome=Outcome.SUCCESS)

        machine = Machine(
            name=self.name,
            initial="CALLING",
            states=(State("CALLING", Kind.CALL, action="call"), State("DONE", Kind.TERMINAL)),
            arrows=(Arrow("CALLING", Outcome.SUCCESS, "DONE"), Arrow("CALLING", Outcome.EXPLICIT_FAIL, "DONE")),
        )
        usual: dict[str, Any] = {"priority": lambda body: body.priority, "alarms": (), "call_timeout_s": 600.0}
        return Flow(machine=machine, body=Job, actions={"call": call}, **(usual | self.options))


async def due(place: Place, flow: str, count: int, priority: Priority = Priority.NORMAL, first: int = 1) -> None:
    """Many records that are due, the first the longest."""
    columns = "number, flow, id, owner, state, version, attempt, transit, due, worker, body, error, priority"
    values = f"10000000 + n, '{flow}', 'j-' || n, '', 'CALLING', 1, 0, 0, %s, '', '{{}}', '', {priority.value}"
    last = first + count - 1
    if place.engine == "postgres":
        rows = f"SELECT {values % 'to_timestamp(n)'} FROM generate_series({first}, {last}) n"
        await behind(place, f"INSERT INTO bursar.records ({columns}) {rows}")
        return
    rows = f"SELECT {values % 'n'}, 0, 0, 0 FROM s"
    series = f"WITH RECURSIVE s (n) AS (SELECT {first} UNION ALL SELECT n + 1 FROM s WHERE n < {last})"
    await behind(place, f"{series} INSERT INTO records ({columns}, since, created_at, updated_at) {rows}")


async def wait_for(condition: Any) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def counts(claimed: list[Record]) -> list[int]:
    return [sum(record.priority is priority for record in claimed) for priority in Priority]


@scenario
async def test_a_flow_gives_its_records_a_priority_when_they_start(place: Place) -> None:
    def starts(_item: Any, event: str, _answer: Answer) -> Booking:
        new = NewRecord(flow="jobs", id="other", body=Job(Priority.LOW))
        return Booking(starts=(new,) if event == "APPROVE" else ())

    async with program(place, Bank()) as engine:
        engine.register(Jobs("jobs").flow())
        for priority in Priority:
            await start(engine, f"p-{priority.value}", priority=priority)
            assert (await at(engine, f"p-{priority.value}")).priority is priority
        engine.flows["payouts"] = replace(engine.flows["payouts"], book=starts)
        moved = await engine.signal(await at(engine, "p-0"), "APPROVE", "ann", {})
        assert (await at(engine, "p-0")).priority is moved.priority is Priority.HIGH
        other = await engine.get("jobs", "other")
        assert other is not None
        assert other.priority is Priority.LOW


@scenario
async def test_a_claim_takes_the_higher_priority_first_and_some_of_each_lower_one(place: Place) -> None:
    async with program(place, Bank()) as engine:
        claim = engine.store.single().records.claim_due
        for n, priority in enumerate(Priority):
            await due(place, "jobs", 40, priority, first=1 + 100 * (2 - n))  # the lower, the longer it is due
        for expected in ([16, 2, 2], [16, 2, 2], [8, 8, 2], [0, 16, 2], [0, 12, 4], [0, 0, 16], [0, 0, 12], [0, 0, 0]):
            page = list(await claim(["jobs"], "w", 16, 10**9, 10**12))
            assert counts(page) == expected
            for priority in Priority:  # of one priority, what is due longest
                numbers = sorted(record.number for record in page if record.priority is priority)
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
        assert await claim(["other"], "w", 16, 10**9, 10**12) == []


@scenario
async def test_high_comes_before_low_and_low_is_not_starved(place: Place) -> None:
    """One place, and more high ones than it can take: every eighth turn is for the oldest, also of low priority."""
    jobs = Jobs("jobs")
    async with program(place, Bank()) as engine:
        engine.register(jobs.flow())
        worker = Worker(engine, concurrency=1, queue_max=64, scan_s=0.01)
        await worker.look()  # its first look takes all that is there, whatever its priority
        await due(place, "jobs", 10, Priority.LOW)
        await due(place, "jobs", 200, Priority.HIGH, first=1001)
        running = asyncio.create_task(worker.run())
        await wait_for(lambda: len(jobs.called) == 210)
        worker.stop()
        await running
        low = [place for place, id in enumerate(jobs.called) if int(id[2:]) <= 10]
        assert low[0] >= 7, "high first"
        assert len(low) == 10
        assert low[-1] < 200, "all low ones were called while high ones were left"


@scenario
async def test_a_flow_whose_rail_hangs_does_not_delay_another(place: Place) -> None:
    """Given 10,000 records of a flow that hangs, due longer and of higher priority, then it takes its share only."""
    hangs, works = Jobs("hangs", hangs=True, share=0.5), Jobs("works")
    await due_in(place, hangs)
    async with program(place, Bank()) as engine:
        engine.register(hangs.flow()).register(works.flow())
        worker = Worker(engine, concurrency=8, queue_max=100, scan_s=0.02)
        running = asyncio.create_task(worker.run())
        await wait_for(lambda: len(hangs.called) == 4)
        for n in range(20):
            record = (await engine.start("works", Job(Priority.LOW), id=f"w-{n}")).record
            await behind(
                place,
                f"UPDATE {{s}}records SET worker = '', due = {'now()' if place.engine == 'postgres' else 1} "
                f"WHERE number = {record.number} AND worker = 'local'",
            )
        await wait_for(lambda: len(set(works.called)) == 20)
        assert len(hangs.called) == engine.in_progress_of("hangs") == 4, "half of eight places"
        assert worker._queue.of("hangs") <= 50
        hangs.gate.set()
        await wait_for(lambda: len(hangs.called) > 500)  # and goes on once its rail does
        worker.stop()
        await running


async def due_in(place: Place, jobs: Jobs) -> None:
    async with program(place, Bank()):
        await due(place, jobs.name, MANY, Priority.HIGH)


@scenario
async def test_claims_ask_only_for_flows_that_have_room(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs, works = Jobs("hangs", hangs=True, share=0.25), Jobs("works")
    async with program(place, Bank()) as engine:
        engine.register(hangs.flow()).register(works.flow())
        await due(place, "hangs", 100)
        worker = Worker(engine, concurrency=8, queue_max=16)
        await worker.look()
        asked: list[list[str]] = []
        real = worker._claim_due

        async def claim(flows: list[str], most: int) -> list[Record]:
            asked.append(flows)
            return await real(flows, most)

        monkeypatch.setattr(worker, "_claim_due", claim)
        await worker.look()
        assert asked == [["payouts", "works"]]
        assert (engine.in_progress_of("hangs"), worker._queue.of("hangs")) == (2, 4)
        hangs.gate.set()
        await wait_for(lambda: worker._queue.of("hangs") == engine.in_progress_of("hangs") == 0)
        assert len(hangs.called) == 6
        await worker.look()
        await wait_for(lambda: len(hangs.called) > 6)


@scenario
async def test_places_are_counted_however_a_record_ends(place: Place) -> None:
    jobs = Jobs("jobs", hangs=True)
    async with program(place, Bank()) as engine:
        engine.register(jobs.flow())
        records = [(await engine.start("jobs", Job(), id=f"j-{n}")).record for n in range(3)]
        tasks = [engine.drive(record) for record in (*records, records[0])]  # twice: one after the other
        await wait_for(lambda: len(jobs.called) == 3)
        assert engine.in_progress_of("jobs") == engine.in_progress == 3
        jobs.gate.set()
        await asyncio.gather(*tasks)
        await wait_for(lambda: engine.in_progress == 0)
        assert engine.in_progress_of("jobs") == 0
        left = (await engine.start("jobs", Job(), id="j-9")).record
        jobs.gate.clear()
        engine.drive(left)
        assert await engine.finish(0.05) == 1
        assert engine.in_progress_of("jobs") == 0
