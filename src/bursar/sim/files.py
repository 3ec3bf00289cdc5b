"""A simulated disk of plain files, as unkind as a real one may be.

Written bytes are there for every reader, and may be gone after a power cut until they are synced: of each file, by
itself, some of its unsynced end survives, perhaps with a sector of garbage in it. Names (of new, renamed and removed
files) survive a power cut only once their folder is synced, or by luck, and then in the order in which they changed; so
a renamed file may be there with nothing in it. The disk can be full, a sync can fail, and the power can be cut before
any single operation, also in the middle of a piece of work on a lane.

`FilesState` is the disk and outlives processes; `SimFiles` is one incarnation's door to it.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from bursar.ports import File
from bursar.sim.loop import Fenced

if TYPE_CHECKING:
    from bursar.sim.process import Process

SECTOR: Final = 512


class Inode:
    """A file without its name."""

    __slots__ = ("data", "synced")

    def __init__(self) -> None:
        self.data = bytearray()
        self.synced = 0  # how many of its bytes a power cut cannot take

    def power_cut(self, rng: random.Random) -> None:
        """Keep what was synced, and some of the rest, perhaps torn."""
        kept = rng.randint(self.synced, len(self.data)) if rng.random() < 0.8 else len(self.data)
        del self.data[kept:]
        if kept > self.synced and rng.random() < 0.5:
            start = rng.randrange(self.synced, kept)
            end = min(kept, start + rng.randint(1, SECTOR))
            self.data[start:end] = bytes(end - start) if rng.random() < 0.5 else rng.randbytes(end - start)
        self.synced = len(self.data)


class FilesState:
    """What is on the disk, and what would be if the power were cut now."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.names: dict[str, Inode] = {}
        self.folders: set[str] = set()
        self.locks: set[str] = set()
        self.operations = 0  # that changed something, or tried to
        self.cut_at: int | None = None  # the power is cut before this operation
        self.cut_probability = 0.0
        self.free_bytes: int | None = None  # None: the disk is never full
        self.failing_syncs = 0  # so many of the next ones fail
        self._lasting: dict[str, Inode] = {}
        self._changes: list[tuple[str, str, Inode | None]] = []  # folder, path, what it names from then on

    def name(self, path: str, inode: Inode | None) -> None:
        """Change what a path stands for, for now."""
        if inode is None:
            del self.names[path]
        else:
            self.names[path] = inode
        self._changes.append((_folder(path), path, inode))

    def sync_folder(self, folder: str) -> None:
        """Make the names in a folder last."""
        rest = []
        for change in self._changes:
            if change[0] == folder:
                self._make_last(change[1], change[2])
            else:
                rest.append(change)
        self._changes = rest

    def _make_last(self, path: str, inode: Inode | None) -> None:
        if inode is None:
            self._lasting.pop(path, None)
        else:
            self._lasting[path] = inode

    def power_cut(self) -> None:
        """Lose what luck does not keep."""
        for _, path, inode in self._changes[: self.rng.randint(0, len(self._changes))]:
            self._make_last(path, inode)
        self._changes.clear()
        self.names = dict(self._lasting)
        for path in sorted(self.names):
            self.names[path].power_cut(self.rng)
        self.locks.clear()

    def cuts_now(self) -> bool:
        """Whether the power goes before the operation that is about to happen."""
        self.operations += 1
        if self.cut_at is not None and self.operations == self.cut_at:
            return True
        return self.cut_probability > 0 and self.rng.random() < self.cut_probability


class SimFiles:
    """`bursar.ports.Files` of one incarnation."""

    __slots__ = ("_process", "_state")

    def __init__(self, process: Process, state: FilesState) -> None:
        self._process = process
        self._state = state

    def make_folder(self, path: str) -> None:
        self.changing().folders.add(path)

    def names(self, folder: str) -> list[str]:
        return sorted(path.rpartition("/")[2] for path in self.living().names if _folder(path) == folder)

    def size(self, path: str) -> int:
        return len(self.inode(path).data)

    def mode(self, path: str) -> int:
        return 0o700 if path in self.living().folders else 0o600

    def read(self, path: str, start: int = 0, size: int = -1) -> bytes:
        data = self.inode(path).data
        return bytes(data[start:] if size < 0 else data[start : start + size])

    def create(self, path: str) -> File:
        inode = Inode()
        self.changing().name(path, inode)
        return SimFile(self, inode)

    def append(self, path: str) -> File:
        return SimFile(self, self.inode(path))

    def truncate(self, path: str, size: int) -> None:
        self.changing()
        inode = self.inode(path)
        del inode.data[size:]
        inode.synced = len(inode.data)

    def rename(self, old: str, new: str) -> None:
        state = self.changing()
        inode = self.inode(old)
        state.name(old, None)
        state.name(new, inode)

    def remove(self, path: str) -> None:
        self.inode(path)
        self.changing().name(path, None)

    def sync_folder(self, path: str) -> None:
        state = self.changing()
        _may_fail(state)
        state.sync_folder(path)

    def lock(self, path: str) -> Callable[[], None]:
        state = self.living()
        if path in state.locks:
            raise BlockingIOError(errno.EWOULDBLOCK, "locked")
        state.locks.add(path)
        return lambda: state.locks.discard(path) if self._process.alive else None

    def living(self) -> FilesState:
        """The disk, unless this incarnation is dead."""
        if not self._process.alive:
            raise Fenced(self._process.who)
        return self._state

    def changing(self) -> FilesState:
        """The disk, about to be changed; or the moment of the power cut."""
        state = self.living()
        if state.cuts_now():
            process = self._process
            process.kernel.kill(process, process.port_calls, f"file operation {state.operations}", None)
            raise Fenced(process.who)
        return state

    def inode(self, path: str) -> Inode:
        """The file of that name."""
        try:
            return self.living().names[path]
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, "no such file", path) from None


class SimFile:
    """`bursar.ports.File`: what is written here lasts when it is synced."""

    __slots__ = ("_files", "_inode")

    def __init__(self, files: SimFiles, inode: Inode) -> None:
        self._files = files
        self._inode = inode

    def write(self, data: bytes | memoryview) -> None:
        state = self._files.changing()
        if state.free_bytes is not None:
            fits = min(len(data), state.free_bytes)
            state.free_bytes -= fits
            self._inode.data += data[:fits]
            if fits < len(data):
                raise OSError(errno.ENOSPC, "no space left on the disk")
            return
        self._inode.data += data

    def sync(self) -> None:
        state = self._files.changing()
        _may_fail(state)
        self._inode.synced = len(self._inode.data)

    def close(self) -> None:
        pass


def _may_fail(state: FilesState) -> None:
    if state.failing_syncs:
        state.failing_syncs -= 1
        raise OSError(errno.EIO, "the sync failed")


def _folder(path: str) -> str:
    return path.rpartition("/")[0]
