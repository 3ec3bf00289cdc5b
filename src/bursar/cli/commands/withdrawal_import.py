"""`bursar withdrawal import`: take over the withdrawals that are under way in another system."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from bursar.cli.commands.withdrawal import withdrawal
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import PayoutDesk, on_desk
from bursar.cli.types import actor_option

if TYPE_CHECKING:
    from bursar.cli.output import Drawing
    from bursar.flows.withdrawals.importing import Report

REFUSED = 1


@withdrawal.command(
    "import",
    examples="""
    bursar withdrawal import running.csv --dry-run --actor anna
    bursar withdrawal import running.csv --actor anna
    """,
)
@click.argument("file", metavar="FILE|-", type=click.Path(dir_okay=False, allow_dash=True))
@click.option("--dry-run", is_flag=True, help="Check everything and say what would be written; write nothing.")
@actor_option
@on_desk
async def import_(desk: PayoutDesk, out: Output, /, file: str, dry_run: bool, actor: str) -> int:
    """Take over the running withdrawals of a CSV file: all of them or, if there is any problem, none.

    What was sent there is watched until it is final. What may have been sent, and no node knows, waits for two people.
    The same file can be imported again: what is there is left alone.

    Exit code 0: all rows are there. 1: there are problems, each is named with its line, and nothing was written.
    """
    from bursar.flows.withdrawals.importing import import_running

    desk.require()
    report = await import_running(desk.withdrawals, _read(file), actor=actor, dry_run=dry_run)
    out.show(report, lambda: _drawn(report, dry_run))
    return REFUSED if report.problems else 0


def _read(file: str) -> str:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise click.UsageError(f"{file} is no text in UTF-8") from None


def _drawn(report: Report, dry_run: bool) -> Drawing:
    if report.problems:
        rows = [(problem.line, problem.why) for problem in report.problems]
        return table("line", "problem: nothing was written", rows=rows, right=("line",))
    headings = ("line", "request", "becomes", "wallet", "transaction", "")
    missing = "would be written" if dry_run else "written"
    lines = [
        (line.line, line.id, line.becomes, line.wallet, line.tx_hash, "there already" if line.there else missing)
        for line in report.lines
    ]
    return table(*headings, rows=lines, right=("line",), whole=("request", "transaction"))
