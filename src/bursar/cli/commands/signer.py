"""`bursar signer`: asking a signer that runs, its halt, and a look at its log.

The process itself is in `signer_run`; keys and approvals are in `signer_keys`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import click
import msgspec

from bursar.cli.commands.signer_keys import approval_files, approve, approver_key, create, import_, list_, rotate, xpub
from bursar.cli.commands.signer_run import LOCAL_SECRET, LOCAL_SOCKET, data_option, run
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, table
from bursar.cli.state import Group, State
from bursar.model.errors import BursarError

if TYPE_CHECKING:
    from bursar.signer.client import SignerClient
    from bursar.signer.entries import Entry
    from bursar.signer.protocol import SignerStatus

ENTRIES = 50  # that `log` shows by itself
ANSWER_S = 10.0

EXAMPLES = """\b
Examples:
  bursar signer create --keystore /var/lib/bursar-signer/keystore.json --name main
  bursar signer run --data /var/lib/bursar-signer --keystore /var/lib/bursar-signer/keystore.json \\
      --policy /etc/bursar-signer/policy.toml --listen tcp:10.0.0.5:7443 --new-log
  bursar signer halt --data /var/lib/bursar-signer --reason "a key may be stolen"
  bursar signer verify --data /var/lib/bursar-signer
"""


@click.group(cls=Group, epilog=EXAMPLES)
def signer() -> None:
    """Run a signer, and what belongs to it. It holds keys, signs what its own policy allows, and never broadcasts.

    Run it as a user of its own, on a host of its own: docs/how-to/pay-out.md.
    """


for command in (create, import_, list_, rotate, xpub, approver_key, approve, run):
    signer.add_command(command)


def remote_options(command: Any) -> Any:
    """Where a signer is that runs on another host, and how to prove oneself to it."""
    command = click.option("--secret-file", metavar="FILE", help="The caller's secret.")(command)
    command = click.option("--caller", metavar="NAME", help="A caller of its policy.")(command)
    command = click.option("--name", metavar="NAME", help="Which signer it should be.")(command)
    command = click.option("--at", metavar="ADDRESS", help="Of a signer elsewhere: unix:PATH or tcp:HOST:PORT.")(
        command
    )
    return click.option("--data", metavar="DIR", help="Its folder, on the signer's own host.")(command)


# --- asking a signer that runs


@asynccontextmanager
async def _connected(
    data: str | None, at: str | None, name: str | None, caller: str | None, secret_file: str | None
) -> AsyncIterator[SignerClient]:
    """A client of the signer that the options name: by its folder here, or by its address elsewhere."""
    from bursar.config import ConfigRefused, secret
    from bursar.ports import SystemPorts
    from bursar.signer import SECRET_BYTES_MIN
    from bursar.signer.client import SignerClient
    from bursar.signer.policy import LOCAL

    ports = SystemPorts()
    if data is not None and at is None:
        name = _name_of(data)
        try:
            key = ports.files().read(f"{data}/{LOCAL_SECRET}")
        except OSError as error:
            raise Unusable(f"no signer has run in {data}: {error.strerror}") from error
        client = SignerClient(
            ports, f"unix:{data}/{LOCAL_SOCKET}", name=name, caller=LOCAL, secret=key, timeout_s=ANSWER_S
        )
    elif at and name and caller and secret_file:
        try:
            key = secret(secret_file, "--secret-file", SECRET_BYTES_MIN)
        except ConfigRefused as error:
            raise click.UsageError(error.problems) from None
        client = SignerClient(ports, at, name=name, caller=caller, secret=key, timeout_s=ANSWER_S)
    else:
        raise click.UsageError("name the signer: --data DIR on its own host, or --at, --name, --caller, --secret-file")
    async with client:
        yield client


def _unavailable(error: BursarError) -> Unusable:
    return Unusable(f"{error}; it was not asked, or may have done it: ask for its status")


@signer.command(
    examples="""
    bursar signer halt --data /var/lib/bursar-signer --reason "a key may be stolen"
    bursar signer halt --at tcp:10.0.0.5:7443 --name hot --caller ops --secret-file ops.secret --reason "a drill"
    """
)
@remote_options
@click.option("--reason", metavar="TEXT", required=True, help="Why; it is in the log.")
@click.pass_context
def halt(ctx: click.Context, /, reason: str, data: str | None, **where: Any) -> int:
    """Stop every signature, also after a restart. Repeating what was signed before, tombstones and the log go on.

    With --data it also works while the signer is not running: it then starts halted.
    """
    from bursar.ports import SystemPorts
    from bursar.signer.errors import SignerInUse
    from bursar.signer.protocol import SignerUnavailable
    from bursar.signer.service import halt_offline

    async def work() -> None:
        if data is not None and where["at"] is None:
            _name_of(data)  # or there would be a new folder where there is none
            try:
                await halt_offline(SystemPorts(), data, reason)
                return
            except SignerInUse:
                pass  # it runs: it is asked
        try:
            async with _connected(data, **where) as client:
                await client.halt(reason)
        except SignerUnavailable as error:
            raise _unavailable(error) from error

    asyncio.run(work())
    Output(as_json=ctx.ensure_object(State).json).show({"halted": reason}, lambda: f"halted: {reason}")
    return 0


@signer.command(
    examples="""
    bursar signer unhalt --data /var/lib/bursar-signer --by ann --by ben
    bursar signer unhalt --data /var/lib/bursar-signer --approval ann.json --approval ben.json
    """
)
@data_option
@click.option("--by", "people", metavar="NAME", multiple=True, help="A person whom the policy names; twice.")
@click.option("--approval", "approvals", metavar="FILE", multiple=True, help="Of `bursar signer approve`; twice.")
@click.pass_context
def unhalt(ctx: click.Context, data: str, people: tuple[str, ...], approvals: tuple[str, ...]) -> int:
    """Let a halted signer sign again: on its own host, while it runs, by two people as its policy says."""
    from bursar.signer.protocol import SignerUnavailable

    given = approval_files(approvals)

    async def work() -> None:
        try:
            async with _connected(data, None, None, None, None) as client:
                await client.unhalt(people, given)
        except SignerUnavailable as error:
            raise _unavailable(error) from error

    asyncio.run(work())
    Output(as_json=ctx.ensure_object(State).json).show({"halted": ""}, lambda: "it signs again")
    return 0


@signer.command(
    examples="""
    bursar signer release --at tcp:10.0.0.5:7443 --name hot --caller ops --secret-file ops.secret release.json \\
        --approval ann.json --approval ben.json
    """
)
@remote_options
@click.argument("file", metavar="RELEASE", type=click.Path(exists=True, dir_okay=False))
@click.option("--approval", "approvals", metavar="FILE", multiple=True, help="Of `bursar signer approve`; twice.")
@click.pass_context
def release(ctx: click.Context, /, file: str, approvals: tuple[str, ...], **where: Any) -> int:
    """Give a signer two approvers' word that attempts of a payout are dead: it may be signed in another slot then."""
    from bursar.cli.commands.signer_keys import read_struct
    from bursar.model.authorizations import Release
    from bursar.signer.protocol import SignerUnavailable

    what, given = read_struct(file, Release), approval_files(approvals)

    async def work() -> None:
        try:
            async with _connected(**where) as client:
                await client.release(what, given)
        except SignerUnavailable as error:
            raise _unavailable(error) from error

    asyncio.run(work())
    text = f"{len(what.dead)} attempts of {what.payout} are declared dead"
    Output(as_json=ctx.ensure_object(State).json).show(msgspec.to_builtins(what), lambda: text)
    return 0


