"""Addresses for deposits, derived from an extended public key (BIP-32): each user has one of his own. Pure.

The server has the extended public key and derives addresses; the private keys come from the signer's mnemonic alone.
The address of user 1001 is that of the key at KEY/0/1001. It follows from the user's number, and there is no counter:
after a restore from a backup a user has the same address, and no address is ever given to a second user. BIP-32 leaves
2^31 places to each level, so the number's upper bits are one level and its lower 31 bits the next.

Who has the extended public key can find out all addresses, and with one private key below it all private keys: it is
for the server's own configuration, and no secret. A private key is refused here with an error that never repeats it.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from importlib import import_module
from typing import Final, cast

from coincurve import PublicKey
from Crypto.Hash import RIPEMD160  # hashlib has it with some builds of OpenSSL only

from bursar.rails.base58 import payload_of, text_of

VERSION: Final = bytes.fromhex("0488B21E")
PRIVATE: Final = ("xprv", "yprv", "zprv", "tprv", "uprv", "vprv")
PAYLOAD_BYTES: Final = 78
HARDENED: Final = 2**31  # BIP-32: the first place that only a private key can derive
DEPTH_MAX: Final = 255
USER_MAX: Final = 2**62 - 1  # of which 31 bits are one level and 31 bits the next
PLACES: Final = {  # kind of chain → what writes the address of an uncompressed public key
    "evm": "bursar.rails.evm.codec:address_of",
    "tron": "bursar.rails.tron.codec:address_of",
}

Written = Callable[[bytes], str]  # of an uncompressed public key: 65 bytes


@dataclass(frozen=True)
class ExtendedKey:
    """A public key from which further public keys can be derived."""

    depth: int
    parent: bytes  # fingerprint of the parent's key
    number: int  # of this child of its parent; from HARDENED on it is a hardened one
    chain_code: bytes
    point: bytes  # the public key, compressed: 33 bytes

    @classmethod
    def parse(cls, text: str) -> ExtendedKey:
        """The key in a text that begins with xpub; ValueError, with the reason, if it is none."""
        if text.strip().startswith(PRIVATE):
            raise ValueError("this is a PRIVATE key: never give one to a server. It wants the public one, xpub…")
        if not text.startswith("xpub"):
            raise ValueError("it is no extended public key: those begin with xpub")
        payload = payload_of(text, PAYLOAD_BYTES)
        if payload[:4] != VERSION:
            raise ValueError("its version is not that of an extended public key")
        depth, parent, number = payload[4], payload[5:9], int.from_bytes(payload[9:13], "big")
        if depth == 0 and (number or any(parent)):
            raise ValueError("it says that it is a master key and that it has a parent")
        return cls(depth, parent, number, payload[13:45], _checked(payload[45:]))

    @property
    def text(self) -> str:
        """As people and programs pass it on: xpub…."""
        head = bytes([self.depth]) + self.parent + self.number.to_bytes(4, "big")
        return text_of(VERSION + head + self.chain_code + self.point)

    @property
    def public_key(self) -> bytes:
        """The public key, uncompressed: 65 bytes, the first of them 4."""
        return PublicKey(self.point).format(compressed=False)

    def child(self, index: int) -> ExtendedKey:
        """The public key at a place below. ValueError for a hardened place: only the private key derives those."""
        if not 0 <= index < HARDENED:
            raise ValueError(f"{index} is no place below a public key: 0 to {HARDENED - 1}")
        if self.depth == DEPTH_MAX:
            raise ValueError(f"BIP-32 has {DEPTH_MAX} levels and no more")
        made = hmac.digest(self.chain_code, self.point + index.to_bytes(4, "big"), "sha512")
        try:
            point = PublicKey(self.point).add(made[:32])
        except ValueError:  # one place in 2^127: the standard gives it no key
            raise ValueError(f"BIP-32 has no key at place {index} of this one") from None
        return ExtendedKey(self.depth + 1, fingerprint(self.point), index, made[32:], point.format())

    def of_user(self, user: int) -> ExtendedKey:
        """The key of a user's own address."""
        upper, lower = _places(user)
        return self.child(upper).child(lower)


def fingerprint(point: bytes) -> bytes:
    """By which BIP-32 knows the parent of a key: 4 bytes of the hash of its compressed public key."""
    return RIPEMD160.new(sha256(point).digest()).digest()[:4]


def user_path(user: int) -> str:
    """Where a user's key is below the extended key: 0/1001."""
    upper, lower = _places(user)
    return f"{upper}/{lower}"


def deposit_address(kind: str, key: ExtendedKey, user: int, written: Written | None = None) -> str:
    """A user's own address on a chain of this kind, as the chain's codec writes it.

    `written` writes the address of a key for a kind that is not known here.
    """
    return (written or writer_of(kind))(key.of_user(user).public_key)


def writer_of(kind: str) -> Written:
    """What writes the addresses of a kind of chain; ValueError if there is none."""
    if kind not in PLACES:
        raise ValueError(f"no addresses are derived for chains of the kind {kind!r}: known are {', '.join(PLACES)}")
    module, _, name = PLACES[kind].partition(":")  # a chain of one kind needs no libraries of another
    return cast(Written, getattr(import_module(module), name))


def _places(user: int) -> tuple[int, int]:
    if isinstance(user, bool) or not 0 < user <= USER_MAX:
        raise ValueError(f"{user} is no user: a whole number from 1 to {USER_MAX}")
    return user >> 31, user & (HARDENED - 1)


def _checked(point: bytes) -> bytes:
    try:
        PublicKey(point)
    except ValueError:
        raise ValueError("its public key is no point of the curve") from None
    return point
