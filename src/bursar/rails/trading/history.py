"""What the core remembers: every operation that was executed or refused, and where to find it by its id.

Rows lie in blocks of up to 256, each as MessagePack, as they came off the wire, with what became of each (*meta*: asset
number, operation, answer) beside them. A block looks the same here, in the log and in a snapshot, so that none of them
translates; and it never changes, which is what lets a snapshot be written while the core goes on: it only holds them.
Answers and sequences are read without decoding; parameters, which are compared when an operation comes again, with it.

A remembered operation takes about 30 bytes of block and 120 of index; raising the floor below which everything is
forgotten is what bounds both. Each block knows its lowest ids, so that a floor that rises a little touches few blocks:
the core waits while it does. `steps` says how to raise one by much in little steps.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from struct import Struct
from typing import Annotated, Final, NamedTuple, Self

import msgspec

from bursar.rails.trading.rules import REMEMBERED, UNSURE, Op

BLOCK_ROWS_MAX: Final = 256
DECODED_MAX: Final = 64  # blocks that are kept decoded, in case they are asked for again
STEP_BLOCKS: Final = 16  # that one step of a floor touches: some milliseconds, in which no other request is served
LISTED_ROWS_MAX: Final = 16_384  # that are looked at for one request of a list
SMALL_ROWS: Final = 64  # what a block costs there at least, as small as it may be
META_BYTES: Final = 4
WITHDRAW: Final = int(Op.WITHDRAW)  # an enumeration is looked up too slowly for every row

_HEAD: Final = Struct("<QI")  # sequence of its first row, number of rows
_META: Final = Struct("<I")
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_decode = msgspec.msgpack.Decoder(list[tuple[_U64, _U64, _U64, _U64, _U64, _U64]]).decode
_encode = msgspec.msgpack.Encoder().encode

# Operation, id, user, place of the asset in the request that brought it, amount, other.
Item = tuple[int, int, int, int, int, int]
Named = tuple[int, int, int, str, int, int]  # the same, with the asset's name itself


def indexed(items: Iterable[Named]) -> tuple[list[str], list[Item]]:
    """Operations with their assets as places in a list of names, as a frame has them."""
    places: dict[str, int] = {}
    made = [
        (op, id_, user, places.setdefault(name, len(places)), amount, o) for op, id_, user, name, amount, o in items
    ]
    return list(places), made


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


@dataclass(frozen=True, slots=True)
class Block:
    """Rows with sequences in a row."""

    sequence: int  # of the first
    count: int
    metas: bytes  # u32 each
    items: bytes  # MessagePack
    low: int  # the lowest id
    moved_low: int  # the lowest and the highest id of its deposits and withdraws; 0 if it has none
    moved_high: int

    @classmethod
    def of(cls, sequence: int, metas: bytes, items: Sequence[Item], encoded: bytes) -> Self:
        """A block of these rows."""
        moved = [item[1] for item in items if item[0] <= WITHDRAW]
        if not moved:
            return cls(sequence, len(items), metas, encoded, min(item[1] for item in items), 0, 0)
        low = min(moved)
        lowest = low if len(moved) == len(items) else min(item[1] for item in items)
        return cls(sequence, len(items), metas, encoded, lowest, low, max(moved))

    @property
    def size(self) -> int:
        """Its bytes, as `dump` makes them."""
        return _HEAD.size + len(self.metas) + len(self.items)

    def meta(self, place: int) -> int:
        """What became of one."""
        found: int = _META.unpack_from(self.metas, place * META_BYTES)[0]
        return found

    def rows(self) -> Iterator[Row]:
        """All of them."""
        metas = (meta for (meta,) in _META.iter_unpack(self.metas))
        for sequence, (_, id_, user, _, amount, other), meta in zip(
            range(self.sequence, self.sequence + self.count), _decode(self.items), metas, strict=True
        ):
            yield Row._make((sequence, id_, user, amount, other, meta))  # faster than a call of Row

    def has_transfers(self) -> bool:
        """Whether a deposit, a withdraw or a refund is among them."""
        return any(meta >> 8 & 0xFF <= Op.REFUND for (meta,) in _META.iter_unpack(self.metas))

    def dump(self) -> bytes:
        """As it is on disk: sequence u64 · rows u32 · a u32 for each · MessagePack."""
        return b"".join((_HEAD.pack(self.sequence, self.count), self.metas, self.items))


def load(data: bytes) -> Block:
    """A block from a disk. ValueError if no core could have written it."""
    if len(data) < _HEAD.size:
        raise ValueError("half a block of rows")
    sequence, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * META_BYTES
    metas, encoded = data[_HEAD.size : end], data[end:]
    if not count or len(metas) != count * META_BYTES:
        raise ValueError("a block without its rows")
    try:
        items = _decode(encoded)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    kinds = [meta for (meta,) in _META.iter_unpack(metas)]
    if [item[0] for item in items] != [kind >> 8 & 0xFF for kind in kinds]:
        raise ValueError("rows and their answers do not belong together")
    if not all(kind >> 8 & 0xFF in REMEMBERED and kind & 0xFF < UNSURE for kind in set(kinds)):
        raise ValueError("rows that no core writes")
    return Block.of(sequence, metas, items, encoded)


def blocks_of(sequence: int, items: Sequence[Item], metas: Sequence[int]) -> list[Block]:
    """Rows with these sequences and on, as blocks."""
    made = []
    for start in range(0, len(items), BLOCK_ROWS_MAX):
        some = items[start : start + BLOCK_ROWS_MAX]
        kinds = octets(array("I", metas[start : start + BLOCK_ROWS_MAX]))
        made.append(Block.of(sequence + start, kinds, some, _encode(some)))
    return made


def octets(values: array[int]) -> bytes:
    """Unsigned integers, little-endian."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


