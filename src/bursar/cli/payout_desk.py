"""What commands about payouts, chains and wallets share: how they are opened, and documents from files and options.

Most need the database alone. Those that ask nodes (a request, a quote, balances) open the configured nodes and signer,
and no core; they drive nothing, so that what they write down is carried out by the worker that runs.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.errors import Unusable
from bursar.cli.output import Output, plain, table
from bursar.cli.state import opening

if TYPE_CHECKING:
    from bursar.config import Config
    from bursar.documents import Document, DocumentKind, Documents, Proposal
    from bursar.flows.deposits import ChainDeposits
    from bursar.flows.payouts import Payouts
    from bursar.flows.payouts.overview import Overview
    from bursar.flows.withdrawals import Withdrawals

WITHIN_S = 10.0  # for one question to nodes
VALUE_HELP = "Change one field of the version in use; a dot leads into a table (fee_ceilings.low=5). May be repeated."


@dataclass(frozen=True)
class PayoutDesk:
    """Payouts with the nodes and the signer of the configuration."""

    payouts: Payouts
    withdrawals: Withdrawals
    deposits: ChainDeposits
    overview: Overview
    is_configured: bool

    def configured(self) -> Payouts:
        """Payouts, or what is missing for them."""
        self.require()
        return self.payouts

    def require(self) -> None:
        """Refuse what needs nodes and a signer where they are not configured."""
        from bursar.config import ConfigRefused

        if not self.is_configured:
            raise ConfigRefused("payouts need signer, signer_name, signer_caller, signer_secret_file and chain_nodes")


@asynccontextmanager
async def opened_desk(ctx: click.Context) -> AsyncIterator[PayoutDesk]:
    """The database, and the nodes and the signer that are configured."""
    from bursar.cli.place import open_database
    from bursar.documents import Documents
    from bursar.engine import Engine
    from bursar.flows.catalog import KINDS, Catalog
    from bursar.flows.payouts.overview import Overview
    from bursar.payout_setup import paying_out
    from bursar.ports import SystemPorts
    from bursar.rails.chain import NodesUnavailable
    from bursar.signer.protocol import SignerUnavailable

    config: Config = ctx.meta["config"]()
    async with AsyncExitStack() as stack:
        b = await stack.enter_async_context(open_database(config))
        if config.pays_out:
            engine, documents = Engine(b.store, b.ledger.writer, ()), Documents(b.store, KINDS)
            opened = paying_out(config, SystemPorts(), b.ledger, documents, engine)
            paying = await stack.enter_async_context(opened)
            payouts, withdrawals, deposits = paying.payouts, paying.withdrawals, paying.deposits
        else:
            catalog = Catalog.on(b.ledger)
            payouts, withdrawals, deposits = catalog.payouts, catalog.withdrawals, catalog.arrivals
        overview = Overview(b.store, payouts.documents, payouts.chains, within_s=WITHIN_S)
        try:
            yield PayoutDesk(payouts, withdrawals, deposits, overview, config.pays_out)
        except (NodesUnavailable, SignerUnavailable) as error:
            raise Unusable(f"{error}; nothing was written, try again") from None


on_desk = opening(opened_desk)

Also = Callable[[dict[str, Any]], Awaitable[dict[str, str]]]  # more to show of the body of a document, by name


async def nothing_more(_body: dict[str, Any]) -> dict[str, str]:
    """A document is shown as it is."""
    return {}


def _lines(more: dict[str, str]) -> list[str]:
    return [f"{name.replace('_', ' ')}: {value}" for name, value in more.items()]


# --- documents -------------------------------------------------------------------------------------------------------


def field(value: str) -> tuple[str, Any]:
    """NAME=VALUE: the value is JSON, or else text."""
    name, equals, raw = value.partition("=")
    if not equals or not name:
        raise click.BadParameter(f"{value!r} is not NAME=VALUE.")
    try:
        return name, json.loads(raw)
    except ValueError:
        return name, raw


def document_options(command: Any) -> Any:
    """Where the body of a document comes from."""
    command = click.option("--set", "fields", metavar="NAME=VALUE", multiple=True, type=field, help=VALUE_HELP)(command)
    return click.argument("file", metavar="[FILE|-]", required=False, type=click.Path(dir_okay=False, allow_dash=True))(
        command
    )


def body_of(file: str | None, fields: tuple[tuple[str, Any], ...], current: Mapping[str, Any] | None) -> dict[str, Any]:
    """The body: of the file (JSON, or TOML by its name), or of the version in use; with the given fields changed."""
    if file is None and not fields:
        raise click.UsageError(
            "name a file with the document, or change fields with --set", click.get_current_context()
        )
    body = _read(file) if file is not None else json.loads(json.dumps(current or {}))
    for name, value in fields:
        *way, last = name.split(".")
        place = body
        for part in way:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise click.UsageError(f"{name}: {part} is no table")
        place[last] = value
    return body


def _read(file: str) -> dict[str, Any]:
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        found = tomllib.loads(raw.decode()) if file.endswith(".toml") else json.loads(raw)
    except OSError as error:
        raise click.UsageError(f"{file} can't be read: {error.strerror}") from None
    except (ValueError, UnicodeDecodeError) as error:
        kind = "TOML" if file.endswith(".toml") else "JSON"
        raise click.UsageError(f"{file} is not {kind}: {error}") from None
    if not isinstance(found, dict):
        raise click.UsageError(f"{file} is not a table of fields")
    return found


async def put_document(
    documents: Documents,
    out: Output,
    kind: DocumentKind[Any],
    name: str,
    given: tuple[str | None, tuple[tuple[str, Any], ...]],
    *,
    run: str,
    actor: str,
    reason: str,
    also: Also = nothing_more,
) -> None:
    """Propose a version after the one in use; `run` is the command that approves it."""
    from bursar.documents import Proposal

    current = await documents.current(kind, name, fresh=True)
    body = body_of(*given, None if current is None else json.loads(current.document.body))
    base = await _newest(documents, kind, name)
    made = await documents.put(kind, name, body, base=base, author=actor, reason=reason)
    if isinstance(made, Proposal):
        hash_ = made.hash.hex()
        words = f"{kind.name} {name}: version {base + 1} is proposed. Another person must run: {run} {hash_} "
        facts = {"kind": kind.name, "name": name, "base": made.base, "hash": hash_, "proposed": True}
        more = await also(json.loads(made.body))
        lines = "\n".join([f"{words}--actor OTHER --reason WHY", *_lines(more)])
        out.show(facts | {"body": json.loads(made.body)} | more, lambda: lines)
    else:
        _show_version(out, made, await also(json.loads(made.body)))


async def _newest(documents: Documents, kind: DocumentKind[Any], name: str) -> int:
    """The newest version, retired or not; 0: there is none."""
    from bursar.documents import UnknownDocument

    try:
        return (await documents.get(kind, name)).version
    except UnknownDocument:
        return 0


async def approve_document(
    payouts: Payouts,
    out: Output,
    kind: DocumentKind[Any],
    name: str,
    hash_: str,
    *,
    actor: str,
    reason: str,
    also: Also = nothing_more,
) -> None:
    """Approve what another person has proposed; a wallet's account is made with it."""
    try:
        raw = bytes.fromhex(hash_)
    except ValueError:
        raise click.UsageError(f"{hash_!r} is not the hash of a proposal", click.get_current_context()) from None
    made = await payouts.documents.approve(kind, name, raw, actor=actor, reason=reason)
    await payouts.prepare()
    _show_version(out, made, await also(json.loads(made.body)))


