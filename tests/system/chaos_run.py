"""One chaos run for `make test`: what has to be true of it on either store. `make chaos` is the same, for longer."""

from __future__ import annotations

import pytest

from bursar.chaos import Report, chaos

SECONDS = 40
SEED = 33  # by its second blow everything has been killed once, also on a machine that has time for few


def run_chaos(store: str) -> Report:
    """All is well, and enough has happened for that to mean something."""
    report = chaos(store, seconds=SECONDS, seed=SEED, say=lambda _report: None)
    if not report.ok:
        found = [*report.wrong, *(f"{f.invariant}: {f.note}" for f in report.findings if not f.judged)]
        pytest.fail("\n".join([*found, f"logs: {report.folder}", str(report)]))
    assert report.elapsed >= SECONDS
    assert sum(report.kills.values()) >= 8, report
    assert report.ends["COMMITTED"] >= 50, report
    assert sum(report.lost.values()) > 0, report
    assert report.refusals["INSUFFICIENT_BALANCE"] > 0, report
    assert report.payouts["confirmed"] >= 5, report
    assert sum(report.chain_faults.values()) >= 10, report
    cores = 1 if store == "sqlite" else 2
    assert sorted(f.invariant for f in report.findings) == sorted(
        ["I1", "I2", "I3", "I4", *["I5"] * cores, "I6", "I7", "I8", "I9"]
    )
    return report
