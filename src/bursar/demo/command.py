"""`bursar demo`: what a newcomer sees first. It tells the story as it happens; story makes it happen."""

from __future__ import annotations

import contextlib
import shlex
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.audit import draw_findings, finding_json
from bursar.cli.output import Output, table
from bursar.cli.place import make_folder
from bursar.cli.state import Command, State

if TYPE_CHECKING:
    from bursar.demo.story import Blow, Report, Watch
    from bursar.testbed import Guard, Program

SECONDS = 20.0
SECONDS_MIN = 5
LOOK_S = 0.2
HALTS = {
    "INIT": "written down, no call made yet",
    "SOURCE_PENDING": "the source is asked for it",
    "SOURCE_DONE": "taken from the source",
    "TARGET_PENDING": "taken, and offered to the target",
    "COMPENSATING": "refused by the target, on its way back",
}

ENDS = {
    "COMMITTED": "moved",
    "FAILED": "refused by the source, nothing moved",
    "ROLLED_BACK": "refused by the target, given back",
}


@click.command(
    cls=Command,
    examples="""
    bursar demo
    bursar demo --seconds 60
    bursar demo --folder my-demo --listen 127.0.0.1:9000
    """,
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=SECONDS_MIN),
    help=f"End by itself after about so long. Without: a story of {SECONDS:g} s; in a terminal it then stays up.",
)
@click.option("--folder", metavar="DIR", type=click.Path(), help="A new folder to use and keep, not a temporary one.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Where the API listens. Without: 127.0.0.1:8080, or if that is taken, any port.",
)
@click.pass_obj
def demo(state: State, seconds: float | None, folder: str | None, listen: str | None) -> int:
    """All of it on this machine, killed while money is in flight, and nothing is lost.

    Starts `bursar serve` (API, worker, SQLite) with its trading core. Users move money between the two in both
    directions over HTTP. The core gets kill -9, then the server, while money has left one side and not arrived at the
    other. Both come back; every transfer comes to its end, once; every balance is compared with what was promised; and
    the audit is run. Exit code 0 only if all of it is right. It prints curl lines that work while it is up.
    """
    from bursar.testbed import Guard

    out = Output(as_json=state.json)
    if folder is not None and Path(folder).exists() and (not Path(folder).is_dir() or any(Path(folder).iterdir())):
        raise click.BadParameter(f"{folder} is there already, and not an empty folder", param_hint="--folder")
    stays = seconds is None and not out.as_json and sys.stdin.isatty() and sys.stdout.isatty()
    where = Path(folder).absolute() if folder is not None else Path(tempfile.mkdtemp(prefix="bursar-demo-"))
    make_folder(where, "--folder")
    guard = Guard("" if folder is not None else str(where))
    try:
        with ended_by_signals():
            return _run(out, where, listen, seconds or SECONDS, guard, stays=stays, kept=folder)
    finally:
        guard.close()


def _run(
    out: Output, where: Path, listen: str | None, seconds: float, guard: Guard, *, stays: bool, kept: str | None
) -> int:
    from bursar.demo.story import Story

    out.say("Bursar, all of it, on this machine: `bursar serve` (API, worker, SQLite)")
    out.say("and its trading core.")
    story = Story(where, listen, seconds, partial(_tell, out, stays))
    with story.running(guard) as server:
        with _watched(out) as watch:
            report = story.play(watch)
        if out.as_json:
            out.show(_json(report), str)
        else:
            _tables(out, report)
            _verdict(out, report)
        if stays and report.ok:
            return _stay(out, report, server)
        server.stop()
    if kept is not None:
        out.say(f"\nTo go on with it: bursar serve --data {shlex.quote(kept)}")
    return 0 if report.ok else 1


