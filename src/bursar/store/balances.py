"""Sums of what is live, and the two disposable tables that keep some of them."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.store.accounts import LAST_PATH
from bursar.store.session import Table


class Balances(Table):
    """Sums of what is live, and the two disposable tables that keep some of them."""

    async def of(self, account: int) -> dict[int, tuple[int, int]]:
        """asset → (sum, number of postings), from the live table."""
        return {row[0]: (int(row[1]), row[2]) for row in await self._s.rows("balances", account)}

    async def of_many(self, accounts: Sequence[int]) -> dict[int, dict[int, int]]:
        """account → asset → sum, from the live table; an account without postings is missing."""
        found: dict[int, dict[int, int]] = {}
        for account, asset, total in await self._s.rows("balances_of_many", list(accounts)):
            found.setdefault(account, {})[asset] = int(total)
        return found

    async def cached(self, account: int) -> dict[int, int]:
        """asset → sum, from the cache."""
        return {row[0]: int(row[1]) for row in await self._s.rows("cached_balances", account)}

    async def cached_of_many(self, accounts: Sequence[int]) -> dict[int, dict[int, int]]:
        """account → asset → sum, from the cache; an account without any is missing."""
        found: dict[int, dict[int, int]] = {}
        for account, asset, total in await self._s.rows("cached_balances_of_many", list(accounts)):
            found.setdefault(account, {})[asset] = int(total)
        return found

    async def by_prefix(self, prefix: str) -> dict[int, int]:
        """asset → sum over an account and all below it."""
        rows = await self._s.rows("balances_by_prefix", prefix, prefix + ":", prefix + ":" + LAST_PATH)
        return {row[0]: int(row[1]) for row in rows}

    async def at(self, accounts: Sequence[int], at_us: int) -> dict[int, int]:
        """asset → sum over these accounts as it was at a moment."""
        return {row[0]: int(row[1]) for row in await self._s.rows("balances_at", list(accounts), at_us)}

    async def cached_accounts(self) -> set[int]:
        """Accounts that have been given a cache."""
        return {row[0] for row in await self._s.rows("cached_accounts")}

    async def add_cache(self, rows: Sequence[tuple[int, int, int, int]]) -> int:
        """(account, asset, part, amount)."""
        return await self._s.write("insert_cache", [(a, s, p, str(v)) for a, s, p, v in rows])

    async def start_cache(self, account: int, sums: dict[int, int]) -> None:
        """Give an account a cache of its own, beginning with what it has. In a transaction that bumped the rules."""
        await self._s.rows("clear_cache_of", account)
        await self.add_cache([(account, 0, 0, 0), *((account, asset, 0, amount) for asset, amount in sums.items())])

    async def fragmented(self, most: int) -> list[tuple[int, int]]:
        """Cached balances in more than so many parts."""
        return [(row[0], row[1]) for row in await self._s.rows("cache_crowds", most)]

    async def consolidate(self, account: int, asset: int) -> None:
        """Replace the parts of a cached balance by their sum. To be called in a transaction."""
        parts = await self._s.rows("take_cache_parts", account, asset)
        await self._s.write("add_to_cache", [(account, asset, str(sum(int(row[0]) for row in parts)))])

    async def clear_cache(self) -> None:
        """Forget the cache."""
        await self._s.rows("clear_cache")

    async def all_guarded(self) -> dict[tuple[int, int], int]:
        """Every guarded balance."""
        return {(r[0], r[1]): int(r[2]) for r in await self._s.rows("all_guarded")}

    async def put_guarded(self, rows: Sequence[tuple[int, int, int]]) -> int:
        """(account, asset, balance)."""
        return await self._s.write("put_guarded_balance", [(a, s, str(b)) for a, s, b in rows])

    async def drop_guarded(self, account: int) -> None:
        """Forget the guarded balance of an account that is no longer capped."""
        await self._s.rows("drop_guarded", account)

    async def clear_guarded(self) -> None:
        """Forget the guarded balances."""
        await self._s.rows("clear_guarded")
