"""What people decide about withdrawals: waiting, payment, approve, reject, and the switches, of `bursar withdrawal`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.approving import approval_options, signed_approval
from bursar.cli.commands.withdrawal import id_argument, show_list, show_result, withdrawal
from bursar.cli.operating import on_catalog, show_lift
from bursar.cli.output import Output, table
from bursar.cli.types import operator_options, together

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog
    from bursar.flows.withdrawals.switches import Switch

WAITING_MAX = 1_000
switch_options = together(
    click.option("--user", type=click.IntRange(1), help="Withdrawals of this user."),
    click.option("--asset", default="", help="Withdrawals of this asset, on any chain."),
    click.option("--chain", default="", help="Withdrawals on this chain."),
    click.option("--all", "everything", is_flag=True, help="All withdrawals."),
    operator_options,
)


@withdrawal.command(examples="bursar withdrawal waiting")
@on_catalog
async def waiting(catalog: Catalog, out: Output) -> None:
    """What waits for people, newest first. What only time or a switch holds up is left out."""
    from bursar.flows.withdrawals.listing import waiting_for_people

    show_list(out, await waiting_for_people(catalog.withdrawals, WAITING_MAX), "nothing waits for people")


@withdrawal.command(
    examples="""
    bursar withdrawal payment wd-1734912345678901234
    bursar --json withdrawal payment wd-1734912345678901234 > payment.json
    """
)
@id_argument
@on_catalog
async def payment(catalog: Catalog, out: Output, id_: str) -> None:
    """Exactly what an approver signs, in words. As JSON it is what `bursar signer approve` takes on another machine."""
    from bursar.flows.payouts.words import covered

    found = await catalog.withdrawals.payment(id_)
    rows = [*covered(found, await catalog.ledger.asset(found.asset)), ("digest", found.digest())]
    facts = {name: getattr(found, name) for name in found.__struct_fields__}
    out.show(facts, lambda: table("the signature covers", "value", rows=rows, whole=("the signature covers",)))


@withdrawal.command(
    examples="""
    bursar withdrawal approve wd-1734912345678901234 --key ~/bursar/ann.key
    bursar withdrawal approve wd-1734912345678901234 --key ann.key --passphrase-file ann.pass --digest 5f2c… --yes
    """
)
@id_argument
@approval_options
@on_catalog
async def approve(catalog: Catalog, out: Output, /, id_: str, **how: Any) -> None:
    """Show exactly what is paid to whom, ask, sign it with your own key, and hand the signature to the withdrawal.

    It is checked here, when the withdrawal is decided, and by the signer. What you have requested you can't approve.
    """
    made = await signed_approval(catalog.ledger, await catalog.withdrawals.payment(id_), **how)
    show_result(out, await catalog.withdrawals.approve(id_, made), f"approved by {made.approver}")


@withdrawal.command(examples='bursar withdrawal reject wd-1734912345678901234 --actor anna --reason "ticket 17"')
@id_argument
@operator_options
@on_catalog
async def reject(catalog: Catalog, out: Output, id_: str, actor: str, reason: str) -> None:
    """Refuse one that is not ordered yet; the money goes back. Its user reads that it was rejected, and not why."""
    view = await catalog.withdrawals.reject(id_, actor=actor, reason=reason)
    show_result(out, view, "" if view.status == "rejected" else "it is rejected by the worker that runs")


@withdrawal.command(
    examples="""
    bursar withdrawal pause --user 1001 --actor anna --reason "the account was stolen"
    bursar withdrawal pause --all --actor anna --reason "ticket 17"
    """
)
@switch_options
@on_catalog
async def pause(catalog: Catalog, out: Output, /, actor: str, reason: str, **which: Any) -> None:
    """Switch withdrawals off, on any host: of a user, an asset, a chain, or all.

    What is requested meanwhile is written down and waits, and can be cancelled. What was signed is confirmed.
    """
    switch = await _switch(catalog, **which)
    was_on = await catalog.withdrawals.pause(switch, actor=actor, reason=reason)
    words = f"{switch[1]}: paused" if was_on else f"{switch[1]}: paused before"
    out.show({"switch": switch[1], "paused": was_on}, lambda: words)


@withdrawal.command(examples='bursar withdrawal resume --user 1001 --actor anna --reason "the owner is back"')
@switch_options
@on_catalog
async def resume(catalog: Catalog, out: Output, /, actor: str, reason: str, **which: Any) -> None:
    """Switch them on again. What has waited goes on within a minute."""
    switch = await _switch(catalog, **which)
    lift = await catalog.withdrawals.resume(switch, actor=actor, reason=reason)
    run = "the same command with --actor OTHER"
    show_lift(out, lift, f"{switch[1]}", "go on", key="resumed", run=run)


@withdrawal.command(examples="bursar withdrawal switches")
@on_catalog
async def switches(catalog: Catalog, out: Output) -> None:
    """Withdrawals that are switched off, since when, by whom and why."""
    from bursar.flows.withdrawals.switches import is_switch

    found = [one for one in await catalog.ledger.store.read.pauses.list() if is_switch(one.kind, one.name)]
    facts = [
        {"switch": one.name, "seconds": one.age_us // 10**6, "by": one.actor, "reason": one.reason} for one in found
    ]
    rows = [tuple(one.values()) for one in facts]
    headings = ("switched off", "seconds", "by", "reason")
    out.show(facts, lambda: table(*headings, rows=rows, right=("seconds",), empty="nothing is switched off"))


async def _switch(catalog: Catalog, *, user: int | None, asset: str, chain: str, everything: bool) -> Switch:
    """The switch that is meant. One with a typing error would stop nothing."""
    from bursar.flows.payouts.documents import CHAIN
    from bursar.flows.withdrawals.switches import EVERYTHING, of_asset, of_chain, of_user

    if sum((user is not None, bool(asset), bool(chain), everything)) != 1:
        raise click.UsageError("name one of --user, --asset, --chain and --all", click.get_current_context())
    if user is not None:
        return of_user(user)
    if asset:
        return of_asset((await catalog.ledger.asset(asset)).code)
    if chain:
        return of_chain((await catalog.withdrawals.documents.get(CHAIN, chain)).name)
    return EVERYTHING
