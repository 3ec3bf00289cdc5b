"""The peer of transfers: what a competent engineer writes in an afternoon.

A table of transfers with a state, a table of balances, a table of operations that makes each end idempotent; one
statement per transaction over a pool of connections; persisted before each call, retried under the same id. The same
core, by the same client. No history, no entries, no limits, no checks beyond the balance, and no batching.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import asyncpg

from bursar.bench.transfers_load import AMOUNT, ASSET, SEED, USERS, Job
from bursar.model.outcome import Outcome
from bursar.rails.trading import TradingClient

POOL = 16  # connections: more than this many gained nothing on two cores

TABLES = """
CREATE TABLE balances (user_id bigint, asset text, available bigint NOT NULL CHECK (available >= 0),
    PRIMARY KEY (user_id, asset));
CREATE TABLE transfers (req_id text PRIMARY KEY, user_id bigint NOT NULL, source text NOT NULL, target text NOT NULL,
    asset text NOT NULL, amount bigint NOT NULL, state text NOT NULL, created_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now());
CREATE INDEX transfers_open ON transfers (updated_at) WHERE state NOT IN ('COMMITTED', 'FAILED', 'ROLLED_BACK');
CREATE TABLE operations (req_id text, op text, outcome text NOT NULL, PRIMARY KEY (req_id, op));
"""
CREATE = (
    "INSERT INTO transfers (req_id, user_id, source, target, asset, amount, state) "
    "VALUES ($1, $2, $3, $4, $5, $6, 'SOURCE_PENDING') ON CONFLICT DO NOTHING"
)
# The operation's row and the balance together: the row's key decides which call was first, the balance whether it
# suffices.
DEBIT = (
    "WITH op AS (INSERT INTO operations SELECT $1, 'withdraw', CASE WHEN available >= $4 THEN 'ok' ELSE 'refused' END "
    "FROM balances WHERE user_id = $2 AND asset = $3 ON CONFLICT DO NOTHING RETURNING outcome) "
    "UPDATE balances SET available = available - $4 FROM op WHERE user_id = $2 AND asset = $3 AND op.outcome = 'ok'"
)
CREDIT = (
    "WITH op AS (INSERT INTO operations VALUES ($1, 'deposit', 'ok') ON CONFLICT DO NOTHING RETURNING outcome) "
    "UPDATE balances SET available = available + $4 FROM op WHERE user_id = $2 AND asset = $3"
)
MOVE = "UPDATE transfers SET state = $3, updated_at = now() WHERE req_id = $1 AND state = $2"


class PlainTransfers(Protocol):
    """Transfers by hand."""

    async def transfer(self, job: Job) -> None:
        """One transfer, to its end."""
        ...

    async def close(self) -> None:
        """Close the database."""
        ...


async def prepare(pool: asyncpg.Pool) -> None:
    """Make the tables and fill them."""
    await pool.execute(TABLES)
    await pool.execute(f"INSERT INTO balances SELECT u, '{ASSET}', {SEED} FROM generate_series(1, {USERS}) AS u")
    await pool.execute("ANALYZE")


class PostgresPlain:
    """asyncpg with a pool."""

    def __init__(self, pool: asyncpg.Pool, core: TradingClient) -> None:
        self._pool = pool
        self._core = core

    @classmethod
    async def open(cls, address: str, core: TradingClient) -> PostgresPlain:
        """Make the tables and fill them."""
        pool = await asyncpg.create_pool(address, min_size=POOL, max_size=POOL)
        await prepare(pool)
        return cls(pool, core)

    async def transfer(self, job: Job) -> None:
        """One transfer, to its end."""
        req_id, user, inward = job
        run = self._pool.execute
        await run(CREATE, req_id, user, *ends(inward), ASSET, AMOUNT)
        if inward:
            await run(DEBIT, req_id, user, ASSET, AMOUNT)
        else:
            sure((await self._core.withdraw(req_id, user, ASSET, AMOUNT)).outcome)
        await run(MOVE, req_id, "SOURCE_PENDING", "TARGET_PENDING")
        if inward:
            sure((await self._core.deposit(req_id, user, ASSET, AMOUNT)).outcome)
        else:
            await run(CREDIT, req_id, user, ASSET, AMOUNT)
        await run(MOVE, req_id, "TARGET_PENDING", "COMMITTED")

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


class SqlitePlain:
    """The same on sqlite3, on a thread, as an asyncio program has to."""

    def __init__(self, path: str, core: TradingClient) -> None:
        self._lane = ThreadPoolExecutor(max_workers=1)
        self._core = core
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        tables = TABLES.replace("timestamptz", "text").replace("now()", "CURRENT_TIMESTAMP")
        self._connection.executescript(tables)
        rows = [(user, ASSET, SEED) for user in range(1, USERS + 1)]
        self._connection.execute("BEGIN")
        self._connection.executemany("INSERT INTO balances VALUES (?, ?, ?)", rows)
        self._connection.execute("COMMIT")

    async def transfer(self, job: Job) -> None:
        """One transfer, to its end."""
        req_id, user, inward = job
        await self._run(self._create, req_id, user, *ends(inward))
        if inward:
            await self._run(self._book, req_id, user, "withdraw", -AMOUNT)
        else:
            sure((await self._core.withdraw(req_id, user, ASSET, AMOUNT)).outcome)
        await self._run(self._move, req_id, "SOURCE_PENDING", "TARGET_PENDING")
        if inward:
            sure((await self._core.deposit(req_id, user, ASSET, AMOUNT)).outcome)
        else:
            await self._run(self._book, req_id, user, "deposit", AMOUNT)
        await self._run(self._move, req_id, "TARGET_PENDING", "COMMITTED")

    async def _run(self, what: Callable[..., None], *args: object) -> None:
        await asyncio.get_running_loop().run_in_executor(self._lane, what, *args)

    def _create(self, req_id: str, user: int, source: str, target: str) -> None:
        self._connection.execute(
            "INSERT INTO transfers (req_id, user_id, source, target, asset, amount, state) "
            "VALUES (?, ?, ?, ?, ?, ?, 'SOURCE_PENDING') ON CONFLICT DO NOTHING",
            (req_id, user, source, target, ASSET, AMOUNT),
        )

    def _book(self, req_id: str, user: int, op: str, change: int) -> None:
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        if run("INSERT INTO operations VALUES (?, ?, 'ok') ON CONFLICT DO NOTHING", (req_id, op)).rowcount:
            where = (change, user, ASSET)
            run("UPDATE balances SET available = available + ? WHERE user_id = ? AND asset = ?", where)
        run("COMMIT")

    def _move(self, req_id: str, source: str, target: str) -> None:
        self._connection.execute(
            "UPDATE transfers SET state = ?, updated_at = CURRENT_TIMESTAMP WHERE req_id = ? AND state = ?",
            (target, req_id, source),
        )

    async def close(self) -> None:
        """Close the file."""
        await self._run(self._connection.close)
        self._lane.shutdown()


def ends(inward: bool) -> tuple[str, str]:
    """From where, and to where."""
    return ("FUNDING", "SPOT") if inward else ("SPOT", "FUNDING")


def sure(outcome: Outcome) -> None:
    """The benchmark's load has no other outcome."""
    if outcome is not Outcome.SUCCESS:
        raise RuntimeError(f"the core said {outcome}")
