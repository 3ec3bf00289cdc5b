"""Bursar for programs without an event loop: scripts, notebooks, threads.

    with bursar.sync.open("sqlite:///funds.db") as b:
        b.ledger.create_asset("USDT", precision=6)
        print(b.ledger.balance("user:1001:funding", "USDT"))

The same ledger and flows, whose methods block. Its own event loop runs in a daemon thread, so it works where a loop is
running already (notebooks), and from several threads at once: their entries share one group commit, as tasks do.
Interrupting a call (Ctrl-C) stops waiting; its entry may have been committed, and repeating it with the same key tells.
Not here: transactions of the caller's own, which belong to the caller's thread or loop (see `Ledger.commit`).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from datetime import datetime, timedelta
from types import TracebackType
from typing import Any, Self, TypeVar

import msgspec

from bursar import instance
from bursar.engine import Flow, FlowRecord, Operators, Sink
from bursar.ledger import Ledger as AsyncLedger
from bursar.model.accounts import Account, Book, Policy
from bursar.model.entries import Entry
from bursar.model.envelope import Receipt
from bursar.model.errors import BursarError, Refusal
from bursar.model.money import Amount, Asset, AssetStatus, Money
from bursar.model.records import Event, Transition
from bursar.model.views import AccountVersion, EnvelopeView, HistoryLine, Hold, PostingView
from bursar.writer import Limit

T = TypeVar("T")
B = TypeVar("B", bound=msgspec.Struct)


@dataclass(eq=False)
class Closed(BursarError):
    """Used after it was closed, or before it was opened."""

    why: str
    code = "CLOSED"
    text = "this Bursar is not open: {why}; use it inside `with bursar.sync.open(url) as b:`"


@dataclass(eq=False)
class ForeignConnection(Refusal):
    """A connection that can't be used from our thread."""

    why: str
    code = "FOREIGN_CONNECTION"
    text = "the entry can't join that connection's transaction: {why}"


class Loop:
    """An event loop in a thread of its own, to which any thread may give work."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="bursar-sync", daemon=True)
        self._lock = threading.Lock()
        self._open = False

    def start(self) -> None:
        """From here on it takes work."""
        self._thread.start()
        self._open = True

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run to the end and return what it returns."""
        with self._lock:  # so that nothing is given to a loop that has just stopped, where it would wait for ever
            if not self._open:
                work.close()
                raise Closed("it was closed")
            future: Future[T] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except CancelledError:
            raise Closed("it was closed while this call was waiting") from None
        except BaseException:
            future.cancel()  # an interrupt: no caller waits for the answer
            raise

    def stop(self, last: Coroutine[Any, Any, None] | None = None) -> None:
        """Take no more work, do one last thing, end everything that still waits, then the thread."""
        with self._lock:
            self._open = False
        try:
            if last is not None:
                asyncio.run_coroutine_threadsafe(last, self._loop).result()
        finally:
            asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()


