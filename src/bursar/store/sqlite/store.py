"""The SQLite store: two threads (one writes, one reads), transactions, snapshots, batches."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, TypeVar, cast

from bursar.model.errors import BursarError, DatabaseNewer, DatabaseOlder, DatabaseUnavailable
from bursar.ports import Ports, SerialExecutor
from bursar.store.batch import CommitUnknown, Lane, WriteConflict
from bursar.store.columns import Row
from bursar.store.protocol import Work
from bursar.store.sql import migrations
from bursar.store.sqlite import calls
from bursar.store.sqlite.batches import SqliteBatchSession
from bursar.store.sqlite.log import Log, is_full
from bursar.store.tables import Tables

T = TypeVar("T")
MIGRATIONS = migrations("sqlite")
VERSION = MIGRATIONS[-1][0]
PAGE = 2_048
CACHE_KIB = 65_536


class SqliteSession:
    """Statements on one connection, on one lane."""

    def __init__(self, store: SqliteStore, lane: SerialExecutor, connection: Callable[[], sqlite3.Connection]) -> None:
        self._store = store
        self._lane = lane
        self._connection = connection

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows."""
        return await self.run(lambda connection: calls.rows(connection, name, args))

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement once per row."""
        return await self.run(lambda connection: calls.write(connection, name, rows)) if rows else 0

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Run something on the connection."""
        return await self._store.run(self._lane, partial(work, self._connection()))


class ReadSession(SqliteSession):
    """Like a session, but waits for a snapshot that holds the reading connection."""

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        async with self._store.read_lock:
            return await super().run(work)


class SingleSession(SqliteSession):
    """Like a session on the writing connection, but never inside a transaction that another caller has open there.

    It need not hold the lock itself: the lane keeps order, so what is queued before a BEGIN runs before it.
    """

    async def run(self, work: Callable[[sqlite3.Connection], T]) -> T:
        await self._store.make_room()
        while self._store.write_lock.locked():
            async with self._store.write_lock:
                pass
        return await super().run(work)


