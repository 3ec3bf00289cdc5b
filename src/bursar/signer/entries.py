"""What stands in a signer's log: entries, each with the hash of the one before it.

An entry is JSON, and its hash covers its bytes as they are written, the hash of the entry before it among them. All
that replaying needs is in the entry itself (slot, amounts that count): neither a policy nor a codec is needed to know
what was signed, also years later."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import msgspec

from bursar.model.authorizations import Approval, Release
from bursar.signer.protocol import LogEntry, SignRequest

LABEL: Final = b"bursar signer log 1\n"
NO_HASH: Final = "0" * 64


class Created(msgspec.Struct, frozen=True, kw_only=True, tag="created"):
    """The first entry: the log exists. The identity is made here, once."""

    name: str
    identity: str


class Started(msgspec.Struct, frozen=True, kw_only=True, tag="started"):
    """A process began to work with this policy, or read another one."""

    policy: str  # SHA-256 of the file


class Counted(msgspec.Struct, frozen=True, kw_only=True):
    """An amount that counts towards a cap."""

    scope: str
    amount: str


class Signed(msgspec.Struct, frozen=True, kw_only=True, tag="signed"):
    """A signature."""

    request: SignRequest
    raw: bytes
    hash: str
    chain_id: int
    nonce: int | None
    slot: str  # what can take effect once: chain, sender and nonce
    counted: tuple[Counted, ...]


class Tombstone(msgspec.Struct, frozen=True, kw_only=True, tag="tombstone"):
    """An attempt that was never signed, and never will be."""

    payout: str
    attempt: int


class DeclaredDead(msgspec.Struct, frozen=True, kw_only=True, tag="dead"):
    """Attempts that can never pay, by two people's word or by what the signer's own nodes have shown."""

    release: Release
    approvals: tuple[Approval, ...] = ()  # none: the witness
    proofs: tuple[dict[str, Any], ...] = ()  # what it has seen, for each slot: transaction, block, nodes


class Halted(msgspec.Struct, frozen=True, kw_only=True, tag="halted"):
    """No signature from here on."""

    reason: str


class Behind(msgspec.Struct, frozen=True, kw_only=True, tag="behind"):
    """A caller has seen more than this log has: it was restored from an old copy. Nothing is answered any more."""

    seen: int


class Unhalted(msgspec.Struct, frozen=True, kw_only=True, tag="unhalted"):
    """Two people let it sign again."""

    people: tuple[str, ...]
    approvals: tuple[Approval, ...] = ()


What = Created | Started | Signed | Tombstone | DeclaredDead | Halted | Behind | Unhalted


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry.

    `sequence` counts promises to callers: signatures and tombstones. A start or a halt does not raise it. If it did, a
    signer that was restored from an old copy would pass for the newer one after a few starts (W33).
    """

    number: int  # of the entry, from 1 on
    sequence: int
    previous: str  # hash of the entry before it
    at_us: int
    caller: str
    what: What


def is_promise(what: What) -> bool:
    """Whether callers rest on it."""
    return isinstance(what, Signed | Tombstone)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Entry)


def encode(entry: Entry) -> bytes:
    """The bytes of an entry."""
    return _encoder.encode(entry)


def decode(data: bytes | msgspec.Raw) -> Entry:
    """An entry from its bytes; msgspec.MsgspecError if it is none."""
    return _decoder.decode(data)


def hash_of(data: bytes | msgspec.Raw | memoryview) -> str:
    """The hash of an entry's bytes."""
    return hashlib.sha256(LABEL + bytes(data)).hexdigest()


def for_callers(entry: Entry) -> LogEntry | None:
    """An entry as callers see it; None if it is neither a signature nor a tombstone."""
    match entry.what:
        case Signed(request=request, raw=raw, hash=hash_):
            return LogEntry(
                sequence=entry.sequence,
                at_us=entry.at_us,
                payout=request.payout,
                attempt=request.attempt,
                request=request,
                raw=raw,
                hash=hash_,
            )
        case Tombstone(payout=payout, attempt=attempt):
            return LogEntry(sequence=entry.sequence, at_us=entry.at_us, payout=payout, attempt=attempt)
        case _:
            return None
