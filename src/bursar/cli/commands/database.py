"""The database itself: set it up, mend it after a crash or a restore, make its disposable tables anew."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, closing
from functools import partial
from pathlib import Path
from typing import Any

import click

from bursar.cli.children import children
from bursar.cli.commands.serve import alone
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, shown
from bursar.cli.place import check_place, on_postgres, open_database, sqlite_path
from bursar.cli.state import Command, configured, on_database, output, state
from bursar.cli.types import settings_options
from bursar.config import CHILD, Config
from bursar.engine import set_pause
from bursar.flows.transfers import behind
from bursar.flows.transfers.flow import rail_name
from bursar.flows.transfers.request import NEW_TRANSFERS
from bursar.instance import Bursar
from bursar.model.errors import DatabaseOlder
from bursar.ports import Ports, SystemPorts
from bursar.runtime import asked_cores
from bursar.stopping import Stopping
from bursar.store.sqlite import calls
from bursar.store.sqlite import store as sqlite

NOT_ASKED = (
    "the cores were not asked what they know: give --config or --data, as `bursar serve` has it, and repeat this"
)


@click.command(
    cls=Command,
    examples="""
    bursar --database postgresql://bursar@db.internal/money migrate
    bursar --database postgresql://dba@db.internal/money migrate --sql > steps.sql
    """,
)
@click.option(
    "--sql",
    is_flag=True,
    help="Print the statements for a DBA (`psql -1`) instead, and touch nothing: what the PostgreSQL database named by "
    "--database lacks; or all of them, if it names none.",
)
def migrate(sql: bool) -> None:
    """Set a database up, or bring it to this version. Doing it twice is doing it once."""
    if sql:
        click.echo(asyncio.run(_script(state().database)), nl=False)
        return
    version, applied = asyncio.run(_migrate(state().database))
    names = [f"{number:04d}_{name}" for number, name in applied]
    done = f"applied {', '.join(names)}" if names else "nothing to do"
    output().show({"version": version, "applied": names}, lambda: f"{done}; the schema is at version {version}")


async def _script(url: str) -> str:
    from bursar.store.postgres.schema import script, version_of

    return script(0 if sqlite_path(url) is not None else await on_postgres(url, version_of))


async def _migrate(url: str) -> tuple[int, list[tuple[int, str]]]:
    """The version it is at now, and what was applied."""
    await check_place(url, may_create=True)  # refuses what can't be a database, before anything is touched
    if (path := sqlite_path(url)) is not None:
        version, migrations, applied = sqlite.VERSION, sqlite.MIGRATIONS, _migrate_sqlite(path)
    else:
        from bursar.store.postgres import schema

        applied = await on_postgres(url, partial(schema.check_version, migrate=True))
        version, migrations = schema.VERSION, schema.MIGRATIONS
    async with open_database(url):  # it opens, so it is whole
        pass
    return version, [(number, name) for number, name, _ in migrations if number in applied]


def _migrate_sqlite(path: str) -> list[int]:
    try:
        with closing(SystemPorts().sqlite(path, read_only=False)) as connection:
            connection.execute(f"PRAGMA busy_timeout = {calls.BUSY_MS}")
            connection.execute(f"PRAGMA page_size = {sqlite.PAGE}")  # of a new file
            try:
                return sqlite.version(connection, migrate=False)  # refuses a file that belongs to something else
            except DatabaseOlder:
                return sqlite.version(connection, migrate=True)
    except sqlite3.Error as error:
        raise calls.explain(error) from error


@click.command(
    cls=Command,
    examples="""
    bursar --database postgresql://bursar@db.internal/money recover --restored
    """,
)
@click.option("--restored", is_flag=True, help="The database was restored from a backup or a dump.")
@settings_options
def recover(restored: bool, file: str | None, data: str | None) -> None:
    """Go on after a restore. After a crash there is nothing to do: commits are transactions.

    After the database was restored from a backup or a dump, run it once with --restored: events written from then on
    come after every cursor that a reader may have kept, which would skip them otherwise. If the ledger has trading
    cores, new transfers are paused until two people allow them, because the cores may know what this database has
    forgotten; with --config or --data the cores are asked, and what they know is shown. Child cores are started for
    that, if no `bursar serve` runs them.
    """
    if not restored:
        raise click.UsageError("a crash leaves nothing half done; after a restore from a backup, say --restored")
    config = configured(file, data=data) if file or data else None
    database = state().database if config is None or state().database_given else config.database_url
    epoch = asyncio.run(_raise_epoch(database))
    paused, ahead = asyncio.run(_pause_restored(database, config))
    lines = [f"events written from now on belong to epoch {epoch}", *ahead]
    if paused:
        lines.append("new transfers are paused; docs/how-to/restore.md says how to go on: bursar transfer reconcile")
    facts = {"epoch": epoch, "paused": paused, "cores": ahead}
    output().show(facts, lambda: "\n".join(shown(line) for line in lines))


async def _pause_restored(url: str, config: Config | None) -> tuple[bool, list[str]]:
    """Pause the intake of transfers, if there are cores; whether it is, and what the cores say that can be asked."""
    async with open_database(url) as b:
        if not await b.store.read.cores.identity():
            return False, []
        await set_pause(b.store, *NEW_TRANSFERS, actor="recover", reason="the database was restored", two_people=True)
        return True, [NOT_ASKED] if config is None else await _ahead(b, config)


async def _ahead(b: Bursar, config: Config) -> list[str]:
    lines, ports = [], SystemPorts()
    async with AsyncExitStack() as stack:
        try:
            await stack.enter_async_context(_children(config, ports))
        except Unusable as error:
            lines.append(str(error))
        for kind, client in (await stack.enter_async_context(asked_cores(config, b.store, ports))).items():
            found = await behind.look(b.store, rail := rail_name(kind), client)
            lines += [found.note] if found.note else found.texts() or [f"core {rail} knows nothing that is not here"]
    return lines


@asynccontextmanager
async def _children(config: Config, ports: Ports) -> AsyncIterator[None]:
    """The child cores that there are, running: they stop with their `bursar serve`, and know what was forgotten."""
    kinds = _there(config)
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(config, ports, kinds))
        except Unusable:
            kinds = []  # a `bursar serve` has them
        async with children(config, ports, kinds, Stopping(ports, config.shutdown_ms / 1000)):
            yield


def _there(config: Config) -> list[str]:
    """The child cores that have a data folder: none is made, which would be another core."""
    return [kind for kind in config.cores if config.core(kind) == CHILD and Path(config.data, kind).is_dir()]


async def _raise_epoch(url: str) -> int:
    from bursar.store.postgres.arrays import SQL

    async def work(connection: Any) -> int:
        return int(await connection.fetchval(SQL["raise_epoch"]))

    if sqlite_path(url) is None:
        return await on_postgres(url, work)  # the store refuses to open what was restored
    async with open_database(url) as b, b.store.transaction() as tables:
        return await tables.events.raise_epoch()


@click.command(cls=Command, examples="bursar rebuild && bursar audit")
@on_database()
async def rebuild(b: Bursar, out: Output) -> None:
    """Make the disposable tables (live postings, kept balances) anew from the value tables, in one transaction."""
    with out.bar("rebuilding"):
        live = await b.ledger.rebuild()
    out.show({"live_postings": live}, lambda: f"rebuilt: {live} postings are live")
