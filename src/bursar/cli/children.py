"""A child core: the real `bursar core` as a process of `bursar serve`, started again when it dies.

The child stops by itself when its standard input ends, which happens when the server dies, however it dies; so no
orphan keeps the log locked. A child that can't start is tried again with back-off: transfers wait as PENDING meanwhile.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator

from bursar.cli.errors import Unusable
from bursar.config import Config
from bursar.ports import Ports
from bursar.stopping import Stopping

BACKOFF_S = 0.2
BACKOFF_S_MAX = 10.0
STEADY_S = 30.0  # after so long a life, the next back-off begins anew
FIRST_S = 30.0  # how long the first start may take
PARTING_S = 10.0

log = logging.getLogger("bursar.children")


class ChildCore:
    """One core, kept alive."""

    def __init__(self, config: Config, ports: Ports, kind: str, stopping: Stopping) -> None:
        self.kind = kind
        self._stopping = stopping
        self.ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._ports = ports
        self._words = [
            *("--data", f"{config.data}/{kind}", "--listen", config.core_address(kind)),
            *("--secret-file", config.core_secret_file(kind), "--name", kind, "--until-eof"),
        ]
        self._failed = ""

    async def run(self) -> None:
        """Start it, and again, until cancelled; then let it end."""
        wait_s = BACKOFF_S
        try:
            while True:
                began = self._ports.monotonic()
                code = await self._once()
                self.ready.clear()
                if self._ports.monotonic() - began > STEADY_S:
                    wait_s = BACKOFF_S
                self._failed = f"core {self.kind} ended with {code}"
                log.error("%s; it is started again in %.1f s", self._failed, wait_s)
                await self._ports.sleep(wait_s)
                wait_s = min(2 * wait_s, BACKOFF_S_MAX)
        finally:
            await self._end()

    async def until_ready(self) -> None:
        """Wait for its first start; Unusable if it takes too long."""
        try:
            async with asyncio.timeout(FIRST_S):
                await self.ready.wait()
        except TimeoutError:
            raise Unusable(f"{self._failed or f'core {self.kind} does not get ready'}; see above why") from None

    async def _once(self) -> int:
        # -P: a file of the current folder that happens to be called json.py must not become part of the core.
        command = [sys.executable, "-P", "-c", "from bursar.cli import main; main()", "core", *self._words]
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C at the terminal is for the server, which still needs its core to finish.
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.process = process
        assert process.stdout is not None
        if await process.stdout.readline():
            self.ready.set()
        return await process.wait()

    async def _end(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(min(PARTING_S, self._stopping.left_s(0.9))):
                await process.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


@contextlib.asynccontextmanager
async def children(
    config: Config, ports: Ports, kinds: list[str], stopping: Stopping
) -> AsyncIterator[list[ChildCore]]:
    """Child cores, all ready; ended at the end."""
    cores = [ChildCore(config, ports, kind, stopping) for kind in kinds]
    tasks = [asyncio.create_task(core.run(), name=f"bursar-core-{core.kind}") for core in cores]
    try:
        for core in cores:
            await core.until_ready()
        yield cores
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
