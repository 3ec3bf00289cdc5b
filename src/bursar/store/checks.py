"""What audit asks of all tables."""

from __future__ import annotations

from collections.abc import Iterable

from bursar.store.columns import minor_of, text_of
from bursar.store.session import Table


class Checks(Table):
    """What audit asks. Rows are evidence of something broken; none is good."""

    async def asset_sums(self) -> dict[int, int]:
        """I1."""
        return {row[0]: int(row[1]) for row in await self._s.rows("asset_sums")}

    async def ids(self, name: str, limit: int) -> list[int]:
        """Numbers of rows that break an invariant: `stray_spends`, `not_live`, `wrongly_live`, `stray_postings`."""
        return [row[0] for row in await self._s.rows(name, limit)]

    async def spends(self) -> int:
        """How many spends there are."""
        return int(await self._one("count_spends"))

    async def cached_sums(self) -> list[tuple[int, int, int]]:
        """(account, asset, sum) of all cached balances."""
        return [(r[0], r[1], int(r[2])) for r in await self._s.rows("cached_sums")]

    async def open_holds(self, after: int, limit: int) -> list[tuple[int, int, int, int, int, int]]:
        """(hold, asset, remaining, posting, account, amount) of open holds, by number, after one."""
        rows = await self._s.rows("open_holds", after, limit)
        return [(r[0], r[1], minor_of(r[2]), r[3], r[4], minor_of(r[5])) for r in rows]

    async def owned_holds(self, after: int, limit: int) -> list[tuple[int, int, int, int, str]]:
        """(hold, asset, remaining, posting, owner) of open holds that records own, by number, after one."""
        rows = await self._s.rows("owned_holds", after, limit)
        return [(r[0], r[1], minor_of(r[2]), r[3], r[4]) for r in rows]

    async def involved(self, accounts: Iterable[int], first: int, last: int) -> set[tuple[int, int]]:
        """What stands in the histories of accounts between two envelopes: (account, envelope)."""
        return {(r[0], r[1]) for r in await self._s.rows("involved_between", list(accounts), first, last)}

    async def histories(self) -> int:
        """How many lines all histories have."""
        return int(await self._one("count_involved"))

    async def transit(self, after: int, limit: int) -> list[tuple[int, int, int, str, str]]:
        """(posting, asset, amount, scope, key) of what lies in transit accounts, by number, after one."""
        rows = await self._s.rows("transit_postings", after, limit)
        return [(r[0], r[1], minor_of(r[2]), r[3], r[4]) for r in rows]

    async def records_in_transit(self, after: int, limit: int) -> list[tuple[int, str, str, str, int, bool]]:
        """(number, flow, id, state, posting, open) of records that own a posting in transit, by number, after one."""
        rows = await self._s.rows("records_in_transit", after, limit)
        return [(r[0], text_of(r[1]), text_of(r[2]), text_of(r[3]), r[4], bool(r[5])) for r in rows]

    async def open_records(self, after: int, limit: int) -> list[tuple[int, str]]:
        """(number, id) of records that are driven, by number, after one."""
        return [(r[0], text_of(r[1])) for r in await self._s.rows("open_records", after, limit)]

    async def operations(self) -> int:
        """How many answers are remembered."""
        return int(await self._one("count_operations"))

    async def counts(self) -> dict[str, int]:
        """How much there is."""
        row = (await self._s.rows("counts"))[0]
        return dict(zip(("accounts", "envelopes", "postings", "live", "events"), map(int, row), strict=True))
