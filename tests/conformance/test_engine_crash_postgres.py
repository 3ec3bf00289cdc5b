"""A process that dies at any of its writes on PostgreSQL, or whose answer is lost: both records moved, or neither.

On SQLite every call passes the ports, and `tests/crashing.py` breaks those. Here the statement itself is broken, before
it reaches the server or after the server has committed it: as a process that dies there, or as a connection that is
lost while the process goes on and repeats what it has no answer to (L18).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import asyncpg
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_engine_others import Intent, World, program, until

from bursar.engine import Engine
from bursar.model.errors import BursarError
from bursar.store.postgres.arrays import SQL, WRITE, WRITE_RECORDS

POSTGRES = pytest.mark.parametrize("mode", ["postgres"], indirect=True)
WRITES = {WRITE.sql, WRITE_RECORDS.sql, SQL["claim_due"]}  # whatever else a record's way needs only reads


class Broken:
    """Writes of this process, counted; the one that goes wrong, and whether the process dies of it."""

    def __init__(self, at: int, *, written: bool, dies: bool) -> None:
        self.at, self.written, self.dies = at, written, dies
        self.count = 0
        self.reached = False
        self.dead = asyncio.Event()

    async def fetch(self, connection: asyncpg.Connection, sql: str, *args: Any, **more: Any) -> Any:
        if self.dead.is_set():
            await asyncio.Event().wait()  # a dead process does nothing more
        if sql not in WRITES:
            return await REAL(connection, sql, *args, **more)
        self.count += 1
        if self.count != self.at:
            return await REAL(connection, sql, *args, **more)
        self.reached = True
        if self.written:
            await REAL(connection, sql, *args, **more)
        connection.terminate()
        if self.dies:
            self.dead.set()
            await asyncio.Event().wait()
        raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")


REAL = asyncpg.Connection.fetch


@contextlib.contextmanager
def breaking(monkeypatch: pytest.MonkeyPatch, broken: Broken) -> Iterator[None]:
    async def fetch(connection: asyncpg.Connection, sql: str, *args: Any, **more: Any) -> Any:
        return await broken.fetch(connection, sql, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(asyncpg.Connection, "fetch", fetch)
        yield


async def run(engine: Engine, id: str) -> None:
    """An intent is started, approved, and its job driven to its end. Repeated, it goes on where it was."""
    record = await engine.get("intents", id)
    if record is None:
        record = (await engine.start("intents", Intent(f"job-{id}"), id=id)).record
    if record.state == "PENDING":
        await engine.signal(record, "APPROVE", "ann", {})
    await until(engine, "intents", id, "COMPLETED")


async def check(engine: Engine, id: str) -> None:
    """Both came to their end along each arrow once."""
    for flow, wanted, record_id in (
        ("intents", ["CREATED", "APPROVE", "DONE"], id),
        ("jobs", ["CREATED", "SUCCESS", "SUCCESS"], f"job-{id}"),
    ):
        record = await engine.get(flow, record_id)
        assert record is not None
        history = await engine.store.read.records.history(record.number)
        assert [step.event for step in history] == wanted
    assert [alert for alert in await engine.store.read.alerts.open() if alert.severity == "critical"] == []


@POSTGRES
@pytest.mark.parametrize("written", [True, False], ids=["after", "before"])
@scenario
async def test_a_process_that_dies_at_each_write(place: Place, written: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 30):
        broken = Broken(at, written=written, dies=True)
        with breaking(monkeypatch, broken):
            async with place.bursar() as bursar:
                engine = Engine(bursar.store, bursar.ledger.writer, World().flows())
                work, death = asyncio.ensure_future(run(engine, f"w{at}")), asyncio.ensure_future(broken.dead.wait())
                await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
                left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
                for task in left:
                    task.cancel()
                await asyncio.gather(*left, return_exceptions=True)
                broken.dead.clear()  # what is left is the closing of sockets, which the kernel does for a dead process
        if not broken.reached:
            break
        async with program(place, World()) as engine:
            await run(engine, f"w{at}")
            await check(engine, f"w{at}")
    assert at > 4


@POSTGRES
@pytest.mark.parametrize("written", [True, False], ids=["after", "before"])
@scenario
async def test_a_connection_that_is_lost_at_each_write(
    place: Place, written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process goes on: what it has no answer to is repeated, or raised to a caller who repeats it."""
    for at in range(1, 30):
        broken = Broken(at, written=written, dies=False)
        async with program(place, World()) as engine:
            with breaking(monkeypatch, broken):
                for _ in range(3):
                    with contextlib.suppress(BursarError):
                        await run(engine, f"w{at}")
                        break
            await check(engine, f"w{at}")
        if not broken.reached:
            break
    assert at > 4