@contextlib.contextmanager
def own_folder(prefix: str) -> Iterator[tuple[Path, Guard]]:
    """A folder that is gone in the end, with all that runs in it. A Ctrl-C while it is made waits until it is made: or
    nothing would know of it."""
    from bursar.testbed import Guard

    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        folder = tempfile.mkdtemp(prefix=prefix)
        guard = Guard(folder)
    except BaseException:  # an interrupt, too: the signals that wait are delivered, and it is passed on
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        yield Path(folder), guard
    finally:
        guard.close()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end it as Ctrl-C does: in good order, leaving nothing behind."""

    def end(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _watched(out: Output) -> Iterator[Watch]:
    """A bar in a terminal; elsewhere the story itself is enough."""
    if out.as_json or not out.console.is_terminal:
        yield lambda _part, _report: None
        return
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    words = "{task.fields[done]:,} transfers at their end; {task.description}"
    column = Column(no_wrap=True, overflow="ellipsis")
    columns = (BarColumn(bar_width=16), TextColumn(words, table_column=column))
    with Progress(*columns, console=out.console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0, done=0)

        def watch(part: float, report: Report) -> None:
            progress.update(task, completed=part, done=report.done, description=report.phase)

        yield watch


def _stay(out: Output, report: Report, server: Program) -> int:
    """Until Ctrl-C, or until the server ends for a reason of its own."""
    out.say("\nIt stays up until Ctrl-C. You are user 1000, with 100 USDT. In another terminal:\n")
    _curl(out, report)
    try:
        while server.pid:
            time.sleep(LOOK_S)  # between two looks at a real process
    except KeyboardInterrupt:
        out.say("\nEnding it.")
        return 0 if server.stop() == 0 else 1
    out.say(f"\nThe server has ended: {server.tail()}")
    return 1


def _tell(out: Output, stays: bool, what: str, r: Report) -> None:
    """The story, as it happens."""
    if what == "ready":
        out.say(f"It is ready at {r.listen}. Eight users with 1,000 USDT each")
        out.say("move it to and fro, twelve at a time, between FUNDING (the ledger) and SPOT")
        out.say("(the core): two systems that share no transaction.\n")
        if not stays and not out.as_json:
            out.say("As long as this runs, user 1000 is yours, with 100 USDT:\n")
            _curl(out, r)
            out.say("")
    elif what == "killed":
        _tell_blow(out, r, r.blows[-1])
    elif what == "back":
        _tell_back(out, r.blows[-1])
    elif what == "over":
        count = sum(r.ends.values())
        out.say(f"{r.seconds:4.1f} s  The end: {r.asked:,} requests, {count:,} transfers, all at their end.\n")


def _tell_blow(out: Output, r: Report, blow: Blow) -> None:
    out.say(f"{blow.at_s:4.1f} s  {r.done:,} transfers are at their end.")
    with_it = " (its core goes with it)" if blow.victim == "server" else ""
    out.say(f"        kill -9 of the {blow.victim}, process {blow.pid}{with_it}.")
    out.say(f"        {len(blow.open)} transfers are on their way:")
    count, sums = Counter[str](), Counter[str]()
    for state, minor in blow.open.values():
        count[state] += 1
        sums[state] += minor
    for state in (state for state in HALTS if state in count):
        out.say(f"          {count[state]:>2} {state:<14} {_units(sums[state]):>9} USDT  {HALTS[state]}")


def _tell_back(out: Output, blow: Blow) -> None:
    ends = ", ".join(f"{n} {state}" for state, n in blow.ends.most_common()) or "none"
    who = "The server starts it again" if blow.victim == "core" else "It is started again"
    out.say(f"        {who}, and it works after {blow.back_s:.1f} s.")
    out.say(f"        Those {len(blow.open)} are at their end: {ends}.")
    out.say(f"        {blow.unanswered} requests had no answer, and were sent again under the same id.\n")


def _tables(out: Output, r: Report) -> None:
    accounts = ("FUNDING", "SPOT")
    right = (*accounts, "together")
    rows = [
        (f"user {user}", *[_units(has.get(a, 0)) for a in accounts], _units(sum(has.values())))
        for user, has in sorted(r.balances.items())
    ]
    out.console.print(table("USDT", *right, rows=rows, title="Balances", right=right), "")
    ends = [(state, f"{r.ends[state]:,}", text) for state, text in ENDS.items() if r.ends[state]]
    ends += [(code, f"{n:,}", "refused, nothing written") for code, n in r.refusals.items()]
    out.console.print(table("transfers", "count", "", rows=ends, right=("count",)), "")
    out.console.print("Audit", style="bold")
    out.console.print(draw_findings(r.findings), "")


def _verdict(out: Output, r: Report) -> None:
    if r.ok:
        out.console.print(
            f"All is well: {sum(r.ends.values()):,} transfers, each once and at its end, every balance exactly as"
            f" promised, all invariants hold. ({r.seconds:.1f} s)",
            style="bold green",
        )
        return
    for text in r.wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    out.console.print(f"NOT well: see above. ({r.seconds:.1f} s)", style="bold red")


def _curl(out: Output, r: Report) -> None:
    """Lines that can be copied: never broken where the screen ends."""
    from bursar.demo.story import curl_lines

    for line in curl_lines(r.listen, r.token):
        out.console.print(line, soft_wrap=True, markup=False, highlight=False)


def _units(minor: int) -> str:
    from bursar.demo.story import UNIT

    return f"{minor // UNIT:,}.{minor % UNIT * 100 // UNIT:02d}"


def _json(r: Report) -> dict[str, Any]:
    return {
        "ok": r.ok,
        "kills": [
            {
                "victim": blow.victim,
                "pid": blow.pid,
                "at": round(blow.at_s, 3),
                "on_their_way": dict(Counter(state for state, _ in blow.open.values())),
                "in_flight": _units(blow.in_flight).replace(",", ""),  # for programs: a plain number
                "back": round(blow.back_s, 3),
                "ended": round(blow.ended_s, 3),
                "ends": dict(blow.ends),
                "sent_again": blow.unanswered,
            }
            for blow in r.blows
        ],
        "asked": r.asked,
        "transfers": dict(r.ends),
        "refusals": dict(r.refusals),
        "wrong": r.wrong,
        "audit": [finding_json(f) for f in r.findings],
        "seconds": round(r.seconds, 3),
    }
