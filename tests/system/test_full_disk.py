"""SQLite on a disk that is full, or nearly: what is freed is not eaten by the log, and as soon as there is room enough
to copy the log back it goes on by itself, without a restart. Nothing that was told is lost."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.builders import check_sound
from tests.system.crew import ASSET, BANK, furnish, outcome

from bursar import Bursar, Receipt, deposit
from bursar.model.errors import DatabaseUnavailable
from bursar.ports import SystemPorts
from bursar.store.sqlite import log

KIB, MIB = 2**10, 2**20
NOTE = {"note": "x" * 1_500}


class Disk(SystemPorts):
    """A machine whose disk has only so many bytes for the file and its log: SQLite is told, as by the system, that
    there is no room. Time passes as the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 2**40
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def free_bytes(self, path: str) -> int:
        return max(0, self.size - self.used)

    @property
    def log_size(self) -> int:
        beside = self.path.with_name(f"{self.path.name}-wal")
        return beside.stat().st_size if beside.exists() else 0

    @property
    def used(self) -> int:
        return self.path.stat().st_size + self.log_size

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        if read_only:
            return super().sqlite(path, read_only=True)
        disk = self

        class OnDisk(sqlite3.Connection):
            def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
                if sql == "COMMIT" and self.total_changes != self.before and disk.used >= disk.size:
                    raise full()
                if sql.startswith("PRAGMA wal_checkpoint"):
                    page, pages = log._pages(self)
                    if disk.used + page * pages - disk.path.stat().st_size > disk.size:
                        raise full()
                if sql == "BEGIN IMMEDIATE":
                    self.before = self.total_changes
                return super().execute(sql, *args)

            before = 0

        return sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=OnDisk)


def full() -> sqlite3.Error:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorname = "SQLITE_FULL"
    return error


async def fill(bursar: Bursar, name: str, most: int) -> list[str]:
    """Deposits until one is refused, or so many; the keys of those that were not."""
    done: list[str] = []
    for number in range(most):
        found = await outcome(
            bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=f"{name}{number}", metadata=NOTE))
        )
        if not isinstance(found, Receipt):
            assert found == "DATABASE_UNAVAILABLE"
            break
        done.append(f"{name}{number}")
    return done


def test_freed_bytes_are_not_eaten_and_it_goes_on_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "funds.db"
    url = f"sqlite:///{path}"
    asyncio.run(furnish(url, "a"))

    async def body() -> None:
        disk = Disk(path)
        async with Bursar(url, ports=disk) as bursar:
            told = await fill(bursar, "first", 200)
            assert len(told) == 200
            disk.size = disk.used + 64 * KIB
            told += await fill(bursar, "second", 1_000)
            assert 200 < len(told) < 1_000, "it is full"
            with pytest.raises(DatabaseUnavailable, match=r"make room \(about \d+ MiB are needed"):
                await bursar.ledger.freeze("a")
            stuck = disk.log_size
            for _ in range(10):
                disk.size += 16 * KIB
                disk.now += 10
                told += await fill(bursar, f"freed{disk.size}", 5)
                assert disk.log_size <= stuck, "not a byte of it went into the log"
            disk.size += 4 * MIB
            disk.now += 10
            told += await fill(bursar, "third", 20)
            assert told[-20:] == [f"third{n}" for n in range(20)], "no restart, no command"
            assert disk.log_size < stuck / 2
            await check_sound(bursar.ledger)
            for key in told:
                assert (await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=key, metadata=NOTE))).replayed
            assert (await bursar.ledger.balance("a", ASSET)).decimal == len(told)

    asyncio.run(body())


def test_full_disk_is_not_tried_again_by_each_of_many(tmp_path: Path) -> None:
    """To copy the log back and fail is work: once in a second is enough."""
    path = tmp_path / "funds.db"
    url = f"sqlite:///{path}"
    asyncio.run(furnish(url, "a"))

    async def body() -> None:
        disk = Disk(path)
        async with Bursar(url, ports=disk) as bursar:
            await fill(bursar, "first", 20)
            disk.size = disk.used
            assert await fill(bursar, "second", 1) == []
            disk.size += 100 * MIB
            assert await fill(bursar, "third", 1) == []
            disk.now += log.AGAIN_S
            assert len(await fill(bursar, "fourth", 5)) == 5

    asyncio.run(body())


@pytest.mark.parametrize(("free", "size"), [(10**12, 64 * MIB), (40 * MIB, 10 * MIB), (0, log.BYTES_LEAST)])
def test_log_may_use_a_part_of_what_is_free(tmp_path: Path, free: int, size: int) -> None:
    class Nearly(SystemPorts):
        def free_bytes(self, path: str) -> int:
            return free

    connection = sqlite3.connect(tmp_path / "x.db")
    connection.execute("PRAGMA page_size = 2048")
    made = log.Log(Nearly(), str(tmp_path / "x.db"))
    made.open(connection)
    assert connection.execute("PRAGMA wal_autocheckpoint").fetchone()[0] * 2048 == size
    free = 10**12
    for _ in range(log.LOOK_EVERY):
        made.written(connection)
    assert connection.execute("PRAGMA wal_autocheckpoint").fetchone()[0] * 2048 == 64 * MIB
    connection.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real one of 16 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a disk")
def test_real_disk_that_somebody_else_fills_and_frees(small_disk: Path) -> None:
    path = small_disk / "funds.db"
    url = f"sqlite:///{path}"
    asyncio.run(furnish(url, "a"))
    ballast = small_disk / "ballast"

    def leave(free: int) -> None:
        """Somebody else's file takes all but so much."""
        have = os.statvfs(small_disk)
        size = ballast.stat().st_size if ballast.exists() else 0
        with ballast.open("ab") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, size + have.f_bavail * have.f_frsize - free))

    async def body() -> None:
        async with Bursar(url) as bursar:
            told = await fill(bursar, "first", 300)
            assert len(told) == 300
            leave(100 * KIB)
            told += await fill(bursar, "second", 2_000)
            assert len(told) < 2_300, "it is full"
            ballast.unlink()
            wait = asyncio.get_running_loop().time() + 30
            while not (more := await fill(bursar, "third", 100)):
                assert asyncio.get_running_loop().time() < wait, "it never went on"
                await asyncio.sleep(0.1)
            told += more
            assert len(more) == 100
            await check_sound(bursar.ledger)
            assert (await bursar.ledger.balance("a", ASSET)).decimal == len(told)

    asyncio.run(body())
