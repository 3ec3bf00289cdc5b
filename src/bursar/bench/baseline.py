"""The baseline: what the same durable rows cost by plain hand-written SQL, without any of the ledger's work.

What it is: the same tables with the same indexes and triggers (the schema comes from the same migration), and for
every payment the same rows in them: an envelope, the spend of the posting that pays, two postings, their live rows and
the deletion of the one consumed, two rows of history and an event. As many payments in one transaction as the ledger
itself reached on average with that number of callers, one durable commit per transaction, on one connection, in the
same run on the same machine. A posting that is created and spent within one batch never gets a live row, as in ours.

What it is not: it checks nothing. It does not look for an existing key, for funds, for a freeze or for who else
writes; it reads nothing at all, since which posting pays is worked out before the clock starts. It hashes nothing:
ids, movements and pins are constant bytes of the right length. It has no callers to wake up. Only turning a payment
into rows, and those into what the driver takes, happens on the clock, because no program could write them otherwise.

The distance to a ratio of 1 is what keys, selection, validation, hashing and callers cost; less what the ledger saves
by handing rows over in ways that the drivers take faster. The baseline uses the usual ones, an array per column on
PostgreSQL and `executemany` on SQLite; the ledger writes texts (decision 17), and on SQLite many rows by one statement,
copying those of live postings and events from the rows just written. With those ways, the baseline would cost less.
"""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Callable
from typing import Any, Protocol

import asyncpg
import msgspec

from bursar.bench.measure import Window
from bursar.bench.workload import ACCOUNTS, FIRST_ID, SEED_MINOR, Payment, Workload
from bursar.store.sqlite import log
from bursar.store.sqlite.calls import amount_in
from bursar.store.sqlite.store import CACHE_KIB, PAGE

HASH = bytes(range(32))  # as long as a content hash
LEGS = bytes(13)  # as long as one movement
PINS = bytes(11)  # as long as the pins of two accounts
FOREVER = float("inf")
BOOK = 1
ASSET_ID = 1


class Step(msgspec.Struct, frozen=True, gc=False):
    """A payment with the posting that pays, known ahead."""

    seq: int
    key: str
    payment: Payment
    consumed: int
    change: int  # amount of what comes back


Group = tuple[list[Step], frozenset[int]]  # payments, and which of their postings are spent within the batch


class Picture:
    """Which posting each account would pay with: the largest, which is the change of its last payment."""

    def __init__(self, last_seq: int, largest: dict[int, tuple[int, int]]) -> None:
        self._seq = last_seq
        self._largest = largest  # account → posting, amount

    def plan(self, workload: Workload, groups: int, size: int) -> list[Group]:
        """So many batches of so many payments, one after the other. Nothing has happened until they are accepted."""
        planned = []
        seq, largest = self._seq, dict(self._largest)
        for _ in range(groups):
            steps, made, passing = [], set(), set()
            for key, payment in workload.take(size):
                seq += 1
                source, _target, amount = payment
                posting, had = largest[source]
                steps.append(Step(seq, key, payment, posting, had - amount))
                largest[source] = (seq << 16, had - amount)
                made.add(seq << 16)
                if posting in made:
                    passing.add(posting)
            planned.append((steps, frozenset(passing)))
        return planned

    def accept(self, groups: list[Group]) -> None:
        """The first of the planned batches have been written."""
        for steps, _ in groups:
            for step in steps:
                self._seq = step.seq
                self._largest[step.payment[0]] = (step.seq << 16, step.change)


class Rows:
    """What one batch writes, table by table. Made on the clock, and only once per row."""

    __slots__ = ("dead", "envelopes", "events", "involved", "live", "postings", "spends")

    def __init__(self, group: Group, amount: Callable[[int], Any]) -> None:
        steps, passing = group
        self.envelopes = [
            (s.seq, HASH, "user", s.key, BOOK, 0, 0, LEGS, PINS, s.consumed.to_bytes(8, "big"), "{}") for s in steps
        ]
        self.spends = [(s.consumed, s.seq) for s in steps]
        self.dead = [s.consumed for s in steps if s.consumed not in passing]
        self.postings: list[tuple[int, int, int, Any]] = []
        self.involved: list[tuple[int, int]] = []
        for s in steps:
            seq = s.seq
            source, target, paid = s.payment
            self.postings += (
                (seq << 16, source, ASSET_ID, amount(s.change)),
                (seq << 16 | 1, target, ASSET_ID, amount(paid)),
            )
            self.involved += ((source, seq), (target, seq))
        self.live = [p for p in self.postings if p[0] not in passing] if passing else self.postings
        self.events = [s.seq for s in steps]


class Baseline(Protocol):
    """A database written to by hand."""

    picture: Picture

    async def write(self, groups: list[Group], deadline: float) -> int:
        """Write batches, each in one durable transaction, until the time is up; returns how many."""
        ...

    async def settle(self, groups: list[Group]) -> None:
        """Find the fastest way for batches of this size, by writing all of these."""
        ...


