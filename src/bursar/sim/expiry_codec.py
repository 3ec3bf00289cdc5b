"""The formats of the simulated chain without nonces: bytes that are exactly one way, and signatures over them.

A transaction is a msgpack list of fixed fields. Its hash is SHA-256 of the unsigned bytes, as on TRON: the signature is
no part of it, and two transactions of equal content are one. `Slot.reference` names a block and may carry a suffix
after `/`, which makes two payments of equal content two transactions.

Addresses and signatures are those of EVM chains (EIP-55; r, s and the recovery id over 32 bytes), so that the same
signer and the same keys work. Pure.
"""

from __future__ import annotations

import re
from functools import lru_cache
from hashlib import sha256
from typing import Final, NoReturn

import msgspec
from coincurve import PublicKey
from eth_hash.auto import keccak
from eth_utils.address import to_checksum_address

from bursar.rails.chain import (
    Decoded,
    Fee,
    InvalidAddress,
    Network,
    Order,
    Shape,
    Signed,
    Slot,
    Unbuildable,
    Undecodable,
)

KIND: Final = "expiry"
HEX_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)
SEEN_MAX: Final = 1_024
ZERO_ADDRESS: Final = "0x" + 40 * "0"
HALF_ORDER: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0


class Content(msgspec.Struct, array_like=True, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a transaction says, in the order in which it is encoded."""

    chain_id: int
    sender: str
    to: str
    contract: str
    amount: str  # decimal: it may not fit into 64 bits
    memo: str
    gas_limit: int
    price: int
    reference: str
    expires: int


class Envelope(msgspec.Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """A signed transaction."""

    unsigned: bytes
    signature: bytes


class ExpiryCodec:
    """`rails.chain.Codec` of the simulated chain."""

    kind = KIND

    def check_address(self, chain: str, text: str) -> str:
        if not HEX_ADDRESS.fullmatch(text):
            raise InvalidAddress(chain, text, "it is not 0x and 40 hexadecimal digits")
        canonical = _checksummed(text)
        if canonical == ZERO_ADDRESS:
            raise InvalidAddress(chain, text, "it is the zero address, which has no key")
        if text[2:] not in (text[2:].lower(), text[2:].upper(), canonical[2:]):
            raise InvalidAddress(chain, text, "its checksum is wrong (upper and lower case): it was mistyped")
        return canonical

    def check_memo(self, chain: str, text: str) -> None:
        return  # any text goes

    def build(self, network: Network, sender: str, order: Order, shape: Shape, slot: Slot, fee: Fee) -> bytes:
        if slot.expires is None or not slot.reference or slot.nonce is not None:
            raise Unbuildable(network.name, f"its slot is an expiry and a reference block, not {slot}")
        pays = shape is Shape.PAY
        content = Content(
            chain_id=network.chain_id,
            sender=self.check_address(network.name, sender),
            to=self.check_address(network.name, order.to if pays else sender),
            contract=self.check_address(network.name, order.contract) if pays and order.contract else "",
            amount=str(order.amount if pays else 0),
            memo=order.memo if pays else "",
            gas_limit=fee.gas_limit,
            price=fee.price,
            reference=slot.reference,
            expires=slot.expires,
        )
        unsigned = msgspec.msgpack.encode(content)
        self.decode(unsigned)  # nothing is built that can't be read
        return unsigned

    def decode(self, unsigned: bytes) -> Decoded:
        return _meaning(self.content(unsigned))

    def content(self, unsigned: bytes) -> Content:
        """The fields; Undecodable unless `build` makes exactly these bytes of them."""
        try:
            content = msgspec.msgpack.decode(unsigned, type=Content)
            addresses = [one for one in (content.sender, content.to, content.contract) if one]
            canonical = [self.check_address(KIND, one) for one in addresses] == addresses
            amount = int(content.amount)
        except (msgspec.MsgspecError, InvalidAddress, ValueError) as error:
            _undecodable(f"{error}")
        if msgspec.msgpack.encode(content) != unsigned or not canonical or str(amount) != content.amount:
            _undecodable("it is encoded otherwise")
        cancels = content.to == content.sender and not content.contract and not content.memo
        if not (content.sender and content.to) or amount < 0 or (amount == 0 and not cancels):
            _undecodable("it is neither a payment nor a cancellation")
        if min(content.chain_id, content.gas_limit, content.price, content.expires) < 1 or not content.reference:
            _undecodable("a field is out of bounds")
        return content

    def digest(self, unsigned: bytes) -> bytes:
        self.decode(unsigned)
        return sha256(unsigned).digest()

    def signed(self, unsigned: bytes, signature: bytes, sender: str) -> Signed:
        digest = self.digest(unsigned)
        signer = _signer(digest, signature)
        if signer != self.check_address(KIND, sender) or signer != self.content(unsigned).sender:
            _undecodable(f"it was signed by {signer}, not by {sender}")
        return Signed(raw=msgspec.msgpack.encode(Envelope(unsigned, signature)), hash=digest.hex())

    def read(self, raw: bytes) -> tuple[Decoded, str, str]:
        try:
            envelope = msgspec.msgpack.decode(raw, type=Envelope)
        except msgspec.MsgspecError as error:
            _undecodable(f"{error}")
        sender = self.content(envelope.unsigned).sender
        signed = self.signed(envelope.unsigned, envelope.signature, sender)
        if signed.raw != raw:
            _undecodable("it is encoded otherwise")
        return self.decode(envelope.unsigned), sender, signed.hash


def _meaning(content: Content) -> Decoded:
    return Decoded(
        chain_id=content.chain_id,
        to=content.to,
        contract=content.contract,
        amount=int(content.amount),
        slot=Slot(expires=content.expires, reference=content.reference),
        fee=Fee(gas_limit=content.gas_limit, price=content.price),
        memo=content.memo,
    )


@lru_cache(maxsize=SEEN_MAX)  # each node checks the same signature
def _signer(digest: bytes, signature: bytes) -> str:
    if len(signature) != 65 or signature[64] > 1 or not 0 < int.from_bytes(signature[32:64], "big") <= HALF_ORDER:
        _undecodable("the signature is out of bounds")
    try:
        key = PublicKey.from_signature_and_message(signature, digest, hasher=None)
    except Exception:  # coincurve raises a bare Exception for a signature of no key
        _undecodable("the signature is of no key")
    return _checksummed("0x" + keccak(key.format(compressed=False)[1:])[-20:].hex())


@lru_cache(maxsize=SEEN_MAX)
def _checksummed(address: str) -> str:
    return str(to_checksum_address(address))


def _undecodable(why: str) -> NoReturn:
    raise Undecodable(KIND, why)
