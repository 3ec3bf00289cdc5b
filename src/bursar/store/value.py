"""Tables of value and of the rules about it. They apply what they are told and return what changed.

One set of classes serves both engines. Nothing here interprets a count, decides a state or retries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bursar.model.accounts import Account, Book, encode_policy
from bursar.model.money import Asset
from bursar.model.postings import SEQ_MAX, Posting, PostingState, posting_id
from bursar.model.records import ExistingEntry, StoredEnvelope, StoredPosting, StoredVersion
from bursar.store.columns import Row
from bursar.store.rows import account_of, asset_of, book_of, envelope_of
from bursar.store.session import Table

LAST_PATH = "\x7f"  # sorts after every character a path may have
FOREVER_US = 2**57  # some 4,500 years after 1970
OVERTAKEN_MAX = 2_000  # lines of a history that are put into the order of events, around the place where it is read

Place = tuple[int, int, int]  # in the order of events: epoch, transaction, number
FIRST_PLACE: Place = (0, 0, 0)
LAST_PLACE: Place = (2**31 - 1, 2**63 - 1, 2**63 - 1)


class Rules(Table):
    """The one row that guards status, policy and book of all accounts; assets and books, which are few."""

    async def generation(self) -> int:
        """The current generation."""
        return int(await self._one("generation"))

    async def share(self) -> int:
        """Hold the rules as they are until the unit ends, and let others do so too."""
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
        """A number nobody has."""
        return int(await self._one("take_account_number"))

    async def append(self, account: Account) -> int:
        """A new version. 0 if it does not follow directly on the newest, or is there already."""
        row = (account.id, account.version, account.path, encode_policy(account.policy), account.status.value)
        return await self._s.write("insert_account", [(*row, account.book)])

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


class Postings(Table):
    """Postings, who spent them, and the disposable table of what is live."""

    def _stored(self, row: Row) -> StoredPosting:
        posting = Posting(row[0], row[1], row[2], self._s.minor(row[3]))
        if row[5] is not None and not row[6]:
            state = PostingState.SPENT
        else:
            state = PostingState.LIVE if row[4] is None else PostingState.RESERVED
        return StoredPosting(posting=posting, state=state, reservation=row[4], spender=row[5])

    async def get(self, ids: Iterable[int]) -> list[StoredPosting]:
        """Postings by number, in that order; the missing are missing. Spent ones stay readable."""
        return [self._stored(row) for row in await self._s.rows("postings_by_id", list(ids))]

    async def of_envelopes(self, first: int, last: int) -> list[StoredPosting]:
        """What the envelopes from `first` to `last` created."""
        rows = await self._s.rows("postings_of_envelopes", posting_id(first, 0), posting_id(last + 1, 0))
        return [self._stored(row) for row in rows]

    async def of_account(
        self, account: int, *, asset: int = 0, live_only: bool = False, after: int = 0, limit: int = 100
    ) -> list[StoredPosting]:
        """Postings of one account by number; of one asset if given."""
        name = "live_of_account" if live_only else "postings_of_account"
        return [self._stored(row) for row in await self._s.rows(name, account, after, asset, limit)]

    async def candidates(self, name: str, account: int, asset: int, limit: int) -> list[Posting]:
        """Free live postings: `largest`, `most_negative` or `smallest` first."""
        rows = await self._s.rows(name, account, asset, limit)
        return [Posting(row[0], row[1], row[2], self._s.minor(row[3])) for row in rows]

    async def spenders(self, ids: Iterable[int]) -> dict[int, int]:
        """Who spent them; the unspent are missing."""
        return {row[0]: row[1] for row in await self._s.rows("spends_by_id", list(ids))}

    async def rebuild(self) -> int:
        """Throw the live table away and make it anew from postings and spends."""
        await self._s.rows("clear_live")
        await self._s.rows("rebuild_live")
        return sum(row[3] for row in await self._s.rows("live_sums"))

    async def sums(self) -> list[tuple[int, int, int, int]]:
        """(account, asset, sum, count) of all that is live."""
        return [(r[0], r[1], int(r[2]), r[3]) for r in await self._s.rows("live_sums")]


class Envelopes(Table):
    """Committed envelopes, and which accounts they involve."""

    async def existing(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ExistingEntry]:
        """What (scope, key) pairs stand for already."""
        rows = await self._s.rows("envelopes_by_key", [s for s, _ in keys], [k for _, k in keys])
        return {(r[2], r[3]): ExistingEntry(r[0], r[1], r[4], r[5]) for r in rows}

    async def get(self, seqs: Iterable[int]) -> list[StoredEnvelope]:
        """Envelopes by number, in order of number."""
        return await self._all(envelope_of, "envelopes_by_seq", list(seqs))

    async def after(self, seq: int, *, book: int = 0, limit: int = 100) -> list[StoredEnvelope]:
        """Envelopes by number, after one; of one book if given. Not for followers: a lower number may commit later."""
        return await self._all(envelope_of, "envelopes_range", seq, book, limit)

    async def place(self, seq: int) -> Place | None:
        """Where an envelope stands in the order of events."""
        rows = await self._s.rows("place_of_envelope", seq)
        return (rows[0][0], rows[0][1], rows[0][2]) if rows else None

    async def after_place(self, place: Place, *, book: int = 0, limit: int = 100) -> list[StoredEnvelope]:
        """Envelopes in the order of events, after a place in it; never one that another could still come before."""
        return await self._all(envelope_of, "envelopes_after", *place, book, limit)

    async def of_account(
        self,
        account: int,
        *,
        before: int = SEQ_MAX,
        place: Place = LAST_PLACE,
        since_us: int = 0,
        until_us: int = FOREVER_US,
        limit: int = 100,
    ) -> list[StoredEnvelope]:
        """Envelopes an account took part in, newest first in the order of events; `before` one, at its place.

        Exact unless a commit was overtaken by more than `OVERTAKEN_MAX` others of the same account.
        """
        span = (since_us, until_us, limit, OVERTAKEN_MAX)
        return await self._all(envelope_of, "envelopes_of_account", account, *place, before, *span)

    async def by_hash(self, id_: bytes) -> int | None:
        """Number of the envelope with this content hash, by looking at all of them."""
        found = await self._one("envelope_by_hash", id_)
        return None if found is None else int(found)
