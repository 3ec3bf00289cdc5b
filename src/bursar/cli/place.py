"""Where the database is: its address, whether anything is there, and opening it; folders and the limit of files.

Only what sets things up may make a new database. For everything else a missing file, an empty one, or a PostgreSQL
database without our schema is a mistyped address: an audit of it would find nothing broken, and be believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import resource
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from bursar.cli.errors import Unusable
from bursar.cli.output import shown
from bursar.config import Config, options_of
from bursar.instance import Bursar
from bursar.model.errors import DatabaseUnavailable
from bursar.ports import SystemPorts

OWNER_ALONE = 0o700  # secrets and money are kept there
ALL_USERS = 0o777  # as far as the umask allows
CLOSE_S = 1.0  # for the server to take note that we go
ASK_AGAIN_S = 1.0  # between two tries to reach a database that is away

T = TypeVar("T")


@contextlib.asynccontextmanager
async def open_database(at: str | Config, *, may_create: bool = False) -> AsyncIterator[Bursar]:
    """The database of a configuration, or behind an address, open; it has to be set up already, unless it may be made.
    Used as the configuration says, or else the environment."""
    url, options = (at, options_of(os.environ)) if isinstance(at, str) else (at.database_url, at.database_options)
    await check_place(url, may_create=may_create)
    quiet_pool()
    async with Bursar(url, options=options) as b:
        yield b


async def check_place(url: str, *, may_create: bool = False) -> None:
    """DatabaseUnavailable if nothing can be there, or if nothing is and it may not be made. Writes nothing."""
    path = sqlite_path(url)
    if path is not None:
        _check_file(url, path, may_create=may_create)
        if may_create or not _is_empty(path):
            return
        why = f"{path} is empty"
    elif may_create or not url.startswith(("postgresql://", "postgres://")):
        return  # the store says what is wrong with an address
    else:
        from bursar.store.postgres.schema import version_of

        if await on_postgres(url, version_of):
            return
        why = "nothing of ours is in it"
    raise DatabaseUnavailable(f"{why}; is the address right? A new one is set up by `bursar migrate`")


def _check_file(url: str, path: str, *, may_create: bool) -> None:
    try:
        if Path(path).is_dir():
            raise DatabaseUnavailable(f"{path} is a folder; name a file in it")
        if not may_create and not Path(path).exists():
            raise DatabaseUnavailable(f"there is no file {path}; make it with `bursar --database {url} migrate`")
    except OSError as error:
        raise DatabaseUnavailable(f"{path} can't be reached: {error.strerror}; see who may use its folder") from error


def _is_empty(path: str) -> bool:
    """Whether a file has nothing in it."""
    try:
        with contextlib.closing(SystemPorts().sqlite(path, read_only=True)) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        return False  # the store says what is wrong with it
    return not version and not tables


def sqlite_path(url: str) -> str | None:
    """The file of a SQLite address, as the store reads it; None for other addresses."""
    if not url.startswith("sqlite:///"):
        return None
    return url.removeprefix("sqlite:///") or None


async def on_postgres(url: str, work: Callable[[Any], Awaitable[T]]) -> T:
    """Do something on a bare connection, where the store would refuse to open."""
    from bursar.store.batch import Unreachable
    from bursar.store.postgres.connecting import SETTINGS, Connector
    from bursar.store.postgres.errors import CONNECTION_ERRORS, explain

    if not url.startswith(("postgresql://", "postgres://")):
        async with open_database(url):  # says what is wrong with the address
            raise DatabaseUnavailable(f"{url} is not PostgreSQL")
    try:
        connection = await Connector(SystemPorts(), url, options_of(os.environ)).connect(SETTINGS, limited=False)
        try:
            return await work(connection)
        finally:
            await connection.close(timeout=CLOSE_S)
    except (Unreachable, TimeoutError, *CONNECTION_ERRORS) as error:
        raise explain(error) from error


def make_folder(folder: str | Path, option: str, mode: int = OWNER_ALONE) -> None:
    """Make a folder that is about to be written to, if need be; Unusable, before any work, if that can't be."""
    try:
        Path(folder).mkdir(mode, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise Unusable(f"can't write to the folder {folder}: {error.strerror}; name another with {option}") from error


async def until_back(b: Bursar, away: DatabaseUnavailable) -> None:
    """Wait until a database that has gone away answers again; say so once, and once that it is back."""
    click.echo(f"{shown(str(away))}; it is asked again every {ASK_AGAIN_S:g} s", err=True)
    while True:
        await asyncio.sleep(ASK_AGAIN_S)
        with contextlib.suppress(DatabaseUnavailable):
            await b.ledger.assets()
            break
    click.echo("the database is back", err=True)


def raise_file_limit(wanted: int) -> int:
    """Ask for so many open files; how many of them this process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # a system with yet another limit: then it stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return wanted if soft == resource.RLIM_INFINITY else min(soft, wanted)


def quiet_pool() -> None:
    """It tells with a whole traceback, again and again, that the database is away, which we say in one line."""
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
