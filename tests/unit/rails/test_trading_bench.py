"""`bursar bench trading` has the promised rows, and its baseline speaks the core's protocol."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bursar.bench import report, trading
from bursar.bench.command import command
from bursar.ports import SystemPorts
from bursar.rails.trading import protocol

INSTANT = trading.TradingPace(1, 2_048, 2_000)


def test_the_rows_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trading, "QUICK", INSTANT)
    monkeypatch.setattr(trading, "CLIENTS", (1, 4))
    done = CliRunner().invoke(command, ["trading", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert {"case", "store", "callers", "ours_per_s", "baseline_per_s", "ratio"} <= rows[0].keys()
    assert [(row["case"], row["callers"]) for row in rows[:6]] == [
        (f"frames-{size}", clients) for size in (1, 64, 1024) for clients in (1, 4)
    ]
    assert [row["case"] for row in rows[6:]] == ["restart-snapshot", "restart-log", "snapshot"]
    assert all(row["ours_per_s"] > 0 and row["baseline_per_s"] > 0 for row in rows)
    assert (tmp_path / "trading.md").read_text().startswith("# Benchmark: trading")
    assert report.as_table([], "trading").title


def test_the_baseline_answers_as_the_core_does(tmp_path: Path) -> None:
    async def ask() -> protocol.Answer:
        async with trading._baseline(tmp_path) as address:
            stream = await SystemPorts().connect(address)
            stream.write(trading.Load().frame(3))
            splitter = protocol.Splitter(protocol.ANSWER_BYTES_MAX)
            while not (found := splitter.feed(await stream.read())):
                pass
            stream.close()
            answer: protocol.Answer = protocol.decode_answer(found[0])
            return answer

    assert asyncio.run(ask()) == protocol.Done(1, 3, b"\0\0\0", [1, 2, 3])
    assert (tmp_path / "baseline.log").stat().st_size > 0
