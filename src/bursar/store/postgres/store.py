"""The PostgreSQL store: a connection that decides groups, one that writes them, a few that read; units, snapshots; and
one more for groups that are set aside, from the first one on.

A group is two round trips: one statement reads all it needs, one function call writes it, checks its own counts and
fails whole. No lock is held in between, so what was read may be stale by then; the function notices (`Lost`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, cast

import asyncpg

from bursar.model.errors import BursarError, Conflict, DatabaseCorrupt, DatabaseUnavailable, InvalidEntry
from bursar.ports import Ports
from bursar.store.address import HOW_TO
from bursar.store.group import (
    Blocked,
    Broken,
    Decided,
    Job,
    Lost,
)
from bursar.store.postgres.arrays import SQL, plain
from bursar.store.postgres.groups import read_group, write_group
from bursar.store.postgres.schema import check_version
from bursar.store.rows import Row
from bursar.store.tables import Tables

READERS = 4
CONNECT_TIMEOUT_S = 10
SETTINGS = {
    "application_name": "bursar",
    "jit": "off",
    "plan_cache_mode": "force_custom_plan",  # a generic plan made while tables were empty would be kept for ever
    # Closing an account looks at it after waiting for the commits in flight: each statement must see what is there now,
    # whatever the database's own default is.
    "default_transaction_isolation": "read committed",
    "array_nulls": "on",
}
# A group's two statements are planned once and must then be right at any size (ADR 9): by index, in the caller's order.
SWITCHED_OFF = ("seqscan", "hashjoin", "mergejoin", "bitmapscan", "sort", "material")
WRITER_SETTINGS = SETTINGS | {
    "plan_cache_mode": "force_generic_plan",
    **{f"enable_{what}": "off" for what in SWITCHED_OFF},
}
LOST_STATES = {"BU001", "BU002", "BU003", "BU004", "BU005", "BU006", "23505", "40001", "40P01"}
BLOCKED_STATES = {  # somebody holds a row and does not let go:
    "55P03",  # our lock_timeout
    "57014",  # or the statement_timeout of whoever runs the database
}
ISOLATION = "SELECT current_setting('transaction_isolation')"
GROUP_TIMEOUT_S = 30.0  # for one half of a group; a server that says nothing for so long is taken for gone
ASIDE = "SET bursar.lock_timeout = '50ms'"  # a rival's COMMIT on a slow disk is worth waiting for, a user's is not
BROKEN_STATES = {"57P01", "57P02", "57P03", "08000", "08003", "08006"}

Connection = asyncpg.Connection


def explain(error: Exception) -> BursarError:
    """What a person can do about it, in one line."""
    state = getattr(error, "sqlstate", "") or ""
    text = str(error).split("\n")[0]
    if state == "53100":
        return DatabaseUnavailable("the disk is full; nothing was written, make room and try again")
    if state == "25006":
        return DatabaseUnavailable("it is read-only (a replica, or set so); connect to the primary")
    if state in ("40001", "40P01"):
        return Conflict(text, 1)
    if state in BLOCKED_STATES:
        return Conflict(f"another transaction holds what this needs, see pg_stat_activity for the oldest ({text})", 1)
    if state.startswith("28") or state == "42501":
        return DatabaseUnavailable(f"access was refused: {text}")
    if state == "3D000":
        return DatabaseUnavailable(f"{text}; create it first")
    if state in ("42P01", "3F000", "42883"):
        return DatabaseUnavailable(f"its schema is not ours or not whole ({text}); run `bursar migrate`")
    if state.startswith("22"):  # a value that can't be stored (NUL in text, no JSON): its sender's mistake alone
        return InvalidEntry(f"the database can't store it: {text}")
    if state == "BU100" or state.startswith("23"):
        return DatabaseCorrupt("a row", text)
    return DatabaseUnavailable(text or type(error).__name__)


def broken(error: BaseException) -> bool:
    """Whether the connection is gone, as against a statement refused."""
    state = getattr(error, "sqlstate", "") or ""
    gone = OSError | asyncpg.InterfaceError | asyncpg.InternalClientError | asyncpg.ConnectionDoesNotExistError
    return isinstance(error, gone) or state in BROKEN_STATES


class PostgresSession:
    """Statements on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows."""
        return cast("Sequence[Row]", await self._connection.fetch(SQL[name], *plain(name, args)))

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement with one array per column."""
        if not rows:
            return 0
        status = await self._connection.execute(SQL[name], *plain(name, map(list, zip(*rows, strict=True))))
        return int(status.rsplit(" ", 1)[1])

    async def together(self, writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> list[int]:
        """Several writes as one transaction."""
        async with self._connection.transaction():
            return [await self.write(name, rows) for name, rows in writes]

    amount = staticmethod(str)
    minor = staticmethod(int)


class PoolSession(PostgresSession):
    """Statements that each take a connection from the pool."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows."""
        async with self._store.connection() as connection:
            return await PostgresSession(connection).rows(name, *args)

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement with one array per column."""
        async with self._store.connection() as connection:
            return await PostgresSession(connection).write(name, rows)

    async def together(self, writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> list[int]:
        """Several writes as one transaction."""
        async with self._store.connection() as connection:
            return await PostgresSession(connection).together(writes)


class PostgresStore:
    """One PostgreSQL database."""

    engine = "postgres"
    split = False
    has_clock = True
    overlaps = True

    def __init__(self, ports: Ports, url: str) -> None:
        self.ports = ports
        self.url = url
        self.timeout_s: float = GROUP_TIMEOUT_S
        self._pool: asyncpg.Pool | None = None
        self._decider: Connection | None = None
        self._deciding = asyncio.Lock()
        self._writer: Connection | None = None
        self._writing = asyncio.Lock()
        self._aside: Connection | None = None
        self._setting_aside = asyncio.Lock()
        self.read = Tables(PoolSession(self))

    async def open(self, *, migrate: bool = False) -> None:
        """Connect. A database without our schema gets it; an older one only if `migrate` says so."""
        try:
            self._pool = await asyncpg.create_pool(
                self.url,
                min_size=1,
                max_size=READERS,
                server_settings=SETTINGS,
                timeout=CONNECT_TIMEOUT_S,
                init=_durably,
                reset=_nothing,
            )
        except ValueError:  # which would quote it, and its password (asyncpg's own is one, too)
            raise DatabaseUnavailable(f"its address can't be read; {HOW_TO}") from None
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, TimeoutError) as error:
            raise explain(error) from error
        try:
            async with self.connection() as connection:
                await check_version(connection, migrate=migrate)
        except BaseException:  # also a cancellation: let go of the connections and pass it on
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of all connections."""
        for connection in (self._decider, self._writer, self._aside):
            if connection is not None:
                connection.terminate()
        self._decider = self._writer = self._aside = None
        if self._pool is not None:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()
            self._pool = None

    @contextlib.asynccontextmanager
    async def connection(self) -> AsyncIterator[Connection]:
        """A connection from the pool, with asyncpg's errors turned into ours."""
        if self._pool is None:
            raise DatabaseUnavailable("it is not open")
        try:
            async with self._pool.acquire(timeout=CONNECT_TIMEOUT_S) as connection:
                yield cast("Connection", connection)  # a proxy that behaves like one
        except TimeoutError as error:
            raise DatabaseUnavailable(f"no connection within {CONNECT_TIMEOUT_S} s") from error
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError, asyncpg.InternalClientError) as error:
            raise explain(error) from error  # the last: asyncpg's state, when a connection dies under a statement

    @contextlib.asynccontextmanager
    async def unit(self) -> AsyncIterator[Tables]:
        """Several primitives as one transaction."""
        async with self.connection() as connection, connection.transaction():
            yield Tables(PostgresSession(connection))

    async def now_us(self) -> int:
        """The server's clock."""
        return await self.read.clock.now_us()

    def single(self) -> Tables:
        """Primitives that each stand alone."""
        return self.read

    @contextlib.asynccontextmanager
    async def snapshot(self) -> AsyncIterator[Tables]:
        """Reads that all see the same moment."""
        async with self.connection() as connection, connection.transaction(isolation="repeatable_read", readonly=True):
            yield Tables(PostgresSession(connection))

    async def group(self, job: Job, connection: Connection | None = None) -> None:
        """Write a group: in one statement of its own, or in the caller's transaction."""
        if connection is not None:
            await self._in_callers_transaction(connection, job)
            return
        if not (job.aside and await self._group_aside(job)):
            await self.write(await self.decide(job, beside=False))

    async def decide(self, job: Job, *, beside: bool) -> Decided:
        """Read and decide; on a connection of its own, if the group before is being written beside it."""
        if not beside:
            return await self._decide_alone(job)
        async with self._deciding:
            try:
                self._decider = await self._alive(self._decider)
                async with asyncio.timeout(self.timeout_s):
                    return await read_group(self._decider, job, self.ports.monotonic())
            except Exception as error:
                self._decider = _dropped(self._decider, error)
                raise _sorted_out(error) from error

    async def _decide_alone(self, job: Job) -> Decided:
        """On the writing connection: for a lone caller, one server process that has everything at hand is faster."""
        async with self._writing:
            try:
                self._writer = await self._alive(self._writer)
                async with asyncio.timeout(self.timeout_s):
                    return await read_group(self._writer, job, self.ports.monotonic())
            except Exception as error:
                self._writer = _dropped(self._writer, error)
                raise _sorted_out(error) from error

    async def write(self, decided: Decided) -> None:
        """Write what was decided, if all it rests on still stands."""
        async with self._writing:
            try:
                self._writer = await self._alive(self._writer)
                async with asyncio.timeout(self.timeout_s):
                    await write_group(self._writer, decided, self.ports.monotonic())
            except Exception as error:
                self._writer = _dropped(self._writer, error)
                raise _sorted_out(error) from error

    async def _group_aside(self, job: Job) -> bool:
        """Read, decide and write on a connection of its own, beside all others. False: there is none to be had."""
        async with self._setting_aside:
            try:
                before, self._aside = self._aside, await self._alive(self._aside)
                if self._aside is not before:
                    await self._aside.execute(ASIDE)
            except Exception:  # too many of them: then like all others; if it is the database that is gone, they say so
                self._aside = None
                return False
            try:
                async with asyncio.timeout(self.timeout_s):
                    decided = await read_group(self._aside, job, self.ports.monotonic())
                async with asyncio.timeout(self.timeout_s):
                    await write_group(self._aside, decided, self.ports.monotonic())
            except Exception as error:
                self._aside = _dropped(self._aside, error)
                raise _sorted_out(error) from error
        return True

    async def _in_callers_transaction(self, connection: Connection, job: Job) -> None:
        try:
            if not hasattr(connection, "is_in_transaction"):
                raise DatabaseUnavailable(f"an asyncpg connection is expected, not {type(connection).__name__}")
            if not connection.is_in_transaction():
                raise DatabaseUnavailable("the connection is not in a transaction; begin one first")
            await self._in_savepoint(connection, job)
            if job.doubtful() and await connection.fetchval(ISOLATION) != "read committed":
                # Nothing was written, so nothing has noticed that it rests on what was long ago.
                raise Conflict("a refusal in a transaction that sees only what was there when it began; end it", 1)
        except asyncpg.InterfaceError as error:  # closed, given back, or busy with something else
            raise DatabaseUnavailable(f"the connection can't be used: {error}") from error
        except Exception as error:
            raise _sorted_out(error) from error

    async def _in_savepoint(self, connection: Connection, job: Job) -> None:
        """A lost race must not spoil the caller's transaction, however that was begun."""
        await connection.execute("SAVEPOINT bursar")
        try:
            now_s = self.ports.monotonic()
            await write_group(connection, await read_group(connection, job, now_s), now_s)
        except BaseException:  # it goes on to the caller, who decides about the rest
            if not connection.is_closed():
                await connection.execute("ROLLBACK TO SAVEPOINT bursar")
            raise
        await connection.execute("RELEASE SAVEPOINT bursar")

    async def _alive(self, connection: Connection | None) -> Connection:
        if self._pool is None:
            raise DatabaseUnavailable("it is not open")
        if connection is None or connection.is_closed():
            connection = await asyncpg.connect(self.url, server_settings=WRITER_SETTINGS, timeout=CONNECT_TIMEOUT_S)
            await _durably(connection)
        return connection


