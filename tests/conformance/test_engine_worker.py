"""Workers: whatever is not at its end is found, whatever else is broken, full, slow or stuck."""

from __future__ import annotations

import asyncio
import sqlite3
from typing import Any

import asyncpg
import pytest
from tests.builders import Place, scenario
from tests.toy import PATIENCE_S, Order, Program, World, program

from bursar.engine import Engine, Worker
from bursar.model.errors import Conflict, DatabaseUnavailable
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.store.postgres.arrays import SQL as POSTGRES
from bursar.store.postgres.connecting import SETTINGS
from bursar.store.sqlite.calls import SQL as LITE
from bursar.store.sqlite.calls import register
from bursar.writer import Change, ChangeResult, Operation

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


async def behind(place: Place, sqlite: str, postgres: str = "") -> None:
    """Change rows behind everybody's back."""
    if place.engine == "sqlite":
        with sqlite3.connect(place.path, timeout=20) as connection:
            connection.execute(sqlite)
        connection.close()
    else:
        other = await asyncpg.connect(place.url)
        await other.execute(postgres or sqlite.replace("records", "bursar.records"))
        await other.close()


async def look_until(worker: Worker, p: Program, records: list[Record], *states: str) -> None:
    """Look again and again, as `run` does, until all are there."""
    async with asyncio.timeout(PATIENCE_S):
        while {(await p.at(record)).state for record in records} - set(states):
            await worker.look()
            await asyncio.sleep(0.002)


@scenario
async def test_what_a_dead_process_left_is_finished_by_the_next(place: Place) -> None:
    """Given more records than queue and hands hold, when a new process starts, then it finishes them at once."""
    world = World()
    async with program(place, world) as p:
        left = [await p.order(f"o-{n}") for n in range(50)]
    async with program(place, world) as p:
        worker = Worker(p.engine, queue_max=10, concurrency=4, scan_s=0.01)
        running = asyncio.create_task(worker.run())
        for record in left:
            await p.until(record, "DONE")
        worker.stop()
        await running
    assert len(world.effects) == 100
    assert world.calls == {"charge": 50, "ship": 50}


@scenario
async def test_at_start_it_takes_what_nobody_else_drives(place: Place) -> None:
    """Mine, nobody's, and others' whose lease is over; not what somebody is driving."""
    world = World(ship=[Outcome.TIMEOUT])
    world.flow_options["retry"] = Retry(first_s=500, cap_s=500)
    async with program(place, world, worker="me") as p, program(place, World(), worker="other") as q:
        parked = await p.now(await p.order("parked"))  # due in minutes, and nobody's
        assert (parked.state, parked.worker) == ("SHIPPING", "")
        mine, theirs, dead = await p.order("mine"), await q.order("theirs"), await q.order("dead")
        await behind(
            place,
            "UPDATE records SET due = due - 60000000 WHERE id = 'dead'",
            "UPDATE bursar.records SET due = due - interval '60 s' WHERE id = 'dead'",
        )
        worker = Worker(p.engine)
        assert await worker.look() == 3
        await look_until(worker, p, [parked, mine, dead], "DONE")
        assert (await p.at(theirs)).state == "CHARGING"


@scenario
async def test_later_it_takes_only_what_is_due(place: Place) -> None:
    world = World()
    async with program(place, world, worker="me", lease_s=500) as p:
        worker = Worker(p.engine)
        assert await worker.look() == 0
        record = await p.order()
        assert await worker.look() == 0  # its starter has it
        await behind(place, "UPDATE records SET due = 1", "UPDATE bursar.records SET due = to_timestamp(1)")
        assert await worker.look() == 1
        assert await worker.look() == 0
        await p.until(record, "DONE")


@scenario
async def test_a_clock_that_had_jumped(place: Place) -> None:
    """L24: due ten years from now counts as due."""
    async with program(place, World(), worker="me") as p:
        worker = Worker(p.engine)
        await worker.look()
        record = await p.order()
        await behind(
            place,
            "UPDATE records SET due = due + 315360000000000, worker = 'other'",
            "UPDATE bursar.records SET due = due + interval '10 years', worker = 'other'",
        )
        assert await worker.look() == 1
        await p.until(record, "DONE")


