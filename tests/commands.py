"""A command of `bursar` as a person types it, in this process: its code, and everything it prints.

To start a program costs twenty times as much as most commands do, nearly all of it for loading the package. Tests that
are about something else run their commands here; that a command is a program is for `cli/test_process.py` to show.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from click.testing import CliRunner

from bursar.cli.app import root


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """What it printed for programs."""
        return json.loads(self.out)


def command(*words: str, environ: Mapping[str, str] | None = None) -> Ran:
    """Run it, in our environment or in a whole other one. Not for two threads at once: they would print into one."""
    env = None if environ is None else dict.fromkeys(os.environ) | dict(environ)
    result = CliRunner().invoke(root, words, env=env)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.output
    return Ran(result.exit_code, result.stdout, result.stderr)
