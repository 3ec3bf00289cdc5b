"""`bursar withdrawal`: ask for withdrawals of users, look at them, and cancel one.

What approvers and operators decide is in `withdrawal_people`, the rules are in `withdrawal_rules`, the address book is
in `withdrawal_addresses`; all of it is one group. What became of the payment is `bursar payout`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.operating import on_catalog, operators_group
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import PayoutDesk, on_desk
from bursar.cli.types import actor_option, operator_options, together
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.cli.output import Drawing
    from bursar.flows.catalog import Catalog
    from bursar.flows.withdrawals import WithdrawalView

withdrawal = operators_group(
    "withdrawal",
    "Withdrawals of users: quote, request, list, waiting, show, approve, reject, cancel, pause, resume; their rules.",
)
id_argument = click.argument("id_", metavar="ID")
user_option = click.option("--user", type=click.IntRange(1), required=True, help="Whose money.")
wanted_options = together(
    click.argument("asset"),
    click.argument("amount"),
    user_option,
    click.option("--chain", required=True, help="The name of its document."),
    click.option("--to", required=True, help="The address that is paid."),
    click.option("--memo", default="", help="For chains that have one."),
)


@withdrawal.command(examples="bursar withdrawal quote USDT 25.00 --user 1001 --chain bsc --to 0x…")
@wanted_options
@on_desk
async def quote(desk: PayoutDesk, out: Output, /, **wanted: Any) -> None:
    """What a withdrawal would cost, how long it would take, and what it would wait for. Nothing is written.

    AMOUNT arrives; the fee is paid beside it. `all`: everything that is available, less the fee.
    """
    from bursar.flows.withdrawals import WithdrawalRequest

    desk.require()
    found = await desk.withdrawals.quote(WithdrawalRequest(**wanted))
    rows = [
        ("arrives", f"{found.amount} {found.asset}"),
        ("at", found.to),
        ("fee", f"{found.fee} {found.asset}"),
        ("leaves the account", f"{found.total} {found.asset}"),
        ("final", f"about {found.seconds} s after its approval"),
        *(("waits for", reason.words) for reason in found.reasons),
    ]
    out.show(found, lambda: table("field", "value", rows=rows, whole=("field",)))


@withdrawal.command(
    examples="""
    bursar withdrawal request USDT 25.00 --user 1001 --chain bsc --to 0x… --key w-17 --actor anna
    bursar withdrawal request USDT all --user 1001 --chain bsc --to 0x… --key w-18 --max-fee 1.00 --actor anna
    """
)
@wanted_options
@click.option("--max-fee", default="", help="The fee of the quote; dearer is refused. Without it: whatever it is now.")
@click.option(
    "--key", required=True, help="Idempotency key of this user: sent again with the same key, it happens once."
)
@actor_option
@on_desk
async def request(desk: PayoutDesk, out: Output, /, key: str, actor: str, **wanted: Any) -> None:
    """Write a withdrawal down for a user, with its money set aside. The worker that runs carries it out.

    You are the requester: your own approval of it does not count, under no name that looks like yours.
    """
    from bursar.flows.withdrawals import WithdrawalRequest

    desk.require()
    show_result(out, await desk.withdrawals.request(WithdrawalRequest(**wanted), key=key, requester=actor))


@withdrawal.command(
    "list",
    examples="""
    bursar withdrawal list
    bursar withdrawal list --status pending --user 1001
    """,
)
@click.option("--status", default="", help="pending, approved, queued, completed, failed, …; or an exact state.")
@click.option("--user", type=click.IntRange(1), help="One user's only.")
@click.option("--asset", default="", help="Of this asset only.")
@click.option("--chain", default="", help="On this chain only.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def list_(catalog: Catalog, out: Output, /, status: str, **wanted: Any) -> None:
    """Withdrawals, newest first."""
    from bursar.flows.withdrawals.listing import STATUSES, listed, states_of
    from bursar.store.records import NEWEST

    states = states_of(status)
    if states is None:
        raise click.UsageError(f"--status: one of {', '.join(STATUSES)}", click.get_current_context())
    views: list[WithdrawalView] = []
    before, most = NEWEST, wanted.pop("limit")
    while before and len(views) < most:  # however many records of other flows are between them
        more, before = await listed(
            catalog.withdrawals, states=states, before=before, limit=most - len(views), **wanted
        )
        views += more
    show_list(out, views, "no withdrawals")


@withdrawal.command(examples="bursar withdrawal show wd-1734912345678901234")
@id_argument
@on_catalog
async def show(catalog: Catalog, out: Output, id_: str) -> None:
    """One withdrawal: what it waits for, with what its user is not told. `bursar flow show ID` has its history."""
    view = await catalog.withdrawals.view(id_)
    out.show(view, lambda: _drawn(view))


@withdrawal.command(examples='bursar withdrawal cancel wd-1734912345678901234 --actor anna --reason "she called"')
@id_argument
@operator_options
@on_catalog
async def cancel(catalog: Catalog, out: Output, id_: str, actor: str, reason: str) -> None:
    """Give the money back, as long as the signer was not asked for the payment."""
    view = await catalog.withdrawals.cancel(id_, actor=actor, reason=reason)
    show_result(out, view, "" if view.status == "cancelled" else "it is cancelled by the worker that runs")


def show_result(out: Output, view: WithdrawalView, note: str = "") -> None:
    """What became of a request. With a note, what it waits for is left out: it is looked at anew by the worker."""
    said = note or "; ".join(reason.words for reason in view.reasons) or view.reason
    words = f"{view.id} is {view.status}" + (f": {said}" if said else "")
    out.show(view, lambda: words)


def show_list(out: Output, views: list[WithdrawalView], empty: str) -> None:
    """Withdrawals as a table."""
    rows = [
        (
            view.id,
            view.status,
            view.user,
            view.amount,
            view.asset,
            view.chain,
            view.to,
            "; ".join(reason.words for reason in view.reasons) or view.reason,
        )
        for view in views
    ]
    headings = ("withdrawal", "status", "user", "amount", "asset", "chain", "to", "waits for, or ended with")
    whole = ("withdrawal", "status", "to")
    out.show(views, lambda: table(*headings, rows=rows, right=("user", "amount"), whole=whole, empty=empty))


def _drawn(view: WithdrawalView) -> Drawing:
    rows: list[tuple[str, Any]] = [
        ("withdrawal", view.id),
        ("status", view.status if view.status == view.state else f"{view.status} ({view.state})"),
        ("user", view.user),
        ("pays", f"{view.amount} {view.asset}"),
        ("to", view.to),
        ("on", view.chain),
        ("memo", view.memo),
        ("fee", f"{view.fee} {view.asset}"),
        *(("waits for", f"{one.words} ({one.detail})" if one.detail else one.words) for one in view.reasons),
        ("looked at again", moment(view.until_us) if view.until_us else ""),
        ("requested by", view.requester),
        ("approved by", ", ".join(view.approvals)),
        ("approvals missing", view.approvals_missing or ""),
        ("ended with", view.reason),
        ("payout", f"{view.payout} ({view.payout_status})" if view.payout else ""),
        ("transaction", view.tx_hash),
        ("digest", view.digest),
        ("created (UTC)", moment(view.created_us)),
        ("queued (UTC)", moment(view.queued_us) if view.queued_us else ""),
        ("updated (UTC)", moment(view.updated_us)),
    ]
    return table("field", "value", rows=[row for row in rows if row[1] != ""], whole=("field",))
