"""The three modes that every test here runs in, each on a database as good as new.

Making a database costs more than most tests do. For SQLite a test gets a copy of a file. On PostgreSQL all tests share
two databases, one bare and one furnished, which are put back into their first state before each; a test that alters
the schema asks for `own_place` instead.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from tests.builders import LedgerAt, Place, StoreAt, furnish

MODES = ("sqlite", "split", "postgres")


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A furnished database in each mode."""
    if mode == "postgres":
        return Place(mode, request.getfixturevalue("furnished_postgres").as_good_as_new())
    shutil.copyfile(request.getfixturevalue("furnished_file"), tmp_path / "funds.db")
    return Place(mode, f"sqlite:///{tmp_path}/funds.db")


@pytest.fixture
def bare_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A database with nothing but our schema, in each mode (for SQLite not even that: opening it makes it)."""
    if mode == "postgres":
        return Place(mode, request.getfixturevalue("bare_postgres").as_good_as_new())
    return Place(mode, f"sqlite:///{tmp_path}/funds.db")


@pytest.fixture
def own_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A furnished database that is nobody else's, so that even its schema may be altered."""
    url = request.getfixturevalue("fresh_postgres") if mode == "postgres" else f"sqlite:///{tmp_path}/own.db"
    asyncio.run(_make(url, furnished=True))
    return Place(mode, url)


@pytest.fixture
def ledger(place: Place) -> LedgerAt:
    """A furnished ledger; `scenario` opens it, and checks its books when the test is over."""
    return LedgerAt(place)


@pytest.fixture
def store(bare_place: Place) -> StoreAt:
    """A bare store; `scenario` opens it."""
    return StoreAt(bare_place)


@pytest.fixture(scope="session")
def furnished_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("furnished") / "funds.db"
    asyncio.run(_make(f"sqlite:///{path}", furnished=True))
    return path


@pytest.fixture(scope="session")
def furnished_postgres(postgres_url: str) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        yield Shared(postgres_url, "furnished", runner)


@pytest.fixture(scope="session")
def bare_postgres(postgres_url: str) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        yield Shared(postgres_url, "bare", runner)


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
        await _make(self._url, furnished=name == "furnished")
        connection = await asyncpg.connect(self._url)
        await connection.execute(KEEP)
        return connection

    def as_good_as_new(self) -> str:
        """Its address, once it is."""
        self._runner.run(self._connection.execute("CALL keep.put_back()"))
        return self._url


async def _make(url: str, *, furnished: bool) -> None:
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
