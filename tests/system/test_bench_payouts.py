"""`bursar bench payouts` has the promised rows, of real payments; and waiting for confirmations leaves no history."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bursar.bench import payouts
from bursar.bench.command import command

INSTANT = payouts.PayoutsPace(1, 6, 4, (10, 30), 30, 1)
KEYS = {"case", "store", "callers", "ours_per_s", "baseline_per_s", "ratio", "p50_ms", "p99_ms", "note"}


@pytest.mark.timeout(300)
def test_the_rows_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(payouts, "QUICK", INSTANT)
    words = ["payouts", "--quick", "--json", "--store", "sqlite", "--out", str(tmp_path)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert all(row.keys() >= KEYS and row["store"] == "sqlite" for row in rows)
    found = {row["case"]: row for row in rows}
    assert {case: row["callers"] for case, row in found.items()} == {
        "wallets-1": 4,
        "wallets-4": 16,
        "polling-10": 10,
        "polling-30": 30,
    }
    assert all(row["ours_per_s"] > 0 and row["baseline_per_s"] > 0 and row["ratio"] > 0 for row in rows)
    for case in ("wallets-1", "wallets-4"):
        assert found[case]["against"] == "a bare sender"
        assert found[case]["p99_ms"] >= found[case]["p50_ms"] > 0
    for waiting in (10, 30):
        assert found[f"polling-{waiting}"]["note"].endswith("; 0 rows of history")
        assert found[f"polling-{waiting}"]["against"] == "the same with 10"
    assert (tmp_path / "payouts.md").read_text().startswith("# Benchmark: payouts")
