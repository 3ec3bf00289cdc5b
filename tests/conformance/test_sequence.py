"""Sequences: three steps, failure at each, compensation and its failure, resuming, starting twice, people."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
from tests.builders import Place, balance, check_sound, outcome, scenario, seed
from tests.shop import LATER, PATIENCE_S, THREE, Program, Shop, program, states

from bursar import pay
from bursar.audit import audit
from bursar.engine import AlertDispatcher, Answer, FlowRefused, Notice, Worker
from bursar.flows.sequence import Deposit, Own, Pair, Pay, Result, Sequences, Withdraw
from bursar.flows.sequence.steps import Step
from bursar.model.errors import IdempotencyKeyReused, InvalidState, UnknownRecord
from bursar.model.outcome import UNKNOWNS, Outcome

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ANN: dict[str, Any] = {"actor": "ann", "reason": "I have called them"}
BEN: dict[str, Any] = {"actor": "ben", "reason": "so have I"}
START, ON, OK = "-CREATED>RUNNING", "STEP_DONE-NEXT>RUNNING", "RUNNING-SUCCESS>STEP_DONE"
REFUSED, BACK, BACK_ON = (
    "RUNNING-EXPLICIT_FAIL>STEP_REFUSED",
    "STEP_REFUSED-UNDO>COMPENSATING",
    "STEP_UNDONE-UNDO>COMPENSATING",
)
UNDONE, FAILED = "COMPENSATING-SUCCESS>STEP_UNDONE", "STEP_UNDONE-UNDONE>FAILED"


async def check_books(p: Program) -> None:
    """Conservation, and every invariant that audit knows."""
    await check_sound(p.ledger)
    assert [text for finding in await audit(p.ledger.store) for text in finding.broken] == []


async def refused_midway(p: Program, shop: Shop, *amounts: str) -> str:
    """A sequence whose second step was refused, and whose first can't be undone, because bob has spent the money."""
    await seed(p.ledger, "alice", *(amounts or ("10",)))

    async def spends() -> Outcome:
        await p.ledger.commit(pay("bob", "carol", "USDT", "7", key="spent"))
        return Outcome.EXPLICIT_FAIL

    shop.says["ship_do"] = [spends]
    view = await p.start(THREE)
    assert (view.state, view.result) == ("COMPENSATION_FAILED", Result.COMPENSATION_FAILED)
    return view.id


# --- forward -------------------------------------------------------------------------------------------------------


