"""`bursar chaos`: kill everything at random under load, and see whether anything is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.audit import draw_findings, finding_json
from bursar.cli.output import Output, table
from bursar.cli.state import Command, State

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bursar.chaos import Outage, Report

BOTH = ("sqlite", "postgres")
LINE_EVERY_S = 5.0  # where there is no bar

Watch = Callable[["Report"], None]


@click.command(
    cls=Command,
    examples="""
    bursar chaos --seconds 600
    bursar chaos --store postgres --seconds 3600 --seed 7
    bursar chaos --store cluster --seconds 120
    """,
)
@click.option(
    "--seconds", type=click.FloatRange(min=1), default=60, show_default=True, help="How long things die, per store."
)
@click.option(
    "--store",
    type=click.Choice([*BOTH, "both", "cluster"]),
    default="both",
    show_default=True,
    help="On which database.",
)
@click.option("--seed", type=int, help="Who is hit when, and what is asked for. Default: the time.")
@click.pass_obj
def chaos(state: State, seconds: float, store: str, seed: int | None) -> int:
    """The whole system as real processes under load, killed at random; then healed, and judged from outside.

    SQLite: `bursar serve` and its core. PostgreSQL: two `bursar serve`, a worker, two cores, and a throw-away database.
    Both: a signer and an EVM node. Any of them gets kill -9 or is held still, at any moment, several at once too, and
    the chain reorganises, forgets transactions, stops and goes silent. Cluster: the same programs without payouts, on
    three nodes of PostgreSQL under Patroni (docs/how-to/cluster.md); nodes are killed, silenced, cut off, restarted and
    switched over, and transfers must be back within the failover plus two seconds. Clients repeat their requests until
    they know. In the end: nothing lost, nothing twice, all transfers and payouts ended, and every answer is true.

    Exit code 0 only then. If not, the folder with all logs and files is kept.
    """
    from bursar.chaos import ClusterUnavailable
    from bursar.chaos import chaos as run
    from bursar.testbed.anvil import AnvilNotFoundError

    out = Output(as_json=state.json)
    seed = int(time.time()) if seed is None else seed
    reports = []
    for name in BOTH if store == "both" else (store,):
        out.say(f"{name}: {seconds:g} s, seed {seed}")
        try:
            with _watched(out, seconds) as watch:
                reports.append(run(name, seconds=seconds, seed=seed, say=watch))
        except (ClusterUnavailable, AnvilNotFoundError) as error:
            raise click.ClickException(str(error)) from error
        if not out.as_json:
            _tell(out, reports[-1])
    out.show([report_json(report) for report in reports], lambda: _verdict(reports))
    return 0 if all(report.ok for report in reports) else 1


@contextlib.contextmanager
def _watched(out: Output, seconds: float) -> Iterator[Watch]:
    """A bar in a terminal, a line every few seconds elsewhere."""
    if out.as_json:
        yield lambda _report: None
    elif out.console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.table import Column

        words = TextColumn("{task.description}", table_column=Column(no_wrap=True, overflow="ellipsis"))
        columns = (BarColumn(bar_width=16), TimeElapsedColumn(), words)
        with Progress(*columns, console=out.console, transient=True) as progress:
            task = progress.add_task("starting", total=seconds)
            yield lambda r: progress.update(task, completed=min(r.elapsed, seconds), description=_line(r))
    else:
        told, phase = float("-inf"), ""

        def line(r: Report) -> None:
            nonlocal told, phase
            if r.phase != phase or time.monotonic() - told > LINE_EVERY_S:
                told, phase = time.monotonic(), r.phase
                out.line({}, f"{r.elapsed:5.0f} s  {_line(r)}")

        yield line


def _line(r: Report) -> str:
    words = f"{r.asked:,} asked, {sum(r.lost.values()):,} lost answers, {sum(r.kills.values())} kills"
    if r.chain_faults:
        words += f", {sum(r.chain_faults.values())} faults of the chain"
    return f"{r.phase}: {words}" + (f", last {r.last}" if r.last and r.phase == "striking" else "")


def _tell(out: Output, r: Report) -> None:
    rows: list[tuple[str, Any]] = [
        ("killed (kill -9)", _counts(r.kills)),
        ("held still", _counts(r.pauses)),
        ("happened to the chain", _counts(r.chain_faults)),
        ("ended because the database was away", f"{r.restarts:,}"),
        ("requests", f"{r.requests:,}"),
        ("without a useful answer", _counts(r.lost)),
        ("requests (client_order_id)", f"{r.asked:,}"),
        ("transfers in the database", _counts(r.ends)),
        ("refused, nothing written", _counts(r.refusals)),
        ("payouts in the database", _counts(r.payouts)),
        ("transactions signed for them", f"{r.transactions:,}"),
        ("what operators did to payouts", _counts(r.operated)),
        ("accounts frozen for a moment", f"{r.frozen:,}"),
        ("all at their end after", f"{r.drain_s:.1f} s"),
    ]
    if r.network:
        rows[2:2] = [("nodes are cut off by", r.network), ("writes of the database itself", f"{r.database_writes:,}")]
    out.console.print(table("", r.store, rows=rows), "")
    if r.outages:
        out.console.print(_outages(r.outages), "")
    if r.findings:
        out.console.print(draw_findings(r.findings), "")
    for text in r.wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    if r.folder:
        out.say(f"Logs, database and the cores' files are kept in {r.folder}")


def _outages(outages: list[Outage]) -> RenderableType:
    rows = [
        (
            f"{o.at_s:.0f} s",
            o.fault + (f", and {o.also}" if o.also else ""),
            o.node,
            "-" if o.promoted_s is None else f"{o.promoted_s:.1f} s",
            f"{o.database_s:.1f} s",
            f"{o.bursar_s:.1f} s",
        )
        for o in outages
    ]
    return table("at", "fault", "node", "promoted", "no writes: database", "no writes: bursar", rows=rows)


def _counts(counts: dict[str, int]) -> str:
    total = sum(counts.values())
    parts = ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items(), key=lambda pair: -pair[1]))
    return f"{total:,} ({parts})" if parts else "0"


def _verdict(reports: list[Report]) -> str:
    bad = [report.store for report in reports if not report.ok]
    if bad:
        return f"NOT well: {' and '.join(bad)}; see above."
    moved = sum(sum(report.ends.values()) for report in reports)
    paid = sum(sum(report.payouts.values()) for report in reports)
    kills = sum(sum(report.kills.values()) for report in reports)
    things = f"{moved:,} transfers, {paid:,} payouts"
    return f"All is well: {kills} kills, {things}, nothing lost, nothing twice, all at their end."


def outage_json(o: Outage) -> dict[str, Any]:
    """A fault for programs."""
    return {
        "fault": o.fault.name.lower(),
        "node": o.node,
        "at_s": round(o.at_s, 3),
        "promoted_s": None if o.promoted_s is None else round(o.promoted_s, 3),
        "database_s": round(o.database_s, 3),
        "bursar_s": round(o.bursar_s, 3),
        "also": o.also,
        "ok": not o.late,
    }


def report_json(r: Report) -> dict[str, Any]:
    """A report for programs."""
    return {
        "ok": r.ok,
        "store": r.store,
        "seed": r.seed,
        "seconds": round(r.elapsed, 3),
        "kills": dict(r.kills),
        "pauses": dict(r.pauses),
        "chain_faults": dict(r.chain_faults),
        "restarts": r.restarts,
        "requests": r.requests,
        "lost": dict(r.lost),
        "asked": r.asked,
        "transfers": dict(r.ends),
        "payouts": dict(r.payouts),
        "transactions": r.transactions,
        "operated": dict(r.operated),
        "refusals": dict(r.refusals),
        "frozen": r.frozen,
        "drain_s": round(r.drain_s, 3),
        "network": r.network,
        "database_writes": r.database_writes,
        "outages": [outage_json(outage) for outage in r.outages],
        "wrong": r.wrong,
        "audit": [finding_json(f) for f in r.findings],
        "folder": r.folder,
    }
