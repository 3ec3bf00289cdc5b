"""`bursar bench withdrawals` has the promised rows, of real requests that wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bursar.bench import withdrawals
from bursar.bench.command import command


@pytest.mark.timeout(120)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_rows_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str) -> None:
    monkeypatch.setattr(withdrawals, "QUICK", withdrawals.WaitingPace((5, 20), 10, 1))
    words = ["withdrawals", "--quick", "--json", "--store", store, "--out", str(tmp_path)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    rows = {row["case"]: row for row in json.loads(done.stdout)}
    assert {case: row["callers"] for case, row in rows.items()} == {"waiting-5": 5, "waiting-20": 20}
    assert all(row["ours_per_s"] > 0 and row["against"] == "the same with 5" for row in rows.values())
    assert (tmp_path / "withdrawals.md").read_text().startswith("# Benchmark: withdrawals")
