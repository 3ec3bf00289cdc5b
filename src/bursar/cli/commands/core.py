"""`bursar core`: the trading core as a process, and a look at its files."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from bursar import garbage
from bursar.cli.errors import Unusable
from bursar.cli.output import Drawing, Output, shown, stack, table
from bursar.cli.place import raise_file_limit
from bursar.cli.state import Group, output
from bursar.config import ConfigRefused, secret
from bursar.ports import SystemPorts, split_address
from bursar.rails.trading import Core, DescribeReply, Loading, Recovery, Server, ServerLimits, TradingClient
from bursar.rails.trading.frames import BadFrame
from bursar.rails.trading.inspection import Inspection
from bursar.rails.trading.inspection import inspect as look
from bursar.rails.trading.protocol import SECRET_BYTES_MIN

DAMAGED = 1
MEBIBYTE = 1024 * 1024
STDIN_BYTES = 4_096
YOUNG = 200_000  # objects before the collector looks: some dozens of full frames
RESERVED = 32  # open files that are no connections
LOADING = "loading: "  # how a line begins that tells a parent of progress
PARENT_S, PERSON_S = 0.5, 3.0  # between two of them
# The thread that comes back from the disk has answers to release: it must not wait long for its turn.
SWITCH_S = 0.0005

EXAMPLES = """\b
Examples:
  head -c 32 /dev/urandom > core.secret && chmod 600 core.secret
  bursar core --data /var/lib/bursar/spot --listen unix:/run/bursar/spot.sock --secret-file core.secret --name spot
  bursar core inspect /var/lib/bursar/spot
  bursar core describe --at unix:/run/bursar/spot.sock --secret-file core.secret --name spot