@scenario
async def test_three_steps_all_of_them_once(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start(THREE)
        assert (view.state, view.result, view.error, view.ended) == ("COMPLETED", Result.COMPLETED, "", True)
        assert states(view) == ["done", "done", "done"]
        assert await p.path(view.id) == [START, OK, ON, OK, ON, OK, "STEP_DONE-END>COMPLETED"]
        assert await p.balances() == ["2", "6", "0"]
        assert shop.effects == {"ship_do": 1}
        assert await p.reasons() == []
        await check_books(p)


@scenario
async def test_results_are_kept_and_shown_to_the_steps_after(place: Place) -> None:
    """In the record, in its history, and to whoever comes later; an entry shows its envelope."""
    said = Answer(outcome=Outcome.SUCCESS, evidence={"parcel": "p-1", "odd": "\x00", "thing": object, "half": "\ud800"})
    plain = Answer(outcome=Outcome.SUCCESS, evidence={"room": 12})
    shop = Shop(ship_do=[said], room_do=[plain])
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")
        steps: list[Step] = [Own("room"), Pay("alice", "bob", "USDT", "10"), Own("ship", {"book": "Dune"})]
        view = await p.start(steps)
        assert view.state == "COMPLETED"
        assert view.steps[0].result == {"room": 12}
        assert "p-1" in str(view.steps[2].result)
        assert [step.what for step in view.steps] == [
            "own step room",
            "pay 10.000000 USDT from alice to bob",
            "own step ship",
        ]
        envelope = await p.ledger.envelope(view.steps[1].envelope or 0)
        assert envelope.metadata == {"sequence": view.id, "step": 1}
        assert (await p.evidence(view.id))[1]["room"] == 12
        last = shop.calls[-1]
        assert (last.key, last.step, last.arguments) == (f"{view.id}:2:do", 2, {"book": "Dune"})
        assert last.results == ({"room": 12}, {})


@scenario
async def test_a_result_that_is_too_long_for_the_record_is_cut_there(place: Place) -> None:
    said = Answer(outcome=Outcome.SUCCESS, evidence={"all": "x" * 10_000})
    async with program(place, Shop(ship_do=[said])) as p:
        view = await p.start([Own("ship")])
        assert view.state == "COMPLETED"
        assert len(view.steps[0].result["cut"]) == 4_096
        assert len((await p.evidence(view.id))[1]["all"]) == 10_000


@pytest.mark.parametrize("unknown", [*UNKNOWNS, RuntimeError("oops"), "no answer at all"])
@scenario
async def test_whatever_is_not_known_stays_and_is_asked_again(place: Place, unknown: Any) -> None:
    shop = Shop(ship_do=[unknown])
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")
        view = await p.start(THREE)
        assert (view.state, view.result, states(view)) == ("RUNNING", Result.PAUSED, ["done", "running", "ahead"])
        assert await p.balances() == ["0", "10", "0"]
        view = await p.sequences.wait(view.id)
        assert view.state == "COMPLETED"
        assert shop.effects == {"ship_do": 1}
        assert len({call.key for call in shop.calls}) == 1  # asked again under the same key


@scenario
async def test_a_call_that_hangs_is_given_up_and_asked_again(place: Place) -> None:
    async def hangs() -> Outcome:
        await asyncio.Event().wait()
        return Outcome.SUCCESS

    shop = Shop(ship_do=[hangs])
    async with program(place, shop, call_timeout_s=0.05) as p:
        view = await p.start([Own("ship")])
        assert view.error.startswith("TIMEOUT")
        assert (await p.sequences.wait(view.id)).state == "COMPLETED"


@scenario
async def test_an_own_step_can_not_steer_the_flow(place: Place) -> None:
    """An event, a body or a posting in its answer are nobody's business."""
    said = Answer(outcome=Outcome.SUCCESS, event="END", in_flight_posting=65536, body=Answer(outcome=Outcome.SUCCESS))
    async with program(place, Shop(ship_do=[said])) as p:
        await seed(p.ledger, "alice", "10")
        assert states(await p.start(THREE)) == ["done"] * 3


# --- failure at each -----------------------------------------------------------------------------------------------


@scenario
async def test_the_first_step_is_refused(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "9.999999")
        view = await p.start(THREE)
        assert (view.state, view.result) == ("FAILED", Result.FAILED)
        assert view.error == "INSUFFICIENT_BALANCE: alice has 9.999999 USDT available, 10.000000 needed"
        assert states(view) == ["refused", "dropped", "dropped"]
        assert await p.path(view.id) == [START, REFUSED, "STEP_REFUSED-UNDONE>FAILED"]
        assert shop.calls == []
        assert await p.balances() == ["9.999999", "0", "0"]
        assert await p.reasons() == []
        await check_books(p)


@scenario
async def test_the_second_step_is_refused(place: Place) -> None:
    shop = Shop()
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start(THREE)
        assert (view.state, view.error) == ("FAILED", "SOLD_OUT: not today")
        assert states(view) == ["undone", "refused", "dropped"]
        assert await p.path(view.id) == [START, OK, ON, REFUSED, BACK, UNDONE, FAILED]
        assert await p.balances() == ["12", "0", "0"]
        assert shop.effects == {}
        assert await p.reasons() == []
        await check_books(p)


@scenario
async def test_the_third_step_is_refused_and_what_was_done_is_undone_in_reverse(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start([*THREE[:2], Withdraw("bob", "bank", "USDT", "10.000001")])
        assert (view.state, view.result) == ("FAILED", Result.FAILED)
        assert view.error.startswith("INSUFFICIENT_BALANCE: bob")
        assert states(view) == ["undone", "undone", "refused"]
        assert await p.path(view.id) == [START, OK, ON, OK, ON, REFUSED, BACK, UNDONE, BACK_ON, UNDONE, FAILED]
        assert shop.effects == {"ship_do": 1, "ship_undo": 1}
        undo = shop.calls[-1]
        assert (undo.key, undo.undoes) == (f"{view.id}:1:undo", f"{view.id}:1:do")
        assert undo.results[1] == {"parcel": "ship_do 1"}  # it is told what it once answered
        assert await p.balances() == ["12", "0", "0"]
        last = (await p.evidence(view.id))[-2]
        assert last["reverses"] == view.steps[0].envelope
        await check_books(p)


@pytest.mark.parametrize("failing", range(4))
@scenario
async def test_only_what_was_done_is_undone_newest_first(place: Place, failing: int) -> None:
    """Four own steps, each refused in turn."""
    shop = Shop()
    names = ["a", "b", "c", "d"]
    shop.refuses = {f"{names[failing]}_do"}
    async with program(place, shop, own=shop.own(*names)) as p:
        view = await p.start([Own(name) for name in names])
        assert view.state == "FAILED"
        asked = [(names[call.step], "undo" if call.undoes else "do") for call in shop.calls]
        done = names[:failing]
        assert asked == [(n, "do") for n in names[: failing + 1]] + [(n, "undo") for n in reversed(done)]
        assert set(shop.keys.values()) <= {1}
        assert len(shop.keys) == 2 * failing


@scenario
async def test_a_deposit_and_a_withdrawal_are_undone_too(place: Place) -> None:
    shop = Shop()
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p:
        bank = await balance(p.ledger, "bank")
        steps: list[Step] = [
            Deposit("bank", "alice", "USDT", "5"),
            Pay("alice", "bob", "USDT", "3"),
            Withdraw("bob", "bank", "USDT", "2"),
            Own("ship"),
        ]
        view = await p.start(steps)
        assert states(view) == ["undone", "undone", "undone", "refused"]
        assert await p.balances() == ["0", "0", "0"]
        assert await balance(p.ledger, "bank") == bank
        await check_books(p)


@scenario
async def test_money_goes_back_to_a_frozen_account(place: Place) -> None:
    """T35: a return is not stopped by a freeze of whoever receives it."""
    shop = Shop()

    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")

        async def freezes() -> Outcome:
            await p.ledger.freeze("alice")
            return Outcome.EXPLICIT_FAIL

        shop.says["ship_do"] = [freezes]
        view = await p.start(THREE)
        assert view.state == "FAILED"
        assert await p.balances() == ["10", "0", "0"]


@scenario
async def test_a_frozen_payer_is_a_refusal(place: Place) -> None:
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "10")
        await p.ledger.freeze("alice")
        view = await p.start(THREE)
        assert (view.state, view.error.partition(":")[0]) == ("FAILED", "ACCOUNT_FROZEN")
        assert await p.reasons() == []


@scenario
async def test_a_refusal_that_is_no_answer_stays_and_people_are_told(place: Place) -> None:
    """Somebody took the entry's key behind our back: that is no refusal of the step, and nothing is given back."""
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "20")
        view = await p.start(THREE, wait_s=0)
        thief = await p.ledger._intend(pay("alice", "carol", "USDT", "1", key=f"{view.id}:0"), "sequence")
        from bursar.writer import Change  # noqa: PLC0415

        await p.ledger.writer.apply(Change((thief,)))
        view = await p.sequences.wait(view.id)
        assert (view.state, states(view)) == ("RUNNING", ["running", "ahead", "ahead"])
        assert await p.reasons() == [("critical", "booking refused")]


