"""`bursar flow`: what operators do to records of any flow, by the flow's name and the record's id.

What is about transfers alone (their cores, their intake) is `bursar transfer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
import msgspec

from bursar.cli.operating import TIME, on_catalog, on_catalog_with_cores, operators_group, show_lift
from bursar.cli.output import Drawing, Output, plain, stack, table, time_text
from bursar.cli.types import operator_options, together
from bursar.engine import Operators
from bursar.engine.flow import flow_of
from bursar.engine.moves import SIGNAL
from bursar.engine.operators import FORCE_ASKED, TELL_ASKED
from bursar.engine.pauses import ALL_SIGNING, HALT
from bursar.flows.catalog import Catalog, entries_of
from bursar.model.machine import Kind
from bursar.model.records import Alert, Record, Signal, Transition
from bursar.model.views import EnvelopeView, moment

ALERTS_MAX = 100_000  # open ones, among which those of one record are looked for
TRANSFERS = "transfers"

flow = operators_group(
    "flow",
    "Records of all flows (transfers, payouts, deposits, …): list, show, pause, resume, halt, retry, force, signal.",
)
record_arguments = together(click.argument("name", metavar="FLOW"), click.argument("id_", metavar="ID"))
switch_options = together(
    click.argument("name", metavar="[FLOW]", default=""),
    click.option("--rail", default="", help="A rail (funding, spot, …) instead of a flow."),
    operator_options,
)


@flow.command(
    "list",
    examples="""
    bursar flow list
    bursar flow list --all
    """,
)
@click.option("--all", "ended", is_flag=True, help="Count records that have ended, too. Reads every record.")
@on_catalog
async def list_(catalog: Catalog, out: Output, ended: bool) -> None:
    """Each flow: its records by state, since when the oldest is there, and whether it is paused or halted."""
    read, flows = catalog.ledger.store.read, catalog.engine.flows
    machines = [one.machine for one in flows.values()]
    if ended:
        counts = await read.records.counts()
    else:
        waiting = [(m.name, state.name) for m in machines for state in m.states if state.kind is Kind.WAIT]
        counts = await read.records.open_counts(waiting)
    terminal = {(m.name, state.name) for m in machines for state in m.states if state.kind is Kind.TERMINAL}
    switched = {(pause.kind, pause.name): pause for pause in await read.pauses.list()}
    found: list[dict[str, Any]] = []
    for name in sorted({*flows, *(name for name, _ in counts)}):
        states = {state: counted for (of, state), counted in sorted(counts.items()) if of == name}
        since = [since_us for state, (_, since_us) in states.items() if (name, state) not in terminal]
        found.append(
            {
                "flow": name,
                "known": name in flows,
                "paused": switched.get(("flow", name)),
                "halted": switched.get(ALL_SIGNING) or switched.get((f"{HALT} flow", name)),
                "oldest_open": moment(min(since)) if since else None,
                "states": {state: {"records": n, "oldest": moment(us)} for state, (n, us) in states.items()},
            }
        )
    out.show(found, lambda: _flows_table(found))


def _flows_table(found: list[dict[str, Any]]) -> Drawing:
    rows: list[tuple[Any, ...]] = []
    for one in found:
        off = [f"{what} by {one[what].actor}: {one[what].reason}" for what in ("paused", "halted") if one[what]]
        note = "; ".join(off) or "no"
        note += "" if one["known"] else " (a flow of another program)"
        states = one["states"] or {"": {"records": 0, "oldest": None}}
        rows += [(one["flow"], state, fact["records"], fact["oldest"], note) for state, fact in states.items()]
    oldest = "oldest since (UTC)"
    headings = ("flow", "state", "records", oldest, "switched off")
    return table(*headings, rows=rows, right=("records",), whole=("flow", oldest))


@flow.command(
    examples="""
    bursar flow show sr-1734912345678901234
    bursar flow show deposits wire-17
    """
)
@click.argument("words", metavar="[FLOW] ID", nargs=-1, required=True)
@on_catalog
async def show(catalog: Catalog, out: Output, words: tuple[str, ...]) -> None:
    """One record: where it is, every transition with its evidence, signals, open alerts, and the ledger's entries.

    Without FLOW it is found by the prefix of the id: sr- for transfers, wd- for withdrawals, and so on.
    """
    if len(words) > 2:
        raise click.UsageError("name one record: [FLOW] ID")
    *named, id_ = words
    record = await catalog.engine.record(named[0] if named else _flow_of(catalog, id_), id_)
    read = catalog.ledger.store.read
    history = await read.records.history(record.number)
    alerts = [one for one in await read.alerts.open(limit=ALERTS_MAX) if one.record == record.number]
    entries = await entries_of(catalog.ledger, record, history)
    signals = list(await read.records.signals(record.number))
    facts = {"record": record, "history": list(history), "signals": signals, "alerts": alerts, "entries": entries}
    out.show(facts, lambda: stack(*_parts(record, history, signals, alerts, entries)))


def _parts(
    record: Record,
    history: Sequence[Transition],
    signals: Sequence[Signal],
    alerts: Sequence[Alert],
    entries: Sequence[EnvelopeView],
) -> list[Drawing]:
    fields = [(name, value) for name, value in plain(record).items() if value not in ("", None)]
    moves = [(time_text(moment(t.at_us)), t.source, t.event, t.target, t.attempt, t.actor, t.evidence) for t in history]
    headings = (TIME, "from", "event", "to", "attempt", "by", "evidence")
    parts: list[Drawing] = [
        table("field", "value", rows=fields, whole=("field",)),
        "",
        table(*headings, rows=moves, title="history", right=("attempt",), whole=(TIME,)),
    ]
    if signals:
        sent = [
            (moment(s.at_us), s.event, s.sender, s.actor, s.consumed or "in the inbox", s.evidence) for s in signals
        ]
        names = (TIME, "event", "sender's id", "by", "consumed by version", "evidence")
        parts += ["", table(*names, rows=sent, title="signals", whole=(TIME,))]
    rows = [(moment(a.raised_us), a.severity, a.reason, a.message) for a in alerts]
    heads = (TIME, "severity", "reason", "message")
    parts += ["", table(*heads, rows=rows, title="open alerts", whole=(TIME,), empty="no open alerts")]
    legs = [
        (entry.envelope, entry.at, leg.source, leg.target, str(leg.amount), leg.amount.asset)
        for entry in entries
        for leg in entry.movements
    ]
    columns, right = ("envelope", TIME, "from", "to", "amount", "asset"), ("envelope", "amount")
    parts += ["", table(*columns, rows=legs, title="ledger", right=right, whole=(TIME,), empty="no ledger entries")]
    return parts


def _flow_of(catalog: Catalog, id_: str) -> str:
    """The flow whose prefix an id has."""
    found = flow_of(id_, catalog.engine.flows.values())
    if found is None:
        raise click.UsageError(f"the id {id_!r} does not tell its flow; write bursar flow show FLOW ID")
    return found.name


@flow.command(examples='bursar flow retry transfers sr-1734912345678901234 --actor anna --reason "the core is back"')
@record_arguments
@operator_options
@on_catalog
async def retry(catalog: Catalog, out: Output, /, name: str, id_: str, **who: str) -> None:
    """Make a record's next call due now, whatever its back-off says."""
    _show_result(out, await Operators(catalog.engine).retry_now(name, id_, **who), "due now")


