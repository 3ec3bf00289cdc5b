"""Tables of the rules: assets, books, and the versions of accounts."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bursar.model.accounts import Account, Book, encode_policy
from bursar.model.money import Asset
from bursar.model.records import StoredVersion
from bursar.store.rows import account_of, asset_of, book_of
from bursar.store.session import Table

LAST_PATH = "\x7f"  # sorts after every character a path may have


class Rules(Table):
    """The one row that guards status, policy and book of all accounts; assets and books, which are few."""

    async def generation(self) -> int:
        """The current generation."""
        return int(await self._one("generation"))

    async def share(self) -> int:
        """Hold the rules as they are until the transaction ends; others may do so too."""
        return int(await self._one("share_rules"))

    async def bump(self, *, soon: bool = False) -> int:
        """A rule changes: commits validated before this fail. Returns the new generation. `soon`: or not at all."""
        return int(await self._one("bump_rules_soon" if soon else "bump_rules"))

    async def assets(self) -> dict[str, Asset]:
        """All assets by code."""
        return {row[1]: asset_of(row) for row in await self._s.rows("assets")}

    async def create_asset(self, asset: Asset) -> int:
        """1 if it is new, 0 if the code is taken."""
        row = (asset.code, asset.precision, str(asset.min_transfer), str(asset.max_transfer), asset.status.value)
        return await self._s.write("insert_asset", [(*row, asset.internal_transfer_enabled)])

    async def update_asset(self, asset: Asset) -> int:
        """Limits and status."""
        row = (asset.code, str(asset.min_transfer), str(asset.max_transfer), asset.status.value)
        return await self._s.write("update_asset", [(*row, asset.internal_transfer_enabled)])

    async def books(self) -> dict[str, Book]:
        """All books by name."""
        return {row[1]: book_of(row) for row in await self._s.rows("books")}

    async def create_book(self, book: Book) -> int:
        """1 if it is new, 0 if the name is taken."""
        lists = [msgspec.json.encode(list(names)).decode() for names in (book.assets, book.accounts)]
        return await self._s.write("insert_book", [(book.name, *lists)])


class Accounts(Table):
    """Versions of accounts: append only, without gaps."""

    async def take_number(self) -> int:
        """A number not in use."""
        return (await self.take_numbers(1))[0]

    async def take_numbers(self, count: int) -> list[int]:
        """So many numbers not in use."""
        rows = await self._s.rows("take_account_numbers", count)
        return [number for first, last in rows for number in range(first, last + 1)]

    async def append(self, *accounts: Account) -> int:
        """New versions; how many were written. Not one that is there already, or does not follow on the newest."""
        rows = [(a.id, a.version, a.path, encode_policy(a.policy), a.status.value, a.book) for a in accounts]
        return await self._s.write("insert_account", rows)

    async def heads(self, paths: Iterable[str]) -> dict[str, Account]:
        """Newest versions by path; the missing are missing."""
        return {row[1]: account_of(row) for row in await self._s.rows("heads_by_path", list(paths))}

    async def heads_by_id(self, ids: Iterable[int]) -> dict[int, Account]:
        """Newest versions by number."""
        return {row[0]: account_of(row) for row in await self._s.rows("heads_by_id", list(ids))}

    async def in_transit(self, account: int) -> int:
        """How many postings in transit came from it and may have to go back."""
        return int(await self._one("in_transit_of", account))

    async def holding(self, prefix: str) -> set[str]:
        """Which of an account and all below it have anything, by their cached balances (system accounts have those)."""
        rows = await self._s.rows("holding_accounts", prefix, prefix + ":", prefix + ":" + LAST_PATH)
        return {path for path, total in rows if int(total)}

    async def versions(self, wanted: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Account]:
        """Exact versions by (number, version)."""
        pairs = list(wanted)
        rows = await self._s.rows("versions", [i for i, _ in pairs], [v for _, v in pairs])
        return {(row[0], row[2]): account_of(row) for row in rows}

    async def history(self, path: str) -> list[StoredVersion]:
        """Every version, oldest first."""
        rows = await self._s.rows("account_history", path)
        return [StoredVersion(account=account_of(row), at_us=row[6]) for row in rows]

    async def list(self, prefix: str = "", after: str = "", limit: int = 100) -> list[Account]:
        """Heads by path, after one; with `prefix`, of an account and all below it."""
        found: list[Account] = []
        if prefix and after < prefix and limit:
            found = list((await self.heads([prefix])).values())
        below = prefix and prefix + ":"
        rows = await self._s.rows("list_accounts", after, below, below + LAST_PATH, limit - len(found))
        return found + [account_of(row) for row in rows]
