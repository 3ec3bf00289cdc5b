"""What a payment costs on TRON, and what it may cost at most. Pure.

Energy is what a contract's code uses, at the chain's price; `fee_limit` bounds it, and a call that runs out of it takes
the whole limit (W29). Beside it: bandwidth for the bytes of the transaction, a fee for a memo, and TRX to an address
that is no account yet activates it for a fee. The chain burns TRX for what staked or free resources do not cover.

A quote counts everything as burned. Staked energy and bandwidth make a payment cheaper than that: what was really paid
is read from the receipt, and that is what is booked.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from bursar.rails.nodes import Malformed
from bursar.rails.tron.codec import RESULT_BYTES, SIGNED_BYTES_MORE

ENERGY_DEFAULT_MAX: Final = 200_000  # where the asset has no limit of its own
NEW_HOLDER_ENERGY: Final = 15_000  # if the recipient spends his last token meanwhile, storing his balance costs as much


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """What the chain asks for now, in sun."""

    energy: int
    byte: int
    memo: int
    activation: int
    fee_limit_max: int

    @classmethod
    def of(cls, parameters: dict[str, int]) -> Prices:
        """As a node has them. Those that cost nothing have no value; those that must cost something must be there."""
        found = cls(
            energy=parameters.get("getEnergyFee", 0),
            byte=parameters.get("getTransactionFee", 0),
            memo=parameters.get("getMemoFee", 0),
            activation=parameters.get("getCreateNewAccountFeeInSystemContract", 0)
            + parameters.get("getCreateAccountFee", 0),
            fee_limit_max=parameters.get("getMaxFeeLimit", 0),
        )
        if min(found.energy, found.byte, found.memo + 1, found.activation + 1, found.fee_limit_max) < 1:
            raise Malformed("the chain's parameters have no price of energy or bandwidth, or no highest fee limit")
        return found

    def beside(self, size: int, *, memo: bool, activates: bool) -> int:
        """What a transaction with so many bytes of raw_data costs beside its energy."""
        bandwidth = (size + SIGNED_BYTES_MORE + RESULT_BYTES) * self.byte
        return bandwidth + (self.memo if memo else 0) + (self.activation if activates else 0)


def usual(prices: Iterable[Prices]) -> Prices:
    """Of each price the middle one; of two, the higher. One node that is wrong does not set it among three."""
    every = list(prices)
    return Prices(
        energy=_median(one.energy for one in every),
        byte=_median(one.byte for one in every),
        memo=_median(one.memo for one in every),
        activation=_median(one.activation for one in every),
        fee_limit_max=-_median(-one.fee_limit_max for one in every),
    )


def _median(values: Iterable[int]) -> int:
    ordered = sorted(values)
    return ordered[len(ordered) // 2]


def energy_limit(used: int, highest: int) -> int:
    """What a dry run used, which is not above the limit, with a margin for state that changes until then."""
    return min(highest, -(-used * 5 // 4) + NEW_HOLDER_ENERGY)


def transfer_answer(returned: bytes) -> str:
    """Why what a token's `transfer` returned is no success; "": nothing and true are (TRON's USDT returns nothing)."""
    return "the token's transfer returns false" if returned and not any(returned[:32]) else ""
