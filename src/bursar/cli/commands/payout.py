"""`bursar payout`: request payouts, look at them, and what operators and approvers do to one.

History, retries and pauses of any record are `bursar flow`; alerts are `bursar alert`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.approving import approval_options, signed_approval
from bursar.cli.operating import on_catalog, operators_group
from bursar.cli.output import Output, plain, table
from bursar.cli.payout_desk import PayoutDesk, on_desk
from bursar.cli.types import operator_options
from bursar.model.views import moment

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bursar.flows.catalog import Catalog
    from bursar.flows.payouts import PayoutView
    from bursar.flows.payouts.payout import Attempt

payout = operators_group(
    "payout", "Payments that leave on a chain: request, list, show, approve, bump, cancel, hold, release, resolve."
)
id_argument = click.argument("id_", metavar="ID")
sender_option = click.option(
    "--sender", default="", help="An id of your own for this: sent again under it, nothing happens."
)
priority_option = click.option(
    "--priority", type=click.Choice(["high", "normal", "low"]), default="normal", show_default=True, help="Its rank."
)


@payout.command(
    examples="""
    bursar payout request user:1001:funding USDT 25.00 --chain bsc --to 0x… --source withdrawal:17 --key w-17
    bursar payout request user:1001:funding USDT 5 --chain bsc --to 0x… --source refund:9 --key r-9 --mandate auto
    """
)
@click.argument("account")
@click.argument("asset")
@click.argument("amount")
@click.option("--chain", required=True, help="The name of its document.")
@click.option("--to", required=True, help="The address that is paid.")
@click.option("--source", required=True, help="What it is for: one payout that has not failed per source.")
@click.option("--key", required=True, help="Idempotency key: sent again with the same key, it happens once.")
@click.option("--fee", default="0", show_default=True, help="What the account pays us beside it.")
@click.option("--memo", default="", help="For chains that have one.")
@click.option("--mandate", default="", help="Under which the signer signs; without it, people approve it.")
@click.option("--wallet", default="", help="The wallet that pays; only for sweeps and refills.")
@click.option("--actor", metavar="NAME", default="", help="Who you are; it is written down.")
@priority_option
@on_desk
async def request(desk: PayoutDesk, out: Output, /, key: str, actor: str, **wanted: Any) -> None:
    """Write a payout down, with its money set aside. The worker that runs carries it out."""
    from bursar.flows.payouts import PayoutRequest
    from bursar.model.actors import check_actor

    who = check_actor(actor) if actor else ""
    view = await desk.configured().request(PayoutRequest(**wanted), key=key, actor=who)
    _show_result(out, view)


@payout.command(examples="bursar payout quote USDT 25.00 --chain bsc --to 0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed")
@click.argument("asset")
@click.argument("amount")
@click.option("--chain", required=True, help="The name of its document.")
@click.option("--to", required=True, help="The address that would be paid.")
@priority_option
@on_desk
async def quote(desk: PayoutDesk, out: Output, /, **wanted: Any) -> None:
    """The fee that a payout would offer now, after a dry run at the nodes. Nothing is reserved."""
    from bursar.cli.payout_desk import WITHIN_S
    from bursar.flows.payouts import PayoutRequest
    from bursar.flows.payouts.overview import quote as ask

    request = PayoutRequest(account="quote", source="quote", **wanted)
    found = await ask(desk.configured(), request, within_s=WITHIN_S)
    rows = list(plain(found).items())
    out.show(found, lambda: table("field", "value", rows=rows, whole=("field",)))


@payout.command(
    "list",
    examples="""
    bursar payout list
    bursar payout list --status confirming --account user:1001:funding
    """,
)
@click.option("--status", default="", help="pending, processing, confirming, confirmed, failed; or an exact state.")
@click.option("--account", default="", help="Of this account only.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def list_(catalog: Catalog, out: Output, status: str, account: str, limit: int) -> None:
    """Payouts, newest first."""
    from bursar.flows.payouts.machine import STATUS

    states = tuple(state for state, of in STATUS.items() if of == status) or tuple(s for s in STATUS if s == status)
    if status and not states:
        raise click.UsageError(f"--status: one of {', '.join(sorted({*STATUS, *STATUS.values()}))}")
    views = await catalog.payouts.list(owner=account, states=states, limit=limit)
    rows = [(v.id, v.status, v.amount, v.asset, v.chain, v.to, v.wallet, v.error) for v in views]
    headings = ("payout", "status", "amount", "asset", "chain", "to", "wallet", "waits for, or failed with")
    out.show(views, lambda: table(*headings, rows=rows, right=("amount",), whole=("payout", "to"), empty="no payouts"))


@payout.command(examples="bursar payout show po-1734912345678901234")
@id_argument
@on_catalog
async def show(catalog: Catalog, out: Output, id_: str) -> None:
    """One payout with every attempt. `bursar flow show payouts ID` has its history, alerts and entries."""
    view = await catalog.payouts.view(id_)
    out.show(view, lambda: _drawn(view))


def _drawn(view: PayoutView) -> RenderableType:
    from rich.console import Group

    facts = {name: value for name, value in plain(view).items() if name != "attempts" and value not in ("", None, [])}
    parts: list[RenderableType] = [table("field", "value", rows=list(facts.items()), whole=("field",)), ""]
    rows = [_attempt_row(one) for one in view.attempts]
    headings = ("attempt", "made (UTC)", "shape", "wallet", "nonce", "gas price", "hash", "outcome")
    right, whole = ("attempt", "nonce", "gas price"), ("made (UTC)", "hash")
    parts.append(table(*headings, rows=rows, title="attempts", right=right, whole=whole, empty="no attempts yet"))
    return Group(*parts)


def _attempt_row(one: Attempt) -> tuple[Any, ...]:
    made = moment(one.made_us) if one.made_us else None
    return one.number, made, one.shape, one.wallet, one.nonce, one.fee.price, one.hash or "not signed", one.outcome


def _show_result(out: Output, view: PayoutView, note: str = "") -> None:
    words = f"{view.id} is {view.status}" + (f": {note}" if note else "") + (f" ({view.error})" if view.error else "")
    out.show(view, lambda: words)


@payout.command(examples='bursar payout bump po-1734912345678901234 --actor anna --reason "stuck since noon"')
@id_argument
@sender_option
@operator_options
@on_catalog
async def bump(catalog: Catalog, out: Output, /, id_: str, **who: str) -> None:
    """Raise the fee of what was sent, on the same nonce, within the ceiling of its priority."""
    _show_result(out, await catalog.payouts.bump(id_, **who), "its fee is raised if it is not final yet")


@payout.command(examples='bursar payout cancel po-1734912345678901234 --actor anna --reason "wrong address"')
@id_argument
@sender_option
@operator_options
@on_catalog
async def cancel(catalog: Catalog, out: Output, /, id_: str, **who: str) -> None:
    """Make sure that it is not paid, if that can still be: what is final is final. The money is back when it failed."""
    _show_result(out, await catalog.payouts.cancel(id_, **who), "it is cancelled if it is not final yet")


@payout.command(examples='bursar payout hold po-1734912345678901234 --actor anna --reason "the user called"')
@id_argument
@sender_option
@operator_options
@on_catalog
async def hold(catalog: Catalog, out: Output, /, id_: str, **who: str) -> None:
    """Let it wait before anything of it is signed. Only what is pending can be held."""
    _show_result(out, await catalog.payouts.hold(id_, **who), "it is held")


@payout.command(examples='bursar payout release po-1734912345678901234 --actor anna --reason "the user is sure"')
@id_argument
@sender_option
@operator_options
@on_catalog
async def release(catalog: Catalog, out: Output, /, id_: str, **who: str) -> None:
    """Let a payout go on that was held."""
    _show_result(out, await catalog.payouts.release(id_, **who), "it goes on")


@payout.command(
    examples="""
    bursar payout resolve po-1734912345678901234 --paid --actor anna --reason "ticket 17: seen in the explorer"
    bursar payout resolve po-1734912345678901234 --paid --actor ben --reason "ticket 17: so have I"
    """
)
@id_argument
@click.option("--paid/--not-paid", default=None, required=True, help="What became of it. Not paid: money goes back.")
@operator_options
@on_desk
async def resolve(desk: PayoutDesk, out: Output, id_: str, paid: bool, actor: str, reason: str) -> None:
    """Decide what the chain can't say: two people must say the same. What they declare dead stays watched.

    For a final transaction that moved something else than was ordered, and for a nonce that an unknown transaction has
    used up.
    """
    before = await desk.payouts.view(id_)
    view = await desk.configured().resolve(id_, paid=paid, actor=actor, reason=reason)
    said = "--paid" if paid else "--not-paid"
    run = f"bursar payout resolve {id_} {said} --actor OTHER --reason WHY"
    _show_result(out, view, "decided" if view.state != before.state else f"asked for; another person must run: {run}")


@payout.command(
    examples="""
    bursar payout approve po-1734912345678901234 --key ~/bursar/ann.key
    bursar payout approve po-1734912345678901234 --key ann.key --passphrase-file ann.pass --digest 5f2c… --yes
    """
)
@id_argument
@approval_options
@on_catalog
async def approve(catalog: Catalog, out: Output, /, id_: str, **how: Any) -> None:
    """Show exactly what is paid to whom, ask, sign it with your own key, and hand the signature to the payout.

    The signer verifies it. Nothing is signed if the payment is not the one of --digest.
    """

    payment = await catalog.payouts.payment(id_)
    made = await signed_approval(catalog.ledger, payment, **how)
    _show_result(out, await catalog.payouts.approve(id_, made), f"approved by {made.approver}")


@payout.command(
    "signer-rebind", examples='bursar payout signer-rebind --actor anna --reason "its disk is lost, ticket 17"'
)
@operator_options
@click.pass_context
def signer_rebind(ctx: click.Context, actor: str, reason: str) -> None:
    """Put the signer that answers now in the place of the one that this database knows, and that is lost for good.

    What the old one has signed is not in the new one's log: payouts are paused with it, and two people resume them when
    every transaction of the wallets is accounted for (docs/how-to/pay-out.md). Restart every process afterwards.
    """

    @on_desk
    async def work(desk: PayoutDesk, out: Output) -> None:
        from bursar.flows.payouts.link import rebind
        from bursar.payout_setup import signer_client
        from bursar.ports import SystemPorts

        desk.configured()
        config = ctx.meta["config"]()
        async with signer_client(config, SystemPorts()) as client:
            status = await client.status()
        store = desk.payouts.ledger.store
        was = await rebind(store, config.signer_name, status.identity, actor=actor, reason=reason)
        facts = {"signer": status.name, "identity": status.identity, "was": was}
        run = "bursar flow resume payouts --actor YOU --reason WHY"
        out.show(facts, lambda: f"the signer is {status.identity}; payouts are paused until two people run: {run}")

    work()
