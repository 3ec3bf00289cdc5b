"""The PostgreSQL store: a connection that writes batches, one that prepares them, a few that read; transactions,
snapshots; and one more for blocked changes, from the first one on.

A batch is two round trips: one statement reads all it needs, one function call writes it, checks its own counts and
fails as a whole. No lock is held in between, so what was read may be stale by then; the function notices
(`WriteConflict`).

No statement waits for ever: a server that lives stops it after `Options.statement_s`, and one that is silent is not
asked again: its connection is dropped. What was being committed then may be there or not, and is never reported as
either (L18). A cancel request is never sent: it would end a COMMIT's wait for a synchronous standby, and the server
would then call committed what no standby has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, TypeVar, cast
from weakref import WeakSet

import asyncpg

from bursar.model.errors import DatabaseUnavailable, OutcomeUnknown
from bursar.ports import Ports
from bursar.store.batch import Lane, Unreachable
from bursar.store.columns import Row
from bursar.store.postgres.arrays import SQL, plain
from bursar.store.postgres.batches import PostgresBatchSession
from bursar.store.postgres.connecting import SETTINGS, SLOWER, WRITER_SETTINGS, Connection, Connector
from bursar.store.postgres.errors import (
    CONNECTION_ERRORS,
    broken,
    explain,
    first_line,
    not_connected,
    read_only,
    sorted_out,
)
from bursar.store.postgres.schema import check_version
from bursar.store.protocol import USUAL, Options, Work
from bursar.store.tables import Tables

T = TypeVar("T")
READERS = 4
FREE_S = 10  # to wait for a connection that is free, and to make it
CLOSE_S = 1.0  # for the server to take note that we go
HANGING_MAX = 4  # commits that wait for a standby for too long; then no more are started
HANGING = "commits wait for a synchronous standby that does not answer; see synchronous_standby_names"
ISOLATION = "SELECT current_setting('transaction_isolation')"
# A rival's COMMIT on a slow disk is worth waiting for, a user's is not.
SHORT_LOCKS = "SET bursar.lock_timeout = '50ms'"
NO_KEY = "it has none; look whether it has happened before you repeat it"


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


class PoolSession(PostgresSession):
    """Statements that each take a connection from the pool."""

    def __init__(self, store: PostgresStore) -> None:
        self._store = store

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows."""
        writes = not SQL[name].startswith("SELECT") and not name.startswith("list_")
        async with self._store.connection(writes=writes) as connection:
            return await PostgresSession(connection).rows(name, *args)

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement with one array per column."""
        async with self._store.connection(writes=True) as connection:
            return await PostgresSession(connection).write(name, rows)


class PostgresStore:
    """One PostgreSQL database."""

    has_clock = True
    overlaps = True
    first_read = 2  # most payments need no more, and to read on costs a round trip
    reuses_postings = True

    def __init__(self, ports: Ports, url: str, options: Options = USUAL) -> None:
        self.ports = ports
        self.url = url
        self.timeout_s = options.statement_s * SLOWER  # for one half of a group
        self._connector = Connector(ports, url, options)
        self._pool: asyncpg.Pool | None = None
        self._lanes: dict[Lane, Connection | None] = dict.fromkeys(Lane)  # each keeps a connection
        self._locks = {lane: asyncio.Lock() for lane in Lane}
        self._readers: WeakSet[Connection] = WeakSet()  # of the pool
        self._connected = 0  # connections made for groups: after a failover, the next one may be to another server
        self._may_hang = False  # whether a commit got no answer since we last looked
        self._busy: set[int] = set()  # server processes that are in use
        self.read = Tables(PoolSession(self))

    async def open(self, *, migrate: bool = False) -> None:
        """Connect. A database without our schema gets it; an older one only if `migrate` says so."""
        self._pool = asyncpg.create_pool(
            self.url,
            min_size=0,
            max_size=READERS,
            connect=self._connect_reader,
            reset=_nothing,
        )
        await self._pool
        try:
            async with self.connection(unhurried=True) as connection:
                await check_version(connection, migrate=migrate)
                if self._connector.is_pooled:  # another one beside it shows whether each has a server's to itself
                    async with self.connection():
                        pass
        except BaseException:  # also a cancellation: let go of the connections and pass it on
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of all connections. A caller that still waits for one gets an error."""
        self._drop_lanes()
        if self._pool is not None:
            try:
                async with asyncio.timeout(CLOSE_S):
                    await self._pool.close()
            except TimeoutError:
                self._pool.terminate()
            self._pool = None

    @contextlib.asynccontextmanager
    async def connection(self, *, unhurried: bool = False, writes: bool = False) -> AsyncIterator[Connection]:
        """A connection from the pool, with asyncpg's errors turned into ours; or, `unhurried`, one of its own, whose
        statements have no limit. With `writes`, a statement on it that gets no answer may have been written."""
        if writes:
            await self.check_commits()
        connection = await self._acquire(unhurried)
        pid = connection.get_server_pid()
        self._busy.add(pid)
        try:
            yield connection
        except (TimeoutError, *CONNECTION_ERRORS) as error:
            if broken(error):  # before anything is awaited, or a cancel request would be on its way
                drop(connection)
            if read_only(error) or broken(error):
                await self._reconnect()
            if not broken(error):
                raise explain(error) from error
            why = f"no answer within {self.timeout_s:g} s" if isinstance(error, TimeoutError) else first_line(error)
            self._may_hang |= writes
            raise (OutcomeUnknown(NO_KEY, why) if writes else DatabaseUnavailable(why)) from error
        except OutcomeUnknown:  # of COMMIT
            self._may_hang = True
            raise
        except asyncio.CancelledError:
            drop(connection)
            raise
        finally:
            self._busy.discard(pid)
            await self._give_back(connection, unhurried)

    async def _acquire(self, unhurried: bool) -> Connection:
        if self._pool is None:
            raise DatabaseUnavailable("it is not open")
        try:
            if unhurried:
                return await self._connect(SETTINGS, limited=False)
            return cast("Connection", await self._pool.acquire(timeout=FREE_S))  # a proxy that behaves like one
        except TimeoutError as error:
            raise DatabaseUnavailable(f"no connection within {FREE_S} s") from error
        except Unreachable as error:
            raise DatabaseUnavailable(str(error)) from error
        except CONNECTION_ERRORS as error:
            raise explain(error) from error

    async def _give_back(self, connection: Any, unhurried: bool) -> None:
        if unhurried:
            if usable(connection):
                with contextlib.suppress(TimeoutError, *CONNECTION_ERRORS):
                    await connection.close(timeout=CLOSE_S)
        elif self._pool is not None:
            with contextlib.suppress(TimeoutError, *CONNECTION_ERRORS):  # it is dropped then
                await self._pool.release(connection, timeout=CLOSE_S)

    async def _connect_reader(self, *_: Any, **__: Any) -> Connection:
        connection = await self._connect(SETTINGS, timed=True)
        self._readers.add(connection)
        return connection

    async def _connect(self, settings: Mapping[str, str], **how: bool) -> Connection:
        """A new connection. If there is none to be had, or it is to another host than the last one, a server has gone:
        idle connections to it may not know that yet."""
        before = self._connector.host
        try:
            connection = await self._connector.connect(settings, **how)
        except Unreachable:
            await self._reconnect()
            raise
        if before is not None and before != self._connector.host:
            await self._reconnect()
        return connection

    async def _reconnect(self) -> None:
        """Use no connection again that was made before now: the server is silent or gone, or no longer the one that
        takes writes. An idle connection does not notice that by itself, and the next statement on it would wait for
        its whole limit. Connections that are in use end by themselves."""
        for connection in list(self._readers):
            if not connection.is_closed() and connection.get_server_pid() not in self._busy:
                connection.terminate()
        self._drop_lanes(idle=True)
        if self._pool is not None:
            await self._pool.expire_connections()

    def _drop_lanes(self, *, idle: bool = False) -> None:
        for lane, connection in self._lanes.items():
            if connection is not None and not (idle and self._locks[lane].locked()):
                connection.terminate()
                self._lanes[lane] = None

    @contextlib.asynccontextmanager
    async def transaction(self, *, unhurried: bool = False) -> AsyncIterator[Tables]:
        """Several primitives as one transaction."""
        await self.check_commits()
        async with self.connection(unhurried=unhurried) as connection, whole(connection):
            yield Tables(PostgresSession(connection))

    async def now_us(self) -> int:
        """The server's clock."""
        return await self.read.clock.now_us()

    def single(self) -> Tables:
        """Primitives that each stand alone."""
        return self.read

    @contextlib.asynccontextmanager
    async def snapshot(self, *, unhurried: bool = False) -> AsyncIterator[Tables]:
        """Reads that all see the same moment."""
        options = {"isolation": "repeatable_read", "readonly": True}
        async with self.connection(unhurried=unhurried) as connection, whole(connection, **options):
            yield Tables(PostgresSession(connection))

    async def beat(self, worker: str) -> None:
        """Write something small, durably, or raise why that can't be."""
        if await self._hanging(self.read):
            raise DatabaseUnavailable(HANGING)
        await self.read.heartbeats.beat(worker)

    async def check_commits(self) -> None:
        """Begin no write while too many commits hang. Nothing is asked unless one has had no answer lately."""
        if self._may_hang:
            if await self._hanging(self.read) > HANGING_MAX:
                raise DatabaseUnavailable(HANGING)
            self._may_hang = False

    async def _hanging(self, tables: Tables) -> int:
        """How many commits hang. Each keeps a process of the server until its standby is back, although the caller
        is long gone: to start one after the other would use up all connections."""
        return await tables.heartbeats.hanging_commits(int(self.timeout_s * 1e6))

    async def run_batch(self, work: Work[T], lane: Lane = Lane.WRITE) -> T:
        """Do something on the connection of a lane; a write is one statement, and a transaction of its own."""
        if lane is Lane.BLOCKED and not await self._can_be_beside():
            lane = Lane.WRITE
        async with self._locks[lane]:
            return await self._on(lane, work)

    async def _on(self, lane: Lane, work: Work[T]) -> T:
        """A server that is read-only has done nothing of it: another connection, perhaps to another server, is tried at
        once."""
        for last in (False, True):
            connection = await self._alive(lane)
            try:
                return await work(
                    PostgresBatchSession(connection, self._connected, self.timeout_s, self.ports.monotonic)
                )
            except BaseException as error:  # also a cancellation, in the middle of a statement
                if broken(error) or not isinstance(error, Exception):
                    connection.terminate()
                    self._lanes[lane] = None
                if not isinstance(error, Exception):
                    raise
                if read_only(error):
                    self._drop_lanes()
                if read_only(error) or broken(error):
                    await self._reconnect()
                if read_only(error) and not last:
                    continue
                raise sorted_out(error) from error
        raise AssertionError("the last try returns or raises")

    async def _can_be_beside(self) -> bool:
        """Whether the lane of blocked changes has its connection. If not, they go with all others; and if the database
        is gone, these say so."""
        async with self._locks[Lane.BLOCKED]:
            try:
                await self._alive(Lane.BLOCKED)
            except Exception:  # too many connections, perhaps; nothing was sent, and the other lane meets it again
                return False
        return True

    async def run_batch_in(self, connection: Connection, work: Work[T]) -> T:
        """Do something in the caller's transaction. A conflict must not spoil that, however it was begun."""
        try:
            if not hasattr(connection, "is_in_transaction"):
                raise DatabaseUnavailable(f"an asyncpg connection is expected, not {type(connection).__name__}")
            if not connection.is_in_transaction():
                raise DatabaseUnavailable("the connection is not in a transaction; begin one first")
            await connection.execute("SAVEPOINT bursar")
            try:
                result = await work(PostgresBatchSession(connection, 0, None, self.ports.monotonic))
            except BaseException:  # it goes on to the caller, who decides about the rest
                if not connection.is_closed():
                    await connection.execute("ROLLBACK TO SAVEPOINT bursar")
                raise
            await connection.execute("RELEASE SAVEPOINT bursar")
        except asyncpg.InterfaceError as error:  # closed, given back, or busy with something else
            raise DatabaseUnavailable(f"the connection can't be used: {error}") from error
        except Exception as error:
            raise sorted_out(error) from error
        return result

    async def reads_latest(self, connection: Connection) -> bool:
        """Whether a caller's transaction sees what others commit meanwhile."""
        return bool(await connection.fetchval(ISOLATION) == "read committed")

    async def _alive(self, lane: Lane) -> Connection:
        if self._pool is None:
            raise DatabaseUnavailable("it is not open")
        connection = self._lanes[lane]
        if connection is None or connection.is_closed():
            connection = await self._connect(WRITER_SETTINGS)
            self._connected += 1
            try:
                async with asyncio.timeout(self.timeout_s):
                    if await self._hanging(Tables(PostgresSession(connection))) > HANGING_MAX:
                        raise Unreachable(HANGING)
                    if lane is Lane.BLOCKED:  # however this connection came about: no change waits long on it
                        await connection.execute(SHORT_LOCKS)
            except BaseException as error:  # also a cancellation: it would never be used
                connection.terminate()
                if isinstance(error, CONNECTION_ERRORS):
                    raise not_connected({"": error}) from error
                raise
            self._lanes[lane] = connection
        return connection


@contextlib.asynccontextmanager
async def whole(connection: Connection, **options: Any) -> AsyncIterator[None]:
    """A transaction. What has no answer is never waited for again: not to roll back (the holder of the connection drops
    it, and the server rolls back), and not to learn whether COMMIT went through, which then is unknown."""
    transaction = connection.transaction(**options)
    await transaction.start()
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) and not broken(error) and usable(connection):
            await transaction.rollback()
        raise
    try:
        await transaction.commit()
    except (TimeoutError, *CONNECTION_ERRORS) as error:
        if not broken(error) or options.get("readonly"):
            raise
        drop(connection)
        raise OutcomeUnknown(NO_KEY, first_line(error)) from error


def usable(connection: Connection) -> bool:
    """Whether a connection lives and is still ours: one that breaks goes back to its pool by itself."""
    try:
        return not connection.is_closed()
    except asyncpg.InterfaceError:
        return False


def drop(connection: Connection) -> None:
    """End a connection at once, without a word to its server, which may be silent."""
    with contextlib.suppress(asyncpg.InterfaceError):  # gone already
        connection.terminate()


async def _nothing(_connection: Any) -> None:
    """Nothing to reset: we never leave a setting, a listener or a cursor behind."""
