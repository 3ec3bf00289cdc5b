"""The command as a process of its own: what can't be seen from within."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from tests.cli.conftest import Shell

T = TypeVar("T")


def test_help_loads_no_command_and_no_database() -> None:
    program = (
        "import sys\n"
        "from bursar.cli.app import root\n"
        "try: root.main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('rich', 'asyncpg', 'bursar.sim', 'bursar.demo', 'bursar.audit') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "Exit codes:" in out
    assert out.endswith("[]\n")


def test_an_interrupt_is_quiet_and_130(shell: Shell) -> None:
    process = shell.process("ledger", "events", "--follow")
    assert process.stdout is not None
    seen = [process.stdout.readline() for _ in range(5)]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert (process.returncode, out, err.strip()) == (130, "", "")  # a line's end after the terminal's ^C is all
    assert seen[4].split()[1:] == ["committed", "envelope", "1"]


@pytest.mark.parametrize("whom", [os.kill, os.killpg], ids=["its process", "all of the terminal"])
def test_an_interrupt_ends_the_simulator_with_seeds_still_to_run(
    empty: Shell, whom: Callable[[int, int], None]
) -> None:
    with empty.running("sim", "ledger", "--seeds", "100000", "--jobs", "2") as process:
        workers = wait_for(lambda: working(process.pid))
        began = time.monotonic()
        whom(process.pid, signal.SIGINT)
        out, err = process.communicate(timeout=30)
        assert time.monotonic() - began < 5
        assert (process.returncode, out, err.strip()) == (130, "", "")
        assert wait_for(lambda: all(ended(worker) for worker in workers))


def working(pid: int) -> list[int]:
    """The children of a process once there are three (two, and the one that counts their resources), all at work."""
    found = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    ignoring = [re.search(r"SigIgn:.*[2367abef]$", status(one), re.MULTILINE) for one in found]  # bit 1: SIGINT
    return found if len(found) == 3 and all(ignoring) else []


def status(pid: int) -> str:
    return Path(f"/proc/{pid}/status").read_text()


def ended(pid: int) -> bool:
    """Gone, or dead and waiting for somebody to take note."""
    return not Path(f"/proc/{pid}").exists() or "State:\tZ" in status(pid)


def wait_for(condition: Callable[[], T]) -> T:
    """What it gives, once that is true."""
    until = time.monotonic() + 10
    while not (found := condition()):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found


def test_followed_events_are_a_line_of_json_each_and_come_as_they_happen(shell: Shell) -> None:
    process = shell.process("--json", "ledger", "events", "--follow", "--after", "0.0.4")
    assert process.stdout is not None
    assert json.loads(process.stdout.readline())["kind"] == "committed"
    shell.ok("account", "freeze", "user:1")
    assert json.loads(process.stdout.readline())["kind"] == "account_changed"
    process.send_signal(signal.SIGINT)
    process.communicate()


def test_a_watching_audit_goes_on_until_it_is_interrupted(shell: Shell) -> None:
    process = shell.process("audit", "--watch", "0.01")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(3)]
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert process.returncode == 130
    assert all("I1 ok, I2 ok, I3 ok, I4 ok, I6 ok, I7 ok, I8 ok" in line for line in lines)


def test_a_closed_pipe_is_quiet(shell: Shell) -> None:
    for words in (("ledger", "events", "--follow"), ("--json", "ledger", "events"), ("account", "list")):
        process = shell.process(*words)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert (process.wait(), err) == (141, "")


@pytest.mark.parametrize("form", [(), ("--json",)], ids=["text", "json"])
def test_what_is_committed_and_can_not_be_printed_is_said_to_be_committed(shell: Shell, form: tuple[str, ...]) -> None:
    pay = ("ledger", "pay", "user:1", "shop", "USDT", "1", "--key", "full")
    with Path("/dev/full").open("w") as full:
        process = shell.process(*form, *pay, stdout=full)
        _, err = process.communicate()
    assert process.returncode == 6
    assert err.startswith("error: UNPRINTED: the output can't be written: No space left on device; ")
    assert "committed" in err
    assert err.count("\n") == 1
    assert shell.json("ledger", "show", "--key", "full")["key"] == "full"
    with Path("/dev/full").open("w") as full:
        process = shell.process(*form, "ledger", "show", "77", stdout=full)
        _, err = process.communicate()
    assert (process.returncode, "Traceback" in err) == (1, False)


@pytest.mark.parametrize("closed", [1, 2])
def test_closed_streams_are_as_if_nobody_looked(shell: Shell, closed: int) -> None:
    def close() -> None:
        os.close(closed)

    for form in ((), ("--json",)):
        words = (*form, "ledger", "balance", "user:1")
        process = shell.process(*words, preexec_fn=close)
        out, err = process.communicate()
        assert (process.returncode, err, bool(out)) == (0, "", closed == 2)


def test_a_pipe_gets_whole_lines_and_no_colours(shell: Shell) -> None:
    path = "user:" + "x" * 100
    shell.ok("account", "create", path)
    process = shell.process("account", "list", "user")
    out, _ = process.communicate()
    assert path in out
    assert "\x1b" not in out
