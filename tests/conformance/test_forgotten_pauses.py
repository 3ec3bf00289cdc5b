"""A forgotten pause raises an alert, and again when it has lasted twice as long; a transfer's age is its whole life."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import FUNDING, SPOT, alerted, behind, exchange
from tests.toy import Program, World, program

from bursar.config import Config
from bursar.engine import Operators, lift_pause, set_pause, watch_pauses
from bursar.engine.pauses import alert_forgotten, overdue_us
from bursar.flows.transfers import AccountType
from bursar.flows.transfers.flow import ALARMS
from bursar.model.outcome import Outcome
from bursar.model.retry import Alarm, Retry
from bursar.runtime import alarms

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

HOUR_S = 3_600
REASON = "rail shop is paused"


async def lasts(p: Program, place: Place, hours: float) -> None:
    """The pause was set so long ago."""
    ago = f"now() - interval '{hours} hours'" if place.engine == "postgres" else f"{_ago_us(p, hours)}"
    await behind(place, f"UPDATE {{s}}pauses SET at = {ago}")


async def raised(place: Place, hours_ago: float, p: Program) -> None:
    """The alert was raised so long ago."""
    ago = f"now() - interval '{hours_ago} hours'" if place.engine == "postgres" else f"{_ago_us(p, hours_ago)}"
    await behind(place, f"UPDATE {{s}}alerts SET raised_at = {ago}")


def _ago_us(p: Program, hours: float) -> int:
    return p.engine.ports.now_us() - int(hours * HOUR_S * 1e6)


@scenario
async def test_a_forgotten_pause_is_told_when_it_is_too_long_and_when_it_doubles(place: Place) -> None:
    async with program(place, World()) as p:
        people = Operators(p.engine)

        async def told() -> list[str]:
            await alert_forgotten(p.engine, HOUR_S)
            return [reason for _, reason in await p.reasons()]

        await set_pause(p.engine.store, "rail", "shop", actor="ann", reason="they migrate")
        assert await told() == []
        await lasts(p, place, 1.1)
        assert await told() == [REASON]
        [alert] = await p.engine.store.read.alerts.open()
        assert "by ann: they migrate" in alert.message
        assert await told() == [REASON]
        await people.acknowledge(0, REASON, actor="bob")
        assert await told() == []  # seen, and not nagged about
        await lasts(p, place, 2.1)
        await raised(place, 1, p)
        assert await told() == [REASON]
        await people.acknowledge(0, REASON, actor="bob")
        assert await told() == []
        await lift_pause(p.engine.store, "rail", "shop", actor="ann", reason="done")
        await raised(place, 9, p)
        assert await told() == []


@pytest.mark.parametrize(
    ("age", "since"), [(0, None), (9, None), (10, 0), (19, 9), (20, 0), (39, 19), (40, 0), (85, 5), (-5, None)]
)
def test_when_a_pause_is_overdue(mode: str, age: int, since: int | None) -> None:
    assert overdue_us(age, 10) == since


@scenario
async def test_the_watch_of_pauses_runs_until_it_is_cancelled_or_is_off(place: Place) -> None:
    async with program(place, World()) as p:
        await watch_pauses(p.engine, 0)  # off: it ends at once
        await set_pause(p.engine.store, "rail", "shop", actor="ann", reason="they migrate")
        watching = asyncio.create_task(watch_pauses(p.engine, 0.05))
        async with asyncio.timeout(20):
            while [reason for _, reason in await p.reasons()] != [REASON]:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


@scenario
async def test_a_transfer_is_stuck_by_its_whole_life_not_by_its_last_state(place: Place, tmp_path: Path) -> None:
    """001 §9.5: it was created five minutes ago and has just come to TARGET_PENDING."""
    retry = Retry(first_s=500, cap_s=500)
    configured = alarms(Config(alert_after_s=300))  # as `bursar serve` has it
    assert [alarm.whole_life for alarm in (*ALARMS, *configured) if alarm.reason == "stuck"] == [True, True]
    async with exchange(place, tmp_path, works=False, retry=retry, alarms=configured) as here:
        here.break_rail(AccountType.SPOT, "deposit", Outcome.TIMEOUT, Outcome.TIMEOUT)
        view = await here.move(FUNDING, SPOT, "1")
        assert await alerted(here, view) == {}
        ago = "created_at - interval '301 seconds'" if place.engine == "postgres" else "created_at - 301000000"
        await behind(place, f"UPDATE {{s}}records SET created_at = {ago}")
        record = await here.transfers.engine.get("transfers", view.req_id)
        assert record is not None
        await here.transfers.engine.process_now(record, 10)
        assert list(await alerted(here, view)) == ["stuck"]


@pytest.mark.parametrize(("age_s", "life_s", "rings"), [(0, 59, False), (0, 60, True), (60, 0, True), (59, 59, False)])
def test_an_alarm_of_the_whole_life(mode: str, age_s: int, life_s: int, rings: bool) -> None:
    alarm = Alarm(reason="stuck", seconds=60, whole_life=True)
    assert alarm.rings("A", 1, age_s * 10**6, None, life_s * 10**6) is rings
    assert not Alarm(reason="here", seconds=60).rings("A", 1, 0, None, 61 * 10**6)
