"""A group is decided while the one before it is written. If that one is not written, the decision is worth nothing.

Only PostgreSQL overlaps groups, so the simulator does not reach this; and there the write of a stale decision mostly
fails by its own counts. What does not fail by itself is what writes nothing: receipts again, and refusals.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bursar.model.accounts import Account, Book
from bursar.model.entries import Intent, Leg
from bursar.model.errors import InsufficientFunds
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.model.records import Taken
from bursar.ports import SystemPorts
from bursar.store.group import Decided, Known, Lost
from bursar.writer import Change, Remember, Writer
from bursar.writer.decide import Delta, GroupJob

PATHS = ("a", "b", "c")


class OverlappingStore:
    """A store that decides and writes apart, on a dictionary; its first write is lost to somebody faster."""

    split = False
    overlaps = True

    def __init__(self) -> None:
        self.ports = SystemPorts()
        self.live = {1 << 16: Posting(1 << 16, 1, 1, 100)}
        self.taken: dict[tuple[str, str], Taken] = {}
        self.number = 100
        self.arrive = asyncio.Event()  # the first group is full
        self.ahead = asyncio.Event()  # the second is decided, while the first is written
        self.writing = False
        self.lost = asyncio.Event()  # the first group may now fail

    async def decide(self, job: Any, *, beside: bool) -> Decided:
        """Read, and let the job decide."""
        rows = self.rows(job)
        if beside:
            self.ahead.set()
        else:
            self.arrive.set()
            await asyncio.sleep(0)  # those who arrive now wait for the next group
        return Decided(0, rows)

    def rows(self, job: GroupJob) -> Any:
        """What the job makes of what is there."""
        job.heads.accounts = {path: Account(id=n, path=path) for n, path in enumerate(PATHS, start=1)}
        job.heads.assets = {"USD": Asset(id=1, code="USD", precision=2)}
        job.heads.books = {"main": Book(id=1, name="main")}
        ask = job.ask()
        pools = {key: [p for p in self.live.values() if p.account == key[0]] for key in ask.pools}
        taken = {key: self.taken[key] for key in ask.keys if key in self.taken}
        numbers = list(range(self.number, self.number + ask.intents))
        self.number += ask.intents
        rows = job.decide(Known(numbers, taken, pools, [], {}))
        assert rows is not None
        return rows

    async def write(self, decided: Decided) -> None:
        """Write; but the first is lost: another process has spent the posting, and left 60."""
        if not self.writing:
            self.writing = True
            await self.lost.wait()
            self.live = {2 << 16: Posting(2 << 16, 1, 1, 60)}
            raise Lost("a posting was taken")
        self.put(decided.rows)

    async def group(self, job: Any, connection: Any = None) -> None:
        """Decide and write in one."""
        self.put(self.rows(job))

    def put(self, rows: Any) -> None:
        if any(number not in self.live for number in rows.dead):
            raise Lost("a posting was taken")
        for number in rows.dead:
            del self.live[number]
        self.live |= {p.id: p for p, live in rows.postings if live}
        self.taken |= {(r[2], r[3]): Taken(r[0], r[1], r[4], r[7]) for r in rows.envelopes}


def payment(key: str, target: str, minor: int) -> Change:
    return Change((Intent(scope="user", key=key, legs=(Leg("a", target, "USD", minor),)),))


@pytest.mark.parametrize("second", [["again"], ["small"], ["again", "small"]], ids=" and ".join)
def test_what_was_decided_on_a_group_that_failed_is_decided_again(second: list[str]) -> None:
    """Given a payment in flight, when it is lost, then those decided on top of it are answered by what is there."""
    asyncio.run(lose_the_first(second))


async def lose_the_first(second: list[str]) -> None:
    store = OverlappingStore()
    writer = Writer(store)  # type: ignore[arg-type]  # as much of a store as a group needs
    writer.gather_min = 1
    first = asyncio.ensure_future(writer.apply(payment("one", "b", 80)))
    await store.arrive.wait()
    changes = {"again": payment("one", "b", 80), "small": payment("two", "c", 50)}
    others = {name: asyncio.ensure_future(writer.apply(changes[name])) for name in second}
    await store.ahead.wait()  # the second group is decided, on the 20 that the first would leave
    store.lost.set()
    await asyncio.wait([first, *others.values()])

    assert isinstance(first.exception(), InsufficientFunds)
    if "again" in others:
        assert isinstance(others["again"].exception(), InsufficientFunds)  # no receipt for what never was
    if "small" in others:
        assert others["small"].result().receipts[0].envelope in {taken.seq for taken in store.taken.values()}


def test_a_refusal_of_records_is_not_decided_beside_another_group() -> None:
    """Nothing it writes would notice that the group before has answered the operation: it must wait for that one."""
    store = OverlappingStore()
    refused = Change(
        (Intent(scope="s", key="k:pay", legs=(Leg("a", "b", "USD", 500),)),),
        remember=Remember(scope="s", id="k", op="pay", fingerprint="x"),
    )
    beside = GroupJob(Writer(store).heads, [refused], Delta(frozenset(), {}, {}, {}))  # type: ignore[arg-type]
    with pytest.raises(Lost, match="just writing"):
        store.rows(beside)
    assert beside.ask().look is None  # what is looked up now is not what will be there
    alone = GroupJob(Writer(store).heads, [refused])  # type: ignore[arg-type]
    with pytest.raises(AssertionError):  # not decided yet: it wants to look first
        store.rows(alone)
    assert alone.ask().look is not None
