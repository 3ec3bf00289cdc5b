"""What it costs to ask again and again for what is not final, while more and more payouts wait.

The payouts are made the usual way, and mined; then no block comes any more, so that none of them becomes final. All are
made due at once and polled by the worker, in passes: claimed, their fates asked for, and put back. A poll costs the CPU
that this process has used meanwhile, divided by how many there were. No poll may leave a row of history.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable

import msgspec

from bursar.bench.measure import Row, row_of
from bursar.bench.payouts_town import Town
from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.machine import CONFIRMING, MACHINE
from bursar.flows.payouts.payout import Payout
from bursar.model.records import Record
from bursar.runtime import Runtime
from bursar.testbed.look import select

CHUNK = 500  # payouts in a block: nodes look through the whole block for one receipt
LOOK_S = 0.002
DEADLINE_S = 600.0
HISTORY = "SELECT count(*) FROM {schema}transitions"


class Polls(msgspec.Struct, frozen=True):
    """What was measured while so many waited."""

    waiting: int
    cpu_ms: list[float]  # per poll, sample by sample
    wall_ms: list[float]
    history: int  # rows that the polls have left


async def wait_and_poll(
    town: Town, runtime: Runtime, ask: Callable[[], Awaitable[None]], waiting: int, polls: int, samples: int
) -> Polls:
    """Let so many payouts wait, and poll them all, at least `polls` times in a sample."""
    await _make(town, runtime, ask, waiting)
    counter = _Counter(runtime)
    await _idle(runtime)  # each was polled once when it was sent
    records = await _waiting(runtime, waiting)
    await counter.passed(records)  # warm
    before = await _history(runtime)
    cpu_ms, wall_ms = list[float](), list[float]()
    for _ in range(samples):
        done, cpu, begun = 0, time.process_time(), time.perf_counter()
        while done < polls:
            done += await counter.passed(records)
        cpu_ms.append((time.process_time() - cpu) / done * 1_000)
        wall_ms.append((time.perf_counter() - begun) / done * 1_000)
    counter.close()
    return Polls(waiting, cpu_ms, wall_ms, await _history(runtime) - before)


async def _make(town: Town, runtime: Runtime, ask: Callable[[], Awaitable[None]], waiting: int) -> None:
    """Until so many are mined and not final."""
    ends = time.monotonic() + DEADLINE_S
    there = await _confirming(runtime)
    while there < waiting:
        wanted = min(waiting, there + CHUNK)
        await asyncio.gather(*[ask() for _ in range(wanted - there)])
        while (there := await _confirming(runtime)) < wanted:
            await asyncio.sleep(0.05)
            if time.monotonic() > ends:
                raise RuntimeError(f"{there} of {waiting} payouts were sent after {DEADLINE_S:.0f} s")
        town.anvil.mine()


async def _idle(runtime: Runtime) -> None:
    while runtime.engine.in_progress_of(MACHINE.name):  # noqa: ASYNC110 (tasks of the engine's own)
        await asyncio.sleep(LOOK_S)


async def _confirming(runtime: Runtime) -> int:
    counts = await runtime.bursar.store.read.records.open_counts([])
    return counts.get((MACHINE.name, CONFIRMING), (0, 0))[0]


async def _waiting(runtime: Runtime, waiting: int) -> list[Record]:
    found = list(await runtime.bursar.store.read.records.list(MACHINE.name, limit=waiting + 1))
    if len(found) != waiting or any(record.state != CONFIRMING for record in found):
        raise RuntimeError(f"{waiting} payouts should wait, and {len(found)} are there")
    return found


async def _history(runtime: Runtime) -> int:
    [[(rows,)]] = await asyncio.to_thread(select, runtime.config, HISTORY)
    return int(rows)


class _Counter:
    """Counts the polls of a runtime that have said nothing new and are put back."""

    def __init__(self, runtime: Runtime) -> None:
        self._engine = runtime.engine
        self._actions = runtime.engine.flows[MACHINE.name].actions
        self._confirm = self._actions["confirm"]
        self._polled = 0
        self._actions["confirm"] = self._counted  # type: ignore[index]

    async def _counted(self, item: FlowRecord[Payout]) -> Answer:
        answer = await self._confirm(item)
        self._polled += answer.unchanged
        return answer

    async def passed(self, records: list[Record]) -> int:
        """All of them are due now, and each is polled; how many polls that took.

        One for each, unless a pass takes longer than a lease: then another look claims what is still in the queue.
        """
        before, ends = self._polled, time.monotonic() + DEADLINE_S
        target = before + len(records)
        for start in range(0, len(records), CHUNK):
            numbers = [record.number for record in records[start : start + CHUNK]]
            await self._engine.store.single().records.wake_held(numbers, "")
        while self._polled < target or self._engine.in_progress_of(MACHINE.name):
            await asyncio.sleep(LOOK_S)
            if time.monotonic() > ends:
                raise RuntimeError(f"{target - self._polled} of {len(records)} were not polled")
        return self._polled - before

    def close(self) -> None:
        """Count no longer."""
        self._actions["confirm"] = self._confirm  # type: ignore[index]


def polls_row(store: str, fewest: Polls, polls: Polls) -> Row:
    """Polls per second of CPU, beside those at the fewest that wait: 1 is flat, less is dearer."""
    samples = list(zip(_rates(polls.cpu_ms), _rates(fewest.cpu_ms), strict=True))
    row = row_of(f"polling-{polls.waiting}", store, polls.waiting, samples, against=f"the same with {fewest.waiting}")
    cpu, wall = statistics.median(polls.cpu_ms), statistics.median(polls.wall_ms)
    dearer = cpu / statistics.median(fewest.cpu_ms)
    row.note = f"{cpu:.2f} ms of CPU and {wall:.2f} ms of time a poll, {dearer:.2f} times that with {fewest.waiting}; "
    row.note += f"{polls.history} rows of history"
    return row


def _rates(per_poll_ms: list[float]) -> list[float]:
    return [1_000 / one for one in per_poll_ms]
