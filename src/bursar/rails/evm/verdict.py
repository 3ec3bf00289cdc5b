"""The fate of a payout's transactions: what one node's facts mean, and what several nodes together prove. Pure.

`judge` reads the facts of one node as if that node could be believed. `combine` believes nothing that ends a payment
unless two nodes give exactly the same verdict, and more than half of those that answered (W35).

What one node's facts mean, at the final block F on whose hash the nodes agree:

- A try of ours is in a block up to F, and that block is the one of its height: it is final. A payment that succeeded is
  confirmed if it moved exactly what was ordered, else a mismatch (W36). A payment that failed is dead, at our cost. A
  cancellation is the death of what it replaced. Of tokens that is what their event says; `check` holds a payment that
  is confirmed by its event against the balances.
- No try is final, but the nonce is used at F: the transaction that used it decides. Known from the watcher, it is
  looked at: if it made this payment, that is a mismatch; if not, every try is dead and the proof names it. If it is not
  known, a person has to find it (W17).
- Otherwise it is pending: the nonce is free at F, so any try may still be mined. Absence proves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from bursar.rails.chain import Confirmed, Dead, Fate, Mismatch, Order, Pending, Question, Shape, Try, Unknown
from bursar.rails.evm.codec import read_transfer
from bursar.rails.evm.reading import Receipt, Transaction, same
from bursar.rails.evm.tokens import Changes, contradiction
from bursar.rails.nodes import largest_group
from bursar.rails.verdicts import Verdict, by_one_node, describe, ending, waiting_together, with_nodes

PLAIN_GAS = 21_000  # a transfer that runs no code uses exactly this

TRANSFERS_SHOWN_MAX = 10
BALANCES = "balances"  # in the evidence of a mismatch: what they were, and what the events say

T = TypeVar("T")


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says about one question."""

    final: int  # the height of F
    nonce: int | None  # how many transactions of the sender are in the blocks up to F; None: it can't say any more
    receipts: dict[str, Receipt | None]  # by hash
    transactions: dict[str, Transaction | None]
    canonical: dict[int, str | None]  # hash of the block at a height

    def included(self, hash_: str) -> Receipt | None:
        """The receipt of a transaction that is in a block of the chain as it is now."""
        found = self.receipts.get(hash_)
        return found if found is not None and self.canonical.get(found.block) == found.block_hash else None


# --- one node --------------------------------------------------------------------------------------------------------


def judge(question: Question, facts: Facts) -> Fate:
    """What the facts of one node mean, if it can be believed."""
    nonce = question.tries[0].slot.nonce
    assert nonce is not None  # the caller has checked
    hashes = [one.hash for one in question.tries if one.hash]
    included = {hash_: found for hash_ in hashes if (found := facts.included(hash_)) is not None}
    final = [one for one in question.tries if one.hash in included and included[one.hash].block <= facts.final]
    if len(final) > 1:
        return Unknown(why="two transactions with one nonce are said to be in the chain")
    if final:
        return _final(question, final[0], included[final[0].hash], facts.transactions.get(final[0].hash), nonce)
    if facts.nonce is not None and facts.nonce > nonce:
        return _consumed(question, facts, nonce)
    if included:
        return Pending(seen=True, block=min(found.block for found in included.values()))
    if facts.nonce is None:
        return Unknown(why=f"it has no state of block {facts.final} any more, and can't say whether the nonce is used")
    # One that is in a block of the past is not seen: after a reorganisation nodes may still name that block.
    pool = [facts.transactions.get(hash_) for hash_ in hashes]
    return Pending(seen=any(found is not None and found.block is None for found in pool))


def _final(question: Question, one: Try, receipt: Receipt, found: Transaction | None, nonce: int) -> Fate:
    if found is None or not _is_of(found, question.sender, nonce):
        return Unknown(why=f"there is a receipt of {one.hash}, but not that transaction of {question.sender}")
    if one.shape is Shape.CANCEL:
        return _dead(receipt, nonce, "cancelled")
    if not receipt.succeeded:
        return _dead(receipt, nonce, "failed")
    why = _difference(question, receipt, found)
    evidence: dict[str, Any] = {"block": receipt.block, "block_hash": receipt.block_hash, "nonce": nonce}
    if question.order.contract:
        evidence["transfers"] = [
            {"contract": t.contract, "from": t.sender, "to": t.to, "amount": str(t.amount)}
            for t in receipt.transfers[:TRANSFERS_SHOWN_MAX]
        ]
    cost: dict[str, Any] = {"fee_paid": receipt.fee, "gas_used": receipt.gas_used, "gas_price": receipt.gas_price}
    if why:
        return Mismatch(hash=one.hash, why=why, evidence=evidence, **cost)
    return Confirmed(hash=one.hash, block=receipt.block, block_hash=receipt.block_hash, evidence=evidence, **cost)


def _is_of(found: Transaction, sender: str, nonce: int) -> bool:
    return same(sender, found.sender) and found.nonce == nonce


def _dead(receipt: Receipt, nonce: int, how: str) -> Dead:
    return Dead(
        proof=_proof(receipt, nonce, how),
        hash=receipt.hash,
        fee_paid=receipt.fee,
        gas_used=receipt.gas_used,
        gas_price=receipt.gas_price,
    )


def _proof(receipt: Receipt, nonce: int, how: str) -> dict[str, Any]:
    named = {"hash": receipt.hash, "block": receipt.block, "block_hash": receipt.block_hash}
    return {"how": how, "nonce": nonce, "consumed_by": named}


