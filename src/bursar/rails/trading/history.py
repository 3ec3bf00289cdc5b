"""What the core remembers: every operation that was executed or refused, and where to find it by its id.

Rows lie in blocks of up to 256, each as MessagePack, as they came off the wire, with what became of each (*meta*: asset
number, operation, answer) beside them. A block looks the same here, in the log and in a snapshot, so that none of them
translates; and it never changes, which is what lets a snapshot be written while the core goes on: it only holds them.
Answers and sequences are read without decoding; parameters, which are compared when an operation comes again, with it.

A remembered operation takes about 30 bytes of block and 120 of index; raising the floor (`prune`) is what bounds both.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from struct import Struct
from typing import Annotated, Final, NamedTuple

import msgspec

from bursar.rails.trading.words import REMEMBERED, UNSURE, Op

BLOCK_ROWS_MAX: Final = 256
DECODED_MAX: Final = 64  # blocks that are kept decoded, for whoever asks again
META_BYTES: Final = 4

_HEAD: Final = Struct("<QI")  # sequence of its first row, number of rows
_META: Final = Struct("<I")
_U64 = Annotated[int, msgspec.Meta(ge=0)]
_decode = msgspec.msgpack.Decoder(list[tuple[_U64, _U64, _U64, _U64, _U64, _U64]]).decode
_encode = msgspec.msgpack.Encoder().encode

# Operation, id, user, place of the asset in the request that brought it, amount, other.
Item = tuple[int, int, int, int, int, int]


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
        return map(Row._make, self._columns())

    def _columns(self) -> Iterator[tuple[int, int, int, int, int, int]]:
        metas = (meta for (meta,) in _META.iter_unpack(self.metas))
        for sequence, (_, id_, user, _, amount, other), meta in zip(
            range(self.sequence, self.sequence + self.count), _decode(self.items), metas, strict=True
        ):
            yield sequence, id_, user, amount, other, meta

    def dump(self) -> bytes:
        """As it is on disk: sequence u64 · rows u32 · a u32 for each · MessagePack."""
        return b"".join((_HEAD.pack(self.sequence, self.count), self.metas, self.items))


def load(data: bytes) -> Block:
    """A block from a disk. ValueError if no core could have written it."""
    if len(data) < _HEAD.size:
        raise ValueError("half a block of rows")
    sequence, count = _HEAD.unpack_from(data)
    end = _HEAD.size + count * META_BYTES
    block = Block(sequence, count, data[_HEAD.size : end], data[end:])
    if not count or len(block.metas) != count * META_BYTES:
        raise ValueError("a block without its rows")
    try:
        ops = [item[0] for item in _decode(block.items)]
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error
    kinds = [meta for (meta,) in _META.iter_unpack(block.metas)]
    if ops != [kind >> 8 & 0xFF for kind in kinds]:
        raise ValueError("rows and their answers do not belong together")
    if not all(kind >> 8 & 0xFF in REMEMBERED and kind & 0xFF < UNSURE for kind in set(kinds)):
        raise ValueError("rows that no core writes")
    return block


def blocks_of(sequence: int, items: Sequence[Item], metas: Sequence[int]) -> list[Block]:
    """Rows with these sequences and on, as blocks."""
    made = []
    for start in range(0, len(items), BLOCK_ROWS_MAX):
        some = items[start : start + BLOCK_ROWS_MAX]
        kinds = _little(array("I", metas[start : start + BLOCK_ROWS_MAX]))
        made.append(Block(sequence + start, len(some), kinds, _encode(some)))
    return made


def _little(values: array[int]) -> bytes:
    if values.itemsize == META_BYTES and array("I", [1]).tobytes()[0]:
        return values.tobytes()
    return b"".join(map(_META.pack, values))  # a machine that counts otherwise


class History:
    """The rows, and an index per operation: id → number of its row."""

    __slots__ = ("_decoded", "_starts", "blocks", "count", "end", "where")

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
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
        """Append blocks. Their index entries are the caller's: the book makes them while it decides."""
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
        items = _encode(_decode(left.items) + _decode(right.items))
        self.blocks[-2:] = [Block(left.sequence, left.count + right.count, left.metas + right.metas, items)]
        self._starts.pop()
        self._decoded.pop(self._starts[-1], None)
        return True

    def index(self, block: Block, first: int) -> None:
        """Make the index entries of a block whose first row has the number `first`: for what is read from a file."""
        where = self.where
        for number, item in enumerate(_decode(block.items), first):
            where[item[0]][item[1]] = number

    def prune(self, floor: int, keep: Collection[int]) -> list[tuple[int, int, int]]:
        """Forget every row of an id below the floor that is not to be kept. Returns what nobody can refund any more.

        That is the user, asset number and amount of withdraws. Rows that stay keep their numbers, so that only what
        goes is touched: the core waits for this.
        """
        starts, blocks = self._starts, self.blocks
        self._starts, self.blocks, self._decoded = [], [], {}
        withdrawn: dict[int, tuple[int, int, int]] = {}
        for start, block in zip(starts, blocks, strict=True):
            items = _decode(block.items)
            if min(item[1] for item in items) >= floor:
                self._starts.append(start)
                self.blocks.append(block)
                continue
            metas = [meta for (meta,) in _META.iter_unpack(block.metas)]
            self._forget([pair for pair in zip(items, metas, strict=True) if _goes(pair[0], floor, keep)], withdrawn)
            for goes, run in groupby(range(block.count), key=lambda place: _goes(items[place], floor, keep)):
                if not goes:
                    places = list(run)
                    first, end = places[0], places[-1] + 1
                    self._starts.append(start + first)
                    self.blocks += blocks_of(block.sequence + first, items[first:end], metas[first:end])
        return list(withdrawn.values())

    def _forget(self, pairs: list[tuple[Item, int]], withdrawn: dict[int, tuple[int, int, int]]) -> None:
        where = self.where
        self.count -= len(pairs)
        for (op, id_, user, _, amount, _), meta in pairs:
            del where[op][id_]
            if op == Op.WITHDRAW and not meta & 0xFF:
                withdrawn[id_] = (user, meta >> 16, amount)
            elif op == Op.REFUND:  # behind its withdraw, and forgotten with it
                withdrawn.pop(id_, None)

    def rows(self) -> Iterator[Row]:
        """Everything that is remembered, in order."""
        for block in self.blocks:
            yield from block.rows()

    def replace(self, blocks: Iterable[Block]) -> None:
        """These blocks instead of all there were."""
        self._clear()
        for block in blocks:
            self.index(block, self.end)
            self.extend([block])


def _goes(item: Item, floor: int, keep: Collection[int]) -> bool:
    return item[1] < floor and item[1] not in keep
