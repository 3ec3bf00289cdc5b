"""The cases of payouts: token payments from request to `confirmed`, and what it costs to wait for confirmations.

- `wallets-1`, `wallets-4`: so many payouts are asked for, never more at once than all wallets may have under way, and
  waited for until they are confirmed: database, worker, signer, nodes. Beside a bare sender (`payouts_bare`) that makes
  as many payments from as many wallets of its own, with as many under way, on the same node. Both take turns.
- `polling-N`: polls per second of CPU of this process while N payouts wait, beside the same at the fewest
  (`payouts_polling`).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from bursar.bench.measure import Row, row_of
from bursar.bench.payouts_bare import BareSender
from bursar.bench.payouts_polling import Polls, polls_row, wait_and_poll
from bursar.bench.payouts_town import ACCOUNT, AMOUNT_TEXT, ASSET_CODE, CHAIN_NAME, MANDATE, Town, shops, town
from bursar.bench.places import DISKS, Place, place_of
from bursar.flows.payouts import PayoutRequest
from bursar.flows.payouts.machine import CONFIRMED, MACHINE
from bursar.runtime import Runtime

WALLETS = (1, 4)
LOOK_S = 0.005
DEADLINE_S = 300.0
ASKING = 32  # requests at a time: a server, too, admits so many and no more

Say = Callable[[str], None]


class PayoutsPace(msgspec.Struct, frozen=True):
    """How often, how much."""

    windows: int
    payments: int  # per wallet and window
    in_flight: int  # per wallet
    waiting: tuple[int, ...]  # payouts that wait while polls are measured
    polls: int  # at least so many, per sample
    samples: int


FULL = PayoutsPace(3, 192, 64, (100, 1_000, 10_000), 2_000, 3)
QUICK = PayoutsPace(1, 32, 16, (100, 400), 400, 1)


class Window(msgspec.Struct):
    """So many payments, from the first request to the last one that is final."""

    seconds: float
    cpu_s: float  # of this process
    waits: list[float]  # seconds from request to final, each

    @property
    def rate(self) -> float:
        """Payments per second."""
        return len(self.waits) / self.seconds

    @property
    def cpu_ms(self) -> float:
        """Of this process, per payment."""
        return self.cpu_s / len(self.waits) * 1_000

    def percentile(self, share: float) -> float:
        """In seconds."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(len(self.waits) * share))]


def steps(stores: Iterable[str], pace: PayoutsPace) -> int:
    """How many times `run` will say something."""
    return sum(1 + len(WALLETS) + len(pace.waiting) for _ in stores)


async def run(stores: Iterable[str], pace: PayoutsPace, say: Say) -> list[Row]:
    """All cases on these stores."""
    rows: list[Row] = []
    for store in stores:
        say(f"{store}: starting")
        with place_of(store) as place:
            for wallets in WALLETS:
                say(f"{store}: {wallets} wallets")
                rows.append(await _beside_bare(place, wallets, pace))
            rows += await _polling(place, pace, say)
    return rows


@contextlib.contextmanager
def _town(wallets: int) -> Iterator[Town]:
    """A town for one database: a signer that has signed for another one would stop payouts (W33)."""
    disk = next(disk for disk in DISKS if disk.is_dir() and os.access(disk, os.W_OK))  # where fsync means something
    with tempfile.TemporaryDirectory(prefix="bursar-bench-", dir=disk) as name, town(Path(name), wallets) as there:
        yield there


async def _beside_bare(place: Place, wallets: int, pace: PayoutsPace) -> Row:
    with _town(wallets) as there, there.mining():
        address = await place.blank(f"payouts_{wallets}")
        async with there.paying(address, wallets, unconfirmed_max=pace.in_flight) as runtime:
            ours, bare = Requests(runtime), BareSender(there, wallets, pace.in_flight)
            try:
                return await _in_turn(place.store, ours, bare, wallets, pace)
            finally:
                await bare.close()


