"""Envelopes: entries resolved into postings, named by the hash of their content.

The id is the double SHA-256 of canonical bytes: big-endian, length-prefixed, behind a version byte. It covers who,
what and why (scope, key, book, movements, metadata), against which account versions it was validated (pins), and both
sides of the value (postings consumed, with what they were, and created). It does not cover when: the database's clock
says that. Golden vectors are in tests/unit/golden; a change here that alters them needs CANONICAL_VERSION + 1.
"""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache

import msgspec

from bursar.model.accounts import Account, Book
from bursar.model.entries import EntryKind
from bursar.model.money import Asset
from bursar.model.postings import Posting

CANONICAL_VERSION = 1
_HEAD = struct.Struct(">BBQ").pack  # version, kind, number of the envelope it reverses
_U16, _U32, _U64 = struct.Struct(">H").pack, struct.Struct(">I").pack, struct.Struct(">Q").pack

_ONE, _TWO, _PAIR = _U16(1), _U16(2), _U32(2)


@lru_cache(1_024)
def _head(kind: int, reverses: int, book: bytes, scope: str) -> bytes:
    """What comes before the key: the same for most."""
    text = scope.encode()
    return b"".join((_HEAD(CANONICAL_VERSION, kind, reverses), book, _U16(len(text)), text))


class BookedLeg(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A movement by row numbers, as stored. Amounts above 63 bits are 16 bytes, since MessagePack ends at 64."""

    source: int
    target: int
    asset: int
    amount: int | bytes

    @property
    def minor(self) -> int:
        """The amount in smallest units."""
        return self.amount if isinstance(self.amount, int) else int.from_bytes(self.amount, "big", signed=True)


class Envelope(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A resolved entry. `seq` is its number in this database; it is not part of the content."""

    seq: int
    scope: str
    key: str
    book: Book
    kind: EntryKind
    reverses: int
    legs: tuple[BookedLeg, ...]
    accounts: tuple[Account, ...]  # every account that takes part, as validated, by path: the pins
    assets: tuple[Asset, ...]  # every asset that takes part
    consumes: tuple[Posting, ...]
    creates: tuple[Posting, ...]
    metadata: str

    def canonical(self) -> bytes:
        """The bytes that the id is the hash of."""
        key, metadata = self.key.encode(), self.metadata.encode()
        head = _head(self.kind, self.reverses, self.book.name_bytes, self.scope)
        counts = (len(self.accounts), len(self.assets), len(self.legs), len(self.consumes), len(self.creates))
        if counts == (2, 1, 1, 1, 2):
            # Most envelopes: one posting becomes change and a payment. The same as below, in one expression.
            (leg,), (spent,), (left, paid) = self.legs, self.consumes, self.creates
            (first, second), (asset,) = self.accounts, self.assets
            if leg.asset == spent.asset == left.asset == paid.asset == asset.id:
                paths = {first.id: first.path_bytes, second.id: second.path_bytes}
                code = asset.code_bytes
                return b"".join(
                    (
                        head, _U16(len(key)), key,
                        _ONE, paths[leg.source], paths[leg.target], code, leg.minor.to_bytes(16, "big", signed=True),
                        _PAIR, first.pin_bytes, second.pin_bytes,
                        _ONE, _U64(spent.id), paths[spent.account], code, spent.amount.to_bytes(16, "big", signed=True),
                        _TWO, paths[left.account], code, left.amount.to_bytes(16, "big", signed=True),
                        paths[paid.account], code, paid.amount.to_bytes(16, "big", signed=True),
                        _U32(len(metadata)), metadata,
                    )
                )  # fmt: skip
        paths = {a.id: a.path_bytes for a in self.accounts}
        codes = {a.id: a.code_bytes for a in self.assets}
        parts = [head, _U16(len(key)), key, _U16(len(self.legs))]
        for leg in self.legs:
            parts += (
                paths[leg.source],
                paths[leg.target],
                codes[leg.asset],
                leg.minor.to_bytes(16, "big", signed=True),
            )
        parts.append(_U32(len(self.accounts)))
        parts += [account.pin_bytes for account in self.accounts]
        parts.append(_U16(len(self.consumes)))
        for p in self.consumes:
            parts += (_U64(p.id), paths[p.account], codes[p.asset], p.amount.to_bytes(16, "big", signed=True))
        parts.append(_U16(len(self.creates)))
        for p in self.creates:
            parts += (paths[p.account], codes[p.asset], p.amount.to_bytes(16, "big", signed=True))
        parts += (_U32(len(metadata)), metadata)
        return b"".join(parts)

    def id(self) -> bytes:
        """The content hash."""
        return hashlib.sha256(hashlib.sha256(self.canonical()).digest()).digest()


def booked_amount(minor: int) -> int | bytes:
    """An amount as a booked leg carries it."""
    return minor if minor < 2**63 else minor.to_bytes(16, "big", signed=True)


_legs_encoder = msgspec.msgpack.Encoder()
_legs_decoder = msgspec.msgpack.Decoder(tuple[BookedLeg, ...])
_pins_decoder = msgspec.msgpack.Decoder(tuple[tuple[int, int], ...])


def encode_legs(legs: tuple[BookedLeg, ...]) -> bytes:
    """Movements as stored; equal bytes mean equal movements."""
    return _legs_encoder.encode(legs)


def decode_legs(data: bytes) -> tuple[BookedLeg, ...]:
    """Movements as read back."""
    return _legs_decoder.decode(data)


def encode_pins(accounts: tuple[Account, ...]) -> bytes:
    """The accounts that took part, as (row number, version)."""
    return _legs_encoder.encode([(a.id, a.version) for a in accounts])


def decode_pins(data: bytes) -> tuple[tuple[int, int], ...]:
    """(row number, version) of the accounts that took part."""
    return _pins_decoder.decode(data)


def encode_ids(postings: tuple[Posting, ...]) -> bytes:
    """Posting numbers, eight bytes each."""
    return b"".join([_U64(p.id) for p in postings])


def decode_ids(data: bytes) -> tuple[int, ...]:
    """Posting numbers as read back."""
    if len(data) % 8:
        raise ValueError(f"{len(data)} bytes are no list of posting numbers")
    return struct.unpack(f">{len(data) // 8}Q", data)


class Plan(msgspec.Struct, frozen=True, gc=False):
    """A commit that is right on the state it was checked on."""

    envelope: Envelope
    id: bytes
    floors: tuple[tuple[int, int, int, int], ...]  # (account, asset, balance before, balance after), capped ones only


class Receipt(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Proof that an entry is in the ledger."""

    envelope: int  # its number: the handle for show, reverse, history
    id: str  # its content hash, in hexadecimal
    key: str
    replayed: bool = False  # True: it was there already, nothing happened now
