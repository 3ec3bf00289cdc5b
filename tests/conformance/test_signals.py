"""Signals: a durable inbox per record. Each is consumed once, in the order of arrival, also if it came early."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.builders import MovablePorts, Place, scenario
from tests.crashing import dies
from tests.timed_payouts import HOUR_S, Bank, at, behind, in_s, look, path, program, start, until

from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, Operators, RecordSignal
from bursar.ledger import Ledger
from bursar.model.errors import IdempotencyKeyReused, InvalidState, RecordMoved
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record, Signal

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY: dict[str, Any] = {"actor": "ann", "reason": "because"}
ALSO: dict[str, Any] = {"actor": "ben", "reason": "so do I"}


async def outcome(word: Any) -> Any:
    try:
        return await word
    except (InvalidState, RecordMoved, IdempotencyKeyReused) as error:
        return error


async def inbox(engine: Engine, id: str = "p-1") -> list[tuple[str, str, int | None]]:
    """Sender's id, event, and which version has consumed it. What the record counts is what is there."""
    record = await at(engine, id)
    sent = await engine.store.read.records.signals(record.number)
    assert record.inbox == sum(signal.consumed is None for signal in sent)
    assert [s.arrived for s in sent] == sorted(s.arrived for s in sent)
    return [(signal.sender, signal.event, signal.consumed) for signal in sent]


async def sending(engine: Engine, id: str = "p-1") -> Record:
    """A payout that is about to be sent."""
    return await engine.signal(await start(engine, id), "APPROVE", "ann", {}, sender="approval")


async def send(engine: Engine, id: str, event: str, sender: str, **evidence: Any) -> None:
    """As a program does: send it to the record as it is, and again while the record moves."""
    while isinstance(
        await outcome(engine.signal(await at(engine, id), event, "x", evidence, sender=sender)), RecordMoved
    ):
        pass


