"""A simulated disk: SQLite databases in memory, by path, that outlive the process that opened them.

What was committed survives a crash; an open transaction is rolled back, as the next opener of a real file would do.
Every opening of a path is one and the same connection, which keeps a run cheap and has a price: a reader sees what a
transaction that spans several lane calls has not committed yet, and pragmas outlive the process that set them. A disk
belongs to one process name, since two processes on one connection would share transactions too.

Not here: torn and lost writes, full disks, and the locks of real files.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any, Final

# Bytes 18 and 19 of a database say how it is written: 2 is a write-ahead log, which an image in memory cannot have.
_WRITE_VERSION: Final = slice(18, 20)
_WAL: Final = b"\x02\x02"
_ROLLBACK: Final = b"\x01\x01"


class DiskConnection(sqlite3.Connection):
    """The one connection to a path. It closes with the disk, not with the process.

    A function that is registered again, by the next incarnation, only changes what is called: SQLite would throw away
    every prepared statement instead, and preparing them all once per crash was a tenth of a run.
    """

    def create_function(  # type: ignore[override]  # options by name only, as everybody gives them
        self, name: str, narg: int, func: Callable[..., Any] | None, /, **options: Any
    ) -> None:
        """Register a function, or say what it does from now on."""
        cells: dict[str, list[Any]] = self.__dict__.setdefault("cells", {})
        if name in cells:
            cells[name][0] = func
            return
        cell = cells[name] = [func]

        def call(*arguments: Any) -> Any:
            return cell[0](*arguments)

        super().create_function(name, narg, call, **options)

    def create_aggregate(self, name: str, n_arg: int, aggregate_class: Any, /) -> None:
        """Register an aggregate, once; they carry no state from one incarnation to the next."""
        known: set[str] = self.__dict__.setdefault("aggregates", set())
        if name not in known:
            known.add(name)
            super().create_aggregate(name, n_arg, aggregate_class)

    def close(self) -> None:
        """Do nothing: the process lets go of a file, and the file stays."""

    def unplug(self) -> None:
        """Really close."""
        super().close()

    def __del__(self) -> None:
        self.unplug()  # memory has nothing to lose, and Python warns of connections that nobody closed


class SimDisk:
    """Databases by path. Give it to each incarnation of one process, and `close` it when nobody looks at it again."""

    def __init__(self) -> None:
        self.process: str | None = None  # the name of the process it belongs to, from its first start on
        self._connections: dict[str, DiskConnection] = {}

    def open(self, path: str) -> sqlite3.Connection:
        """The connection to `path`, which is an empty database if it never was opened or installed."""
        connection = self._connections.get(path)
        if connection is None:
            connection = self._connections[path] = _memory()
        return connection

    def install(self, path: str, template: bytes) -> None:
        """Put a prepared database at `path`: an `image`, or the bytes of a file whose log is checkpointed."""
        if path in self._connections:
            raise ValueError(f"{path} is already on this disk")
        if template[_WRITE_VERSION] == _WAL:
            template = template[:18] + _ROLLBACK + template[20:]
        connection = self._connections[path] = _memory()
        connection.deserialize(template)

    def image(self, path: str) -> bytes:
        """The database at `path`, as `install` takes it. Not inside a transaction: it would be half of one."""
        connection = self._connections[path]
        if connection.in_transaction:
            raise ValueError(f"{path} has an open transaction")
        return connection.serialize()

    def power_cut(self) -> None:
        """What a crash does to a disk: whatever was not committed never was."""
        for connection in self._connections.values():
            connection.row_factory = None
            if connection.in_transaction:
                connection.rollback()

    def close(self) -> None:
        """Free the memory."""
        for connection in self._connections.values():
            connection.unplug()
        self._connections.clear()


def _memory() -> DiskConnection:
    return DiskConnection(":memory:", isolation_level=None, check_same_thread=False, cached_statements=256)
