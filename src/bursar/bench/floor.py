"""The floor: the least that the machine must do for the same durable rows, by hand-written SQL.

What it is: the same tables with the same indexes and triggers (the schema comes from the same migration), and for
every payment the same rows in them: an envelope, the spend of the posting that pays, two postings, their live rows and
the deletion of the one consumed, two rows of history and an event. As many payments in one transaction as the ledger
itself reached on average with that number of callers, one durable commit per transaction, on one connection, in the
same run on the same machine. A posting that is created and spent within one group never gets a live row, as in ours.

What it is not: it checks nothing. It does not look for an existing key, for funds, for a freeze or for who else
writes; it reads nothing at all, since which posting pays is worked out before the clock starts. It hashes nothing:
ids, movements and pins are constant bytes of the right length. It has no callers to wake up. Only turning a payment
into rows, and those into what the driver takes, happens on the clock, because no program could write them otherwise.

So a ratio of 1 is out of reach, and the distance is what keys, selection, validation, hashing and callers cost.
"""

from __future__ import annotations

import sqlite3
import time
from typing import Any, Protocol

import asyncpg
import msgspec

from bursar.bench.measure import Window
from bursar.bench.workload import ACCOUNTS, FIRST_ID, SEED_MINOR, Payment, Workload
from bursar.store.sqlite.calls import amount_in

HASH = bytes(range(32))  # as long as a content hash
LEGS = bytes(13)  # as long as one movement
PINS = bytes(11)  # as long as the pins of two accounts
BOOK = 1
ASSET_ID = 1


class Step(msgspec.Struct, frozen=True, gc=False):
    """A payment with the posting that pays, known ahead."""

    seq: int
    key: str
    payment: Payment
    consumed: int
    change: int  # amount of what comes back


Group = tuple[list[Step], frozenset[int]]  # payments, and which of their postings are spent within the group


class Rows(msgspec.Struct):
    """What one group writes, as rows."""

    envelopes: list[tuple[Any, ...]]
    spends: list[tuple[int, int]]
    dead: list[int]
    postings: list[tuple[int, int, int, int]]
    live: list[tuple[int, int, int, int]]
    involved: list[tuple[int, int]]
    events: list[int]


class Picture:
    """Which posting each account would pay with: the largest, which is the change of its last payment."""

    def __init__(self, last_seq: int, largest: dict[int, tuple[int, int]]) -> None:
        self._seq = last_seq
        self._largest = largest  # account → posting, amount

    def plan(self, workload: Workload, groups: int, size: int) -> list[Group]:
        """So many groups of so many payments."""
        planned = []
        for _ in range(groups):
            steps, made, passing = [], set(), set()
            for key, payment in workload.take(size):
                self._seq += 1
                source, _target, amount = payment
                posting, had = self._largest[source]
                steps.append(Step(self._seq, key, payment, posting, had - amount))
                self._largest[source] = (self._seq << 16, had - amount)
                made.add(self._seq << 16)
                if posting in made:
                    passing.add(posting)
            planned.append((steps, frozenset(passing)))
        return planned


def rows_of(group: Group) -> Rows:
    """A group's payments as rows: on the clock."""
    steps, passing = group
    rows = Rows([], [], [], [], [], [], [])
    for step in steps:
        seq = step.seq
        source, target, amount = step.payment
        rows.envelopes.append(
            (seq, HASH, "user", step.key, BOOK, 0, 0, LEGS, PINS, step.consumed.to_bytes(8, "big"), "{}")
        )
        rows.spends.append((step.consumed, seq))
        if step.consumed not in passing:
            rows.dead.append(step.consumed)
        change = (seq << 16, source, ASSET_ID, step.change)
        paid = (seq << 16 | 1, target, ASSET_ID, amount)
        rows.postings += (change, paid)
        if change[0] not in passing:
            rows.live.append(change)
        rows.live.append(paid)
        rows.involved += ((source, seq), (target, seq))
        rows.events.append(seq)
    return rows


class Floor(Protocol):
    """A database written to by hand."""

    picture: Picture

    async def write(self, groups: list[Group]) -> None:
        """Write groups, each in one durable transaction."""
        ...

    async def settle(self, groups: list[Group]) -> None:
        """Before measuring at a new group size: find the fastest way for it, by writing these groups."""
        ...


async def window(floor: Floor, workload: Workload, size: int, seconds: float, rate: float) -> Window:
    """A window of about so many seconds, at a rate known from before. Planning is off the clock."""
    groups = max(1, round(seconds * rate / size))
    planned = floor.picture.plan(workload, groups, size)
    started = time.perf_counter()
    await floor.write(planned)
    return Window(groups * size, time.perf_counter() - started, groups)


# ------------------------------------------------------------------------------------------------------------ SQLite


