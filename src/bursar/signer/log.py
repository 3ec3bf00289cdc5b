"""The signer's log on disk: entries in frames, appended and synced before an answer leaves, never changed.

One file, one frame a line:

    bursar-log 1 LENGTH SHA256 [["HASH", ENTRY], …]

A frame holds the entries of all requests that waited together; it is one write and one fsync. LENGTH and SHA256 are of
the JSON behind them, and say whether the frame is whole. HASH is the hash of its entry, which contains the hash of the
entry before: no entry can be changed, left out or put in without changing all that follow. The chain shows damage and
clumsy edits; it is no signature, and does not stop an attacker who can write to the disk and rewrites all of it.

A crash may leave the last frame incomplete. Nothing in it was answered, so it is cut off, and kept beside the log in
a file of its own. Damage anywhere else stops the signer. A last frame that was whole and was damaged later looks like
an incomplete one; callers that have seen its entries then refuse the signer (W33)."""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from bursar.ports import File, Files
from bursar.signer import entries
from bursar.signer.entries import NO_HASH, Entry
from bursar.signer.errors import NoLog, SignerDamaged, SignerInUse
from bursar.signer.state import State

FILE: Final = "log"
LOCK: Final = "lock"
ASIDE: Final = ".new"
TORN: Final = "torn-"
MAGIC: Final = b"bursar-log 1 "
HEADER: Final = re.compile(rb"bursar-log 1 ([0-9]{10}) ([0-9a-f]{64}) ")
HEADER_BYTES: Final = len(MAGIC) + 10 + 1 + 64 + 1
FRAME_BYTES_MAX: Final = 64 * 1024 * 1024
CHUNK_BYTES: Final = 4 * 1024 * 1024

_frame_decoder = msgspec.json.Decoder(list[tuple[str, msgspec.Raw]])


class Bad(Exception):
    """What is there is no frame."""


@dataclass(frozen=True)
class Torn:
    """An incomplete end that was cut off, and where it is kept."""

    size: int
    kept: str


def frame(parts: list[tuple[str, bytes]]) -> bytes:
    """A frame of entries and their hashes."""
    payload = b"[" + b",".join(b'["%s",%s]' % (hash_.encode(), data) for hash_, data in parts) + b"]"
    digest = hashlib.sha256(payload).hexdigest().encode()
    return b"%s%010d %s %s\n" % (MAGIC, len(payload), digest, payload)


class Log:
    """The log of one signer, open for appending. All of it happens on one lane."""

    def __init__(self, files: Files, folder: str) -> None:
        self.folder = folder
        self.path = f"{folder}/{FILE}"
        self.torn: Torn | None = None
        self._files = files
        self._file: File | None = None
        self._unlock: Callable[[], None] | None = None
        self._firsts: list[int] = []  # the sequence of each frame's first entry
        self._offsets: list[int] = []
        self._end = 0

    def open(self, state: State, create: Callable[[], Entry] | None) -> None:
        """Read everything into an empty state, cut an incomplete end off, and get ready to append.

        `create` makes the first entry of a new log; None: there must be one.
        """
        files = self._files
        files.make_folder(self.folder)
        try:
            self._unlock = files.lock(f"{self.folder}/{LOCK}")
        except BlockingIOError as error:
            raise SignerInUse(self.folder) from error
        found = files.names(self.folder)
        if FILE + ASIDE in found:
            files.remove(self.path + ASIDE)  # begun and never finished: it never was
        if create is not None:
            if FILE in found:
                raise NoLog(self.folder, "there is a log already; leave --new-log out")
            self._create(create())
        elif FILE not in found:
            raise NoLog(
                self.folder, "there is no log; is the folder right? A new signer is started with --new-log once"
            )
        self._load(state)
        self._file = files.append(self.path)

    def _create(self, first: Entry) -> None:
        """Write it aside and rename it: a log is there whole, with its identity, or not at all."""
        data = entries.encode(first)
        made = self._files.create(self.path + ASIDE)
        made.write(frame([(entries.hash_of(data), data)]))
        made.sync()
        made.close()
        self._files.rename(self.path + ASIDE, self.path)
        self._files.sync_folder(self.folder)

    def _load(self, state: State) -> None:
        for offset, found in read_frames(self._files, self.path):
            if isinstance(found, Bad):
                self._cut(offset, str(found))
                return
            applied = [check_next(self.path, offset, state, hash_, data) for hash_, data in found]
            self._firsts.append(applied[0].sequence)
            self._offsets.append(offset)
            self._end = offset
        self._end = self._files.size(self.path)

    def _cut(self, offset: int, why: str) -> None:
        """Cut an incomplete end off, if that is what it is; else stop."""
        rest = self._files.read(self.path, offset)
        if offset == 0 or len(rest) > FRAME_BYTES_MAX or whole_frame_in(rest):
            raise SignerDamaged(self.path, offset, why)
        kept = f"{self.folder}/{TORN}{offset:012d}"
        file = self._files.create(kept)
        file.write(rest)
        file.sync()
        file.close()
        self._files.sync_folder(self.folder)
        self._files.truncate(self.path, offset)
        self._end = offset
        self.torn = Torn(len(rest), kept)

    def append(self, data: bytes, first: int) -> None:
        """Append a frame and sync it. An OSError means that the process has to end."""
        assert self._file is not None
        self._file.write(data)
        self._file.sync()
        self._firsts.append(first)
        self._offsets.append(self._end)
        self._end += len(data)

    def read(self, after: int, up_to: int, limit: int, bytes_max: int) -> list[Entry]:
        """Entries behind a sequence, in order: at most so many, of about so many bytes."""
        found: list[Entry] = []
        size = 0
        start = max(0, bisect_left(self._firsts, after + 1) - 1)
        for index in range(start, len(self._offsets)):
            end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
            offset = self._offsets[index]
            payload = check_frame(self._files.read(self.path, offset, end - offset))
            for _, data in payload:
                entry = entries.decode(data)
                if after < entry.sequence <= up_to:
                    found.append(entry)
                    size += len(bytes(data))
                if len(found) >= limit or size >= bytes_max:
                    return found
        return found

    def close(self) -> None:
        """Let go of the folder."""
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


