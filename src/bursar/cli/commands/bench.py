"""`bursar bench`: the benchmarks' own command, with examples, and a look at --out before the minutes that it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from bursar.bench.command import command as measuring
from bursar.cli.place import EVERYBODY, make_folder

EXAMPLES = """\b
Examples:
  bursar bench ledger --quick --store sqlite
  bursar bench transfers --json > transfers.json
  bursar bench trading --out results
"""


@click.pass_context
def _measure(ctx: click.Context, /, out: Path | None, **more: Any) -> None:
    if out is not None:
        make_folder(out, "--out", EVERYBODY)
    ctx.invoke(measuring, out=out, **more)


command = click.Command("bench", callback=_measure, params=measuring.params, help=measuring.help, epilog=EXAMPLES)
