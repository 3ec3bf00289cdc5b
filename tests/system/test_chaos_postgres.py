"""40 seconds of `kill -9` on PostgreSQL: two servers, worker, two cores, signer, EVM node and database, under load."""

from __future__ import annotations

import pytest
from tests.system.chaos_run import run_chaos


@pytest.mark.timeout(600)
def test_40_seconds_of_kills_on_postgres() -> None:
    """Each of the eight dies again and again, sometimes all at once; clients repeat until they know."""
    report = run_chaos("postgres")
    assert set(report.kills) == {
        *("api-a", "api-b", "worker", "core-spot", "core-future", "postgres", "signer", "anvil")
    }
