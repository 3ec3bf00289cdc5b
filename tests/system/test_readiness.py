"""Ready means that the database takes writes. One that answers reads and takes none (a replica, a full disk, a leader
that waits for a standby) is not: `/readyz` says so in time, and neither server nor worker starts on it."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import Office, office, until
from tests.system.crew import furnish
from tests.system.pair import standby_of
from tests.system.test_settings import set_standbys
from tests.system.test_trouble import sql

from bursar import Bursar
from bursar.config import Config
from bursar.model.errors import BursarError, DatabaseReadOnly, DatabaseUnavailable
from bursar.ports import SystemPorts
from bursar.runtime import running
from bursar.store import Options
from bursar.store.probe import FRESH_S, Probe
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

LIMIT_S = 0.5
WAITS = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"


@pytest.fixture
def server() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


async def ready(here: Office) -> tuple[int, str]:
    began = time.monotonic()
    answer = await here.get("/readyz")
    assert time.monotonic() - began < 6
    return answer.status_code, answer.json()["database"]


async def turns(here: Office, status: int) -> str:
    """What it says once it has that status."""
    found: list[str] = []

    async def look() -> bool:
        code, said = await ready(here)
        found.append(said)
        return code == status

    await until(look)
    return found[-1]


@asynccontextmanager
async def read_only(server: ThrowawayPostgres) -> AsyncIterator[None]:
    async def becomes(value: str) -> None:
        await sql(
            server.url,
            "SET default_transaction_read_only = off",
            f"ALTER SYSTEM SET default_transaction_read_only = {value}",
            "SELECT pg_reload_conf()",
        )
        async with asyncio.timeout(20):
            while (await sql(server.url, "SHOW default_transaction_read_only"))[0][0] != value:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    await becomes("on")
    yield
    await becomes("off")


def test_read_only_database_is_noticed_and_so_is_its_end(server: ThrowawayPostgres, tmp_path: Path) -> None:
    async def body() -> None:
        async with office(server.url, tmp_path) as here:
            assert await ready(here) == (200, "ok")
            async with read_only(server):
                assert await turns(here, 503) == "DATABASE_READ_ONLY"
                assert "bursar_database_up 0" in (await here.get("/metrics")).text
                assert (await here.get("/healthz")).status_code == 200
            assert await turns(here, 200) == "ok"

    asyncio.run(body())


def test_nothing_starts_on_a_replica(server: ThrowawayPostgres, tmp_path: Path) -> None:
    """Looking is possible there: the ledger opens, and answers."""

    async def body(url: str) -> None:
        async with Bursar(url) as bursar:
            assert "USDT" in await bursar.ledger.assets()
        with pytest.raises(DatabaseReadOnly):
            async with office_of_furnished(url, tmp_path):
                pass

    asyncio.run(furnish(server.url, "a"))
    with standby_of(server) as standby:
        standby.catch_up()
        asyncio.run(body(standby.url))


@asynccontextmanager
async def office_of_furnished(url: str, folder: Path) -> AsyncIterator[None]:
    """The runtime alone: an office would make assets first."""
    (folder / "secret").write_bytes(b"s" * 32)
    (folder / "secret").chmod(0o600)
    config = Config(
        data=str(folder), database=url, core_spot=f"unix:{folder}/none", core_spot_secret_file=str(folder / "secret")
    )
    async with running(config, SystemPorts(), "worker"):
        yield


def test_commits_that_hang_are_noticed_and_do_not_pile_up(server: ThrowawayPostgres, tmp_path: Path) -> None:
    """Given a synchronous standby that is not there, then it is not ready, however often it is asked; the server's
    connections are not used up by commits that wait; and when the standby is no longer asked for, it is ready again."""

    async def body() -> None:
        async with office(server.url, tmp_path, database_timeout_ms=int(LIMIT_S * 1000)) as here:
            await here.fund(1001, "100")
            here.runtime.bursar.ledger.writer.runner.patience_s = 0.5
            await set_standbys(server.url, "nobody")
            await turns(here, 503)
            ledger, waits = here.runtime.bursar.ledger, []
            for n in range(20):
                answer = await here.transfer(1001, "FUNDING", "SPOT", "1", client_order_id=f"o{n}")
                assert answer.status_code in (202, 503), answer.text
                with pytest.raises(BursarError):
                    await ledger.create_account(f"user:{n}:other")
                assert (await ready(here))[0] == 503
                waits.append((await sql(server.url, WAITS))[0][0])
            assert 1 <= waits[-1] <= 12, waits
            with pytest.raises(DatabaseUnavailable):
                async with asyncio.timeout(30), office_of_furnished(server.url, tmp_path / "other"):
                    pass
            await set_standbys(server.url, "")
            assert await turns(here, 200) == "ok"

    (tmp_path / "other").mkdir()
    asyncio.run(body())


def test_sqlite_that_can_not_be_written_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "funds.db"

    async def body() -> None:
        async with Bursar(f"sqlite:///{path}") as bursar:
            probe = Probe(bursar.store, "me")
            assert await probe.look(10) == "ok"
            probe._seen = None
            with closing(sqlite3.connect(path, isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                assert "no write was committed within" in await probe.look(0.2)
                other.execute("ROLLBACK")
            assert await probe.look(10) == "ok"

    asyncio.run(body())


def test_many_who_ask_cause_one_write(tmp_path: Path) -> None:
    async def body() -> None:
        async with Bursar(f"sqlite:///{tmp_path}/funds.db") as bursar:
            beats = 0
            real = bursar.store.beat

            async def beat(worker: str) -> None:
                nonlocal beats
                beats += 1
                await real(worker)

            bursar.store.beat = beat  # type: ignore[method-assign]
            probe = Probe(bursar.store, "me")
            assert set(await asyncio.gather(*[probe.look(10) for _ in range(50)])) == {"ok"}
            assert await probe.look(10) == "ok"
            assert beats == 1
            assert probe._seen is not None
            probe._seen = (probe._seen[0] - FRESH_S, None)
            assert await probe.look(10) == "ok"
            assert beats == 2

    asyncio.run(body())


def test_error_that_nobody_expected_is_not_ready(tmp_path: Path) -> None:
    async def body() -> None:
        async with Bursar(f"sqlite:///{tmp_path}/funds.db", options=Options()) as bursar:

            async def beat(worker: str) -> Any:
                raise ZeroDivisionError(worker)

            bursar.store.beat = beat  # type: ignore[method-assign]
            assert await Probe(bursar.store, "me").look(10) == DatabaseUnavailable.code
            with pytest.raises(BursarError, match="ZeroDivisionError"):
                await Probe(bursar.store, "me").require(10)

    asyncio.run(body())
