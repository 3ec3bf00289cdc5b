"""`bursar wallet`: our wallets on chains: what they have, their documents, and pausing one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.operating import on_catalog, operators_group, show_lift
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import (
    PayoutDesk,
    approve_document,
    document_options,
    on_desk,
    put_document,
    show_document,
)
from bursar.cli.types import operator_options
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog

wallet = operators_group("wallet", "Wallets of ours on chains: list, show, put, approve, pause, resume.")
name_argument = click.argument("name")


@wallet.command("list", examples="bursar wallet list")
@on_desk
async def list_(desk: PayoutDesk, out: Output) -> None:
    """All wallets: what they have at the last final block, what is reserved of it, and what is not final yet."""
    views = await desk.overview.wallets()
    rows: list[tuple[Any, ...]] = []
    for one in views:
        used = moment(one.last_used_us) if one.last_used_us else "never"
        for code in sorted({*one.reserved, *(one.balances or {})}) or [""]:
            has = (one.balances or {}).get(code, "?")
            note = "; ".join(part for part in (one.paused and f"paused by {one.paused}", one.trouble) if part)
            facts = (one.name, one.chain, one.role, one.status, code, has, one.reserved.get(code, "0"))
            rows.append((*facts, one.unconfirmed, used, note))
    used_at = "last used (UTC)"
    headings = ("wallet", "chain", "role", "status", "asset", "has", "reserved", "unconfirmed", used_at, "note")
    right, whole = ("has", "reserved", "unconfirmed"), ("wallet", used_at)
    out.show(views, lambda: table(*headings, rows=rows, right=right, whole=whole, empty="no wallets"))


@wallet.command(examples="bursar wallet show hot-bsc")
@name_argument
@on_catalog
async def show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of a wallet, and what is proposed."""
    from bursar.flows.payouts.documents import WALLET

    await show_document(catalog.payouts.documents, out, WALLET, name)


@wallet.command(
    examples="""
    bursar wallet put hot-bsc --set chain=bsc --set address=0x… --actor anna --reason "the first wallet"
    bursar wallet put hot-bsc --set status=draining --actor anna --reason "the key is replaced"
    """
)
@name_argument
@document_options
@operator_options
@on_catalog
async def put(catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str) -> None:
    """Propose a wallet, or a new version of it. Its name is the name of the signer's wallet; chain and address stay."""
    from bursar.flows.payouts.documents import WALLET

    run = f"bursar wallet approve {name}"
    given = (file, fields)
    await put_document(catalog.payouts.documents, out, WALLET, name, given, run=run, actor=actor, reason=reason)


@wallet.command(examples='bursar wallet approve hot-bsc 7e0e642e… --actor ben --reason "address compared"')
@name_argument
@click.argument("hash_", metavar="HASH")
@operator_options
@on_catalog
async def approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash. The wallet's account is made."""
    from bursar.flows.payouts.documents import WALLET

    await approve_document(catalog.payouts, out, WALLET, name, hash_, actor=actor, reason=reason)


@wallet.command(examples='bursar wallet pause hot-bsc --actor anna --reason "looks odd"')
@name_argument
@operator_options
@on_catalog
async def pause(catalog: Catalog, out: Output, name: str, actor: str, reason: str) -> None:
    """Let a wallet pay nothing new, at once and on any host. What it has sent is confirmed."""
    from bursar.engine import set_pause
    from bursar.flows.payouts.documents import WALLET
    from bursar.flows.payouts.wallets import wallet_rail
    from bursar.model.actors import check_actor, check_reason

    await catalog.payouts.documents.get(WALLET, name)
    person, why = check_actor(actor), check_reason(reason)
    was_on = await set_pause(catalog.ledger.store, "rail", wallet_rail(name), actor=person, reason=why)
    words = f"wallet {name} is paused" if was_on else f"wallet {name} was paused before"
    out.show({"paused": was_on}, lambda: words)


@wallet.command(examples='bursar wallet resume hot-bsc --actor anna --reason "it was a test"')
@name_argument
@operator_options
@on_catalog
async def resume(catalog: Catalog, out: Output, name: str, actor: str, reason: str) -> None:
    """Let it pay again. Where a transaction was found that is no payout of ours, two people are needed."""
    from bursar.engine.pauses import lift_pause
    from bursar.flows.payouts.documents import WALLET
    from bursar.flows.payouts.wallets import wallet_rail

    await catalog.payouts.documents.get(WALLET, name)
    lift = await lift_pause(catalog.ledger.store, "rail", wallet_rail(name), actor=actor, reason=reason)
    run = f"bursar wallet resume {name} --actor OTHER --reason WHY"
    show_lift(out, lift, f"wallet {name}", "pays again", key="resumed", run=run)
