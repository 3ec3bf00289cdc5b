"""The trading core's baseline: the least a durable server of the same frames must do.

It decodes each frame as the core does, makes one look-up and one store in a dictionary per operation, appends the
frame's bytes to a file, syncs it once for all frames that are waiting, and answers in the core's own form. It checks
nothing, remembers nothing that it could find again after a restart, and has no handshake.
"""

from __future__ import annotations

import asyncio
import os
import sys

from bursar import garbage
from bursar.rails.trading import protocol

YOUNG = 200_000  # as in the core


class Baseline:
    """All connections of the baseline; one dictionary, one file."""

    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        self.balances: dict[int, int] = {}
        self.sequence = 0
        self.frames: list[bytes] = []
        self.answers: list[tuple[asyncio.Transport, bytes]] = []

    def take(self, transport: asyncio.Transport, payload: bytes) -> None:
        """Decode, look up, store; the answer waits for the sync."""
        request = protocol.decode_request(payload)
        balances = self.balances
        for _, id_, user, _, amount, _ in request.items:
            balances.get(user)
            balances[id_] = amount
        count = len(request.items)
        first = self.sequence + 1
        self.sequence += count
        done = protocol.Done(request.number, self.sequence, bytes(count), list(range(first, self.sequence + 1)))
        if not self.frames:
            asyncio.get_running_loop().call_soon(self.commit)
        self.frames.append(payload)
        self.answers.append((transport, protocol.frame(done)))

    def commit(self) -> None:
        """One write, one sync, all answers."""
        os.write(self.fd, b"".join(self.frames))
        os.fsync(self.fd)
        self.frames.clear()
        for transport, answer in self.answers:
            transport.write(answer)
        self.answers.clear()


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, baseline: Baseline) -> None:
        """Of which baseline."""
        self.baseline = baseline
        self.splitter = protocol.Splitter(protocol.REQUEST_BYTES_MAX)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember where answers go."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Take every frame that is complete."""
        for payload in self.splitter.feed(data):
            self.baseline.take(self.transport, payload)


async def main(socket: str, path: str) -> None:
    """Serve until killed."""
    baseline = Baseline(path)
    garbage.relax_gc(YOUNG)
    server = await asyncio.get_running_loop().create_unix_server(lambda: Connection(baseline), socket)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