@scenario
async def test_a_compensation_whose_reply_is_lost_is_asked_again(place: Place) -> None:
    shop = Shop()
    shop.loses = {"room_undo"}
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p:
        view = await p.start([Own("room"), Own("ship")])
        assert (view.state, states(view)) == ("COMPENSATING", ["undoing", "refused"])
        assert (await p.sequences.wait(view.id)).state == "FAILED"
        assert shop.effects == {"room_do": 1, "room_undo": 1}


@scenario
async def test_what_was_reversed_by_hand_is_not_reversed_twice(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")

        async def by_hand() -> Outcome:
            (view,) = await p.sequences.list()
            assert view.steps[0].envelope is not None
            await p.ledger.reverse(view.steps[0].envelope)
            await p.ledger.commit(pay("alice", "bob", "USDT", "10", key="again"))  # so that a second one could be
            return Outcome.EXPLICIT_FAIL

        shop.says["ship_do"] = [by_hand]
        view = await p.start(THREE)
        assert view.state == "FAILED"
        assert await p.balances() == ["0", "10", "0"]
        assert "reversed_by" in (await p.evidence(view.id))[-2]


@scenario
async def test_a_reversal_by_hand_between_look_and_leap_counts_and_so_does_one_after(place: Place) -> None:
    """One key for both: whoever comes second finds it done."""
    shop = Shop()
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p, program(place, shop, worker="other") as other:
        await seed(p.ledger, "alice", "20")
        real = p.sequences.engine.writer.apply
        hands = iter([other.ledger])

        async def slow(change: Any) -> Any:
            for ledger in hands if change.intents and change.intents[0].reverses else ():
                await ledger.reverse(change.intents[0].reverses)
                await ledger.commit(pay("alice", "bob", "USDT", "10", key="again"))  # so that a second one could be
            return await real(change)

        p.sequences.engine.writer.apply = slow  # type: ignore[method-assign]
        view = await p.start(THREE)
        assert (view.state, await p.reasons()) == ("COMPENSATING", [])
        view = await p.sequences.wait(view.id)
        assert view.state == "FAILED"
        assert await p.balances() == ["10", "10", "0"]
        later = await p.start(THREE, key="later")
        assert (later.state, later.steps[0].envelope is None) == ("FAILED", False)
        assert (await p.ledger.reverse(later.steps[0].envelope or 0)).replayed
        assert await p.balances() == ["10", "10", "0"]
        await check_books(p)


@scenario
async def test_a_posting_spent_between_look_and_leap_is_looked_at_again(place: Place) -> None:
    """The compensation has chosen a posting; before it is written, bob pays with it. He has enough left."""
    shop = Shop()
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p, program(place, shop, worker="other") as other:
        await seed(p.ledger, "alice", "10")
        await seed(p.ledger, "bob", "9")
        real = p.sequences.engine.writer.apply

        async def slow(change: Any) -> Any:
            if change.intents and change.intents[0].consume:
                with contextlib.suppress(StopIteration):
                    next(once)
                    await other.ledger.commit(pay("bob", "carol", "USDT", "9.5", key="faster"))
            return await real(change)

        once = iter([1])
        p.sequences.engine.writer.apply = slow  # type: ignore[method-assign]
        view = await p.start(THREE)
        assert (view.state, view.error.partition(":")[0]) == ("COMPENSATING", "POSTING_NOT_LIVE")
        assert await p.reasons() == []
        # bob has 9.5 left of the 10 that must go back: now it is refused, and a person decides
        view = await p.sequences.wait(view.id)
        assert view.state == "COMPENSATION_FAILED"
        await seed(p.ledger, "bob", "0.5")
        await p.sequences.retry(view.id, **ANN)
        assert (await p.sequences.wait(view.id)).state == "FAILED"
        assert await p.balances() == ["10", "0", "9.5"]
        await check_books(p)


# --- compensation failing ------------------------------------------------------------------------------------------


@scenario
async def test_a_compensation_that_is_refused_waits_for_a_person_and_wakes_one(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        id = await refused_midway(p, shop)
        view = await p.sequences.get(id)
        assert states(view) == ["undoing", "refused", "dropped"]
        assert view.error.startswith("INSUFFICIENT_BALANCE: bob has 3.000000 USDT")
        assert await p.reasons() == [("critical", "CompensationFailed")]
        (alert,) = await p.ledger.store.read.alerts.open()
        assert f"sequence {id}: step 0 (pay 10.000000 USDT from alice to bob) can't be undone" in alert.message
        assert [found.id for found in await p.sequences.queue()] == [id]
        before = await p.evidence(id)
        await seed(p.ledger, "bob", "7")  # it would be possible now, but nobody tries it again by himself
        await Worker(p.sequences.engine).look()
        await p.sequences.engine.finish(PATIENCE_S)
        assert (await p.sequences.wait(id)).state == "COMPENSATION_FAILED"
        assert await p.evidence(id) == before
        await p.ledger.commit(pay("bob", "bank", "USDT", "7", key="away"))
        assert await p.balances() == ["0", "3", "7"]
        await check_books(p)


@scenario
async def test_people_are_told_by_a_bell(place: Place) -> None:
    """While the context is open, every sink hears of a compensation that was refused."""
    told: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()

    async def sink(notice: Notice) -> None:
        told.set_result(notice)

    shop = Shop()
    async with program(place, shop) as p:
        id = await refused_midway(p, shop)
    async with place.bursar() as bursar:
        dispatcher = AlertDispatcher(bursar.store, {"test": sink})
        async with Sequences(bursar.ledger, own=shop.own(), dispatcher=dispatcher), asyncio.timeout(PATIENCE_S):
            notice = await told
    assert (notice.reason, notice.severity, notice.record_id) == ("CompensationFailed", "critical", id)


@scenario
async def test_one_person_says_retry(place: Place) -> None:
    """Refused again while the money is gone; done once it is back."""
    shop = Shop()
    async with program(place, shop) as p:
        id = await refused_midway(p, shop)
        assert (await p.sequences.retry(id, **ANN)).state == "COMPENSATING"
        assert (await p.sequences.wait(id)).state == "COMPENSATION_FAILED"
        await p.ledger.commit(pay("carol", "bob", "USDT", "7", key="back"))
        await p.sequences.retry(id, **ANN)
        view = await p.sequences.wait(id)
        assert (view.state, view.result, states(view)) == ("FAILED", Result.FAILED, ["undone", "refused", "dropped"])
        assert await p.balances() == ["10", "0", "0"]
        assert await p.sequences.queue() == []
        await check_books(p)


@scenario
async def test_skipping_needs_a_second_person(place: Place) -> None:
    """The first one asks; the same one again, however spelled, does not count; then the rest is undone."""
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "10")

        async def spends() -> Outcome:
            await p.ledger.commit(pay("bob", "carol", "USDT", "7", key="spent"))
            return Outcome.EXPLICIT_FAIL

        shop.says["ship_do"] = [spends]
        steps: list[Step] = [Own("room"), *THREE]
        view = await p.start(steps)
        assert states(view) == ["done", "undoing", "refused", "dropped"]
        for actor in ("ann", "ANN"):
            assert (await p.sequences.skip(view.id, actor=actor, reason="gone")).state == "COMPENSATION_FAILED"
        assert (await p.sequences.skip(view.id, **BEN)).state == "COMPENSATING"
        view = await p.sequences.wait(view.id)
        assert (view.state, view.result) == ("FAILED_IN_PART", Result.FAILED)
        assert states(view) == ["undone", "skipped", "refused", "dropped"]
        assert shop.effects == {"room_do": 1, "room_undo": 1}
        assert await p.balances() == ["0", "3", "7"]
        assert [step for step in await p.path(view.id) if "SKIP" in step] == ["COMPENSATION_FAILED-SKIP>STEP_UNDONE"]
        told = [e for e in await p.evidence(view.id) if e.get("reason") == "so have I"]
        assert len(told) == 1
        await check_books(p)


@scenario
async def test_an_own_compensation_that_is_refused(place: Place) -> None:
    shop = Shop()
    shop.refuses = {"ship_do", "room_undo"}
    async with program(place, shop) as p:
        view = await p.start([Own("room"), Own("ship")])
        assert (view.state, view.error) == ("COMPENSATION_FAILED", "SOLD_OUT: not today")
        shop.refuses = set()
        await p.sequences.retry(view.id, **ANN)
        assert (await p.sequences.wait(view.id)).state == "FAILED"
        assert shop.effects == {"room_do": 1, "room_undo": 1}


@scenario
async def test_people_can_say_neither_where_nobody_is_waited_for(place: Place) -> None:
    async with program(place, Shop(ship_do=[Outcome.TIMEOUT])) as p:
        view = await p.start([Own("ship")])
        for call in (p.sequences.retry, p.sequences.skip):
            assert isinstance(await outcome(call(view.id, **ANN)), InvalidState)
            assert isinstance(await outcome(call("nobody", **ANN)), UnknownRecord)


@scenario
async def test_forcing_says_how_one_step_ended_and_no_other(place: Place) -> None:
    """Two people say that the first parcel has left. The second one is asked for as ever."""
    shop = Shop(a_do=[Outcome.TIMEOUT] * 9, b_do=[Outcome.TIMEOUT])
    async with program(place, shop, own=shop.own("a", "b", "c"), retry=LATER) as p:
        view = await p.start([Own("a"), Own("b"), Own("c")])
        await p.sequences.people.force("sequence", view.id, "SUCCESS", **ANN)
        record = await p.sequences.people.force("sequence", view.id, "SUCCESS", **BEN)
        assert record.state == "RUNNING"
        view = await p.sequences.get(view.id)
        assert states(view) == ["done", "running", "ahead"]
        assert view.steps[0].result["forced_by"] == "ben"
        assert shop.effects == {}
        view = await p.sequences.wait(view.id)
        assert states(view) == ["done", "running", "ahead"]
        view = await p.sequences.wait(view.id)
        assert states(view) == ["done"] * 3
        assert shop.effects == {"b_do": 1, "c_do": 1}


@scenario
async def test_what_one_person_asked_of_a_step_is_not_asked_of_the_next(place: Place) -> None:
    """Ann asks to force the first step; it ends by itself; Ben asks it of the second, and is the first to."""
    shop = Shop(a_do=[Outcome.TIMEOUT], b_do=[Outcome.TIMEOUT] * 9)
    async with program(place, shop, own=shop.own("a", "b"), retry=LATER) as p:
        view = await p.start([Own("a"), Own("b")])
        await p.sequences.people.force("sequence", view.id, "SUCCESS", **ANN)
        view = await p.sequences.wait(view.id)
        assert states(view) == ["done", "running"]
        await p.sequences.people.force("sequence", view.id, "SUCCESS", **BEN)
        assert states(await p.sequences.get(view.id)) == ["done", "running"]
        await p.sequences.people.force("sequence", view.id, "SUCCESS", **ANN)
        assert (await p.sequences.get(view.id)).state == "COMPLETED"


@scenario
async def test_a_failure_is_forced_only_if_the_step_can_promise_it(place: Place) -> None:
    shop = Shop(ship_do=[Outcome.TIMEOUT] * 9)
    async with program(place, shop, retry=LATER) as p:
        view = await p.start([Own("room"), Own("ship")])
        await p.sequences.people.force("sequence", view.id, "EXPLICIT_FAIL", **ANN)
        record = await p.sequences.people.force("sequence", view.id, "EXPLICIT_FAIL", **BEN)
        assert record.state == "RUNNING"
        assert "can't promise" in record.error
    shop.cancels = Outcome.EXPLICIT_FAIL
    async with program(place, shop, retry=LATER) as p:
        await p.sequences.people.force("sequence", view.id, "EXPLICIT_FAIL", **ANN)
        record = await p.sequences.people.force("sequence", view.id, "EXPLICIT_FAIL", **BEN)
        assert record.state == "COMPENSATING"
        view = await p.sequences.wait(view.id)
        assert (view.state, view.error.partition(":")[0]) == ("FAILED", "CANCELLED")
        assert shop.effects == {"room_do": 1, "room_undo": 1}


@scenario
async def test_an_entry_is_forced_by_booking_it_or_by_never_booking_it(place: Place) -> None:
    """A step that is said to be done is booked with that word; one that is said to have failed never will be."""
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "10")
        done = await p.start([Pay("alice", "bob", "USDT", "4")], key="a", wait_s=0)
        failed = await p.start([Pay("alice", "bob", "USDT", "4")], key="b", wait_s=0)
        for who in (ANN, BEN):
            await p.sequences.people.force("sequence", done.id, "SUCCESS", **who)
            await p.sequences.people.force("sequence", failed.id, "EXPLICIT_FAIL", **who)
        assert [(await p.sequences.get(view.id)).state for view in (done, failed)] == ["COMPLETED", "FAILED"]
        assert await p.balances() == ["6", "4", "0"]
        await check_books(p)


