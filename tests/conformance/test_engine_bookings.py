"""Flows whose own operation is an entry: the ledger's refusal is the answer, and the body follows the arrow."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from tests.builders import Place, check_sound, outcome, scenario, seed
from tests.toy import HAPPY, Order, Program, World, book, program, waits

from bursar import pay
from bursar.engine import Answer, Booking, FlowRecord, FlowRefused
from bursar.model.errors import InsufficientFunds, InvalidState, Refusal
from bursar.model.outcome import Outcome
from bursar.model.retry import Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY: dict[str, Any] = {"actor": "ann", "reason": "known customer"}
ALSO: dict[str, Any] = {"actor": "ben", "reason": "known to me, too"}
MILLION = 1_000_000


def world(refused: dict[str, Outcome], **more: Any) -> World:
    """An outside whose charging is the entry itself."""

    def charges(item: FlowRecord[Order], event: str, answer: Answer) -> Booking:
        found = book(item, event, answer)
        return msgspec.structs.replace(found, refused=refused) if found.intents else found

    made = World(**more)
    made.flow_options["book"] = charges
    return made


@scenario
async def test_a_refusal_on_the_list_is_the_answer(place: Place) -> None:
    """Alice has nothing: the order fails as if the card had been refused, and nobody is woken."""
    async with program(place, world({"INSUFFICIENT_BALANCE": Outcome.EXPLICIT_FAIL})) as p:
        record = await p.now(await p.order(minor=MILLION))
        assert record.state == "FAILED"
        assert record.error.startswith("INSUFFICIENT_BALANCE: alice has 0.000000 USDT")
        assert await p.path(record) == ["-CREATED>NEW", "NEW-GO>CHARGING", "CHARGING-EXPLICIT_FAIL>FAILED"]
        evidence = msgspec.json.decode((await p.engine.store.read.records.history(record.number))[-1].evidence)
        assert (evidence["account"], evidence["needed"]) == ("alice", "1.000000")
        assert await p.reasons() == []
        await check_sound(p.ledger)


@scenario
async def test_a_refusal_that_stands_for_not_knowing_is_tried_again(place: Place) -> None:
    async with program(place, world({"INSUFFICIENT_BALANCE": Outcome.PENDING})) as p:
        record = await p.now(await p.order(minor=MILLION))
        assert (record.state, record.attempt) == ("CHARGING", 1)
        assert await p.reasons() == []
        await seed(p.ledger, "alice", "1")
        assert (await p.now(record)).state == "DONE"
        assert await p.balances() == [0, 0, MILLION]


@scenario
async def test_a_refusal_that_is_not_on_the_list_is_a_mistake(place: Place) -> None:
    async with program(place, world({"ACCOUNT_FROZEN": Outcome.EXPLICIT_FAIL})) as p:
        record = await p.now(await p.order(minor=MILLION))
        assert (record.state, record.attempt) == ("CHARGING", 1)
        assert await p.reasons() == [("critical", "booking refused")]


@scenario
async def test_two_workers_of_whom_one_is_refused_contradict_nobody(place: Place) -> None:
    """One finds too little money; before that is written, the other finds enough. What was written is what happened."""
    outside = world({"INSUFFICIENT_BALANCE": Outcome.EXPLICIT_FAIL})
    async with program(place, outside) as p, program(place, outside, worker="other") as other:
        record = await p.order(minor=MILLION)
        real = p.engine.writer.apply
        refused, go = asyncio.Event(), asyncio.Event()

        async def slow(change: Any) -> Any:
            if not change.intents and not go.is_set():
                refused.set()
                await go.wait()
            return await real(change)

        p.engine.writer.apply = slow  # type: ignore[method-assign]
        first = asyncio.create_task(p.now(record))
        await refused.wait()
        await seed(other.ledger, "alice", "1")
        assert (await other.now(record)).state == "DONE"
        go.set()
        await first
        assert (await p.at(record)).state == "DONE"
        assert await p.reasons() == []
        assert not [step for step in await p.path(record) if "LATE" in step]


@scenario
async def test_a_success_that_was_not_booked_contradicts_nobody(place: Place) -> None:
    """The other way round: one is refused and writes that down; the other, who came too late, has nothing to tell."""
    called, go = asyncio.Event(), asyncio.Event()

    async def waits() -> Outcome:
        called.set()
        await go.wait()
        return Outcome.SUCCESS

    outside = world({"INSUFFICIENT_BALANCE": Outcome.EXPLICIT_FAIL}, charge=[waits])
    async with program(place, outside) as p, program(place, outside, worker="other") as other:
        record = await p.order(minor=MILLION)
        first = asyncio.create_task(p.now(record))
        await called.wait()
        assert (await other.now(record)).state == "FAILED"
        go.set()
        await first
        assert await p.reasons() == []


def refuses_after(p: Program, meanwhile: Callable[[], Awaitable[object]]) -> None:
    """The writer has read where the record is; then another process moves it; then it reads the balance, which is not
    enough any more. So it refuses the change for what that one has booked, and can't tell that the record has moved."""
    real = p.engine.writer.apply

    async def apply(change: Any) -> Any:
        if not change.intents:
            return await real(change)
        p.engine.writer.apply = real  # type: ignore[method-assign]
        await meanwhile()
        with pytest.raises(Refusal):
            await real(change)
        raise InsufficientFunds("alice", "USDT", "1.000000", "0.000000")

    p.engine.writer.apply = apply  # type: ignore[method-assign]


