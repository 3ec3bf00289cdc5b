"""The clock that due times are in: the database's where it has one (PostgreSQL), else this machine's (SQLite).

A clock that is set back leaves every due time, lease and back-off further ahead than it was meant to be. So a worker
samples the clock beside a monotonic one at each look, and where it has gone back, moves all that is due in the future
back by as much: nothing waits longer than it would have (L24). Between two samples the database's clock is continued by
the monotonic one, so that buckets of limits agree on many hosts whose own clocks do not.
"""

from __future__ import annotations

from bursar.store import Store

SET_BACK_MIN_US = 1_000_000  # less than that does not matter, and a slow answer must not look like it


class DatabaseClock:
    """As one process knows it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports = store.ports
        self._sampled_us: int | None = None
        self._sampled_at = 0.0  # monotonic, after the sample was taken

    async def set_back(self) -> int:
        """Sample the clock; by how many microseconds it was set back since the last time, 0 if it was not."""
        asked = self._ports.monotonic()
        now_us = await self._store.now_us()
        before_us, before_at = self._sampled_us, self._sampled_at
        self._sampled_us, self._sampled_at = now_us, self._ports.monotonic()
        if before_us is None:
            return 0
        least_us = before_us + int((asked - before_at) * 1e6)  # so much time has passed for certain
        return least_us - now_us if least_us - now_us > SET_BACK_MIN_US else 0

    def now_us(self) -> int:
        """What the clock says now, without asking."""
        if self._sampled_us is None or not self._store.has_clock:
            return self._ports.now_us()
        return self._sampled_us + int((self._ports.monotonic() - self._sampled_at) * 1e6)
