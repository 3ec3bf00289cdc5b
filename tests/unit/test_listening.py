"""A listener where the machine has no descriptor left: reported once per try, retried, and working when one is free."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from pathlib import Path

WAIT_S = 60
PROGRAM = """
import asyncio, resource, sys
from bursar.ports import SystemPorts
held = []
async def main():
    await SystemPorts().listen(sys.argv[1], held.append, lambda e: print("trouble", e.errno, len(held), flush=True))
    resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
    print("ready", flush=True)
    while (word := await asyncio.to_thread(sys.stdin.readline)).strip():
        while held:
            held.pop().abort()
    print("over", flush=True)
asyncio.run(main())
"""


def test_without_a_descriptor_accepting_backs_off_and_resumes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    command = [sys.executable, "-c", PROGRAM, f"unix:{path}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as p:
        assert p.stdout is not None and p.stdin is not None and p.stderr is not None
        assert p.stdout.readline() == "ready\n"
        many = [socket.socket(socket.AF_UNIX) for _ in range(40)]
        for each in many:
            each.connect(str(path))
        troubles = [p.stdout.readline().split() for _ in range(4)]
        assert [words[:2] for words in troubles] == [["trouble", str(errno.EMFILE)]] * 4
        for each in many:
            each.close()
        p.stdin.write("let go\n")
        p.stdin.flush()
        with socket.socket(socket.AF_UNIX) as late:
            late.settimeout(WAIT_S)
            late.connect(str(path))
            while True:  # accepted, and aborted with all others as soon as it is
                try:
                    late.settimeout(0.2)
                    assert late.recv(1) == b""
                    break
                except TimeoutError:
                    p.stdin.write("let go\n")
                    p.stdin.flush()
        p.stdin.write("\n")
        p.stdin.flush()
        rest, errors = p.communicate(timeout=WAIT_S)
        assert rest.endswith("over\n")
        assert errors == ""
        assert rest.count("trouble") < 100  # not one for each turn of the loop
