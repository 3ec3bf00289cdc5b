"""The fate of a transaction: what one node's facts mean, and what several nodes together prove. Pure.

`judge` reads the facts of one node as if that node could be believed. `combine` believes nothing that ends a payment
unless two nodes give exactly the same verdict, and more than half of those that answered (W35).

What one node's facts mean:

- It is in a final block. A payment that succeeded is confirmed if it moved exactly what was ordered, else a mismatch
  (W36). One that failed is dead, at our cost: it moved nothing.
- It is in no final block, and the block that was final *before* the node was asked for it is at or past its expiration:
  it is dead, if the node has shown that it keeps what is older. A block takes a transaction by the time of its parent,
  so neither a clock, nor the newest block, nor "Transaction expired" would do.
- Otherwise it is pending: it may still be included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from bursar.rails.chain import Confirmed, Dead, Fate, Mismatch, Order, Pending, Question, Try, Undecodable, Unknown
from bursar.rails.nodes import largest_group
from bursar.rails.tron.addresses import bytes_of, text_of
from bursar.rails.tron.codec import content
from bursar.rails.tron.reading import Block, Header, Info, Transfer
from bursar.rails.verdicts import Ended, Verdict, by_one_node, describe, ending, waiting_together, with_nodes

TRANSFERS_SHOWN_MAX: Final = 10


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What one node says about one transaction."""

    final: Header  # what it called final, read before anything else
    info: Info | None = None  # what became of it in a final block
    raw: bytes = b""  # its bytes; they are its own, by their hash
    block: Block | None = None  # the final block that it is in
    included: int | None = None  # the block that it is in, which is not final
    waiting: bool = False  # the node has it, in no block
    forgets: str = ""  # why the node could have forgotten a transaction; "": it has shown that it keeps them


# --- one node --------------------------------------------------------------------------------------------------------


def judge(question: Question, one: Try, facts: Facts) -> Fate:
    """What the facts of one node mean, if it can be believed."""
    if facts.info is not None:
        return _final(question, facts.info, facts)
    assert one.slot.expires is not None  # the caller has checked
    if facts.final.timestamp < one.slot.expires:
        return Pending(seen=facts.waiting or facts.included is not None, block=facts.included)
    if facts.forgets:
        why = f"{one.hash} has expired and is in no final block, but {facts.forgets}"
        return Unknown(why=why, person=True)
    return Dead(proof={"how": "expired", "hash": one.hash, "expired": one.slot.expires})


def _final(question: Question, info: Info, facts: Facts) -> Fate:
    block = facts.block
    if block is None or not facts.raw or info.hash not in block.hashes or info.timestamp != block.header.timestamp:
        return Unknown(why=f"{info.hash} is said to be in block {info.block}, and is not there as such")
    where = {"block": info.block, "block_hash": block.header.id}
    cost: dict[str, Any] = {
        "fee_paid": info.fee,
        "gas_used": info.energy,
        "gas_price": info.energy_fee // max(info.energy, 1),
    }
    if info.failed:
        proof = {"how": "failed", "hash": info.hash, "result": info.result, "message": info.message, **where}
        return Dead(proof=proof, hash=info.hash, **cost)
    evidence: dict[str, Any] = {**where, "timestamp": info.timestamp}
    if question.order.contract:
        evidence["transfers"] = [_shown(transfer) for transfer in info.transfers[:TRANSFERS_SHOWN_MAX]]
    if why := _difference(question.sender, question.order, info, facts.raw):
        return Mismatch(hash=info.hash, why=why, evidence=evidence, **cost)
    alone = bool(question.order.contract)  # nodes have no older state, so that no balance can be compared
    paid: dict[str, Any] = {"hash": info.hash, **where, "evidence": evidence, "by_event_alone": alone}
    return Confirmed(**paid, **cost)


def _shown(transfer: Transfer) -> dict[str, str]:
    return {
        "contract": text_of(transfer.contract),
        "from": text_of(transfer.sender),
        "to": text_of(transfer.to),
        "amount": str(transfer.amount),
    }


