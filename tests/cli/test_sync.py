"""The synchronous façade: the same ledger, from notebooks, scripts and threads."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import signal
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import bursar.sync
from bursar import BursarError, ExternalAccount, Receipt, StoreError, deposit, pay
from bursar.ledger import Ledger
from bursar.model.errors import InsufficientFunds
from bursar.sync import Closed, ForeignConnection

# Parts of other methods, and of flows.
NOT_FOR_CALLERS = {"begin_close", "cancel_close", "close_empty", "known_assets", "require_accounts", "widen"}


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/funds.db"


@pytest.fixture
def ledger(url: str) -> Iterator[bursar.sync.Ledger]:
    with bursar.sync.open(url) as b:
        furnish(b.ledger)
        yield b.ledger


def furnish(ledger: bursar.sync.Ledger) -> None:
    ledger.create_asset("USDT", precision=6)
    ledger.create_account("bank", policy=ExternalAccount())
    ledger.create_account("alice")
    ledger.create_account("bob")
    ledger.commit(deposit("bank", "alice", "USDT", "100"))


def test_methods_block_and_return_what_the_others_return(ledger: bursar.sync.Ledger) -> None:
    receipt = ledger.commit(pay("alice", "bob", "USDT", "30", key="k"))
    assert isinstance(receipt, Receipt)
    assert ledger.commit(pay("alice", "bob", "USDT", "30", key="k")) == Receipt(
        envelope=receipt.envelope, id=receipt.id, key="k", replayed=True
    )
    assert str(ledger.balance("bob", "USDT")) == "30.000000"
    hold = ledger.authorize("bob", "USDT", "10")
    ledger.confirm(hold.id, "alice", "4")
    ledger.void(hold.id)
    assert {p: str(ledger.balance(p, "USDT")) for p in ("alice", "bob")} == {"alice": "74.000000", "bob": "26.000000"}
    with pytest.raises(InsufficientFunds):
        ledger.commit(pay("bob", "alice", "USDT", "1000"))


def test_postgresql_too(fresh_postgres: str) -> None:
    with bursar.sync.open(fresh_postgres) as b:
        furnish(b.ledger)
        assert str(b.ledger.balance("alice", "USDT")) == "100.000000"


def test_inside_a_running_loop_as_in_a_notebook(url: str) -> None:
    async def cell() -> str:
        with bursar.sync.open(url) as b:
            furnish(b.ledger)
            return str(b.ledger.balance("alice", "USDT"))

    assert asyncio.run(cell()) == "100.000000"


def test_from_several_threads_at_once(ledger: bursar.sync.Ledger) -> None:
    outcomes: list[Receipt | BursarError] = []

    def work() -> None:
        for _ in range(25):
            try:
                outcomes.append(ledger.commit(pay("alice", "bob", "USDT", "1.5")))
            except BursarError as error:
                outcomes.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    paid = sum(isinstance(o, Receipt) for o in outcomes)
    assert (len(outcomes), paid) == (100, 66)  # 66 × 1.5 = 99 of 100
    assert str(ledger.balance("bob", "USDT")) == "99.000000"


def test_events_are_an_ordinary_iterator_that_waits(ledger: bursar.sync.Ledger) -> None:
    past = len(ledger.events())
    events = ledger.follow()
    assert len(list(itertools.islice(events, past))) == past
    got: list[int] = []
    waiting = threading.Thread(target=lambda: got.append(next(events).subject))
    waiting.start()
    receipt = ledger.commit(pay("alice", "bob", "USDT", "1"))
    waiting.join()
    assert got == [receipt.envelope]


def test_every_call_after_close_says_so(url: str) -> None:
    with bursar.sync.open(url) as b:
        furnish(b.ledger)
        ledger, events = b.ledger, b.ledger.follow()
        next(events)
    for call in (ledger.assets, lambda: ledger.commit(pay("alice", "bob", "USDT", "1")), lambda: next(events)):
        with pytest.raises(Closed, match="not open"):
            call()
    b.close()
    with pytest.raises(Closed):
        b.__enter__()


def test_before_it_is_opened_it_says_so(url: str) -> None:
    with pytest.raises(Closed, match="not opened"):
        _ = bursar.sync.open(url).ledger


def test_a_call_that_waits_ends_when_it_is_closed_from_another_thread(url: str) -> None:
    b = bursar.sync.open(url)
    b.__enter__()
    furnish(b.ledger)
    events = b.ledger.follow(b.ledger.events()[-1].cursor)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            next(events)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    b.close()
    thread.join()
    assert [type(error) for error in errors] == [Closed]


def test_an_interrupt_ends_the_wait_and_nothing_else(ledger: bursar.sync.Ledger) -> None:
    """Ctrl-C in a notebook cell: the façade can be used afterwards."""
    main = threading.main_thread().ident
    assert main is not None

    async def interrupted() -> None:
        signal.pthread_kill(main, signal.SIGINT)
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        ledger._run(interrupted())
    assert str(ledger.balance("alice", "USDT")) == "100.000000"


def test_a_database_that_cannot_be_opened_says_so_and_leaves_nothing_running(tmp_path: Path) -> None:
    with pytest.raises(StoreError), bursar.sync.open(f"sqlite:///{tmp_path}/missing/funds.db"):
        pass
    assert not [t for t in threading.enumerate() if t.name == "bursar-sync"]


def test_the_callers_transaction_if_its_connection_may_cross_threads(ledger: bursar.sync.Ledger, url: str) -> None:
    path = url.removeprefix("sqlite:///")
    own = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    own.execute("CREATE TABLE orders (id)")
    for ending, expected in (("ROLLBACK", "0.000000"), ("COMMIT", "5.000000")):
        own.execute("BEGIN IMMEDIATE")
        own.execute("INSERT INTO orders VALUES (7)")
        ledger.commit(pay("alice", "bob", "USDT", "5", key="order-7"), connection=own)
        own.execute(ending)
        assert str(ledger.balance("bob", "USDT")) == expected
    own.close()


def test_a_connection_of_another_thread_or_loop_is_refused_and_it_says_why(
    ledger: bursar.sync.Ledger, url: str
) -> None:
    own = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    own.execute("BEGIN")
    with pytest.raises(ForeignConnection, match="check_same_thread=False"):
        ledger.commit(pay("alice", "bob", "USDT", "5"), connection=own)
    own.execute("ROLLBACK")
    own.close()
    with pytest.raises(ForeignConnection, match="event loop"):
        ledger.commit(pay("alice", "bob", "USDT", "5"), connection=object())
    assert str(ledger.balance("bob", "USDT")) == "0.000000"


def test_it_has_every_method_of_the_ledger_with_the_same_arguments() -> None:
    for name, method in inspect.getmembers(Ledger, inspect.isfunction):
        if name.startswith("_") or name in NOT_FOR_CALLERS:
            continue
        ours = getattr(bursar.sync.Ledger, name, None)
        assert ours is not None, f"{name} is missing"
        assert list(inspect.signature(ours).parameters.values()) == list(inspect.signature(method).parameters.values())


# --- flows ---------------------------------------------------------------------------------------------------------


class Order(bursar.Body):
    book: str


@bursar.call("CHARGING", then="ASKING", refused="FAILED")
def charge(order: bursar.FlowRecord[Order]) -> bursar.Answer:
    return bursar.done({"thread": threading.current_thread().name, "book": order.body.book})


asking = bursar.wait("ASKING", awaits="approver", on={"APPROVE": "SHIPPING"})


@bursar.call("SHIPPING", then="DONE", refused="FAILED")
async def ship(_order: bursar.FlowRecord[Order]) -> bursar.Answer:
    return bursar.done()


orders = bursar.flow("orders", Order, charge, asking, ship, succeeded="DONE", failed="FAILED")


def test_a_flow_of_plain_and_async_functions(url: str) -> None:
    """Plain ones run in threads of their own, not in the one of the event loop."""
    with bursar.sync.open(url, flows=[orders]) as b:
        order = b.wait(b.start(orders, Order("Dune"), key="k1"))
        assert order.state == "ASKING"
        assert '"thread":"bursar-action-1"' in b.history(order)[-1].evidence
        b.run(b.operators.signal("orders", order.id, "APPROVE", actor="ann", reason="known"))
        assert b.wait(b.get(orders, order.id)).state == "DONE"
    with bursar.sync.open(url, flows=[orders]) as b:
        assert b.start(orders, Order("Dune"), key="k1").id == order.id
    with pytest.raises(Closed):
        b.start(orders, Order("Dune"), key="k1")


def test_an_action_may_use_the_same_open_ledger(url: str) -> None:
    """The event loop is in another thread, so that an action that blocks on the ledger does not wait for itself."""

    @bursar.call("PAYING", then="DONE", refused="FAILED")
    def settle(order: bursar.FlowRecord[Order]) -> bursar.Answer:
        receipt = b.ledger.commit(deposit("bank", "alice", "USDT", "5", key=order.key))
        return bursar.done({"envelope": receipt.envelope})

    bills = bursar.flow("bills", Order, settle, succeeded="DONE", failed="FAILED")
    with bursar.sync.open(url, flows=[bills]) as b:
        furnish(b.ledger)
        assert b.wait(b.start(bills, Order("Dune"), key="k1")).state == "DONE"
        assert str(b.ledger.balance("alice", "USDT")) == "105.000000"  # with what it was furnished with
