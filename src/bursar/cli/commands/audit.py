"""`bursar audit`: the invariants as a table, and an exit code."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import click

from bursar.audit import INVARIANTS, Finding
from bursar.audit import audit as run_audit
from bursar.cli.output import Output, table
from bursar.cli.state import Command, on_database

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bursar.instance import Bursar

BROKEN, NOT_JUDGED = 1, 3


@click.command(
    cls=Command,
    examples="""
    bursar audit
    bursar audit --only I1 --only I8
    bursar audit --watch 60
    """,
)
@click.option("--only", metavar="NAME", type=click.Choice(list(INVARIANTS)), multiple=True, help="Only this invariant.")
@click.option(
    "--watch",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Again and again, until interrupted.",
)
@on_database()
async def audit(b: Bursar, out: Output, only: tuple[str, ...], watch: float | None) -> int:
    """Check the invariants over one consistent moment. Others go on writing meanwhile.

    Exit code 0: all hold. 1: something is broken, and the evidence says what. 3: commits are under way, so that some
    can't be judged; run `bursar recover` first.
    """
    if watch is not None:
        await _watch(b, out, only, watch)
    findings = await _once(b, out, only)
    out.show([finding_json(f) for f in findings], lambda: draw_findings(findings))
    if not all(f.ok for f in findings):
        return BROKEN
    return 0 if all(f.judged for f in findings) else NOT_JUDGED


async def _once(b: Bursar, out: Output, only: tuple[str, ...]) -> list[Finding]:
    with out.bar("auditing") as advance:
        return await run_audit(b.store, only=only, progress=advance)


async def _watch(b: Bursar, out: Output, only: tuple[str, ...], seconds: float) -> None:
    """Until somebody interrupts it. In a terminal the table stays in its place; elsewhere each look is added."""
    from datetime import UTC, datetime

    if out.as_json or not out.console.is_terminal:
        while True:
            findings = await run_audit(b.store, only=only)
            at = datetime.now(UTC)
            words = ", ".join(f"{f.invariant} {_verdict(f)}" for f in findings)
            evidence = "".join(f"\n  {f.invariant}: {text}" for f in findings for text in f.broken)
            out.line(
                {"at": at, "findings": [finding_json(f) for f in findings]},
                f"{at:%Y-%m-%d %H:%M:%S} UTC  {words}{evidence}",
            )
            await asyncio.sleep(seconds)
    from rich.console import Group
    from rich.live import Live

    with Live(console=out.console, auto_refresh=False) as live:
        while True:
            findings = await run_audit(b.store, only=only)
            at = datetime.now(UTC)
            footer = f"looked at {at:%H:%M:%S} UTC, every {seconds:g} s; Ctrl-C ends"
            live.update(Group(draw_findings(findings), footer), refresh=True)
            await asyncio.sleep(seconds)


def draw_findings(findings: list[Finding]) -> RenderableType:
    """Findings as a table, and the evidence under it."""
    from rich.console import Group
    from rich.text import Text

    rows = [
        (
            f.invariant,
            f.meaning,
            f.checked if f.judged else "",
            f"{f.seconds:.2f} s" if f.judged else "",
            Text(_verdict(f), style=_style(f)),
        )
        for f in findings
    ]
    parts: list[RenderableType] = [table("", "invariant", "rows", "time", "verdict", rows=rows, right=("rows", "time"))]
    for f in findings:
        parts += [Text(f"{f.invariant}: {text}", style="red") for text in f.broken]
        if f.note:
            parts.append(Text(f"{f.invariant}: {f.note}", style="yellow"))
    return Group(*parts)


def _verdict(f: Finding) -> str:
    if not f.ok:
        return "BROKEN"
    return "ok" if f.judged else "not judged"


def _style(f: Finding) -> str:
    if not f.ok:
        return "bold red"
    return "green" if f.judged else "yellow"


def finding_json(f: Finding) -> dict[str, Any]:
    """A finding for programs."""
    return {
        "invariant": f.invariant,
        "meaning": f.meaning,
        "ok": f.ok,
        "judged": f.judged,
        "checked": f.checked,
        "broken": f.broken,
        "note": f.note,
        "seconds": round(f.seconds, 6),
    }
