"""A command of this program as a process: started, killed, stopped, started again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bursar.testbed.guard import Guard

# -P: a file of the current folder that happens to be called json.py must not be imported.
COMMAND = (sys.executable, "-P", "-c", "from bursar.cli import main; main()", "--json")
READY_S = 60.0
STOP_S = 60.0
TAIL_BYTES = 2_000


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """Our environment with these settings and no others: those of our own caller mean another system."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("BURSAR_")}
    return inherited | {f"BURSAR_{name.upper()}": value for name, value in settings.items()}


def children_of(pid: int) -> list[int]:
    """Its child processes, oldest first."""
    if not pid:
        return []
    listed = Path(f"/proc/{pid}/task/{pid}/children")
    if Path("/proc/self/task").exists():
        try:
            return sorted(int(word) for word in listed.read_text(encoding="ascii").split())
        except OSError:
            return []  # it has just gone
    shown = subprocess.run(["ps", "-A", "-o", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
    pairs = [line.split() for line in shown.splitlines()]
    return sorted(int(child) for child, parent in pairs if parent == str(pid))


class Program:
    """One process at a time. What it writes to stderr is appended to a file."""

    def __init__(self, name: str, words: list[str], settings: Mapping[str, str], log: Path, guard: Guard) -> None:
        self.name = name
        self.log = log
        self.fact: dict[str, Any] = {}  # the one line that it printed when it was ready
        self.last_words = ""  # or else why it ended
        self.ready = threading.Event()
        self.starts = 0
        self._words = words
        self._environment = environment(settings)
        self._guard = guard
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        """Its process id; 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.poll() is None else 0

    @property
    def is_ready(self) -> bool:
        """Whether it runs and has printed that it is ready."""
        return bool(self.pid and self.fact)

    @property
    def code(self) -> int | None:
        """How it ended; None while it runs."""
        return 0 if self._process is None else self._process.poll()

    def start(self) -> None:
        """Start it, and don't wait until it is ready."""
        # In a thread, which Ctrl-C does not interrupt: a process that was started and not noted would not be ended.
        with ThreadPoolExecutor(1) as apart:
            apart.submit(self._bear).result()

    def _bear(self) -> None:
        self.ready.clear()
        self.fact = {}
        self.starts += 1
        with self.log.open("a", encoding="utf-8") as log:
            process = subprocess.Popen(
                [*COMMAND, *self._words],
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # Ctrl-C in a terminal is for us, who then decide
            )
        self._process = process
        self._guard.born(process.pid)
        threading.Thread(target=self._listen, args=(process,), daemon=True).start()

    def until_ready(self, timeout_s: float = READY_S) -> dict[str, Any]:
        """Wait for the line that says so; a RuntimeError if it ends instead, or says nothing."""
        if not self.ready.wait(timeout_s) or not self.fact:
            raise RuntimeError(f"{self.name} does not get ready: {self.last_words}\n{self.tail()}".rstrip())
        return self.fact

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self._signal(signal.SIGKILL)
        self._wait()

    def pause(self) -> None:
        """Stop it for a while, as a machine that is out of memory would."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Resume it."""
        self._signal(signal.SIGCONT)

    def stop(self, timeout_s: float = STOP_S) -> int:
        """SIGTERM; returns the exit code."""
        self._signal(signal.SIGTERM)
        return self._wait(timeout_s)

    def tail(self) -> str:
        """The end of what it wrote to stderr."""
        with contextlib.suppress(OSError):
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
        return ""

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _wait(self, timeout_s: float = STOP_S) -> int:
        process = self._process
        if process is None:
            return 0
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        self._guard.gone(process.pid)
        return code

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        fact: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # instead of that line, it may say why it ends
            fact = json.loads(process.stdout.readline())
        if process is self._process:  # else a later one is awaited by now
            self.last_words = str(fact.get("message", ""))
            self.fact = {} if self.last_words else fact
            self.ready.set()
