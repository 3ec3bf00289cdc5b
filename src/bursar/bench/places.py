"""Where the benchmark's databases are: a throw-away PostgreSQL with fsync on, or SQLite files on a real disk.

A place makes databases, fills them, copies them, opens baselines and peers on them, and says how many bytes of
write-ahead log have been written. Everything is gone when the place is left.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Protocol

import asyncpg

import bursar
from bursar.bench.baseline import Baseline, PostgresBaseline, SqliteBaseline, picture_after
from bursar.bench.load import load_postgres, load_sqlite
from bursar.bench.plain import Plain, PostgresPlain, SqlitePlain
from bursar.bench.workload import ASSET, PRECISION
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

# A server of usual size: the defaults are for the smallest machine PostgreSQL knows. Durability is what it is by
# default: fsync, synchronous_commit and full_page_writes are on.
SETTINGS = {"shared_buffers": "512MB", "max_wal_size": "8GB", "checkpoint_timeout": "30min"}
DISKS = (Path("/var/tmp"), Path.cwd())  # /tmp is often memory, which would make a commit cheap


class Place(Protocol):
    """One kind of store."""

    store: str

    async def make(self, name: str, postings: int) -> str:
        """A new database with so many postings in it; returns its address."""
        ...

    async def blank(self, name: str) -> str:
        """A new database with nothing in it; returns its address."""
        ...

    async def copy(self, address: str, name: str) -> str:
        """The same again; returns the copy's address."""
        ...

    def baseline(self, address: str, postings: int) -> contextlib.AbstractAsyncContextManager[Baseline]:
        """The baseline on a database that `make` or `copy` has made."""
        ...

    def plain(self, name: str) -> contextlib.AbstractAsyncContextManager[Plain]:
        """The peer, on a database of its own."""
        ...

    def wal(self, address: str) -> contextlib.AbstractAsyncContextManager[list[int]]:
        """Counts the write-ahead bytes of what happens inside the block: one number, there at the end."""
        ...

    async def settle(self) -> None:
        """Write out what is pending, so that the next case does not pay for the last one."""
        ...


async def _schema(address: str) -> None:
    async with bursar.open(address) as b:
        await b.ledger.create_asset(ASSET, PRECISION)


class SqlitePlace:
    """Files in a folder of their own."""

    store = "sqlite"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def blank(self, name: str) -> str:
        return f"sqlite:///{self._folder / name}.db"

    async def make(self, name: str, postings: int) -> str:
        address = await self.blank(name)
        await _schema(address)
        load_sqlite(self._path(address), postings)
        return address

    async def copy(self, address: str, name: str) -> str:
        target = f"sqlite:///{self._folder / name}.db"
        shutil.copyfile(self._path(address), self._path(target))
        return target

    @contextlib.asynccontextmanager
    async def baseline(self, address: str, postings: int) -> AsyncIterator[Baseline]:
        with contextlib.closing(SqliteBaseline(str(self._path(address)), picture_after(postings))) as baseline:
            yield baseline

    @contextlib.asynccontextmanager
    async def plain(self, name: str) -> AsyncIterator[Plain]:
        plain = SqlitePlain(str(self._folder / name))
        try:
            yield plain
        finally:
            await plain.close()

    @contextlib.asynccontextmanager
    async def wal(self, address: str) -> AsyncIterator[list[int]]:
        path = self._path(address)
        counted: list[int] = []
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            # A reader with a snapshot keeps the log from being started over, so that its length is what was written.
            connection.execute("BEGIN")
            connection.execute("SELECT count(*) FROM rules").fetchall()
            before = _length(f"{path}-wal")
            yield counted
            counted.append(_length(f"{path}-wal") - before)
            connection.execute("ROLLBACK")

    async def settle(self) -> None:
        os.sync()

    def _path(self, address: str) -> Path:
        return Path(address.removeprefix("sqlite:///"))


class PostgresPlace:
    """Databases of one throw-away server."""

    store = "postgres"

    def __init__(self, server: ThrowawayPostgres) -> None:
        self._server = server

    async def blank(self, name: str) -> str:
        return await self._create(name)

    async def make(self, name: str, postings: int) -> str:
        address = await self._create(name)
        await _schema(address)
        async with _connected(address) as connection:
            await load_postgres(connection, postings)
        return address

    async def copy(self, address: str, name: str) -> str:
        original = address.partition("?")[0].rpartition("/")[2]
        return await self._create(name, f"TEMPLATE {original}")

    async def _create(self, name: str, how: str = "") -> str:
        name = name.replace("-", "_")
        async with _connected(self._server.url) as connection:
            await connection.execute(f"CREATE DATABASE {name} {how}")
        return self._server.url_of(name)

    @contextlib.asynccontextmanager
    async def baseline(self, address: str, postings: int) -> AsyncIterator[Baseline]:
        async with _connected(address) as connection:
            yield PostgresBaseline(connection, picture_after(postings))

    @contextlib.asynccontextmanager
    async def plain(self, name: str) -> AsyncIterator[Plain]:
        plain = await PostgresPlain.open(await self._create(name))
        try:
            yield plain
        finally:
            await plain.close()

    @contextlib.asynccontextmanager
    async def wal(self, address: str) -> AsyncIterator[list[int]]:
        counted: list[int] = []
        async with _connected(address) as connection:
            before = await connection.fetchval("SELECT pg_current_wal_insert_lsn()")
            yield counted
            counted.append(int(await connection.fetchval("SELECT pg_current_wal_insert_lsn() - $1::pg_lsn", before)))

    async def settle(self) -> None:
        async with _connected(self._server.url) as connection:
            await connection.execute("CHECKPOINT")


@contextlib.asynccontextmanager
async def _connected(address: str) -> AsyncIterator[asyncpg.Connection]:
    connection = await asyncpg.connect(address, server_settings={"jit": "off"})
    try:
        yield connection
    finally:
        await connection.close()


def _length(file: str) -> int:
    path = Path(file)
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def place_of(store: str) -> Iterator[Place]:
    """The place for a kind of store."""
    if store == "postgres":
        with throwaway_postgres(SETTINGS) as server:
            yield PostgresPlace(server)
        return
    parent = next((path for path in DISKS if os.access(path, os.W_OK)), None)
    with tempfile.TemporaryDirectory(prefix="bursar-bench-", dir=parent) as folder:
        yield SqlitePlace(Path(folder))
