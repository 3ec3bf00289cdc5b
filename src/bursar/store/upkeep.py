"""Tables beside the value: disposable balances, the outbox, holds, commits under way, and what audit asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bursar.model.accounts import Account
from bursar.model.entries import HoldState
from bursar.model.records import Event, EventKind, HoldRow
from bursar.store.columns import Row, text_of
from bursar.store.rows import account_of, parse_cursor
from bursar.store.session import Table
from bursar.store.value import LAST_PATH


class Balances(Table):
    """Sums of what is live, and the two disposable tables that keep some of them."""

    async def of(self, account: int) -> dict[int, tuple[int, int]]:
        """asset → (sum, number of postings), from the live table."""
        return {row[0]: (int(row[1]), row[2]) for row in await self._s.rows("balances", account)}

    async def cached(self, account: int) -> dict[int, int]:
        """asset → sum, from the cache."""
        return {row[0]: int(row[1]) for row in await self._s.rows("cached_balances", account)}

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
        """Give an account a cache of its own, beginning with what it has. In a unit that has bumped the rules."""
        await self._s.rows("clear_cache_of", account)
        await self.add_cache([(account, 0, 0, 0), *((account, asset, 0, amount) for asset, amount in sums.items())])

    async def fragmented(self, most: int) -> list[tuple[int, int]]:
        """Cached balances in more than so many parts."""
        return [(row[0], row[1]) for row in await self._s.rows("cache_crowds", most)]

    async def consolidate(self, account: int, asset: int) -> None:
        """Replace the parts of a cached balance by their sum. To be called in a unit."""
        parts = await self._s.rows("take_cache_parts", account, asset)
        await self._s.write("add_to_cache", [(account, asset, str(sum(int(row[0]) for row in parts)))])

    async def clear_cache(self) -> None:
        """Forget the cache."""
        await self._s.rows("clear_cache")

    async def all_heads(self) -> dict[tuple[int, int], int]:
        """Every guarded balance."""
        return {(r[0], r[1]): int(r[2]) for r in await self._s.rows("all_heads")}

    async def put_heads(self, rows: Sequence[tuple[int, int, int]]) -> int:
        """(account, asset, balance)."""
        return await self._s.write("put_guarded_balance", [(a, s, str(b)) for a, s, b in rows])

    async def drop_head(self, account: int) -> None:
        """Forget the guarded balance of an account that is no longer capped."""
        await self._s.rows("drop_head", account)

    async def clear_heads(self) -> None:
        """Forget the guarded balances."""
        await self._s.rows("clear_heads")


class Events(Table):
    """The outbox."""

    async def append(self, kind: EventKind, subject: int, version: int = 0) -> int:
        """1, or 0 if that event is there already."""
        return await self._s.write("insert_event", [(int(kind), subject, version)])

    async def raise_epoch(self) -> int:
        """The database was restored: what is written from now on comes after every cursor that there is."""
        return int(await self._one("raise_epoch"))

    async def since(self, cursor: str, limit: int) -> list[Event]:
        """Events after a cursor, in order; never one that another could still come before."""
        epoch, xid, seq = parse_cursor(cursor)
        rows = await self._s.rows("events_since", epoch, xid, seq, limit)
        return [
            Event(
                cursor=f"{epoch}.{xid}.{seq}", kind=EventKind(kind), subject=subject, version=version, name=name or ""
            )
            for epoch, xid, seq, kind, subject, version, name in rows
        ]


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
        return [(r[0], r[1], self._s.minor(r[2]), r[3], r[4], self._s.minor(r[5])) for r in rows]

    async def owned_holds(self, after: int, limit: int) -> list[tuple[int, int, int, int, str]]:
        """(hold, asset, remaining, posting, owner) of open holds that records own, by number, after one."""
        rows = await self._s.rows("owned_holds", after, limit)
        return [(r[0], r[1], self._s.minor(r[2]), r[3], r[4]) for r in rows]

    async def involved(self, accounts: Iterable[int], first: int, last: int) -> set[tuple[int, int]]:
        """What stands in the histories of accounts between two envelopes: (account, envelope)."""
        return {(r[0], r[1]) for r in await self._s.rows("involved_between", list(accounts), first, last)}

    async def histories(self) -> int:
        """How many lines all histories have."""
        return int(await self._one("count_involved"))

    async def transit(self, after: int, limit: int) -> list[tuple[int, int, int, str, str]]:
        """(posting, asset, amount, scope, key) of what lies in transit accounts, by number, after one."""
        rows = await self._s.rows("transit_postings", after, limit)
        return [(r[0], r[1], self._s.minor(r[2]), r[3], r[4]) for r in rows]

    async def records_in_transit(self, after: int, limit: int) -> list[tuple[int, str, str, str, int, bool]]:
        """(number, flow, id, state, posting, open) of records that own a posting in transit, by number, after one."""
        rows = await self._s.rows("records_in_transit", after, limit)
        return [(r[0], text_of(r[1]), text_of(r[2]), text_of(r[3]), r[4], bool(r[5])) for r in rows]

    async def open_records(self, after: int, limit: int) -> list[tuple[int, str]]:
        """(number, id) of records that somebody drives, by number, after one."""
        return [(r[0], text_of(r[1])) for r in await self._s.rows("open_records", after, limit)]

    async def outcomes(self) -> int:
        """How many answers are remembered."""
        return int(await self._one("count_outcomes"))

    async def counts(self) -> dict[str, int]:
        """How much there is."""
        row = (await self._s.rows("counts"))[0]
        return dict(zip(("accounts", "envelopes", "postings", "live", "events"), map(int, row), strict=True))
