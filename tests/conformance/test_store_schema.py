"""What the database itself promises: value tables that refuse change, and migrations that only go forward."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sqlite3
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import asyncpg
import pytest
from tests.builders import BANK, Place, check_sound, furnish, scenario

import bursar
from bursar import deposit, pay
from bursar.model.errors import DatabaseNewer, DatabaseOlder, DatabaseUnavailable
from bursar.store.postgres import arrays as postgres
from bursar.store.postgres import schema
from bursar.store.sqlite import store as sqlite

VALUE_TABLES = ("accounts", "envelopes", "postings", "spends", "involved", "events")


class Raw:
    """A connection of somebody who goes behind our back."""

    def __init__(self, connection: sqlite3.Connection | asyncpg.Connection) -> None:
        self.connection = connection

    async def execute(self, statement: str) -> None:
        if isinstance(self.connection, sqlite3.Connection):
            self.connection.execute(statement)
        else:
            await self.connection.execute(statement)

    async def count(self, table: str) -> int:
        query = f"SELECT count(*) FROM {table}"
        if isinstance(self.connection, sqlite3.Connection):
            return int(self.connection.execute(query).fetchone()[0])
        return int(await self.connection.fetchval(query))


@contextlib.asynccontextmanager
async def raw(place: Place) -> AsyncIterator[Raw]:
    if place.engine == "sqlite":
        with contextlib.closing(sqlite3.connect(place.path, isolation_level=None)) as connection:
            yield Raw(connection)
    else:
        server = await asyncpg.connect(place.url, server_settings={"search_path": "bursar"})
        try:
            yield Raw(server)
        finally:
            await server.close()


async def populate(place: Place) -> None:
    """Something in every value table."""
    async with place.bursar() as bursar:
        await bursar.ledger.commit(deposit(BANK, "alice", "USDT", "10"))
        await bursar.ledger.commit(pay("alice", "bob", "USDT", "4"))


@pytest.mark.parametrize(
    ("table", "column"),
    [
        ("accounts", "book"),
        ("envelopes", "key"),
        ("postings", "account"),
        ("spends", "envelope"),
        ("involved", "envelope"),
        ("events", "version"),
    ],
)
@scenario
async def test_value_tables_refuse_update_by_the_database_itself(place: Place, table: str, column: str) -> None:
    await populate(place)
    async with raw(place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match="insert-only"):
            await intruder.execute(f"UPDATE {table} SET {column} = {column}")


@pytest.mark.parametrize("table", VALUE_TABLES)
@scenario
async def test_value_tables_refuse_delete_by_the_database_itself(place: Place, table: str) -> None:
    await populate(place)
    async with raw(place) as intruder:
        before = await intruder.count(table)
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match="insert-only"):
            await intruder.execute(f"DELETE FROM {table}")
        assert await intruder.count(table) == before > 0


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ("accounts", "path, version"),
        ("envelopes", "seq"),
        ("postings", "id"),
        ("spends", "posting"),
        ("involved", "account, envelope"),
        ("events", "subject, kind, version"),
    ],
)
@scenario
async def test_value_tables_refuse_an_upsert(place: Place, table: str, key: str) -> None:
    await populate(place)
    column = key.split(",", maxsplit=1)[0]
    async with raw(place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match="insert-only"):
            await intruder.execute(
                f"INSERT INTO {table} SELECT * FROM {table} WHERE true "
                f"ON CONFLICT ({key}) DO UPDATE SET {column} = excluded.{column}"
            )


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE assets SET precision = 3",
        "UPDATE assets SET code = 'X' || code",
        "DELETE FROM assets",
        "UPDATE books SET accounts = '[]'",
        "DELETE FROM books",
        "UPDATE holds SET account = account + 1",
        "UPDATE holds SET amount = remaining, owner = 'me'",
        "DELETE FROM holds",
    ],
)
@scenario
async def test_what_an_asset_is_and_whose_a_hold_is_can_not_be_changed(place: Place, change: str) -> None:
    """Three decimals instead of two make ten times less of everybody's money."""
    async with place.bursar() as bursar:
        await bursar.ledger.commit(deposit(BANK, "alice", "USDT", "5"))
        await bursar.ledger.authorize("alice", "USDT", "1")
    async with raw(place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match=r"insert-only|changed|deleted"):
            await intruder.execute(change)


