"""`bursar.testing` kills and stops at every call, notices what is wrong, and says where; and `open` on its clock."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import bursar
from bursar.model.entries import Intent, Leg
from bursar.model.retry import Alarm
from bursar.sim import Kernel, SimHost, SimNet, run
from bursar.testing import NotRecovered, crash_everywhere


class Bill(bursar.Body):
    cents: int = 5


class World:
    """The other side: how often it was called, and what it did under each key."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.paid: Counter[str] = Counter()


def flows(world: World, *, idempotent: bool = True, blocking: bool = False, **more: Any) -> list[bursar.Flow[Bill]]:
    def happen(bill: bursar.FlowRecord[Bill]) -> bursar.Answer:
        world.calls[bill.key] += 1
        if not (idempotent and world.paid[bill.key]):
            world.paid[bill.key] += bill.body.cents
        return bursar.done()

    def blocks(bill: bursar.FlowRecord[Bill]) -> bursar.Answer:
        return happen(bill)

    async def waits(bill: bursar.FlowRecord[Bill]) -> bursar.Answer:
        return happen(bill)

    pay: Callable[[bursar.FlowRecord[Bill]], Any] = blocks if blocking else waits
    paying = bursar.call("PAYING", then="PAID", refused="REFUSED")(pay)
    return [bursar.flow("bills", Bill, paying, succeeded="PAID", failed="REFUSED", **more)]


async def client(b: bursar.Bursar) -> bursar.FlowRecord[Any]:
    return await b.wait(await b.start(b.flows["bills"], Bill(), key="k1"))


def paid_once(world: World, bill: bursar.FlowRecord[Any]) -> None:
    assert bill.state == "PAID"
    assert world.paid == {f"{bill.id}:PAYING": 5}


@pytest.mark.parametrize("blocking", [False, True])
def test_a_flow_that_keeps_its_promises_survives_and_was_killed_around_its_call(blocking: bool) -> None:
    seen: list[int] = []

    def check(world: World, bill: bursar.FlowRecord[Any]) -> None:
        paid_once(world, bill)
        seen.append(world.calls[f"{bill.id}:PAYING"])

    places = crash_everywhere(client, flows=lambda w: flows(w, blocking=blocking), world=World, check=check)
    assert len(seen) == places + 1  # and the run that nothing disturbs
    assert seen[0] == 1
    assert max(seen) == 2  # killed after the effect and before its answer was on disk


@pytest.mark.parametrize("blocking", [False, True])
def test_a_call_that_happens_twice_is_noticed_and_its_place_runs_alone(blocking: bool) -> None:
    def made(world: World) -> list[bursar.Flow[Bill]]:
        return flows(world, idempotent=False, blocking=blocking)

    with pytest.raises(NotRecovered, match=r"killed (before|after) call") as caught:
        crash_everywhere(client, flows=made, world=World, check=paid_once)
    call, when = re.findall(r"at=\((\d+), '(\w+)'\)", str(caught.value))[0]
    with pytest.raises(NotRecovered) as again:
        crash_everywhere(client, flows=made, world=World, check=paid_once, at=(int(call), when))
    assert str(again.value) == str(caught.value)
    assert crash_everywhere(client, flows=made, world=World, check=paid_once, at=(1, "stop")) == 1


def test_stopped_at_a_call_the_program_closes_and_is_started_again() -> None:
    lives: list[bursar.Bursar] = []

    async def counted(b: bursar.Bursar) -> bursar.FlowRecord[Any]:
        if b not in lives:
            lives.append(b)
        return await client(b)

    def stopped_at(call: int) -> int:
        lives.clear()
        crash_everywhere(counted, flows=flows, world=World, check=paid_once, at=(call, "stop"))
        return len(lives)

    # One life in the undisturbed run before it, and two in the one that is stopped.
    assert {stopped_at(call) for call in range(10, 30)} == {3}
    with pytest.raises(NotRecovered, match=r"told to stop at call 1000000.*there is no such call"):
        stopped_at(1_000_000)


def test_it_says_which_action_it_was_killed_at() -> None:
    with pytest.raises(NotRecovered, match=r"after waits has answered"):
        for call in range(1, 200):
            try:
                crash_everywhere(
                    client,
                    flows=lambda w: flows(w, idempotent=False),
                    world=World,
                    check=paid_once,
                    at=(call, "before"),
                )
            except NotRecovered as error:
                if "waits" in str(error):
                    raise


