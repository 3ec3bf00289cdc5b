"""Child cores of `bursar serve`: waited for as long as they get on, and supervised whatever happens."""

from __future__ import annotations

import asyncio
import errno
import logging
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bursar.cli import children
from bursar.cli.children import ChildCore
from bursar.cli.commands.core import LOADING, Tell
from bursar.cli.errors import Unusable
from bursar.config import Config
from bursar.ports import SystemPorts
from bursar.rails.trading import Loading
from bursar.stopping import Stopping

WAIT_S = 60.0
PATIENCE_S = 0.3
ECHO = "import sys\nfor line in sys.stdin: print(line, end='', flush=True)"


class Clock(SystemPorts):
    """The real machine, on which time passes when the test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def supervised(folder: Path, ports: SystemPorts, program: str) -> AsyncIterator[ChildCore]:
    """A child that is another program, and its supervision."""
    core = ChildCore(Config(data=str(folder)), ports, "spot", Stopping(ports, 10))
    core.command = [sys.executable, "-c", program]
    task = asyncio.create_task(core.run())
    try:
        yield core
    finally:
        assert not task.done(), "the supervision has ended"
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def play(work: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WAIT_S):
            await work()

    asyncio.run(bounded())


def says(core: ChildCore, line: str) -> None:
    assert core.process is not None and core.process.stdin is not None
    core.process.stdin.write(f"{line}\n".encode())


def test_a_child_that_gets_on_is_waited_for_and_one_that_does_not_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Ten times as long as the patience, as long as it gets on; then it is stuck, and the error says where."""
    monkeypatch.setattr(children, "PATIENCE_S", PATIENCE_S)

    async def work() -> None:
        clock = Clock()
        async with supervised(tmp_path, clock, ECHO) as core:
            ready = asyncio.create_task(core.until_ready())
            await until(lambda: core.process is not None)
            for step in range(12):
                clock.now += PATIENCE_S * 0.9
                says(core, f"{LOADING}{step} of 12 MiB (0 %), snap-1.snap")
                await until(lambda: core.moved_at == clock.now)
                assert not ready.done() and not core.ready.is_set()
            clock.now += 2 * PATIENCE_S
            with pytest.raises(Unusable, match=r"does not get ready, stuck at 11 of 12 MiB \(0 %\), snap-1.snap"):
                await ready

    with caplog.at_level(logging.WARNING, "bursar.children"):
        play(work)
    assert "core spot is loading: 0 of 12 MiB (0 %), snap-1.snap" in caplog.text


def test_a_child_is_ready_when_it_says_so(tmp_path: Path) -> None:
    async def work() -> None:
        async with supervised(tmp_path, SystemPorts(), ECHO) as core:
            await until(lambda: core.process is not None)
            says(core, f"{LOADING}1 of 2 MiB (50 %), snap-1.snap")
            says(core, "core spot is ready at unix:spot.sock")
            await core.until_ready()

    play(work)


def test_a_child_that_loads_and_dies_again_and_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Getting on is no progress if it leads nowhere: a core that dies while it loads is not waited for for ever."""
    monkeypatch.setattr(children, "PATIENCE_S", 1.0)
    monkeypatch.setattr(children, "BACKOFF_S", 0.001)
    monkeypatch.setattr(children, "BACKOFF_S_MAX", 0.001)
    monkeypatch.setattr(children, "DEATHS_MAX", 1)

    async def work() -> None:
        program = f"import os; print('{LOADING}', os.getpid(), 'of 2 MiB', flush=True); raise SystemExit(9)"
        async with supervised(tmp_path, SystemPorts(), program) as core:
            with pytest.raises(Unusable, match="core spot ended with 9"):
                await core.until_ready()

    play(work)


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EMFILE, errno.ENOMEM])
def test_a_machine_that_can_start_no_process_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """A failed fork is logged, and is not the end of the supervision: the core comes back when the machine can."""
    real, failures = asyncio.create_subprocess_exec, [OSError(number, "no more of them")] * 2

    async def fails_first(*words: Any, **options: Any) -> Any:
        if failures:
            raise failures.pop()
        return await real(*words, **options)

    monkeypatch.setattr(asyncio, "create_subprocess_exec", fails_first)
    monkeypatch.setattr(children, "BACKOFF_S", 0.001)

    async def work() -> None:
        async with supervised(tmp_path, SystemPorts(), "print('ready', flush=True); input()") as core:
            await core.until_ready()

    with caplog.at_level(logging.ERROR, "bursar.children"):
        play(work)
    assert len([r for r in caplog.records if "can't be started: " in r.getMessage()]) == 2
    assert "no more of them; it is started again in" in caplog.text


def test_progress_is_told_now_and_then() -> None:
    clock, told = Clock(), list[str]()
    tell = Tell(clock.monotonic, told.append, 3.0)
    for done in range(1, 9):
        clock.now += 1.0
        tell.loading(Loading("/data/snap-7.snap", done * 2**20, 20 * 2**20))
    assert told == ["loading: 3 of 20 MiB (15 %), snap-7.snap", "loading: 6 of 20 MiB (30 %), snap-7.snap"]
