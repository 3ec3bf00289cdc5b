"""What operators' commands share: settings, the database or all of the runtime, and words for what became of it.

They open the same database as `bursar serve` would with the same settings, and the same cores where one is called, and
start neither a worker nor a child core: what they make due is driven by the worker that runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.serve import config_option, configured, data_option
from bursar.cli.errors import Unusable
from bursar.cli.output import Output
from bursar.cli.state import Group, State

if TYPE_CHECKING:
    from bursar.config import Config
    from bursar.engine import Lift
    from bursar.flows.catalog import Catalog
    from bursar.runtime import Runtime

TIME = "time (UTC)"
actor_option = click.option("--actor", metavar="NAME", required=True, help="Who you are; it is written down.")
reason_option = click.option("--reason", metavar="TEXT", required=True, help="Why; it is written down.")


def operators_group(name: str, about: str) -> Group:
    """A group of commands that take the settings of `bursar serve`."""

    def settings(file: str | None, data: str | None) -> None:
        ctx = click.get_current_context()
        ctx.meta["config"] = partial(configured, ctx, file, data=data)

    group = click.group(name, cls=Group, help=about)(config_option(data_option(settings)))
    assert isinstance(group, Group)
    return group


def on_database(ctx: click.Context, work: Callable[[Catalog, Output], Awaitable[None]]) -> None:
    """For what is only looked at or written down: the database is enough, and no core's secret is asked for."""
    from bursar.cli.place import open_database
    from bursar.flows.catalog import Catalog

    state = ctx.ensure_object(State)
    config: Config | None = None if state.database_given else ctx.meta["config"]()
    url, options = (state.database, None) if config is None else (config.database_url, config.database_options)
    out = Output(as_json=state.json)

    async def body() -> None:
        async with open_database(url, options=options) as b:
            await work(Catalog.on(b.ledger), out)

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


def on_cores(ctx: click.Context, work: Callable[[Catalog, Output], Awaitable[None]]) -> None:
    """All flows, with the cores that transfers call."""
    from bursar.flows.catalog import Catalog

    async def body(runtime: Runtime, out: Output) -> None:
        await work(Catalog.beside(runtime.transfers), out)

    on_runtime(ctx, body)


def show_lift(out: Output, lift: Lift, what: str, done: str, *, key: str, run: str, off: str = "paused") -> None:
    """What became of the wish to lift a switch; `run` is the command that a second person needs."""
    words = {
        "lifted": f"{what} {done}",
        "proposed": f"{what}: proposed by you; two people are needed. Another person must run: {run}",
        "not paused": f"{what} was not {off}",
    }
    facts: dict[str, Any] = {key: lift == "lifted", "proposed": lift == "proposed"}
    out.show(facts, lambda: words[lift])
