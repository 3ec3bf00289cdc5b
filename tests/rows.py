"""Rows that tests write behind the ledger's back, on both stores."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bursar.model.envelope import Envelope
from bursar.sim.split.tables import Steps
from bursar.store.rows import envelope_row
from bursar.store.sql import bring
from bursar.store.sqlite.store import SqliteSession
from bursar.store.tables import Tables

bring("tests")


class Rows(Steps):
    """On PostgreSQL only what has a statement in `postgres.sql` here."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(tables.session)
        if not isinstance(tables.session, SqliteSession):
            self.amount = str  # type: ignore[assignment]

    async def store(self, envelope: Envelope, id_: bytes) -> int:
        """Write an envelope; 0 if its number or key is there already."""
        return await self._s.write("insert_envelope", [envelope_row(envelope, id_)])

    async def involve(self, accounts: Iterable[int], envelope: int) -> int:
        """Write who took part."""
        return await self._s.write("insert_account_history", [(a, envelope) for a in accounts])

    async def spend_directly(self, ids: Sequence[int], envelope: int, *, bury: bool = True) -> None:
        """Spend postings in the name of an envelope, and take them out of the live table."""
        assert await self._s.write("insert_spend_directly", [(i, envelope) for i in ids]) == len(ids)
        if bury:
            assert await self._s.write("bury_directly", [(i,) for i in ids]) == len(ids)
