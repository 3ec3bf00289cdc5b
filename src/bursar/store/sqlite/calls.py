"""The synchronous half: what runs on the lane's thread, against one sqlite3 connection."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec

from bursar.model.errors import BursarError, Conflict, DatabaseCorrupt, DatabaseReadOnly, DatabaseUnavailable
from bursar.store.columns import OFFSET, Row
from bursar.store.sql import statements

T = TypeVar("T")
SQL = statements("sqlite")
BUSY_MS = 5000
WAL_TURNS = 50

_json = msgspec.json.Encoder()


def amount_in(minor: int) -> bytes:
    """16 bytes that sort as the numbers do."""
    return (minor + OFFSET).to_bytes(16, "big")


def amount_out(stored: bytes) -> int:
    """The number again."""
    return int.from_bytes(stored, "big") - OFFSET


class _SumAmounts:
    """SQL aggregate: exact sum of amounts, as decimal text (it may be wider than one amount)."""

    def __init__(self) -> None:
        self.total = 0

    def step(self, stored: bytes) -> None:
        self.total += amount_out(stored)

    def finalize(self) -> str:
        return str(self.total)


class _SumText(_SumAmounts):
    """SQL aggregate: exact sum of decimal text."""

    def step(self, stored: Any) -> None:
        self.total += int(stored)


def register(connection: sqlite3.Connection, now_us: Callable[[], int]) -> None:
    """Teach a connection the functions that our statements use."""
    connection.create_function("now_us", 0, now_us)
    connection.create_function("add_text", 2, lambda a, b: str(int(a) + int(b)), deterministic=True)
    connection.create_aggregate("sum_amounts", 1, _SumAmounts)  # type: ignore[arg-type]
    connection.create_aggregate("sum_text", 1, _SumText)  # type: ignore[arg-type]


@contextlib.contextmanager
def our_ways(connection: sqlite3.Connection, now_us: Callable[[], int]) -> Iterator[None]:
    """A caller's connection as our statements need it, and afterwards as it was."""
    row_factory, text_factory = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        register(connection, now_us)
        yield
    finally:
        connection.row_factory, connection.text_factory = row_factory, text_factory


def file_of(connection: sqlite3.Connection) -> str:
    """The file that a connection is to, as SQLite names it."""
    return str(next(row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main"))


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite does not wait for others here as it does elsewhere, so we take turns."""
    for turn in range(WAL_TURNS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if turn == WAL_TURNS - 1 or not getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                raise
        together(connection, int)  # waits until the connection that is switching has done so


def rows(connection: sqlite3.Connection, name: str, args: Sequence[Any]) -> list[Row]:
    """Run one statement; lists become JSON."""
    plain = [_json.encode(a).decode() if isinstance(a, list) else a for a in args]
    return connection.execute(SQL[name], plain).fetchall()


def write(connection: sqlite3.Connection, name: str, values: Sequence[tuple[Any, ...]]) -> int:
    """Run one statement once per row, all or nothing; returns how many rows changed."""
    if len(values) > 1 and not connection.in_transaction:
        return together(connection, partial(write, connection, name, values))
    return max(0, connection.executemany(SQL[name], values).rowcount)


def roll_back(connection: sqlite3.Connection) -> None:
    """End a transaction that went wrong, if there is one."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


class CommitFailed(sqlite3.OperationalError):
    """The disk failed in the middle of COMMIT. Its log may hold all of the transaction, and the next process to open it
    would take it for committed: only a key can say, later."""

    sqlite_errorname = "SQLITE_IOERR"


def together(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    """Run work in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work()
        _commit(connection)
    except BaseException:  # whatever it is, it goes on to the caller; no transaction may stay open
        roll_back(connection)
        raise
    return result


def _commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
            raise CommitFailed(str(error)) from error
        raise


def explain(error: sqlite3.Error) -> BursarError:
    """What a person can do about it, in one line."""
    name = getattr(error, "sqlite_errorname", "") or ""
    text = str(error)
    if name == "SQLITE_BUSY_SNAPSHOT":
        return Conflict("the transaction began before others have written; end it and begin with BEGIN IMMEDIATE", 1)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        why = f"it is locked by another process for more than {BUSY_MS // 1000} s; find and stop that one"
    elif name.startswith("SQLITE_READONLY") or "readonly" in text:
        return DatabaseReadOnly("it is read-only; check the owner and mode of the file and of its folder")
    elif name.startswith("SQLITE_FULL"):
        why = "the disk is full; nothing was written, make room and try again"
    elif name.startswith("SQLITE_CANTOPEN"):
        why = "the file can't be opened; check the path and the folder's mode"
    elif name.startswith("SQLITE_IOERR"):
        why = f"the disk failed ({text}); what was being written may be there or not"
    elif name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return DatabaseCorrupt("the database file", text)
    elif name.startswith("SQLITE_CONSTRAINT") or text.startswith("Could not decode to UTF-8"):
        return DatabaseCorrupt("a row", text)  # not unavailable: trying again would never help
    else:
        why = text
    return DatabaseUnavailable(why)
