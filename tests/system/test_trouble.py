"""A PostgreSQL that is newer, older, read-only, locked, gone, full, not ours or hanging says so in one line, as a typed
error, and loses nothing: once the trouble is over the same request goes through, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import asyncpg
import pytest
from tests.system.crew import ASSET, BANK, crew, furnish, until
from tests.system.trouble import absurd_expiry, balance, open_once, opens, put_in

from bursar import Bursar, BursarError, Receipt, deposit
from bursar import open as open_bursar
from bursar.model.errors import Conflict, DatabaseNewer, DatabaseOlder, DatabaseUnavailable, OutcomeUnknown
from bursar.store.batch import Lane
from bursar.store.postgres import schema
from bursar.store.postgres.store import PostgresStore
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres
from bursar.testbed.program import COMMAND


@pytest.fixture(scope="module")
def server() -> Iterator[ThrowawayPostgres]:
    """A server of our own: it is stopped, killed, and told to ask for passwords."""
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


@pytest.fixture
def pg(server: ThrowawayPostgres) -> Iterator[str]:
    """A database with one deposit of 1."""
    server.start()
    name = f"trouble_{time.monotonic_ns()}"
    asyncio.run(sql(server.url, f"CREATE DATABASE {name}"))
    url = server.url_of(name)
    asyncio.run(furnish(url, "a"))
    assert isinstance(asyncio.run(put_in(url, "first")), Receipt)
    yield url
    server.start()
    asyncio.run(sql(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


async def sql(url: str, *statements: str) -> Any:
    connection = await asyncpg.connect(url)
    try:
        result = None
        for statement in statements:
            result = await connection.fetch(statement)
        return result
    finally:
        await connection.close()


def test_postgres_newer_but_compatible(pg: str) -> None:
    """Version N runs on schema N+1 if that migration says so."""
    newer = f"INSERT INTO bursar.migrations VALUES ({schema.VERSION + 1}, 'next', {schema.VERSION})"
    asyncio.run(sql(pg, newer))
    assert asyncio.run(opens(pg)) is None
    assert isinstance(asyncio.run(put_in(pg, "second")), Receipt)


def test_postgres_newer(pg: str) -> None:
    newer = f"INSERT INTO bursar.migrations VALUES ({schema.VERSION + 1}, 'next', {schema.VERSION + 1})"
    asyncio.run(sql(pg, newer))
    assert isinstance(asyncio.run(opens(pg)), DatabaseNewer)
    assert isinstance(asyncio.run(opens(pg, migrate=True)), DatabaseNewer)


def test_postgres_newer_by_several_steps_of_which_one_breaks(pg: str) -> None:
    """The newest migration may allow us while one below it does not: then we may not run."""
    steps = f"({schema.VERSION + 1}, 'breaks', {schema.VERSION + 1}), ({schema.VERSION + 2}, 'next', {schema.VERSION})"
    asyncio.run(sql(pg, f"INSERT INTO bursar.migrations VALUES {steps}"))
    assert isinstance(asyncio.run(opens(pg)), DatabaseNewer)


def test_postgres_older(pg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = [*schema.MIGRATIONS, (schema.VERSION + 1, "more", "CREATE TABLE bursar.more (id integer);")]
    monkeypatch.setattr(schema, "MIGRATIONS", more)
    monkeypatch.setattr(schema, "VERSION", schema.VERSION + 1)
    assert isinstance(asyncio.run(opens(pg)), DatabaseOlder)
    assert asyncio.run(opens(pg, migrate=True)) is None
    assert asyncio.run(balance(pg)) == "1.00"


def test_postgres_older_gets_from_a_dba_what_it_lacks(server: ThrowawayPostgres) -> None:
    """Given a database that is behind, when a DBA runs what `migrate --sql` prints for it, then it is up to date."""
    name = f"behind_{time.monotonic_ns()}"
    url = server.url_of(name)
    server.start()
    asyncio.run(sql(server.url, f"CREATE DATABASE {name}"))

    async def behind() -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(schema.FRAME)
        for number, what, text in schema.MIGRATIONS[:-2]:
            await connection.execute(text + "\n" + schema._note(number, what, text))
        await connection.close()

    async def run(script: str) -> None:
        connection = await asyncpg.connect(url)
        await connection.execute(script)
        await connection.close()

    def printed() -> str:
        words = [*COMMAND, "--database", url, "migrate", "--sql"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout

    asyncio.run(behind())
    assert isinstance(asyncio.run(opens(url)), DatabaseOlder)
    asyncio.run(run(printed()))
    assert asyncio.run(opens(url)) is None
    assert "ALTER" not in printed()
    asyncio.run(sql(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


def test_postgres_two_migrations_at_once(server: ThrowawayPostgres) -> None:
    """Two `migrate` at once: the second waits and finds it done."""
    server.start()
    asyncio.run(sql(server.url, "CREATE DATABASE twice"))
    url = server.url_of("twice")
    try:
        with crew(*[(open_once, url)] * 5) as openers:
            assert [opener.result() for opener in openers] == [""] * 5
        assert len(asyncio.run(sql(url, "SELECT * FROM bursar.migrations"))) == len(schema.MIGRATIONS)
    finally:
        asyncio.run(sql(server.url, "DROP DATABASE twice WITH (FORCE)"))


def test_postgres_killed_during_migration(server: ThrowawayPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart during migration: all of it or nothing."""
    server.start()
    asyncio.run(sql(server.url, "CREATE DATABASE half"))
    url = server.url_of("half")

    async def slow() -> None:
        number, name, text = schema.MIGRATIONS[0]
        with monkeypatch.context() as patch:
            patch.setattr(schema, "MIGRATIONS", [(number, name, text + "\nSELECT pg_sleep(60);")])
            task = asyncio.create_task(opens(url))
            watcher = await asyncpg.connect(server.url)
            asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            async with asyncio.timeout(30):
                while not await watcher.fetchval(asleep):  # noqa: ASYNC110 (the condition is the server's)
                    await asyncio.sleep(0.005)
            watcher.terminate()
            server.kill()
            assert isinstance(await task, DatabaseUnavailable)

    asyncio.run(slow())
    server.start()
    try:
        assert asyncio.run(sql(url, "SELECT to_regclass('bursar.rules') AS t"))[0]["t"] is None
        asyncio.run(furnish(url, "a"))
        assert isinstance(asyncio.run(put_in(url, "first")), Receipt)
    finally:
        asyncio.run(sql(server.url, "DROP DATABASE half WITH (FORCE)"))


