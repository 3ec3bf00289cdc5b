"""The synchronous half: what runs on the lane's thread, against one sqlite3 connection."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any, TypeVar

import msgspec

from bursar.model.errors import BursarError, Conflict, DatabaseCorrupt, DatabaseReadOnly, DatabaseUnavailable
from bursar.model.postings import INDEX_BITS, Posting
from bursar.model.records import Taken
from bursar.store.group import Ask, Heads, Job, Known, Lost, PoolKey, RecordAsk, RecordRows, RecordsKnown, Rows
from bursar.store.rows import Row, account_of, asset_of, book_of, hold_values, remembered_of
from bursar.store.sql import statements

T = TypeVar("T")
OFFSET = 2**127
SQL = statements("bursar.store.sqlite")
LARGEST, MOST_NEGATIVE = SQL["largest"], SQL["most_negative"]
BUSY_MS = 5000
WAL_TURNS = 50
FEW = 4  # pools, or rows: fewer are read or written faster one by one
TOGETHER = 32  # rows of one statement

_json = msgspec.json.Encoder()


def amount_in(minor: int) -> bytes:
    """16 bytes that sort as the numbers do."""
    return (minor + OFFSET).to_bytes(16, "big")


def amount_out(stored: bytes) -> int:
    """The number again."""
    return int.from_bytes(stored, "big") - OFFSET


class _SumAmounts:
    """SQL aggregate: exact sum of amounts, as decimal text (it may be wider than one amount)."""

    def __init__(self) -> None:
        self.total = 0

    def step(self, stored: bytes) -> None:
        self.total += amount_out(stored)

    def finalize(self) -> str:
        return str(self.total)


class _SumText(_SumAmounts):
    """SQL aggregate: exact sum of decimal text."""

    def step(self, stored: Any) -> None:
        self.total += int(stored)


def register(connection: sqlite3.Connection, now_us: Callable[[], int]) -> None:
    """Teach a connection the functions that our statements use."""
    connection.create_function("now_us", 0, now_us)
    connection.create_function("add_text", 2, lambda a, b: str(int(a) + int(b)), deterministic=True)
    connection.create_aggregate("sum_amounts", 1, _SumAmounts)  # type: ignore[arg-type]
    connection.create_aggregate("sum_text", 1, _SumText)  # type: ignore[arg-type]


@contextlib.contextmanager
def our_ways(connection: sqlite3.Connection, now_us: Callable[[], int]) -> Iterator[None]:
    """A caller's connection as our statements need it, and afterwards as it was."""
    row_factory, text_factory = connection.row_factory, connection.text_factory
    connection.row_factory, connection.text_factory = None, str
    try:
        register(connection, now_us)
        yield
    finally:
        connection.row_factory, connection.text_factory = row_factory, text_factory


def file_of(connection: sqlite3.Connection) -> str:
    """The file that a connection is to, as SQLite names it."""
    return str(next(row[2] for row in connection.execute("PRAGMA database_list") if row[1] == "main"))


def use_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log. SQLite does not wait for others here as it does elsewhere, so we take turns."""
    for turn in range(WAL_TURNS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if turn == WAL_TURNS - 1 or not getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
                raise
        together(connection, int)  # waits until whoever is switching has done so


def rows(connection: sqlite3.Connection, name: str, args: Sequence[Any]) -> list[Row]:
    """Run one statement; lists become JSON."""
    plain = [_json.encode(a).decode() if isinstance(a, list) else a for a in args]
    return connection.execute(SQL[name], plain).fetchall()


def write(connection: sqlite3.Connection, name: str, values: Sequence[tuple[Any, ...]]) -> int:
    """Run one statement once per row, all or nothing; returns how many rows changed."""
    if len(values) > 1 and not connection.in_transaction:
        return together(connection, partial(write, connection, name, values))
    return max(0, connection.executemany(SQL[name], values).rowcount)


def roll_back(connection: sqlite3.Connection) -> None:
    """End a transaction that went wrong, if there is one."""
    if connection.in_transaction:
        connection.execute("ROLLBACK")


def write_all(connection: sqlite3.Connection, writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> list[int]:
    """Several statements as one, whether or not a transaction is open already."""
    work = partial(_write_each, connection, writes)
    return work() if connection.in_transaction else together(connection, work)


def _write_each(connection: sqlite3.Connection, writes: Sequence[tuple[str, Sequence[tuple[Any, ...]]]]) -> list[int]:
    return [write(connection, name, values) for name, values in writes]


class CommitFailed(sqlite3.OperationalError):
    """The disk failed in the middle of COMMIT. Its log may hold all of the transaction, and whoever opens it next would
    take it for committed: only a key can tell, later."""

    sqlite_errorname = "SQLITE_IOERR"


def together(connection: sqlite3.Connection, work: Callable[[], T]) -> T:
    """Run work in a transaction of its own."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        result = work()
        _commit(connection)
    except BaseException:  # whatever it is, it goes on to whoever waits; nobody may find a transaction open
        roll_back(connection)
        raise
    return result


