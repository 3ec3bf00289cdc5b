"""Sidings: where changes wait that are in somebody's way, so that nobody waits behind them.

A user of the library may hold rows in a transaction of his own for as long as he likes. A group that needs one of them
can't be written, and the lane does not try it twice: it hands the group over and goes on. Here, on a connection of its
own that never waits for long, halves find whom it concerns; the others go through. Whoever is left is tried again now
and then, and told `Conflict` before long. For the lane all that happens as if in another process: every write checks
itself. A change is in the lane or in one siding, never in both.

What was found to be held is remembered for some seconds after: who needs the same comes here at once, and the lane is
not stopped for each try of a caller that does not give up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterator, Mapping
from functools import partial
from typing import Any

from bursar.model.accounts import Account
from bursar.model.errors import Conflict
from bursar.writer.change import Change
from bursar.writer.tries import GROUP_MAX, Tries, Waiting, fail, in_doubt

WAIT_S = 1.5  # in a siding, before contention is reported
SIFT_S = 5.0  # to find those who are blocked among many; then the rest wait together
AGAIN_MIN_S = 0.05  # between two tries of those who wait in a siding; twice as long each time, up to
AGAIN_MAX_S = 0.4
PROBES = 2  # of those who are blocked together: how many are found to be blocked alone before all wait again
HELD_S = 5.0  # after somebody was found blocked: who needs the same is set aside at once
SWEEP_S = 1.0
HELD = "another transaction holds a posting or key that this one needs"

log = logging.getLogger("bursar.writer")

# What may be held: who pays ("alice") and who receives ("to bob"), postings by number, keys, records and operations.
Name = str | int | tuple[str, ...]


class Siding:
    """Changes that need the same rows."""

    __slots__ = ("served", "tried", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Waiting] = []
        self.tried: list[Waiting] = []  # those of them that were tried last
        self.served = False  # somebody sees to them


class Sidings:
    """All of them, and what is known to be held."""

    def __init__(self, tries: Tries) -> None:
        self.held: dict[Name, tuple[Siding, float]] = {}  # → who waits for it, and until when we believe that it is
        self.tasks: dict[asyncio.Task[None], None] = {}
        self._tries = tries
        self._ports = tries.ports
        self._sweep_at = 0.0
        self._turn = asyncio.Lock()  # one siding at a time, so that those who may not be blocked at all wait for one

    def take(self, batch: list[Waiting]) -> None:
        """See to a group that is blocked as a whole."""
        now = self._ports.monotonic()
        for waiting in batch:
            waiting.since = now
            waiting.tries = 1
        self._start(self._sift(batch), batch)

    def divert(self, waiting: Waiting) -> bool:
        """See to a change, if it needs what is known to be held."""
        waiting.since = self._ports.monotonic()
        siding = self._siding(waiting.change)
        if siding is None:
            return False
        self._join(siding, [waiting], 0.0)
        return True

    async def _sift(self, batch: list[Waiting]) -> None:
        """Find those who are blocked among those who are together. Once it takes too long, they wait together."""
        if len(batch) == 1 or self._ports.monotonic() - batch[0].since > SIFT_S:
            siding = self._siding(batch[0].change) or Siding()
            if len(batch) == 1:
                self._mark(siding, batch[0].change)
            self._join(siding, batch, AGAIN_MIN_S)
            return
        middle = len(batch) // 2
        for half in (batch[:middle], batch[middle:]):
            unknown = [waiting for waiting in half if not self._known(waiting)]
            for left in await self._try(unknown) if unknown else ():
                await self._sift(left)

    async def _try(self, batch: list[Waiting]) -> list[list[Waiting]]:
        groups = await self._tries.settle(batch, aside=True)
        for group in groups:
            for waiting in group:
                waiting.tries += 1
        return groups

    def _known(self, waiting: Waiting) -> bool:
        """Whether it needs what another was just found to be blocked by: then it waits with that one."""
        siding = self._siding(waiting.change)
        if siding is not None:
            self._join(siding, [waiting], AGAIN_MIN_S)
        return siding is not None

    async def _serve(self, siding: Siding, again_s: float) -> None:
        """Try those who wait again and again, until there are none."""
        while siding.waiting:
            if again_s:
                await self._ports.sleep(again_s)
            batch, siding.waiting = siding.waiting[:GROUP_MAX], siding.waiting[GROUP_MAX:]
            siding.tried = batch
            left, alone = await self._round(siding, batch)
            still = len(left) + len(alone)
            left, alone = self._patient(left), self._patient(alone)
            siding.waiting = left + siding.waiting + alone  # whoever was not tried alone is next
            if not still:
                again_s = 0.0
            elif still < len(batch):
                again_s = AGAIN_MIN_S
            else:
                again_s = min(AGAIN_MAX_S, max(AGAIN_MIN_S, 2 * again_s))
        siding.served = False

    async def _round(self, siding: Siding, batch: list[Waiting]) -> tuple[list[Waiting], list[Waiting]]:
        """Try them together, and if that is blocked, some alone: who is left, and who is left although tried alone.

        That somebody pays from the same account does not mean that it needs the same posting.
        """
        left = await self._try_again(batch)
        alone: list[Waiting] = []
        if len(batch) == 1:
            left, alone = alone, left
        while left and len(alone) < PROBES:
            alone += await self._try_again([left.pop(0)])
        for waiting in alone:
            self._mark(siding, waiting.change)
        return left, alone

    async def _try_again(self, batch: list[Waiting]) -> list[Waiting]:
        async with self._turn:
            return [waiting for group in await self._try(batch) for waiting in group]

    def _patient(self, batch: list[Waiting]) -> list[Waiting]:
        """Those who have time left; the others are told."""
        patient = []
        for waiting in batch:
            if self._overdue(waiting):
                fail([waiting], Conflict(HELD, waiting.tries))
            else:
                patient.append(waiting)
        return patient

    def _overdue(self, waiting: Waiting) -> bool:
        now = self._ports.monotonic()
        if waiting.doubt is not None:  # in the way may be its first try, still being written
            return now - waiting.doubt > self._tries.patience_s
        return now - waiting.since > WAIT_S

    def _join(self, siding: Siding, batch: list[Waiting], again_s: float) -> None:
        siding.waiting += batch
        if not siding.served:
            siding.served = True
            self._start(self._serve(siding, again_s), siding)

    def _start(self, work: Coroutine[Any, Any, None], whose: list[Waiting] | Siding) -> None:
        task = asyncio.get_running_loop().create_task(work, name="bursar-siding")
        self.tasks[task] = None
        task.add_done_callback(partial(self._ended, whose))

    def _ended(self, whose: list[Waiting] | Siding, task: asyncio.Task[None]) -> None:
        """Tell those who would wait for ever if it ended by a mistake of ours."""
        self.tasks.pop(task)
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        log.critical("changes that were set aside could not be tried again", exc_info=error)
        if isinstance(whose, Siding):
            waiting, whose.waiting, whose.served = [*whose.tried, *whose.waiting], [], False
        else:
            waiting = whose
        in_doubt(waiting, self._ports.monotonic())
        fail(waiting, error if isinstance(error, Exception) else Conflict(repr(error), 1))

    def _mark(self, siding: Siding, change: Change) -> None:
        until = self._ports.monotonic() + HELD_S
        for name in own(change, self._tries.heads.accounts):
            self.held[name] = (siding, until)

    def _siding(self, change: Change) -> Siding | None:
        """Where those wait who need what this one needs."""
        now = self._ports.monotonic()
        if now >= self._sweep_at:
            self.held = {name: (siding, until) for name, (siding, until) in self.held.items() if until > now}
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
    for operation in (*change.operations, *([change.remember] if change.remember else ())):
        yield operation.scope, operation.id, operation.op


def own(change: Change, accounts: Mapping[str, Account]) -> Iterator[Name]:
    """The same, without what it shares with strangers: accounts that pay without postings, and those from which it only
    takes a posting by number (one account has all held money). They must not wait because this one does."""
    shared: set[Name] = set()
    for intent in change.intents:
        for leg in intent.legs:
            source, target = accounts.get(leg.source), accounts.get(leg.target)
            if intent.consume or source is None or not source.selects:
                shared.add(leg.source)
            if target is None or not target.selects or target.never_owes:  # it only gets a posting
                shared.add(f"to {leg.target}")
    return (name for name in needs(change) if name not in shared)
