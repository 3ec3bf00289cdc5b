"""A group: many callers' changes written in one unit. Shapes that the writer fills and the engines write.

`Ask` says what has to be known, `Known` is the answer, `Rows` is what to write. The decision in between is pure and
lives in the writer; an engine only reads, calls it, and writes: SQLite inside one transaction, PostgreSQL in two round
trips of which the second checks its own counts and fails whole (`Lost`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from bursar.model.accounts import Account, Book
from bursar.model.money import Asset
from bursar.model.postings import POSTINGS_MAX, Posting
from bursar.model.records import HoldRow, Remembered, Taken
from bursar.model.selection import Pool

FIRST_READ = 2  # postings read per account and asset at first; eight times as many whenever that was too few
READ_MAX = POSTINGS_MAX + 1


class Lost(Exception):
    """Somebody else was faster, or the rules changed: nothing is written, read again. Never reaches a caller."""


class Blocked(Lost):
    """Somebody holds a row for long: trying again at once is no use, but those who don't need it can go on."""


class Broken(Exception):
    """The connection broke and what was being written may or may not be there: ask again with the same keys."""


class Unreachable(Broken):
    """No connection could be made: nothing of this try was sent, so it leaves no doubt behind."""


PoolKey = tuple[int, int, int]  # account, asset, sign


class Heads:
    """Newest versions of accounts, with assets and books: good as long as the rules' generation stands.

    Only what is true is kept; that an account does *not* exist is asked again every time.

    And live postings as our last group has left them (decision 18), where a round trip is saved if nobody else has
    written since: the write notices, and whatever goes wrong, they are forgotten.
    """

    WARY_GROUPS = 64
    LIMIT = 200_000  # accounts kept; beyond that the cache starts over
    LIVE_MAX = 200_000  # postings, and pools, likewise

    __slots__ = (
        "accounts",
        "assets",
        "books",
        "connected",
        "generation",
        "live",
        "numbers",
        "numbers_until",
        "pools",
        "wary",
        "wide",
    )

    def __init__(self) -> None:
        self.generation = 0
        self.connected = 0  # since which connection it was learnt, in a store that may connect to another server
        self.wary = 0  # groups that look ahead at what others usually only hope for, because a race was lost lately
        self.numbers: list[int] = []  # fetched ahead, by a store that does so
        self.numbers_until = 0.0  # and still fresh until then
        self.live: dict[int, Posting] = {}  # of records, and of the pools
        self.pools: dict[PoolKey, Pool] = {}
        self.accounts: dict[str, Account] = {}
        self.assets: dict[str, Asset] = {}
        self.books: dict[str, Book] = {}
        self.wide: set[int] = set()

    def reset(self, generation: int, assets: dict[str, Asset], books: dict[str, Book], wide: set[int]) -> None:
        """The rules have changed: start over. Everything given must have been read after `generation` was."""
        self.generation = generation
        self.accounts = {}
        self.assets = assets
        self.books = books
        self.wide = wide
        self.forget()

    def forget(self) -> None:
        """Postings may not be as our last group has left them: read them again. Not the dicts that are in use."""
        self.live, self.pools = {}, {}

    def relearn(self, connected: int) -> None:
        """There is another connection, perhaps to another server, where the same generation means other rules."""
        if self.connected != connected:
            self.connected, self.generation, self.numbers = connected, 0, []
            self.forget()

    def trim(self) -> None:
        """No more than fits is kept. Between two groups: it is what they are decided on."""
        if len(self.accounts) > self.LIMIT:
            self.accounts = {}
        if max(len(self.live), len(self.pools)) > self.LIVE_MAX:
            self.forget()


class RecordAsk(msgspec.Struct):
    """What a group has to know of records, operations and limits, after it has lost a race."""

    versions: list[int] = []  # by number
    made: list[tuple[str, str]] = []  # flow, id: is there such a record
    operations: list[tuple[str, str, str]] = []
    counters: list[str] = []


