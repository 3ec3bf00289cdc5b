"""What is shown of the rows: a table for the terminal, Markdown, JSON and a plot for the documentation."""

from __future__ import annotations

import os
import platform
import sqlite3
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from bursar.bench.measure import Row
from bursar.bench.plot import plot

HEADINGS = ("case", "store", "callers", "ours/s", "base/s", "ratio")
MORE = ("batch", "log B")
WAITS = ("p50 ms", "p99 ms")
LEFT = 2  # columns of text; the others are numbers

TITLES = {
    "ledger": "The ledger beside its baseline; plain, growth and memory: see `bursar bench --help`",
    "transfers": "Internal transfers beside what a team would use instead; cases: see `bursar bench --help`",
    "payouts": "Payouts beside a bare sender; cases: see `bursar bench --help`",
    "deposits": "Deposits from a chain; cases: see `bursar bench --help`",
    "withdrawals": "Withdrawals that wait for approval; cases: see `bursar bench --help`",
    "trading": "The trading core beside its baseline; restart and snapshot: see `bursar bench --help`",
}
PROSE = {
    "ledger": (
        "![ratio to the baseline, by callers, and to 10^4 postings, by size](ledger.svg)",
        "",
        "The baseline writes the same durable rows into the same tables by hand-written SQL, in batches of the same",
        "size, and checks nothing. It passes them to the driver in the usual way (`executemany`, an array per",
        "column); the ledger's own way is faster, which is part of the ratio. The garbage collector runs rarely, as",
        "in `bursar serve`. A row's two rates were measured in turn, window by window, after some seconds of load on",
        "both; each is the median. In `plain` rows the other is a table of balances with one transaction per payment;",
        "in `growth` rows it is the ledger itself at 10^4 postings; in `memory` rows the ratio is of resident bytes,",
        "half-way and at the end.",
    ),
    "transfers": (
        "Settled transfers per second, every second one back, durable on both sides. `plain`: the version written in",
        "an afternoon, one statement per transaction, idempotent, no batching, no checks, no history. `dbos`: the",
        "same two steps as a DBOS workflow. Both use the same PostgreSQL server, the same core and the same client,",
        "and take turns with ours. `http`: `bursar serve` beside the library; `http-dbos`: beside DBOS behind the",
        "same web server. `half-rate`: arrivals by the clock at half of the highest rate, beside the p99 that is",
        "allowed. `overload-http`: settled beside accepted, with twice as many clients as are admitted. `recovery`:",
        "transfers left in flight by a killed process, ended per second, beside what is allowed.",
    ),
    "payouts": (
        "ERC-20 payments per second on one anvil, from request to confirmed: database, worker, `bursar signer run`,",
        "two configured nodes (both are that anvil). The bare sender has one node, and as many wallets, payments and",
        "payments under way; it signs, sends each by itself, asks for all receipts once per block, and keeps nothing.",
        "A block comes every 200 ms and is final two later. With one wallet both wait for blocks most of the time;",
        "with four, the processes are what is measured. A window begins with nothing under way and ends when all is",
        "final; both ends are in the rates. Callers: payments under way at most. p50, p99: from request to confirmed.",
        "",
        "`polling-N`: N payouts are mined and not final. Polls (claimed by the worker, fate asked of two nodes, put",
        "back) per second of CPU of this process, beside the same with the fewest: 1.00 is flat, and 0.83 (1.2 times",
        "as dear) is allowed. Callers: payouts that wait.",
    ),
    "deposits": (
        "Transfers to users' addresses, three of four of a token and the others of coin, in final blocks of a",
        "simulated EVM chain, as many of strangers among them: read by the real rail at two nodes, stored, judged and",
        "credited. Half of them are a user's first, which makes two accounts. The nodes are in this process; what they",
        "use is left out, and no HTTP is in it. The database only grows. Callers: deposits, or addresses, that it has.",
        "",
        "`deposits-N`: deposits per second of CPU of this process, in windows of 100, in turn with windows on another",
        "database that has the fewest: 1.00 is flat, and 0.77 (1.3 times as dear) is allowed. `floor-N`: the same",
        "windows per second of time, beside the very rows that they have left, written into a further database by",
        "bare statements (COPY, `executemany`) in as many groups, which reads no chain and decides nothing. `idle-N`:",
        "polls that find a block with nothing for us, per second of CPU, with N addresses issued, beside the same",
        "with the fewest. Batch: deposits in one transaction.",
    ),
    "withdrawals": (
        "`waiting-N`: N withdrawals wait for approval. A worker's looks for work, which find none, per second of CPU",
        "of this process, beside the same with the fewest: 1.00 is flat, and 0.83 (1.2 times as dear) is allowed.",
        "Callers: withdrawals that wait. They were requested and decided the usual way, each with its hold.",
    ),
    "trading": (
        "Operations per second of one core process over its Unix socket, durable; `frames-N` has N operations in a",
        "frame, and every client waits for its answer. The baseline decodes the same frames, makes one look-up and",
        "one store per operation, appends, syncs once for all that wait, and answers; it checks nothing and keeps no",
        "answers. In `restart` rows the other is what is allowed; in the `snapshot` row it is the same without",
        "snapshots.",
    ),
}


