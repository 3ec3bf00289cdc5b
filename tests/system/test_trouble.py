"""A database that is newer, older, read-only, locked, gone, full, not ours or corrupt says so in one line, as a typed
error, and loses nothing: once the trouble is over the same request goes through, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from bursar import Bursar, BursarError, Receipt, deposit
from bursar import open as open_bursar
from bursar.devdb import ThrowawayPostgres, throwaway_postgres
from bursar.model.errors import (
    DatabaseCorrupt,
    DatabaseNewer,
    DatabaseOlder,
    DatabaseUnavailable,
    OutcomeUnknown,
    Refusal,
)
from bursar.ports import SystemPorts
from bursar.store.postgres import schema
from bursar.store.sqlite import calls
from bursar.store.sqlite import store as sqlite_store
from tests.builders import check_sound
from tests.system.crew import ASSET, BANK, crew, furnish, outcome, until

NOBODY = 65534


async def opens(url: str, **more: Any) -> BursarError | None:
    """The error that opening raises, in one line; None if it opens and its books are sound."""
    try:
        async with open_bursar(url, **more) as bursar:
            await check_sound(bursar.ledger)
    except BursarError as error:
        assert "\n" not in str(error)
        assert str(error)
        return error
    return None


async def put_in(url: str, key: str, amount: str = "1") -> Receipt | BursarError:
    """A deposit, or the error it meets, in one line."""
    try:
        async with open_bursar(url) as bursar:
            return await bursar.ledger.commit(deposit(BANK, "a", ASSET, amount, key=key))
    except BursarError as error:
        assert "\n" not in str(error)
        return error


async def balance(url: str) -> str:
    async with open_bursar(url) as bursar:
        await check_sound(bursar.ledger)
        return str((await bursar.ledger.balance("a", ASSET)).decimal)


# --- SQLite ----------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A SQLite file with one deposit of 1."""
    path = tmp_path / "funds.db"
    asyncio.run(furnish(at(path), "a"))
    assert isinstance(asyncio.run(put_in(at(path), "first")), Receipt)
    return path


def at(path: Path) -> str:
    return f"sqlite:///{path}"


