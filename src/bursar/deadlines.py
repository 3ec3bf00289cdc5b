"""Many deadlines, few timers: those that begin at about the same time and last equally long share one.

A busy process waits for thousands of answers at a time, nearly all of which come in time; a timer for each would cost
more than most answers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")
PARTS = 32  # a deadline is never early, and late by this part of its length at most
SHORTEST_S = 0.001

Pending = dict[Callable[[], None], None]  # in the order in which they came


class Deadlines:
    """Of one event loop."""

    def __init__(self) -> None:
        self._pending: dict[tuple[float, int], Pending] = {}

    def add(self, timeout_s: float, expire: Callable[[], None]) -> Pending:
        """Call `expire` after that time. A caller that is done before removes it from the returned dict."""
        loop = asyncio.get_running_loop()
        part_s = max(timeout_s, SHORTEST_S) / PARTS
        slot = (timeout_s, int(loop.time() / part_s))
        pending = self._pending.get(slot)
        if pending is None:
            pending = self._pending[slot] = {}
            loop.call_at((slot[1] + 1) * part_s + timeout_s, self._expire, slot)
        pending[expire] = None
        return pending

    async def keep(self, timeout_s: float, work: Awaitable[T]) -> T:
        """Do some work; `TimeoutError` if it takes longer, as `asyncio.timeout` has it."""
        deadline = Deadline(self, timeout_s)
        try:
            return await deadline.keep(work)
        finally:
            deadline.end()

    async def wait(self, task: asyncio.Task[Any], timeout_s: float) -> None:
        """Until a task is over, but no longer than that. It is never cancelled."""
        deadline = Deadline(self, timeout_s)
        try:
            await deadline.wait(task)
        finally:
            deadline.end()

    def begin(self, timeout_s: float) -> Deadline:
        """A deadline for one thing after the other, never later than that."""
        return Deadline(self, timeout_s * PARTS / (PARTS + 1))

    def _expire(self, slot: tuple[float, int]) -> None:
        pending = self._pending.pop(slot)
        for expire in list(pending):  # each by itself: one that fails must not keep the others waiting
            asyncio.get_running_loop().call_soon(_tell, pending, expire)


class Deadline:
    """One deadline for all the work on one request. `end` it when no caller waits any more."""

    def __init__(self, deadlines: Deadlines, timeout_s: float) -> None:
        self.is_over = False
        self._stop: Callable[[], None] | None = None  # interrupts the present wait
        self._pending = deadlines.add(timeout_s, self._expire)

    async def keep(self, work: Awaitable[T]) -> T:
        """Do some work; `TimeoutError` if it takes longer."""
        async with asyncio.timeout(None) as limit:
            self._stop = partial(_end, limit)
            if self.is_over:
                self._stop()
            try:
                return await work
            finally:
                self._stop = None

    async def wait(self, task: asyncio.Task[Any]) -> None:
        """Until a task is over, but no longer. It is never cancelled."""
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def stop(*_: object) -> None:
            if not over.done():
                over.set_result(None)

        if self.is_over:
            return
        task.add_done_callback(stop)
        self._stop = stop
        try:
            await over
        finally:
            self._stop = None
            task.remove_done_callback(stop)

    def end(self) -> None:
        """It is not needed any more."""
        self._pending.pop(self._expire, None)

    def _expire(self) -> None:
        self.is_over = True
        if self._stop is not None:
            self._stop()


def _tell(pending: Pending, expire: Callable[[], None]) -> None:
    if expire in pending:  # the one before may have been the end of others, too
        expire()


def _end(limit: asyncio.Timeout) -> None:
    limit.reschedule(asyncio.get_running_loop().time())