def test_postgres_read_only(pg: str) -> None:
    """As on a replica: reads work, writes are refused in one line, and nothing is lost."""
    (row,) = asyncio.run(sql(pg, "SELECT current_database() AS name"))
    name = row["name"]
    asyncio.run(sql(pg, f"ALTER DATABASE {name} SET default_transaction_read_only = on"))
    assert asyncio.run(balance(pg)) == "1.00"
    error = asyncio.run(put_in(pg, "second"))
    assert isinstance(error, DatabaseUnavailable)
    assert "read-only" in error.why
    asyncio.run(sql(pg, "SET default_transaction_read_only = off", f"ALTER DATABASE {name} RESET ALL"))
    assert isinstance(asyncio.run(put_in(pg, "second")), Receipt)
    assert asyncio.run(balance(pg)) == "2.00"


def test_postgres_role_without_rights(pg: str, server: ThrowawayPostgres) -> None:
    asyncio.run(sql(pg, "DROP ROLE IF EXISTS guest", "CREATE ROLE guest LOGIN"))
    error = asyncio.run(opens(pg.replace("bursar@", "guest@")))
    assert isinstance(error, DatabaseUnavailable)
    assert "access was refused" in error.why


def test_postgres_role_that_may_only_read(pg: str) -> None:
    statements = ["DROP ROLE IF EXISTS reader", "CREATE ROLE reader LOGIN", "GRANT USAGE ON SCHEMA bursar TO reader"]
    asyncio.run(sql(pg, *statements, "GRANT SELECT ON ALL TABLES IN SCHEMA bursar TO reader"))
    error = asyncio.run(put_in(pg.replace("bursar@", "reader@"), "second"))
    assert isinstance(error, DatabaseUnavailable)
    assert "access was refused" in error.why
    asyncio.run(sql(pg, "DROP OWNED BY reader", "DROP ROLE reader"))
    assert asyncio.run(balance(pg)) == "1.00"


def test_postgres_wrong_password(pg: str, server: ThrowawayPostgres) -> None:
    hba = server.data_dir / "pg_hba.conf"
    before = hba.read_text(encoding="utf-8")
    hba.write_text("local all locked scram-sha-256\n" + before, encoding="utf-8")
    try:
        asyncio.run(sql(pg, "DROP ROLE IF EXISTS locked", "CREATE ROLE locked LOGIN PASSWORD 'right'"))
        asyncio.run(sql(pg, "SELECT pg_reload_conf()"))
        found: list[BursarError | None] = []

        def refused() -> bool:
            found.append(asyncio.run(opens(pg.replace("bursar@", "locked:wrong@"))))
            return "password" in str(found[-1])

        until(refused, 10)
        assert isinstance(found[-1], DatabaseUnavailable)
        assert "wrong" not in str(found[-1]), "a password is never repeated"
    finally:
        hba.write_text(before, encoding="utf-8")
        asyncio.run(sql(pg, "SELECT pg_reload_conf()"))


