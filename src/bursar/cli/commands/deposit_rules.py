"""The rules of deposits from chains, as documents that two people change; scans and sweeps: of `bursar deposit`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.deposit import deposit
from bursar.cli.operating import on_catalog
from bursar.cli.output import Output, table
from bursar.cli.payout_desk import Also, approve_document, document_options, put_document, show_document
from bursar.cli.state import Group
from bursar.cli.types import operator_options
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.flows.catalog import Catalog

chain_argument = click.argument("chain")


@deposit.group("rules", cls=Group)
def rules() -> None:
    """What is accepted from a chain, and what becomes of it: list, show, put, approve, history."""


@rules.command("list", examples="bursar deposit rules list")
@on_catalog
async def rules_list(catalog: Catalog, out: Output) -> None:
    """All of them, with what is proposed."""
    from bursar.flows.deposits import DEPOSITS

    documents = catalog.arrivals.documents
    waiting = {one.name: one for one in await documents.proposals(DEPOSITS)}
    facts: list[dict[str, Any]] = []
    for one in await documents.list(DEPOSITS):
        body, proposal = DEPOSITS.read(one), waiting.pop(one.name, None)
        state = "retired" if one.retired else "in use" if body.active else "no new addresses"
        facts.append(
            {"chain": one.name, "version": one.version, "state": state, "wallets": body.wallets}
            | {"assets": sorted(body.assets), "proposal": "" if proposal is None else proposal.hash.hex()}
        )
    facts += [
        {"chain": one.name, "version": 0, "state": "proposed", "wallets": "", "assets": [], "proposal": one.hash.hex()}
        for one in waiting.values()
    ]
    rows = [tuple(", ".join(v) if isinstance(v, list) else v for v in one.values()) for one in facts]
    headings = ("chain", "version", "state", "wallets", "assets", "proposed")
    out.show(facts, lambda: table(*headings, rows=rows, right=("version",), whole=("chain",), empty="none yet"))


@rules.command("show", examples="bursar deposit rules show bsc")
@chain_argument
@on_catalog
async def rules_show(catalog: Catalog, out: Output, chain: str) -> None:
    """The rules of a chain, what is proposed, and the address of user 1 by each."""
    from bursar.flows.deposits import DEPOSITS

    await show_document(catalog.arrivals.documents, out, DEPOSITS, chain, also=_also(catalog, chain))


@rules.command(
    "put",
    examples="""
    bursar deposit rules put bsc deposits-bsc.toml --actor anna --reason "deposits from BSC"
    bursar deposit rules put bsc --set assets.USDT.minimum='"5"' --actor anna --reason "dust"
    bursar deposit rules put bsc --set active=false --actor anna --reason "no new addresses"
    """,
)
@chain_argument
@document_options
@operator_options
@on_catalog
async def rules_put(
    catalog: Catalog, out: Output, chain: str, file: str | None, fields: Any, actor: str, reason: str
) -> None:
    """Propose the rules of a chain, or a new version of them. Another xpub needs another name of its wallets.

    Prints the address that user 1 gets: compare it with what `bursar signer xpub` has printed on the signer's host. By
    another key, users would send money to where the signer can't sweep it from.
    """
    from bursar.flows.deposits import DEPOSITS
    from bursar.flows.payouts.documents import CHAIN

    documents, run = catalog.arrivals.documents, f"bursar deposit rules approve {chain}"
    await documents.get(CHAIN, chain)  # or there is no address to compare
    given, who = (file, fields), {"actor": actor, "reason": reason}
    await put_document(documents, out, DEPOSITS, chain, given, run=run, **who, also=_also(catalog, chain))


@rules.command(
    "approve",
    examples="""
    bursar deposit rules approve bsc 9b1c… --address 0x5aAe… --actor ben --reason "address compared"
    """,
)
@chain_argument
@click.argument("hash_", metavar="HASH")
@click.option("--address", default="", help="Of user 1, as the signer has printed it. Any other: nothing is approved.")
@operator_options
@on_catalog
async def rules_approve(
    catalog: Catalog, out: Output, chain: str, hash_: str, address: str, actor: str, reason: str
) -> None:
    """Approve what another person has proposed: exactly this hash. From then on the chain is scanned."""
    from bursar.cli.errors import Unusable
    from bursar.flows.deposits import DEPOSITS

    also = _also(catalog, chain)
    for one in await catalog.arrivals.documents.proposals(DEPOSITS):
        if address and (one.name, one.hash.hex()) == (chain, hash_):
            first = (await also(json.loads(one.body)))["address_of_user_1"]
            if _digits(first) != _digits(address.strip()):
                raise Unusable(
                    f"by this proposal the address of user 1 is {first}, not {address}: nothing was approved"
                )
    await approve_document(catalog.payouts, out, DEPOSITS, chain, hash_, actor=actor, reason=reason, also=also)


@rules.command("history", examples="bursar deposit rules history bsc")
@chain_argument
@on_catalog
async def rules_history(catalog: Catalog, out: Output, chain: str) -> None:
    """Every version of the rules of a chain, newest first: who made it, who approved it, and why."""
    from bursar.flows.deposits import DEPOSITS

    found = await catalog.arrivals.documents.history(DEPOSITS, chain)
    facts = [
        {
            "version": one.version,
            "at": moment(one.at_us),
            "author": one.author,
            "approved_by": one.approved_by,
            "retired": one.retired,
            "reason": one.reason,
            "hash": one.hash.hex(),
            "body": json.loads(one.body),
        }
        for one in found
    ]
    rows = [tuple(one.values())[:6] for one in facts]
    headings = ("version", "at (UTC)", "author", "approved by", "retired", "reason")
    whole = ("at (UTC)",)
    out.show(facts, lambda: table(*headings, rows=rows, right=("version",), whole=whole, empty="none yet"))


# --- scans and sweeps ------------------------------------------------------------------------------------------------


@deposit.command(examples="bursar deposit scans")
@on_catalog
async def scans(catalog: Catalog, out: Output) -> None:
    """How far chains are scanned, as it was written down last: when something arrived, or every 10,000 blocks."""
    from bursar.flows.deposits import overview

    views = await overview.scans(catalog.ledger.store)
    rows = [(one.chain, one.block, moment(one.updated_us), one.error) for one in views]
    headings = ("chain", "read up to", "written (UTC)", "last trouble; it may be over")
    right, whole = ("read up to",), ("chain", "written (UTC)")
    out.show(views, lambda: table(*headings, rows=rows, right=right, whole=whole, empty="no chain is scanned"))


@deposit.command(examples='bursar deposit rescan bsc 41800000 --actor anna --reason "the database was restored"')
@chain_argument
@click.argument("block", type=click.IntRange(0, 2**53 - 1))
@operator_options
@on_catalog
async def rescan(catalog: Catalog, out: Output, chain: str, block: int, actor: str, reason: str) -> None:
    """Read a chain again from BLOCK on. What was seen before stays as it is; it is never sent forward."""
    await catalog.arrivals.rescan(chain, block, actor=actor, reason=reason)
    words = f"{chain} is read again from block {block} on by the worker that runs, or from where it is if that is lower"
    out.show({"chain": chain, "block": block}, lambda: words)


@deposit.command(
    examples="""
    bursar deposit sweeps
    bursar deposit sweeps --state swept --chain bsc
    bursar deposit sweeps --wallet dep-bsc-1001 --state ''
    """
)
@click.option("--state", default="sweeping", show_default=True, help="sweeping, swept or left; '' for all.")
@click.option("--chain", default="", help="On this chain only.")
@click.option("--wallet", default="", help="Of this user's wallet only.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def sweeps(catalog: Catalog, out: Output, state: str, chain: str, wallet: str, limit: int) -> None:
    """Sweeps, newest first: what each waits for, and its payout (`bursar payout show`)."""
    from bursar.flows.deposits import overview

    if state not in ("", *overview.SWEEP_STATES):
        raise click.UsageError(f"--state: one of {', '.join(overview.SWEEP_STATES)}", click.get_current_context())
    states = (state,) if state else ()
    views, _ = await overview.sweeps(catalog.ledger.store, states=states, chain=chain, wallet=wallet, limit=limit)
    rows = [(moment(one.created_us), one.state, one.wallet, one.asset, one.payout, one.error) for one in views]
    headings = ("begun (UTC)", "state", "wallet", "asset", "payout", "waits for")
    whole = ("begun (UTC)", "state", "payout")
    out.show(views, lambda: table(*headings, rows=rows, whole=whole, empty="no sweeps"))


def _digits(address: str) -> str:
    """Without the checksum that upper and lower case of hexadecimal digits are."""
    return address.lower() if address.startswith("0x") else address


def _also(catalog: Catalog, chain: str) -> Also:
    """Shows the address of user 1, to be compared with the signer's."""

    async def first_address(body: dict[str, Any]) -> dict[str, str]:
        import msgspec

        from bursar.flows.deposits import DepositRules, overview

        found = msgspec.convert(body, DepositRules)
        first = await overview.first_address(catalog.arrivals.documents, chain, found)
        return {
            "address_of_user_1": first or "none: there is no such chain here",
            "compare_it_with": "what `bursar signer xpub` has printed on the signer's host",
        }

    return first_address
