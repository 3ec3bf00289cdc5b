"""What operators' commands share: settings, the database or all of the runtime, and words for what became of it.

They open the same database as `bursar serve` would with the same settings, and the same cores where one is called, and
start neither a worker nor a child core: what they make due is driven by the worker that runs.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Concatenate

import click

from bursar.cli.errors import Unusable
from bursar.cli.output import Output
from bursar.cli.place import check_place, open_database, quiet_pool
from bursar.cli.state import Group, P, configured, opening, state
from bursar.cli.types import settings_options
from bursar.config import Config
from bursar.engine import Lift
from bursar.flows.catalog import Catalog
from bursar.ports import SystemPorts
from bursar.runtime import Runtime, client_of, opened

TIME = "time (UTC)"


def operators_group(name: str, about: str) -> Group:
    """A group of commands that take the settings of `bursar serve`."""

    def settings(file: str | None, data: str | None) -> None:
        click.get_current_context().meta["config"] = partial(configured, file, data=data)

    group = click.group(name, cls=Group, help=about)(settings_options(settings))
    assert isinstance(group, Group)
    return group


@asynccontextmanager
async def opened_catalog(ctx: click.Context) -> AsyncIterator[Catalog]:
    """All flows on the database alone, for what is only looked at or written down: no core's secret is asked for."""
    config: Config | None = None if state().database_given else ctx.meta["config"]()
    async with open_database(config or state().database) as b:
        yield Catalog.on(b.ledger)


@asynccontextmanager
async def opened_runtime(ctx: click.Context) -> AsyncIterator[Runtime]:
    """Everything, for what calls a core."""
    config: Config = ctx.meta["config"]()
    ports = SystemPorts()
    quiet_pool()
    await check_place(config.database_url)
    for kind in config.cores:
        client_of(config, ports, kind)  # refuses a missing secret, before a folder is made
    async with opened(config, ports, "operator") as runtime:
        try:
            yield runtime
        except ConnectionError as error:
            raise Unusable(f"a core can't be reached: {error}; nothing is lost, see that it runs") from None


@asynccontextmanager
async def _opened_catalog_with(
    ctx: click.Context, asks_cores: Callable[[dict[str, Any]], bool]
) -> AsyncIterator[Catalog]:
    if asks_cores(ctx.params):
        async with opened_runtime(ctx) as runtime:
            yield Catalog.beside(runtime.transfers, runtime.payouts, runtime.withdrawals, runtime.arrivals)
    else:
        async with opened_catalog(ctx) as catalog:
            yield catalog


on_runtime = opening(opened_runtime)
on_catalog = opening(opened_catalog)


def on_catalog_with_cores(
    asks_cores: Callable[[dict[str, Any]], bool],
) -> Callable[[Callable[Concatenate[Catalog, Output, P], Awaitable[int | None]]], Callable[P, int | None]]:
    """As `on_catalog`, and with the cores where the command's parameters say that one is called."""
    return opening(partial(_opened_catalog_with, asks_cores=asks_cores))


def show_lift(out: Output, lift: Lift, what: str, done: str, *, key: str, run: str, off: str = "paused") -> None:
    """What became of a request to lift a switch; `run` is the command that a second person needs."""
    words = {
        "lifted": f"{what} {done}",
        "proposed": f"{what}: proposed by you; two people are needed. Another person must run: {run}",
        "not paused": f"{what} was not {off}",
    }
    facts: dict[str, Any] = {key: lift == "lifted", "proposed": lift == "proposed"}
    out.show(facts, lambda: words[lift])