@pytest.mark.parametrize("change", ["DELETE FROM operator_actions", "UPDATE operator_actions SET actor = 'nobody'"])
@scenario
async def test_what_operators_did_can_not_be_changed(place: Place, change: str) -> None:
    async with place.bursar() as bursar:
        await bursar.store.single().actions.note("paused", "rail", "spot", actor="ann", reason="ticket 17")
    async with raw(place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match="insert-only"):
            await intruder.execute(change)


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@pytest.mark.parametrize("table", VALUE_TABLES)
@scenario
async def test_value_tables_refuse_truncate(place: Place, table: str) -> None:
    await populate(place)
    async with raw(place) as intruder:
        with pytest.raises(asyncpg.PostgresError, match="insert-only"):
            await intruder.execute(f"TRUNCATE {table} CASCADE")


@scenario
async def test_a_posting_can_be_spent_once_whoever_writes_the_row(place: Place) -> None:
    await populate(place)
    async with raw(place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.UniqueViolationError)):
            await intruder.execute("INSERT INTO spends (posting, envelope) SELECT posting, envelope + 1 FROM spends")


# --- migrations ------------------------------------------------------------------------------------------------------


@scenario
async def test_migrating_twice_is_once(bare_place: Place) -> None:
    for _ in range(2):
        store = bare_place.store()
        await store.open(migrate=True)
        assert list(await store.read.rules.books()) == ["main"]
        await store.close()


@pytest.fixture
def empty_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A database with nothing in it at all."""
    return Place(
        mode, request.getfixturevalue("fresh_postgres") if mode == "postgres" else f"sqlite:///{tmp_path}/empty.db"
    )


@scenario
async def test_a_new_database_is_set_up_without_being_asked(empty_place: Place) -> None:
    async with empty_place.bursar() as bursar:
        await furnish(bursar.ledger)
        assert "USDT" in await bursar.ledger.assets()


@pytest.fixture
def one_more_migration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The program of tomorrow: it has a migration that the database does not have yet."""
    number = sqlite.VERSION + 1
    later = (number, "notes", "CREATE TABLE notes (envelope INTEGER PRIMARY KEY, note TEXT NOT NULL);")
    monkeypatch.setattr(sqlite, "MIGRATIONS", [*sqlite.MIGRATIONS, later])
    monkeypatch.setattr(sqlite, "VERSION", number)
    server = (schema.VERSION + 1, "notes", later[2].replace("notes", "bursar.notes"))
    monkeypatch.setattr(schema, "MIGRATIONS", [*schema.MIGRATIONS, server])
    monkeypatch.setattr(schema, "VERSION", server[0])


@scenario
async def test_an_older_database_is_refused_until_it_is_migrated(own_place: Place, one_more_migration: None) -> None:
    store = own_place.store()
    with pytest.raises(DatabaseOlder):
        await store.open()
    await store.close()


@scenario
async def test_migrations_go_forward_on_populated_tables(own_place: Place, request: pytest.FixtureRequest) -> None:
    await populate(own_place)
    request.getfixturevalue("one_more_migration")

    store = own_place.store()
    await store.open(migrate=True)
    await store.close()

    async with own_place.bursar() as bursar:
        assert str(await bursar.ledger.balance("alice", "USDT")) == "6.000000"
        await bursar.ledger.commit(pay("alice", "bob", "USDT", "6"))
        await check_sound(bursar.ledger)
    async with raw(own_place) as look:
        assert await look.count("notes") == 0


HELD_BEFORE = """INSERT INTO holds (id, account, asset, amount, remaining, posting, state, owner, expires_us)
    VALUES (7, 1, 1, {amount}, {amount}, 3, 'open', 'somebody', NULL),
           (8, 1, 1, {amount}, {amount}, 4, 'voided', 'somebody', NULL),
           (9, 1, 1, {amount}, {amount}, 5, 'open', '', 1)"""


