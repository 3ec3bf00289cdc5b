"""A batch: the changes of many callers, committed in one transaction. The shapes that writer and store exchange.

The writer owns the loop (`writer/batch.py`): it computes a `ReadSet`, the store returns a `LoadedState`, the writer
decides, and the store writes the `WriteSet`. The store decides nothing and calls nothing back. What was read may be
stale by the time it is written: the write compares versions and counts, and fails as a whole (`WriteConflict`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any, Protocol

import msgspec

from bursar.model.accounts import Account, Book
from bursar.model.flow_rows import FlowRow, RowKey
from bursar.model.money import Asset
from bursar.model.postings import POSTINGS_MAX, Posting
from bursar.model.records import ExistingEntry, HoldRow, OperationResult
from bursar.model.selection import Pool, PoolKey

READ_MAX = POSTINGS_MAX + 1


class WriteConflict(Exception):
    """Another transaction was faster, or the rules changed: nothing is written; read again. Never reaches a caller."""


class LockTimeout(WriteConflict):
    """Another transaction holds a row for long: to retry at once is no use, but other batches can go on."""


class ConnectionFailed(Exception):
    """The batch has no answer from the database. Never reaches a caller."""


class CommitUnknown(ConnectionFailed):
    """The connection broke, and what was being written may or may not be there: retry with the same keys (L18)."""


class Unreachable(ConnectionFailed):
    """No connection could be made: nothing of this attempt was sent, so its outcome is known."""


class Lane(Enum):
    """On which connection a batch is read or written, in a store that has several."""

    WRITE = "write"
    PREPARE = "prepare"  # beside the batch that is being written
    BLOCKED = "blocked"  # waits only briefly for locks, beside all others


class RuleSet(msgspec.Struct, frozen=True):
    """The rules of one generation: everything here was read after the generation was."""

    generation: int
    assets: dict[str, Asset]
    books: dict[str, Book]
    cached_accounts: set[int]  # those whose balance is cached


class WriterCache(msgspec.Struct, eq=False, kw_only=True):
    """Newest versions of accounts, with assets and books: valid as long as the rules' generation stands.

    Only what exists is kept; that an account does *not* exist is read again every time.

    It also keeps live postings as the last batch has left them (decision 18). A batch that is decided on them saves a
    round trip if no other process has written since. The write notices if one has, and then they are dropped.
    """

    PESSIMISTIC_BATCHES = 64  # after a conflict
    ACCOUNTS_MAX = 200_000  # beyond that the cache starts over
    POSTINGS_MAX = 200_000  # and pools, likewise

    generation: int = 0
    connection: int = 0  # the store's connection count when it was filled: another one may be to another server
    pessimistic: int = 0  # batches that still read what others assume, because of a recent conflict
    numbers: list[int] = []  # taken ahead, by a store that does so
    numbers_until: float = 0.0  # and still fresh until then
    live: dict[int, Posting] = {}  # of records, and of the pools
    pools: dict[PoolKey, Pool] = {}
    accounts: dict[str, Account] = {}
    assets: dict[str, Asset] = {}
    books: dict[str, Book] = {}
    cached_accounts: set[int] = set()

    def reset(self, rules: RuleSet) -> None:
        """The rules have changed: start over."""
        self.generation = rules.generation
        self.accounts = {}
        self.assets = rules.assets
        self.books = rules.books
        self.cached_accounts = rules.cached_accounts
        self.drop_postings()

    def drop_postings(self) -> None:
        """Postings may not be as the last batch has left them: read them again. Not the dicts that are in use."""
        self.live, self.pools = {}, {}

    def on_conflict(self) -> None:
        """What was assumed did not hold: for a while, read it first."""
        self.pessimistic = self.PESSIMISTIC_BATCHES
        self.drop_postings()

    def use_connection(self, connection: int) -> None:
        """There is another connection, perhaps to another server, where the same generation means other rules."""
        if self.connection != connection:
            self.connection, self.generation, self.numbers = connection, 0, []
            self.drop_postings()

    def trim(self) -> None:
        """Keep no more than fits. Between two batches: they are decided on it."""
        if len(self.accounts) > self.ACCOUNTS_MAX:
            self.accounts = {}
        if max(len(self.live), len(self.pools)) > self.POSTINGS_MAX:
            self.drop_postings()

    def keep_in_flight(self, writes: WriteSet) -> None:
        """Remember the postings that records own from now on: the records' next moves name them."""
        for posting in writes.spent_live:
            self.live.pop(posting, None)
        if writes.records is not None:
            owned = {row[6] for row in writes.records.new} | {row[5] for row in writes.records.moves}
            self.live.update({p.id: p for p, live in writes.postings if live and p.id in owned})


