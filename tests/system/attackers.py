"""Anonymous attackers of a real server, in a process of their own: silent connections, slow headers, endless headers.

They hold what they can get for as long as they are told to: whoever is hung up on calls again. Bounded in number and
in time, and only ever against 127.0.0.1.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import resource
import select
import socket
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection

LIVES_S = 300.0
TURN_S = 0.05
LORIS_S = 0.2  # between two bytes
CHUNK = b"x" * 65_536
_fork = multiprocessing.get_context("fork")


class Attackers:
    """Seen from the test."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def begin(self) -> None:
        """Attack; returns when every connection was made once."""
        self._say("begin")

    def end(self) -> None:
        """Hang up, all of them."""
        self._say("end")

    def _say(self, word: str) -> None:
        self._pipe.send(word)
        assert self._pipe.poll(60), "the attackers don't answer"
        self._pipe.recv()


@contextlib.contextmanager
def attackers(port: int, *, silent: int = 0, loris: int = 0, endless: int = 0) -> Iterator[Attackers]:
    """A process that attacks whenever it is told to."""
    ours, theirs = _fork.Pipe()
    process = _fork.Process(target=_run, args=(port, theirs, silent, loris, endless), daemon=True)
    process.start()
    try:
        yield Attackers(ours)
    finally:
        process.kill()
        process.join()


def _run(port: int, pipe: Connection, silent: int, loris: int, endless: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    until = time.monotonic() + LIVES_S
    gang: _Gang | None = None
    while time.monotonic() < until:
        if pipe.poll(0 if gang is not None else 1):
            word = pipe.recv()
            if gang is not None:
                gang.close()
            gang = _Gang(port, silent, loris, endless) if word == "begin" else None
            pipe.send(word)
        if gang is not None:
            gang.turn()


class _Gang:
    """Connections, by what they do."""

    def __init__(self, port: int, silent: int, loris: int, endless: int) -> None:
        self._port = port
        self._poll = select.epoll()
        self._doing: dict[int, str] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._dripped = 0.0
        for kind, count in (("silent", silent), ("loris", loris), ("endless", endless)):
            for _ in range(count):
                self._call(kind)

    def turn(self) -> None:
        """Whoever was hung up on calls again; the slow send their byte, the endless as much as is taken."""
        began = time.monotonic()
        for number, _ in self._poll.poll(TURN_S):
            if not self._said(number, None):
                self._call(self._hang_up(number))
        slow = began - self._dripped > LORIS_S
        self._dripped = began if slow else self._dripped
        for number, kind in list(self._doing.items()):
            data = CHUNK if kind == "endless" else b"x" if kind == "loris" and slow else None
            if data is not None and not self._said(number, data):
                self._call(self._hang_up(number))
        time.sleep(max(0.0, TURN_S - (time.monotonic() - began)))

    def close(self) -> None:
        for number in list(self._sockets):
            self._hang_up(number)
        self._poll.close()

    def _call(self, kind: str) -> None:
        made = socket.create_connection(("127.0.0.1", self._port), timeout=10)
        self._sockets[made.fileno()] = made
        self._doing[made.fileno()] = kind
        self._poll.register(made.fileno(), select.EPOLLIN | select.EPOLLRDHUP)
        if kind != "silent":
            self._said(made.fileno(), b"GET / HTTP/1.1\r\nX: ")
        made.setblocking(False)

    def _said(self, number: int, data: bytes | None) -> bool:
        """Send, or hear that it is over; whether it is not."""
        try:
            if data is None:
                return bool(self._sockets[number].recv(65_536))
            self._sockets[number].send(data)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _hang_up(self, number: int) -> str:
        with contextlib.suppress(OSError):
            self._poll.unregister(number)
        self._sockets.pop(number).close()
        return self._doing.pop(number)
