"""The statements, and arrays on their way to them: as one text each, unless they are of texts.

asyncpg looks at every element of an array three times, which cost as much as deciding a group. And it asks every new
connection about every kind of array that it does not know, in a query of some 15 ms: it knows only those of texts. So
numbers, truths and bytes are written as an array's literal (`$1::text::bigint[]`); and the many texts of a group are
each preceded by a character that none of them may contain.

What a batch writes is made from the one list of columns of each kind of row. A statement names a kind of row as
`@envelopes`, and a single value as `@generation:bigint`. `expand` puts one parameter per column in its place, in the
order of the list, and `arguments` packs the rows in the same order. The functions in the migrations have these very
columns as parameters; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from bursar.model.errors import InvalidEntry
from bursar.store.columns import ROWS
from bursar.store.sql import statements

SQL = statements("postgres")
_LITERAL = re.compile(r"\$(\d+)::text::(bigint|integer|smallint|boolean|bytea)\[\]")
_PLACE = re.compile(r"@(\w+)(?::(\w+))?")
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


class Statement(NamedTuple):
    """SQL with its parameters in place, and what they are: kinds of rows and names of single values, in their order."""

    sql: str
    parameters: tuple[str, ...]


def array_of(kind: str) -> str:
    """The type of the array in which a column reaches its function."""
    return {"amount": "text", "text?": "text"}.get(kind, kind) + "[]"


def expand(template: str) -> Statement:
    """A statement for a template."""
    places: dict[str, str] = {}
    count = 0

    def put(found: re.Match[str]) -> str:
        nonlocal count
        name, kind = found.groups()
        if name not in places:
            parameters = []
            for column in [kind] if kind else ROWS[name].values():
                count += 1
                parameters.append(f"${count}::{column}" if kind else _decoded(count, column))
            places[name] = ", ".join(parameters)
        return places[name]

    sql = _PLACE.sub(put, template)
    return Statement(sql, tuple(places))


def _packer(kind: str) -> Packer:
    """How a column is packed."""
    return texts_text if kind in ("text", "text?") else bytes_text if kind == "bytea" else numbers_text


_PACKERS = {name: [_packer(kind) for kind in row.values()] for name, row in ROWS.items()}


def _decoded(place: int, kind: str) -> str:
    """How a parameter becomes an array."""
    match kind:
        case "text":
            return f"(string_to_array(${place}::text, E'\\x1f'))[2:]"
        case "text?":
            return f"(string_to_array(${place}::text, E'\\x1f', E'\\x1e'))[2:]"
        case _:
            return f"${place}::text::{array_of(kind)}"


def arguments(statement: Statement, values: dict[str, Any]) -> list[Any]:
    """The parameters of a statement, given rows by kind and single values by name."""
    found: list[Any] = []
    for name in statement.parameters:
        if name in ROWS:
            rows, packers = values[name], _PACKERS[name]
            per_column: Iterable[Sequence[Any]] = zip(*rows, strict=True) if rows else [()] * len(packers)
            found += [pack(column) for pack, column in zip(packers, per_column, strict=True)]
        else:
            found.append(values[name])
    return found


def _statement(name: str) -> Statement:
    statement = expand(SQL[name])
    SQL[name] = statement.sql  # as it is sent: what watches a connection knows it by that
    return statement


READ = _statement("batch_read")
WRITE_ENTRIES = _statement("batch_write_entries")
WRITE_RECORDS = _statement("batch_write_records")
WRITE = _statement("batch_write")
