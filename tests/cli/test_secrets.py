"""No command prints a password, whatever is wrong with the address that it stands in."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.cli.conftest import Shell

SECRET = "hunter2"
ADDRESSES = (
    f"postgresql://u:{SECRET}@127.0.0.1:1/db",
    f"postgresql://u@127.0.0.1:1/db?password={SECRET}",
    f"postgresql://u:{SECRET}%21@127.0.0.1:1/db",
    f"postgresql://u:{SECRET}#x@127.0.0.1:1/db",
    f"postgresql://u:{SECRET}/x@127.0.0.1:1/db",
    f"postgresql://u:x@127.0.0.1:{SECRET}/db",
    f"postgres//u:{SECRET}@127.0.0.1/db",
    f"mysql://u:{SECRET}@127.0.0.1/db",
    f"host=127.0.0.1 port=1 user=u password={SECRET}",
)
COMMANDS = (
    ("audit",),
    ("migrate",),
    ("migrate", "--sql"),
    ("recover", "--restored"),
    ("account", "list"),
    ("transfer", "list"),
    ("ledger", "balance", "a"),
    ("serve",),
    ("worker",),
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_no_command_prints_the_password_of_its_database(address: str, tmp_path: Path) -> None:
    """For people and for programs."""
    shell = Shell(address)
    for words in COMMANDS:
        for flags in ((), ("--json",)):
            more = ("--data", str(tmp_path)) if words[0] in ("serve", "worker") else ()
            ran = shell(*flags, *words, *more)
            assert ran.code in (1, 2, 4), (words, ran)
            assert ran.out + ran.err
            assert SECRET not in ran.out + ran.err, words
