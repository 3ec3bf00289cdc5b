"""The bytes of the log: segments, frames, and the journal records in them. Pure; golden vectors hold every byte of it.

A segment is a header and frames. A frame is everything one fsync covers: it is there whole or not at all, and since
the next one is only written when this one is on disk, nothing but the last frame of the last segment can ever be torn.

    segment   magic 8 · first sequence u64 · core's name 64, zero-padded · core's identity 32 hexadecimal digits ·
              CRC-32 of the 112 bytes before, u32
    frame     magic 4 · payload length u32 · first sequence u64 · sequences in it u32 · CRC-32 u32 · payload
              the CRC is over the 20 bytes before it and the payload
    payload   blocks, one after the other: kind u8 · three zeros · length u32 · bytes
      1 asset   number u64 · the code in ASCII
      2 rows    sequence u64 · rows u32 · what became of each, u32 · MessagePack (history.Block)
      3 status  sequence u64 · user u64 · status u64
      5 floors  sequence u64 · room u64 · forget u64 · ids that are kept, u64 each
      6 bound   sequence u64 · the ledger's identity in ASCII

All integers are little-endian. A segment of another format is refused.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from struct import Struct
from typing import Final, assert_never

from bursar.rails.trading.history import load, octets
from bursar.rails.trading.journal import Bound, FloorsRaised, JournalRecord, NewAsset, OperationBlocks, StatusChange
from bursar.rails.trading.rules import IDENTITY_DIGITS, Status, is_asset, is_identity, is_ledger

SEGMENT_MAGIC: Final = b"BURSWAL2"
FRAME_MAGIC: Final = b"\xf5BWF"
NAME_BYTES_MAX: Final = 64
PAYLOAD_BYTES_MAX: Final = 64 * 1024 * 1024

_SEGMENT: Final = Struct(f"<8sQ{NAME_BYTES_MAX}s{IDENTITY_DIGITS}s")
_FRAME: Final = Struct("<4sIQI")
_BLOCK: Final = Struct("<B3xI")
_U32: Final = Struct("<I")
SEGMENT_BYTES: Final = _SEGMENT.size + 4  # its header
FRAME_BYTES: Final = _FRAME.size + 4

ASSET, ROWS, STATUS, FLOORS, BOUND = 1, 2, 3, 5, 6


class BadFrame(ValueError):
    """These bytes are not a whole frame."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame, read."""

    first: int
    count: int
    records: list[JournalRecord]
    end: int  # where the next one begins
    size: int

    @property
    def last(self) -> int:
        """Its last sequence."""
        return self.first + self.count - 1


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """How a segment begins, read."""

    name: str
    core: str  # its identity
    first: int


def segment_header(name: str, core: str, first: int) -> bytes:
    """How a segment begins."""
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise ValueError(f"a core's name has 1 to {NAME_BYTES_MAX} bytes, not {len(encoded)}")
    head = _SEGMENT.pack(SEGMENT_MAGIC, first, encoded, core.encode("ascii"))
    return head + _U32.pack(zlib.crc32(head))


def read_segment_header(data: bytes) -> SegmentHeader:
    """How a segment begins."""
    head = data[: _SEGMENT.size]
    if data[:8] != SEGMENT_MAGIC:
        raise BadFrame(f"it begins with {data[:8]!r}, and a segment of this version with {SEGMENT_MAGIC!r}")
    if len(data) < SEGMENT_BYTES or zlib.crc32(head) != _U32.unpack_from(data, _SEGMENT.size)[0]:
        raise BadFrame("its first bytes are not those of a segment")
    _, first, name, core = _SEGMENT.unpack(head)
    if not is_identity(identity := core.decode("ascii", "replace")):
        raise BadFrame(f"{identity!r} is no identity of a core")
    return SegmentHeader(name.rstrip(b"\0").decode(), identity, first)


def encode(records: Iterable[JournalRecord], first: int, count: int) -> bytes:
    """A frame."""
    payload = b"".join(_blocks(records))
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise ValueError(f"a frame of {len(payload)} bytes is over the limit of {PAYLOAD_BYTES_MAX}")
    head = _FRAME.pack(FRAME_MAGIC, len(payload), first, count)
    return b"".join((head, _U32.pack(zlib.crc32(payload, zlib.crc32(head))), payload))


