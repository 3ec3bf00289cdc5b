"""The lane of blocked changes: where changes wait that need what another transaction holds.

A user of the library may hold rows in a transaction of his own for as long as he likes. A batch that needs one of them
can't be written, and the writer does not try it twice: it hands the batch over and goes on. Here, on a connection of
its own that waits only briefly for locks, bisection finds which changes are blocked; the others go through. The blocked
ones are retried now and then, and refused with `Conflict` before long. For the writer all that happens as if in another
process: every write checks itself. A change is in the writer's queue or in one queue here, never in both.

What was found to be held is remembered for some seconds: a change that needs the same comes here at once, and the
writer is not stopped by every retry of a caller that does not give up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bursar.model.accounts import Account
from bursar.model.errors import Conflict
from bursar.store.batch import Lane
from bursar.writer.change import Change
from bursar.writer.runner import BATCH_MAX, BatchRunner, PendingChange, fail, mark_unknown

WAIT_S = 1.5  # in a queue, before contention is reported
BISECT_S = 5.0  # to find the blocked changes among many; then the rest wait together
RETRY_MIN_S = 0.05  # between two retries of a queue; twice as long each time, up to
RETRY_MAX_S = 0.4
PROBES_MAX = 2  # of changes that are blocked together: how many are found to be blocked alone before all wait again
HELD_S = 5.0  # after a change was found blocked: one that needs the same is routed here at once
SWEEP_S = 1.0
BLOCKED = "another transaction holds a posting or key that this one needs"

log = logging.getLogger("bursar.writer")

# What may be held: who pays ("alice") and who receives ("to bob"), postings by number, keys, records and operations.
Name = str | int | tuple[str, ...]


@dataclass(slots=True, eq=False)
class BlockedQueue:
    """Changes that need the same rows."""

    waiting: list[PendingChange] = field(default_factory=list)
    tried: list[PendingChange] = field(default_factory=list)  # those of them that were tried last
    is_served: bool = False  # a task retries them


class BlockedLane:
    """All queues, and what is known to be held."""

    def __init__(self, runner: BatchRunner) -> None:
        self.held: dict[Name, tuple[BlockedQueue, float]] = {}  # → which queue waits for it, and until when it counts
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._runner = runner
        self._ports = runner.ports
        self._sweep_at = 0.0
        self._turn = asyncio.Lock()  # one queue at a time: a change that may not be blocked at all waits for one only

    def take(self, batch: list[PendingChange]) -> None:
        """Take over a batch that is blocked as a whole."""
        now = self._ports.monotonic()
        for one in batch:
            one.blocked_since = now
            one.attempts = 1
        self._start(self._bisect(batch), batch)

    def route(self, waiting: PendingChange) -> bool:
        """Take over a change, if it needs what is known to be held."""
        waiting.blocked_since = self._ports.monotonic()
        queue = self._queue_of(waiting.change)
        if queue is None:
            return False
        self._join(queue, [waiting], 0.0)
        return True

    async def _bisect(self, batch: list[PendingChange]) -> None:
        """Find the blocked changes of a batch. Once that takes too long, the rest wait together."""
        if len(batch) == 1 or self._ports.monotonic() - batch[0].blocked_since > BISECT_S:
            queue = self._queue_of(batch[0].change) or BlockedQueue()
            if len(batch) == 1:
                self._mark(queue, batch[0].change)
            self._join(queue, batch, RETRY_MIN_S)
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            unknown = [waiting for waiting in half if not self._known(waiting)]
            for left in await self._try(unknown) if unknown else ():
                await self._bisect(left)

    async def _try(self, batch: list[PendingChange]) -> list[list[PendingChange]]:
        blocked = await self._runner.run(batch, Lane.BLOCKED)
        for changes in blocked:
            for one in changes:
                one.attempts += 1
        return blocked

    def _known(self, waiting: PendingChange) -> bool:
        """Whether it needs what another was just found to be blocked by: then it waits with that one."""
        queue = self._queue_of(waiting.change)
        if queue is not None:
            self._join(queue, [waiting], RETRY_MIN_S)
        return queue is not None

    async def _retry_until_empty(self, queue: BlockedQueue, retry_s: float) -> None:
        """Retry a queue until it is empty."""
        while queue.waiting:
            if retry_s:
                await self._ports.sleep(retry_s)
            batch, queue.waiting = queue.waiting[:BATCH_MAX], queue.waiting[BATCH_MAX:]
            queue.tried = batch
            left, alone = await self._round(queue, batch)
            still = len(left) + len(alone)
            left, alone = self._not_overdue(left), self._not_overdue(alone)
            queue.waiting = left + queue.waiting + alone  # one that was not tried alone is next
            if not still:
                retry_s = 0.0
            elif still < len(batch):
                retry_s = RETRY_MIN_S
            else:
                retry_s = min(RETRY_MAX_S, max(RETRY_MIN_S, 2 * retry_s))
        queue.is_served = False

    async def _round(
        self, queue: BlockedQueue, batch: list[PendingChange]
    ) -> tuple[list[PendingChange], list[PendingChange]]:
        """Try them together, and if that is blocked, some alone: which are left, and which although tried alone.

        Two changes that pay from the same account need not need the same posting.
        """
        left = await self._try_again(batch)
        alone: list[PendingChange] = []
        if len(batch) == 1:
            left, alone = alone, left
        while left and len(alone) < PROBES_MAX:
            alone += await self._try_again([left.pop(0)])
        for waiting in alone:
            self._mark(queue, waiting.change)
        return left, alone

    async def _try_again(self, batch: list[PendingChange]) -> list[PendingChange]:
        async with self._turn:
            return [one for changes in await self._try(batch) for one in changes]

    def _not_overdue(self, batch: list[PendingChange]) -> list[PendingChange]:
        """Those that have time left; the others are refused."""
        left = []
        for one in batch:
            if self._overdue(one):
                fail([one], Conflict(BLOCKED, one.attempts))
            else:
                left.append(one)
        return left

    def _overdue(self, waiting: PendingChange) -> bool:
        now = self._ports.monotonic()
        if waiting.commit_unknown_since is not None:  # its own first attempt may be what blocks it
            return now - waiting.commit_unknown_since > self._runner.patience_s
        return now - waiting.blocked_since > WAIT_S

    def _join(self, queue: BlockedQueue, batch: list[PendingChange], retry_s: float) -> None:
        queue.waiting += batch
        if not queue.is_served:
            queue.is_served = True
            self._start(self._retry_until_empty(queue, retry_s), queue)

    def _start(self, work: Coroutine[Any, Any, None], whose: list[PendingChange] | BlockedQueue) -> None:
        task = asyncio.get_running_loop().create_task(work, name="bursar-blocked")
        self.tasks[task] = None
        task.add_done_callback(partial(self._ended, whose))

    def _ended(self, whose: list[PendingChange] | BlockedQueue, task: asyncio.Task[None]) -> None:
        """Answer the callers who would wait for ever if it ended by a bug."""
        self.tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.critical("blocked changes could not be retried", exc_info=error)
        if isinstance(whose, BlockedQueue):
            waiting, whose.waiting, whose.is_served = [*whose.tried, *whose.waiting], [], False
        else:
            waiting = whose
        mark_unknown(waiting, self._ports.monotonic())
        fail(waiting, error if isinstance(error, Exception) else Conflict(repr(error), 1))

    def _mark(self, queue: BlockedQueue, change: Change) -> None:
        until = self._ports.monotonic() + HELD_S
        for name in own(change, self._runner.cache.accounts):
            self.held[name] = (queue, until)

    def _queue_of(self, change: Change) -> BlockedQueue | None:
        """The queue of changes that need what this one needs."""
        now = self._ports.monotonic()
        if now >= self._sweep_at:
            self.held = {name: (queue, until) for name, (queue, until) in self.held.items() if until > now}
            self._sweep_at = now + SWEEP_S
        return next((self.held[name][0] for name in needs(change) if name in self.held), None)


def needs(change: Change) -> Iterator[Name]:
    """What a change may have to wait for."""
    for intent in change.intents:
        for leg in intent.legs:
            yield leg.source
            yield f"to {leg.target}"
        yield from intent.consume
        yield intent.scope, intent.key
    for move in change.moves:
        yield move.flow, move.id
    for operation in (*change.inline_operations, *([change.operation] if change.operation else ())):
        yield operation.key


def own(change: Change, accounts: Mapping[str, Account]) -> Iterator[Name]:
    """The same, without what it shares with strangers: accounts that pay without postings, and those from which it only
    takes a posting by number (one account has all held money). They must not wait because this one does."""
    shared: set[Name] = set()
    for intent in change.intents:
        for leg in intent.legs:
            source, target = accounts.get(leg.source), accounts.get(leg.target)
            if intent.consume or source is None or not source.pays_from_postings:
                shared.add(leg.source)
            if target is None or not target.pays_from_postings or target.no_overdraft:  # it only gets a posting
                shared.add(f"to {leg.target}")
    return (name for name in needs(change) if name not in shared)