@scenario
async def test_what_is_refused_because_another_worker_has_booked_it_is_no_mistake(place: Place) -> None:
    async with program(place, World()) as p, program(place, World(), worker="other") as other:
        await seed(p.ledger, "alice", "1")
        record = await p.order(minor=MILLION)
        refuses_after(p, lambda: other.now(record))
        assert (await p.now(record)).state == "DONE"
        assert await p.reasons() == [] and await p.balances() == [0, 0, MILLION]
        assert await p.path(record) == HAPPY


@scenario
async def test_what_was_heard_too_late_and_can_not_be_booked_is_a_contradiction_and_no_mistake(place: Place) -> None:
    """People have decided that the card was not charged, it was, and alice has spent the money meanwhile."""
    async with program(place, World()) as p, program(place, World(), worker="other") as other:
        await seed(p.ledger, "alice", "1")
        record = await p.order(minor=MILLION)

        async def decided() -> None:
            for who in (WHY, ALSO):
                await other.people.force("orders", record.id, "EXPLICIT_FAIL", **who)
            await other.ledger.commit(pay("alice", "bob", "USDT", "1", key="spent"))

        refuses_after(p, decided)
        assert (await p.now(record)).state == "FAILED"
        assert await p.reasons() == [("critical", "contradiction")]
        assert (await p.path(record))[-1] == "FAILED-LATE SUCCESS>FAILED"


def renamed(item: FlowRecord[Order], event: str, _answer: Answer) -> Order | None:
    """What is ordered becomes the trail of what happened."""
    return msgspec.structs.replace(item.body, what=f"{item.body.what} {event}")


async def what(p: Program) -> str:
    record = await p.engine.get("orders", "o-1")
    assert record is not None
    found: str = msgspec.json.decode(record.body)["what"]
    return found


@scenario
async def test_the_body_follows_the_arrow_whoever_spoke(place: Place) -> None:
    """By an answer, by a person who was waited for, by two who force."""
    outside = World(ship=[Outcome.TIMEOUT] * 9)
    outside.flow_options |= {"next_body": renamed, "retry": Retry(first_s=500, cap_s=500)}
    async with program(place, outside) as p:
        record = await p.order("o-1", ask=True)
        await p.people.signal("orders", "o-1", "APPROVE", **WHY)
        assert await what(p) == "book APPROVE"
        record = await p.now(await p.at(record))
        assert (record.state, await what(p)) == (
            "SHIPPING",
            "book APPROVE SUCCESS",
        )  # a call without an answer: as it was
        await p.people.force("orders", "o-1", "LEFT", **WHY)
        await p.people.force("orders", "o-1", "LEFT", **ALSO)
        assert (await p.at(record)).state == "DONE"
        assert await what(p) == "book APPROVE SUCCESS LEFT"


@scenario
async def test_an_answer_that_brings_a_body_has_the_last_word(place: Place) -> None:
    said = Answer(outcome=Outcome.SUCCESS, body=Order(what="another"))
    outside = World(charge=[said])
    outside.flow_options["next_body"] = renamed
    async with program(place, outside) as p:
        await p.now(await p.order("o-1"))
        assert await what(p) == "another SUCCESS"


@scenario
async def test_what_only_two_people_can_tell(place: Place) -> None:
    outside = World()
    outside.flow_options["second_person"] = frozenset({"REJECT"})
    async with program(place, outside) as p:
        record = await p.order("o-1", ask=True)
        asked = await p.people.signal("orders", "o-1", "REJECT", **WHY)
        assert (asked.state, waits(asked)) == ("ASKING", True)
        for same in ("ann", "Ann"):  # one person, however the name is typed
            assert (await p.people.signal("orders", "o-1", "REJECT", actor=same, reason="really")).state == "ASKING"
        assert isinstance(await outcome(p.people.signal("orders", "o-1", "GO", **ALSO)), InvalidState)
        assert (await p.people.signal("orders", "o-1", "REJECT", **ALSO)).state == "REJECTED"
        assert (await p.path(record))[2:] == ["ASKING-TELL ASKED>ASKING"] * 3 + ["ASKING-REJECT>REJECTED"]
        one = await p.order("o-2", ask=True)
        await p.people.signal("orders", "o-2", "REJECT", **WHY)
        assert (await p.people.signal("orders", "o-2", "APPROVE", **ALSO)).state == "CHARGING"
        assert (await p.now(await p.at(one))).state == "DONE"


@scenario
async def test_only_events_can_need_two_people(place: Place) -> None:
    outside = World()
    outside.flow_options["second_person"] = frozenset({"NEVER"})
    with pytest.raises(FlowRefused, match="NEVER needs two operators"):
        async with program(place, outside):
            pass
