"""`bursar.open(url, flows=[…])`: a record is started once per key, driven in the background, and whole after a stop."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario

import bursar
from bursar.engine import FlowRefused, Notice
from bursar.engine.engine import LEASE_S
from bursar.model.entries import KEY_LENGTH_MAX
from bursar.model.errors import AccountFrozen, Conflict, IdempotencyKeyReused, InvalidState, UnknownRecord
from bursar.model.machine import Kind
from bursar.model.retry import Alarm, Retry

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

SOON = Retry(first_s=0.01, cap_s=0.02)
PATIENCE_S = 30.0


class Order(bursar.Body):
    book: str = "Dune"


class Shop:
    """The other side, idempotent by key: what it did, and what it is told to say first."""

    def __init__(self, *says: Any) -> None:
        self.says = list(says)
        self.asked = 0  # also by calls that hang
        self.calls: list[str] = []
        self.effects: Counter[str] = Counter()
        self.hangs: asyncio.Event | None = None

    def say(self, key: str) -> Any:
        self.calls.append(key)
        said = self.says.pop(0) if self.says else bursar.done({"key": key})
        if isinstance(said, Exception):
            raise said
        self.effects[key] |= 1
        return said

    def flow(self, **more: Any) -> bursar.Flow[Order]:
        @bursar.call("CHARGING", then="DONE", refused="FAILED")
        async def charge(order: bursar.FlowRecord[Order]) -> Any:
            self.asked += 1
            if self.hangs is not None:
                await self.hangs.wait()
            return self.say(order.key)

        return bursar.flow("orders", Order, charge, succeeded="DONE", failed="FAILED", **({"retry": SOON} | more))


@contextlib.asynccontextmanager
async def opened(place: Place, *flows: bursar.Flow[Any], **more: Any) -> AsyncIterator[bursar.Bursar]:
    async with bursar.open(place.url, flows=flows, **more) as b, asyncio.timeout(PATIENCE_S):
        yield b


async def until(true: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if true():
                return
            await asyncio.sleep(0.005)


# --- starting ------------------------------------------------------------------------------------------------------


@scenario
async def test_a_record_is_driven_to_its_end_and_its_id_tells_its_flow(place: Place) -> None:
    orders = Shop().flow()
    async with opened(place, orders) as b:
        order = await b.wait(await b.start(orders, Order("Emma"), key="k1", owner="alice"))
        assert (order.state, order.body, order.record.owner) == ("DONE", Order("Emma"), "alice")
        assert re.fullmatch(r"orders-[0-9]{15,19}", order.id)
        assert await b.get(orders, order.id) == order
        steps = [(step.source, step.event, step.target) for step in await b.history(order)]
        assert steps == [("", "CREATED", "CHARGING"), ("CHARGING", "SUCCESS", "DONE")]


@scenario
async def test_a_record_that_nobody_waits_for_is_driven_too(place: Place) -> None:
    """At once, not when the lease of half a minute is over; also when the worker's first look is long over."""
    shop = Shop()
    orders = shop.flow()
    async with opened(place, orders) as b, asyncio.timeout(LEASE_S / 2):
        await b.wait(await b.start(orders, Order(), key="k0"))
        await until(lambda: b.worker.scans > 1)
        order = await b.start(orders, Order(), key="k1")
        await until(lambda: shop.effects[order.key] == 1)
    async with opened(place, orders) as b:
        assert (await b.get(orders, order.id)).state == "DONE"


@scenario
async def test_the_same_key_is_one_record_per_owner_also_from_another_process(place: Place) -> None:
    shop = Shop()
    orders = shop.flow()
    async with opened(place, orders) as one, opened(place, orders) as other:
        ids = await asyncio.gather(*[b.start(orders, Order(), key="k1", owner="alice") for b in (one, other) * 5])
        assert len({order.id for order in ids}) == 1
        assert (await other.start(orders, Order(), key="k1", owner="bob")).id != ids[0].id
        with pytest.raises(IdempotencyKeyReused):
            await one.start(orders, Order("Emma"), key="k1", owner="alice")
        await one.wait(ids[0])
    assert shop.effects[f"{ids[0].id}:CHARGING"] == 1


@scenario
async def test_keys_and_owners_may_be_as_long_as_any(place: Place) -> None:
    orders = Shop().flow()
    async with opened(place, orders) as b:
        order = await b.start(orders, Order(), key="k" * KEY_LENGTH_MAX, owner="ö" * KEY_LENGTH_MAX)
        assert (await b.start(orders, Order(), key="k" * KEY_LENGTH_MAX, owner="ö" * KEY_LENGTH_MAX)).id == order.id