@flow.command(
    examples="""
    bursar flow force transfers sr-1734912345678901234 EXPLICIT_FAIL --actor anna --reason "ticket 17"
    bursar flow force transfers sr-1734912345678901234 EXPLICIT_FAIL --actor ben --reason "ticket 17"
    """
)
@record_arguments
@click.argument("event")
@operator_options
@on_catalog_with_cores(lambda given: given["name"] == TRANSFERS)  # no other flow's call can be cancelled at a core
async def force(catalog: Catalog, out: Output, /, name: str, id_: str, event: str, **who: str) -> None:
    """Say how a call ended whose answer is not known: SUCCESS or EXPLICIT_FAIL. Two people must say the same.

    EXPLICIT_FAIL goes to the rail first, which must promise that it never happened and never will; if it says that it
    did, that counts.
    """
    before = await catalog.engine.record(name, id_)
    record = await Operators(catalog.engine).force(name, id_, event, **who)
    await _show_said(catalog, out, before, record, FORCE_ASKED, event)


@flow.command(
    examples="""
    bursar flow signal sequence seq-1734912345678901234 RETRY --actor anna --reason "the account is open again"
    bursar flow signal deposits wire-17 REJECT --actor anna --reason "sent twice"
    """
)
@record_arguments
@click.argument("event")
@click.option("--sender", default="", help="An id of your own for this signal: sent again under it, nothing happens.")
@click.option(
    "--declared-dead", is_flag=True, help="Give money back although something was sent: two people say it is dead."
)
@operator_options
@on_catalog
async def signal(
    catalog: Catalog, out: Output, /, name: str, id_: str, event: str, sender: str, declared_dead: bool, **who: str
) -> None:
    """Send a record an event. Where the flow asks for two people, both must say the same.

    An event that gives money back is refused if anything was ever sent for the record, unless two people declare that
    dead; it then stays watched, and its arrival halts the flow.

    A record that waits for it moves. If the flow keeps such events, one that comes early stays in the record's inbox.
    """
    before, people = await catalog.engine.record(name, id_), Operators(catalog.engine)
    record = await people.signal(name, id_, event, sender=sender, declared_dead=declared_dead, **who)
    said = f"{event} --declared-dead" if declared_dead else event
    await _show_said(catalog, out, before, record, TELL_ASKED, event, said)


