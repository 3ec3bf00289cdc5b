"""A client's side of the handshake: a connection on which both have proved themselves, or why there is none.

The core's identity is compared before anything is said to it: a core that is not the one this ledger is bound to hears
neither an operation nor a sequence, which would make it believe that it has forgotten something.

`CoreLink` is the ledger's side. A ledger's database keeps, durably, which core it is bound to and the highest sequence
of it that it relies on. The client asks before every login, because other processes of the same ledger learn more
meanwhile. At first contact it has its own side bound before the core binds itself, so that a crash in between leaves
nothing that another core or another ledger could slip into. Not here: how the ledger keeps it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import msgspec

from bursar.model.errors import BursarError
from bursar.model.marks import Restored, restored
from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.protocol import ProtocolError, Splitter
from bursar.rails.trading.replies import (
    CORE_BEHIND,
    CORE_REFUSED,
    LINK_FAILED,
    NOT_CONNECTED,
    OTHER_CORE,
    OTHER_LEDGER,
    Floors,
)

BIND_NUMBER = 0  # the first request of a connection; those of callers begin with 1


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """What a client's ledger knows of a core."""

    ledger: str = ""  # identity of the ledger that this client works for; "": for none
    core: str = ""  # identity of the core that the ledger is bound to; "": none yet
    seen: int = 0  # the highest sequence of this core that the ledger's database relies on (T33)


class CoreRefused(BursarError):
    """The ledger is bound to another core."""

    known: str
    found: str
    code = "OTHER_CORE"
    text = (
        "this ledger is bound to the core with identity {known}, and the one at this address is {found}: restore the "
        "data folder of {known}, or point the setting to its address. Nothing was sent to {found}"
    )


class CoreLink(Protocol):
    """The ledger's side of a connection to a core."""

    async def known(self) -> Known:
        """What to tell the core. Asked before every login; if it raises, the connection is tried again later."""

    async def bind(self, core: str) -> None:
        """Remember durably that the ledger is bound to this core; CoreRefused if it is bound to another."""


class FixedLink:
    """A link that knows what it was given. For clients that work for no ledger: a matching engine, tools, tests."""

    def __init__(self, known: Known | None = None) -> None:
        self._known = known or Known()

    async def known(self) -> Known:
        """What it was given, and the core that it has met."""
        return self._known

    async def bind(self, core: str) -> None:
        """Remember the core, as long as this object lives."""
        if self._known.core not in ("", core):
            raise CoreRefused(self._known.core, core)
        self._known = msgspec.structs.replace(self._known, core=core)


class NoConnection(Exception):
    """There is no connection, and why."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


@dataclass(frozen=True)
class Target:
    """Which core, where, and how to prove oneself to it."""

    address: str
    name: str
    secret: bytes


@dataclass
class Connected:
    """An open connection."""

    stream: Stream
    splitter: Splitter
    payloads: list[bytes]  # what came right behind the handshake
    core: str  # the core's identity
    sequence: int  # what the core had on disk
    floors: Floors


async def connect(ports: Ports, target: Target, link: CoreLink, heard: Known, timeout_s: float) -> Connected:
    """Connect and shake hands, or raise NoConnection. `heard`: what this client itself has heard from the core."""
    async with _time_for_ledger(timeout_s, "what the ledger knows of this core can't be read"):
        known = await link.known()
    # A core that answers with another identity than before is not the one whose answers we hold. If operators have put
    # it in that one's place, what we heard from the old one says nothing about the new one.
    seen = known.seen if known.core not in ("", heard.core) else max(known.seen, heard.seen)
    both = Known(ledger=known.ledger, core=known.core or heard.core, seen=seen)
    stream: Stream | None = None
    try:
        async with asyncio.timeout(timeout_s):
            stream = await ports.connect(target.address)
            connection = _Handshake(ports, target, stream)
            connected = await connection.shake(both)
        await connection.bind(known, link, timeout_s)
    except BaseException as error:
        if stream is not None:
            stream.abort()
        match error:
            case NoConnection():
                raise
            case CoreRefused():
                raise NoConnection(OTHER_CORE, str(error)) from error
            case TimeoutError():
                raise NoConnection(NOT_CONNECTED, "the core did not answer in time") from error
            case ProtocolError() | msgspec.MsgspecError() | ValueError():
                raise NoConnection(CORE_REFUSED, str(error)) from error
            case Exception():  # whatever it is, the client goes on trying
                raise NoConnection(NOT_CONNECTED, f"{type(error).__name__}: {error}") from error
            case _:
                raise
    return connected


@contextlib.asynccontextmanager
async def _time_for_ledger(timeout_s: float, failed: str) -> AsyncIterator[None]:
    """A call to the ledger. A database that is down must not end the client: it is asked again."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except CoreRefused:
        raise
    except Exception as error:
        raise NoConnection(LINK_FAILED, f"{failed}: {str(error) or type(error).__name__}") from error