def _commit(connection: sqlite3.Connection) -> None:
    try:
        connection.execute("COMMIT")
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_IOERR"):
            raise CommitFailed(str(error)) from error
        raise


def run_group(connection: sqlite3.Connection, job: Job, now_us: Callable[[], int], used: int) -> Rows:
    """Read, decide and write a group; returns what was written. The caller has begun the transaction, so nothing can
    change in between; and the time is asked for here, because whoever had to wait for that came later.

    Numbers up to `used` have been told to somebody, although what they named may have been rolled back.
    """
    heads = job.heads
    generation, last = connection.execute(SQL["group_begin"]).fetchone()
    last = max(last, used)
    if generation != heads.generation:
        load_rules(connection, job, generation)
    heads.trim()
    plan = _decide(connection, job, last)
    if not heads.wary and _taken(connection, job.doubtful()):
        heads.wary = Heads.WARY_GROUPS
        plan = _decide(connection, job, last)
    _write_group(connection, plan, now_us())
    return plan


def _decide(connection: sqlite3.Connection, job: Job, last: int) -> Rows:
    """Decide a group, with the numbers after the last one. Unless it is wary, as if no key were taken yet.

    Most keys are new, and the unique index says so at no extra cost: a taken key makes the write fail, and the group is
    run again. That leaves what is refused, and so never written: its keys the caller looks up afterwards.
    """
    plan: Rows | None = None
    job.first_read = 1  # the largest is mostly enough, and reading on costs one more look, not one more round
    job.keeps = False  # nor does reading at all
    while plan is None:
        ask = job.ask()
        if ask.missing:
            for row in rows(connection, "heads_by_path", [sorted(ask.missing)]):
                job.heads.accounts[row[1]] = account_of(row)
            ask = job.ask()
        known = _know(connection, ask, last, _taken(connection, ask.keys) if job.heads.wary else {})
        if ask.look is not None:
            known.found = _look(connection, ask.look)
        plan = job.decide(known)
    return plan


def load_rules(connection: sqlite3.Connection, job: Job, generation: int) -> None:
    """Assets, books and cached accounts, under a generation that was read before them."""
    wide = {row[0] for row in connection.execute(SQL["wide_accounts"])}
    assets = {row[1]: asset_of(row) for row in connection.execute(SQL["assets"])}
    books = {row[1]: book_of(row) for row in connection.execute(SQL["books"])}
    job.heads.reset(generation, assets, books, wide)


def _taken(connection: sqlite3.Connection, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], Taken]:
    taken: dict[tuple[str, str], Taken] = {}
    sql = SQL["group_key"]
    for key in keys:
        found = connection.execute(sql, key).fetchone()
        if found is not None:
            taken[key] = Taken(*found)
    return taken


def _know(connection: sqlite3.Connection, ask: Ask, last: int, taken: dict[tuple[str, str], Taken]) -> Known:
    pools = _pools(connection, ask.pools)
    named = _postings(rows(connection, "live_by_id", [ask.named])) if ask.named else []
    floors: dict[tuple[int, int], tuple[int, int]] = {}
    if ask.floors:
        found_rows = rows(connection, "head_balances", [[a for a, _ in ask.floors], [s for _, s in ask.floors]])
        floors = {(r[0], r[1]): (int(r[2]), r[3]) for r in found_rows}
    return Known(itertools.count(last + 1), taken, pools, named, floors, more=partial(_more, connection))