"""


@click.group(cls=Group, invoke_without_command=True, epilog=EXAMPLES)
@click.option("--data", metavar="DIR", type=click.Path(file_okay=False), help="Where its log and snapshots are.")
@click.option("--listen", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT (port 0: any that is free).")
@click.option("--secret-file", metavar="FILE", type=click.Path(dir_okay=False), help="At least 16 bytes; no default.")
@click.option("--name", metavar="NAME", help="Which core this is, such as spot. Its files and clients must agree.")
@click.option(
    "--snapshot-mib", type=click.IntRange(1), default=64, show_default=True, help="MiB of log between two snapshots."
)
@click.option("--connections", type=click.IntRange(1), default=256, show_default=True, help="How many at most.")
@click.option("--until-eof", is_flag=True, help="Also stop when standard input ends: a parent's child dies with it.")
@click.pass_context
def core(
    ctx: click.Context,
    data: str | None,
    listen: str | None,
    secret_file: str | None,
    name: str | None,
    snapshot_mib: int,
    connections: int,
    until_eof: bool,
) -> int | None:
    """Run a trading core until SIGTERM or SIGINT; it then answers what was asked, writes a snapshot, and exits with 0.

    It prints one line when it is ready. It ends with exit code 4, without a further answer, if its disk fails or its
    files are damaged, and says what to do.
    """
    if ctx.invoked_subcommand is not None:
        return None
    given = {"--data": data, "--listen": listen, "--secret-file": secret_file, "--name": name}
    if missing := [option for option, value in given.items() if not value]:
        raise click.UsageError(f"a core needs {', '.join(missing)}")
    assert data and listen and secret_file and name
    key = _secret(secret_file)
    _check_address(listen, "--listen")
    if until_eof and not _has_an_end():
        raise click.UsageError("--until-eof needs a pipe or a terminal as standard input")
    asyncio.run(_run(output(), data, listen, key, name, snapshot_mib * MEBIBYTE, connections, until_eof))
    return 0


def _secret(file: str) -> bytes:
    """What the file says, all of it but a newline at its end."""
    try:
        return secret(file, "--secret-file", SECRET_BYTES_MIN)
    except ConfigRefused as error:
        raise click.UsageError(error.problems) from None


def _has_an_end() -> bool:
    """Whether one can wait for the end of standard input."""
    mode = os.fstat(0).st_mode
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(0)


def _check_address(address: str, option: str) -> None:
    try:
        split_address(address)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint=option) from error


async def _run(
    out: Output,
    data: str,
    listen: str,
    key: bytes,
    name: str,
    snapshot_bytes: int,
    connections: int,
    until_eof: bool,
) -> None:
    ports = SystemPorts()
    if until_eof and not Path(data).parent.is_dir():  # the parent has gone, with all it had: don't make it anew
        raise Unusable(f"the folder {Path(data).parent} is gone")
    # A parent reads standard output, where it waits for the line that says that all is ready.
    tell = Tell(ports.monotonic, click.echo if until_eof else _log, PARENT_S if until_eof else PERSON_S)
    try:
        opened = await Core.open(ports, data, name, snapshot_bytes=snapshot_bytes, loading=tell.loading)
    except OSError as error:
        raise Unusable(f"can't use the folder {data}: {_why(error)}; name another with --data") from error
    for line in _found(opened.recovery):
        _log(line)
    garbage.relax_gc(YOUNG)  # what is remembered stays, too: the collector need not walk over it again and again
    sys.setswitchinterval(SWITCH_S)
    limits = ServerLimits(connections=connections)
    fits = raise_file_limit(limits.connections + limits.strangers + RESERVED) - RESERVED
    if fits < limits.connections + limits.strangers:
        # At the limit of open files the log could not begin a new segment, and the core would end.
        strangers = max(1, min(limits.strangers, fits // 4))
        limits = ServerLimits(connections=max(1, min(connections, fits - strangers)), strangers=strangers)
        _log(f"only {limits.connections} clients fit into the limit of open files; raise it (ulimit -n)")
    server = Server(ports, opened, key, limits=limits, log=_log)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    if until_eof:
        loop.add_reader(0, _listen_for_the_end, loop, server)

    def ready(address: str) -> None:
        recovery = opened.recovery
        fact = {"core": name, "listen": address, "sequence": recovery.sequence, "remembered": recovery.remembered}
        text = f"core {name} is ready at {address}: sequence {recovery.sequence:,}, {recovery.remembered:,} operations"
        out.line(fact, f"{text} remembered, {recovery.seconds:.2f} s")

    try:
        await server.run(listen, ready)
    except OSError as error:
        raise Unusable(f"can't listen at {listen}: {_why(error)}; name another address with --listen") from error
    finally:
        opened.close()


class Tell:
    """Says how far loading is, not too often."""

    def __init__(self, monotonic: Callable[[], float], say: Callable[[str], object], every_s: float) -> None:
        self._monotonic = monotonic
        self._say = say
        self._every_s = every_s
        self._said_at = monotonic()

    def loading(self, loading: Loading) -> None:
        """It is so far."""
        now = self._monotonic()
        if now - self._said_at >= self._every_s:
            self._said_at = now
            percent = 100 * loading.done // max(loading.total, 1)
            mib = f"{loading.done / MEBIBYTE:,.0f} of {loading.total / MEBIBYTE:,.0f} MiB"
            self._say(f"{LOADING}{mib} ({percent} %), {Path(loading.file).name}")


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _listen_for_the_end(loop: asyncio.AbstractEventLoop, server: Server) -> None:
    """The parent at the other end of our standard input has gone, however it died."""
    if not os.read(0, STDIN_BYTES):
        loop.remove_reader(0)
        server.stop()


def _log(text: str) -> None:
    click.echo(shown(text), err=True)


def _found(recovery: Recovery) -> list[str]:
    """What a person should know about the files, if anything."""
    lines = [f"passed over a damaged snapshot, {path}: {why}" for path, why in recovery.bad_snapshots]
    if (torn := recovery.torn) is not None:
        lines.append(f"cut a torn end of {torn.size} bytes off {torn.path}, as a crash leaves it ({torn.why})")
    return lines


@core.command(
    examples="""
    bursar core inspect /var/lib/bursar/spot
    bursar core inspect /var/lib/bursar/spot/wal-00000000000000000001.log --json
    """
)
@click.argument("path", metavar="DIR|FILE", type=click.Path(exists=True))
def inspect(path: str) -> int:
    """Say what is in a core's log and snapshots, and whether they are whole. Changes nothing; the core may be running.

    Exit code 0: whole (a torn end, as a crash leaves it, is cut by the core and counts as whole). 1: damaged.
    """
    try:
        found = look(SystemPorts().files(), path.rstrip("/") or "/", is_folder=Path(path).is_dir())
    except BadFrame as error:
        raise click.BadParameter(str(error), param_hint="DIR|FILE") from error
    output().show(found, lambda: draw(found))
    return 0 if found.whole else DAMAGED


@core.command(
    examples="bursar core describe --at unix:/run/bursar/spot.sock --secret-file core.secret --name spot",
)
@click.option("--at", "address", metavar="ADDRESS", required=True, help="Where it listens: unix:PATH or tcp:HOST:PORT.")
@click.option("--secret-file", metavar="FILE", type=click.Path(dir_okay=False), required=True, help="Its secret.")
@click.option("--name", metavar="NAME", required=True, help="Which core it should be, such as spot.")
def describe(address: str, secret_file: str, name: str) -> None:
    """Ask a running core who it is: identity, ledger, sequence, floors, and how much it remembers.

    Exit code 4: it can't be reached, or is not that core.
    """
    key = _secret(secret_file)
    _check_address(address, "--at")
    found = asyncio.run(_described(address, key, name))
    if found.code != "OK":
        raise Unusable(f"the core at {address} does not say who it is: {found.code}: {found.detail}")
    fact = msgspec.to_builtins(found)
    rows = [(what, fact[what]) for what in ("core", "ledger", "sequence", "highest_id", "remembered", "accounts")]
    rows += [(f"floor: {which}", height) for which, height in fact["floors"].items()]
    output().show(fact, lambda: table("", name, rows=rows))


async def _described(address: str, key: bytes, name: str) -> DescribeReply:
    async with TradingClient(SystemPorts(), address, name=name, secret=key) as client:
        return await client.describe()


def draw(found: Inspection) -> Drawing:
    """An inspection for a person."""
    from rich.text import Text

    rows: list[tuple[Any, ...]] = [
        (
            Path(report.file).name,
            report.kind,
            f"{report.first:,}" if report.first else "",
            f"{report.last:,}",
            f"{report.frames:,}" if report.kind == "segment" else "",
            f"{report.operations:,}",
            f"{report.bytes:,}",
            Text("whole" if report.whole else "DAMAGED", style="green" if report.whole else "bold red"),
            report.why,
        )
        for report in found.files
    ]
    headings = ("file", "kind", "first", "last", "frames", "operations", "bytes", "state", "")
    parts: list[Drawing] = [table(*headings, rows=rows, right=("first", "last", "frames", "operations", "bytes"))]
    if found.totals or found.answers:
        bound = f"bound to ledger {found.ledger}" if found.ledger else "not bound to a ledger yet"
        parts.append(Text(f"\ncore {found.identity}, {bound}"))
        parts.append(Text(f"sequence {found.sequence:,}, {found.remembered:,} remembered, {found.accounts:,} accounts"))
        floors = f"room is reserved from id {found.room}, remembered from id {found.forget}"
        parts.append(Text(f"{floors}; highest id {found.highest}"))
        parts.append(table("asset", "total", rows=[*found.totals.items()], right=("total",)))
        parts.append(table("operation and answer", "count", rows=[*found.answers.items()], right=("count",)))
    if found.why and not found.whole:
        parts.append(Text(found.why, style="red"))
    return stack(*parts)
