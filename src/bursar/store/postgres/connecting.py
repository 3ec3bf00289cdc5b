"""A connection to PostgreSQL: which host, how long that may take, and the settings without which it is not used.

Of several hosts in the address, each gets a short time, and the next one is tried beside it before that is over: one
that accepts connections and says nothing, or does not even do that, does not block the others. With several hosts,
one that takes writes is wanted (`target_session_attrs=read-write`), unless the address says otherwise.

Settings are made by statements after connecting and read back in another one. As parameters of the start-up packet
pgbouncer would refuse them, or, set to ignore them, drop them without a word; and a pooler that lends its server's
connections per transaction would apply them to another client's.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, cast
from urllib.parse import parse_qs, unquote, urlsplit
from weakref import WeakValueDictionary

import asyncpg

from bursar.model.errors import DatabaseUnavailable
from bursar.ports import Ports, notice_silence
from bursar.store.address import HOW_TO
from bursar.store.postgres.errors import POOLER, not_connected
from bursar.store.protocol import Options

HOST_S = 5.0  # to connect to one host, be let in, and make the settings
STANDBY_S = 3.0  # of that, for a standby to have what a server shows, where that is required
CANCEL_S = 1.0
NEXT_HOST_S = 0.3  # after which the next host is tried beside it
SILENCE_S = 15.0  # after which the kernels at both ends give up on a peer that acknowledges nothing
CLIENT_CHECK_S = 2.0  # between two looks of a busy server process whether its client is still there
SLOWER = 1.2  # a server that lives stops a statement by itself; a client waits a little longer, and then drops it

SETTINGS = {
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
# A client that has vanished must not keep its locks for long: its server process notices while it works (the check),
# while it waits for the next statement of a transaction (its limit), and while it answers (TCP).
_CLIENT_GONE = {
    "tcp_keepalives_idle": f"{math.ceil(SILENCE_S / 3)}s",
    "tcp_keepalives_interval": f"{math.ceil(SILENCE_S / 3)}s",
    "tcp_keepalives_count": "2",
    "tcp_user_timeout": f"{math.ceil(SILENCE_S)}s",
}
DURABLE = ("on", "remote_apply")  # of synchronous_commit: a commit is at a standby before its answer, if there is one
MADE = (  # beside those that are named, in the order of the statement that makes them
    "statement_timeout",
    "synchronous_commit",
    "idle_in_transaction_session_timeout",
    "client_connection_check_interval",
)
# Flushed by a standby, whatever the level of other commits; a server that takes no writes is asked for nothing.
BARRIER = """
    SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'bursar', 'connected')
    WHERE current_setting('transaction_read_only') = 'off'
