"""What a call does decides which switch stops it: a pause the first send (W15), a halt every signature (W21).

The toy is a payout that signs, sends and confirms, and whose return signs too.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.builders import Place, outcome, scenario
from tests.payouts import Chain, approved
from tests.toy import Program, World, program

from bursar.engine import Answer, Lift, Worker
from bursar.model.errors import InvalidName, InvalidState
from bursar.model.outcome import Outcome
from bursar.model.records import Record

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ANN, BOB = {"actor": "ann", "reason": "ticket 17"}, {"actor": "bob", "reason": "ticket 17"}
UNKNOWN, NO = Outcome.TIMEOUT, Outcome.EXPLICIT_FAIL
SWITCHES = [("flow", "payouts"), ("rail", "signer"), ("rail", "chain")]


async def driven(p: Program, record: Record) -> str:
    """Where it is after a worker has tried, once it is due."""
    record = await p.at(record)
    return (await p.now(record)).state


@pytest.mark.parametrize(
    ("kind", "name", "stays"),
    [("flow", "payouts", "SIGNING"), ("rail", "signer", "SIGNING"), ("rail", "chain", "SENDING")],
)
@scenario
async def test_a_pause_stops_the_first_send(place: Place, kind: str, name: str, stays: str) -> None:
    world = Chain()
    async with program(place, world) as p:
        await p.people.pause(kind, name, **ANN)
        record = await approved(p, "p-1")
        assert await driven(p, record) == stays
        assert world.calls == ({} if stays == "SIGNING" else {"sign": 1})
        assert (await p.at(record)).attempt == 0
        await p.people.resume(kind, name, **ANN)
        assert await driven(p, record) == "DONE"


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
@scenario
async def test_a_pause_does_not_stop_a_call_that_may_have_happened(place: Place, kind: str, name: str) -> None:
    """It was signed, or sent, and the reply was lost: it is asked again until its outcome is known."""
    action, state = ("sign", "SIGNING") if name == "signer" else ("send", "SENDING")
    world = Chain(**{action: [UNKNOWN]})
    async with program(place, world) as p:
        record = await p.now(await approved(p, "p-1"))
        assert (record.state, record.attempt) == (state, 1)
        await p.people.pause(kind, name, **ANN)
        after = await driven(p, record)
        assert after == ("SENDING" if (kind, state) == ("flow", "SIGNING") else "DONE")
        assert world.calls[action] == 2


@pytest.mark.parametrize(("kind", "name"), SWITCHES)
@scenario
async def test_a_pause_stops_neither_confirmation_nor_return(place: Place, kind: str, name: str) -> None:
    world = Chain(confirm=[UNKNOWN], send=[Outcome.SUCCESS, NO])
    async with program(place, world) as p:
        confirming = await p.now(await approved(p, "p-1"))
        returning = await approved(p, "p-2")
        for _ in range(2):
            returning = await p.engine.step(await p.at(returning)) or returning
        assert [confirming.state, returning.state] == ["CONFIRMING", "RETURNING"]
        await p.people.pause(kind, name, **ANN)
        assert [await driven(p, confirming), await driven(p, returning)] == ["DONE", "RETURNED"]


@scenario
async def test_a_worker_goes_on_with_what_a_paused_flow_has_sent(place: Place) -> None:
    world = Chain(confirm=[UNKNOWN])
    async with program(place, world, lease_s=0.05) as p:
        confirming = await p.now(await approved(p, "p-1"))
        await p.people.pause("flow", "payouts", **ANN)
        held = await approved(p, "p-2")
        worker = Worker(p.engine, scan_s=0.01)
        running = asyncio.create_task(worker.run())
        await p.until(confirming, "DONE")
        worker.stop()
        await running
        assert (await p.at(held)).state == "SIGNING"
        assert world.calls["sign"] == 1


@scenario
async def test_a_first_poll_that_says_nothing_new_counts_as_sent(place: Place) -> None:
    """It leaves one row, so that a pause knows that it was called; further ones leave none."""
    nothing = Answer(outcome=Outcome.PENDING, unchanged=True)
    world = Chain(send=[nothing, nothing])
    async with program(place, world) as p:
        record = await p.now(await approved(p, "p-1"))
        assert (record.state, record.attempt) == ("SENDING", 1)
        await p.people.pause("rail", "chain", **ANN)
        assert await driven(p, record) == "SENDING"
        assert (await p.at(record)).version == record.version
        assert await driven(p, record) == "DONE"


# --- halt ----------------------------------------------------------------------------------------------------------

HALTS = [("", ""), ("flow", "payouts"), ("rail", "signer"), ("rail", "chain")]


@pytest.mark.parametrize(("kind", "name"), HALTS)
@scenario
async def test_a_halt_stops_every_signature_and_nothing_else(place: Place, kind: str, name: str) -> None:
    """The first, the second, and the one of a return; what is signed is sent and confirmed."""
    world = Chain(sign=[UNKNOWN], send=[UNKNOWN, NO])
    async with program(place, world) as p:
        again, sending = await p.now(await approved(p, "p-1")), await p.now(await approved(p, "p-2"))
        returning = await approved(p, "p-3")
        for _ in range(2):
            returning = await p.engine.step(await p.at(returning)) or returning
        assert [again.state, sending.state, returning.state] == ["SIGNING", "SENDING", "RETURNING"]
        before = world.calls.copy()
        assert await p.people.halt(kind, name, **ANN)
        assert not await p.people.halt(kind, name, **BOB)
        first = await approved(p, "p-4")
        signs, returns = name != "chain", name != "signer"
        assert await driven(p, again) == await driven(p, first) == ("SIGNING" if signs else "DONE")
        assert await driven(p, returning) == ("RETURNING" if returns else "RETURNED")
        assert await driven(p, sending) == "DONE"
        assert world.calls["sign"] == before["sign"] + (0 if signs else 2)
        assert world.calls["return"] == before["return"] + (0 if returns else 1)
        assert await p.people.unhalt(kind, name, **ANN) is Lift.PROPOSED
        refused = await outcome(p.people.unhalt(kind, name, **ANN))
        assert isinstance(refused, InvalidState)
        assert await driven(p, first) == ("SIGNING" if signs else "DONE")
        assert await p.people.unhalt(kind, name, **BOB) is Lift.LIFTED
        ends = [await driven(p, record) for record in (again, first, returning)]
        assert ends == ["DONE", "DONE", "RETURNED"]


@scenario
async def test_a_halt_by_another_process_is_obeyed_at_once(place: Place) -> None:
    """What is known of pauses may be two seconds old; before a signature the database is asked."""
    world = Chain()
    async with program(place, world) as p, program(place, world, worker="other") as other:
        await p.engine.pauses.read()
        await other.people.halt(**ANN)
        assert p.engine.pauses.now == frozenset()
        assert await driven(p, await approved(p, "p-1")) == "SIGNING"
        assert world.calls == {}


@scenario
async def test_the_process_that_sets_a_pause_obeys_it_at_once(place: Place) -> None:
    """Also if it has just read what is paused."""
    world = Chain()
    async with program(place, world) as p:
        await p.engine.pauses.read()
        await p.people.pause("rail", "chain", **ANN)
        assert await driven(p, await approved(p, "p-1")) == "SENDING"
        assert world.calls == {"sign": 1}


@scenario
async def test_a_pause_by_another_process_is_obeyed_when_it_is_known(place: Place) -> None:
    world = Chain(sign=[Outcome.SUCCESS])
    async with program(place, world) as p, program(place, world, worker="other") as other:
        await other.people.pause("rail", "chain", **ANN)
        await p.engine.pauses.read()
        assert await driven(p, await approved(p, "p-1")) == "SENDING"


@scenario
async def test_a_halt_and_a_pause_are_two_switches(place: Place) -> None:
    async with program(place, Chain()) as p:
        await p.people.pause("flow", "payouts", **ANN)
        await p.people.halt("flow", "payouts", **ANN)
        assert await p.people.resume("flow", "payouts", **ANN) is Lift.LIFTED
        assert [(pause.kind, pause.two_people) for pause in await p.engine.store.read.pauses.list()] == [
            ("halt flow", True)
        ]
        for who in (ANN, BOB):
            await p.people.unhalt("flow", "payouts", **who)
        did = [(one.action, one.kind) for one in await p.engine.store.read.actions.list()]
        assert did[:3] == [("unhalted", "halt flow"), ("unhalt proposed", "halt flow"), ("resumed", "flow")]
        assert ("halted", "halt flow") in did


@scenario
async def test_a_second_cause_for_a_halt_ends_the_proposal_to_lift_it(place: Place) -> None:
    async with program(place, Chain()) as p:
        await p.people.halt(**ANN)
        await p.people.unhalt(**ANN)
        assert not await p.people.halt(actor="carol", reason="another key is gone")
        assert await p.people.unhalt(**BOB) is Lift.PROPOSED
        [halt] = await p.engine.store.read.pauses.list()
        assert halt.reason == "ticket 17; another key is gone"


@scenario
async def test_people_cancel_nothing_that_may_sign_while_it_is_halted(place: Place) -> None:
    world = Chain(sign=[UNKNOWN])
    async with program(place, world) as p:
        await p.now(await approved(p, "p-1"))
        await p.people.halt(**ANN)
        await p.people.force("payouts", "p-1", "EXPLICIT_FAIL", **ANN)
        refused = await outcome(p.people.force("payouts", "p-1", "EXPLICIT_FAIL", **BOB))
        assert isinstance(refused, InvalidState)
        assert "halted" in str(refused)
        assert world.calls["cancel sign"] == 0


@pytest.mark.parametrize(("kind", "name"), [("flow", "orders"), ("rail", "shop"), ("flow", "ordres"), ("rial", "shop")])
@scenario
async def test_a_halt_that_would_stop_nothing_is_refused(place: Place, kind: str, name: str) -> None:
    """Orders sign nothing. All signing can be halted in any program: others may sign."""
    async with program(place, World()) as p:
        assert isinstance(await outcome(p.people.halt(kind, name, **ANN)), InvalidName)
        assert await p.engine.store.read.pauses.list() == []
        assert await p.people.halt(**ANN)


@pytest.mark.parametrize("who", [("", "why"), ("ann", " ")])
@scenario
async def test_a_halt_needs_a_name_and_a_reason(place: Place, who: tuple[str, str]) -> None:
    async with program(place, Chain()) as p:
        for call in (p.people.halt, p.people.unhalt):
            assert isinstance(await outcome(call(actor=who[0], reason=who[1])), InvalidName)
        assert await p.engine.store.read.pauses.list() == []
