"""The ledger in split mode: what it does differently because a commit may be half done."""

from __future__ import annotations

from typing import Self

from bursar.instance import Bursar
from bursar.ledger import Ledger
from bursar.model.accounts import Account
from bursar.model.actors import check_actor, check_reason
from bursar.model.entries import USER_SCOPE
from bursar.model.errors import Conflict, DatabaseUnavailable
from bursar.sim.split.commit import SagaCommit
from bursar.sim.split.tables import SplitTables
from bursar.store import Store
from bursar.store.tables import Tables
from bursar.writer import Change, ChangeResult, Writer
from bursar.writer.writer import CONFLICTS_MAX, CONSOLIDATE_ABOVE

LAST_COMMITS_TRIES = 200
LAST_COMMITS_PAUSE_S = 0.005


class SplitWriter(Writer):
    """Commits each change by a saga of its own."""

    def __init__(self, store: Store, *, conflicts_max: int = CONFLICTS_MAX) -> None:
        super().__init__(store, conflicts_max=conflicts_max)
        self.sagas = SagaCommit(store, conflicts_max)

    async def apply(self, change: Change) -> ChangeResult:
        """Make a change. Records need a store with transactions."""
        if not change.plain:
            raise DatabaseUnavailable("split mode is for the ledger alone; records need a store with transactions")
        return await self.sagas.apply(change)

    async def consolidate(self, above: int = CONSOLIDATE_ABOVE) -> int:
        """Sum up cached balances, unless a saga that is rolled forward again would add its change a second time."""
        if await SplitTables(self.store.read).steps.count():
            return 0
        return await super().consolidate(above)


class SplitLedger(Ledger):
    """A ledger whose commits take several steps."""

    writer: SplitWriter

    def __init__(self, store: Store) -> None:
        super().__init__(store, SplitWriter(store))

    async def recover(self) -> dict[str, int]:
        """Finish or cleanly abandon what a crash left half done. Safe at any time; a second call does nothing."""
        return await self.writer.sagas.recover()

    async def release_saga(self, id: str, *, actor: str, reason: str) -> int:
        """Give up a commit that `recover` has set aside, if nothing of it was written. Returns how many postings are
        free again."""
        return await self.writer.sagas.release(id, actor=check_actor(actor), reason=check_reason(reason))

    async def freeze(self, path: str) -> Account:
        """Freeze, and wait for the commits that passed their point of no return before it."""
        account = await super().freeze(path)
        steps = SplitTables(self.store.single()).steps
        for _ in range(LAST_COMMITS_TRIES):
            if not any(saga.phase == "finalizing" for saga in await steps.list()):
                return account
            await self.store.ports.sleep(LAST_COMMITS_PAUSE_S)
        raise Conflict("it is in force, but commits before it are unfinished; recover them", LAST_COMMITS_TRIES)

    async def _check_settled(self, unit: Tables) -> None:
        if await SplitTables(unit).steps.count():
            raise Conflict("commits are under way; recover them, or try again", 1)

    async def _only_if_unasked(self, key: str) -> None:
        """A hold that looks closed to us may be so because an earlier try of ours is being finished by recovery."""
        sagas = await SplitTables(self.store.read).steps.list()
        if any((saga.scope, saga.key) == (USER_SCOPE, key) for saga in sagas) or (
            await self.store.read.envelopes.existing([(USER_SCOPE, key)])
        ):
            raise Conflict(f"key {key!r} is being committed by another process", 1)


class SplitBursar(Bursar):
    """An open SQLite database whose ledger commits by saga."""

    ledger: SplitLedger

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        self.ledger = SplitLedger(self.store)
        return self
