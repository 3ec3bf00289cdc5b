"""The walk: all envelopes in order, a page at a time, with the postings they consume and create.

Memory stays bounded however large the ledger and however long an envelope's lists: a page is cut short as soon as it
names many postings, and pages shrink while rows are large.
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from bursar.model.accounts import Account
from bursar.model.envelope import decode_ids, decode_pins
from bursar.model.errors import DatabaseCorrupt
from bursar.model.postings import Posting
from bursar.model.records import StoredEnvelope, StoredPosting
from bursar.store.tables import Tables

R = TypeVar("R", bound=tuple[Any, ...])

PAGE_MAX = 1_000  # envelopes read at once: beyond that it gets no faster, only larger
PAGE_MIN = 10
PAGE_BYTES_MAX = 4_000_000
POSTINGS_MAX = 20_000  # named by one page
VERSIONS_MAX = 100_000  # account versions remembered; beyond that the memory starts over

# What decoding a row of unknown origin may raise.
UNREADABLE = (ValueError, KeyError, OverflowError, struct.error, msgspec.MsgspecError, DatabaseCorrupt)


def said(error: Exception) -> str:
    """What can't be read, and why; without the advice that a command would give."""
    return f"{error.what} can't be read ({error.why})" if isinstance(error, DatabaseCorrupt) else str(error)


async def numbered(read: Callable[[int, int], Awaitable[list[R]]]) -> AsyncIterator[R]:
    """All rows that begin with their number, read page by page in its order."""
    after = 0
    while page := await read(after, PAGE_MAX):
        for row in page:
            yield row
        after = page[-1][0]


class Page(msgspec.Struct):
    """Some envelopes, and what belongs to them."""

    envelopes: list[StoredEnvelope]
    listed: dict[int, tuple[int, ...]]  # envelope → postings it says it consumes
    consumed: dict[int, StoredPosting]  # by posting; those that don't exist are missing
    created: dict[int, list[Posting]]  # envelope → postings it created


class Walk:
    """Reads envelopes from one snapshot."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._versions: dict[tuple[int, int], Account] = {}
        self.unreadable: set[int] = set()  # envelopes whose row can't be read at all

    async def pages(self) -> AsyncIterator[Page]:
        """All envelopes, oldest first, with the postings they consumed and created."""
        after, size = 0, PAGE_MAX
        while rows := await self._rows(after, size):
            weight = sum(len(e.consumes) + len(e.legs) + len(e.metadata) for e in rows)
            size = max(PAGE_MIN, size // 2) if weight > PAGE_BYTES_MAX else min(PAGE_MAX, size * 2)
            for chunk in _chunks(rows):
                yield await self._page(chunk)
            after = rows[-1].seq

    async def _page(self, rows: list[StoredEnvelope]) -> Page:
        listed = {e.seq: _listed(e) for e in rows}
        ids = [i for numbers in listed.values() for i in numbers]
        stored = await self._tables.postings.get(ids) if ids else []
        created: dict[int, list[Posting]] = {}
        for p in await self._tables.postings.of_envelopes(rows[0].seq, rows[-1].seq):
            created.setdefault(p.posting.envelope, []).append(p.posting)
        return Page(rows, listed, {p.posting.id: p for p in stored}, created)

    async def versions(self, rows: list[StoredEnvelope]) -> dict[tuple[int, int], Account]:
        """The account versions that envelopes were validated against; at least those that exist."""
        wanted: set[tuple[int, int]] = set()
        for e in rows:
            try:
                wanted.update(decode_pins(e.pins))
            except UNREADABLE:
                continue  # the check that judges the envelope meets this again and says so
        if len(self._versions) > VERSIONS_MAX:
            self._versions = {}
        missing = sorted(wanted - self._versions.keys())
        if missing:
            self._versions.update(await self._tables.accounts.versions(missing))
        return self._versions

    async def _rows(self, after: int, limit: int) -> list[StoredEnvelope]:
        try:
            return await self._tables.envelopes.after(after, limit=limit)
        except UNREADABLE:
            return await self._readable(after)

    async def _readable(self, after: int) -> list[StoredEnvelope]:
        """One row of a page can't be read: the rows up to it, one by one, or else the row behind it."""
        rows: list[StoredEnvelope] = []
        while True:
            try:
                found = await self._tables.envelopes.after(rows[-1].seq if rows else after, limit=1)
            except UNREADABLE:
                if rows:
                    return rows
                after = await self._unreadable(after)
                continue
            if not found or len(rows) == PAGE_MAX:
                return rows
            rows += found

    async def _unreadable(self, after: int) -> int:
        """The number of the next row, which can't be read. Numbers have gaps, and only asking tells."""
        while True:
            after += 1
            try:
                await self._tables.envelopes.get([after])
            except UNREADABLE:
                self.unreadable.add(after)
                return after


def _listed(stored: StoredEnvelope) -> tuple[int, ...]:
    """What it says it consumes; a list that can't be read names nothing, and the check of the envelope says so."""
    try:
        return decode_ids(stored.consumes)
    except UNREADABLE:
        return (0,)  # no posting has this number


def _chunks(rows: list[StoredEnvelope]) -> list[list[StoredEnvelope]]:
    """Cut where a page would name too many postings; each leg creates two at most."""
    chunks: list[list[StoredEnvelope]] = [[]]
    named = 0
    for e in rows:
        weight = len(e.consumes) // 8 + len(e.legs) // 2
        if chunks[-1] and named + weight > POSTINGS_MAX:
            chunks.append([])
            named = 0
        chunks[-1].append(e)
        named += weight
    return chunks
