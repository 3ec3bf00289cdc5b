"""What the rest of the process sees of the outside world: the ports, and what comes through them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

T = TypeVar("T")
ASIDE = ".tmp"  # how the name of a file ends that is not whole yet


class SerialExecutor(Protocol):
    """One thread: what is given to it runs in order, one at a time, off the event loop."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run `work` and return what it returns. Cancelling the caller never stops work that has begun."""

    def close(self) -> None:
        """Let the thread end once its queue is empty."""


class File(Protocol):
    """A file that is being written, from its end on."""

    def write(self, data: bytes | memoryview) -> None:
        """All of it, or an OSError; after an error it is unknown how much."""

    def sync(self) -> None:
        """Return when what was written is on the disk. An error means that it may never be: do not try again."""

    def close(self) -> None:
        """Close it, without a sync."""


class Files(Protocol):
    """A disk, for work on a `SerialExecutor`. Paths are text; new files are 0600, new folders 0700."""

    def make_folder(self, path: str) -> None:
        """Make it, with its parents, unless it is there."""

    def names(self, folder: str) -> list[str]:
        """What is in a folder, in order."""

    def size(self, path: str) -> int:
        """How many bytes a file has."""

    def mode(self, path: str) -> int:
        """The permission bits of a file or folder, such as 0o600."""
        ...

    def read(self, path: str, start: int = 0, size: int = -1) -> bytes:
        """A file, or a part of it."""

    def create(self, path: str) -> File:
        """A new, empty file, instead of any of that name. Its name lasts once the folder is synced."""

    def append(self, path: str) -> File:
        """An existing file, to append to."""

    def truncate(self, path: str, size: int) -> None:
        """Cut a file and sync it."""

    def rename(self, old: str, new: str) -> None:
        """Give a file another name, replacing what had it. Lasts once the folder is synced."""

    def remove(self, path: str) -> None:
        """Remove a file."""

    def sync_folder(self, path: str) -> None:
        """Return when the names in a folder are on the disk."""

    def lock(self, path: str) -> Callable[[], None]:
        """Hold this lock until the returned function is called; BlockingIOError if another process has it."""


def write_whole(files: Files, folder: str, name: str, pieces: Iterable[bytes | memoryview]) -> str:
    """Write a file aside, each piece synced, and only then give it its name: until then it does not exist."""
    path = f"{folder}/{name}"
    aside = files.create(path + ASIDE)
    try:
        for piece in pieces:
            aside.write(piece)
            aside.sync()
    finally:
        aside.close()
    files.rename(path + ASIDE, path)
    files.sync_folder(folder)
    return path


class Stream(Protocol):
    """A connection: bytes in order, in both directions, until either side or the network ends it."""

    async def read(self) -> bytes:
        """The next bytes; none at the end. OSError if the connection broke."""

    def write(self, data: bytes) -> None:
        """Queue bytes to be sent. Never waits, never fails: whether they arrive is not known here."""

    @property
    def unsent(self) -> int:
        """How many bytes wait here because the other side reads slowly."""

    async def drain(self) -> None:
        """Wait until few bytes wait. OSError if the connection broke."""

    def close(self) -> None:
        """End it, when what was handed over is sent."""

    def abort(self) -> None:
        """End it now; what was handed over and waits here is dropped."""


class Listener(Protocol):
    """An address at which others connect. A Unix socket is for its owner alone."""

    address: str

    def close(self) -> None:
        """Accept no further connection. Open ones stay open."""


class Ports(Protocol):
    """The ports. One object per process; the simulator makes one per incarnation."""

    def now_us(self) -> int:
        """Wall clock: microseconds since 1970 UTC. May jump; only ever stored or shown, never trusted for order."""

    def monotonic(self) -> float:
        """Seconds that never go back, for measuring and for deadlines."""

    def random(self) -> float:
        """Uniform in [0, 1): jitter. Never for anything that must be unique or secret."""

    def token(self) -> str:
        """32 unguessable hexadecimal digits: unique across processes without coordination."""

    async def sleep(self, seconds: float) -> None:
        """Wait without blocking others."""

    def lane(self, name: str) -> SerialExecutor:
        """A new thread of its own."""

    def sqlite(self, path: str, *, read_only: bool) -> sqlite3.Connection:
        """Open a SQLite file in autocommit mode; the caller sets pragmas and begins transactions itself."""

    def identity(self, path: str) -> tuple[int, int] | None:
        """The identity of the file at a path, as opposed to one that replaces it; None if there is none."""

    def free_bytes(self, path: str) -> int:
        """How much room there is on the disk of a file."""

    def files(self) -> Files:
        """The disk."""

    async def connect(self, address: str) -> Stream:
        """A connection to `unix:PATH` or `tcp:HOST:PORT`; OSError if no process listens there."""

    async def listen(
        self,
        address: str,
        accept: Callable[[Stream], object],
        trouble: Callable[[OSError], object] = lambda _: None,
    ) -> Listener:
        """Call `accept` with each new connection; `trouble` while no descriptor is left for one. Port 0: a free one."""
