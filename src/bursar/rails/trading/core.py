"""A core state that is on disk: what is decided is appended and synced, and only then is it answered.

Requests are decided as they come, one after the other, and their answers are held back. Whenever the log is free, all
that was decided since is one frame, one write, one fsync; then the answers that it covers go out, and what was decided
meanwhile is the next frame. So a lone caller waits for one fsync, a thousand callers share one, and deciding goes on
while the disk is busy. Reading waits likewise: a balance is answered only when everything that made it is on disk.

If the disk fails, no answer leaves any more, and `run` raises: the process has to end, because a log that failed once
cannot be trusted to know what it holds (T6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, TypeVar

from bursar.ports import ASIDE, Files, Ports, SerialExecutor
from bursar.rails.trading import frames, snapshots
from bursar.rails.trading.errors import CoreDamaged, CoreInUse, CoreStopped, WrongCore
from bursar.rails.trading.journal import JournalRecord
from bursar.rails.trading.snapshots import BadSnapshot, OtherFormat, Snapshot
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import SEGMENT_BYTES_MAX, Log, Torn, segments_in

T = TypeVar("T")

LOCK: Final = "lock"
DAMAGED: Final = ".bad"
GROUP_ROWS_MAX: Final = 262_144
SNAPSHOT_BYTES: Final = 64 * 1024 * 1024  # of log between two snapshots
LOADING_BYTES: Final = 1024 * 1024  # between two reports of how far loading is


@dataclass
class Recovery:
    """What opening a core found and did."""

    snapshot: int = 0  # its sequence; 0 if everything came from the log
    bad_snapshots: list[tuple[str, str]] = field(default_factory=list)
    frames: int = 0
    sequence: int = 0
    remembered: int = 0
    torn: Torn | None = None
    seconds: float = 0.0


class Loading(NamedTuple):
    """How far a core is with its files while it opens. `done` never sinks; `total` may grow."""

    file: str
    done: int
    total: int


class Core:
    """One core. `open` it, keep `run` running, decide on its `state`, and let answers go through `when_durable`."""

    def __init__(
        self,
        ports: Ports,
        folder: str,
        name: str,
        *,
        segment_bytes: int,
        snapshot_bytes: int,
        loading: Callable[[Loading], object],
    ) -> None:
        self.ports = ports
        self.folder = folder
        self.name = name
        self.identity = ""  # made when the folder is; no other core has it
        self.files: Files = ports.files()
        self.state = CoreState()
        self.log = Log(self.files, folder, name, segment_bytes_max=segment_bytes)
        self.durable = 0  # everything up to here is on disk
        self.recovery = Recovery()
        self.followers: list[Callable[[list[JournalRecord]], None]] = []  # called with each frame when it is on disk
        self.snapshot_bytes = snapshot_bytes
        self._loading = _Progress(loading)
        self._lane: SerialExecutor = ports.lane(f"core-{name}")
        self._aside: SerialExecutor = ports.lane(f"core-{name}-snapshots")
        self._unlock: Callable[[], None] | None = None
        self._held: list[Callable[[], None]] = []
        self._wake = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._since_snapshot = 0
        self._snapshot_at = 0
        self._snapshotting: asyncio.Task[None] | None = None
        self._stopping = False

    @classmethod
    async def open(
        cls,
        ports: Ports,
        folder: str,
        name: str,
        *,
        segment_bytes: int = SEGMENT_BYTES_MAX,
        snapshot_bytes: int = SNAPSHOT_BYTES,
        loading: Callable[[Loading], object] = lambda _: None,
    ) -> Core:
        """A core on what its folder holds. Raises CoreInUse, CoreDamaged, WrongCore, or an OSError.

        `loading` is called now and then with how far it is, from another thread.
        """
        sizes = {"segment_bytes": segment_bytes, "snapshot_bytes": snapshot_bytes}
        core = cls(ports, folder, name, loading=loading, **sizes)
        started = ports.monotonic()
        try:
            await core._lane.run(core._recover)
        except BaseException:  # it serves no client before it is open; let go of the folder and pass it on
            core.close()
            raise
        core.recovery.seconds = ports.monotonic() - started
        return core

    # --- opening

    def _recover(self) -> None:
        files, folder = self.files, self.folder
        files.make_folder(folder)
        try:
            self._unlock = files.lock(f"{folder}/{LOCK}")
        except BlockingIOError as error:
            raise CoreInUse(folder) from error
        for name in files.names(folder):
            if name.endswith(ASIDE):
                files.remove(f"{folder}/{name}")  # begun and never finished: it never was
        self._loading.total = sum(segment.size for segment in segments_in(files, folder))
        self._load_snapshot()
        state, found = self.state, self.recovery
        for frame in self.log.read_all():
            if frame.first > state.sequence + 1 or frame.first <= state.sequence < frame.last:
                raise self._gap(
                    f"a frame holds sequences {frame.first} to {frame.last}, and {state.sequence + 1} is next"
                )
            if frame.last > state.sequence:
                state.replay(frame.records)
                found.frames += 1
            self._loading.advance(self.log.reading, frame.size)
        if self.log.segments and self.log.end < state.sequence:
            raise self._gap(f"the log ends at sequence {self.log.end}, before the snapshot at {state.sequence}")
        if self.identity and self.log.core and self.identity != self.log.core:
            raise self._gap(f"the log is of the core {self.log.core}, and the snapshot of the core {self.identity}")
        found.torn = self.log.torn
        self.identity = self.identity or self.log.core or self.ports.token()
        self.log.open(state.sequence + 1, self.identity)
        self.durable = found.sequence = state.sequence
        found.remembered = state.history.count

    def _load_snapshot(self) -> None:
        """The newest that is whole. A damaged one is put aside under another name, or it would count as a fallback."""
        for sequence in snapshots.snapshots_in(self.files, self.folder):
            path = f"{self.folder}/{snapshots.snapshot_name(sequence)}"
            progress = self._loading.part(path, self.files.size(path))
            try:
                found = snapshots.restore(snapshots.read(self.files, path, progress), progress)
            except BadSnapshot as error:
                self.recovery.bad_snapshots.append((path, str(error)))
                self.files.rename(path, path + DAMAGED)
                continue
            except OtherFormat as error:
                raise CoreDamaged(path, 0, str(error), "Start the version of bursar that wrote it") from error
            if found.name != self.name:
                raise WrongCore(self.folder, self.name, found.name)
            self.state, self.identity = found.state, found.core
            self.recovery.snapshot = self._snapshot_at = sequence
            return

    def _gap(self, why: str) -> CoreDamaged:
        advice = (
            "Put back the files that are missing. `bursar core inspect` lists what is there; if a snapshot covers all "
            "of it, moving the segments (wal-*) out of the folder lets the core start from that snapshot"
        )
        return CoreDamaged(self.folder, 0, why, advice)

    # --- answers

    def when_durable(self, answer: Callable[[], None]) -> None:
        """Call `answer` once everything decided so far is on disk; never, if the disk fails."""
        self._held.append(answer)
        self._wake.set()

    async def until_durable(self) -> None:
        """Wait until everything decided so far is on disk; for ever, if the disk fails."""
        answered = asyncio.Event()
        self.when_durable(answered.set)
        await answered.wait()

    async def has_room(self) -> None:
        """Wait until the next frame can take more."""
        if self.state.pending >= GROUP_ROWS_MAX:
            self._room.clear()
            self._wake.set()
            await self._room.wait()

    async def run(self) -> None:
        """Write what is decided and release the answers, until `stop`. Raises CoreStopped if the disk fails."""
        while True:
            if not self._held and not self._stopping:
                self._wake.clear()
                await self._wake.wait()
            if self._snapshotting is not None and self._snapshotting.done():
                self._snapshotting.result()
                self._snapshotting = None
            if self._held or self.state.sequence > self.durable:
                await self._write()
            elif self._stopping:
                return

    async def _write(self) -> None:
        """One frame, if anything was decided; then the answers it covers."""
        answers, self._held = self._held, []
        first, last = self.durable + 1, self.state.sequence
        if last >= first:
            records = self.state.drain()
            self._room.set()
            due = self._since_snapshot >= self.snapshot_bytes and self._snapshotting is None
            held = snapshots.capture(self.state, self.name, self.identity) if due else None
            # What was forgotten leaves the disk with the next snapshot: it counts like log that one would save reading.
            self._since_snapshot += self.state.freed_bytes
            self.state.freed_bytes = 0
            self._since_snapshot += await self._disk(self._lane, partial(self._append, records, first, last))
            self.durable = last
            for follow in list(self.followers):
                follow(records)
            if held is not None:
                self._since_snapshot = 0
                self._snapshotting = asyncio.create_task(self._keep(held), name="core-snapshot")
                self._snapshotting.add_done_callback(self._snapshot_done)
        for answer in answers:
            answer()

    def _append(self, records: list[JournalRecord], first: int, last: int) -> int:
        frame = frames.encode(records, first, last - first + 1)
        self.log.append(frame, first)
        return len(frame)

    async def _disk(self, lane: SerialExecutor, work: Callable[[], T]) -> T:
        try:
            return await lane.run(work)
        except OSError as error:
            raise CoreStopped(str(error)) from error

    # --- snapshots

    async def _keep(self, held: Snapshot) -> None:
        """Write a snapshot, whose sequence is on disk by now; then drop the log that no snapshot needs."""
        oldest = await self._disk(self._aside, partial(snapshots.write, self.files, self.folder, held))
        self._snapshot_at = held.header.sequence
        if oldest:
            await self._disk(self._lane, partial(self.log.drop_before, oldest))

    def _snapshot_done(self, task: asyncio.Task[None]) -> None:
        """Let `run` look at how it ended, also if no request comes."""
        if not task.cancelled():
            task.exception()  # looked at: if the log has failed meanwhile, `run` is no longer there to do it
        self._wake.set()

    async def snapshot(self) -> int:
        """Write a snapshot of what is on disk now; returns its sequence. Only when `run` has ended."""
        assert self.state.sequence == self.durable and not self.state.pending
        if self._snapshotting is not None:
            await self._snapshotting
        if self.durable > self._snapshot_at:
            await self._keep(snapshots.capture(self.state, self.name, self.identity))
        return self.durable

    # --- the end

    def stop(self) -> None:
        """Let `run` end once everything decided is on disk and answered."""
        self._stopping = True
        self._wake.set()

    def close(self) -> None:
        """Let go of the folder. Not before `run` has ended."""
        self._aside.close()
        self._lane.close()
        self.log.close()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None


class _Progress:
    """Counts bytes of files that were loaded, and reports them now and then."""

    def __init__(self, report: Callable[[Loading], object]) -> None:
        self.total = 0
        self._report = report
        self._done = 0.0
        self._reported = 0.0

    def advance(self, file: str, size: float) -> None:
        """So many bytes more."""
        self._done += size
        if self._done - self._reported >= LOADING_BYTES:
            self._reported = self._done
            self._report(Loading(file, int(self._done), self.total))

    def part(self, file: str, size: int) -> Callable[[int], None]:
        """A file more, of this size, which is gone through twice: read, then understood."""
        self.total += size
        return lambda more: self.advance(file, more / 2)
