"""A simulated disk: SQLite databases in memory, by path, that outlive the process that opened them.

What was committed survives a crash; an open transaction is rolled back, as the next opener of a real file would do.
Each process has one connection to a path, however often it opens it, which keeps a run cheap and has a price: within
a process a reader sees what a transaction that spans several lane calls has not committed yet, and pragmas outlive the
process that set them. Between processes SQLite's own locks hold: one that finds another one's transaction open gets
the error that the database is busy. A real connection would wait for it; `held` is for those who simulate the waiting.

Databases made from the same template are used again, run after run: the template's pages are copied over them. Opening
a database means preparing every statement anew, which was a tenth of a run.

Not here: torn and lost writes, full disks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from itertools import count
from typing import Any, Final

# Bytes 18 and 19 of a database say how it is written: 2 is a write-ahead log, which an image in memory cannot have.
_WRITE_VERSION: Final = slice(18, 20)
_WAL: Final = b"\x02\x02"
_ROLLBACK: Final = b"\x01\x01"

FIRST: Final = ""  # the name under which the first process of a disk has its connections
SPARE_MAX: Final = 4  # databases of one template that wait for the next run
STATEMENTS_MAX: Final = 256


class DiskConnection(sqlite3.Connection):
    """One process's connection to a path. It closes with the disk, not with the process.

    A function that is registered again, by the next incarnation, only changes what is called: SQLite would throw away
    every prepared statement instead, and preparing them all once per crash was a tenth of a run.
    """

    def __init__(self, database: str, **options: Any) -> None:
        super().__init__(database, **options)
        self._cells: dict[str, list[Any]] = {}
        self._aggregates: set[str] = set()

    def create_function(  # type: ignore[override]  # options by name only, as all callers give them
        self, name: str, narg: int, func: Callable[..., Any] | None, /, **options: Any
    ) -> None:
        """Register a function, or say what it does from now on."""
        cells = self._cells
        if name in cells:
            cells[name][0] = func
            return
        cell = cells[name] = [func]

        def call(*arguments: Any) -> Any:
            return cell[0](*arguments)

        super().create_function(name, narg, call, **options)

    def create_aggregate(self, name: str, n_arg: int, aggregate_class: Any, /) -> None:
        """Register an aggregate, once; they carry no state from one incarnation to the next."""
        if name not in self._aggregates:
            self._aggregates.add(name)
            super().create_aggregate(name, n_arg, aggregate_class)

    def close(self) -> None:
        """Do nothing: the process lets go of a file, and the file stays."""

    def let_go(self) -> None:
        """What the end of a process does to its connection: whatever was not committed never was."""
        self.row_factory = None
        if self.in_transaction:
            self.rollback()

    def forget(self) -> None:
        """Let go also of the functions, which hold on to the run that registered them."""
        self.let_go()
        for cell in self._cells.values():
            cell[0] = None

    def unplug(self) -> None:
        """Really close."""
        super().close()

    def __del__(self) -> None:
        self.unplug()  # memory has nothing to lose, and Python warns of connections that were not closed


class Database:
    """One database in memory, seen by as many connections as there are processes."""

    _numbers = count()

    def __init__(self, template: sqlite3.Connection | None = None) -> None:
        self._uri = f"file:/bursar-{next(Database._numbers)}?vfs=memdb"
        self.connections: dict[str, DiskConnection] = {}  # by process
        self._template = template
        self._schema = 0
        # In memory a database lives as long as a connection to it: this one, through which it is also made anew.
        self._home = self._connect()
        if template is not None:
            (self._schema,) = template.execute("PRAGMA schema_version").fetchone()
            template.backup(self._home)

    def connect(self, process: str) -> DiskConnection:
        """The connection of a process."""
        connection = self.connections.get(process)
        if connection is None:
            connection = self.connections[process] = self._connect()
        return connection

    def renew(self) -> bool:
        """Make it what it was in the beginning; False if that can't be, because a reader is still there."""
        if self._template is None:
            return False
        for connection in self.connections.values():
            connection.forget()
        try:
            self._home.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            return False  # backup would wait for ever
        self._home.execute("ROLLBACK")
        self._template.backup(self._home)
        # Copying raises the schema's version, and every other connection would prepare its statements anew.
        self._home.execute(f"PRAGMA schema_version = {self._schema}")
        return True

    def restore(self, image: bytes) -> None:
        """What an earlier image says, instead of what is there."""
        for connection in self.connections.values():
            connection.let_go()
        backup = DiskConnection(":memory:", isolation_level=None)
        backup.deserialize(image)
        backup.backup(self._home)
        backup.unplug()

    def unplug(self) -> None:
        """Free the memory."""
        for connection in (*self.connections.values(), self._home):
            connection.unplug()

    def _connect(self) -> DiskConnection:
        return DiskConnection(
            self._uri,
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            cached_statements=STATEMENTS_MAX,
            timeout=0,
        )


