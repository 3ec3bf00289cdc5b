"""L24: after the clock is set back nothing waits longer than its back-off, whatever the distance.

Five minutes are the hard case: too little to look like a mistake by itself. On SQLite the clock is the machine's, on
PostgreSQL the server's; a test can't set that, so what the worker sees of it is moved, and the rows with it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.builders import MovablePorts, Place, scenario
from tests.conformance.test_transfers import FUNDING, SPOT, behind, exchange
from tests.toy import Program, World, program

from bursar.engine import AlertDispatcher, Notice, Worker
from bursar.engine.clock import SET_BACK_MIN_US, DatabaseClock, Snowflakes
from bursar.flows.transfers import Limits, TransferRefused
from bursar.model.outcome import Outcome
from bursar.model.retry import Alarm, Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

BACKS_S = [2, 60, 300, 3_600, 86_400]
SHORT = Retry(first_s=0.05, cap_s=0.1)
PATIENCE_S = 20.0


class Machine(MovablePorts):
    """Its clock, and for PostgreSQL what is seen of the server's, can be set back; due rows stay where they are."""

    def set_back(self, seconds: float) -> None:
        self.ahead_us -= int(seconds * 1e6)


async def later(p: Program, seconds: float) -> None:
    """PostgreSQL: instead of its clock going back, all due times go ahead."""
    if not p.engine.store.has_clock:
        return
    ahead = f"interval '{seconds} seconds'"
    async with p.engine.store.connection() as connection:  # type: ignore[attr-defined]
        await connection.execute(f"UPDATE bursar.records SET due = due + {ahead}")
        await connection.execute(f"UPDATE bursar.alert_deliveries SET due = due + {ahead}")
        await connection.execute(f"UPDATE bursar.forced_calls SET due = due + {ahead}")
        await connection.execute(f"UPDATE bursar.nodes SET until = until + {ahead} WHERE holder <> ''")


