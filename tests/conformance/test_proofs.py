"""A waiting record gives money back with proof only: dead, never issued, or declared dead and watched (S44)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import MovablePorts, Place, outcome, scenario
from tests.conformance.test_transfers import behind
from tests.crashing import dies
from tests.payouts import SUSPENSE, Chain, Payout, approved, payout, stuck
from tests.toy import Program, program

from bursar import SystemAccount
from bursar.engine import Booking, Engine, NewRecord, Operators
from bursar.engine.forced import ask_due
from bursar.model.errors import InvalidState
from bursar.model.outcome import Outcome
from bursar.model.proof import ProofMissing, dead, declared_dead, never_issued
from bursar.model.records import Record

MODES = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
ANN: dict[str, Any]
BOB: dict[str, Any]
ANN, BOB = {"actor": "ann", "reason": "ticket 17"}, {"actor": "bob", "reason": "ticket 17"}
HOUR_US = 3_600_000_000


def unconfirmed() -> Chain:
    return Chain(confirm=[Outcome.EXPLICIT_FAIL] * 9)


async def proof_of(p: Program, record: Record, event: str) -> Any:
    """The proof that is stored with an event."""
    history = await p.engine.store.read.records.history(record.number)
    (row,) = [row for row in history if row.event == event]
    return msgspec.json.decode(row.evidence)["proof"]


@pytest.mark.parametrize("event", ["GIVE_UP", "DECIDE"])
@pytest.mark.parametrize("evidence", [{}, never_issued(), dead(), declared_dead("ann", "ann"), {"proof": "dead"}])
@MODES
@scenario
async def test_what_was_sent_is_not_given_back_without_proof(
    place: Place, event: str, evidence: dict[str, Any]
) -> None:
    """Directly, and by way of a state that moves on by itself."""
    world = unconfirmed()
    async with program(place, world) as p:
        record = await stuck(p, "p-1")
        refused = await outcome(p.engine.signal(record, event, "ann", {"reason": "too long"} | evidence))
        assert isinstance(refused, ProofMissing)
        assert ((await p.at(record)).state, (await p.at(record)).version) == ("STUCK", record.version)
        assert world.calls["return"] == 0


@pytest.mark.parametrize("event", ["GIVE_UP", "DECIDE"])
@MODES
@scenario
async def test_what_is_dead_is_given_back_with_the_facts_stored(place: Place, event: str) -> None:
    async with program(place, unconfirmed()) as p:
        record = await stuck(p, "p-1")
        record = await p.engine.signal(record, event, "watcher", {"reason": "seen"} | dead(nonce=17))
        assert (await p.now(record)).state == "RETURNED"
        assert await proof_of(p, record, event) == {"kind": "dead", "facts": {"nonce": 17}}


@MODES
@scenario
async def test_what_turns_nowhere_needs_no_proof(place: Place) -> None:
    async with program(place, unconfirmed()) as p:
        record = await p.engine.signal(await stuck(p, "p-1"), "AGAIN", "ann", {})
        assert record.state == "APPROVING"
        record = await p.engine.signal(await stuck(p, "p-2", way="ON"), "DECIDE", "ann", {})
        assert record.state == "APPROVING"


@MODES
@scenario
async def test_what_was_never_issued_is_given_back(place: Place) -> None:
    """A program says so, a person need not: the engine compares it with the history (S50)."""
    async with program(place, unconfirmed()) as p:
        record = await payout(p, "p-1")
        assert isinstance(await outcome(p.engine.signal(record, "REJECT", "timer", {})), ProofMissing)
        record = await p.engine.signal(record, "REJECT", "timer", never_issued())
        assert (record.state, await proof_of(p, record, "REJECT")) == ("RETURNED", {"kind": "never_issued"})
        record = await payout(p, "p-2")
        assert (await p.people.signal("payouts", "p-2", "REJECT", **ANN)).state == "RETURNED"
        assert await proof_of(p, record, "REJECT") == {"kind": "never_issued"}


@MODES
@scenario
async def test_what_was_sent_once_was_issued_wherever_it_waits_now(place: Place) -> None:
    async with program(place, unconfirmed()) as p:
        again = await p.engine.signal(await stuck(p, "p-1"), "AGAIN", "ann", {})
        for call in (
            p.engine.signal(again, "REJECT", "ann", never_issued()),
            p.people.signal("payouts", "p-1", "REJECT", **ANN),
        ):
            refused = await outcome(call)
            assert isinstance(refused, ProofMissing)
            assert "SIGNING was reached" in str(refused)
            assert "two people" in str(refused)
        assert (await p.at(again)).state == "APPROVING"


@MODES
@scenario
async def test_what_a_record_has_started_counts_as_issued(place: Place) -> None:
    """Another record may send for it: its history names what it has started."""
    world = Chain()

    def book_start(item: Any) -> Booking:
        return Booking(starts=(NewRecord(flow="payouts", id="child", body=Payout()),) if item.id == "parent" else ())

    world.flow_options["book_start"] = book_start
    async with program(place, world) as p:
        record = await payout(p, "parent")
        refused = await outcome(p.people.signal("payouts", "parent", "REJECT", **ANN))
        assert isinstance(refused, ProofMissing)
        assert "payouts child" in str(refused)
        assert (await p.people.signal("payouts", "child", "REJECT", **ANN)).state == "RETURNED"
        assert (await p.engine.signal(record, "REJECT", "ann", dead(child="rejected"))).state == "RETURNED"


# --- declared dead -------------------------------------------------------------------------------------------------


async def declare(p: Program, id: str, event: str = "GIVE_UP") -> Record:
    await p.people.signal("payouts", id, event, declared_dead=True, **ANN)
    return await p.people.signal("payouts", id, event, declared_dead=True, **BOB)


async def due(p: Program, place: Place) -> int:
    """Let the time pass until the next question, and ask."""
    ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
    await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago} WHERE due IS NOT NULL")
    return await ask_due(p.engine)


@MODES
@scenario
async def test_two_people_declare_it_dead(place: Place) -> None:
    async with program(place, unconfirmed()) as p:
        record = await stuck(p, "p-1")
        for _ in range(2):
            asked = await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **ANN)
            assert asked.state == "STUCK"
        assert isinstance(await outcome(p.people.signal("payouts", "p-1", "GIVE_UP", **BOB)), ProofMissing)
        assert (await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **BOB)).state == "RETURNING"
        proof = await proof_of(p, record, "GIVE_UP")
        assert proof == {"kind": "declared_dead", "facts": {"by": ["ann", "bob"]}}
        [watched] = await p.engine.store.read.forced_calls.open()
        assert (watched.record, watched.state) == (record.number, "CONFIRMING")


@MODES
@scenario
async def test_who_asked_for_the_event_alone_has_not_declared_it_dead(place: Place) -> None:
    world = unconfirmed()
    world.flow_options["second_person"] = frozenset({"GIVE_UP"})
    async with program(place, world) as p:
        await stuck(p, "p-1")
        await p.people.signal("payouts", "p-1", "GIVE_UP", **ANN)
        asked = await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **BOB)
        assert asked.state == "STUCK"
        assert (await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **ANN)).state == "RETURNING"


@MODES
@scenario
async def test_what_can_not_be_watched_is_not_declared_dead(place: Place) -> None:
    world = unconfirmed()
    world.flow_options["queries"] = {}
    async with program(place, world) as p:
        record = await stuck(p, "p-1")
        refused = await outcome(declare(p, "p-1"))
        assert isinstance(refused, InvalidState)
        assert "watched" in str(refused)
        assert (await p.at(record)).state == "STUCK"


@MODES
@scenario
async def test_what_was_declared_dead_and_is_dead_is_asked_once(place: Place) -> None:
    world = unconfirmed()
    async with program(place, world) as p:
        await stuck(p, "p-1")
        assert (await p.now(await declare(p, "p-1"))).state == "RETURNED"
        assert await due(p, place) == 0  # nothing definite yet
        world.found = Outcome.EXPLICIT_FAIL
        assert await due(p, place) == 1
        assert (await due(p, place), world.calls["query"]) == (0, 2)
        assert await p.engine.store.read.pauses.list() == []
        assert await p.reasons() == []


@MODES
@scenario
async def test_what_was_declared_dead_and_arrives_is_suspense_and_a_halt(place: Place) -> None:
    world = unconfirmed()
    async with program(place, world) as p:
        await p.ledger.create_account(SUSPENSE, policy=SystemAccount())
        record = await stuck(p, "p-1", minor=7)
        assert (await p.now(await declare(p, "p-1"))).state == "RETURNED"
        world.found = Outcome.SUCCESS
        assert await due(p, place) == 1
        assert (await p.ledger.balance(SUSPENSE, "USDT")).minor == -7
        assert ("critical", "contradiction") in await p.reasons()
        assert (await p.path(record))[-1] == "RETURNED-LATE SUCCESS>RETURNED"
        [halt] = await p.engine.store.read.pauses.list()
        assert (halt.kind, halt.name, halt.two_people) == ("halt flow", "payouts", True)
        other = await approved(p, "p-2")
        assert (await p.now(other)).state == "SIGNING"
        assert await due(p, place) == 0


@MODES
@scenario
async def test_a_watch_that_is_set_before_the_decision_asks_nothing(place: Place) -> None:
    """The process died between the two: nobody has decided, and the chain is not asked."""
    world = unconfirmed()
    world.found = Outcome.EXPLICIT_FAIL
    async with program(place, world) as p:
        await stuck(p, "p-1")
        record = await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **ANN)
        await p.engine.store.single().forced_calls.add(record.number, record.version, "CONFIRMING", 0)
        assert (await due(p, place), world.calls["query"]) == (0, 0)
        await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **BOB)
        assert (await due(p, place), world.calls["query"]) == (1, 1)


# --- crashes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_while_it_is_declared_dead_leaves_nothing_unwatched(
    place: Place, fault: str, tmp_path: Path
) -> None:
    async with program(place, unconfirmed()) as p:
        await stuck(p, "p-1")
        await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **ANN)
    call = 0
    while True:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        world = unconfirmed()

        async def decide(engine: Engine) -> None:
            await Operators(engine).signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **BOB)

        reached = await dies(copy, [world.flow()], decide, fault, call)
        clock = MovablePorts()
        clock.ahead_us = HOUR_US
        async with program(copy, world, ports=clock) as p:
            record = await p.engine.get("payouts", "p-1")
            assert record is not None
            assert record.state in ("STUCK", "RETURNING")
            watched = [one.state for one in await p.engine.store.read.forced_calls.open()]
            assert watched == ["CONFIRMING"] or record.state == "STUCK"
            if record.state == "STUCK":
                await p.people.signal("payouts", "p-1", "GIVE_UP", declared_dead=True, **BOB)
            assert len(await p.engine.store.read.forced_calls.open()) == 1
        if not reached:
            break
    assert call > 3