def test_a_client_without_a_key_of_its_own_is_noticed() -> None:
    made: list[str] = []

    async def careless(b: bursar.Bursar) -> bursar.FlowRecord[Any]:
        made.append("")
        return await b.wait(await b.start(b.flows["bills"], Bill(), key=f"k{len(made)}"))

    with pytest.raises(NotRecovered, match="undisturbed"):
        crash_everywhere(careless, flows=flows, world=World, check=paid_once)


def test_a_record_that_does_not_end_is_noticed() -> None:
    asking = bursar.wait("ASKING", awaits="approver", on={"GO": "PAID", "NO": "REFUSED"})
    waiting = bursar.flow("bills", Bill, asking, succeeded="PAID", failed="REFUSED")
    with pytest.raises(NotRecovered, match=r"not ended: bills bills-\d+ is ASKING"):
        crash_everywhere(client, flows=[waiting], world=World, check=lambda _world, _bill: None)


def test_a_critical_alert_is_noticed() -> None:
    alarms = (Alarm(reason="stuck", tries=1, seconds=300, severity="critical"),)

    @bursar.call("PAYING", then="PAID", refused="REFUSED")
    async def pay(bill: bursar.FlowRecord[Bill]) -> bursar.Answer:
        return bursar.done() if bill.record.attempt else bursar.pending()

    stuck = bursar.flow("bills", Bill, pay, succeeded="PAID", failed="REFUSED", alarms=alarms)
    with pytest.raises(NotRecovered, match="alerts: stuck"):
        crash_everywhere(client, flows=[stuck], world=World, check=lambda _world, _bill: None)


async def setup(b: bursar.Bursar) -> None:
    await b.ledger.create_asset("USD", precision=2)
    await b.ledger.create_account("bank", policy=bursar.ExternalAccount())
    await b.ledger.create_account("shop")


def test_entries_of_a_flow_are_booked_once_on_a_ledger_that_was_set_up() -> None:
    def book(bill: bursar.FlowRecord[Bill], _event: str, _answer: bursar.Answer) -> bursar.Booking:
        return bursar.Booking(
            (Intent(scope="bills", key=bill.key, legs=(Leg("bank", "shop", "USD", bill.body.cents),)),)
        )

    async def paying(b: bursar.Bursar) -> str:
        await client(b)
        return str(await b.ledger.balance("shop", "USD"))

    def check(_world: World, balance: str) -> None:
        assert balance == "0.05"

    assert crash_everywhere(paying, flows=lambda w: flows(w, book=book), world=World, check=check, setup=setup) > 30


def test_open_gives_expired_holds_back_while_it_runs() -> None:
    """On the virtual clock: the reaper looks every few seconds."""

    async def main(kernel: Kernel) -> list[str]:
        ports = kernel.start("program", disk=SimHost(SimNet(kernel), "disk")).ports
        async with bursar.Bursar("sqlite:///x.db", ports=ports, flows=flows(World())) as b:
            await setup(b)
            await b.ledger.commit(bursar.deposit("bank", "shop", "USD", "1.00"))
            await b.ledger.authorize("shop", "USD", "0.40", expires_in=timedelta(seconds=60))
            found = [str(await b.ledger.balance("shop", "USD"))]
            await ports.sleep(70)
            return [*found, str(await b.ledger.balance("shop", "USD"))]

    assert run(main, 0).value == ["0.60", "1.00"]


def test_a_background_task_of_open_that_fails_is_run_again_and_alerts(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = asyncio.Event()

    async def fails(*_arguments: object) -> None:
        if not failed.is_set():
            failed.set()
            raise ZeroDivisionError
        await asyncio.Event().wait()

    monkeypatch.setattr("bursar.instance.keep_expiring_holds", fails)

    async def main(kernel: Kernel) -> list[str]:
        ports = kernel.start("program", disk=SimHost(SimNet(kernel), "disk")).ports
        async with bursar.Bursar("sqlite:///x.db", ports=ports, flows=flows(World()), sinks={}) as b:
            await ports.sleep(5)
            return [alert.reason for alert in await b.store.read.alerts.open()]

    assert run(main, 0).value == ["bursar-holds failed"]
