"""TRON formats: addresses, the exact bytes of a transaction, and what such bytes would do. Pure.

Two transactions exist here, and no other is ever built or read: a transfer of TRX (`TransferContract`), and a call of a
TRC-20 token's `transfer(address,uint256)` (`TriggerSmartContract`). What a key signs is SHA-256 of the protobuf
`raw_data`; it is also the hash by which the chain knows the transaction, and the signature is no part of it (W27).

`decode` reads the fields, checks them, encodes them again and compares: bytes that differ in any way from what `build`
makes of the same values are refused. So permissions, call values, second contracts and fields of any other kind never
reach a key, without a rule for each.

There is no nonce. A transaction names a block (two bytes of its number, eight of its hash) and the time at which it
expires, in the chain's own milliseconds. Its `timestamp` is checked by no node: it tells equal payments apart. In a
`Slot`, `expires` is the expiration, and `reference` is "number bytes, hash bytes/timestamp".

Nothing in the bytes names the chain but that block: `Decoded.chain_id` is None. A key must not be used on two chains of
this kind (`signer.policy` refuses it), or a payment for a test network could be sent on the real one.

Nothing can be cancelled: there is no transaction that takes the place of another.
"""

from __future__ import annotations

import re
from hashlib import sha256
from typing import Final, NamedTuple, NoReturn

from coincurve import PublicKey
from eth_hash.auto import keccak

from bursar.rails.chain import (
    Decoded,
    Fee,
    InvalidAddress,
    InvalidMemo,
    Network,
    Order,
    SentElsewhere,
    Shape,
    Signed,
    Slot,
    Unbuildable,
    Undecodable,
)
from bursar.rails.tron.addresses import PREFIX, bytes_of, text_of
from bursar.rails.tron.protobuf import INT64_MAX, NotProtobuf, data, fields, number

KIND: Final = "tron"
TRANSFER: Final = 1  # ContractType.TransferContract
TRIGGER: Final = 31  # ContractType.TriggerSmartContract
_URLS: Final = {
    TRANSFER: b"type.googleapis.com/protocol.TransferContract",
    TRIGGER: b"type.googleapis.com/protocol.TriggerSmartContract",
}
TRANSFER_SELECTOR: Final = bytes.fromhex("a9059cbb")  # transfer(address,uint256)
ZERO_ADDRESS: Final = PREFIX + bytes(20)  # a valid address without a key: nodes let TRX go there
WORD_MAX: Final = 2**256 - 1
MEMO_BYTES_MAX: Final = 512
SIGNATURE_BYTES: Final = 65
SIGNED_BYTES_MORE: Final = 75  # a signed transaction is at most this much longer than its raw_data
CURVE_ORDER: Final = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

# What a transaction costs beside its energy, in sun, as the public network has it. `decode` knows no node: it counts
# what the bytes may cost by these. A quote counts by what the nodes say.
BYTE_SUN: Final = 1_000
RESULT_BYTES: Final = 64  # that are paid for beside those of the transaction
ACTIVATION_SUN: Final = 1_100_000  # TRX to an address that is no account yet
MEMO_SUN: Final = 1_000_000

_REFERENCE: Final = re.compile(r"([0-9a-f]{4})([0-9a-f]{16})/([1-9][0-9]{0,18})", re.ASCII)


class Content(NamedTuple):
    """What a transaction says. Addresses have 21 bytes."""

    owner: bytes
    to: bytes
    contract: bytes  # of the token; empty: TRX
    amount: int
    memo: bytes
    block_bytes: bytes
    block_hash: bytes
    expires: int
    timestamp: int
    fee_limit: int


# --- addresses -------------------------------------------------------------------------------------------------------


def checked(chain: str, text: str) -> bytes:
    """The bytes of an address; InvalidAddress if it is none, or one without a key."""
    try:
        found = bytes_of(text)
    except ValueError as error:
        raise InvalidAddress(chain, text, str(error)) from None
    if found == ZERO_ADDRESS:
        raise InvalidAddress(chain, text, "it is the zero address, which has no key")
    return found


def address_of(public_key: bytes) -> str:
    """The address of an uncompressed public key (65 bytes, the first of them 4)."""
    return text_of(PREFIX + keccak(public_key[1:])[-20:])


# --- bytes -----------------------------------------------------------------------------------------------------------


def transfer_data(to: bytes, amount: int) -> bytes:
    """The calldata of a TRC-20 `transfer`; `to` has 21 bytes."""
    return TRANSFER_SELECTOR + to[1:].rjust(32, b"\0") + amount.to_bytes(32, "big")


