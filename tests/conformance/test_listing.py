"""Lists and counts of records: the database filters, along an index, and looks at no more rows than it may."""

from __future__ import annotations

import contextlib
import random
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.builders import Place, scenario

from bursar.flows.transfers import AccountType, Filter, Limits, Transfers
from bursar.model.records import Record
from bursar.store.postgres import schema
from bursar.store.postgres.arrays import SQL as POSTGRES_SQL
from bursar.store.postgres.connecting import SETTINGS
from bursar.store.protocol import Store
from bursar.store.records import NEWEST, Wanted
from bursar.store.sqlite import store as sqlite_store
from bursar.store.sqlite.calls import SQL as SQLITE_SQL

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ENDS = ("COMMITTED", "FAILED", "ROLLED_BACK")
STATES = ("INIT", "SOURCE_PENDING", "TARGET_PENDING", *ENDS)
ASSETS = ("USDT", "BTC")
COLUMNS = (
    "number, flow, id, owner, state, version, attempt, transit, due, worker, body, error, since, created_at, updated_at"
)


def row(number: int, chance: random.Random, **said: Any) -> dict[str, Any]:
    """A record as it may stand there."""
    state = said.pop("state", chance.choice(STATES))
    ends = list(chance.sample(["FUNDING", "SPOT", "FUTURE"], 2))
    user = chance.choice([1, 2, 3])
    body = {"user": user, "source": ends[0], "target": ends[1], "asset": chance.choice(ASSETS), "asset_id": 1}
    usual = {
        "number": number,
        "flow": "transfers",
        "owner": str(user),
        "state": state,
        "due": None if state in ENDS else chance.randrange(10**6),
        "body": msgspec.json.encode(body | {"amount": "5"}).decode(),
        "created": 1_000_000 + chance.randrange(1_000),
    }
    return usual | said


async def put(place: Place, rows: list[dict[str, Any]]) -> None:
    """Write them behind the program's back."""
    if place.engine == "sqlite":
        values = [
            (r["number"], r["flow"], f"sr-{r['number']}", r["owner"], r["state"], 1, 0, 0, r["due"], "", r["body"], "",
             r["created"], r["created"], r["created"])
            for r in rows
        ]  # fmt: skip
        with contextlib.closing(sqlite3.connect(place.path)) as file:
            file.executemany(f"INSERT INTO records ({COLUMNS}) VALUES ({', '.join('?' * 15)})", values)
            file.commit()
        return
    moment = "'epoch'::timestamptz + {} * interval '1 microsecond'"
    times = f"{moment.format('$7::bigint')}, {moment.format('$7')}, {moment.format('$7')}"
    server = await asyncpg.connect(place.url)
    try:
        await server.executemany(
            f"INSERT INTO bursar.records ({COLUMNS}) VALUES "
            f"($1, $2, 'sr-' || $1::bigint, $3, $4, 1, 0, 0, {moment.format('$5::bigint')}, '', $6, '', {times})",
            [(r["number"], r["flow"], r["owner"], r["state"], r["due"], r["body"], r["created"]) for r in rows],
        )
        await server.execute("ANALYZE bursar.records")
    finally:
        await server.close()


def fits(wanted: Wanted) -> Callable[[dict[str, Any]], bool]:
    def check(r: dict[str, Any]) -> bool:
        said = msgspec.json.decode(r["body"])
        return (
            r["flow"] == "transfers"
            and wanted.owner in ("", r["owner"])
            and (not wanted.states or r["state"] in wanted.states)
            and all(said.get(name) == value for name, value in wanted.facts.items())
            and wanted.since_us <= r["created"] < wanted.until_us
        )

    return check


async def walked(store: Store, wanted: Wanted, limit: int, looked_max: int) -> tuple[list[Record], int]:
    """All pages, one after the other, and how many."""
    found: list[Record] = []
    before, pages = NEWEST, 0
    while before:
        page, before = await store.read.records.page(
            "transfers", wanted, before=before, limit=limit, looked_max=looked_max
        )
        assert len(page) <= limit
        found += page
        pages += 1
    return found, pages


