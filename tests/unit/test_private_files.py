"""A SQLite database and what stands beside it are for their owner alone, whatever the umask is."""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

import bursar


@pytest.fixture(autouse=True)
def careless() -> Iterator[None]:
    """A umask that takes no rights away."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, str]:
    return {path.name: f"{stat.S_IMODE(path.stat().st_mode):o}" for path in sorted(folder.iterdir())}


async def use(path: Path) -> dict[str, str]:
    async with bursar.open(f"sqlite:///{path}") as b:
        await b.ledger.create_asset(f"A{os.urandom(3).hex().upper()}", 2)
        return modes(path.parent)


def test_a_new_database_is_private_from_the_first_moment(tmp_path: Path) -> None:
    """With its log and shared memory; a file that is opened to be read makes none."""
    assert asyncio.run(use(tmp_path / "funds.db")) == {"funds.db": "600", "funds.db-shm": "600", "funds.db-wal": "600"}
    assert modes(tmp_path) == {"funds.db": "600"}


def test_one_that_others_can_read_is_closed_to_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With what a crash has left beside it; and it is logged, once."""
    path = tmp_path / "funds.db"
    asyncio.run(use(path))
    left = sqlite3.connect(path)  # keeps the log from being removed
    left.execute("SELECT count(*) FROM accounts").fetchall()
    for file in tmp_path.iterdir():
        file.chmod(0o644)
    with caplog.at_level(logging.WARNING, "bursar"):
        assert set(asyncio.run(use(path)).values()) == {"600"}
    left.close()
    assert len(caplog.records) == 1
    assert f"{path} could be read by others" in caplog.records[0].getMessage()


def test_a_lock_of_this_very_process_survives(tmp_path: Path) -> None:
    """POSIX drops all locks of a process on a file when it closes any descriptor of it: SQLite's own would be gone."""
    path = tmp_path / "funds.db"
    asyncio.run(use(path))
    path.chmod(0o644)
    mine = sqlite3.connect(path, isolation_level=None)
    mine.execute("BEGIN IMMEDIATE")
    from bursar.ports import SystemPorts  # noqa: PLC0415

    SystemPorts().sqlite(str(path), read_only=False).close()
    probe = (
        "import sqlite3,sys; sqlite3.connect(sys.argv[1], timeout=0, isolation_level=None).execute('BEGIN IMMEDIATE')"
    )
    assert os.spawnvp(os.P_WAIT, "python3", ["python3", "-c", probe, str(path)]) != 0
    mine.execute("ROLLBACK")


def test_a_missing_folder_is_reported_as_before(tmp_path: Path) -> None:
    with pytest.raises(bursar.BursarError, match="check the path"):
        asyncio.run(use(tmp_path / "none" / "funds.db"))
