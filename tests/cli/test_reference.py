"""The reference and the help say what there is: every error, every table, and examples that can all be followed."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cli.conftest import Shell

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "docs" / "reference"
SOURCE = ROOT / "src" / "bursar"


def test_every_code_of_an_error_is_in_the_reference() -> None:
    told = (REFERENCE / "errors.md").read_text()
    codes = {
        code
        for path in SOURCE.rglob("*.py")
        for code in re.findall(r'^    code(?:: ClassVar\[str\])? = "([A-Z_]+)"$', path.read_text(), re.MULTILINE)
    }
    assert len(codes) > 45
    missing = sorted(code for code in codes - {"ERROR"} if f"| `{code}` |" not in told)
    assert missing == []


def test_every_table_is_in_the_reference() -> None:
    told = (REFERENCE / "tables.md").read_text()
    tables = {
        name
        for path in (SOURCE / "store").rglob("*.sql")
        for name in re.findall(r"^CREATE (?:TABLE|VIEW) (?:bursar\.)?(\w+)", path.read_text(), re.MULTILINE)
    }
    assert len(tables) > 20
    assert sorted(name for name in tables if f"`{name}`" not in told) == []


def test_no_two_examples_use_one_key_for_two_things(empty: Shell) -> None:
    commands = ("ledger deposit", "ledger pay", "ledger withdraw", "hold authorize", "hold confirm")
    keys = [key for words in commands for key in re.findall(r"--key ([a-z][\w-]+)", empty.ok(*words.split(), "--help"))]
    assert len(keys) == len(set(keys)) > 4
