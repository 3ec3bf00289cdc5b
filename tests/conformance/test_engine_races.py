"""Several programs drive the same records at once: a lost compare-and-set means that somebody else did it."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from tests.builders import Place, check_sound, scenario, seed
from tests.toy import HAPPY, Order, Program, World, program

from bursar import Conflict, pay
from bursar.engine import Answer, Worker
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.store.batch import CommitUnknown, PreparedBatch, WriteConflict
from bursar.store.postgres.batches import PostgresBatchSession
from bursar.writer import Limit, Operation

BOTH = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
LEFT = Answer(outcome=Outcome.SUCCESS, event="LEFT")


@BOTH
@scenario
async def test_two_programs_drive_the_same_records_at_once(place: Place) -> None:
    """Given two engines that know nothing of each other, then each transition is there once, and so is each entry."""
    world = World()
    async with program(place, world, worker="one") as p, program(place, world, worker="two") as q:
        await seed(p.ledger, "alice", *["1"] * 24)
        records = [await p.order(f"o-{n}", minor=1_000_000) for n in range(24)]
        world.refuses = {(record.id, "ship") for record in records[::3]}
        while open_ones := [r for r in records if (await p.at(r)).state not in ("DONE", "FAILED")]:
            stale = [await p.at(record) for record in open_ones]
            await asyncio.gather(*[who.now(record) for record in stale for who in (p, q)])
        for n, record in enumerate(records):
            path = await p.path(record)
            assert path[:4] == HAPPY[:4]
            assert path[4:] == (
                ["SHIPPING-EXPLICIT_FAIL>REFUNDING", "REFUNDING-SUCCESS>FAILED"] if n % 3 == 0 else HAPPY[4:]
            )
        assert set(world.effects.values()) == {1}
        assert await p.balances() == [8_000_000, 0, 16_000_000]
        assert await p.reasons() == []
        await check_sound(p.ledger)


@BOTH
@scenario
async def test_two_workers_share_the_work(place: Place) -> None:
    world = World()
    async with program(place, world, worker="one", lease_s=1) as p, program(place, world, worker="two", lease_s=1) as q:
        await seed(p.ledger, "alice", *["1"] * 60)
        records = [await p.order(f"o-{n}", minor=1_000_000) for n in range(60)]
        world.loses = {(record.id, "charge") for record in records[::4]}
        workers = [Worker(who.engine, scan_s=0.02, queue_max=16, concurrency=4) for who in (p, q)]
        running = [asyncio.create_task(worker.run()) for worker in workers]
        for record in records:
            await p.until(record, "DONE")
        for worker in workers:
            worker.stop()
        await asyncio.gather(*running)
        for record in records:
            path = await p.path(record)
            assert [step for step in path if "UNKNOWN" not in step] == HAPPY
        assert set(world.effects.values()) == {1}
        assert await p.balances() == [0, 0, 60_000_000]
        await check_sound(p.ledger)


@BOTH
@scenario
async def test_bookings_among_other_commits_of_the_same_money(place: Place) -> None:
    """Given money that orders and payments race for, then what is booked is booked once, and nothing is lost."""
    world = World()
    async with program(place, world) as p, program(place, World(), worker="two") as q:
        await seed(p.ledger, "alice", *["1"] * 40)
        records = [await p.order(f"o-{n}", minor=1_000_000) for n in range(20)]

        async def paying(n: int) -> None:
            while True:
                try:
                    await q.ledger.commit(pay("alice", "carol", "USDT", "1", key=f"{n}"))
                except Conflict:
                    continue
                return

        await asyncio.gather(*[p.now(record) for record in records], *[paying(n) for n in range(20)])
        for record in records:
            await p.now(await p.at(record))
            assert (await p.at(record)).state == "DONE"
        assert await p.balances() == [0, 0, 20_000_000]
        assert (await p.ledger.balance("carol", "USDT")).minor == 20_000_000
        await check_sound(p.ledger)


@BOTH
@scenario
async def test_moves_of_many_records_ride_in_few_units(place: Place) -> None:
    async with program(place, World()) as p:
        before = p.engine.writer.batches
        records = await asyncio.gather(*[p.order(f"o-{n}") for n in range(200)])
        started = p.engine.writer.batches
        assert started - before <= 8
        await asyncio.gather(*[p.now(record) for record in records])
        assert p.engine.settled.total() == 200
        assert p.engine.writer.batches - started <= 80  # 400 moves


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_writes_that_get_lost_or_are_not_heard_of(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given groups decided ahead of writes that fail, or seem to: each transition and each entry is there once."""
    world, mishaps = World(), Counter[str]()
    async with program(place, world) as p:
        await seed(p.ledger, "alice", *["1"] * 10, "140")
        real = PostgresBatchSession.write

        async def unlucky(session: PostgresBatchSession, prepared: PreparedBatch) -> None:
            mishaps["writes"] += 1
            turn = mishaps["writes"] % 5
            if turn == 1:
                mishaps["lost"] += 1
                raise WriteConflict("bad luck")
            await real(session, prepared)
            if turn == 3:
                mishaps["unheard"] += 1
                raise CommitUnknown("bad luck")

        monkeypatch.setattr(PostgresBatchSession, "write", unlucky)
        limit = Limit(key="day", count_max=150, amount_max=10**9, until_us=2**60, code="X")
        requests = [Operation(scope="api", id=f"k-{n % 150}", op="create", fingerprint="x") for n in range(300)]
        started = await asyncio.gather(
            *[p.engine.start("orders", Order(minor=1_000_000), operation=r, limits=(limit,)) for r in requests]
        )
        records = list({one.record.number: one.record for one in started}.values())
        world.refuses = {(record.id, "ship") for record in records[::3]}
        while open_ones := [r for r in records if (await p.at(r)).state not in ("DONE", "FAILED")]:
            await asyncio.gather(*[p.now(await p.at(record)) for record in open_ones])
        assert len(records) == 150
        for record in records:
            assert (await p.path(record))[:4] == HAPPY[:4]
            assert len(await p.path(record)) == (6 if (record.id, "ship") in world.refuses else 5)
        assert set(world.effects.values()) == {1}
        assert await p.balances() == [50_000_000, 0, 100_000_000]
        assert await p.reasons() == []
        assert min(mishaps["lost"], mishaps["unheard"]) > 0
        await check_sound(p.ledger)