@scenario
async def test_an_own_step_can_be_paused_by_its_name(place: Place) -> None:
    """As any rail: it is not called, others are, and what it did is undone all the same."""
    shop = Shop()
    async with program(place, shop) as p:
        await p.sequences.people.pause("rail", "ship", **ANN)
        view = await p.start([Own("room"), Own("ship")])
        assert (view.state, states(view), shop.effects) == ("RUNNING", ["done", "running"], {"room_do": 1})
        await p.sequences.people.resume("rail", "ship", **ANN)
        await p.sequences.engine.pauses.read()
        assert (await p.sequences.wait(view.id)).state == "COMPLETED"


# --- resuming ------------------------------------------------------------------------------------------------------


@scenario
async def test_it_goes_on_where_it_stopped_in_another_program(place: Place) -> None:
    """L14: the persisted index decides; what is done is not done again."""
    shop = Shop(ship_do=[Outcome.TIMEOUT])
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start(THREE)
        assert states(view) == ["done", "running", "ahead"]
    async with program(place, shop, worker="next") as p:
        view = await p.sequences.wait(view.id)
        assert view.state == "COMPLETED"
        assert await p.balances() == ["2", "6", "0"]
        assert shop.effects == {"ship_do": 1}


@scenario
async def test_a_worker_takes_up_what_a_dead_program_left(place: Place) -> None:
    shop = Shop(ship_do=[Outcome.TIMEOUT])
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start(THREE)
    async with place.bursar() as bursar, Sequences(bursar.ledger, own=shop.own()) as sequences:
        found = Program(sequences, bursar.ledger)
        assert (await found.until(view.id, "COMPLETED")).steps[1].result == {"parcel": "ship_do 1"}


