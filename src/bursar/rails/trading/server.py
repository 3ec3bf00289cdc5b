"""The core's process: connections in, requests decided in order of arrival, answers out when they are on disk.

Every connection stands alone: garbage, half a frame, one too large, a wrong secret or silence during the handshake end
that connection and disturb no other. There is a limit on connections, on the size of a frame, and on what one
connection may have waiting, answers that it does not read included; a connection at its limit is not read from until it
has read its answers.

Connections that have not logged in have a limit of their own: the oldest of them makes way for a new one, so that a
peer without the secret that holds connections open keeps no client out that knows it.

A core that learns from a client that it has forgotten something (T33) serves no client any more: others may not
know it, and would get the answer that what has happened has not.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple, assert_never

import msgspec

from bursar.model.marks import Restored, restored
from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.connection import other_ledger
from bursar.rails.trading.core import Core
from bursar.rails.trading.errors import CoreStopped
from bursar.rails.trading.feed import Feed
from bursar.rails.trading.protocol import Answer, ProtocolError, Splitter
from bursar.rails.trading.rules import Status, is_ledger
from bursar.supervise import supervise

LOOKS = 4  # at silent connections, before one is closed
DONE_BYTES: Final = 48  # that an answer to one operation takes, waiting: its code, its sequence
SMALL_BYTES: Final = 512  # that any answer takes, waiting


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How much is too much."""

    connections: int = 256  # that have logged in
    strangers: int = 256  # that have not
    handshake_s: float = 5.0
    idle_s: float = 60.0  # clients that have nothing to say ping
    waiting_bytes: int = 8 * 1024 * 1024  # of one connection's requests, and of its answers that wait for the disk
    unsent_bytes: int = 8 * 1024 * 1024  # of one connection's answers or events that it does not read
    goodbye_s: float = 5.0  # for answers to leave at the end


@dataclass(eq=False, slots=True)
class Connection:
    """One client, and how much it waits for."""

    stream: Stream
    ledger: str = ""  # that it has named; "": none
    open: bool = True
    silent_for: int = 0  # looks of the server, since something was heard
    waiting_bytes: int = 0
    has_room: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Outages:
    """One log line when trouble of a kind begins, and one when it is over: never one for each time it happens. A client
    that makes a core refuse something could otherwise fill its disk with lines about it."""

    def __init__(self, log: Callable[[str], object]) -> None:
        self._log = log
        self._times: dict[str, int] = {}
        self._quiet: dict[str, int] = {}  # how often, when last looked at

    def happened(self, kind: str, detail: str = "") -> None:
        """It happened again."""
        times = self._times[kind] = self._times.get(kind, 0) + 1
        if times == 1:
            self._log(f"{kind}{f': {detail}' if detail else ''}")

    def look(self) -> None:
        """What has not happened since the last look is over."""
        for kind, times in list(self._times.items()):
            if self._quiet.get(kind) == times:
                del self._times[kind], self._quiet[kind]
                if times > 1:
                    self._log(f"{kind}: it happened {times:,} times, and is over")
            else:
                self._quiet[kind] = times


