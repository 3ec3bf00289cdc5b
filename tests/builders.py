"""Builders: a furnished ledger in a line, and the checks that every suite makes of one.

`Place` is where a database is and how it is worked; `scenario` turns an `async def` test into a plain one and opens
whatever places it asks for. A furnished ledger has the assets USDT (6 decimals), BTC (8) and ETH (18), the external
account `bank`, the system account `fees` and the plain accounts `alice`, `bob` and `carol`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from tests.rows import Rows
from tests.warm import WARM

from bursar import Bursar, BursarError, Entry, ExternalAccount, Receipt, SystemAccount, deposit
from bursar.ledger import Ledger
from bursar.model.entries import EntryKind
from bursar.model.envelope import BookedLeg, Envelope
from bursar.model.postings import Posting, posting_id
from bursar.model.records import EventKind
from bursar.ports import Ports, SerialExecutor, SystemPorts
from bursar.sim.split import SplitBursar
from bursar.store import Store, connect

T = TypeVar("T")
BANK = "bank"
PRECISIONS = {"USDT": 6, "BTC": 8, "ETH": 18}


class MovablePorts(SystemPorts):
    """The real machine, with a wall clock that can be moved."""

    def __init__(self) -> None:
        self.ahead_us = 0

    def now_us(self) -> int:
        return super().now_us() + self.ahead_us


class Crash(BaseException):
    """The process is gone. Not an Exception: nothing may catch it and go on."""


class FaultyPorts(MovablePorts):
    """The real machine, on which the n-th call to a lane goes wrong. Nothing does before `arm`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.fails_at = 0
        self.fault = ""
        self.dead = asyncio.Event()

    def arm(self, fault: str, call: int) -> None:
        """`cancel`: the caller is cancelled while it waits. `before`, `after`: the process dies before or after."""
        self.calls, self.fault, self.fails_at = 0, fault, call

    @property
    def reached(self) -> bool:
        """Whether there was such a call at all."""
        return 0 < self.fails_at <= self.calls

    def victims(self) -> list[asyncio.Task[Any]]:
        """Who is cancelled: whoever makes the call."""
        task = asyncio.current_task()
        assert task is not None
        return [task]

    def lane(self, name: str) -> SerialExecutor:
        return FaultyLane(super().lane(name), self)


class FaultyLane:
    """A lane that does as its ports say."""

    def __init__(self, inner: SerialExecutor, ports: FaultyPorts) -> None:
        self.inner = inner
        self.ports = ports

    async def run(self, work: Callable[[], T]) -> T:
        ports = self.ports
        ports.calls += 1
        if not ports.reached:
            return await self.inner.run(work)
        if ports.fault == "cancel":
            if ports.calls == ports.fails_at:
                for task in ports.victims():
                    task.cancel()
            return await self.inner.run(work)
        if ports.fault == "after" and ports.calls == ports.fails_at:
            await self.inner.run(work)
        ports.dead.set()
        raise Crash

    def close(self) -> None:
        self.inner.close()


@dataclass(frozen=True)
class Place:
    """A database of the test's own, and the mode in which it is worked."""

    mode: str  # sqlite, split or postgres
    url: str

    @property
    def engine(self) -> str:
        return "postgres" if self.mode == "postgres" else "sqlite"

    @property
    def path(self) -> str:
        """The file behind a SQLite address."""
        return self.url.removeprefix("sqlite:///")

    def bursar(self, ports: Ports | None = None, *, split: bool | None = None) -> Bursar:
        """Bursar on this database; several at once are several programs at once."""
        if self.mode == "split" if split is None else split:
            return SplitBursar(self.url, ports=ports)
        return Bursar(self.url, ports=ports)

    def store(self, ports: Ports | None = None) -> Store:
        """The bare store, not opened yet."""
        return connect(self.url, ports or SystemPorts())


@dataclass(frozen=True)
class LedgerAt:
    """A ledger to be opened by `scenario`. When the test is over its books must be sound, whatever it did."""

    place: Place

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Ledger]:
        async with self.place.bursar() as bursar:
            yield bursar.ledger
            await bursar.ledger.writer.close()
            await check_sound(bursar.ledger)


