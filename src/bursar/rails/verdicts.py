"""What the verdicts of several nodes have in common on all chains: what ends a payment, and who is believed.

Each node's facts are judged as if that node could be believed; a rail then combines those verdicts. How it combines
them is its own (`evm.verdict`, `tron.verdict`), because it is not the same question. EVM nodes are asked at one final
block on whose hash they agree, so that "pending" contradicts "confirmed". TRON nodes can't be asked at a block: each
speaks of its own final block, and what one calls final the others are about to. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from bursar.rails.chain import Confirmed, Dead, Fate, Mismatch, Pending, Question, Unknown

Ended = Confirmed | Dead | Mismatch


class Verdict(msgspec.Struct, frozen=True):
    """What the nodes together prove, and those that say something else than what is believed."""

    fate: Fate
    doubted: dict[str, str]  # node → what it says


def ending(said: Mapping[str, Fate]) -> dict[str, Fate]:
    """The verdicts after which nothing is waited for: the payment is over, or only a person can say."""
    return {name: fate for name, fate in said.items() if isinstance(fate, Ended) or needs_person(fate)}


def needs_person(fate: Fate) -> bool:
    """Whether it will not become clear by itself."""
    return isinstance(fate, Unknown) and fate.person


def by_one_node(question: Question, value: Fate, name: str) -> Fate:
    """What is believed of the only node that is configured (W35)."""
    if question.one_node_is_enough or isinstance(value, Unknown):
        return with_nodes(value, [name])
    why = (
        f"only one node ({name}) is configured, and the amount is above the limit for that. It says: {describe(value)}"
    )
    return Unknown(why=why, person=True)


def with_nodes(fate: Fate, names: list[str]) -> Fate:
    """A fate that ends a payment, with the nodes that agree on it."""
    match fate:
        case Dead():
            return msgspec.structs.replace(fate, proof={**fate.proof, "nodes": names})
        case Confirmed() | Mismatch():
            return msgspec.structs.replace(fate, evidence={**fate.evidence, "nodes": names})
        case _:
            return fate


def waiting_together(waiting: list[Pending]) -> Pending:
    """What nodes say together that all wait: it is seen if one of them sees it, in the lowest block that is named."""
    blocks = [fate.block for fate in waiting if fate.block is not None]
    return Pending(seen=any(fate.seen for fate in waiting), block=min(blocks, default=None))


def describe(fate: Fate) -> str:
    """A fate in a few words, for people."""
    match fate:
        case Confirmed():
            return f"{fate.hash} is confirmed in block {fate.block} ({fate.block_hash})"
        case Dead():
            consumer = fate.proof.get("consumed_by")
            return f"dead: {fate.proof['how']}" + (f", nonce used by {consumer['hash']}" if consumer else "")
        case Mismatch():
            return f"mismatch: {fate.why}"
        case Pending():
            return "pending, known" if fate.seen else "pending, not known"
        case Unknown():
            return fate.why
