"""A TCP proxy in front of a PostgreSQL server, which can go silent instead of closing, as a cut network does.

It runs in a thread of its own, so that tests with real processes and tests with an event loop use it alike. Silence
keeps what was sent in the kernel's buffers: every byte is acknowledged, and nothing is ever answered.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

CANCEL_REQUEST = 80877102
BYTES = 65_536


class Link:
    """One client and its connection to the server."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self.deaf = False  # nothing of the client's arrives
        self.dumb = False  # nothing of the server's arrives


class Proxy:
    """Forwards to a server's Unix socket."""

    def __init__(self, url: str) -> None:
        """`url`: as `ThrowawayPostgres` has it, with a folder as host."""
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._target = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.host = f"127.0.0.1:{self.port}"
        self.url = f"postgresql://{parts.netloc.partition('@')[0]}@{self.host}{parts.path}"
        self.links: list[Link] = []
        self.cancels = 0  # requests to cancel a statement
        self.silent = False  # also for those who connect from now on
        self.refuses = False  # those who connect from now on
        self.refused = 0
        self._wake, self._woken = socket.socketpair()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def go_silent(self, *, for_new: bool = True) -> None:
        """Forward nothing more, in either direction; also for those who connect later, or not."""
        for link in self.links:
            link.deaf = link.dumb = True
        self.silent = for_new
        self._wake.send(b".")

    def swallow_answers(self) -> None:
        """Forward what clients ask, and none of the answers, on the connections that there are."""
        for link in self.links:
            link.dumb = True
        self._wake.send(b".")

    def speak(self) -> None:
        """Forward everything again."""
        self.silent = self.refuses = False
        for link in self.links:
            link.deaf = link.dumb = False
        self._wake.send(b".")

    def close(self) -> None:
        self._ends = True
        self._wake.send(b".")
        self._thread.join()

    def _serve(self) -> None:
        while not self._ends:
            heard = [link.client for link in self.links if not link.deaf]
            said = [link.server for link in self.links if not link.dumb]
            ready, _, _ = select.select([self._listener, self._woken, *heard, *said], [], [])
            for one in ready:
                if one is self._listener:
                    self._accept()
                elif one is self._woken:
                    self._woken.recv(BYTES)
                else:
                    self._forward(one)
        for one in (self._listener, self._wake, self._woken, *(s for k in self.links for s in (k.client, k.server))):
            one.close()

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        if self.refuses:
            self.refused += 1
            client.close()
            return
        server = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            server.connect(self._target)
        link = Link(client, server)
        link.deaf = link.dumb = self.silent
        self.links.append(link)

    def _forward(self, one: socket.socket) -> None:
        link = next((k for k in self.links if one in (k.client, k.server)), None)
        if link is None:
            return  # ended a moment ago by its other side
        other = link.server if one is link.client else link.client
        try:
            data = one.recv(BYTES)
            if one is link.client and len(data) == 16 and struct.unpack("!ii", data[:8])[1] == CANCEL_REQUEST:
                self.cancels += 1
            if data:
                other.sendall(data)
        except OSError:
            data = b""
        if not data:
            self.links.remove(link)
            link.client.close()
            link.server.close()


@contextlib.contextmanager
def proxied(url: str) -> Iterator[Proxy]:
    """A proxy in front of a server."""
    proxy = Proxy(url)
    try:
        yield proxy
    finally:
        proxy.close()
