"""Records that start others and end others' waiting, in one transaction; polls that say nothing new.

An intent (`intents`) waits for approval, then starts a job (`jobs`) and waits for it. The job sends, polls until it is
confirmed, and its end is the intent's end: both move, or neither does.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.builders import MovablePorts, Place, scenario

from bursar import Bursar
from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, FlowRefused, NewRecord, RecordSignal, Worker
from bursar.model.errors import AlreadyExists, InvalidEntry, InvalidState, RecordMoved
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.proof import dead
from bursar.model.records import Record
from bursar.model.retry import Alarm, Retry
from bursar.ports import Ports
from bursar.testing import crash_everywhere
from bursar.writer import Change, Move, NewTransition, Operation

MODES = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
HOUR_US = 3_600_000_000

INTENTS = Machine(
    name="intents",
    initial="PENDING",
    events=("APPROVE", "DONE", "FAILED"),
    states=(
        State("PENDING", Kind.WAIT, awaits="approver"),
        State("QUEUED", Kind.WAIT, awaits="job"),
        State("COMPLETED", Kind.TERMINAL),
        State("FAILED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("PENDING", "APPROVE", "QUEUED"),
        Arrow("QUEUED", "DONE", "COMPLETED"),
        Arrow("QUEUED", "FAILED", "FAILED"),
    ),
)
JOBS = Machine(
    name="jobs",
    initial="SENDING",
    states=(
        State("SENDING", Kind.CALL, action="send"),
        State("CONFIRMING", Kind.CALL, action="confirm", poll_s=1800, effect=Effect.CONFIRM),
        State("CONFIRMED", Kind.TERMINAL),
        State("DEAD", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("SENDING", Outcome.SUCCESS, "CONFIRMING"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "DEAD"),
        Arrow("CONFIRMING", Outcome.SUCCESS, "CONFIRMED"),
        Arrow("CONFIRMING", Outcome.EXPLICIT_FAIL, "DEAD"),
    ),
)


class Intent(msgspec.Struct):
    job: str


class Job(msgspec.Struct):
    intent: str


def approve(item: FlowRecord[Intent], event: str, _answer: Answer) -> Booking:
    return Booking(starts=(NewRecord(flow="jobs", id=item.body.job, body=Job(item.id)),) if event == "APPROVE" else ())


def end(item: FlowRecord[Job], event: str, answer: Answer) -> Booking:
    if item.record.state == "SENDING" and event == "SUCCESS":
        return Booking()
    told, proof = ("DONE", {}) if event == "SUCCESS" else ("FAILED", dead(refused=answer.code))
    evidence = {"why": answer.code} | proof
    return Booking(signals=(RecordSignal(flow="intents", id=item.body.intent, event=told, evidence=evidence),))


class World:
    """The other side of jobs: what it says to `send` and `confirm`, in order; then SUCCESS."""

    def __init__(self, **says: list[Answer]) -> None:
        self.says = says
        self.calls: Counter[str] = Counter()

    def flows(self, **more: Any) -> list[Flow[Any]]:
        def action(name: str) -> Any:
            async def call(_item: FlowRecord[Job]) -> Answer:
                self.calls[name] += 1
                script = self.says.get(name, [])
                return script.pop(0) if script else Answer(outcome=Outcome.SUCCESS)

            return call

        actions = {name: action(name) for name in ("send", "confirm")}
        retry = Retry(first_s=0.001, cap_s=0.002)
        return [
            Flow(machine=INTENTS, body=Intent, actions={}, book=approve, alarms=()),
            Flow(machine=JOBS, body=Job, actions=actions, retry=retry, **({"book": end} | more)),
        ]


@contextlib.asynccontextmanager
async def program(place: Place, world: World, ports: Ports | None = None, **more: Any) -> AsyncIterator[Engine]:
    async with place.bursar(ports) as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, world.flows(**more))
        try:
            yield engine
        finally:
            await engine.finish(0)


async def approved(engine: Engine, id: str = "w1", job: str = "j1") -> Record:
    started = await engine.start("intents", Intent(job), id=id)
    return await engine.signal(started.record, "APPROVE", "ann", {})


async def until(engine: Engine, flow: str, id: str, state: str) -> Record:
    worker = Worker(engine)
    async with asyncio.timeout(30):
        while True:
            await worker.look()
            found = await engine.get(flow, id)
            if found is not None and found.state == state:
                return found
            for job in await engine.store.read.records.list("jobs"):  # also one whose driver was cancelled
                await engine.process_now(job, 5)


@MODES
@scenario
async def test_a_record_starts_another_and_its_end_ends_the_waiting(place: Place) -> None:
    async with program(place, World()) as engine:
        record = await approved(engine)
        assert record.state == "QUEUED"
        job = await engine.get("jobs", "j1")
        assert job is not None
        await until(engine, "jobs", "j1", "CONFIRMED")
        done = await engine.get("intents", "w1")
        assert done is not None
        assert done.state == "COMPLETED", "in the transaction of the job's end"
        last = (await engine.store.read.records.history(done.number))[-1]
        assert msgspec.json.decode(last.evidence)["from"] == {"flow": "jobs", "id": "j1"}
        assert engine.settled == {("jobs", "CONFIRMED"): 1, ("intents", "COMPLETED"): 1}


@MODES
@scenario
async def test_a_refusal_travels_to_the_record_that_waits(place: Place) -> None:
    world = World(confirm=[Answer(outcome=Outcome.EXPLICIT_FAIL, code="REVERTED")])
    async with program(place, world) as engine:
        await approved(engine)
        await until(engine, "jobs", "j1", "DEAD")
        found = await engine.get("intents", "w1")
        assert found is not None
        assert found.state == "FAILED"


@MODES
@scenario
async def test_a_start_that_is_refused_leaves_both_where_they_were(place: Place) -> None:
    async with program(place, World()) as engine:
        await approved(engine)
        second = (await engine.start("intents", Intent("j1"), id="w2")).record  # the same job
        with pytest.raises(AlreadyExists, match="is started once"):
            await engine.signal(second, "APPROVE", "ann", {})
        found = await engine.get("intents", "w2")
        assert found is not None
        assert (found.state, found.version) == ("PENDING", 1)


@MODES
@scenario
async def test_a_signal_that_the_other_record_does_not_wait_for_is_no_answer(place: Place) -> None:
    """The job's end can't be written with the intent's: it stays, is called again, and operators get an alert."""
    async with program(place, World()) as engine:
        job = (await engine.start("jobs", Job("w1"), id="j1")).record
        job = await engine.step(job) or job
        job = await engine.step(job) or job
        assert job.state == "CONFIRMING"
        assert "w1" in job.error
        await engine.start("intents", Intent("j1"), id="w1")
        job = await engine.step(job) or job
        assert job.state == "CONFIRMING"
        assert "cannot happen" in job.error
        (alert,) = await engine.store.read.alerts.open()
        assert (alert.severity, alert.reason) == ("critical", "booking refused")