@scenario
async def test_a_program_that_ends_lets_what_is_under_way_finish(place: Place) -> None:
    called = asyncio.Event()

    async def takes_a_while() -> Outcome:
        called.set()
        await asyncio.sleep(0.3)
        return Outcome.SUCCESS

    shop = Shop(ship_do=[takes_a_while])
    async with place.bursar() as bursar:
        async with Sequences(bursar.ledger, own=shop.own()) as sequences:
            view = await sequences.start([Own("ship")], key="order-7", wait_s=0.01)
            await called.wait()
            assert not view.ended
        assert (await sequences.get(view.id)).state == "COMPLETED"


@scenario
async def test_a_step_that_is_gone_after_a_restart_is_waited_for(place: Place) -> None:
    """Never lost: people are told at once, and with the step back it goes on."""
    shop = Shop(ship_do=[Outcome.TIMEOUT])
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "12")
        view = await p.start(THREE)
    async with program(place, shop, own={}) as p:
        view = await p.sequences.wait(view.id)
        assert (view.state, states(view)) == ("RUNNING", ["done", "running", "ahead"])
        assert view.error.startswith("UNKNOWN_STEP: sequence")
        assert ("critical", "missing step") in await p.reasons()
        record = await p.sequences.engine.get("sequence", view.id)
        assert record is not None
        assert record.due_us is not None
    async with program(place, shop) as p:
        assert (await p.sequences.wait(view.id)).state == "COMPLETED"


