"""40 seconds of `kill -9` on SQLite: server, core, signer and EVM node, under load. Nothing lost, nothing twice."""

from __future__ import annotations

import pytest
from tests.system.chaos_run import run_chaos


@pytest.mark.timeout(600)
def test_40_seconds_of_kills_on_sqlite() -> None:
    """Each of the four dies again and again, and the chain misbehaves; clients repeat until they know."""
    report = run_chaos("sqlite")
    assert set(report.kills) == {"server", "core", "signer", "anvil"}