def _difference(sender: str, order: Order, info: Info, raw: bytes) -> str:
    """How a successful transaction differs from what was ordered; "" if it does not (W13)."""
    contract = bytes_of(order.contract) if order.contract else b""
    try:
        says = content(raw)  # by the hash, these are the bytes that were signed
    except Undecodable as error:
        return f"the transaction is no payment: {error.why}"
    wanted = (bytes_of(sender), bytes_of(order.to), contract, order.amount, order.memo.encode())
    if (says.owner, says.to, says.contract, says.amount, says.memo) != wanted:
        return "the transaction is not the payment that was ordered"
    if not order.contract:
        return "" if not info.result else f"a transfer of TRX has the result {info.result}"
    if info.result != "SUCCESS":
        return f"the call of the token has the result {info.result or 'nothing'}"
    moved = [one for one in info.transfers if one.contract == contract]
    # Exactly one: a second one is a fee that the token takes from the sender or from the recipient.
    if len(moved) != 1:
        return f"the token reports {len(moved)} transfers where there should be one"
    one = moved[0]
    if (one.sender, one.to, one.amount) != (bytes_of(sender), bytes_of(order.to), order.amount):
        return f"the token reports {one.amount} from {text_of(one.sender)} to {text_of(one.to)}"
    return ""


# --- several nodes ---------------------------------------------------------------------------------------------------


def combine(question: Question, said: Mapping[str, Fate], configured: int, missing: str) -> Verdict:
    """What the verdicts of several nodes prove together. `missing`: which nodes gave none, and why."""
    ends = ending(said)
    if not ends:
        return Verdict(_open(said), {})
    value, agreeing = largest_group(ends)
    words = {name: describe(fate) for name, fate in sorted(said.items())}
    if configured == 1:
        return Verdict(by_one_node(question, value, agreeing[0]), {})
    if len(agreeing) >= 2 and 2 * len(agreeing) > len(said):
        others = {name: word for name, word in words.items() if name in ends and name not in agreeing}
        return Verdict(with_nodes(value, agreeing), others)
    proven = {name: fate for name, fate in ends.items() if isinstance(fate, Ended)}
    if proven and len(proven) < len(ends) == len(said) and len(largest_group(proven)[1]) == len(proven):
        # The others can't say any more, so that waiting makes nothing clear.
        why = "; ".join(f"{name}: {word}" for name, word in words.items())
        return Verdict(Unknown(why=f"only {', '.join(sorted(proven))} proves it. {why}", person=True), {})
    if len(agreeing) < len(ends):
        why = "nodes disagree: " + "; ".join(f"{name}: {word}" for name, word in words.items())
        return Verdict(Unknown(why=why), {name: words[name] for name in ends})
    if len(said) == len(ends):
        return Verdict(Unknown(why=f"only {', '.join(agreeing)} answers: {words[agreeing[0]]}{missing}"), {})
    # What one node calls final, others are about to: they have not come that far.
    found = _open({name: fate for name, fate in said.items() if name not in ends})
    if isinstance(found, Pending) and not isinstance(value, Unknown):
        known = getattr(value, "hash", "") != ""
        block = value.block if isinstance(value, Confirmed) else found.block
        found = msgspec.structs.replace(found, seen=found.seen or known, block=block)
    return Verdict(found, {})


def _open(said: Mapping[str, Fate]) -> Fate:
    """No node says that it is over, or too few do."""
    waiting = [fate for fate in said.values() if isinstance(fate, Pending)]
    if not waiting:
        name, fate = sorted(said.items())[0]
        return Unknown(why=f"{name}: {describe(fate)}")
    return waiting_together(waiting)


def of_all(fates: list[Fate]) -> Fate:
    """The fate of a payout with several transactions, each with an expiration of its own: it is dead if all are."""
    for kind in (Confirmed, Mismatch, Unknown, Pending):
        for fate in fates:
            if isinstance(fate, kind):
                return fate
    dead = [fate for fate in fates if isinstance(fate, Dead)]
    if len(dead) == 1:
        return dead[0]
    return Dead(
        proof={"how": "all", "tries": [fate.proof for fate in dead]},
        hash=next((fate.hash for fate in dead if fate.hash), ""),
        fee_paid=sum(fate.fee_paid for fate in dead),
        gas_used=sum(fate.gas_used for fate in dead),
    )
