"""Group commit: callers wait together, one unit carries them all.

The next group is written when the last one's commit returns, so a lone caller waits for nobody and many callers share
one fsync. Where the store can, the next group is *decided* meanwhile, on what the last one is about to leave behind; if
that one fails, so does the decision. One lane per process: more gained nothing. A refused change is refused alone; the
others commit. A group that is in somebody's way leaves the lane (`siding`). Nobody is answered before COMMIT, and
cancelling a caller never cancels the unit it rides in (L18).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable
from typing import Any, NamedTuple

from bursar.model.errors import BursarError, Conflict, DatabaseUnavailable, OutcomeUnknown, Refusal
from bursar.store import Store
from bursar.store.group import Blocked, Broken, Decided, Heads, Lost, Unreachable
from bursar.writer.change import Change, Done
from bursar.writer.decide import GroupJob, Outcome
from bursar.writer.saga import SagaCommit
from bursar.writer.siding import Sidings
from bursar.writer.tries import GROUP_MAX, Tries, Waiting, answer, fail, in_doubt, keys_of

GATHER_MIN = 24  # callers who are worth a group of their own while another one is written
HALVE_FROM = 48  # callers waiting from which it pays to decide one half while the other is written
TRIES = 30  # before contention is reported
TRIES_IN_CALLERS = 3  # inside a caller's transaction, which holds its own locks meanwhile
PATIENCE_S = 20.0  # how long an ambiguous commit is asked about before the caller is told
PARTING_S = 0.5  # how long those that were given up may take to notice
FOLD_EVERY = 256  # groups between two looks at the balance cache
FOLD_ABOVE = 64  # parts of one cached balance

log = logging.getLogger("bursar.writer")


class Flight(NamedTuple):
    """A group that is being written."""

    batch: list[Waiting]
    job: GroupJob
    writing: asyncio.Task[None]


class Writer:
    """The one way rows change."""

    def __init__(self, store: Store, *, tries: int = TRIES, patience_s: float = PATIENCE_S) -> None:
        self.store = store
        self._tries = Tries(store, tries, patience_s)
        self._sidings = Sidings(self._tries)
        self.gather_min = GATHER_MIN
        self.groups = 0  # units committed, for those who watch
        self._waiting: list[Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._enough: asyncio.Future[None] | None = None  # somebody waits until so many have come
        self._wanted = 0
        self._sagas = SagaCommit(store, tries)

    @property
    def heads(self) -> Heads:
        """What the lane knows of accounts, and keeps in mind of postings."""
        return self._tries.heads

    @property
    def patience_s(self) -> float:
        """How long an ambiguous commit is asked about before the caller is told."""
        return self._tries.patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._tries.patience_s = seconds

    @property
    def busy(self) -> bool:
        """Whether a group is on its way, so that the next change shares the one after it."""
        return self._runner is not None

    async def apply(self, change: Change) -> Done:
        """Make a change, riding with whoever else is waiting. Raises its refusal."""
        if self.store.split:
            if not change.plain:
                raise DatabaseUnavailable("split mode is for the ledger alone; records need a store with real units")
            return await self._sagas.apply(change)
        future: asyncio.Future[Done] = asyncio.get_running_loop().create_future()
        waiting = Waiting(change, future)
        if self._sidings.held and self._sidings.divert(waiting):
            return await future
        self._waiting.append(waiting)
        if self._enough is not None and len(self._waiting) >= self._wanted:
            _end(self._enough)
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="bursar-writer")
        return await future

    async def apply_in(self, connection: Any, change: Change) -> Done:
        """Make a change in a transaction that the caller owns: it happens if and when the caller commits."""
        last = ""
        for turn in range(TRIES_IN_CALLERS):
            heads = Heads()  # of its own: what this transaction sees is nobody else's business
            heads.wary = turn
            job = GroupJob(heads, [change])
            try:
                await self.store.group(job, connection)
            except Lost as lost:
                await self._tries.pause()
                last = str(lost)
                continue
            except Broken as error:
                raise OutcomeUnknown(keys_of([change]), str(error)) from error
            return _done(job.outcomes[0])
        raise Conflict(last, TRIES_IN_CALLERS)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that was given has been written; False: that took too long, and what is left is let go
        of where it is, as a crash would."""
        until = None if timeout_s is None else self.store.ports.monotonic() + timeout_s
        while tasks := [*self._sidings.tasks, *([self._runner] if self._runner else ())]:
            left_s = None if until is None else max(0.0, until - self.store.ports.monotonic())
            done, _ = await asyncio.wait(tasks, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks, timeout=PARTING_S)
                return False
        return True

    async def recover(self) -> dict[str, int]:
        """Finish or undo what a crash left half done. Nothing, unless the store works in split mode."""
        return await self._sagas.recover()

    async def release_saga(self, id_: str, *, actor: str, reason: str) -> int:
        """Give up a commit that recovery has set aside; returns how many postings are free again."""
        return await self._sagas.release(id_, actor=actor, reason=reason)

    async def _run(self) -> None:
        flight: Flight | None = None
        batch: list[Waiting] = []
        try:
            while self._waiting or flight is not None:
                if flight is not None and not await self._gather(flight):
                    await self._land(flight)
                    flight = None
                else:
                    batch = self._cut(in_flight=flight is not None)
                    if self.store.overlaps:
                        flight = await self._overlap(batch, flight)
                    else:
                        await self._group(batch)
                    await self._count()
                await _let_others_run()  # those just answered may have their next change ready: take them along
        except Exception as error:  # a mistake of ours: without an answer, these callers would wait for ever
            log.exception("the writer failed; callers are told, and the next one starts it again")
            begun = [*batch, *(flight.batch if flight is not None else ())]
            in_doubt(begun, self.store.ports.monotonic())
            waiting, self._waiting = self._waiting, []
            fail([*begun, *waiting], error)
            self.heads.forget()
        finally:
            self._runner = None

    async def _gather(self, flight: Flight) -> bool:
        """Wait until enough callers have come to decide a group beside the one in flight; False: it has landed first.

        To take the first one who comes would make small groups of all that follow.
        """
        self._wanted = max(self.gather_min, len(flight.batch))
        if len(self._waiting) < self._wanted and not flight.writing.done():
            enough = self._enough = asyncio.get_running_loop().create_future()
            flight.writing.add_done_callback(lambda _: _end(enough))
            try:
                await enough
            finally:
                self._enough = None
        return bool(self._waiting) and not flight.writing.done()

    def _cut(self, *, in_flight: bool) -> list[Waiting]:
        """The next group: all that wait; or half of many, so that the other half is decided while it is written."""
        size = GROUP_MAX
        if self.store.overlaps and not in_flight and len(self._waiting) >= HALVE_FROM:
            size = min(GROUP_MAX, (len(self._waiting) + 1) // 2)
        batch, self._waiting = self._waiting[:size], self._waiting[size:]
        return batch

    async def _count(self) -> None:
        self.groups += 1
        if self.heads.wary:
            self.heads.wary -= 1
        if self.groups % FOLD_EVERY == 0:
            try:
                await self.fold()
            except Exception as error:  # the cache is disposable, and callers wait behind it; the next look folds it
                log.error("cached balances are not summed up: %s", error, exc_info=not isinstance(error, BursarError))

    async def _overlap(self, batch: list[Waiting], before: Flight | None) -> Flight | None:
        """Decide a group while the one before it is written; then start to write it.

        What it was decided on includes what the one before does. If that fails, the decision is worth nothing: the one
        before is tried again by itself, and then this one.
        """
        job = GroupJob(self.heads, [waiting.change for waiting in batch], None if before is None else before.job.delta)
        decided: Decided | None = None
        with contextlib.suppress(Exception):  # whatever it is, trying again by itself meets it again and reports it
            decided = await self.store.decide(job, beside=before is not None)
        landed = before is None or await self._land(before)
        if decided is None or not landed:
            await self._group(batch)
            return None
        if decided.rows.empty:
            answer(batch, job.outcomes)
            return None
        if len(batch) < self.gather_min:  # so few that nobody would be decided beside it: no need for a task
            await self._written(batch, job, self.store.write(decided))
            return None
        return Flight(batch, job, asyncio.get_running_loop().create_task(self.store.write(decided)))

    async def _land(self, flight: Flight) -> bool:
        """Wait for a group to be written and answer its callers. If it was not written, try again by itself."""
        return await self._written(flight.batch, flight.job, flight.writing)

    async def _written(self, batch: list[Waiting], job: GroupJob, writing: Awaitable[None]) -> bool:
        try:
            await writing
        except Blocked:
            self.heads.forget()
            self._sidings.take(batch)
            return False
        except Exception as error:
            self.heads.forget()
            if isinstance(error, Broken) and not isinstance(error, Unreachable):
                in_doubt(batch, self.store.ports.monotonic())
            await self._group(batch)  # what went wrong is met again there, and reported if it stays
            return False
        answer(batch, job.outcomes)
        return True

    async def _group(self, batch: list[Waiting]) -> None:
        for left in await self._tries.settle(batch):
            self._sidings.take(left)

    async def fold(self, above: int = FOLD_ABOVE) -> int:
        """Sum up cached balances that have come apart into many small changes. Returns how many."""
        if self.store.split and await self.store.read.sagas.count():
            return 0  # a saga that is rolled forward again would add its change a second time
        crowds = await self.store.read.balances.crowds(above)
        for account, asset in crowds:
            async with self.store.unit() as unit:
                await unit.rules.share()  # in the same order as all who make a cache anew
                await unit.balances.fold(account, asset)
        return len(crowds)


def _done(outcome: Outcome) -> Done:
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome


def _let_others_run() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_end, turn)
    return turn


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