@scenario
async def test_what_was_refused_is_not_started_and_its_key_is_free(place: Place) -> None:
    refused = [True]

    async def admit(_order: Order, _id: str) -> None:
        if refused[0]:
            raise AccountFrozen("alice")

    orders = Shop().flow(admit=admit)
    async with opened(place, orders) as b:
        with pytest.raises(AccountFrozen):
            await b.start(orders, Order(), key="k1")
        assert await b.store.read.records.list("orders") == []
        refused[0] = False
        first = await b.start(orders, Order(), key="k1")
        refused[0] = True  # the same request again is answered as it was, whatever would be refused by now
        assert (await b.start(orders, Order(), key="k1")).id == first.id


@scenario
async def test_a_flow_that_does_not_run_here_is_refused(place: Place) -> None:
    orders, others = Shop().flow(), Shop().flow()
    async with opened(place, orders) as b:
        with pytest.raises(FlowRefused, match=r"give it to `bursar.open"):
            await b.start(others, Order(), key="k1")
        with pytest.raises(UnknownRecord):
            await b.get(orders, "orders-1")
        with pytest.raises(TypeError, match="keeps Order, not Body"):
            await b.start(orders, bursar.Body(), key="k1")  # type: ignore[misc]
    async with opened(place) as b:
        with pytest.raises(FlowRefused):
            await b.start(orders, Order(), key="k1")
    with pytest.raises(FlowRefused, match="another flow has that name"):
        bursar.open(place.url, flows=[orders, others])


@scenario
async def test_an_id_that_another_record_has_is_not_taken_for_ours(place: Place, monkeypatch: Any) -> None:
    """Two processes under one node number make one id twice; the reply to a COMMIT that was lost looks alike (L18)."""
    orders = Shop().flow()
    async with opened(place, orders) as b:

        async def same() -> int:
            return 17

        monkeypatch.setattr(b.engine._ids, "next", same)
        first = (await b.engine.start("orders", Order("Dune"))).record
        assert (await b.engine.start("orders", Order("Dune"))).record.number == first.number
        with pytest.raises(Conflict, match="orders-17 is taken"):
            await b.engine.start("orders", Order("Emma"))


# --- actions -------------------------------------------------------------------------------------------------------


@scenario
async def test_an_action_that_returns_nothing_is_called_again_and_the_record_says_why(place: Place) -> None:
    shop = Shop(None, ConnectionResetError("lost"))
    orders = shop.flow()
    async with opened(place, orders) as b:
        order = await b.wait(await b.start(orders, Order(), key="k1"))
        assert order.state == "DONE"
        assert len(shop.calls) == 3
        said = [msgspec.json.decode(step.evidence) for step in await b.history(order)]
        assert [one.get("outcome") for one in said] == [None, "UNKNOWN", "UNKNOWN", "SUCCESS"]
        assert "returned None, which says nothing about what happened; return bursar.done" in said[1]["message"]


@scenario
async def test_only_an_explicit_refusal_fails_a_record(place: Place) -> None:
    shop = Shop(TimeoutError(), ValueError(), bursar.Refused("CARD_DECLINED"))
    orders = shop.flow()
    async with opened(place, orders) as b:
        order = await b.wait(await b.start(orders, Order(), key="k1"))
        assert (order.state, order.record.error, len(shop.calls)) == ("FAILED", "CARD_DECLINED", 3)


@scenario
async def test_plain_functions_run_in_threads_side_by_side(place: Place) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)

    @bursar.call("CHARGING", then="DONE", refused="FAILED")
    def charge(_order: bursar.FlowRecord[Order]) -> bursar.Answer:
        together.wait()  # three calls at a time, or none returns
        return bursar.done({"thread": threading.current_thread().name})

    orders = bursar.flow("orders", Order, charge, succeeded="DONE", failed="FAILED")
    async with opened(place, orders) as b:
        started = [await b.start(orders, Order(), key=f"k{n}") for n in range(3)]
        assert [(await b.wait(order)).state for order in started] == ["DONE"] * 3
        evidence = [(await b.history(order))[-1].evidence for order in started]
        assert len({msgspec.json.decode(one)["thread"] for one in evidence}) == 3


@scenario
async def test_a_function_that_hangs_times_out_and_is_called_again(place: Place) -> None:
    hangs, calls = threading.Event(), []

    @bursar.call("CHARGING", then="DONE", refused="FAILED")
    def charge(order: bursar.FlowRecord[Order]) -> bursar.Answer:
        calls.append(order.key)
        if len(calls) == 1:
            hangs.wait(PATIENCE_S)
        return bursar.done()

    orders = bursar.flow("orders", Order, charge, succeeded="DONE", failed="FAILED", call_timeout_s=0.05, retry=SOON)
    async with opened(place, orders) as b:
        order = await b.wait(await b.start(orders, Order(), key="k1"))
        hangs.set()
        assert order.state == "DONE"
        assert [step.event for step in await b.history(order)] == ["CREATED", "TIMEOUT", "SUCCESS"]


