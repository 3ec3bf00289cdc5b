"""Whether the database takes writes: not whether it answers. A replica, a full disk and a leader whose standbys are
gone all answer reads.

A heartbeat is written, durably, when a caller asks; at most once in a while, and one at a time, however many ask (in
between it is enough that reads are answered). An asker waits only so long: a commit that hangs is the very thing to be
reported, and goes on to its own end meanwhile.
"""

from __future__ import annotations

import asyncio

from bursar.model.errors import BursarError, DatabaseUnavailable, OutcomeUnknown
from bursar.store.protocol import Store

FRESH_S = 2.0  # how old an answer may be
OK = "ok"
STUCK = "is its disk stuck, or a synchronous standby missing?"


class Probe:
    """One per process."""

    def __init__(self, store: Store, worker: str) -> None:
        self._store = store
        self._worker = worker
        self._seen: tuple[float, BursarError | None] | None = None  # when, and what was in the way
        self._asking: asyncio.Task[None] | None = None

    async def look(self, timeout_s: float) -> str:
        """`ok`, or the code of what is in the way; never after more than that time."""
        try:
            await self.require(timeout_s)
        except BursarError as error:
            return error.code
        except TimeoutError:
            return f"no write was committed within {timeout_s:g} s"
        return OK

    async def require(self, timeout_s: float) -> None:
        """Raise what is in the way, or `TimeoutError`."""
        now = self._store.ports.monotonic()
        if self._asking is None and self._seen is not None and now - self._seen[0] < FRESH_S:
            if self._seen[1] is not None:
                raise self._seen[1]
            async with asyncio.timeout(timeout_s):
                await self._store.read.pauses.list()
            return
        if self._asking is None:
            self._seen = None
            self._asking = asyncio.get_running_loop().create_task(self._ask(), name="bursar-probe")
        await asyncio.wait([self._asking], timeout=timeout_s)
        if self._seen is None:
            raise TimeoutError
        if self._seen[1] is not None:
            raise self._seen[1]

    def close(self) -> None:
        """Wait for no answer any more."""
        if self._asking is not None:
            self._asking.cancel()

    async def _ask(self) -> None:
        found: BursarError | None = None
        try:
            await self._store.beat(self._worker)
        except OutcomeUnknown as error:  # whether it was written does not matter, but that there was no answer
            found = DatabaseUnavailable(f"a write got no answer ({error.why}): {STUCK}")
        except BursarError as error:
            found = error
        except Exception as error:  # whatever it is, it can't write
            found = DatabaseUnavailable(f"{type(error).__name__}: {error}")
        finally:
            self._asking = None
        self._seen = (self._store.ports.monotonic(), found)
