"""The how-to's flow works as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.system.test_readme import ROOT, run

HOW_TO = (ROOT / "docs" / "how-to" / "own-flow.md").read_text()
(PROGRAM,) = re.findall(r"```python\n(.*?)```", HOW_TO, re.DOTALL)
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


def test_what_people_can_do_is_spelled_as_it_is_called() -> None:
    """Every call in the second example is one that operators have."""
    from bursar.engine import Operators  # noqa: PLC0415

    called = re.findall(r"await people\.(\w+)\(", HOW_TO)
    assert len(called) == 8
    assert all(hasattr(Operators, name) for name in called)
