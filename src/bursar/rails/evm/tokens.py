"""What a token's contract says: balances, and its Transfer events of a block, read strictly into plain values.

An event is what a contract claims to have moved. It may have moved less, or taken a fee that it does not report. So a
payment is held against the balances of both sides at the block before and at its own: they must have changed by what
all Transfer events of that block say about them. All, because other payments in it move the same balances.

A balance is the contract's word, too: one that lies in both is believed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from bursar.rails.chain import Confirmed, Question
from bursar.rails.evm.codec import address_bytes
from bursar.rails.evm.fees import refusal
from bursar.rails.evm.reading import TRANSFER_TOPIC, Transfer, block_transfers, same
from bursar.rails.evm.rpc import Call, CallError, CallFailed, data, result

CHANGES_CALLS = 6  # for one payment
_BALANCE_OF = bytes.fromhex("70a08231")  # balanceOf(address)


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What one block did to the balance of an address."""

    before: int | None  # None: the contract gives no balance
    after: int | None
    reported: int  # what the events say that it received, less what it sent


class Changes(msgspec.Struct, frozen=True, kw_only=True):
    """What the block of a payment did to its two sides."""

    wallet: Change
    recipient: Change


# --- balances --------------------------------------------------------------------------------------------------------


def balance_call(contract: str, address: str, at: str) -> Call:
    """Ask for the balance of an address after a block."""
    return Call("eth_call", ({"to": contract, "data": "0x" + (_BALANCE_OF + _word(address)).hex()}, at))


def balance(value: Any) -> int | None:
    """What `balanceOf` returns; None if that is no number: there is no token at that address."""
    if isinstance(value, CallError):
        refusal(value)  # raises if the error is the node's own trouble
        return None
    found = data(value)
    return int.from_bytes(found, "big") if len(found) == 32 else None


def _word(address: str) -> bytes:
    return address_bytes(address).rjust(32, b"\0")


def contradiction(side: str, change: Change) -> str:
    """How a balance contradicts the events; "" if it does not."""
    if change.before is None or change.after is None:
        return f"the token gives no balance of the {side}"
    moved = change.after - change.before
    if moved >= change.reported:  # more is no fee: interest, or coin that was wrapped
        return ""
    return f"the token reports that the {side}'s balance {_rose(change.reported)}, but it {_rose(moved)}"


def _rose(by: int) -> str:
    return "did not change" if not by else f"rose by {by}" if by > 0 else f"fell by {-by}"


# --- what a block did ------------------------------------------------------------------------------------------------


def changes_calls(question: Question, paid: Confirmed) -> list[Call]:
    """What a node has to be asked for `changes`. Logs by the block's hash, balances by its height: it is final."""
    contract, sides = question.order.contract, (question.sender, question.order.to)
    either = ["0x" + _word(side).hex() for side in sides]
    where = {"blockHash": paid.block_hash, "address": contract}
    return [
        Call("eth_getLogs", ({**where, "topics": [TRANSFER_TOPIC, either]},)),
        Call("eth_getLogs", ({**where, "topics": [TRANSFER_TOPIC, None, either]},)),
        *(balance_call(contract, side, hex(at)) for side in sides for at in (paid.block - 1, paid.block)),
    ]


def changes(question: Question, paid: Confirmed, results: Sequence[Any]) -> Changes:
    """What the block of a payment did to both sides, as one node says. `CallFailed`: it can't say."""
    sent, received = (block_transfers(result(one), paid.block_hash) for one in results[:2])
    for logs in (sent, received):
        # A node that has dropped old logs may answer with none instead of an error.
        if not any(_is_payment(question, log) for log in logs):
            raise CallFailed(f"its events of block {paid.block} lack the payment's own")
    balances = [balance(one) for one in results[2:]]

    def change(side: str, before: int | None, after: int | None) -> Change:
        ours = question.order.contract
        reported = sum(log.amount for log in received if same(ours, log.contract) and same(side, log.to))
        reported -= sum(log.amount for log in sent if same(ours, log.contract) and same(side, log.sender))
        return Change(before=before, after=after, reported=reported)

    return Changes(
        wallet=change(question.sender, *balances[:2]),
        recipient=change(question.order.to, *balances[2:]),
    )


def _is_payment(question: Question, log: Transfer) -> bool:
    order = question.order
    sides = same(question.sender, log.sender) and same(order.to, log.to)
    return sides and same(order.contract, log.contract) and log.amount == order.amount
