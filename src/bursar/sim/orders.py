"""What the engine scenario drives and judges: a flow with bookings, a rail that breaks, and what must be true of both.

An order charges a card, has something shipped, and refunds if the shop refuses. If the shop can't find it, the order
waits until a searcher proves that it is lost (S44). The ledger books the amount into transit, and from there to the
shop or back. Some orders set their money aside when they start, in a hold of their own:
charged, it is paid into transit; refused, it is given back (W34). The rail is idempotent: it remembers, per operation,
what it answered. What it can't do is answer reliably: requests and replies get lost, some are slow, some happen long
after their caller has given up. The shop's side signs, and so does a refund: operators pause and halt both (switches).

Some orders are approved first, and lapse if that takes too long: a timer. What is shipped waits for the word that it
was delivered: a courier's signal, which may come long before, or that of a parcel, a record of another flow that the
order starts. Customers send signals of their own: `RECALL`, which only an order that waits for delivery consumes, and
`RUSH`, which changes the body and nothing else.

`OrderOracle` knows what must be true of orders after every commit: entries exactly where a transition asks for them,
and in transit exactly what records say.
"""

from __future__ import annotations

import random
import sqlite3
from collections import defaultdict
from collections.abc import Awaitable, Callable
from contextvars import Context
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import msgspec

from bursar.engine import Answer, Booking, Flow, FlowRecord, NewRecord, RecordSignal, holds
from bursar.engine.holds import Held
from bursar.model.accounts import HELD
from bursar.model.entries import EntryKind, Intent, Leg
from bursar.model.flow_rows import (
    Claim,
    Form,
    GiveBack,
    Next,
    Put,
    Release,
    Reserve,
    RowKind,
    RowOperation,
    numbered,
)
from bursar.model.machine import Arrow, Effect, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.proof import Proof, ProofKind, proof_in
from bursar.model.records import Priority, owner_name
from bursar.model.retry import Retry
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.records import RecordOracle
from bursar.store.sqlite.calls import amount_out

if TYPE_CHECKING:
    from bursar.sim.kernel import Kernel
    from bursar.sim.process import Process

TRANSIT: Final = "transit:orders"
SHOP: Final = "shop"
SCOPE: Final = "orders"
RETRY: Final = Retry(first_s=0.05, cap_s=1.0)
CALL_TIMEOUT_S: Final = 2.0
INVOICE: Final = RowKind("invoice", Form.SEQUENCE)  # a number for each order that was charged
EXPOSURE: Final = RowKind("exposure", Form.AMOUNT)  # what is charged and neither shipped nor given back
RECEIPT: Final = RowKind("receipt", Form.UNIQUE, releasable=True)
NOTE: Final = RowKind("note", Form.VALUE)
FIRST_INVOICE: Final = 100
EXPOSURE_MAX: Final = 10**12
SIGNALS: Final = ("APPROVE", "DELIVERED", "RECALL", "LOST")
EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
LATE_S_MAX: Final = 4.0  # after its caller has given up
ENDS: Final[dict[str, list[list[Outcome | None]]]] = {  # what the rail must have said to charge, ship and refund
    "DONE": [[Outcome.SUCCESS, Outcome.SUCCESS, None]],
    "RECALLED": [[Outcome.SUCCESS, Outcome.SUCCESS, None]],
    "LAPSED": [[None, None, None]],
    "FAILED": [[Outcome.EXPLICIT_FAIL, None, None], [Outcome.SUCCESS, Outcome.EXPLICIT_FAIL, Outcome.SUCCESS]],
}
RAILS: Final = {"charge": "card", "ship": "shop", "refund": "card"}
PEER: Final = "rail:orders"  # of high-water marks
LOST: Final = Proof(kind=ProofKind.DEAD, facts={"found": "nowhere"})
REFUSED_SHARE: Final = {"charge": 0.15, "ship": 0.25}

