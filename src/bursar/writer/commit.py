"""How a batch is committed: read set → decide → write set. Every entry and every transition goes through this loop.

The store only reads and writes. On PostgreSQL this runs on the event loop, and `prepare` and the write may be on two
connections; on SQLite all of it runs on the writer's thread inside one transaction (`store.run_batch`).
"""

from __future__ import annotations

from bursar.store.batch import BatchSession, PreparedBatch
from bursar.writer.batch import Batch


async def prepare(batch: Batch, session: BatchSession) -> PreparedBatch:
    """Read and decide, until nothing that was decided depends on what was not read."""
    cache = batch.cache
    cache.use_connection(session.connection)
    if cache.generation == 0:
        cache.reset(await session.rules())
    while True:
        cache.trim()
        read = batch.read_set()
        if read.accounts:  # which postings to read depends on them
            for account in await session.accounts(sorted(read.accounts)):
                cache.accounts[account.path] = account
            read = batch.read_set()
        loaded = await session.load(read, cache)
        if loaded.generation != cache.generation:
            cache.reset(await session.rules())
            continue
        writes = await batch.decide(loaded, session)
        if writes is None:  # a refusal depends on what was not read: now everything is
            continue
        if not loaded.keys_read and await session.existing(batch.refused_keys()):
            cache.on_conflict()  # an earlier attempt was written, and its receipt is the answer: read all keys
            continue
        return PreparedBatch(loaded.generation, writes, cache, session.connection)


async def commit(batch: Batch, session: BatchSession) -> None:
    """Read, decide and write. A batch of refusals and replays writes nothing, and waits for no disk."""
    prepared = await prepare(batch, session)
    if not prepared.writes.empty:
        await session.write(prepared)
