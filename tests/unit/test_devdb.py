"""The throw-away PostgreSQL: it starts, what it committed survives kill -9, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest

from bursar.testbed import devdb
from bursar.testbed.devdb import PostgresFailedError, PostgresNotFoundError, ThrowawayPostgres, throwaway_postgres

WAIT_SECONDS = 20.0


@pytest.fixture(scope="module")
def postgres() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"work_mem": "5MB"}) as running:
        yield running


def query(url: str, *statements: str) -> object:
    """What the last statement's first value is."""

    async def run() -> object:
        connection = await asyncpg.connect(url)
        try:
            for statement in statements[:-1]:
                await connection.execute(statement)
            return await connection.fetchval(statements[-1])
        finally:
            await connection.close()

    return asyncio.run(run())


def process_exists(pid: int) -> bool:
    # A process that has ended and was not waited for yet (state Z) is gone for our purposes.
    state = subprocess.run(["ps", "-o", "state=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return state.strip() not in ("", "Z")


def wait_until_gone(pid: int, directory: Path) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while process_exists(pid) or directory.exists():
        assert time.monotonic() < deadline, f"server {pid} or {directory} is still there"
        time.sleep(0.02)  # between two looks at a real process, until a deadline


def make_installation(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in ("initdb", "postgres", "pg_ctl"):
        (directory / name).touch(mode=0o755)
    return directory


def test_what_was_committed_survives_kill_9(postgres: ThrowawayPostgres) -> None:
    query(postgres.url, "CREATE TABLE kept (amount bigint)", "INSERT INTO kept VALUES (42) RETURNING amount")

    postgres.kill()
    with pytest.raises(OSError):
        query(postgres.url, "SELECT 1")
    postgres.start()

    assert query(postgres.url, "SELECT amount FROM kept") == 42


def test_a_kill_under_open_connections_is_followed_by_a_start(postgres: ThrowawayPostgres) -> None:
    async def kill_while_connected() -> None:
        connections = [await asyncpg.connect(postgres.url) for _ in range(5)]
        postgres.kill()
        postgres.start()
        for connection in connections:
            connection.terminate()

    asyncio.run(kill_while_connected())

    assert query(postgres.url, "SELECT 1") == 1


def test_it_stops_and_starts_again_and_neither_minds_being_repeated(postgres: ThrowawayPostgres) -> None:
    query(postgres.url, "CREATE TABLE stopped (amount bigint)", "INSERT INTO stopped VALUES (7) RETURNING amount")

    postgres.stop()
    postgres.stop()
    assert not (postgres.data_dir / "postmaster.pid").exists()
    postgres.start()
    postgres.start()

    assert query(postgres.url, "SELECT amount FROM stopped") == 7


def test_writes_are_durable_and_the_network_is_shut_unless_asked(postgres: ThrowawayPostgres) -> None:
    assert query(postgres.url, "SHOW fsync") == "on"
    assert query(postgres.url, "SHOW synchronous_commit") == "on"
    assert query(postgres.url, "SHOW listen_addresses") == ""
    assert query(postgres.url, "SHOW work_mem") == "5MB"


def test_only_the_owner_may_enter_the_directory_of_the_socket(postgres: ThrowawayPostgres) -> None:
    assert postgres.data_dir.parent.stat().st_mode & 0o077 == 0


def test_nothing_is_left_when_the_block_ends() -> None:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        pid = int((postgres.data_dir / "postmaster.pid").read_text().splitlines()[0])
        directory = postgres.data_dir.parent

    assert not process_exists(pid)
    assert not directory.exists()


@pytest.mark.parametrize(
    ("fsync", "bytes_wanted", "where"), [("off", 0, "memory"), ("off", 1 << 60, "disk"), ("on", 0, "disk")]
)
def test_it_is_in_memory_if_nothing_is_synced_and_there_is_room(
    fsync: str, bytes_wanted: int, where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ThrowawayPostgres] = []
    for name in ("memory", "disk"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(devdb, "MEMORY_ROOT", tmp_path / "memory")
    monkeypatch.setattr(devdb, "TEMPORARY_ROOTS", (tmp_path / "disk",))
    monkeypatch.setattr(devdb, "MEMORY_BYTES_MIN", bytes_wanted)
    monkeypatch.setattr(ThrowawayPostgres, "_make_cluster", lambda self, _: made.append(self))

    ThrowawayPostgres({"fsync": fsync}).close()

    assert made[0].data_dir.parent.parent == tmp_path / where


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_process_is_interrupted(how: signal.Signals) -> None:
    program = (
        "import sys, time\n"
        "from bursar.testbed.devdb import ThrowawayPostgres\n"
        "postgres = ThrowawayPostgres({'fsync': 'off'})\n"
        "postgres.start()\n"
        "print(postgres.data_dir, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        data_dir = Path(process.stdout.readline().strip())
        pid = int((data_dir / "postmaster.pid").read_text().splitlines()[0])
        process.send_signal(how)

    wait_until_gone(pid, data_dir.parent)


def test_a_server_that_will_not_start_says_why() -> None:
    with (
        pytest.raises(PostgresFailedError, match="no_such_setting"),
        throwaway_postgres({"no_such_setting": "1"}),
    ):
        pytest.fail("it started")


def test_the_newest_packaged_server_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in ("9", "10", "17"):
        make_installation(tmp_path / version / "bin")
    (tmp_path / "18" / "bin").mkdir(parents=True)  # client programs only
    monkeypatch.setattr(devdb, "SYSTEM_ROOT", tmp_path)

    assert devdb.system_binaries() == tmp_path / "17" / "bin"


def test_else_the_one_on_the_path_is_found_behind_its_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = make_installation(tmp_path / "opt" / "bin")
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "pg_ctl").symlink_to(real / "pg_ctl")
    monkeypatch.setattr(devdb, "SYSTEM_ROOT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))

    assert devdb.system_binaries() == real


def test_else_the_wheel_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / devdb.WHEEL_PACKAGE
    make_installation(package / "pginstall" / "bin")
    newest = make_installation(package / "pginstall18" / "bin")
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    assert devdb.wheel_binaries() == newest


def test_without_postgresql_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devdb, "SYSTEM_ROOT", tmp_path)
    monkeypatch.setattr(devdb, "WHEEL_PACKAGE", "no_such_package")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv(devdb.BINARIES_VARIABLE, raising=False)

    with pytest.raises(PostgresNotFoundError, match=r"apt install postgresql.*requirements-postgres\.lock"):
        devdb.find_binaries()
