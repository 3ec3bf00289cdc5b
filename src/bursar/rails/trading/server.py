"""The core's process: connections in, requests decided in order of arrival, answers out when they are on disk.

Every connection stands alone: garbage, half a frame, one too large, a wrong secret or silence during the handshake end
that connection and disturb nobody else. There is a limit on connections, on the size of a frame, and on what one
connection may have waiting; whoever reaches it is simply not read from until it has its answers.

A core that learns from a client that it has forgotten something (T33) serves nobody any more: other clients may not
know it, and would be told that what has happened has not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.core import Core
from bursar.rails.trading.errors import CoreStopped
from bursar.rails.trading.feed import Feed
from bursar.rails.trading.protocol import Answer, ProtocolError, Splitter
from bursar.rails.trading.words import Status
from bursar.supervise import supervise

LOOKS = 4  # at silent connections, before one is closed


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much is too much."""

    connections: int = 256
    handshake_s: float = 5.0
    idle_s: float = 60.0  # clients that have nothing to say ping
    waiting_bytes: int = 8 * 1024 * 1024  # of one connection's requests, unanswered
    unsent_bytes: int = 8 * 1024 * 1024  # for a subscriber who reads slowly
    goodbye_s: float = 5.0  # for answers to leave at the end


class Connection:
    """One client, and how much it waits for."""

    __slots__ = ("has_room", "open", "silent_for", "stream", "task", "waiting_bytes")

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.open = True
        self.silent_for = 0  # looks of the server, since something was heard
        self.waiting_bytes = 0
        self.has_room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Server:
    """Serves one core to whoever knows its secret."""

    def __init__(
        self, ports: Ports, core: Core, secret: bytes, *, limits: Limits | None = None, log: Callable[[str], object]
    ) -> None:
        if len(secret) < protocol.SECRET_BYTES_MIN:
            raise ValueError(f"a secret of {len(secret)} bytes is too short: at least {protocol.SECRET_BYTES_MIN}")
        self.core = core
        self.connections: list[Connection] = []
        self._ports = ports
        self._secret = secret
        self._limits = limits or Limits()
        self._log = log
        self._feed = Feed(ports, core, self._limits.unsent_bytes)
        self._stopping = False
        self._forgotten = 0  # the highest sequence that a client has heard of and this core has not

    async def run(self, address: str, ready: Callable[[str], object]) -> None:
        """Serve until `stop`; then answer what was asked and write a snapshot. CoreStopped if the disk fails."""
        listener = await self._ports.listen(address, self._accept)
        idle = asyncio.create_task(supervise("core-idle", self._end_silence, self._ports), name="core-idle")
        ready(listener.address)
        try:
            await self.core.run()
        except CoreStopped:
            self._stopping = True
            self._hang_up()
            raise
        finally:
            listener.close()
            idle.cancel()
        await self._say_goodbye()
        await self.core.snapshot()

    def stop(self) -> None:
        """Take no more requests, and let `run` end."""
        self._stopping = True
        self.core.stop()

    async def _say_goodbye(self) -> None:
        """Let answers leave, but not for ever: a client may have stopped reading."""
        try:
            async with asyncio.timeout(self._limits.goodbye_s):
                for connection in list(self.connections):
                    try:
                        await connection.stream.drain()
                    except OSError:
                        continue
        except TimeoutError:
            pass
        self._hang_up()

    async def _end_silence(self) -> None:
        """Close connections on which nothing is heard. One look at all of them, not a timer for every read."""
        while True:
            await self._ports.sleep(self._limits.idle_s / LOOKS)
            for connection in list(self.connections):
                connection.silent_for += 1
                if connection.silent_for > LOOKS and not connection.waiting_bytes:
                    self._log("closed a connection: nothing was heard for too long")
                    connection.stream.abort()

    def _hang_up(self) -> None:
        for connection in list(self.connections):
            connection.open = False
            connection.stream.close()
            if connection.task is not None:
                connection.task.cancel()
        self._feed.close()

    # --- one connection

    def _accept(self, stream: Stream) -> None:
        if self._stopping or len(self.connections) >= self._limits.connections:
            self._log(f"refused a connection: {'stopping' if self._stopping else 'there are too many'}")
            stream.close()
            return
        connection = Connection(stream)
        self.connections.append(connection)
        connection.task = asyncio.create_task(self._serve(connection), name="core-connection")

    async def _serve(self, connection: Connection) -> None:
        try:
            splitter = Splitter(protocol.LOGIN_BYTES_MAX)
            async with asyncio.timeout(self._limits.handshake_s):
                first = await self._handshake(connection, splitter)
            splitter.limit = protocol.REQUEST_BYTES_MAX
            await self._requests(connection, splitter, first)
        except (ProtocolError, msgspec.MsgspecError, OSError, TimeoutError, ValueError) as error:
            self._log(f"closed a connection: {type(error).__name__}: {error}")
        finally:
            connection.open = False
            connection.stream.close()
            if connection in self.connections:
                self.connections.remove(connection)

    async def _handshake(self, connection: Connection, splitter: Splitter) -> list[bytes]:
        """Both sides prove themselves. Returns what the client has already sent behind its login."""
        stream, name = connection.stream, self.core.name
        nonce = bytes.fromhex(self._ports.token() + self._ports.token())
        stream.write(protocol.frame(protocol.Hello(protocol.VERSION, name, nonce)))
        while True:
            data = await stream.read()
            if not data:
                raise ProtocolError("it ended during the handshake")
            if frames := splitter.feed(data):
                break
        login = protocol.decode_handshake(frames[0])
        if not isinstance(login, protocol.Login) or login.version != protocol.VERSION:
            raise ProtocolError("it does not log in as this version does")
        proof = protocol.prove(self._secret, "client", name, nonce, login.nonce, login.seen)
        if not protocol.proves(proof, login.proof):
            raise ProtocolError("it does not know the secret")
        prove = partial(protocol.prove, self._secret, "core", name, nonce, login.nonce)
        if login.seen > self.core.durable:
            self._forget(login.seen, connection)
        if self._forgotten:
            text = f"this core knows sequences up to {self.core.durable}, and {self._forgotten} has been acknowledged"
            proof = prove(self.core.durable, protocol.BEHIND)
            stream.write(protocol.frame(protocol.Refused(self.core.durable, protocol.BEHIND, text, proof)))
            await stream.drain()
            raise ProtocolError(text)
        stream.write(protocol.frame(protocol.Welcome(self.core.durable, prove(self.core.durable))))
        return frames[1:]

    def _forget(self, seen: int, teller: Connection) -> None:
        """We have forgotten what somebody was told. From now on nobody is served."""
        self._forgotten = max(self._forgotten, seen)
        self._log(
            f"CRITICAL: a client has seen sequence {seen}, and this core ends at {self.core.durable}: its disk was "
            "restored or damaged. It serves nobody until it is started on the newest data."
        )
        for connection in self.connections:
            if connection is not teller:  # who has yet to hear why
                connection.open = False
                connection.stream.close()

    async def _requests(self, connection: Connection, splitter: Splitter, payloads: list[bytes]) -> None:
        stream, limits = connection.stream, self._limits
        while True:
            for payload in payloads:
                if not connection.open or self._stopping:
                    return
                request = protocol.decode_request(payload)
                if isinstance(request, protocol.Subscribe):
                    await self._feed.serve(
                        stream, request, limits.idle_s, partial(setattr, connection, "silent_for", 0)
                    )
                    return
                await self.core.has_room()
                self._take(connection, request, len(payload))
            while connection.waiting_bytes > limits.waiting_bytes:
                connection.has_room.clear()
                await connection.has_room.wait()
            if stream.unsent > limits.unsent_bytes:
                await stream.drain()
            data = await stream.read()
            if not data:
                return
            connection.silent_for = 0
            payloads = splitter.feed(data)

    # --- one request

    def _take(self, connection: Connection, request: protocol.Request, size: int) -> None:
        """Decide it now; its answer leaves when all that it rests on is on disk."""
        connection.waiting_bytes += size
        self.core.when_durable(partial(self._answer, connection, size, self._decide(request)))

    def _answer(self, connection: Connection, size: int, answer: Callable[[int], Answer]) -> None:
        connection.waiting_bytes -= size
        connection.has_room.set()
        if connection.open:
            connection.stream.write(protocol.frame(answer(self.core.durable)))

    def _decide(self, request: protocol.Request) -> Callable[[int], Answer]:
        """What to answer, given the sequence that is on disk by then."""
        book, number = self.core.book, request.number
        match request:
            case protocol.Execute(_, assets, items):
                codes, sequences = book.execute(assets, items)
                return lambda sequence: protocol.Done(number, sequence, codes, sequences)
            case protocol.Lookup(_, pairs):
                codes, sequences = book.lookup(pairs)
                return lambda sequence: protocol.Done(number, sequence, codes, sequences)
            case protocol.Query(_, id_, op):
                at, row = book.sequence, book.operation(id_, op)
                found = row and (row.sequence, row.user, book.asset_code(row.asset), row.amount, row.other, row.code)
                return lambda _: protocol.Found(number, at, found)
            case protocol.Balances(_, users):
                at, accounts = book.sequence, [(int(book.status(user)), book.balances(user)) for user in users]
                return lambda _: protocol.Held(number, at, accounts)
            case protocol.Totals():
                at, totals = book.sequence, [(code, str(total)) for code, total in book.totals()]
                return lambda _: protocol.Summed(number, at, totals)
            case protocol.SetStatus(_, user, status_number):
                at = book.set_status(user, Status(status_number))
                return lambda _: protocol.Noted(number, at)
            case protocol.Prune(_, floor, keep):
                at = book.prune(floor, keep)
                return lambda _: protocol.Noted(number, at)
            case protocol.Ping():
                return lambda sequence: protocol.Noted(number, sequence)
            case protocol.Subscribe():
                raise ProtocolError("a subscription is not a request among others")
