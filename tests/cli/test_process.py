"""The command as a process of its own: what can't be seen from within."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

from tests.cli.conftest import Shell


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
    assert all("I1 ok, I2 ok, I3 ok, I4 ok, I7 ok, I8 ok" in line for line in lines)


def test_a_closed_pipe_is_quiet(shell: Shell) -> None:
    for words in (("ledger", "events", "--follow"), ("--json", "ledger", "events"), ("account", "list")):
        process = shell.process(*words)
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        err = process.stderr.read()
        process.stderr.close()
        assert (process.wait(), err) == (141, "")


def test_a_pipe_gets_whole_lines_and_no_colours(shell: Shell) -> None:
    path = "user:" + "x" * 100
    shell.ok("account", "create", path)
    process = shell.process("account", "list", "user")
    out, _ = process.communicate()
    assert path in out
    assert "\x1b" not in out
