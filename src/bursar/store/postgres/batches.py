"""A batch on PostgreSQL: one statement reads all it needs, one function call writes it. Two round trips, or one.

A batch that selects no postings, or a small one that only selects among those which the batches before have left
behind, has nothing to read if no other process writes: its keys are new and its postings live, and if not, the write
fails by itself, as it does if the rules have changed. Fresh numbers for such a batch came with the write before it. A
refusal is never decided so: nothing would be written, and nothing would notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import asyncpg
import msgspec

from bursar.model.accounts import Account
from bursar.model.postings import Posting
from bursar.model.records import ExistingEntry
from bursar.model.selection import PoolKey
from bursar.store.batch import (
    LoadedRecords,
    LoadedState,
    PreparedBatch,
    ReadSet,
    RecordReadSet,
    RecordWrites,
    RuleSet,
    WriteConflict,
    WriterCache,
    WriteSet,
)
from bursar.store.columns import Row
from bursar.store.flow_rows import flow_row_of, flow_row_values
from bursar.store.postgres.arrays import (
    READ,
    SQL,
    WRITE,
    WRITE_ENTRIES,
    WRITE_RECORDS,
    Statement,
    arguments,
    columns,
    numbers_text,
)
from bursar.store.rows import account_of, asset_of, book_of, hold_values, operation_result_of

NUMBERS_AHEAD = 8  # at least, that come with the write of a small batch
NUMBERS_S = 1.0  # for so long
SMALL = 16  # new entries and records
HASH_BYTES = 32  # of a content hash, in front of the legs

Connection = asyncpg.Connection


class PostgresBatchSession:
    """Reads and writes one batch on one connection. Each statement has a limit of time, or None: the caller's own."""

    def __init__(
        self, postgres: Connection, connection: int, timeout_s: float | None, monotonic: Callable[[], float]
    ) -> None:
        self.connection = connection
        self._postgres = postgres
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._numbers: list[int] = []  # taken, and not used yet

    async def _fetch(self, name: str, *args: Any) -> Sequence[Row]:
        async with asyncio.timeout(self._timeout_s):
            return cast("Sequence[Row]", await self._postgres.fetch(SQL[name], *args))

    async def _run(self, statement: Statement, values: dict[str, Any]) -> Sequence[Row]:
        async with asyncio.timeout(self._timeout_s):
            return cast("Sequence[Row]", await self._postgres.fetch(statement.sql, *arguments(statement, values)))

    async def rules(self) -> RuleSet:
        """The generation first: what is read after it may be newer, which the write notices, but never older."""
        generation = (await self._fetch("generation"))[0][0]
        return RuleSet(
            generation,
            assets={row[1]: asset_of(row) for row in await self._fetch("assets")},
            books={row[1]: book_of(row) for row in await self._fetch("books")},
            cached_accounts={row[0] for row in await self._fetch("cached_accounts")},
        )

    async def accounts(self, paths: Sequence[str]) -> Sequence[Account]:
        """The newest version of each account that exists."""
        return [account_of(row) for row in await self._fetch("heads_by_path", list(paths))]

    async def load(self, read: ReadSet, cache: WriterCache) -> LoadedState:
        """In one round trip; in none, if the batch is optimistic and numbers were taken ahead."""
        if read.optimistic:
            named = [cache.live[number] for number in read.named]
            numbers = await self._fresh_numbers(cache, read.numbers)
            loaded = LoadedState(cache.generation, numbers, {}, {}, named, {}, optimistic=True)
        else:
            loaded = await self._load(read)
        if read.records is not None:
            loaded.records = await self._load_records(read.records)
        if read.rows:
            found = map(flow_row_of, await self._fetch("batch_flow_rows", *columns(read.rows, 3)))
            loaded.rows = {row.row_key: row for row in found}
        return loaded

    async def _fresh_numbers(self, cache: WriterCache, count: int) -> list[int]:
        """Those that came with the write before, unless that was a while ago: numbers order histories."""
        if len(cache.numbers) < count or self._monotonic() > cache.numbers_until:
            return [row[0] for row in await self._fetch("batch_numbers", count)]
        taken, cache.numbers = cache.numbers[:count], cache.numbers[count:]
        return taken

    async def _load(self, read: ReadSet) -> LoadedState:
        plus = [pool for pool in read.pools if pool[2] > 0]
        minus = [pool for pool in read.pools if pool[2] < 0]
        rows = await self._run(
            READ,
            {
                "numbers": 0 if self._numbers else read.numbers,
                "keys": read.keys,
                "positive_pools": [(pool[0], pool[1], read.pools[pool]) for pool in plus],
                "negative_pools": [(pool[0], pool[1], read.pools[pool]) for pool in minus],
                "named_postings": [(number,) for number in read.named],
                "guarded_keys": read.guarded,
            },
        )
        generation = 0
        existing: dict[tuple[str, str], ExistingEntry] = {}
        pools: dict[PoolKey, list[Posting]] = {key: [] for key in read.pools}
        named: list[Posting] = []
        guarded: dict[tuple[int, int], tuple[int, int]] = {}
        for what, place, a, b, text, data in rows:
            if what in (4, 5):
                pool = (plus if what == 4 else minus)[place - 1]
                pools[pool].append(Posting(a, pool[0], pool[1], int(text)))
            elif what == 2:
                self._numbers.append(a)
            elif what == 3:
                existing[read.keys[place - 1]] = ExistingEntry(a, data[:HASH_BYTES], b, data[HASH_BYTES:])
            elif what == 6:
                named.append(Posting(a, b, place, int(text)))
            elif what == 7:
                guarded[read.guarded[place - 1]] = (int(text), a)
            else:
                generation = a
        return LoadedState(generation, list(self._numbers), existing, pools, named, guarded)

    async def _load_records(self, read: RecordReadSet) -> LoadedRecords:
        loaded = LoadedRecords(versions={}, ids=set(), operations={}, counters={})
        rows = await self._fetch(
            "batch_read_records",
            numbers_text(read.versions),
            *columns(read.ids, 2),
            *columns(read.operations, 3),
            read.counters,
        )
        for what, place, a, b, text in rows:
            if what == 1:
                loaded.versions[a] = b
            elif what == 2:
                loaded.ids.add(read.ids[place - 1])
            elif what == 3:
                loaded.operations[read.operations[place - 1]] = operation_result_of(text)
            else:
                loaded.counters[text[0]] = (a, int(text[1]))
        return loaded

    async def pool(self, key: PoolKey, most: int) -> list[Posting]:
        """More postings of one pool."""
        account, asset, sign = key
        rows = await self._fetch("largest" if sign > 0 else "most_negative", account, asset, most)
        return [Posting(row[0], account, asset, int(row[3])) for row in rows]

    async def existing(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ExistingEntry]:
        """Never asked for: `load` reads all keys, and nothing is refused without it."""
        raise AssertionError("keys are read with the rest")

    async def write(self, prepared: PreparedBatch) -> None:
        """One function call, which checks its own counts and fails as a whole."""
        if prepared.connection != self.connection:
            raise WriteConflict("it was decided before the last connection was made: read again")
        writes, cache = prepared.writes, prepared.cache
        made = len(writes.envelopes) + (0 if writes.records is None else len(writes.records.new))
        ahead = max(NUMBERS_AHEAD, made) if made <= SMALL and not cache.pessimistic else 0
        values = {"numbers_ahead": ahead, "generation": prepared.generation}
        if writes.records is None:
            statement, values = WRITE_ENTRIES, values | _entries(writes)
        elif writes.envelopes:
            statement, values = WRITE, values | _entries(writes) | _records(writes.records)
        else:
            statement, values = WRITE_RECORDS, values | _records(writes.records)
            if not writes.checks_rules:
                values["generation"] = 0
        written = await self._run(statement, values)
        cache.numbers, cache.numbers_until = [int(number) for number in written[0][-1]], self._monotonic() + NUMBERS_S
        cache.keep_in_flight(writes)


# What the fields of both hold under the name of its kind of row is written as it is.
def _records(writes: RecordWrites) -> dict[str, Any]:
    rows = {"new_records": writes.new, "flow_rows": [flow_row_values(*row) for row in writes.rows]}
    return msgspec.structs.asdict(writes) | rows


def _entries(writes: WriteSet) -> dict[str, Any]:
    return msgspec.structs.asdict(writes) | {
        "postings": [(p.id, p.account, p.asset, p.amount, live) for p, live in writes.postings],
        "spent_live": [(number,) for number in writes.spent_live],
        "holds": [hold_values(h, str) for h in writes.holds],
    }
