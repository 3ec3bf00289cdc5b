"""The store: what the ledger needs of a database. SQLite and PostgreSQL fulfil it; the simulator runs SQLite."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeAlias, TypeVar

import msgspec

from bursar.ports import Ports
from bursar.store.batch import BatchSession, Lane
from bursar.store.tables import Tables

T = TypeVar("T")
Work: TypeAlias = Callable[[BatchSession], Coroutine[Any, Any, T]]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """How a database is used, as its configuration says. PostgreSQL's: SQLite is a file on this host."""

    statement_s: float = 5.0  # for one statement; then its connection is dropped. Not for migrations, audit, rebuild
    require_synchronous: bool = False  # refuse a server whose commits no synchronous standby has


USUAL = Options()


class Store(Protocol):
    """WriteSet, in units. It applies and returns what changed; it decides nothing."""

    overlaps: bool  # one batch can be prepared while the one before it is written
    first_read: int  # postings to read per account and asset at first
    reuses_postings: bool  # small batches may be decided on postings that the batch before has left
    has_clock: bool  # its own, which all hosts share; if not, due times are in this machine's
    ports: Ports
    read: Tables  # reads that each stand alone

    async def open(self, *, migrate: bool = False) -> None:
        """Connect and check the schema's version."""

    async def close(self) -> None:
        """Let go."""

    async def now_us(self) -> int:
        """The clock that due times are in."""

    def transaction(self, *, unhurried: bool = False) -> AbstractAsyncContextManager[Tables]:
        """Several primitives, all or nothing. `unhurried`: none of them has a time limit (rebuild)."""

    def single(self) -> Tables:
        """Primitives that each stand alone."""

    def snapshot(self, *, unhurried: bool = False) -> AbstractAsyncContextManager[Tables]:
        """Reads that all see one moment. `unhurried`: none of them has a time limit (audit)."""

    async def beat(self, worker: str) -> None:
        """Write something small, durably, or raise why that can't be."""

    async def run_batch(self, work: Work[T], lane: Lane = Lane.WRITE) -> T:
        """Run the writer's work with a session: in a transaction (SQLite, on the writer's thread), or on a lane's
        connection, where the session's write is its own transaction (PostgreSQL).

        Raises `WriteConflict` if another transaction was faster, `LockTimeout` if one holds what it needs, and
        `ConnectionFailed` if the connection went away on the way.
        """

    async def run_batch_in(self, connection: Any, work: Work[T]) -> T:
        """The same in a transaction that the caller owns."""

    async def reads_latest(self, connection: Any) -> bool:
        """Whether a caller's transaction sees what others commit meanwhile."""