class History:
    """The rows, and an index per operation: id → number of its row."""

    __slots__ = ("_decoded", "_starts", "blocks", "count", "end", "where")

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.count = 0  # how many rows there are
        self.end = 0  # the number of the next one; more than there are, once some are pruned
        self.where: dict[int, dict[int, int]] = {op: {} for op in REMEMBERED}
        self._starts: list[int] = []  # the number of each block's first row
        self._decoded: dict[int, list[Item]] = {}

    def __getitem__(self, number: int) -> Row:
        start, block = self._find(number)
        items = self._decoded.get(start)
        if items is None:
            if len(self._decoded) >= DECODED_MAX:
                del self._decoded[next(iter(self._decoded))]
            items = self._decoded[start] = _decode(block.items)
        _, id_, user, _, amount, other = items[number - start]
        return Row(block.sequence + number - start, id_, user, amount, other, block.meta(number - start))

    def answer(self, number: int) -> tuple[int, int]:
        """What was answered, and with which sequence."""
        start, block = self._find(number)
        return block.meta(number - start) & 0xFF, block.sequence + number - start

    def _find(self, number: int) -> tuple[int, Block]:
        place = bisect_right(self._starts, number) - 1
        return self._starts[place], self.blocks[place]

    def extend(self, blocks: Iterable[Block]) -> None:
        """Append blocks. Their index entries are the caller's: the state makes them while it decides."""
        for block in blocks:
            self._starts.append(self.end)
            self.blocks.append(block)
            self.count += block.count
            self.end += block.count
            while self._merge_last():
                pass

    def _merge_last(self) -> bool:
        """Make one of the last two blocks if they are small and alike, or lone operations would be a block each."""
        if len(self.blocks) < 2:
            return False
        left, right = self.blocks[-2:]
        if left.count > 2 * right.count or left.count + right.count > BLOCK_ROWS_MAX:
            return False
        if left.sequence + left.count != right.sequence or self._starts[-2] + left.count != self._starts[-1]:
            return False
        items = _decode(left.items) + _decode(right.items)
        self.blocks[-2:] = [Block.of(left.sequence, left.metas + right.metas, items, _encode(items))]
        self._starts.pop()
        self._decoded.pop(self._starts[-1], None)
        return True

    def append(self, block: Block) -> None:
        """Append a block that was read from a file, with its index entries."""
        where = self.where
        for number, item in enumerate(_decode(block.items), self.end):
            where[item[0]][item[1]] = number
        self.extend([block])

    def steps(self, lowest: Callable[[Block], int], above: int, up_to: int) -> list[int]:
        """Heights at which a floor may pause on its way up, the last included, so that each step touches few blocks."""
        lows = sorted(low for block in self.blocks if above < (low := lowest(block)) < up_to)
        return [*dict.fromkeys(lows[STEP_BLOCKS::STEP_BLOCKS]), up_to]

    def withdrawn(self, low: int, high: int) -> Iterator[Row]:
        """Withdraws with ids from `low` to below `high` that have succeeded and were not refunded."""
        refunded = self.where[Op.REFUND]
        for block in self.blocks:
            if block.moved_low < high and block.moved_high >= low:
                for place, (op, id_, user, _, amount, other) in enumerate(_decode(block.items)):
                    if op == WITHDRAW and low <= id_ < high and id_ not in refunded:
                        meta = block.meta(place)
                        if not meta & 0xFF:
                            yield Row(block.sequence + place, id_, user, amount, other, meta)

    def withdrawn_as(self, id_: int) -> Row | None:
        """The withdraw of this id, if it has succeeded and was not refunded."""
        number = self.where[Op.WITHDRAW].get(id_)
        if number is None or id_ in self.where[Op.REFUND]:
            return None
        row = self[number]
        return None if row.code else row

    def forget(self, floor: int, keep: Collection[int]) -> int:
        """Forget every row of an id below the floor that is not to be kept; returns how many bytes of blocks that is.

        Rows that stay keep their numbers, so that only what goes is touched: the core waits for this.
        """
        starts, blocks = self._starts, self.blocks
        if not any(block.low < floor for block in blocks):
            return 0
        before, after = 0, 0
        self._starts, self.blocks, self._decoded = [], [], {}
        for start, block in zip(starts, blocks, strict=True):
            if block.low >= floor:
                self._starts.append(start)
                self.blocks.append(block)
                continue
            before += block.size
            items = _decode(block.items)
            metas = [meta for (meta,) in _META.iter_unpack(block.metas)]
            goes = [item[1] < floor and item[1] not in keep for item in items]
            for gone, run in groupby(range(block.count), key=goes.__getitem__):
                places = list(run)
                first, end = places[0], places[-1] + 1
                if gone:
                    self.count -= len(places)
                    for op, id_, *_ in items[first:end]:
                        del self.where[op][id_]
                    continue
                self._starts.append(start + first)
                [left] = blocks_of(block.sequence + first, items[first:end], metas[first:end])
                self.blocks.append(left)
                after += left.size
        return before - after

    def transfers(self, after: int, limit: int, end: int) -> tuple[list[Row], int]:
        """Deposits, withdraws and refunds behind a sequence, refused ones too, and up to where these are all.

        `end`: the sequence up to which there is nothing behind the last row. A bounded number of rows is looked at, so
        that the core is not held up by many that are something else; who wants more asks again from there.
        """
        found: list[Row] = []
        place = max(bisect_right(self.blocks, after, key=lambda block: block.sequence) - 1, 0)
        complete_to, looked_at = after, 0
        for block in islice(self.blocks, place, None):
            last = block.sequence + block.count - 1
            if last <= after:
                continue
            if looked_at >= LISTED_ROWS_MAX:
                return found, complete_to
            looked_at += max(block.count, SMALL_ROWS)
            if block.has_transfers():
                for row in block.rows():
                    if row.sequence > after and row.op <= Op.REFUND:
                        if len(found) == limit:
                            return found, found[-1].sequence
                        found.append(row)
            complete_to = last
        return found, max(after, end)

    def rows(self) -> Iterator[Row]:
        """Everything that is remembered, in order."""
        for block in self.blocks:
            yield from block.rows()