def check_next(path: str, offset: int, state: State, hash_: str, data: msgspec.Raw) -> Entry:
    """Verify that an entry follows the state, and apply it. SignerDamaged if it does not."""
    try:
        entry = entries.decode(data)
    except msgspec.MsgspecError as error:
        raise SignerDamaged(path, offset, f"an entry can't be read ({type(error).__name__})") from None
    if entries.hash_of(data) != hash_:
        raise SignerDamaged(path, offset, f"entry {entry.number} is not what its hash says")
    follows = (state.number + 1, state.sequence + entries.is_promise(entry.what), state.last_hash)
    if (entry.number, entry.sequence, entry.previous) != follows:
        raise SignerDamaged(path, offset, f"entry {entry.number} does not follow entry {state.number}")
    if isinstance(entry.what, entries.Created) != (entry.previous == NO_HASH):
        raise SignerDamaged(path, offset, "a log begins with its creation, and has one")
    state.apply(entry, hash_)
    return entry


def read_frames(files: Files, path: str) -> Iterator[tuple[int, list[tuple[str, msgspec.Raw]] | Bad]]:
    """All frames with their offsets; the last one may be Bad."""
    size, offset, buffer, start = files.size(path), 0, b"", 0
    while offset < size:
        wanted = HEADER_BYTES
        while True:
            at = offset - start
            if len(buffer) - at < wanted and start + len(buffer) < size:
                more = files.read(path, start + len(buffer), max(CHUNK_BYTES, wanted))
                buffer, start = buffer[at:] + more, offset
                continue
            header = HEADER.match(buffer, at)
            if header is None:
                yield offset, Bad("there is no header of a frame")
                return
            length = HEADER_BYTES + int(header[1]) + 1
            if length > FRAME_BYTES_MAX:
                yield offset, Bad(f"a frame of {length} bytes")
                return
            if wanted < length and start + len(buffer) < size:
                wanted = length
                continue
            break
        try:
            yield offset, check_frame(buffer[at : at + length])
        except Bad as bad:
            yield offset, bad
            return
        offset += length


def check_frame(data: bytes) -> list[tuple[str, msgspec.Raw]]:
    """Entries of a frame that is whole; Bad if it is not."""
    header = HEADER.match(data)
    if header is None:
        raise Bad("there is no header of a frame")
    payload = data[HEADER_BYTES:-1]
    if len(payload) != int(header[1]) or data[-1:] != b"\n":
        raise Bad("the frame is incomplete")
    if hashlib.sha256(payload).hexdigest().encode() != header[2]:
        raise Bad("the frame is not what its checksum says")
    try:
        found = _frame_decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise Bad(f"the frame can't be read ({type(error).__name__})") from None
    if not found:
        raise Bad("the frame is empty")
    return found


def whole_frame_in(data: bytes) -> bool:
    """Whether there is a whole frame behind the first byte: then what is in front of it is damage, not a torn end."""
    at = data.find(MAGIC, 1)
    while at >= 0:
        header = HEADER.match(data, at)
        if header is not None:
            try:
                check_frame(data[at : at + HEADER_BYTES + int(header[1]) + 1])
                return True
            except Bad:
                pass
        at = data.find(MAGIC, at + 1)
    return False