async def _show_said(
    catalog: Catalog, out: Output, before: Record, record: Record, asked: str, event: str, said: str = ""
) -> None:
    """What became of an operator's word: it decided, it waits for a second person, or the rail did not answer."""
    history = await catalog.ledger.store.read.records.history(before.number)
    new = [row for row in history if row.version > before.version]
    if any(row.source != row.target for row in new):
        _show_result(out, record, "decided")
    elif any(row.event == asked for row in new):
        first = _first_asker(history, asked, event)
        verb = click.get_current_context().info_name
        run = f"bursar flow {verb} {record.flow} {record.id} {said or event} --actor OTHER --reason WHY"
        what = f"asked for by {first}; another person must run: {run}"
        _show_result(out, record, what, asked_by=first, run=run)
    elif any(row.event == f"{SIGNAL} {event}" for row in new):
        _show_result(out, record, f"{event} stays in its inbox")
    elif asked == TELL_ASKED:
        _show_result(out, record, "sent before: nothing was changed")
    else:
        why = f" ({record.error})" if record.error else ""
        what = f"not decided: its rail did not say that it never happened{why}; it is asked again, repeat this then"
        _show_result(out, record, what)


def _first_asker(history: Sequence[Transition], asked: str, event: str) -> str:
    """Who asked first for this event, since the record came into its state."""
    first = ""
    for row in reversed(history):
        if row.source != row.target:
            break
        if row.event == asked and msgspec.json.decode(row.evidence).get("event") == event:
            first = row.actor
    return first


def _show_result(out: Output, record: Record, what: str, **more: str) -> None:
    facts = {"flow": record.flow, "id": record.id, "state": record.state, "what": what, **more}
    out.show(facts, lambda: f"{record.id} is {record.state}: {what}")


def _names_a_rail(given: dict[str, Any]) -> bool:
    """Whether a rail is to be paused or resumed (their names are in the settings of cores), and not a flow."""
    if bool(given["name"]) == bool(given["rail"]):
        raise click.UsageError("name a flow, or a rail with --rail")
    return bool(given["rail"])


def _switched(name: str, rail: str) -> tuple[str, str, str]:
    """What a pause or a halt is about (kind and name, or nothing for all), and that in words."""
    kind = "flow" if name else "rail" if rail else ""
    return kind, name or rail, f"{kind} {name or rail}" if kind else "all signing"


def _again(verb: str, name: str, rail: str) -> str:
    """What a second person runs."""
    words = ("bursar flow", verb, f"--rail {rail}" if rail else name, "--actor OTHER --reason WHY")
    return " ".join(filter(None, words))


