"""Time, and the ids that are made of it.

Due times are in the database's clock where it has one (PostgreSQL), else in this machine's (SQLite). A clock that is
set back leaves every due time, lease and back-off further ahead than it was meant to be. So a worker samples the clock
beside a monotonic one at each look, and where it has gone back, moves all that is due in the future back by as much:
nothing waits longer than it would have (L24). Between two samples the database's clock is continued by the monotonic
one, so that buckets of limits agree on many hosts whose own clocks do not.

Snowflakes are ids that are numbers, rise with time, and never repeat, made without asking the database each time:
41 bits of milliseconds since 2020, 10 bits of node, 12 bits of count. The node number is a leased row, and its holder's
ids begin after all that any holder before can have made. A clock that is set back does not matter: the last moment is
used on, count by count, until the clock has caught up. The database's unique index has the last word (L6).
"""

from __future__ import annotations

from bursar.model.errors import Conflict
from bursar.store import Store

SET_BACK_MIN_US = 1_000_000  # less than that does not matter, and a slow answer must not look like it
EPOCH_US = 1_577_836_800_000_000  # 2020-01-01T00:00:00Z
NODE_BITS, COUNT_BITS = 10, 12
LEASE_S = 60.0


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


def first_id_at(us: int) -> int:
    """The smallest id that can be made at a moment or later."""
    return max(1, (max(0, us - EPOCH_US) // 1000) << (NODE_BITS + COUNT_BITS))


def made_at_us(id_: int) -> int:
    """The moment that an id carries."""
    return (id_ >> (NODE_BITS + COUNT_BITS)) * 1000 + EPOCH_US


class Snowflakes:
    """One per process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ports = store.ports
        self._node = -1
        self._holder = self._ports.token()
        self._last = 0  # milliseconds << COUNT_BITS | count, of the last id
        self._renewed = 0.0

    async def next(self) -> int:
        """An id that was never used."""
        if self._node < 0 or self._ports.monotonic() - self._renewed > LEASE_S / 3:
            await self._hold()
        now = max(0, self._ports.now_us() - EPOCH_US) // 1000
        self._last = max(self._last + 1, now << COUNT_BITS)
        moment, count = self._last >> COUNT_BITS, self._last & ((1 << COUNT_BITS) - 1)
        return moment << (NODE_BITS + COUNT_BITS) | self._node << COUNT_BITS | count

    def rise_above(self, id_: int) -> None:
        """Make no id from now on that is not later than this one: a clock of ours that is behind does not matter."""
        self._last = max(self._last, ((id_ >> (NODE_BITS + COUNT_BITS)) + 1) << COUNT_BITS)

    async def _hold(self) -> None:
        """Keep our number; or take another, if another process took ours while we slept."""
        nodes = self._store.single().nodes
        asked, lease_us = self._ports.monotonic(), int(LEASE_S * 1e6)
        if self._node < 0 or not await nodes.renew(self._node, self._holder, lease_us):
            found = await nodes.lease(self._holder, lease_us)
            if found is None:
                raise Conflict("all node numbers are taken: too many processes", 1)
            self._node, since_us = found
            self._last = max(self._last, (max(0, since_us - EPOCH_US) // 1000 + 1) << COUNT_BITS)
        self._renewed = asked
