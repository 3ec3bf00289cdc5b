"""Connections to PostgreSQL that outlive the test that made them, in one event loop that outlives it too.

A new connection costs the server a process with empty caches, in which every statement is parsed and planned as if for
the first time: together more than all else that most tests do. So a store that closes leaves its idle connections to
the next test, on the databases that tests share (`Shared`) and nowhere else. What the next test gets is reset as a pool
resets what it hands on; what it asks of a new connection (settings, and that they hold) happens again. A connection
that is dropped, in a transaction, or in the middle of a statement ends for real.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Coroutine
from contextvars import copy_context
from typing import Any, Final, TypeVar

import asyncpg

from bursar.store.postgres.connecting import Connector, Host
from bursar.store.postgres.store import PostgresStore

T = TypeVar("T")
RESET_S: Final = 5.0

Key = tuple[str, bool, float]  # address, and what limits a statement in this process: that can't be changed later


class Kept(asyncpg.Connection):
    """A connection that is put aside where others are closed, once nothing is open on it."""

    __slots__ = ()

    _loop: asyncio.AbstractEventLoop
    _pool_holder: Any

    async def close(self, *, timeout: float | None = None) -> None:
        """Leave it to the next test, if it is fit for that."""
        kept = WARM.key_of.get(self)
        if kept is None or self._loop is not WARM.loop() or self.is_closed() or self.is_in_transaction():
            await super().close(timeout=timeout)
            return
        # What asyncpg's own `_cleanup` does for whoever had it, but for the statements, which stay prepared.
        holder, self._pool_holder = self._pool_holder and self._pool_holder(), None
        if holder is not None and holder._con is self:
            holder._release_on_close()
        WARM.idle[kept].append(self)


class Warm:
    """The loop, and what waits for the next test."""

    def __init__(self) -> None:
        self.addresses: set[str] = set()  # databases whose connections are kept
        self.idle: dict[Key, list[Kept]] = defaultdict(list)
        self.key_of: dict[asyncpg.Connection, Key] = {}
        self._runner = asyncio.Runner()

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop to which all of them belong."""
        return self._runner.get_loop()

    def run(self, body: Coroutine[Any, Any, T]) -> T:
        """As `asyncio.run`, in the loop that stays: whatever is still running afterwards is cancelled."""
        return self._runner.run(_alone(body), context=copy_context())

    def pids(self) -> list[int]:
        """The server's processes that wait."""
        return [connection.get_server_pid() for waiting in self.idle.values() for connection in waiting]

    async def take(self, key: Key) -> Kept | None:
        """One that waits, as good as new."""
        while self.idle[key] and asyncio.get_running_loop() is self.loop():
            connection = self.idle[key].pop()
            with contextlib.suppress(TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                await connection.reset(timeout=RESET_S)
                return connection
            connection.terminate()  # the test has ended it, or its server
            del self.key_of[connection]
        return None

    def keep(self, connection: asyncpg.Connection, key: Key) -> asyncpg.Connection:
        """Let a new connection be put aside one day."""
        self.key_of[connection] = key
        connection.__class__ = Kept
        return connection


async def _alone(body: Coroutine[Any, Any, T]) -> T:
    """Run to the end, then cancel what was left running."""
    try:
        return await body
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


WARM: Final = Warm()

_open, _close = Connector._open, PostgresStore.close


async def open_or_take(self: Connector, host: Host | None, timed: bool) -> asyncpg.Connection:
    """In the place of `Connector._open`."""
    if self._url not in WARM.addresses:
        return await _open(self, host, timed)
    key = (self._url, timed, self._options.statement_s)
    return await WARM.take(key) or WARM.keep(await _open(self, host, timed), key)


async def close_or_keep(self: PostgresStore) -> None:
    """In the place of `PostgresStore.close`, which drops the connections of its lanes: those that nobody uses close."""
    for lane, connection in self._lanes.items():
        if connection is not None and not self._locks[lane].locked() and self.url in WARM.addresses:
            self._lanes[lane] = None
            await connection.close()
    await _close(self)


def keep_warm(url: str) -> None:
    """Keep the connections to a database from now on."""
    Connector._open, PostgresStore.close = open_or_take, close_or_keep  # type: ignore[method-assign]
    WARM.addresses.add(url)