@signer.command(
    examples="""
    bursar signer status --data /var/lib/bursar-signer
    bursar signer status --at tcp:10.0.0.5:7443 --name hot --caller ops --secret-file ops.secret --json
    """
)
@remote_options
@click.pass_context
def status(ctx: click.Context, /, **where: Any) -> int:
    """Ask a running signer who it is, how far its log goes, and whether it signs. Exit code 4: no answer."""
    from bursar.signer.protocol import SignerUnavailable

    async def work() -> SignerStatus:
        try:
            async with _connected(**where) as client:
                return await client.status()
        except SignerUnavailable as error:
            raise Unusable(str(error)) from error

    found = msgspec.to_builtins(asyncio.run(work()))
    rows = [(key, str(value)) for key, value in found.items()]
    Output(as_json=ctx.ensure_object(State).json).show(found, lambda: table("", "", rows=rows))
    return 0


# --- its log


def _read_log(folder: str) -> tuple[Any, list[Entry], str]:
    """State, entries and trouble of a log, read without changing it; the signer may be running."""
    from bursar.ports import SystemPorts
    from bursar.signer.log import FILE, Bad, check_next, read_frames
    from bursar.signer.state import State as Memory

    state, found, path = Memory(), list[Any](), f"{folder}/{FILE}"
    try:
        for offset, entries in read_frames(SystemPorts().files(), path):
            if isinstance(entries, Bad):
                return state, found, f"incomplete at byte {offset}: {entries}"
            found += [check_next(path, offset, state, hash_, data) for hash_, data in entries]
    except OSError as error:
        raise Unusable(f"there is no signer's log in {folder}: {error.strerror}") from error
    return state, found, ""