async def window(baseline: Baseline, workload: Workload, size: int, seconds: float, rate: float) -> Window:
    """A window of so many seconds, at a rate of about what was seen before. Planning is off the clock."""
    planned = baseline.picture.plan(workload, max(2, round(seconds * rate * 1.5 / size)), size)
    started = time.perf_counter()
    written = await baseline.write(planned, started + seconds)
    window = Window(written * size, time.perf_counter() - started, written)
    baseline.picture.accept(planned[:written])
    return window


async def settle(baseline: Baseline, workload: Workload, size: int, groups: int) -> None:
    """Before measuring at a batch size: let the baseline find its fastest way."""
    planned = baseline.picture.plan(workload, groups, size)
    await baseline.settle(planned)
    baseline.picture.accept(planned)


# ------------------------------------------------------------------------------------------------------------ SQLite


class SqliteBaseline:
    """Bare sqlite3: executemany between BEGIN IMMEDIATE and COMMIT, with the write-ahead log and synchronous=FULL."""

    def __init__(self, path: str, picture: Picture) -> None:
        self.picture = picture
        self._connection = sqlite3.connect(path, isolation_level=None, cached_statements=256)
        self._connection.execute("PRAGMA journal_mode = WAL")
        self._connection.execute("PRAGMA synchronous = FULL")
        self._connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        self._connection.execute(f"PRAGMA wal_autocheckpoint = {log.BYTES_MIN // PAGE}")

    async def settle(self, groups: list[Group]) -> None:
        """There is only one way here."""
        await self.write(groups, FOREVER)

    async def write(self, groups: list[Group], deadline: float) -> int:
        """Write batches, each in one durable transaction, until the time is up; returns how many."""
        many, run = self._connection.executemany, self._connection.execute
        for place, group in enumerate(groups):
            if place and time.perf_counter() > deadline:
                return place
            rows = Rows(group, amount_in)
            at = time.time_ns() // 1000
            run("BEGIN IMMEDIATE")
            many(
                "INSERT INTO envelopes VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", [(*e, at) for e in rows.envelopes]
            )
            many("INSERT INTO spends VALUES (?, ?)", rows.spends)
            many("DELETE FROM live_postings WHERE posting = ?", [(i,) for i in rows.dead])
            many("INSERT INTO postings VALUES (?, ?, ?, ?)", rows.postings)
            many("INSERT INTO live_postings (posting, account, asset, amount) VALUES (?, ?, ?, ?)", rows.live)
            many("INSERT INTO involved VALUES (?, ?)", rows.involved)
            many("INSERT INTO events (kind, subject, version) VALUES (1, ?, 0)", [(seq,) for seq in rows.events])
            run("COMMIT")
        return len(groups)

    def close(self) -> None:
        """Close the file."""
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
        shifted = re.sub(r"\$(\d+)", lambda found, by=taken: f"${int(found[1]) + by}", text)  # type: ignore[misc]
        taken += text.count("$")
        parts.append(shifted if place == len(STATEMENTS) - 1 else f"w{place} AS ({shifted})")
    return f"WITH {', '.join(parts[:-1])} {parts[-1]}"


ONE_STATEMENT = _one_statement()


class PostgresBaseline:
    """Bare asyncpg with one array per column.

    Two ways, each under the plans that suit it: one statement for all tables, or a transaction of one statement per
    table. `settle` times both and keeps the faster, which depends on the size of the batch.
    """

    def __init__(self, connection: asyncpg.Connection, picture: Picture) -> None:
        self.picture = picture
        self._connection = connection
        self._ways = [(self._at_once, plans) for plans in ("force_generic_plan", "force_custom_plan")]
        self._ways.append((self._in_turn, "force_generic_plan"))
        self._way = self._at_once

    async def settle(self, groups: list[Group]) -> None:
        """Time the ways on these batches, in turn, and keep the fastest."""
        spent = [0.0] * len(self._ways)
        for place, group in enumerate(groups):
            which = place % len(self._ways)
            await self._choose(which)
            started = time.perf_counter()
            await self._way(Rows(group, int))
            if place >= len(self._ways):  # the first of each prepares its statements
                spent[which] += time.perf_counter() - started
        await self._choose(spent.index(min(spent)))

    async def _choose(self, which: int) -> None:
        self._way, plans = self._ways[which]
        await self._connection.execute(f"SET plan_cache_mode = {plans}")

    async def write(self, groups: list[Group], deadline: float) -> int:
        """Write batches, each in one durable transaction, until the time is up; returns how many."""
        for place, group in enumerate(groups):
            if place and time.perf_counter() > deadline:
                return place
            await self._way(Rows(group, int))
        return len(groups)

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