def _pools(connection: sqlite3.Connection, asked: dict[PoolKey, int]) -> dict[PoolKey, list[Posting]]:
    """So many postings of each pool: one statement for all that want as many of one sign."""
    if len(asked) < FEW:
        return {pool: _more(connection, pool, most) for pool, most in asked.items()}
    found: dict[PoolKey, list[Posting]] = {pool: [] for pool in asked}
    alike: dict[tuple[int, int], list[PoolKey]] = {}
    for pool, most in asked.items():
        alike.setdefault((pool[2], most), []).append(pool)
    for (sign, most), pools in alike.items():
        sql = SQL["group_largest" if sign > 0 else "group_most_negative"]
        for place, id_, amount in connection.execute(sql, (_json.encode(pools).decode(), most)):
            account, asset, _ = pool = pools[place]
            found[pool].append(Posting(id_, account, asset, amount_out(amount)))
    return found


def _more(connection: sqlite3.Connection, pool: PoolKey, most: int) -> list[Posting]:
    account, asset, sign = pool
    found = connection.execute(LARGEST if sign > 0 else MOST_NEGATIVE, (account, asset, most))
    return [Posting(id_, account, asset, amount_out(amount)) for id_, _, _, amount in found]


def _postings(found: Sequence[Row]) -> list[Posting]:
    return [Posting(r[0], r[1], r[2], amount_out(r[3])) for r in found]


def _look(connection: sqlite3.Connection, ask: RecordAsk) -> RecordsKnown:
    """What a wary group wants to know of records, operations and limits."""
    operations = {}
    for operation in ask.operations:
        found = connection.execute(SQL["outcome"], operation).fetchone()
        if found is not None:
            operations[operation] = remembered_of(found)
    return RecordsKnown(
        versions={row[0]: row[1] for row in rows(connection, "group_versions", [ask.versions])},
        made={(flow, id_) for flow, id_ in ask.made if connection.execute(SQL["record"], (flow, id_)).fetchone()},
        operations=operations,
        counters={
            key: (count, int(amount)) for key, count, amount in rows(connection, "group_counters", [ask.counters])
        },
    )


def _write_group(connection: sqlite3.Connection, plan: Rows, now_us: int) -> None:
    if plan.empty:
        return  # a group of refusals and replays writes nothing at all, and does not wait for the disk
    if plan.envelopes:
        _write_entries(connection, plan, now_us)
    if plan.records is not None:
        _write_records(connection, plan.records, now_us)


def _write_records(connection: sqlite3.Connection, plan: RecordRows, now_us: int) -> None:
    """The records' part. A count that is not what it should be: somebody was faster, and the group is decided anew."""
    many = connection.executemany
    many(SQL["group_outcome"], [(*row, now_us) for row in plan.outcomes])
    # One by one: a row that is at its limit already must not be lost in a sum.
    for key, count, amount, count_max, amount_max, until in plan.counters:
        used = connection.execute(SQL["group_counter"], (key,)).fetchone() or (0, "0")
        total = (used[0] + count, int(used[1]) + amount)
        if total[0] > count_max or total[1] > amount_max:
            raise Lost("a limit is used up")
        connection.execute(SQL["group_put_counter"], (key, total[0], str(total[1]), count_max, str(amount_max), until))
    many(SQL["group_record"], [(*row, now_us) for row in plan.new])
    if plan.moves and many(SQL["group_move"], [(*row, now_us) for row in plan.moves]).rowcount != len(plan.moves):
        raise Lost("a record has moved")
    many(SQL["group_passage"], [(*row, now_us) for row in plan.passages])
    if plan.high_water:
        many(SQL["group_high_water"], [(*row, now_us) for row in plan.high_water])


@cache
def _of_many(name: str) -> str:
    """An INSERT of one row, as one of many."""
    sql = SQL[name]
    values = sql[sql.rindex("(") :].strip()
    return sql + f", {values}" * (TOGETHER - 1)