def test_postgres_down_at_open(pg: str, server: ThrowawayPostgres) -> None:
    server.stop()
    began = time.monotonic()
    assert isinstance(asyncio.run(opens(pg)), DatabaseUnavailable)
    assert time.monotonic() - began < 15
    server.start()
    assert asyncio.run(balance(pg)) == "1.00"


def test_postgres_database_missing(server: ThrowawayPostgres) -> None:
    server.start()
    error = asyncio.run(opens(server.url_of("nowhere")))
    assert isinstance(error, DatabaseUnavailable)
    assert "create it first" in error.why


def test_postgres_schema_not_ours(server: ThrowawayPostgres) -> None:
    """Somebody else's schema of our name is left as it was."""
    server.start()
    asyncio.run(sql(server.url, "CREATE DATABASE theirs"))
    url = server.url_of("theirs")
    try:
        asyncio.run(sql(url, "CREATE SCHEMA bursar", "CREATE TABLE bursar.accounts (theirs integer)"))
        assert isinstance(asyncio.run(opens(url)), DatabaseUnavailable)
        tables = asyncio.run(sql(url, "SELECT tablename FROM pg_tables WHERE schemaname = 'bursar'"))
        assert [row["tablename"] for row in tables] == ["accounts"]
        asyncio.run(sql(url, "CREATE TABLE bursar.migrations (other text)"))
        assert isinstance(asyncio.run(opens(url)), DatabaseUnavailable)
    finally:
        asyncio.run(sql(server.url, "DROP DATABASE theirs WITH (FORCE)"))


def test_postgres_restored_from_a_dump(pg: str) -> None:
    """A dump restored elsewhere carries transaction numbers from the future; events could be skipped, so it is said."""
    asyncio.run(
        sql(
            pg,
            "INSERT INTO bursar.events (epoch, xid, seq, kind, subject, version) "
            "VALUES (1, '4000000000', nextval('bursar.numbers'), 1, 999999, 0)",
        )
    )
    error = asyncio.run(opens(pg))
    assert isinstance(error, DatabaseUnavailable)
    assert "restored" in error.why


def test_postgres_disk_full(pg: str) -> None:
    """The server says that its disk is full: told in one line, nothing written; later the same key goes through."""
    trigger = (
        "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS "
        "$$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full'; END $$"
    )
    create = "CREATE TRIGGER full_disk BEFORE INSERT ON bursar.events FOR EACH STATEMENT EXECUTE FUNCTION full_disk()"
    asyncio.run(sql(pg, trigger, create))
    error = asyncio.run(put_in(pg, "second"))
    assert isinstance(error, DatabaseUnavailable)
    assert "disk is full" in error.why
    assert asyncio.run(balance(pg)) == "1.00"
    asyncio.run(sql(pg, "DROP TRIGGER full_disk ON bursar.events"))
    assert isinstance(asyncio.run(put_in(pg, "second")), Receipt)


def test_postgres_locked_by_another(pg: str) -> None:
    """A table is locked and the server is told not to wait: one line, nothing lost."""

    async def body() -> None:
        holder = await asyncpg.connect(pg)
        transaction = holder.transaction()
        await transaction.start()
        await holder.execute("LOCK TABLE bursar.events IN ACCESS EXCLUSIVE MODE")
        name = await holder.fetchval("SELECT current_database()")
        other = await asyncpg.connect(pg)
        await other.execute(f"ALTER DATABASE {name} SET lock_timeout = '100ms'")
        await other.close()
        async with open_bursar_without_epoch(pg) as bursar:
            entry = deposit(BANK, "a", ASSET, "1", key="second")
            with pytest.raises(Conflict, match="holds"):
                await bursar.ledger.commit(entry)
            await transaction.rollback()
            await holder.close()
            assert not (await bursar.ledger.commit(entry)).replayed

    asyncio.run(body())


