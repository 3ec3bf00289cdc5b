"""A cluster loses its leader in three ways: killed, silent, and in good order.

Not in `make test`: it runs only if it is named (tests/conftest.py), and needs requirements-cluster.lock.
`make chaos CHAOS_STORE=cluster` is the same with every fault, for longer, in an order that the seed decides.
"""

from __future__ import annotations

import pytest

from bursar.chaos import Fault, chaos

FAULTS = (Fault.KILL_LEADER, Fault.SWITCH_OVER, Fault.STOP_LEADER)
SECONDS = 600  # more than they take
SEED = 1


@pytest.mark.timeout(SECONDS)
def test_transfers_are_back_two_seconds_after_every_failover_and_nothing_is_lost() -> None:
    report = chaos("cluster", seconds=SECONDS, seed=SEED, say=lambda _report: None, faults=FAULTS)

    if not report.ok:
        found = [*report.wrong, *(f"{f.invariant}: {f.note}" for f in report.findings if not f.judged)]
        pytest.fail("\n".join([*found, f"logs: {report.folder}", str(report)]))
    assert [outage.fault for outage in report.outages] == list(FAULTS)
    assert all(outage.promoted_s is not None for outage in report.outages), report.outages
    assert report.database_writes > 100, report
    assert report.ends["COMMITTED"] >= 100, report
    assert sum(report.lost.values()) > 0, report
    assert sorted(f.invariant for f in report.findings) == ["I1", "I2", "I3", "I4", "I5", "I5", "I7", "I8"]
