"""Entries from a file: JSON, checked to the last field before anything is committed.

    {"key": "order-7", "movements": [{"source": "user:1", "target": "shop", "asset": "EUR", "amount": "12.50"}, …]}

or a list of such entries, which are committed together or not at all. A name that is misspelt would be ignored by a
forgiving reader, and of an amount that is given twice the first; another entry would be committed than was meant. So
both are refused, and so is a number where an amount should be text.
"""

from __future__ import annotations

import json
from typing import Any, BinaryIO

import click
import msgspec

from bursar.model.accounts import MAIN_BOOK
from bursar.model.entries import Entry, Movement

FILE_BYTES_MAX = 64 * 2**20
EXAMPLE = '{"movements": [{"source": "a", "target": "b", "asset": "EUR", "amount": "1.00"}]}'


class FileMovement(msgspec.Struct, forbid_unknown_fields=True):
    """One movement, as it is written."""

    source: str
    target: str
    asset: str
    amount: str


class FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One entry, as it is written."""

    movements: list[FileMovement]
    key: str | None = None
    book: str = MAIN_BOOK
    metadata: dict[str, Any] = {}

    def entry(self) -> Entry:
        """As the ledger wants it."""
        movements = tuple([Movement(m.source, m.target, m.asset, m.amount) for m in self.movements])
        return Entry(movements=movements, key=self.key, book=self.book, metadata=self.metadata)


def read_entries(file: BinaryIO) -> tuple[list[Entry], bool]:
    """The entries of a file, and whether it was a list of them; or a usage error that says where it is wrong."""
    name = "standard input" if file.name == "<stdin>" else str(file.name)
    try:
        data = file.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise click.UsageError(f"{name} can't be read: {error.strerror}.") from None
    if len(data) > FILE_BYTES_MAX:
        raise click.UsageError(f"{name} is larger than {FILE_BYTES_MAX // 2**20} MiB; commit it in parts.")
    try:
        raw = msgspec.json.decode(data)
        json.loads(data, object_pairs_hook=_once, parse_int=str)  # its numbers don't matter here
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{name} is not JSON: {error}.") from None
    except _Twice as error:
        raise click.UsageError(f"{name} is no entry: {error}.") from None
    except RecursionError:
        raise click.UsageError(f"{name} is nested too deeply.") from None
    is_list = isinstance(raw, list)
    try:
        found = msgspec.convert(raw if is_list else [raw], list[FileEntry])
    except msgspec.ValidationError as error:
        where = str(error) if is_list else str(error).replace("$[0]", "$").replace("$[...]", "$")
        raise click.UsageError(f"{name} is no entry: {where}. An entry is {EXAMPLE}, or a list of such.") from None
    return [one.entry() for one in found], is_list


class _Twice(ValueError):
    """A field was given twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field, value in pairs:
        if field in found:
            raise _Twice(f"the field {field[:64]!r} is given twice")
        found[field] = value
    return found
