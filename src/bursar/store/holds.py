"""The table of holds."""

from __future__ import annotations

from collections.abc import Iterable

from bursar.model.accounts import Account
from bursar.model.entries import HoldState
from bursar.model.records import HoldRow
from bursar.store.columns import Row
from bursar.store.rows import account_of
from bursar.store.session import Table


class Holds(Table):
    """Holds as they stand."""

    def _hold(self, row: Row) -> HoldRow:
        id_, account, asset, amount, remaining, posting, state, owner, expires_us, lasts_us = row[:10]
        return HoldRow(
            id=id_,
            account=account,
            asset=asset,
            amount=self._s.minor(amount),
            remaining=self._s.minor(remaining),
            posting=posting,
            state=HoldState(state),
            owner=owner,
            expires_us=expires_us,
            lasts_us=lasts_us,
        )

    async def get(self, ids: Iterable[int]) -> list[tuple[HoldRow, Account]]:
        """Holds by number, each with its account."""
        return [(self._hold(row), account_of(row[10:])) for row in await self._s.rows("holds_by_id", list(ids))]

    async def open_of(self, account: int) -> list[HoldRow]:
        """Open holds of an account."""
        return await self._all(self._hold, "holds_of_account", account)

    async def due(self, limit: int) -> list[HoldRow]:
        """Open holds whose time is up."""
        return await self._all(self._hold, "holds_due", limit)

    async def clock_us(self) -> int:
        """The clock that decides whose time is up."""
        return int(await self._one("clock"))
