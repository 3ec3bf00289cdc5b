"""A batch of changes: what has to be read for it, and what is written once each of its changes is decided.

The result of each change is what it would have been alone, in that order (L17): `Decision` decides it on the state as
its predecessors have left it. If the write conflicts with another transaction, the whole batch is read and decided
again, refusals included.

`prepare` and `commit` are the loop that every entry and every transition goes through: read set → decide → write set.
The store only reads and writes. On PostgreSQL it runs on the event loop, and `prepare` and the write may be on two
connections; on SQLite all of it runs on the writer's thread inside one transaction (`store.run_batch`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bursar.model.entries import Intent
from bursar.model.errors import Refusal
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.selection import NeedMorePostings, PoolKey
from bursar.store.batch import (
    READ_MAX,
    BatchSession,
    LoadedState,
    PreparedBatch,
    ReadSet,
    WriteConflict,
    WriterCache,
    WriteSet,
)
from bursar.writer.change import Change
from bursar.writer.decision import Decision, Effects, Result, accounts_of
from bursar.writer.records import records_to_read, rows_to_read

REUSE_MAX = 16  # changes of a batch that reuses cached postings: of a larger one, a round trip is a small part
READ_MORE = 8  # times as many postings, whenever those read so far are too few


class Batch:
    """Changes that are committed together; `after` is what the batch before it is just writing."""

    def __init__(
        self,
        cache: WriterCache,
        changes: Sequence[Change],
        *,
        after: Effects | None = None,
        first_read: int,
        reuses_postings: bool = False,
    ) -> None:
        self.cache = cache
        self.changes = changes
        self.results: list[Result] = []
        self._after = after
        self._first_read = first_read
        self._reuses_postings = reuses_postings and after is None and len(changes) <= REUSE_MAX
        self._read = ReadSet()
        self._decision: Decision | None = None
        self._writes = WriteSet()
        self._pessimistic = False  # a refusal depends on what was not read

    def read_set(self) -> ReadSet:
        """Unknown accounts, keys, pools of those who pay (or owe), named postings and guarded balances."""
        cache = self.cache
        read = ReadSet(accounts=set(), numbers=0, keys=[], pools={}, named=[], guarded=[])
        guarded: set[tuple[int, int]] = set()
        for change in self.changes:
            if change.active:
                read.accounts.update(path for path in change.active if path not in cache.accounts)
            for intent in change.intents:
                read.numbers += 1
                read.keys.append((intent.scope, intent.key))
                read.named += intent.consume
                self._read_pools(intent, read, guarded)
            for move in change.moves:
                read.numbers += not move.version
        read.guarded = sorted(guarded)
        pessimistic = bool(cache.pessimistic) or self._pessimistic
        read.optimistic = (
            not (pessimistic or guarded)
            and (read.pools.keys() <= cache.pools.keys() if self._reuses_postings else not read.pools)
            and all(number in cache.live for number in read.named)
        )
        if self._after is None and pessimistic and not all(change.plain for change in self.changes):
            read.records = records_to_read(self.changes)
        if any(change.moves for change in self.changes):
            read.rows = rows_to_read(self.changes)
        self._read = read
        return read

    def _read_pools(self, intent: Intent, read: ReadSet, guarded: set[tuple[int, int]]) -> None:
        accounts, assets = self.cache.accounts, self.cache.assets
        if len(intent.legs) == 1 and not intent.consume:
            leg = intent.legs[0]
            source, target, asset = accounts.get(leg.source), accounts.get(leg.target), assets.get(leg.asset)
            plain = not intent.pins and intent.hold is None
            if plain and source and target and asset and source.no_overdraft and target.no_overdraft:
                read.pools[source.id, asset.id, PLUS] = self._first_read  # most entries; the same as below
                return
        read.accounts |= accounts_of(intent).difference(accounts)
        for (path, code), delta in intent.deltas().items():
            account, asset = accounts.get(path), assets.get(code)
            if account is None or asset is None:
                continue  # refused by name when it is decided
            if account.pays_from_postings:
                owes = account.may_owe(asset)
                if delta < 0 or intent.consume:
                    read.pools[account.id, asset.id, PLUS] = self._first_read
                if owes and (delta > 0 or intent.consume):
                    read.pools[account.id, asset.id, MINUS] = self._first_read
                if owes and account.floor(asset) is not None:
                    guarded.add((account.id, asset.id))

    async def decide(self, loaded: LoadedState, session: BatchSession) -> WriteSet | None:
        """Decide every change in order. None: a refusal depends on what was not read; read pessimistically first."""
        try:
            return await self._decide(loaded, session)
        except BaseException:  # whatever it is: what was done so far to the cached postings will not happen
            self.cache.drop_postings()
            raise

    async def _decide(self, loaded: LoadedState, session: BatchSession) -> WriteSet | None:
        if self._decision is not None:  # decided before, on too little
            self._decision.undo(0)
            self._decision = None
        read_counts = {key: len(postings) for key, postings in loaded.pools.items()}
        if self._after is not None:
            loaded = self._after.apply(loaded, self._read.named)
        decision = Decision(self.state(loaded, read_counts), loaded)
        self.results = []
        while len(self.results) < len(self.changes):
            try:
                for change in self.changes[len(self.results) :]:
                    self.results.append(decision.change(change))
            except NeedMorePostings as need:
                decision.again()
                await self.read_more(decision, need, session)
        if decision.unsure and self._after is not None:  # what is being written beside it can't be read: wait for it
            raise WriteConflict("a refusal relies on what another batch is just writing")
        if decision.unsure or (loaded.optimistic and decision.refused):
            self.cache.drop_postings()
            self._pessimistic = True
            return None
        self._decision = decision
        self._writes = decision.write_set(self.cache.cached_accounts)
        return self._writes

    def state(self, loaded: LoadedState, read_counts: Mapping[PoolKey, int]) -> LedgerState:
        """The state to decide on. `read_counts` says how many postings of each pool were read from the store."""
        cache = self.cache
        state = LedgerState(cache.accounts, cache.assets, cache.books)
        if self._reuses_postings:
            state.live, state.pools = cache.live, cache.pools
        else:
            cache.pools = {}  # they will not be what they were
        for key, postings in loaded.pools.items():
            most = self._read.pools[key]
            state.add_postings(postings, key=key, complete=read_counts[key] < most or most >= READ_MAX)
        state.add_postings(loaded.named, key=None)
        for account_asset in self._read.guarded:
            state.balances[account_asset] = loaded.guarded.get(account_asset, (0, 0))[0]
        return state

    async def read_more(self, decision: Decision, need: NeedMorePostings, session: BatchSession) -> None:
        """The postings read of a pool are too few: read more of it, and go on with the change that needs them.

        Every posting that is live at this later moment gets into the pool, so no change is refused for a lack of
        postings that exist; if one of those read before is gone by now, the write conflicts.
        """
        state = decision.state
        key = next(key for key, pool in state.pools.items() if pool is need.pool)
        most = self._read.pools[key] = min(READ_MAX, self._read.pools[key] * READ_MORE)
        found = await session.pool(key, most)
        known = {-minus for _, minus in need.pool.items}
        known.update(p.id for step in decision.steps for p in step.plan.envelope.consumes)
        if self._after is not None:
            known |= self._after.spent
        fresh = [p for p in found if p.id not in known]
        state.extend_pool(key, fresh, complete=len(found) < most or most >= READ_MAX)

    @property
    def effects(self) -> Effects | None:
        """What a batch that is decided after this one has to take into account; None before this one is decided."""
        return None if self._decision is None else self._decision.effects(self._writes)

    def refused_keys(self) -> list[tuple[str, str]]:
        """Keys of what was refused. If one of them exists, an earlier attempt was written, and that is the answer."""
        pairs = zip(self.changes, self.results, strict=True)
        return [(i.scope, i.key) for change, result in pairs if isinstance(result, Refusal) for i in change.intents]


async def prepare(batch: Batch, session: BatchSession) -> PreparedBatch:
    """Read and decide, until nothing that was decided depends on what was not read."""
    cache = batch.cache
    cache.use_connection(session.connection)
    if cache.generation == 0:
        cache.reset(await session.rules())
    while True:
        cache.trim()
        read = batch.read_set()
        if read.accounts:  # which postings to read depends on them
            for account in await session.accounts(sorted(read.accounts)):
                cache.accounts[account.path] = account
            read = batch.read_set()
        loaded = await session.load(read, cache)
        if loaded.generation != cache.generation:
            cache.reset(await session.rules())
            continue
        writes = await batch.decide(loaded, session)
        if writes is None:  # a refusal depends on what was not read: now everything is
            continue
        if not loaded.keys_read and await session.existing(batch.refused_keys()):
            cache.on_conflict()  # an earlier attempt was written, and its receipt is the answer: read all keys
            continue
        return PreparedBatch(loaded.generation, writes, cache, session.connection)


async def commit(batch: Batch, session: BatchSession) -> None:
    """Read, decide and write. A batch of refusals and replays writes nothing, and waits for no disk."""
    prepared = await prepare(batch, session)
    if not prepared.writes.empty:
        await session.write(prepared)
