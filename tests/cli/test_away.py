"""Commands that go on until they are interrupted go on when the database is started again under them."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator

import pytest
from tests.cli.conftest import Shell

from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres


@pytest.fixture(scope="module")
def postgres() -> Iterator[ThrowawayPostgres]:
    """A server that a test may end."""
    with throwaway_postgres({"fsync": "off"}) as made:
        yield made


def interrupted(process: subprocess.Popen[str]) -> list[str]:
    """What it has said on stderr, in lines."""
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    return err.strip().splitlines()


@pytest.mark.parametrize("ending", ["stop", "kill"])
def test_a_watching_audit_and_a_follower_of_events_wait_for_it(postgres: ThrowawayPostgres, ending: str) -> None:
    shell = Shell(postgres.url)
    shell.ok("migrate")
    shell.ok("asset", "create", "EUR", "--precision", "2")
    with (
        shell.running("audit", "--watch", "0.1") as watching,
        shell.running("ledger", "events", "--follow") as following,
    ):
        assert watching.stdout is not None
        assert watching.stderr is not None
        assert following.stdout is not None
        assert following.stderr is not None
        assert "I1 ok" in watching.stdout.readline()
        assert "asset_created" in following.stdout.readline()
        getattr(postgres, ending)()
        away = [process.stderr.readline() for process in (watching, following) if process.stderr]
        postgres.start()
        back = [process.stderr.readline() for process in (watching, following) if process.stderr]
        assert all(line.startswith("the database can't be used: ") for line in away), away
        assert back == ["the database is back\n"] * 2
        shell.ok("account", "create", f"user:{ending}")
        assert any(f"account user:{ending} version 1" in line for line in iter(following.stdout.readline, ""))
        assert "I1 ok" in watching.stdout.readline()
        assert (interrupted(watching), interrupted(following)) == ([], [])
