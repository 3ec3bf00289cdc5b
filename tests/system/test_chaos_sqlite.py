"""A minute of `kill -9` on SQLite: the server and its core, at random, under load. Nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from tests.system.chaos_run import run_chaos


@pytest.mark.timeout(600)
def test_a_minute_of_kills_on_sqlite() -> None:
    """`bursar serve` and its child core die again and again; clients repeat until they know."""
    report = run_chaos("sqlite")
    assert set(report.kills) == {"server", "core"}
