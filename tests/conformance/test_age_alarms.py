"""Records that only wait: over an age people are told, once; and not a whole back-off late where somebody is called."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import exchange
from tests.toy import Program, World, program, waits

from bursar.engine import Worker
from bursar.flows.deposits import Deposits
from bursar.flows.transfers import AccountType
from bursar.flows.transfers.conservation import conservation
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Alarm, Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

OLD = Alarm(reason="old", seconds=0.3)
OLDER = Alarm(reason="older", severity="critical", state="ASKING", seconds=0.6)
ELSEWHERE = Alarm(reason="elsewhere", state="SHIPPING", seconds=0.1)
WAIT_S = 20.0


def watched(*alarms: Alarm) -> World:
    world = World()
    world.flow_options["alarms"] = alarms
    return world


async def look_until(p: Program, worker: Worker, *reasons: str) -> None:
    async with asyncio.timeout(WAIT_S):
        while [reason for _, reason in await p.reasons()] != list(reasons):
            await worker.look()
            await p.engine.finish(WAIT_S)
            await asyncio.sleep(0.01)


async def undriven(p: Program, record: Record) -> None:
    """Nobody looks at it any more."""
    async with asyncio.timeout(WAIT_S):
        while (await p.at(record)).due_us is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@scenario
async def test_what_waits_too_long_is_told_once_per_alarm(place: Place) -> None:
    async with program(place, watched(OLD, OLDER, ELSEWHERE)) as p:
        worker = Worker(p.engine)
        record = await p.now(await p.order("o-1", ask=True))
        await worker.look()
        assert await p.reasons() == []
        await look_until(p, worker, "old")
        await look_until(p, worker, "old", "older")
        alerts = await p.engine.store.read.alerts.open()
        assert [alert.raised_us - record.since_us >= age for alert, age in zip(alerts, (0.3e6, 0.6e6), strict=True)]
        assert "o-1 is ASKING: it waits for approver since 0 s" in alerts[0].message
        await undriven(p, record)
        assert await p.people.acknowledge(record.number, "old", actor="ann")
        for _ in range(3):
            assert await worker.look() == 0
        assert [reason for _, reason in await p.reasons()] == ["older"]
        assert (await p.at(record)).version == 2, "to look at it is no transition"
        assert (await p.people.signal("orders", "o-1", "REJECT", actor="ann", reason="too late")).state == "REJECTED"


@scenario
async def test_whoever_speaks_in_time_is_not_told_of(place: Place) -> None:
    async with program(place, watched(OLD)) as p:
        worker = Worker(p.engine)
        await worker.look()
        record = await p.order("o-1", ask=True)
        await p.people.signal("orders", "o-1", "REJECT", actor="ann", reason="no")
        assert (await p.at(record)).due_us is None
        await asyncio.sleep(0.4)  # past its alarm
        assert await worker.look() == 0
        assert await p.reasons() == []


@scenario
async def test_a_start_that_looks_at_everything_does_not_make_it_wait_longer(place: Place) -> None:
    """Given a record that waits, then a restart that claims it puts it back to when its alarm would ring."""
    async with program(place, World()) as p:
        record = await p.order("o-1", ask=True)
    async with program(place, World(), worker="two") as q:
        worker = Worker(q.engine)
        await worker.look()
        await q.engine.finish(WAIT_S)
        found = await q.at(record)
        assert (waits(found), await q.reasons()) == (True, [])


@scenario
async def test_a_flow_without_alarms_is_never_looked_at(place: Place) -> None:
    async with program(place, watched()) as p:
        record = await p.now(await p.order("o-1", ask=True))
        assert (record.state, (await p.at(record)).due_us) == ("ASKING", None)


@scenario
async def test_a_call_is_made_when_an_alarm_is_due(place: Place) -> None:
    """Given a back-off far longer than an alarm's age, then it rings at that age and not after the back-off."""
    world = watched(Alarm(reason="old", state="SHIPPING", seconds=0.4))
    world.says["ship"] = [Outcome.TIMEOUT] * 100
    world.flow_options["retry"] = Retry(first_s=300, cap_s=300)
    async with program(place, world) as p:
        worker = Worker(p.engine)
        await worker.look()  # the first look takes everything, due or not
        record = await p.now(await p.order("o-1"))
        assert await p.reasons() == []
        await look_until(p, worker, "old")
        assert world.calls["ship"] == 2
        again = await p.at(record)
        assert again.due_us is not None
        assert again.due_us - p.engine.ports.now_us() > 100e6, "after that the back-off counts"


@scenario
async def test_a_deposit_that_waits_for_a_second_person_is_told(place: Place, tmp_path: Path) -> None:
    """And what other flows drive in the same tables is none of I5's business."""
    async with exchange(place, tmp_path) as here:
        deposits = Deposits(here.transfers, confirm_above={"USDT": 5}, waits_s=0.3)
        await deposits.ask(7, "USDT", "10", reference="wire-9", actor="ann")
        worker = Worker(deposits.engine)
        async with asyncio.timeout(WAIT_S):
            while not (found := await here.bursar.store.read.alerts.open()):
                await worker.look()
                await asyncio.sleep(0.02)
        assert [(alert.reason, alert.severity) for alert in found] == [("waiting", "warning")]
        assert "wire-9" in found[0].message
        await deposits.ask(7, "USDT", "10", reference="wire-10", actor="ann")
        finding = await conservation(here.transfers, AccountType.SPOT, await here.core.client())
        assert (finding.ok, finding.judged) == (True, True)
        assert (await deposits.confirm(7, "USDT", "10", reference="wire-9", actor="ben")).state == "BOOKED"