class Server:
    """Serves one core to clients that know its secret."""

    def __init__(
        self,
        ports: Ports,
        core: Core,
        secret: bytes,
        *,
        limits: ServerLimits | None = None,
        log: Callable[[str], object],
    ) -> None:
        if len(secret) < protocol.SECRET_BYTES_MIN:
            raise ValueError(f"a secret of {len(secret)} bytes is too short: at least {protocol.SECRET_BYTES_MIN}")
        self.core = core
        self.connections: list[Connection] = []  # that have logged in
        self.strangers: list[Connection] = []  # that have not, oldest first
        self._ports = ports
        self._secret = secret
        self._limits = limits or ServerLimits()
        self._log = log
        self._outages = Outages(log)
        self._pruning: asyncio.Task[None] | None = None
        self._prunes: deque[tuple[Connection, protocol.Prune, int]] = deque()
        self._feed = Feed(ports, core, self._limits.unsent_bytes)
        self._stopping = False
        self._forgotten = 0  # the highest sequence that a client has heard of and this core has not

    async def run(self, address: str, ready: Callable[[str], object]) -> None:
        """Serve until `stop`; then answer what was asked and write a snapshot. CoreStopped if the disk fails."""
        listener = await self._ports.listen(address, self._accept, self._cannot_accept)
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
                    self._outages.happened("closed a connection: nothing was heard for too long")
                    connection.stream.abort()
            self._outages.look()

    def _hang_up(self) -> None:
        for connection in [*self.connections, *self.strangers]:
            connection.open = False
            connection.stream.close()
            if connection.task is not None:
                connection.task.cancel()
        if self._pruning is not None:
            self._pruning.cancel()
        self._feed.close()

    # --- one connection

    def _accept(self, stream: Stream) -> None:
        if self._stopping:
            stream.close()
            return
        if len(self.strangers) >= self._limits.strangers:
            self._outages.happened("too many connections have not logged in: the oldest is closed for each new one")
            oldest = self.strangers.pop(0)
            oldest.open = False
            # Not proved, since no client has logged in: it may be an honest client, which need not doubt its secret.
            why = "too many connections have not logged in"
            oldest.stream.write(protocol.frame(protocol.Refused(0, protocol.FULL, why, b"")))
            oldest.stream.close()
        connection = Connection(stream)
        self.strangers.append(connection)
        connection.task = asyncio.create_task(self._serve(connection), name="core-connection")

    def _cannot_accept(self, error: OSError) -> None:
        self._outages.happened("connections can't be accepted, it is tried again", str(error))

    async def _serve(self, connection: Connection) -> None:
        try:
            splitter = Splitter(protocol.LOGIN_BYTES_MAX)
            async with asyncio.timeout(self._limits.handshake_s):
                first = await self._handshake(connection, splitter)
            splitter.limit = protocol.REQUEST_BYTES_MAX
            await self._requests(connection, splitter, first)
        except (ProtocolError, msgspec.MsgspecError, OSError, TimeoutError, ValueError) as error:
            if connection.open:  # not if it was closed from here, which was logged there
                self._outages.happened(f"closed a connection: {type(error).__name__}", str(error))
        finally:
            connection.open = False
            connection.stream.close()
            for where in (self.connections, self.strangers):
                if connection in where:
                    where.remove(connection)

    async def _handshake(self, connection: Connection, splitter: Splitter) -> list[bytes]:
        """Both sides prove themselves. Returns what the client has already sent behind its login."""
        stream, core = connection.stream, self.core
        nonce = bytes.fromhex(self._ports.token() + self._ports.token())
        hello = protocol.Hello(protocol.VERSION, core.name, core.identity, nonce)
        stream.write(protocol.frame(hello))
        while True:
            data = await stream.read()
            if not data:
                raise ProtocolError("it ended during the handshake")
            if frames := splitter.feed(data):
                break
        login = protocol.decode_handshake(frames[0])
        if not isinstance(login, protocol.Login) or login.version != protocol.VERSION:
            raise ProtocolError(f"it does not log in as version {protocol.VERSION} does")
        proof = protocol.prove_login(self._secret, hello, login.nonce, login.seen, login.ledger)
        if not protocol.proves(proof, login.proof):
            raise ProtocolError("it does not know the secret")
        if login.ledger and not is_ledger(login.ledger):
            raise ProtocolError("the ledger it names is not printable text without blanks")
        said = await self._judge(login, connection)
        said = msgspec.structs.replace(said, proof=protocol.prove_answer(self._secret, hello, login.nonce, said))
        stream.write(protocol.frame(said))
        if isinstance(said, protocol.Refused):
            await stream.drain()
            raise ProtocolError(said.text)
        if connection in self.strangers:  # and not closed meanwhile, to make way
            self.strangers.remove(connection)
            self.connections.append(connection)
        connection.ledger = login.ledger
        return frames[1:]

    async def _judge(self, login: protocol.Login, connection: Connection) -> protocol.Welcome | protocol.Refused:
        """What to answer a client that knows the secret; not proved yet."""
        state, floors = self.core.state, self.core.state.floors
        ledger, room, forget = state.ledger, floors.room, floors.forget
        if state.sequence > self.core.durable:
            await self.core.until_durable()  # these are answered, so they have to be on disk
        at = self.core.durable
        # Another ledger's client knows nothing of our sequences: it is refused before its `seen` is believed.
        if login.ledger and ledger not in ("", login.ledger):
            return protocol.Refused(at, protocol.OTHER_LEDGER, other_ledger(ledger, login.ledger), b"")
        if restored(mark=login.seen, sequence=at) is Restored.PEER:
            self._forget(login.seen, connection)
        if len(self.connections) >= self._limits.connections:
            self._outages.happened("refused a client: there are too many")
            return protocol.Refused(at, protocol.FULL, f"{self._limits.connections} clients are connected already", b"")
        if self._forgotten:
            text = f"this core knows sequences up to {at}, and {self._forgotten} has been acknowledged"
            return protocol.Refused(at, protocol.BEHIND, text, b"")
        return protocol.Welcome(at, ledger, room, forget, b"")

    def _forget(self, seen: int, teller: Connection) -> None:
        """This core has forgotten what it answered. From now on no client is served."""
        self._forgotten = max(self._forgotten, seen)
        self._log(
            f"CRITICAL: a client has seen sequence {seen}, and this core ends at {self.core.durable}: its disk was "
            "restored or damaged. It serves no client until it is started on the newest data."
        )
        for connection in [*self.connections, *self.strangers]:
            if connection is not teller:  # who has yet to hear why
                connection.open = False
                connection.stream.close()

    async def _requests(self, connection: Connection, splitter: Splitter, payloads: list[bytes]) -> None:
        stream, limits = connection.stream, self._limits
        while True:
            for payload in payloads:
                await self._room_for(connection)
                if not connection.open or self._stopping:
                    return
                request = protocol.decode_request(payload)
                if isinstance(request, protocol.Subscribe):
                    self._check_bound(connection, request)
                    await self._feed.serve(
                        stream, request, limits.idle_s, partial(setattr, connection, "silent_for", 0)
                    )
                    return
                self._take(connection, request, len(payload))
            await self._room_for(connection)
            data = await stream.read()
            if not data:
                return
            connection.silent_for = 0
            payloads = splitter.feed(data)

    async def _room_for(self, connection: Connection) -> None:
        """Wait until the next frame has room, and the client few answers that wait for the disk or to be read by it."""
        limits, stream = self._limits, connection.stream
        while connection.waiting_bytes > limits.waiting_bytes:
            connection.has_room.clear()
            await connection.has_room.wait()
        if stream.unsent > limits.unsent_bytes:
            await stream.drain()
        await self.core.has_room()

    # --- one request

    def _take(self, connection: Connection, request: protocol.Request, size: int) -> None:
        """Decide it now; its answer leaves when all that it rests on is on disk."""
        self._check_bound(connection, request)
        if isinstance(request, protocol.Prune):
            size += SMALL_BYTES
            connection.waiting_bytes += size
            self._prunes.append((connection, request, size))
            if self._pruning is None or self._pruning.done():
                self._pruning = asyncio.create_task(self._prune(), name="core-prune")
                self._pruning.add_done_callback(self._prune_ended)
            return
        waiting = decide(self.core, request)
        size += waiting.size
        connection.waiting_bytes += size
        self.core.when_durable(partial(self._answer, connection, size, waiting.frame))

    def _check_bound(self, connection: Connection, request: protocol.Request) -> None:
        """Nothing is executed for a ledger that this core does not work for."""
        if isinstance(request, protocol.Bind):
            if not connection.ledger or request.ledger != connection.ledger:
                raise ProtocolError("it asks to be bound to another ledger than it has named")
        elif connection.ledger not in ("", self.core.state.ledger):
            raise ProtocolError(f"it works for the ledger {connection.ledger}, to which this core is not bound")

    def _answer(self, connection: Connection, size: int, frame: Callable[[int], bytes]) -> None:
        connection.waiting_bytes -= size
        connection.has_room.set()
        if connection.open:
            connection.stream.write(frame(self.core.durable))

    async def _prune(self) -> None:
        """Raise floors, in steps that are short; in between, others are served."""
        state = self.core.state
        while self._prunes and not self._stopping:
            connection, request, size = self._prunes.popleft()
            code, way_up = state.floor_steps(request.room, request.forget)
            steps, keep = deque(way_up), frozenset(request.keep)
            while steps and not self._stopping:  # what is not raised by then is asked for again
                state.raise_floors(*steps.popleft(), keep)
                await self.core.until_durable()
            if not steps:
                at, floors = state.sequence, state.floors
                done = protocol.Pruned(request.number, at, code, floors.room, floors.forget)
                self.core.when_durable(partial(self._answer, connection, size, _now(done).frame))

    def _prune_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log(f"CRITICAL: the floors can't be raised: {type(error).__name__}: {error}")


