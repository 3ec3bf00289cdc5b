"""What pgbouncer does to those who connect through it, as far as it matters here: it refuses parameters of the start-up
packet that it does not know, unless it is told to ignore them; its process number is not the server's; and it lends its
own connections for as long as a client is there (`session`), or for one transaction (`transaction`).

No pgbouncer can be had on every machine. This one was held against pgbouncer 1.18 with the same results.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

KNOWN = {"user", "database", "client_encoding", "application_name", "datestyle", "timezone", "replication"}
PROTOCOL, SSL_REQUEST = 196_608, 80_877_103
PID = 4_242_424

Wire = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def message(kind: bytes, body: bytes) -> bytes:
    return kind + struct.pack("!i", len(body) + 4) + body


async def read_message(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Kind, and all of it."""
    head = await reader.readexactly(5)
    return head[:1], head + await reader.readexactly(struct.unpack("!i", head[1:])[0] - 4)


class Pooler:
    """On a thread of its own."""

    def __init__(self, url: str, mode: str) -> None:
        parts = urlsplit(url)
        query = parse_qs(parts.query)
        self._path = f"{query['host'][0]}/.s.PGSQL.{query['port'][0]}"
        self._user, self._database = parts.netloc.partition("@")[0], parts.path[1:]
        self._mode = mode
        self._free: list[Wire] = []
        self._greeting = b""  # what the server says of itself to whoever is let in
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        started = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._client, "127.0.0.1", 0), self._loop)
        port = started.result(10).sockets[0].getsockname()[1]
        self.url = f"postgresql://{self._user}@127.0.0.1:{port}/{self._database}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _server(self) -> Wire:
        reader, writer = await asyncio.open_unix_connection(self._path)
        said = {"user": self._user, "database": self._database}
        text = b"".join(f"{name}\0{value}\0".encode() for name, value in said.items()) + b"\0"
        writer.write(struct.pack("!ii", len(text) + 8, PROTOCOL) + text)
        greeting = b""
        while True:
            kind, whole = await read_message(reader)
            if kind == b"S":
                greeting += whole
            if kind == b"Z":
                self._greeting = greeting
                return reader, writer

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(EOFError, ConnectionError):
            await self._serve(reader, writer)
        writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        size, code = struct.unpack("!ii", await reader.readexactly(8))
        if code == SSL_REQUEST:
            writer.write(b"N")
            size, code = struct.unpack("!ii", await reader.readexactly(8))
        words = (await reader.readexactly(size - 8)).rstrip(b"\0").decode().split("\0")
        for name in words[::2]:
            if name.lower() not in KNOWN:
                text = f"SFATAL\0C08P01\0Munsupported startup parameter: {name}\0\0"
                writer.write(message(b"E", text.encode()))
                return
        server = await self._take()
        writer.write(message(b"R", struct.pack("!i", 0)) + self._greeting)
        writer.write(message(b"K", struct.pack("!ii", PID, 1)) + message(b"Z", b"I"))
        if self._mode == "transaction":
            self._free.append(server)
        held: list[Wire] = [] if self._mode == "transaction" else [server]
        answering = None if self._mode == "transaction" else asyncio.create_task(self._answer(held, writer))
        while True:
            kind, whole = await read_message(reader)
            if kind == b"X":
                break
            if not held:
                held.append(await self._take())
                answering = asyncio.create_task(self._answer(held, writer))
            held[0][1].write(whole)
        if answering is not None:
            answering.cancel()
        for _, server_writer in held:
            server_writer.close()

    async def _answer(self, held: list[Wire], client: asyncio.StreamWriter) -> None:
        """What the server says, for as long as the client has it."""
        while held:
            kind, whole = await read_message(held[0][0])
            if self._mode == "transaction" and kind == b"Z" and whole[5:] == b"I":
                self._free.append(held.pop())
            client.write(whole)

    async def _take(self) -> Wire:
        return self._free.pop() if self._free else await self._server()


@contextlib.contextmanager
def pooled(url: str, mode: str) -> Iterator[Pooler]:
    """A pooler in front of a server."""
    pooler = Pooler(url, mode)
    try:
        yield pooler
    finally:
        pooler.close()
