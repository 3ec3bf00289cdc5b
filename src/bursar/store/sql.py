"""Reads `.sql` files: one named statement after another, each with a comment above it.

The statements of a dialect are those of all `.sql` files beside its code, and those that other packages bring: a
flow's statements stand beside the flow, in `sqlite.sql` and `postgres.sql`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from bursar.store.columns import expand

MARK = "-- name: "

_found: dict[str, dict[str, str]] = {}  # of the dialects in use: name → statement
_brought: list[str] = []  # packages that have statements of their own


def statements(dialect: str) -> dict[str, str]:
    """The statements of a dialect by name."""
    if dialect not in _found:
        _found[dialect] = {}
        for file in files(f"bursar.store.{dialect}").iterdir():
            if file.name.endswith(".sql"):
                _add(dialect, file)
        for package in _brought:
            _add(dialect, files(package) / f"{dialect}.sql")
    return _found[dialect]


def bring(package: str) -> None:
    """Add the statements of another package to those of both dialects; call it where the package uses them.

    A package without a file for a dialect is of no use there.
    """
    if package not in _brought:
        _brought.append(package)
        for dialect in _found:
            _add(dialect, files(package) / f"{dialect}.sql")


def _add(dialect: str, file: Traversable) -> None:
    for name, sql in _named(file) if file.is_file() else ():
        if name in _found[dialect]:
            raise ValueError(f"{file}: a statement {name!r} exists already for {dialect}")
        _found[dialect][name] = expand(dialect, sql)


def _named(file: Traversable) -> Iterator[tuple[str, str]]:
    for block in file.read_text(encoding="utf-8").split(MARK)[1:]:
        name, _, body = block.partition("\n")
        yield name.strip(), "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()


def migrations(dialect: str) -> list[tuple[int, str, str]]:
    """The migrations of a dialect: number, name, text; in order."""
    found = []
    for file in (files(f"bursar.store.{dialect}") / "migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, file.read_text(encoding="utf-8")))
    return sorted(found)
