"""`bursar chain`: chains and the assets on them, as documents that two people change, and the health of their nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.operating import on_catalog, operators_group
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

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog

chain = operators_group(
    "chain", "Chains that are paid out on: list, nodes, show, put, approve; asset-show, asset-put, asset-approve."
)
name_argument = click.argument("name")
hash_argument = click.argument("hash_", metavar="HASH")
asset_argument = click.argument("name", metavar="ASSET:CHAIN")


@chain.command("list", examples="bursar chain list")
@on_desk
async def list_(desk: PayoutDesk, out: Output) -> None:
    """All chains, the assets on them, and how many of their nodes can be used."""
    views = await desk.overview.chains()
    rows = [
        (
            one.name,
            one.document.kind,
            one.document.chain_id,
            one.document.native,
            ", ".join(sorted(asset.asset for asset in one.assets.values())),
            one.document.active,
            f"{sum(node.usable for node in one.nodes)} of {len(one.nodes)}",
            "; ".join(part for part in (one.paused and f"paused by {one.paused}", one.trouble) if part),
        )
        for one in views
    ]
    headings = ("chain", "kind", "chain id", "coin", "assets", "active", "usable nodes", "note")
    out.show(views, lambda: table(*headings, rows=rows, right=("chain id",), whole=("chain",), empty="no chains"))


@chain.command(examples="bursar chain nodes bsc")
@click.argument("name", required=False, default="")
@on_desk
async def nodes(desk: PayoutDesk, out: Output, name: str) -> None:
    """Every configured node as it answers now. Nodes are named by their place in the configuration, never by URL."""
    found = [one for one in await desk.overview.chains() if name in ("", one.name)]
    if name and not found:
        raise click.UsageError(f"there is no chain {name!r}; see `bursar chain list`", click.get_current_context())
    facts = {one.name: {"nodes": list(one.nodes), "trouble": one.trouble} for one in found}
    rows = [(one.name, node.name, node.usable, node.height, node.trouble) for one in found for node in one.nodes] or [
        (one.name, "", False, None, one.trouble) for one in found
    ]
    headings = ("chain", "node", "usable", "height", "trouble")
    out.show(facts, lambda: table(*headings, rows=rows, right=("height",), whole=("node",), empty="no chains"))


@chain.command(examples="bursar chain show bsc")
@name_argument
@on_catalog
async def show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of a chain, and what is proposed."""
    from bursar.flows.payouts.documents import CHAIN

    await show_document(catalog.payouts.documents, out, CHAIN, name)


@chain.command(
    examples="""
    bursar chain put bsc bsc.toml --actor anna --reason "we pay out on BSC"
    bursar chain put bsc --set fee_ceilings.normal=5000000000 --actor anna --reason "fees have risen"
    bursar chain put bsc --set active=false --actor anna --reason "ticket 17"
    """
)
@name_argument
@document_options
@operator_options
@on_catalog
async def put(catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str) -> None:
    """Propose a chain, or a new version of it. Its kind, id, coin and decimals never change."""
    from bursar.flows.payouts.documents import CHAIN

    documents, run = catalog.payouts.documents, f"bursar chain approve {name}"
    await put_document(documents, out, CHAIN, name, (file, fields), run=run, actor=actor, reason=reason)


@chain.command(examples='bursar chain approve bsc 7e0e642e… --actor ben --reason "compared with the explorer"')
@name_argument
@hash_argument
@operator_options
@on_catalog
async def approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash."""
    from bursar.flows.payouts.documents import CHAIN

    await approve_document(catalog.payouts, out, CHAIN, name, hash_, actor=actor, reason=reason)


@chain.command("asset-show", examples="bursar chain asset-show usdt:bsc")
@asset_argument
@on_catalog
async def asset_show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of an asset on a chain, and what is proposed."""
    from bursar.flows.payouts.documents import ASSET

    await show_document(catalog.payouts.documents, out, ASSET, name)


@chain.command(
    "asset-put",
    examples="""
    bursar chain asset-put usdt:bsc usdt-bsc.toml --actor anna --reason "USDT on BSC"
    bursar chain asset-put bnb:bsc --set asset=BNB --set chain=bsc --set decimals=18 --actor anna --reason "the coin"
    """,
)
@asset_argument
@document_options
@operator_options
@on_catalog
async def asset_put(
    catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str
) -> None:
    """Propose an asset on a chain, or a new version of it. Its contract and decimals never change."""
    from bursar.flows.payouts.documents import ASSET

    documents, run = catalog.payouts.documents, f"bursar chain asset-approve {name}"
    await put_document(documents, out, ASSET, name, (file, fields), run=run, actor=actor, reason=reason)


@chain.command("asset-approve", examples='bursar chain asset-approve usdt:bsc 9b1c… --actor ben --reason "compared"')
@asset_argument
@hash_argument
@operator_options
@on_catalog
async def asset_approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash."""
    from bursar.flows.payouts.documents import ASSET

    await approve_document(catalog.payouts, out, ASSET, name, hash_, actor=actor, reason=reason)
