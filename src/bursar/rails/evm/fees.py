"""Fees and dry runs: what a transaction should offer, and whether the chain would refuse it. Pure.

A price is what one unit of gas may cost at most. With EIP-1559 the chain burns its base fee, which can double within
six full blocks, and pays the tip; an offer of twice the base fee plus the tip stays includable that long. No offer is
above the ceiling of its priority.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from bursar.rails.chain import Fee, FeeTooHigh
from bursar.rails.evm.rpc import CallError, CallFailed

PLAIN_GAS = 21_000  # a transfer that runs no code costs exactly this
GAS_LIMIT_DEFAULT_MAX = 500_000  # where the asset has no limit of its own
REASON_CHARS_MAX = 200

_ERROR_STRING = bytes.fromhex("08c379a0")  # Error(string)
_PANIC = bytes.fromhex("4e487b71")  # Panic(uint256)
# What nodes say when the code itself refuses; anything else is the node's own trouble.
_REVERTS = (
    "revert",
    "out of gas",
    "outofgas",
    "gas required exceeds",
    "invalid opcode",
    "invalid jump",
    "stack underflow",
    "stack limit",
    "vm execution error",
    "evm error",
)


class Market(msgspec.Struct, frozen=True):
    """What the chain asks for now: the next block's base fee, or the usual gas price of a chain without one."""

    base: int
    legacy: bool

    def least(self, tip: int) -> int:
        """The lowest price that can be included now."""
        return self.base + tip

    def usual(self, tip: int) -> int:
        """A price that can be included for a while."""
        return self.base if self.legacy else 2 * self.base + tip


class Reverted(msgspec.Struct, frozen=True):
    """A dry run in which the chain refuses the payment."""

    why: str


class Short(msgspec.Struct, frozen=True):
    """A dry run in which the wallet has too little coin."""


def offer(chain: str, market: Market, tip: int, ceiling: int, gas_limit: int) -> Fee:
    """A first offer; `FeeTooHigh` if nothing under the ceiling can be included now."""
    tip = 0 if market.legacy else tip
    least = max(1, market.least(tip))  # a price of nothing can't be encoded
    if least > ceiling:
        raise FeeTooHigh(chain, least, ceiling)
    return Fee(gas_limit=gas_limit, price=max(least, min(ceiling, market.usual(tip))), tip=tip)


def replacement(fee: Fee, market: Market, tip: int, ceiling: int) -> Fee | None:
    """An offer that replaces another one: nodes want a tenth more of both price and tip; we give an eighth."""
    tip = 0 if market.legacy else max(_eighth_more(fee.tip), tip)
    price = max(_eighth_more(fee.price), min(ceiling, market.usual(tip)))
    if price > ceiling or price < market.least(tip):
        return None
    return Fee(gas_limit=fee.gas_limit, price=price, tip=tip)


def _eighth_more(value: int) -> int:
    return -(-value * 9 // 8)  # rounded up


def median(values: Iterable[int]) -> int:
    """The middle one; of two, the higher. One node that is wrong does not set the price among three."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def gas_limit(estimate: int, highest: int) -> int | None:
    """An estimate with a margin, for state that changes until then; None if the estimate itself is above the limit."""
    if estimate > highest:
        return None
    return estimate if estimate <= PLAIN_GAS else min(highest, -(-estimate * 5 // 4))


# --- dry runs --------------------------------------------------------------------------------------------------------


def refusal(error: CallError) -> Reverted | Short:
    """What an error of a dry run means; `CallFailed` if it says nothing about the payment."""
    said = error.message.lower()
    if error.code == 3 or error.data or any(word in said for word in _REVERTS):
        return Reverted(_reason(error))
    if "insufficient funds" in said:
        return Short()
    raise CallFailed(f"error {error.code}: {error.message}")


def transfer_answer(returned: bytes) -> Reverted | None:
    """What a token's `transfer` returned: nothing and true are success (a token that returns nothing is common)."""
    if returned and (len(returned) < 32 or not any(returned[:32])):
        return Reverted("the token's transfer returns false")
    return None


def _reason(error: CallError) -> str:
    """The reason that the code gave, where it gave one."""
    returned = error.data
    if returned.startswith(_ERROR_STRING) and len(returned) >= 68:
        size = int.from_bytes(returned[36:68], "big")
        return returned[68 : 68 + min(size, 4 * REASON_CHARS_MAX)].decode(errors="replace")[:REASON_CHARS_MAX]
    if returned.startswith(_PANIC) and len(returned) == 36:
        return f"the contract panics with code {int.from_bytes(returned[4:], 'big'):#x}"
    if len(returned) >= 4:
        return f"the contract reverts with error 0x{returned[:4].hex()}"
    return error.message[:REASON_CHARS_MAX]