@scenario
async def test_a_compensation_whose_step_is_gone_is_waited_for_too(place: Place) -> None:
    shop = Shop(room_undo=[Outcome.TIMEOUT])
    shop.refuses = {"ship_do"}
    async with program(place, shop) as p:
        view = await p.start([Own("room"), Own("ship")])
        assert view.state == "COMPENSATING"
    async with program(place, shop, own={}) as p:
        assert (await p.sequences.wait(view.id)).state == "COMPENSATING"
        assert ("critical", "missing step") in await p.reasons()
    async with program(place, shop) as p:
        assert (await p.sequences.wait(view.id)).state == "FAILED"
        assert shop.effects == {"room_do": 1, "room_undo": 1}


@pytest.mark.parametrize("ship", [Outcome.SUCCESS, Outcome.EXPLICIT_FAIL])
@scenario
async def test_two_workers_on_one_record(place: Place, ship: Outcome) -> None:
    """Both drive it at once, from two programs: everything once, and nobody is told of a contradiction."""
    shop = Shop()
    if ship is Outcome.EXPLICIT_FAIL:
        shop.refuses = {"ship_do"}
    good = [START, OK, ON, OK, ON, OK, "STEP_DONE-END>COMPLETED"]
    path = good if ship is Outcome.SUCCESS else [START, OK, ON, REFUSED, BACK, UNDONE, FAILED]
    async with program(place, shop) as p, program(place, shop, worker="other") as other:
        await seed(p.ledger, "alice", "100")
        for number in range(8):
            view = await p.start(THREE, key=f"o-{number}", wait_s=0)
            await asyncio.gather(*[each.sequences.wait(view.id, 30) for each in (p, other, other, p)])
            view = await p.sequences.wait(view.id, 30)
            assert view.ended
            assert await p.path(view.id) == path
        assert max(shop.keys.values(), default=1) == 1
        assert await p.reasons() == []
        assert await p.balances() == (["20", "48", "0"] if ship is Outcome.SUCCESS else ["100", "0", "0"])
        await check_books(p)


