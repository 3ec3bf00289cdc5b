"""A withdrawal whose process dies at every call to the database in turn, before it or after its effect.

The chain, the signer and the people live on. The next process finishes what the dead one left: the payment happened
once, or all of the money is back, and no hold is left behind.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import FaultyPorts, Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import CONTRACT, FEES, Town
from tests.withdrawing import FUNDS, Counter, counter

from bursar.audit import audit
from bursar.flows.withdrawals import WithdrawalRefused
from bursar.flows.withdrawals.policy import APPROVER, Approver

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

CALLS_MAX = 600
ENDS = ("completed", "failed", "rejected", "cancelled")
PAID = {"auto": 5, "people": 60, "rejected": 0, "cancelled": 0, "returned": 20}
AMOUNTS = {"auto": "5", "people": "60", "rejected": "60", "cancelled": "5", "returned": "20"}


async def live(c: Counter, story: str) -> None:
    """Ask for a withdrawal and drive it to its end, with blocks mined on the way. Said twice, it happens once."""
    made = await c.request(AMOUNTS[story])
    for _ in range(12):
        record = await c.step(made.id)
        if record.state in ENDS:
            break
        if record.state == "waiting":
            await decide(c, made.id, story)
        if record.state == "queued":
            payout = (await c.withdrawals.view(made.id)).payout
            if story == "cancelled":
                await cancel(c, made.id)
            if story == "returned":
                await switch_off(c, "ann")
            if (await c.till.step(payout)).state == "confirming":
                c.till.town.chain.mine()


async def decide(c: Counter, id_: str, story: str) -> None:
    if story == "rejected":
        await c.withdrawals.reject(id_, actor="ann", reason="unknown")
        return
    for name in {"people": ("ann", "ben"), "returned": ("ann", "ben")}[story]:
        try:
            await c.approve(id_, name)
        except WithdrawalRefused as error:  # it needs no more, or that person may not any more
            assert error.reason in ("INVALID_STATE", "UNKNOWN_APPROVER")
        if story == "returned" and (await c.withdrawals.view(id_)).approvals:
            return


async def cancel(c: Counter, id_: str) -> None:
    try:
        await c.withdrawals.cancel(id_, actor="1", user=1)
    except WithdrawalRefused as error:
        assert error.reason in ("TOO_LATE", "INVALID_STATE")


async def switch_off(c: Counter, name: str) -> None:
    found = await c.till.documents.current(APPROVER, name, fresh=True)
    assert found is not None
    if found.body.active:
        await c.till.put(APPROVER, name, Approver(public_key=found.body.public_key, active=False))


async def dies(place: Place, town: Town, story: str, fault: str, call: int) -> bool:
    """One life, ended at this call; whether there was such a call."""
    ports = FaultyPorts()
    context = counter(place, town, ports=ports)
    c = await context.__aenter__()
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(live(c, story)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    reached = ports.reached
    ports.arm("", 0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(work, death, return_exceptions=True)
    await c.till.ledger.store.close()  # what the kernel does for a dead process
    return reached


@scenario
@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("story", list(PAID))
async def test_withdrawal_survives_a_crash_at_every_call(place: Place, fault: str, story: str, tmp_path: Path) -> None:
    town = Town()
    async with counter(place, town) as c:
        await c.record_count()  # furnished
    copy(Path(place.path), tmp_path / "first.db")
    opening = dict(town.chain.tokens)
    for call in range(1, CALLS_MAX):
        copy(tmp_path / "first.db", tmp_path / "run.db")
        at = Place("sqlite", f"sqlite:///{tmp_path}/run.db")
        town = Town()
        town.chain.tokens.update(opening)
        reached = await dies(at, town, story, fault, call)
        async with counter(at, town) as c:
            for _ in range(4):
                await live(c, story)
                town.chain.mine()
            await judge(c, story)
        if not reached:
            assert call > 20, "the process was not killed at all"
            return
    raise AssertionError("it never came to an end")


async def judge(c: Counter, story: str) -> None:
    (record,) = await c.till.engine.store.read.records.list("withdrawals")
    view = await c.withdrawals.view(record.id)
    paid = c.till.town.chain.tokens.get((CONTRACT, "@bob"), 0)
    expected = {"rejected": ("rejected",), "cancelled": ("cancelled", "completed")}.get(story, ("completed",))
    assert view.status in expected, record.error
    assert paid == (0 if view.status in ("rejected", "cancelled") else (PAID[story] or 5) * 10**6)
    fee = 1_000_000 if paid else 0
    assert (await c.funds(), await c.till.minor(FEES)) == (FUNDS - paid - fee, fee)
    assert not any((await c.till.reserved()).values())
    assert [finding for finding in await audit(c.till.engine.store) if not finding.ok] == []
