"""A toy flow with timers, signals and priorities: a payout that is approved in time, sent, and settled by the bank.

The approval has the expiry that the body names; the settlement times out an hour after it began to wait, and is chased.
`SETTLED` and `CANCEL` may come before the payout waits for them, `BUMP` only changes the fee that the next call offers.
Whatever ends a wait for good books one unit from the bank to bob: bob's balance says how often that happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

import asyncpg
import msgspec
from tests.builders import BANK, Place

from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, Worker
from bursar.model.entries import Intent, Leg
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Priority, Record
from bursar.model.retry import Retry
from bursar.ports import Ports

PATIENCE_S = 10.0
HOUR_S = 3_600

MACHINE = Machine(
    name="payouts",
    initial="APPROVING",
    events=("APPROVE", "EXPIRED", "SETTLED", "CANCEL", "LATE"),
    states=(
        State("APPROVING", Kind.WAIT, awaits="approver", timeout_event="EXPIRED"),
        State("SENDING", Kind.CALL, action="send"),
        State("SETTLING", Kind.WAIT, awaits="bank", timeout_event="LATE", timeout_s=HOUR_S),
        State("CHASING", Kind.CALL, action="chase"),
        State("DONE", Kind.TERMINAL),
        State("GONE", Kind.TERMINAL),
    ),
    arrows=(
        Arrow("APPROVING", "APPROVE", "SENDING"),
        Arrow("APPROVING", "CANCEL", "GONE"),
        Arrow("APPROVING", "EXPIRED", "GONE"),
        Arrow("SENDING", Outcome.SUCCESS, "SETTLING"),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "GONE"),
        Arrow("SETTLING", "SETTLED", "DONE"),
        Arrow("SETTLING", "CANCEL", "GONE"),
        Arrow("SETTLING", "LATE", "CHASING"),
        Arrow("CHASING", Outcome.SUCCESS, "SETTLING"),
        Arrow("CHASING", Outcome.EXPLICIT_FAIL, "GONE"),
    ),
)


class Payout(msgspec.Struct):
    expires: datetime | None = None
    fee: int = 1
    bumps: int = 0
    cancelled: bool = False
    priority: Priority = Priority.NORMAL


def in_s(seconds: float) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=seconds)


def book(item: FlowRecord[Payout], event: str, _answer: Answer) -> Booking:
    """What ends a wait moves one unit, under a key of the record and the event: it can't be booked twice."""
    if event not in ("SETTLED", "EXPIRED", "CANCEL"):
        return Booking()
    leg = Leg(BANK, "bob", "USDT", 1)
    return Booking((Intent(scope="payouts", key=f"{item.id}:{event}", legs=(leg,)),))


def on_signal(item: FlowRecord[Payout], event: str, evidence: dict[str, Any]) -> Payout | None:
    if event == "BUMP":
        return msgspec.structs.replace(item.body, fee=evidence["fee"], bumps=item.body.bumps + 1)
    return msgspec.structs.replace(item.body, cancelled=True) if event == "CANCEL" else None


class Bank:
    """The other side: what it was offered, and what it says; SUCCESS unless it is scripted."""

    def __init__(self, **says: list[Any]) -> None:
        self.says = says
        self.offers: list[tuple[str, str, int, bool]] = []  # id, action, fee, whether the body says "cancelled"
        self.hangs: asyncio.Event | None = None
        self.called = asyncio.Event()
        self.options: dict[str, Any] = {}

    def flow(self) -> Flow[Payout]:
        def action(name: str) -> Any:
            async def call(item: FlowRecord[Payout]) -> Answer:
                self.offers.append((item.id, name, item.body.fee, item.body.cancelled))
                self.called.set()
                if self.hangs is not None:
                    await self.hangs.wait()
                script = self.says.get(name, [])
                return Answer(outcome=script.pop(0) if script else Outcome.SUCCESS)

            return call

        usual: dict[str, Any] = {
            "alarms": (),
            "retry": Retry(first_s=0.001, cap_s=0.002),
            "rails": {"send": "bank", "chase": "bank"},
        }
        return Flow(
            machine=MACHINE,
            body=Payout,
            actions={name: action(name) for name in ("send", "chase")},
            book=book,
            timer=lambda item: item.body.expires,
            inbox_events=frozenset({"SETTLED", "CANCEL", "BUMP"}),
            on_signal=on_signal,
            priority=lambda body: body.priority,
            **(usual | self.options),
        )


@contextlib.asynccontextmanager
async def program(
    place: Place, bank: Bank, *, worker: str = "local", lease_s: float = 30.0, ports: Ports | None = None
) -> AsyncIterator[Engine]:
    async with place.bursar(ports) as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, [bank.flow()], worker=worker, lease_s=lease_s)
        try:
            yield engine
        finally:
            await engine.finish(0)


async def start(engine: Engine, id: str = "p-1", **body: Any) -> Record:
    return (await engine.start("payouts", Payout(**body), id=id)).record


async def at(engine: Engine, id: str = "p-1") -> Record:
    found = await engine.get("payouts", id)
    assert found is not None
    return found


async def path(engine: Engine, id: str = "p-1") -> list[str]:
    history = await engine.store.read.records.history((await at(engine, id)).number)
    assert [t.version for t in history] == list(range(1, len(history) + 1)), "every transition once, in order"
    return [t.event for t in history]


async def look(*engines: Engine) -> None:
    """A new worker in each process looks at what was left, then for what is due; and all that follows from it."""

    async def both(worker: Worker) -> None:
        await worker.look()
        await worker.look()

    await asyncio.gather(*(both(Worker(engine)) for engine in engines))
    await asyncio.gather(*(engine.finish(PATIENCE_S) for engine in engines))


async def until(engine: Engine, state: str, id: str = "p-1") -> Record:
    async with asyncio.timeout(PATIENCE_S):
        while (found := await at(engine, id)).state != state:
            await look(engine)
    return found


async def time_passes(place: Place) -> None:
    """All timers have come. On PostgreSQL a test can't move the clock: it moves the timers."""
    past = "to_timestamp(1)" if place.engine == "postgres" else "1"
    await behind(place, f"UPDATE {{s}}records SET timer = {past} WHERE timer IS NOT NULL")


async def behind(place: Place, sql: str) -> None:
    """Change rows behind the program's back; `{s}` is the schema."""
    if place.engine == "postgres":
        connection = await asyncpg.connect(place.url)
        try:
            await connection.execute(sql.replace("{s}", "bursar."))
        finally:
            await connection.close()
        return
    with contextlib.closing(sqlite3.connect(place.path, timeout=20, isolation_level=None)) as file:
        file.execute(sql.replace("{s}", ""))