def execute(path: Path, sql: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(sql)


def test_sqlite_newer(file: Path) -> None:
    execute(file, f"PRAGMA user_version = {sqlite_store.VERSION + 1}")
    error = asyncio.run(opens(at(file)))
    assert isinstance(error, DatabaseNewer)
    assert (error.have, error.need) == (sqlite_store.VERSION + 1, sqlite_store.VERSION)
    assert isinstance(asyncio.run(opens(at(file), migrate=True)), DatabaseNewer), "migrate never goes back"
    execute(file, f"PRAGMA user_version = {sqlite_store.VERSION}")
    assert asyncio.run(balance(at(file))) == "1.00"


def test_sqlite_older(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older file is refused until `migrate` is asked for; then it is brought forward with all that is in it."""
    more = [*sqlite_store.MIGRATIONS, (sqlite_store.VERSION + 1, "more", "CREATE TABLE more (id INTEGER);")]
    monkeypatch.setattr(sqlite_store, "MIGRATIONS", more)
    monkeypatch.setattr(sqlite_store, "VERSION", sqlite_store.VERSION + 1)
    assert isinstance(asyncio.run(opens(at(file))), DatabaseOlder)
    assert asyncio.run(opens(at(file), migrate=True)) is None
    assert asyncio.run(balance(at(file))) == "1.00"


def test_sqlite_migration_that_fails_leaves_the_old_schema_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = sqlite_store.VERSION
    more = [*sqlite_store.MIGRATIONS, (version + 1, "bad", "CREATE TABLE more (id INTEGER);\nSELECT no_such_thing;")]
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_store, "MIGRATIONS", more)
        patch.setattr(sqlite_store, "VERSION", version + 1)
        assert isinstance(asyncio.run(opens(at(file), migrate=True)), DatabaseUnavailable)
    assert asyncio.run(balance(at(file))) == "1.00"


async def migrate_and_die(_say: Any, url: str) -> None:
    """A migration in the middle of which the process is killed."""
    number, name, text = sqlite_store.MIGRATIONS[0]
    sqlite_store.MIGRATIONS[0] = (number, name, text + "\nSELECT die();")
    register = calls.register

    def with_death(connection: sqlite3.Connection, now_us: Any) -> None:
        register(connection, now_us)
        connection.create_function("die", 0, lambda: os.kill(os.getpid(), signal.SIGKILL))

    calls.register = with_death
    async with open_bursar(url):
        pass


def test_sqlite_killed_during_migration(tmp_path: Path) -> None:
    """Restart during migration: the next one finds a file that is still new."""
    path = tmp_path / "funds.db"
    with crew((migrate_and_die, at(path))) as (victim,):
        victim.process.join(30)
        assert victim.process.exitcode == -signal.SIGKILL
    assert path.exists()
    asyncio.run(furnish(at(path), "a"))
    assert isinstance(asyncio.run(put_in(at(path), "first")), Receipt)


async def open_once(_say: Any, url: str) -> str:
    error = await opens(url)
    return str(error or "")


def test_sqlite_is_new_for_several_processes_at_once(tmp_path: Path) -> None:
    """Two `migrate` at once: whoever comes second finds it done."""
    for attempt in range(5):
        path = tmp_path / f"funds-{attempt}.db"
        with crew(*[(open_once, at(path))] * 6) as openers:
            assert [opener.result() for opener in openers] == [""] * 6
        assert asyncio.run(opens(at(path))) is None


async def as_nobody(_say: Any, url: str) -> Any:
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    result = await put_in(url, "refused")
    return type(result).__name__, str(result)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("what", ["file", "folder"])
def test_sqlite_read_only(file: Path, what: str) -> None:
    """A file or folder that we may not write: said in one line, nothing lost."""
    for folder in (file.parent, *file.parent.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/pytest"):
            folder.chmod(0o755)
    if what == "folder":  # the file itself is theirs, but no journal can be made beside it
        os.chown(file, NOBODY, NOBODY)
    file.parent.chmod(0o755)
    file.chmod(0o644)
    with crew((as_nobody, at(file))) as (reader,):
        kind, text = reader.result()
    assert kind == "DatabaseUnavailable", text
    assert "mode" in text
    assert asyncio.run(balance(at(file))) == "1.00"


async def hold_lock(say: Any, path: str) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("BEGIN EXCLUSIVE")
    say("locked")
    await asyncio.sleep(60)


def test_sqlite_locked_by_another_process(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process holds the file: readers go on, a writer is told after the busy timeout, and then it works."""
    monkeypatch.setattr(calls, "BUSY_MS", 1000)

    async def body() -> None:
        async with open_bursar(at(file)) as bursar:
            with crew((hold_lock, str(file))) as (holder,):
                assert holder.get() == ("said", "locked")
                assert str((await bursar.ledger.balance("a", ASSET)).decimal) == "1.00"
                entry = deposit(BANK, "a", ASSET, "1", key="second")
                with pytest.raises(DatabaseUnavailable, match="locked by another process") as raised:
                    await bursar.ledger.commit(entry)
                assert "\n" not in str(raised.value)
            assert not (await bursar.ledger.commit(entry)).replayed

    asyncio.run(body())
    assert asyncio.run(balance(at(file))) == "2.00"


class SmallDisk(SystemPorts):
    """A machine on whose disk the file can't grow: SQLite itself says that it is full."""

    pages = 0

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        connection = super().sqlite(path, read_only=read_only)
        if not read_only and self.pages:
            connection.execute(f"PRAGMA max_page_count = {self.pages}")
        return connection


def test_sqlite_disk_full(file: Path) -> None:
    """Disk full: refused in one line, what was there stays, and with more room the same keys go through."""

    async def body() -> None:
        ports = SmallDisk()
        ports.pages = 1  # SQLite raises it to what the file has
        entries = [deposit(BANK, "a", ASSET, "1", key=f"d{i}", metadata={"note": "x" * 2000}) for i in range(40)]
        async with Bursar(at(file), ports=ports) as bursar:
            results = [await outcome(bursar.ledger.commit(entry)) for entry in entries]
            assert "DATABASE_UNAVAILABLE" in results
            with pytest.raises(DatabaseUnavailable, match="disk is full"):
                await bursar.ledger.commit(entries[-1])
            await check_sound(bursar.ledger)
        async with open_bursar(at(file)) as bursar:
            for entry, result in zip(entries, results, strict=True):
                assert (await bursar.ledger.commit(entry)).replayed is isinstance(result, Receipt)

    asyncio.run(body())
    assert asyncio.run(balance(at(file))) == "41.00"


def test_sqlite_gone(tmp_path: Path) -> None:
    assert isinstance(asyncio.run(opens(at(tmp_path / "nowhere" / "funds.db"))), DatabaseUnavailable)
    assert isinstance(asyncio.run(opens(at(tmp_path))), DatabaseUnavailable), "a folder is no file"


def test_sqlite_not_ours(tmp_path: Path) -> None:
    """A file of something else is left alone."""
    other = tmp_path / "other.db"
    execute(other, "CREATE TABLE theirs (id INTEGER)")
    assert isinstance(asyncio.run(opens(at(other))), DatabaseUnavailable)
    with contextlib.closing(sqlite3.connect(other)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("theirs",)]
    text = tmp_path / "text.db"
    text.write_text("this is no database at all\n" * 100, encoding="utf-8")
    assert isinstance(asyncio.run(opens(at(text))), DatabaseCorrupt)
    assert text.read_text(encoding="utf-8").startswith("this is no database")


def test_sqlite_corrupt(file: Path) -> None:
    """Pages of the file are overwritten: said, and never answered with wrong numbers."""
    execute(file, "PRAGMA wal_checkpoint(TRUNCATE)")
    data = bytearray(file.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    file.write_bytes(data)

    async def body() -> BursarError | None:
        try:
            async with open_bursar(at(file)) as bursar:
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
        except BursarError as error:
            assert "\n" not in str(error)
            return error
        return None

    assert isinstance(asyncio.run(body()), DatabaseCorrupt)


def test_sqlite_caller_gives_up_while_its_unit_begins(file: Path) -> None:
    """A caller cancelled at any moment leaves no transaction open behind it: the next one works."""

    async def body() -> None:
        async with open_bursar(at(file)) as bursar:
            blocker = sqlite3.connect(file, isolation_level=None)
            blocker.execute("BEGIN IMMEDIATE")
            task = asyncio.create_task(bursar.ledger.freeze("a"))
            for _ in range(20):  # its BEGIN is on the lane's thread, waiting for the lock
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait([task])
            blocker.execute("ROLLBACK")
            blocker.close()
            receipt = await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            assert not receipt.replayed

    asyncio.run(body())
    assert asyncio.run(balance(at(file))) == "2.00"


def test_sqlite_reader_gives_up_while_its_snapshot_begins(file: Path) -> None:
    """A snapshot cancelled at its beginning does not freeze what this process sees."""

    async def body() -> None:
        async with open_bursar(at(file)) as bursar:

            async def look() -> None:
                async with bursar.store.snapshot() as tables:
                    await tables.checks.counts()

            for turns in range(20):  # cancelled after no, one, two… turns of the loop
                task = asyncio.create_task(look())
                for _ in range(turns % 5):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            assert str((await bursar.ledger.balance("a", ASSET)).decimal) == "2.00"
            await look()

    asyncio.run(body())


# --- PostgreSQL -------------------------------------------------------------------------------------------------


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


def test_postgres_killed_during_migration(
    server: ThrowawayPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
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
                while not await watcher.fetchval(asleep):
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
    name = pg.split("/")[3].split("?")[0]
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
    """A dump restored elsewhere carries transaction numbers from the future: an event could be skipped, so it is said."""
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
            with pytest.raises(DatabaseUnavailable, match="locked"):
                await bursar.ledger.commit(entry)
            await transaction.rollback()
            await holder.close()
            assert not (await bursar.ledger.commit(entry)).replayed

    asyncio.run(body())


@contextlib.asynccontextmanager
async def open_bursar_without_epoch(url: str) -> AsyncIterator[Bursar]:
    """Opening looks at the events, which are locked: look away."""
    checked = schema._check_epoch

    async def looked(_connection: Any) -> None:
        return None

    schema._check_epoch = looked
    try:
        async with open_bursar(url) as bursar:
            yield bursar
    finally:
        schema._check_epoch = checked


@pytest.mark.parametrize("engine", ["sqlite", "postgres"])
def test_one_callers_nonsense_does_not_stop_the_others(
    engine: str, request: pytest.FixtureRequest
) -> None:
    """An expiry beyond the end of time is refused at once, and those in the same group go through."""
    url = at(request.getfixturevalue("file")) if engine == "sqlite" else str(request.getfixturevalue("pg"))

    async def body() -> None:
        async with open_bursar(url) as bursar:
            ledger = bursar.ledger
            began = time.monotonic()
            results = await asyncio.gather(
                ledger.authorize("a", ASSET, "1", expires_in=timedelta.max),
                ledger.commit(deposit(BANK, "a", ASSET, "1", key="second")),
                return_exceptions=True,
            )
            assert isinstance(results[1], Receipt), repr(results[1])
            assert isinstance(results[0], Refusal), repr(results[0])
            assert time.monotonic() - began < 5

    asyncio.run(body())


def test_postgres_that_stops_answering(pg: str, server: ThrowawayPostgres) -> None:
    """A server that hangs without closing the connection (a dead network): the caller is told before long."""

    async def body() -> None:
        async with open_bursar(pg) as bursar:
            bursar.ledger.writer.patience_s = 1.0
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            pids = [row["pid"] for row in await sql(pg, "SELECT pid FROM pg_stat_activity WHERE application_name = 'bursar'")]
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            try:
                async with asyncio.timeout(5):
                    with pytest.raises(OutcomeUnknown):
                        await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="third"))
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)

    asyncio.run(body())
