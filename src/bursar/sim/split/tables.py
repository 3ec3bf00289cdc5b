"""The primitives of split mode: the steps of a saga, each by itself, and the table of commits under way."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

import msgspec

from bursar.model.postings import Posting
from bursar.model.records import EventKind, HoldRow, StoredEnvelope
from bursar.store.columns import minor_of, text_of
from bursar.store.rows import hold_values
from bursar.store.session import Table
from bursar.store.sql import bring
from bursar.store.sqlite import calls
from bursar.store.sqlite.calls import amount_in
from bursar.store.sqlite.store import SqliteSession
from bursar.store.tables import Tables

bring("bursar.sim.split")


class Saga(msgspec.Struct, frozen=True, kw_only=True):
    """The write-ahead record of a commit under way."""

    id: str
    kind: str
    scope: str
    key: str
    phase: str
    fence: int
    lease_us: int
    data: bytes


class Sagas(Table):
    """Commits under way."""

    async def save(self, saga: Saga) -> int:
        """1, or 0 if its key is under way or committed already."""
        row = (saga.id, saga.kind, saga.scope, saga.key, saga.phase, saga.fence, saga.lease_us, saga.data)
        return await self._s.write("save_saga", [row])

    async def finalize(self, saga: str, fence: int, data: bytes, generation: int) -> int:
        """The point of no return; 0 if the fence is lost or the rules have changed."""
        return await self._s.write("finalize_saga", [(saga, fence, data, generation)])

    async def take(self, saga: Saga, lease_us: int, now_us: int) -> int:
        """Take over an abandoned saga, if it is still as we saw it; its fence rises by one."""
        return await self._s.write("take_saga", [(saga.id, saga.fence, lease_us, now_us, saga.phase)])

    async def has_fence(self, saga: str, fence: int) -> bool:
        """Whether no other process has taken it over, or finished it."""
        return bool(await self._s.rows("saga_fence", saga, fence))

    async def set_aside(self, saga: str) -> int:
        """It can't be read; leave it for a person."""
        return await self._s.write("break_saga", [(saga,)])

    async def delete(self, saga: str, fence: int) -> int:
        """It is over."""
        return await self._s.write("delete_saga", [(saga, fence)])

    async def list(self) -> list[Saga]:
        """All of them."""
        return [
            Saga(
                id=text_of(r[0]),
                kind=text_of(r[1]),
                scope=text_of(r[2]),
                key=text_of(r[3]),
                phase=r[4],
                fence=r[5],
                lease_us=r[6],
                data=r[7],
            )
            for r in await self._s.rows("sagas")
        ]

    async def release_claims(self, saga: str) -> int:
        """Let go of what a commit that was set aside has claimed; returns how many postings."""
        return len(await self._s.rows("release_set_aside", saga))

    async def claims(self, limit: int) -> Sequence[tuple[int, str]]:
        """(posting, commit) of what commits that were set aside have claimed."""
        return [(row[0], row[1]) for row in await self._s.rows("claims_set_aside", limit)]

    async def count(self) -> int:
        """Those that are not set aside."""
        return int(await self._one("count_sagas"))


