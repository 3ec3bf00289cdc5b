"""Statements by name: those of a dialect, and those that a flow brings."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bursar.store import sql

PACKAGE = "brought_by_a_test"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of a flow's author, and the stores as they are before they know it."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)  # another test's
    monkeypatch.setattr(sql, "_found", {"sqlite": dict(sql.statements("sqlite"))})
    monkeypatch.setattr(sql, "_brought", [])
    return tmp_path / PACKAGE


def test_a_flow_brings_statements_for_stores_in_use_and_for_those_to_come(package: Path) -> None:
    for dialect, schema in (("sqlite", ""), ("postgres", "bursar.")):
        text = f"-- name: my_pauses\n-- What is off.\nSELECT @p.pause FROM {schema}pauses p\n"
        (package / f"{dialect}.sql").write_text(text)

    sql.bring(PACKAGE)
    sql.bring(PACKAGE)

    assert sql.statements("sqlite")["my_pauses"].startswith("SELECT p.kind, p.name, p.actor, p.reason, p.at, ")
    assert sql.statements("postgres")["my_pauses"].endswith(" FROM bursar.pauses p")
    assert "pauses" in sql.statements("postgres")


def test_a_name_that_exists_is_refused(package: Path) -> None:
    (package / "sqlite.sql").write_text("-- name: pauses\n-- What is off.\nSELECT 1\n")

    with pytest.raises(ValueError, match="'pauses' exists already for sqlite"):
        sql.bring(PACKAGE)
    assert sql.statements("sqlite")["pauses"] != "SELECT 1"
