"""Tables about trading cores: the ledger's identity, which core stands behind a rail, floors.

And high-water marks: the highest sequence of a peer's own log that anything in this database relies on (T33, W33).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from bursar.store.session import Table


class CoreRow(msgspec.Struct, frozen=True):
    """The core behind a rail, as this database knows it."""

    rail: str
    identity: str
    room: int  # floors that it was asked for, or is about to be (T32)
    forget: int
    compared: int  # the sequence of its log up to which every operation has its record here
    pruned_us: int | None  # when the core last took them
    sequence: int  # the highest of its log that anything here relies on (T33)


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


class Cores(Table):
    """Cores that this ledger works with."""

    async def identity(self) -> str:
        """Who this ledger is; "" before its first contact with a core."""
        return str(await self._one("ledger_identity") or "")

    async def make_identity(self, token: str) -> str:
        """Who this ledger is; this token, if it had no identity yet."""
        await self._s.rows("make_ledger_identity", token)
        return await self.identity()

    async def get(self, rail: str) -> CoreRow | None:
        """The core behind a rail; None before its first contact."""
        return await self._first(lambda row: CoreRow(*row), "core", rail)

    async def bind(self, rail: str, identity: str) -> bool:
        """Whether the rail was bound now: it was free, and the core was no other rail's."""
        return await self._one("bind_core", rail, identity) is not None

    async def rebind(self, rail: str, identity: str, was: str) -> bool:
        """Put another core behind a rail, if it was this one until now. In a transaction: marks go with it."""
        if await self._one("rebind_core", rail, identity, was) is None:
            return False
        await Marks(self._s).forget(rail)
        return True

    async def raise_floors(self, rail: str, room: int, forget: int) -> tuple[int, int]:
        """Write floors down before the core is asked for them; returns the higher of these and what was there."""
        rows = await self._s.rows("raise_floors", rail, room, forget)
        return (rows[0][0], rows[0][1]) if rows else (0, 0)

    async def forgotten(self) -> int:
        """The highest id below which some core has forgotten all, or is about to."""
        return int(await self._one("forgotten"))

    async def floors_taken(self, rail: str) -> None:
        """The core has taken them."""
        await self._s.rows("floors_taken", rail)

    async def compared_to(self, rail: str, sequence: int) -> None:
        """All of a core's operations up to a sequence have their records here."""
        await self._s.rows("compared_to", rail, sequence)

    async def oldest_open(self, flow: str, prefix: str) -> tuple[int | None, int]:
        """The smallest number among the ids of open records, and the time in microseconds by the database's clock."""
        oldest, now_us = (await self._s.rows("oldest_open_id", flow, prefix))[0]
        return None if oldest is None else int(oldest), now_us

    async def forced(self, flow: str) -> list[str]:
        """The ids of records that operators forced, or wanted to."""
        return sorted(str(row[0]) for row in await self._s.rows("forced_ids", flow))

    async def known(self, flow: str, ids: Sequence[str]) -> set[str]:
        """Which of these ids are records of a flow."""
        return {str(row[0]) for row in await self._s.rows("known_ids", flow, list(ids))}