class Shelf:
    """Databases that were used, by template, ready to be used again."""

    def __init__(self) -> None:
        self._templates: dict[bytes, sqlite3.Connection] = {}
        self._spare: dict[bytes, list[Database]] = {}

    def take(self, template: bytes) -> Database:
        """A database that is a copy of the template."""
        spare = self._spare.setdefault(template, [])
        while spare:
            database = spare.pop()
            if database.renew():
                return database
            database.unplug()
        if template not in self._templates:
            source = self._templates[template] = DiskConnection(":memory:", isolation_level=None)
            source.deserialize(template)
        return Database(self._templates[template])

    def put(self, template: bytes, database: Database) -> None:
        """Keep a database for the next run."""
        spare = self._spare[template]
        if len(spare) < SPARE_MAX:
            spare.append(database)
        else:
            database.unplug()


SHELF: Final = Shelf()  # prepared statements are all that one run leaves to the next


class SimDisk:
    """Databases by path. Give it to each incarnation of its processes, and `close` it when it is not read again."""

    def __init__(self) -> None:
        self._process = FIRST
        self._databases: dict[str, Database] = {}
        self._templates: dict[str, bytes] = {}
        self._drives: dict[str, SimDisk] = {}

    def drive(self, process: str) -> SimDisk:
        """The same disk, as one process has it: its connections are its own, but for those who look on from outside.

        They share the first process's connections, so that looking costs nothing; they see what it sees.
        """
        if not self._drives:
            self._drives[process] = self
        found = self._drives.get(process)
        if found is None:
            found = self._drives[process] = self.another()
            found._process = process
            found._databases, found._templates, found._drives = self._databases, self._templates, self._drives
        return found

    def another(self) -> SimDisk:
        """What one more process has of it, before it shares the databases."""
        return SimDisk()

    def open(self, path: str) -> DiskConnection:
        """The connection to `path`, which is an empty database if it never was opened or installed."""
        database = self._databases.get(path)
        if database is None:
            database = self._databases[path] = Database()
        return database.connect(self._process)

    def install(self, path: str, template: bytes) -> None:
        """Put a prepared database at `path`: an `image`, or the bytes of a file whose log is checkpointed."""
        if path in self._databases:
            raise ValueError(f"{path} is already on this disk")
        if template[_WRITE_VERSION] == _WAL:
            template = template[:18] + _ROLLBACK + template[20:]
        self._templates[path] = template
        self._databases[path] = SHELF.take(template)

    def image(self, path: str) -> bytes:
        """The database at `path`, as `install` takes it. Not inside a transaction: it would be half of one."""
        database = self._databases[path]
        if any(connection.in_transaction for connection in database.connections.values()):
            raise ValueError(f"{path} has an open transaction")
        return database.connect(self._process).serialize()

    def restore(self, path: str, image: bytes) -> None:
        """Put an `image` back in the place of a database, as operators do with a backup when no process has it open."""
        self._databases[path].restore(image)

    def held(self) -> bool:
        """Whether another process has a transaction open, so that a call would have to wait."""
        mine = self._process
        for database in self._databases.values():
            for process, connection in database.connections.items():
                if process != mine and connection.in_transaction:
                    return True
        return False

    def power_cut(self) -> None:
        """What the crash of its process does to a disk: whatever that had not committed never was."""
        for database in self._databases.values():
            if self._process in database.connections:
                database.connections[self._process].let_go()

    def close(self) -> None:
        """Free the memory, or leave it to the next run."""
        for path, database in self._databases.items():
            if path in self._templates:
                SHELF.put(self._templates[path], database)
            else:
                database.unplug()
        self._databases.clear()
        self._templates.clear()