def _headings(name: str) -> tuple[str, ...]:
    return HEADINGS + (WAITS if name in ("transfers", "payouts") else MORE)


def _cells(row: Row, name: str) -> tuple[str, ...]:
    more = (
        ("" if row.p50_ms is None else f"{row.p50_ms:,.1f}", "" if row.p99_ms is None else f"{row.p99_ms:,.1f}")
        if name in ("transfers", "payouts")
        else (f"{row.group:.0f}", "" if row.wal_bytes is None else f"{row.wal_bytes:,}")
    )
    return (
        row.case,
        row.store,
        f"{row.callers}",
        f"{row.ours_per_s:,.0f}",
        f"{row.baseline_per_s:,.0f}",
        f"{row.ratio:.2f}",
        *more,
    )


def as_table(rows: Sequence[Row], name: str) -> Table:
    """For a terminal."""
    title = TITLES[name]
    table = Table(
        title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 0, 0, 1), pad_edge=False, show_edge=False
    )
    for place, heading in enumerate(_headings(name)):
        table.add_column(heading, justify="left" if place < LEFT else "right", no_wrap=True)
    store = None
    for row in rows:
        if store not in (None, row.store):
            table.add_section()
        store = row.store
        table.add_row(*_cells(row, name))
    return table


def as_json(rows: Sequence[Row]) -> str:
    """A list of rows."""
    return msgspec.json.format(msgspec.json.encode(rows), indent=1).decode()


def as_markdown(rows: Sequence[Row], name: str) -> str:
    """For the documentation."""
    headings = _headings(name)
    rules = ("---" if place < LEFT else "---:" for place in range(len(headings)))
    lines = [
        f"# Benchmark: {name}",
        "",
        f"Made by `bursar bench {name}` on {machine()}. Read the ratios; the rates are that machine's.",
        "",
        *PROSE[name],
        "",
        f"| {' | '.join(headings)} |",
        f"| {' | '.join(rules)} |",
        *(f"| {' | '.join(_cells(row, name))} |" for row in rows),
        "",
        *(f"- {row.case}, {row.store}: {row.note}." for row in rows if row.note),
    ]
    return "\n".join(lines) + "\n"


def machine() -> str:
    """What it ran on, in a few words."""
    cores = len(os.sched_getaffinity(0))
    return f"{cores} cores of {platform.machine()}, Python {platform.python_version()}, SQLite {sqlite3.sqlite_version}"


def keep(rows: Sequence[Row], folder: Path, name: str) -> list[Path]:
    """Write them into a folder, the ledger's with a plot; returns where they are."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {"md": as_markdown(rows, name), "json": as_json(rows) + "\n"}
    if name == "ledger":
        contents["svg"] = plot(rows)
    paths = []
    for kind, text in contents.items():
        path = folder / f"{name}.{kind}"
        path.write_text(text, encoding="utf-8")
        paths.append(path)
    return paths