def _blocks(records: Iterable[JournalRecord]) -> Iterator[bytes]:
    for record in records:
        match record:
            case OperationBlocks(blocks):
                for block in blocks:
                    yield _BLOCK.pack(ROWS, block.size)
                    yield block.dump()
                continue
            case NewAsset(number, code):
                kind, body = ASSET, octets(array("Q", [number])) + code.encode("ascii")
            case StatusChange():
                kind, body = STATUS, octets(array("Q", record))
            case FloorsRaised(sequence, room, forget, keep):
                kind, body = FLOORS, octets(array("Q", [sequence, room, forget, *keep]))
            case Bound(sequence, ledger):
                kind, body = BOUND, octets(array("Q", [sequence])) + ledger.encode("ascii")
            case _:
                assert_never(record)
        yield _BLOCK.pack(kind, len(body))
        yield body


def decode(data: bytes, start: int, expected: int) -> Frame:
    """The frame at `start`, which must begin with sequence `expected`."""
    if len(data) - start < FRAME_BYTES:
        raise BadFrame(f"{len(data) - start} bytes are too few for a frame")
    magic, length, first, count = _FRAME.unpack_from(data, start)
    if magic != FRAME_MAGIC:
        raise BadFrame("no frame begins here")
    body, end = start + FRAME_BYTES, start + FRAME_BYTES + length
    if length > PAYLOAD_BYTES_MAX or end > len(data):
        raise BadFrame(f"it says {length} bytes, and {len(data) - body} are there")
    payload = data[body:end]
    if zlib.crc32(payload, zlib.crc32(data[start : start + _FRAME.size])) != _U32.unpack_from(data, body - 4)[0]:
        raise BadFrame("its checksum is wrong")
    if first != expected:
        raise BadFrame(f"it begins with sequence {first}, and {expected} is next")
    try:
        records = list(_records(payload, first, count))
    except (ValueError, IndexError) as error:
        raise BadFrame(f"its checksum is right and its content is not: {error}") from error
    return Frame(first, count, records, end, end - start)


def _records(payload: bytes, first: int, count: int) -> Iterator[JournalRecord]:
    """The records of a payload, whose sequences must be `first` and on, without a gap."""
    at, sequence = 0, first
    while at < len(payload):
        if len(payload) - at < _BLOCK.size:
            raise ValueError("half a block")
        kind, length = _BLOCK.unpack_from(payload, at)
        at += _BLOCK.size
        body = payload[at : at + length]
        at += length
        if len(body) != length:
            raise ValueError("half a block")
        record = _record(kind, body)
        if not isinstance(record, NewAsset):
            if record.sequence != sequence:
                raise ValueError(f"sequence {record.sequence} where {sequence} is next")
            sequence += record.blocks[0].count if isinstance(record, OperationBlocks) else 1
        yield record
    if sequence != first + count:
        raise ValueError(f"{count} sequences were promised, and {sequence - first} are there")


def _record(kind: int, body: bytes) -> JournalRecord:
    """The record in one block."""
    if kind == ROWS:
        return OperationBlocks([load(body)])
    if kind in (ASSET, BOUND):
        number, text = numbers(body[:8])[0], body[8:].decode("ascii")
        if not (is_asset(text) if kind == ASSET else is_ledger(text)):
            raise ValueError(f"{text!r} is no {'asset' if kind == ASSET else 'ledger'}")
        return NewAsset(number, text) if kind == ASSET else Bound(number, text)
    values = numbers(body)
    if kind == STATUS and values[2] in tuple(Status):
        return StatusChange(*values[:3])
    if kind == FLOORS and values[1] >= values[2]:
        return FloorsRaised(values[0], values[1], values[2], tuple(values[3:]))
    raise ValueError(f"a block of kind {kind}")


def numbers(data: bytes | memoryview) -> array[int]:
    """Little-endian unsigned 64-bit integers."""
    found = array("Q")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def next_whole(data: bytes, start: int, above: int) -> int | None:
    """Where, behind `start`, a whole frame with a sequence above `above` begins: then damage is no torn end."""
    at = data.find(FRAME_MAGIC, start)
    while at >= 0:
        if len(data) - at >= FRAME_BYTES:
            first = _FRAME.unpack_from(data, at)[2]
            if first > above:
                try:
                    decode(data, at, first)
                    return at
                except BadFrame:
                    pass
        at = data.find(FRAME_MAGIC, at + 1)
    return None
