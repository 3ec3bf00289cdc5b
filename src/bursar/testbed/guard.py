"""A guard: a small shell that outlives us, ends the processes we leave behind and removes our folder.

Its standard input is a pipe of which only this process holds the other end, and the kernel closes that however we die.
Each line names all processes that live; the last one counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading

_GUARD = """
while read -r line; do pids=$line; done
for pid in $pids; do kill -CONT "$pid"; kill -KILL "$pid"; done
[ -z "$1" ] && exit
# What the processes had started may still be ending, and write.
tries=0
until rm -rf "$1" && [ ! -e "$1" ] || [ $tries -gt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
"""


class Guard:
    """Knows which processes live. `close` ends them, and removes the folder unless it is to be kept."""

    def __init__(self, folder: str) -> None:
        self._pids: set[int] = set()
        self._lock = threading.Lock()
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "guard", folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd="/",
            start_new_session=True,  # Ctrl-C is meant for us; the guard must outlive it
        )

    def born(self, pid: int) -> None:
        """A process was started."""
        with self._lock:
            self._pids.add(pid)
            if not self._tell():
                os.kill(pid, signal.SIGKILL)  # too late: the guard would not end it

    def gone(self, pid: int) -> None:
        """It has ended: its id may be another process's by now."""
        with self._lock:
            self._pids.discard(pid)
            self._tell()

    def close(self) -> None:
        """End what still lives, and remove the folder."""
        with contextlib.suppress(BrokenPipeError):
            self._shell.communicate()

    def _tell(self) -> bool:
        assert self._shell.stdin is not None
        with contextlib.suppress(BrokenPipeError, ValueError):
            self._shell.stdin.write(" ".join(map(str, sorted(self._pids))) + "\n")
            self._shell.stdin.flush()
            return True
        return False