# --- starting ------------------------------------------------------------------------------------------------------


@scenario
async def test_the_same_key_and_steps_get_the_first_sequence(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p:
        await seed(p.ledger, "alice", "30")
        first = await p.start(THREE)
        rows = await p.rows()
        same: list[Step] = [
            Pay("alice", "bob", "USDT", "10.00"),  # the same amount, spelled otherwise
            Own("ship", {"book": "Dune"}),
            Withdraw("bob", "bank", "USDT", "4"),
        ]
        again = await p.start(same)
        assert (again.id, again.replayed, first.replayed) == (first.id, True, False)
        assert await p.rows() == rows
        assert shop.effects == {"ship_do": 1}
        found = await p.sequences.find("order-7")
        assert found is not None
        assert found.id == first.id
        assert await p.sequences.find("order-8") is None


@scenario
async def test_the_same_key_with_other_steps_is_refused(place: Place) -> None:
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "30")
        await p.start(THREE)
        rows = await p.rows()
        for other in (THREE[:2], [THREE[0], Own("ship", {"book": "Emma"}), THREE[2]], [THREE[1], THREE[0], THREE[2]]):
            refusal = await outcome(p.start(other))
            assert isinstance(refusal, IdempotencyKeyReused)
            assert refusal.facts["id"] == "order-7"
        assert await p.rows() == rows


