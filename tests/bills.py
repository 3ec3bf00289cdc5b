"""A toy flow that uses every form of rows of its own.

A bill takes a number, reserves its amount under the wallet's bound, claims its reference for ever and its seat until it
ends, and keeps a list of its attempts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from tests.builders import Place

from bursar.audit import audit
from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, Worker
from bursar.model.flow_rows import Claim, Form, GiveBack, Next, Put, Release, Reserve, RowKind
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.ports import Ports

NUMBER = RowKind("number", Form.SEQUENCE)
RESERVED = RowKind("reserved", Form.AMOUNT)
REFERENCE = RowKind("reference", Form.UNIQUE)
SEAT = RowKind("seat", Form.UNIQUE, releasable=True)
ATTEMPT = RowKind("attempt", Form.VALUE)
KINDS = (NUMBER, RESERVED, REFERENCE, SEAT, ATTEMPT)
BOUND = 100

MACHINE = Machine(
    name="bills",
    initial="PAYING",
    states=(
        State("PAYING", Kind.CALL, action="pay"),
        State("FILING", Kind.CALL, action="file"),
        State("PAID", Kind.TERMINAL),
        State("REFUSED", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("PAYING", Outcome.SUCCESS, "FILING"),
        Arrow("PAYING", Outcome.EXPLICIT_FAIL, "REFUSED"),
        Arrow("FILING", Outcome.SUCCESS, "PAID"),
        Arrow("FILING", Outcome.EXPLICIT_FAIL, "FILING"),
    ),
)


class Bill(msgspec.Struct):
    reference: str
    amount: int = 10
    seat: str = "1A"


def book_start(item: FlowRecord[Bill]) -> Booking:
    reserve = Reserve(RESERVED, "wallet", item.body.amount, BOUND)
    return Booking(rows=(Claim(REFERENCE, item.body.reference), reserve, Next(NUMBER, "wallet", at_least=5)))


def book(item: FlowRecord[Bill], _event: str, answer: Answer) -> Booking:
    ends = GiveBack(RESERVED, "wallet")
    if item.record.state == "FILING":
        return Booking(rows=(ends, Release(SEAT, item.body.seat), Put(ATTEMPT, item.id, 2, {"filed": True})))
    if answer.outcome is Outcome.EXPLICIT_FAIL:
        return Booking(rows=(ends,))
    taken = Claim(SEAT, item.body.seat, {"for": item.id})
    return Booking(rows=(taken,), refused={"ROW_TAKEN": Outcome.EXPLICIT_FAIL})


async def pay(item: FlowRecord[Bill]) -> Answer:
    if item.record.attempt == 0:  # a first call without an answer, of which a list keeps a note
        return Answer(outcome=Outcome.PENDING, rows=(Put(ATTEMPT, item.id, 0, {"paid": False}),))
    return Answer(outcome=Outcome.SUCCESS, rows=(Put(ATTEMPT, item.id, 1, {"paid": True}),))


async def file(_item: FlowRecord[Bill]) -> Answer:
    return Answer(outcome=Outcome.SUCCESS)


FLOW = Flow(
    machine=MACHINE,
    body=Bill,
    actions={"pay": pay, "file": file},
    book=book,
    book_start=book_start,
    row_kinds=KINDS,
    retry=Retry(first_s=0.001, cap_s=0.002),
)


@contextlib.asynccontextmanager
async def program(place: Place, ports: Ports | None = None, worker: str = "local") -> AsyncIterator[Engine]:
    async with place.bursar(ports) as bursar:
        engine = Engine(bursar.store, bursar.ledger.writer, [FLOW], worker=worker)
        try:
            yield engine
        finally:
            await engine.finish(0)


async def bill(engine: Engine, id: str, **body: Any) -> Record:
    return (await engine.start("bills", Bill(**({"reference": id} | body)), id=id)).record


async def ended(engine: Engine, record: Record) -> Record:
    async with asyncio.timeout(30):
        while record.state not in ("PAID", "REFUSED"):
            record = await engine.process_now(record, 10)
            await Worker(engine).look()
    return record


async def rows(engine: Engine, kind: RowKind) -> dict[str, tuple[int, str, int]]:
    found = await engine.store.read.flow_rows.by_prefix("bills", kind.name, limit=1000)
    return {row.key: (row.record, row.state.value, row.amount) for row in found}


async def sound(engine: Engine) -> None:
    for finding in await audit(engine.store):
        assert finding.ok, finding
