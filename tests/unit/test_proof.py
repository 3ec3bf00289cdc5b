"""Proof for giving money back out of a waiting state, as specifications (S44, S50)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.proof import (
    Proof,
    ProofKind,
    ProofMissing,
    dead,
    declared_dead,
    issued_by,
    never_issued,
    proof_in,
    shortfall,
    was_declared_dead,
)
from bursar.model.records import Transition

MACHINE = Machine(
    name="payouts",
    initial="LOOKING",
    events=("GO", "BACK"),
    states=(
        State("LOOKING", Kind.CALL, action="look", effect=Effect.CONFIRM),
        State("WAITING", Kind.WAIT, awaits="person"),
        State("SENDING", Kind.CALL, action="send"),
        State("DONE", Kind.TERMINAL),
        State("RETURNED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("LOOKING", Outcome.SUCCESS, "WAITING"),
        Arrow("LOOKING", Outcome.EXPLICIT_FAIL, "RETURNED"),
        Arrow("WAITING", "GO", "SENDING"),
        Arrow("WAITING", "BACK", "RETURNED"),
        Arrow("SENDING", Outcome.SUCCESS, "DONE"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "WAITING"),
    ),
)


def rows(*steps: tuple[str, str] | tuple[str, str, dict[str, Any]]) -> list[Transition]:
    """A history: source, target, and evidence."""
    return [
        Transition(
            record=1,
            version=number,
            source=step[0],
            event="X",
            target=step[1],
            attempt=0,
            actor="ann",
            evidence=msgspec.json.encode(step[2] if len(step) == 3 else {}).decode(),
            at_us=0,
        )
        for number, step in enumerate(steps, start=1)
    ]


def proof(evidence: dict[str, Any]) -> Proof | None:
    return proof_in(msgspec.json.encode({"reason": "why"} | evidence).decode())


NOTHING_SENT = rows(("", "LOOKING"), ("LOOKING", "LOOKING"), ("LOOKING", "WAITING"))
SENT = [*NOTHING_SENT, *rows(("WAITING", "SENDING"), ("SENDING", "WAITING"))]
STARTED = rows(("", "LOOKING"), ("LOOKING", "WAITING", {"starts": ["jobs j-1"]}))


def test_a_proof_is_read_from_the_evidence_that_carries_it() -> None:
    assert proof(dead(nonce=17)) == Proof(kind=ProofKind.DEAD, facts={"nonce": 17})
    assert proof(never_issued()) == Proof(kind=ProofKind.NEVER_ISSUED)
    assert proof(declared_dead("ann", "bob")) == Proof(kind=ProofKind.DECLARED_DEAD, facts={"by": ["ann", "bob"]})
    assert {ProofKind(kind) for kind in ("dead", "never_issued", "declared_dead")} == set(ProofKind)


@pytest.mark.parametrize(
    "evidence", [{}, {"proof": None}, {"proof": "dead"}, {"proof": {"kind": "sure"}}, {"proof": {}}]
)
def test_anything_else_is_no_proof(evidence: dict[str, Any]) -> None:
    assert proof(evidence) is None
    assert "needs proof" in shortfall(MACHINE, proof(evidence), NOTHING_SENT)
    assert proof_in("[1]") is None


@pytest.mark.parametrize("history", [NOTHING_SENT, SENT, STARTED])
def test_death_is_proved_by_facts_and_whatever_was_sent(history: list[Transition]) -> None:
    assert shortfall(MACHINE, proof(dead(nonce=17)), history) == ""
    assert "facts" in shortfall(MACHINE, proof(dead()), history)


def test_nothing_was_issued_if_the_history_says_so() -> None:
    """A call that only looks issues nothing; one that sends may have, from the moment its state is reached."""
    assert issued_by(MACHINE, NOTHING_SENT) == shortfall(MACHINE, proof(never_issued()), NOTHING_SENT) == ""
    for history, what in ((SENT, "SENDING was reached (version 1)"), (STARTED, "['jobs j-1'] (version 2)")):
        assert what in issued_by(MACHINE, history)
        why = shortfall(MACHINE, proof(never_issued()), history)
        assert what in why
        assert "two people" in why


@pytest.mark.parametrize("by", [None, "ann", [], ["ann"], ["ann", "ann"], ["ann", "Ann"], ["ann", "bob", "carol"]])
def test_one_person_declares_nothing_dead(by: Any) -> None:
    said = Proof(kind=ProofKind.DECLARED_DEAD, facts={} if by is None else {"by": by})
    assert "two different people" in shortfall(MACHINE, said, SENT)


def test_two_people_declare_it_dead_whatever_was_sent() -> None:
    assert shortfall(MACHINE, proof(declared_dead("ann", "bob")), SENT) == ""


def test_it_is_known_which_move_rests_on_peoples_word() -> None:
    """The first move after a version counts; notes that move nothing do not."""
    word = declared_dead("ann", "bob")
    left = rows(("", "WAITING"), ("WAITING", "WAITING"), ("WAITING", "RETURNED", word), ("RETURNED", "RETURNED"))
    assert [was_declared_dead(left, version) for version in (0, 1, 2, 3, 4)] == [False, True, True, False, False]
    for other in ({}, dead(nonce=17), never_issued()):
        assert not was_declared_dead(rows(("", "WAITING"), ("WAITING", "RETURNED", other)), 1)
    later = rows(("", "WAITING"), ("WAITING", "SENDING"), ("SENDING", "WAITING"), ("WAITING", "RETURNED", word))
    assert [was_declared_dead(later, version) for version in (1, 3)] == [False, True]


def test_the_refusal_says_what_to_do() -> None:
    error = ProofMissing("payouts", "p-1", "WAITING", "it needs proof")
    assert error.code == "PROOF_MISSING"
    assert str(error) == "payouts p-1 is WAITING, and this event gives money back: it needs proof"