async def _in_turn(store: str, ours: Requests, bare: BareSender, wallets: int, pace: PayoutsPace) -> Row:
    at_once, mine, other = wallets * pace.in_flight, list[Window](), list[Window]()
    for number in range(pace.windows + 1):
        payments = wallets * (pace.payments if number else pace.in_flight)  # the first one warms both up
        pair = (
            await _measured(lambda payments=payments: ours.confirmed(payments, at_once)),  # type: ignore[misc]
            await _measured(lambda payments=payments: bare.final(payments)),  # type: ignore[misc]
        )
        if number:
            mine.append(pair[0])
            other.append(pair[1])
    return row_beside(f"wallets-{wallets}", store, at_once, mine, other)


async def _measured(work: Callable[[], Awaitable[list[float]]]) -> Window:
    gc.collect()
    begun, cpu = time.perf_counter(), time.process_time()
    waits = await work()
    return Window(time.perf_counter() - begun, time.process_time() - cpu, waits)


def row_beside(case: str, store: str, at_once: int, mine: list[Window], other: list[Window]) -> Row:
    """Windows of ours beside those of the bare sender, in the order in which they were measured."""
    samples = [(a.rate, b.rate) for a, b in zip(mine, other, strict=True)]
    row = row_of(case, store, at_once, samples, against="a bare sender")
    row.p50_ms, row.p99_ms = (
        round(statistics.median(w.percentile(share) for w in mine) * 1000, 1) for share in (0.5, 0.99)
    )
    ours_ms, bare_ms = (statistics.median(w.cpu_ms for w in windows) for windows in (mine, other))
    bare_s = statistics.median(w.percentile(0.5) for w in other)
    row.note = f"this process used {ours_ms:.1f} ms of CPU a payout and {bare_ms:.1f} a bare payment; "
    row.note += f"p50 of the latter {bare_s * 1000:,.0f} ms"
    return row


class Requests:
    """Payouts that are asked for on a runtime, and driven there."""

    def __init__(self, runtime: Runtime) -> None:
        assert runtime.payouts is not None  # it is configured
        self._payouts = runtime.payouts
        self._engine = runtime.engine
        self._shops = shops()
        self._numbers = itertools.count()
        self._asking = asyncio.Semaphore(ASKING)

    async def ask(self) -> None:
        """One more."""
        name = f"bench:{next(self._numbers)}"
        wanted = PayoutRequest(
            account=ACCOUNT,
            asset=ASSET_CODE,
            chain=CHAIN_NAME,
            to=next(self._shops),
            amount=AMOUNT_TEXT,
            source=name,
            mandate=MANDATE,
        )
        async with self._asking:
            await self._payouts.request(wanted, key=name)

    async def confirmed(self, payouts: int, at_once: int) -> list[float]:
        """Ask for so many, never with more at once, until all are confirmed; how long each took."""
        settled, before = self._engine.settled, self._engine.settled.total()
        ends = time.monotonic() + DEADLINE_S
        async with asyncio.TaskGroup() as group:
            asked = 0
            while (done := settled.total() - before) < payouts:
                for _ in range(min(payouts, done + at_once) - asked):
                    asked += 1
                    group.create_task(self.ask())
                await asyncio.sleep(LOOK_S)
                if time.monotonic() > ends:
                    raise RuntimeError(f"{done} of {payouts} payouts are confirmed after {DEADLINE_S:.0f} s")
        found = await self._engine.store.read.records.list(MACHINE.name, limit=payouts)
        if any(record.state != CONFIRMED for record in found):
            raise RuntimeError(f"payouts are not confirmed: {[record.state for record in found]}")
        return [(record.updated_us - record.created_us) / 1e6 for record in found]


async def _polling(place: Place, pace: PayoutsPace, say: Say) -> list[Row]:
    found: list[Polls] = []
    with _town(WALLETS[-1]) as there:
        address = await place.blank("polling")
        more = {"unconfirmed_max": max(pace.waiting), "depth": 100, "block_ms": 3_600_000}
        async with there.paying(address, WALLETS[-1], scan_ms=10, **more) as runtime:
            requests = Requests(runtime)
            for waiting in pace.waiting:
                say(f"{place.store}: {waiting:,} payouts wait")
                found.append(await wait_and_poll(there, runtime, requests.ask, waiting, pace.polls, pace.samples))
    return [polls_row(place.store, found[0], polls) for polls in found]
