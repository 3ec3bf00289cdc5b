"""A process that pays bills dies at every call to its database: no number, seat or amount is lost or doubled."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.bills import FLOW, NUMBER, RESERVED, SEAT, bill, ended, program, rows, sound
from tests.builders import MovablePorts, Place, scenario
from tests.crashing import dies

from bursar.engine import Engine, Worker
from bursar.model.errors import BursarError

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)  # where every call passes the ports

HOUR_US = 3_600_000_000
IDS = ("b1", "b2", "b3")


async def run(engine: Engine) -> None:
    for id in IDS:
        record = await engine.get("bills", id) or await bill(engine, id, amount=20)
        await ended(engine, record)


@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_at_every_call_loses_and_doubles_no_row(place: Place, fault: str, tmp_path: Path) -> None:
    async with program(place):
        pass
    call = 0
    while True:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        reached = await dies(copy, [FLOW], run, fault, call)
        clock = MovablePorts()
        clock.ahead_us = HOUR_US
        async with program(copy, clock) as engine:
            with contextlib.suppress(BursarError):
                await Worker(engine).look()
            await run(engine)
            records = {id: await engine.get("bills", id) for id in IDS}
            numbers = await rows(engine, NUMBER)
            assert numbers.pop("wallet") == (0, "sequence", 8)
            assert [r for r, _, _ in numbers.values()] == [r.number for r in records.values() if r]
            assert (await rows(engine, RESERVED))["wallet"] == (0, "total", 0)
            assert (await rows(engine, SEAT)) == {"1A": (records["b3"].number, "released", 0)}  # type: ignore[union-attr]
            assert {id: row.version for id in IDS for row in await versions(engine, id)} == dict.fromkeys(IDS, 3)
            await sound(engine)
        if not reached:
            break
    assert call > 12


async def versions(engine: Engine, id: str) -> list[Any]:
    row = await engine.store.read.flow_rows.get("bills", "attempt", id)
    return [] if row is None else [row]