@dataclass(frozen=True)
class StoreAt:
    """A store to be opened by `scenario`."""

    place: Place

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Store]:
        store = self.place.store()
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def scenario(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """An async test as a plain function: ledgers and stores among its arguments are opened for it."""

    @functools.wraps(test)
    def plain(**arguments: Any) -> None:
        async def body() -> None:
            async with contextlib.AsyncExitStack() as stack:
                for name, value in arguments.items():
                    if isinstance(value, LedgerAt | StoreAt):
                        arguments[name] = await stack.enter_async_context(value.open())
                await test(**arguments)

        WARM.run(body())

    return plain


async def furnish(ledger: Ledger) -> None:
    """Assets and accounts that every scenario may count on."""
    for code, precision in PRECISIONS.items():
        await ledger.create_asset(code, precision)
    await ledger.create_account(BANK, policy=ExternalAccount())
    await ledger.create_account("fees", policy=SystemAccount())
    for name in ("alice", "bob", "carol"):
        await ledger.create_account(name)


async def seed(ledger: Ledger, account: str, *amounts: str, asset: str = "USDT") -> list[Receipt]:
    """Deposits from the bank, one posting each, in that order."""
    return [await ledger.commit(deposit(BANK, account, asset, amount)) for amount in amounts]


async def balance(ledger: Ledger, account: str, asset: str = "USDT") -> str:
    """What an account has, as text."""
    return str(await ledger.balance(account, asset))


async def outcome(work: Coroutine[Any, Any, Any]) -> Any:
    """What a call returns, or the error it raises."""
    try:
        return await work
    except BursarError as error:
        return error


async def all_at_once(ledger: Ledger, entries: Iterable[Entry]) -> list[Any]:
    """Commit concurrently; each one's receipt or error, in the order given."""
    return list(await asyncio.gather(*[outcome(ledger.commit(entry)) for entry in entries]))


def receipts(outcomes: Iterable[Any]) -> list[Receipt]:
    """Those that were committed."""
    return [found for found in outcomes if isinstance(found, Receipt)]


async def dust(ledger: Ledger, account: str, count: int, asset: str = "USDT") -> None:
    """So many postings of one smallest unit each, written behind the ledger's back but as it would have done it."""
    async with ledger.store.transaction() as unit:
        kind = (await unit.rules.assets())[asset]
        heads = await unit.accounts.heads([BANK, account])
        bank, owner = heads[BANK].id, heads[account].id
        while count > 0:
            part = min(count, 60_000)
            seq = await Rows(unit).take_numbers(1)
            postings = [Posting(posting_id(seq, 0), bank, kind.id, -part)]
            postings += [Posting(posting_id(seq, i), owner, kind.id, 1) for i in range(1, part + 1)]
            await Rows(unit).insert(postings)
            await Rows(unit).enliven(postings)
            envelope = Envelope(
                seq=seq,
                scope="dust",
                key=str(seq),
                book=(await unit.rules.books())["main"],
                kind=EntryKind.ENTRY,
                reverses=0,
                legs=(BookedLeg(bank, owner, kind.id, part),),
                accounts=tuple(sorted(heads.values(), key=lambda head: head.path)),
                assets=(kind,),
                consumes=(),
                creates=tuple(postings),
                metadata="{}",
            )
            await Rows(unit).store(envelope, envelope.id())
            await Rows(unit).involve([bank, owner], seq)
            await unit.events.append(EventKind.COMMITTED, seq)
            await unit.balances.add_cache([(bank, kind.id, seq, -part)])
            count -= part


async def check_sound(ledger: Ledger) -> None:
    """Conservation, one spender per posting, live = postings - spends, and every cached sum is the sum."""
    async with ledger.store.snapshot(unhurried=True) as tables:  # as audit reads: a test may have written many rows
        sums = {(account, asset): total for account, asset, total, _ in await tables.postings.sums()}
        assert set((await tables.checks.asset_sums()).values()) <= {0}, "value was made or lost"
        for name in ("stray_spends", "not_live", "wrongly_live", "stray_postings"):
            assert await tables.checks.ids(name, 5) == [], name
        for key, guarded in (await tables.balances.all_guarded()).items():
            assert guarded == sums.get(key, 0), f"guarded balance of {key}"
        heads = {a.id: a for a in await tables.accounts.list(limit=100_000)}
        wide = await tables.balances.cached_accounts()
        for number, head in heads.items():
            if head.pays_from_postings and number not in wide:
                continue
            cached = await tables.balances.cached(number)
            for asset in {s for a, s in sums if a == number} | set(cached):
                assert cached.get(asset, 0) == sums.get((number, asset), 0), f"cache of {head.path}"