@MODES
@scenario
async def test_another_record_that_moves_meanwhile_is_read_again(place: Place) -> None:
    """A lost compare-and-set names the record that moved: the job's own move is not lost for it."""
    async with program(place, World()) as engine:
        record = await approved(engine)
        job = await engine.get("jobs", "j1")
        assert job is not None
        assert job.worker == "", "a person's process may be gone in a moment: any worker takes it"
        job = await engine.step(job) or job
        real = engine.get
        moved: list[int] = []

        async def get(flow: str, id: str) -> Record | None:
            found = await real(flow, id)
            if flow == "intents" and not moved and found is not None:
                moved.append(await nudge(engine, found))  # after it was read, before it is written
            return found

        engine.get = get  # type: ignore[method-assign]
        job = await engine.step(job) or job
        assert (job.state, moved) == ("CONFIRMED", [record.number])
        found = await real("intents", record.id)
        assert found is not None
        assert found.state == "COMPLETED"


@MODES
@scenario
async def test_a_worker_that_comes_second_raises_no_alert(place: Place) -> None:
    """Two workers drive one job. The second finds the intent at its end: its own job has moved, and that is all."""
    async with program(place, World()) as one, program(place, World()) as two:
        await approved(one)
        job = await one.get("jobs", "j1")
        assert job is not None
        job = await one.step(job) or job
        assert (await one.step(job) or job).state == "CONFIRMED"
        late = await two.step(job)
        assert late is not None
        assert late.state == "CONFIRMED"
        assert await two.store.read.alerts.open() == []
        assert [t.event for t in await one.store.read.records.history(job.number)] == ["CREATED", "SUCCESS", "SUCCESS"]


