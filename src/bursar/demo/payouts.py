"""`bursar demo-payouts`: payments that leave on a chain, while the chain and the signer do what they do at worst.

Bursar's part is real: a database in a file, the worker, the EVM rail, and a signer in a process of its own. The chain
is the simulator's, or a real EVM node (`make demo-evm`). Users are paid out; the signer is killed, fees rise above what
was offered, one payment is cancelled after it was sent, and a reorganisation removes another. Not here: the story
itself (payout_story).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.audit import draw_findings, finding_json
from bursar.cli.output import Output, table
from bursar.cli.state import Command, State
from bursar.demo.command import ended_by_signals, own_folder

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from bursar.demo.payout_chains import DemoChain
    from bursar.demo.payout_story import Report, Watch

SIMULATED, ANVIL = "simulated", "anvil"
HASH_SHOWN = 18
LIBRARIES = ("coincurve", "cryptography", "eth_account", "eth_hash", "httpx", "rlp")  # of the extras [evm] and [signer]


@click.command(
    "demo-payouts",
    cls=Command,
    examples="""
    bursar demo-payouts
    bursar demo-payouts --chain anvil
    """,
)
@click.option(
    "--chain",
    type=click.Choice([SIMULATED, ANVIL]),
    default=SIMULATED,
    show_default=True,
    help="anvil: a real EVM node, in a clone of the repository (`make demo-evm` fetches it).",
)
@click.pass_obj
def demo_payouts(state: State, chain: str) -> int:
    """Payouts on a chain that misbehaves: fees rise, blocks are reorganised, and the signer is killed.

    Exit code 0 only if the chain has paid each recipient once, every wallet has what the ledger says, and the audit is
    clean.
    """
    out = Output(as_json=state.json)
    opened = _opened(chain)
    out.say("Bursar pays out on a chain, and the chain and the signer misbehave.")
    from bursar.demo.payout_story import play

    with own_folder("bursar-payouts-") as (folder, guard), ended_by_signals(), _watched(out) as watch:
        report = asyncio.run(play(folder, guard, opened, lambda *lines: _tell(out, lines), watch))
    if out.as_json:
        out.show(_json(report), str)
    else:
        _draw(out, report)
    return 0 if report.ok else 1


def _opened(chain: str) -> AbstractAsyncContextManager[DemoChain]:
    """The chain, not started yet; a refusal if it can't be here."""
    if chain == ANVIL and find_spec("bursar.demo.payout_anvil") is None:
        where = "run it in a clone of the repository: make demo-evm"
        raise click.UsageError(f"--chain anvil is not in the installed package; {where}")
    if missing := [name for name in LIBRARIES if find_spec(name) is None]:
        raise click.UsageError(f"{missing[0]} is missing: pip install 'bursar[evm,signer]'")
    if chain == SIMULATED:
        from bursar.demo.payout_chains import simulated

        return simulated()
    from bursar.demo.payout_anvil import on_anvil, require_anvil

    require_anvil()
    return on_anvil()


@contextlib.contextmanager
def _watched(out: Output) -> Iterator[Watch]:
    """A bar in a terminal; elsewhere the story itself is enough."""
    if out.as_json or not out.console.is_terminal:
        yield lambda _what, _ended, _count: None
        return
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    column = Column(no_wrap=True, overflow="ellipsis")
    columns = (BarColumn(bar_width=16), TextColumn("{task.description}", table_column=column))
    with Progress(*columns, console=out.console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def watch(what: str, ended: int, count: int) -> None:
            words = f"{ended} of {count} payouts have ended; waiting for {what}" if count else what
            progress.update(task, completed=ended, total=count or None, description=words)

        yield watch


def _tell(out: Output, lines: tuple[str, ...]) -> None:
    out.say("\n".join(lines) + "\n")


def _draw(out: Output, report: Report) -> None:
    rows = [
        (
            view.id,
            view.amount,
            view.status,
            len(view.attempts),
            view.tx_hash[:HASH_SHOWN] or "-",
            report.fortunes[view.id],
        )
        for view in report.payouts
    ]
    heads = ("payout", "USDT", "state", "attempts", "hash", "what happened")
    whole = ("payout", "hash")
    out.console.print(table(*heads, rows=rows, right=("USDT", "attempts"), whole=whole), "")
    held = [
        (one.name, one.asset, _units(one.on_chain, one.asset), _units(one.in_ledger, one.asset))
        for one in report.wallets
    ]
    right = ("on the chain", "in the ledger")
    out.console.print(table("wallet", "asset", *right, rows=held, right=right), "")
    out.console.print(draw_findings(report.findings), "")
    for text in report.wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    if report.ok:
        paid = sum(view.status == "confirmed" for view in report.payouts)
        out.console.print(f"All is well: {paid} of {len(report.payouts)} payouts are confirmed.", style="bold green")
        out.console.print("Each recipient was paid once; wallets have what the ledger says.", style="bold green")
    else:
        out.console.print("NOT well: see above.", style="bold red")


def _units(minor: int, asset: str) -> str:
    from bursar.model.money import Money

    return str(Money(asset, 6 if asset == "USDT" else 18, minor))


def _json(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "chain": report.chain,
        "payouts": {
            view.id: {
                "status": view.status,
                "amount": view.amount,
                "attempts": len(view.attempts),
                "hash": view.tx_hash,
                "what_happened": report.fortunes[view.id],
            }
            for view in report.payouts
        },
        "wallets": [
            {"wallet": one.name, "asset": one.asset, "on_chain": str(one.on_chain), "in_ledger": str(one.in_ledger)}
            for one in report.wallets
        ],
        "wrong": report.wrong,
        "audit": [finding_json(f) for f in report.findings],
    }
