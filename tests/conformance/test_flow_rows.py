"""Rows of a flow's own, written with its records' moves, on every store that has transactions (tests/bills)."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3

import asyncpg
import pytest
from tests.bills import (
    ATTEMPT,
    FLOW,
    MACHINE,
    NUMBER,
    RESERVED,
    SEAT,
    Bill,
    bill,
    book,
    book_start,
    ended,
    program,
    rows,
    sound,
)
from tests.builders import Place, scenario

from bursar.audit import audit
from bursar.engine import Engine, Flow, FlowRefused
from bursar.model.errors import RecordMoved
from bursar.model.flow_rows import BoundExceeded, Form, RowKind, RowTaken, number_of

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@scenario
async def test_rows_are_written_with_the_moves_of_their_record(place: Place) -> None:
    async with program(place) as engine:
        first, second = await bill(engine, "b1"), await bill(engine, "b2", seat="1B")
        assert await rows(engine, RESERVED) == {
            "wallet": (0, "total", 20),
            "wallet/b1": (first.number, "held", 10),
            "wallet/b2": (second.number, "held", 10),
        }
        read = engine.store.read.flow_rows
        (number,) = await read.of_record(second.number, "number")
        assert number_of(number) == 6
        assert [row.kind for row in await read.of_record(second.number)] == ["number", "reference", "reserved"]
        assert await read.of_record(0) == []
        assert (await ended(engine, first)).state == "PAID"
        assert (await ended(engine, second)).state == "PAID"
        assert await rows(engine, RESERVED) == {
            "wallet": (0, "total", 0),
            "wallet/b1": (first.number, "released", 0),
            "wallet/b2": (second.number, "released", 0),
        }
        assert await rows(engine, SEAT) == {"1A": (first.number, "released", 0), "1B": (second.number, "released", 0)}
        row = await read.get("bills", "attempt", "b1")
        assert row is not None
        assert (row.version, row.body, row.record) == (3, '{"filed":true}', first.number)
        await sound(engine)


@scenario
async def test_rows_are_found_by_prefix_page_by_page(place: Place) -> None:
    async with program(place) as engine:
        for id in ("a/1", "a/2", "a/3", "ab", "b%", "bé"):
            await bill(engine, id, amount=1, seat=f"seat {id}")
        read = engine.store.read.flow_rows
        page = await read.by_prefix("bills", "reference", "a/", limit=2)
        assert [row.key for row in page] == ["a/1", "a/2"]
        assert [row.key for row in await read.by_prefix("bills", "reference", "a/", after="a/2")] == ["a/3"]
        assert [row.key for row in await read.by_prefix("bills", "reference", "b")] == ["b%", "bé"]
        assert await read.by_prefix("bills", "reference", "c") == []


@scenario
async def test_a_start_whose_rows_are_refused_leaves_no_trace(place: Place) -> None:
    async with program(place) as engine:
        first = await bill(engine, "b1", amount=95)
        with pytest.raises(BoundExceeded) as caught:
            await bill(engine, "b2", amount=6)
        assert caught.value.facts["reserved"] == 95
        with pytest.raises(RowTaken) as taken:
            await bill(engine, "b3", reference="b1", amount=1)
        assert taken.value.record == first.number
        assert await engine.get("bills", "b2") is None
        assert await engine.get("bills", "b3") is None
        assert len(await rows(engine, NUMBER)) == 2  # the sequence, and one number
        await bill(engine, "b4", amount=5, seat="1B")
        assert await rows(engine, NUMBER) == {
            "wallet": (0, "sequence", 7),
            f"wallet/{5:020}": (first.number, "held", 5),
            f"wallet/{6:020}": ((await engine.get("bills", "b4")).number, "held", 6),  # type: ignore[union-attr]
        }


@scenario
async def test_a_refusal_of_rows_can_be_the_answer_of_a_call(place: Place) -> None:
    """Two bills want one seat: the second is refused, and what it had reserved is given back."""
    async with program(place) as engine:
        first, second = await bill(engine, "b1"), await bill(engine, "b2")
        for _ in range(2):  # calls
            first = await engine.step(first) or first
            second = await engine.step(second) or second
        assert (first.state, second.state) == ("FILING", "REFUSED")
        assert (await rows(engine, RESERVED))["wallet"] == (0, "total", 10)
        assert (await ended(engine, first)).state == "PAID"
        await sound(engine)


@scenario
async def test_many_programs_at_once_take_each_number_once(place: Place) -> None:
    async with program(place, worker="one") as one, program(place, worker="two") as two:
        started = await asyncio.gather(
            *(bill(engine, f"{name}{i}", amount=1) for i in range(20) for engine, name in ((one, "a"), (two, "b")))
        )
        found = await rows(one, NUMBER)
        assert found.pop("wallet") == (0, "sequence", 45)
        assert sorted(amount for _, _, amount in found.values()) == list(range(5, 45))
        assert sorted(record for record, _, _ in found.values()) == sorted(record.number for record in started)
        assert (await rows(two, RESERVED))["wallet"] == (0, "total", 40)
        refused = await asyncio.gather(
            *(bill(engine, f"{name}", amount=35) for engine, name in ((one, "x"), (two, "y"))), return_exceptions=True
        )
        assert sorted(type(one).__name__ for one in refused) == ["BoundExceeded", "Record"]
        claims = await asyncio.gather(
            *(bill(engine, name, amount=1, reference="same") for engine, name in ((one, "p"), (two, "q"))),
            return_exceptions=True,
        )
        assert sorted(type(one).__name__ for one in claims) == ["Record", "RowTaken"]
        await sound(one)


@scenario
async def test_a_lost_compare_and_set_writes_no_rows(place: Place) -> None:
    async with program(place, worker="one") as one, program(place, worker="two") as two:
        record = await bill(one, "b1")
        seen = await two.get("bills", "b1")
        assert seen is not None
        await one.step(record)
        await two.step(seen)  # it answers with the same rows, and has lost: nothing of it is written
        found = await one.get("bills", "b1")
        assert found is not None
        assert found.version == 2
        assert len(await rows(one, ATTEMPT)) == 1
        with pytest.raises(RecordMoved):
            await bill(two, "b1")


@scenario
async def test_the_database_refuses_what_would_lose_a_row(place: Place) -> None:
    async with program(place) as engine:
        await ended(engine, await bill(engine, "b1"))
    damage = (
        "DELETE FROM {s}flow_rows",
        "UPDATE {s}flow_rows SET record = record + 1, version = version + 1 WHERE kind = 'reference'",
        "UPDATE {s}flow_rows SET state = 'released', version = version + 1 WHERE kind = 'reference'",
        "UPDATE {s}flow_rows SET key = 'other', version = version + 1 WHERE kind = 'seat'",
        "UPDATE {s}flow_rows SET amount = 5 WHERE kind = 'number'",
    )
    for sql in damage:
        with pytest.raises((asyncpg.PostgresError, sqlite3.DatabaseError), match="lose what a record has"):
            await execute(place, sql)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (
            "UPDATE {s}flow_rows SET amount = 5, version = 99 WHERE kind = 'number' AND state = 'sequence'",
            "the number 5, and 6 is taken",
        ),
        ("UPDATE {s}flow_rows SET amount = 3, version = 99 WHERE kind = 'reserved' AND state = 'total'", "have 10"),
        ("UPDATE {s}flow_rows SET record = 4711, version = 99 WHERE kind = 'seat'", "does not exist"),
    ],
)
@scenario
async def test_audit_finds_rows_that_do_not_add_up(place: Place, damage: str, told: str) -> None:
    async with program(place) as engine:
        await ended(engine, await bill(engine, "b1"))
        await bill(engine, "b2", seat="2B")
        await sound(engine)
        await execute(place, damage)
        (finding,) = [f for f in await audit(engine.store) if not f.ok]
        assert finding.invariant == "I7"
        assert told in finding.broken[0]


@scenario
async def test_rows_of_a_kind_that_is_not_declared_are_refused(place: Place) -> None:
    async with place.bursar() as bursar:
        bare = Flow(machine=MACHINE, body=Bill, actions=FLOW.actions, book=book, book_start=book_start)
        engine = Engine(bursar.store, bursar.ledger.writer, [bare])
        with pytest.raises(FlowRefused, match="'reference' are not declared"):
            await bill(engine, "b1")
    twice = (NUMBER, RowKind("number", Form.UNIQUE))
    with pytest.raises(FlowRefused, match="one name"):
        Flow(machine=MACHINE, body=Bill, actions=FLOW.actions, row_kinds=twice)


async def execute(place: Place, sql: str) -> None:
    """Change rows by hand, as an operator with a database tool could."""
    if place.mode == "sqlite":
        with contextlib.closing(sqlite3.connect(place.path)) as connection, connection:
            connection.execute(sql.format(s=""))
        return
    connection_ = await asyncpg.connect(place.url)
    try:
        await connection_.execute(sql.format(s="bursar."))
    finally:
        await connection_.close()
