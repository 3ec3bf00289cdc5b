"""Reads `.sql` files: one named statement after another, each with a comment above it.

The statements of an engine are those of all `.sql` files beside its code, and those that other packages bring: a flow's
statements stand beside the flow, in `sqlite.sql` and `postgres.sql`.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable

from bursar.store.columns import expand

MARK = "-- name: "

_found: dict[str, dict[str, str]] = {}  # of the engines in use: name → statement
_brought: list[str] = []  # packages that have statements of their own


def statements(engine: str) -> dict[str, str]:
    """The statements of an engine by name."""
    if engine not in _found:
        _found[engine] = {}
        for file in files(f"bursar.store.{engine}").iterdir():
            if file.name.endswith(".sql"):
                _add(engine, file)
        for package in _brought:
            _add(engine, files(package) / f"{engine}.sql")
    return _found[engine]


def bring(package: str) -> None:
    """Add the statements of another package to those of both engines; call it where the package uses them.

    A package without a file for an engine is of no use there.
    """
    if package not in _brought:
        _brought.append(package)
        for engine in _found:
            _add(engine, files(package) / f"{engine}.sql")


def _add(engine: str, file: Traversable) -> None:
    for name, sql in _named(file) if file.is_file() else ():
        if name in _found[engine]:
            raise ValueError(f"{file}: a statement {name!r} exists already for {engine}")
        _found[engine][name] = expand(engine, sql)


def _named(file: Traversable) -> Iterator[tuple[str, str]]:
    for block in file.read_text(encoding="utf-8").split(MARK)[1:]:
        name, _, body = block.partition("\n")
        yield name.strip(), "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()


def migrations(engine: str) -> list[tuple[int, str, str]]:
    """The migrations of an engine: number, name, text; in order."""
    found = []
    for file in (files(f"bursar.store.{engine}") / "migrations").iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, file.read_text(encoding="utf-8")))
    return sorted(found)
