"""Filling a database with a past: accounts, deposits and payments, as rows, by SQL alone.

Envelopes are numbered from 1. The first ACCOUNTS of them are deposits, one to each account, two postings each (the
world owes, the account has). Every further one is a payment of two postings: account after account pays in turn, in
round n the amount n, from the change of its last payment; every second payment goes to the hot account. So everything
about envelope k follows from k, the value is conserved, and the live rows are what is left. Hashes and movements are
bytes of the right length, not of the right content: an audit of I8 would say so.

The hot account ends up with a quarter of all postings ever made, live and small, beside the large one it pays with.
"""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import asyncpg

from bursar.bench.baseline import HASH, LEGS, PINS
from bursar.bench.workload import ACCOUNTS, FIRST_ID, SEED_MINOR, WORLD_ID, path_of
from bursar.store.sqlite.calls import amount_in

BASE = 10_000  # postings in a database before anything is measured

NO_OVERDRAFT = '{"policy":"no_overdraft"}'
EXTERNAL = '{"policy":"external"}'

# Every column follows from k. {A}: accounts; {F}: first account; {W}: the world; {S}: what an account starts with.
# `held` is the posting that the account keeps, `gone` the one that it consumes (0: none).
_HISTORY = """
SELECT k, CASE WHEN n = 0 THEN {W} ELSE {F} + place END AS source,
       CASE WHEN n = 0 THEN {F} + place
            WHEN k % 2 = 0 THEN {F}
            ELSE {F} + (place + 1 + (k * 31) % ({A} - 1)) % {A} END AS target,
       CASE WHEN n = 0 THEN -{S} ELSE {S} - n * (n + 1) / 2 END AS kept,
       CASE WHEN n = 0 THEN {S} ELSE n END AS paid,
       CASE n WHEN 0 THEN 0 WHEN 1 THEN ((k - {A}) << 16) + 1 ELSE (k - {A}) << 16 END AS gone,
       k + {A} > {last} AS newest, n
FROM (SELECT k, (k - 1) / {A} AS n, (k - 1) % {A} AS place FROM {series}) AS numbered
"""

# Inserted in the order of each index that matters; `{amount}` turns a number into what the column holds.
_FILL = """
INSERT INTO {schema}spends (posting, envelope) SELECT gone, k FROM history WHERE gone <> 0 ORDER BY k;
INSERT INTO {schema}postings (id, account, asset, amount)
SELECT k << 16, source, 1, {kept} FROM history
UNION ALL SELECT (k << 16) + 1, target, 1, {paid} FROM history ORDER BY 1;
INSERT INTO {schema}live_postings (posting, account, asset, amount)
SELECT k << 16, source, 1, {kept} FROM history WHERE n = 0 OR newest
UNION ALL SELECT (k << 16) + 1, target, 1, {paid} FROM history WHERE n > 0 OR newest ORDER BY 1;
INSERT INTO {schema}involved (account, envelope)
SELECT source, k FROM history UNION ALL SELECT target, k FROM history ORDER BY 1, 2;
"""


