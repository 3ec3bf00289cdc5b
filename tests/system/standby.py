"""A synchronous standby for a throw-away server: a client that receives its log and says what it has on disk."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

from tests.system.test_trouble import sql

from bursar.testbed.devdb import find_binaries

ATTACH_S = 20.0
FOLLOWING = "SELECT 1 FROM pg_stat_replication WHERE application_name = '{name}' AND state = 'streaming'"


@contextlib.asynccontextmanager
async def standby(url: str, name: str) -> AsyncIterator[None]:
    """It follows inside, under this name."""
    parts = urlsplit(url)
    place = {key: values[0] for key, values in parse_qs(parts.query).items()}
    login = f"host={place['host']} port={place['port']} user={parts.username} application_name={name}"
    with tempfile.TemporaryDirectory(prefix="bursar-standby-") as folder:
        process = subprocess.Popen(  # noqa: ASYNC220 (it returns at once)
            [str(find_binaries() / "pg_receivewal"), "--directory", folder, "--synchronous", "--dbname", login],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with asyncio.timeout(ATTACH_S):
                while not await sql(url, FOLLOWING.format(name=name)):  # noqa: ASYNC110 (another process)
                    await asyncio.sleep(0.02)
            yield
        finally:
            process.kill()
            process.wait()