class RecordsKnown(msgspec.Struct):
    """The answer to that."""

    versions: dict[int, int]
    made: set[tuple[str, str]]
    operations: dict[tuple[str, str, str], Remembered]
    counters: dict[str, tuple[int, int]]  # → count, amount


class Ask(msgspec.Struct):
    """What a group has to know. Everything in an order that is always the same, so that reads repeat exactly."""

    missing: set[str] = set()  # accounts whose heads are not known; or which are not there at all
    intents: int = 0  # how many numbers to take: one per entry and per new record
    keys: list[tuple[str, str]] = []
    pools: dict[PoolKey, int] = {}  # → how many postings to read
    named: list[int] = []
    floors: list[tuple[int, int]] = []
    hopeful: bool = False  # all of that is kept from the group before: nothing has to be read, if nobody else writes
    look: RecordAsk | None = None  # None: hope that nobody was faster; the write notices if somebody was


class Known(msgspec.Struct):
    """The answer to an Ask."""

    numbers: Sequence[int] | Iterator[int]
    taken: dict[tuple[str, str], Taken]
    pools: dict[PoolKey, list[Posting]]
    named: list[Posting]
    floors: dict[tuple[int, int], tuple[int, int]]  # → balance, turn
    found: RecordsKnown | None = None
    more: Callable[[PoolKey, int], list[Posting]] | None = None  # where the store can be asked again in between
    hoped: bool = False  # nothing was read: what is refused on this has to be looked at again


class RecordRows(msgspec.Struct):
    """The records' part of what a group writes. Lists are in lock order."""

    outcomes: list[tuple[str, str, str, str, str, str, str]] = []  # scope, id, op, fingerprint, outcome, code, detail
    counters: list[tuple[str, int, int, int, int, int]] = []  # key, count, amount, count_max, amount_max, until_us
    new: list[tuple[Any, ...]] = []  # number, flow, id, owner, state, version, transit, delay, worker, body, error
    moves: list[tuple[Any, ...]] = []  # number, expected, state, version, attempt, transit, delay, worker, body, error
    passages: list[tuple[Any, ...]] = []  # record, version, source, event, target, attempt, actor, evidence


class Rows(msgspec.Struct):
    """What a group writes. Lists are in lock order (keys, floors and spends sorted)."""

    envelopes: list[tuple[Any, ...]] = []
    postings: list[tuple[Posting, bool]] = []  # created; whether it is still live when the group ends
    spends: list[tuple[int, int]] = []  # posting, envelope
    dead: list[int] = []  # postings that stop being live (those created in this same group never were)
    involved: list[tuple[int, int]] = []
    floors: list[tuple[int, int, int, int]] = []  # account, asset, expected turn, balance
    cache: list[tuple[int, int, int, int]] = []  # account, asset, part, amount
    holds: list[HoldRow] = []
    records: RecordRows | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to write."""
        return not self.envelopes and self.records is None


class Decided(msgspec.Struct, frozen=True):
    """What a group writes, and the generation of the rules under which that was decided."""

    generation: int
    rows: Rows
    heads: Heads = msgspec.field(default_factory=Heads)


class Job(Protocol):
    """What the writer gives an engine to run. Pure but for its own memory of how many postings it asked for."""

    heads: Heads
    first_read: int  # postings read per account and asset at first
    keeps: bool  # whether it is decided on the postings that are kept, and leaves its own behind
    aside: bool  # whether it was in somebody's way: it must not wait for long, nor anybody for it

    def ask(self) -> Ask:
        """What to read. Heads that are missing first: what else there is to read depends on them, so ask again then."""
        ...

    def decide(self, known: Known) -> Rows | None:
        """What to write; None if it needs to know more first (`ask` again). Empty rows: nothing to write."""
        ...

    def doubtful(self) -> list[tuple[str, str]]:
        """After `decide`: the keys of what was refused, for an engine that has not looked up any keys yet."""
        ...
