"""`bursar audit`: the invariants as a table, and an exit code."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import Any

import click

from bursar.audit import ELSEWHERE, INVARIANTS, Finding, Progress
from bursar.audit import audit as run_audit
from bursar.cli.output import Drawing, Output, plain, shown, stack, table
from bursar.cli.place import open_database, until_back
from bursar.cli.state import Command, configured, output, state
from bursar.cli.types import settings_options
from bursar.documents import Documents
from bursar.flows.catalog import KINDS
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.transfers import AccountType, Transfers
from bursar.flows.transfers.conservation import cores_hold
from bursar.instance import Bursar
from bursar.model.errors import DatabaseUnavailable
from bursar.payout_setup import asked_chains
from bursar.ports import SystemPorts
from bursar.rails.chain import Chain
from bursar.rails.trading import TradingClient
from bursar.runtime import asked_cores

BROKEN, NOT_JUDGED = 1, 3
WRITTEN = {"I2", "I8"}  # the value tables themselves
REBUILT = {"I1", "I3"}  # what is made from them, and can be made anew
MOVED = {"I4", "I5", "I7"}  # what transfers, payouts and cores did
BROUGHT = {check.invariant for check in CHECKS}
WALLETS = "wallet"  # documents of this kind: with none, there is nothing that I9 could ask
STYLES = {"BROKEN": "bold red", "ok": "green", "not judged": "yellow"}  # of verdicts
Look = Callable[[Progress | None], Awaitable[list[Finding]]]


@click.command(
    cls=Command,
    examples="""
    bursar audit
    bursar audit --only I1 --only I8
    bursar audit --config /etc/bursar.toml
    bursar audit --data /var/lib/bursar --watch 60
    """,
)
@click.option(
    "--only",
    metavar="NAME",
    type=click.Choice(sorted({*INVARIANTS, *ELSEWHERE})),
    multiple=True,
    help="Only this invariant.",
)
@click.option(
    "--watch",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Again and again, until interrupted.",
)
@settings_options
@click.option(
    "--cores/--no-cores", default=None, help="Ask the cores of the configuration (I5). If --config or --data is given."
)
def audit(only: tuple[str, ...], watch: float | None, file: str | None, data: str | None, cores: bool | None) -> int:
    """Check the invariants over one consistent moment. Others go on writing meanwhile.

    With a configuration its cores are asked what they hold (I5), and its nodes what the wallets have (I9). I9 names
    the wallets that could not be asked; if no node is configured, that alone does not change the exit code.

    Exit code 0: all hold. 1: something is broken, and the evidence says what. 3: some can't be judged, because a
    core or a node does not answer.
    """
    asks = bool(file or data) if cores is None else cores
    if "I5" in only and not asks:
        raise click.UsageError("I5 is about cores: name a configuration with --config or --data, or say --cores")
    config = configured(file, data=data) if asks or file or data else None

    async def work() -> int:
        async with AsyncExitStack() as opened:
            b = await opened.enter_async_context(open_database(config or state().database))
            clients: dict[AccountType, TradingClient] = {}
            if config is not None and asks:
                clients = await opened.enter_async_context(asked_cores(config, b.store, SystemPorts()))
            chains: Mapping[str, Chain] = {}
            if config is not None and config.chain_nodes:
                documents = Documents(b.store, KINDS)
                chains = await opened.enter_async_context(asked_chains(config, SystemPorts(), documents))
            look = _looking(b, clients, chains, only)
            optional = set() if chains else {"I9"} - set(only)  # no node was named, so none was to be asked
            return await _audit(output(), look if watch is None else _patient(b, look), watch, optional)

    return asyncio.run(work())


async def _audit(out: Output, look: Look, watch: float | None, optional: set[str]) -> int:
    if watch is not None:
        await _watch(out, look, watch)
    with out.bar("auditing") as advance:
        findings = await look(advance)
    out.show([finding_json(f) for f in findings], lambda: _advised(findings))
    if not all(f.ok for f in findings):
        return BROKEN
    return 0 if all(f.judged or f.invariant in optional for f in findings) else NOT_JUDGED


def _looking(
    b: Bursar, clients: dict[AccountType, TradingClient], chains: Mapping[str, Chain], only: tuple[str, ...]
) -> Look:
    """One look at everything that was asked for: the database's own invariants, then what cores and chains say."""
    ours = [name for name in only if name in BROUGHT or name in INVARIANTS]

    async def look(progress: Progress | None) -> list[Finding]:
        findings = await run_audit(b.store, only=ours, progress=progress, more=CHECKS) if ours or not only else []
        if "I9" in only or (not only and await b.store.read.documents.list(WALLETS, limit=1)):
            findings.append(await wallets_cover(b.store, chains))
        if clients and (not only or "I5" in only):
            findings.append(await cores_hold(Transfers(b.ledger, clients), clients))
        return sorted(findings, key=lambda finding: finding.invariant)

    return look


