"""The engine, as specifications: a toy flow of twenty lines gets crash safety for free.

The toy orders something: it charges a card, then has it shipped, and gives the money back if the shop refuses. Both
other sides are idempotent and remember what they were asked, as every rail must.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario

from bursar import Bursar
from bursar.engine import Answer, Engine, Flow, Item, Worker
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import UNKNOWNS, Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

MACHINE = Machine(
    name="orders",
    initial="NEW",
    events=("GO", "NEXT"),
    states=(
        State("NEW", Kind.REST),
        State("CHARGING", Kind.CALL, action="charge"),
        State("CHARGED", Kind.REST, in_flight=True),
        State("SHIPPING", Kind.CALL, action="ship", in_flight=True),
        State("DONE", Kind.TERMINAL),
        State("REFUNDING", Kind.CALL, action="refund", in_flight=True, gives_back=True),
        State("FAILED", Kind.TERMINAL, gives_back=True),
    ),
    arrows=(
        Arrow("NEW", "GO", "CHARGING"),
        Arrow("CHARGING", Outcome.SUCCESS, "CHARGED"),
        Arrow("CHARGING", Outcome.EXPLICIT_FAIL, "FAILED"),
        Arrow("CHARGED", "NEXT", "SHIPPING"),
        Arrow("SHIPPING", Outcome.SUCCESS, "DONE"),
        Arrow("SHIPPING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
        Arrow("REFUNDING", Outcome.SUCCESS, "FAILED"),
        Arrow("REFUNDING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
    ),
)


class Order(msgspec.Struct):
    what: str


class World:
    """The other sides: what they are told to say, and what they were asked."""

    def __init__(self) -> None:
        self.says: dict[str, list[Any]] = {}  # per action, in order; then SUCCESS
        self.calls: Counter[str] = Counter()
        self.effects: set[tuple[str, str]] = set()

    def action(self, name: str) -> Any:
        async def call(item: Item[Order]) -> Answer:
            self.calls[name] += 1
            said = self.says.get(name, [])
            answer = said.pop(0) if said else Outcome.SUCCESS
            if isinstance(answer, Exception):
                raise answer
            if answer is Outcome.SUCCESS:
                self.effects.add((item.id, name))
            return Answer(outcome=answer, evidence={"call": self.calls[name]})

        return call

    def flow(self) -> Flow[Order]:
        actions = {name: self.action(name) for name in ("charge", "ship", "refund")}
        return Flow(machine=MACHINE, body=Order, actions=actions, retry=Retry(first_s=0.01, cap_s=0.02))


def engine_on(bursar: Bursar, *flows: Flow[Any], worker: str = "local") -> Engine:
    return Engine(bursar.store, bursar.ledger.writer, flows, worker=worker)


async def path(engine: Engine, record: Record) -> list[str]:
    history = await engine.store.read.records.history(record.number)
    return [f"{t.source}-{t.event}>{t.target}" for t in history]


async def until(engine: Engine, record: Record, state: str) -> Record:
    async with asyncio.timeout(20):
        while True:
            found = await engine.get(record.flow, record.id)
            if found is not None and found.state == state:
                return found
            await engine.ports.sleep(0.01)


@scenario
async def test_a_record_goes_from_its_beginning_to_its_end(place: Place) -> None:
    world = World()
    async with place.bursar() as bursar:
        engine = engine_on(bursar, world.flow())
        started = await engine.start("orders", Order("book"), id="o-1", owner="alice")
        ended = await engine.process_now(started.record, 5)
        assert ended.state == "DONE"
        assert await path(engine, ended) == [
            "-CREATED>NEW",
            "NEW-GO>CHARGING",
            "CHARGING-SUCCESS>CHARGED",
            "CHARGED-NEXT>SHIPPING",
            "SHIPPING-SUCCESS>DONE",
        ]
        found = await engine.get("orders", "o-1")
        assert found is not None
        assert (found.state, found.version, found.due_us, found.owner) == ("DONE", 5, None, "alice")


@pytest.mark.parametrize("outcome", UNKNOWNS)
@scenario
async def test_every_unknown_stays_and_is_called_again(place: Place, outcome: Outcome) -> None:
    world = World()
    world.says = {"ship": [outcome, outcome]}
    async with place.bursar() as bursar:
        engine = engine_on(bursar, world.flow())
        worker = Worker(engine, scan_s=0.01)
        started = await engine.start("orders", Order("book"))
        waiting = await engine.process_now(started.record, 5)
        assert (waiting.state, waiting.attempt) == ("SHIPPING", 1)
        running = asyncio.create_task(worker.run())
        found = await until(engine, started.record, "DONE")
        worker.stop()
        await running
        assert world.calls == {"charge": 1, "ship": 3}
        assert (await path(engine, found))[4:6] == [f"SHIPPING-{outcome.value}>SHIPPING"] * 2


@scenario
async def test_what_a_dead_process_left_is_finished_by_the_next(place: Place) -> None:
    world = World()
    async with place.bursar() as bursar:
        engine = engine_on(bursar, world.flow())
        left = [(await engine.start("orders", Order("book"))).record for _ in range(50)]
    async with place.bursar() as bursar:
        engine = engine_on(bursar, world.flow())
        worker = Worker(engine, queue_max=10, driven_max=4)
        async with asyncio.timeout(30):
            while engine.settled < len(left):
                await worker.look()
                await asyncio.sleep(0)
        for record in left:
            found = await engine.get("orders", record.id)
            assert found is not None
            assert found.state == "DONE"
    assert len(world.effects) == 100
