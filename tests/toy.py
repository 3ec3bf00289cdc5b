"""A toy flow for every suite that tests the engine, with the other sides it calls.

The toy orders something: it charges a card, has the thing shipped, and gives the money back if the shop refuses; a
large order is approved by somebody first. Where an order has an amount, the ledger books it: alice pays into
`transit:orders`, and from there bob is paid, or alice again. The other sides are idempotent and remember what they
were asked, as every rail must; a test scripts what they say.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

import msgspec
from tests.builders import Place

from bursar import SystemAccount
from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, Operators
from bursar.ledger import Ledger
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.ports import Ports

TRANSIT = "transit:orders"
PATIENCE_S = 30.0
SOON = Retry(first_s=0.01, cap_s=0.02)

MACHINE = Machine(
    name="orders",
    initial="NEW",
    events=("GO", "ASK", "APPROVE", "REJECT", "NEXT", "LEFT"),
    states=(
        State("NEW", Kind.AUTOMATIC),
        State("ASKING", Kind.WAIT, awaits="approver"),
        State("REJECTED", Kind.TERMINAL, compensating=True),
        State("CHARGING", Kind.CALL, action="charge"),
        State("CHARGED", Kind.AUTOMATIC, in_flight=True),
        State("SHIPPING", Kind.CALL, action="ship", in_flight=True),
        State("DONE", Kind.TERMINAL),
        State("REFUNDING", Kind.CALL, action="refund", in_flight=True, compensating=True),
        State("FAILED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("NEW", "GO", "CHARGING"),
        Arrow("NEW", "ASK", "ASKING"),
        Arrow("ASKING", "APPROVE", "CHARGING"),
        Arrow("ASKING", "REJECT", "REJECTED"),
        Arrow("CHARGING", Outcome.SUCCESS, "CHARGED"),
        Arrow("CHARGING", Outcome.EXPLICIT_FAIL, "FAILED"),
        Arrow("CHARGED", "NEXT", "SHIPPING"),
        Arrow("SHIPPING", Outcome.SUCCESS, "DONE"),
        Arrow("SHIPPING", "LEFT", "DONE", outcome=Outcome.SUCCESS),  # at a neighbour's
        Arrow("SHIPPING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
        Arrow("REFUNDING", Outcome.SUCCESS, "FAILED"),
        Arrow("REFUNDING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
    ),
)
HAPPY = [
    "-CREATED>NEW",
    "NEW-GO>CHARGING",
    "CHARGING-SUCCESS>CHARGED",
    "CHARGED-NEXT>SHIPPING",
    "SHIPPING-SUCCESS>DONE",
]


class Order(msgspec.Struct):
    what: str = "book"
    minor: int = 0  # of USDT, booked from alice to bob by way of transit; 0: nothing is booked
    ask: bool = False  # whether somebody has to approve it


def choose(item: FlowRecord[Order]) -> str:
    return "ASK" if item.body.ask else "GO"


def book(item: FlowRecord[Order], _event: str, answer: Answer) -> Booking:
    if not item.body.minor or answer.outcome is not Outcome.SUCCESS:
        return Booking()
    match item.record.state:
        case "CHARGING":
            return Booking((intent(item, "alice", TRANSIT),), in_flight_account=TRANSIT)
        case "SHIPPING":
            return Booking((intent(item, TRANSIT, "bob"),), clears_in_flight=True)
        case "REFUNDING":
            return Booking((intent(item, TRANSIT, "alice", EntryKind.RETURN),), clears_in_flight=True)
    return Booking()


def intent(item: FlowRecord[Order], source: str, target: str, kind: EntryKind = EntryKind.ENTRY) -> Intent:
    leg = Leg(source, target, "USDT", item.body.minor)
    owned = (item.record.in_flight_posting,) if source == TRANSIT else ()
    return Intent(scope="orders", key=f"{item.id}:{item.record.state}", legs=(leg,), kind=kind, consume=owned)


class World:
    """The other sides: what they are told to say, what they were asked, and what they did."""

    def __init__(self, **says: list[Any]) -> None:
        self.says = says  # per action, in order: an outcome, an answer, an error, or something to await; then SUCCESS
        self.cancel_says: dict[str, Any] = {}
        self.calls: Counter[str] = Counter()
        self.effects: Counter[tuple[str, str]] = Counter()
        self.hangs: dict[str, asyncio.Event] = {}  # per record: calls wait for this
        self.refuses: set[tuple[str, str]] = set()  # (record, action): explicitly, and for ever
        self.loses: set[tuple[str, str]] = set()  # (record, action): it happens, and the first reply is lost
        self.flow_options: dict[str, Any] = {}
        self._answered: dict[tuple[str, str], Answer] = {}

    def action(self, name: str) -> Callable[[FlowRecord[Order]], Awaitable[Answer]]:
        async def call(item: FlowRecord[Order]) -> Answer:
            self.calls[name] += 1
            if item.id in self.hangs:
                await self.hangs[item.id].wait()
            if (item.id, name) in self._answered:
                return self._answered[item.id, name]
            if (item.id, name) in self.refuses:
                return Answer(outcome=Outcome.EXPLICIT_FAIL, code="NO")
            script = self.says.get(name, [])
            said = script.pop(0) if script else Outcome.SUCCESS
            if callable(said):
                said = await said()
            if isinstance(said, BaseException):
                raise said
            if isinstance(said, Outcome):
                said = Answer(outcome=said, evidence={"call": self.calls[name]})
            if isinstance(said, Answer) and said.outcome is Outcome.SUCCESS and said.event in ("", "LEFT"):
                self.effects[item.id, name] += 1
                self._answered[item.id, name] = said
            if (item.id, name) in self.loses:
                self.loses.discard((item.id, name))
                raise ConnectionResetError("the reply is lost")
            return cast("Answer", said)  # a test may have it return anything

        return call

    def cancel(self, name: str) -> Callable[[FlowRecord[Order]], Awaitable[Answer]]:
        async def call(_item: FlowRecord[Order]) -> Answer:
            self.calls[f"cancel {name}"] += 1
            said = self.cancel_says.get(name, Outcome.EXPLICIT_FAIL)
            if isinstance(said, BaseException):
                raise said
            return Answer(outcome=said)

        return call

    def flow(self) -> Flow[Any]:
        rails = {"charge": "card", "ship": "shop", "refund": "card"}
        options = {"retry": SOON, "book": book, "rails": rails, **self.flow_options}
        return Flow(
            machine=MACHINE,
            body=Order,
            actions={name: self.action(name) for name in ("charge", "ship", "refund")},
            cancels={name: self.cancel(name) for name in ("charge", "ship")},
            choose=choose,
            **options,
        )


def waits(record: Record) -> bool:
    """Whether nobody drives it, and nobody looks at it before its alarm (five minutes) would ring."""
    return record.worker == "" and record.due_us is not None and abs(record.due_us - record.since_us - 300e6) < 5e6


@dataclass(frozen=True)
class Program:
    """One process: an engine on a database, and what goes with it."""

    engine: Engine
    ledger: Ledger

    @property
    def people(self) -> Operators:
        return Operators(self.engine)

    async def order(self, id: str | None = None, **body: Any) -> Record:
        """Start an order; nobody drives it yet."""
        return (await self.engine.start("orders", Order(**body), id=id, owner="alice")).record

    async def now(self, record: Record, seconds: float = PATIENCE_S) -> Record:
        return await self.engine.process_now(record, seconds)

    async def at(self, record: Record) -> Record:
        """Where a record is by now."""
        found = await self.engine.store.read.records.by_number(record.number)
        assert found is not None
        return found

    async def path(self, record: Record) -> list[str]:
        history = await self.engine.store.read.records.history(record.number)
        assert [t.version for t in history] == list(range(1, len(history) + 1)), "every transition once, in order"
        return [f"{t.source}-{t.event}>{t.target}" for t in history]

    async def until(self, record: Record, *states: str) -> Record:
        """Wait until it is in one of these states."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                found = await self.at(record)
                if found.state in states:
                    return found
                await asyncio.sleep(0.005)

    async def reasons(self) -> list[tuple[str, str]]:
        """Open alerts: severity and reason."""
        return [(alert.severity, alert.reason) for alert in await self.engine.store.read.alerts.open()]

    async def balances(self) -> list[int]:
        """alice, in transit, bob."""
        return [(await self.ledger.balance(path, "USDT")).minor for path in ("alice", TRANSIT, "bob")]


@contextlib.asynccontextmanager
async def program(
    place: Place, world: World, *, worker: str = "local", lease_s: float = 30.0, ports: Ports | None = None
) -> AsyncIterator[Program]:
    """A program that knows the toy flow. Several at once on one place are several processes at once."""
    async with place.bursar(ports) as bursar:
        await bursar.ledger.create_account(TRANSIT, policy=SystemAccount())  # once, however often it is asked for
        engine = Engine(bursar.store, bursar.ledger.writer, [world.flow()], worker=worker, lease_s=lease_s)
        try:
            yield Program(engine, bursar.ledger)
        finally:
            await engine.finish(0)
