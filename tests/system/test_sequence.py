"""The how-to's sequence works as it stands there, on either store, also when it is killed in the middle."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.system.test_readme import ROOT, run

from bursar.flows.sequence import MACHINE, Sequences

HOW_TO = (ROOT / "docs" / "how-to" / "sequence.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)
(PRINTED,) = re.findall(r"```\n(Completed .*?)```", HOW_TO, re.DOTALL)


def test_the_program_prints_the_same_however_often_it_is_run(tmp_path: Path) -> None:
    assert [run(sys.executable, "-c", PROGRAM, where=tmp_path) for _ in range(2)] == [PRINTED] * 2


def test_the_same_program_on_postgresql(fresh_postgres: str, tmp_path: Path) -> None:
    """Nothing but the address changes."""
    program = PROGRAM.replace("sqlite:///shop.db", fresh_postgres)
    assert [run(sys.executable, "-c", program, where=tmp_path) for _ in range(2)] == [PRINTED] * 2


def test_a_program_that_is_killed_in_a_step_is_finished_by_the_next(tmp_path: Path) -> None:
    """It dies by its own hand, as hard as kill -9, while the carrier is being called for the first time."""
    ship = "async def ship(call: Call) -> Answer:"
    dies = PROGRAM.replace(ship, f"{ship}\n    import os; os._exit(9)")
    assert dies != PROGRAM
    killed = subprocess.run([sys.executable, "-c", dies], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert (killed.returncode, killed.stdout) == (9, b"")
    assert run(sys.executable, "-c", PROGRAM, where=tmp_path) == PRINTED


def test_the_picture_is_the_machine() -> None:
    (picture,) = re.findall(r"```mermaid\n(.*?)```", HOW_TO, re.DOTALL)
    assert picture.strip() == MACHINE.mermaid().strip()


def test_what_people_can_do_is_spelled_as_it_is_called() -> None:
    called = re.findall(r"await sequences\.(\w+)\(", HOW_TO)
    assert {"queue", "retry", "skip"} <= set(called)
    assert all(hasattr(Sequences, name) for name in called)
