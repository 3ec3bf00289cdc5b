"""`bursar serve` under load: a server process, and clients on plain connections that keep them.

A client of an ordinary library would cost this machine more than the server under test.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import msgspec

from bursar.bench.measure import Row, row_of
from bursar.bench.processes import started
from bursar.bench.transfers_load import AMOUNT_TEXT, ASSET, USERS, Job, Load
from bursar.bench.transfers_plain import ends
from bursar.config import Config

KEY = b"a key of the benchmark alone, of thirty-two bytes and more"
PATIENCE_S = 120.0
REQUESTS_MAX = 512
SETTLE_S = 60.0
TERMINAL = ("COMMITTED", "ROLLED_BACK", "FAILED")

Transfer = Callable[[Job], Awaitable[None]]


class Connection:
    """One connection that is kept."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        length = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
        body = await reader.readexactly(length)
        if b"connection: close" in lines:
            self.close()
        return int(head[9:12]), body

    def close(self) -> None:
        """Close it."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


class Serving:
    """A running server, and tokens for its users."""

    def __init__(self, port: int, folder: Path) -> None:
        from bursar.api.tokens import make_token  # noqa: PLC0415 (it needs the API's libraries)

        self._port = port
        config = Config(data=str(folder), jwt_key_file=str(folder / "jwt.key"))
        now_s = int(time.time())
        self._tokens = [
            make_token(config, str(user), ["user"], now_s=now_s, seconds=86_000) for user in range(1, USERS + 1)
        ]

    def request(self, job: Job, order: str = "") -> bytes:
        """A transfer as a request."""
        _, user, inward = job
        source, target = ends(inward)
        body = {"from": source, "to": target, "asset": ASSET, "amount": AMOUNT_TEXT}
        return self._message(
            "POST", "/api/v1/internal_transfer", user, body | ({"client_order_id": order} if order else {})
        )

    def look(self, user: int, req_id: str) -> bytes:
        """A question about a transfer."""
        return self._message("GET", f"/api/v1/internal_transfer/{req_id}", user, None)

    def _message(self, method: str, path: str, user: int, body: dict[str, str] | None) -> bytes:
        payload = b"" if body is None else msgspec.json.encode(body)
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {self._tokens[user - 1]}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
        )
        return head.encode() + payload

    @contextlib.asynccontextmanager
    async def clients(self, count: int) -> AsyncIterator[Transfer]:
        """So many connections, each for one transfer at a time."""
        async with connections(self._port, count) as free:

            async def transfer(job: Job) -> None:
                connection = free.pop()
                status, body = await connection.ask(self.request(job))
                free.append(connection)
                answer = msgspec.json.decode(body)
                if status == 202:
                    await self.settled(connection, job[1], answer["req_id"])
                elif status != 200 or answer["state"] != "COMMITTED":
                    raise RuntimeError(f"{status}: {body.decode()}")

            yield transfer

    async def settled(self, connection: Connection, user: int, req_id: str) -> str:
        """Wait for the end of a transfer that was PENDING; returns its state."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                _, body = await connection.ask(self.look(user, req_id))
                state: str = msgspec.json.decode(body)["state"]
                if state in TERMINAL:
                    return state
                await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def connections(port: int, count: int) -> AsyncIterator[list[Connection]]:
    """Connections that are idle at the moment."""
    all_of_them = [Connection(port) for _ in range(count)]
    try:
        yield list(all_of_them)
    finally:
        for connection in all_of_them:
            connection.close()


@contextlib.asynccontextmanager
async def serving(folder: Path, address: str) -> AsyncIterator[Serving]:
    """`bursar serve` on a database, with the benchmark's core."""
    (folder / "jwt.key").write_bytes(KEY)
    (folder / "jwt.key").chmod(0o600)
    settings = {
        "DATABASE": address,
        "DATA": str(folder),
        "LISTEN": "127.0.0.1:0",
        "CORE_SPOT": f"unix:{folder}/core.sock",
        "CORE_SPOT_SECRET_FILE": str(folder / "secret"),
        "JWT_KEY_FILE": str(folder / "jwt.key"),
        "LIMIT_PER_SECOND": "0",
        "LIMIT_PER_DAY": "0",
        "LIMIT_READS_PER_SECOND": "0",
        "REQUESTS_MAX": str(REQUESTS_MAX),
        "AUDIT_INTERVAL_S": "0",
    }
    environment = os.environ | {f"BURSAR_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-c", "from bursar.cli import main; main()", "--json", "serve"]
    with started(command, env=environment) as line:
        yield Serving(int(msgspec.json.decode(line)["listen"].rpartition(":")[2]), folder)


@contextlib.asynccontextmanager
async def dbos_clients(port: int, count: int) -> AsyncIterator[Transfer]:
    """The same for the server of `transfers_dbos`."""
    async with connections(port, count) as free:

        async def transfer(job: Job) -> None:
            payload = msgspec.json.encode(dict(zip(("req_id", "user", "inward"), job, strict=True)))
            head = "POST /transfer HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
            connection = free.pop()
            status, body = await connection.ask(f"{head}Content-Length: {len(payload)}\r\n\r\n".encode() + payload)
            free.append(connection)
            if status != 200:
                raise RuntimeError(f"{status}: {body.decode()}")

        yield transfer


async def overload(server: Serving, store: str, seconds: float) -> Row:
    """Twice as many requests at once as are allowed: a client that gets 503 asks for another; an accepted one
    settles."""
    load, orders = Load(0), itertools.count()
    busy, accepted, settled = 0, 0, 0
    async with connections(server._port, 2 * REQUESTS_MAX) as free:
        begun = time.perf_counter()

        async def client(connection: Connection) -> None:
            nonlocal busy, accepted, settled
            while time.perf_counter() - begun < seconds:
                job = load.job()
                status, body = await connection.ask(server.request(job, f"overload-{begun}-{next(orders)}"))
                if status == 503:
                    busy += 1
                    await asyncio.sleep(0.05)
                    continue
                answer = msgspec.json.decode(body)
                if status not in (200, 202):
                    raise RuntimeError(f"{status}: {body.decode()}")
                accepted += 1
                state = answer["state"]
                if state not in TERMINAL:
                    state = await server.settled(connection, job[1], answer["req_id"])
                settled += state == "COMMITTED"

        await asyncio.gather(*[client(connection) for connection in free])
        took = time.perf_counter() - begun
    row = row_of("overload-http", store, 2 * REQUESTS_MAX, [(settled / took, accepted / took)], against="accepted")
    row.note = f"{accepted:,} were accepted and {settled:,} settled; {busy:,} requests got 503"
    return row