@scenario
async def test_a_repeated_request_is_answered_whatever_has_changed_since(place: Place) -> None:
    """T12: the own step is gone, and an account is closed."""
    async with program(place, Shop()) as p:
        first = await p.start(
            [Own("ship"), Deposit("bank", "carol", "USDT", "1"), Withdraw("carol", "bank", "USDT", "1")]
        )
        assert first.state == "COMPLETED"
        await p.ledger.close("carol")
    async with program(place, Shop(), own={}) as p:
        steps: list[Step] = [Own("ship"), Deposit("bank", "carol", "USDT", "1"), Withdraw("carol", "bank", "USDT", "1")]
        assert (await p.start(steps)).id == first.id


@scenario
async def test_twenty_at_once_start_one(place: Place) -> None:
    shop = Shop()
    async with program(place, shop) as p, program(place, shop, worker="other") as other:
        await seed(p.ledger, "alice", "300")
        views = await asyncio.gather(*[each.start(THREE) for each in (p, other) for _ in range(10)])
        assert len({view.id for view in views}) == 1
        assert [view.replayed for view in views].count(False) == 1
        assert (await p.until(views[0].id, "COMPLETED")).state == "COMPLETED"
        assert await p.balances() == ["290", "6", "0"]
        assert set(shop.keys.values()) == {1}


@scenario
async def test_keys_belong_to_their_owner_and_without_one_every_start_is_new(place: Place) -> None:
    async with program(place, Shop()) as p:
        start, steps = p.sequences.start, [Own("ship")]
        hers, his = await start(steps, key="1", owner="alice"), await start(steps, key="1", owner="bob")
        assert hers.id != his.id
        assert [view.id for view in await p.sequences.list(owner="bob")] == [his.id]
        assert (await start(steps)).id != (await start(steps)).id
        assert len(await p.sequences.list()) == 4


@scenario
async def test_own_steps_are_checked_when_they_are_registered(place: Place) -> None:
    class Half:
        async def do(self, call: Any) -> Answer:
            raise AssertionError(call)

    async with place.bursar() as bursar:
        with pytest.raises(FlowRefused, match="'ship' has no `undo`"):
            Sequences(bursar.ledger, own={"ship": Half()})  # type: ignore[dict-item]


@scenario
async def test_a_class_is_an_own_step_too(place: Place) -> None:
    class Ship:
        async def do(self, call: Any) -> Answer:
            return Answer(outcome=Outcome.SUCCESS, evidence={"by": call.arguments["carrier"]})

        async def undo(self, call: Any) -> Answer:
            raise AssertionError(call)

    async with program(place, Shop(), own={"ship": Ship(), "pair": Pair(do=Ship().do, undo=Ship().undo)}) as p:
        view = await p.start([Own("ship", {"carrier": "post"}), Own("pair", {"carrier": "bike"})])
        assert [step.result for step in view.steps] == [{"by": "post"}, {"by": "bike"}]


@pytest.mark.parametrize(
    ("first", "second", "end"),
    [
        (Outcome.SUCCESS, Outcome.EXPLICIT_FAIL, "FAILED"),
        (Outcome.EXPLICIT_FAIL, Outcome.SUCCESS, "COMPENSATION_FAILED"),
    ],
)
@scenario
async def test_two_programs_undo_the_same_step_and_hear_different_answers(
    place: Place, first: Outcome, second: Outcome, end: str
) -> None:
    """A refusal to undo is no last word (L15): heard after the success of another call, it is nothing. A success that
    is heard after a refusal is kept, and an operator is told: the step is undone after all."""
    calling, heard = asyncio.Event(), asyncio.Event()

    async def slow() -> Outcome:
        calling.set()
        await heard.wait()
        return second

    slow_shop = Shop(room_do=[Outcome.EXPLICIT_FAIL], ship_undo=[slow])
    async with program(place, slow_shop, retry=LATER) as p, program(place, Shop(ship_undo=[first]), retry=LATER) as q:
        view = await p.start([Own("ship"), Own("room")], wait_s=0.01)
        async with asyncio.timeout(PATIENCE_S):
            await calling.wait()
        moved = await q.sequences.wait(view.id, PATIENCE_S)
        assert moved.state == end
        heard.set()
        await p.sequences.engine.finish(PATIENCE_S)
        record = await p.sequences.engine.get("sequence", view.id)
        assert record is not None
        history = await p.ledger.store.read.records.history(record.number)
        late = [transition.event for transition in history if transition.event.startswith("LATE")]
        reasons = [reason for _, reason in await p.reasons()]
        if second is Outcome.EXPLICIT_FAIL:
            assert (late, reasons) == ([], [])
        else:
            assert (late, reasons) == (["LATE SUCCESS"], ["CompensationFailed", "contradiction"])
