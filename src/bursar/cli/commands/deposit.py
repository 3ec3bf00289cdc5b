"""`bursar deposit`: users' addresses for deposits from chains, what has arrived, and what people decide about it.

The rules, scans and sweeps are in `deposit_rules`; both are one group. What an operator books by hand, under a
reference from outside, is `POST /api/v1/deposits`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bursar.cli.operating import on_catalog, operators_group
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import PayoutDesk, on_desk
from bursar.cli.types import operator_options
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog
    from bursar.flows.deposits.from_chains import AddressView

deposit = operators_group(
    "deposit",
    "Deposits from chains: address, list, show, confirm, reject; their rules, scans and sweeps.",
)
id_argument = click.argument("id_", metavar="ID")


@deposit.command(examples="bursar deposit address bsc --user 1001")
@click.argument("chain")
@click.option("--user", type=click.IntRange(1), required=True, help="Whose.")
@click.option("--actor", metavar="NAME", default="", help="Who you are; it is written down.")
@on_desk
async def address(desk: PayoutDesk, out: Output, chain: str, user: int, actor: str) -> None:
    """A user's own address on a chain: made at the first request, and the same at every later one."""
    from bursar.model.actors import check_actor

    desk.require()
    view = await desk.deposits.issue(user, chain, actor=check_actor(actor) if actor else "")
    out.show(view, lambda: table("field", "value", rows=_rows_of(view), whole=("field", "value")))


@deposit.command(examples="bursar deposit addresses --user 1001")
@click.option("--user", type=click.IntRange(1), required=True, help="Whose.")
@on_catalog
async def addresses(catalog: Catalog, out: Output, user: int) -> None:
    """A user's addresses for deposits, newest first."""
    views = await catalog.arrivals.addresses(user)
    rows = [(one.chain, one.address, one.wallet, moment(one.created_us)) for one in views]
    headings = ("chain", "address", "wallet", "since (UTC)")
    out.show(views, lambda: table(*headings, rows=rows, whole=headings, empty="no addresses"))


@deposit.command(
    "list",
    examples="""
    bursar deposit list
    bursar deposit list --state held
    bursar deposit list --user 1001 --chain bsc
    """,
)
@click.option("--state", default="", help="pending, credited, under_review, ignored, rejected; or an exact state.")
@click.option("--user", type=click.IntRange(1), help="One user's only.")
@click.option("--chain", default="", help="From this chain only.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def list_(catalog: Catalog, out: Output, state: str, user: int | None, chain: str, limit: int) -> None:
    """What has arrived, newest first. `ignored` is what payouts of ours have brought: the gas of sweeps."""
    from bursar.flows.deposits.arrivals import STATUS
    from bursar.flows.deposits.words import states_of

    states = states_of(state, is_staff=True)
    if states is None:
        known = ", ".join(sorted({*STATUS, *STATUS.values()}))
        raise click.UsageError(f"--state: one of {known}", click.get_current_context())
    views, _ = await catalog.arrivals.page(user=user or 0, states=states, chain=chain, limit=limit)
    rows = [
        (
            moment(one.created_us),
            one.state,
            one.user,
            one.amount or f"{one.raw} smallest units",
            one.asset or one.contract,
            one.id,
            one.why,
        )
        for one in views
    ]
    headings = ("seen (UTC)", "state", "user", "amount", "asset", "deposit", "why")
    right, whole = ("user", "amount"), ("seen (UTC)", "state", "deposit")
    out.show(views, lambda: table(*headings, rows=rows, right=right, whole=whole, empty="no deposits"))


@deposit.command(examples="bursar deposit show bsc:0x5c50…:0")
@id_argument
@on_catalog
async def show(catalog: Catalog, out: Output, id_: str) -> None:
    """One deposit, with what its user is told. `bursar flow show arrivals ID` has its history and entries."""
    view = await catalog.arrivals.view(id_)
    rows = [
        ("deposit", view.id),
        ("status", view.status if view.status == view.state else f"{view.status} ({view.state})"),
        ("user", view.user),
        ("amount", f"{view.amount} {view.asset}".strip()),
        ("smallest units", view.raw),
        ("contract", view.contract),
        ("from", view.sender),
        ("to", f"{view.to} ({view.wallet})"),
        ("block", view.block),
        ("why", view.why),
        ("its user reads", view.words),
        ("confirmed by", ", ".join(view.confirmed_by)),
        ("booked in", view.account),
        ("seen (UTC)", moment(view.created_us)),
        ("updated (UTC)", moment(view.updated_us)),
    ]
    out.show(view, lambda: table("field", "value", rows=[row for row in rows if row[1] != ""], whole=("field",)))


@deposit.command(examples='bursar deposit confirm bsc:0x5c50…:0 --actor anna --reason "in two explorers, ticket 17"')
@id_argument
@operator_options
@on_catalog
async def confirm(catalog: Catalog, out: Output, id_: str, actor: str, reason: str) -> None:
    """Say that one that is held is there. It is judged anew by the worker that runs: some need two people."""
    view = await catalog.arrivals.confirm(id_, actor=actor, reason=reason)
    words = f"{id_} is confirmed by {', '.join(view.confirmed_by)} and judged anew by the worker that runs"
    out.show(view, lambda: f"{words}; `bursar deposit show` says whether another person has to say the same")


@deposit.command(examples='bursar deposit reject bsc:0x5c50…:0 --actor anna --reason "not there, ticket 17"')
@id_argument
@operator_options
@on_catalog
async def reject(catalog: Catalog, out: Output, id_: str, actor: str, reason: str) -> None:
    """Never credit one that is held. Its user reads that it was not credited, and not why."""
    view = await catalog.arrivals.reject(id_, actor=actor, reason=reason)
    out.show(view, lambda: f"{id_} is rejected")


def _rows_of(view: AddressView) -> list[tuple[str, object]]:
    from bursar.flows.deposits.words import NOT_SEEN

    return [
        ("address", view.address),
        ("chain", view.chain),
        ("wallet", view.wallet),
        ("since (UTC)", moment(view.created_us)),
        *(("accepted", f"{code}, from {minimum} on") for code, minimum in view.assets.items()),
        ("counts", view.final_after),
        ("not seen", NOT_SEEN),
    ]
