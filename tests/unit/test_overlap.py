"""A batch is decided while the one before it is written. If that one is not written, the decision is worth nothing.

Only PostgreSQL overlaps batches, so the simulator does not reach this; and there the write of a stale decision mostly
fails by its own counts. What does not fail by itself is what writes nothing: receipts again, and refusals.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.memory import MemoryLedger

from bursar.model.accounts import Account
from bursar.model.entries import Intent, Leg
from bursar.model.errors import InsufficientFunds
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.ports import SystemPorts
from bursar.store.batch import Lane, PreparedBatch, WriteConflict
from bursar.store.sqlite.store import run_sync
from bursar.writer import Change, Operation, Writer
from bursar.writer.batch import Batch, prepare
from bursar.writer.decision import Effects

PATHS = ("a", "b", "c")


class OverlappingStore(MemoryLedger):
    """A store that prepares and writes apart, in memory; its first write is lost to another process."""

    split = False
    overlaps = True
    first_read = 2
    reuses_postings = False

    def __init__(self) -> None:
        accounts = [Account(id=n, path=path) for n, path in enumerate(PATHS, start=1)]
        super().__init__(Asset(id=1, code="USD", precision=2), accounts, [Posting(1 << 16, 1, 1, 100)])
        self.ports = SystemPorts()
        self.arrive = asyncio.Event()  # the first batch is full
        self.ahead = asyncio.Event()  # the second is prepared, while the first is written
        self.writing = False
        self.lost = asyncio.Event()  # the first batch may now fail

    async def run_batch(self, work: Any, lane: Lane = Lane.WRITE) -> Any:
        result = await work(self)
        if lane is Lane.PREPARE:
            self.ahead.set()
        elif isinstance(result, PreparedBatch):
            self.arrive.set()
            await asyncio.sleep(0)  # those who arrive now wait for the next batch
        return result

    async def write(self, prepared: PreparedBatch) -> None:
        """Write; but the first is lost: another process has spent the posting, and left 60."""
        if not self.writing:
            self.writing = True
            await self.lost.wait()
            self.live = {2 << 16: Posting(2 << 16, 1, 1, 60)}
            raise WriteConflict("a posting was taken")
        await super().write(prepared)


def payment(key: str, target: str, minor: int) -> Change:
    return Change((Intent(scope="user", key=key, legs=(Leg("a", target, "USD", minor),)),))


@pytest.mark.parametrize("second", [["again"], ["small"], ["again", "small"]], ids=" and ".join)
def test_batch_decided_on_a_failed_one_is_decided_again(second: list[str]) -> None:
    """Given a payment in flight, when it is lost, then those decided on top of it are answered by what is there."""
    asyncio.run(lose_the_first(second))


async def lose_the_first(second: list[str]) -> None:
    store = OverlappingStore()
    writer = Writer(store)  # type: ignore[arg-type]  # as much of a store as a batch needs
    writer.gather_min = 1
    first = asyncio.ensure_future(writer.apply(payment("one", "b", 80)))
    await store.arrive.wait()
    changes = {"again": payment("one", "b", 80), "small": payment("two", "c", 50)}
    others = {name: asyncio.ensure_future(writer.apply(changes[name])) for name in second}
    await store.ahead.wait()  # the second batch is decided, on the 20 that the first would leave
    store.lost.set()
    await asyncio.wait([first, *others.values()])

    assert isinstance(first.exception(), InsufficientFunds)
    if "again" in others:
        assert isinstance(others["again"].exception(), InsufficientFunds)  # no receipt for what never was
    if "small" in others:
        assert others["small"].result().receipts[0].envelope in {entry.seq for entry in store.entries.values()}


def test_a_refusal_of_records_is_not_decided_beside_another_batch() -> None:
    """Nothing it writes would notice that the batch before has answered the operation: it must wait for that one."""
    store = OverlappingStore()
    refused = Change(
        (Intent(scope="s", key="k:pay", legs=(Leg("a", "b", "USD", 500),)),),
        operation=Operation(scope="s", id="k", op="pay", fingerprint="x"),
    )
    nothing = Effects(frozenset(), {}, {}, {}, {})
    beside = Batch(store.cache(), [refused], after=nothing, first_read=2)
    with pytest.raises(WriteConflict, match="just writing"):
        run_sync(prepare(beside, store))
    assert beside.read_set().records is None  # what is read now is not what will be there
    alone = Batch(store.cache(), [refused], first_read=2)
    assert alone.read_set().records is None
    assert run_sync(alone.decide(run_sync(store.load(alone.read_set(), alone.cache)), store)) is None  # read first
    assert alone.read_set().records is not None
