"""A caller's side of the signer: any number of concurrent questions over one connection.

The connection is made anew when it breaks, with back-off. What was on its way then is `SignerUnavailable`, which says
nothing: the caller asks again for exactly the same bytes (W30). Nothing is asked again here. While the signer can't be
reached, questions fail at once instead of queueing.

`SignerLink` is what the caller's database knows of the signer: which one it is, and the highest sequence of its log
that anything rests on. It is read before every login. A signer whose log ends before it, or that has another log, is
not spoken to (W33). Not here: how the database keeps it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol, Self, TypeVar

import msgspec

from bursar.model.authorizations import Approval, Authorization, Payment, Release
from bursar.model.marks import Restored, restored
from bursar.ports import Ports, Stream
from bursar.signer import wire
from bursar.signer.protocol import (
    KnownAttempt,
    LogEntry,
    Never,
    Preview,
    Signature,
    SignerRefused,
    SignerStatus,
    SignerUnavailable,
    SignRequest,
)
from bursar.signer.wire import ProtocolError, Seals, Splitter
from bursar.supervise import supervise

PING_S: Final = 15.0
BACKOFF_S, BACKOFF_S_MAX = 0.05, 2.0
IN_FLIGHT_MAX: Final = 200  # below what a signer takes of one connection

A = TypeVar("A")


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a caller knows of a signer."""

    identity: str = ""  # of its log; "": none yet
    seen: int = 0  # the highest sequence that anything rests on


class SignerLink(Protocol):
    """The caller's memory of the signer."""

    async def known(self) -> Known:
        """What to tell it. Asked before every login; if it raises, the connection is tried again later."""
        ...

    async def bind(self, identity: str) -> None:
        """Remember durably, at first contact, which signer this is; SignerUnavailable if it is another one."""
        ...