def encode(c: Content) -> bytes:
    """The `raw_data` of a transaction."""
    if c.contract:
        kind, call = TRIGGER, data(1, c.owner) + data(2, c.contract) + data(4, transfer_data(c.to, c.amount))
    else:
        kind, call = TRANSFER, data(1, c.owner) + data(2, c.to) + number(3, c.amount)
    contract = number(1, kind) + data(2, data(1, _URLS[kind]) + data(2, call))
    return b"".join(
        (
            data(1, c.block_bytes),
            data(4, c.block_hash),
            number(8, c.expires),
            data(10, c.memo),
            data(11, contract),
            number(14, c.timestamp),
            number(18, c.fee_limit),
        )
    )


def transaction(raw_data: bytes, signature: bytes) -> bytes:
    """A signed transaction, as it is broadcast."""
    return data(1, raw_data) + data(2, signature)


def hash_of(raw_data: bytes) -> str:
    """The hash by which the chain knows a transaction: its signature is no part of it."""
    return sha256(raw_data).hexdigest()


# --- reading ---------------------------------------------------------------------------------------------------------


def _undecodable(why: str) -> NoReturn:
    raise Undecodable(KIND, why)


def _message(message: bytes) -> dict[int, int | bytes]:
    try:
        return dict(fields(message))  # of a field that is there twice the last: encoded again, it is another message
    except NotProtobuf as error:
        _undecodable(str(error))


def _bytes(found: dict[int, int | bytes], field: int) -> bytes:
    value = found.get(field, b"")
    return value if isinstance(value, bytes) else _undecodable(f"field {field} is no bytes")


def _int(found: dict[int, int | bytes], field: int) -> int:
    value = found.get(field, 0)
    return value if isinstance(value, int) else _undecodable(f"field {field} is no number")


def content(raw_data: bytes) -> Content:
    """The fields; Undecodable unless `build` makes exactly these bytes of them."""
    raw = _message(raw_data)
    contract = _message(_bytes(raw, 11))
    kind, call = _int(contract, 1), _message(_bytes(_message(_bytes(contract, 2)), 2))
    if kind not in _URLS:
        _undecodable("it is neither a transfer of TRX nor a call of a contract")
    owner, token, to, amount = _bytes(call, 1), b"", _bytes(call, 2), 0
    if kind == TRANSFER:
        amount = _int(call, 3)
    else:
        token, calldata = to, _bytes(call, 4)
        to, amount = PREFIX + calldata[16:36], int.from_bytes(calldata[36:68], "big")
    found = Content(
        owner,
        to,
        token,
        amount,
        _bytes(raw, 10),
        _bytes(raw, 1),
        _bytes(raw, 4),
        _int(raw, 8),
        _int(raw, 14),
        _int(raw, 18),
    )
    if why := _out_of_bounds(found):
        _undecodable(why)
    if encode(found) != raw_data:
        _undecodable("it contains more than a transfer, or is encoded otherwise")
    return found


def spends(raw_data: bytes) -> SentElsewhere:
    """Who spends by a transaction that another program has built, until when, and the most that it can cost.

    It may be one that `build` does not make: only what every transfer and call has is read.
    """
    raw = _message(raw_data)
    call = _message(_bytes(_message(_bytes(_message(_bytes(raw, 11)), 2)), 2))
    owner = _bytes(call, 1)
    if len(owner) != len(ZERO_ADDRESS) or owner[:1] != PREFIX:
        _undecodable("the sender is no address")
    reference = f"{_bytes(raw, 1).hex()}{_bytes(raw, 4).hex()}/{_int(raw, 14)}"
    beside = (len(raw_data) + SIGNED_BYTES_MORE + RESULT_BYTES) * BYTE_SUN + MEMO_SUN + ACTIVATION_SUN
    return SentElsewhere(
        hash=hash_of(raw_data),
        sender=text_of(owner),
        slot=Slot(expires=_int(raw, 8), reference=reference),
        fee=Fee(gas_limit=_int(raw, 18), price=1, beside=beside),
    )


def _out_of_bounds(c: Content) -> str:
    for name, address in (("sender", c.owner), ("recipient", c.to), ("token", c.contract or c.to)):
        if len(address) != len(ZERO_ADDRESS) or address[:1] != PREFIX or address == ZERO_ADDRESS:
            return f"the {name} is no address"
    if len(c.block_bytes) != 2 or len(c.block_hash) != 8:
        return "it names no block"
    if not 1 <= c.expires <= INT64_MAX or not 1 <= c.timestamp <= INT64_MAX:
        return "expiration or timestamp is out of bounds"
    if not 1 <= c.amount <= (WORD_MAX if c.contract else INT64_MAX):
        return f"amount {c.amount} is out of bounds"
    if c.contract and not 1 <= c.fee_limit <= INT64_MAX:
        return "a call without a fee limit fails, and costs"
    if not c.contract and c.fee_limit:
        return "a transfer of TRX has no fee limit"
    if c.to == c.contract:
        return "the tokens go to their own contract"
    if not c.contract and c.to == c.owner:
        return "the chain refuses TRX from an address to itself"
    return _wrong_memo(c.memo)