@pytest.mark.parametrize(("queue_max", "concurrency"), [(1, 1), (2, 1), (7, 3), (1000, 2)])
@scenario
async def test_a_full_queue_loses_nothing(place: Place, queue_max: int, concurrency: int) -> None:
    world = World()
    async with program(place, world, lease_s=0.2) as p:
        worker = Worker(p.engine, queue_max=queue_max, concurrency=concurrency, scan_s=0.01)
        running = asyncio.create_task(worker.run())
        records = list(await asyncio.gather(*[p.order(f"o-{n}") for n in range(40)]))
        for record in records:
            await p.until(record, "DONE")
        worker.stop()
        await running
        assert set(world.effects.values()) == {1}


@scenario
async def test_one_that_hangs_does_not_delay_the_others(place: Place) -> None:
    world = World()
    async with program(place, world, lease_s=0.5) as p:  # those who queue for longer would be called again
        hanging = await p.order("hangs")
        world.hangs["hangs"] = asyncio.Event()
        others = [await p.order(f"o-{n}") for n in range(20)]
        worker = Worker(p.engine, concurrency=3, scan_s=0.01)
        running = asyncio.create_task(worker.run())
        for record in others:
            await p.until(record, "DONE")
        assert (await p.at(hanging)).state == "CHARGING"
        assert world.calls["charge"] == 21  # found again by its lease, and not called twice at a time
        world.hangs["hangs"].set()
        await p.until(hanging, "DONE")
        worker.stop()
        await running


@scenario
async def test_unreadable_rows_do_not_stop_the_scan(place: Place) -> None:
    """Given rows broken behind our back, then all the others are driven, and people are told of each once."""
    async with program(place, World(), lease_s=0.05) as p:
        bad = ["shape", "state", "flow"] + (["text", "error"] if place.engine == "sqlite" else [])
        for id in bad:
            await p.order(id)
        good = [await p.order(f"o-{n}") for n in range(10)]
        await behind(place, "UPDATE records SET body = '{\"what\": 5}' WHERE id = 'shape'")
        await behind(place, "UPDATE records SET state = 'NOWHERE' WHERE id = 'state'")
        await behind(place, "UPDATE records SET flow = 'forgotten' WHERE id = 'flow'")
        if place.engine == "sqlite":
            await behind(place, "UPDATE records SET body = CAST(x'ff00fe' AS TEXT) WHERE id = 'text'")
            await behind(place, "UPDATE records SET error = CAST(x'ff00fe' AS TEXT) WHERE id = 'error'")
        worker = Worker(p.engine)
        await look_until(worker, p, good, "DONE")
        more = [await p.order(f"p-{n}") for n in range(5)]
        await look_until(worker, p, more, "DONE")
        broken = {"shape", "state"} | ({"text"} & set(bad))
        alerts = await p.engine.store.read.alerts.open()
        assert {alert.reason for alert in alerts} == {"can't be driven"}
        assert {alert.message.split()[1] for alert in alerts} == broken
        assert len(alerts) == len(broken)


