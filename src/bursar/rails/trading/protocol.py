"""The wire: frames, messages, and the handshake in which both sides prove that they know the secret.

A frame is a length (u32, big-endian) and that many bytes of MessagePack: an array whose first element says what it is.
Requests carry a number that their answer repeats; many may be on their way. An answer to operations is a byte and a
sequence for each.

    core    Hello(version, name, core, nonce)           core: its identity, 32 hexadecimal digits, for ever
    client  Login(version, nonce, seen, ledger, proof)  ledger: the identity of the ledger it works for; "": for none
    core    Welcome(sequence, ledger, room, forget, proof)  ledger: to which the core is bound; "": to none yet
         or Refused(sequence, why, text, proof)

A proof is an HMAC under the secret over the role, what Hello says, the client's nonce, and what the message itself says
(`prove`). Each side's covers the other's fresh nonce, so a recorded handshake is worth nothing; the core's name and
identity are in it, so that a client never talks to the wrong core; the role is in it, so that a proof cannot be sent
back to its maker. `seen` is the highest sequence that the client knows of this core: a core that is behind it has
forgotten something (T33).

A core works for at most one ledger, for ever. A client that named one, at a core that is bound to none, sends Bind as
its first request and waits for the answer; until then the core executes nothing for it.

What follows the handshake is not encrypted: over TCP, use it inside a network that you trust, or a tunnel.
"""

from __future__ import annotations

import hmac
from struct import Struct
from typing import Annotated, Final

import msgspec

from bursar.rails.trading.rules import LEDGER_CHARACTERS_MAX

VERSION: Final = 2
SECRET_BYTES_MIN: Final = 16
REQUEST_BYTES_MAX: Final = 4 * 1024 * 1024
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
LOGIN_BYTES_MAX: Final = 1024
LOOKUPS_MAX: Final = 65_536
USERS_MAX: Final = 1_024  # whose balances are asked for at once
KEEP_MAX: Final = 65_536  # ids that a floor may pass over
OPERATIONS_MAX: Final = 16_384  # in one answer of a list
BEHIND: Final = "BEHIND"  # why a core refuses: it has forgotten what it acknowledged
OTHER_LEDGER: Final = "OTHER_LEDGER"  # or it is bound to another ledger
FULL: Final = "FULL"  # or it has as many clients as it may have

U64 = Annotated[int, msgspec.Meta(ge=0)]  # MessagePack has no larger integers than 2^64 - 1
Ledger = Annotated[str, msgspec.Meta(max_length=LEDGER_CHARACTERS_MAX)]
Place = Annotated[int, msgspec.Meta(ge=0, le=255)]  # state.ASSETS_IN_FRAME_MAX
_LENGTH: Final = Struct(">I")
LENGTH_BYTES: Final = _LENGTH.size


class ProtocolError(Exception):
    """The other side does not speak this protocol, or not any more: the connection is of no further use."""