# --- waiting, people, alerts ---------------------------------------------------------------------------------------


@scenario
async def test_a_record_that_waits_for_a_person_goes_on_at_the_signal(place: Place) -> None:
    asking = bursar.wait("ASKING", awaits="approver", on={"APPROVE": "DONE", "REJECT": "FAILED"})
    orders = bursar.flow("orders", Order, asking, succeeded="DONE", failed="FAILED")
    async with opened(place, orders) as b:
        order = await b.wait(await b.start(orders, Order(), key="k1"))
        assert orders.machine.state(order.state).kind is Kind.WAIT
        with pytest.raises(InvalidState):
            await b.operators.signal("orders", order.id, "SHIP", actor="ann", reason="typo")
        await b.operators.signal("orders", order.id, "APPROVE", actor="ann", reason="known customer")
        assert (await b.get(orders, order.id)).state == "DONE"


@scenario
async def test_waiting_ends_in_time_and_the_record_goes_on(place: Place) -> None:
    shop = Shop()
    shop.hangs = asyncio.Event()
    orders = shop.flow()
    async with opened(place, orders) as b:
        order = await b.start(orders, Order(), key="k1")
        assert (await b.wait(order, timeout_s=0.05)).state == "CHARGING"
        shop.hangs.set()
        assert (await b.wait(order)).state == "DONE"


@scenario
async def test_alerts_go_to_the_sinks(place: Place) -> None:
    heard: asyncio.Queue[Notice] = asyncio.Queue()

    async def pager(notice: Notice) -> None:
        heard.put_nowait(notice)

    orders = Shop(*[ConnectionResetError("lost")] * 3).flow(alarms=(Alarm(reason="stuck", tries=2, seconds=300),))
    async with opened(place, orders, sinks={"pager": pager}) as b:
        order = await b.start(orders, Order(), key="k1")
        notice = await heard.get()
        assert (notice.reason, notice.flow, notice.record_id) == ("stuck", "orders", order.id)


# --- stopping and starting again -----------------------------------------------------------------------------------


@scenario
async def test_closing_waits_for_what_is_under_way(place: Place) -> None:
    shop = Shop()
    shop.hangs = asyncio.Event()
    orders = shop.flow()
    async with opened(place, orders) as b:
        order = await b.start(orders, Order(), key="k1")
        asyncio.get_running_loop().call_later(0.05, shop.hangs.set)
    async with opened(place, orders) as b:
        assert (await b.get(orders, order.id)).state == "DONE"
        assert len(shop.calls) == 1


@scenario
async def test_what_is_not_done_in_time_is_picked_up_by_the_next(place: Place) -> None:
    """Under the same name, which a SQLite file keeps by itself: without waiting for a lease."""
    shop = Shop()
    shop.hangs = asyncio.Event()
    orders = shop.flow()
    async with opened(place, orders, stop_s=0.1, worker_name="host-1") as b:
        order = await b.start(orders, Order(), key="k1")
        await until(lambda: shop.asked)
    shop.hangs.set()
    async with opened(place, orders, worker_name="host-1") as b:
        assert (await b.wait(order)).state == "DONE"
    assert shop.effects == {order.key: 1}


@scenario
async def test_an_error_inside_closes_everything_and_is_not_swallowed(place: Place) -> None:
    orders = Shop().flow()
    before = asyncio.all_tasks()
    with pytest.raises(ZeroDivisionError):
        async with opened(place, orders) as b:
            await b.start(orders, Order(), key="k1")
            raise ZeroDivisionError
    assert [task.get_name() for task in asyncio.all_tasks() - before] == []
    async with opened(place, orders) as b:
        assert (await b.wait(await b.start(orders, Order(), key="k1"))).state == "DONE"


@scenario
async def test_two_programs_on_one_database_have_two_names_and_share_the_work(place: Place) -> None:
    shop = Shop()
    orders = shop.flow()
    async with opened(place, orders) as one, opened(place, orders) as other:
        assert one.engine.worker != other.engine.worker
        started = [await b.start(orders, Order(), key=f"k{n}") for n in range(10) for b in (one, other)]
        for order in started:  # each waits for what the other has started, too
            assert (await one.wait(order)).state == (await other.wait(order)).state == "DONE"
    assert set(shop.effects.values()) == {1}
    assert len(shop.effects) == 10