@MODES
@scenario
async def test_a_repeated_request_gets_its_record_although_what_it_started_exists(place: Place) -> None:
    """Also where its start signals a record that waits no more."""
    request = Operation(scope="jobs:ann", id="key-1", op="create", fingerprint="x")

    def start(item: FlowRecord[Job]) -> Booking:
        if item.id == "started by w1":
            return Booking()
        new = NewRecord(flow="intents", id=f"of-{item.id}", body=Intent("none"))
        return Booking(starts=(new,), signals=(RecordSignal(flow="intents", id="w1", event="APPROVE"),))

    async with program(place, World(), book_start=start) as engine:
        await engine.start("intents", Intent("started by w1"), id="w1")
        first = await engine.start("jobs", Job("w1"), id="j1", operation=request)
        again = await engine.start("jobs", Job("w1"), id="j1", operation=request)
        assert (first.replayed, again.replayed, again.record.id) == (False, False, "j1")
        other = await engine.start("jobs", Job("w1"), id="j2", operation=request)
        assert (other.replayed, other.record.id) == (True, "j1")
        with pytest.raises(RecordMoved):
            await engine.start("jobs", Job("w1"), id="j1")
        with pytest.raises(InvalidState, match="APPROVE"):
            await engine.start("jobs", Job("w1"), id="j3")
        assert await engine.get("intents", "of-j3") is None


async def nudge(engine: Engine, record: Record) -> int:
    """Another process writes a note about a record that waits: its version moves, and nothing else."""
    note = NewTransition(record.state, "NOTE", record.state)
    move = Move(
        flow=record.flow,
        id=record.id,
        number=record.number,
        version=record.version,
        transitions=(note,),
        actor="x",
        delay_us=-1,
    )
    await engine.writer.apply(Change(moves=(move,)))
    return record.number


@MODES
@scenario
async def test_a_change_names_the_record_that_has_moved(place: Place) -> None:
    async with program(place, World()) as engine:
        records = [(await engine.start("intents", Intent(f"j{i}"), id=f"w{i}")).record for i in (1, 2)]
        await nudge(engine, records[1])
        moves = tuple(
            Move(
                flow=r.flow,
                id=r.id,
                number=r.number,
                version=r.version,
                transitions=(NewTransition(r.state, "NOTE", r.state),),
                actor="x",
                delay_us=-1,
            )
            for r in records
        )
        with pytest.raises(RecordMoved) as caught:
            await engine.writer.apply(Change(moves=moves))
        assert caught.value.id == "w2"
        first = await engine.get("intents", "w1")
        assert first is not None
        assert first.version == 1, "neither was written"
        kept = tuple(
            msgspec.structs.replace(m, version=v, in_flight_account="a") for m, v in zip(moves, (1, 2), strict=True)
        )
        with pytest.raises(InvalidEntry, match="two records"):
            await engine.writer.apply(Change(moves=kept))


@MODES
@scenario
async def test_a_booking_that_moves_one_record_twice_is_refused(place: Place) -> None:
    def both(item: FlowRecord[Job], _event: str, _answer: Answer) -> Booking:
        signal = RecordSignal(flow="intents", id=item.body.intent, event="DONE")
        return Booking(signals=(signal, signal))

    async with program(place, World(), book=both) as engine:
        record = await approved(engine)
        job = await engine.get("jobs", "j1")
        assert job is not None
        with pytest.raises(FlowRefused, match="twice"):
            await engine.step(job)
        found = await engine.get("intents", record.id)
        assert found is not None
        assert found.state == "QUEUED"


# --- polling -------------------------------------------------------------------------------------------------------

