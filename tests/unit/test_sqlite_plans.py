"""How SQLite looks things up: by whole keys. Half a key works as well, until there is a lot to walk over."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest

import bursar
from bursar.flows import transfers  # noqa: F401 (it brings statements)
from bursar.store.sqlite.calls import SQL, register

# Statement → the table, and by what it is looked up.
PLANS = {
    "envelopes_by_key": ("e", "(scope=? AND key=?)"),
    "batch_key": ("envelopes", "(scope=? AND key=?)"),
    "versions": ("a", "(id=? AND version=?)"),
    "batch_guarded_balances": ("h", "(account=? AND asset=?)"),
    "standings": ("l", "(account=? AND asset=?)"),
    "batch_live": ("postings", "(rowid>?)"),
    "batch_events": ("envelopes", "(rowid>?)"),
    "place_of_envelope": ("events", "(subject=? AND kind=? AND version=?)"),
    "envelopes_after": ("v", "(rowid>?)"),
    "envelopes_of_account": ("v", "(subject=? AND kind=? AND version=? AND rowid<?)"),
    "operation": ("outcomes", "(scope=? AND id=? AND op=?)"),
}


@pytest.fixture(scope="module")
def connection(tmp_path_factory: pytest.TempPathFactory) -> sqlite3.Connection:
    path = tmp_path_factory.mktemp("plans") / "funds.db"

    async def make() -> None:
        async with bursar.open(f"sqlite:///{path}"):
            pass

    asyncio.run(make())
    opened = sqlite3.connect(Path(path))
    register(opened, lambda: 0)
    return opened


def test_open_holds_are_read_without_those_that_have_ended(connection: sqlite3.Connection) -> None:
    """Every minute, and there is one for every withdrawal that ever was."""
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {SQL['owned_holds']}", (0, 1_000))]
    assert plan[0] == "SCAN holds USING INDEX holds_open", plan


@pytest.mark.parametrize("name", PLANS)
def test_a_key_is_looked_up_whole(connection: sqlite3.Connection, name: str) -> None:
    table, by = PLANS[name]
    values = ["[]"] * len(set(re.findall(r"\?\d", SQL[name])) or re.findall(r"\?", SQL[name]))
    plan = [row[3] for row in connection.execute(f"EXPLAIN QUERY PLAN {SQL[name]}", values)]
    assert any(step.startswith(f"SEARCH {table} ") and step.endswith(by) for step in plan), plan
