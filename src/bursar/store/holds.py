"""The table of holds."""

from __future__ import annotations

from collections.abc import Iterable

from bursar.model.accounts import Account
from bursar.model.records import HoldRow
from bursar.store.columns import reader
from bursar.store.rows import account_of
from bursar.store.session import Table

_hold = reader("hold", HoldRow)
WIDTH = len(HoldRow.__struct_fields__)


class Holds(Table):
    """Holds as they stand."""

    async def get(self, ids: Iterable[int]) -> list[tuple[HoldRow, Account]]:
        """Holds by number, each with its account."""
        return [(_hold(row[:WIDTH]), account_of(row[WIDTH:])) for row in await self._s.rows("holds_by_id", list(ids))]

    async def open_of(self, account: int) -> list[HoldRow]:
        """Open holds of an account."""
        return await self._all(_hold, "holds_of_account", account)

    async def due(self, limit: int) -> list[HoldRow]:
        """Open holds whose time is up."""
        return await self._all(_hold, "holds_due", limit)

    async def clock_us(self) -> int:
        """The clock that decides whose time is up."""
        return int(await self._one("clock"))