async def show_document(
    documents: Documents, out: Output, kind: DocumentKind[Any], name: str, *, also: Also = nothing_more
) -> None:
    """The newest version, and what is proposed."""
    waiting = [one for one in await documents.proposals(kind) if one.name == name]
    if waiting and not await _newest(documents, kind, name):
        made: Document | Proposal = waiting[0]
    else:
        made = await documents.get(kind, name)
    document = _facts(made)
    more, proposed = await also(document["body"]), [await also(json.loads(one.body)) for one in waiting]
    proposals = [_facts(one) | more for one, more in zip(waiting, proposed, strict=True)]
    facts = {"document": document, "proposals": proposals} | more

    def draw() -> Any:
        from rich.console import Group

        rows = [(key, value) for key, value in flat(document) if value not in ("", None)]
        parts: list[Any] = [table("field", "value", rows=rows, whole=("field",)), *_lines(more)]
        for one, its in zip(waiting, proposed, strict=True):
            parts += ["", f"proposed by {one.author} ({one.reason}): {one.hash.hex()}", *_lines(its)]
        return Group(*parts)

    out.show(facts, draw)


def _facts(made: Document | Proposal) -> dict[str, Any]:
    found: dict[str, Any] = plain(made)
    for name in ("previous", "number"):
        found.pop(name, None)
    return found | {"body": json.loads(made.body)}


def flat(facts: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    """Fields of fields, as rows."""
    rows: list[tuple[str, Any]] = []
    for name, value in facts.items():
        path = f"{before}{name}"
        rows += flat(value, f"{path}.") if isinstance(value, dict) else [(path, value)]
    return rows


def _show_version(out: Output, made: Document, more: dict[str, str]) -> None:
    who = f", approved by {made.approved_by}" if made.approved_by else ""
    words = f"{made.kind} {made.name} is at version {made.version}, by {made.author}{who}"
    out.show(_facts(made) | more, lambda: "\n".join([words, *_lines(more)]))
