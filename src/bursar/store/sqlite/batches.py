"""A batch on SQLite: its reads and its write, on the writer's thread, inside one transaction.

The methods are `async` because the writer's loop is, but none of them ever suspends: the loop runs on the thread that
owns the connection (`store.run_batch`), so a lone caller pays for no further switch of threads.
"""

from __future__ import annotations

import itertools
import re
import sqlite3
from collections.abc import Callable, Sequence
from functools import cache

import msgspec

from bursar.model.accounts import Account
from bursar.model.errors import DatabaseCorrupt
from bursar.model.flow_rows import FlowRow, RowKey
from bursar.model.postings import INDEX_BITS, Posting
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
from bursar.store.columns import OFFSET, Row
from bursar.store.flow_rows import flow_row_of, flow_row_values
from bursar.store.rows import account_of, asset_of, book_of, hold_values, operation_result_of
from bursar.store.sqlite.calls import SQL, amount_in, amount_out, rows

LARGEST, MOST_NEGATIVE = SQL["largest"], SQL["most_negative"]
FEW = 4  # pools, or rows: fewer are read or written faster one by one
TOGETHER = 32  # rows of one statement

_json = msgspec.json.Encoder()


class SqliteBatchSession:
    """Reads and writes one batch; the transaction has begun, so nothing changes in between.

    Unless `reads_keys` or the cache is pessimistic, keys are not read: most are new, and the unique index says so at no
    extra cost. An existing key makes the write fail, and the batch is retried. What is refused is never written: for
    that, the writer asks for its keys (`existing`).
    """

    connection = 0

    def __init__(
        self, sqlite: sqlite3.Connection, now_us: Callable[[], int], used: int, *, reads_keys: bool = False
    ) -> None:
        """`used` is the highest number given to a caller, although its transaction may have been rolled back."""
        self.used = used
        self.assumes_keys = not reads_keys  # that they are new
        self._sqlite = sqlite
        self._now_us = now_us
        self._reads_keys = reads_keys
        self._generation, last = sqlite.execute(SQL["batch_begin"]).fetchone()
        self._last = max(last, used)

    async def rules(self) -> RuleSet:
        """The rules as they are in this transaction."""
        execute = self._sqlite.execute
        return RuleSet(
            self._generation,
            assets={row[1]: asset_of(row) for row in execute(SQL["assets"])},
            books={row[1]: book_of(row) for row in execute(SQL["books"])},
            cached_accounts={row[0] for row in execute(SQL["cached_accounts"])},
        )

    async def accounts(self, paths: Sequence[str]) -> Sequence[Account]:
        """The newest version of each account that exists."""
        return [account_of(row) for row in rows(self._sqlite, "heads_by_path", [list(paths)])]

    async def load(self, read: ReadSet, cache: WriterCache) -> LoadedState:
        """What a batch needs; nothing, if the rules are others than the cache's: it will be asked for again."""
        if self._generation != cache.generation:
            return LoadedState(self._generation, [], {}, {}, [], {})
        reads_keys = self._reads_keys or bool(cache.pessimistic)
        self.assumes_keys = not reads_keys
        return LoadedState(
            self._generation,
            itertools.count(self._last + 1),
            await self.existing(read.keys) if reads_keys else {},
            _pools(self._sqlite, read.pools),
            _named(self._sqlite, read.named) if read.named else [],
            _guarded(self._sqlite, read.guarded) if read.guarded else {},
            None if read.records is None else _load_records(self._sqlite, read.records),
            keys_read=reads_keys,
            rows=_flow_rows(self._sqlite, read.rows) if read.rows else {},
        )

    async def pool(self, key: PoolKey, most: int) -> list[Posting]:
        """More postings of one pool."""
        return _pool(self._sqlite, key, most)

    async def existing(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ExistingEntry]:
        """The entries that have these keys."""
        existing: dict[tuple[str, str], ExistingEntry] = {}
        sql = SQL["batch_key"]
        for key in keys:
            found = self._sqlite.execute(sql, key).fetchone()
            if found is not None:
                existing[key] = ExistingEntry(*found)
        return existing

    async def write(self, prepared: PreparedBatch) -> None:
        """Write it. The time is read here: a batch that had to wait for the lock came later."""
        writes, now_us = prepared.writes, self._now_us()
        if writes.envelopes:
            _write_entries(self._sqlite, writes, now_us)
            self.used = max([self.used, *(row[0] for row in writes.envelopes)])
        if writes.records is not None:
            _write_records(self._sqlite, writes.records, now_us)