def _patient(b: Bursar, look: Look) -> Look:
    """The same, but for a database that goes away: it is waited for."""

    async def wait(progress: Progress | None) -> list[Finding]:
        while True:
            try:
                return await look(progress)
            except DatabaseUnavailable as error:
                await until_back(b, error)

    return wait


async def _watch(out: Output, look: Look, seconds: float) -> None:
    """Until it is interrupted. In a terminal the table stays in its place; elsewhere each look is added."""
    if out.as_json or not out.console.is_terminal:
        while True:
            findings = await look(None)
            at = datetime.now(UTC)
            words = ", ".join(f"{f.invariant} {_verdict(f)}" for f in findings)
            evidence = "".join(
                f"\n  {f.invariant}: {shown(text)}" for f in findings for text in [*f.broken, f.note] if text
            )
            out.line(
                {"at": at, "findings": [finding_json(f) for f in findings]},
                f"{at:%Y-%m-%d %H:%M:%S} UTC  {words}{evidence}",
            )
            await asyncio.sleep(seconds)
    from rich.live import Live

    with Live(console=out.console, auto_refresh=False) as live:
        while True:
            findings = await look(None)
            at = datetime.now(UTC)
            footer = f"looked at {at:%H:%M:%S} UTC, every {seconds:g} s; Ctrl-C ends"
            live.update(stack(_advised(findings), footer), refresh=True)
            await asyncio.sleep(seconds)


def draw_findings(findings: list[Finding]) -> Drawing:
    """Findings as a table, and the evidence under it."""
    from rich.text import Text

    rows = [
        (
            f.invariant,
            f.meaning,
            f.checked if f.judged else "",
            f"{f.seconds:.2f} s" if f.judged else "",
            Text(verdict := _verdict(f), style=STYLES[verdict]),
        )
        for f in findings
    ]
    parts: list[Drawing] = [table("", "invariant", "rows", "time", "verdict", rows=rows, right=("rows", "time"))]
    for f in findings:
        parts += [Text(f"{f.invariant}: {shown(text)}", style="red") for text in f.broken]
        if f.note:
            parts.append(Text(f"{f.invariant}: {shown(f.note)}", style="yellow"))
    return stack(*parts)


def _advised(findings: list[Finding]) -> Drawing:
    """The findings, and what to do about them."""
    from rich.text import Text

    return stack(draw_findings(findings), *(Text(f"→ {line}", style="bold") for line in advice(findings)))


def advice(findings: list[Finding]) -> list[str]:
    """What to do about what is broken, as docs/how-to/operate.md says it."""
    broken = {f.invariant for f in findings if not f.ok}
    sound = {f.invariant for f in findings if f.ok and f.judged}
    lines = []
    if broken & WRITTEN:
        lines.append("Stop writing, and restore from a backup: what was written is not what is there.")
    elif broken & REBUILT and sound >= WRITTEN:
        lines.append("The value is intact: run `bursar rebuild`, then audit again.")
        if "I1" in broken:
            lines.append("If I1 is still broken after that: stop writing, and restore from a backup.")
    elif broken & REBUILT:
        lines.append("Audit I2 and I8 too: they tell whether `bursar rebuild` is enough.")
    if broken & MOVED:
        lines.append("Look at the transfers named above, and at suspense:transfers, before anything else moves.")
    if "I6" in broken:
        lines.append("Pause withdrawals, and look at those named above, before anything else is paid.")
    if "I9" in broken:
        lines.append("Pause payouts, and find what has left the wallets named above, before anything else is signed.")
    return lines


def _verdict(f: Finding) -> str:
    if not f.ok:
        return "BROKEN"
    return "ok" if f.judged else "not judged"


def finding_json(f: Finding) -> dict[str, Any]:
    """A finding for programs."""
    facts: dict[str, Any] = plain(f)
    return facts | {"meaning": f.meaning, "seconds": round(f.seconds, 6)}
