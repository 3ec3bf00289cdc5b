"""`bursar serve`, `worker`, `token` and `openapi`: the system as processes, and what one needs to try it out.

`serve` alone is everything: API, worker, and a core as a child, on SQLite in a data folder. With PostgreSQL and the
addresses of cores, the same command runs on as many hosts as one likes; `worker` is the same without the API.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from bursar import garbage
from bursar.cli.children import children
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, shown
from bursar.cli.place import make_folder, quiet_pool, raise_file_limit, sqlite_path
from bursar.cli.state import Command, configured, output
from bursar.cli.types import settings_options
from bursar.config import CHILD, Config
from bursar.ports import Ports, SystemPorts, exit_after, split_address
from bursar.runtime import make_secrets, running
from bursar.stopping import Stopping
from bursar.store.address import printable

BACKLOG = 2_048
HEALTH_CONNECTIONS_MAX = 64
LOCK = "serve.lock"
LOCK_SUFFIX = "-serve.lock"  # beside the database
DAY_S = 86_400
API_LIBRARIES = frozenset({"cryptography", "jwt", "litestar", "prometheus_client", "uvicorn"})


@contextlib.contextmanager
def _needs_api() -> Iterator[None]:
    """The API's libraries are an extra: say so, instead of naming a module."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in API_LIBRARIES:
            raise
        raise click.UsageError(f"{error.name} is missing: pip install 'bursar[api]'") from None


@click.command(
    cls=Command,
    examples="""
    bursar serve
    bursar serve --data /var/lib/bursar --listen 127.0.0.1:8080
    bursar --database postgresql://bursar@db/bursar serve --config /etc/bursar.toml
    """,
)
@settings_options
@click.option("--listen", metavar="HOST:PORT", help="Setting `listen`. Port 0: any that is free.")
def serve(file: str | None, data: str | None, listen: str | None) -> None:
    """Run the API and a worker, and the core too where none is named, until SIGTERM or SIGINT.

    Prints one line when it is ready. At the end it takes no more requests, finishes what is in progress or leaves it to
    the next worker, and exits with 0. Settings: docs/reference/configuration.md.
    """
    config = configured(file, data=data, listen=listen)
    _log_to_stderr(config.log_level)
    with _needs_api():
        asyncio.run(_serve(config, output()))


@click.command(cls=Command, examples="bursar --database postgresql://bursar@db/bursar worker --config /etc/bursar.toml")
@settings_options
def worker(file: str | None, data: str | None) -> None:
    """Drive transfers that are due, beside any number of `bursar serve`, until SIGTERM or SIGINT."""
    config = configured(file, data=data)
    _log_to_stderr(config.log_level)
    asyncio.run(_work(config, output()))


@click.command(
    cls=Command,
    examples="""
    bursar token --user 1001
    bursar token --subject anna --role operator --seconds 600
    """,
)
@settings_options
@click.option("--user", metavar="NUMBER", help="A user's token: subject NUMBER, role user.")
@click.option("--subject", metavar="NAME", help="Whose token, where it is no user's.")
@click.option("--role", "roles", multiple=True, help="user, viewer, operator, approver or admin; may be repeated.")
@click.option("--seconds", type=click.IntRange(1, 30 * DAY_S), default=3_600, show_default=True, help="How long.")
@click.option("--private-key", type=click.Path(dir_okay=False, exists=True), help="PEM, for EdDSA.")
def token(
    file: str | None,
    data: str | None,
    user: str | None,
    subject: str | None,
    roles: tuple[str, ...],
    seconds: int,
    private_key: str | None,
) -> None:
    """Make a token for trying out, with the key that `bursar serve` checks with."""
    with _needs_api():
        from bursar.api.problems import Problem
        from bursar.api.tokens import make_token
    if (user is None) == (subject is None):
        raise click.UsageError("give --user or --subject")
    config = configured(file, data=data)
    names = [*roles, *(["user"] if user is not None and "user" not in roles else [])]
    now_s = SystemPorts().now_us() // 1_000_000
    pem = None if private_key is None else Path(private_key).read_bytes()
    try:
        made = make_token(config, user or subject or "", names, now_s=now_s, seconds=seconds, private_key=pem)
    except (Problem, ValueError) as error:
        raise click.UsageError(str(error)) from None
    output().line({"token": made}, made)


@click.command(cls=Command, examples="bursar openapi > docs/reference/openapi.json")
def openapi() -> None:
    """Print the OpenAPI description of the API."""
    with _needs_api():
        from bursar.api.app import description
    click.echo(json.dumps(description(), indent=2, ensure_ascii=False))


