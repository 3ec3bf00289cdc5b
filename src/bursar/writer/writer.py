"""Group commit: callers wait together, one unit carries them all.

The next group is written when the last one's commit returns, so a lone caller waits for nobody and many callers share
one fsync. Where the store can, the next group is *decided* meanwhile, on what the last one is about to leave behind; if
that one fails, so does the decision. One lane per process: more gained nothing. A refused change is refused alone; the
others commit. Nobody is answered before COMMIT, and cancelling a caller never cancels the unit it rides in (L18).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Any, NamedTuple

from bursar.model.errors import (
    BursarError,
    Conflict,
    DatabaseCorrupt,
    DatabaseUnavailable,
    OutcomeUnknown,
    Refusal,
    StoreError,
)
from bursar.ports import Ports
from bursar.store import Store
from bursar.store.group import Blocked, Broken, Decided, Heads, Lost
from bursar.writer.change import Change, Done
from bursar.writer.decide import GroupJob, Outcome
from bursar.writer.saga import SagaCommit

GROUP_MAX = 512  # changes in one unit
GATHER_MIN = 24  # callers who are worth a group of their own while another one is written
HALVE_FROM = 48  # callers waiting from which it pays to decide one half while the other is written
TRIES = 30  # before contention is reported
TRIES_BLOCKED = 4  # of a single change, each of which has waited for a lock
TRIES_IN_CALLERS = 3  # inside a caller's transaction, which holds its own locks meanwhile
PAUSE_S = 0.004  # between tries, with jitter; short, because a rival needs only milliseconds for its turn
PAUSE_BROKEN_S = 0.1
PATIENCE_S = 20.0  # how long an ambiguous commit is asked about before the caller is told
FOLD_EVERY = 256  # groups between two looks at the balance cache
FOLD_ABOVE = 64  # parts of one cached balance

Waiting = tuple[Change, "asyncio.Future[Done]"]


class Doubt:
    """Since when an earlier try of the same changes may have been written, or may yet be, for all that is known."""

    __slots__ = ("since",)

    def __init__(self, since: float | None = None) -> None:
        self.since = since


class Flight(NamedTuple):
    """A group that is being written."""

    batch: list[Waiting]
    job: GroupJob
    writing: asyncio.Task[None]


class Writer:
    """The one way rows change."""

    def __init__(self, store: Store, *, tries: int = TRIES, patience_s: float = PATIENCE_S) -> None:
        self.store = store
        self.ports: Ports = store.ports
        self.heads = Heads()
        self.tries = tries
        self.patience_s = patience_s
        self.gather_min = GATHER_MIN
        self.groups = 0  # units committed, for those who watch
        self._waiting: list[Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._enough: asyncio.Future[None] | None = None  # somebody waits until so many have come
        self._wanted = 0
        self._sagas = SagaCommit(store, tries)

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
        self._waiting.append((change, future))
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
                await self._pause()
                last = str(lost)
                continue
            except Broken as error:
                raise OutcomeUnknown(_keys([change]), str(error)) from error
            return _done(job.outcomes[0])
        raise Conflict(last, TRIES_IN_CALLERS)

    async def close(self) -> None:
        """Wait until everything that was given has been written."""
        while self._runner is not None:
            await asyncio.wait([self._runner])

    async def recover(self) -> dict[str, int]:
        """Finish or undo what a crash left half done. Nothing, unless the store works in split mode."""
        return await self._sagas.recover()

    async def _run(self) -> None:
        flight: Flight | None = None
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
            with contextlib.suppress(BursarError):  # the cache is disposable; the next look folds it
                await self.fold()

    async def _overlap(self, batch: list[Waiting], before: Flight | None) -> Flight | None:
        """Decide a group while the one before it is written; then start to write it.

        What it was decided on includes what the one before does. If that fails, the decision is worth nothing: the one
        before is tried again by itself, and then this one.
        """
        job = GroupJob(self.heads, [change for change, _ in batch], None if before is None else before.job.delta)
        decided: Decided | None = None
        with contextlib.suppress(Exception):  # whatever it is, trying again by itself meets it again and reports it
            decided = await self.store.decide(job, beside=before is not None)
        landed = before is None or await self._land(before)
        if decided is None or not landed:
            await self._group(batch)
            return None
        if decided.rows.empty:
            _answer(batch, job.outcomes)
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
        except Exception as error:
            self.heads.forget()
            doubt = Doubt(self.ports.monotonic() if isinstance(error, Broken) else None)
            await self._group(batch, doubt)  # what went wrong is met again there, and reported if it stays
            return False
        _answer(batch, job.outcomes)
        return True

    async def _group(self, batch: list[Waiting], doubt: Doubt | None = None) -> None:
        changes = [change for change, _ in batch]
        doubt = doubt or Doubt()
        try:
            outcomes = await self._attempt(changes, doubt)
        except Exception as failure:
            error = failure
            if len(batch) > 1 and not (isinstance(error, StoreError) and not isinstance(error, DatabaseCorrupt)):
                # One of them may be to blame: halves find it, and the others go through. A database that is down,
                # full or locked is nobody's fault; asking it a hundred times more would only take longer.
                middle = len(batch) // 2
                await self._group(batch[:middle], doubt)
                await self._group(batch[middle:], doubt)
                return
            if doubt.since is not None and not isinstance(error, Refusal | OutcomeUnknown):
                # Whatever is in the way now, the first try may have gone through: nobody is told that nothing was.
                error = OutcomeUnknown(_keys(changes), str(error))
                error.__cause__ = failure
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        _answer(batch, outcomes)

    async def _attempt(self, changes: list[Change], doubt: Doubt) -> list[Outcome]:
        """One group, tried until it is written or refused. Keys make every further try safe."""
        lost = 0
        while True:
            job = GroupJob(self.heads, changes)
            try:
                await self.store.group(job)
                return job.outcomes
            except Lost as error:
                lost += 1
                self.heads.wary = Heads.WARY_GROUPS
                self.heads.forget()
                blocked = isinstance(error, Blocked)
                if blocked and len(changes) > 1:
                    raise Conflict(str(error), lost) from error  # halves find whom it concerns; the others go on
                if doubt.since is not None:  # what is in the way may be the first try itself, still being written
                    if self.ports.monotonic() - doubt.since > self.patience_s:
                        raise Conflict(str(error), lost) from error
                elif lost >= (TRIES_BLOCKED if blocked else self.tries):
                    raise Conflict(str(error), lost) from error
                await self._pause()
            except Broken as error:
                self.heads = Heads()
                if doubt.since is None:
                    doubt.since = self.ports.monotonic()
                elif self.ports.monotonic() - doubt.since > self.patience_s:
                    raise OutcomeUnknown(_keys(changes), str(error)) from error
                await self.ports.sleep(PAUSE_BROKEN_S)
            except BaseException:  # what was decided is not written: postings are not as it would have left them
                self.heads.forget()
                raise

    async def _pause(self) -> None:
        await self.ports.sleep(PAUSE_S * (0.25 + self.ports.random()))

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


def _answer(batch: list[Waiting], outcomes: list[Outcome]) -> None:
    """Tell every caller what became of its change. Only ever after COMMIT."""
    for (_, future), outcome in zip(batch, outcomes, strict=True):
        if future.done():
            continue  # the caller has gone; what it asked for has happened all the same
        if isinstance(outcome, Refusal):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)


def _done(outcome: Outcome) -> Done:
    if isinstance(outcome, Refusal):
        raise outcome
    return outcome


def _keys(changes: list[Change]) -> str:
    keys = [intent.key for change in changes for intent in change.intents]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")


def _let_others_run() -> asyncio.Future[None]:
    loop = asyncio.get_running_loop()
    turn: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_end, turn)
    return turn


def _end(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
