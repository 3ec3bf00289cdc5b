"""The process dies at every call to its database, before or after its effect; the next one finishes everything.

Here on real SQLite files, with three orders: one goes well, one loses a reply, one is refused by the shop and given
back. Each other side does each thing once, each entry is booked once, and no order is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import pytest
from tests.builders import MovablePorts, Place, check_sound, scenario, seed
from tests.crashing import dies
from tests.toy import HAPPY, Order, Program, World, program

from bursar.engine import Engine, Worker
from bursar.model.errors import BursarError
from bursar.writer import Limit, Operation

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

ENDS = {"good": "DONE", "lossy": "DONE", "refused": "FAILED"}
HOUR_US = 3_600_000_000


def world() -> World:
    made = World()
    made.loses = {("lossy", "charge"), ("lossy", "ship"), ("refused", "refund")}
    made.refuses = {("refused", "ship")}
    return made


async def run(engine: Engine) -> None:
    """Start the three as an API would, with the client's own keys, and drive them to their ends."""

    async def one(id: str) -> None:
        remember = Operation(scope="orders:alice", id=f"client-{id}", op="create", fingerprint=id)
        limit = Limit(key="day", count_max=3, amount_max=9, until_us=2**60, code="TOO_MANY")
        started = await engine.start("orders", Order(minor=1_000_000), id=id, operation=remember, limits=(limit,))
        record = started.record
        while record.state not in ENDS.values():
            record = await engine.process_now(record, 60)

    for id in ENDS:  # one after the other: together they would ride in a handful of units
        await one(id)


async def finishes(p: Program) -> None:
    """The client asks again, and a worker takes up what is left."""
    worker = Worker(p.engine)
    async with asyncio.timeout(30):
        again = asyncio.ensure_future(run(p.engine))
        while not again.done():
            with contextlib.suppress(BursarError):
                await worker.look()
            await asyncio.sleep(0.001)
        await again


async def check(p: Program, outside: World) -> None:
    for id, end in ENDS.items():
        record = await p.engine.get("orders", id)
        assert record is not None
        assert (record.state, record.in_flight_posting, record.due_us) == (end, 0, None)
        path = [step for step in await p.path(record) if "UNKNOWN" not in step]
        assert path[:4] == HAPPY[:4]
        assert len(path) == (5 if end == "DONE" else 6), path
    assert outside.effects == {
        **{(id, "charge"): 1 for id in ENDS},
        **{(id, "ship"): 1 for id in ("good", "lossy")},
        ("refused", "refund"): 1,
    }
    assert await p.balances() == [1_000_000, 0, 2_000_000]
    assert "critical" not in dict(await p.reasons())
    await check_sound(p.ledger)


@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_at_every_call_to_the_database(place: Place, fault: str, tmp_path: Path) -> None:
    async with program(place, World()) as p:
        await seed(p.ledger, "alice", "3")
    call = 0
    while True:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        outside = world()
        reached = await dies(copy, [outside.flow()], run, fault, call)
        clock = MovablePorts()
        clock.ahead_us = HOUR_US  # whatever it was waiting for is due by now
        async with program(copy, outside, ports=clock) as p:
            await finishes(p)
            await check(p, outside)
        if not reached:
            break
    assert call > 12