@scenario
async def test_pages_are_what_a_filter_in_the_program_would_give(place: Place) -> None:
    """Every filter, alone and with others, page by page, however few rows a page may look at."""
    chance = random.Random(7)
    rows = [row(n, chance) for n in range(1, 201)]
    rows += [row(n, chance, flow="others") for n in range(201, 221)]
    rows += [row(n, chance, state="INIT", due=None) for n in range(221, 226)]  # open, and nobody drives them
    async with place.bursar() as bursar:
        await put(place, rows)
        for _ in range(80):
            facts = {"asset": chance.choice(ASSETS), "source": "FUNDING", "target": "SPOT"}
            spans = [(0, NEWEST), (1_000_300, NEWEST), (0, 1_000_700), (1_000_300, 1_000_700)]
            since_us, until_us = chance.choice(spans)
            wanted = Wanted(
                owner=chance.choice(["", "1", "2", "nobody"]),
                states=chance.choice([(), ("COMMITTED",), ("FAILED",), STATES[:3], ("INIT",)]),
                facts={name: facts[name] for name in chance.sample(sorted(facts), chance.randrange(3))},
                since_us=since_us,
                until_us=until_us,
            )
            found, _ = await walked(bursar.store, wanted, chance.choice([1, 7, 500]), chance.choice([3, 50, 10_000]))
            should = sorted((r["number"] for r in rows if fits(wanted)(r)), reverse=True)
            assert [record.number for record in found] == should, wanted


@scenario
async def test_a_page_looks_at_no_more_rows_than_it_may(place: Place) -> None:
    chance = random.Random(8)
    rows = [row(n, chance, state="COMMITTED", owner="1") for n in range(1, 101)]
    rows[0]["body"] = rows[0]["body"].replace("USDT", "RARE").replace("BTC", "RARE")
    async with place.bursar() as bursar:
        await put(place, rows)
        for owner, states in (("1", ()), ("", ("COMMITTED",)), ("", ())):
            wanted = Wanted(owner=owner, states=states, facts={"asset": "RARE"})
            first, below = await bursar.store.read.records.page("transfers", wanted, limit=10, looked_max=25)
            assert (first, below) == ([], 76)
            found, pages = await walked(bursar.store, wanted, 10, 25)
            assert ([record.number for record in found], pages) == ([1], 5)


@scenario
async def test_a_cursor_neither_skips_nor_repeats_while_others_write(place: Place) -> None:
    chance = random.Random(9)
    async with place.bursar() as bursar:
        await put(place, [row(n, chance, owner="1") for n in range(1, 41)])
        records = bursar.store.read.records
        found, before, newest = [], NEWEST, 40
        while before:
            page, before = await records.page("transfers", Wanted(owner="1"), before=before, limit=7)
            found += [record.number for record in page]
            newest += 1
            await put(place, [row(newest, chance, owner="1")])
        assert found == list(range(40, 0, -1))


@scenario
async def test_counts_know_what_has_not_ended_and_nothing_else(place: Place) -> None:
    chance = random.Random(10)
    rows = [row(n, chance) for n in range(1, 101)]
    rows += [row(n, chance, flow="deposits", state="ASKED", due=None) for n in range(101, 104)]
    rows += [row(n, chance, flow="deposits", state="ASKED") for n in range(104, 106)]
    waiting = [("deposits", "ASKED"), *(("transfers", state) for state in STATES[:3])]
    async with place.bursar() as bursar:
        await put(place, rows)
        counts = await bursar.store.read.records.open_counts(waiting)
        everything = await bursar.store.read.records.counts()
    assert counts == {key: counted for key, counted in everything.items() if key[1] not in ENDS}
    assert counts["deposits", "ASKED"][0] == 5
    assert len(counts) == 4


@scenario
async def test_views_of_a_page_cost_no_call_each_and_an_unreadable_one_hides_no_other(place: Place) -> None:
    chance = random.Random(11)
    rows = [row(n, chance, owner="1") for n in range(1, 61)]
    broken = rows[30]["number"]
    rows[30]["body"] = '{"asset": 5}' if place.engine == "postgres" else "{broken"
    async with place.bursar() as bursar:
        await put(place, rows)
        transfers = Transfers(bursar.ledger, {}, limits=Limits())
        session: Any = bursar.store.read.records._s
        real, calls = session.rows, []

        async def counted(name: str, *args: Any) -> Any:
            calls.append(name)
            return await real(name, *args)

        session.rows = counted
        for wanted in (Filter(), Filter(asset="BTC"), Filter(source=AccountType.SPOT, state="PENDING")):
            calls.clear()
            found, below = await transfers.page(1, wanted, limit=100)
            assert len(calls) <= 3, calls
            assert below == 0
            should = [r["number"] for r in rows if r["number"] != broken and fits(wanted.of("1"))(r)]
            assert [view.transfer_id for view in found] == should[::-1]


