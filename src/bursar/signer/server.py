"""The signer's process: connections in, each caller with its rights, answers out when they are on disk.

Every connection stands alone: garbage, half a frame, one too large, a wrong secret, an unknown name or silence during
the handshake end that connection and disturb no other. There is a limit on connections, on the size of a frame, and
on what one connection may have asked and not heard; a connection at its limit is not read from until it has its
answers.

Connections that have not logged in have a limit of their own: the oldest of them makes way for a new one, so that a
stranger that holds connections open keeps no caller out.

There are two ways in. Callers come over the address of the policy, with the secrets of the policy. The command on the
signer's own host comes over a Unix socket in the data folder, with a secret that is a file there: it alone may lift a
halt."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import msgspec

from bursar.model.errors import BursarError
from bursar.model.marks import Restored, restored
from bursar.ports import Ports, Stream
from bursar.signer import wire
from bursar.signer.errors import SignerStopped
from bursar.signer.policy import LOCAL, Right
from bursar.signer.protocol import Never, Signature, SignerRefused, SignerUnavailable
from bursar.signer.rules import Reason
from bursar.signer.service import Service
from bursar.signer.wire import ProtocolError, Seals, Splitter
from bursar.supervise import supervise

LOOKS: Final = 4  # at silent connections, before one is closed
KINDS_MAX: Final = 64  # of trouble that is counted

RIGHTS: Final = {
    wire.AskPreview: Right.PREVIEW,
    wire.AskSign: Right.SIGN,
    wire.AskCancel: Right.CANCEL,
    wire.AskLog: Right.LOG,
    wire.AskStatus: Right.STATUS,
    wire.AskHalt: Right.HALT,
    wire.AskRelease: Right.RELEASE,
    wire.AskAttempts: Right.PREVIEW,
}
MAY_STOP: Final = frozenset({Right.SIGN, Right.CANCEL, Right.HALT})  # by what such a caller has seen, too (W33)
LOCAL_RIGHTS: Final = frozenset({Right.LOG, Right.STATUS, Right.HALT, Right.RELEASE})


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """How much is too much."""

    connections: int = 64  # that have logged in
    connections_of_caller: int = 48  # of those, so that a stolen secret leaves room for those who would halt
    strangers: int = 64  # that have not, from the network and on this host each
    handshake_s: float = 5.0
    idle_s: float = 60.0  # callers that have nothing to say ask for the status
    in_flight: int = 256  # requests of one connection that wait for their answer
    unsent_bytes: int = 8 * 1024 * 1024
    goodbye_s: float = 5.0


class Connection:
    """One connection, and how much it waits for."""

    __slots__ = (
        "caller",
        "has_room",
        "in_flight",
        "is_local",
        "open",
        "rights",
        "seals",
        "silent_for",
        "stream",
        "task",
    )

    def __init__(self, stream: Stream, *, is_local: bool) -> None:
        self.stream = stream
        self.is_local = is_local
        self.caller = ""
        self.rights: frozenset[Right] = frozenset()
        self.seals: Seals | None = None
        self.open = True
        self.silent_for = 0
        self.in_flight = 0
        self.has_room = asyncio.Event()
        self.task: asyncio.Task[None] | None = None


class Server:
    """Serves one signer to the callers of its policy."""

    def __init__(
        self,
        ports: Ports,
        service: Service,
        secrets: Mapping[str, bytes],
        *,
        local_secret: bytes,
        limits: ServerLimits | None = None,
        log: Callable[[str], object],
    ) -> None:
        """`secrets`: of the policy's callers, by name."""
        self.connections: list[Connection] = []  # that have logged in
        self.strangers: list[Connection] = []  # that have not, oldest first
        self._ports = ports
        self._service = service
        self._secrets = dict(secrets)
        self._local_secret = local_secret
        self._limits = limits or ServerLimits()
        self._log = log
        self._trouble: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False

    async def run(self, address: str, local_address: str, ready: Callable[[str], object]) -> None:
        """Serve until `stop`; then answer what was asked. SignerStopped if the disk fails."""
        trouble = partial(self._happened, "connections can't be accepted, it is tried again")
        listeners = [await self._ports.listen(local_address, partial(self._accept, is_local=True), trouble)]
        idle = asyncio.create_task(supervise("signer-idle", self._end_silence, self._ports), name="signer-idle")
        try:
            listeners.append(await self._ports.listen(address, partial(self._accept, is_local=False), trouble))
            ready(listeners[1].address)
            await self._service.run()
        except SignerStopped:
            self._hang_up()
            raise
        finally:
            self._stopping = True
            for listener in listeners:
                listener.close()
            idle.cancel()
        await self._say_goodbye()

    def stop(self) -> None:
        """Take no more requests, and let `run` end."""
        self._stopping = True
        self._service.stop()

    def use(self, secrets: Mapping[str, bytes]) -> None:
        """Take the callers of a policy that was read anew; those whose secret or name is gone are put out."""
        before, self._secrets = self._secrets, dict(secrets)
        for connection in list(self.connections):
            name = connection.caller
            if not connection.is_local and before.get(name) != self._secrets.get(name):
                self._close(connection)
            elif not connection.is_local:
                connection.rights = self._rights(name)

    async def _say_goodbye(self) -> None:
        """Let answers leave, but not for ever: a caller may have stopped reading."""
        try:
            async with asyncio.timeout(self._limits.goodbye_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                for connection in list(self.connections):
                    try:
                        await connection.stream.drain()
                    except OSError:
                        continue
        except TimeoutError:
            pass
        self._hang_up()

    def _hang_up(self) -> None:
        for connection in [*self.connections, *self.strangers]:
            self._close(connection)
            if connection.task is not None:
                connection.task.cancel()
        for task in list(self._tasks):
            task.cancel()

    @staticmethod
    def _close(connection: Connection) -> None:
        connection.open = False
        connection.stream.close()

    async def _end_silence(self) -> None:
        """Close connections on which nothing is heard, and say how often trouble has happened."""
        while True:
            await self._ports.sleep(self._limits.idle_s / LOOKS)
            for connection in list(self.connections):
                connection.silent_for += 1
                if connection.silent_for > LOOKS and not connection.in_flight:
                    self._happened("closed a connection: nothing was heard for too long")
                    connection.stream.abort()
            trouble, self._trouble = self._trouble, {}
            for kind, times in trouble.items():
                if times > 1:
                    self._log(f"{kind}: it happened {times:,} times")

    def _happened(self, kind: str, detail: object = "") -> None:
        """One line for the first time, one for all others: a stranger must not fill the disk with lines."""
        times = self._trouble.get(kind, 0)
        if times or len(self._trouble) < KINDS_MAX:
            self._trouble[kind] = times + 1
            if not times:
                self._log(f"{kind}: {detail}" if detail else kind)

    # --- one connection

    def _accept(self, stream: Stream, *, is_local: bool) -> None:
        if self._stopping:
            stream.close()
            return
        # Each way in has places of its own: strangers in the network do not keep a halt on this host out.
        alike = [one for one in self.strangers if one.is_local is is_local]
        if len(alike) >= self._limits.strangers:
            self._happened("too many connections have not logged in: the oldest is closed for each new one")
            self.strangers.remove(alike[0])
            self._close(alike[0])
        connection = Connection(stream, is_local=is_local)
        self.strangers.append(connection)
        connection.task = asyncio.create_task(self._serve(connection), name="signer-connection")

    async def _serve(self, connection: Connection) -> None:
        try:
            splitter = Splitter(wire.LOGIN_BYTES_MAX)
            async with asyncio.timeout(self._limits.handshake_s):
                payloads = await self._handshake(connection, splitter)
            splitter.limit = wire.REQUEST_BYTES_MAX
            await self._requests(connection, splitter, payloads)
        except (ProtocolError, msgspec.MsgspecError, OSError, TimeoutError, ValueError) as error:
            if connection.open:  # not if it was closed from here
                self._happened(f"closed a connection: {type(error).__name__}", error)
        finally:
            self._close(connection)
            for where in (self.connections, self.strangers):
                if connection in where:
                    where.remove(connection)

    async def _handshake(self, connection: Connection, splitter: Splitter) -> list[bytes]:
        """Both sides prove themselves. Returns what the caller has already sent behind its login."""
        stream, state = connection.stream, self._service.state
        nonce = bytes.fromhex(self._ports.token() + self._ports.token())
        hello = wire.Hello(wire.VERSION, state.name, state.identity, nonce)
        stream.write(wire.frame(hello))
        payloads: list[bytes] = []
        while not payloads:
            data = await stream.read()
            if not data:
                raise ProtocolError("it ended during the handshake")
            payloads = splitter.feed(data)
        login = wire.decode_handshake(payloads[0])
        if not isinstance(login, wire.Login) or login.version != wire.VERSION:
            raise ProtocolError(f"it does not log in as version {wire.VERSION} does")
        secret = self._secret(connection, login.caller)
        if not secret or not wire.proves(wire.prove_login(secret, hello, login), login.proof):
            raise ProtocolError("it does not know the secret of the caller that it says it is")
        said = await self._judge(connection, login)
        said = msgspec.structs.replace(said, proof=wire.prove_answer(secret, hello, login, said))
        stream.write(wire.frame(said))
        if isinstance(said, wire.Refused):
            await stream.drain()
            raise ProtocolError(f"refused {login.caller}: {said.text}")
        connection.caller = login.caller
        connection.rights = LOCAL_RIGHTS if connection.is_local else self._rights(login.caller)
        connection.seals = Seals(secret, hello, login.caller, login.nonce, is_signer=True)
        if connection in self.strangers:  # and not closed meanwhile, to make way
            self.strangers.remove(connection)
            self.connections.append(connection)
        return payloads[1:]

    def _secret(self, connection: Connection, caller: str) -> bytes:
        if connection.is_local:
            return self._local_secret if caller == LOCAL else b""
        return self._secrets.get(caller, b"")

    def _rights(self, caller: str) -> frozenset[Right]:
        policy = self._service.policy
        found = None if policy is None else policy.callers.get(caller)
        return frozenset() if found is None else found.rights

    async def _judge(self, connection: Connection, login: wire.Login) -> wire.Welcome | wire.Refused:
        """What to answer a caller that knows its secret; not proved yet."""
        service = self._service
        status = await service.status()  # waits for the disk: what is said next is about it
        at = status.sequence
        if login.identity and login.identity != status.identity:
            text = f"this is the signer with identity {status.identity}, not {login.identity}"
            return wire.Refused(at, wire.OTHER_SIGNER, text, b"")
        behind = restored(mark=login.seen, sequence=at) is Restored.PEER
        if behind and not connection.is_local and not self._rights(login.caller) & MAY_STOP:
            # Nothing rests on what it has seen, and it has no right to stop the signer.
            self._happened(
                f"CRITICAL: {login.caller} says that it has seen sequence {login.seen}; this log ends at {at}"
            )
            return wire.Refused(at, wire.BEHIND, f"this log ends at {at}", b"")
        if behind:
            self._log(
                f"CRITICAL: {login.caller} has seen sequence {login.seen}, and this log ends at {at}: it was restored "
                "from an old copy. The signer answers no caller until it is started on the newest log."
            )
            await service.fell_behind(login.caller, login.seen)
            for other in [*self.connections, *self.strangers]:
                if other is not connection and not other.is_local:
                    self._close(other)
        if service.state.behind and not connection.is_local:
            text = f"this log ends at {at}, and sequence {service.state.behind} has been acknowledged"
            return wire.Refused(at, wire.BEHIND, text, b"")
        if self._is_full(login.caller) and not connection.is_local:
            self._happened("refused a caller: there are too many")
            return wire.Refused(at, wire.FULL, "too many callers are connected already, or too many of this name", b"")
        return wire.Welcome(at, b"")

    def _is_full(self, caller: str) -> bool:
        alike = sum(one.caller == caller for one in self.connections)
        return len(self.connections) >= self._limits.connections or alike >= self._limits.connections_of_caller

    async def _requests(self, connection: Connection, splitter: Splitter, payloads: list[bytes]) -> None:
        stream, seals = connection.stream, connection.seals
        assert seals is not None  # the handshake has set it
        while True:
            for payload in payloads:
                await self._room_for(connection)
                if not connection.open or self._stopping:
                    return
                request = wire.decode_request(seals.open(payload))
                connection.in_flight += 1
                task = asyncio.create_task(self._answer(connection, request), name="signer-request")
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await self._room_for(connection)
            data = await stream.read()
            if not data:
                return
            connection.silent_for = 0
            payloads = splitter.feed(data)

    async def _room_for(self, connection: Connection) -> None:
        while connection.in_flight >= self._limits.in_flight:
            connection.has_room.clear()
            await connection.has_room.wait()
        if connection.stream.unsent > self._limits.unsent_bytes:
            await connection.stream.drain()

    # --- one request

    async def _answer(self, connection: Connection, request: wire.Request) -> None:
        """Decide it, and send the answer if the caller is still there."""
        try:
            answer = await self._judged(connection, request)
        except SignerUnavailable as error:
            self._happened("closed a connection: there is no answer", error)
            self._close(connection)
            return
        except Exception as error:  # one request must not end the signer: the caller learns nothing
            self._happened(f"CRITICAL: a request failed: {type(error).__name__}", error)
            self._close(connection)
            return
        finally:
            connection.in_flight -= 1
            connection.has_room.set()
        if connection.open and connection.seals is not None:
            connection.stream.write(connection.seals.seal(answer))

    async def _judged(self, connection: Connection, request: wire.Request) -> wire.Answer:
        number = request.number
        try:
            if not self._may(connection, request):
                sequence = (await self._service.status()).sequence
                why = f"{connection.caller} may not ask for that"
                return wire.No(number, Reason.NOT_PERMITTED.value, why, False, sequence)
            return await self._ask(connection, request)
        except SignerRefused as no:
            return wire.No(number, no.reason, no.why, no.denied, no.sequence)
        except SignerUnavailable:
            raise
        except BursarError as error:  # a name or a reason that can't be
            return wire.No(number, Reason.MALFORMED.value, str(error), False, self._service.durable)

    @staticmethod
    def _may(connection: Connection, request: wire.Request) -> bool:
        if isinstance(request, wire.AskUnhalt):
            return connection.is_local
        return RIGHTS[type(request)] in connection.rights

    async def _ask(self, connection: Connection, request: wire.Request) -> wire.Answer:
        service, caller, number = self._service, connection.caller, request.number
        match request:
            case wire.AskPreview(_, payment, authorization, wallet):
                return wire.Previewed(number, await service.preview(payment, authorization, wallet))
            case wire.AskSign(_, asked):
                return _definite(number, await service.sign(caller, asked))
            case wire.AskCancel(_, payout, attempt):
                return _definite(number, await service.cancel(caller, payout, attempt))
            case wire.AskLog(_, after, limit):
                return wire.Logged(number, list(await service.log(after, limit)))
            case wire.AskAttempts(_, payout):
                found = await service.attempts(payout)
                return wire.Attempts(number, list(found), service.durable)
            case wire.AskStatus():
                return wire.Told(number, await service.status())
            case wire.AskHalt(_, reason):
                return wire.Done(number, await service.halt(caller, reason))
            case wire.AskUnhalt(_, people, approvals):
                return wire.Done(number, await service.unhalt(people, approvals))
            case wire.AskRelease(_, release, approvals):
                return wire.Done(number, await service.release(caller, release, approvals))


def _definite(number: int, answer: Signature | Never) -> wire.Answer:
    if isinstance(answer, Signature):
        return wire.Signed(number, answer)
    return wire.NeverSigned(number, answer)
