"""`bursar transfer`: what operators do about transfers, beside a running `bursar serve` or without one.

It opens the same database as `bursar serve` would with the same settings, and the same cores where one is called, and
starts neither a worker nor a child core: what it makes due is driven by whoever runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.serve import config_option, configured, data_option
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, shown, table, time_text
from bursar.cli.state import Group, State
from bursar.model.views import moment

if TYPE_CHECKING:
    from bursar.config import Config
    from bursar.engine import Lift
    from bursar.flows.transfers import Transfers
    from bursar.model.records import Record
    from bursar.runtime import Runtime

FLOW = "transfers"
TIME = "time (UTC)"
actor_option = click.option("--actor", metavar="NAME", required=True, help="Who you are; it is written down.")
reason_option = click.option("--reason", metavar="TEXT", required=True, help="Why; it is written down.")


@click.group(cls=Group)
@config_option
@data_option
@click.pass_context
def transfer(ctx: click.Context, file: str | None, data: str | None) -> None:
    """Transfers between funding and trading accounts: create, list, show, query, retry, force; alerts; pauses."""
    ctx.meta["config"] = partial(configured, ctx, file, data=data)


def _on_database(ctx: click.Context, work: Callable[[Transfers, Output], Awaitable[None]]) -> None:
    """For what is only looked at or written down: the database is enough, and no core's secret is asked for."""
    from bursar.cli.place import open_database
    from bursar.flows.transfers import Transfers

    state = ctx.ensure_object(State)
    config: Config | None = None if state.database_given else ctx.meta["config"]()
    url, options = (state.database, None) if config is None else (config.database_url, config.database_options)
    out = Output(as_json=state.json)

    async def body() -> None:
        async with open_database(url, options=options) as b:
            await work(Transfers(b.ledger, {}), out)

    asyncio.run(body())


def on_runtime(ctx: click.Context, work: Callable[[Runtime, Output], Awaitable[None]]) -> None:
    """For what calls a core."""
    from bursar.cli.place import check_place, quiet_pool
    from bursar.ports import SystemPorts
    from bursar.runtime import client_of, opened

    config: Config = ctx.meta["config"]()
    out = Output(as_json=ctx.ensure_object(State).json)
    ports = SystemPorts()
    quiet_pool()

    async def body() -> None:
        await check_place(config.database_url)
        for kind in config.cores:
            client_of(config, ports, kind)  # refuses a missing secret, before a folder is made
        async with opened(config, ports, "operator") as runtime:
            try:
                await work(runtime, out)
            except ConnectionError as error:
                raise Unusable(f"a core can't be reached: {error}; nothing is lost, see that it runs") from None

    asyncio.run(body())


@transfer.command(examples="bursar transfer create --user 1001 --from FUNDING --to SPOT USDT 10.00 --order my-1")
@click.option("--user", type=click.IntRange(1), required=True, help="Whose money.")
@click.option("--from", "source", required=True, help="FUNDING, SPOT, FUTURE or MARGIN.")
@click.option("--to", "target", required=True, help="As --from.")
@click.option("--order", default="", help="client_order_id: repeating it repeats nothing.")
@click.argument("asset")
@click.argument("amount")
@click.pass_context
def create(ctx: click.Context, user: int, source: str, target: str, order: str, asset: str, amount: str) -> None:
    """Move a user's money, with every check that the API makes."""
    from bursar.flows.transfers import Request
    from bursar.runtime import first_look

    async def work(runtime: Runtime, out: Output) -> None:
        await first_look(runtime)
        wish = Request(user=user, source=source, target=target, asset=asset, amount=amount, client_order_id=order)
        view = await runtime.transfers.create(wish, deadline_s=runtime.config.deadline_ms / 1000)
        text = f"{view.req_id} is {view.fsm_state} {shown(view.error)}".rstrip()
        out.show(view, lambda: text)

    on_runtime(ctx, work)