@scenario
async def test_a_scan_that_fails_is_followed_by_another(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a database that is away for a while, or a mistake of ours, then the worker goes on."""
    async with program(place, World()) as p:
        record = await p.order()
        worker = Worker(p.engine, scan_s=0.01)
        real, trouble = worker._claim_all, [DatabaseUnavailable("away"), RuntimeError("our mistake"), OSError("net")]

        async def claim(flow: str, most: int) -> Any:
            if trouble:
                raise trouble.pop()
            return await real(flow, most)

        monkeypatch.setattr(worker, "_claim_all", claim)
        running = asyncio.create_task(worker.run())
        await p.until(record, "DONE")
        worker.stop()
        await running


@scenario
async def test_a_worker_stops_when_told(place: Place) -> None:
    """It takes no more, and returns soon, whatever still hangs."""
    world = World()
    async with program(place, world) as p:
        for n in range(5):
            world.hangs[f"o-{n}"] = asyncio.Event()
            await p.order(f"o-{n}")
        worker = Worker(p.engine, scan_s=500, concurrency=2)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(PATIENCE_S):
            while world.calls["charge"] < 2:
                await p.engine.ports.sleep(0.005)
            worker.stop()
            await running
        assert p.engine.in_progress == 2


@scenario
async def test_a_stop_during_a_look_is_not_slept_through(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    async with program(place, world) as p:
        for n in range(5):
            world.hangs[f"o-{n}"] = asyncio.Event()
            await p.order(f"o-{n}")
        worker = Worker(p.engine, scan_s=500, concurrency=2)
        real = worker.look

        async def look() -> int:
            found = await real()
            worker.stop()
            return found

        monkeypatch.setattr(worker, "look", look)
        async with asyncio.timeout(5):
            await worker.run()
        assert p.engine.in_progress == 2


# --- process_now, finish -------------------------------------------------------------------------------------------


@scenario
async def test_process_now_returns_by_its_deadline_and_the_step_goes_on(place: Place) -> None:
    world = World()
    async with program(place, world) as p:
        record = await p.order("o-1")
        world.hangs["o-1"] = asyncio.Event()
        async with asyncio.timeout(5):
            waiting = await p.now(record, 0.02)
        assert waiting.state == "CHARGING"
        impatient = asyncio.create_task(p.now(record, 500))
        await asyncio.sleep(0)
        impatient.cancel()  # a client that hangs up
        await asyncio.gather(impatient, return_exceptions=True)
        world.hangs["o-1"].set()
        await p.until(record, "DONE")
        assert world.calls == {"charge": 1, "ship": 1}


@scenario
async def test_several_who_wait_for_one_record_drive_it_once(place: Place) -> None:
    world = World()
    async with program(place, world) as p:
        record = await p.order()
        found = await asyncio.gather(*[p.now(record) for _ in range(10)])
        assert {f.state for f in found} == {"DONE"}
        assert world.calls == {"charge": 1, "ship": 1}


@scenario
async def test_finish_parks_what_does_not_end(place: Place) -> None:
    """Whoever waits for it gets the record as it is, and the next process takes it up at once."""
    world = World()
    async with program(place, world) as p:
        record = await p.order("o-1")
        world.hangs["o-1"] = asyncio.Event()
        waiting = asyncio.create_task(p.now(record, 500))
        async with asyncio.timeout(PATIENCE_S):
            while not world.calls["charge"]:
                await p.engine.ports.sleep(0.005)
            assert await p.engine.finish(0.01) == 1
            assert (await waiting).state == "CHARGING"
        assert p.engine.in_progress == 0
        assert await p.engine.finish(0.01) == 0
    world.hangs.clear()
    async with program(place, world) as p:
        await look_until(Worker(p.engine), p, [record], "DONE")
        assert world.effects == {("o-1", "charge"): 1, ("o-1", "ship"): 1}


@scenario
async def test_a_database_that_goes_away_while_waiting(place: Place) -> None:
    """Given a store that closes under a call, then whoever waits gets what was known, and nothing is lost."""
    world = World()
    async with program(place, world) as p:
        record = await p.order("o-1")
        world.hangs["o-1"] = asyncio.Event()
        waiting = asyncio.create_task(p.now(record, 0.2))
        async with asyncio.timeout(PATIENCE_S):
            while not world.calls["charge"]:
                await p.engine.ports.sleep(0.005)
        await p.engine.store.close()
        world.hangs["o-1"].set()
        assert (await waiting).state == "CHARGING"
        await p.engine.finish(PATIENCE_S)
    world.hangs.clear()
    async with program(place, world) as p:
        await look_until(Worker(p.engine), p, [record], "DONE")
        assert set(world.effects.values()) == {1}


@scenario
async def test_a_flow_that_is_not_known_here_is_left_alone(place: Place) -> None:
    async with program(place, World()) as p:
        record = await p.order()
        stranger = Engine(p.engine.store, p.engine.writer, [], worker="stranger")
        assert await Worker(stranger).look() == 0
        assert (await p.at(record)).worker == "local"
        assert (await p.engine.process_now(record, PATIENCE_S)).state == "DONE"


@pytest.mark.parametrize("table", ["transitions", "outcomes"])
@pytest.mark.parametrize("statement", ["UPDATE {} SET {} = 'x'", "DELETE FROM {}"])
@scenario
async def test_what_happened_can_not_be_unwritten(place: Place, table: str, statement: str) -> None:
    """Histories and answers are insert-only, and the database itself says so."""
    async with program(place, World()) as p:
        remember = Operation(scope="s", id="k", op="create", fingerprint="x")
        await p.engine.start("orders", Order(), operation=remember)
        column = "event" if table == "transitions" else "outcome"
        with pytest.raises((sqlite3.Error, asyncpg.PostgresError), match="insert-only"):
            await behind(place, statement.format(table, column), statement.format(f"bursar.{table}", column))


@scenario
async def test_a_scan_reads_what_is_due_and_not_all_that_ever_ended(place: Place) -> None:
    """Given many records at their end, in tables that nobody has analysed, then the plan is by the index of the due."""
    flows, values = ["orders"], (1000, "w", 1, 1)
    async with program(place, World()):
        if place.engine == "sqlite":
            connection = sqlite3.connect(place.path)
            register(connection, lambda: 0)
            plans = connection.execute(f"EXPLAIN QUERY PLAN {LITE['claim_due']}", ('["orders"]', *values)).fetchall()
            plan = "\n".join(row[3] for row in plans)
            connection.close()
        else:
            other = await asyncpg.connect(place.url, server_settings=SETTINGS)
            await other.execute(
                "INSERT INTO bursar.records (number, flow, id, owner, state, version, attempt, transit, due, worker, "
                "body, error) SELECT -n, 'orders', n::text, '', 'DONE', 5, 0, 0, NULL, '', '{}', '' "
                "FROM generate_series(1, 20000) n"
            )
            await other.execute(f"PREPARE claim (text[], bigint, text, bigint, bigint) AS {POSTGRES['claim_due']}")
            found = await other.fetch(f"EXPLAIN EXECUTE claim (ARRAY{flows}, {', '.join(map(repr, values))})")
            plan = "\n".join(row[0] for row in found)
            await other.close()
        assert plan.count("records_due") == 4, plan
        assert plan.count("records_timer") == 1, plan
        assert "records_resting" not in plan
        assert "records_owner" not in plan
        assert "Seq Scan" not in plan
        assert "SCAN records" not in plan


@scenario
async def test_who_claims_what_another_is_just_leaving_drives_it(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its last word is written, and it is due again before whoever wrote that is gone: it must not wait for a lease."""
    async with program(place, World(charge=[Outcome.UNKNOWN, Outcome.UNKNOWN])) as p:
        said, leaving = asyncio.Event(), asyncio.Event()
        real = p.engine._drive

        async def slow(record: Record) -> Record:
            after = await real(record)
            said.set()
            await leaving.wait()
            return after

        monkeypatch.setattr(p.engine, "_drive", slow)
        record = (await p.engine.start("orders", Order("book"))).record
        first = p.engine.drive(record)
        await said.wait()
        claimed = await p.engine.get("orders", record.id)
        assert claimed is not None
        second = p.engine.drive(claimed)
        leaving.set()
        assert (await first).version == claimed.version
        assert (await second).version > claimed.version
        await asyncio.sleep(0)
        assert p.engine.in_progress == 0


@pytest.mark.parametrize("blow", [DatabaseUnavailable("gone for a moment"), Conflict("too many at once", 20)])
@scenario
async def test_what_could_not_be_written_goes_on_when_it_can_and_not_with_the_end_of_its_lease(
    place: Place, blow: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World()
    async with program(place, world, lease_s=600) as p:
        worker = Worker(p.engine, scan_s=0.01)
        await worker.look()
        real, blows = p.engine.writer.apply, [blow]

        async def apply(change: Change) -> ChangeResult:
            if change.moves[0].version and blows:
                raise blows.pop()
            return await real(change)

        monkeypatch.setattr(p.engine.writer, "apply", apply)
        record = await p.now(await p.order())
        assert (record.state, blows) == ("CHARGING", [])
        await look_until(worker, p, [record], "DONE")
    assert len(world.effects) == 2  # charged twice, which happened once


@scenario
async def test_a_note_beside_a_call_does_not_make_it_wait_for_its_lease(place: Place) -> None:
    """The record's version moves under its driver, whose answer is lost with that; it is his, and he asks again."""
    world = World(charge=[Outcome.UNKNOWN])
    async with program(place, world, lease_s=600) as p:
        record = await p.now(await p.order("o-1"))
        assert (record.state, record.attempt) == ("CHARGING", 1)
        worker = Worker(p.engine)
        real = p.engine.call

        async def noted(flow: Any, action: Any, item: Any) -> Any:
            answer = await real(flow, action, item)
            if item.record.version == record.version:
                await behind(place, "UPDATE records SET version = version + 1 WHERE id = 'o-1'")
            return answer

        p.engine.call = noted  # type: ignore[method-assign]
        await look_until(worker, p, [record], "DONE")
    assert world.calls == {"charge": 3, "ship": 1}


@scenario
async def test_a_record_that_is_claimed_again_in_the_queue_is_driven_as_it_is_now(place: Place) -> None:
    world = World()
    async with program(place, world) as p:
        worker = Worker(p.engine, concurrency=0)
        record = await p.order()
        assert await worker.look() == 1
        await p.engine.step(record)  # somebody moves it, and it is due again
        await behind(place, "UPDATE records SET due = due - 60000000", "UPDATE bursar.records SET due = now()")
        assert await worker.look() == 1
        worker.concurrency = 1
        await look_until(worker, p, [record], "DONE")
    assert world.calls == {"charge": 1, "ship": 1}


@scenario
async def test_what_was_moved_on_here_while_it_was_claimed_is_not_called_twice(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that has just started claims what a request is driving, and hears of it when that has gone on."""
    world = World(charge=[Outcome.UNKNOWN])
    async with program(place, world) as p:
        worker = Worker(p.engine)
        record = await p.order()
        real = worker._claim_all

        async def slow(flow: str, most: int) -> list[Record]:
            page = await real(flow, most)
            if [claimed.version for claimed in page] == [record.version]:
                assert (await p.now(record)).attempt == 1
            return page

        monkeypatch.setattr(worker, "_claim_all", slow)
        await worker.look()
        assert p.engine.in_progress == 0
        assert world.calls == {"charge": 1}
        await look_until(worker, p, [record], "DONE")
    assert world.calls == {"charge": 2, "ship": 1}


@scenario
async def test_an_alert_that_cannot_be_raised_leaves_the_record_to_the_next_scan(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given a record that can't be driven and a mistake of ours in raising its alert, then it is driven once it can."""
    async with program(place, World(), lease_s=0.05) as p:
        worker = Worker(p.engine)
        record = await p.order("o-1")
        real_step, real_alert = p.engine.step, p.engine.alert

        async def broken(*_: object) -> None:
            raise RuntimeError("our mistake")

        monkeypatch.setattr(p.engine, "step", broken)
        monkeypatch.setattr(p.engine, "alert", broken)
        await worker.look()
        await p.engine.finish(20)
        assert p.engine.in_progress == 0
        monkeypatch.setattr(p.engine, "step", real_step)
        monkeypatch.setattr(p.engine, "alert", real_alert)
        await look_until(worker, p, [record], "DONE")