class Bursar:
    """An open database. Use it as `with bursar.sync.open(url) as b:`, or call `close` yourself."""

    def __init__(self, inner: instance.Bursar) -> None:
        self.url = inner.url
        self._inner = inner
        self._loop: Loop | None = None
        self._ledger: Ledger | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger, with methods that block."""
        if self._ledger is None:
            raise Closed("it was not opened")
        return self._ledger

    def __enter__(self) -> Self:
        if self._ledger is not None:
            raise Closed("it was opened before; make a new one")
        self._loop = Loop()
        self._loop.start()
        try:
            self._loop.call(self._inner.__aenter__())
        except BaseException:
            self._loop.stop()
            self._loop = None
            raise
        self._ledger = Ledger(self._loop, self._inner.ledger)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(
        self, flow: Flow[B], body: B, *, key: str, owner: str = "", limits: tuple[Limit, ...] = ()
    ) -> FlowRecord[B]:
        """Start a record, once per owner and key, and have it driven."""
        return self.run(self._inner.start(flow, body, key=key, owner=owner, limits=limits))

    def wait(self, record: FlowRecord[B], timeout_s: float = instance.WAIT_S) -> FlowRecord[B]:
        """The record once it has ended or waits for an event, or as it is after that time."""
        return self.run(self._inner.wait(record, timeout_s))

    def get(self, flow: Flow[B], id: str) -> FlowRecord[B]:
        """A record as it stands."""
        return self.run(self._inner.get(flow, id))

    def history(self, record: FlowRecord[Any]) -> Sequence[Transition]:
        """Every transition of a record, oldest first."""
        return self.run(self._inner.history(record))

    @property
    def operators(self) -> Operators:
        """What people do to records. Its methods are coroutines: `b.run(b.operators.signal(…))`."""
        return self._inner.operators

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this Bursar's event loop, and return what it returns."""
        if self._loop is None:
            work.close()
            raise Closed("it was closed, or not opened")
        return self._loop.call(work)

    def close(self) -> None:
        """Finish what is being written and close. A second call does nothing; any other call afterwards raises
        `Closed`."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(self._inner.__aexit__(None, None, None))


def open(
    url: str,
    *,
    flows: Sequence[Flow[Any]] = (),
    migrate: bool = False,
    require_synchronous: bool = False,
    sinks: Mapping[str, Sink] = instance.SINKS,
    worker_name: str = "",
    stop_s: float = instance.STOP_S,
) -> Bursar:
    """Open `sqlite:///funds.db` or `postgresql://…`, as `bursar.open` does."""
    return Bursar(
        instance.open(
            url,
            flows=flows,
            migrate=migrate,
            require_synchronous=require_synchronous,
            sinks=sinks,
            worker_name=worker_name,
            stop_s=stop_s,
        )
    )


class Ledger:
    """The ledger, whose every method blocks until it is done. `Ledger` documents what each does and raises."""

    def __init__(self, loop: Loop, inner: AsyncLedger) -> None:
        self._loop = loop
        self._inner = inner

    # --- entries -----------------------------------------------------------------------------------------------

    def commit(self, entry: Entry, *, connection: Any = None) -> Receipt:
        """Commit an entry, once. `connection`: a sqlite3 connection opened with check_same_thread=False, in a
        transaction; any other belongs to another thread or loop and is refused."""
        return self._loop.call(self._commit(entry, connection))

    async def _commit(self, entry: Entry, connection: Any) -> Receipt:
        if connection is not None:
            _check_foreign(connection)
        return await self._inner.commit(entry, connection=connection)

    def commit_many(self, entries: Iterable[Entry], *, atomic: bool = False) -> list[Receipt | BursarError]:
        """Commit many entries, each by itself, or with `atomic` all or none."""
        return self._loop.call(self._inner.commit_many(list(entries), atomic=atomic))

    def reverse(self, envelope: int | str, *, metadata: dict[str, Any] | None = None) -> Receipt:
        """Undo an envelope by another one."""
        return self._loop.call(self._inner.reverse(envelope, metadata=metadata))

    # --- holds -------------------------------------------------------------------------------------------------

    def authorize(
        self,
        account: str,
        asset: str,
        amount: Amount,
        *,
        key: str | None = None,
        expires_in: timedelta | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Hold:
        """Set money aside."""
        return self._loop.call(
            self._inner.authorize(account, asset, amount, key=key, expires_in=expires_in, metadata=metadata)
        )

    def confirm(
        self,
        hold: int,
        target: str,
        amount: Amount | None = None,
        *,
        key: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Receipt:
        """Pay from a hold: all that remains, or a part."""
        return self._loop.call(self._inner.confirm(hold, target, amount, key=key, metadata=metadata))

    def void(self, hold: int) -> Receipt:
        """Give back what remains of a hold."""
        return self._loop.call(self._inner.void(hold))

    def expire_holds(self, limit: int = 100) -> list[Receipt]:
        """Give back what remains of holds whose time is up."""
        return self._loop.call(self._inner.expire_holds(limit))

    def hold(self, hold: int) -> Hold:
        """One hold as it stands."""
        return self._loop.call(self._inner.hold(hold))

    def holds(self, account: str) -> list[Hold]:
        """Open holds of an account."""
        return self._loop.call(self._inner.holds(account))

    # --- rules -------------------------------------------------------------------------------------------------

    def create_asset(
        self,
        code: str,
        precision: int,
        *,
        min_transfer: Amount | None = None,
        max_transfer: Amount | None = None,
        internal_transfer_enabled: bool | None = None,
    ) -> Asset:
        """Create an asset."""
        return self._loop.call(
            self._inner.create_asset(
                code,
                precision,
                min_transfer=min_transfer,
                max_transfer=max_transfer,
                internal_transfer_enabled=internal_transfer_enabled,
            )
        )

    def change_asset(
        self,
        code: str,
        *,
        status: AssetStatus | None = None,
        min_transfer: Amount | None = None,
        max_transfer: Amount | None = None,
        internal_transfer_enabled: bool | None = None,
    ) -> Asset:
        """Suspend or resume an asset, or move its transfer limits."""
        return self._loop.call(
            self._inner.change_asset(
                code,
                status=status,
                min_transfer=min_transfer,
                max_transfer=max_transfer,
                internal_transfer_enabled=internal_transfer_enabled,
            )
        )

    def assets(self) -> dict[str, Asset]:
        """All assets by code."""
        return self._loop.call(self._inner.assets())

    def asset(self, code: str) -> Asset:
        """One asset, as it is now."""
        return self._loop.call(self._inner.asset(code))

    def create_book(self, name: str, *, assets: tuple[str, ...] = (), accounts: tuple[str, ...] = ()) -> Book:
        """Create a book."""
        return self._loop.call(self._inner.create_book(name, assets=assets, accounts=accounts))

    def books(self) -> dict[str, Book]:
        """All books by name."""
        return self._loop.call(self._inner.books())

    def create_account(self, path: str, *, policy: Policy | None = None, book: str = "") -> Account:
        """Create an account."""
        return self._loop.call(self._inner.create_account(path, policy=policy, book=book))

    def account(self, path: str) -> Account:
        """The newest version of an account."""
        return self._loop.call(self._inner.account(path))

    def accounts(self, prefix: str = "", *, after: str = "", limit: int = 100) -> list[Account]:
        """Accounts by path; with `prefix`, an account and all below it."""
        return self._loop.call(self._inner.accounts(prefix, after=after, limit=limit))

    def account_history(self, path: str) -> list[AccountVersion]:
        """Every version of an account, oldest first."""
        return self._loop.call(self._inner.account_history(path))

    def freeze(self, path: str) -> Account:
        """From the moment this returns nothing moves out or in, except what is given back."""
        return self._loop.call(self._inner.freeze(path))

    def unfreeze(self, path: str) -> Account:
        """Undo a freeze."""
        return self._loop.call(self._inner.unfreeze(path))

    def change_policy(self, path: str, policy: Policy) -> Account:
        """A new policy."""
        return self._loop.call(self._inner.change_policy(path, policy))

    def close(self, path: str) -> Account:
        """Close an account for good."""
        return self._loop.call(self._inner.close(path))

    # --- reads -------------------------------------------------------------------------------------------------

    def balance(
        self, account: str | None = None, asset: str = "", *, prefix: str | None = None, at: datetime | None = None
    ) -> Money:
        """The balance of an account (or a prefix) in an asset, now or at a past time."""
        return self._loop.call(self._inner.balance(account, asset, prefix=prefix, at=at))

    def balances(
        self, account: str | None = None, *, prefix: str | None = None, at: datetime | None = None
    ) -> dict[str, Money]:
        """The balances of an account (or a prefix), now or at a past time, by asset code."""
        return self._loop.call(self._inner.balances(account, prefix=prefix, at=at))

    def history(
        self,
        account: str,
        *,
        before: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[HistoryLine]:
        """Envelopes an account took part in, newest first."""
        return self._loop.call(self._inner.history(account, before=before, since=since, until=until, limit=limit))

    def envelope(self, envelope: int | str) -> EnvelopeView:
        """One envelope whole."""
        return self._loop.call(self._inner.envelope(envelope))

    def envelope_by_key(self, key: str, *, scope: str = "user") -> EnvelopeView:
        """The envelope that a key stands for."""
        return self._loop.call(self._inner.envelope_by_key(key, scope=scope))

    def envelopes(self, *, after: int = 0, book: str | None = None, limit: int = 100) -> list[EnvelopeView]:
        """Envelopes in the order of events, after one."""
        return self._loop.call(self._inner.envelopes(after=after, book=book, limit=limit))

    def postings(
        self, account: str, asset: str | None = None, *, live_only: bool = True, after: int = 0, limit: int = 100
    ) -> list[PostingView]:
        """Postings of an account by number."""
        return self._loop.call(self._inner.postings(account, asset, live_only=live_only, after=after, limit=limit))

    def events(self, after: str = "", *, limit: int = 100) -> list[Event]:
        """Events after a cursor, in order."""
        return self._loop.call(self._inner.events(after, limit=limit))

    def follow(self, after: str = "") -> Iterator[Event]:
        """All events after a cursor, and then those to come: an ordinary iterator that waits for the next one."""
        events: AsyncIterator[Event] = self._inner.follow(after)
        try:
            while True:
                yield self._loop.call(_next(events))
        finally:
            with contextlib.suppress(Closed):
                self._loop.call(_end(events))

    # --- upkeep ------------------------------------------------------------------------------------------------

    def compact(self, account: str, *, most: int = 1_000_000) -> int:
        """Merge the postings of an account."""
        return self._loop.call(self._inner.compact(account, most=most))

    def rebuild(self) -> int:
        """Make the disposable tables again."""
        return self._loop.call(self._inner.rebuild())


async def _next(events: AsyncIterator[Event]) -> Event:
    return await anext(events)  # it never ends by itself


async def _end(events: AsyncIterator[Event]) -> None:
    close = getattr(events, "aclose", None)
    if close is not None:
        await close()


def _check_foreign(connection: Any) -> None:
    """Runs in the loop's thread: whether a connection that the caller made can be used here."""
    if not isinstance(connection, sqlite3.Connection):
        raise ForeignConnection(
            f"{type(connection).__name__}: it belongs to the event loop that opened it, and this one is another; "
            "use `async with bursar.open(url)` in that loop"
        )
    try:
        connection.cursor().close()
    except sqlite3.ProgrammingError:
        raise ForeignConnection(
            "a sqlite3 connection works only in the thread that opened it, and entries are committed in another; "
            "open it with sqlite3.connect(path, check_same_thread=False)"
        ) from None
