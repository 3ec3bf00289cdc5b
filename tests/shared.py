"""A PostgreSQL database that tests use one after the other, put back into its first state before each.

Making a database with our schema costs twenty times as much as putting one back, and more than most tests do. A test
that alters the schema or the database's settings needs one of its own.
"""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from tests.builders import Place, furnish


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
        connection = await asyncpg.connect(self._url)
        await connection.execute(KEEP)
        return connection

    def as_good_as_new(self) -> str:
        """Its address, once it is."""
        self._runner.run(self._connection.execute("CALL keep.put_back()"))
        return self._url


async def make(url: str, *, furnished: bool) -> None:
    """Our schema; with `furnished` also the builders' assets and accounts."""
    async with Place("any", url).bursar() as bursar:
        if furnished:
            await furnish(bursar.ledger)


# Value tables refuse to be emptied; session_replication_role shuts their triggers up, which only a superuser may do.
KEEP = """
CREATE SCHEMA keep;
CREATE TABLE keep.numbers AS SELECT sequencename AS name, last_value AS value FROM pg_sequences
    WHERE schemaname = 'bursar';
DO $$ DECLARE t text; BEGIN
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'bursar' LOOP
        EXECUTE format('CREATE TABLE keep.%I AS TABLE bursar.%I', 'rows_of_' || t, t);
    END LOOP;
END $$;
CREATE PROCEDURE keep.put_back() LANGUAGE plpgsql AS $$ DECLARE t text; n text; v bigint; BEGIN
    PERFORM pg_terminate_backend(pid) FROM pg_stat_activity
        WHERE datname = current_database() AND pid <> pg_backend_pid();
    SET LOCAL session_replication_role = replica;
    FOR t IN SELECT tablename FROM pg_tables WHERE schemaname = 'bursar' LOOP
        IF pg_relation_size(format('bursar.%I', t)) > 1000000 THEN
            EXECUTE format('TRUNCATE bursar.%I', t);
        ELSE
            EXECUTE format('DELETE FROM bursar.%I', t);
        END IF;
        EXECUTE format('INSERT INTO bursar.%I OVERRIDING SYSTEM VALUE TABLE keep.%I', t, 'rows_of_' || t);
    END LOOP;
    FOR n, v IN SELECT name, value FROM keep.numbers LOOP
        PERFORM setval(format('bursar.%I', n), coalesce(v, 1), v IS NOT NULL);
    END LOOP;
END $$;
"""
