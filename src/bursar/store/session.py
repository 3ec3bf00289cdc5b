"""A session: named statements on a connection. What differs between the stores (SQL, lists, amounts) is behind it.

Whether several calls happen together is the session's affair: inside `store.transaction()` they do, in `store.single()`
each stands alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from bursar.store.columns import Row

T = TypeVar("T")


class Session(Protocol):
    """A connection with named statements."""

    async def rows(self, name: str, *args: Any) -> Sequence[Row]:
        """Run a statement and return its rows. Lists are passed as they are."""

    async def write(self, name: str, rows: Sequence[tuple[Any, ...]]) -> int:
        """Run a statement once per row, in as few round trips as the store can; returns how many rows changed."""


class Table:
    """Something that talks through a session."""

    def __init__(self, session: Session) -> None:
        self._s = session

    async def _all(self, read: Callable[[Row], T], name: str, *args: Any) -> list[T]:
        return [read(row) for row in await self._s.rows(name, *args)]

    async def _first(self, read: Callable[[Row], T], name: str, *args: Any) -> T | None:
        rows = await self._s.rows(name, *args)
        return read(rows[0]) if rows else None

    async def _one(self, name: str, *args: Any) -> Any:
        rows = await self._s.rows(name, *args)
        return rows[0][0] if rows else None
