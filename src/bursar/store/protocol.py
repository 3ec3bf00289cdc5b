"""The store: what the ledger needs of a database. Two engines fulfil it, and the simulator runs one of them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from bursar.ports import Ports
from bursar.store.group import Decided, Job
from bursar.store.tables import Tables


class Store(Protocol):
    """Rows, in units. It applies and returns what changed; it decides nothing."""

    engine: str
    split: bool  # commits go by saga, each primitive by itself
    overlaps: bool  # one group can be decided while the one before it is written
    has_clock: bool  # its own, which all hosts share; if not, due times are in this machine's
    ports: Ports
    read: Tables  # reads that each stand alone

    async def open(self, *, migrate: bool = False) -> None:
        """Connect and check the schema's version."""
        ...

    async def close(self) -> None:
        """Let go."""
        ...

    async def now_us(self) -> int:
        """The clock that due times are in."""
        ...

    def unit(self, *, unhurried: bool = False) -> AbstractAsyncContextManager[Tables]:
        """Several primitives, all or nothing. `unhurried`: none of them has a time limit (rebuild)."""
        ...

    def single(self) -> Tables:
        """Primitives that each stand alone: the steps of a saga."""
        ...

    def snapshot(self, *, unhurried: bool = False) -> AbstractAsyncContextManager[Tables]:
        """Reads that all see one moment. `unhurried`: none of them has a time limit (audit)."""
        ...

    async def beat(self, worker: str) -> None:
        """Write something small, durably, or raise why that can't be."""
        ...

    async def decide(self, job: Job, *, beside: bool) -> Decided:
        """The first half of a group: read and decide. Only where `overlaps`; it may run `beside` another's `write`."""
        ...

    async def write(self, decided: Decided) -> None:
        """The second half: write it, if all it rests on still stands. Raises `Lost` or `Broken`."""
        ...

    async def group(self, job: Job, connection: Any = None) -> None:
        """Read, decide and write a group, in a unit of its own or in the caller's transaction.

        Raises `Lost` if somebody else was faster, `Blocked` if somebody holds what it needs, and `Broken` if the
        connection went away on the way. A job that is `aside` is never waited for by those that are not.
        """
        ...
