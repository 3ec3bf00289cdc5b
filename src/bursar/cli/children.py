"""A child core: the real `bursar core` as a process of `bursar serve`, started again when it dies.

The child stops by itself when its standard input ends, which happens when the server dies, however it dies; so no
orphan keeps the log locked. A child that can't start is tried again with back-off: transfers wait as PENDING meanwhile.

A core with much to load takes its time, and says how far it is: the first start is waited for as long as it gets on,
and given up when nothing has moved for half a minute. Nothing ends the supervision but its cancellation: whatever goes
wrong, also where the machine has no process or descriptor left to start one, is logged and tried again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator

from bursar.cli.commands.core import LOADING
from bursar.cli.errors import Unusable
from bursar.config import Config
from bursar.ports import Ports
from bursar.stopping import Stopping

BACKOFF_S = 0.2
BACKOFF_S_MAX = 10.0
STEADY_S = 30.0  # after so long a life, the next back-off begins anew
PATIENCE_S = 30.0  # without progress, before the first start is given up
SHOWN_S = 5.0  # between two log lines about progress
DEATHS_MAX = 3  # of a child that gets on and dies: after that, getting on is no progress any more
PARTING_S = 10.0

log = logging.getLogger("bursar.children")


class ChildCore:
    """One core, kept alive."""

    def __init__(self, config: Config, ports: Ports, kind: str, stopping: Stopping) -> None:
        self.kind = kind
        self._stopping = stopping
        self.ready = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self.moved_at = ports.monotonic()  # when it last got on
        self._ports = ports
        # -P: a file of the current folder that happens to be called json.py must not become part of the core.
        self.command = [
            *(sys.executable, "-P", "-c", "from bursar.cli import main; main()", "core"),
            *("--data", f"{config.data}/{kind}", "--listen", config.core_address(kind)),
            *("--secret-file", config.core_secret_file(kind), "--name", kind, "--until-eof"),
        ]
        self._failed = ""
        self._progress = ""  # what it said last, while it loads
        self._deaths = 0
        self._shown_at = 0.0

    async def run(self) -> None:
        """Start it, and again, until cancelled; then let it end."""
        wait_s = BACKOFF_S
        try:
            while True:
                began = self._ports.monotonic()
                try:
                    self._failed = f"core {self.kind} ended with {await self._once()}"
                except Exception as error:  # no process, no descriptor, no memory: supervision goes on all the same
                    self._failed = f"core {self.kind} can't be started: {type(error).__name__}: {error}"
                self.ready.clear()
                self._deaths += 1
                if self._ports.monotonic() - began > STEADY_S:
                    wait_s = BACKOFF_S
                log.error("%s; it is started again in %.1f s", self._failed, wait_s)
                await self._ports.sleep(wait_s)
                wait_s = min(2 * wait_s, BACKOFF_S_MAX)
        finally:
            await self._end()

    async def until_ready(self) -> None:
        """Wait for its first start, as long as it gets on; Unusable if it does not."""
        while not self.ready.is_set():
            left_s = self.moved_at + PATIENCE_S - self._ports.monotonic()
            if left_s <= 0:
                stuck = self._progress and f", stuck at {self._progress}"
                why = self._failed or f"core {self.kind} does not get ready{stuck}"
                raise Unusable(f"{why}; see above why")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self.ready.wait()

    async def _once(self) -> int:
        pipe = asyncio.subprocess.PIPE
        # A session of its own: Ctrl-C at the terminal is for the server, which still needs its core to finish.
        process = await asyncio.create_subprocess_exec(*self.command, stdin=pipe, stdout=pipe, start_new_session=True)
        self.process = process
        assert process.stdout is not None
        while line := await process.stdout.readline():
            said = line.decode("utf-8", "replace").strip()
            if not said.startswith(LOADING):
                self.ready.set()
                break
            self._loads(said.removeprefix(LOADING))
        return await process.wait()

    def _loads(self, progress: str) -> None:
        """It says how far it is."""
        now = self._ports.monotonic()
        if progress != self._progress and self._deaths < DEATHS_MAX:
            self.moved_at = now
        self._progress = progress
        if now - self._shown_at >= SHOWN_S:
            self._shown_at = now
            log.warning("core %s is loading: %s", self.kind, progress)

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
