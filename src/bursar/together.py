"""Questions that are asked at about the same time, answered together: one look at the other side for all of them.

A look begins after everything that it answers was asked, so that no answer is older than its question. Questions that
come while a look is under way wait for the next one. A lone question waits for no other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Together(Generic[K, V]):
    """Questions of one kind, by key. `look` answers at most so many different keys; what is missing is None."""

    def __init__(self, look: Callable[[list[K]], Awaitable[Mapping[K, V]]], most: int = 500) -> None:
        self._look = look
        self._most = most
        self._waiting: dict[K, asyncio.Future[V | None]] = {}
        self._running: asyncio.Task[None] | None = None

    async def ask(self, key: K) -> V | None:
        """The answer of the next look. If the look fails, so does every question of it."""
        if self._running is None or self._running.done():
            self._waiting = {}  # a task that was cancelled before it began has left some, of an event loop that is gone
            self._running = asyncio.get_running_loop().create_task(self._run(), name="together")
        answer = self._waiting.get(key)
        if answer is None:
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
        return await asyncio.shield(answer)  # a caller that gives up leaves the others their answer

    async def _run(self) -> None:
        """Look, until no question waits."""
        taken: dict[K, asyncio.Future[V | None]] = {}
        try:
            while self._waiting:
                keys = list(self._waiting)[: self._most]
                taken = {key: self._waiting.pop(key) for key in keys}
                await self._answer(taken)
        finally:
            for answer in (*taken.values(), *self._waiting.values()):
                answer.cancel()  # of no effect, unless this task was cancelled: its process ends

    async def _answer(self, asked: Mapping[K, asyncio.Future[V | None]]) -> None:
        try:
            found = await self._look(list(asked))
        except asyncio.CancelledError:
            raise
        except (
            BaseException
        ) as error:  # whatever it is, it goes on to those that asked: each is as if it had looked itself
            for answer in asked.values():
                answer.set_exception(error)
                answer.exception()  # each caller raises it; one without callers is no failure of its own
        else:
            for key, answer in asked.items():
                answer.set_result(found.get(key))
