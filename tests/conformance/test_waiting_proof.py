"""Timers and kept signals that would give money back: only if nothing was ever issued, never in silence (S44, S50)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.timed_payouts import look, time_passes

from bursar.engine import Answer, Engine, Flow, FlowRecord, Operators
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record

MODES = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
WHY: dict[str, Any] = {"actor": "ann", "reason": "asked to"}

MACHINE = Machine(
    name="quotes",
    initial="OFFERED",
    events=("GO", "EXPIRED", "LATE", "CANCEL", "SETTLED"),
    states=(
        State("OFFERED", Kind.WAIT, awaits="buyer", timeout_event="EXPIRED", timeout_s=60),
        State("SENDING", Kind.CALL, action="send", effect=Effect.SEND),
        State("SETTLING", Kind.WAIT, awaits="bank", timeout_event="LATE", timeout_s=60),
        State("DONE", Kind.TERMINAL),
        State("RETURNED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("OFFERED", "GO", "SENDING"),
        Arrow("OFFERED", "EXPIRED", "RETURNED"),
        Arrow("OFFERED", "CANCEL", "RETURNED"),
        Arrow("SENDING", Outcome.SUCCESS, "SETTLING"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "RETURNED"),
        Arrow("SETTLING", "SETTLED", "DONE"),
        Arrow("SETTLING", "LATE", "RETURNED"),
        Arrow("SETTLING", "CANCEL", "RETURNED"),
    ),
)


class Quote(msgspec.Struct):
    pass


async def send(_item: FlowRecord[Quote]) -> Answer:
    return Answer(outcome=Outcome.SUCCESS)


FLOW = Flow(
    machine=MACHINE,
    body=Quote,
    actions={"send": send},
    inbox_events=frozenset({"CANCEL", "SETTLED"}),
    alarms=(),
)


class Program:
    """One process."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def look(self) -> None:
        await look(self.engine)

    async def at(self, record: Record) -> Record:
        found = await self.engine.get(record.flow, record.id)
        assert found is not None
        return found

    async def reasons(self) -> list[tuple[str, str]]:
        return [(alert.severity, alert.reason) for alert in await self.engine.store.read.alerts.open()]


@MODES
@scenario
async def test_a_timer_gives_back_what_was_never_issued(place: Place) -> None:
    async with place.bursar() as bursar:
        program = Program(Engine(bursar.store, bursar.ledger.writer, [FLOW]))
        record = (await program.engine.start("quotes", Quote(), id="q")).record
        await time_passes(place)
        await program.look()
        assert (await program.at(record)).state == "RETURNED"
        last = (await bursar.store.read.records.history(record.number))[-1]
        assert msgspec.json.decode(last.evidence)["proof"] == {"kind": "never_issued"}


@MODES
@scenario
async def test_a_timer_gives_nothing_back_after_something_was_sent(place: Place) -> None:
    """Operators get one alert; the record goes on waiting, and what it waits for still moves it."""
    async with place.bursar() as bursar:
        program = Program(Engine(bursar.store, bursar.ledger.writer, [FLOW]))
        record = (await program.engine.start("quotes", Quote(), id="q")).record
        record = await program.engine.signal(record, "GO", "buyer", {})
        await program.engine.process_now(record, 5)
        record = await program.at(record)
        assert record.state == "SETTLING"
        await time_passes(place)
        await program.look()
        await program.look()
        assert (await program.at(record)).state == "SETTLING"
        assert await program.reasons() == [("critical", "signal refused")]
        assert (await program.engine.signal(await program.at(record), "SETTLED", "bank", {})).state == "DONE"


@MODES
@scenario
async def test_a_kept_signal_that_is_refused_does_not_block_the_inbox(place: Place) -> None:
    """A cancellation that came early can't give back what was sent by then; what comes after it is taken."""
    async with place.bursar() as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, [FLOW])
        program = Program(engine)
        record = (await engine.start("quotes", Quote(), id="q")).record
        record = await engine.signal(record, "GO", "buyer", {})
        record = await engine.signal(await program.at(record), "CANCEL", "buyer", {}, sender="cancel-1")
        assert (record.state, record.inbox) == ("SENDING", 1)
        await engine.process_now(await program.at(record), 5)
        record = await program.at(record)
        assert (record.state, record.inbox) == ("SETTLING", 1)
        assert await program.reasons() == [("critical", "signal refused")]
        await engine.signal(record, "SETTLED", "bank", {}, sender="bank-1")
        await program.look()
        record = await program.at(record)
        assert (record.state, record.inbox) == ("DONE", 1)


@MODES
@scenario
async def test_an_operators_signal_that_is_sent_again_is_the_same_one_with_its_proof(place: Place) -> None:
    async with place.bursar() as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, [FLOW])
        await engine.start("quotes", Quote(), id="q")
        people = Operators(engine)
        for _ in range(2):
            record = await people.signal("quotes", "q", "CANCEL", sender="ticket-17", **WHY)
            assert (record.state, record.version) == ("RETURNED", 2)
