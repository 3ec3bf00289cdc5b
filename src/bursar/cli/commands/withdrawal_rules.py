"""The rules of withdrawals, as documents that two people change: `bursar withdrawal` policy, address-list, approver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.withdrawal import withdrawal
from bursar.cli.operating import on_catalog
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import approve_document, document_options, put_document, show_document
from bursar.cli.state import Group
from bursar.cli.types import operator_options, together

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog

hash_options = together(click.argument("hash_", metavar="HASH"), operator_options)
put_options = together(document_options, operator_options)


# --- policy


@withdrawal.group("policy", cls=Group)
def policy() -> None:
    """What withdrawals of an asset on a chain cost and need: list, show, put, approve."""


@policy.command("list", examples="bursar withdrawal policy list")
@on_catalog
async def policy_list(catalog: Catalog, out: Output) -> None:
    """All of them, with what is proposed."""
    from bursar.flows.withdrawals.policy import POLICY

    await _show_all(catalog, out, POLICY)


@policy.command("show", examples="bursar withdrawal policy show usdt:bsc")
@click.argument("name", metavar="ASSET:CHAIN")
@on_catalog
async def policy_show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of a policy, and what is proposed."""
    from bursar.flows.withdrawals.policy import POLICY

    await show_document(catalog.withdrawals.documents, out, POLICY, name)


@policy.command(
    "put",
    examples="""
    bursar withdrawal policy put usdt:bsc usdt-bsc-policy.toml --actor anna --reason "withdrawals of USDT"
    bursar withdrawal policy put usdt:bsc --set fee_flat=0.80 --actor anna --reason "gas is cheaper"
    """,
)
@click.argument("name", metavar="ASSET:CHAIN")
@put_options
@on_catalog
async def policy_put(
    catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str
) -> None:
    """Propose a policy, or a new version of it. Its asset and chain never change."""
    from bursar.flows.withdrawals.policy import POLICY

    documents, run = catalog.withdrawals.documents, f"bursar withdrawal policy approve {name}"
    await put_document(documents, out, POLICY, name, (file, fields), run=run, actor=actor, reason=reason)


@policy.command("approve", examples='bursar withdrawal policy approve usdt:bsc 9b1c… --actor ben --reason "compared"')
@click.argument("name", metavar="ASSET:CHAIN")
@hash_options
@on_catalog
async def policy_approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash."""
    from bursar.flows.withdrawals.policy import POLICY

    await approve_document(catalog.payouts, out, POLICY, name, hash_, actor=actor, reason=reason)


# --- address-list


@withdrawal.group("address-list", cls=Group)
def address_list() -> None:
    """Addresses that are denied, or that alone are allowed: list, show, put, approve."""


@address_list.command("list", examples="bursar withdrawal address-list list")
@on_catalog
async def address_list_list(catalog: Catalog, out: Output) -> None:
    """All of them, with what is proposed."""
    from bursar.flows.withdrawals.policy import ADDRESS_LIST

    await _show_all(catalog, out, ADDRESS_LIST)


@address_list.command("show", examples="bursar withdrawal address-list show bsc")
@click.argument("name", metavar="CHAIN|ASSET:CHAIN")
@on_catalog
async def address_list_show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of a list, and what is proposed."""
    from bursar.flows.withdrawals.policy import ADDRESS_LIST

    await show_document(catalog.withdrawals.documents, out, ADDRESS_LIST, name)


@address_list.command(
    "put",
    examples="""
    bursar withdrawal address-list put bsc denied.json --actor anna --reason "new sanctions"
    bursar withdrawal address-list put usdt:bsc --set 'deny=["0x…"]' --actor anna --reason "ticket 17"
    """,
)
@click.argument("name", metavar="CHAIN|ASSET:CHAIN")
@put_options
@on_catalog
async def address_list_put(
    catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str
) -> None:
    """Propose a list, or a new version of it. It counts for what is requested, and for what is not signed yet."""
    from bursar.flows.withdrawals.policy import ADDRESS_LIST

    documents, run = catalog.withdrawals.documents, f"bursar withdrawal address-list approve {name}"
    await put_document(documents, out, ADDRESS_LIST, name, (file, fields), run=run, actor=actor, reason=reason)