@scenario
async def test_holds_with_an_owner_that_a_caller_made_up_can_be_ended_after_the_migration(
    empty_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a record ends what it owns from then on, and there is none of that name."""
    with monkeypatch.context() as yesterday:
        for module in (sqlite, schema):
            older = [found for found in module.MIGRATIONS if found[0] < _number(module.MIGRATIONS, "holds")]
            yesterday.setattr(module, "MIGRATIONS", older)
            yesterday.setattr(module, "VERSION", older[-1][0])
        store = empty_place.store()
        await store.open()
        await store.close()
        amount = "100" if empty_place.engine == "postgres" else "x'80000000000000000000000000000064'"
        async with raw(empty_place) as somebody:
            await somebody.execute(HELD_BEFORE.format(amount=amount))

    store = empty_place.store()
    await store.open(migrate=True)
    held = {row.id: (row.owner, row.lasts_us, row.remaining) for row in await store.read.holds.open_of(1)}
    await store.close()

    assert held == {7: ("", None, 100), 9: ("", None, 100)}
    async with raw(empty_place) as look:
        assert await look.count("holds WHERE owner = 'somebody'") == 1
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError)):
            await look.execute("UPDATE holds SET lasts_us = 1")


PAUSED_BEFORE = """INSERT INTO pauses (kind, name, actor, reason, at, two_people, proposed_by, proposed_reason)
    VALUES ('flow', 'transfers', 'ann', 'why', {at}, {yes}, 'bob', 'done'),
           ('rail', 'spot', 'ann', 'why', {at}, {no}, '', '')"""
MARKED_BEFORE = "INSERT INTO core_high_water (rail, worker, sequence, at) VALUES ('spot', 'host-1', 17, {at})"


@scenario
async def test_pauses_and_marks_are_kept_by_the_migration_that_brings_halts(
    empty_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A halt is a row beside the pause of the same name, and a program that lifts pauses does not lift it."""
    with monkeypatch.context() as yesterday:
        for module in (sqlite, schema):
            older = [found for found in module.MIGRATIONS if found[0] < _number(module.MIGRATIONS, "halts")]
            yesterday.setattr(module, "MIGRATIONS", older)
            yesterday.setattr(module, "VERSION", older[-1][0])
        store = empty_place.store()
        await store.open()
        await store.close()
        words = {"yes": "true", "no": "false", "at": "now()"}
        words = words if empty_place.engine == "postgres" else {"yes": "1", "no": "0", "at": "0"}
        async with raw(empty_place) as look:
            await look.execute(PAUSED_BEFORE.format(**words))
            await look.execute(MARKED_BEFORE.format(**words))

    store = empty_place.store()
    await store.open(migrate=True)
    pauses = store.single().pauses
    found = [(one.kind, one.name, one.two_people, one.proposed_by) for one in await pauses.list()]
    assert found == [("flow", "transfers", True, "bob"), ("rail", "spot", False, "")]
    assert await store.read.marks.highest("spot") == 17
    assert await pauses.add("halt flow", "transfers", "ann", "a key is stolen", two_people=True)
    assert await pauses.drop("flow", "transfers")
    assert [one.kind for one in await pauses.list()] == ["halt flow", "rail"]
    await store.close()
    async with raw(empty_place) as look:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError)):
            await look.execute("UPDATE pauses SET kind = 'flaw'")


def _number(migrations: list[tuple[int, str, str]], name: str) -> int:
    return next(number for number, found, _ in migrations if found == name)