MACHINE: Final = Machine(
    name="orders",
    initial="NEW",
    events=("GO", "ASK", "APPROVE", "EXPIRED", "NEXT", "DELIVERED", "RECALL", "MISSING", "LOST"),
    states=(
        State("NEW", Kind.AUTOMATIC),
        State("ASKING", Kind.WAIT, awaits="approver", timeout_event="EXPIRED"),
        State("LAPSED", Kind.TERMINAL),
        State("CHARGING", Kind.CALL, action="charge", effect=Effect.SEND),
        State("CHARGED", Kind.AUTOMATIC, in_flight=True),
        State("SHIPPING", Kind.CALL, action="ship", in_flight=True, effect=Effect.SIGN | Effect.SEND),
        State("SEARCHING", Kind.WAIT, awaits="searcher", in_flight=True),
        State("DELIVERING", Kind.WAIT, awaits="courier"),
        State("DONE", Kind.TERMINAL),
        State("RECALLED", Kind.TERMINAL),
        State(
            "REFUNDING",
            Kind.CALL,
            action="refund",
            in_flight=True,
            compensating=True,
            effect=Effect.SIGN | Effect.RETURN,
        ),
        State("FAILED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("NEW", "GO", "CHARGING"),
        Arrow("NEW", "ASK", "ASKING"),
        Arrow("ASKING", "APPROVE", "CHARGING"),
        Arrow("ASKING", "EXPIRED", "LAPSED"),
        Arrow("CHARGING", Outcome.SUCCESS, "CHARGED"),
        Arrow("CHARGING", Outcome.EXPLICIT_FAIL, "FAILED"),
        Arrow("CHARGED", "NEXT", "SHIPPING"),
        Arrow("SHIPPING", Outcome.SUCCESS, "DELIVERING"),
        Arrow("DELIVERING", "DELIVERED", "DONE"),
        Arrow("DELIVERING", "RECALL", "RECALLED"),
        Arrow("SHIPPING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
        Arrow("SHIPPING", "MISSING", "SEARCHING", Outcome.EXPLICIT_FAIL),
        Arrow("SEARCHING", "LOST", "REFUNDING"),
        Arrow("REFUNDING", Outcome.SUCCESS, "FAILED"),
        Arrow("REFUNDING", Outcome.EXPLICIT_FAIL, "REFUNDING"),
    ),
)
PARCELS: Final = Machine(
    name="parcels",
    initial="PACKING",
    states=(State("PACKING", Kind.CALL, action="pack"), State("DONE", Kind.TERMINAL)),
    arrows=(Arrow("PACKING", Outcome.SUCCESS, "DONE"), Arrow("PACKING", Outcome.EXPLICIT_FAIL, "PACKING")),
)


class Order(msgspec.Struct):
    """What is ordered, by whom, for how much."""

    user: str
    minor: int
    held: bool = False  # whether the money is set aside when the order starts
    asks_until_us: int = 0  # whether it is to be approved, and until when
    parcel: bool = False  # whether a record of its own says that it was delivered
    rushed: int = 0  # signals that have changed the body


class Parcel(msgspec.Struct):
    """Something on its way, for an order."""

    order: str


def choose(item: FlowRecord[Order]) -> str:
    """Whether it is to be approved. Pure."""
    return "ASK" if item.body.asks_until_us else "GO"


def timer(item: FlowRecord[Order]) -> datetime:
    """When an order that is not approved lapses. Pure."""
    return EPOCH + timedelta(microseconds=item.body.asks_until_us)


def on_signal(item: FlowRecord[Order], event: str, _evidence: object) -> Order | None:
    """A signal that stays. Pure."""
    return msgspec.structs.replace(item.body, rushed=item.body.rushed + 1) if event == "RUSH" else None


def priority(order: Order) -> Priority:
    """Any. Pure."""
    return Priority(order.minor % 3)


def book_parcel(item: FlowRecord[Parcel], _event: str, answer: Answer) -> Booking:
    """Its end is the order's: both move, or neither does. Pure."""
    delivered = RecordSignal(flow=MACHINE.name, id=item.body.order, event="DELIVERED")
    return Booking(signals=(delivered,) if answer.outcome is Outcome.SUCCESS else ())


def book_start(item: FlowRecord[Order]) -> Booking:
    """Set the money aside, where the order wants it. Pure."""
    return holds.authorize(item, _held(item)) if item.body.held else Booking()


def _held(item: FlowRecord[Order]) -> Held:
    return Held(account=item.body.user, asset="USD", amount=item.body.minor)


def book(item: FlowRecord[Order], _event: str, answer: Answer) -> Booking:
    """Into transit when charged, and from there to the shop or back. Pure."""
    state, user = item.record.state, item.body.user
    if state == "CHARGING" and item.body.held and answer.outcome is not Outcome.SUCCESS:
        return holds.void(item, _held(item))
    if answer.outcome is not Outcome.SUCCESS or MACHINE.state(state).kind is Kind.WAIT:
        return Booking()
    if state == "CHARGING":
        paid = Booking((_intent(item, user, TRANSIT),))
        if item.body.held:
            paid = holds.confirm(item, _held(item), (TRANSIT, item.body.minor), op=state)
        return msgspec.structs.replace(paid, in_flight_account=TRANSIT, clears_in_flight=False, rows=_charged(item))
    paid_out = (_intent(item, TRANSIT, SHOP if state == "SHIPPING" else user),)
    parcel = NewRecord(flow=PARCELS.name, id=f"parcel-{item.id}", body=Parcel(item.id))
    starts = (parcel,) if state == "SHIPPING" and item.body.parcel else ()
    return Booking(paid_out, clears_in_flight=True, rows=_ended(item), starts=starts)


def _charged(item: FlowRecord[Order]) -> tuple[RowOperation, ...]:
    return (
        Next(INVOICE, SHOP, at_least=FIRST_INVOICE),
        Reserve(EXPOSURE, SHOP, item.body.minor, EXPOSURE_MAX),
        Claim(RECEIPT, f"receipt-{item.id}"),
        Put(NOTE, item.id, 0, {"state": "charged"}),
    )


def _ended(item: FlowRecord[Order]) -> tuple[RowOperation, ...]:
    return (
        GiveBack(EXPOSURE, SHOP),
        Release(RECEIPT, f"receipt-{item.id}"),
        Put(NOTE, item.id, 1, {"state": "ended"}),
    )


def _intent(item: FlowRecord[Order], source: str, target: str) -> Intent:
    leg = Leg(source, target, "USD", item.body.minor)
    consume = (item.record.in_flight_posting,) if source == TRANSIT else ()
    key = f"{item.id}:{item.record.state}"
    return Intent(scope=SCOPE, key=key, legs=(leg,), kind=EntryKind.RETURN, consume=consume)


class Rail:
    """The other side. It outlives every process that calls it."""

    def __init__(self, kernel: Kernel, dice: random.Random) -> None:
        self._kernel = kernel
        self._dice = dice
        self.trouble = 0.35  # of the calls
        self.answers: dict[tuple[str, str], Outcome] = {}
        self.effects: list[tuple[str, str]] = []
        self.calls = 0
        self.on_call: Callable[[str, str], None] = lambda _id, _op: None  # who judges each call, as it begins

    def flow(self, process: Process) -> Flow[Order]:
        """The flow, as one process drives it."""
        return Flow(
            machine=MACHINE,
            body=Order,
            actions={name: self._action(process, name) for name in ("charge", "ship", "refund")},
            book=book,
            book_start=book_start,
            rails=RAILS,
            row_kinds=(INVOICE, EXPOSURE, RECEIPT, NOTE),
            choose=choose,
            timer=timer,
            inbox_events=frozenset({"DELIVERED", "RECALL", "RUSH"}),
            on_signal=on_signal,
            priority=priority,
            retry=RETRY,
            call_timeout_s=CALL_TIMEOUT_S,
        )

    def parcels(self, process: Process) -> Flow[Parcel]:
        """The flow that orders start records of."""
        return Flow(
            machine=PARCELS,
            body=Parcel,
            actions={"pack": self._action(process, "pack")},
            book=book_parcel,
            retry=RETRY,
            call_timeout_s=CALL_TIMEOUT_S,
            share=0.5,
        )

    def _action(self, process: Process, name: str) -> Callable[[FlowRecord[Any]], Awaitable[Answer]]:
        async def call(item: FlowRecord[Any]) -> Answer:
            return await self._call(process, item.id, name)

        return call

    async def _call(self, process: Process, id: str, op: str) -> Answer:
        self.calls += 1
        self.on_call(id, op)
        sleep, dice = process.ports.sleep, self._dice
        await sleep(dice.random() * 0.02)
        fault = dice.choice(("request", "reply", "slow", "late", "twice")) if dice.random() < self.trouble else ""
        if fault == "request":
            raise ConnectionResetError("the request is lost")
        if fault == "late":
            delay = CALL_TIMEOUT_S + dice.random() * LATE_S_MAX
            self._kernel.loop.call_later(delay, self.execute, id, op, context=Context())
            await sleep(2 * CALL_TIMEOUT_S)
        outcome = self.execute(id, op)
        if fault == "twice":
            self._kernel.loop.call_later(dice.random(), self.execute, id, op, context=Context())
        if fault == "reply":
            raise ConnectionResetError("the reply is lost")
        await sleep(2 * CALL_TIMEOUT_S if fault == "slow" else dice.random() * 0.02)
        missing = op == "ship" and outcome is Outcome.EXPLICIT_FAIL and int(id, 16) % 2
        at = list(self.answers).index((id, op)) + 1  # in the rail's own log, which outlives every process
        event, evidence = "MISSING" if missing else "", {"rail": op, "at": at}
        return Answer(outcome=outcome, event=event, evidence=evidence, high_water=((PEER, at),))

    def execute(self, id: str, op: str) -> Outcome:
        """Once per operation; asked again, the same answer."""
        known = self.answers.get((id, op))
        if known is None:
            refused = random.Random(f"{self._kernel.seed} {id} {op}").random() < REFUSED_SHARE.get(op, 0.0)
            known = self.answers[id, op] = Outcome.EXPLICIT_FAIL if refused else Outcome.SUCCESS
            if not refused:
                self.effects.append((id, op))
        return known


class OrderOracle(RecordOracle):
    """What must be true of orders."""

    machine = MACHINE

    def __init__(self, connection: sqlite3.Connection, rail: Rail, past: Oracle | None = None) -> None:
        super().__init__(connection, past)
        self._rail = rail
        sql = "SELECT id FROM accounts WHERE path = ?"
        self._transit, self._held = [self.db.execute(sql, (path,)).fetchone()[0] for path in (TRANSIT, HELD)]

    @staticmethod
    def _was_charged(steps: list[tuple[object, ...]]) -> bool:
        return any(step[1:3] == ("CHARGING", "SUCCESS") for step in steps)

    def _own_rows(self, charged: list[tuple[int, str, bool, int]]) -> None:
        """The flow's own rows are those of the orders that were charged (number, id, whether in flight, amount)."""
        sql = "SELECT kind, key, record, state, amount, version FROM flow_rows"
        found = {(kind, key): tuple(row) for kind, key, *row in self.db.execute(sql)}
        wanted: dict[tuple[str, str], tuple[object, ...]] = {}
        for number, id, open_, minor in charged:
            wanted["exposure", f"{SHOP}/{id}"] = (number, *(("held", str(minor), 1) if open_ else ("released", "0", 2)))
            wanted["receipt", f"receipt-{id}"] = (number, *(("held", "0", 1) if open_ else ("released", "0", 2)))
            wanted["note", id] = (number, "value", "0", 1 if open_ else 2)
        if charged:
            total = sum(minor for _, _, _, minor in charged)
            count = len(charged)
            ended = sum(not open_ for _, _, open_, _ in charged)
            wanted["exposure", SHOP] = (0, "total", str(total), count + ended)
            wanted["invoice", SHOP] = (0, "sequence", str(FIRST_INVOICE + count), count)
            taken = {key: row for (kind, key), row in found.items() if kind == "invoice" and key != SHOP}
            numbers = [numbered(SHOP, FIRST_INVOICE + place) for place in range(count)]
            if sorted(taken) != numbers or sorted(str(row[0]) for row in taken.values()) != sorted(
                str(number) for number, *_ in charged
            ):
                raise Violation(f"I7: numbers {sorted(taken)} for {count} orders that were charged")
            found = {place: row for place, row in found.items() if place[0] != "invoice" or place[1] == SHOP}
        if found != wanted:
            wrong = sorted(place for place in found.keys() | wanted.keys() if found.get(place) != wanted.get(place))
            raise Violation(
                f"I7: the rows {wrong} are {[found.get(p) for p in wrong]}, not {[wanted.get(p) for p in wrong]}"
            )

    def records(self) -> None:
        """Every record is where its history says, and its money is where it says."""
        read = self.db.execute
        sql = "SELECT number, id, state, version, transit, body FROM records WHERE flow = 'orders' ORDER BY number"
        rows = read(sql).fetchall()
        steps = self.steps()
        self._signals(steps)
        booked: set[str] = set()
        in_transit: dict[int, int] = {}
        held: dict[str, tuple[int, int]] = {}
        for number, id, state, version, transit, body in rows:
            self.legal(number, id, steps[number], state, version)
            booked |= {f"{id}:{s}" for _, s, event, target in steps[number] if event == "SUCCESS" and s != target}
            order = msgspec.json.decode(body, type=Order)
            if order.held:
                booked.add(f"{id}:hold")
                booked |= {f"{id}:void" for _, s, e, _ in steps[number] if (s, e) == ("CHARGING", "EXPLICIT_FAIL")}
            is_held = order.held and state == "CHARGING"
            if (MACHINE.state(state).in_flight or is_held) != (transit != 0):
                raise Violation(f"I4: order {id} is {state} and owns posting {transit}")
            if is_held:
                held[owner_name(SCOPE, id)] = (transit, order.minor)
            elif transit:
                in_transit[transit] = order.minor
        made = {row[3] for row in self.envelopes.values() if row[2] == SCOPE}
        if made != booked:
            raise Violation(f"booked without its transition, or not booked with it: {sorted(made ^ booked)}")
        live = {n: p.amount for n, p in self._values.items() if p.account == self._transit and n not in self.spent}
        if live != in_transit:
            raise Violation(f"I4: in transit are {live}, records say {in_transit}")
        charged = [row for row in rows if self._was_charged(steps[row[0]])]
        (relied_on,) = read("SELECT coalesce(max(evidence ->> '$.at'), 0) FROM transitions").fetchone()
        (mark,) = read("SELECT coalesce(max(sequence), 0) FROM core_high_water WHERE rail = ?", (PEER,)).fetchone()
        if mark != relied_on:
            raise Violation(f"W33: the history relies on {relied_on} of the rail's log, the mark is {mark}")
        lost = read("SELECT evidence FROM transitions WHERE event = 'LOST'").fetchall()
        if unproved := [evidence for (evidence,) in lost if proof_in(evidence) != LOST]:
            raise Violation(f"S44: money is given back for {unproved}")
        self._own_rows([(number, id, p in in_transit, in_transit.get(p, 0)) for number, id, _, _, p, _ in charged])
        rows = read("SELECT owner, posting, remaining FROM holds WHERE state = 'open'").fetchall()
        there = {owner: (posting, amount_out(remaining)) for owner, posting, remaining in rows}
        kept = {n: p.amount for n, p in self._values.items() if p.account == self._held and n not in self.spent}
        if there != held or kept != dict(held.values()):
            raise Violation(f"W34: held are {kept} for {there}, records say {held}")

    def _signals(self, steps: dict[int, list[tuple[object, ...]]]) -> None:
        """Each signal is consumed once at most; none that is awaited is left; no timer has fired before its time."""
        read = self.db.execute
        sent: dict[int, list[tuple[Any, ...]]] = defaultdict(list)
        for record, sender, event, arrived, consumed in read(
            "SELECT record, sender, event, arrived, consumed FROM signals ORDER BY record, arrived"
        ):
            sent[record].append((sender, event, arrived, consumed))
        parcels = dict(read("SELECT id, state FROM records WHERE flow = 'parcels'").fetchall())
        rests = "worker = '' AND (due IS NULL OR due > updated_at)"
        sql = f"SELECT number, id, state, {rests}, inbox, body FROM records WHERE flow = 'orders'"
        for number, id, state, rests, inbox, body in read(sql):
            signals, history = sent[number], {step[0]: step[2] for step in steps[number]}
            left = [event for _, event, _, consumed in signals if consumed is None]
            used = [(consumed, event) for _, event, _, consumed in signals if consumed is not None]
            if len(left) != inbox or len(dict(used)) != len(used):
                raise Violation(f"order {id} counts {inbox} signals in its inbox: {signals}")
            moved = {(version, event) for version, event in history.items() if event in SIGNALS}
            # No state waits for RUSH: it is consumed by what its arrival does to the body.
            moved |= {(version, "RUSH") for version, event in history.items() if event == "SIGNAL RUSH"}
            if moved != set(used):
                raise Violation(f"order {id} has consumed {used}, its history says {history}")
            if any(history.get(at) not in (event, f"SIGNAL {event}") for _, event, at, _ in signals):
                raise Violation(f"the signals {signals} of order {id} are not in its history {history}")
            if rests and {arrow.event for arrow in MACHINE.arrows_from(state)} & set(left):
                raise Violation(f"order {id} rests in {state}, and in its inbox are {left}")
            order = msgspec.json.decode(body, type=Order)
            rushes = [event for _, event in used].count("RUSH")
            if order.rushed != rushes:
                raise Violation(f"order {id} was rushed {order.rushed} times by {rushes} signals")
            shipped = any(step[1:3] == ("SHIPPING", "SUCCESS") for step in steps[number])
            if (f"parcel-{id}" in parcels) != (order.parcel and shipped):
                raise Violation(f"order {id} has a parcel, and was not shipped, or the other way round")
            if (parcels.get(f"parcel-{id}") == "DONE") != any(sender.startswith("parcels/") for sender, *_ in signals):
                raise Violation(f"the parcel of order {id} is delivered, and the order does not know, or vice versa")
            if "EXPIRED" in history.values() and self.latest_us < order.asks_until_us:
                raise Violation(f"order {id} lapsed at {self.latest_us}, before {order.asks_until_us}")

    def waiting(self) -> list[str]:
        """Orders that wait for the searcher."""
        return [id for (id,) in self.db.execute("SELECT id FROM records WHERE state = 'SEARCHING' ORDER BY number")]

    def ended(self) -> None:
        """Every order has ended, and that end is what the rail did."""
        done = self._rail.answers
        for id, state, due in self.db.execute("SELECT id, state, due FROM records WHERE flow = 'orders'"):
            said = [done.get((id, op)) for op in ("charge", "ship", "refund")]
            if due is not None or said not in ENDS.get(state, []):
                raise Violation(f"order {id} is {state}, due {due}; the rail said {said}")
        if len(set(self._rail.effects)) != len(self._rail.effects):
            raise Violation("I7: something happened twice at the rail")
        alerts = self.db.execute("SELECT reason, message FROM alerts WHERE severity = 'critical'").fetchall()
        if alerts:
            raise Violation(f"critical alerts: {alerts}")
