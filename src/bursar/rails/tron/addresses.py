"""Addresses on TRON: the byte 0x41 and the last 20 bytes of the hash of a public key, written in base58check. Pure.

The text carries four bytes of a checksum, so that a mistyped address is found out. The same account has the same 20
bytes on EVM chains.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Final

PREFIX: Final = b"\x41"
ADDRESS_BYTES: Final = 21
TEXT_LENGTH: Final = 34
_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


def checksum(payload: bytes) -> bytes:
    """The first four bytes of the double SHA-256."""
    return sha256(sha256(payload).digest()).digest()[:4]


def text_of(address: bytes) -> str:
    """An address of 21 bytes, as people write it."""
    whole = address + checksum(address)
    number, digits = int.from_bytes(whole, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" * (len(whole) - len(whole.lstrip(b"\0"))) + digits


def bytes_of(text: str) -> bytes:
    """The 21 bytes of an address; ValueError, with the reason, if the text is none."""
    if len(text) != TEXT_LENGTH:
        raise ValueError(f"it does not have {TEXT_LENGTH} characters")
    number = 0
    for digit in text:
        place = _ALPHABET.find(digit)
        if place < 0:
            raise ValueError(f"{digit!r} is no character of base58")
        number = number * 58 + place
    if number >> (8 * (ADDRESS_BYTES + 4)):
        raise ValueError("it stands for more than 25 bytes")
    whole = number.to_bytes(ADDRESS_BYTES + 4, "big")
    address = whole[:ADDRESS_BYTES]
    if checksum(address) != whole[ADDRESS_BYTES:]:
        raise ValueError("its checksum is wrong: it was mistyped")
    if address[:1] != PREFIX:
        raise ValueError("it is of another network: its first byte is not 0x41")
    return address
