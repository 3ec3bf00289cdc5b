"""`bursar bench NAME`: runs a benchmark and shows, prints or keeps its rows."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from bursar import garbage
from bursar.bench import deposits, ledger, payouts, report, trading, transfers, withdrawals
from bursar.bench.measure import FULL, QUICK, Row
from bursar.cli.place import ALL_USERS, make_folder
from bursar.testbed.anvil import AnvilFailedError, AnvilNotFoundError
from bursar.testbed.devdb import PostgresFailedError, PostgresNotFoundError

STORES = ("sqlite", "postgres")
PIPE_WIDTH = 200  # columns of a pipe or a file: nothing is cut
EXAMPLES = """\b
Examples:
  bursar bench ledger --quick --store sqlite
  bursar bench transfers --json > transfers.json
  bursar bench trading --out results
"""


@contextlib.contextmanager
def _progress(total: int) -> Iterator[ledger.Say]:
    """A progress bar on standard error, apart from the output; none if that is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("starting", total=total)

        def say(what: str) -> None:
            progress.update(task, advance=1, description=what)

        yield say


@click.command("bench", epilog=EXAMPLES)
@click.argument("name", type=click.Choice(["deposits", "ledger", "payouts", "trading", "transfers", "withdrawals"]))
@click.option("--quick", is_flag=True, help="Short windows and no database of 10^6 postings: under 45 seconds.")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON and nothing else.")
@click.option(
    "--store",
    type=click.Choice([*STORES, "all"]),
    default="all",
    show_default=True,
    help="Of all but trading: which store.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Also write NAME.md, NAME.json and, for the ledger, NAME.svg into this folder.",
)
def command(name: str, quick: bool, as_json: bool, store: str, out: Path | None) -> None:
    """Measure this project beside the least that the machine must do.

    Both are measured in the same run, in turn, on throw-away databases that are durable while they last. Read the
    ratios, not the rates: those are this machine's.

    The baseline of uniform and hot cases writes the same rows by bare SQL, in batches of the same size, without checks.
    plain: beside a table of balances, one transaction per payment. growth: beside the same at 10^4 postings.
    memory: resident bytes half-way, over those at the end.

    The trading core's baseline decodes the same frames, makes one look-up and one store per operation, appends, syncs
    and answers. restart: beside what is allowed for 10^6 remembered operations. snapshot: beside the same without any.

    Transfers are measured beside plain (by hand, one statement per transaction) and dbos (the same as a DBOS workflow),
    in process and over HTTP. half-rate: beside the p99 allowed. overload-http: settled beside accepted. recovery: of
    transfers left in flight by a crash, beside what is allowed.

    Payouts are token payments on anvil, from request to confirmed, beside a bare sender that signs, sends and waits for
    the same finality. polling: polls per second of CPU while so many wait, beside the same with 100.

    Deposits come from final blocks of a simulated chain. deposits-N: beside the same with the fewest there. floor:
    beside the same rows by bare statements. idle: polls that find nothing, beside the same with the fewest addresses.

    Withdrawals: what a worker's look for work costs while so many wait for approval, beside the same with 100.
    """
    if out is not None:
        make_folder(out, "--out", ALL_USERS)  # before the minutes that it takes
    garbage.relax_gc()  # as in `bursar serve`
    if name == "trading":
        with _progress(trading.steps()) as say:
            rows = asyncio.run(trading.run(trading.QUICK if quick else trading.FULL, say))
    else:
        rows = _on_stores(name, STORES if store == "all" else (store,), quick)
    if as_json:
        click.echo(report.as_json(rows))
    else:
        Console(width=None if sys.stdout.isatty() else PIPE_WIDTH).print(report.as_table(rows, name))
    if out is not None:
        for path in report.keep(rows, out, name):
            click.echo(f"wrote {path}", err=True)


def _on_stores(name: str, stores: tuple[str, ...], quick: bool) -> list[Row]:
    try:
        if name == "payouts":
            pay = payouts.QUICK if quick else payouts.FULL
            with _progress(payouts.steps(stores, pay)) as say:
                return asyncio.run(payouts.run(stores, pay, say))
        if name == "deposits":
            arrive = deposits.QUICK if quick else deposits.FULL
            with _progress(deposits.steps(stores, arrive)) as say:
                return asyncio.run(deposits.run(stores, arrive, say))
        if name == "withdrawals":
            waits = withdrawals.QUICK if quick else withdrawals.FULL
            with _progress(withdrawals.steps(stores, waits)) as say:
                return asyncio.run(withdrawals.run(stores, waits, say))
        if name == "transfers":
            haste = transfers.QUICK if quick else transfers.FULL
            with _progress(transfers.steps(stores, haste)) as say:
                return asyncio.run(transfers.run(stores, haste, say))
        pace = QUICK if quick else FULL
        with _progress(ledger.steps(stores, pace)) as say:
            return asyncio.run(ledger.run(stores, pace, say))
    except ModuleNotFoundError as error:
        raise click.ClickException(f"{error.name} is missing: run `make setup`") from error
    except (PostgresNotFoundError, PostgresFailedError) as error:
        raise click.ClickException(f"{error} Or leave PostgreSQL out: --store sqlite") from error
    except (AnvilNotFoundError, AnvilFailedError) as error:
        raise click.ClickException(str(error)) from error
