"""The command as a person runs it, in this process: fast, and with everything it prints."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.commands import Ran, command
from tests.shared import folder_in_memory

from bursar.cli.app import TRACEBACK_VARIABLE


@dataclass(frozen=True)
class Shell:
    """Runs the command on a database of the test's own."""

    url: str

    def __call__(self, *words: str) -> Ran:
        return command("--database", self.url, *words)

    def ok(self, *words: str) -> str:
        """Run it, and expect that it went well."""
        ran = self(*words)
        assert ran.code == 0, ran.err + ran.out
        return ran.out

    def json(self, *words: str) -> Any:
        """Run it for a program, and expect that it went well."""
        return json.loads(self.ok("--json", *words))

    def on(self, url: str) -> Shell:
        """The same on another database."""
        return Shell(url)

    def process(self, *words: str, **more: Any) -> subprocess.Popen[str]:
        """Run it as a process of its own."""
        program = [sys.executable, "-c", "from bursar.cli import main; main()", "--database", self.url, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(program, **(pipes | more))

    @contextmanager
    def running(self, *words: str, **more: Any) -> Iterator[subprocess.Popen[str]]:
        """The same; killed in the end, with all it started, if a test that fails leaves it running."""
        with self.process(*words, start_new_session=True, **more) as process:
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    yield from folder_in_memory(tmp_path)


@pytest.fixture(autouse=True)
def nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """No database and no wish for tracebacks from the environment of whoever runs the tests."""
    for name in ("BURSAR_DATABASE", TRACEBACK_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert TRACEBACK_VARIABLE not in os.environ


@pytest.fixture
def empty(tmp_path: Path) -> Shell:
    """No database yet."""
    return Shell(f"sqlite:///{tmp_path}/funds.db")


@pytest.fixture
def shell(empty: Shell) -> Shell:
    """A small ledger: USDT, a bank, a user with 100, a shop that may owe 500."""
    empty.ok("asset", "create", "USDT", "--precision", "6")
    empty.ok("account", "create", "external:bank", "--policy", "external")
    empty.ok("account", "create", "user:1")
    empty.ok("account", "create", "shop", "--policy", "capped", "--floor", "-500.00", "--asset", "USDT")
    empty.ok("ledger", "deposit", "external:bank", "user:1", "USDT", "100.00", "--key", "dep-1", "--meta", "ref=A17")
    return empty


@pytest.fixture
def broken(shell: Shell) -> Callable[[str], None]:
    """Run SQL behind the ledger's back."""

    def run(sql: str) -> None:
        with sqlite3.connect(shell.url.removeprefix("sqlite:///")) as file:
            file.execute(sql)
        file.close()

    return run
