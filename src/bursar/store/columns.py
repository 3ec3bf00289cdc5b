"""The columns of every kind of row, once for both dialects: statements name a kind, and its columns are put in.

What is read: `@record` stands for all columns of a record as they are selected, in the order of the struct's fields;
`@r.record` for the same of a table that the statement calls `r`. `reader` makes the struct of such a row.

What a batch writes (`ROWS`): on PostgreSQL `@envelopes` stands for one array per column (postgres/arrays.py). On
SQLite `@envelopes` stands for the names of the columns, `:envelopes` for a row's values, `:moves.number` for one of
them, `@moves.changes` for the assignments of an UPDATE, and `:now` for the time, which follows each row.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, TypeVar, get_type_hints

import msgspec

from bursar.model.accounts import Account, Book, Closing
from bursar.model.documents import Document, Proposal
from bursar.model.errors import DatabaseCorrupt
from bursar.model.flow_rows import FlowRow
from bursar.model.money import Asset
from bursar.model.records import (
    Alert,
    ForcedCall,
    HoldRow,
    OperatorAction,
    Pause,
    Record,
    Signal,
    StoredEnvelope,
    Transition,
)

Row = Sequence[Any]
T = TypeVar("T")
OFFSET = 2**127  # of amounts in 16 bytes, so that they sort as the numbers do

# One list for each kind of row: columns and their types. Types of PostgreSQL; and `amount`, a number that may be wider
# than bigint and is a text in the function, and `text?`, a text that may be null.
_LISTS = """
envelopes: seq bigint, id bytea, scope text, key text, book integer, kind smallint, reverses bigint, legs bytea,
    pins bytea, consumes bytea, metadata text
postings: id bigint, account bigint, asset integer, amount amount, live boolean
spends: posting bigint, envelope bigint
spent_live: posting bigint
account_history: account bigint, envelope bigint
guarded: account bigint, asset integer, version bigint, balance amount
cached_balances: account bigint, asset integer, part bigint, amount amount
holds: id bigint, account bigint, asset integer, amount amount, remaining amount, posting bigint, state text,
    owner text, expires_us bigint, lasts_us bigint
operations: scope text, id text, op text, fingerprint text, outcome text, code text, detail text
counters: key text, count bigint, amount amount, count_max bigint, amount_max amount, until_us bigint
new_records: number bigint, flow text, id text, owner text, state text, version integer, in_flight_posting bigint,
    delay_us bigint, worker text, body text, error text, timer bigint, priority smallint
moves: number bigint, expected_version integer, state text, version integer, attempt integer,
    in_flight_posting bigint, delay_us bigint, worker text, body text?, error text, timer bigint, inbox integer
transitions: record bigint, version integer, source text, event text, target text, attempt integer, actor text,
    evidence text
flow_rows: expected_version bigint, flow text, kind text, key text, record bigint, state text, amount amount,
    version bigint, permanent boolean, body text
