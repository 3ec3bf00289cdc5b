"""Tables of envelopes and of the events that announce them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bursar.model.postings import SEQ_MAX
from bursar.model.records import Event, EventKind, ExistingEntry, StoredEnvelope
from bursar.store.rows import envelope_of, parse_cursor
from bursar.store.session import Table

FOREVER_US = 2**57  # some 4,500 years after 1970
OVERTAKEN_MAX = 2_000  # lines of a history that are put into the order of events, around the place where it is read
Place = tuple[int, int, int]  # in the order of events: epoch, transaction, number
FIRST_PLACE: Place = (0, 0, 0)
LAST_PLACE: Place = (2**31 - 1, 2**63 - 1, 2**63 - 1)


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


class Events(Table):
    """The outbox."""

    async def append(self, kind: EventKind, subject: int, version: int = 0) -> int:
        """1, or 0 if that event is there already."""
        return await self.append_all(kind, [subject], version)

    async def append_all(self, kind: EventKind, subjects: Sequence[int], version: int) -> int:
        """The same of several; how many are new."""
        return await self._s.write("insert_event", [(int(kind), subject, version) for subject in subjects])

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