class RecordReadSet(msgspec.Struct):
    """What to read of records, operations and limits, after a conflict."""

    versions: list[int] = []  # by number
    ids: list[tuple[str, str]] = []  # flow, id: does such a record exist
    operations: list[tuple[str, str, str]] = []
    counters: list[str] = []


class LoadedRecords(msgspec.Struct):
    """The answer to that."""

    versions: dict[int, int]
    ids: set[tuple[str, str]]
    operations: dict[tuple[str, str, str], OperationResult]
    counters: dict[str, tuple[int, int]]  # → count, amount


class ReadSet(msgspec.Struct):
    """What a batch has to read. Everything in an order that is always the same, so that reads repeat exactly."""

    accounts: set[str] = set()  # that the cache does not know, or that don't exist
    numbers: int = 0  # how many to take: one per entry and per new record
    keys: list[tuple[str, str]] = []
    pools: dict[PoolKey, int] = {}  # → how many postings to read
    named: list[int] = []
    guarded: list[tuple[int, int]] = []  # account, asset
    optimistic: bool = False  # all of that is cached from the batch before: nothing has to be read
    records: RecordReadSet | None = None  # None: assume that no other process was faster; the write checks
    rows: list[RowKey] = []  # of flows' own: always read, because what they become depends on what they are


class LoadedState(msgspec.Struct):
    """The answer to a read set."""

    generation: int
    numbers: Sequence[int] | Iterator[int]
    existing: dict[tuple[str, str], ExistingEntry]
    pools: dict[PoolKey, list[Posting]]
    named: list[Posting]
    guarded: dict[tuple[int, int], tuple[int, int]]  # → balance, version
    records: LoadedRecords | None = None
    optimistic: bool = False  # nothing was read: what is refused on this has to be read first
    keys_read: bool = True  # if not, the keys of what is refused have to be read
    rows: dict[RowKey, FlowRow] = {}


class RecordWrites(msgspec.Struct):
    """The records' part of what a batch writes. Lists are in lock order."""

    operations: list[tuple[str, str, str, str, str, str, str]] = []  # scope, id, op, fingerprint, outcome, code, detail
    counters: list[tuple[str, int, int, int, int, int]] = []  # key, count, amount, count_max, amount_max, until_us
    # number, flow, id, owner, state, version, transit, delay, worker, body, error, timer, priority
    new: list[tuple[Any, ...]] = []
    # number, expected, state, version, attempt, transit, delay, worker, body, error, timer, change of the inbox
    moves: list[tuple[Any, ...]] = []
    transitions: list[tuple[Any, ...]] = []  # record, version, source, event, target, attempt, actor, evidence
    high_water: list[tuple[str, str, int]] = []  # peer, writer, sequence
    rows: list[tuple[int, FlowRow]] = []  # expected version (0: none), row
    signals: list[tuple[Any, ...]] = []  # record, sender, event, actor, evidence, arrived, consumed


class WriteSet(msgspec.Struct):
    """What a batch writes. Lists are in lock order (keys, guarded balances and spends sorted)."""

    envelopes: list[tuple[Any, ...]] = []
    postings: list[tuple[Posting, bool]] = []  # created; whether it is still live when the batch ends
    spends: list[tuple[int, int]] = []  # posting, envelope
    spent_live: list[int] = []  # postings that stop being live (those created in this same batch never were)
    account_history: list[tuple[int, int]] = []  # account, envelope
    guarded: list[tuple[int, int, int, int]] = []  # account, asset, expected version, balance
    cached_balances: list[tuple[int, int, int, int]] = []  # account, asset, part, amount
    holds: list[HoldRow] = []
    records: RecordWrites | None = None
    checks_rules: bool = False  # its records rely on accounts being active: written only under the same generation

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.envelopes and self.records is None


class PreparedBatch(msgspec.Struct, frozen=True):
    """What a batch writes, and the generation of the rules and the connection under which that was decided."""

    generation: int
    writes: WriteSet
    cache: WriterCache
    connection: int = 0


class BatchSession(Protocol):
    """Reads and the write of one batch, on one connection.

    SQLite's methods never suspend: there the whole loop runs on the writer's thread, inside one transaction.
    """

    connection: int  # how many connections the store had made when this one was

    async def rules(self) -> RuleSet:
        """The rules as they are now."""

    async def accounts(self, paths: Sequence[str]) -> Sequence[Account]:
        """The newest version of each account that exists."""

    async def load(self, read: ReadSet, cache: WriterCache) -> LoadedState:
        """Everything in the read set but accounts."""

    async def pool(self, key: PoolKey, most: int) -> list[Posting]:
        """More postings of one pool: the largest so many."""

    async def existing(self, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], ExistingEntry]:
        """The entries that have these keys."""

    async def write(self, prepared: PreparedBatch) -> None:
        """Write a batch as a whole, if everything it relies on still holds."""