@transfer.command("list", examples="bursar transfer list --user 1001 --state TARGET_PENDING")
@click.option("--user", type=click.IntRange(1), help="One user's only.")
@click.option("--state", default="", help="In this exact state only, such as TARGET_PENDING.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@click.pass_context
def list_(ctx: click.Context, user: int | None, state: str, limit: int) -> None:
    """Transfers, newest first."""

    async def work(transfers: Transfers, out: Output) -> None:
        views = await transfers.list(user, state=state, limit=limit)
        rows = [
            (v.req_id, v.user, v.source.value, v.target.value, v.amount, v.asset, v.fsm_state, v.error) for v in views
        ]
        headings = ("transfer", "user", "from", "to", "amount", "asset", "state", "error")
        out.show(views, lambda: table(*headings, rows=rows, right=("amount",), whole=("transfer", "user")))

    _on_database(ctx, work)


@transfer.command(examples="bursar transfer show sr-1734912345678901234")
@click.argument("req_id")
@click.pass_context
def show(ctx: click.Context, req_id: str) -> None:
    """One transfer with its history: every state, call and answer."""

    async def work(transfers: Transfers, out: Output) -> None:
        view = await transfers.get(None, req_id)
        history = await transfers.ledger.store.read.records.history(view.transfer_id)
        rows = [
            (time_text(moment(t.at_us)), t.source, t.event, t.target, t.attempt, t.actor, t.evidence) for t in history
        ]
        headings = (TIME, "from", "event", "to", "attempt", "by", "evidence")
        out.show(
            {"transfer": view, "history": list(history)},
            lambda: table(*headings, rows=rows, right=("attempt",), whole=(TIME,)),
        )

    _on_database(ctx, work)


@transfer.command(examples="bursar transfer query sr-1734912345678901234")
@click.argument("req_id")
@click.pass_context
def query(ctx: click.Context, req_id: str) -> None:
    """Ask both ends what they have on record of a transfer. Nothing is changed; what is missing may still happen."""

    async def work(runtime: Runtime, out: Output) -> None:
        transfers = runtime.transfers
        view = await transfers.get(None, req_id)
        record = await transfers.engine.get(FLOW, view.req_id)
        assert record is not None  # it was there a moment ago, and records stay
        item, found = transfers.flow.item(record), []
        for kind, op in ((view.source, "withdraw"), (view.target, "deposit"), (view.source, "refund")):
            said = await transfers.rails[kind].query(item, op)
            found.append({"end": kind.value, "op": op, "outcome": said.outcome.value, "code": said.code})
        rows = [tuple(one.values()) for one in found]
        out.show(found, lambda: table("end", "operation", "outcome", "code", rows=rows))

    on_runtime(ctx, work)


@transfer.command(examples='bursar transfer retry sr-1734912345678901234 --actor anna --reason "the core is back"')
@click.argument("req_id")
@actor_option
@reason_option
@click.pass_context
def retry(ctx: click.Context, req_id: str, actor: str, reason: str) -> None:
    """Make a transfer due now, whatever its back-off says."""

    async def work(transfers: Transfers, out: Output) -> None:
        from bursar.engine import Operators

        record = await Operators(transfers.engine).retry_now(FLOW, req_id, actor=actor, reason=reason)
        _told(out, record, "due now")

    _on_database(ctx, work)


@transfer.command(
    examples="""
    bursar transfer force sr-1734912345678901234 EXPLICIT_FAIL --actor anna --reason "ticket 17"
    bursar transfer force sr-1734912345678901234 EXPLICIT_FAIL --actor ben --reason "ticket 17"
    """
)
@click.argument("req_id")
@click.argument("event", type=click.Choice(["SUCCESS", "EXPLICIT_FAIL"]))
@actor_option
@reason_option
@click.pass_context
def force(ctx: click.Context, req_id: str, event: str, actor: str, reason: str) -> None:
    """Say how a call ended whose answer nobody knows. Two people must say the same.

    EXPLICIT_FAIL goes to the rail first, which must promise that it never happened and never will; if it says that it
    did, that counts.
    """

    async def work(runtime: Runtime, out: Output) -> None:
        from bursar.engine import Operators
        from bursar.engine.operators import FORCE_ASKED
        from bursar.model.actors import check_actor

        before = await runtime.transfers.get(None, req_id)
        history = runtime.bursar.store.read.records.history
        known = len(await history(before.transfer_id))
        record = await Operators(runtime.transfers.engine).force(FLOW, req_id, event, actor=actor, reason=reason)
        if record.state != before.fsm_state:
            what = "decided"
        elif any(
            t.event == FORCE_ASKED and t.actor == check_actor(actor)
            for t in (await history(before.transfer_id))[known:]
        ):
            what = "asked for; another person must say the same"
        else:
            what = "not decided: the core did not answer, and will be asked again; repeat this when it is back"
        _told(out, record, what)

    on_runtime(ctx, work)


@transfer.command(examples="bursar transfer alerts")
@click.pass_context
def alerts(ctx: click.Context) -> None:
    """What a person should look at, and nobody has acknowledged."""

    async def work(transfers: Transfers, out: Output) -> None:
        found = await transfers.ledger.store.read.alerts.open()
        rows = [(moment(a.raised_us), a.record or "", a.severity, a.reason, a.message) for a in found]
        headings = (TIME, "record", "severity", "reason", "message")
        out.show(found, lambda: table(*headings, rows=rows, right=("record",), whole=(TIME,)))

    _on_database(ctx, work)


@transfer.command(examples='bursar transfer acknowledge 17 "target pending" --actor anna')
@click.argument("record", type=int)
@click.argument("reason")
@actor_option
@click.pass_context
def acknowledge(ctx: click.Context, record: int, reason: str, actor: str) -> None:
    """Say that an alert has been seen, by the record's number and the alert's reason."""

    async def work(transfers: Transfers, out: Output) -> None:
        from bursar.engine import Operators

        was_open = await Operators(transfers.engine).acknowledge(record, reason, actor=actor)
        words = "acknowledged" if was_open else "there is no such alert that is open"
        out.show({"acknowledged": was_open}, lambda: words)

    _on_database(ctx, work)


kind_argument = click.argument("kind", type=click.Choice(["flow", "rail"]))


@transfer.command(
    examples="""
    bursar transfer pause rail spot --actor anna --reason "the core moves"
    bursar transfer pause flow transfers --actor anna --reason "ticket 17"
    """
)
@kind_argument
@click.argument("name")
@actor_option
@reason_option
@click.pass_context
def pause(ctx: click.Context, kind: str, name: str, actor: str, reason: str) -> None:
    """Call nobody at a rail (funding, spot, …), or nobody at all for a flow, on any host.

    A rail: no new transfers from or to it; those under way wait where they would call it, but for refunds, which go on.
    A flow: nothing of it is called, refunds neither; new transfers are written down and wait.
    """

    async def work(runtime: Runtime, out: Output) -> None:
        from bursar.engine import Operators

        was_on = await Operators(runtime.transfers.engine).pause(kind, name, actor=actor, reason=reason)
        words = f"{kind} {name} is paused" if was_on else f"{kind} {name} was paused before"
        out.show({"paused": was_on}, lambda: words)

    on_runtime(ctx, work)


@transfer.command(examples='bursar transfer resume rail spot --actor anna --reason "the core is back"')
@kind_argument
@click.argument("name")
@actor_option
@reason_option
@click.pass_context
def resume(ctx: click.Context, kind: str, name: str, actor: str, reason: str) -> None:
    """Call them again. What waited goes on within half a minute; `retry` makes one of them due at once."""

    async def work(runtime: Runtime, out: Output) -> None:
        from bursar.engine import Operators

        lift = await Operators(runtime.transfers.engine).resume(kind, name, actor=actor, reason=reason)
        _lifted(out, lift, f"{kind} {name}", "is resumed", key="resumed")

    on_runtime(ctx, work)


@transfer.command(
    examples="""
    bursar transfer pauses
    bursar transfer pauses --history
    """
)
@click.option("--history", is_flag=True, help="What was paused and resumed, by whom and why; newest first.")
@click.option("--limit", type=click.IntRange(1, 1_000), default=50, show_default=True, help="How many at most.")
@click.pass_context
def pauses(ctx: click.Context, history: bool, limit: int) -> None:
    """What is switched off, by whom and why; whether two people must resume it, and who has proposed that."""

    async def work(transfers: Transfers, out: Output) -> None:
        read = transfers.ledger.store.read
        if history:
            did = await read.actions.list(limit=limit)
            lines = [(moment(a.at_us), a.action, a.kind, a.name, a.actor, a.proposed_by, a.reason) for a in did]
            headings = (TIME, "action", "kind", "name", "by", "proposed by", "reason")
            out.show(did, lambda: table(*headings, rows=lines, whole=(TIME,)))
            return
        found = await read.pauses.list()
        rows = [
            (moment(p.at_us), p.kind, p.name, p.actor, p.reason, "two" if p.two_people else "one", p.proposed_by)
            for p in found
        ]
        headings = (TIME, "kind", "name", "by", "reason", "people to resume", "proposed by")
        out.show(found, lambda: table(*headings, rows=rows, whole=(TIME,)))

    _on_database(ctx, work)


@transfer.command(examples='bursar transfer stop --actor anna --reason "ticket 17"')
@actor_option
@reason_option
@click.pass_context
def stop(ctx: click.Context, actor: str, reason: str) -> None:
    """Start no new transfers, on any host. Those under way go on, and so do refunds."""

    async def work(transfers: Transfers, out: Output) -> None:
        from bursar.model.actors import check_actor

        was_on = await transfers.pause_intake(check_actor(actor), reason)
        words = "no new transfers are started" if was_on else "none were started before either"
        out.show({"stopped": was_on}, lambda: words)

    _on_database(ctx, work)


@transfer.command(
    examples="""
    bursar transfer allow --actor anna --reason "ticket 17 is mended"
    bursar transfer allow --actor ben --reason "seen, and I5 holds"
    """
)
@actor_option
@reason_option
@click.pass_context
def allow(ctx: click.Context, actor: str, reason: str) -> None:
    """Start new transfers again, after `stop` or after the audit found something broken and it was mended.

    After broken conservation, or after a restore, two people are needed (the first one proposes, another one agrees),
    and every core must hold what the ledger says.
    """
    what = ("starting new transfers", "is allowed")
    needs_two: list[bool] = []

    async def alone(transfers: Transfers, out: Output) -> None:
        from bursar.flows.transfers.request import NEW_TRANSFERS

        pauses = await transfers.ledger.store.read.pauses.list()
        needs_two.append(any(pause.two_people for pause in pauses if (pause.kind, pause.name) == NEW_TRANSFERS))
        if not needs_two[0]:
            _lifted(out, await transfers.resume_intake(actor, reason), *what, key="allowed")

    async def compared(runtime: Runtime, out: Output) -> None:
        from bursar.flows.transfers.watch import resume_intake

        lift = await resume_intake(runtime.transfers, runtime.cores, actor=actor, reason=reason)
        _lifted(out, lift, *what, key="allowed")

    _on_database(ctx, alone)
    if needs_two[0]:
        on_runtime(ctx, compared)


def _lifted(out: Output, lift: Lift, what: str, done: str, *, key: str) -> None:
    words = {
        "lifted": f"{what} {done}",
        "proposed": f"{what}: proposed; two people are needed, another one must say the same",
        "not paused": f"{what} was not paused",
    }
    out.show({key: lift == "lifted", "proposed": lift == "proposed"}, lambda: words[lift])


def _told(out: Output, record: Record, what: str) -> None:
    fact: dict[str, Any] = {"req_id": record.id, "state": record.state, "what": what}
    out.show(fact, lambda: f"{record.id} is {record.state}: {what}")
