"""Sequences whose process dies: at every write on either store, at every call of an own step, at every call to SQLite.

Four sequences: one goes well, one loses every first reply, one is refused in its second step and one in its third.
However the process dies, the next one finishes them all: each entry booked once, each own step done once, and undone
once where a later one was refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.builders import Crash, FaultyPorts, MovablePorts, Place, check_sound, scenario, seed
from tests.shop import SOON, Program, Shop, program, states

from bursar.audit import audit
from bursar.engine import Worker
from bursar.flows.sequence import Call, Own, Pay, Sequences, Withdraw
from bursar.flows.sequence.steps import Step
from bursar.model.errors import BursarError

HOUR_US = 3_600_000_000
ORDERS: dict[str, list[Step]] = {
    "good": [Pay("alice", "bob", "USDT", "10"), Own("ship"), Withdraw("bob", "bank", "USDT", "4")],
    "lossy": [Own("room"), Pay("alice", "bob", "USDT", "1"), Own("ship")],
    "second": [Pay("alice", "bob", "USDT", "5"), Own("never"), Own("ship")],
    "third": [Pay("alice", "carol", "USDT", "2"), Own("room"), Withdraw("carol", "bank", "USDT", "2.5")],
}
ENDS = {
    "good": ["done"] * 3,
    "lossy": ["done"] * 3,
    "second": ["undone", "refused", "dropped"],
    "third": ["undone", "undone", "refused"],
}
EFFECTS = {"ship_do": 2, "room_do": 2, "room_undo": 1}


def shop() -> Shop:
    made = Shop()
    made.refuses = {"never_do"}
    made.loses = {"room_do", "ship_do", "room_undo"}
    return made


class Mortal(Shop):
    """One whose callers die at the n-th call, before it hears of it or before they hear of it."""

    def __init__(self, dies_at: int, moment: str) -> None:
        super().__init__()
        self.refuses = {"never_do"}
        self.dies_at, self.moment = dies_at, moment
        self.asked = 0
        self.dead = asyncio.Event()

    def _op(self, op: str) -> Callable[[Call], Any]:
        real = super()._op(op)

        async def ask(call: Call) -> Any:
            self.asked += 1
            if self.asked != self.dies_at:
                return await real(call)
            if self.moment == "after":
                await real(call)
            self.dead.set()
            raise Crash

        return ask


async def run(sequences: Sequences) -> None:
    """Start all, as their clients do, under keys of their own; ask again until each is at its end."""
    for key, steps in ORDERS.items():
        view = await sequences.start(steps, key=key, wait_s=60)
        while not view.ended:
            view = await sequences.wait(view.id, 60)


def own(outside: Shop) -> dict[str, Any]:
    return outside.own("ship", "room", "never")


async def die(work: asyncio.Task[None], dead: asyncio.Event) -> None:
    """Let it run until it ends or dies; then nobody of it is left."""
    death = asyncio.ensure_future(dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


async def finish(p: Program) -> None:
    """The clients ask again, and a worker takes up what is left."""
    worker = Worker(p.sequences.engine)
    async with asyncio.timeout(60):
        again = asyncio.ensure_future(run(p.sequences))
        while not again.done():
            with contextlib.suppress(BursarError):
                await worker.look()
            await asyncio.sleep(0.001)
        await again


async def check(p: Program, outside: Shop) -> None:
    for key, end in ENDS.items():
        view = await p.sequences.find(key)
        assert view is not None
        assert states(view) == end, view
        path = await p.path(view.id)
        assert path.count("RUNNING-SUCCESS>STEP_DONE") == sum(state in ("done", "undone") for state in end)
        assert path.count("COMPENSATING-SUCCESS>STEP_UNDONE") == end.count("undone")
    assert len(await p.sequences.list()) == len(ORDERS)
    assert outside.effects == EFFECTS
    assert set(outside.keys.values()) == {1}
    assert await p.balances() == ["9", "7", "0"]
    assert "critical" not in dict(await p.reasons())
    assert [text for finding in await audit(p.ledger.store) for text in finding.broken] == []
    await check_sound(p.ledger)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_a_crash_at_every_write(place: Place, moment: str) -> None:
    """One life after the other on one database, each dying one write later than the one before; then one that lives."""
    outside = shop()
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "20")
    for write in range(1, 40):
        bursar = place.bursar()
        await bursar.__aenter__()
        sequences = Sequences(bursar.ledger, own=own(outside), retry=SOON, worker=f"w{write}")
        dead, real, writes = asyncio.Event(), bursar.ledger.writer.apply, 0

        async def apply(change: Any, *, real: Any = real, dead: Any = dead, last: int = 1 + write % 3) -> Any:
            nonlocal writes
            writes += 1
            if writes < last:
                return await real(change)
            if writes == last and moment == "after":
                await real(change)
            dead.set()
            raise Crash

        bursar.ledger.writer.apply = apply  # type: ignore[method-assign]
        await die(asyncio.ensure_future(run(sequences)), dead)
        await bursar.store.close()
        if not dead.is_set():
            break
    assert write > 8
    async with program(place, outside, own=own(outside)) as p:
        await finish(p)
        await check(p, outside)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
@scenario
async def test_a_crash_at_every_call_of_an_own_step(place: Place, moment: str) -> None:
    """The state is on disk before the call, so the next process asks again, under the same key."""
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "20")
    outside = Mortal(1, moment)
    lives = 0
    while True:
        lives += 1
        bursar = place.bursar()
        await bursar.__aenter__()
        sequences = Sequences(bursar.ledger, own=own(outside), retry=SOON, worker=f"w{lives}")
        await die(asyncio.ensure_future(run(sequences)), outside.dead)
        await bursar.store.close()
        if not outside.dead.is_set():
            break
        outside.dead.clear()
        outside.dies_at = outside.asked + 1 + lives % 2  # the next call, or the one after it
    assert lives > 4
    async with program(place, outside, own=own(outside)) as p:
        await finish(p)
        await check(p, outside)


class Machine(FaultyPorts):
    """Where `cancel` means everybody who drives a record just then, as a shutdown does."""

    def victims(self) -> list[asyncio.Task[Any]]:
        return [task for task in asyncio.all_tasks() if task.get_name().startswith("bursar-sequence-")]


async def dies(place: Place, outside: Shop, fault: str, call: int) -> bool:
    """Run on a machine on which that call goes wrong; whether there was such a call."""
    ports = Machine()
    bursar = place.bursar(ports)
    await bursar.__aenter__()
    sequences = Sequences(bursar.ledger, own=own(outside), retry=SOON)
    ports.arm(fault, call)
    await die(asyncio.ensure_future(run(sequences)), ports.dead)
    reached = ports.reached
    ports.arm("", 0)
    await bursar.store.close()  # what the kernel does for a dead process
    return reached


@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_a_crash_at_every_call_to_the_database(place: Place, fault: str, tmp_path: Path) -> None:
    async with program(place, Shop()) as p:
        await seed(p.ledger, "alice", "20")
    call = 0
    while True:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        outside = shop()
        reached = await dies(copy, outside, fault, call)
        clock = MovablePorts()
        clock.ahead_us = HOUR_US  # whatever it was waiting for is due by now
        async with program(copy, outside, own=own(outside), ports=clock) as p:
            await finish(p)
            await check(p, outside)
        if not reached:
            break
    assert call > 40
