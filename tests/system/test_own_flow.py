"""The programs of the how-to work as they stand there: both forms, on either store, killed, and crashed everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.system.test_readme import ROOT, run

from bursar.engine import Operators
from bursar.testing import NotRecovered

HOW_TO = (ROOT / "docs" / "how-to" / "own-flow.md").read_text()
PROGRAM, BLOCKING, CRASHED = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)
SHIP = "async def ship(order: bursar.FlowRecord[Order]) -> bursar.Answer:"
PRINTED = """\
FAILED
- CREATED CHARGING
CHARGING SUCCESS SHIPPING
SHIPPING EXPLICIT_FAIL REFUNDING
REFUNDING SUCCESS FAILED
"""


def test_the_flow_runs_and_a_second_run_finds_the_record_of_the_first(tmp_path: Path) -> None:
    """The same request gets the same record; its history is no longer than before."""
    assert [run(sys.executable, "-c", PROGRAM, where=tmp_path) for _ in range(2)] == [PRINTED] * 2


def test_the_same_flow_on_postgresql(fresh_postgres: str, tmp_path: Path) -> None:
    """Nothing but the address changes."""
    program = PROGRAM.replace("sqlite:///orders.db", fresh_postgres)
    assert run(sys.executable, "-c", program, where=tmp_path) == PRINTED


def test_the_synchronous_form(tmp_path: Path) -> None:
    assert [run(sys.executable, "-c", BLOCKING, where=tmp_path) for _ in range(2)] == ["DONE\n"] * 2


def test_a_program_that_is_killed_in_a_call_is_finished_by_the_next(tmp_path: Path) -> None:
    """kill -9 by its own hand while the shop is called for the first time; the client asks again, and is told at once:
    the next process has the same name, and waits for no lease."""
    dies = PROGRAM.replace(SHIP, f"{SHIP}\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert dies != PROGRAM
    killed = subprocess.run([sys.executable, "-c", dies], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (killed.returncode, killed.stdout) == (-9, b"")
    assert run(sys.executable, "-c", PROGRAM, where=tmp_path) == PRINTED


def test_a_killed_program_with_a_name_goes_on_at_once_on_postgresql_too(fresh_postgres: str, tmp_path: Path) -> None:
    program = PROGRAM.replace("sqlite:///orders.db", fresh_postgres)
    program = program.replace("flows=[orders])", 'flows=[orders], worker_name="host-1")')
    dies = program.replace(SHIP, f"{SHIP}\n    import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    killed = subprocess.run([sys.executable, "-c", dies], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (killed.returncode, killed.stdout) == (-9, b"")
    assert run(sys.executable, "-c", program, where=tmp_path) == PRINTED


def crash(program: str) -> None:
    """Run the test that is in the program, as pytest would."""
    module: dict[str, Any] = {"__name__": "test_orders"}
    exec(compile(program, "test_orders.py", "exec"), module)
    module["test_an_order_survives_every_crash"]()


def test_the_harness_crashes_the_flow_in_a_test_of_the_users() -> None:
    crash(CRASHED)


def test_the_harness_notices_a_flow_that_is_not_idempotent() -> None:
    """Without the check of the key, the fake pays twice when a reply is lost: at a crash, or by itself."""
    wrong = CRASHED.replace("if key in self.paid:", "if False:").replace("= cents", "= self.paid.get(key, 0) + cents")
    with pytest.raises(NotRecovered):
        crash(wrong)


def test_the_programs_are_typed_and_a_wrong_flow_is_not(tmp_path: Path) -> None:
    """A user's `mypy --strict` finds what is wrong with a flow, and nothing else."""
    says_nothing = re.sub(
        r"(async def charge.*) -> bursar.Answer:\n.*\n.*", r"\1 -> None:\n    return None", PROGRAM, count=1
    )
    files = {
        "right.py": PROGRAM,
        "blocking.py": BLOCKING,
        "crashed.py": CRASHED,
        "nothing.py": says_nothing,
        "other.py": PROGRAM.replace('b.start(orders, Order("Dune", 999)', 'b.start(orders, "Dune"'),
    }
    for name, program in files.items():
        (tmp_path / name).write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), *files]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False).stdout
    errors = sorted(line for line in said.splitlines() if ": error: " in line)
    assert [line.split(":")[0] for line in errors] == ["nothing.py", "other.py"], said
    assert 'cannot be "Coroutine[Any, Any, None]"' in errors[0]


def test_the_picture_is_the_machine(tmp_path: Path) -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", HOW_TO, re.DOTALL)
    drawn = run(sys.executable, "-c", PROGRAM.split("async def main")[0] + "print(orders.mermaid())", where=tmp_path)
    assert drawn.strip() == picture.strip()


def test_what_operators_can_do_is_spelled_as_it_is_called() -> None:
    """Every call in that example is one that operators have."""
    called = re.findall(r"await operators\.(\w+)\(", HOW_TO)
    assert len(called) == 8
    assert all(hasattr(Operators, name) for name in called)
