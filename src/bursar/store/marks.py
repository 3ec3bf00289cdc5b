"""High-water marks: the highest sequence of a peer's own log that anything in this database relies on (T33, W33)."""

from __future__ import annotations

from bursar.store.session import Table


class Marks(Table):
    """One row per peer and writer; the highest of a peer's rows counts. They are raised by the moves that rely on them.

    A trading core's peer is its rail. Other peers have a colon in their names (`signer:hot`), which no rail has.
    """

    async def highest(self, peer: str) -> int:
        """The highest sequence known of a peer; 0 for none."""
        return int(await self._one("high_water", peer))

    async def forget(self, peer: str) -> None:
        """Operators put another one in its place: what was known of the old one says nothing about it."""
        await self._s.rows("forget_high_water", peer)