WAITS = Answer(outcome=Outcome.PENDING, unchanged=True)


@MODES
@scenario
async def test_a_poll_that_says_nothing_new_leaves_no_trace(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    clock = MovablePorts()
    world = World(confirm=[WAITS] * 20)
    async with program(place, world, clock) as engine:
        await approved(engine)
        job = await until(engine, "jobs", "j1", "CONFIRMING")
        before = world.calls["confirm"]
        with caplog.at_level(logging.INFO):
            for _ in range(15):
                clock.ahead_us += HOUR_US
                await Worker(engine).look()
                await engine.finish(5)
        assert world.calls["confirm"] >= before + 12
        found = await engine.get("jobs", "j1")
        assert found is not None
        assert (found.version, found.attempt, found.worker) == (job.version, 0, "")
        assert found.due_us is not None
        assert 1700e6 < found.due_us - await engine.store.read.clock.now_us() <= 1800e6, (
            "after the state's delay, not the flow's"
        )
        assert [t.event for t in await engine.store.read.records.history(found.number)] == ["CREATED", "SUCCESS"]
        assert await engine.store.read.alerts.open() == []
        assert not [line for line in caplog.records if line.levelno >= logging.CRITICAL]


@MODES
@scenario
async def test_an_answer_can_say_when_to_call_again(place: Place) -> None:
    said = msgspec.structs.replace(WAITS, retry_after_s=600.0)
    loud = Answer(outcome=Outcome.PENDING, retry_after_s=900.0)
    far = msgspec.structs.replace(WAITS, retry_after_s=10**9)
    async with program(place, World(confirm=[said, loud, far]), alarms=()) as engine:
        job = (await engine.start("jobs", Job("w1"), id="j1")).record
        job = await engine.step(job) or job
        for seconds in (600, 900, 1800):  # never beyond the longest delay that the flow knows (L24)
            job = await engine.step(job) or job
            found = await engine.get("jobs", "j1")
            assert found is not None
            assert found.due_us is not None
            assert abs(found.due_us - await engine.store.read.clock.now_us() - seconds * 10**6) < 5e6
        assert job.attempt == 1, "an answer that is not marked as unchanged is a call like any other"


@MODES
@scenario
async def test_an_alarm_of_the_polled_state_still_rings(place: Place) -> None:
    clock = MovablePorts()
    alarms = (Alarm(reason="stuck", tries=1, seconds=1), Alarm(reason="unconfirmed", state="CONFIRMING", seconds=7200))
    async with program(place, World(confirm=[WAITS] * 20), clock, alarms=alarms) as engine:
        job = (await engine.start("jobs", Job("w1"), id="j1")).record
        job = await engine.step(job) or job
        await engine.step(job)
        assert await engine.store.read.alerts.open() == []
        clock.ahead_us += 3 * HOUR_US
        await engine.step(job)
        assert [alert.reason for alert in await engine.store.read.alerts.open()] == ["unconfirmed"]


# --- crashes -------------------------------------------------------------------------------------------------------


async def client(b: Bursar) -> None:
    """What a process finds is whole; then it goes on."""
    engine = b.engine
    for id in ("w1", "w2"):
        async with b.store.snapshot() as tables:  # its worker is at work already
            intent, job = await tables.records.get("intents", id), await tables.records.get("jobs", f"job-{id}")
        assert (job is not None) == (intent is not None and intent.state != "PENDING")
        assert (job is not None and job.state == "CONFIRMED") == (intent is not None and intent.state == "COMPLETED")
    for id in ("w1", "w2"):
        record = await engine.get("intents", id)
        if record is None:
            record = (await engine.start("intents", Intent(f"job-{id}"), id=id)).record
        if record.state == "PENDING":
            record = await engine.signal(record, "APPROVE", "ann", {})
        await until(engine, "intents", id, "COMPLETED")


def test_killed_or_stopped_at_every_call_both_records_move_or_neither() -> None:
    def check(world: World, _result: None) -> None:
        assert world.calls["send"] >= 2

    assert crash_everywhere(client, flows=World.flows, world=World, check=check) > 50
