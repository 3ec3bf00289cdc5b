"""The statements, and arrays on their way to them: as one text each, unless they are of texts.

asyncpg looks at every element of an array three times, which cost as much as deciding a group. And it asks every new
connection about every kind of array that it does not know, in a query of some 15 ms: it knows only those of texts. So
numbers, truths and bytes are written as an array's literal (`$1::text::bigint[]`); and the many texts of a group are
each preceded by a character that none of them may contain.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

from bursar.model.errors import InvalidEntry
from bursar.store.sql import statements

SQL = statements("postgres")
_LITERAL = re.compile(r"\$(\d+)::text::(bigint|integer|smallint|boolean|bytea)\[\]")
_MARK, _NULL = "\x1f", "\x1e"
Packer = Callable[[Sequence[Any]], str]  # of a column


def plain(name: str, args: Iterable[Any]) -> list[Any]:
    """A statement's arguments as they travel."""
    literals = _literals(name)
    return [literals[place](value) if place in literals else value for place, value in enumerate(args, 1)]


@cache
def _literals(name: str) -> dict[int, Packer]:
    found = _LITERAL.findall(SQL[name])
    return {int(place): bytes_text if kind == "bytea" else numbers_text for place, kind in found}


def columns(rows: Sequence[tuple[Any, ...]], width: int) -> list[list[Any]]:
    """A list per column, also of no rows."""
    return [list(column) for column in zip(*rows, strict=True)] if rows else [[] for _ in range(width)]


def packed(rows: Sequence[tuple[Any, ...]], packers: Sequence[Packer]) -> list[str]:
    """A text per column."""
    per_column: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(packers)
    return [pack(column) for pack, column in zip(packers, per_column, strict=True)]


def numbers_text(column: Sequence[int | bool | None]) -> str:
    """Numbers or truths as an array's literal."""
    text = ",".join(map(str, column))
    return "{" + (text.replace("None", "NULL") if "N" in text else text) + "}"


def bytes_text(column: Sequence[bytes | None]) -> str:
    """Bytes as an array's literal."""
    return "{" + ",".join(["NULL" if value is None else "\\\\x" + value.hex() for value in column]) + "}"


def texts_text(column: Sequence[str | None]) -> str:
    """Texts, each with a mark before it."""
    if not column:
        return ""
    text = _MARK + _MARK.join([_NULL if value is None else value for value in column])
    if text.count(_MARK) != len(column):
        raise InvalidEntry("the database can't store it: U+001F in a text")
    return text