@scenario
async def test_a_signal_that_is_awaited_moves_the_record_in_its_own_transaction(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await sending(engine)
        assert (record.state, record.version, record.inbox) == ("SENDING", 2, 0)
        assert await inbox(engine) == [("approval", "APPROVE", 2)]


@scenario
async def test_a_signal_that_comes_early_is_consumed_when_the_record_waits_for_it(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine)
        kept = await engine.signal(record, "SETTLED", "bank", {"receipt": 7}, sender="m-1")
        assert (kept.state, kept.version, kept.inbox) == ("APPROVING", 2, 1)
        assert await inbox(engine) == [("m-1", "SETTLED", None)]
        await engine.signal(kept, "APPROVE", "ann", {})
        done = await until(engine, "DONE")
        assert await path(engine) == ["CREATED", "SIGNAL SETTLED", "APPROVE", "SUCCESS", "SETTLED"]
        assert ("m-1", "SETTLED", done.version) in await inbox(engine)
        last = (await engine.store.read.records.history(done.number))[-1]
        assert (last.actor, msgspec.json.decode(last.evidence)["receipt"]) == ("bank", 7)
        assert (done.timer_us, done.due_us, done.inbox) == (None, None, 0)


@scenario
async def test_signals_are_consumed_in_the_order_of_arrival(place: Place) -> None:
    """Also one that the record waits for already, while an earlier one has not been consumed yet."""
    for first, second, end in (("CANCEL", "SETTLED", "GONE"), ("SETTLED", "CANCEL", "DONE")):
        id = f"p-{first}"
        async with program(place, Bank()) as engine:
            record = await sending(engine, id)
            record = await engine.signal(record, first, "bank", {}, sender="1")
            settling = await engine.step(record)  # its lease is taken to consume; the process is slow
            assert settling is not None and settling.state == "SETTLING" and settling.due_us is not None
            await engine.signal(settling, second, "bank", {}, sender="2")
            await until(engine, end, id)
            consumed = {sender: version for sender, _, version in await inbox(engine, id)}
            assert consumed["1"] is not None and consumed["2"] is None, "what came too late stays as evidence"


@scenario
async def test_a_signal_sent_again_is_the_same_signal(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await sending(engine)
        kept = await engine.signal(record, "SETTLED", "bank", {"a": 1, "b": 2}, sender="m-1")
        again = await engine.signal(record, "SETTLED", "bank", {"b": 2, "a": 1}, sender="m-1")
        assert (again.version, again.inbox) == (kept.version, 1)
        for event, evidence in (("SETTLED", {"a": 2}), ("CANCEL", {"a": 1, "b": 2})):
            assert isinstance(
                await outcome(engine.signal(kept, event, "bank", evidence, sender="m-1")), IdempotencyKeyReused
            )
        done = await until(engine, "DONE")
        for seen in (record, kept, done):  # also long after, whatever the sender has seen
            replayed = await engine.signal(seen, "SETTLED", "bank", {"a": 1, "b": 2}, sender="m-1")
            assert (replayed.state, replayed.version) == ("DONE", done.version)
        assert (await path(engine)).count("SETTLED") == 1


@scenario
async def test_the_same_signal_from_two_processes_at_once_is_one(place: Place) -> None:
    async with program(place, Bank()) as one, program(place, Bank(), worker="two") as two:
        for n in range(5):
            record = await sending(one, f"p-{n}")
            words = [engine.signal(record, "SETTLED", "bank", {}, sender="m") for engine in (one, two)]
            found = await asyncio.gather(*words)
            assert {(r.version, r.inbox) for r in found} == {(3, 1)}
            assert [event for _, event, _ in await inbox(one, f"p-{n}")] == ["APPROVE", "SETTLED"]


@scenario
async def test_a_signal_in_a_call_state_changes_the_body_and_makes_the_record_due(place: Place) -> None:
    """The action sees it at its next call; the record moves by the action's answer alone."""
    bank = Bank(send=[Outcome.PENDING])
    async with program(place, bank) as engine:
        record = await sending(engine)
        record = await engine.step(record) or record
        for fee in (5, 9):
            record = await engine.signal(record, "BUMP", "ann", {"fee": fee}, sender=f"bump-{fee}")
            assert (record.state, record.worker, record.attempt) == ("SENDING", "", 1)
            assert record.due_us is not None and record.due_us <= await engine.store.now_us() + 10**6
        replayed = await engine.signal(record, "BUMP", "ann", {"fee": 9}, sender="bump-9")
        assert replayed.version == record.version
        await until(engine, "SETTLING")
        assert [fee for _, _, fee, _ in bank.offers] == [1, 9]
        arrived = [consumed for _, event, consumed in await inbox(engine) if event == "BUMP"]
        assert None not in arrived, "no state waits for it: it is consumed by changing the body"
        found = await at(engine)
        assert (found.inbox, found.due_us, found.worker) == (0, None, ""), "it waits, and nobody looks at it"


@scenario
async def test_a_cancel_in_a_call_state_is_seen_by_the_action_and_consumed_where_it_is_awaited(place: Place) -> None:
    bank = Bank(send=[Outcome.TIMEOUT])
    async with program(place, bank) as engine:
        record = await sending(engine)
        record = await engine.step(record) or record
        record = await engine.signal(record, "CANCEL", "ann", {})
        assert record.state == "SENDING"
        await until(engine, "GONE")
        assert [cancelled for _, _, _, cancelled in bank.offers] == [False, True]
        assert (await path(engine))[-2:] == ["SUCCESS", "CANCEL"]


@scenario
async def test_a_signal_during_a_call_is_not_lost_with_the_answer(place: Place) -> None:
    """The answer loses its compare-and-set against the signal; the call is made again, and knows of it."""
    bank = Bank()
    bank.hangs = asyncio.Event()
    async with program(place, bank) as engine:
        record = await sending(engine)
        task = engine.drive(record)
        await bank.called.wait()
        await engine.signal(await at(engine), "SETTLED", "bank", {}, sender="m-1")
        bank.hangs.set()
        await task
        assert (await at(engine)).state == "DONE", "by the same worker, at once"
        assert await path(engine) == ["CREATED", "APPROVE", "SIGNAL SETTLED", "SUCCESS", "SETTLED"]


@scenario
async def test_a_record_that_comes_to_wait_while_the_signal_is_written_does_not_miss_it(place: Place) -> None:
    """It is read in its call state and moves on before the signal is written: the sender is told, and repeats."""
    async with program(place, Bank()) as engine, program(place, Bank(), worker="two") as two:
        record = await sending(engine)
        await until(two, "SETTLING")
        heard = await outcome(engine.signal(record, "SETTLED", "bank", {}, sender="m-1"))
        assert isinstance(heard, RecordMoved)
        assert await inbox(engine) == [("approval", "APPROVE", 2)], (
            "nothing is left in the inbox of a record that waits"
        )
        done = await engine.signal(await at(engine), "SETTLED", "bank", {}, sender="m-1")
        assert done.state == "DONE"


@scenario
async def test_no_signal_is_left_behind_whichever_transaction_is_first(place: Place) -> None:
    """Two processes: one sends the signal, the other moves the record into the state that waits for it."""
    async with program(place, Bank()) as one, program(place, Bank(), worker="two") as two:
        for n in range(12):
            id = f"p-{n}"
            record = await sending(one, id)

            await asyncio.gather(send(one, id, "SETTLED", "m"), two.process_now(record, 10))
            await until(two, "DONE", id)
            assert (await path(one, id)).count("SETTLED") == 1
            assert all(consumed is not None for _, _, consumed in await inbox(one, id))


@scenario
async def test_a_record_at_its_end_refuses_signals_and_so_does_one_that_keeps_none(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine)
        assert isinstance(await outcome(engine.signal(record, "NONSENSE", "ann", {})), InvalidState)
        record = await engine.signal(record, "APPROVE", "ann", {})
        for event in ("APPROVE", "LATE", "SUCCESS"):
            assert isinstance(await outcome(engine.signal(record, event, "ann", {})), InvalidState)
        assert (await at(engine)).version == record.version
        gone = await engine.signal(await start(engine, "p-2"), "CANCEL", "ann", {})
        assert gone.state == "GONE"
        for event in ("CANCEL", "SETTLED", "BUMP"):
            assert isinstance(await outcome(engine.signal(gone, event, "ann", {})), InvalidState)
        assert len(await inbox(engine, "p-2")) == 1


@scenario
async def test_operators_signal_by_the_same_rules(place: Place) -> None:
    bank = Bank(send=[Outcome.PENDING] * 3)
    bank.options = {"second_person": frozenset({"CANCEL"}), "reserved_events": {"SETTLED": "the bank says so"}}
    async with program(place, bank) as engine:
        people = Operators(engine)
        record = await sending(engine)
        record = await engine.step(record) or record
        assert isinstance(await outcome(people.signal("payouts", "p-1", "SETTLED", **WHY)), InvalidState)
        asked = await people.signal("payouts", "p-1", "CANCEL", sender="c-1", **WHY)
        assert (asked.inbox, asked.state) == (0, "SENDING"), "one of two"
        assert (await people.signal("payouts", "p-1", "CANCEL", sender="c-1", **WHY)).inbox == 0
        kept = await people.signal("payouts", "p-1", "CANCEL", sender="c-1", **ALSO)
        assert kept.inbox == 1
        gone = await until(engine, "GONE")
        replayed = await people.signal("payouts", "p-1", "CANCEL", sender="c-1", **ALSO)
        assert replayed.version == gone.version
        assert isinstance(
            await outcome(people.signal("payouts", "p-1", "CANCEL", sender="c-1", actor="ben", reason="other words")),
            IdempotencyKeyReused,
        )


BANKS = Machine(
    name="banks",
    initial="SENDING",
    states=(State("SENDING", Kind.CALL, action="send"), State("DONE", Kind.TERMINAL)),
    arrows=(Arrow("SENDING", Outcome.SUCCESS, "DONE"), Arrow("SENDING", Outcome.EXPLICIT_FAIL, "DONE")),
)


class Message(msgspec.Struct):
    payout: str


def banks() -> Flow[Message]:
    """A flow whose end is a signal to a payout."""

    async def send(_item: FlowRecord[Message]) -> Answer:
        return Answer(outcome=Outcome.SUCCESS)

    def settled(item: FlowRecord[Message], _event: str, _answer: Any) -> Booking:
        return Booking(signals=(RecordSignal(flow="payouts", id=item.body.payout, event="SETTLED"),))

    return Flow(machine=BANKS, body=Message, actions={"send": send}, book=settled, alarms=())


@scenario
async def test_a_record_signals_another_one_before_that_waits(place: Place) -> None:
    """The signal is in the transaction of the sender's move, and stays in the other's inbox."""
    async with program(place, Bank()) as engine:
        engine.register(banks())
        record = await start(engine)
        message = (await engine.start("banks", Message("p-1"), id="b-1")).record
        assert (await engine.process_now(message, 10)).state == "DONE"
        assert await inbox(engine) == [("banks/b-1/1", "SETTLED", None)]
        await engine.signal(await at(engine), "APPROVE", "ann", {})
        await until(engine, "DONE")
        assert record.number == (await at(engine)).number
        # And at its end it refuses: then the sender's own move is refused.
        late = (await engine.start("banks", Message("p-1"), id="b-2")).record
        late = await engine.step(late) or late
        assert late.state == "SENDING"
        assert "it has ended" in late.error


@scenario
async def test_a_signal_is_consumed_once_and_never_deleted_and_the_database_says_so(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await sending(engine)
        await engine.signal(record, "SETTLED", "bank", {}, sender="m-1")
    for sql in (
        "UPDATE {s}signals SET consumed = 9 WHERE sender = 'approval'",
        "UPDATE {s}signals SET event = 'CANCEL' WHERE sender = 'm-1'",
        "UPDATE {s}signals SET consumed = 9, sender = 'x' WHERE sender = 'm-1'",
        "DELETE FROM {s}signals",
    ):
        with pytest.raises((sqlite3.Error, asyncpg.PostgresError), match=r"consumed once|never deleted"):
            await behind(place, sql)


@scenario
async def test_a_signal_that_was_consumed_meanwhile_is_not_consumed_again(place: Place) -> None:
    """Given a stale view of the inbox, then the compare-and-set of the record fails, and with it the consumption."""
    async with program(place, Bank()) as one, program(place, Bank(), worker="two") as two:
        record = await one.signal(await sending(one), "SETTLED", "bank", {}, sender="m-1")
        settling = await one.step(record)
        assert settling is not None and settling.inbox == 1
        done = await asyncio.gather(one.step(settling), two.step(settling))
        assert {r.state for r in done if r is not None} == {"DONE"}
        assert (await path(one)).count("SETTLED") == 1
        stale = Signal(record.number, "m-1", "SETTLED", "bank", "{}", 3, consumed=9)
        with pytest.raises(RecordMoved):
            move = one.moves.signalled(one.require("payouts"), settling, "SETTLED", {}, "", signal=stale, inbox=-1)[1]
            await one.commit(settling, move, Booking())


# --- crashes -------------------------------------------------------------------------------------------------------


async def run(engine: Engine) -> None:
    """Early and duplicate signals, one in a call state; whoever does not know whether it was sent sends it again."""
    for id in ("p-1", "p-2"):
        if await engine.get("payouts", id) is None:
            await start(engine, id, expires=in_s(HOUR_S))
        for sender, event in (("s", "SETTLED"), ("b", "BUMP"), ("a", "APPROVE"), ("s", "SETTLED"), ("b", "BUMP")):
            evidence = {"fee": 3} if event == "BUMP" else {}
            await send(engine, id, event, sender, **evidence)
        await until(engine, "DONE", id)


@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_at_every_call_consumes_each_signal_once(place: Place, fault: str, tmp_path: Path) -> None:
    if place.engine == "postgres":
        pytest.skip("only on SQLite does every call pass the ports")
    async with program(place, Bank()) as engine:
        before = (await Ledger(engine.store).balance("bob", "USDT")).minor
    call, reached = 0, True
    while reached:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        reached = await dies(copy, [Bank().flow()], run, fault, call)
        ports = MovablePorts()
        ports.ahead_us = 10**6 * HOUR_S // 2
        async with program(copy, Bank(), ports=ports) as engine:
            await run(engine)
            for id in ("p-1", "p-2"):
                events = [event for event in await path(engine, id) if event != "UNKNOWN"]
                assert events == ["CREATED", "SIGNAL SETTLED", "SIGNAL BUMP", "APPROVE", "SUCCESS", "SETTLED"]
                sent = await inbox(engine, id)
                assert [(sender, consumed is None) for sender, _, consumed in sent] == [
                    ("s", False),
                    ("b", False),
                    ("a", False),
                ]
                assert b'"bumps":1' in (await at(engine, id)).body.encode()
            assert (await Ledger(engine.store).balance("bob", "USDT")).minor == before + 2
    assert call > 20


@scenario
async def test_looking_at_an_inbox_without_anything_to_consume_puts_the_record_back(place: Place) -> None:
    async with program(place, Bank()) as engine:
        record = await start(engine, expires=in_s(HOUR_S))
        await engine.signal(record, "SETTLED", "bank", {})
        await look(engine)
        found = await at(engine)
        assert (found.state, found.due_us, found.worker, found.inbox) == ("APPROVING", None, "", 1)
        assert found.timer_us == record.timer_us