class FixedLink:
    """A link that remembers as long as it lives: for tools and tests."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known or Known()

    async def known(self) -> Known:
        """What it was given, and the signer that it has met."""
        return self._known

    async def bind(self, identity: str) -> None:
        """Remember it."""
        self._known = msgspec.structs.replace(self._known, identity=identity)


@dataclass(frozen=True)
class Target:
    """Which signer, where, and how to prove oneself to it."""

    address: str
    name: str
    caller: str
    secret: bytes

    def __repr__(self) -> str:
        return f"Target({self.address!r}, {self.name!r}, {self.caller!r})"


@dataclass
class Connected:
    """An open connection."""

    stream: Stream
    splitter: Splitter
    payloads: list[bytes]
    seals: Seals
    identity: str
    sequence: int


class SignerClient:
    """Questions to one signer; implements `protocol.Signer`. Use it as `async with`, or `start` and `close` it."""

    def __init__(
        self,
        ports: Ports,
        address: str,
        *,
        name: str,
        caller: str,
        secret: bytes,
        link: SignerLink | None = None,
        timeout_s: float = 10.0,
    ) -> None:
        self.name = name
        self.sequence = 0  # the highest heard of
        self.identity = ""
        self._target = Target(address, name, caller, secret)
        self._link = link or FixedLink()
        self._timeout_s = timeout_s
        self._ports = ports
        self._connected: Connected | None = None
        self._trouble = ""  # why there is no connection, once one was tried
        self._tried = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[wire.Answer]] = {}
        self._room = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._number = 0
        self._heard_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._closed = False

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def start(self) -> None:
        """Begin to connect. Questions may be asked at once."""
        self._tasks = [
            asyncio.create_task(supervise("signer-client", self._keep_connected, self._ports), name="signer-client"),
            asyncio.create_task(supervise("signer-client-ping", self._ping, self._ports), name="signer-client-ping"),
        ]

    async def close(self) -> None:
        """Stop. Questions that still wait get `SignerUnavailable`."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._connected is not None:
            self._connected.stream.close()
        self._disconnect("the client was closed")

    # --- questions

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        return self._expect(
            await self._ask(lambda n: wire.AskPreview(n, payment, authorization, wallet)), wire.Previewed
        ).preview

    async def sign(self, request: SignRequest) -> Signature | Never:
        return self._definite(await self._ask(lambda n: wire.AskSign(n, request)))

    async def cancel(self, payout: str, attempt: int) -> Signature | Never:
        return self._definite(await self._ask(lambda n: wire.AskCancel(n, payout, attempt)))

    async def attempts(self, payout: str) -> tuple[KnownAttempt, ...]:
        asked = await self._ask(lambda n: wire.AskAttempts(n, payout))
        return tuple(self._expect(asked, wire.Attempts).attempts)

    async def log(self, after: int, limit: int = 1_000) -> tuple[LogEntry, ...]:
        """Signatures and tombstones behind a sequence. One answer may be short; none: there are no more."""
        return tuple(self._expect(await self._ask(lambda n: wire.AskLog(n, after, limit)), wire.Logged).entries)

    async def status(self) -> SignerStatus:
        return self._expect(await self._ask(wire.AskStatus), wire.Told).status

    async def release(self, release: Release, approvals: Sequence[Approval]) -> int:
        """Declare attempts dead by two approvers' word; the sequence at which it is so."""
        asked = await self._ask(lambda n: wire.AskRelease(n, release, list(approvals)))
        return self._expect(asked, wire.Done).sequence

    async def halt(self, reason: str) -> int:
        """Stop all signing; the sequence at which it is so."""
        return self._expect(await self._ask(lambda n: wire.AskHalt(n, reason)), wire.Done).sequence

    async def unhalt(self, people: Sequence[str], approvals: Sequence[Approval]) -> int:
        """Lift a halt. On the signer's own host alone."""
        asked = await self._ask(lambda n: wire.AskUnhalt(n, list(people), list(approvals)))
        return self._expect(asked, wire.Done).sequence

    def _definite(self, answer: wire.Answer) -> Signature | Never:
        if isinstance(answer, wire.Signed):
            return answer.signature
        return self._expect(answer, wire.NeverSigned).never

    def _expect(self, answer: wire.Answer, kind: type[A]) -> A:
        if not isinstance(answer, kind):
            raise self._unavailable("it answered another question")
        return answer

    async def _ask(self, request: Callable[[int], wire.Request]) -> wire.Answer:
        """One question, one answer. Anything unclear is SignerUnavailable; a refusal is SignerRefused."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._tried.wait()
                connected = self._connected
                if self._closed or connected is None:
                    raise self._unavailable(self._trouble or "there is no connection")
                async with self._room:
                    answer = await self._exchange(connected, request)
        except TimeoutError:
            self._fell_silent()
            raise self._unavailable("no answer in time") from None
        if isinstance(answer, wire.No):
            self.sequence = max(self.sequence, answer.sequence)
            raise SignerRefused(answer.reason, answer.why, answer.denied, answer.sequence)
        return answer

    async def _exchange(self, connected: Connected, request: Callable[[int], wire.Request]) -> wire.Answer:
        if connected is not self._connected:  # it broke while this question waited for its turn
            raise self._unavailable(self._trouble or "the connection was lost")
        self._number = number = self._number + 1
        waiting: asyncio.Future[wire.Answer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = waiting
        try:
            connected.stream.write(connected.seals.seal(request(number)))
            return await waiting
        finally:
            self._waiting.pop(number, None)

    def _fell_silent(self) -> None:
        """If nothing at all was heard for so long, the connection is not worth keeping."""
        connected = self._connected
        if connected is not None and self._ports.monotonic() - self._heard_at >= self._timeout_s:
            connected.stream.abort()
            self._disconnect("the signer fell silent")

    def _unavailable(self, why: str) -> SignerUnavailable:
        return SignerUnavailable(self.name, why)

    # --- the connection

    async def _keep_connected(self) -> None:
        failures = 0
        while True:
            try:
                connected = await self._connect()
            except SignerUnavailable as error:
                failures += 1
                self._disconnect(error.why)
                self._tried.set()
                longest = min(BACKOFF_S_MAX, BACKOFF_S * 2 ** min(failures, 10))
                await self._ports.sleep(longest * (0.5 + self._ports.random() / 2))
                continue
            failures = 0
            self._connected, self._trouble = connected, ""
            self.identity, self.sequence = connected.identity, max(self.sequence, connected.sequence)
            self._heard_at = self._ports.monotonic()
            self._tried.set()
            why = await self._read(connected)
            connected.stream.abort()
            if self._connected is connected:
                self._disconnect(why)

    async def _connect(self) -> Connected:
        """Connect and shake hands; SignerUnavailable says why not."""
        stream: Stream | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                known = await self._link.known()
                stream = await self._ports.connect(self._target.address)
                connected = await self._shake(stream, known)
                if not known.identity:
                    await self._link.bind(connected.identity)
                return connected
        except BaseException as error:
            if stream is not None:
                stream.abort()
            match error:
                case SignerUnavailable():
                    raise
                case TimeoutError():
                    raise self._unavailable("it did not answer in time") from None
                case Exception():  # whatever it is, the client goes on trying
                    raise self._unavailable(f"{type(error).__name__}: {error}") from error
                case _:
                    raise

    async def _shake(self, stream: Stream, known: Known) -> Connected:
        target, splitter = self._target, Splitter(wire.LOGIN_BYTES_MAX)
        payloads: list[bytes] = []

        async def read() -> bytes:
            while not payloads:
                data = await stream.read()
                if not data:
                    raise self._unavailable("it ended the handshake: are name and secret of the caller right?")
                payloads.extend(splitter.feed(data))
            return payloads.pop(0)

        hello = wire.decode_handshake(await read())
        if not isinstance(hello, wire.Hello) or hello.version != wire.VERSION:
            raise ProtocolError(f"it does not greet as a signer of version {wire.VERSION} does")
        if hello.name != target.name:
            raise self._unavailable(f"this is the signer {hello.name!r}")
        if known.identity not in ("", hello.identity):
            # Before a word is said to it: a sequence of another log would make it believe that it has lost something.
            raise self._unavailable(f"its log has the identity {hello.identity}, and we know {known.identity}")
        nonce = bytes.fromhex(self._ports.token() + self._ports.token())
        seen = max(known.seen, self.sequence if hello.identity == self.identity else 0)
        login = wire.Login(wire.VERSION, target.caller, nonce, known.identity or self.identity, seen, b"")
        login = msgspec.structs.replace(login, proof=wire.prove_login(target.secret, hello, login))
        stream.write(wire.frame(login))
        said = wire.decode_handshake(await read())
        if not isinstance(said, wire.Welcome | wire.Refused):
            raise ProtocolError("it does not answer a login")
        if not wire.proves(wire.prove_answer(target.secret, hello, login, said), said.proof):
            raise self._unavailable("it does not know the secret")
        if isinstance(said, wire.Refused):
            raise self._unavailable(f"{said.why}: {said.text}")
        if restored(mark=seen, sequence=said.sequence) is Restored.PEER:
            raise self._unavailable(f"{wire.BEHIND}: its log ends at {said.sequence}, and we have seen {seen}")
        splitter.limit = wire.ANSWER_BYTES_MAX
        seals = Seals(target.secret, hello, target.caller, nonce, is_signer=False)
        return Connected(stream, splitter, payloads, seals, hello.identity, said.sequence)

    async def _read(self, connected: Connected) -> str:
        """Hand out answers until the connection ends; returns why it did."""
        payloads = connected.payloads
        try:
            while True:
                for payload in payloads:
                    self._on_answer(wire.decode_answer(connected.seals.open(payload)))
                data = await connected.stream.read()
                if not data:
                    return "the signer closed the connection"
                self._heard_at = self._ports.monotonic()
                payloads = connected.splitter.feed(data)
        except (OSError, ProtocolError, msgspec.MsgspecError, ValueError) as error:
            return f"{type(error).__name__}: {error}"

    def _on_answer(self, answer: wire.Answer) -> None:
        self.sequence = max(self.sequence, _sequence_of(answer))
        waiting = self._waiting.get(answer.number)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    def _disconnect(self, why: str) -> None:
        """There is no connection: every question that waits is unanswered."""
        self._connected, self._trouble = None, why
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(self._unavailable(why))

    async def _ping(self) -> None:
        """Say something now and then, so that the signer keeps the connection, and a dead one is noticed."""
        while True:
            await self._ports.sleep(PING_S)
            if self._connected is not None:
                try:
                    await self._ask(wire.AskStatus)
                except (SignerUnavailable, SignerRefused):
                    continue


def _sequence_of(answer: wire.Answer) -> int:
    match answer:
        case wire.Previewed(_, preview):
            return preview.sequence
        case wire.Signed(_, signature):
            return signature.sequence
        case wire.NeverSigned(_, never):
            return never.sequence
        case wire.Told(_, status):
            return status.sequence
        case wire.Logged(_, entries):
            return entries[-1].sequence if entries else 0
        case wire.Done(_, sequence) | wire.No(_, _, _, _, sequence) | wire.Attempts(_, _, sequence):
            return sequence
