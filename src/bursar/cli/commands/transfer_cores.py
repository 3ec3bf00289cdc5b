"""`bursar transfer cores`, `prune`, `reconcile`, `rebind`: the cores behind transfers, as the ledger knows them."""

from __future__ import annotations

from typing import Any

import click

from bursar.cli.commands.transfer import transfer
from bursar.cli.errors import Unusable
from bursar.cli.operating import on_runtime
from bursar.cli.output import Output, shown, table
from bursar.cli.types import operator_options
from bursar.flows.transfers import behind
from bursar.flows.transfers import reconcile as reconciling
from bursar.flows.transfers.reconcile import Report
from bursar.model.actors import check_actor
from bursar.model.outcome import Outcome
from bursar.model.views import moment
from bursar.rails.trading import TradingClient
from bursar.runtime import Runtime, client_of, prune_cores


@transfer.command(examples="bursar transfer cores")
@on_runtime
async def cores(runtime: Runtime, out: Output) -> None:
    """The core behind each rail: its identity, how far its log is known here, what it may forget, how much it holds.

    Floors are the ids below which a core reserves no room for refunds any more (room) and remembers nothing (forget).
    """
    found = [await _core(runtime, kind.value.lower(), client) for kind, client in runtime.cores.items()]
    numbers = ("known to", "core at", "room below", "forgets below", "remembers")
    headings = ("rail", "core", *numbers, "pruned (UTC)", "")
    rows = [tuple(shown(str(value)) for value in one.values()) for one in found]
    out.show(found, lambda: table(*headings, rows=rows, right=numbers, whole=("rail", "core")))


async def _core(runtime: Runtime, rail: str, client: TradingClient) -> dict[str, Any]:
    known = await runtime.bursar.store.read.cores.get(rail)
    there = await client.describe()
    answers = there.outcome is Outcome.SUCCESS
    state = client.trouble or there.code
    if answers:
        state = "ahead of this database" if (await behind.look(runtime.bursar.store, rail, client)).is_behind else "ok"
    return {
        "rail": rail,
        "core": "not bound yet" if known is None else known.identity,
        "known_to": "" if known is None else known.sequence,
        "core_at": there.sequence if answers else "",
        "room": there.floors.room if answers else "",
        "forget": there.floors.forget if answers else "",
        "remembered": there.remembered if answers else "",
        "pruned_at": "" if known is None or known.pruned_us is None else moment(known.pruned_us),
        "state": state,
    }


@transfer.command(examples="bursar transfer prune")
@on_runtime
async def prune(runtime: Runtime, out: Output) -> None:
    """Let the cores set room free and forget what is old enough, now. `bursar serve` and `worker` do it by
    themselves."""
    found = await prune_cores(runtime)
    rows = [
        (one.rail, *((one.floors.room, one.floors.forget) if one.floors else ("", "")), one.kept, one.note)
        for one in found
    ]
    headings = ("rail", "room below", "forgets below", "kept", "note")
    out.show(found, lambda: table(*headings, rows=rows, right=headings[1:4], whole=("rail",)))


@transfer.command(
    examples="""
    bursar transfer reconcile
    bursar transfer reconcile --book --actor anna --reason "restored last night's backup, ticket 17"
    """
)
@click.option("--book", is_flag=True, help="Write them down. Without it they are only shown.")
@click.option("--actor", metavar="NAME", help="Who you are; it is written down.")
@click.option("--reason", metavar="TEXT", help="Why; it is written down.")
def reconcile(book: bool, actor: str | None, reason: str | None) -> None:
    """After the database was restored: what the cores have done since the backup, and this database has forgotten.

    With --book each such transfer gets its record again, at its end, and the ledger books what the core holds because
    of it. What a user's account does not have comes out of suspense:transfers. docs/how-to/restore.md says what comes
    before and after.
    """
    if book and not (actor and reason):
        raise click.UsageError("--book needs --actor and --reason")

    @on_runtime
    async def work(runtime: Runtime, out: Output) -> None:
        ledger, clients = runtime.bursar.ledger, runtime.cores
        if book:
            report = await reconciling.reconcile(ledger, clients, actor=actor or "", reason=reason or "")
        else:
            report = await reconciling.survey(ledger, clients)
        _show(out, report, booked=book)

    work()


def _show(out: Output, report: Report, *, booked: bool) -> None:
    facts: dict[str, Any] = {
        "missing": sum(len(one.missing) for one in report.found),
        "transfers": [plan.text() for plan in report.plans],
        "unknown_assets": report.unknown,
        "booked": [one.text for one in report.done],
        "suspense": [one.id for one in report.done if one.suspense],
    }
    lines = [line for one in report.found for line in one.texts()]
    lines += [
        f"{'booked' if booked else 'to be booked'}: {text}" for text in facts["booked" if booked else "transfers"]
    ]
    lines += [f"there is no asset {code} here: create it again, as it was, and repeat this" for code in report.unknown]
    if not lines:
        lines = ["the cores and this database know the same"]
    elif not booked:
        lines.append("→ bursar transfer reconcile --book --actor YOU --reason WHY")
    else:
        lines.append("→ bursar audit --cores; when I5 holds, two people run `bursar transfer allow`")
    out.show(facts, lambda: "\n".join(shown(line) for line in lines))


@transfer.command(examples='bursar transfer rebind spot --actor anna --reason "disk of the core is lost, ticket 17"')
@click.argument("rail")
@operator_options
@on_runtime
async def rebind(runtime: Runtime, out: Output, rail: str, actor: str, reason: str) -> None:
    """Put the core that answers now behind a rail whose core is lost for good.

    What the old core held is not in the new one: the intake of transfers is paused with it, and two people resume it
    once core and ledger agree again (docs/how-to/restore.md).
    """
    store, person = runtime.bursar.store, check_actor(actor)
    if rail not in runtime.config.cores:
        raise Unusable(f"no core is configured for the rail {shown(rail)}")
    known, identity = await store.read.cores.get(rail), await store.read.cores.identity()
    async with client_of(runtime.config, runtime.ports, rail) as client:
        there = await client.describe()
    if there.outcome is not Outcome.SUCCESS:
        raise Unusable(f"core {rail} does not answer: {there.code}; start the one that is to be bound")
    if known is None or there.core == known.identity:
        raise Unusable(f"rail {rail} is bound to no other core than the one that answers")
    if there.ledger not in ("", identity):
        raise Unusable(f"core {there.core} is another ledger's ({there.ledger}); start one with an empty data folder")
    await runtime.transfers.pause_intake(person, f"core {rail} was replaced: {reason}", two_people=True)
    async with store.transaction() as tables:
        if not await tables.cores.rebind(rail, there.core, known.identity):
            raise Unusable(f"rail {rail} was bound to another core meanwhile; see `bursar transfer cores`")
    facts = {"rail": rail, "core": there.core, "was": known.identity, "rebound": True}
    out.show(facts, lambda: f"rail {rail} is bound to core {there.core}; no new transfers until two people allow them")
