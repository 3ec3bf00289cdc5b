"""Every door out of the process: clock, ids, randomness, files, threads.

All other modules are handed a `Ports` and touch the outside world through it alone (a ruff ban holds that), so that
the simulator can put a virtual clock, seeded randomness and crashing "threads" behind the same doors. Sockets of
PostgreSQL are the one exception: asyncpg opens its own, which is why that store stays outside the simulator.

A *port call* is anything that leaves the process: here that is `Lane.run` and `Ports.sleep`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Lane(Protocol):
    """One thread: what is given to it runs in order, one at a time, off the event loop."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return what it returns. Cancelling the caller never stops work that has begun."""
        ...

    def close(self) -> None:
        """Let the thread end once its queue is empty."""
        ...


class Ports(Protocol):
    """The doors. One object per process; the simulator makes one per incarnation."""

    def now_us(self) -> int:
        """Wall clock: microseconds since 1970 UTC. May jump; only ever stored or shown, never trusted for order."""
        ...

    def monotonic(self) -> float:
        """Seconds that never go back, for measuring and for deadlines."""
        ...

    def random(self) -> float:
        """Uniform in [0, 1): jitter. Never for anything that must be unique or secret."""
        ...

    def token(self) -> str:
        """32 unguessable hexadecimal digits: unique across processes without asking anybody."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking others."""
        ...

    def lane(self, name: str) -> Lane:
        """A new thread of its own."""
        ...

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        """Open a SQLite file in autocommit mode; the caller sets pragmas and begins transactions itself."""
        ...


class ThreadLane:
    """A lane on a real thread. Leaner than an executor: one queue in, one wake-up of the loop out."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[Any], Callable[[], Any]] | None]
        self._queue = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"bursar-{name}", daemon=True)
        self._thread.start()

    async def run(self, work: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[T] = loop.create_future()
        self._queue.put((loop, reply, work))
        return await reply

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (asked := self._queue.get()) is not None:
            loop, reply, work = asked
            value, error = None, None
            try:
                value = work()
            except BaseException as raised:
                error = raised
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits for the reply any more
                loop.call_soon_threadsafe(_reply, reply, value, error)
            del asked, work, value, error, reply


def _reply(reply: asyncio.Future[Any], value: Any, error: BaseException | None) -> None:
    if reply.done():
        return  # the caller was cancelled meanwhile: the work has happened, and nobody asks
    if error is None:
        reply.set_result(value)
    else:
        reply.set_exception(error)


class SystemPorts:
    """The real machine."""

    def now_us(self) -> int:
        return time.time_ns() // 1000

    def monotonic(self) -> float:
        return time.monotonic()

    def random(self) -> float:
        return random.random()

    def token(self) -> str:
        return secrets.token_hex(16)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def lane(self, name: str) -> Lane:
        return ThreadLane(name)

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        uri = Path(path).absolute().as_uri() + ("?mode=ro" if read_only else "?mode=rwc")
        # autocommit: every BEGIN and COMMIT in this code base is written out, none is implied by the driver.
        return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False, cached_statements=256)