async def _durably(connection: Any) -> None:
    """A receipt is for ever: whatever the database's default, COMMIT waits for the disk, at least."""
    await connection.execute(
        "SELECT set_config('synchronous_commit', 'on', false) WHERE current_setting('synchronous_commit') = 'off'"
    )


async def _nothing(_connection: Any) -> None:
    """Nothing to reset: we never leave a setting, a listener or a cursor behind."""


def _dropped(connection: Connection | None, error: Exception) -> Connection | None:
    """A connection that broke is not used again."""
    if connection is not None and (broken(error) or isinstance(error, TimeoutError)):
        connection.terminate()
        return None
    return connection


def _sorted_out(error: Exception) -> Exception:
    """A lost race, a broken connection, or an error for the caller."""
    if isinstance(error, BursarError | Lost | Broken):
        return error
    if getattr(error, "sqlstate", None) in BLOCKED_STATES:
        return Blocked("another transaction holds a posting or key that this one needs")
    if getattr(error, "sqlstate", None) in LOST_STATES:
        return Lost(str(error).split("\n")[0])
    if broken(error) or isinstance(error, TimeoutError):
        return Broken(str(error).split("\n")[0] or type(error).__name__)
    if isinstance(error, asyncpg.PostgresError):
        return explain(error)
    return error
