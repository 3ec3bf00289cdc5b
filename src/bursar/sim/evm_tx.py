"""Raw transactions as an EVM node reads them: type 2 (EIP-1559) and legacy with a chain id (EIP-155).

This is the network's own reading, written apart from `rails/evm` on purpose: a mistake in the codec that builds
transactions must not be repeated by the chain that judges them. The sender is recovered from the signature; bytes that
are not canonical, or whose signature is of no key, are refused with the words of a real node.

Contract creation and access lists are not simulated and are refused.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, NamedTuple

import rlp  # type: ignore[import-untyped]
from coincurve import PublicKey
from eth_hash.auto import keccak

HALF_ORDER: Final = 0x7FFFFFFFFFFFFFFFFFFFFFFFFFFFFFFF5D576E7357A4501DDFE92F46681B20A0
BASE_GAS: Final = 21_000
TRANSFER: Final = bytes.fromhex("a9059cbb")  # transfer(address,uint256)


class RefusedTransaction(Exception):
    """A node does not take these bytes, in its own words."""


class Tx(NamedTuple):
    """A transaction whose signature was checked. Addresses are lower-case text."""

    hash: str
    legacy: bool
    chain_id: int
    nonce: int
    tip: int  # legacy: the gas price
    max_fee: int  # legacy: the gas price
    gas: int
    to: str
    value: int
    data: bytes
    sender: str
    v: int
    r: int
    s: int
    raw: bytes

    @property
    def cost_max(self) -> int:
        """The most that it can take from its sender."""
        return self.gas * self.max_fee + self.value

    @property
    def intrinsic_gas(self) -> int:
        """What it costs before anything is executed."""
        zeros = self.data.count(0)
        return BASE_GAS + 4 * zeros + 16 * (len(self.data) - zeros)

    def tip_at(self, base_fee: int) -> int:
        """What the block's maker gets per unit of gas; negative if the base fee is not covered."""
        return min(self.tip, self.max_fee - base_fee)


@lru_cache(maxsize=1_024)  # every node reads what it is given
def read_transaction(raw: bytes) -> Tx:
    """Decode and check; RefusedTransaction if a node would not take it."""
    legacy = raw[:1] >= b"\xc0"
    if not legacy and raw[:1] != b"\x02":
        raise RefusedTransaction("transaction type not supported")
    try:
        fields = list(rlp.decode(raw if legacy else raw[1:]))
        tx = _legacy(fields, raw) if legacy else _dynamic(fields, raw)
    except (rlp.exceptions.RLPException, ValueError, TypeError, RecursionError) as error:
        raise RefusedTransaction(f"rlp: {error or type(error).__name__}") from None
    return tx


def _dynamic(fields: list[Any], raw: bytes) -> Tx:
    *content, v, r, s = fields
    chain_id, nonce, tip, max_fee, gas, to, value, data, access = content
    if access:
        raise RefusedTransaction("access lists are not simulated")
    sender = _sender(b"\x02" + rlp.encode(content), _int(v), _int(r), _int(s))
    if _int(tip) > _int(max_fee):
        raise RefusedTransaction("max priority fee per gas higher than max fee per gas")
    return Tx(
        hash="0x" + keccak(raw).hex(),
        legacy=False,
        chain_id=_int(chain_id),
        nonce=_int(nonce),
        tip=_int(tip),
        max_fee=_int(max_fee),
        gas=_int(gas),
        to=_address(to),
        value=_int(value),
        data=_bytes(data),
        sender=sender,
        v=_int(v),
        r=_int(r),
        s=_int(s),
        raw=raw,
    )


def _legacy(fields: list[Any], raw: bytes) -> Tx:
    nonce, price, gas, to, value, data, v, r, s = fields
    chain_id, parity = divmod(_int(v) - 35, 2)
    if chain_id < 1:
        raise RefusedTransaction("only replay-protected (EIP-155) transactions allowed over RPC")
    unsigned = rlp.encode([nonce, price, gas, to, value, data, chain_id, b"", b""])
    return Tx(
        hash="0x" + keccak(raw).hex(),
        legacy=True,
        chain_id=chain_id,
        nonce=_int(nonce),
        tip=_int(price),
        max_fee=_int(price),
        gas=_int(gas),
        to=_address(to),
        value=_int(value),
        data=_bytes(data),
        sender=_sender(unsigned, parity, _int(r), _int(s)),
        v=_int(v),
        r=_int(r),
        s=_int(s),
        raw=raw,
    )


def _sender(unsigned: bytes, parity: int, r: int, s: int) -> str:
    if parity not in (0, 1) or not 0 < s <= HALF_ORDER:
        raise RefusedTransaction("invalid transaction v, r, s values")
    signature = r.to_bytes(32, "big") + s.to_bytes(32, "big") + bytes([parity])
    try:
        key = PublicKey.from_signature_and_message(signature, keccak(unsigned), hasher=None)
    except Exception:  # coincurve raises a bare Exception for a signature of no key
        raise RefusedTransaction("invalid transaction v, r, s values") from None
    return "0x" + keccak(key.format(compressed=False)[1:])[-20:].hex()


def _int(value: bytes) -> int:
    if not isinstance(value, bytes) or value[:1] == b"\0" or len(value) > 32:
        raise ValueError("non-canonical integer")
    return int.from_bytes(value, "big")


def _bytes(value: bytes) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("expected input string or byte")
    return value


def _address(value: bytes) -> str:
    if _bytes(value) == b"":
        raise RefusedTransaction("contract creation is not simulated")
    if len(value) != 20:
        raise ValueError("input string too short for common.Address")
    return "0x" + value.hex()


def read_transfer(data: bytes) -> tuple[str, int] | None:
    """Recipient and amount of an ERC-20 `transfer`; None if the calldata is not one."""
    if len(data) != 68 or data[:16] != TRANSFER + bytes(12):
        return None
    return "0x" + data[16:36].hex(), int.from_bytes(data[36:], "big")
