"""The wire: frames, messages, the handshake in which both sides prove themselves, and a seal on every frame.

A frame is a length (u32, big-endian) and that many bytes. In the handshake they are MessagePack: an array whose first
element says what it is. Afterwards 32 bytes of HMAC stand in front of it. Requests carry a number that their answer
repeats; many may be on their way.

    signer  Hello(version, name, identity, nonce)        identity: of its log, for ever
    caller  Login(version, caller, nonce, identity, seen, proof)   what it knows of the signer; "" and 0: nothing
    signer  Welcome(sequence, proof) or Refused(sequence, why, text, proof)

Each caller has a name and a secret of its own. A proof is an HMAC under it over the role, what Hello says, the
caller's name, its nonce, and what the message itself says. It covers the other side's fresh nonce, so a recorded
handshake is worth nothing; it names both sides, so that no side is taken for another; it names the role, so that a
proof can't be sent back to its maker. Both nonces also make two session keys, one for each direction. The HMAC of a
frame is under the session key of its direction, over the frame's number and its bytes: a frame that is changed, left
out, repeated or moved ends the connection.

Nothing is encrypted: an observer reads payments and signed transactions, which are public on their chain soon after.
Over TCP, use a network that you trust, or a tunnel."""

from __future__ import annotations

import hmac
from struct import Struct
from typing import Annotated, Final

import msgspec

from bursar.model.authorizations import Approval, Authorization, Payment, Release
from bursar.signer.protocol import KnownAttempt, LogEntry, Never, Preview, Signature, SignerStatus, SignRequest

VERSION: Final = 1
NONCE_BYTES: Final = 32
REQUEST_BYTES_MAX: Final = 64 * 1024
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
LOGIN_BYTES_MAX: Final = 1024
SEAL_BYTES: Final = 32
BEHIND: Final = "BEHIND"  # why a signer refuses: its log lacks what the caller has seen
OTHER_SIGNER: Final = "OTHER_SIGNER"  # or it has another log than the one that the caller knows
FULL: Final = "FULL"

