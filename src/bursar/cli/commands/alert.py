"""`bursar alert`: what operators should look at, of any flow or of the system as a whole."""

from __future__ import annotations

import click

from bursar.cli.operating import TIME, on_catalog, operators_group
from bursar.cli.output import Output, table
from bursar.cli.types import actor_option
from bursar.engine import Operators
from bursar.flows.catalog import Catalog
from bursar.model.views import moment

alert = operators_group("alert", "Alerts of all flows: list those that are open, acknowledge one.")
LIMIT = 1_000


@alert.command("list", examples="bursar alert list --flow transfers")
@click.option("--flow", default="", help="Of records of this flow only.")
@click.option("--limit", type=click.IntRange(1, LIMIT), default=LIMIT, show_default=True, help="How many at most.")
@on_catalog
async def list_(catalog: Catalog, out: Output, flow: str, limit: int) -> None:
    """Alerts that no operator has acknowledged, oldest first."""
    if flow:
        catalog.engine.require(flow)
    read = catalog.ledger.store.read
    found = await read.alerts.open(limit=limit)
    records = {r.number: r for r in await read.records.by_numbers(sorted({a.record for a in found if a.record}))}
    views = [
        {
            "record": one.record,
            "flow": records[one.record].flow if one.record in records else "",
            "id": records[one.record].id if one.record in records else "",
            "severity": one.severity,
            "reason": one.reason,
            "message": one.message,
            "raised": moment(one.raised_us),
        }
        for one in found
    ]
    views = [view for view in views if not flow or view["flow"] == flow]
    names = ("raised", "record", "flow", "id", "severity", "reason", "message")
    rows = [tuple(view[name] or "" for name in names) for view in views]
    right, whole = ("record",), (TIME, "id")
    out.show(views, lambda: table(TIME, *names[1:], rows=rows, right=right, whole=whole, empty="no open alerts"))


@alert.command(examples='bursar alert acknowledge 17 "target pending" --actor anna')
@click.argument("record", type=int)
@click.argument("reason")
@actor_option
@on_catalog
async def acknowledge(catalog: Catalog, out: Output, record: int, reason: str, actor: str) -> None:
    """Say that an alert has been seen, by the record's number (0: the system as a whole) and the alert's reason, as
    `bursar alert list` has them."""
    was_open = await Operators(catalog.engine).acknowledge(record, reason, actor=actor)
    words = "acknowledged" if was_open else "there is no such alert that is open; see `bursar alert list`"
    out.show({"acknowledged": was_open}, lambda: words)
