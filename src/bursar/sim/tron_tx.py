"""TRON transactions as a node reads them: any that parse, and not only those that our codec builds.

A node parses what it gets, writes raw_data anew and hashes that; unknown fields stay at the end of their message. What
it can't parse is an error of its protobuf library. Pure.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Final, NamedTuple

from coincurve import PublicKey

from bursar.rails.tron.addresses import text_of
from bursar.rails.tron.codec import TRANSFER, TRIGGER, address_of
from bursar.rails.tron.protobuf import NotProtobuf, data, fields, number

NAMES: Final = {TRANSFER: "TransferContract", TRIGGER: "TriggerSmartContract"}
_VALUE_FIELDS: Final = {  # in the order in which nodes print them
    "TransferContract": (("amount", 3), ("owner_address", 1), ("to_address", 2)),
    "TriggerSmartContract": (("data", 4), ("owner_address", 1), ("contract_address", 2), ("call_value", 3)),
}
_BIG_FIELD: Final = 2**29


class Contract(NamedTuple):
    """What a transaction does."""

    kind: int
    type_url: str
    value: bytes
    permission: int

    @property
    def name(self) -> str:
        """As JSON has it."""
        return NAMES.get(self.kind, str(self.kind))

    @property
    def fits(self) -> bool:
        """Whether type and value belong together."""
        return self.type_url == f"type.googleapis.com/protocol.{self.name}"

    def field(self, place: int) -> Any:
        """A field of the value; None if it is not there."""
        return dict(fields(self.value)).get(place)

    @property
    def owner(self) -> bytes:
        """The account that it spends from."""
        found = self.field(1)
        return found if isinstance(found, bytes) and self.fits else b""


class Tx(NamedTuple):
    """A transaction."""

    id: str
    raw_data: bytes
    signatures: tuple[bytes, ...]
    block_bytes: bytes
    block_hash: bytes
    expires: int
    memo: bytes
    timestamp: int
    fee_limit: int
    contracts: tuple[Contract, ...]

    @property
    def size(self) -> int:
        """Bytes, as they are broadcast."""
        return len(data(1, self.raw_data) + b"".join(data(2, one) for one in self.signatures))

    @property
    def reference(self) -> str:
        """The block that it refers to: two bytes of the number, eight of the id."""
        return self.block_bytes.hex() + self.block_hash.hex()


def parse(encoded: bytes) -> Tx:
    """A transaction as it is broadcast; NotProtobuf if it is none."""
    raw, signatures = b"", []
    for field, value in fields(encoded):
        if field == 1 and isinstance(value, bytes):
            raw = value
        elif field == 2 and isinstance(value, bytes):
            signatures.append(value)
    return read(raw, tuple(signatures))


def read(raw: bytes, signatures: tuple[bytes, ...]) -> Tx:
    """A transaction from its raw_data. Its id is of the bytes that a node would write."""
    known: dict[int, Any] = {}
    contracts, rest = [], b""
    for field, value in fields(raw):
        if field == 11 and isinstance(value, bytes):
            contracts.append(_contract(value))
        elif field in (1, 4, 10) and isinstance(value, bytes):
            known[field] = value
        elif field in (8, 14, 18) and isinstance(value, int):
            known[field] = value if value < 2**63 else value - 2**64
        else:
            rest += number(field, value) if isinstance(value, int) else data(field, value)
    written = b"".join(
        (
            data(1, known.get(1, b"")),
            data(4, known.get(4, b"")),
            _signed(8, known.get(8, 0)),
            data(10, known.get(10, b"")),
            *(data(11, _written(one)) for one in contracts),
            _signed(14, known.get(14, 0)),
            _signed(18, known.get(18, 0)),
            rest,
        )
    )
    return Tx(
        sha256(written).hexdigest(),
        written,
        signatures,
        known.get(1, b""),
        known.get(4, b""),
        known.get(8, 0),
        known.get(10, b""),
        known.get(14, 0),
        known.get(18, 0),
        tuple(contracts),
    )


def _signed(field: int, value: int) -> bytes:
    return number(field, value % 2**64)


def _contract(encoded: bytes) -> Contract:
    found = dict(fields(encoded))
    kind, permission, parameter = found.get(1, 0), found.get(5, 0), found.get(2, b"")
    if not isinstance(kind, int) or not isinstance(permission, int) or not isinstance(parameter, bytes):
        raise NotProtobuf("While parsing a protocol message, the input ended unexpectedly")
    inner = dict(fields(parameter))
    url, value = inner.get(1, b""), inner.get(2, b"")
    if not isinstance(url, bytes) or not isinstance(value, bytes):
        raise NotProtobuf("While parsing a protocol message, the input ended unexpectedly")
    return Contract(kind, url.decode(errors="replace"), value, permission)


def _written(one: Contract) -> bytes:
    parameter = data(1, one.type_url.encode()) + data(2, one.value)
    return number(1, one.kind) + data(2, parameter) + number(5, one.permission)


def signer_of(tx: Tx, signature: bytes) -> str:
    """The address whose key has signed; ValueError, in a node's words, if there is none."""
    if len(signature) < 65:
        raise ValueError(f"Signature size is {len(signature)}")
    recovery = signature[64] - 27 if signature[64] >= 27 else signature[64]
    try:
        key = PublicKey.from_signature_and_message(
            signature[:64] + bytes([recovery]), bytes.fromhex(tx.id), hasher=None
        )
    except Exception:  # coincurve raises a bare Exception
        raise ValueError("java.lang.IllegalArgumentException: Invalid point compression") from None
    return address_of(key.format(compressed=False))


# --- JSON ------------------------------------------------------------------------------------------------------------


def raw_data_json(tx: Tx, *, visible: bool) -> dict[str, Any]:
    """`raw_data` as nodes print it: values that are 0 are left out."""
    found: dict[str, Any] = {"data": tx.memo.hex()} if tx.memo else {}
    found["contract"] = [_contract_json(one, visible=visible) for one in tx.contracts]
    found |= {"ref_block_bytes": tx.block_bytes.hex(), "ref_block_hash": tx.block_hash.hex()}
    found |= {"expiration": tx.expires, "fee_limit": tx.fee_limit, "timestamp": tx.timestamp}
    return {name: value for name, value in found.items() if value not in (0, "")}


def _contract_json(one: Contract, *, visible: bool) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for name, place in _VALUE_FIELDS.get(one.name, ()):
        found = one.field(place)
        if isinstance(found, bytes) and found:
            value[name] = text_of(found) if visible and name.endswith("address") else found.hex()
        elif isinstance(found, int) and found:
            value[name] = found
    contract: dict[str, Any] = {"parameter": {"value": value, "type_url": one.type_url}, "type": one.name}
    return contract | ({"Permission_id": one.permission} if one.permission else {})


def transaction_json(tx: Tx, result: str, *, visible: bool) -> dict[str, Any]:
    """A transaction as `gettransactionbyid` and blocks have it."""
    return {
        "ret": [{"contractRet": result}],
        "signature": [one.hex() for one in tx.signatures],
        "txID": tx.id,
        "raw_data": raw_data_json(tx, visible=visible),
        "raw_data_hex": tx.raw_data.hex(),
    }
