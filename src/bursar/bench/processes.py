"""Processes beside the benchmark: from their first line of output on, ended at the end."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator


@contextlib.contextmanager
def started(command: list[str], **more: object) -> Iterator[str]:
    """A process, and its first line of output. It is killed at the end: nothing here needs a graceful stop."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)  # type: ignore[call-overload]
    try:
        line: str = process.stdout.readline()
        if not line:
            raise RuntimeError(f"{' '.join(command[1:4])} … did not start")
        yield line.strip()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