@contextlib.asynccontextmanager
async def open_bursar_without_epoch(url: str) -> AsyncIterator[Bursar]:
    """Opening looks at the events, which are locked: look away."""
    checked = schema._check_epoch

    async def looked(connection: asyncpg.Connection) -> None:
        return None

    schema._check_epoch = looked
    try:
        async with open_bursar(url) as bursar:
            yield bursar
    finally:
        schema._check_epoch = checked


def test_one_callers_nonsense_does_not_stop_the_others(pg: str) -> None:
    """An expiry beyond the end of time is refused at once, and those in the same group go through."""
    asyncio.run(absurd_expiry(pg))


def test_postgres_that_stops_answering(pg: str, server: ThrowawayPostgres) -> None:
    """A backend that hangs without closing the connection (a dead network): another one is asked before long."""

    async def body() -> None:
        async with open_bursar(pg) as bursar:
            assert isinstance(bursar.store, PostgresStore)
            bursar.store.timeout_s = 0.5
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            pids = [
                row["pid"]
                for row in await sql(pg, "SELECT pid FROM pg_stat_activity WHERE application_name = 'bursar'")
            ]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(5):
                    receipt = await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="third"))
                assert not receipt.replayed
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)

    asyncio.run(body())


def test_postgres_that_does_not_wait_for_its_disk_is_told_to(pg: str) -> None:
    """A receipt is for ever, whatever the database's default."""

    async def body() -> None:
        name = pg.split("?", maxsplit=1)[0].rsplit("/", 1)[1]
        await sql(pg, f"ALTER DATABASE {name} SET synchronous_commit = off")
        await sql(pg, f"ALTER DATABASE {name} SET array_nulls = off")
        async with open_bursar(pg) as bursar:
            assert isinstance(bursar.store, PostgresStore)
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            await bursar.ledger.authorize("a", ASSET, "1")
            writer = bursar.store._lanes[Lane.WRITE]
            assert writer is not None
            assert await writer.fetchval("SHOW synchronous_commit") == "on"
            async with bursar.store.connection() as connection:
                assert await connection.fetchval("SHOW synchronous_commit") == "on"

    asyncio.run(body())


def test_postgres_restored_from_a_dump_and_migrated_at_once(pg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Migrating it does not make it forget that its events have numbers from the future."""
    asyncio.run(
        sql(
            pg,
            "INSERT INTO bursar.events (epoch, xid, seq, kind, subject, version) "
            "VALUES (1, '4000000000', nextval('bursar.numbers'), 1, 999999, 0)",
        )
    )
    newer = (schema.VERSION + 1, "later", "SELECT 1;")
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, newer])
    monkeypatch.setattr(schema, "VERSION", newer[0])
    error = asyncio.run(opens(pg, migrate=True))
    assert isinstance(error, DatabaseUnavailable)
    assert "restored" in str(error)


STALL = """
CREATE SEQUENCE stalls;
CREATE FUNCTION stall() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('stalls') = 1 THEN PERFORM pg_sleep(1.5); END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER stall AFTER INSERT ON bursar.envelopes FOR EACH STATEMENT EXECUTE FUNCTION stall();
"""


@pytest.mark.parametrize("patience_s", [10.0, 0.5], ids=["patient", "impatient"])
@pytest.mark.parametrize("callers", [1, 60])
def test_postgres_that_stalls_in_the_middle_of_a_write(pg: str, patience_s: float, callers: int) -> None:
    """Given a disk that stalls for longer than anybody waits, when the commit is asked for again, then what is in the
    way is the first try, still being written: that is no conflict, in which nothing was written. Whoever has no
    patience left is told that nobody knows; and the key tells later."""

    async def body() -> None:
        async with open_bursar(pg) as bursar:
            assert isinstance(bursar.store, PostgresStore)
            bursar.store.timeout_s, bursar.ledger.writer.runner.patience_s = 0.3, patience_s
            entries = [deposit(BANK, "a", ASSET, "1", key=f"k{n}") for n in range(callers)]
            connection = await asyncpg.connect(pg)
            await connection.execute(STALL)
            told = await bursar.ledger.commit_many(entries)
            if patience_s > 1:
                assert all(isinstance(one, Receipt) for one in told), told
            else:
                assert any(isinstance(one, OutcomeUnknown) for one in told), told
            assert all(isinstance(one, Receipt | OutcomeUnknown) for one in told), told
            await connection.fetch("DROP TRIGGER stall ON bursar.envelopes")  # waits until the stalled one is through
            await connection.close()
            assert all(isinstance(one, Receipt) for one in await bursar.ledger.commit_many(entries))

    asyncio.run(body())
    assert asyncio.run(balance(pg)) == f"{1 + callers}.00"