def _name_of(folder: str) -> str:
    """The name of the signer whose log is in a folder; the rest of the log is not read."""
    from bursar.ports import SystemPorts
    from bursar.signer.entries import Created, decode
    from bursar.signer.log import FILE, Bad, read_frames

    try:
        _, first = next(read_frames(SystemPorts().files(), f"{folder}/{FILE}"))
        created = None if isinstance(first, Bad) else decode(first[0][1]).what
    except (OSError, StopIteration, msgspec.MsgspecError) as error:
        raise Unusable(f"there is no signer's log in {folder}: {error}") from error
    if not isinstance(created, Created):
        raise Unusable(f"the log in {folder} is damaged; see `bursar signer verify --data {folder}`")
    return created.name


@signer.command(
    name="log",
    examples="""
    bursar signer log --data /var/lib/bursar-signer
    bursar signer log --data /var/lib/bursar-signer --payout p-1001 --json
    """,
)
@data_option
@click.option("--payout", metavar="ID", help="Entries of this payout alone.")
@click.option("--limit", type=click.IntRange(1), default=ENTRIES, show_default=True, help="The last so many.")
@click.pass_context
def log_(ctx: click.Context, data: str, payout: str | None, limit: int) -> int:
    """Show the log: signatures, tombstones, releases, halts and starts, the newest last."""
    _, entries, _ = _read_log(data)
    facts = [{**msgspec.to_builtins(entry), "what": msgspec.to_builtins(entry.what)} for entry in entries]
    chosen = [fact for fact in facts if payout is None or _payout_of(fact["what"]) == payout][-limit:]
    rows = [(str(f["number"]), str(f["sequence"]), _moment(f["at_us"]), f["caller"], *_told(f["what"])) for f in chosen]
    headings = ("entry", "sequence", "at", "caller", "what", "of")
    out = Output(as_json=ctx.ensure_object(State).json)
    out.show(chosen, lambda: table(*headings, rows=rows, right=("entry", "sequence"), empty="no such entry"))
    return 0


def _payout_of(what: dict[str, Any]) -> str:
    for part in (what, what.get("request"), what.get("release")):
        if isinstance(part, dict) and "payout" in part:
            return str(part["payout"])
    return ""


def _told(what: dict[str, Any]) -> tuple[str, str]:
    if (asked := what.get("request")) is not None:
        pays = asked["payment"]
        to = f"{pays['amount_raw']} {pays['asset']} to {pays['to']}"
        return f"signed ({asked['shape']})", f"{asked['payout']} attempt {asked['attempt']}: {to}, {what['hash']}"
    payout = _payout_of(what)
    rest = {key: value for key, value in what.items() if key not in ("type", "payout", "release") and value}
    return what["type"], " ".join([payout, *(f"{key} {value}" for key, value in rest.items())]).strip()


def _moment(at_us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(at_us / 1e6, UTC).strftime("%Y-%m-%d %H:%M:%S")


@signer.command(examples="bursar signer verify --data /var/lib/bursar-signer")
@data_option
@click.pass_context
def verify(ctx: click.Context, data: str) -> int:
    """Recompute the hash chain of the log, from its first entry on. Changes nothing; the signer may be running.

    Exit code 0: whole (an incomplete end, as a crash leaves it, is cut by the signer and counts as whole). 4: damaged.
    """
    state, entries, trouble = _read_log(data)
    found = {
        "name": state.name,
        "identity": state.identity,
        "entries": len(entries),
        "sequence": state.sequence,
        "last_hash": state.last_hash,
        "incomplete_end": trouble,
        "halted": state.halted,
    }
    out = Output(as_json=ctx.ensure_object(State).json)
    out.show(found, lambda: table("", "", rows=[(key, str(value)) for key, value in found.items()]))
    return 0