signals: record bigint, sender text, event text, actor text, evidence text, arrived integer, consumed integer
high_water: rail text, worker text, sequence bigint
keys: scope text, key text
positive_pools: account bigint, asset integer, most integer
negative_pools: account bigint, asset integer, most integer
named_postings: posting bigint
guarded_keys: account bigint, asset integer
"""
ROWS: dict[str, dict[str, str]] = {
    name: dict(column.split() for column in columns.split(","))
    for name, columns in (line.split(":") for line in _LISTS.replace("\n    ", " ").strip().splitlines())
}
# SQLite: columns that are called otherwise in their table, or are none, and those that say which row is meant.
STORED = {"in_flight_posting": "transit", "delay_us": "due", "until_us": "until"}
NOT_STORED = ("expected_version", "live")
# Times that a batch brings: a delay from now; a moment, or if it is negative a delay from now, or none if it is 0.
_TIMES = {
    "due": "{now} + {value}",
    "timer": "CASE WHEN {value} > 0 THEN {value} WHEN {value} < 0 THEN {now} - {value} END",
}
_KEPT = {"delay_us": "-1", "timer": "NULL"}
KEYS = {"moves": ("number", "expected_version"), "flow_rows": ("expected_version", "flow", "kind", "key")}


class Reading(msgspec.Struct, frozen=True):
    """What is read as a struct: each field from the column of its name, but for these: column, and how it is stored."""

    struct: type[msgspec.Struct]
    columns: dict[str, tuple[str, str]] = {}
    known_as: str = "{0}"  # how errors name a row, by its columns


def _times(**columns: str) -> dict[str, tuple[str, str]]:
    return {field: (column, "time") for field, column in columns.items()}


# How a column is stored, if not plainly: `time` (microseconds on SQLite), `age` (a time, as time since then), `json`
# (read as text), `parsed` (JSON in a text, read as what the field is),
# `wide` (a number wider than bigint; text on SQLite), `amount` (the same; 16 bytes on SQLite that sort as it does),
# `raw` (text that may have been broken behind our back, and must not fail the statement; on SQLite read as bytes).
READ = {
    "account": Reading(Account, {"policy": ("policy", "parsed")}, "{1}, version {2},"),
    "action": Reading(OperatorAction, _times(at_us="at")),
    "alert": Reading(
        Alert, _times(raised_us="raised_at", delivered_us="delivered_at", acknowledged_us="acknowledged_at")
    ),
    "asset": Reading(Asset, {name: (name, "wide") for name in ("min_transfer", "max_transfer")}, "{1}"),
    "book": Reading(Book, {name: (name, "parsed") for name in ("assets", "accounts")}, "{1}"),
    "closing": Reading(Closing, {"age_us": ("at", "age")}),
    "document": Reading(Document, _times(at_us="at")),
    "envelope": Reading(StoredEnvelope, {"metadata": ("metadata", "json"), **_times(at_us="at")}),
    "flow_row": Reading(FlowRow, {"amount": ("amount", "wide"), "body": ("body", "json")}),
    "forced_call": Reading(ForcedCall),
    "hold": Reading(HoldRow, {"amount": ("amount", "amount"), "remaining": ("remaining", "amount")}),
    "pause": Reading(Pause, {**_times(at_us="at"), "age_us": ("at", "age")}),
    "proposal": Reading(Proposal, _times(at_us="at")),
    "record": Reading(
        Record,
        {
            **{name: (name, "raw") for name in ("flow", "id", "owner", "state", "worker", "error")},
            "in_flight_posting": ("transit", ""),
            "body": ("body", "raw json"),
            **_times(due_us="due", since_us="since", timer_us="timer"),
            **_times(created_us="created_at", updated_us="updated_at"),
        },
    ),
    "signal": Reading(Signal, {"evidence": ("evidence", "json"), **_times(at_us="at")}),
    "transition": Reading(Transition, {"evidence": ("evidence", "json"), **_times(at_us="at")}),
}
_SELECTED = {
    "postgres": {
        "time": "(extract(epoch FROM {}) * 1000000)::bigint",
        "age": "(extract(epoch FROM now() - {}) * 1000000)::bigint",
        "json": "{}::text",
        "raw json": "{}::text",
        "wide": "{}::text",
        "amount": "{}::text",
    },
    "sqlite": {"age": "now_us() - {}", "raw": "CAST({} AS BLOB)", "raw json": "CAST({} AS BLOB)"},
}
_READ = re.compile(r"@(?:(\w+)\.)?(\w+)")
_WRITTEN = re.compile(r"([@:])(\w+)(?:\.(\w+))?")


def expand(dialect: str, sql: str) -> str:
    """A statement with the columns put in."""
    sql = _READ.sub(lambda found: _selected(dialect, *found.groups()) or found[0], sql)
    return _with_written(sql) if dialect == "sqlite" else sql


def _selected(dialect: str, table: str | None, name: str) -> str:
    if name not in READ:
        return ""
    reading = READ[name]
    found = (reading.columns.get(field, (field, "")) for field in reading.struct.__struct_fields__)
    prefix = "" if table is None else f"{table}."
    return ", ".join(_SELECTED[dialect].get(how, "{}").format(prefix + column) for column, how in found)


def _with_written(sql: str) -> str:
    """SQLite's: one kind of row for each statement, whose values are numbered in the order of the list."""
    kind = next((found[2] for found in _WRITTEN.finditer(sql) if found[2] in ROWS), None)
    if kind is None:
        return sql
    values = {name: f"?{place}" for place, name in enumerate(ROWS[kind], 1)}
    now = f"?{len(values) + 1}"
    stored = {STORED.get(name, name): value for name, value in values.items() if name not in NOT_STORED}

    def put(found: re.Match[str]) -> str:
        match found.groups():
            case (":", "now", None):
                return now
            case ("@", name, None) if name == kind:
                return ", ".join(stored)
            case (":", name, None) if name == kind:
                return ", ".join(_TIMES.get(column, "{value}").format(value=v, now=now) for column, v in stored.items())
            case ("@", name, "changes") if name == kind:
                changed = (column for column in values if column not in KEYS[kind])
                return ", ".join(_change(column, values[column], now, ROWS[kind][column]) for column in changed)
            case (":", name, column) if name == kind:
                return values[column]
        return found[0]

    return _WRITTEN.sub(put, sql)


def _change(column: str, value: str, now: str, how: str) -> str:
    """An assignment. What is kept stays as it was: a text that is null, a delay of -1 (`KEEP_DUE`), a timer of null."""
    stored = STORED.get(column, column)
    if column in _KEPT:
        time = _TIMES[stored].format(value=value, now=now)
        return f"{stored} = CASE WHEN {value} IS {_KEPT[column]} THEN {stored} ELSE {time} END"
    if column == "inbox":
        return f"{stored} = {stored} + {value}"
    return f"{stored} = coalesce({value}, {stored})" if how == "text?" else f"{stored} = {value}"


def text_of(stored: str | bytes) -> str:
    """Text that may have been broken behind our back: only the caller that decodes it finds out."""
    return stored if isinstance(stored, str) else stored.decode("utf-8", "replace")


def minor_of(stored: str | bytes) -> int:
    """An amount: text, or 16 bytes."""
    return int(stored) if isinstance(stored, str) else int.from_bytes(stored, "big") - OFFSET


def reader(name: str, kind: type[T]) -> Callable[[Row], T]:
    """The struct of a row that was selected as `@name`."""
    reading, types = READ[name], get_type_hints(kind)
    assert reading.struct is kind
    names = reading.struct.__struct_fields__
    stored = {field: how for field, (_, how) in reading.columns.items()}
    conversions = [(field, to) for field in names if (to := _conversion(types[field], stored.get(field, "")))]

    def read(row: Row) -> T:
        try:
            fields = dict(zip(names, row, strict=True))
            for field, to in conversions:
                fields[field] = to(fields[field])
            return kind(**fields)
        except (ValueError, TypeError, msgspec.MsgspecError) as error:
            raise DatabaseCorrupt(f"{name} {reading.known_as.format(*row)}", str(error)) from error

    return read


def _conversion(kind: Any, how: str) -> Callable[[Any], Any] | None:
    if how.startswith("raw"):
        return text_of
    if how in ("wide", "amount"):
        return minor_of
    if how == "parsed":
        return msgspec.json.Decoder(kind).decode
    return kind if kind is bool or (isinstance(kind, type) and issubclass(kind, Enum)) else None
