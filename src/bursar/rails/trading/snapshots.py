"""Snapshots: the whole state at one sequence, in one file, so that a core need not read its log from the beginning.

A snapshot is captured in an instant (balances are copied, blocks of history are only held), and written by a lane of
its own while the core goes on, in pieces that are synced one by one, so that the log's own syncs never wait behind
hundreds of megabytes. It is written aside, synced, renamed, and the folder synced; until then it does not exist.

    magic 8 · header length u32 · header (MessagePack) · CRC-32 of the header u32
    per asset: the users, u64 each; available, frozen, committed of each in turn, u64 each
    blocks of history: length u32 and bytes of each (history.Block) · CRC-32 of all that u32 · magic 8

A snapshot that is not whole is passed over for the one before. The log reaches back to the oldest that is kept. One of
another format is no damage: the core does not start.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from struct import Struct
from struct import error as struct_error
from typing import Final

import msgspec

from bursar.ports import Files, write_whole
from bursar.rails.trading.accounts import ACCOUNT_BYTES
from bursar.rails.trading.floors import CoreFloors
from bursar.rails.trading.frames import numbers
from bursar.rails.trading.history import Block, load, octets
from bursar.rails.trading.journal import NewAsset
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import numbered

MAGIC, END = b"BURSNAP2", b"BURSEND2"
PREFIX: Final = "snap-"
SUFFIX: Final = ".snap"
KEPT: Final = 2
PIECE_BYTES: Final = 4 * 1024 * 1024
READ_BYTES: Final = 16 * 1024 * 1024
BLOCKS_AT_A_TIME: Final = 512

_U32: Final = Struct("<I")


class BadSnapshot(ValueError):
    """These bytes are not a whole snapshot."""


class OtherFormat(ValueError):
    """These bytes are a snapshot of another version."""


class Header(msgspec.Struct, array_like=True, frozen=True):
    """What a snapshot holds."""

    name: str
    core: str  # its identity
    ledger: str  # to which it is bound; "": to none
    sequence: int
    room: int
    forget: int
    kept: list[int]  # ids below `room` whose withdraws reserve room
    highest: int  # id of a transfer
    assets: list[tuple[str, int]]  # code and number of accounts, in the order of their numbers
    statuses: list[tuple[int, int]]
    rows: int


@dataclass(frozen=True)
class Snapshot:
    """A state at one moment, held until it is written."""

    header: Header
    columns: list[array[int]]
    blocks: list[Block]


@dataclass(frozen=True)
class Restored:
    """What a snapshot held."""

    state: CoreState
    name: str
    core: str  # the identity of its core


def capture(state: CoreState, name: str, core: str) -> Snapshot:
    """The state as it is now. Nothing may be pending, and it may not be written before its sequence is on disk."""
    assert not state.pending, "a snapshot must not see what is not in a frame yet"
    columns: list[array[int]] = []
    for accounts in state.assets.values():
        columns += accounts.columns()
    header = Header(
        name,
        core,
        state.ledger,
        state.sequence,
        state.floors.room,
        state.floors.forget,
        sorted(state.floors.kept),
        state.highest,
        [(code, len(accounts.by_user)) for code, accounts in state.assets.items()],
        sorted(state.statuses.items()),
        state.history.count,
    )
    return Snapshot(header, columns, list(state.history.blocks))


def pieces(snapshot: Snapshot) -> Iterator[bytes]:
    """The bytes of a snapshot."""
    header = msgspec.msgpack.encode(snapshot.header)
    yield MAGIC + _U32.pack(len(header)) + header + _U32.pack(zlib.crc32(header))
    checksum = 0
    for data in _body(snapshot):
        checksum = zlib.crc32(data, checksum)
        yield data
    yield _U32.pack(checksum) + END


def _body(snapshot: Snapshot) -> Iterator[bytes]:
    yield from map(octets, snapshot.columns)
    for start in range(0, len(snapshot.blocks), BLOCKS_AT_A_TIME):
        some = snapshot.blocks[start : start + BLOCKS_AT_A_TIME]
        yield b"".join(part for block in some for part in (_U32.pack(block.size), block.dump()))


def read(files: Files, path: str, progress: Callable[[int], object]) -> bytes:
    """A snapshot's bytes. Piece by piece: it may be large, and the disk slow; `progress` is called for each."""
    pieces_read: list[bytes] = []
    at, size = 0, files.size(path)
    while at < size:
        piece = files.read(path, at, READ_BYTES)
        if not piece:
            break
        at += len(piece)
        pieces_read.append(piece)
        progress(len(piece))
    return b"".join(pieces_read)


