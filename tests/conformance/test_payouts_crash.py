"""A payout whose process dies at every call to the database in turn, before it or after its effect.

The chain and the signer live on. The next process finishes what the dead one left, and the payment happened once, or
not at all if it was cancelled; whatever was reserved is given back.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest
from tests.builders import FaultyPorts, Place, scenario
from tests.till import CONTRACT, GAS, Till, Town, till, wallet_account

from bursar.audit import audit

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

CALLS_MAX = 400
WHY = {"actor": "ann", "reason": "because"}


async def live(t: Till, story: str) -> None:
    """Ask for a payout and drive it to its end, with blocks mined on the way. Said twice, it happens once."""
    town = t.town
    made = await t.request("5")
    for _ in range(16):
        record = await t.step(made.id)
        if record.state in ("confirmed", "failed"):
            break
        if story == "bump" and record.state == "confirming" and '"attempts":1' in record.body:
            town.chain.price = 50
            await t.payouts.bump(made.id, **WHY, sender="once")
        if story == "cancel" and record.state in ("signing", "confirming"):
            await t.payouts.cancel(made.id, **WHY, sender=f"once {record.state}")
        for number in (2, 3, 4):
            if await t.engine.get("replacements", f"{made.id}-r{number}") is not None:
                await t.replace(made.id, number)
        if record.state == "confirming" and (story == "plain" or '"attempts":1' not in record.body):
            town.chain.mine()


async def dies(place: Place, town: Town, story: str, fault: str, call: int) -> bool:
    """One life, ended at this call; whether there was such a call."""
    ports = FaultyPorts()
    context = till(place, town, ports=ports)
    t = await context.__aenter__()
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(live(t, story)), asyncio.ensure_future(ports.dead.wait())
    await asyncio.wait([work, death], return_when=asyncio.FIRST_COMPLETED)
    reached = ports.reached
    ports.arm("", 0)
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    await asyncio.gather(work, death, return_exceptions=True)
    await t.ledger.store.close()  # what the kernel does for a dead process
    return reached


@scenario
@pytest.mark.parametrize("fault", ["before", "after"])
@pytest.mark.parametrize("story", ["plain", "bump", "cancel"])
async def test_payout_survives_a_crash_at_every_call(place: Place, fault: str, story: str, tmp_path: Path) -> None:
    async with till(place, Town()) as t:
        await t.engine.store.read.records.list("payouts")  # furnished
    copy(Path(place.path), tmp_path / "first.db")
    for call in range(1, CALLS_MAX):
        copy(tmp_path / "first.db", tmp_path / "run.db")
        at = Place("sqlite", f"sqlite:///{tmp_path}/run.db")
        town = Town()
        reached = await dies(at, town, story, fault, call)
        async with till(at, town) as t:
            for _ in range(6):
                await live(t, story)
                town.chain.mine()
            await judge(t, story)
        if not reached:
            assert call > 20, "the process was not killed at all"
            return
    raise AssertionError("it never came to an end")


def copy(source: Path, target: Path) -> None:
    """A database with its log."""
    for suffix in ("", "-wal", "-shm"):
        there = source.with_name(source.name + suffix)
        here = target.with_name(target.name + suffix)
        here.unlink(missing_ok=True)
        if there.exists():
            shutil.copyfile(there, here)


async def judge(t: Till, story: str) -> None:
    (record,) = await t.engine.store.read.records.list("payouts")
    assert record.state == ("failed" if story == "cancel" else "confirmed"), record.error
    paid = t.town.chain.tokens.get((CONTRACT, "@bob"), 0)
    assert paid == (0 if story == "cancel" else 5_000_000)
    assert await t.minor("alice") == 100_000_000 - paid
    assert not any((await t.reserved()).values())
    gas = sum(21_000 * decoded.fee.price for decoded, _, _ in t.town.chain.mined.values())
    assert await t.minor(GAS, "ETH") == -gas
    wallets = [await t.minor(wallet_account("paper", name), "ETH") for name in ("hot1", "hot2")]
    assert sum(wallets) == gas
    assert [finding for finding in await audit(t.engine.store) if not finding.ok] == []
