"""The columns of every kind of row that a batch writes: one list each, from which arguments and SQL are made.

A statement names a kind of row as `@envelopes`, and a single value as `@generation:bigint`. `expand` puts one parameter
per column in its place, in the order of the list, and `arguments` packs the rows in the same order. The functions in
the migrations have these very columns as parameters; a test compares them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from bursar.store.postgres.arrays import SQL, packed

# Types of PostgreSQL; and `amount`, a number that may be wider than bigint and is a text in the function, and `text?`,
# a text that may be null.
ROWS: dict[str, dict[str, str]] = {
    "envelopes": {
        "seq": "bigint",
        "id": "bytea",
        "scope": "text",
        "key": "text",
        "book": "integer",
        "kind": "smallint",
        "reverses": "bigint",
        "legs": "bytea",
        "pins": "bytea",
        "consumes": "bytea",
        "metadata": "text",
    },
    "postings": {"id": "bigint", "account": "bigint", "asset": "integer", "amount": "amount", "live": "boolean"},
    "spends": {"posting": "bigint", "envelope": "bigint"},
    "spent_live": {"posting": "bigint"},
    "account_history": {"account": "bigint", "envelope": "bigint"},
    "guarded": {"account": "bigint", "asset": "integer", "version": "bigint", "balance": "amount"},
    "cached_balances": {"account": "bigint", "asset": "integer", "part": "bigint", "amount": "amount"},
    "holds": {
        "id": "bigint",
        "account": "bigint",
        "asset": "integer",
        "amount": "amount",
        "remaining": "amount",
        "posting": "bigint",
        "state": "text",
        "owner": "text",
        "expires_us": "bigint",
        "lasts_us": "bigint",
    },
    "operations": {
        "scope": "text",
        "id": "text",
        "op": "text",
        "fingerprint": "text",
        "outcome": "text",
        "code": "text",
        "detail": "text",
    },
    "counters": {
        "key": "text",
        "count": "bigint",
        "amount": "amount",
        "count_max": "bigint",
        "amount_max": "amount",
        "until_us": "bigint",
    },
    "new_records": {
        "number": "bigint",
        "flow": "text",
        "id": "text",
        "owner": "text",
        "state": "text",
        "version": "integer",
        "in_flight_posting": "bigint",
        "delay_us": "bigint",
        "worker": "text",
        "body": "text",
        "error": "text",
        "timer": "bigint",
        "priority": "smallint",
    },
    "moves": {
        "number": "bigint",
        "expected_version": "integer",
        "state": "text",
        "version": "integer",
        "attempt": "integer",
        "in_flight_posting": "bigint",
        "delay_us": "bigint",
        "worker": "text",
        "body": "text?",
        "error": "text",
        "timer": "bigint",
        "inbox": "integer",
    },
    "transitions": {
        "record": "bigint",
        "version": "integer",
        "source": "text",
        "event": "text",
        "target": "text",
        "attempt": "integer",
        "actor": "text",
        "evidence": "text",
    },
    "flow_rows": {
        "expected_version": "bigint",
        "flow": "text",
        "kind": "text",
        "key": "text",
        "record": "bigint",
        "state": "text",
        "amount": "amount",
        "version": "bigint",
        "permanent": "boolean",
        "body": "text",
    },
    "signals": {
        "record": "bigint",
        "sender": "text",
        "event": "text",
        "actor": "text",
        "evidence": "text",
        "arrived": "integer",
        "consumed": "integer",
    },
    "high_water": {"rail": "text", "worker": "text", "sequence": "bigint"},
    # What a batch reads:
    "keys": {"scope": "text", "key": "text"},
    "positive_pools": {"account": "bigint", "asset": "integer", "most": "integer"},
    "negative_pools": {"account": "bigint", "asset": "integer", "most": "integer"},
    "named_postings": {"posting": "bigint"},
    "guarded_keys": {"account": "bigint", "asset": "integer"},
}
_PLACE = re.compile(r"@(\w+)(?::(\w+))?")
_PACKERS = {"text": "t", "text?": "t", "bytea": "b"}  # all others: n


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

    return Statement(_PLACE.sub(put, template), tuple(dict.fromkeys(m.group(1) for m in _PLACE.finditer(template))))


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
            found += packed(values[name], _KINDS[name])
        else:
            found.append(values[name])
    return found


_KINDS = {name: "".join(_PACKERS.get(kind, "n") for kind in row.values()) for name, row in ROWS.items()}


def _statement(name: str) -> Statement:
    statement = expand(SQL[name])
    SQL[name] = statement.sql  # as it is sent: what watches a connection knows it by that
    return statement


READ = _statement("batch_read")
WRITE_ENTRIES = _statement("batch_write_entries")
WRITE_RECORDS = _statement("batch_write_records")
WRITE = _statement("batch_write")


def one_column(values: Sequence[int]) -> list[tuple[int]]:
    """Rows of a single column."""
    return [(value,) for value in values]