class _Handshake:
    """One stream on its way to being a connection."""

    def __init__(self, ports: Ports, target: Target, stream: Stream) -> None:
        self._ports = ports
        self._target = target
        self._stream = stream
        self._splitter = Splitter(protocol.LOGIN_BYTES_MAX)
        self._payloads: list[bytes] = []
        self._greeted_by = ""
        self._bound_to = ""

    async def _read(self) -> bytes:
        while not self._payloads:
            data = await self._stream.read()
            if not data and not self._greeted_by:
                raise NoConnection(NOT_CONNECTED, "the core ended the connection before it said who it is")
            if not data:
                raise NoConnection(CORE_REFUSED, "the core ended the handshake: is the secret right?")
            self._payloads.extend(self._splitter.feed(data))
        return self._payloads.pop(0)

    async def shake(self, known: Known) -> Connected:
        """Prove ourselves to the right core, and let it prove itself."""
        target = self._target
        hello = self._greeted(await self._read(), known)
        self._greeted_by = hello.core
        nonce = bytes.fromhex(self._ports.token() + self._ports.token())
        proof = protocol.prove_login(target.secret, hello, nonce, known.seen, known.ledger)
        login = protocol.Login(protocol.VERSION, nonce, known.seen, known.ledger, proof)
        self._stream.write(protocol.frame(login))
        # From the login on, answers may be as large as they get.
        self._splitter.limit = protocol.ANSWER_BYTES_MAX
        said = protocol.decode_handshake(await self._read())
        if not isinstance(said, protocol.Welcome | protocol.Refused):
            raise ProtocolError("it does not answer a login")
        if isinstance(said, protocol.Refused) and said.why == protocol.FULL:
            raise NoConnection(NOT_CONNECTED, f"the core has no place for us: {said.text}")  # proved or not: try again
        if not protocol.proves(protocol.prove_answer(target.secret, hello, nonce, said), said.proof):
            raise NoConnection(CORE_REFUSED, "the core does not know the secret")
        if isinstance(said, protocol.Refused):
            codes = {protocol.BEHIND: CORE_BEHIND, protocol.OTHER_LEDGER: OTHER_LEDGER}
            raise NoConnection(codes.get(said.why, CORE_REFUSED), said.text)
        if restored(mark=known.seen, sequence=said.sequence) is Restored.PEER:
            why = f"the core knows sequences up to {said.sequence}, and {known.seen} has been acknowledged"
            raise NoConnection(CORE_BEHIND, why)
        self._bound_to = said.ledger
        floors = Floors(said.room, said.forget)
        return Connected(self._stream, self._splitter, self._payloads, hello.core, said.sequence, floors)

    def _greeted(self, payload: bytes, known: Known) -> protocol.Hello:
        """Its greeting, if this is the core we look for. What it says is proved later; until then nothing is sent."""
        try:
            hello = protocol.decode_handshake(payload)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"it does not greet as a core of version {protocol.VERSION} does") from error
        if not isinstance(hello, protocol.Hello) or hello.version != protocol.VERSION:
            raise ProtocolError(f"it does not greet as a core of version {protocol.VERSION} does")
        if hello.name != self._target.name:
            raise NoConnection(CORE_REFUSED, f"this is the core {hello.name!r}, not {self._target.name!r}")
        if known.core and hello.core != known.core:
            raise CoreRefused(known.core, hello.core)
        return hello

    async def bind(self, known: Known, link: CoreLink, timeout_s: float) -> None:
        """At first contact: bind the ledger's side durably, and only then the core's."""
        if not known.ledger:
            return
        if not known.core:
            async with _time_for_ledger(timeout_s, "the ledger can't remember this core"):
                await link.bind(self._greeted_by)
        if self._bound_to:
            return
        async with asyncio.timeout(timeout_s):
            self._stream.write(protocol.frame(protocol.Bind(BIND_NUMBER, known.ledger)))
            answer = protocol.decode_answer(await self._read())
        if not isinstance(answer, protocol.Bound):
            raise ProtocolError("it does not answer a request to be bound")
        if answer.ledger != known.ledger:
            raise NoConnection(OTHER_LEDGER, other_ledger(answer.ledger, known.ledger))


def other_ledger(bound_to: str, named: str) -> str:
    """What to do about a core that works for another ledger."""
    return (
        f"this core is bound to the ledger {bound_to}, and the client works for {named}: use the database of "
        f"{bound_to}, or give {named} a core with a data folder of its own"
    )
