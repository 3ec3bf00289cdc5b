"""Signals in every order: against the move that makes the record wait for it, against itself, and against a timer."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
from tests.interleaving.stage import RECORDS, Actor
from tests.interleaving.world import Operation as Act
from tests.interleaving.world import World, every_order
from tests.timed_payouts import Bank, Payout, at, in_s, path

from bursar.engine import Booking, Engine
from bursar.ledger import Ledger
from bursar.model.errors import InvalidState, RecordMoved
from bursar.model.records import Record

ORDERS_OF_RIVALS = 4  # if the second to write waits for the first one's COMMIT


def engine_on(ledger: Ledger, name: str = "stage") -> Engine:
    flow = replace(Bank().flow(), book=lambda *_: Booking())
    return Engine(ledger.store, ledger.writer, [flow], worker=name)


async def start(world: World, **body: Any) -> Record:
    engine = engine_on(world.ledger)
    return (await engine.start("payouts", Payout(**body), id=f"p-{world.stage.scenes}")).record


async def sending(world: World) -> Record:
    return await engine_on(world.ledger).signal(await start(world), "APPROVE", "ann", {})


def signalling(seen: Record, event: str, sender: str) -> Act:
    """Send a signal to the record as it was seen, and again to the record as it is, until it is written."""

    async def act(actor: Actor) -> Record:
        engine, record = engine_on(actor.ledger, actor.name), seen
        while True:
            try:
                return await engine.signal(record, event, actor.name, {}, sender=sender)
            except RecordMoved:
                record = await at(engine, record.id)

    return act


def leaving(seen: Record) -> Act:
    """Step until the record has left its state."""

    async def act(actor: Actor) -> Record:
        engine, record = engine_on(actor.ledger, actor.name), seen
        while record.state == seen.state:
            record = await engine.step(record) or record
        return record

    return act


def test_signal_against_the_move_into_the_state_that_waits_for_it(empty_postgres: str) -> None:
    """Whoever is first: the signal has moved the record, or the record is not at rest and knows that it has one."""
    records: list[Record] = []
    ends: set[str] = set()

    async def prepare(world: World) -> list[Act]:
        records.append(await sending(world))
        return [signalling(records[-1], "SETTLED", "m"), leaving(records[-1])]

    async def check(world: World, outcomes: list[Any]) -> None:
        engine = engine_on(world.ledger)
        found = await at(engine, records[-1].id)
        ends.add(found.state)
        sent = await engine.store.read.records.signals(found.number)
        assert [signal.event for signal in sent] == ["APPROVE", "SETTLED"]
        if found.state == "DONE":
            assert (sent[1].consumed, found.inbox) == (found.version, 0)
        else:
            assert (sent[1].consumed, found.inbox) == (None, 1)
            assert found.due_us is not None, "it is driven on, by its worker or by the next one that claims it"
            while found.state != "DONE":
                found = await engine.step(msgspec.structs.replace(found, worker="stage")) or found
        assert (await path(engine, found.id)).count("SETTLED") == 1

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS
    assert ends == {"DONE", "SETTLING"}


def test_signal_against_the_same_signal(empty_postgres: str) -> None:
    """From two processes, at once: written once."""
    records: list[Record] = []

    async def prepare(world: World) -> list[Act]:
        records.append(await sending(world))
        return [signalling(records[-1], "SETTLED", "m")] * 2

    async def check(world: World, outcomes: list[Any]) -> None:
        engine = engine_on(world.ledger)
        assert [(r.version, r.inbox) for r in outcomes] == [(3, 1)] * 2
        assert await path(engine, records[-1].id) == ["CREATED", "APPROVE", "SIGNAL SETTLED"]

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS


def test_signal_against_a_timer(empty_postgres: str) -> None:
    """One of them moves the record; the sender of a signal that was late is told so."""
    records: list[Record] = []
    wins: set[str] = set()

    async def prepare(world: World) -> list[Act]:
        records.append(await start(world, expires=in_s(-1)))
        claimed = msgspec.structs.replace(records[-1], worker="stage")
        return [signalling(records[-1], "APPROVE", "m"), leaving(claimed)]

    async def check(world: World, outcomes: list[Any]) -> None:
        events = await path(engine_on(world.ledger), records[-1].id)
        wins.add(events[1])
        assert len(events) == 2
        assert isinstance(outcomes[0], InvalidState) == (events[1] == "EXPIRED")

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS
    assert wins == {"APPROVE", "EXPIRED"}
