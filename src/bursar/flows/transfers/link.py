"""What the ledger's database knows of a core: read before every login, written at first contact
(rails/trading/connection).

A core is bound to its ledger, and the ledger to its core, both for ever. A second core under the same name, or an empty
data folder beside an old database, would be a second place for the same money.
"""

from __future__ import annotations

from bursar.model.errors import DatabaseUnavailable
from bursar.rails.trading import CoreRefused, Known
from bursar.store import Store


class CoreUnusable(DatabaseUnavailable):
    """A core is not this ledger's, or does not answer although it has to; `why` says which, and what to do."""

    code = "CORE_UNUSABLE"
    text = "{why}"


class StoreLink:
    """The database's side of one rail."""

    def __init__(self, store: Store, rail: str, *, binds: bool = True) -> None:
        """Without `binds` it only looks: a tool that is pointed at the wrong core must not bind the ledger to it."""
        self._store = store
        self._rail = rail
        self._binds = binds

    async def known(self) -> Known:
        """Who this ledger is, which core it is bound to, and how far that core's log is known."""
        cores = self._store.read.cores
        core = await cores.get(self._rail)
        identity = await cores.identity()
        if not identity and self._binds:
            identity = await self._store.single().cores.make_identity(self._store.ports.token())
        bound = "" if core is None else core.identity
        ledger = identity if self._binds or bound else ""
        # What was compared came from the core, too, and what was reconciled rests on it alone.
        seen = 0 if core is None else max(core.sequence, core.compared)
        return Known(ledger=ledger, core=bound, seen=seen)

    async def bind(self, core: str) -> None:
        """First contact: from now on this rail is that core."""
        if not self._binds:
            return
        if await self._store.single().cores.bind(self._rail, core):
            return
        found = await self._store.read.cores.get(self._rail)
        if found is None:
            raise CoreRefused("(none: that core is bound to another rail of this ledger)", core)
        if found.identity != core:
            raise CoreRefused(found.identity, core)
