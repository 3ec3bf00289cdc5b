"""Checks, before a move is written, that a waiting record gives money back with proof only (S44).

It is asked of every move that the engine commits, made by a person, another record or a program. The history
that a proof is compared with can't grow before the move is written: the compare-and-set of the version sees to that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from bursar.engine.flow import Flow, NewRecord
from bursar.engine.forced import FIRST_S
from bursar.model.machine import Kind, Machine
from bursar.model.proof import STARTS, ProofKind, ProofMissing, proof_in, shortfall
from bursar.model.records import Record, Transition
from bursar.writer import Move

if TYPE_CHECKING:
    from bursar.engine.engine import Engine


async def check_proof(engine: Engine, record: Record, move: Move) -> None:
    """Raise `ProofMissing` if a move that turns back has no proof."""
    flow, told = engine.require(record.flow), move.transitions[0]
    history = await engine.store.read.records.history(record.number)
    proof = proof_in(told.evidence)
    why = shortfall(flow.machine, proof, history)
    if not why and proof is not None and proof.kind is ProofKind.DECLARED_DEAD:
        why = await _watch(engine, flow, record, history)
    if why:
        raise ProofMissing(record.flow, record.id, record.state, why)


async def _watch(engine: Engine, flow: Flow[Any], record: Record, history: Sequence[Transition]) -> str:
    """Have the rail of the last call asked whether it arrives after all; why that can't be done, or "".

    The row is written before the decision: a crash between the two leaves a row about nothing, which is harmless.
    """
    for row in reversed(history):
        if _action(flow.machine, row.source) in flow.queries:
            calls = engine.store.single().forced_calls
            await calls.add(record.number, record.version, row.source, int(FIRST_S * 1e6))
            return ""
    return "what operators declare dead stays watched, and no call of it can be queried; prove that it is dead"


def _action(machine: Machine, state: str) -> str:
    found = [each.action for each in machine.states if each.name == state and each.kind is Kind.CALL]
    return (found[0] if found else None) or ""


def with_starts(move: Move, starts: Sequence[NewRecord]) -> Move:
    """The same move, whose history names the records that it starts: what they issue is issued for this one."""
    if not starts:
        return move
    told, *rest = move.transitions
    named = {STARTS: [f"{new.flow} {new.id}" for new in starts]}
    evidence = msgspec.json.encode(msgspec.json.decode(told.evidence) | named).decode()
    return msgspec.structs.replace(move, transitions=(msgspec.structs.replace(told, evidence=evidence), *rest))
