"""Migrations on PostgreSQL: numbered, under an advisory lock, each in one transaction with its own number.

Program version N runs on schema N+1 as long as that migration says so: `runs_from` is the oldest program version that
may still work on it. `script()` prints everything for a DBA.
"""

from __future__ import annotations

import re

import asyncpg

from bursar.model.errors import DatabaseNewer, DatabaseOlder, DatabaseUnavailable
from bursar.store.sql import migrations

MIGRATIONS = migrations("postgres")
VERSION = MIGRATIONS[-1][0]
LOCK = 0x6275_7273_6172  # "bursar"

FRAME = """\
CREATE SCHEMA IF NOT EXISTS bursar;
CREATE TABLE IF NOT EXISTS bursar.migrations (
    number    integer PRIMARY KEY,
    name      text NOT NULL,
    runs_from integer NOT NULL,            -- oldest program version that may run on this schema
    at        timestamptz NOT NULL DEFAULT now()
);
"""


def runs_from(number: int, text: str) -> int:
    """What a migration says in a line `-- runs_from: N`; itself, if it says nothing."""
    found = re.search(r"^-- runs_from: (\d+)$", text, re.MULTILINE)
    return int(found.group(1)) if found else number


def script(have: int = 0) -> str:
    """The statements that bring a database from a version to ours, for `psql -1`."""
    parts = [FRAME]
    for number, name, text in MIGRATIONS:
        if number > have:
            parts.append(f"{text}\n{_note(number, name, text)}")
    return "\n".join(parts)


def _note(number: int, name: str, text: str) -> str:
    return (
        "INSERT INTO bursar.migrations (number, name, runs_from) "
        f"VALUES ({number}, '{name}', {runs_from(number, text)});\n"
    )


async def check_version(connection: asyncpg.Connection, *, migrate: bool) -> list[int]:
    """Check the schema's version; bring it forward if asked to, or if there is none. Returns what was applied."""
    have, oldest = await _version(connection)
    if have == VERSION or (have > VERSION and oldest <= VERSION):
        await _check_epoch(connection)
        return []
    if have > VERSION:
        raise DatabaseNewer(have, VERSION)
    if have and not migrate:
        raise DatabaseOlder(have, VERSION)
    applied = await apply(connection)
    await _check_epoch(connection)
    return applied


async def apply(connection: asyncpg.Connection) -> list[int]:
    """Apply what is missing. Two processes at once: the second waits and finds nothing to do."""
    applied = []
    # The lock comes before the transaction: a process that waited for it must see what the other one has made.
    await connection.execute("SELECT pg_advisory_lock($1)", LOCK)
    try:
        async with connection.transaction():
            have, _ = await _version(connection)
            if have < VERSION:
                await connection.execute(FRAME)
            for number, name, text in MIGRATIONS:
                if number > have:
                    await connection.execute(text)
                    await connection.execute(_note(number, name, text))
                    applied.append(number)
    finally:
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", LOCK)
    return applied


async def version_of(connection: asyncpg.Connection) -> int:
    """The version that a database is at; 0 if it has nothing of ours."""
    return (await _version(connection))[0]


async def _version(connection: asyncpg.Connection) -> tuple[int, int]:
    if await connection.fetchval("SELECT to_regclass('bursar.migrations')") is None:
        return 0, 0
    # Of all that is newer than us: each must say that we may go on.
    row = await connection.fetchrow(
        "SELECT coalesce(max(number), 0), coalesce(max(runs_from) FILTER (WHERE number > $1), 0) "
        "FROM bursar.migrations",
        VERSION,
    )
    return (row[0], row[1]) if row else (0, 0)


async def _check_epoch(connection: asyncpg.Connection) -> None:
    """Events are ordered by transaction number; a dump restored elsewhere has numbers from the future."""
    newest = await connection.fetchval(
        "SELECT max(xid::text::bigint) FROM (SELECT xid FROM bursar.events WHERE epoch = "
        "(SELECT epoch FROM bursar.clock_epoch) ORDER BY epoch DESC, xid DESC, seq DESC LIMIT 1) AS e"
    )
    horizon = await connection.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
    if newest is not None and newest >= horizon:
        raise DatabaseUnavailable("it was restored from a dump into another cluster; run `bursar recover --restored`")
