"""The reference says what the code says."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from bursar.model import errors

REFERENCE = Path(__file__).parents[2] / "docs" / "reference" / "errors.md"


def concrete(family: type[errors.BursarError]) -> Iterator[type[errors.BursarError]]:
    """Every error class that has a code of its own."""
    for kind in family.__subclasses__():
        if "code" in vars(kind):
            yield kind
        yield from concrete(kind)


def test_every_error_is_in_the_reference_with_its_code_meaning_and_facts() -> None:
    """Given an error class, then its row in docs/reference/errors.md names code, class, meaning and facts."""
    rows = REFERENCE.read_text().splitlines()
    kinds = [kind for kind in concrete(errors.BursarError) if kind.__module__ == errors.__name__]
    assert len(kinds) > 25
    for kind in kinds:
        meaning = (kind.__doc__ or "").strip().splitlines()[0]
        facts = ", ".join(f"`{field.name}`" for field in dataclasses.fields(kind))
        found = [r for r in rows if f"`{kind.code}`" in r and f"`{kind.__name__}`" in r]
        assert len(found) == 1, kind.__name__
        assert meaning in found[0]
        assert found[0].endswith(f"| {facts} |")


def test_codes_are_not_shared() -> None:
    """A program that switches on the code must be able to tell two errors apart."""
    codes = [kind.code for kind in concrete(errors.BursarError)]
    assert len(codes) == len(set(codes))