def _pools(connection: sqlite3.Connection, wanted: dict[PoolKey, int]) -> dict[PoolKey, list[Posting]]:
    """So many postings of each pool: one statement for all that want as many of one sign."""
    if len(wanted) < FEW:
        return {pool: _pool(connection, pool, most) for pool, most in wanted.items()}
    found: dict[PoolKey, list[Posting]] = {pool: [] for pool in wanted}
    alike: dict[tuple[int, int], list[PoolKey]] = {}
    for pool, most in wanted.items():
        alike.setdefault((pool[2], most), []).append(pool)
    for (sign, most), pools in alike.items():
        sql = SQL["batch_largest" if sign > 0 else "batch_most_negative"]
        for place, id_, amount in connection.execute(sql, (_json.encode(pools).decode(), most)):
            account, asset, _ = pool = pools[place]
            found[pool].append(Posting(id_, account, asset, amount_out(amount)))
    return found


def _pool(connection: sqlite3.Connection, pool: PoolKey, most: int) -> list[Posting]:
    account, asset, sign = pool
    found = connection.execute(LARGEST if sign > 0 else MOST_NEGATIVE, (account, asset, most))
    return [Posting(id_, account, asset, amount_out(amount)) for id_, _, _, amount in found]


def _named(connection: sqlite3.Connection, wanted: list[int]) -> list[Posting]:
    return [Posting(r[0], r[1], r[2], amount_out(r[3])) for r in rows(connection, "batch_live_by_id", [wanted])]


def _guarded(
    connection: sqlite3.Connection, wanted: Sequence[tuple[int, int]]
) -> dict[tuple[int, int], tuple[int, int]]:
    found = rows(connection, "batch_guarded_balances", list(map(list, zip(*wanted, strict=True))))
    return {(row[0], row[1]): (int(row[2]), row[3]) for row in found}


def _flow_rows(connection: sqlite3.Connection, wanted: Sequence[RowKey]) -> dict[RowKey, FlowRow]:
    found = (connection.execute(SQL["batch_flow_row"], key).fetchone() for key in wanted)
    return {key: flow_row_of(row) for key, row in zip(wanted, found, strict=True) if row is not None}


def _load_records(connection: sqlite3.Connection, read: RecordReadSet) -> LoadedRecords:
    """What a pessimistic batch reads of records, operations and limits."""
    operations = {}
    for operation in read.operations:
        found = connection.execute(SQL["operation"], operation).fetchone()
        if found is not None:
            operations[operation] = operation_result_of(found)
    return LoadedRecords(
        versions={row[0]: row[1] for row in rows(connection, "batch_versions", [read.versions])},
        ids={(flow, id_) for flow, id_ in read.ids if connection.execute(SQL["record"], (flow, id_)).fetchone()},
        operations=operations,
        counters={
            key: (count, int(amount)) for key, count, amount in rows(connection, "batch_counters", [read.counters])
        },
    )


