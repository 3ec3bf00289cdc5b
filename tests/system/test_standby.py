"""With `require_synchronous`, nothing is read that no standby has: a leader may show commits that it can still lose.

A commit waits for its standby unseen. But a server that crashes in that wait shows it after the restart, and so does
one that was just promoted: read then, answered to a client, and lost with that server, it is a promise broken.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import asyncpg
import pytest
from tests.system.crew import furnish
from tests.system.standby import standby
from tests.system.test_settings import refusal, set_standbys
from tests.system.test_trouble import sql

from bursar.model.errors import DatabaseUnavailable
from bursar.store import Options
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

STRICT = Options(require_synchronous=True)
WAITING = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
WITNESS = "SELECT to_regclass('witness')::text"


@pytest.fixture
def server() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


async def commit_without_standby(url: str) -> None:
    """A commit that waits for a standby that is not there."""
    connection = await asyncpg.connect(url)
    waits = asyncio.create_task(connection.execute("CREATE TABLE witness ()"))
    async with asyncio.timeout(20):
        while not await sql(url, WAITING):  # noqa: ASYNC110 (the server's)
            await asyncio.sleep(0.01)
    assert await sql(url, WITNESS) == [(None,)], "nobody sees it while it waits"
    connection.terminate()
    await asyncio.gather(waits, return_exceptions=True)


def test_commit_that_no_standby_has_is_not_shown_after_a_crash(server: ThrowawayPostgres) -> None:
    async def before() -> None:
        await furnish(server.url, "a")
        await set_standbys(server.url, "one")
        await commit_without_standby(server.url)

    async def after() -> None:
        assert await sql(server.url, WITNESS) == [("witness",)], "the server itself shows it"
        error = await refusal(server.url, STRICT)
        assert isinstance(error, DatabaseUnavailable)
        assert "no synchronous standby" in error.why
        async with asyncio.timeout(20):  # whoever asked in vain leaves nothing behind
            while await sql(server.url, WAITING):  # noqa: ASYNC110 (the server's)
                await asyncio.sleep(0.01)
        async with standby(server.url, "one"):
            assert await refusal(server.url, STRICT) is None

    asyncio.run(before())
    server.kill()
    server.start()
    asyncio.run(after())
