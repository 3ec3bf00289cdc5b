"""Group commit: callers wait together, one unit carries them all.

The next group starts when the last one's commit returns, so a lone caller waits for nobody and many callers share one
fsync. One lane per process: more gained nothing. A refused change is refused alone; the others commit. Nobody is
answered before COMMIT, and cancelling a caller never cancels the unit it rides in (L18).
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from bursar.model.envelope import Receipt
from bursar.model.errors import BursarError, Conflict, DatabaseCorrupt, OutcomeUnknown, Refusal, StoreError
from bursar.ports import Ports
from bursar.store import Store
from bursar.store.group import Broken, Heads, Lost
from bursar.writer.change import Change
from bursar.writer.decide import GroupJob, Outcome
from bursar.writer.saga import SagaCommit

GROUP_MAX = 512  # changes in one unit
TRIES = 12  # before contention is reported
PAUSE_S = 0.001  # between tries; doubles, with jitter
PAUSE_MAX_S = 0.1
PATIENCE_S = 20.0  # how long an ambiguous commit is asked about before the caller is told
FOLD_EVERY = 256  # groups between two looks at the balance cache
FOLD_ABOVE = 64  # parts of one cached balance

Waiting = tuple[Change, "asyncio.Future[tuple[Receipt, ...]]"]


class Writer:
    """The one way rows change."""

    def __init__(self, store: Store, *, tries: int = TRIES, patience_s: float = PATIENCE_S) -> None:
        self.store = store
        self.ports: Ports = store.ports
        self.heads = Heads()
        self.tries = tries
        self.patience_s = patience_s
        self.groups = 0  # units committed, for those who watch
        self._waiting: list[Waiting] = []
        self._runner: asyncio.Task[None] | None = None
        self._sagas = SagaCommit(store, tries)

    async def apply(self, change: Change) -> tuple[Receipt, ...]:
        """Make a change, riding with whoever else is waiting. Raises its refusal."""
        if self.store.split:
            return await self._sagas.apply(change)
        future: asyncio.Future[tuple[Receipt, ...]] = asyncio.get_running_loop().create_future()
        self._waiting.append((change, future))
        if self._runner is None:
            self._runner = asyncio.get_running_loop().create_task(self._run(), name="bursar-writer")
        return await future

    async def apply_in(self, connection: Any, change: Change) -> tuple[Receipt, ...]:
        """Make a change in a transaction that the caller owns: it happens if and when the caller commits."""
        last = ""
        for attempt in range(self.tries):
            # Heads of its own: what this transaction sees is nobody else's business.
            job = GroupJob(Heads(), [change])
            try:
                await self.store.group(job, connection)
            except Lost as lost:
                await self._pause(attempt)
                last = str(lost)
                continue
            except Broken as error:
                raise OutcomeUnknown(_keys([change]), str(error)) from error
            return _receipts(job.outcomes[0])
        raise Conflict(last, self.tries)

    async def close(self) -> None:
        """Wait until everything that was given has been written."""
        while self._runner is not None:
            await asyncio.wait([self._runner])

    async def recover(self) -> dict[str, int]:
        """Finish or undo what a crash left half done. Nothing, unless the store works in split mode."""
        return await self._sagas.recover()

    async def _run(self) -> None:
        try:
            while self._waiting:
                batch, self._waiting = self._waiting[:GROUP_MAX], self._waiting[GROUP_MAX:]
                await self._group(batch)
                self.groups += 1
                if self.groups % FOLD_EVERY == 0:
                    with contextlib.suppress(BursarError):  # the cache is disposable; the next look folds it
                        await self.fold()
                await _let_others_run()  # those just answered may have their next change ready: take them along
        finally:
            self._runner = None

    async def _group(self, batch: list[Waiting]) -> None:
        changes = [change for change, _ in batch]
        try:
            outcomes = await self._attempt(changes)
        except Exception as error:
            if len(batch) > 1 and not (isinstance(error, StoreError) and not isinstance(error, DatabaseCorrupt)):
                # One of them may be to blame: halves find it, and the others go through. A database that is down,
                # full or locked is nobody's fault; asking it a hundred times more would only take longer.
                middle = len(batch) // 2
                await self._group(batch[:middle])
                await self._group(batch[middle:])
                return
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if future.done():
                continue  # the caller has gone; what it asked for has happened all the same
            if isinstance(outcome, Refusal):
                future.set_exception(outcome)
            else:
                future.set_result(outcome)

    async def _attempt(self, changes: list[Change]) -> list[Outcome]:
        """One group, tried until it is written or refused. Keys make every further try safe."""
        lost, broken_since = 0, None
        while True:
            job = GroupJob(self.heads, changes)
            try:
                await self.store.group(job)
                return job.outcomes
            except Lost as error:
                lost += 1
                if lost >= self.tries:
                    raise Conflict(str(error), lost) from error
                await self._pause(lost)
            except Broken as error:
                self.heads = Heads()
                broken_since = broken_since or self.ports.monotonic()
                if self.ports.monotonic() - broken_since > self.patience_s:
                    raise OutcomeUnknown(_keys(changes), str(error)) from error
                await self.ports.sleep(PAUSE_MAX_S)

    async def _pause(self, attempt: int) -> None:
        await self.ports.sleep(min(PAUSE_MAX_S, PAUSE_S * 2**attempt) * (0.5 + self.ports.random()))

    async def fold(self, above: int = FOLD_ABOVE) -> int:
        """Sum up cached balances that have come apart into many small changes. Returns how many."""
        if self.store.split and await self.store.read.sagas.count():
            return 0  # a saga that is rolled forward again would add its change a second time
        crowds = await self.store.read.balances.crowds(above)
        for account, asset in crowds:
            async with self.store.unit() as unit:
                await unit.balances.fold(account, asset)
        return len(crowds)


def _receipts(outcome: Outcome) -> tuple[Receipt, ...]:
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
