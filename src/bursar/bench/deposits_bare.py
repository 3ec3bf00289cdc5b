"""The baseline of deposits: the very rows that ours has written for a window, written again by bare statements.

After a window the rows are read from our database, off the clock: records of arrivals with their history, accounts, and
of the entries all that they consist of. They are written into a database of the same schema, in as many groups as ours
took. Of each group first the record and its first line of history, in one transaction; the accounts, in another; then
the record's move, with all of the entry, in a third. SQLite's are written by `executemany`, PostgreSQL's by COPY.

What it is not: it reads no chain, judges nothing, looks for no earlier entry, and makes no row. All are there before
the clock starts. The database has the same history as ours: every row is copied, whether or not it is measured.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Sequence
from typing import Any, Final, Protocol

import asyncpg
import msgspec

Rows = dict[str, list[tuple[Any, ...]]]

KEYS: Final = {  # of each table, what grows
    "records": "number",
    "transitions": "record",
    "accounts": "id",
    "envelopes": "seq",
    "postings": "id",
    "live_postings": "posting",
    "involved": "envelope",
    "balance_cache": "part",
    "events": "seq",
}
ONLY: Final = {
    "records": "flow = 'arrivals'",
    "transitions": "record IN (SELECT number FROM {schema}records WHERE flow = 'arrivals')",
}
NOT_COPIED: Final = ("epoch", "xid")  # which transaction has written it: each has its own
MOVED: Final = ("state", "version", "due", "worker", "body", "updated_at")
ENTRY: Final = ("envelopes", "postings", "live_postings", "involved", "balance_cache", "events")


class Group(msgspec.Struct, frozen=True):
    """Rows of some deposits, by transaction."""

    first: Rows
    accounts: Rows
    last: Rows
    moves: list[tuple[Any, ...]]  # of records: what is changed, and the number


class Database(Protocol):
    """One database, without the ledger."""

    schema: str

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of a statement."""
        ...

    async def run(self, sql: str) -> None:
        """Run a statement that returns nothing."""
        ...

    async def columns(self, table: str) -> list[str]:
        """Names of a table's columns."""
        ...

    async def write(self, rows: Rows, columns: dict[str, list[str]], moves: Sequence[tuple[Any, ...]]) -> None:
        """Insert rows and move records, in one transaction."""
        ...

    async def close(self) -> None:
        """Let go."""
        ...


