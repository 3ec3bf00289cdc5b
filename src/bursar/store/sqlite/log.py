"""The write-ahead log of a SQLite file, and a disk that has no room left.

What is committed is in the log, and is copied back into the file when the log has become large. On a disk that is
nearly full that would never come about: each commit takes what is left, the log stays below its size, and every byte
that is freed becomes more of it. Two rules against that. The log may use a part of what is free, so that there
is room to copy it back. And once the disk has been full, nothing is written before the log is in the file and its own
bytes are free again: that needs less room than it sets free, and is tried again by itself.
"""

from __future__ import annotations

import sqlite3

from bursar.model.errors import DatabaseUnavailable
from bursar.ports import Ports

BYTES_MIN, BYTES_MAX = 64 * 2**20, 128 * 2**20  # of the log, before it is copied back
BYTES_LEAST = 2**18  # on a disk that is nearly full
PART = 4  # the log and what it is copied to use no more than a half of what is free, at this part each
LOOK_EVERY = 64  # groups between two looks at what is free
AGAIN_S = 1.0  # between two tries to copy it back on a full disk
MEBIBYTE = 2**20


def is_full(error: BaseException) -> bool:
    """Whether the disk has no room."""
    name = getattr(error, "sqlite_errorname", "") or ""
    return isinstance(error, sqlite3.Error) and name.startswith(("SQLITE_FULL", "SQLITE_IOERR_SHMSIZE"))


class Log:
    """Of one file; for the thread that writes it."""

    def __init__(self, ports: Ports, path: str) -> None:
        self.is_full = False  # the disk was, and the log is not copied back since
        self._ports = ports
        self._path = path
        self._bytes = 0
        self._wanted = BYTES_MIN
        self._groups = 0
        self._again_at = 0.0

    def open(self, connection: sqlite3.Connection) -> None:
        """The more pages there are, the fewer of those in the log are the same one: it may get as large as the file."""
        page, pages = _pages(connection)
        self._wanted = min(max(page * pages, BYTES_MIN), BYTES_MAX)
        self._fit(connection)

    def written(self, connection: sqlite3.Connection) -> None:
        """A group was written; now and then it is time to look at the disk."""
        self._groups += 1
        if self._groups % LOOK_EVERY == 0:
            self._fit(connection)

    def make_room(self, connection: sqlite3.Connection) -> None:
        """Copy the log back and give its bytes to the disk; raise that the disk is full, if it is too full for that."""
        now = self._ports.monotonic()
        if self.is_full and now < self._again_at:
            raise self._full(connection)
        self.is_full, self._again_at = True, now + AGAIN_S
        try:
            _copy_back(connection)
        except sqlite3.Error as error:
            if not is_full(error):
                raise
            raise self._full(connection) from error
        self.is_full = False
        self._fit(connection)

    def _fit(self, connection: sqlite3.Connection) -> None:
        size = max(min(self._wanted, self._ports.free_bytes(self._path) // PART), BYTES_LEAST)
        if size != self._bytes and (size < self._bytes or size == self._wanted or size > 2 * self._bytes):
            page, _ = _pages(connection)
            connection.execute(f"PRAGMA wal_autocheckpoint = {size // page}")
            # With room enough it keeps its bytes when it is copied back: to get them anew makes every sync dearer.
            connection.execute(f"PRAGMA journal_size_limit = {-1 if size == self._wanted else size}")
            self._bytes = size

    def _full(self, connection: sqlite3.Connection) -> DatabaseUnavailable:
        page, pages = _pages(connection)
        needed = max(0, page * pages - self._ports.files().size(self._path)) + MEBIBYTE
        return DatabaseUnavailable(
            f"the disk is full; nothing was written, make room (about {-(-needed // MEBIBYTE)} MiB are needed, it then "
            "goes on by itself) and try again"
        )


def _pages(connection: sqlite3.Connection) -> tuple[int, int]:
    (page,), (pages,) = (connection.execute(f"PRAGMA {what}").fetchone() for what in ("page_size", "page_count"))
    return int(page), int(pages)


def _copy_back(connection: sqlite3.Connection) -> None:
    """Without waiting for those who read from the log: they would keep all who write waiting. While there are some, its
    bytes stay."""
    (patience_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout = 0")
    try:
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout = {patience_ms}")