def envelopes_of(postings: int) -> int:
    """How many envelopes a database of so many postings has."""
    return max(ACCOUNTS, postings // 2)


def last_payment(place: int, last: int) -> tuple[int, int]:
    """The envelope of an account's last payment (or deposit), and what it has paid up to then."""
    rounds = (last - place - 1) // ACCOUNTS
    return rounds * ACCOUNTS + place + 1, rounds * (rounds + 1) // 2


def _history(last: int, series: str) -> str:
    return _HISTORY.format(A=ACCOUNTS, F=FIRST_ID, W=WORLD_ID, S=SEED_MINOR, last=last, series=series)


def _accounts() -> list[tuple[int, str, str]]:
    world = (WORLD_ID, path_of(WORLD_ID), EXTERNAL)
    return [world] + [(i, path_of(i), NO_OVERDRAFT) for i in range(FIRST_ID, FIRST_ID + ACCOUNTS)]


async def load_postgres(connection: asyncpg.Connection, postings: int) -> None:
    """Fill a database that has our schema and one asset. Statistics and visibility are settled before it returns."""
    last = envelopes_of(postings)
    series = f"generate_series(1::bigint, {last}) AS g (k)"
    async with connection.transaction():
        await connection.execute(
            "INSERT INTO bursar.accounts (id, version, path, policy, status, book) "
            "SELECT i, 1, p, y, 'active', '' FROM unnest($1::bigint[], $2::text[], $3::text[]) AS a (i, p, y)",
            *zip(*_accounts(), strict=True),
        )
        await connection.execute(f"CREATE TEMP TABLE history ON COMMIT DROP AS {_history(last, series)}")
        await connection.execute(
            "INSERT INTO bursar.envelopes (seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata) "
            "SELECT k, sha256(k::text::bytea), 'user', 'load-' || lpad(k::text, 9, '0'), 1, 0, 0, "
            "$1::bytea, $2::bytea, CASE gone WHEN 0 THEN ''::bytea ELSE int8send(gone) END, '{}' "
            "FROM history ORDER BY k",
            LEGS,
            PINS,
        )
        await connection.execute(_FILL.format(schema="bursar.", kept="kept", paid="paid"))
        await connection.execute(
            "INSERT INTO bursar.events (seq, kind, subject, version) SELECT k, 1, k, 0 FROM history ORDER BY k"
        )
        await connection.execute(
            f"INSERT INTO bursar.balance_cache VALUES ({WORLD_ID}, 1, 0, {-ACCOUNTS * SEED_MINOR})"
        )
        await connection.execute(f"SELECT setval('bursar.numbers', {last})")
        await connection.execute(f"SELECT setval('bursar.account_numbers', {FIRST_ID + ACCOUNTS})")
        await connection.execute("UPDATE bursar.rules SET generation = generation + 1")
    await connection.execute("VACUUM (ANALYZE)")


def load_sqlite(path: Path, postings: int) -> None:
    """Fill a file that has our schema and one asset; all of it is on the disk before this returns."""
    last = envelopes_of(postings)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.create_function("amount", 1, amount_in, deterministic=True)
    connection.create_function("number", 1, lambda n: n.to_bytes(8, "big"), deterministic=True)
    connection.execute("PRAGMA synchronous = OFF")
    connection.execute("PRAGMA temp_store = MEMORY")
    series = "(WITH RECURSIVE g (k) AS (SELECT 1 UNION ALL SELECT k + 1 FROM g WHERE k < {last}) SELECT k FROM g)"
    connection.execute(f"CREATE TEMP TABLE history AS {_history(last, series.format(last=last))}")
    now = time.time_ns() // 1000
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany(f"INSERT INTO accounts VALUES (?, 1, ?, ?, 'active', '', {now})", _accounts())
    connection.execute(
        "INSERT INTO envelopes SELECT k, ?, 'user', 'load-' || substr('00000000' || k, -9), 1, 0, 0, ?, ?, "
        "CASE gone WHEN 0 THEN x'' ELSE number(gone) END, '{}', ? FROM history ORDER BY k",
        (HASH, LEGS, PINS, now),
    )
    for statement in _FILL.format(schema="main.", kept="amount(kept)", paid="amount(paid)").split(";\n"):
        connection.execute(statement)
    connection.execute("INSERT INTO events (kind, subject, version) SELECT 1, k, 0 FROM history ORDER BY k")
    connection.execute("INSERT INTO balance_cache VALUES (?, 1, 0, ?)", (WORLD_ID, str(-ACCOUNTS * SEED_MINOR)))
    connection.execute("UPDATE numbers SET envelope = ?, account = ?", (last, FIRST_ID + ACCOUNTS))
    connection.execute("UPDATE rules SET generation = generation + 1")
    connection.execute("COMMIT")
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    with path.open("rb") as file:
        os.fsync(file.fileno())
