"""The log: segments in a folder, opened with suspicion, appended to with an fsync, read again by subscribers.

Opening reads every segment that is kept and checks every frame. One kind of damage is what a crash leaves behind, and
is mended: bytes at the very end of the last segment that are no whole frame, with no whole frame behind them. They are
cut, and the report says so. Everything else stops the core: a gap, a foreign segment, a bad frame with good ones behind
it. Guessing there would forget what a client was answered.

A new segment gets its header under another name first, so that a segment is never without one. It carries the core's
identity, which is made with the first segment: a core that has a log has an identity. Everything here is synchronous,
for a lane.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

from bursar.ports import File, Files, write_whole
from bursar.rails.trading import frames
from bursar.rails.trading.errors import CoreDamaged, WrongCore
from bursar.rails.trading.frames import BadFrame, Frame

PREFIX: Final = "wal-"
SUFFIX: Final = ".log"
SEGMENT_BYTES_MAX: Final = 64 * 1024 * 1024


@dataclass
class Segment:
    """One file of the log."""

    path: str
    first: int  # the sequence with which it begins
    size: int


@dataclass(frozen=True)
class Torn:
    """What a crash left at the end of the log, and was cut."""

    path: str
    at: int
    size: int
    why: str


def segment_name(first: int) -> str:
    """A segment's file: named after its first sequence, so that names sort."""
    return f"{PREFIX}{first:020d}{SUFFIX}"


def segments_in(files: Files, folder: str) -> list[Segment]:
    """The segments of a folder, oldest first."""
    found = ((f"{folder}/{name}", first) for first, name in numbered(files, folder, PREFIX, SUFFIX))
    return [Segment(path, first, files.size(path)) for path, first in found]


def numbered(files: Files, folder: str, prefix: str, suffix: str) -> list[tuple[int, str]]:
    """The files of a folder that have a number between these, lowest first: the number, and the name."""
    found = []
    for name in files.names(folder):
        digits = name.removeprefix(prefix).removesuffix(suffix)
        if name.startswith(prefix) and name.endswith(suffix) and digits.isdigit():
            found.append((int(digits), name))
    return sorted(found)


class Log:
    """The end of the log, to which everything is appended."""

    def __init__(self, files: Files, folder: str, name: str, *, segment_bytes_max: int = SEGMENT_BYTES_MAX) -> None:
        self.files = files
        self.folder = folder
        self.name = name
        self.core = ""  # the identity that its segments carry; "" as long as none does
        self.segments: list[Segment] = []
        self.torn: Torn | None = None
        self.end = 0  # the last sequence that was read
        self.reading = ""  # the segment that is being read
        self._segment_bytes_max = segment_bytes_max
        self._file: File | None = None

    def read_all(self) -> Iterator[Frame]:
        """Every frame that is kept, in order; reports a torn end. Nothing is changed."""
        self.segments = segments_in(self.files, self.folder)
        expected = self.segments[0].first if self.segments else 1
        for segment in self.segments:
            last = segment is self.segments[-1]
            expected = yield from self.read_one(segment, expected, last=last)
            self.end = expected - 1

    def read_one(self, segment: Segment, expected: int, *, last: bool) -> Generator[Frame, None, int]:
        """The frames of one segment, which must begin with sequence `expected`; returns the one that is next."""
        self.reading = segment.path
        data = self.files.read(segment.path)
        at = self._check_header(segment, data, expected)
        while at < len(data):
            try:
                frame = frames.decode(data, at, expected)
            except BadFrame as error:
                self._judge(segment, data, at, expected, last, str(error))
                return expected
            yield frame
            at, expected = frame.end, frame.last + 1
        return expected

    def _check_header(self, segment: Segment, data: bytes, expected: int) -> int:
        """Whether the segment is the one that is next in this core's log; where its frames begin."""
        try:
            header = frames.read_segment_header(data)
        except BadFrame as error:
            raise self._damaged(segment, 0, str(error)) from error
        if header.name != self.name:
            raise WrongCore(self.folder, self.name, header.name)
        if header.first != segment.first or header.first != expected:
            raise self._damaged(segment, 0, f"it begins with sequence {header.first}, and {expected} is next")
        if self.core and header.core != self.core:
            why = f"it belongs to the core with identity {header.core}, and this is {self.core}"
            raise self._damaged(segment, 0, why)
        self.core = header.core
        return frames.SEGMENT_BYTES

    def _judge(self, segment: Segment, data: bytes, at: int, expected: int, last: bool, why: str) -> None:
        """A torn end is noted; anything else stops the core."""
        if not last:
            raise self._damaged(segment, at, f"{why}, and more of the log follows in the next segment")
        if frames.next_whole(data, at + 1, expected) is not None:
            raise self._damaged(segment, at, f"{why}, and whole frames follow")
        self.torn = Torn(segment.path, at, len(data) - at, why)

    @staticmethod
    def _damaged(segment: Segment, at: int, why: str) -> CoreDamaged:
        advice = (
            "Put back a good copy of this file. If a newer snapshot covers it, moving this segment and all older ones "
            "out of the folder also lets the core start; `bursar core inspect` says what the snapshots cover"
        )
        return CoreDamaged(segment.path, at, why, advice)

    def open(self, next_sequence: int, core: str) -> None:
        """Cut a torn end, and be ready to append `next_sequence` to the log of the core with this identity."""
        self.core = core
        if self.torn is not None:
            self.files.truncate(self.torn.path, self.torn.at)
            self.segments[-1].size = self.torn.at
        if not self.segments:
            self._new_segment(next_sequence)
            return
        # A crash may have come between a rename and the sync of the folder; what is appended must not lose its name.
        self.files.sync_folder(self.folder)
        self._file = self.files.append(self.segments[-1].path)

    def append(self, frame: bytes, first: int) -> None:
        """Write a frame; return when it is on disk. After an OSError nothing may be appended or answered any more."""
        if self.segments[-1].size >= self._segment_bytes_max:
            self._new_segment(first)
        assert self._file is not None
        self._file.write(frame)
        self._file.sync()
        self.segments[-1].size += len(frame)

    def _new_segment(self, first: int) -> None:
        if self._file is not None:
            self._file.close()
        header = frames.segment_header(self.name, self.core, first)
        path = write_whole(self.files, self.folder, segment_name(first), [header])
        self._file = self.files.append(path)
        self.segments.append(Segment(path, first, len(header)))

    def drop_before(self, sequence: int) -> None:
        """Remove segments that hold nothing behind `sequence`. The last one always stays."""
        while len(self.segments) > 1 and self.segments[1].first <= sequence + 1:
            self.files.remove(self.segments.pop(0).path)

    def frames_after(self, sequence: int) -> Iterator[Frame]:
        """Frames with anything behind `sequence`, as far as the log goes now. For a reader beside the writer."""
        segments = [Segment(s.path, s.first, s.size) for s in self.segments]
        for place, segment in enumerate(segments):
            if place + 1 < len(segments) and segments[place + 1].first <= sequence + 1:
                continue
            data = self.files.read(segment.path, 0, segment.size)
            at, expected = frames.SEGMENT_BYTES, segment.first
            while at < len(data):
                frame = frames.decode(data, at, expected)
                at, expected = frame.end, frame.last + 1
                if frame.last > sequence:
                    yield frame

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
