"""Memory that is freed and taken again, as SQLite does for every statement with a temporary table."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest

from bursar import garbage

# A block that goes back to the kernel when it is freed is mapped by itself; one that is kept lies in the heap.
# (How many pages are taken anew depends on what else lies in that heap, so counting them decides nothing.)
PROGRAM = """
import runpy
runpy.run_path({path!r})["keep_memory"]() if {keeps} else None
block = bytes(1 << 20)
heap = [line.split()[0].split("-") for line in open("/proc/self/maps") if line.rstrip().endswith("[heap]")]
print(any(int(start, 16) <= id(block) < int(end, 16) for start, end in heap))
"""


def is_kept(*, keeps: bool) -> bool:
    """Whether a megabyte that a program takes stays with it when it is freed."""
    program = PROGRAM.format(path=str(Path(garbage.__file__)), keeps=keeps)
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout == "True\n"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives memory back by rules of its own")
def test_memory_that_is_kept_is_not_taken_from_the_kernel_again() -> None:
    assert (is_kept(keeps=False), is_kept(keeps=True)) == (False, True)