# --- requests, decided


class Waiting(NamedTuple):
    """An answer that waits for the disk, and how much memory it takes meanwhile.

    It may leave only when all that it rests on is on disk, and then waits until the client reads it. Answers that tell
    what is held are made into bytes at once: as objects they would take ten times as much, and a client that asks and
    does not read could fill the memory with them.
    """

    frame: Callable[[int], bytes]  # given the sequence that is on disk by then
    size: int


def decide(core: Core, request: protocol.Request) -> Waiting:
    """Decide a request; returns its answer. Not here: Subscribe and Prune, which take longer than a moment."""
    state, number = core.state, request.number
    match request:
        case protocol.Execute(_, assets, items):
            codes, sequences = state.execute(assets, items)
            return _later(lambda at: protocol.Done(number, at, codes, sequences), DONE_BYTES * len(codes))
        case protocol.Lookup(_, pairs):
            codes, sequences = state.lookup(pairs)
            return _later(lambda at: protocol.Done(number, at, codes, sequences), DONE_BYTES * len(codes))
        case protocol.Ping():
            return _later(lambda at: protocol.Noted(number, at))
        case protocol.Query(_, id_, op):
            row = state.operation(id_, op)
            found = row and (row.sequence, row.user, state.asset_code(row.asset), row.amount, row.other, row.code)
            return _now(protocol.Found(number, state.sequence, found))
        case protocol.Balances(_, users):
            accounts = [(int(state.status(user)), state.balances(user)) for user in users]
            return _now(protocol.Held(number, state.sequence, accounts))
        case protocol.Totals():
            return _now(protocol.Summed(number, state.sequence, [(code, str(total)) for code, total in state.totals()]))
        case protocol.SetStatus(_, user, status_number):
            return _now(protocol.Noted(number, state.set_status(user, Status(status_number))))
        case protocol.Bind(_, ledger):
            bound_to = state.bind(ledger)
            return _now(protocol.Bound(number, state.sequence, bound_to))
        case protocol.Operations(_, after, limit):
            rows, complete_to = state.transfers(after, limit)
            wires = [(r.sequence, r.op, r.id, r.user, state.asset_code(r.asset), r.amount, r.code) for r in rows]
            return _now(protocol.Listed(number, state.sequence, complete_to, wires))
        case protocol.Describe():
            return _now(_described(core, number))
        case protocol.Prune() | protocol.Subscribe():
            raise ProtocolError(f"{type(request).__name__} is not a request among others")
        case _:
            assert_never(request)


def _now(answer: Answer) -> Waiting:
    frame = protocol.frame(answer)
    return Waiting(lambda _: frame, len(frame) + SMALL_BYTES)


def _later(answer: Callable[[int], Answer], size: int = 0) -> Waiting:
    return Waiting(lambda at: protocol.frame(answer(at)), size + SMALL_BYTES)


def _described(core: Core, number: int) -> protocol.Described:
    state = core.state
    return protocol.Described(
        number,
        state.sequence,
        core.identity,
        state.ledger,
        state.floors.room,
        state.floors.forget,
        state.highest,
        state.history.count + state.pending,
        state.accounts,
    )