@flow.command(
    examples="""
    bursar flow pause transfers --actor anna --reason "ticket 17"
    bursar flow pause --rail spot --actor anna --reason "the core moves"
    """
)
@switch_options
@on_catalog_with_cores(_names_a_rail)
async def pause(catalog: Catalog, out: Output, /, name: str, rail: str, **who: str) -> None:
    """Send nothing new for a flow, or at a rail, on any host.

    A call that was made before and has no definite answer is made again, so that its outcome is learned; confirmations
    and refunds go on. A flow: new records are written down and wait. A rail: no new transfers from or to it.
    """
    kind, what, words = _switched(name, rail)
    was_on = await Operators(catalog.engine).pause(kind, what, **who)
    out.show({"paused": was_on}, lambda: f"{words} is paused" if was_on else f"{words} was paused before")


@flow.command(
    examples="""
    bursar flow resume transfers --actor anna --reason "ticket 17 is mended"
    bursar flow resume --rail spot --actor anna --reason "the core is back"
    """
)
@switch_options
@on_catalog_with_cores(_names_a_rail)
async def resume(catalog: Catalog, out: Output, /, name: str, rail: str, **who: str) -> None:
    """Send again. What waited goes on within half a minute; `retry` makes one record due at once."""
    kind, what, words = _switched(name, rail)
    lift = await Operators(catalog.engine).resume(kind, what, **who)
    show_lift(out, lift, words, "is resumed", key="resumed", run=_again("resume", name, rail))


def _halts_a_rail(given: dict[str, Any]) -> bool:
    """As `_names_a_rail`; naming neither is about all that signs."""
    return bool(given["name"] or given["rail"]) and _names_a_rail(given)


@flow.command(
    examples="""
    bursar flow halt --actor anna --reason "a key is stolen"
    bursar flow halt payouts --actor anna --reason "ticket 17"
    """
)
@switch_options
@on_catalog_with_cores(_halts_a_rail)
async def halt(catalog: Catalog, out: Output, /, name: str, rail: str, **who: str) -> None:
    """Sign nothing for a flow, or at a rail, on any host; without a name, nothing at all.

    No call that signs begins after this command has returned: no send, no refund. Calls that do not sign go on; `pause`
    stops what they would send. Two people lift it.
    """
    kind, what, words = _switched(name, rail)
    was_on = await Operators(catalog.engine).halt(kind, what, **who)
    out.show({"halted": was_on}, lambda: f"{words} is halted" if was_on else f"{words} was halted before")


@flow.command(
    examples="""
    bursar flow unhalt --actor anna --reason "the key is replaced"
    bursar flow unhalt --actor ben --reason "so it is"
    """
)
@switch_options
@on_catalog
async def unhalt(catalog: Catalog, out: Output, /, name: str, rail: str, **who: str) -> None:
    """Sign again. The first person proposes it, another one agrees."""
    kind, what, words = _switched(name, rail)
    lift = await Operators(catalog.engine).unhalt(kind, what, **who)
    show_lift(out, lift, words, "is unhalted", key="unhalted", off="halted", run=_again("unhalt", name, rail))


@flow.command(
    examples="""
    bursar flow pauses
    bursar flow pauses --history
    """
)
@click.option("--history", is_flag=True, help="What was paused, halted and lifted, by whom and why; newest first.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@on_catalog
async def pauses(catalog: Catalog, out: Output, history: bool, limit: int) -> None:
    """What is paused or halted, by whom and why; whether two people must lift it, and who has proposed that."""
    read = catalog.ledger.store.read
    if history:
        did = await read.actions.list(limit=limit)
        lines = [(moment(a.at_us), a.action, a.kind, a.name, a.actor, a.proposed_by, a.reason) for a in did]
        headings = (TIME, "action", "kind", "name", "by", "proposed by", "reason")
        out.show(did, lambda: table(*headings, rows=lines, whole=(TIME,), empty="nothing was paused or halted yet"))
        return
    found = await read.pauses.list()
    rows = [
        (moment(p.at_us), p.kind, p.name, p.actor, p.reason, "two" if p.two_people else "one", p.proposed_by)
        for p in found
    ]
    names = (TIME, "kind", "name", "by", "reason", "people to lift", "proposed by")
    out.show(found, lambda: table(*names, rows=rows, whole=(TIME,), empty="nothing is paused or halted"))
