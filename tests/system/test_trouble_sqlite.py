"""A SQLite file that is newer, older, read-only, locked, gone, full, not ours or corrupt says so in one line, as a
typed error, and loses nothing: once the trouble is over the same request goes through, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from tests.builders import check_sound
from tests.system.crew import ASSET, BANK, crew, furnish, outcome
from tests.system.trouble import absurd_expiry, balance, open_once, opens, put_in

from bursar import Bursar, BursarError, ExternalAccount, Receipt, deposit, pay
from bursar import open as open_bursar
from bursar.model.errors import DatabaseCorrupt, DatabaseNewer, DatabaseOlder, DatabaseUnavailable
from bursar.ports import SystemPorts
from bursar.store.sqlite import calls
from bursar.store.sqlite import store as sqlite_store

NOBODY = 65534


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
    assert kind == "DatabaseReadOnly", text
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


class FailingSync(sqlite3.Connection):
    """A disk whose sync fails in the middle of COMMIT: the log has got all of it, or nothing."""

    fails = 0
    keeps = False
    before = 0

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if sql == "BEGIN IMMEDIATE":
            self.before = self.total_changes
        if sql != "COMMIT" or not self.fails or self.total_changes == self.before:  # nothing to sync
            return super().execute(sql, *args)
        self.fails -= 1
        super().execute("COMMIT" if self.keeps else "ROLLBACK")
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorname = "SQLITE_IOERR_FSYNC"
        raise error


class FailingDisk(SystemPorts):
    writer: FailingSync

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        if read_only:
            return super().sqlite(path, read_only=True)
        self.writer = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=FailingSync)
        return self.writer


@pytest.mark.parametrize("keeps", [True, False], ids=["kept", "not kept"])
@pytest.mark.parametrize("fails", [1, 1_000], ids=["once", "for good"])
def test_sqlite_disk_that_fails_in_the_middle_of_commit(file: Path, fails: int, keeps: bool) -> None:
    """Nobody can know what is in the log: it is asked again by key, and a caller is never told that nothing was
    written. With the key, the truth comes out: once."""

    async def body() -> None:
        ports = FailingDisk()
        async with Bursar(at(file), ports=ports) as bursar:
            bursar.ledger.writer.runner.patience_s = 0.3
            entry = deposit(BANK, "a", ASSET, "1", key="second")
            ports.writer.keeps, ports.writer.fails = keeps, fails
            told = await outcome(bursar.ledger.commit(entry))
            if fails == 1 or keeps:  # the key was found, or the next try went through
                assert isinstance(told, Receipt)
            else:
                assert told == "OUTCOME_UNKNOWN"
            ports.writer.fails = 0
            assert (await bursar.ledger.commit(entry)).replayed is isinstance(told, Receipt)

    asyncio.run(body())
    assert asyncio.run(balance(at(file))) == "2.00"


def take_away(file: Path, copy: Path, how: str) -> None:
    match how:
        case "moved":
            file.rename(file.with_suffix(".moved"))
        case "deleted":
            file.unlink()
        case _:
            copy.rename(file)


@pytest.mark.parametrize("how", ["deleted", "moved", "replaced"])
def test_sqlite_gone_while_it_is_open(file: Path, how: str) -> None:
    """What would be written into a file that nobody finds again is refused; nothing is promised that is lost then."""

    async def body() -> None:
        async with open_bursar(at(file)) as bursar:
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            copy = file.with_suffix(".copy")
            with (
                contextlib.closing(sqlite3.connect(copy)) as target,
                contextlib.closing(sqlite3.connect(file)) as source,
            ):
                source.backup(target)
            take_away(file, copy, how)
            with pytest.raises(DatabaseUnavailable, match="moved, deleted or replaced"):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="third"))
            with pytest.raises(DatabaseUnavailable, match="moved, deleted or replaced"):
                await bursar.ledger.freeze("a")

    asyncio.run(body())


def test_sqlite_restored_from_a_backup(file: Path) -> None:
    """Given a reader whose cursor is past the backup, when that is restored and said to be, then it skips no event."""

    async def read(after: str) -> list[str]:
        async with open_bursar(at(file)) as bursar:
            return [event.cursor for event in await bursar.ledger.events(after)]

    async def restored() -> None:
        async with open_bursar(at(file)) as bursar, bursar.store.transaction() as unit:
            assert await unit.events.raise_epoch() == 1

    backup = file.read_bytes()
    for key in ("second", "third"):
        assert isinstance(asyncio.run(put_in(at(file), key)), Receipt)
    seen = asyncio.run(read(""))
    file.write_bytes(backup)
    asyncio.run(restored())
    assert asyncio.run(read(seen[-1])) == []
    assert isinstance(asyncio.run(put_in(at(file), "fourth")), Receipt)
    (new,) = asyncio.run(read(seen[-1]))
    assert asyncio.run(read(new)) == []
    assert isinstance(asyncio.run(put_in(at(file), "fifth")), Receipt)
    assert len(asyncio.run(read(new))) == 1
    assert len(asyncio.run(read(""))) == len(seen)


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


def test_one_callers_nonsense_does_not_stop_the_others(file: Path) -> None:
    """An expiry beyond the end of time is refused at once, and those in the same group go through."""
    asyncio.run(absurd_expiry(at(file)))


def test_rows_that_contradict_each_other_are_told_to_their_payer_alone(tmp_path: Path) -> None:
    """Given a posting that is live and spent, when its owner pays in a batch with another user, then only the other
    payment happens, and the owner's fails because the database is damaged, not because it is busy."""
    path = tmp_path / "funds.db"

    async def body() -> None:
        async with open_bursar(f"sqlite:///{path}") as b:
            await b.ledger.create_asset("USD", precision=2)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            for user in ("alice", "bob", "carol"):
                await b.ledger.create_account(user)
            for user in ("alice", "bob"):
                await b.ledger.commit(deposit("bank", user, "USD", "5"))
            with contextlib.closing(sqlite3.connect(path)) as other, other:
                (account,) = other.execute("SELECT id FROM accounts WHERE path = 'alice'").fetchone()
                other.execute("INSERT INTO spends SELECT posting, 1 FROM live_postings WHERE account = ?", (account,))
            entries = [pay(user, "carol", "USD", "5") for user in ("alice", "bob")]
            alice, bob = await b.ledger.commit_many(entries)
            assert isinstance(alice, DatabaseCorrupt), alice
            assert isinstance(bob, Receipt), bob

    asyncio.run(body())
