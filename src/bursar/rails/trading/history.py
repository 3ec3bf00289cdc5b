"""What the core remembers: one row for every operation that was executed or refused, and where each id is.

A row is six unsigned 64-bit integers: sequence, id, user, amount, other, and *meta* (asset number, operation, answer).
It looks the same here, in the log and in a snapshot, so that none of them translates. Rows lie in chunks. A full chunk
never changes again, which is what lets a snapshot be written while the core goes on: it holds the chunks, and copies
only the last.

Ten million rows are 480 MB of chunks and about 1.2 GB of index; raising the floor (`prune`) is what bounds both.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import Final, NamedTuple

from bursar.rails.trading.words import REMEMBERED, Code, Op

COLUMNS: Final = 6
ROW_BYTES: Final = COLUMNS * 8
CHUNK_ROWS: Final = 65_536
CHUNK_ITEMS: Final = CHUNK_ROWS * COLUMNS

Packed = tuple[int, int, int, int, int, int]


class Row(NamedTuple):
    """One remembered operation."""

    sequence: int
    id: int
    user: int
    amount: int
    other: int  # whom a settlement pays; 0 otherwise
    meta: int

    @property
    def asset(self) -> int:
        """The asset's number in this core; 0 if the name was no asset's."""
        return self.meta >> 16

    @property
    def op(self) -> int:
        """Which operation."""
        return self.meta >> 8 & 0xFF

    @property
    def code(self) -> int:
        """What was answered."""
        return self.meta & 0xFF


def numbers(data: bytes | memoryview) -> array[int]:
    """Little-endian unsigned 64-bit integers."""
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def octets(values: array[int]) -> bytes:
    """The other way round."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def rows_of(values: array[int]) -> Iterator[Packed]:
    """The rows in an array, as tuples."""
    columns = iter(values)
    return zip(columns, columns, columns, columns, columns, columns, strict=True)


class History:
    """The rows, and an index per operation: id → number of its row."""

    __slots__ = ("chunks", "count", "where")

    def __init__(self) -> None:
        self.chunks: list[array[int]] = [array("Q")]
        self.count = 0
        self.where: dict[int, dict[int, int]] = {op: {} for op in REMEMBERED}

    def __getitem__(self, number: int) -> Row:
        chunk, place = divmod(number, CHUNK_ROWS)
        start = place * COLUMNS
        return Row(*self.chunks[chunk][start : start + COLUMNS])

    def extend(self, values: array[int]) -> None:
        """Append rows. Their index entries are the caller's: the book makes them while it decides."""
        self.count += len(values) // COLUMNS
        last = self.chunks[-1]
        room = CHUNK_ITEMS - len(last)
        while len(values) > room:
            last.extend(values[:room])
            values = values[room:]
            last, room = array("Q"), CHUNK_ITEMS
            self.chunks.append(last)
        last.extend(values)

    def index(self, values: array[int], first: int) -> None:
        """Make the index entries of rows that begin at number `first`: for what is read from a file."""
        where = self.where
        for number, (id_, meta) in enumerate(zip(values[1::COLUMNS], values[5::COLUMNS], strict=True), first):
            where[meta >> 8 & 0xFF][id_] = number

    def copy(self) -> list[array[int]]:
        """The rows as they are now, for somebody who reads them later. Costs one chunk, whatever their number."""
        return [*self.chunks[:-1], self.chunks[-1][:]]

    def prune(self, floor: int, keep: Collection[int]) -> list[Row]:
        """Forget every row of an id below the floor that is not to be kept. Returns withdraws nobody can refund now."""
        kept: list[Packed] = []
        dropped: dict[int, Row] = {}
        refunded: set[int] = set()
        for chunk in self.chunks:
            for row in rows_of(chunk):
                if row[1] >= floor or row[1] in keep:
                    kept.append(row)
                elif row[5] & 0xFFFF == Op.WITHDRAW << 8 | Code.OK:
                    dropped[row[1]] = Row(*row)
                elif row[5] & 0xFFFF == Op.REFUND << 8 | Code.OK:
                    refunded.add(row[1])
        self.replace([packed(kept)])
        return [row for id_, row in dropped.items() if id_ not in refunded]

    def replace(self, chunks: Iterable[array[int]]) -> None:
        """These rows instead of all there were."""
        self.chunks = [array("Q")]
        self.count = 0
        self.where = {op: {} for op in REMEMBERED}
        for values in chunks:
            self.index(values, self.count)
            self.extend(values)


def packed(rows: Iterable[Packed]) -> array[int]:
    """Rows as they are kept."""
    return array("Q", chain.from_iterable(rows))
