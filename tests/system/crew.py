"""Real processes: each runs one async function with a Bursar of its own and reports through a pipe.

Forked, not spawned: a racer that takes half a second to import Python is no racer. The function starts when all of the
crew stand at the barrier.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from bursar import BursarError, ExternalAccount, NoOverdraft
from bursar import open as open_bursar
from bursar.model.accounts import Policy

ASSET = "USDT"
BANK = "bank"
WAIT_S = 60.0

_fork = multiprocessing.get_context("fork")
Work = Callable[..., Coroutine[Any, Any, Any]]


@dataclass
class Member:
    """One process."""

    process: BaseProcess
    pipe: Connection

    def get(self, timeout_s: float = WAIT_S) -> Any:
        """The next thing it reports."""
        assert self.pipe.poll(timeout_s), "the process reported nothing in time"
        return self.pipe.recv()

    def result(self) -> Any:
        """What its function returned; what it reported on the way is dropped."""
        while True:
            kind, value = self.get()
            if kind == "failed":
                raise AssertionError(value)
            if kind == "returned":
                self.process.join(WAIT_S)
                return value

    def kill(self) -> None:
        """kill -9."""
        assert self.process.pid is not None
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)

    def reported(self) -> list[Any]:
        """All that it had reported when it ended."""
        found = []
        try:
            while self.pipe.poll(0):
                found.append(self.pipe.recv()[1])
        except EOFError:
            pass
        return found


def _run(work: Work, args: tuple[Any, ...], barrier: Any, pipe: Connection) -> None:
    try:
        barrier.wait(WAIT_S)
        pipe.send(("returned", asyncio.run(work(lambda value: pipe.send(("said", value)), *args))))
    except BaseException as error:
        pipe.send(("failed", repr(error)))


@contextmanager
def crew(*works: tuple[Any, ...]) -> Iterator[list[Member]]:
    """Processes, each given as a function and its arguments; the first argument it gets is how to report."""
    barrier = _fork.Barrier(len(works))
    members = []
    try:
        for work, *args in works:
            ours, theirs = _fork.Pipe(duplex=False)
            process = _fork.Process(target=_run, args=(work, tuple(args), barrier, theirs), daemon=True)
            process.start()
            theirs.close()
            members.append(Member(process, ours))
        yield members
    finally:
        for member in members:
            if member.process.is_alive():
                member.kill()
            member.pipe.close()


async def furnish(url: str, *accounts: str, policy: Policy | None = None) -> None:
    """An asset, the bank, and accounts."""
    async with open_bursar(url) as bursar:
        await bursar.ledger.create_asset(ASSET, 2)
        await bursar.ledger.create_account(BANK, policy=ExternalAccount())
        for account in accounts:
            await bursar.ledger.create_account(account, policy=policy or NoOverdraft())


async def outcome(work: Coroutine[Any, Any, Any]) -> Any:
    """The result, or the code of the error."""
    try:
        return await work
    except BursarError as error:
        assert "\n" not in str(error)
        return error.code


def until(condition: Callable[[], bool], timeout_s: float = WAIT_S) -> None:
    """Wait for something to become true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.005)  # between two looks at a real process, until a deadline
