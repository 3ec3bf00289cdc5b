"""What people have switched off: whole flows, or rails. Known here a moment late, and obeyed by every process."""

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

    async def read(self) -> None:
        """Learn what is switched off, and make due what a pause that is over has held up; or their leases do."""
        self._read_s = self._store.ports.monotonic()
        before = self.now
        self.now = frozenset((pause.kind, pause.name) for pause in await self._store.read.pauses.list())
        if self._held and before - self.now:
            held, self._held = sorted(self._held), set()
            await self._store.single().records.wake_held(held, self._worker)
