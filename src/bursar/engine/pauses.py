"""What people have switched off: whole flows, or rails. Known here a moment late, and obeyed by every process.

And what had to be left meanwhile, for this or because the database was away: due again as soon as it can go on, not
only when its lease is over.
"""

from __future__ import annotations

from typing import Any

from bursar.engine.flow import Flow, Item
from bursar.model.machine import State
from bursar.store import Store

PAUSES_S = 2.0  # how old what we know may be when somebody is called


class Pauses:
    """As one process knows them, and what they hold up there."""

    def __init__(self, store: Store, worker: str) -> None:
        self.now: frozenset[tuple[str, str]] = frozenset()  # (kind, name)
        self._store = store
        self._worker = worker
        self._read_s = -PAUSES_S
        self._held: set[int] = set()  # records that were not called for
        self._left: set[int] = set()  # records that can go on

    async def stop(self, flow: Flow[Any], state: State, item: Item[Any]) -> bool:
        """Whether this call is switched off. A rail's pause spares what gives money back (W15)."""
        if self._store.ports.monotonic() - self._read_s >= PAUSES_S:
            await self.read()
        if not self.now or ("flow", flow.name) in self.now:
            return bool(self.now)
        return not state.gives_back and ("rail", flow.rail(item, state.action or "")) in self.now

    def hold(self, number: int) -> None:
        """A record that is not called for now: it goes on with the end of a pause, not with that of its lease."""
        self._held.add(number)

    def leave(self, number: int) -> None:
        """A record that could not be written down: it goes on as soon as the database answers."""
        self._left.add(number)

    async def read(self) -> None:
        """Learn what is switched off, and make due what can go on; if that can't be said now, next time."""
        self._read_s = self._store.ports.monotonic()
        before = self.now
        self.now = frozenset((pause.kind, pause.name) for pause in await self._store.read.pauses.list())
        if before - self.now:
            self._left |= self._held
            self._held.clear()
        if self._left:
            left = sorted(self._left)
            await self._store.single().records.wake_held(left, self._worker)
            self._left.difference_update(left)
