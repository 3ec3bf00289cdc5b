"""`bursar demo-withdrawals`: deposits arrive on two chains, users withdraw, and people approve with lines to copy.

The programs are real: `bursar serve` and `bursar signer`. The chains are the simulator's, EVM and TRON, behind nodes
that speak HTTP. Not here: the story itself (withdrawal_story).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from decimal import Decimal
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import click

from bursar.cli.commands.audit import draw_findings, finding_json
from bursar.cli.errors import Unusable
from bursar.cli.output import Output, table
from bursar.cli.state import Command, State
from bursar.demo.command import ended_by_signals, own_folder
from bursar.demo.payouts import HASH_SHOWN, LIBRARIES

if TYPE_CHECKING:
    from bursar.demo.withdrawal_story import Report, Watch

PEOPLE_S = 60.0
FIGURES = ("received", "available", "held", "under_review", "paid", "fees")  # of a user's money
API_LIBRARIES = ("httptools", "jwt", "litestar", "uvicorn")  # of the extra [api]


@click.command(
    "demo-withdrawals",
    cls=Command,
    examples="""
    bursar demo-withdrawals
    bursar demo-withdrawals --wait 0
    """,
)
@click.option(
    "--wait",
    "people_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0),
    help=f"How long approvers have to run the lines that it prints; then it runs them. In a terminal: {PEOPLE_S:g}.",
)
@click.pass_obj
def demo_withdrawals(state: State, people_s: float | None) -> int:
    """Deposits and withdrawals on a simulated EVM chain and a simulated TRON chain; the server is killed.

    A stranger sends money to addresses of users. It is credited, and what gathers there is swept. The users withdraw
    it: small amounts are paid without a person, larger ones wait for one approver or two. It prints the lines that
    approve them, to be run in another terminal, and runs them itself if no person does. Exit code 0 only if each
    deposit was credited once and each recipient was paid once, the money of every user adds up, and the audit is clean.
    """
    out = Output(as_json=state.json)
    if missing := [name for name in (*LIBRARIES, *API_LIBRARIES) if find_spec(name) is None]:
        raise click.UsageError(f"{missing[0]} is missing: pip install 'bursar[api,evm,tron,signer]'")
    from bursar.demo.withdrawal_setting import Setting
    from bursar.demo.withdrawal_story import Story

    if people_s is None:
        people_s = PEOPLE_S if not out.as_json and sys.stdin.isatty() and sys.stdout.isatty() else 0.0
    out.say("Deposits arrive on two chains; users withdraw them; people approve; and the server is killed.\n")
    with own_folder("bursar-demo-") as (folder, guard), ended_by_signals(), _watched(out) as watch:
        watch("making keys and documents, starting bursar signer and bursar serve")
        setting = Setting(folder, guard)
        with _started(setting):
            report = Story(setting, people_s, lambda *lines: out.say("\n".join(lines) + "\n"), watch).play()
    if out.as_json:
        out.show(_json(report), str)
    else:
        _draw(out, report)
    return 0 if report.ok else 1


@contextlib.contextmanager
def _started(setting: Any) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(setting.running())
        except RuntimeError as error:
            raise Unusable(str(error)) from None
        yield


@contextlib.contextmanager
def _watched(out: Output) -> Iterator[Watch]:
    """What is awaited, in a terminal; elsewhere the story itself is enough."""
    if out.as_json or not out.console.is_terminal:
        yield lambda _what: None
        return
    from rich.text import Text

    with out.console.status("") as status:
        yield lambda what: status.update(Text(what))


def _draw(out: Output, report: Report) -> None:
    arrived = [
        (
            view["user_id"],
            view["chain"],
            view["address"],
            f"{Decimal(view['amount']):,.2f}",
            view["status"],
            view["tx_hash"][:HASH_SHOWN],
        )
        for view in report.deposits
    ]
    heads = ("user", "chain", "address", "USDT", "status", "transaction")
    out.console.print(table(*heads, rows=arrived, right=("user", "USDT"), whole=("address", "transaction")), "")
    rows = [
        (
            view["id"],
            view["user_id"],
            f"{Decimal(view['amount']):,.2f}",
            view["chain"],
            view["status"],
            view["tx_hash"][:HASH_SHOWN] or "-",
            _approved_by(view),
        )
        for view in report.withdrawals
    ]
    names = ("withdrawal", "user", "USDT", "chain", "status", "transaction", "approved by")
    out.console.print(table(*names, rows=rows, right=("user", "USDT"), whole=("withdrawal", "transaction")), "")
    right = ("received", "= available", "+ held", "+ under review", "+ paid", "+ fees")
    money = [(f"user {one.user}", *(f"{getattr(one, name):,.2f}" for name in FIGURES)) for one in report.money]
    out.console.print(table("USDT", *right, rows=money, right=right), "")
    out.console.print(draw_findings(report.findings), "")
    for text in report.wrong:
        out.console.print(f"WRONG: {text}", style="red", markup=False)
    if report.ok:
        paid = sum(view["status"] == "completed" for view in report.withdrawals)
        words = f"All is well: {paid} of {len(report.withdrawals)} withdrawals are paid, each once; the others gave"
        out.console.print(f"{words} the money back.", style="bold green")
    else:
        out.console.print("NOT well: see above.", style="bold red")


def _approved_by(view: dict[str, Any]) -> str:
    return ", ".join(view["staff"]["approvals"]) or ("policy" if view["status"] == "completed" else "-")


def _json(report: Report) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "deposits": report.deposits,
        "sweeps": report.sweeps,
        "withdrawals": report.withdrawals,
        "money": [{"user": one.user} | {name: str(getattr(one, name)) for name in FIGURES} for one in report.money],
        "wrong": report.wrong,
        "audit": [finding_json(f) for f in report.findings],
    }