@pytest.fixture
def empty_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A database with nothing in it."""
    url = request.getfixturevalue("fresh_postgres") if mode == "postgres" else f"sqlite:///{tmp_path}/old.db"
    return Place(mode, str(url))


@scenario
async def test_the_index_of_what_rests_is_made_on_populated_tables(
    empty_place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Given the schema before it, with records in it, then it is brought forward, and the records are found by it."""
    place = empty_place
    chance = random.Random(13)
    with monkeypatch.context() as before:
        for module in (sqlite_store, schema):
            earlier = [one for one in module.MIGRATIONS if one[0] < 5]
            before.setattr(module, "MIGRATIONS", earlier)
            before.setattr(module, "VERSION", earlier[-1][0])
        store = place.store()
        await store.open()
        await store.close()
    await put(place, [row(n, chance, state="FAILED" if n % 2 else "INIT") for n in range(1, 11)])
    store = place.store()
    await store.open(migrate=True)
    try:
        found, _ = await walked(store, Wanted(states=("FAILED",)), 3, 100)
        assert [record.number for record in found] == [9, 7, 5, 3, 1]
    finally:
        await store.close()


# --- along which index ---------------------------------------------------------------------------------------------

FACTS: tuple[Any, ...] = (1, 2_000_000, ["asset"], ["RARE"])
LAST: tuple[Any, ...] = (17_000, 19_000, 51)  # as the floor says: few of all
# statement, arguments, the index, on SQLite and on PostgreSQL
PLANS: list[tuple[str, tuple[Any, ...], str, str]] = [
    ("list_records", ("transfers", [], *FACTS, *LAST), "INTEGER PRIMARY KEY", "records_pkey"),
    ("list_records_of", ("transfers", "7", [], *FACTS, *LAST), "records_owner", "records_owner"),
    ("list_records_in", ("transfers", ["FAILED"], *FACTS, *LAST), "records_resting", "records_resting"),
    ("list_records_in", ("transfers", ["INIT"], *FACTS, *LAST), "records_due", "records_due"),
    ("floor_records", (19_000, 9_999), "INTEGER PRIMARY KEY", "records_pkey"),
    ("floor_records_of", ("transfers", "7", 19_000, 9), "COVERING INDEX records_owner", "records_owner"),
    ("floor_records_in", ("transfers", ["FAILED"], 19_000, 9), "records_resting", "records_resting"),
    ("count_driven", (), "records_due", "records_due"),
    ("count_resting", ("transfers", "ASKED"), "records_resting", "records_resting"),
]


@scenario
async def test_every_list_and_count_goes_along_an_index(own_place: Place) -> None:
    """On twenty thousand rows of a hundred users, almost all of which have ended."""
    chance = random.Random(12)
    states = {n: "INIT" if n % 500 == 0 else "FAILED" if n % 500 == 1 else "COMMITTED" for n in range(1, 20_001)}
    rows = [
        row(n, chance, owner=str(n % 100), state=state, due=n if state == "INIT" else None)
        for n, state in states.items()
    ]
    await put(own_place, rows)
    for name, args, sqlite_index, postgres_index in PLANS:
        if own_place.engine == "sqlite":
            plan = sqlite_plan(own_place, name, args)
            assert sqlite_index in plan, (name, plan)
            assert "SCAN records" not in plan.replace("SCAN records USING INDEX records_due", ""), (name, plan)
        else:
            plan = await postgres_plan(own_place, name, args)
            assert postgres_index in plan, (name, plan)
            assert "Seq Scan on records" not in plan, (name, plan)


def sqlite_plan(place: Place, name: str, args: tuple[Any, ...]) -> str:
    plain = [msgspec.json.encode(a).decode() if isinstance(a, list) else a for a in args]
    with contextlib.closing(sqlite3.connect(place.path)) as file:
        rows = file.execute(f"EXPLAIN QUERY PLAN {SQLITE_SQL[name]}", plain).fetchall()
    return "\n".join(row[3] for row in rows)


async def postgres_plan(place: Place, name: str, args: tuple[Any, ...]) -> str:
    server = await asyncpg.connect(place.url, server_settings=SETTINGS)
    try:
        return "\n".join(row[0] for row in await server.fetch(f"EXPLAIN {POSTGRES_SQL[name]}", *args))
    finally:
        await server.close()
