"""A PostgreSQL server and a hot standby of it, for a failover: both real, the second made of a copy of the first."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg

from bursar.testbed.devdb import ThrowawayPostgres

WAIT_S = 60.0


class Standby:
    """Follows a server until it is promoted."""

    def __init__(self, leader: ThrowawayPostgres) -> None:
        self._leader = leader
        self._root: Path = leader.data_dir.parent / "standby"
        data = self._root / "data"
        leader.stop()
        shutil.copytree(leader.data_dir, data)
        socket = leader.data_dir.parent
        lines = [f"unix_socket_directories = '{self._root}'", f"primary_conninfo = 'host={socket} user=bursar'"]
        with (data / "postgresql.conf").open("a", encoding="utf-8") as configuration:
            configuration.write("\n".join([*lines, "hot_standby = on", ""]))
        (data / "standby.signal").touch()
        user: dict[str, Any] = leader._as_server_user()
        if "user" in user:
            for path in (self._root, *self._root.rglob("*")):
                os.chown(path, user["user"], user["group"])
        data.chmod(0o700)
        leader.start()
        self._log = (self._root / "log").open("wb")
        self._server = subprocess.Popen(
            [str(leader._binaries / "postgres"), "-D", str(data)],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            **user,
        )
        self.url = leader.url.replace(str(leader.data_dir.parent), str(self._root))
        self.until("SELECT pg_is_in_recovery()")

    def until(self, condition: str, *args: Any) -> None:
        """Wait until the standby says that something is so."""
        deadline = time.monotonic() + WAIT_S
        while True:
            with contextlib.suppress(OSError, asyncpg.PostgresError):
                if asyncio.run(_value(self.url, condition, *args)):
                    return
            assert time.monotonic() < deadline, "the standby never got there"
            time.sleep(0.02)  # between two looks at a real process

    def catch_up(self) -> None:
        """Wait until it has all that the leader has."""
        there = asyncio.run(_value(self._leader.url, "SELECT pg_current_wal_lsn()::text"))
        self.until("SELECT pg_last_wal_replay_lsn() >= $1::text::pg_lsn", there)

    def promote(self) -> None:
        """Make it a leader."""
        assert asyncio.run(_value(self.url, "SELECT pg_promote()"))
        self.until("SELECT NOT pg_is_in_recovery()")

    def close(self) -> None:
        self._server.send_signal(signal.SIGQUIT)
        self._server.wait(WAIT_S)
        self._log.close()
        shutil.rmtree(self._root)


async def _value(url: str, statement: str, *args: Any) -> Any:
    connection = await asyncpg.connect(url, timeout=5)
    try:
        return await connection.fetchval(statement, *args)
    finally:
        await connection.close()


@contextlib.contextmanager
def standby_of(leader: ThrowawayPostgres) -> Iterator[Standby]:
    """A standby for as long as the block lasts."""
    standby = Standby(leader)
    try:
        yield standby
    finally:
        standby.close()