@scenario
async def test_a_migration_that_fails_leaves_the_old_schema_whole(
    own_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await populate(own_place)
    broken = "CREATE TABLE half (id INTEGER PRIMARY KEY); CREATE TABLE half (id INTEGER PRIMARY KEY);"
    with monkeypatch.context() as tomorrow:
        for module in (sqlite, schema):
            number = module.VERSION + 1
            tomorrow.setattr(module, "MIGRATIONS", [*module.MIGRATIONS, (number, "broken", broken)])
            tomorrow.setattr(module, "VERSION", number)
        store = own_place.store()
        with pytest.raises(DatabaseUnavailable):
            await store.open(migrate=True)
        await store.close()

    async with own_place.bursar() as bursar:
        assert str(await bursar.ledger.balance("alice", "USDT")) == "6.000000"
    async with raw(own_place) as look:
        with pytest.raises((sqlite3.OperationalError, asyncpg.UndefinedTableError)):
            await look.count("half")


@scenario
async def test_a_newer_database_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sqlite, schema):
        monkeypatch.setattr(module, "VERSION", 0)  # older than any program that may run beside this schema
    store = place.store()
    with pytest.raises(DatabaseNewer):
        await store.open(migrate=True)
    await store.close()


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_newer_database_that_says_so_still_serves_this_program(
    own_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version N and N + 1 run side by side while a cluster is upgraded."""
    async with raw(own_place) as dba:
        await dba.execute(
            f"INSERT INTO migrations (number, name, runs_from) VALUES ({schema.VERSION + 1}, 'later', {schema.VERSION})"
        )

    await populate(own_place)


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_the_script_for_a_dba_makes_what_we_would_make(own_place: Place) -> None:
    async with raw(own_place) as dba:
        await dba.execute("DROP SCHEMA bursar CASCADE")
        await dba.execute(schema.script())

    async with own_place.bursar() as bursar:
        await furnish(bursar.ledger)
        await bursar.ledger.commit(deposit(BANK, "alice", "USDT", "1"))


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_somebody_elses_sqlite_file_is_left_alone(bare_place: Place) -> None:
    with contextlib.closing(sqlite3.connect(bare_place.path)) as other:
        other.execute("CREATE TABLE theirs (id INTEGER)")
    store = bare_place.store()
    with pytest.raises(DatabaseUnavailable, match="something else"):
        await store.open()
    await store.close()


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("had", "size"), [(0, 0), (4096, 0), (2048, 100), (2048, 200)])
@scenario
async def test_a_new_file_has_small_pages_and_its_log_grows_with_it(bare_place: Place, had: int, size: int) -> None:
    """A file that was there keeps its pages. The log is copied back at 64 MiB, or at the file's size, up to 128."""
    if had:
        with contextlib.closing(sqlite3.connect(bare_place.path)) as older:
            older.execute(f"PRAGMA page_size = {had}")
            older.execute("VACUUM")
            if size:  # of free pages, which count as others do
                older.execute(f"CREATE TABLE filling AS SELECT zeroblob({size << 20})")
                older.execute("DROP TABLE filling")
    store = bare_place.store()
    assert isinstance(store, sqlite.SqliteStore)
    await store.open()
    try:
        connection = store._get_writer()
        ask = partial(store.run, store._write_lane)
        page = await ask(lambda: connection.execute("PRAGMA page_size").fetchone()[0])
        log = await ask(lambda: connection.execute("PRAGMA wal_autocheckpoint").fetchone()[0])
    finally:
        await store.close()
    assert page == (had or 2048)
    assert page * log // 2**20 == min(max(64, size), 128)


def test_every_statement_exists_for_both_engines() -> None:
    """One table of names: what one engine can do, the other can too. Only batches are worked differently."""

    def shared(engine: str) -> set[str]:
        product = Path(bursar.__file__).parent
        files = [*(product / "store" / engine).glob("*.sql"), *(product / "flows").rglob(f"{engine}.sql")]
        names = {name for file in files for name in re.findall(r"^-- name: (\w+)$", file.read_text(), re.MULTILINE)}
        own = {"insert_spend", "hanging_commits"}
        return {name for name in names if not name.endswith("_new") and not name.startswith("batch_")} - own

    assert shared("sqlite") == shared("postgres") != set()


def test_no_statement_makes_asyncpg_ask_about_types(empty_postgres: str) -> None:
    """It would ask each new connection, which takes longer than the statement: of arrays it knows those of texts."""

    async def odd() -> list[tuple[str, str]]:
        connection = await asyncpg.connect(empty_postgres)
        found = []
        for name, sql in postgres.SQL.items():
            statement = await connection.prepare(sql)
            kinds = (*statement.get_parameters(), *(one.type for one in statement.get_attributes()))
            found += [(name, kind.name) for kind in kinds if kind.kind != "scalar" and kind.name != "text[]"]
        await connection.close()
        return found

    assert asyncio.run(odd()) == []
