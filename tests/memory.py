"""As much of a database as a batch needs, in dictionaries: `bursar.store.batch.BatchSession` without any waiting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bursar.model.accounts import Account, Book
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.model.records import ExistingEntry
from bursar.model.selection import PoolKey
from bursar.store.batch import LoadedState, PreparedBatch, ReadSet, RuleSet, WriteConflict, WriterCache, WriteSet

MAIN = Book(id=1, name="main")


class MemoryLedger:
    """Live postings, keys and guarded balances. A write that spends what is not live conflicts, and changes nothing."""

    connection = 0

    def __init__(self, asset: Asset, accounts: Iterable[Account], live: Iterable[Posting] = ()) -> None:
        self.asset = asset
        self.known = {account.path: account for account in accounts}
        self.live = {p.id: p for p in live}
        self.entries: dict[tuple[str, str], ExistingEntry] = {}
        self.guarded: dict[tuple[int, int], tuple[int, int]] = {}
        self.number = 100
        self.reads_keys = True
        self.loads = 0  # with a read
        self.optimistic_loads = 0  # without one
        self.pool_reads = 0  # beside those

    def cache(self) -> WriterCache:
        """What a process knows that has read all rules and accounts."""
        cache = WriterCache()
        cache.reset(self._rules())
        cache.accounts = dict(self.known)
        return cache

    def _rules(self) -> RuleSet:
        return RuleSet(1, {self.asset.code: self.asset}, {"main": MAIN}, set())

    async def rules(self) -> RuleSet:
        return self._rules()

    async def accounts(self, paths: Sequence[str]) -> Sequence[Account]:
        return [self.known[path] for path in paths if path in self.known]

    async def load(self, read: ReadSet, cache: WriterCache) -> LoadedState:
        numbers = list(range(self.number, self.number + read.numbers))
        self.number += read.numbers
        if read.optimistic:
            self.optimistic_loads += 1
            named = [cache.live[number] for number in read.named]
            return LoadedState(cache.generation, numbers, {}, {}, named, {}, optimistic=True)
        self.loads += 1
        return LoadedState(
            1,
            numbers,
            await self.existing(read.keys) if self.reads_keys else {},
            {key: self.largest(key, most) for key, most in read.pools.items()},
            [self.live[number] for number in read.named if number in self.live],
            {key: self.guarded[key] for key in read.guarded if key in self.guarded},
            keys_read=self.reads_keys,
        )

    def largest(self, key: PoolKey, most: int) -> list[Posting]:
        account, asset, sign = key
        mine = [p for p in self.live.values() if (p.account, p.asset) == (account, asset) and p.amount * sign > 0]
        return sorted(mine, key=lambda p: -abs(p.amount))[:most]

    async def pool(self, key: PoolKey, most: int) -> list[Posting]:
        self.pool_reads += 1
        return self.largest(key, most)

    async def existing(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ExistingEntry]:
        return {key: self.entries[key] for key in keys if key in self.entries}

    async def write(self, prepared: PreparedBatch) -> None:
        self.put(prepared.writes)

    def put(self, writes: WriteSet) -> None:
        if any(number not in self.live for number in writes.spent_live):
            raise WriteConflict("a posting was taken")
        for number in writes.spent_live:
            del self.live[number]
        self.live |= {p.id: p for p, live in writes.postings if live}
        self.entries |= {(r[2], r[3]): ExistingEntry(r[0], r[1], r[4], r[7]) for r in writes.envelopes}
        self.guarded |= {(a, s): (balance, version + 1) for a, s, version, balance in writes.guarded}
