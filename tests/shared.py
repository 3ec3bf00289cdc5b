"""Places for tests: a folder in memory; and a PostgreSQL database that they use one after the other, put back into its
first state before each.

Making a database with our schema costs twenty times as much as putting one back, and more than most tests do. A test
that alters the schema or the database's settings needs one of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from tests.builders import Place, furnish
from tests.warm import WARM, keep_warm

from bursar.testbed.devdb import memory_root


def folder_in_memory(otherwise: Path) -> Iterator[Path]:
    """For tests that cut no power: on a disk a third of their time is the kernel's, making files and syncing them."""
    memory = memory_root()
    if memory is None:
        yield otherwise
        return
    with tempfile.TemporaryDirectory(prefix="bursar-test-", dir=memory, ignore_cleanup_errors=True) as name:
        yield Path(name)


class Shared:
    """A database with our schema, and a copy of its first rows beside it; one connection puts them back."""

    def __init__(self, server: str, name: str, runner: asyncio.Runner) -> None:
        self._runner = runner
        self._url = urlunsplit(urlsplit(server)._replace(path=f"/{name}"))
        self._connection = runner.run(self._create(server, name))

    async def _create(self, server: str, name: str) -> asyncpg.Connection:
        connection = await asyncpg.connect(server)
        await connection.execute(f"CREATE DATABASE {name}")
        await connection.close()
        await make(self._url, furnished=name == "furnished")
        # Value tables refuse to be emptied; this shuts their triggers up, which only a superuser may do.
        connection = await asyncpg.connect(self._url, server_settings={"session_replication_role": "replica"})
        await connection.execute(KEEP)
        keep_warm(self._url)
        return connection

    def as_good_as_new(self) -> str:
        """Its address, once it is."""
        self._runner.run(self._connection.execute("CALL keep.put_back($1)", WARM.pids()))
        return self._url


async def make(url: str, *, furnished: bool) -> None:
    """Our schema; with `furnished` also the builders' assets and accounts."""
    async with Place("any", url).bursar() as bursar:
        if furnished:
            await furnish(bursar.ledger)


# The procedure names every table, rather than looking for them each time: so its statements are planned once. What has
# rows from the start (a thousand in `nodes`) is left alone while it has just those.
KEEP = """
CREATE SCHEMA keep;
DO $$ DECLARE t text; n text; v bigint; body text; BEGIN
    body := 'BEGIN
        PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
            WHERE datname = current_database() AND pid <> pg_backend_pid() AND pid <> ALL (warm);';
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'bursar' LOOP
        EXECUTE format('CREATE TABLE keep.%1$I AS TABLE bursar.%1$I', t);
        EXECUTE format('SELECT count(*) FROM keep.%I', t) INTO v;
        body := body || format('
            IF pg_relation_size(''bursar.%1$I'') > 1000000 THEN
                TRUNCATE bursar.%1$I;
            ELSIF %2$s = 0 OR (SELECT count(*) FROM bursar.%1$I) <> %2$s OR EXISTS
                (SELECT x::text FROM bursar.%1$I x EXCEPT SELECT x::text FROM keep.%1$I x) THEN
                DELETE FROM bursar.%1$I;
            END IF;
            IF %2$s > 0 AND NOT EXISTS (TABLE bursar.%1$I) THEN
                INSERT INTO bursar.%1$I OVERRIDING SYSTEM VALUE TABLE keep.%1$I;
            END IF;', t, v);
    END LOOP;
    FOR n, v IN SELECT sequencename, last_value FROM pg_sequences WHERE schemaname = 'bursar' LOOP
        body := body || format('PERFORM setval(%L, %s, %L);', 'bursar.' || n, coalesce(v, 1), v IS NOT NULL);
    END LOOP;
    EXECUTE format('CREATE PROCEDURE keep.put_back(warm integer[]) LANGUAGE plpgsql AS %L', body || ' END');
END $$;
"""
