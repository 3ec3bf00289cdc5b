"""What the README shows works as it stands there: the programs, and the commands."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
COMMANDS = re.findall(r"```\n(export BURSAR_DATABASE=.*?)```", README, re.DOTALL)


def run(*command: str, where: Path) -> str:
    """Run a program with this interpreter's bursar on the path."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command, cwd=where, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_first_program_prints_the_same_however_often_it_is_run(tmp_path: Path) -> None:
    """The keys make each entry happen once; the second program reads what the first has written, the third orders."""
    first, second, third = PROGRAMS
    assert [run(sys.executable, "-c", first, where=tmp_path).strip() for _ in range(2)] == ["70.000000"] * 2
    assert run(sys.executable, "-c", second, where=tmp_path).strip() == "70.000000"
    assert [run(sys.executable, "-c", third, where=tmp_path).strip() for _ in range(2)] == ["DONE"] * 2


def test_the_same_program_on_postgresql(fresh_postgres: str, tmp_path: Path) -> None:
    """Nothing but the address changes."""
    program = PROGRAMS[0].replace("sqlite:///funds.db", fresh_postgres)
    assert run(sys.executable, "-c", program, where=tmp_path).strip() == "70.000000"


def test_the_commands(tmp_path: Path) -> None:
    """As typed, one after the other, in an empty folder."""
    assert len(COMMANDS) == 1
    output = run("bash", "-euc", COMMANDS[0], where=tmp_path)
    assert "100.000000" in output


@pytest.mark.parametrize("link", re.findall(r"\]\((?!http)([^)#]+)\)", README))
def test_links_lead_somewhere(link: str) -> None:
    """Every relative link in the README names a file that exists."""
    assert (ROOT / link).exists(), link
