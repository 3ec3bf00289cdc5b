"""Reads `.sql` files: one named statement after another, each with a comment above it."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable

MARK = "-- name: "


def statements(package: str) -> dict[str, str]:
    """The statements of an engine, by name, from all `.sql` files beside its code."""
    found: dict[str, str] = {}
    for file in files(package).iterdir():
        if file.name.endswith(".sql"):
            for block in file.read_text(encoding="utf-8").split(MARK)[1:]:
                name, _, body = block.partition("\n")
                lines = [line for line in body.splitlines() if not line.startswith("--")]
                if name.strip() in found:
                    raise ValueError(f"{file.name}: a statement {name.strip()!r} exists already in {package}")
                found[name.strip()] = "\n".join(lines).strip()
    return found


def migrations(package: str) -> list[tuple[int, str, str]]:
    """The migrations of an engine: number, name, text; in order."""
    folder: Traversable = files(package) / "migrations"
    found = []
    for file in folder.iterdir():
        if file.name.endswith(".sql"):
            number, _, name = file.name.removesuffix(".sql").partition("_")
            found.append((int(number), name, file.read_text(encoding="utf-8")))
    return sorted(found)
