"""Memory that is freed and taken again, as SQLite does for every statement with a temporary table."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bursar import garbage

PROGRAM = """
import resource, runpy
runpy.run_path({path!r})["keep_memory"]() if {keeps} else None
one = b"x"
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(1000):  # what is kept is paid for once; what is given back, page by page every time
    pages = [one * 90_000 for _ in range(4)]  # written to: zeros of a fresh page would cost nothing until they are read
    del pages
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keeps: bool) -> int:
    """How often the kernel had to give the program a page."""
    program = PROGRAM.format(path=str(Path(garbage.__file__)), keeps=keeps)
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by rules of its own")
def test_memory_that_is_kept_is_not_taken_from_the_kernel_again() -> None:
    assert faults(keeps=False) > 50 * faults(keeps=True)
