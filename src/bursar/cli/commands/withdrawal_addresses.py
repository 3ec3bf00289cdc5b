"""`bursar withdrawal address`: the address book of a user, where the user's withdrawals may go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bursar.cli.commands.withdrawal import user_option, withdrawal
from bursar.cli.operating import on_catalog
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import PayoutDesk, on_desk
from bursar.cli.state import Group
from bursar.cli.types import actor_option
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog


@withdrawal.group("address", cls=Group)
def address() -> None:
    """Show and change the address book of a user: add, remove, list."""


@address.command(examples='bursar withdrawal address add bsc 0x… --user 1001 --label "my wallet" --actor anna')
@click.argument("chain")
@click.argument("text", metavar="ADDRESS")
@user_option
@click.option("--label", default="", help="What its user calls it.")
@actor_option
@on_desk
async def add(desk: PayoutDesk, out: Output, chain: str, text: str, user: int, label: str, actor: str) -> None:
    """Put an address into a user's book. Its cooling period begins now; the same again changes nothing."""
    from bursar.model.actors import check_actor

    desk.require()
    view = await desk.withdrawals.addresses.add(str(user), chain, text, label, actor=check_actor(actor))
    out.show(view, lambda: f"{view.address} on {view.chain} is in the book of user {user} ({view.id})")


@address.command(examples="bursar withdrawal address remove ab-1734912345678901234 --user 1001 --actor anna")
@click.argument("id_", metavar="ID")
@user_option
@actor_option
@on_catalog
async def remove(catalog: Catalog, out: Output, id_: str, user: int, actor: str) -> None:
    """Take an address out of a user's book. Added again, it is new."""
    from bursar.model.actors import check_actor

    view = await catalog.withdrawals.addresses.remove(str(user), id_, actor=check_actor(actor))
    out.show(view, lambda: f"{view.address} on {view.chain} is not in the book of user {user} any more")


@address.command("list", examples="bursar withdrawal address list --user 1001")
@user_option
@click.option("--chain", default="", help="On this chain only.")
@on_catalog
async def list_(catalog: Catalog, out: Output, user: int, chain: str) -> None:
    """A user's address book, newest first."""
    views = await catalog.withdrawals.addresses.list(str(user), chain)
    rows = [(view.id, view.chain, view.address, view.label, moment(view.added_us)) for view in views]
    headings = ("entry", "chain", "address", "label", "added (UTC)")
    out.show(
        views, lambda: table(*headings, rows=rows, whole=("entry", "address", "added (UTC)"), empty="no addresses")
    )
