"""`bursar demo`: what a newcomer sees first. It tells the story as it happens; bursar.demo makes it happen."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import click

from bursar.cli.commands.audit import draw_findings, finding_json
from bursar.cli.output import Output, table
from bursar.cli.show import EventNames, draw_envelope
from bursar.cli.state import Command, State, open_database
from bursar.demo import ASSETS, CALLERS, DAY_MINUTES, SHOPS, USERS, Day, Report
from bursar.model.money import Money

SECONDS = 12
SECONDS_MIN = 5
RICHEST = 8
LINE_EVERY = 180  # virtual minutes between two lines where there is no bar
GRAPH_WIDTH = 100


@click.command(
    cls=Command,
    examples="""
    bursar demo
    bursar demo --seconds 30 --database sqlite:///demo.db
    """,
)
@click.option(
    "--seconds", type=click.FloatRange(min=SECONDS_MIN), default=SECONDS, show_default=True, help="About how long."
)
@click.option(
    "--database", metavar="URL", help="An empty database to use and keep, instead of a temporary SQLite file."
)
@click.pass_obj
def demo(state: State, seconds: float, database: str | None) -> int:
    """A day of traffic, killed in the middle, and nothing is lost.

    Fifty users, five shops, many callers at once. At noon the process that serves them is killed (kill -9). The ledger
    is opened again, everything that had not been answered is sent again, the day goes on, and in the end every balance
    is compared with what was promised. Exit code 0 only if all of it is right.
    """
    out = Output(as_json=state.json)
    if database is None and state.database_given:
        database = state.database
    if database is not None:
        return _run(out, database, seconds, kept=True)
    with tempfile.TemporaryDirectory(prefix="bursar-demo-") as folder:
        return _run(out, f"sqlite:///{folder}/demo.db", seconds, kept=False)


def _run(out: Output, url: str, seconds: float, *, kept: bool) -> int:
    engine = "SQLite" if url.startswith("sqlite:") else "PostgreSQL"
    out.say(f"A day at a small payments company, in about {seconds:g} seconds, on {engine}.")
    out.say(f"{USERS} users, {SHOPS} shops, {' and '.join(ASSETS)}, {CALLERS} callers at once.\n")
    with _clock(out) as clock:
        report = Day(url, seconds, clock, partial(_tell, out)).run()
    if out.as_json:
        out.show(_json(report), str)
    else:
        asyncio.run(_tables(out, url, report))
        _verdict(out, report)
        if kept:
            out.say(f"\nLook around: bursar --database {shlex.quote(url)} account list")
        else:
            out.say("\nTo keep the ledger and look around: bursar demo --database sqlite:///demo.db")
    return 0 if report.ok else 1


@contextlib.contextmanager
def _clock(out: Output) -> Iterator[Callable[[int, int], None]]:
    """The day's clock: a bar in a terminal, a line every few hours elsewhere."""
    if out.as_json:
        yield lambda _minute, _done: None
    elif out.console.is_terminal:
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.fields[time]}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[done]:,} requests"),
        )
        with Progress(*columns, console=out.console, transient=True) as progress:
            task = progress.add_task("", total=DAY_MINUTES, time="00:00", done=0)
            yield lambda minute, done: progress.update(task, completed=minute, time=_hour(minute), done=done)
    else:
        told = -1

        def line(minute: int, done: int) -> None:
            nonlocal told
            if minute // LINE_EVERY > told:
                told = minute // LINE_EVERY
                out.line({}, f"{_hour(told * LINE_EVERY)}  {done:,} requests answered")

        yield line


def _tell(out: Output, what: str, r: Report) -> None:
    """The story, as it happens."""
    if what == "killed":
        out.say(
            f"{_hour(r.killed_minute)}  kill -9 of process {r.killed_pid}, with {r.unanswered} requests on their way."
        )
    elif what == "sent again":
        left = sum(r.recovered.values())
        found = f"{left} half-done commits were ended" if left else "nothing was half done"
        out.say(f"       Opened again in {r.reopened_s * 1000:.0f} ms; recover: {found}.")
        out.say(f"       Those {r.unanswered} were sent again, under the same keys:")
        out.say(f"         {r.were_there:>3} had happened; only the answer was lost, and nothing happened twice")
        out.say(f"         {r.were_new:>3} had not happened, and happened now")
        out.say(f"         {r.were_refused:>3} had not happened, and were refused")
    else:
        short = "" if r.ended_minute == DAY_MINUTES else " early, because the time was up"
        out.say(f"{_hour(r.ended_minute)}  The day is over{short}: {r.committed:,} entries committed.")
        out.say("       Refused, as they should be:")
        for code, count in r.refusals.items():
            out.say(f"         {count:>3} {code}")
        out.say("")


async def _tables(out: Output, url: str, r: Report) -> None:
    async with open_database(url) as b:
        names = EventNames(b)
        events = [(e.cursor, e.kind, await names.subject(e)) for e in r.events]
    people = [p for p in r.balances if p.startswith(("user:", "shop:")) and p != "shop:credit"]
    people.sort(key=lambda p: r.balances[p].get("EUR", Money("EUR", 2, 0)).minor, reverse=True)
    rest = [p for p in r.balances if p not in people]
    rows = [(p, *[r.balances[p].get(code, "") for code in ASSETS]) for p in people[:RICHEST]]
    rows.append(("…", *["" for _ in ASSETS]))
    rows += [(p, *[r.balances[p].get(code, "") for code in ASSETS]) for p in sorted(rest)]
    out.console.print(table("account", *ASSETS, rows=rows, title="Balances", right=tuple(ASSETS)), "")
    out.console.print(table("cursor", "event", "what", rows=events, title="Last events"), "")
    if r.example is not None:
        width = min(out.console.width, GRAPH_WIDTH)
        lost = " whose answer was lost in the crash" if r.example_lost else ""
        out.console.print(f"One entry{lost}, as the ledger has it", style="bold")
        out.say(draw_envelope(r.example, width) + "\n")
    out.console.print("Audit", style="bold")
    out.console.print(draw_findings(r.findings), "")


def _verdict(out: Output, r: Report) -> None:
    if r.ok:
        out.console.print(
            f"All is well: {r.committed:,} entries promised, {r.envelopes:,} in the ledger, every balance exactly as"
            f" promised, all invariants hold. ({r.seconds:.1f} s)",
            style="bold green",
        )
        return
    for text in r.wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    out.console.print(f"NOT well: see above. ({r.seconds:.1f} s)", style="bold red")


def _hour(minute: int) -> str:
    return f"{minute // 60:02d}:{minute % 60:02d}"


def _json(r: Report) -> dict[str, Any]:
    return {
        "ok": r.ok,
        "unanswered": r.unanswered,
        "had_happened": r.were_there,
        "happened_now": r.were_new,
        "refused_now": r.were_refused,
        "committed": r.committed,
        "envelopes": r.envelopes,
        "refusals": r.refusals,
        "wrong": r.wrong,
        "audit": [finding_json(f) for f in r.findings],
        "seconds": round(r.seconds, 3),
    }
