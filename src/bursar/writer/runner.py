"""One batch, retried until it is written or refused, or until it is clear that another transaction blocks it.

Keys make every retry safe. If one change makes the whole batch fail, bisection finds it, and the others go through. No
caller gets an answer before COMMIT; and while an earlier attempt may have been written, no caller is told that nothing
was (L18).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from bursar.model.errors import Conflict, DatabaseCorrupt, DatabaseUnavailable, OutcomeUnknown, Refusal, StoreError
from bursar.ports import Ports
from bursar.store import Store
from bursar.store.batch import CommitUnknown, ConnectionFailed, Lane, LockTimeout, WriteConflict, WriterCache
from bursar.writer.batch import Batch, commit
from bursar.writer.change import Change, ChangeResult
from bursar.writer.decision import Effects, Result

BATCH_MAX = 512  # changes in one transaction
PAUSE_S = 0.004  # after a conflict, with jitter; short, because the other transaction needs only milliseconds
RECONNECT_PAUSE_S = 0.1


@dataclass(slots=True, eq=False)
class PendingChange:
    """A change whose caller waits for the result."""

    change: Change
    future: asyncio.Future[ChangeResult]
    commit_unknown_since: float | None = None  # an earlier attempt may have been written, or may yet be
    blocked_since: float = 0.0  # when it was found to need what another transaction holds
    attempts: int = 0  # since then


class BatchRunner:
    """Commits batches. The retry policy: conflicts are retried `conflicts_max` times, and an unreachable database or an
    unknown commit for `patience_s`; a lock that another transaction holds is not waited for here (`blocked`)."""

    def __init__(self, store: Store, conflicts_max: int, patience_s: float) -> None:
        self.store = store
        self.ports: Ports = store.ports
        self.cache = WriterCache()
        self.conflicts_max = conflicts_max
        self.patience_s = patience_s

    def batch(self, pending: Sequence[PendingChange], cache: WriterCache, after: Effects | None = None) -> Batch:
        """The changes of these callers as one batch; `after` is what the batch before it is just writing."""
        return Batch(
            cache,
            [one.change for one in pending],
            after=after,
            first_read=self.store.first_read,
            reuses_postings=self.store.reuses_postings,
        )

    async def run(self, pending: list[PendingChange], lane: Lane = Lane.WRITE) -> list[list[PendingChange]]:
        """Answer all of them, except those that are returned: each list of these is blocked as a whole."""
        try:
            results = await self._attempt(pending, lane)
        except LockTimeout:
            return [pending]
        except Exception as error:
            if len(pending) > 1 and not (isinstance(error, StoreError) and not isinstance(error, DatabaseCorrupt)):
                # One of them may be the cause: bisect, and the others go through. A database that is down, full or
                # locked is no caller's mistake; to ask it a hundred times more would only take longer.
                middle = len(pending) // 2
                blocked = await self.run(pending[:middle], lane)
                return blocked + await self.run(pending[middle:], lane)
            fail(pending, error)
            return []
        answer(pending, results)
        return []

    async def _attempt(self, pending: list[PendingChange], lane: Lane) -> list[Result]:
        conflicts = 0
        failed_since: float | None = None  # no connection could be made since then
        while True:
            # Beside the others, a cache of its own: theirs stays as their last batch has left it.
            cache = WriterCache(pessimistic=1) if lane is Lane.BLOCKED else self.cache
            batch = self.batch(pending, cache)
            try:
                await self.store.run_batch(partial(commit, batch), lane)
                return batch.results
            except LockTimeout:  # retrying at once is no use
                cache.drop_postings()
                raise
            except WriteConflict as error:
                conflicts += 1
                optimistic = not cache.pessimistic
                cache.on_conflict()
                if (since := unknown_since(pending)) is not None:  # with the first attempt itself, still being written
                    if self.ports.monotonic() - since > self.patience_s:
                        raise Conflict(str(error), conflicts) from error
                elif conflicts >= self.conflicts_max:
                    raise Conflict(str(error), conflicts) from error
                if not optimistic:  # else it may have been our own assumption that was wrong
                    await self.pause()
            except ConnectionFailed as error:
                if lane is not Lane.BLOCKED:
                    self.cache = WriterCache()
                now = self.ports.monotonic()
                failed_since = now if failed_since is None else failed_since
                since = unknown_since(pending)
                if now - (failed_since if since is None else since) > self.patience_s:
                    raise DatabaseUnavailable(str(error)) from error  # or OutcomeUnknown: see `fail`
                if isinstance(error, CommitUnknown):
                    mark_unknown(pending, now)
                await self.ports.sleep(RECONNECT_PAUSE_S)
            except BaseException:  # what was decided is not written: postings are not as it would have left them
                cache.drop_postings()
                raise

    async def pause(self) -> None:
        """Let the other transaction finish."""
        await self.ports.sleep(PAUSE_S * (0.25 + self.ports.random()))


def answer(pending: Sequence[PendingChange], results: Sequence[Result]) -> None:
    """Give every caller its result. Only ever after COMMIT."""
    for one, result in zip(pending, results, strict=True):
        if one.future.done():
            continue  # the caller has gone; its change is committed all the same
        if isinstance(result, Refusal):
            one.future.set_exception(result)
        else:
            one.future.set_result(result)


def fail(pending: Sequence[PendingChange], error: Exception) -> None:
    """Raise the error at every caller; where an earlier attempt may have been written, as `OutcomeUnknown`."""
    for one in pending:
        raised = error
        if one.commit_unknown_since is not None and not isinstance(error, Refusal | OutcomeUnknown):
            raised = OutcomeUnknown(keys_of([one.change]), str(error))
            raised.__cause__ = error
        if not one.future.done():
            one.future.set_exception(raised)


def mark_unknown(pending: Sequence[PendingChange], now: float) -> None:
    """From now on, an attempt of these may have been written."""
    for one in pending:
        if one.commit_unknown_since is None:
            one.commit_unknown_since = now


def unknown_since(pending: Sequence[PendingChange]) -> float | None:
    """Since when an attempt of one of them may have been written."""
    return min((one.commit_unknown_since for one in pending if one.commit_unknown_since is not None), default=None)


def keys_of(changes: Sequence[Change]) -> str:
    """The keys by which callers may ask later: the first few."""
    keys = [intent.key for change in changes for intent in change.intents]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
