"""Deposits from a chain whose process dies at every call to the database in turn, before it or after its effect.

The chain, the signer and the people live on. The next process finishes what the dead one left: what has arrived is
credited once, and what was to be swept lies in our wallet.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.arriving import CONTRACT, UNIT, Intake, intake
from tests.builders import FaultyPorts, Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import Town

from bursar.audit import audit
from bursar.flows.deposits.from_chains import DepositRefused

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

CALLS_MAX = 900
AMOUNTS = {"credited": (5, 7), "held": (5, 7), "swept": (60, 7)}
ROUNDS = 14


async def live(c: Intake, story: str, given: list[str]) -> None:
    """A user asks for an address, money comes, and everything is driven. What the world has done is in `given`."""
    address = await c.address(1)
    chain = c.till.town.chain
    if not given:
        given += [chain.give(address, amount * UNIT, CONTRACT) for amount in AMOUNTS[story]]
    for _ in range(ROUNDS):
        await c.scan()
        if not await drive(c):
            return
        chain.mine()


async def drive(c: Intake) -> bool:
    """Step every record that is open; whether there was one."""
    found = False
    for flow, open_ in (
        ("deposit_addresses", "new"),
        ("arrivals", "arrived"),
        ("arrivals", "held"),
        ("sweeps", "sweeping"),
    ):
        for record in await c.till.engine.store.read.records.list(flow, states=(open_,)):
            found = True
            if open_ == "held":
                await confirm(c, record.id)
            else:
                await c.step(flow, record.id)
    for payout in await c.till.payouts.list():
        if payout.status not in ("confirmed", "failed"):
            found = True
            for _ in range(4):
                await c.till.step(payout.id)
    return found


async def confirm(c: Intake, id_: str) -> None:
    for person in ("ann", "ben"):
        try:
            await c.deposits.confirm(id_, actor=person, reason="it is there")
        except DepositRefused as error:  # that one has, or it is decided
            assert error.reason in ("SAME_PERSON", "NOT_HELD")


async def dies(place: Place, town: Town, story: str, given: list[str], fault: str, call: int) -> bool:
    """One life, ended at this call; whether there was such a call."""
    ports = FaultyPorts()
    context = intake(place, town, ports=ports)
    c = await context.__aenter__()
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(live(c, story, given)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    reached = ports.reached
    ports.arm("", 0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(work, death, return_exceptions=True)
    await c.till.ledger.store.close()  # what the kernel does for a dead process
    return reached


def fresh(story: str) -> Town:
    town = Town()
    if story == "held":
        town.chain.liars.add(CONTRACT)
    return town


@scenario
@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("story", list(AMOUNTS))
async def test_deposit_survives_a_crash_at_every_call(place: Place, fault: str, story: str, tmp_path: Path) -> None:
    async with intake(place, fresh(story)):
        pass  # furnished
    copy(Path(place.path), tmp_path / "first.db")
    for call in range(1, CALLS_MAX):
        copy(tmp_path / "first.db", tmp_path / "run.db")
        at = Place("sqlite", f"sqlite:///{tmp_path}/run.db")
        town, given = fresh(story), list[str]()
        reached = await dies(at, town, story, given, fault, call)
        async with intake(at, town) as c:
            await live(c, story, given)
            await judge(c, story)
        if not reached:
            assert call > 20, "the process was not killed at all"
            return
    raise AssertionError("it never came to an end")


async def judge(c: Intake, story: str) -> None:
    total = sum(AMOUNTS[story]) * UNIT
    states = {view.id: view.state for view in (await c.deposits.page(user=1))[0] if view.asset == "USDT"}
    assert sorted(states.values()) == ["credited"] * len(AMOUNTS[story]), states
    assert await c.funds() == total
    there = c.till.town.chain.tokens[CONTRACT, "@dep1"]
    assert there == await c.of_wallet(), "what the ledger says of the address is what lies there"
    if story == "swept":
        assert there < 50 * UNIT
        assert {record.state for record in await c.till.engine.store.read.records.list("sweeps")} == {"swept"}
    assert not any((await c.till.reserved()).values())
    assert [finding for finding in await audit(c.till.engine.store) if not finding.ok] == []
