"""Group commit: callers wait together, and one transaction carries all their changes.

The next batch is written when the last one's commit returns, so a lone caller waits for no other and many callers share
one fsync. Where the store can, the next batch is *prepared* meanwhile, on what the last one is about to write; if that
one fails, so does what was prepared on it. One pipeline per process: more gained nothing. A refused change is refused
alone; the others commit. A batch that needs what another transaction holds leaves the pipeline (`blocked`). No caller
gets an answer before COMMIT, and cancelling a caller never cancels the transaction that carries its change (L18).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from functools import partial
from typing import Any, NamedTuple

from bursar.model.errors import BursarError, Conflict, OutcomeUnknown, Refusal
from bursar.store import Store
from bursar.store.batch import (
    CommitUnknown,
    ConnectionFailed,
    Lane,
    LockTimeout,
    PreparedBatch,
    WriteConflict,
    WriterCache,
)
from bursar.writer.batch import Batch, commit, prepare
from bursar.writer.blocked import BlockedLane
from bursar.writer.change import Change, ChangeResult
from bursar.writer.runner import BATCH_MAX, BatchRunner, PendingChange, answer, fail, keys_of, mark_unknown

GATHER_MIN = 24  # callers that are worth a batch of their own while another one is written
HALVE_FROM = 48  # waiting callers from which it pays to prepare one half while the other is written
CONFLICTS_MAX = 30  # before contention is reported
CONFLICTS_MAX_IN_CALLERS = 3  # inside a caller's transaction, which holds its own locks meanwhile
PATIENCE_S = 20.0  # how long an unknown commit is retried before the caller gets an error
PARTING_S = 0.5  # how long tasks that were cancelled may take to end
CONSOLIDATE_EVERY = 256  # batches between two looks at the balance cache
CONSOLIDATE_ABOVE = 64  # parts of one cached balance

log = logging.getLogger("bursar.writer")


class InFlightBatch(NamedTuple):
    """A batch that is being written."""

    pending: list[PendingChange]
    batch: Batch
    writing: asyncio.Task[None]


class Writer:
    """The one way rows change."""

    def __init__(self, store: Store, *, conflicts_max: int = CONFLICTS_MAX, patience_s: float = PATIENCE_S) -> None:
        self.store = store
        self.runner = BatchRunner(store, conflicts_max, patience_s)
        self._blocked = BlockedLane(self.runner)
        self.gather_min = GATHER_MIN
        self.batches = 0  # committed: a metric
        self._pending: list[PendingChange] = []
        self._task: asyncio.Task[None] | None = None
        self._enough: asyncio.Future[None] | None = None  # set when so many callers have come
        self._wanted = 0

    @property
    def cache(self) -> WriterCache:
        """What is cached of accounts and postings."""
        return self.runner.cache

    @property
    def busy(self) -> bool:
        """Whether a batch is on its way, so that the next change shares the one after it."""
        return self._task is not None

    async def apply(self, change: Change) -> ChangeResult:
        """Make a change, in one transaction with those of other callers. Raises its refusal."""
        future: asyncio.Future[ChangeResult] = asyncio.get_running_loop().create_future()
        pending = PendingChange(change, future)
        if self._blocked.held and self._blocked.route(pending):
            return await future
        self._pending.append(pending)
        if self._enough is not None and len(self._pending) >= self._wanted:
            _set(self._enough)
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="bursar-writer")
        return await future

    async def apply_in(self, connection: Any, change: Change) -> ChangeResult:
        """Make a change in a transaction that the caller owns: it happens if and when the caller commits."""
        last = ""
        for attempt in range(CONFLICTS_MAX_IN_CALLERS):
            # A cache of its own: what this transaction sees, no other may.
            batch = Batch(WriterCache(pessimistic=attempt), [change], first_read=self.store.first_read)
            try:
                await self.store.run_batch_in(connection, partial(commit, batch))
            except WriteConflict as conflict:
                await self.runner.pause()
                last = str(conflict)
                continue
            except ConnectionFailed as error:
                raise OutcomeUnknown(keys_of([change]), str(error)) from error
            result = batch.results[0]
            if isinstance(result, Refusal):
                if not await self.store.reads_latest(connection):
                    # Nothing was written, so nothing has noticed that the refusal may rely on what was long ago.
                    raise Conflict("a refusal in a transaction that sees only what was there when it began; end it", 1)
                raise result
            return result
        raise Conflict(last, CONFLICTS_MAX_IN_CALLERS)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Wait until every change that was given is written; False: that took too long, and the rest is abandoned where
        it is, as a crash would."""
        until = None if timeout_s is None else self.store.ports.monotonic() + timeout_s
        while tasks := [*self._blocked.tasks, *([self._task] if self._task else ())]:
            left_s = None if until is None else max(0.0, until - self.store.ports.monotonic())
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=PARTING_S)
                return False
        return True

    async def _run(self) -> None:
        in_flight: InFlightBatch | None = None
        pending: list[PendingChange] = []
        try:
            while self._pending or in_flight is not None:
                if in_flight is not None and not await self._gather(in_flight):
                    await self._await_write(in_flight.pending, in_flight.batch, in_flight.writing)
                    in_flight = None
                else:
                    pending = self._cut(in_flight=in_flight is not None)
                    if self.store.overlaps:
                        in_flight = await self._pipeline(pending, in_flight)
                    else:
                        await self._commit(pending)
                    await self._count()
                await _let_others_run()  # those just answered may have their next change ready: take them along
        except Exception as error:  # a bug: without an answer, these callers would wait for ever
            log.exception("the writer failed; callers get the error, and the next one starts it again")
            begun = [*pending, *(in_flight.pending if in_flight is not None else ())]
            mark_unknown(begun, self.store.ports.monotonic())
            waiting, self._pending = self._pending, []
            fail([*begun, *waiting], error)
            self.cache.drop_postings()
        finally:
            self._task = None

    async def _gather(self, in_flight: InFlightBatch) -> bool:
        """Wait until enough callers have come to prepare a batch beside the one in flight; False: it is written first.

        To take the first caller who comes would make small batches of all that follow.
        """
        self._wanted = max(self.gather_min, len(in_flight.pending))
        if len(self._pending) < self._wanted and not in_flight.writing.done():
            enough = self._enough = asyncio.get_running_loop().create_future()
            in_flight.writing.add_done_callback(lambda _: _set(enough))
            try:
                await enough
            finally:
                self._enough = None
        return bool(self._pending) and not in_flight.writing.done()

    def _cut(self, *, in_flight: bool) -> list[PendingChange]:
        """The next batch: all that wait; or half of many, so that the other half is prepared while it is written."""
        size = BATCH_MAX
        if self.store.overlaps and not in_flight and len(self._pending) >= HALVE_FROM:
            size = min(BATCH_MAX, (len(self._pending) + 1) // 2)
        batch, self._pending = self._pending[:size], self._pending[size:]
        return batch

    async def _count(self) -> None:
        self.batches += 1
        if self.cache.pessimistic:
            self.cache.pessimistic -= 1
        if self.batches % CONSOLIDATE_EVERY == 0:
            try:
                await self.consolidate()
            except Exception as error:  # the cache is disposable, and callers wait behind it; the next look retries
                log.error(
                    "cached balances are not consolidated: %s", error, exc_info=not isinstance(error, BursarError)
                )

    async def _pipeline(self, pending: list[PendingChange], before: InFlightBatch | None) -> InFlightBatch | None:
        """Prepare a batch while the one before it is written; then start to write it.

        What it was decided on includes what the one before does. If that fails, the decision is worth nothing: the one
        before is retried by itself, and then this one.
        """
        batch = self.runner.batch(pending, self.cache, None if before is None else before.batch.effects)
        prepared: PreparedBatch | None = None
        # Alone, it is prepared on the writing connection: one server process that has everything cached is faster.
        lane = Lane.WRITE if before is None else Lane.PREPARE
        with contextlib.suppress(Exception):  # whatever it is, the retry by itself meets it again and reports it
            prepared = await self.store.run_batch(partial(prepare, batch), lane)
        written = before is None or await self._await_write(before.pending, before.batch, before.writing)
        if prepared is None or not written:
            await self._commit(pending)
            return None
        if prepared.writes.empty:
            answer(pending, batch.results)
            return None
        writing = self.store.run_batch(lambda session: session.write(prepared))
        if len(pending) < self.gather_min:  # so few that none would be prepared beside it: no need for a task
            await self._await_write(pending, batch, writing)
            return None
        return InFlightBatch(pending, batch, asyncio.get_running_loop().create_task(writing))

    async def _await_write(self, pending: list[PendingChange], batch: Batch, writing: Awaitable[None]) -> bool:
        """Wait for a batch to be written and answer its callers. If it was not written, retry it by itself."""
        try:
            await writing
        except LockTimeout:
            self.cache.drop_postings()
            self._blocked.take(pending)
            return False
        except Exception as error:
            self.cache.drop_postings()
            if isinstance(error, CommitUnknown):
                mark_unknown(pending, self.store.ports.monotonic())
            await self._commit(pending)  # what went wrong is met again there, and reported if it stays
            return False
        answer(pending, batch.results)
        return True

    async def _commit(self, pending: list[PendingChange]) -> None:
        for blocked in await self.runner.run(pending):
            self._blocked.take(blocked)

    async def consolidate(self, above: int = CONSOLIDATE_ABOVE) -> int:
        """Sum up cached balances that have come apart into many small changes. Returns how many."""
        fragmented = await self.store.read.balances.fragmented(above)
        for account, asset in fragmented:
            async with self.store.transaction() as tables:
                await tables.rules.share()  # in the same order as all who make a cache anew
                await tables.balances.consolidate(account, asset)
        return len(fragmented)


def _let_others_run() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_set, turn)
    return turn


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
