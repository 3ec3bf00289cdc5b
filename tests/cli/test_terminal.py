"""What a person sees in a terminal, of whatever width: every digit of a figure and of an id, and nothing but text."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import subprocess
import termios
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from tests.cli.conftest import Shell

from bursar.audit import Finding
from bursar.cli.commands.audit import draw_findings
from bursar.cli.commands.serve import _Lines
from bursar.cli.output import table

WIDTHS = (40, 60, 80)
WEI = "123456789012345.123456789012345678"


def in_terminal(shell: Shell, width: int, *words: str) -> str:
    """What the command writes to a terminal of that width, without colours."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    more = {"stdout": its, "stderr": subprocess.PIPE, "env": {**os.environ, "COLUMNS": str(width), "TERM": "xterm"}}
    process = shell.process(*words, **more)
    os.close(its)
    seen = b""
    try:
        while part := os.read(ours, 65_536):
            seen += part
    except OSError:
        pass  # how Linux says that nobody has the other end open any more
    os.close(ours)
    _, err = process.communicate()
    assert process.returncode == 0, err
    return re.sub(r"\x1b\[[0-9;]*m", "", seen.decode()).replace("\r\n", "\n")


@pytest.fixture
def wei(shell: Shell) -> Shell:
    """The same, with an asset of eighteen decimals, long paths, and a hold."""
    shell.ok("asset", "create", "ETH", "--precision", "18")
    for user in ("1001", "1002"):
        shell.ok("account", "create", f"exchange:user:{user}:funding")
    shell.ok("ledger", "deposit", "external:bank", "exchange:user:1001:funding", "ETH", WEI, "--key", "wei-1")
    shell.ok("hold", "authorize", "exchange:user:1001:funding", "ETH", "12.5", "--key", "h-1", "--expires-in", "30m")
    pay = ("ledger", "pay", "exchange:user:1001:funding", "exchange:user:1002:funding", "ETH", "1")
    shell.ok(*pay, "--key", "wei-2")
    return shell


@pytest.mark.parametrize("width", WIDTHS)
def test_no_figure_and_no_id_is_cut(wei: Shell, width: int) -> None:
    account = "exchange:user:1001:funding"
    shown = in_terminal(wei, width, "ledger", "postings", account, "--all")
    for posting in wei.json("ledger", "postings", account, "--all"):
        for word in (str(posting["id"]), posting["amount"]["amount"]):
            assert re.search(rf"(?<![\d.]){re.escape(word)}(?![\d.])", shown), shown
    holds = in_terminal(wei, width, "hold", "list", account)
    expires = wei.json("hold", "list", account)[0]["expires"][:19].replace("T", " ")
    assert holds.count("12.500000000000000000") == 2
    assert expires in holds
    history = in_terminal(wei, width, "ledger", "history", account)
    assert f"+{WEI}" in history
    assert re.search(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", history)
    balance = in_terminal(wei, width, "ledger", "balance", account)
    assert wei.json("ledger", "balance", account)[0]["amount"] in balance
    events = in_terminal(wei, width, "ledger", "events")
    assert all(event["cursor"] in events for event in wei.json("ledger", "events"))
    assert "…" not in shown + holds + history + balance + events


@pytest.mark.parametrize("width", WIDTHS)
def test_two_accounts_of_an_envelope_never_look_the_same(wei: Shell, width: int) -> None:
    shown = in_terminal(wei, width, "ledger", "show", "--key", "wei-2")
    graph = shown[shown.index("from ") :]
    assert "exchange:user:1002:funding" in graph
    receipt = wei.json("ledger", "show", "--key", "wei-2")
    assert receipt["id"] in shown
    for posting in (*receipt["consumes"], *receipt["creates"]):
        assert f"{posting['amount']['amount']} ETH  #{posting['id']}" in graph


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_is_no_wider_than_the_terminal_if_text_can_be_folded(shell: Shell, width: int) -> None:
    path = "user:" + "x" * 60
    shell.ok("account", "create", path)
    shown = in_terminal(shell, width, "book", "list")
    assert max(map(len, shown.splitlines())) <= width
    listed = in_terminal(shell, width, "account", "list", "user")
    if width == 80:
        assert max(map(len, listed.splitlines())) <= width
    assert "x" * 16 in listed
    assert listed.replace("\n", "").count("x") == 60


EVIL = "\x1b[2J\nkey faked\r\x9b2J\u202e"


def test_nothing_from_outside_moves_the_terminal(shell: Shell) -> None:
    key = "dep-\x1b[2J"
    shell("ledger", "deposit", "external:bank", "user:1", "USDT", "1", "--key", key)  # refused or not
    shell.ok("ledger", "deposit", "external:bank", "user:1", "USDT", "1", "--key", "m", "--meta", f"a={EVIL}")
    shown = in_terminal(shell, 80, "ledger", "show", "--key", "m")
    assert r"meta a=\x1b[2J\nkey faked\r\x9b2J\u202e" in shown
    everything = shown + in_terminal(shell, 80, "ledger", "history", "user:1")
    everything += shell.ok("ledger", "show", "--key", "m") + shell.ok("--json", "ledger", "show", "--key", "m")
    everything += shell("ledger", "show", "--key", key).err + shell("ledger", "balance", f"user:{EVIL}").err
    everything += shell(f"led{EVIL}").err + shell("audit", "--only", EVIL).err
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f]", everything), everything
    assert "\nkey faked" not in everything
    assert shell.json("ledger", "show", "--key", "m")["metadata"] == {"a": EVIL}


def test_cells_evidence_and_logs_are_shown_as_text() -> None:
    console = Console(width=200, file=StringIO())
    finding = Finding(invariant="I1", ok=False, checked=1, broken=[EVIL], seconds=0.0)
    console.print(table("reason", rows=[(EVIL,)]), draw_findings([finding]))
    record = logging.LogRecord("bursar", logging.ERROR, "", 1, "reason: %s", (EVIL,), None)
    made = console.file.getvalue() + _Lines("%(message)s").format(record)  # type: ignore[attr-defined]
    assert made.count(r"\x1b[2J\nkey faked\r\x9b2J\u202e") == 3
    assert "\x1b" not in made


def test_a_hash_is_one_word_however_narrow_the_terminal(shell: Shell) -> None:
    shown = in_terminal(shell, 40, "ledger", "pay", "user:1", "shop", "USDT", "1", "--key", "k")
    assert shell.json("ledger", "show", "--key", "k")["id"] in shown


@pytest.mark.parametrize("width", range(10, 140))
def test_every_figure_is_there_at_every_width(width: int) -> None:
    amounts = ("12.500000", WEI, "-7.000000000000000001")
    rows = [(f"user:{n}:funding:of:somebody", amount, f"sr-173491234567890123{n}") for n, amount in enumerate(amounts)]
    console = Console(width=width, file=StringIO())
    figures = [row[1:] for row in rows]  # nothing that could be folded instead
    how: dict[str, Any] = {"right": ("balance",), "whole": ("transfer",)}
    console.print(table("account", "balance", "transfer", rows=rows, **how), crop=False)
    console.print(table("balance", "transfer", rows=figures, **how), crop=False)
    shown = console.file.getvalue().split()  # type: ignore[attr-defined]
    assert all(shown.count(amount) == shown.count(transfer) == 2 for amount, transfer in figures)