class SqliteStore:
    """One SQLite file."""

    has_clock = False
    overlaps = False  # reading, deciding and writing are one transaction on one thread
    first_read = 1  # the largest is mostly enough, and to read on costs one more look, not a round trip
    reuses_postings = False  # nor does reading at all

    def __init__(self, ports: Ports, path: str) -> None:
        self.ports = ports
        self.path = path
        self._write_lane = ports.lane("write")
        self._read_lane = ports.lane("read")
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._closed = False
        self._file = ""  # as SQLite names it
        self._identity: tuple[int, int] | None = None
        self._used = 0  # the highest number given to a caller whose transaction may have been rolled back since
        self._log = Log(ports, path)
        self.write_lock = asyncio.Lock()
        self.read_lock = asyncio.Lock()
        self.read = Tables(ReadSession(self, self._read_lane, self._get_reader))

    async def open(self, *, migrate: bool = False) -> None:
        """Open the file; make it if it is new. An older one is only brought forward if `migrate` says so."""
        await self.run(self._write_lane, partial(self._open_writer, migrate))
        self._reader = await self.run(self._read_lane, self._new_reader)
        if self._reader is self._writer:  # one connection for both (the simulator): no transaction is read half-way
            self.read_lock = self.write_lock

    async def close(self) -> None:
        """Finish what is queued and let go of the file."""
        with contextlib.suppress(BursarError):
            for lane, connection in ((self._read_lane, self._reader), (self._write_lane, self._writer)):
                if connection is not None:
                    await self.run(lane, connection.close)
        self._closed = True
        self._read_lane.close()
        self._write_lane.close()

    async def run(self, lane: SerialExecutor, work: Callable[[], T]) -> T:
        """Run something on a lane, turning SQLite's errors into ours."""
        if self._closed:
            raise DatabaseUnavailable("it is closed")
        try:
            return await lane.run(work)
        except sqlite3.Error as error:
            if is_full(error) and lane is self._write_lane:
                self._log.is_full = True
            raise calls.explain(error) from error

    async def make_room(self) -> None:
        """Nothing is written to a disk that was full before the log is copied back: it would take all that is freed."""
        if self._log.is_full:
            await self.run(self._write_lane, lambda: self._log.make_room(self._get_writer()))

    @contextlib.asynccontextmanager
    async def transaction(self, *, unhurried: bool = False) -> AsyncIterator[Tables]:
        """Several primitives as one. Nothing on this host's own disk has a time limit."""
        async with self.write_lock:
            tables = Tables(SqliteSession(self, self._write_lane, self._get_writer))
            try:
                self._check_there()
                await self.make_room()
                await self._do("BEGIN IMMEDIATE")
                yield tables
                await self._do("COMMIT")
            except BaseException:  # BEGIN cancelled, COMMIT failed: no transaction may stay open; it goes on
                await self.run(self._write_lane, partial(calls.roll_back, self._get_writer()))
                raise

    async def now_us(self) -> int:
        """This machine's clock."""
        return self.ports.now_us()

    def single(self) -> Tables:
        """Primitives that each stand alone."""
        return Tables(SingleSession(self, self._write_lane, self._get_writer))

    @contextlib.asynccontextmanager
    async def snapshot(self, *, unhurried: bool = False) -> AsyncIterator[Tables]:
        """Reads that all see the same moment, on a connection of their own: other readers go on meanwhile."""
        lane = self.ports.lane("snapshot")
        try:
            connection = await self.run(lane, self._new_reader)
        except BaseException:  # reading only: end the thread and pass it on
            lane.close()
            raise
        shared = connection is self._writer  # the simulator has one connection for all
        try:
            async with self.read_lock if shared else contextlib.nullcontext():
                await self.run(lane, partial(connection.execute, "BEGIN"))
                try:
                    yield Tables(SqliteSession(self, lane, lambda: connection))
                finally:
                    await self.run(lane, partial(connection.execute, "ROLLBACK"))
        finally:
            await self.run(lane, connection.close)
            lane.close()

    async def beat(self, worker: str) -> None:
        """Write something small, durably, or raise why that can't be."""
        self._check_there()
        await self.single().heartbeats.beat(worker)

    async def run_batch(self, work: Work[T], lane: Lane = Lane.WRITE) -> T:
        """Run something on the writer's thread, in a transaction of its own. There is one lane."""
        async with self.write_lock:
            await self.make_room()
            return await self.run(self._write_lane, partial(self._run_batch, work))

    def _check_there(self) -> None:
        """What is written to a file that can't be found again is lost, however well it was synced."""
        if self.ports.identity(self.path) != self._identity:
            raise DatabaseUnavailable("the file was moved, deleted or replaced while it was open; nothing was written")

    def _run_batch(self, work: Work[T]) -> T:
        self._check_there()
        connection = self._get_writer()

        session: SqliteBatchSession | None = None

        def run() -> T:
            nonlocal session
            session = SqliteBatchSession(connection, self.ports.now_us, self._used)
            return run_sync(work(session))

        try:
            try:
                result = calls.together(connection, run)
            except sqlite3.IntegrityError as error:
                if session is None or not session.assumes_keys:
                    raise  # keys and records had been read: the rows contradict each other
                raise WriteConflict(str(error)) from error  # one exists already: the next attempt reads them
            except sqlite3.Error as error:
                if not is_full(error):
                    raise
                self._log.make_room(connection)  # the bytes of the log may be room enough
                result = calls.together(connection, run)
            self._log.written(connection)
        except calls.CommitFailed as error:
            raise CommitUnknown(f"the disk failed: {error}") from error
        return result

    async def run_batch_in(self, connection: sqlite3.Connection, work: Work[T]) -> T:
        """Run something in the caller's transaction. Only this part of it is undone if it fails."""
        try:
            return self._run_batch_in(connection, work)
        except sqlite3.Error as error:
            raise calls.explain(error) from error

    async def reads_latest(self, connection: sqlite3.Connection) -> bool:
        """Yes: a batch in it has taken the write lock first (`batch_claim`), and nothing has been written since."""
        return True

    def _run_batch_in(self, connection: sqlite3.Connection, work: Work[T]) -> T:
        if not isinstance(connection, sqlite3.Connection):
            raise DatabaseUnavailable(f"a sqlite3.Connection is expected, not {type(connection).__name__}")
        if not connection.in_transaction:
            raise DatabaseUnavailable("the connection is not in a transaction; run BEGIN IMMEDIATE first")
        with calls.our_ways(connection, self.ports.now_us):
            if calls.file_of(connection) != self._file:
                raise DatabaseUnavailable(f"the connection is to another file than {self.path}")
            # Nothing would be written for a refusal, and nothing would notice that it rests on what was long ago.
            connection.execute(calls.SQL["batch_claim"])
            connection.execute("SAVEPOINT bursar")
            try:
                # With keys read: a failed write would cost the caller's transaction a second attempt.
                session = SqliteBatchSession(connection, self.ports.now_us, self._used, reads_keys=True)
                result = run_sync(work(session))
                self._used = session.used
            except BaseException:  # our part alone is undone; the caller gets the error, and decides about the rest
                connection.execute("ROLLBACK TO bursar")
                connection.execute("RELEASE bursar")
                raise
            connection.execute("RELEASE bursar")
        return result

    async def _do(self, sql: str) -> None:
        await self.run(self._write_lane, partial(self._get_writer().execute, sql))

    def _get_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise DatabaseUnavailable("it is not open")
        return self._writer

    def _get_reader(self) -> sqlite3.Connection:
        if self._reader is None:
            raise DatabaseUnavailable("it is not open")
        return self._reader

    def _open_writer(self, migrate: bool) -> None:
        connection = self.ports.sqlite(self.path, read_only=False)
        connection.execute(f"PRAGMA busy_timeout = {calls.BUSY_MS}")
        connection.execute(f"PRAGMA page_size = {PAGE}")  # of a new file (decision 19); any other keeps its own
        calls.use_wal(connection)
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._log.open(connection)
        calls.register(connection, self.ports.now_us)
        version(connection, migrate=migrate)
        self._file = calls.file_of(connection)
        self._identity = self.ports.identity(self.path)
        self._writer = connection

    def _new_reader(self) -> sqlite3.Connection:
        connection = self.ports.sqlite(self.path, read_only=True)
        connection.execute(f"PRAGMA busy_timeout = {calls.BUSY_MS}")
        calls.register(connection, self.ports.now_us)
        return connection


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine that never suspends, on this very thread."""
    try:
        work.send(None)
    except StopIteration as done:
        return cast("T", done.value)
    work.close()
    raise AssertionError("a batch on SQLite must not wait for anything: its thread holds the lock")


def version(connection: sqlite3.Connection, *, migrate: bool) -> list[int]:
    """Check the schema's version; bring it forward if asked to, or if the file is new. Returns what was applied."""
    (have,) = connection.execute("PRAGMA user_version").fetchone()
    if have > VERSION:
        raise DatabaseNewer(have, VERSION)
    if have == VERSION:
        return []
    if have and not migrate:
        raise DatabaseOlder(have, VERSION)
    # All in one transaction: another process that opens a new file must not find it half-way.
    return calls.together(connection, partial(_migrate, connection))


def _migrate(connection: sqlite3.Connection) -> list[int]:
    # Looked at again inside the transaction: another process may have been faster.
    (have,) = connection.execute("PRAGMA user_version").fetchone()
    if not have and connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        raise DatabaseUnavailable("the file is a SQLite database of something else; choose another path")
    missing = {number: text for number, _, text in MIGRATIONS if number > have}
    for number, text in missing.items():
        for statement in _statements(text):
            connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {number}")
    return list(missing)


def _statements(script: str) -> list[str]:
    """The statements of a script, one by one: `executescript` would end our transaction."""
    found, so_far = [], ""
    for line in script.splitlines():
        so_far += line + "\n"
        if sqlite3.complete_statement(so_far):
            found.append(so_far)
            so_far = ""
    return found
