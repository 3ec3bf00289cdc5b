"""The benchmark measures what it says: the same rows on both sides, an honest past, rows that can be read."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

import bursar
from bursar.bench import baseline as baselines
from bursar.bench import ledger, payouts, report
from bursar.bench.baseline import ONE_STATEMENT
from bursar.bench.command import command
from bursar.bench.load import BASE
from bursar.bench.measure import Pace, Row, ours, row_of
from bursar.bench.payouts_polling import Polls, polls_row
from bursar.bench.places import SqlitePlace
from bursar.bench.plot import plot
from bursar.bench.workload import ACCOUNTS, ASSET, HOT_ID, SEED_MINOR, Workload, path_of

TABLES = ("envelopes", "postings", "spends", "live_postings", "involved", "events")
INSTANT = Pace(2, 0.01, 0.01, 0.01, 0.01, 0.01, (10_000, 20_000), 0.02)


def counts(path: Path) -> dict[str, int]:
    connection = sqlite3.connect(path)
    found = {table: connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in TABLES}
    connection.close()
    return found


@pytest.mark.parametrize("shape", ["uniform", "hot-source", "hot-target", "hot"])
def test_the_baseline_writes_as_many_rows_into_every_table_as_the_ledger(tmp_path: Path, shape: str) -> None:
    async def both() -> int:
        place = SqlitePlace(tmp_path)
        base = await place.make("mine", BASE)
        bare = await place.copy(base, "bare")
        async with bursar.open(base) as b, place.baseline(bare, BASE) as baseline:
            line = Workload(shape)
            entries = [line.entry() for _ in range(300)]
            await asyncio.gather(*[b.ledger.commit(entry) for entry in entries])
            groups = b.ledger.writer.batches
            window = await baselines.window(baseline, Workload(shape), 300, 60.0, 1.0)
            assert window.done >= 300
            return groups * 1000 + window.groups

    start = counts_of_base(tmp_path)
    asyncio.run(both())
    mine, bare = counts(tmp_path / "mine.db"), counts(tmp_path / "bare.db")
    ours_more = {table: mine[table] - start[table] for table in TABLES}
    bare_more = {table: bare[table] - start[table] for table in TABLES}
    times = bare_more["envelopes"] // 300
    assert bare_more["envelopes"] == 300 * times
    per_payment = {table: n * times for table, n in ours_more.items()}
    assert bare_more == per_payment


def counts_of_base(folder: Path) -> dict[str, int]:
    """What a loaded database holds before the first write."""
    asyncio.run(SqlitePlace(folder).make("untouched", BASE))
    return counts(folder / "untouched.db")


@pytest.mark.parametrize("postings", [BASE, 40_000])
def test_a_loaded_past_conserves_value_and_knows_what_is_live(tmp_path: Path, postings: int) -> None:
    async def look() -> None:
        address = await SqlitePlace(tmp_path).make("past", postings)
        async with bursar.open(address) as b:
            assert counts(tmp_path / "past.db")["postings"] == postings
            read = b.store.read
            sums = await b.ledger.balance(path_of(HOT_ID), ASSET)
            assert sums.minor > SEED_MINOR // 2
            await b.ledger.commit(Workload("hot-source").entry())
            assert await read.rules.generation()

    asyncio.run(look())
    connection = sqlite3.connect(tmp_path / "past.db")
    amounts = [int.from_bytes(row[0], "big") - 2**127 for row in connection.execute("SELECT amount FROM live_postings")]
    assert sum(amounts) == 0
    live = {row[0] for row in connection.execute("SELECT posting FROM live_postings")}
    unspent = {
        row[0] for row in connection.execute("SELECT id FROM postings WHERE id NOT IN (SELECT posting FROM spends)")
    }
    assert live == unspent
    connection.close()


def test_callers_share_batches_and_every_commit_is_counted(tmp_path: Path) -> None:
    async def measure() -> None:
        address = await SqlitePlace(tmp_path).make("past", BASE)
        before = counts(tmp_path / "past.db")["envelopes"]
        async with bursar.open(address) as b:
            window = await ours(b.ledger, Workload("uniform"), 16, 0.05)
        assert counts(tmp_path / "past.db")["envelopes"] - before == window.done
        assert window.group > 1

    asyncio.run(measure())


def test_a_workload_never_pays_itself_and_never_repeats_a_key() -> None:
    for shape in ("uniform", "hot-source", "hot-target", "hot"):
        taken = Workload(shape).take(5_000)
        assert len({key for key, _ in taken}) == 5_000
        assert all(source != target for _, (source, target, _) in taken)
        sources = {source for _, (source, _, _) in taken}
        assert (len(sources) == 1) == (shape == "hot-source")
    assert len({s for _, (s, _, _) in Workload("uniform").take(20_000)}) > ACCOUNTS * 0.9


def test_the_baseline_s_one_statement_numbers_every_argument_once() -> None:
    numbers = [int(piece.partition("::")[0]) for piece in ONE_STATEMENT.split("$")[1:]]
    assert numbers == list(range(1, 26))


def rows() -> list[Row]:
    made = [
        row_of(shape, store, callers, [(10.0, 20.0), (30.0, 40.0), (20.0, 25.0)], against="baseline", group=callers)
        for store in ("sqlite", "postgres")
        for shape in ledger.SHAPES
        for callers in ledger.CALLERS
    ]
    made.append(row_of("growth-uniform-1000000", "sqlite", 256, [(9.0, 10.0)], against="the same at 10,000 postings"))
    return made


def test_a_row_is_the_median_of_its_windows() -> None:
    row = rows()[0]
    assert (row.ours_per_s, row.baseline_per_s, row.ratio) == (20.0, 25.0, 0.8)


def test_the_three_files_are_written_and_can_be_read(tmp_path: Path) -> None:
    paths = report.keep(rows(), tmp_path / "new" / "folder", "ledger")
    assert [path.name for path in paths] == ["ledger.md", "ledger.json", "ledger.svg"]
    assert len(json.loads(paths[1].read_text())) == 19
    assert paths[0].read_text().count("\n| ") == 19 + 2
    ElementTree.fromstring(plot(rows()))


def test_the_command_prints_rows_with_the_keys_that_others_rely_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.bench.command.QUICK", INSTANT)
    result = CliRunner().invoke(command, ["ledger", "--quick", "--json", "--store", "sqlite"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all({"case", "store", "callers", "ours_per_s", "baseline_per_s", "ratio"} <= row.keys() for row in found)
    cases = {(row["case"], row["callers"]) for row in found}
    assert cases >= {(shape, callers) for shape in ledger.SHAPES for callers in (1, 16, 256)}
    assert cases >= {("plain-uniform", 256), ("growth-uniform-20000", 256), ("growth-hot-20000", 256), ("memory", 256)}


def test_a_row_of_payouts_is_the_median_of_windows_beside_the_bare_sender() -> None:
    mine = [payouts.Window(seconds, 0.1, [0.5, 1.0, 2.0, 1.0]) for seconds in (4.0, 2.0, 8.0)]
    bare = [payouts.Window(seconds, 0.04, [0.25] * 4) for seconds in (1.0, 2.0, 2.0)]
    row = payouts.row_beside("wallets-4", "sqlite", 256, mine, bare)
    assert (row.ours_per_s, row.baseline_per_s, row.ratio) == (1.0, 2.0, 0.5)
    assert (row.callers, row.p50_ms, row.p99_ms) == (256, 1_000.0, 2_000.0)
    assert row.samples == [(1.0, 4.0), (2.0, 2.0), (0.5, 2.0)]
    assert "25.0 ms of CPU a payout and 10.0 a bare payment" in row.note


def test_a_row_of_polls_is_flat_at_one_and_below_it_where_more_that_wait_cost_more() -> None:
    few = Polls(100, [1.0, 2.0, 3.0], [2.0, 4.0, 6.0], 0)
    row = polls_row("sqlite", few, Polls(10_000, [2.5, 2.5, 5.0], [5.0, 5.0, 5.0], 7))
    assert (row.ours_per_s, row.baseline_per_s, row.ratio) == (400.0, 500.0, 0.8)
    assert (row.case, row.callers, row.against) == ("polling-10000", 10_000, "the same with 100")
    assert "2.50 ms of CPU and 5.00 ms of time a poll, 1.25 times that with 100" in row.note
    assert row.note.endswith("; 7 rows of history")
    assert polls_row("sqlite", few, few).ratio == 1.0


def test_an_unknown_name_is_refused_with_the_names_there_are() -> None:
    result = CliRunner().invoke(command, ["nothing"])
    assert result.exit_code == 2
    assert "ledger" in result.output


@pytest.mark.parametrize("name", ["ledger", "payouts", "trading", "transfers", "withdrawals"])
def test_no_figure_is_cut_off_in_a_terminal_of_eighty_columns(name: str) -> None:
    kept = Path(__file__).parents[2] / "docs" / "bench" / f"{name}.json"
    rows = msgspec.json.decode(kept.read_bytes(), type=list[Row])
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(report.as_table(rows, name))
    text = console.export_text()
    assert "…" not in text
    assert f"{rows[0].ratio:.2f}" in text