async def _serve(config: Config, out: Output) -> None:
    from bursar.api.app import applications
    from bursar.api.tokens import Keys
    from bursar.cli.http_server import FILES_MAX, Server, connections_of

    ports = SystemPorts()
    make_folder(config.data, "--data")
    make_secrets(config, ports)
    keys = Keys.of(config)
    kinds = [kind for kind in config.cores if config.core(kind) == CHILD]
    connections_max = connections_of(config, raise_file_limit(FILES_MAX))
    with contextlib.ExitStack() as stack:
        stack.enter_context(alone(config, ports, kinds))
        listener = stack.enter_context(_bound(config.listen))
        aside = stack.enter_context(_bound(config.health_listen)) if config.health_listen else None
        stopping = Stopping(ports, config.shutdown_ms / 1000)
        stop = _until_stopped(stopping)
        async with (
            children(config, ports, kinds, stopping),
            running(config, ports, "serve", stopping) as runtime,
        ):
            app, health = applications(runtime, keys)
            servers = [(Server(app, config, connections_max), listener)]
            servers += [(Server(health, config, HEALTH_CONNECTIONS_MAX), aside)] if aside is not None else []
            tasks = [asyncio.create_task(server.serve(sockets=[at]), name="bursar-http") for server, at in servers]
            stopped = asyncio.create_task(stop.wait())
            ended = [*tasks, stopped]
            while not (servers[-1][0].started or any(task.done() for task in ended)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            garbage.relax_gc()
            cores = {kind: config.core_address(kind) for kind in config.cores}
            url, database = _url_of(listener), printable(config.database_url)
            fact = {"listen": url, "database": database, "cores": cores, "pid": os.getpid()}
            fact |= {"health": _url_of(aside)} if aside is not None else {}
            out.line(fact, f"bursar is ready at {url}: database {database}, cores {', '.join(cores)}")
            await asyncio.wait(ended, return_when=asyncio.FIRST_COMPLETED)
            for server, _ in servers:
                server.config.timeout_graceful_shutdown = stopping.left_s(0.7)  # type: ignore[assignment]
                server.should_exit = True
            await asyncio.gather(*tasks)
            stopped.cancel()


async def _work(config: Config, out: Output) -> None:
    make_folder(config.data, "--data")
    ports = SystemPorts()
    stopping = Stopping(ports, config.shutdown_ms / 1000)
    stop = _until_stopped(stopping)
    async with running(config, ports, "worker", stopping):
        garbage.relax_gc()
        database = printable(config.database_url)
        out.line({"worker": True, "database": database, "pid": os.getpid()}, f"a worker is ready: database {database}")
        await stop.wait()


def _until_stopped(stopping: Stopping) -> asyncio.Event:
    """Set by SIGTERM or SIGINT. A second one ends at once, and so does the end of the time for stopping, whatever hangs
    then (a thread on a stuck disk, too): the next start goes on."""
    stop = asyncio.Event()

    def end(number: int) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stopping.begin()
        exit_after(stopping.seconds, 0, "shutdown_ms is over: what had not ended is left to the next start")
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, end, number)
    return stop


@contextlib.contextmanager
def alone(config: Config, ports: Ports, kinds: list[str]) -> Iterator[None]:
    """One `bursar serve` with child cores per database, and per data folder.

    Two on one database, each with a data folder of its own, would start two cores for the same money; two on one data
    folder would start the same core twice.
    """
    if not kinds:
        yield
        return
    database = Path(sqlite_path(config.database_url) or "").resolve()
    folder, other = f"{Path(config.data).absolute()}/{LOCK}", f"{database}{LOCK_SUFFIX}"
    places = {
        folder: f"another `bursar serve` runs on {config.data}; use that one, or name another folder with --data",
        other: f"another `bursar serve` runs on the database {database}, with cores of its own; use that one, or name "
        "another --database",
    }
    with contextlib.ExitStack() as held:
        for path, taken in places.items():
            try:
                held.callback(ports.files().lock(path))
            except BlockingIOError:
                raise Unusable(taken) from None
            except OSError as error:
                raise Unusable(f"can't write to {path}: {error.strerror}; see who may write there") from error
        yield


@contextlib.contextmanager
def _bound(listen: str) -> Iterator[socket.socket]:
    """The address, before anything else is started: that it is taken is the likeliest trouble."""
    _, host, port = split_address(f"tcp:{listen}")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # TCP by name, or asyncio would not know it for TCP and leave Nagle's algorithm on: 40 ms for each answer.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)  # at once: two that have only bound the same address would both believe it theirs
        listener.setblocking(False)
    except OSError as error:
        raise Unusable(f"can't listen at {listen}: {error.strerror}; name another address with --listen") from None
    try:
        yield listener
    finally:
        listener.close()


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class _Lines(logging.Formatter):
    """One line for a message, whatever is in it: reasons and refusals come from outside."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = shown(record.message)
        return super().formatMessage(record)


def _log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.getLogger("uvicorn").setLevel(max(logging.WARNING, logging.getLogger().level))
    quiet_pool()