class Copy:
    """What ours has written since the last time, written again elsewhere."""

    def __init__(self, ours: Database, bare: Database) -> None:
        self._ours = ours
        self._bare = bare
        self._columns: dict[str, list[str]] = {}
        self._after: dict[str, int] = {}

    async def begin(self) -> None:
        """What is there now is not copied."""
        for table in KEYS:
            found = await self._ours.columns(table)
            self._columns[table] = [name for name in found if name not in NOT_COPIED]
        await self._new()

    async def write(self, groups: int) -> float:
        """Copy what is new, in so many groups; how many seconds that took, without reading it."""
        new = await self._new()
        planned = [self._group(new, place, groups) for place in range(groups)]
        begun = time.perf_counter()
        for group in planned:
            await self._bare.write(group.first, self._columns, ())
            if group.accounts["accounts"]:
                await self._bare.write(group.accounts, self._columns, ())
            await self._bare.write(group.last, self._columns, group.moves)
        return time.perf_counter() - begun

    async def close(self) -> None:
        """Let go of both."""
        await self._ours.close()
        await self._bare.close()

    async def _new(self) -> Rows:
        found: Rows = {}
        for table, key in KEYS.items():
            where = f"{key} > {self._after.get(table, 0)}"
            where += f" AND {ONLY[table].format(schema=self._ours.schema)}" if table in ONLY else ""
            names = ", ".join(self._columns[table])
            sql = f"SELECT {names} FROM {self._ours.schema}{table} WHERE {where} ORDER BY {key}"
            found[table] = await self._ours.fetch(sql)
            place = self._columns[table].index(key)
            self._after[table] = max([self._after.get(table, 0), *(row[place] for row in found[table])])
        return found

    def _group(self, new: Rows, place: int, groups: int) -> Group:
        part = {
            name: rows[len(rows) * place // groups : len(rows) * (place + 1) // groups] for name, rows in new.items()
        }
        records = [dict(zip(self._columns["records"], row, strict=True)) for row in part["records"]]
        numbers = {record["number"] for record in records}
        of_group = [row for row in new["transitions"] if self._of("transitions", row, "record") in numbers]
        begun = [
            tuple((record | {"state": "arrived", "version": 1, "due": record["updated_at"]}).values())
            for record in records
        ]
        first = [row for row in of_group if self._of("transitions", row, "version") == 1]
        more = [row for row in of_group if self._of("transitions", row, "version") != 1]
        return Group(
            first={"records": begun, "transitions": first},
            accounts={"accounts": part["accounts"]},
            last={"transitions": more, **{name: part[name] for name in ENTRY}},
            moves=[(*(record[name] for name in MOVED), record["number"]) for record in records],
        )

    def _of(self, table: str, row: tuple[Any, ...], column: str) -> Any:
        return row[self._columns[table].index(column)]


class Sqlite:
    """By sqlite3, with the settings of ours."""

    schema = ""

    def __init__(self, address: str) -> None:
        self._connection = sqlite3.connect(address.removeprefix("sqlite:///"), isolation_level=None)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        return self._connection.execute(sql).fetchall()

    async def run(self, sql: str) -> None:
        self._connection.execute(sql)

    async def columns(self, table: str) -> list[str]:
        return [row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")]

    async def write(self, rows: Rows, columns: dict[str, list[str]], moves: Sequence[tuple[Any, ...]]) -> None:
        self._connection.execute("BEGIN IMMEDIATE")
        for table, some in rows.items():
            names = columns[table]
            sql = f"INSERT INTO {table} ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})"
            self._connection.executemany(sql, some)
        changes = ", ".join(f"{name} = ?" for name in MOVED)
        self._connection.executemany(f"UPDATE records SET {changes} WHERE number = ? AND version = 1", moves)
        self._connection.execute("COMMIT")

    async def close(self) -> None:
        self._connection.close()


class Postgres:
    """By asyncpg."""

    schema = "bursar."

    def __init__(self, connection: asyncpg.Connection) -> None:
        self._connection = connection

    @classmethod
    async def connect(cls, address: str) -> Postgres:
        """A connection to a database."""
        return cls(await asyncpg.connect(address, server_settings={"jit": "off"}))

    async def fetch(self, sql: str) -> list[tuple[Any, ...]]:
        return [tuple(row) for row in await self._connection.fetch(sql)]

    async def run(self, sql: str) -> None:
        await self._connection.execute(sql)

    async def columns(self, table: str) -> list[str]:
        sql = "SELECT column_name FROM information_schema.columns WHERE table_schema = 'bursar' AND table_name = $1"
        return [row[0] for row in await self._connection.fetch(f"{sql} ORDER BY ordinal_position", table)]

    async def write(self, rows: Rows, columns: dict[str, list[str]], moves: Sequence[tuple[Any, ...]]) -> None:
        async with self._connection.transaction():
            for table, some in rows.items():
                if some:
                    await self._connection.copy_records_to_table(
                        table, schema_name="bursar", columns=columns[table], records=some
                    )
            if moves:
                changes = ", ".join(f"{name} = ${place}" for place, name in enumerate(MOVED, 1))
                sql = f"UPDATE bursar.records SET {changes} WHERE number = ${len(MOVED) + 1} AND version = 1"
                await self._connection.executemany(sql, moves)

    async def close(self) -> None:
        await asyncio.wait_for(self._connection.close(), 10.0)


async def database(address: str) -> Database:
    """A database that is there."""
    return Sqlite(address) if address.startswith("sqlite:") else await Postgres.connect(address)
