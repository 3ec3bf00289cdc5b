"""A process that dies, or loses the answer to COMMIT, while it changes a document: repeated, the change is made once.

On SQLite the process dies before or after each call to the database, or is cancelled there. On PostgreSQL the
connection breaks before or after COMMIT.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import asyncpg
import pytest
from asyncpg.transaction import Transaction
from tests.builders import Crash, FaultyPorts, Place, scenario
from tests.conformance.test_audit import look, red
from tests.conformance.test_documents import ANN, BOB, LIMITS, NOTES, Limits, documents

from bursar.documents import Document, Documents
from bursar.model.errors import OutcomeUnknown
from bursar.store import Store


async def change(docs: Documents) -> Document:
    """One person's version, a proposal, its approval and a retirement, as a person repeats them who lost the answer."""
    await docs.put(NOTES, "usdt", Limits(5), base=0, **ANN)
    made = await docs.put(LIMITS, "usdt", Limits(5), base=0, **ANN)
    await docs.approve(LIMITS, "usdt", made.hash, **BOB)
    gone = await docs.retire(NOTES, "usdt", base=1, **ANN)
    assert isinstance(gone, Document)
    return gone


async def check(place: Place, store: Store) -> None:
    """Given the changes, then each was made once, and every hash is right."""
    docs = documents(store)
    assert [d.retired for d in await docs.history(NOTES, "usdt")] == [True, False]
    [limits] = await docs.history(LIMITS, "usdt")
    assert (limits.author, limits.approved_by) == ("ann", "bob")
    assert await docs.proposals() == ()
    assert await store.read.documents.count() == (3, 3)
    assert [a.action for a in await store.read.actions.list(kind="document")] == ["change approved", "change proposed"]
    assert red(await look(place)) == set()


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_at_every_call_to_the_database(place: Place, fault: str, tmp_path: Path) -> None:
    call, reached = 0, True
    while reached:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        ports = FaultyPorts()
        store = copy.store(ports)
        await store.open()
        ports.arm(fault, call)
        await asyncio.wait([work := asyncio.ensure_future(change(documents(store)))])
        reached = ports.reached
        ports.arm("", 0)
        error = None if work.cancelled() else work.exception()
        assert work.cancelled() or error is None or isinstance(error, Crash), error
        await store.close()  # what the kernel does for a dead process

        async with copy.bursar() as bursar:
            await change(documents(bursar.store))
            await check(copy, bursar.store)
    assert call > 20


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@pytest.mark.parametrize("is_written", [True, False], ids=["written", "not-written"])
@pytest.mark.parametrize("at", [1, 2, 3, 4])
@scenario
async def test_a_lost_answer_to_each_commit(
    place: Place, at: int, is_written: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[[Transaction], Awaitable[None]] = Transaction.commit
    commits = 0

    async def lost(transaction: Transaction) -> None:
        nonlocal commits
        commits += 1
        if commits != at or is_written:
            await real(transaction)
        if commits == at:
            raise asyncpg.ConnectionDoesNotExistError("connection was closed in the middle of operation")

    async with place.bursar() as bursar:
        with monkeypatch.context() as breaking:
            breaking.setattr(Transaction, "commit", lost)
            with pytest.raises(OutcomeUnknown):
                await change(documents(bursar.store))
        await change(documents(bursar.store))
        await check(place, bursar.store)
