"""The worker: finds records that are due and has them driven, a bounded number at a time.

At start it takes everything of a flow that is open and that no other worker drives; later only what is due. Nothing is
ever lost by a full queue, a lost wake-up or a dead worker: whatever has not ended is due some day, and is found
then. Several workers share one PostgreSQL by skipping each other's rows; that they hardly ever meet is an optimisation,
no promise.

A flow takes at most its share of the places and of the queue (`Flow.share`). What has no room there is not claimed: it
stays due, for this worker or another one. So a flow whose rail hangs delays no other flow that has room.
"""

from __future__ import annotations

import asyncio
import logging

from bursar.engine.clock import DatabaseClock
from bursar.engine.engine import Engine
from bursar.engine.queue import Queue
from bursar.model.errors import BursarError
from bursar.model.records import Record
from bursar.ports import Ports

QUEUE_MAX = 10_000
CONCURRENCY = 512  # records driven at once; those whose call hangs count too
SCAN_S = 0.5  # between two looks for what is due
PAGE = 1_000
CAP_S = 600.0  # due later than this, and than any back-off here: a clock had jumped
COUNTER_AGE_S = 3_600.0
SWEEP_EVERY = 600  # scans between two sweeps of old counters

log = logging.getLogger("bursar.engine")


class Worker:
    """One per process. `run` returns when it is asked to stop, or is cancelled."""

    def __init__(
        self,
        engine: Engine,
        *,
        concurrency: int = CONCURRENCY,
        queue_max: int = QUEUE_MAX,
        scan_s: float = SCAN_S,
    ) -> None:
        self.engine = engine
        self.ports: Ports = engine.ports
        self.concurrency = concurrency
        self.queue_max = queue_max
        self.scan_s = scan_s
        self.scans = 0
        self._clock = DatabaseClock(engine.store)
        self._queue = Queue()
        self._stop = asyncio.Event()
        self._room = asyncio.Event()
        self._left_out: list[str] = []  # flows that had no room in the queue when the worker last looked
        self._after: dict[str, int] = {}  # the last record of the first, full look at a flow
        self._looked: set[str] = set()  # flows for which that is over

    @property
    def flows(self) -> list[str]:
        """The flows that are looked after: all that are known here, also paused ones: what they sent goes on (W15)."""
        return sorted(self.engine.flows)

    async def run(self) -> None:
        """Look, drive, look again."""
        while not self._stop.is_set():
            try:
                await self.look()
            except Exception as error:  # whatever it is: records are found by the next scan, or not at all
                surprise = not isinstance(error, BursarError)
                log.error("the scan failed, the next one comes in %s s: %s", self.scan_s, error, exc_info=surprise)
            await self._pause()

    def stop(self) -> None:
        """Take no more. What is being driven goes on; `engine.finish` waits for it."""
        self._stop.set()
        self._room.set()

    async def look(self) -> int:
        """Refresh what is paused, fetch what is due as long as there is room, and have it driven. Returns how many."""
        self.scans += 1
        if by_us := await self._clock.set_back():
            moved = await self.engine.store.single().clock.set_back(by_us)
            log.warning("the clock was set back by %.1f s; due as much earlier: %s records", by_us / 1e6, moved)
        await self.engine.pauses.read()
        if self.scans % SWEEP_EVERY == 1:
            await self.engine.store.single().operations.drop_counters(int(COUNTER_AGE_S * 1e6))
        found = 0
        while not self._stop.is_set():
            flows = [name for name in self.flows if self._has_room(name)]
            self._left_out = [name for name in self.flows if name not in flows]
            if not flows:
                break
            most = min(PAGE, *(self._part(name, self.queue_max) - self._queue.of(name) for name in flows))
            most = min(most, max(1, self.queue_max - len(self._queue)))
            new = [name for name in flows if name not in self._looked]
            self.engine.ended = {}
            page = await (self._claim_all(new[0], most) if new else self._claim_due(flows, most))
            found += len(page)
            self._queue.add(self._as_they_are(page))
            self._feed()
            if len(page) < most and self._looked.issuperset(flows):
                break
        return found

    def _part(self, flow: str, whole: int) -> int:
        """The flow's share of places, or of the queue."""
        return max(1, int(self.engine.flows[flow].share * whole))

    def _has_room(self, flow: str) -> bool:
        """Whether records of a flow are claimed: half of its share of the queue is empty."""
        return self._queue.of(flow) <= self._part(flow, self.queue_max) // 2 and len(self._queue) < self.queue_max

    def _has_place(self, flow: str) -> bool:
        return self.engine.in_progress_of(flow) < self._part(flow, self.concurrency)

    def _as_they_are(self, page: list[Record]) -> list[Record]:
        """Without those that this process has moved on before we heard that they are ours."""
        ended, self.engine.ended = self.engine.ended or {}, None
        return [record for record in page if record.version >= ended.get(record.number, 0)]

    async def _claim_due(self, flows: list[str], most: int) -> list[Record]:
        engine = self.engine
        longest_s = max([CAP_S, *(flow.delay_s_max for flow in engine.flows.values())])
        cap_us = int(longest_s * 1e6) + engine.lease_us
        records = engine.store.single().records
        return list(await records.claim_due(flows, engine.worker, most, engine.lease_us, cap_us))

    async def _claim_all(self, flow: str, most: int) -> list[Record]:
        """The next page of the first look at a flow."""
        engine = self.engine
        after = self._after.get(flow, 0)
        records = engine.store.single().records
        page = list(await records.claim_all([flow], engine.worker, most, engine.lease_us, after))
        if page:
            self._after[flow] = page[-1].number
        else:
            self._looked.add(flow)  # a short page is not the last: rows that another transaction is moving are skipped
        return page

    def _feed(self) -> None:
        """Hand over as many as may be driven at once."""
        while self.engine.in_progress < self.concurrency:
            record = self._queue.take(self._has_place)
            if record is None:
                break
            self.engine.drive(record).add_done_callback(self._done)

    def _done(self, _task: asyncio.Task[Record]) -> None:
        if not self._stop.is_set():
            asyncio.get_running_loop().call_soon(self._feed)  # the engine must have crossed it off first
        if any(self._has_room(flow) for flow in self._left_out):
            self._room.set()

    async def _pause(self) -> None:
        """Until the next look: a while, or as soon as there is room for a flow that was left out."""
        if self._stop.is_set():
            return  # said during the last look: clearing what it had set would sleep through it
        self._room.clear()
        more = asyncio.ensure_future(self._room.wait())
        nap = asyncio.ensure_future(self.ports.sleep(self.scan_s))
        try:
            await asyncio.wait([more, nap], return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (more, nap):
                task.cancel()