def seen(p: Program, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """PostgreSQL: the worker sees the server's clock go back with the machine's."""
    store = p.engine.store
    if store.has_clock:
        real = store.now_us

        async def now_us() -> int:
            return await real() + machine.ahead_us

        monkeypatch.setattr(store, "now_us", now_us)


@pytest.mark.parametrize("seconds", BACKS_S)
@scenario
async def test_a_record_is_called_again_after_its_back_off(
    place: Place, monkeypatch: pytest.MonkeyPatch, seconds: int
) -> None:
    """Those that wait for a back-off, and those that a dead worker had leased."""
    machine = Machine()
    world = World(ship=[Outcome.TIMEOUT])
    world.flow_options["retry"] = SHORT
    async with program(place, world, ports=machine, lease_s=0.5) as p:
        seen(p, machine, monkeypatch)
        worker = Worker(p.engine, scan_s=0.02)
        await worker.look()
        waits = await p.now(await p.order("waits"))
        leased = await p.order("leased")  # by a process that never drives it
        assert (waits.state, waits.attempt) == ("SHIPPING", 1)
        await worker.look()
        machine.set_back(seconds)
        await later(p, seconds)
        running = asyncio.create_task(worker.run())
        async with asyncio.timeout(PATIENCE_S):
            await p.until(waits, "DONE")
            await p.until(leased, "DONE")
        worker.stop()
        await running


@scenario
async def test_a_worker_that_starts_after_it_takes_what_a_dead_one_had_leased(place: Place) -> None:
    """Nobody saw the clock go back: leased for longer than any lease is not leased."""
    machine = Machine()
    async with program(place, World(), ports=machine, worker="dead", lease_s=0.5) as p:
        record = await p.order("o-1")
        machine.set_back(300)
        await later(p, 300)
        async with program(place, World(), ports=machine, worker="living", lease_s=0.5) as q:
            assert await Worker(q.engine).look() == 1
            await q.until(record, "DONE")


@scenario
async def test_an_alert_is_told_again_after_its_back_off(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    machine, told = Machine(), list[Notice]()

    async def sink(notice: Notice) -> None:
        told.append(notice)
        if len(told) == 1:
            raise ConnectionError("away")

    async with program(place, World(), ports=machine) as p:
        seen(p, machine, monkeypatch)
        worker = Worker(p.engine)
        await worker.look()
        dispatcher = AlertDispatcher(p.engine.store, {"phone": sink}, back_off=SHORT)
        await p.engine.alert(None, "test", "critical", "look at this")
        assert await dispatcher.dispatch() == 0
        machine.set_back(300)
        await later(p, 300)
        async with asyncio.timeout(PATIENCE_S):
            while len(told) < 2:
                await worker.look()
                await dispatcher.dispatch()
                await asyncio.sleep(0.01)


@scenario
async def test_a_node_number_is_not_lost_by_it(place: Place) -> None:
    """A thousand restarts on a clock that was set back would otherwise use up all numbers; ids never repeat."""
    machine = Machine()
    async with program(place, World(), ports=machine) as p:
        store = p.engine.store
        first = Snowflakes(store)
        made = [await first.next() for _ in range(3)]
        machine.set_back(86_400)
        await later(p, 86_400)
        two_days = "now() + interval '2 days'" if store.has_clock else f"{machine.now_us() + 2 * 86_400 * 10**6}"
        await behind(place, f"UPDATE {{s}}nodes SET until = {two_days}, holder = 'gone' WHERE node <> {first._node}")
        second = Snowflakes(store)
        made += [await second.next() for _ in range(3)]
        assert second._node == first._node
        made += [await first.next() for _ in range(3)]
        first._renewed = -1e9  # it asks for its number again, which it does every 20 s
        made += [await first.next() for _ in range(3)]
        assert first._node != second._node
        assert len(set(made)) == len(made)


@scenario
async def test_an_age_alarm_rings_although_the_clock_was_set_back(place: Place) -> None:
    """Set back past its beginning, a record seems to be younger than nothing: too early is better than never."""
    machine = Machine()
    world = World(ship=[Outcome.TIMEOUT] * 2)
    world.flow_options |= {"retry": SHORT, "alarms": (Alarm(reason="old", seconds=100),)}
    async with program(place, world, ports=machine) as p:
        record = await p.now(await p.order("o-1"))
        assert await p.reasons() == []
        machine.set_back(300)
        await p.now(await p.at(record))
        assert [reason for _, reason in await p.reasons()] == ["old"]


@pytest.mark.parametrize("by_s", [0, 0.5, 2, 300, -300])
@scenario
async def test_the_clock_is_set_back_only_if_it_is(place: Place, monkeypatch: pytest.MonkeyPatch, by_s: float) -> None:
    """Not by a jump ahead, nor by less than anybody minds; and then it is measured."""
    machine = Machine()
    async with program(place, World(), ports=machine) as p:
        seen(p, machine, monkeypatch)
        clock = DatabaseClock(p.engine.store)
        assert await clock.set_back() == 0
        machine.set_back(by_s)
        found: Any = await clock.set_back()
        assert await clock.set_back() == 0
        assert (found == 0) if by_s * 1e6 < SET_BACK_MIN_US else (abs(found - by_s * 1e6) < 1e6)


@scenario
async def test_limits_are_of_the_databases_time(place: Place, tmp_path: Path) -> None:
    """On PostgreSQL a host's own clock does not matter; on SQLite there is no other."""
    machine = Machine()
    limits = Limits(per_second=None, per_day=1)
    async with exchange(place, tmp_path, limits=limits, ports=machine) as here:
        assert (await here.move(FUNDING, SPOT, "1")).state == "COMMITTED"
        machine.set_back(86_400)
        if here.bursar.ledger.store.has_clock:
            with pytest.raises(TransferRefused, match="DAILY_LIMIT_EXCEEDED"):
                await here.move(FUNDING, SPOT, "1")
        else:
            assert (await here.move(FUNDING, SPOT, "1")).state == "COMMITTED"
