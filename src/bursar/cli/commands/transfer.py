"""`bursar transfer`: what is about transfers alone: making them, what their ends remember, and their intake.

What operators do to records of any flow (history, retry, force, pauses) is `bursar flow`; alerts are `bursar alert`.
"""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.operating import on_catalog, on_runtime, operators_group, show_lift
from bursar.cli.output import Output, plain, shown, table
from bursar.cli.types import operator_options
from bursar.flows.catalog import Catalog
from bursar.flows.transfers import Request
from bursar.flows.transfers.request import NEW_TRANSFERS
from bursar.flows.transfers.watch import resume_intake
from bursar.model.actors import check_actor
from bursar.runtime import Runtime, first_look

FLOW = "transfers"
transfer = operators_group(
    "transfer", "Transfers between funding and trading accounts: create, list, show, query; stop and allow; cores."
)


@transfer.command(examples="bursar transfer create --user 1001 --from FUNDING --to SPOT USDT 10.00 --order my-1")
@click.option("--user", type=click.IntRange(1), required=True, help="Whose money.")
@click.option("--from", "source", required=True, help="FUNDING, SPOT, FUTURE or MARGIN.")
@click.option("--to", "target", required=True, help="As --from.")
@click.option("--order", "client_order_id", default="", help="client_order_id: repeating it repeats nothing.")
@click.argument("asset")
@click.argument("amount")
@on_runtime
async def create(runtime: Runtime, out: Output, /, **asked: Any) -> None:
    """Move a user's money, with every check that the API makes."""
    await first_look(runtime)
    view = await runtime.transfers.create(Request(**asked), deadline_s=runtime.config.deadline_ms / 1000)
    text = f"{view.req_id} is {view.fsm_state} {shown(view.error)}".rstrip()
    out.show(view, lambda: text)


@transfer.command("list", examples="bursar transfer list --user 1001 --state TARGET_PENDING")
@click.option("--user", type=click.IntRange(1), help="One user's only.")
@click.option("--state", default="", help="In this exact state only, such as TARGET_PENDING.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def list_(catalog: Catalog, out: Output, user: int | None, state: str, limit: int) -> None:
    """Transfers, newest first."""
    views = await catalog.transfers.list(user, state=state, limit=limit)
    rows = [(v.req_id, v.user, v.source.value, v.target.value, v.amount, v.asset, v.fsm_state, v.error) for v in views]
    headings = ("transfer", "user", "from", "to", "amount", "asset", "state", "error")
    out.show(
        views, lambda: table(*headings, rows=rows, right=("amount",), whole=("transfer", "user"), empty="no transfers")
    )


@transfer.command(examples="bursar transfer show sr-1734912345678901234")
@click.argument("req_id")
@on_catalog
async def show(catalog: Catalog, out: Output, req_id: str) -> None:
    """One transfer as its owner sees it. `bursar flow show transfers ID` has its history, alerts and entries."""
    view = await catalog.transfers.get(None, req_id)
    facts = plain(view) | {"state": view.state}
    rows = [(name, value) for name, value in facts.items() if value not in ("", None)]
    out.show(facts, lambda: table("field", "value", rows=rows, whole=("field",)))


@transfer.command(examples="bursar transfer query sr-1734912345678901234")
@click.argument("req_id")
@on_runtime
async def query(runtime: Runtime, out: Output, req_id: str) -> None:
    """Ask both ends what they have on record of a transfer. Nothing is changed; what is missing may still happen."""
    transfers = runtime.transfers
    view = await transfers.get(None, req_id)
    item, found = transfers.flow.item(await transfers.engine.record(FLOW, view.req_id)), []
    for kind, op in ((view.source, "withdraw"), (view.target, "deposit"), (view.source, "refund")):
        said = await transfers.rails[kind].query(item, op)
        found.append({"end": kind.value, "op": op, "outcome": said.outcome.value, "code": said.code})
    rows = [tuple(one.values()) for one in found]
    out.show(found, lambda: table("end", "operation", "outcome", "code", rows=rows))


@transfer.command(examples='bursar transfer stop --actor anna --reason "ticket 17"')
@operator_options
@on_catalog
async def stop(catalog: Catalog, out: Output, actor: str, reason: str) -> None:
    """Start no new transfers, on any host. Those under way go on, and so do refunds."""
    was_on = await catalog.transfers.pause_intake(check_actor(actor), reason)
    words = "no new transfers are started" if was_on else "none were started before either"
    out.show({"stopped": was_on}, lambda: words)


@transfer.command(
    examples="""
    bursar transfer allow --actor anna --reason "ticket 17 is mended"
    bursar transfer allow --actor ben --reason "seen, and I5 holds"
    """
)
@operator_options
def allow(actor: str, reason: str) -> None:
    """Start new transfers again, after `stop` or after the audit found something broken and it was mended.

    After broken conservation, or after a restore, two people are needed (the first one proposes, another one agrees),
    and every core must hold what the ledger says.
    """
    what, run = ("starting new transfers", "is allowed"), "bursar transfer allow --actor OTHER --reason WHY"
    needs_two: list[bool] = []

    @on_catalog
    async def alone(catalog: Catalog, out: Output) -> None:
        pauses = await catalog.ledger.store.read.pauses.list()
        needs_two.append(any(pause.two_people for pause in pauses if (pause.kind, pause.name) == NEW_TRANSFERS))
        if not needs_two[0]:
            show_lift(out, await catalog.transfers.resume_intake(actor, reason), *what, key="allowed", run=run)

    @on_runtime
    async def compared(runtime: Runtime, out: Output) -> None:
        lift = await resume_intake(runtime.transfers, runtime.cores, actor=actor, reason=reason)
        show_lift(out, lift, *what, key="allowed", run=run)

    alone()
    if needs_two[0]:
        compared()
