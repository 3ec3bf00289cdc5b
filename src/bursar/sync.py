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
import functools
import sqlite3
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

from bursar import instance
from bursar.engine import Operators
from bursar.ledger import Ledger as AsyncLedger
from bursar.model.entries import Entry
from bursar.model.envelope import Receipt
from bursar.model.errors import BursarError, Refusal
from bursar.model.records import Event

P = ParamSpec("P")
T = TypeVar("T")
Inner_co = TypeVar("Inner_co", covariant=True)


class Closed(BursarError):
    """Used after it was closed, or before it was opened."""

    why: str
    code = "CLOSED"
    text = "this Bursar is not open: {why}; use it inside `with bursar.sync.open(url) as b:`"


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


class _Facade(Generic[Inner_co]):
    """Something whose methods are coroutines, and the event loop that runs them."""

    def __init__(self, inner: Inner_co, loop: Loop | None = None) -> None:
        self._inner = inner
        self._loop = loop

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise Closed("it was closed, or not opened")
        return self._loop.call(work)


def _blocking(
    method: Callable[Concatenate[Inner_co, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Facade[Inner_co], P], T]:
    """The same method, with the same arguments, that returns when it is done."""

    @functools.wraps(method)
    def call(self: _Facade[Inner_co], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._run(method(self._inner, *args, **kwargs))

    return call


class Bursar(_Facade[instance.Bursar]):
    """An open database. Use it as `with bursar.sync.open(url) as b:`, or call `close` yourself."""

    def __init__(self, inner: instance.Bursar) -> None:
        super().__init__(inner)
        self.url = inner.url
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
        self._ledger = Ledger(self._inner.ledger, self._loop)
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    start = _blocking(instance.Bursar.start)
    wait = _blocking(instance.Bursar.wait)
    get = _blocking(instance.Bursar.get)
    history = _blocking(instance.Bursar.history)

    @property
    def operators(self) -> Operators:
        """What people do to records. Its methods are coroutines: `b.run(b.operators.signal(…))`."""
        return self._inner.operators

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on this Bursar's event loop, and return what it returns."""
        return self._run(work)

    def close(self) -> None:
        """Finish what is being written and close. A second call does nothing; any other call afterwards raises
        `Closed`."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.stop(self._inner.close())


def _opening(make: Callable[P, instance.Bursar]) -> Callable[P, Bursar]:
    @functools.wraps(make)
    def open_(*args: P.args, **kwargs: P.kwargs) -> Bursar:
        return Bursar(make(*args, **kwargs))

    return open_


open = _opening(instance.open)


class Ledger(_Facade[AsyncLedger]):
    """The ledger, whose every method blocks until it is done. `Ledger` documents what each does and raises."""

    # --- entries -----------------------------------------------------------------------------------------------

    def commit(self, entry: Entry, *, connection: Any = None) -> Receipt:
        """Commit an entry, once. `connection`: a sqlite3 connection opened with check_same_thread=False, in a
        transaction; any other belongs to another thread or loop and is refused."""
        return self._run(self._commit(entry, connection))

    async def _commit(self, entry: Entry, connection: Any) -> Receipt:
        if connection is not None:
            _check_foreign(connection)
        return await self._inner.commit(entry, connection=connection)

    def commit_many(self, entries: Iterable[Entry], *, atomic: bool = False) -> list[Receipt | BursarError]:
        """Commit many entries, each by itself, or with `atomic` all or none."""
        # The caller's iterable is read in the caller's thread.
        return self._run(self._inner.commit_many(list(entries), atomic=atomic))

    reverse = _blocking(AsyncLedger.reverse)

    # --- holds -------------------------------------------------------------------------------------------------

    authorize = _blocking(AsyncLedger.authorize)
    confirm = _blocking(AsyncLedger.confirm)
    void = _blocking(AsyncLedger.void)
    expire_holds = _blocking(AsyncLedger.expire_holds)
    hold = _blocking(AsyncLedger.hold)
    holds = _blocking(AsyncLedger.holds)

    # --- rules -------------------------------------------------------------------------------------------------

    create_asset = _blocking(AsyncLedger.create_asset)
    change_asset = _blocking(AsyncLedger.change_asset)
    assets = _blocking(AsyncLedger.assets)
    asset = _blocking(AsyncLedger.asset)
    create_book = _blocking(AsyncLedger.create_book)
    books = _blocking(AsyncLedger.books)
    create_account = _blocking(AsyncLedger.create_account)
    account = _blocking(AsyncLedger.account)
    accounts = _blocking(AsyncLedger.accounts)
    account_history = _blocking(AsyncLedger.account_history)
    freeze = _blocking(AsyncLedger.freeze)
    unfreeze = _blocking(AsyncLedger.unfreeze)
    change_policy = _blocking(AsyncLedger.change_policy)
    close = _blocking(AsyncLedger.close)

    # --- reads -------------------------------------------------------------------------------------------------

    balance = _blocking(AsyncLedger.balance)
    balances = _blocking(AsyncLedger.balances)
    history = _blocking(AsyncLedger.history)
    envelope = _blocking(AsyncLedger.envelope)
    envelope_by_key = _blocking(AsyncLedger.envelope_by_key)
    envelopes = _blocking(AsyncLedger.envelopes)
    postings = _blocking(AsyncLedger.postings)
    events = _blocking(AsyncLedger.events)

    def follow(self, after: str = "") -> Iterator[Event]:
        """All events after a cursor, and then those to come: an ordinary iterator that waits for the next one."""
        events: AsyncIterator[Event] = self._inner.follow(after)
        try:
            while True:
                yield self._run(_next(events))
        finally:
            with contextlib.suppress(Closed):
                self._run(_end(events))

    # --- upkeep ------------------------------------------------------------------------------------------------

    compact = _blocking(AsyncLedger.compact)
    rebuild = _blocking(AsyncLedger.rebuild)


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