U64 = Annotated[int, msgspec.Meta(ge=0)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
_LENGTH: Final = Struct(">I")
_NUMBER: Final = Struct(">Q")


class ProtocolError(Exception):
    """The other side does not speak this protocol, or not any more: the connection is of no further use."""


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array that begins with its tag."""


class Hello(_Message, frozen=True, tag=1):
    """The signer's first words."""

    version: int
    name: Name
    identity: Name
    nonce: Nonce


class Login(_Message, frozen=True, tag=2):
    """The caller's answer."""

    version: int
    caller: Name
    nonce: Nonce
    identity: Name
    seen: U64
    proof: bytes


class Welcome(_Message, frozen=True, tag=3):
    """The caller knows its secret; so does the signer."""

    sequence: U64
    proof: bytes


class Refused(_Message, frozen=True, tag=4):
    """The caller knows its secret, and is not served all the same."""

    sequence: U64
    why: str
    text: str
    proof: bytes


class AskPreview(_Message, frozen=True, tag=10):
    """Would it sign this?"""

    number: U64
    payment: Payment
    authorization: Authorization
    wallet: Name


class AskSign(_Message, frozen=True, tag=11):
    """Sign this."""

    number: U64
    request: SignRequest


class AskCancel(_Message, frozen=True, tag=12):
    """Make an attempt definite."""

    number: U64
    payout: Name
    attempt: U64


class AskLog(_Message, frozen=True, tag=13):
    """Signatures and tombstones behind a sequence."""

    number: U64
    after: U64
    limit: U64


class AskStatus(_Message, frozen=True, tag=14):
    """Who is it, and does it sign? Also said by a caller that has nothing to say."""

    number: U64


class AskHalt(_Message, frozen=True, tag=15):
    """Sign nothing any more."""

    number: U64
    reason: str


class AskUnhalt(_Message, frozen=True, tag=16):
    """Sign again. On the signer's own host only."""

    number: U64
    people: list[Name]
    approvals: list[Approval]


class AskRelease(_Message, frozen=True, tag=17):
    """Attempts are dead, by two approvers' word."""

    number: U64
    release: Release
    approvals: list[Approval]


class AskAttempts(_Message, frozen=True, tag=18):
    """What is on record for a payout?"""

    number: U64
    payout: Name


class Previewed(_Message, frozen=True, tag=30):
    """To AskPreview."""

    number: U64
    preview: Preview


class Signed(_Message, frozen=True, tag=31):
    """To AskSign and AskCancel: these are the bytes."""

    number: U64
    signature: Signature


class NeverSigned(_Message, frozen=True, tag=32):
    """To AskSign and AskCancel: a tombstone."""

    number: U64
    never: Never


class Logged(_Message, frozen=True, tag=33):
    """To AskLog."""

    number: U64
    entries: list[LogEntry]


class Told(_Message, frozen=True, tag=34):
    """To AskStatus."""

    number: U64
    status: SignerStatus


class Done(_Message, frozen=True, tag=35):
    """To AskHalt, AskUnhalt and AskRelease: it is so, since this sequence."""

    number: U64
    sequence: U64


class Attempts(_Message, frozen=True, tag=37):
    """To AskAttempts."""

    number: U64
    attempts: list[KnownAttempt]
    sequence: U64


class No(_Message, frozen=True, tag=36):
    """To any: a refusal."""

    number: U64
    reason: str
    why: str
    denied: bool
    sequence: U64


Handshake = Hello | Login | Welcome | Refused
Request = AskPreview | AskSign | AskCancel | AskLog | AskStatus | AskHalt | AskUnhalt | AskRelease | AskAttempts
Answer = Previewed | Signed | NeverSigned | Logged | Told | Done | No | Attempts

_encoder = msgspec.msgpack.Encoder()
decode_handshake = msgspec.msgpack.Decoder(Handshake).decode
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode


def frame(message: Handshake) -> bytes:
    """A message of the handshake, ready to be sent."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class Splitter:
    """Cuts a stream of bytes into payloads. Holds at most one frame that is not complete."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. ProtocolError if one says that it is larger than allowed."""
        buffer = self._buffer
        buffer += data
        found, at = [], 0
        while len(buffer) - at >= _LENGTH.size:
            length = _LENGTH.unpack_from(buffer, at)[0]
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes, and at most {self.limit} are allowed")
            end = at + _LENGTH.size + length
            if end > len(buffer):
                break
            found.append(bytes(buffer[at + _LENGTH.size : end]))
            at = end
        del buffer[:at]
        return found


class Seals:
    """Seals what one side sends, and opens what it receives. One per connection and side."""

    __slots__ = ("_receive", "_received", "_send", "_sent")

    def __init__(self, secret: bytes, hello: Hello, caller: str, nonce: bytes, *, is_signer: bool) -> None:
        keys = [prove(secret, f"session of the {role}", hello, caller, nonce) for role in ("signer", "caller")]
        self._send, self._receive = keys if is_signer else reversed(keys)
        self._sent = self._received = 0

    def seal(self, message: Request | Answer) -> bytes:
        """A frame, ready to be sent. In this order: its number is in the seal."""
        payload = _encoder.encode(message)
        self._sent += 1
        seal = hmac.digest(self._send, _NUMBER.pack(self._sent) + payload, "sha256")
        return _LENGTH.pack(SEAL_BYTES + len(payload)) + seal + payload

    def open(self, data: bytes) -> bytes:
        """What was sealed. ProtocolError if it is not the next frame of the other side, unchanged."""
        seal, payload = data[:SEAL_BYTES], data[SEAL_BYTES:]
        self._received += 1
        if not hmac.compare_digest(seal, hmac.digest(self._receive, _NUMBER.pack(self._received) + payload, "sha256")):
            raise ProtocolError("a frame was changed, left out or repeated on its way")
        return payload


def prove(secret: bytes, role: str, hello: Hello, caller: str, nonce: bytes, *said: int | str) -> bytes:
    """What only a peer with the secret can say: in this role, on this connection, about these two sides."""
    # An array, not a string of joined parts: no two different meanings have the same bytes.
    parts = ["bursar signer", VERSION, role, hello.name, hello.identity, hello.nonce, caller, nonce, *said]
    return hmac.digest(secret, _encoder.encode(parts), "sha256")


def prove_login(secret: bytes, hello: Hello, login: Login) -> bytes:
    """The caller's proof, whatever `login.proof` is."""
    return prove(secret, "caller", hello, login.caller, login.nonce, login.identity, login.seen)


def prove_answer(secret: bytes, hello: Hello, login: Login, said: Welcome | Refused) -> bytes:
    """The signer's proof, whatever `said.proof` is."""
    if isinstance(said, Welcome):
        return prove(secret, "signer", hello, login.caller, login.nonce, "welcome", said.sequence)
    return prove(secret, "signer", hello, login.caller, login.nonce, "refused", said.sequence, said.why, said.text)


def proves(expected: bytes, given: bytes) -> bool:
    """Compare proofs in a time that says nothing."""
    return hmac.compare_digest(expected, given)