# --- answers that come too late ----------------------------------------------------------------------------------


async def late(place: Place, winner: object, loser: object) -> tuple[Program, Record, list[str], list[tuple[str, str]]]:
    """One program is calling the shop when another hears something and moves the record; then the first one hears."""
    calling, heard = asyncio.Event(), asyncio.Event()

    async def slow() -> object:
        calling.set()
        await heard.wait()
        return loser

    slow_world, fast_world = World(ship=[slow]), World(ship=[winner])
    async with program(place, slow_world, worker="slow") as p, program(place, fast_world, worker="fast") as q:
        await seed(p.ledger, "alice", "1")
        record = await p.order("o-1", minor=1_000_000)
        first = p.engine.drive(record)
        await asyncio.wait_for(calling.wait(), 20)
        moved = await q.now(await p.at(record))
        heard.set()
        await first
        await check_sound(p.ledger)
        return p, moved, await q.path(record), await q.reasons()


@pytest.mark.parametrize(
    ("winner", "loser"),
    [
        (Outcome.SUCCESS, Outcome.SUCCESS),
        (Outcome.EXPLICIT_FAIL, Outcome.EXPLICIT_FAIL),
        (LEFT, LEFT),
        (LEFT, Outcome.SUCCESS),
        (Outcome.SUCCESS, LEFT),
        (Outcome.SUCCESS, Outcome.TIMEOUT),
        (Outcome.EXPLICIT_FAIL, Outcome.UNKNOWN),
    ],
)
@BOTH
@scenario
async def test_a_late_answer_that_says_the_same_or_nothing_is_nothing(
    place: Place, winner: object, loser: object
) -> None:
    _, _, path, reasons = await late(place, winner, loser)
    assert not any("LATE" in step for step in path)
    assert reasons == []


@pytest.mark.parametrize(
    ("winner", "loser"),
    [(Outcome.SUCCESS, Outcome.EXPLICIT_FAIL), (Outcome.EXPLICIT_FAIL, Outcome.SUCCESS), (Outcome.EXPLICIT_FAIL, LEFT)],
)
@BOTH
@scenario
async def test_a_late_answer_that_contradicts_is_kept_and_people_are_told(
    place: Place, winner: Outcome, loser: Outcome | Answer
) -> None:
    """T34: the record stays where it is, what was heard is in its history, and the alert is critical."""
    _, moved, path, reasons = await late(place, winner, loser)
    said = loser.outcome if isinstance(loser, Answer) else loser
    assert path[-1] == f"{moved.state}-LATE {said.value}>{moved.state}"
    assert reasons == [("critical", "contradiction")]


@BOTH
@scenario
async def test_a_late_answer_to_a_record_that_has_not_moved_on_changes_nothing(place: Place) -> None:
    """Given another program that only heard nothing, then the answer is heard again by whoever calls next."""
    _, _, path, reasons = await late(place, Outcome.TIMEOUT, Outcome.SUCCESS)
    assert path[4:] in (["SHIPPING-TIMEOUT>SHIPPING"], ["SHIPPING-TIMEOUT>SHIPPING", "SHIPPING-SUCCESS>DONE"])
    assert reasons == []