"""
SESSION = "bursar.session"  # a setting of our own: which connection of ours this is

Connection = asyncpg.Connection


class Host(NamedTuple):
    """One of several in an address."""

    name: str
    port: int | None  # None: the usual one


def hosts_of(url: str) -> list[Host]:
    """The hosts of an address that has several, read as asyncpg does; none: it has one, or leaves it to others."""
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    if parts.netloc.count("@") > 1:  # what follows the first would be taken for a host, and be printed as one
        raise ValueError("an @ in a name or password has to be written %40")
    named = parts.netloc.partition("@")[2] if "@" in parts.netloc else parts.netloc
    texts = [unquote(text) for text in named.split(",")] if named else query.get("host", "").split(",")
    if len(texts) < 2:
        return []
    hosts = [_host(text) for text in texts]
    ports = [_port(port) for port in query["port"].split(",")] if "port" in query and not named else []
    if len(ports) == 1:
        ports *= len(hosts)
    if len(ports) not in (0, len(hosts)):
        raise ValueError(f"{len(hosts)} hosts, but {len(ports)} ports")
    return [Host(host.name, port) for host, port in zip(hosts, ports, strict=True)] if ports else hosts


def _host(text: str) -> Host:
    if not text:
        raise ValueError("one of its hosts has no name")
    if text.startswith("/"):
        return Host(text, None)
    name, colon, port = text.rpartition(":")
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        colon, port = rest[:1], rest[1:]
    if not colon:
        return Host(name if text.startswith("[") else text, None)
    if not name:
        raise ValueError("one of its hosts has no name")
    return Host(name, _port(port))


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("one of its ports is no number")  # not which: it may be a part of a password
    return int(text)


class Connector:
    """Makes connections to one address."""

    def __init__(self, ports: Ports, url: str, options: Options) -> None:
        self._ports = ports
        self._url = url
        self._options = options
        self.is_pooled = False  # whether the last connection was to a pooler: its process is not the server's
        self.host: Host | None = None  # of several, whom the last connection was made to
        self._closing: set[asyncio.Task[None]] = set()
        self._sessions: WeakValueDictionary[str, Connection] = WeakValueDictionary()

    async def connect(self, settings: Mapping[str, str], *, limited: bool = True, timed: bool = False) -> Connection:
        """A connection with these settings. Without `limited`, the server lets its statements take as long as they
        take. With `timed`, we stop waiting for each of them by ourselves, too; without, its user does."""
        try:
            hosts: Sequence[Host | None] = hosts_of(self._url) or [None]
        except ValueError:
            raise DatabaseUnavailable(f"its address can't be read; {HOW_TO}") from None
        ordered = sorted(hosts, key=lambda host: host != self.host)  # stable: the others as they are named
        errors: dict[str, BaseException] = {}

        async def attempt(host: Host | None) -> Connection:
            try:
                connection = await self._prepared(host, settings, limited, timed)
                if self._options.require_synchronous:
                    await self._until_replicated(connection)
                return connection
            except BaseException as error:  # also a cancellation: another host was faster
                errors["" if host is None else f"{host.name}:{host.port or ''}".rstrip(":")] = _explained(error)
                raise

        found = await _first(attempt, ordered)
        if found is None:
            raise not_connected(errors) from next(iter(errors.values()))
        connection, self.host = found
        return connection

    async def _prepared(self, host: Host | None, settings: Mapping[str, str], limited: bool, timed: bool) -> Connection:
        connection: Connection | None = None
        try:
            async with asyncio.timeout(HOST_S):
                connection = await self._open(host, timed)
                await self._prepare(connection, settings, limited)
                return connection
        except BaseException:  # also a cancellation, which goes on: nothing was written on it yet
            if connection is not None:
                connection.terminate()
            raise

    async def _open(self, host: Host | None, timed: bool) -> Connection:
        more: dict[str, Any] = {}
        if host is not None:
            more = {"host": host.name, "port": host.port}
            if "target_session_attrs" not in parse_qs(urlsplit(self._url).query):
                more["target_session_attrs"] = "read-write"
        return await asyncpg.connect(
            self._url,
            timeout=HOST_S,
            command_timeout=self._options.statement_s * SLOWER if timed else None,
            server_settings={"application_name": "bursar"},  # which every pooler knows
            **more,
        )

    async def _prepare(self, connection: Connection, settings: Mapping[str, str], limited: bool) -> None:
        """Make the settings, and see in another transaction that they hold."""
        notice_silence(cast("Any", connection)._transport.get_extra_info("socket"), SILENCE_S)  # no public way to it
        session = self._ports.token()
        wanted = {**settings, **_CLIENT_GONE, SESSION: session}
        limit_ms = math.ceil(self._options.statement_s * 1000) if limited else 0
        before = await connection.fetchrow(_make(wanted), limit_ms, *wanted.values())
        assert before is not None  # it has no FROM
        self.is_pooled = before["pid"] != connection.get_server_pid()
        self._check_before(before["session"], before["synchronous_commit"], before["standbys"])
        names = [*wanted, *MADE]
        held = await connection.fetchrow("SELECT " + ", ".join(f"current_setting('{name}', true)" for name in names))
        assert held is not None
        for name, made, now in zip(names, list(before)[4:], held, strict=True):
            if made != now or (name in settings and now != settings[name]):
                raise DatabaseUnavailable(
                    f"setting {name} does not hold: it was made {made!r} and is {now!r}. A pooler in between lends its "
                    f"connections per transaction: {POOLER}"
                )
        self._sessions[session] = connection

    async def _until_replicated(self, connection: Connection) -> None:
        """Wait until a standby has everything that can be read here. A server shows commits that no standby has: after
        a crash in their wait, after its promotion, and, deposed, until it notices. Answered to a client and then lost
        with that server, one of them would be a promise broken. The message in its log comes after all of them."""
        try:
            await connection.execute(BARRIER, timeout=STANDBY_S)
        except BaseException as error:
            # Here, and only here, the server is asked to cancel a wait (asyncpg does, and `close` sees to it). Nothing
            # is in this transaction, and a server process left behind by every attempt would use up all connections.
            task = asyncio.get_running_loop().create_task(_close(connection), name="bursar-close")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
            if not isinstance(error, TimeoutError):
                raise
            raise DatabaseUnavailable(
                f"require_synchronous is set, but no synchronous standby has answered within {STANDBY_S:g} s: what is "
                "committed there could be lost with its server. Bring a standby back, or take require_synchronous back"
            ) from None

    def _check_before(self, session: str | None, synchronous_commit: str, standbys: str) -> None:
        """What the connection was before we have touched it."""
        other = self._sessions.get(session or "")
        if other is not None and not other.is_closed():
            raise DatabaseUnavailable(
                f"two connections of ours share one of the server's: a pooler in between lends them per transaction, "
                f"and what one of them sets or prepares happens to the other: {POOLER}"
            )
        if not self._options.require_synchronous:
            return
        if synchronous_commit not in DURABLE:
            raise DatabaseUnavailable(
                f"require_synchronous is set, but synchronous_commit is {synchronous_commit} for this role or "
                "database: a commit would be lost with its server. Set it to on, or take require_synchronous back"
            )
        if not standbys:
            raise DatabaseUnavailable(
                "require_synchronous is set, but synchronous_standby_names is empty: a commit would be at one server "
                "alone. Name the standbys there (Patroni: synchronous_mode_strict), or take require_synchronous back"
            )


def _make(wanted: Mapping[str, str]) -> str:
    """The statement that makes settings, and says how they were and have become. Its first argument is the limit in
    milliseconds (0: none); a shorter one of the role or the database stays. COMMIT waits for the disk, at least: a
    receipt is for ever, whatever the database's default."""
    made = [f"set_config('{name}', ${place}, false)" for place, name in enumerate(wanted, 2)]
    return f"""
        SELECT current_setting('{SESSION}', true) AS session,
            current_setting('synchronous_commit') AS synchronous_commit,
            current_setting('synchronous_standby_names') AS standbys,
            pg_backend_pid() AS pid,
            {", ".join(made)},
            set_config('statement_timeout', (
                SELECT CASE WHEN $1::integer > 0 AND setting::integer BETWEEN 1 AND $1::integer
                            THEN setting ELSE $1::integer::text END || 'ms'
                FROM pg_settings WHERE name = 'statement_timeout'), false),
            set_config('synchronous_commit', CASE current_setting('synchronous_commit')
                WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, false),
            set_config('idle_in_transaction_session_timeout', $1::integer::text || 'ms', false),
            set_config('client_connection_check_interval', CASE
                WHEN version() ~ 'linux' OR current_setting('server_version_num')::integer >= 150000
                THEN '{CLIENT_CHECK_S * 1000:.0f}ms' ELSE '0' END, false)
    """