def _insert(connection: sqlite3.Connection, name: str, values: Sequence[tuple[Any, ...]]) -> None:
    """Rows of a group, many by one statement: most of what a short row costs is to begin and to end one."""
    whole = len(values) - len(values) % TOGETHER
    if whole:
        sql = _of_many(name)
        for place in range(0, whole, TOGETHER):
            connection.execute(sql, list(itertools.chain.from_iterable(values[place : place + TOGETHER])))
    if whole < len(values):
        connection.executemany(SQL[name], values[whole:])


def _write_entries(connection: sqlite3.Connection, plan: Rows, now_us: int) -> None:
    """The entries' part."""
    first = min([row[0] for row in plan.envelopes])  # whatever has that number or a higher one is theirs
    many, once = connection.executemany, connection.execute
    blob = bytearray  # the driver takes it as it is, where it would ask around what `bytes` are to become
    _insert(
        connection,
        "insert_envelope_new",
        [
            (seq, blob(id_), scope, key, book, kind, back, blob(legs), blob(pins), blob(consumes), metadata, now_us)
            for seq, id_, scope, key, book, kind, back, legs, pins, consumes, metadata in plan.envelopes
        ],
    )
    _insert(connection, "insert_spend", plan.spends)
    if not plan.dead:
        gone = 0
    elif len(plan.dead) < FEW:
        gone = many(SQL["group_dead_one"], [(number,) for number in plan.dead]).rowcount
    else:
        gone = once(SQL["group_dead"], (_json.encode(plan.dead).decode(),)).rowcount
    if gone != len(plan.dead):  # can't happen inside one transaction: the live table is not what the spends say
        raise DatabaseCorrupt("the live table", f"{len(plan.dead)} postings to spend, {gone} found; `bursar rebuild`")
    created = [(p.id, p.account, p.asset, blob((p.amount + OFFSET).to_bytes(16, "big"))) for p, _ in plan.postings]
    _insert(connection, "insert_posting_new", created)
    passing = [p.id for p, live in plan.postings if not live]
    if len(created) < FEW and not passing:
        many(SQL["insert_live_new"], created)
    else:
        once(SQL["group_live"], (first << INDEX_BITS, _json.encode(passing).decode()))
    _insert(connection, "insert_involved_new", plan.involved)
    if plan.floors:
        many(SQL["put_head"], [(a, s, str(balance)) for a, s, _turn, balance in plan.floors])
    if plan.cache:
        many(SQL["insert_cache"], [(a, s, p, str(v)) for a, s, p, v in plan.cache])
    if plan.holds:
        written = many(SQL["put_hold"], [hold_values(h, amount_in) for h in plan.holds]).rowcount
        if written != len(plan.holds):
            raise Lost("a hold is closed, or belongs to somebody else")
    once(SQL["group_events"], (first,))


def explain(error: sqlite3.Error) -> BursarError:
    """What a person can do about it, in one line."""
    name = getattr(error, "sqlite_errorname", "") or ""
    text = str(error)
    if name == "SQLITE_BUSY_SNAPSHOT":
        return Conflict("the transaction began before others have written; end it and begin with BEGIN IMMEDIATE", 1)
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        why = f"it is locked by another process for more than {BUSY_MS // 1000} s; find and stop that one"
    elif name.startswith("SQLITE_READONLY") or "readonly" in text:
        return DatabaseReadOnly("it is read-only; check the owner and mode of the file and of its folder")
    elif name.startswith("SQLITE_FULL"):
        why = "the disk is full; nothing was written, make room and try again"
    elif name.startswith("SQLITE_CANTOPEN"):
        why = "the file can't be opened; check the path and the folder's mode"
    elif name.startswith("SQLITE_IOERR"):
        why = f"the disk failed ({text}); what was being written may be there or not"
    elif name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return DatabaseCorrupt("the database file", text)
    elif name.startswith("SQLITE_CONSTRAINT") or text.startswith("Could not decode to UTF-8"):
        return DatabaseCorrupt("a row", text)  # not unavailable: trying again would never help
    else:
        why = text
    return DatabaseUnavailable(why)