def _write_records(connection: sqlite3.Connection, writes: RecordWrites, now_us: int) -> None:
    """The records' part. If a count is not as expected, another process was faster: the batch is decided anew."""

    def put(name: str, values: Sequence[Row], conflict: str = "") -> None:
        if values:
            written = connection.executemany(SQL[name], [(*row, now_us) for row in values]).rowcount
            if conflict and written != len(values):
                raise WriteConflict(conflict)

    put("batch_operation", writes.operations)
    # One by one: a row that is at its limit already must not be lost in a sum.
    for key, count, amount, count_max, amount_max, until in writes.counters:
        used = connection.execute(SQL["batch_counter"], (key,)).fetchone() or (0, "0")
        total = (used[0] + count, int(used[1]) + amount)
        if total[0] > count_max or total[1] > amount_max:
            raise WriteConflict("a limit is used up")
        connection.execute(SQL["batch_put_counter"], (key, total[0], str(total[1]), count_max, str(amount_max), until))
    put("batch_record", writes.new)
    put("batch_move", writes.moves, "a record has moved")
    put("batch_transition", writes.transitions)
    put("batch_signal", writes.signals, "a signal was sent or consumed before")
    put("batch_high_water", writes.high_water)
    for expected, row in writes.rows:
        name = "batch_changed_flow_row" if expected else "batch_new_flow_row"
        if connection.execute(SQL[name], (*flow_row_values(expected, row), now_us)).rowcount != 1:
            raise WriteConflict("a row of a flow has changed")


@cache
def _of_many(name: str) -> str:
    """An INSERT of one row, as one of many."""
    sql = re.sub(r"\?\d+", "?", SQL[name])  # each value once, in order
    values = sql[sql.rindex("(") :].strip()
    return sql + f", {values}" * (TOGETHER - 1)


def _insert(connection: sqlite3.Connection, name: str, values: Sequence[Row]) -> None:
    """WriteSet of a group, many by one statement: most of what a short row costs is to begin and to end one."""
    whole = len(values) - len(values) % TOGETHER
    if whole:
        sql = _of_many(name)
        for place in range(0, whole, TOGETHER):
            connection.execute(sql, list(itertools.chain.from_iterable(values[place : place + TOGETHER])))
    if whole < len(values):
        connection.executemany(SQL[name], values[whole:])


def _write_entries(connection: sqlite3.Connection, writes: WriteSet, now_us: int) -> None:
    """The entries' part."""
    first = min([row[0] for row in writes.envelopes])  # whatever has that number or a higher one is theirs
    many, once = connection.executemany, connection.execute
    blob = bytearray  # the driver takes it as it is, where it would ask around what `bytes` are to become
    envelopes = [[blob(v) if type(v) is bytes else v for v in row] + [now_us] for row in writes.envelopes]
    _insert(connection, "insert_envelope_new", envelopes)
    _insert(connection, "insert_spend", writes.spends)
    if not writes.spent_live:
        gone = 0
    elif len(writes.spent_live) < FEW:
        gone = many(SQL["batch_dead_one"], [(number,) for number in writes.spent_live]).rowcount
    else:
        gone = once(SQL["batch_dead"], (_json.encode(writes.spent_live).decode(),)).rowcount
    if gone != len(writes.spent_live):  # can't happen inside one transaction: the live table is not what the spends say
        raise DatabaseCorrupt(
            "the live table", f"{len(writes.spent_live)} postings to spend, {gone} found; `bursar rebuild`"
        )
    created = [(p.id, p.account, p.asset, blob((p.amount + OFFSET).to_bytes(16, "big"))) for p, _ in writes.postings]
    _insert(connection, "insert_posting_new", created)
    passing = [p.id for p, live in writes.postings if not live]
    if len(created) < FEW and not passing:
        many(SQL["insert_live_new"], created)
    else:
        once(SQL["batch_live"], (first << INDEX_BITS, _json.encode(passing).decode()))
    _insert(connection, "insert_account_history_new", writes.account_history)
    if writes.guarded:
        many(SQL["put_guarded_balance"], [(a, s, str(balance)) for a, s, _version, balance in writes.guarded])
    if writes.cached_balances:
        many(SQL["insert_cache"], [(a, s, p, str(v)) for a, s, p, v in writes.cached_balances])
    if writes.holds:
        written = many(SQL["batch_hold"], [hold_values(h, amount_in) for h in writes.holds]).rowcount
        if written != len(writes.holds):
            raise WriteConflict("a hold is closed, or belongs to another record")
    once(SQL["batch_events"], (first,))