def _difference(question: Question, receipt: Receipt, found: Transaction) -> str:
    """How a successful payment differs from what was ordered; "" if it does not (W13)."""
    order = question.order
    if not order.contract:
        paid = same(order.to, found.to) and found.value == order.amount and not found.data
        return "" if paid else "the transaction is not the payment of coin that was ordered"
    moved = [transfer for transfer in receipt.transfers if same(order.contract, transfer.contract)]
    # Exactly one: a second one is a fee that the token takes from the sender or from the recipient.
    if len(moved) != 1:
        return f"the token reports {len(moved)} transfers where there should be one"
    one = moved[0]
    if not same(question.sender, one.sender) or not same(order.to, one.to) or one.amount != order.amount:
        return f"the token reports {one.amount} from {one.sender} to {one.to}"
    return ""


def check(paid: Confirmed, found: Changes) -> Confirmed | Mismatch:
    """A payment of tokens that is confirmed by its event, held against what its block did to the balances (W36)."""
    sides = {"recipient": found.recipient, "wallet": found.wallet}
    if not (whys := [why for side, change in sides.items() if (why := contradiction(side, change))]):
        return paid
    shown = {
        side: {"before": str(change.before), "after": str(change.after), "reported": str(change.reported)}
        for side, change in sides.items()
    }
    return Mismatch(
        hash=paid.hash,
        why=f"in block {paid.block} " + ", and ".join(whys),
        fee_paid=paid.fee_paid,
        gas_used=paid.gas_used,
        gas_price=paid.gas_price,
        evidence=paid.evidence | {BALANCES: shown},
    )


def _consumed(question: Question, facts: Facts, nonce: int) -> Fate:
    """The nonce is used at F, and not by a try of ours."""
    consumer = question.consumer
    if not consumer:
        why = f"nonce {nonce} of {question.sender} is used, and it is not known by which transaction"
        return Unknown(why=why, person=True)
    receipt, found = facts.included(consumer), facts.transactions.get(consumer)
    if receipt is None or receipt.block > facts.final or found is None or not _is_of(found, question.sender, nonce):
        return Unknown(why=f"{consumer}, which should have used nonce {nonce}, is not there as such")
    if receipt.succeeded:
        if _pays(question.order, receipt, found):
            why = f"{consumer} is none of the stored transactions, and made this payment"
            return Mismatch(hash=consumer, why=why, evidence={"consumed_by": consumer, "nonce": nonce})
        # Code that ran may have passed the coin on to anyone, and no log would say so.
        if not question.order.contract and found.value >= question.order.amount and receipt.gas_used != PLAIN_GAS:
            why = f"{consumer} used nonce {nonce} and sent coin through a contract: it may have made this payment"
            return Unknown(why=why, person=True)
    return Dead(proof=_proof(receipt, nonce, "replaced"))


def _pays(order: Order, receipt: Receipt, found: Transaction) -> bool:
    """Whether a transaction does what was ordered, whatever else it does."""
    if not order.contract:
        return same(order.to, found.to) and found.value == order.amount
    call = read_transfer(found.data)
    if (
        call is not None
        and same(order.contract, found.to)
        and (call[0].lower(), call[1]) == (order.to.lower(), order.amount)
    ):
        return True
    return any(
        same(order.contract, t.contract) and same(order.to, t.to) and t.amount == order.amount
        for t in receipt.transfers
    )


# --- several nodes ---------------------------------------------------------------------------------------------------


def abstaining(said: Mapping[str, Fate], unchecked: Mapping[str, str]) -> Mapping[str, str]:
    """The nodes whose word does not count, with the reason: they can't see balances in which another sees a difference.

    While no node sees a difference, a node that can't see them agrees with one that can: both say the same of the rest.
    """
    differs = any(isinstance(fate, Mismatch) and BALANCES in fate.evidence for fate in said.values())
    return unchecked if differs else {}


def combine(question: Question, said: Mapping[str, Fate], configured: int, missing: str) -> Verdict:
    """What the verdicts of several nodes prove together. `missing`: which nodes gave none, and why."""
    ends = ending(said)
    waiting = {name: fate for name, fate in said.items() if isinstance(fate, Pending)}
    if not ends or (len(waiting) >= 2 and 2 * len(waiting) > len(said)):
        return Verdict(_open(said, waiting), {name: describe(fate) for name, fate in ends.items()})
    value, agreeing = largest_group(ends)
    if configured == 1:
        return Verdict(by_one_node(question, value, agreeing[0]), {})
    if len(agreeing) >= 2 and 2 * len(agreeing) > len(said):
        doubted = {name: describe(fate) for name, fate in said.items() if name not in agreeing}
        return Verdict(with_nodes(value, agreeing), doubted)
    if len(said) == 1:
        return Verdict(Unknown(why=f"only {agreeing[0]} answers: {describe(value)}. {missing}".strip()), {})
    words = {name: describe(fate) for name, fate in sorted(said.items())}
    return Verdict(Unknown(why="nodes disagree: " + "; ".join(f"{n}: {w}" for n, w in words.items())), words)


def _open(said: Mapping[str, Fate], waiting: Mapping[str, Pending]) -> Fate:
    """No node says that it is over, or too few do."""
    if 2 * len(waiting) <= len(said):
        name, fate = next((name, fate) for name, fate in sorted(said.items()) if name not in waiting)
        return Unknown(why=f"{name}: {describe(fate)}")
    return waiting_together(list(waiting.values()))