def restore(data: bytes, progress: Callable[[int], object] = lambda _: None) -> Restored:
    """The state in a snapshot, and whose it is; `progress` is called with the bytes that are understood."""
    header, at = read_header(data)
    if data[-len(END) :] != END:
        raise BadSnapshot("it has no end")
    body = memoryview(data)[at : -4 - len(END)]
    if zlib.crc32(body) != _U32.unpack_from(data, len(data) - 4 - len(END))[0]:
        raise BadSnapshot("its checksum is wrong")
    state = CoreState()
    start = 0
    for number, (code, count) in enumerate(header.assets, 1):
        state.replay([NewAsset(number, code)])
        middle, end = start + count * 8, start + count * ACCOUNT_BYTES
        state.assets[code].load(numbers(body[start:middle]), numbers(body[middle:end]))
        start = end
        progress(count * ACCOUNT_BYTES)
    try:
        for block in _blocks(body[start:], progress):
            state.history.append(block)
    except (ValueError, struct_error) as error:
        raise BadSnapshot(f"its checksum is right and its content is not: {error}") from error
    if state.history.count != header.rows:
        raise BadSnapshot(f"it has {state.history.count} rows instead of {header.rows}")
    state.sequence, state.statuses = header.sequence, dict(header.statuses)
    state.ledger, state.highest = header.ledger, header.highest
    state.floors = CoreFloors(header.room, header.forget, header.kept)
    return Restored(state, header.name, header.core)


def _blocks(data: memoryview, progress: Callable[[int], object]) -> Iterator[Block]:
    at = 0
    while at < len(data):
        end = at + 4 + _U32.unpack_from(data, at)[0]
        yield load(bytes(data[at + 4 : end]))
        progress(end - at)
        at = end


def read_header(data: bytes) -> tuple[Header, int]:
    """What a snapshot says of itself, and where its columns begin."""
    if data[:8] != MAGIC and data[:7] == MAGIC[:7] and data.endswith(END[:7] + data[7:8]):  # no flipped bit: both ends
        raise OtherFormat(f"it begins with {data[:8]!r}, and a snapshot of this version with {MAGIC!r}")
    if len(data) < 12 or data[:8] != MAGIC:
        raise BadSnapshot("its first bytes are not those of a snapshot")
    length = _U32.unpack_from(data, 8)[0]
    raw = data[12 : 12 + length]
    if len(data) < 16 + length or zlib.crc32(raw) != _U32.unpack_from(data, 12 + length)[0]:
        raise BadSnapshot("its header is damaged")
    try:
        return msgspec.msgpack.decode(raw, type=Header), 16 + length
    except msgspec.MsgspecError as error:
        raise BadSnapshot(f"its header is of another version: {error}") from error


def snapshot_name(sequence: int) -> str:
    """A snapshot's file."""
    return f"{PREFIX}{sequence:020d}{SUFFIX}"


def snapshots_in(files: Files, folder: str) -> list[int]:
    """The sequences of the snapshots in a folder, newest first."""
    return [sequence for sequence, _ in reversed(numbered(files, folder, PREFIX, SUFFIX))]


def write(files: Files, folder: str, snapshot: Snapshot) -> int:
    """Put a snapshot into a folder, and keep the newest two; returns the sequence of the oldest kept.

    0 if there is none to fall back to.
    """
    cut = (memoryview(p)[at : at + PIECE_BYTES] for p in pieces(snapshot) for at in range(0, len(p), PIECE_BYTES))
    write_whole(files, folder, snapshot_name(snapshot.header.sequence), cut)
    found = snapshots_in(files, folder)
    for sequence in found[KEPT:]:
        files.remove(f"{folder}/{snapshot_name(sequence)}")
    if found[KEPT:]:
        files.sync_folder(folder)  # before the log that only they needed goes
    return found[KEPT - 1] if len(found) >= KEPT else 0
