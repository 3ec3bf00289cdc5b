"""Base58Check: bytes as text that people copy, with four bytes of a checksum. TRON and BIP-32 write it. Pure."""

from __future__ import annotations

from hashlib import sha256
from typing import Final

_ALPHABET: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_CHECKSUM_BYTES: Final = 4


def checksum(payload: bytes) -> bytes:
    """The first four bytes of the double SHA-256."""
    return sha256(sha256(payload).digest()).digest()[:_CHECKSUM_BYTES]


def text_of(payload: bytes) -> str:
    """Bytes as text."""
    whole = payload + checksum(payload)
    number, digits = int.from_bytes(whole, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _ALPHABET[digit] + digits
    return "1" * (len(whole) - len(whole.lstrip(b"\0"))) + digits


def payload_of(text: str, size: int) -> bytes:
    """The bytes of a text that stands for so many; ValueError, with the reason, if it does not."""
    whole_bytes = size + _CHECKSUM_BYTES
    if len(text) > 2 * whole_bytes:  # before any arithmetic: the text may come from outside
        raise ValueError(f"it stands for more than {whole_bytes} bytes")
    number = 0
    for digit in text:
        place = _ALPHABET.find(digit)
        if place < 0:
            raise ValueError(f"{digit!r} is no character of base58")
        number = number * 58 + place
    if number >> (8 * whole_bytes):
        raise ValueError(f"it stands for more than {whole_bytes} bytes")
    whole = number.to_bytes(whole_bytes, "big")
    payload = whole[:size]
    if checksum(payload) != whole[size:]:
        raise ValueError("its checksum is wrong: it was mistyped")
    if text_of(payload) != text:
        raise ValueError("it has too few or too many 1 in front")
    return payload