class SqliteFloor:
    """Bare sqlite3: executemany between BEGIN IMMEDIATE and COMMIT, with the write-ahead log and synchronous=FULL."""

    def __init__(self, path: str, picture: Picture) -> None:
        self.picture = picture
        self._connection = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")

    async def settle(self, groups: list[Group]) -> None:
        """There is only one way here."""
        await self.write(groups)

    async def write(self, groups: list[Group]) -> None:
        """Write groups, each in one durable transaction."""
        many, run = self._connection.executemany, self._connection.execute
        for group in groups:
            rows = rows_of(group)
            at = time.time_ns() // 1000
            run("BEGIN IMMEDIATE")
            many("INSERT INTO envelopes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [(*e, at) for e in rows.envelopes])
            many("INSERT INTO spends VALUES (?, ?)", rows.spends)
            many("DELETE FROM live_postings WHERE posting = ?", [(i,) for i in rows.dead])
            many("INSERT INTO postings VALUES (?, ?, ?, ?)", [(i, a, s, amount_in(v)) for i, a, s, v in rows.postings])
            many(
                "INSERT INTO live_postings (posting, account, asset, amount) VALUES (?, ?, ?, ?)",
                [(i, a, s, amount_in(v)) for i, a, s, v in rows.live],
            )
            many("INSERT INTO involved VALUES (?, ?)", rows.involved)
            many("INSERT INTO events (kind, subject, version) VALUES (1, ?, 0)", [(seq,) for seq in rows.events])
            run("COMMIT")

    def close(self) -> None:
        """Let go of the file."""
        self._connection.close()


# -------------------------------------------------------------------------------------------------------- PostgreSQL

_ENVELOPES = """INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata)
SELECT * FROM unnest($1::bigint[], $2::bytea[], $3::text[], $4::text[], $5::integer[], $6::smallint[], $7::bigint[],
                     $8::bytea[], $9::bytea[], $10::bytea[], $11::text[]::json[])"""
_SPENDS = "INSERT INTO bursar.spends (posting, envelope) SELECT * FROM unnest($1::bigint[], $2::bigint[])"
_DEAD = "DELETE FROM bursar.live_postings WHERE posting = ANY ($1::bigint[])"
_POSTINGS = """INSERT INTO bursar.postings (id, account, asset, amount)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[])"""
_LIVE = """INSERT INTO bursar.live_postings (posting, account, asset, amount)
SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::integer[], $4::bigint[])"""
_INVOLVED = "INSERT INTO bursar.involved (account, envelope) SELECT * FROM unnest($1::bigint[], $2::bigint[])"
_EVENTS = "INSERT INTO bursar.events (seq, kind, subject, version) SELECT s, 1, s, 0 FROM unnest($1::bigint[]) AS e (s)"
STATEMENTS = (_ENVELOPES, _SPENDS, _DEAD, _POSTINGS, _LIVE, _INVOLVED, _EVENTS)


def _one_statement() -> str:
    """All of them as one data-modifying statement, which is a transaction by itself: one round trip."""
    parts, taken = [], 0
    for place, text in enumerate(STATEMENTS):
        numbers = sorted({int(word) for word in _numbers(text)}, reverse=True)
        for number in numbers:  # the highest first: $1 is the beginning of $11
            text = text.replace(f"${number}::", f"${number + taken}::")
        taken += len(numbers)
        parts.append(text if place == len(STATEMENTS) - 1 else f"w{place} AS ({text})")
    return f"WITH {', '.join(parts[:-1])} {parts[-1]}"


def _numbers(text: str) -> list[str]:
    return [piece.partition("::")[0] for piece in text.split("$")[1:]]


ONE_STATEMENT = _one_statement()


class PostgresFloor:
    """Bare asyncpg with one array per column.

    Two ways, each under the plans that suit it: one statement for all tables, or a transaction of one statement per
    table. `settle` times both and keeps the faster, which depends on the size of the group.
    """

    def __init__(self, connection: asyncpg.Connection, picture: Picture) -> None:
        self.picture = picture
        self._connection = connection
        self._ways = [(self._at_once, plans) for plans in ("force_generic_plan", "force_custom_plan")]
        self._ways.append((self._in_turn, "force_generic_plan"))
        self._way = self._at_once

    async def settle(self, groups: list[Group]) -> None:
        """Time the ways on these groups, in turn, and keep the fastest."""
        spent = [0.0] * len(self._ways)
        for place, group in enumerate(groups):
            which = place % len(self._ways)
            await self._choose(which)
            started = time.perf_counter()
            await self._way(rows_of(group))
            if place >= len(self._ways):  # the first of each prepares its statements
                spent[which] += time.perf_counter() - started
        await self._choose(spent.index(min(spent)))

    async def _choose(self, which: int) -> None:
        self._way, plans = self._ways[which]
        await self._connection.execute(f"SET plan_cache_mode = {plans}")

    async def write(self, groups: list[Group]) -> None:
        """Write groups, each in one durable transaction."""
        for group in groups:
            await self._way(rows_of(group))

    async def _at_once(self, rows: Rows) -> None:
        columns = [column for table in _tables(rows) for column in table]
        await self._connection.execute(ONE_STATEMENT, *columns)

    async def _in_turn(self, rows: Rows) -> None:
        async with self._connection.transaction():
            for statement, columns in zip(STATEMENTS, _tables(rows), strict=True):
                await self._connection.execute(statement, *columns)


def _tables(rows: Rows) -> list[list[Any]]:
    return [
        _columns(rows.envelopes, 11),
        _columns(rows.spends, 2),
        [rows.dead],
        _columns(rows.postings, 4),
        _columns(rows.live, 4),
        _columns(rows.involved, 2),
        [rows.events],
    ]


def _columns(rows: list[tuple[Any, ...]], width: int) -> list[Any]:
    return list(zip(*rows, strict=True)) if rows else [[] for _ in range(width)]


def picture_after(postings: int) -> Picture:
    """What each account pays with in a database that `load` has filled."""
    from bursar.bench.load import envelopes_of, last_payment  # noqa: PLC0415

    last = envelopes_of(postings)
    largest = {}
    for place in range(ACCOUNTS):
        seq, paid = last_payment(place, last)
        index = 1 if seq <= ACCOUNTS else 0  # a deposit's second posting, or a payment's change
        largest[FIRST_ID + place] = (seq << 16 | index, SEED_MINOR - paid)
    return Picture(last, largest)
