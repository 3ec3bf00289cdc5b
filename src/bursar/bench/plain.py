"""The peer: what an engineer writes without a ledger. A balances table, and a transaction per payment.

Lock both rows in order, check the funds, update both balances, insert one row that says what happened. No postings, no
content hashes, no events, no history beyond that row; a key is unique, which is all the idempotency there is. On
PostgreSQL over a pool of connections, on SQLite on one thread, since that is how those are used.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import asyncpg

from bursar.bench.measure import Window
from bursar.bench.workload import ACCOUNTS, FIRST_ID, SEED_MINOR, Payment, Workload

POOL = 16  # connections: more than this many gained nothing on two cores

TABLES = (
    "CREATE TABLE balances (account bigint PRIMARY KEY, amount {amount} NOT NULL)",
    "CREATE TABLE entries (id {number}, key text NOT NULL UNIQUE, source bigint NOT NULL, target bigint NOT NULL, "
    "amount {amount} NOT NULL, at {time} NOT NULL)",
)


class Plain(Protocol):
    """A table of balances."""

    async def pay(self, key: str, payment: Payment) -> None:
        """One payment in one durable transaction."""
        ...


async def window(plain: Plain, workload: Workload, callers: int, seconds: float) -> Window:
    """Callers who each make one payment after the other, until the time is up."""
    clock = time.perf_counter
    started = clock()
    deadline = started + seconds

    async def caller() -> int:
        done = 0
        while done == 0 or clock() < deadline:
            ((key, payment),) = workload.take(1)
            await plain.pay(key, payment)
            done += 1
        return done

    done = sum(await asyncio.gather(*[caller() for _ in range(callers)]))
    return Window(done, clock() - started, done)


class PostgresPlain:
    """asyncpg with a pool."""

    def __init__(self, pool: asyncpg.Pool) -> None:
        self._pool = pool

    @classmethod
    async def open(cls, address: str) -> PostgresPlain:
        """Make the tables and fill them."""
        pool = await asyncpg.create_pool(address, min_size=POOL, max_size=POOL)
        number = "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY"
        for table in TABLES:
            await pool.execute(table.format(amount="numeric(39)", number=number, time="timestamptz DEFAULT now()"))
        await pool.execute(
            f"INSERT INTO balances SELECT {FIRST_ID} + i, {SEED_MINOR} FROM generate_series(0, {ACCOUNTS - 1}) AS g (i)"
        )
        await pool.execute("ANALYZE")
        return cls(pool)

    async def pay(self, key: str, payment: Payment) -> None:
        """One payment in one durable transaction."""
        source, target, amount = payment
        async with self._pool.acquire() as connection, connection.transaction():
            found = await connection.fetch(
                "SELECT account, amount FROM balances WHERE account = ANY ($1::bigint[]) ORDER BY account FOR UPDATE",
                [source, target],
            )
            if {row[0]: row[1] for row in found}[source] < amount:
                raise ValueError(f"account {source} has too little")
            await connection.execute(
                "UPDATE balances SET amount = amount + CASE account WHEN $1 THEN -$3::bigint ELSE $3::bigint END "
                "WHERE account IN ($1::bigint, $2::bigint)",
                source,
                target,
                amount,
            )
            await connection.execute(
                "INSERT INTO entries (key, source, target, amount) VALUES ($1, $2, $3, $4::bigint)",
                key,
                source,
                target,
                amount,
            )

    async def close(self) -> None:
        """Close the connections."""
        await self._pool.close()


class SqlitePlain:
    """sqlite3 on a thread, as an asyncio program has to."""

    def __init__(self, path: str) -> None:
        self._lane = ThreadPoolExecutor(max_workers=1)
        self._connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        run = self._connection.execute
        run("PRAGMA journal_mode = WAL")
        run("PRAGMA synchronous = FULL")
        for table in TABLES:
            run(table.format(amount="INTEGER", number="INTEGER PRIMARY KEY", time="INTEGER"))
        accounts = [(FIRST_ID + place, SEED_MINOR) for place in range(ACCOUNTS)]
        self._connection.executemany("INSERT INTO balances VALUES (?, ?)", accounts)

    async def pay(self, key: str, payment: Payment) -> None:
        """One payment in one durable transaction."""
        await asyncio.get_running_loop().run_in_executor(self._lane, self._pay, key, payment)

    def _pay(self, key: str, payment: Payment) -> None:
        source, target, amount = payment
        run = self._connection.execute
        run("BEGIN IMMEDIATE")
        (funds,) = run("SELECT amount FROM balances WHERE account = ?", (source,)).fetchone()
        if funds < amount:
            run("ROLLBACK")
            raise ValueError(f"account {source} has too little")
        run("UPDATE balances SET amount = amount - ? WHERE account = ?", (amount, source))
        run("UPDATE balances SET amount = amount + ? WHERE account = ?", (amount, target))
        run(
            "INSERT INTO entries (key, source, target, amount, at) VALUES (?, ?, ?, ?, ?)",
            (key, source, target, amount, time.time_ns() // 1000),
        )
        run("COMMIT")

    async def close(self) -> None:
        """Close the file."""
        await asyncio.get_running_loop().run_in_executor(self._lane, self._connection.close)
        self._lane.shutdown()
