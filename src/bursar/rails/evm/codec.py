"""EVM formats: addresses, the exact bytes of a transaction, and what such bytes would do. Pure.

Four transactions exist here, and no other is ever built or read: a transfer of the chain's coin or a call of an ERC-20
token's `transfer(address,uint256)`, each with EIP-1559 fees (type 2) or with a gas price (legacy, bound to its chain by
EIP-155). A cancellation is a transfer of nothing from the wallet to itself.

`decode` reads the fields, checks them, encodes them again and compares: bytes that differ in any way from what `build`
makes of the same values are refused. So access lists, contract creation, other calldata, integers with leading zeros
and bytes behind the end never reach a key, without a rule for each.

An address is stored and compared in its EIP-55 form. A signature here is r, s and the recovery id (0 or 1): 65 bytes.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from functools import lru_cache
from typing import NamedTuple, NoReturn

import rlp  # type: ignore[import-untyped]
from coincurve import PublicKey
from eth_hash.auto import keccak

from bursar.rails.chain import (
    Decoded,
    Fee,
    InvalidAddress,
    InvalidMemo,
    Network,
    Order,
    Shape,
    Signed,
    Slot,
    Unbuildable,
    Undecodable,
)

KIND = "evm"
ZERO_ADDRESS = "0x" + 40 * "0"

TYPE_1559 = b"\x02"
TRANSFER_SELECTOR = bytes.fromhex("a9059cbb")  # transfer(address,uint256)
TRANSFER_BYTES = 4 + 32 + 32

NONCE_MAX = 2**64 - 2  # EIP-2681: an account's nonce never exceeds 2^64 - 1, so that one can't be used
GAS_LIMIT_MAX = 2**63 - 1  # what nodes accept
WORD_MAX = 2**256 - 1
CHAIN_ID_MAX = 2**63 - 1  # so that the v of EIP-155 fits into nodes' 64 bits
SIGNATURE_BYTES = 65
CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

_HEX_ADDRESS = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)


class Content(NamedTuple):
    """The fields of a transaction, as they are encoded."""

    legacy: bool
    chain_id: int
    nonce: int
    tip: int
    price: int
    gas_limit: int
    to: bytes
    value: int
    data: bytes


# --- addresses -------------------------------------------------------------------------------------------------------


@lru_cache(10_000)  # a hash and forty comparisons in Python, for the same few addresses again and again
def checksum_address(raw: bytes) -> str:
    """EIP-55: a digit a-f is upper case where the hash of the lower-case digits has a high nibble."""
    digits = raw.hex()
    hashed = keccak(digits.encode()).hex()
    return "0x" + "".join(d.upper() if h >= "8" else d for d, h in zip(digits, hashed, strict=False))


def address_bytes(address: str) -> bytes:
    """The 20 bytes of an address that is one."""
    return bytes.fromhex(address[2:])


class LowerCase:
    """Addresses of ours, which are asked for as nodes write them. They are not gone through: there may be a million."""

    def __init__(self, addresses: Container[str]) -> None:
        self._addresses = addresses

    def __contains__(self, address: object) -> bool:
        return isinstance(address, str) and checksum_address(address_bytes(address)) in self._addresses


def address_of(public_key: bytes) -> str:
    """The address of an uncompressed public key (65 bytes, the first of them 4)."""
    return checksum_address(keccak(public_key[1:])[-20:])


def _checked(chain: str, text: str) -> str:
    if not text.startswith("0x"):
        raise InvalidAddress(chain, text, "it does not start with 0x")
    if not _HEX_ADDRESS.fullmatch(text):
        raise InvalidAddress(chain, text, "it is not 0x and 40 hexadecimal digits")
    canonical = checksum_address(address_bytes(text))
    digits = text[2:]
    if canonical == ZERO_ADDRESS:
        raise InvalidAddress(chain, text, "it is the zero address, which has no key")
    if digits not in (digits.lower(), digits.upper(), canonical[2:]):
        raise InvalidAddress(chain, text, "its checksum is wrong (upper and lower case): it was mistyped")
    return canonical


# --- bytes -----------------------------------------------------------------------------------------------------------


def _integer(value: int) -> bytes:
    return value.to_bytes((value.bit_length() + 7) // 8, "big")


def _fields(content: Content) -> list[object]:
    """What a transaction lists before its signature or what stands in for one."""
    c = content
    middle: list[object] = [_integer(c.gas_limit), c.to, _integer(c.value), c.data]
    if c.legacy:
        return [_integer(c.nonce), _integer(c.price), *middle]
    return [_integer(c.chain_id), _integer(c.nonce), _integer(c.tip), _integer(c.price), *middle, []]


def _unsigned(content: Content) -> bytes:
    if content.legacy:
        return bytes(rlp.encode([*_fields(content), _integer(content.chain_id), b"", b""]))
    return TYPE_1559 + bytes(rlp.encode(_fields(content)))


def _raw(content: Content, signature: bytes) -> bytes:
    r, s, recovery = signature[:32].lstrip(b"\0"), signature[32:64].lstrip(b"\0"), signature[64]
    if content.legacy:
        return bytes(rlp.encode([*_fields(content), _integer(2 * content.chain_id + 35 + recovery), r, s]))
    return TYPE_1559 + bytes(rlp.encode([*_fields(content), _integer(recovery), r, s]))


def transfer_data(to: str, amount: int) -> bytes:
    """The calldata of an ERC-20 `transfer`."""
    return TRANSFER_SELECTOR + address_bytes(to).rjust(32, b"\0") + amount.to_bytes(32, "big")


def read_transfer(data: bytes) -> tuple[str, int] | None:
    """Recipient and amount of such calldata; None if it is anything else."""
    if len(data) != TRANSFER_BYTES or not data.startswith(TRANSFER_SELECTOR + bytes(12)):
        return None
    return checksum_address(data[16:36]), int.from_bytes(data[36:], "big")


# --- reading ---------------------------------------------------------------------------------------------------------


def _undecodable(why: str) -> NoReturn:
    raise Undecodable(KIND, why)


def _listed(encoded: bytes) -> list[object]:
    try:
        found = rlp.decode(encoded)
    except (rlp.exceptions.RLPException, RecursionError, TypeError, ValueError) as error:
        _undecodable(f"not canonical RLP ({type(error).__name__})")
    if not isinstance(found, Sequence) or isinstance(found, bytes):
        _undecodable("not a list")
    return list(found)


def _number(field: object) -> int:
    if not isinstance(field, bytes) or len(field) > 32 or field.startswith(b"\0"):
        _undecodable("a number is not encoded as one")
    return int.from_bytes(field, "big")


def _bytes(field: object) -> bytes:
    if not isinstance(field, bytes):
        _undecodable("bytes are expected where there is a list")
    return field


def _content(fields: Sequence[object], *, legacy: bool, chain_id: int | None = None) -> Content:
    """The fields of a transaction without signature, in the order in which they are encoded."""
    if not legacy:
        chain_id, fields = _number(fields[0]), fields[1:]
    assert chain_id is not None  # legacy: the caller has read it
    nonce = _number(fields[0])
    tip, fields = (0, fields[1:]) if legacy else (_number(fields[1]), fields[2:])
    price, gas_limit, to, value, data = fields[:5]
    return Content(
        legacy, chain_id, nonce, tip, _number(price), _number(gas_limit), _bytes(to), _number(value), _bytes(data)
    )


def _read_unsigned(unsigned: bytes) -> Content:
    if unsigned[:1] == TYPE_1559:
        fields = _listed(unsigned[1:])
        if len(fields) != 9:
            _undecodable(f"an unsigned EIP-1559 transaction has 9 fields, this has {len(fields)}")
        content = _content(fields, legacy=False)
    else:
        fields = _listed(unsigned)
        if len(fields) != 9:
            _undecodable(f"an unsigned legacy transaction has 9 fields, this has {len(fields)}")
        content = _content(fields, legacy=True, chain_id=_number(fields[6]))
    if _unsigned(content) != unsigned:
        _undecodable("it contains more than a transfer, or is encoded otherwise")
    return content


def _read_raw(raw: bytes) -> tuple[Content, bytes]:
    """The content of signed bytes, and the signature."""
    legacy = raw[:1] != TYPE_1559
    fields = _listed(raw if legacy else raw[1:])
    if len(fields) != (9 if legacy else 12):
        _undecodable("a signed transaction has 9 fields (legacy) or 12 (EIP-1559)")
    v, r, s = (_number(field) for field in fields[-3:])
    if legacy:
        chain_id, recovery = divmod(v - 35, 2)
        content = _content(fields, legacy=True, chain_id=chain_id)
    else:
        recovery, content = v, _content(fields, legacy=False)
    if recovery not in (0, 1) or content.chain_id < 1:
        _undecodable("the signature's v is of no chain")
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes([recovery])
    if _raw(content, signature) != raw:
        _undecodable("it contains more than a transfer, or is encoded otherwise")
    return content, signature


def _meaning(content: Content) -> Decoded:
    """What the transaction would do; only transfers pass."""
    if why := _out_of_bounds(content):
        _undecodable(why)
    if len(content.to) != 20:
        _undecodable("it has no recipient: it would create a contract")
    to, contract, amount = checksum_address(content.to), "", content.value
    if to == ZERO_ADDRESS:
        _undecodable("it goes to the zero address")
    if content.data:
        transfer = read_transfer(content.data)
        if transfer is None:
            _undecodable("its calldata is not transfer(address,uint256)")
        if content.value:
            _undecodable("it moves coin and tokens at once")
        contract, (to, amount) = to, transfer
        if to == ZERO_ADDRESS:
            _undecodable("the tokens go to the zero address")
        if not amount:
            _undecodable("it moves no tokens")
    fee = Fee(gas_limit=content.gas_limit, price=content.price, tip=content.tip)
    slot = Slot(nonce=content.nonce)
    return Decoded(chain_id=content.chain_id, to=to, contract=contract, amount=amount, slot=slot, fee=fee)


def _out_of_bounds(c: Content) -> str:
    if not 1 <= c.chain_id <= CHAIN_ID_MAX:
        return f"chain id {c.chain_id} is out of bounds"
    if not 0 <= c.nonce <= NONCE_MAX:
        return f"nonce {c.nonce} is out of bounds"
    if not 1 <= c.gas_limit <= GAS_LIMIT_MAX:
        return f"gas limit {c.gas_limit} is out of bounds"
    if not 1 <= c.price <= WORD_MAX or not 0 <= c.tip <= c.price:
        return f"the fee is out of bounds (price {c.price}, tip {c.tip})"
    if not 0 <= c.value <= WORD_MAX:
        return f"amount {c.value} is out of bounds"
    return ""


# --- signatures ------------------------------------------------------------------------------------------------------


def _signer_of(unsigned: bytes, signature: bytes) -> str:
    r, s = int.from_bytes(signature[:32], "big"), int.from_bytes(signature[32:64], "big")
    if len(signature) != SIGNATURE_BYTES or signature[64] > 1:
        _undecodable("a signature is r, s and 0 or 1: 65 bytes")
    if not 0 < r < CURVE_ORDER or not 0 < s <= CURVE_ORDER // 2:  # EIP-2: of two equal signatures, the one with low s
        _undecodable("r or s of the signature is out of bounds")
    try:
        key = PublicKey.from_signature_and_message(signature, keccak(unsigned), hasher=None)
    except Exception:  # coincurve raises a bare Exception for a point that is not on the curve
        _undecodable("the signature is of no key")
    return address_of(key.format(compressed=False))


class EvmCodec:
    """The formats of every EVM chain (`rails.chain.Codec`)."""

    kind = KIND

    def check_address(self, chain: str, text: str) -> str:
        return _checked(chain, text)

    def check_memo(self, chain: str, text: str) -> None:
        if text:
            raise InvalidMemo(chain, "its transactions have none")

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        def refuse(why: str) -> NoReturn:
            raise Unbuildable(network.name, why)

        if slot.nonce is None or slot.expires is not None or slot.reference:
            refuse("its slot must be a nonce and nothing else")
        self.check_memo(network.name, order.memo)
        if fee.tip and network.legacy_fees:
            refuse("a gas price has no tip")
        to, value, data = _checked(network.name, sender), 0, b""
        if shape is Shape.PAY:
            to = _checked(network.name, order.to)
            if not 1 <= order.amount <= WORD_MAX:
                refuse(f"amount {order.amount} is out of bounds")
            if order.contract:
                data = transfer_data(to, order.amount)
                to = _checked(network.name, order.contract)
            else:
                value = order.amount
        content = Content(
            network.legacy_fees,
            network.chain_id,
            slot.nonce,
            fee.tip,
            fee.price,
            fee.gas_limit,
            address_bytes(to),
            value,
            data,
        )
        if why := _out_of_bounds(content):
            refuse(why)
        return _unsigned(content)

    def decode(self, unsigned: bytes) -> Decoded:
        return _meaning(_read_unsigned(unsigned))

    def digest(self, unsigned: bytes) -> bytes:
        self.decode(unsigned)  # nothing is signed that can't be read
        return bytes(keccak(unsigned))

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        content = _read_unsigned(unsigned)
        _meaning(content)
        signer = _signer_of(unsigned, signature)
        if signer != _checked(KIND, sender):
            _undecodable(f"it was signed by {signer}, not by {sender}")
        raw = _raw(content, signature)
        return Signed(raw=raw, hash=hash_of(raw))

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        content, signature = _read_raw(raw)
        return _meaning(content), _signer_of(_unsigned(content), signature), hash_of(raw)


def hash_of(raw: bytes) -> str:
    """The hash by which a chain knows a signed transaction."""
    return "0x" + keccak(raw).hex()
