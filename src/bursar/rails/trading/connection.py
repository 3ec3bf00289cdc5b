"""A client's side of the handshake: a connection on which both have proved themselves, or why there is none."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from bursar.ports import Ports, Stream
from bursar.rails.trading import protocol
from bursar.rails.trading.protocol import ProtocolError, Splitter
from bursar.rails.trading.replies import CORE_BEHIND, CORE_REFUSED, NOT_CONNECTED


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
    sequence: int  # what the core had on disk


async def connect(ports: Ports, target: Target, seen: int, timeout_s: float) -> Connected:
    """Connect and shake hands, or raise NoConnection. `seen`: the highest sequence heard of (T33)."""
    stream: Stream | None = None
    try:
        async with asyncio.timeout(timeout_s):
            stream = await ports.connect(target.address)
            connected = await _handshake(ports, target, stream, seen)
    except BaseException as error:
        if stream is not None:
            stream.abort()
        match error:
            case NoConnection():
                raise
            case TimeoutError():
                raise NoConnection(NOT_CONNECTED, "the core did not answer in time") from error
            case OSError():
                raise NoConnection(NOT_CONNECTED, f"{type(error).__name__}: {error}") from error
            case ProtocolError() | msgspec.MsgspecError() | ValueError():
                raise NoConnection(CORE_REFUSED, str(error)) from error
            case _:
                raise
    return connected


async def _handshake(ports: Ports, target: Target, stream: Stream, seen: int) -> Connected:
    splitter = Splitter(protocol.LOGIN_BYTES_MAX)
    payloads: list[bytes] = []

    async def read() -> protocol.Handshake:
        while not payloads:
            data = await stream.read()
            if not data:
                raise NoConnection(CORE_REFUSED, "the core ended the handshake: is the secret right?")
            payloads.extend(splitter.feed(data))
        said: protocol.Handshake = protocol.decode_handshake(payloads.pop(0))
        return said

    hello = await read()
    if not isinstance(hello, protocol.Hello) or hello.version != protocol.VERSION:
        raise ProtocolError("it does not greet as a core of this version does")
    if hello.name != target.name:
        raise NoConnection(CORE_REFUSED, f"this is the core {hello.name!r}, not {target.name!r}")
    nonce = bytes.fromhex(ports.token() + ports.token())
    proof = protocol.prove(target.secret, "client", target.name, hello.nonce, nonce, seen)
    stream.write(protocol.frame(protocol.Login(protocol.VERSION, nonce, seen, proof)))
    # From the login on, answers may be as large as they get.
    splitter.limit = protocol.ANSWER_BYTES_MAX
    said = await read()
    if not isinstance(said, protocol.Welcome | protocol.Refused):
        raise ProtocolError("it does not answer a login")
    sequence, why = said.sequence, said.why if isinstance(said, protocol.Refused) else ""
    proof = protocol.prove(target.secret, "core", target.name, hello.nonce, nonce, sequence, why)
    if not protocol.proves(proof, said.proof):
        raise NoConnection(CORE_REFUSED, "the core does not know the secret")
    if isinstance(said, protocol.Refused):
        raise NoConnection(CORE_BEHIND if why == protocol.BEHIND else CORE_REFUSED, said.text)
    if sequence < seen:
        raise NoConnection(CORE_BEHIND, f"the core knows sequences up to {sequence}, and {seen} has been acknowledged")
    return Connected(stream, splitter, payloads, sequence)
