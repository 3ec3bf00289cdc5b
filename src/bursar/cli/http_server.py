"""The HTTP server under the API: uvicorn, with a bound on connections and descriptors kept for the rest of the process.

Any client can open a connection. What must go on whatever is opened: the database, the core and its restart, files. So
connections never get the last descriptors, and when all that there may be are in use, idle ones are closed for the
next: strangers first (no valid token has come over them), of the address that has the most, the oldest first. A
connection that is being answered is never closed. A client whose connection was closed calls again, and each call costs
us more than it: so accepting has a pace, which is slow when there is little room left. Who has to wait waits with the
kernel, while those who are in have the processor.

asyncio's own server logs every connection that it can't accept, two thousand times in a turn; here an outage is one
line, and the next try comes after a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import cast

import uvicorn

from bursar.api.gate import Gate
from bursar.cli.http_connection import Connection
from bursar.config import Config

BACKLOG = 2_048
FILES_MAX = 65_536  # more descriptors than that are of no use here
FILES_RESERVED = 256  # for database, core, files, and connections that are about to be closed
ACCEPTED_MAX = 8  # at once, so that others get their turn of the event loop
PACE_S = 0.005  # until the next are accepted: 1,600 connections in a second
CROWDED_PACE_S = 0.02  # the same when there is little room left: 400
PAUSE_S, PAUSE_S_MAX = 0.1, 1.0  # before accepting is tried again
EVICTED_PART = 16  # of all connections, so many are closed at once: looking for them costs the same for one
TICKS = 5  # of a tenth of a second, between two looks at the clock of each connection

log = logging.getLogger("bursar.http")


def connections_of(config: Config, files: int) -> int:
    """How many connections there may be with so many open files."""
    return min(config.connections_max, max(files - FILES_RESERVED, files // 2))


class Listener:
    """Accepts connections at a socket. In uvicorn's place of an asyncio server."""

    def __init__(
        self, listening: socket.socket, make: Callable[[], Connection], is_crowded: Callable[[], bool]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = listening
        self._make = make
        self._is_crowded = is_crowded
        self._opening: set[asyncio.Task[None]] = set()
        self._failing_since: float | None = None
        self._pause_s = PAUSE_S
        self._again: asyncio.TimerHandle | None = None
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket, self._accept)

    def close(self) -> None:
        """Accept no more."""
        if self._again is not None:
            self._again.cancel()
        self._loop.remove_reader(self._socket)

    async def wait_closed(self) -> None:
        """Wait for connections that were accepted a moment ago."""
        await asyncio.gather(*self._opening)

    def _accept(self) -> None:
        for number in range(ACCEPTED_MAX):
            try:
                accepted, _ = self._socket.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                if number and self._is_crowded():
                    self._stop_for(CROWDED_PACE_S)
                return
            except OSError as error:
                self._pause(error)
                return
            if self._failing_since is not None:
                log.warning("connections are accepted again, after %.1f s", self._loop.time() - self._failing_since)
                self._failing_since, self._pause_s = None, PAUSE_S
            task = self._loop.create_task(self._open(accepted), name="bursar-accept")
            self._opening.add(task)
            task.add_done_callback(self._opening.discard)
        self._stop_for(CROWDED_PACE_S if self._is_crowded() else PACE_S)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, accepted)
        except OSError:  # it has gone already
            accepted.close()

    def _pause(self, error: OSError) -> None:
        """The system would say at once that a connection waits, and refuse again: that is a loop without end."""
        if self._failing_since is None:
            self._failing_since = self._loop.time()
            hint = "; raise the limit of open files" if error.errno in (errno.EMFILE, errno.ENFILE) else ""
            log.error("no connection can be accepted: %s%s. It is tried again until it works", error.strerror, hint)
        self._stop_for(self._pause_s)
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _stop_for(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._again = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._again = None
        self._loop.add_reader(self._socket, self._accept)


class Server(uvicorn.Server):
    """uvicorn's server with bounded connections; it leaves signals and logs to us."""

    def __init__(self, app: Gate, config: Config, connections_max: int) -> None:
        settings = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_graceful_shutdown=max(1, config.shutdown_ms // 1000),
        )
        super().__init__(settings)
        self._traffic = app.traffic
        self._connections_max = connections_max
        self._is_full = False
        self._bounds = config

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Not here."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen at these sockets."""
        await self.lifespan.startup()
        self.servers = [Listener(one, self._connection, self._is_crowded) for one in sockets or ()]  # type: ignore[misc]
        self.started = True

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second."""
        if counter % TICKS == 0:
            now = asyncio.get_running_loop().time()
            for connection in self._open():
                connection.check_time(now)
            self._is_full = self._is_full and self._is_crowded()
        return await super().on_tick(counter)

    def _connection(self) -> Connection:
        return Connection(
            self.config, self.server_state, self.lifespan.state, self._bounds, self._traffic, self._make_room
        )

    def _is_crowded(self) -> bool:
        return len(self.server_state.connections) > self._connections_max * 7 // 8

    def _open(self) -> Sequence[Connection]:
        return cast("list[Connection]", list(self.server_state.connections))

    def _make_room(self, newcomer: Connection) -> None:
        """Called with each new connection: if it is one too many, others go, or it does."""
        if len(self.server_state.connections) <= self._connections_max:
            return
        if not self._is_full:
            self._is_full = True
            log.warning("all %s connections are in use; idle ones are closed for new ones", self._connections_max)
        victims = evictable([one for one in self._open() if one is not newcomer])
        for victim in victims[: max(1, self._connections_max // EVICTED_PART)]:
            victim.close_now("evicted")
        if not victims:
            newcomer.turn_away()


def evictable(connections: Sequence[Connection]) -> list[Connection]:
    """Those that may be closed to make room, of the lowest rank that there is, the first to go first."""
    ranked = [(one.rank, one) for one in connections if one.rank is not None and not one.transport.is_closing()]
    lowest = min((rank for rank, _ in ranked), default=0)
    found = [one for rank, one in ranked if rank == lowest]
    crowds = Counter(one.address for one in found)
    return sorted(found, key=lambda one: (-crowds[one.address], one.since))
