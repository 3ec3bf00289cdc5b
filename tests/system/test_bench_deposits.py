"""`bursar bench deposits` has the promised rows, of real deposits that are credited."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bursar.bench import deposits
from bursar.bench.command import command


@pytest.mark.timeout(120)
@pytest.mark.parametrize("store", ["sqlite", "postgres"])
def test_the_rows_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, store: str) -> None:
    monkeypatch.setattr(deposits, "QUICK", deposits.DepositsPace((20, 60), 20, 1, (5, 300), 3, 1))
    words = ["deposits", "--quick", "--json", "--store", store, "--out", str(tmp_path)]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    rows = {row["case"]: row for row in json.loads(done.stdout)}
    sizes = {"deposits-20": 20, "deposits-60": 60, "floor-20": 20, "floor-60": 60, "idle-5": 5, "idle-300": 300}
    assert {case: row["callers"] for case, row in rows.items()} == sizes
    assert all(row["ours_per_s"] > 0 and row["baseline_per_s"] > 0 for row in rows.values())
    assert all(" 0 rows of history" in rows[case]["note"] for case in ("idle-5", "idle-300"))
    assert rows["deposits-60"]["against"] == "the same with 20, in turn"
    assert (tmp_path / "deposits.md").read_text().startswith("# Benchmark: deposits")
