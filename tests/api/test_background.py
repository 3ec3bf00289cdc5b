"""What `serve` and `worker` do beside requests: it must be there, be started, and be started on the right things."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.api.office import ALICE, office, until

from bursar.engine import Answer, FlowRecord, Operators, forced
from bursar.flows.transfers import AccountType, Transfer
from bursar.model.outcome import Outcome
from bursar.rails.trading import Reply

TASKS = {
    "bursar-worker",
    "bursar-watch",
    "bursar-prune",
    "bursar-alerts",
    "bursar-pauses",
    "bursar-forced-calls",
    "bursar-holds",
}


async def _all_of_it(url: str, folder: Path) -> None:
    async with office(url, folder):
        assert {task.get_name() for task in asyncio.all_tasks()} >= TASKS


def test_nothing_that_runs_beside_requests_is_left_out(url: str, tmp_path: Path) -> None:
    asyncio.run(_all_of_it(url, tmp_path))


async def _pruned(url: str, folder: Path) -> None:
    async with office(url, folder, prune_interval_s=1) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, "FUNDING", "SPOT", "10")).json()["state"] == "COMMITTED"
        cores, client = here.runtime.bursar.store.read.cores, here.runtime.cores[AccountType.SPOT]

        async def has_risen() -> bool:
            known = await cores.get("spot")
            return known is not None and known.pruned_us is not None

        await until(has_risen)
        there, known = (await client.describe()).floors, await cores.get("spot")
        assert there.room > there.forget > 1
        assert known is not None
        assert (known.room >= there.room, known.forget >= there.forget) == (True, True), "written here first"
        assert 'bursar_core_floor{core="SPOT",floor="room"} 1.0\n' not in (await here.get("/metrics")).text


def test_cores_are_pruned_by_themselves(url: str, tmp_path: Path) -> None:
    """T32: with nobody to call it, room at a core would be used up for ever, and the core would grow until the end."""
    asyncio.run(_pruned(url, tmp_path))


async def _not_pruned(url: str, folder: Path) -> None:
    async with office(url, folder, prune_interval_s=1) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, "FUNDING", "SPOT", "10")).json()["state"] == "COMMITTED"

        async def refuses(**_: object) -> Reply:
            return Reply(Outcome.UNKNOWN, "FLOOR_TOO_HIGH")

        here.runtime.cores[AccountType.SPOT].prune = refuses  # type: ignore[method-assign]
        alerts = here.runtime.bursar.store.read.alerts

        async def is_told() -> bool:
            return "core spot is not pruned" in [alert.reason for alert in await alerts.open()]

        await until(is_told)


def test_a_core_that_does_not_let_itself_be_pruned_raises_an_alert(url: str, tmp_path: Path) -> None:
    """It would grow in silence, until it can't be started."""
    asyncio.run(_not_pruned(url, tmp_path))


async def _asked(url: str, folder: Path) -> None:
    async with office(url, folder, deadline_ms=100) as here:
        await here.fund(ALICE, "100")
        transfers = here.runtime.transfers
        rail = transfers.rails[AccountType.SPOT]
        deposit = rail.deposit

        async def lost(item: FlowRecord[Transfer]) -> Answer:
            await deposit(item)
            return Answer(outcome=Outcome.TIMEOUT)

        rail.deposit = lost  # type: ignore[method-assign]
        made = (await here.transfer(ALICE, "FUNDING", "SPOT", "10")).json()
        assert made["state"] == "PENDING"
        calls = here.runtime.bursar.store.read.forced_calls
        for person in ("anna", "ben"):
            await Operators(transfers.engine).force(
                "transfers", made["req_id"], "SUCCESS", actor=person, reason="ticket 17"
            )
        assert len(await calls.open()) == 1

        async def is_answered() -> bool:
            return await calls.open() == []

        await until(is_answered)


def test_the_rails_of_forced_calls_are_asked(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """T34: people may be wrong, and only the rail knows."""
    monkeypatch.setattr(forced, "FIRST_S", 0.5)
    monkeypatch.setattr(forced, "SCAN_S", 0.05)
    asyncio.run(_asked(url, tmp_path))
