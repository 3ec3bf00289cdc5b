"""What a poll of a waiting payout costs the database does not grow with how many wait, and leaves no history."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.till import DOCUMENT, Till, Town, till

from bursar.documents import Documents
from bursar.engine import Worker
from bursar.flows.payouts.derived import OwnAddresses
from bursar.flows.payouts.documents import WALLET, WalletDocument
from bursar.rails.chain import Page

PATIENCE_S = 60.0
STEPS = 100  # of SQLite's virtual machine, between two times that it tells us
HISTORY = "SELECT count(*) FROM transitions"


class Work:
    """What SQLite does meanwhile."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.statements = 0
        self.steps = 0  # of its virtual machine: rows that are read cost some, too

    async def __aenter__(self) -> Work:
        await self._tell(self._stepped, self._ran)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tell(None, None)

    async def _tell(self, stepped: Callable[[], int] | None, ran: Callable[[str], None] | None) -> None:
        """On the threads that use the connections: another one would wait for a statement, which waits for it."""
        store = self.store
        for lane, connection in ((store._write_lane, store._writer), (store._read_lane, store._reader)):
            await store.run(lane, partial(connection.set_progress_handler, stepped, STEPS))
            await store.run(lane, partial(connection.set_trace_callback, ran))

    def _stepped(self) -> int:
        self.steps += STEPS
        return 0

    def _ran(self, _sql: str) -> None:
        self.statements += 1


async def let_wait(t: Till, worker: Worker, waiting: int) -> list[int]:
    """So many payouts in all, sent and not mined; their numbers."""
    records = t.engine.store.read.records
    there = len(await records.list("payouts", limit=waiting))
    for first in range(there, waiting, 100):
        await asyncio.gather(*[t.request("0.001", key=f"k{n}") for n in range(first, min(first + 100, waiting))])
        await worker.look()
        await t.engine.finish(PATIENCE_S)
    found = await records.list("payouts", states=("confirming",), limit=waiting + 1)
    assert len(found) == waiting
    return [record.number for record in found]


async def polled(t: Till, worker: Worker, numbers: list[int]) -> tuple[float, float]:
    """All of them are due, and polled once: statements and steps for each."""
    await t.engine.store.single().records.wake_held(numbers, "")
    async with Work(t.engine.store) as work:
        await worker.look()
        await t.engine.finish(PATIENCE_S)
    return work.statements / len(numbers), work.steps / len(numbers)


@scenario
@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
async def test_poll_costs_the_same_with_100_and_with_1000_that_wait(place: Place) -> None:
    town = Town(document=msgspec.structs.replace(DOCUMENT, unconfirmed_max=1_000, block_ms=3_600_000))
    async with till(place, town) as t:
        worker = Worker(t.engine)
        few = await let_wait(t, worker, 100)
        await polled(t, worker, few)  # the engine's first looks are over
        of_few = await polled(t, worker, few)
        many = await let_wait(t, worker, 1_000)
        rows = count(place)
        of_many = await polled(t, worker, many)
        assert count(place) == rows, "no row of history per poll"
        assert of_many[0] <= 1.2 * of_few[0] < 2.4, (of_few, of_many)
        assert 0 < of_many[1] <= 1.2 * of_few[1], (of_few, of_many)


def count(place: Place) -> int:
    connection = sqlite3.connect(place.path)
    try:
        return int(connection.execute(HISTORY).fetchone()[0])
    finally:
        connection.close()


@scenario
@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
async def test_payouts_that_choose_at_the_same_time_do_not_all_choose_one_wallet(place: Place) -> None:
    """Each wallet has room for three. Those that came too late in the transaction would have to wait."""
    async with till(place, Town()) as t:
        t.payouts.out.wallets.fresh_s = 60.0  # one look for all
        await asyncio.gather(*[t.request("1", key=f"k{n}") for n in range(6)])
        await Worker(t.engine).look()
        await t.engine.finish(PATIENCE_S)
        views = await t.payouts.list()
        assert sorted(view.wallet for view in views) == ["hot1"] * 3 + ["hot2"] * 3
        assert not any(view.error for view in views if view.state != "confirming")
        histories = [await t.engine.store.read.records.history((await t.record(view.id)).number) for view in views]
        assert all(len([one for one in history if one.source == "pending"]) == 1 for history in histories)


@scenario
@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
async def test_a_look_of_the_watcher_reads_no_wallet_while_no_document_has_changed(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There may be thousands. One that another process adds, or retires, is watched from the next look on."""
    town, watched, read = Town(), list[frozenset[str]](), list[str]()
    scan, every = town.chain.scan, Documents.list

    async def noted(addresses: OwnAddresses, after: int, after_hash: str = "") -> Page:
        watched.append(frozenset(addresses))
        return await scan(addresses, after, after_hash)

    async def counted(self: Documents, kind: Any, **more: Any) -> Any:
        read.append(kind.name)
        return await every(self, kind, **more)

    monkeypatch.setattr(town.chain, "scan", noted)
    monkeypatch.setattr(Documents, "list", counted)
    async with till(place, town) as t, till(place, town, worker="other") as other:

        async def look() -> frozenset[str]:
            record = await t.engine.get("chains", town.name)
            assert record is not None
            await t.engine.step(record)
            return watched[-1] if watched else frozenset()

        await look()  # where the chain is now
        assert await look() == {"@hot1", "@hot2"}
        read.clear()
        assert await look() == {"@hot1", "@hot2"} and read == []
        await other.put(WALLET, "hot3", WalletDocument(chain=town.name, address="@hot3"))
        assert await look() == {"@hot1", "@hot2", "@hot3"} and read != []
        gone = await other.documents.retire(WALLET, "hot3", base=1, author="ann", reason="test")
        await other.documents.approve(WALLET, "hot3", gone.hash, actor="ben", reason="test")
        assert await look() == {"@hot1", "@hot2", "@hot3"}, "its key exists still"
