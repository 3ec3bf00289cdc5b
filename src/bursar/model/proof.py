"""Proof that money may be given back although no call was refused (S44, S50). Pure.

A call's explicit refusal gives money back by itself. A waiting record has none: an operator's word, or a time that is
over, would give back what may still arrive. So the event that turns it round carries a proof in its evidence, in the
same transaction: what was sent is dead, or nothing ever was. A third kind is the decision of two people, which may be
wrong and stays watched (T34).

    RecordSignal(flow="withdrawals", id=…, event="FAILED", evidence=dead(nonce=17, spent_by="0x…"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import msgspec

from bursar.model.actors import same_person
from bursar.model.errors import InvalidState
from bursar.model.machine import Machine
from bursar.model.records import Transition

PROOF = "proof"  # in the evidence of the event
STARTS = "starts"  # in the evidence of a transition: other records that were started with it


class ProofKind(StrEnum):
    """What proves that nothing arrives any more."""

    DEAD = "dead"  # what was sent can never arrive: the facts say why
    NEVER_ISSUED = "never_issued"  # nothing was ever sent: the engine sees to it that this is so
    DECLARED_DEAD = "declared_dead"  # two people say so, and it stays watched


class Proof(msgspec.Struct, frozen=True, kw_only=True):
    """A proof as it is stored with the transition."""

    kind: ProofKind
    facts: dict[str, Any] = {}


class ProofMissing(InvalidState):
    """Money would be given back without a proof that it did not, and will not, go where it was sent."""

    code = "PROOF_MISSING"
    text = "{flow} {id} is {state}, and this event gives money back: {why}"


def dead(**facts: Any) -> dict[str, Any]:
    """Evidence that what was sent can never arrive, with the facts that show it."""
    return {PROOF: {"kind": ProofKind.DEAD.value, "facts": facts}}


def never_issued() -> dict[str, Any]:
    """Evidence that nothing was ever sent for the record. The engine compares it with the record's history."""
    return {PROOF: {"kind": ProofKind.NEVER_ISSUED.value}}


def declared_dead(first: str, second: str) -> dict[str, Any]:
    """Evidence that two people have decided that it will never arrive."""
    return {PROOF: {"kind": ProofKind.DECLARED_DEAD.value, "facts": {"by": [first, second]}}}


def proof_in(evidence: str) -> Proof | None:
    """The proof in a transition's evidence; None if there is none that can be read."""
    found = _decoded(evidence).get(PROOF)
    try:
        return None if found is None else msgspec.convert(found, Proof)
    except msgspec.ValidationError:
        return None


def shortfall(machine: Machine, proof: Proof | None, history: Sequence[Transition]) -> str:
    """Why a proof is not enough for a record with this history, and what to do; "" if it is enough."""
    if proof is None:
        return "it needs proof that nothing was ever issued, or that what was issued is dead"
    match proof.kind:
        case ProofKind.DEAD:
            return "" if proof.facts else "a proof of death names the facts that show it"
        case ProofKind.DECLARED_DEAD:
            by = proof.facts.get("by")
            if not isinstance(by, list) or len(by) != 2 or same_person(str(by[0]), str(by[1])):
                return "two different people declare it dead"
            return ""
        case ProofKind.NEVER_ISSUED:
            issued = issued_by(machine, history)
            return issued and f"{issued}; prove that it is dead, or let two people declare it dead"


def issued_by(machine: Machine, history: Sequence[Transition]) -> str:
    """What a record has issued, or may have, by its history; "" for nothing."""
    for row in history:
        if machine.issues(row.target):
            return f"{row.target} was reached (version {row.version}), and its call may have had its effect"
        if started := _decoded(row.evidence).get(STARTS):
            return f"it has started {started} (version {row.version})"
    return ""


def was_declared_dead(history: Sequence[Transition], version: int) -> bool:
    """Whether the record left the state that it was in at this version because two people declared it dead."""
    for row in history:
        if row.version > version and row.source != row.target:
            proof = proof_in(row.evidence)
            return proof is not None and proof.kind is ProofKind.DECLARED_DEAD
    return False


def _decoded(evidence: str) -> Mapping[str, Any]:
    found = msgspec.json.decode(evidence)
    return found if isinstance(found, dict) else {}
