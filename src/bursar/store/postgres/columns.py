"""What a batch writes on PostgreSQL: arguments and SQL are made from the one list of columns of each kind of row.

A statement names a kind of row as `@envelopes`, and a single value as `@generation:bigint`. `expand` puts one parameter
per column in its place, in the order of the list, and `arguments` packs the rows in the same order. The functions in
the migrations have these very columns as parameters; a test compares them.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from bursar.store.columns import ROWS
from bursar.store.postgres.arrays import SQL, Packer, bytes_text, numbers_text, packed, texts_text

_PLACE = re.compile(r"@(\w+)(?::(\w+))?")
_PACKERS: dict[str, Packer] = {
    "text": texts_text,
    "text?": texts_text,
    "bytea": bytes_text,
}  # all others are numbers or truths
_PACKED: dict[str, list[Packer]] = {
    name: [_PACKERS.get(kind, numbers_text) for kind in row.values()] for name, row in ROWS.items()
}


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


def _decoded(place: int, kind: str) -> str:
    """How a parameter becomes an array (see `arrays`)."""
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
            found += packed(values[name], _PACKED[name])
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
