"""`bursar bench transfers` has the promised rows; its peers move the same money, once, and finish what they start."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.unit.rails.desk import desk

from bursar.bench import transfers
from bursar.bench.command import command
from bursar.bench.transfers_load import AMOUNT, ASSET, SEED, Load
from bursar.bench.transfers_plain import SqlitePlain

INSTANT = transfers.TransfersPace(1, 0.05, 0.01, 30, (1, 64))
KEYS = {"case", "store", "callers", "ours_per_s", "baseline_per_s", "ratio", "p50_ms", "p99_ms"}
EVERYWHERE = [("plain", 1), ("plain", 64), ("half-rate", 0), ("http", 1), ("http", 64), ("overload-http", 1024)]


@pytest.mark.timeout(300)
def test_the_rows_are_the_promised_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(transfers, "QUICK", INSTANT)
    done = CliRunner().invoke(command, ["transfers", "--quick", "--json", "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)
    assert rows[0].keys() >= KEYS
    found = {(row["store"], row["case"], row["callers"]): row for row in rows}
    wanted = [(store, *case) for store in ("sqlite", "postgres") for case in [*EVERYWHERE, ("recovery", 1)]]
    wanted += [("postgres", case, callers) for case, callers in (("dbos", 1), ("dbos", 64), ("http-dbos", 64))]
    assert sorted(found) == sorted(wanted)
    assert all(row["ours_per_s"] > 0 and row["baseline_per_s"] > 0 for row in rows)
    for store in ("sqlite", "postgres"):
        assert found[store, "overload-http", 1024]["ratio"] == 1.0  # all that was accepted has settled
        assert found[store, "recovery", 1]["note"].startswith("30 in flight")
        assert found[store, "plain", 64]["p99_ms"] >= found[store, "plain", 64]["p50_ms"] > 0
    assert (tmp_path / "transfers.md").read_text().startswith("# Benchmark: transfers")


def test_the_plain_version_moves_money_once(tmp_path: Path) -> None:
    """An honest peer: idempotent, and nothing is lost between its two tables and the core."""

    async def play() -> tuple[int, int]:
        async with desk(tmp_path / "core") as core:
            client = await core.client()
            plain = SqlitePlain(str(tmp_path / "plain.db"), client)
            load = Load(1)
            there, back = load.job(), load.job()
            there = (there[0], back[1], there[2])  # one user's both
            for job in (there, there, back, back):
                await plain.transfer(job)
            held = (await client.balances(back[1])).balances[ASSET].available
            await plain.close()
            return back[1], held

    (tmp_path / "core").mkdir()
    user, held = asyncio.run(play())
    file = sqlite3.connect(tmp_path / "plain.db")
    states = file.execute("SELECT state, count(*) FROM transfers GROUP BY state").fetchall()
    (available,) = file.execute("SELECT available FROM balances WHERE user_id = ?", (user,)).fetchone()
    file.close()
    assert (states, available, held) == ([("COMMITTED", 2)], SEED, 0)
    assert AMOUNT > 0
