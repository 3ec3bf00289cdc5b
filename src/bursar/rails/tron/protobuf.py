"""The little of protobuf's wire format that TRON's transactions use: numbers, bytes and messages in messages. Pure.

Nothing here knows a message: a field is its number and its value. Default values are left out, as every TRON node
writes them. Reading is lenient about the order of fields and about integers that are longer than needed; the codec
encodes what it has read again and compares.
"""

from __future__ import annotations

from collections.abc import Iterator

VARINT = 0
BYTES = 2
INT64_MAX = 2**63 - 1


class NotProtobuf(ValueError):
    """The bytes are no message of numbers and bytes."""


def number(field: int, value: int) -> bytes:
    """A field with a number from 0 to 2^63 - 1; nothing if it is 0."""
    return _varint(field << 3 | VARINT) + _varint(value) if value else b""


def data(field: int, value: bytes) -> bytes:
    """A field with bytes, text or a message; nothing if it is empty."""
    return _varint(field << 3 | BYTES) + _varint(len(value)) + value if value else b""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message in the order in which they stand there; NotProtobuf if it is none."""
    at = 0
    while at < len(message):
        tag, at = _read_varint(message, at)
        field, wire = tag >> 3, tag & 7
        if not field:
            raise NotProtobuf("a field has the number 0")
        value, at = _read_varint(message, at)
        if wire == VARINT:
            yield field, value
        elif wire == BYTES:
            if at + value > len(message):
                raise NotProtobuf("a field is longer than the message")
            yield field, message[at : at + value]
            at += value
        else:
            raise NotProtobuf(f"field {field} is neither a number nor bytes")


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(10):
        if at + place >= len(message):
            raise NotProtobuf("the message ends within a number")
        byte = message[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            if value >= 2**64:
                raise NotProtobuf("a number has more than 64 bits")
            return value, at + place + 1
    raise NotProtobuf("a number has more than ten bytes")
