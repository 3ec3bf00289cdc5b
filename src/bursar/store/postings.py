"""Tables of postings: what was created, who spent it, and what is live."""

from __future__ import annotations

from collections.abc import Iterable

from bursar.model.postings import Posting, PostingState, posting_id
from bursar.model.records import StoredPosting
from bursar.store.columns import Row, minor_of
from bursar.store.session import Table


class Postings(Table):
    """Postings, who spent them, and the disposable table of what is live."""

    @staticmethod
    def _stored(row: Row) -> StoredPosting:
        posting = Posting(row[0], row[1], row[2], minor_of(row[3]))
        if row[5] is not None and not row[6]:
            state = PostingState.SPENT
        else:
            state = PostingState.LIVE if row[4] is None else PostingState.RESERVED
        return StoredPosting(posting=posting, state=state, reservation=row[4], spender=row[5])

    async def get(self, ids: Iterable[int]) -> list[StoredPosting]:
        """Postings by number, in that order; the missing are missing. Spent ones stay readable."""
        return await self._all(self._stored, "postings_by_id", list(ids))

    async def of_envelopes(self, first: int, last: int) -> list[StoredPosting]:
        """What the envelopes from `first` to `last` created."""
        return await self._all(self._stored, "postings_of_envelopes", posting_id(first, 0), posting_id(last + 1, 0))

    async def of_account(
        self, account: int, *, asset: int = 0, live_only: bool = False, after: int = 0, limit: int = 100
    ) -> list[StoredPosting]:
        """Postings of one account by number; of one asset if given."""
        name = "live_of_account" if live_only else "postings_of_account"
        return await self._all(self._stored, name, account, after, asset, limit)

    async def candidates(self, name: str, account: int, asset: int, limit: int) -> list[Posting]:
        """Free live postings: `largest`, `most_negative` or `smallest` first."""
        rows = await self._s.rows(name, account, asset, limit)
        return [Posting(row[0], row[1], row[2], minor_of(row[3])) for row in rows]

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
