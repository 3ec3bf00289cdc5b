"""One group, tried until it is written or refused, or until it is clear that it is in somebody's way.

Keys make every further try safe. What one caller's change is to blame for, halves find: the others go through. Nobody
is answered before COMMIT, and nobody who can't be told what became of an earlier try is told that nothing was written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from bursar.model.errors import Conflict, DatabaseCorrupt, DatabaseUnavailable, OutcomeUnknown, Refusal, StoreError
from bursar.ports import Ports
from bursar.store import Store
from bursar.store.group import Blocked, Broken, Heads, Lost, Unreachable
from bursar.writer.change import Change, Done
from bursar.writer.decide import GroupJob, Outcome

GROUP_MAX = 512  # changes in one unit
PAUSE_S = 0.004  # between tries, with jitter; short, because a rival needs only milliseconds for its turn
PAUSE_BROKEN_S = 0.1


class Waiting:
    """A change whose caller waits for the answer."""

    __slots__ = ("change", "doubt", "future", "since", "tries")

    def __init__(self, change: Change, future: asyncio.Future[Done]) -> None:
        self.change = change
        self.future = future
        self.doubt: float | None = None  # since when an earlier try may have been written, or may yet be
        self.since = 0.0  # when it was set aside, because it is in somebody's way
        self.tries = 0  # in which it was so


class Tries:
    """How a group is tried: in the lane, on what it has kept in mind; or aside, as if by another process."""

    def __init__(self, store: Store, tries: int, patience_s: float) -> None:
        self.store = store
        self.ports: Ports = store.ports
        self.heads = Heads()  # the lane's
        self.tries = tries
        self.patience_s = patience_s

    async def settle(self, batch: list[Waiting], *, aside: bool = False) -> list[list[Waiting]]:
        """Answer all of them, but for those that are returned: each group of these is blocked as a whole."""
        try:
            outcomes = await self._attempt(batch, aside)
        except Blocked:
            return [batch]
        except Exception as error:
            if len(batch) > 1 and not (isinstance(error, StoreError) and not isinstance(error, DatabaseCorrupt)):
                # One of them may be to blame: halves find it, and the others go through. A database that is down,
                # full or locked is nobody's fault; asking it a hundred times more would only take longer.
                middle = len(batch) // 2
                left = await self.settle(batch[:middle], aside=aside)
                return left + await self.settle(batch[middle:], aside=aside)
            fail(batch, error)
            return []
        answer(batch, outcomes)
        return []

    async def _attempt(self, batch: list[Waiting], aside: bool) -> list[Outcome]:
        lost = 0
        away: float | None = None  # since when no connection can be made
        while True:
            if aside:
                heads = Heads()  # of its own: what the lane keeps in mind stays as the lane has left it
                heads.wary = 1
            else:
                heads = self.heads
            job = GroupJob(heads, [waiting.change for waiting in batch], aside=aside)
            try:
                await self.store.group(job)
                return job.outcomes
            except Blocked:  # trying again at once is no use
                heads.forget()
                raise
            except Lost as error:
                lost += 1
                heads.wary = Heads.WARY_GROUPS
                heads.forget()
                if (doubt := _doubt(batch)) is not None:  # in the way may be the first try itself, still being written
                    if self.ports.monotonic() - doubt > self.patience_s:
                        raise Conflict(str(error), lost) from error
                elif lost >= self.tries:
                    raise Conflict(str(error), lost) from error
                await self.pause()
            except Broken as error:
                self.heads = self.heads if aside else Heads()
                now = self.ports.monotonic()
                away = now if away is None else away
                doubt = _doubt(batch)
                if now - (away if doubt is None else doubt) > self.patience_s:
                    raise DatabaseUnavailable(str(error)) from error  # `fail` tells those in doubt what that means
                if not isinstance(error, Unreachable):
                    in_doubt(batch, now)
                await self.ports.sleep(PAUSE_BROKEN_S)
            except BaseException:  # what was decided is not written: postings are not as it would have left them
                heads.forget()
                raise

    async def pause(self) -> None:
        """Let a rival have its turn."""
        await self.ports.sleep(PAUSE_S * (0.25 + self.ports.random()))


def answer(batch: Sequence[Waiting], outcomes: Sequence[Outcome]) -> None:
    """Tell every caller what became of its change. Only ever after COMMIT."""
    for waiting, outcome in zip(batch, outcomes, strict=True):
        if waiting.future.done():
            continue  # the caller has gone; what it asked for has happened all the same
        if isinstance(outcome, Refusal):
            waiting.future.set_exception(outcome)
        else:
            waiting.future.set_result(outcome)


def fail(batch: Sequence[Waiting], error: Exception) -> None:
    """Tell every caller what was in the way. If an earlier try may have gone through, nobody is told that none has."""
    for waiting in batch:
        told = error
        if waiting.doubt is not None and not isinstance(error, Refusal | OutcomeUnknown):
            told = OutcomeUnknown(keys_of([waiting.change]), str(error))
            told.__cause__ = error
        if not waiting.future.done():
            waiting.future.set_exception(told)


def in_doubt(batch: Sequence[Waiting], now: float) -> None:
    """From now on, nobody knows whether a try of these was written."""
    for waiting in batch:
        if waiting.doubt is None:
            waiting.doubt = now


def _doubt(batch: Sequence[Waiting]) -> float | None:
    """Since when one of them has been in doubt."""
    return min((waiting.doubt for waiting in batch if waiting.doubt is not None), default=None)


def keys_of(changes: Sequence[Change]) -> str:
    """The keys by which callers may ask later: the first few."""
    keys = [intent.key for change in changes for intent in change.intents]
    return ", ".join(keys[:5]) + (f" and {len(keys) - 5} more" if len(keys) > 5 else "")
