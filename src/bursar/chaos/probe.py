"""Two ways to see when a cluster takes writes: straight into the database, and through the API.

`DatabaseProbe` writes a number into every node, ten times a second; only the leader takes it. It remembers what was
acknowledged, so that a loss by the database itself is not counted as ours. `Pulses` are users who ask each server for a
small transfer just as often, once each; these are checked in the end like every other request.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import asyncpg

from bursar.chaos.cluster import Cluster, Node
from bursar.testbed.caller import Caller
from bursar.testbed.load import Load
from bursar.testbed.promises import FUNDING, Ask, Kind

EVERY_S = 0.1
PATIENCE_S = 1.0
CREATE = "CREATE TABLE writes (n bigint PRIMARY KEY)"
INSERT = "INSERT INTO writes VALUES ($1)"
DATABASE = "probe"


class DatabaseProbe:
    """Writes into whichever node takes it, until stopped."""

    def __init__(self, cluster: Cluster) -> None:
        self.successes: list[float] = []
        self.acknowledged: set[int] = set()
        self.tried = 0
        self._leader = ""  # which node took the last one
        self._cluster = cluster
        self._numbers = itertools.count()
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._work()), name="probe", daemon=True)

    def start(self) -> None:
        """Begin; the cluster is whole."""
        asyncio.run(self._create())
        self._thread.start()

    def stop(self) -> None:
        """No more."""
        self._over.set()
        self._thread.join()

    def last(self) -> tuple[str, float]:
        """Which node took the last write, and when."""
        return self._leader, self.successes[-1] if self.successes else 0.0

    def lost(self) -> int:
        """How many acknowledged writes are not there; the cluster is whole again."""
        return len(self.acknowledged - asyncio.run(self._there()))

    async def _create(self) -> None:
        connection = await asyncpg.connect(self._cluster.url_of(DATABASE), timeout=10 * PATIENCE_S)
        try:
            await connection.execute(CREATE)
        finally:
            await connection.close()

    async def _there(self) -> set[int]:
        connection = await asyncpg.connect(self._cluster.url_of(DATABASE), timeout=10 * PATIENCE_S)
        try:
            return {row[0] for row in await connection.fetch("SELECT n FROM writes")}
        finally:
            await connection.close()

    async def _work(self) -> None:
        # asyncpg leaves a future behind when a connection dies under a statement that was given up: expected here.
        asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
        await asyncio.gather(*[self._write_to(node) for node in self._cluster.nodes])

    async def _write_to(self, node: Node) -> None:
        connection: asyncpg.Connection[asyncpg.Record] | None = None
        while not self._over.is_set():
            try:
                if connection is None:
                    connection = await asyncpg.connect(node.url_of(DATABASE), timeout=PATIENCE_S)
                number = next(self._numbers)
                self.tried += 1
                await connection.execute(INSERT, number, timeout=PATIENCE_S)
                self.acknowledged.add(number)
                self.successes.append(time.monotonic())
                self._leader = node.name
            except asyncpg.ReadOnlySQLTransactionError:
                pass  # a standby; it may be promoted any moment
            except Exception:  # not acknowledged, so not counted: asyncpg's own errors have no common ancestor
                if connection is not None:
                    connection.terminate()
                connection = None
            await asyncio.sleep(EVERY_S)
        if connection is not None:
            connection.terminate()


@dataclass(frozen=True)
class Beat:
    """A transfer that was accepted."""

    sent: float
    answered: float


class Pulses:
    """One user per server, who only asks it for small transfers."""

    def __init__(self, load: Load, addresses: list[Callable[[], str | None]], users: range) -> None:
        self.beats: list[list[Beat]] = [[] for _ in addresses]
        self._load = load
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._beat, args=(n, address, user), name=f"pulse-{n}", daemon=True)
            for n, (address, user) in enumerate(zip(addresses, users, strict=True))
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """No more."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def last(self) -> float:
        """When the server that has been silent longest last accepted a transfer."""
        return min(beats[-1].answered if beats else 0.0 for beats in self.beats)

    def _beat(self, number: int, address: Callable[[], str | None], user: int) -> None:
        caller, asset = Caller(address, timeout_s=PATIENCE_S), next(iter(self._load.habits.assets))
        for made in itertools.count():
            if self._over.wait(EVERY_S):
                break
            ask = Ask(f"pulse-{number}-{made}", user, FUNDING, "SPOT", asset, 1)
            sent = time.monotonic()
            if self._load.once(caller, ask).kind is Kind.ACCEPTED:
                self.beats[number].append(Beat(sent, time.monotonic()))
        with contextlib.suppress(OSError):
            caller.close()