def _wrong_memo(memo: bytes) -> str:
    """Why no transaction carries a memo; "" if one does."""
    try:
        text = memo.decode()
    except UnicodeDecodeError:
        return "the memo is no text"
    if len(memo) > MEMO_BYTES_MAX or not text.isprintable():
        return f"a memo is at most {MEMO_BYTES_MAX} bytes of printable text"
    return ""


def _meaning(c: Content, size: int) -> Decoded:
    beside = (size + SIGNED_BYTES_MORE + RESULT_BYTES) * BYTE_SUN + (MEMO_SUN if c.memo else 0)
    if not c.contract:
        beside += ACTIVATION_SUN
    reference = f"{c.block_bytes.hex()}{c.block_hash.hex()}/{c.timestamp}"
    return Decoded(
        chain_id=None,
        to=text_of(c.to),
        contract=text_of(c.contract) if c.contract else "",
        amount=c.amount,
        slot=Slot(expires=c.expires, reference=reference),
        fee=Fee(gas_limit=c.fee_limit, price=1, beside=beside),
        memo=c.memo.decode(),
    )


# --- signatures ------------------------------------------------------------------------------------------------------


def _signer_of(raw_data: bytes, signature: bytes) -> str:
    if len(signature) != SIGNATURE_BYTES or signature[64] > 1:
        _undecodable("a signature is r, s and 0 or 1: 65 bytes")
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:64], "big")
    if not 0 < r < CURVE_ORDER or not 0 < s <= CURVE_ORDER // 2:
        _undecodable("r or s of the signature is out of bounds")
    try:
        key = PublicKey.from_signature_and_message(signature, sha256(raw_data).digest(), hasher=None)
    except Exception:  # coincurve raises a bare Exception for a point that is not on the curve
        _undecodable("the signature is of no key")
    return address_of(key.format(compressed=False))


class TronCodec:
    """The formats of TRON (`rails.chain.Codec`)."""

    kind = KIND

    def check_address(self, chain: str, text: str) -> str:
        checked(chain, text)
        return text  # base58check writes an address in one way

    def check_memo(self, chain: str, text: str) -> None:
        if why := _wrong_memo(text.encode()):
            raise InvalidMemo(chain, why)

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        def refuse(why: str) -> NoReturn:
            raise Unbuildable(network.name, why)

        reference = _REFERENCE.fullmatch(slot.reference)
        if slot.nonce is not None or slot.expires is None or reference is None:
            refuse("its slot must be an expiration with a reference block, and nothing else")
        if shape is not Shape.PAY:
            refuse("nothing can be cancelled on this chain: a transaction expires")
        found = Content(
            owner=checked(network.name, sender),
            to=checked(network.name, order.to),
            contract=checked(network.name, order.contract) if order.contract else b"",
            amount=order.amount,
            memo=order.memo.encode(),
            block_bytes=bytes.fromhex(reference[1]),
            block_hash=bytes.fromhex(reference[2]),
            expires=slot.expires,
            timestamp=int(reference[3]),
            fee_limit=fee.gas_limit * fee.price if order.contract else 0,
        )
        if why := _out_of_bounds(found):
            refuse(why)
        return encode(found)

    def decode(self, unsigned: bytes) -> Decoded:
        return _meaning(content(unsigned), len(unsigned))

    def digest(self, unsigned: bytes) -> bytes:
        content(unsigned)  # nothing is signed that can't be read
        return sha256(unsigned).digest()

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        owner, signer = text_of(content(unsigned).owner), _signer_of(unsigned, signature)
        if not signer == owner == sender:
            _undecodable(f"it was signed by {signer} and spends from {owner}, not {sender}")
        return Signed(raw=transaction(unsigned, signature), hash=hash_of(unsigned))

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        found = _message(raw)
        raw_data, signature = _bytes(found, 1), _bytes(found, 2)
        if transaction(raw_data, signature) != raw:
            _undecodable("it contains more than a transfer and one signature, or is encoded otherwise")
        sender = text_of(content(raw_data).owner)
        self.signed(raw_data, signature, sender)
        return self.decode(raw_data), sender, hash_of(raw_data)
