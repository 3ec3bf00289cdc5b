"""A group on PostgreSQL: what is read to decide it, and how it is written. Two round trips, or one.

A group that selects no postings, or a small one that only selects among those which the groups before have left
behind, has nothing to read if nobody else writes: its keys are new and its postings live, and if not, the write fails
by itself, as it does if the rules have changed. Fresh numbers for such a group came with the write before it. A refusal
is never decided so: nothing would be written, and nothing would notice.
"""

from __future__ import annotations

from typing import Any, cast

import asyncpg

from bursar.model.postings import Posting
from bursar.model.records import Taken
from bursar.store.group import Ask, Decided, Heads, Job, Known, PoolKey, RecordAsk, RecordRows, RecordsKnown, Rows
from bursar.store.postgres.arrays import SQL, columns, numbers_text, packed
from bursar.store.rows import Row, account_of, asset_of, book_of, hold_values, remembered_of

NUMBERS_AHEAD = 8  # at least, that come with the write of a small group
NUMBERS_S = 1.0  # for so long
SMALL = 16  # new entries and records
ANSWER_BYTES = 32  # of a content hash, in front of the legs

Connection = asyncpg.Connection


async def read_group(connection: Connection, job: Job, now_s: float) -> Decided:
    """Read until the group can be decided."""
    heads = job.heads
    if heads.generation == 0:
        await _load_rules(connection, job, await connection.fetchval(SQL["generation"]))
    numbers: list[int] = []
    while True:
        heads.trim()
        ask = job.ask()
        if ask.missing:
            for row in await connection.fetch(SQL["heads_by_path"], sorted(ask.missing)):
                heads.accounts[row[1]] = account_of(cast("Row", row))
            ask = job.ask()
        if ask.hopeful:
            found = await _numbers(connection, heads, ask.intents, now_s)
            kept = [heads.live[number] for number in ask.named]
            generation, known = heads.generation, Known(found, {}, {}, kept, {}, hoped=True)
        else:
            generation, known = await _know(connection, ask, numbers)
            if generation != heads.generation:
                await _load_rules(connection, job, generation)
                continue
        if ask.look is not None:
            known.found = await _look(connection, ask.look)
        rows = job.decide(known)
        if rows is not None:
            return Decided(generation, rows, heads)


async def _load_rules(connection: Connection, job: Job, generation: int) -> None:
    """Assets, books and cached accounts, all read after `generation` was: newer is caught, older can't be."""
    assets = {row[1]: asset_of(cast("Row", row)) for row in await connection.fetch(SQL["assets"])}
    books = {row[1]: book_of(cast("Row", row)) for row in await connection.fetch(SQL["books"])}
    wide = {row[0] for row in await connection.fetch(SQL["wide_accounts"])}
    job.heads.reset(generation, assets, books, wide)


async def _know(connection: Connection, ask: Ask, numbers: list[int]) -> tuple[int, Known]:
    plus = [key for key in ask.pools if key[2] > 0]
    minus = [key for key in ask.pools if key[2] < 0]
    answer = await connection.fetch(
        SQL["group_read"],
        0 if numbers else ask.intents,
        *packed(ask.keys, "tt"),
        *packed([(account, asset, ask.pools[account, asset, sign]) for account, asset, sign in plus], "nnn"),
        *packed([(account, asset, ask.pools[account, asset, sign]) for account, asset, sign in minus], "nnn"),
        numbers_text(ask.named),
        *packed(ask.floors, "nn"),
    )
    generation = 0
    taken: dict[tuple[str, str], Taken] = {}
    pools: dict[PoolKey, list[Posting]] = {key: [] for key in ask.pools}
    named: list[Posting] = []
    floors: dict[tuple[int, int], tuple[int, int]] = {}
    for what, place, a, b, text, data in answer:
        if what == 4:
            key = plus[place - 1]
            pools[key].append(Posting(a, key[0], key[1], int(text)))
        elif what == 2:
            numbers.append(a)
        elif what == 3:
            taken[ask.keys[place - 1]] = Taken(a, data[:ANSWER_BYTES], b, data[ANSWER_BYTES:])
        elif what == 5:
            key = minus[place - 1]
            pools[key].append(Posting(a, key[0], key[1], int(text)))
        elif what == 6:
            named.append(Posting(a, b, place, int(text)))
        elif what == 7:
            floors[ask.floors[place - 1]] = (int(text), a)
        else:
            generation = a
    return generation, Known(list(numbers), taken, pools, named, floors)