def _explained(error: BaseException) -> BaseException:
    """Why a host was not connected to, where asyncpg's own words do not say what to do."""
    match error:
        case TimeoutError():
            return TimeoutError(f"no answer within {HOST_S:g} s")
        case asyncpg.TargetServerAttributeNotMatched():
            return ConnectionError("it is not what target_session_attrs wants (read-write: one that takes writes)")
        case ValueError():
            return DatabaseUnavailable(f"its address can't be read; {HOW_TO}")
    return error


async def _close(connection: Connection) -> None:
    with contextlib.suppress(Exception):  # it is given up either way
        await connection.close(timeout=CANCEL_S)


async def _first(
    attempt: Callable[[Host | None], Coroutine[Any, Any, Connection]], hosts: Sequence[Host | None]
) -> tuple[Connection, Host | None] | None:
    """The first connection that can be made. Each host is tried when those before it have failed, or after a moment;
    and again, every moment, while a silent one is waited for: any of them may be the next leader."""
    left = list(hosts)
    first: set[asyncio.Task[Connection]] = set()  # each host's first try: the others last no longer than the slowest
    tasks: dict[asyncio.Task[Connection], Host | None] = {}
    winner: asyncio.Task[Connection] | None = None
    try:
        while left or any(not task.done() for task in tasks):
            if left:
                host = left.pop(0)
                task = asyncio.get_running_loop().create_task(attempt(host), name="bursar-connect")
                tasks[task] = host
                if len(first) < len(hosts):
                    first.add(task)
            running = [task for task in tasks if not task.done()]
            done, _ = await asyncio.wait(running, timeout=NEXT_HOST_S, return_when=asyncio.FIRST_COMPLETED)
            winner = next((task for task in done if not task.cancelled() and task.exception() is None), None)
            if winner is not None:
                return winner.result(), tasks[winner]
            if not left and not done and any(not task.done() for task in first):
                busy = [tasks[task] for task in running]
                left = [host for host in hosts if host not in busy]
    finally:
        for task in tasks:
            if task is not winner:
                task.add_done_callback(_discard)
                task.cancel()
    return None


def _discard(task: asyncio.Task[Connection]) -> None:
    """Of two that were made at the same moment, one is not needed; why others were not made is known already."""
    if not task.cancelled() and task.exception() is None:
        task.result().terminate()