@address_list.command(
    "approve", examples='bursar withdrawal address-list approve bsc 9b1c… --actor ben --reason "compared"'
)
@click.argument("name", metavar="CHAIN|ASSET:CHAIN")
@hash_options
@on_catalog
async def address_list_approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash."""
    from bursar.flows.withdrawals.policy import ADDRESS_LIST

    await approve_document(catalog.payouts, out, ADDRESS_LIST, name, hash_, actor=actor, reason=reason)


# --- approver


@withdrawal.group("approver", cls=Group)
def approver() -> None:
    """People who may approve withdrawals: list, show, put, approve."""


@approver.command("list", examples="bursar withdrawal approver list")
@on_catalog
async def approver_list(catalog: Catalog, out: Output) -> None:
    """All of them, with what is proposed."""
    from bursar.flows.withdrawals.policy import APPROVER

    await _show_all(catalog, out, APPROVER)


@approver.command("show", examples="bursar withdrawal approver show ann")
@click.argument("name", metavar="NAME")
@on_catalog
async def approver_show(catalog: Catalog, out: Output, name: str) -> None:
    """The document of an approver, and what is proposed."""
    from bursar.flows.withdrawals.policy import APPROVER

    await show_document(catalog.withdrawals.documents, out, APPROVER, name)


@approver.command(
    "put",
    examples="""
    bursar withdrawal approver put ann --set public_key=… --actor anna --reason "ann joins"
    bursar withdrawal approver put ann --set active=false --actor anna --reason "ann leaves"
    """,
)
@click.argument("name", metavar="NAME")
@put_options
@on_catalog
async def approver_put(
    catalog: Catalog, out: Output, name: str, file: str | None, fields: Any, actor: str, reason: str
) -> None:
    """Propose an approver, or a new version. The key has to be in the signer's policy, too."""
    from bursar.flows.withdrawals.policy import APPROVER

    documents, run = catalog.withdrawals.documents, f"bursar withdrawal approver approve {name}"
    await put_document(documents, out, APPROVER, name, (file, fields), run=run, actor=actor, reason=reason)


@approver.command("approve", examples='bursar withdrawal approver approve ann 9b1c… --actor ben --reason "compared"')
@click.argument("name", metavar="NAME")
@hash_options
@on_catalog
async def approver_approve(catalog: Catalog, out: Output, name: str, hash_: str, actor: str, reason: str) -> None:
    """Approve what another person has proposed: exactly this hash."""
    from bursar.flows.withdrawals.policy import APPROVER

    await approve_document(catalog.payouts, out, APPROVER, name, hash_, actor=actor, reason=reason)


async def _show_all(catalog: Catalog, out: Output, kind: Any) -> None:
    documents = catalog.withdrawals.documents
    found = await documents.list(kind)
    waiting = {one.name: one for one in await documents.proposals(kind)}
    rows: list[tuple[Any, ...]] = []
    for one in found:
        proposal = waiting.pop(one.name, None)
        note = "" if proposal is None else f"{proposal.hash.hex()} by {proposal.author}"
        rows.append((one.name, one.version, "retired" if one.retired else "in use", one.author, one.approved_by, note))
    rows += [(one.name, 0, "proposed", one.author, "", one.hash.hex()) for one in waiting.values()]
    facts = [
        dict(zip(("name", "version", "state", "author", "approved_by", "proposal"), row, strict=True)) for row in rows
    ]
    headings = ("name", "version", "state", "author", "approved by", "proposed")
    out.show(facts, lambda: table(*headings, rows=rows, right=("version",), whole=("name",), empty="none yet"))