class _Message(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """An array that begins with its tag."""


# --- handshake


class Hello(_Message, frozen=True, tag=1):
    """The core's first words."""

    version: int
    name: str
    core: str  # its identity
    nonce: bytes


class Login(_Message, frozen=True, tag=2):
    """The client's answer."""

    version: int
    nonce: bytes
    seen: U64
    ledger: Ledger
    proof: bytes


class Welcome(_Message, frozen=True, tag=3):
    """The client knows the secret; so does the core."""

    sequence: U64
    ledger: Ledger
    room: U64
    forget: U64
    proof: bytes


class Refused(_Message, frozen=True, tag=4):
    """The client knows the secret, and is not served all the same."""

    sequence: U64
    why: str
    text: str
    proof: bytes


# --- requests


class _Request(_Message, frozen=True):
    """What a client asks."""

    number: U64  # which its answer repeats


class Execute(_Request, frozen=True, tag=10):
    """Operations, in order: operation, id, user, asset, amount, other (history.Item). Asset: an index in `assets`."""

    assets: Annotated[list[str], msgspec.Meta(max_length=256)]
    items: list[tuple[U64, U64, U64, Place, U64, U64]]


class Lookup(_Request, frozen=True, tag=11):
    """What is on record for (id, operation) pairs."""

    pairs: Annotated[list[tuple[U64, U64]], msgspec.Meta(max_length=LOOKUPS_MAX)]


class Query(_Request, frozen=True, tag=12):
    """Everything on record about one operation: for operators."""

    id: U64
    op: U64


class Balances(_Request, frozen=True, tag=13):
    """What users hold."""

    users: Annotated[list[U64], msgspec.Meta(max_length=USERS_MAX)]


class Totals(_Request, frozen=True, tag=14):
    """What all hold, per asset."""


class SetStatus(_Request, frozen=True, tag=15):
    """Freeze, disable or free an account."""

    user: U64
    status: Annotated[int, msgspec.Meta(ge=1, le=3)]


class Prune(_Request, frozen=True, tag=16):
    """Raise the floors."""

    room: U64
    forget: U64
    keep: Annotated[list[U64], msgspec.Meta(max_length=KEEP_MAX)]


class Ping(_Request, frozen=True, tag=17):
    """Still there?"""


class Subscribe(_Request, frozen=True, tag=18):
    """From now on this connection carries events behind a sequence, and nothing else."""

    after: U64


class Bind(_Request, frozen=True, tag=19):
    """Work for this ledger for ever: the one that the login named."""

    ledger: Ledger


class Operations(_Request, frozen=True, tag=20):
    """Deposits, withdraws and refunds on record behind a sequence, refused ones too."""

    after: U64
    limit: Annotated[int, msgspec.Meta(ge=1, le=OPERATIONS_MAX)]


class Describe(_Request, frozen=True, tag=21):
    """Who is this core, and how much does it hold?"""


Request = (
    Execute | Lookup | Query | Balances | Totals | SetStatus | Prune | Ping | Subscribe | Bind | Operations | Describe
)


# --- answers


class _Answer(_Message, frozen=True):
    """What the core answers."""

    number: U64  # of the request
    sequence: U64  # everything up to here is on disk


class Done(_Answer, frozen=True, tag=30):
    """To Execute and Lookup: an answer (rules.Code) and a sequence for each."""

    codes: bytes
    sequences: list[int]


class Found(_Answer, frozen=True, tag=31):
    """To Query: the operation, or nothing; sequence, user, asset, amount, other, answer."""

    operation: tuple[int, int, str, int, int, int] | None


class Held(_Answer, frozen=True, tag=32):
    """To Balances, for each user: status, and asset, available, frozen of all that is held."""

    accounts: list[tuple[int, list[tuple[str, int, int]]]]


class Summed(_Answer, frozen=True, tag=33):
    """To Totals. A total may be wider than 64 bits, so it is text."""

    totals: list[tuple[str, str]]


class Noted(_Answer, frozen=True, tag=34):
    """To SetStatus, Ping, Subscribe: it is so, since this sequence."""


class Gone(_Message, frozen=True, tag=35):
    """To Subscribe: what lies behind that sequence is no longer in the log, which begins at `oldest`."""

    number: U64
    oldest: U64


class Events(_Message, frozen=True, tag=36):
    """To a subscriber: kind, sequence, id, user, asset, amount, other, answer. See events.Event."""

    events: list[tuple[int, int, int, int, str, int, int, int]]


class Bound(_Answer, frozen=True, tag=37):
    """To Bind: the ledger that this core works for, which may be another."""

    ledger: Ledger


class Listed(_Answer, frozen=True, tag=38):
    """To Operations: sequence, operation, id, user, asset, amount, answer of each; up to where these are all."""

    complete_to: U64
    operations: list[tuple[int, int, int, int, str, int, int]]


class Described(_Answer, frozen=True, tag=39):
    """To Describe."""

    core: str
    ledger: Ledger
    room: U64
    forget: U64
    highest: U64  # id of a deposit or withdraw there ever was
    remembered: U64
    accounts: U64


class Pruned(_Answer, frozen=True, tag=40):
    """To Prune: what became of it (rules.Code), and where the floors are."""

    code: U64
    room: U64
    forget: U64


Answer = Done | Found | Held | Summed | Noted | Gone | Events | Bound | Listed | Described | Pruned
Handshake = Hello | Login | Welcome | Refused

_encoder = msgspec.msgpack.Encoder()
decode_request = msgspec.msgpack.Decoder(Request).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
decode_handshake = msgspec.msgpack.Decoder(Handshake).decode


def frame(message: Request | Answer | Handshake) -> bytes:
    """A message, ready to be sent."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class Splitter:
    """Cuts a stream of bytes into payloads. Holds at most one frame that is not complete."""

    __slots__ = ("_buffer", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that are complete now. ProtocolError if one says that it is larger than allowed."""
        data = self._buffer + data if self._buffer else data
        found, at = [], 0
        while len(data) - at >= LENGTH_BYTES:
            length = _LENGTH.unpack_from(data, at)[0]
            if length > self.limit:
                raise ProtocolError(f"a frame of {length} bytes, and at most {self.limit} are allowed")
            end = at + LENGTH_BYTES + length
            if end > len(data):
                break
            found.append(data[at + LENGTH_BYTES : end])
            at = end
        self._buffer = data[at:] if at else data
        return found


def prove(secret: bytes, role: str, hello: Hello, nonce: bytes, *said: int | str) -> bytes:
    """What only a peer with the secret can say: about this connection, in this role, to this core."""
    # An array, not a string of joined parts: no two different meanings have the same bytes.
    parts = ["bursar core", VERSION, role, hello.name, hello.core, hello.nonce, nonce, *said]
    return hmac.digest(secret, _encoder.encode(parts), "sha256")


def prove_login(secret: bytes, hello: Hello, nonce: bytes, seen: int, ledger: str) -> bytes:
    """The client's proof."""
    return prove(secret, "client", hello, nonce, seen, ledger)


def prove_answer(secret: bytes, hello: Hello, nonce: bytes, said: Welcome | Refused) -> bytes:
    """The core's proof, whatever `said.proof` is."""
    if isinstance(said, Welcome):
        return prove(secret, "core", hello, nonce, "welcome", said.sequence, said.ledger, said.room, said.forget)
    return prove(secret, "core", hello, nonce, "refused", said.sequence, said.why, said.text)


def proves(expected: bytes, given: bytes) -> bool:
    """Compare proofs in a time that says nothing."""
    return hmac.compare_digest(expected, given)