async def _numbers(connection: Connection, heads: Heads, how_many: int, now_s: float) -> list[int]:
    """Fresh numbers. Those that came with the write before are, unless that was a while ago: they order histories."""
    if len(heads.numbers) < how_many or now_s > heads.numbers_until:
        rows = await connection.fetch(SQL["group_numbers"], how_many)
        return [row[0] for row in rows]
    taken, heads.numbers = heads.numbers[:how_many], heads.numbers[how_many:]
    return taken


async def _look(connection: Connection, ask: RecordAsk) -> RecordsKnown:
    """What a wary group wants to know of records, operations and limits."""
    known = RecordsKnown(versions={}, made=set(), operations={}, counters={})
    found = await connection.fetch(
        SQL["group_look"],
        numbers_text(ask.versions),
        *columns(ask.made, 2),
        *columns(ask.operations, 3),
        ask.counters,
    )
    for what, place, a, b, text in found:
        if what == 1:
            known.versions[a] = b
        elif what == 2:
            known.made.add(ask.made[place - 1])
        elif what == 3:
            known.operations[ask.operations[place - 1]] = remembered_of(text)
        else:
            known.counters[text[0]] = (a, int(text[1]))
    return known


async def write_group(connection: Connection, decided: Decided, now_s: float) -> None:
    """Write what was decided, if all it rests on still stands."""
    rows, heads = decided.rows, decided.heads
    made = len(rows.envelopes) + (0 if rows.records is None else len(rows.records.new))
    ahead = max(NUMBERS_AHEAD, made) if made <= SMALL and not heads.wary else 0
    if rows.records is None:
        if not rows.envelopes:
            return
        written = await connection.fetch(SQL["group_write"], *_entries(decided), ahead)
    elif rows.envelopes:
        known = packed(rows.records.high_water, "ttn")
        written = await connection.fetch(
            SQL["group_write_all"], *_entries(decided), *_records(rows.records), ahead, *known
        )
    else:
        generation = decided.generation if rows.under_rules else 0
        known = packed(rows.records.high_water, "ttn")
        written = await connection.fetch(SQL["group_records"], *_records(rows.records), ahead, generation, *known)
    heads.numbers, heads.numbers_until = [int(number) for number in written[0][-1]], now_s + NUMBERS_S
    _keep(heads, rows)


def _keep(heads: Heads, rows: Rows) -> None:
    """Remember the postings that records own from now on: whoever moves those records names them."""
    for posting in rows.dead:
        heads.live.pop(posting, None)
    if rows.records is not None:
        owned = {row[6] for row in rows.records.new} | {row[5] for row in rows.records.moves}
        heads.live.update({p.id: p for p, live in rows.postings if live and p.id in owned})


def _records(rows: RecordRows) -> list[str]:
    return [
        *packed(rows.outcomes, "ttttttt"),
        *packed(rows.counters, "tnnnnn"),
        *packed(rows.new, "nttttnnnttt"),
        *packed(rows.moves, "nntnnnnttt"),
        *packed(rows.passages, "nntttntt"),
    ]


def _entries(decided: Decided) -> list[Any]:
    rows = decided.rows
    postings = [(p.id, p.account, p.asset, p.amount, live) for p, live in rows.postings]
    return [
        decided.generation,
        *packed(rows.envelopes, "nbttnnnbbbt"),
        *packed(postings, "nnnnn"),
        *packed(rows.spends, "nn"),
        numbers_text(rows.dead),
        *packed(rows.involved, "nn"),
        *packed(rows.floors, "nnnn"),
        *packed(rows.cache, "nnnn"),
        *packed([hold_values(h, str) for h in rows.holds], "nnnnnnttnn"),
    ]
