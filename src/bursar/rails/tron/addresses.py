"""Addresses on TRON: the byte 0x41 and the last 20 bytes of the hash of a public key, written in base58check. Pure.

The text carries four bytes of a checksum, so that a mistyped address is found out. The same account has the same 20
bytes on EVM chains.
"""

from __future__ import annotations

from typing import Final

from bursar.rails.base58 import payload_of, text_of

__all__ = ["ADDRESS_BYTES", "PREFIX", "TEXT_LENGTH", "bytes_of", "text_of"]

PREFIX: Final = b"\x41"
ADDRESS_BYTES: Final = 21
TEXT_LENGTH: Final = 34


def bytes_of(text: str) -> bytes:
    """The 21 bytes of an address; ValueError, with the reason, if the text is none."""
    if len(text) != TEXT_LENGTH:
        raise ValueError(f"it does not have {TEXT_LENGTH} characters")
    address = payload_of(text, ADDRESS_BYTES)
    if address[:1] != PREFIX:
        raise ValueError("it is of another network: its first byte is not 0x41")
    return address