class Steps(Sagas):
    """And the rows that a saga writes, step by step."""

    amount = staticmethod(amount_in)

    def _rows(self, postings: Sequence[Posting]) -> Sequence[tuple[Any, ...]]:
        return [(p.id, p.account, p.asset, self.amount(p.amount)) for p in postings]

    async def take_numbers(self, count: int) -> int:
        """Reserve envelope numbers; returns the last of them."""
        return int(await self._one("take_numbers", count))

    async def insert(self, postings: Sequence[Posting]) -> int:
        """Write postings; those there already don't count."""
        return await self._s.write("insert_posting", self._rows(postings))

    async def enliven(self, postings: Sequence[Posting]) -> int:
        """Make postings live, except those spent already."""
        return await self._s.write("insert_live", self._rows(postings))

    async def live(self, ids: Iterable[int]) -> Sequence[Posting]:
        """Those of the postings that are live and free."""
        rows = await self._s.rows("batch_live_by_id", [*ids])
        return [Posting(row[0], row[1], row[2], minor_of(row[3])) for row in rows]

    async def reserve(self, ids: Sequence[int], saga: str, fence: int) -> int:
        """Claim free postings; what is taken is skipped. Ours count."""
        return await self._s.write("reserve", [(i, saga, fence) for i in ids])

    async def release(self, ids: Sequence[int], saga: str, fence: int) -> int:
        """Give back those that are ours."""
        return await self._s.write("release", [(i, saga, fence) for i in ids])

    async def spend(self, ids: Sequence[int], saga: str, fence: int, envelope: int) -> int:
        """Spend those we reserved, in the name of an envelope; what is spent already is skipped."""
        return await self._s.write("spend", [(i, saga, fence, envelope) for i in ids])

    async def bury(self, ids: Sequence[int], saga: str) -> int:
        """Take what is spent out of the live table."""
        return await self._s.write("bury", [(i, saga) for i in ids])

    async def shortage(self, account: int, asset: int) -> tuple[int, int, int]:
        """In one moment: postings claimed by others, commits past their point of no return, what is free to spend."""
        row = (await self._s.rows("shortage", account, asset))[0]
        return row[0], row[1], int(row[2] or 0)

    async def guarded(self, wanted: Sequence[tuple[int, int]]) -> dict[tuple[int, int], int]:
        """(account, asset) → guarded balance."""
        rows = await self._s.rows("batch_guarded_balances", [a for a, _ in wanted], [s for _, s in wanted])
        return {(r[0], r[1]): int(r[2]) for r in rows}

    async def reserve_guarded(self, wanted: Sequence[tuple[int, int]], saga: str, fence: int) -> int:
        """Claim guarded balances for a saga; ours count."""
        return await self._s.write("reserve_head", [(a, s, saga, fence) for a, s in wanted])

    async def settle_guarded(self, rows: Sequence[tuple[int, int, int]], saga: str) -> int:
        """Write guarded balances that we claimed, and let go of them."""
        return await self._s.write("settle_head", [(a, s, str(b), saga) for a, s, b in rows])

    async def release_guarded(self, saga: str, fence: int) -> int:
        """Let go of guarded balances."""
        return await self._s.write("release_heads", [(saga, fence)])

    async def publish(
        self,
        stored: StoredEnvelope,
        accounts: Iterable[int],
        cache: Sequence[tuple[int, int, int]],
        hold: HoldRow | None,
        saga: str,
        fence: int,
    ) -> int:
        """Store an envelope with all that it announces, if its saga still has its fence. 0: it has not, or was done.

        One primitive, because an envelope that is found is taken for a receipt: history, cached balances, hold and
        event must be there with it.
        """
        s = stored
        head = (s.seq, s.id, s.scope, s.key, s.book, int(s.kind), s.reverses)
        writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]] = [
            ("insert_envelope_fenced", [(*head, s.legs, s.pins, s.consumes, s.metadata, saga, fence)]),
            ("insert_account_history_fenced", [(a, s.seq, saga, fence) for a in accounts]),
            ("insert_cache_fenced", [(a, asset, s.seq, str(v), saga, fence) for a, asset, v in cache]),
            ("put_hold_fenced", [] if hold is None else [(*hold_values(hold, amount_in), saga, fence, s.seq)]),
            ("insert_event_fenced", [(int(EventKind.COMMITTED), s.seq, 0, saga, fence)]),
        ]

        def write_all(connection: sqlite3.Connection) -> list[int]:
            return [calls.write(connection, name, rows) for name, rows in writes if rows]

        def as_one(connection: sqlite3.Connection) -> list[int]:
            if connection.in_transaction:
                return write_all(connection)
            return calls.together(connection, partial(write_all, connection))

        return (await cast("SqliteSession", self._s).run(as_one))[0]


class SplitTables(Tables):
    """All tables over one session, with the steps of sagas."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.session)
        self.steps = Steps(tables.session)
