"""An import whose process dies at every call to the database in turn, before it or after its effect.

The chain lives on, and what was sent there gets into a block. The same file is imported again, and all of it ends: each
request once, none of it paid a second time, and the books balance.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import FaultyPorts, Place, scenario
from tests.conformance.test_payouts import ALSO, WHY
from tests.conformance.test_payouts_crash import copy
from tests.conformance.test_withdrawal_import import imported, payout_of, sent_there, sound
from tests.till import CONTRACT, Town
from tests.withdrawing import FUNDS, Counter, counter

from bursar.flows.withdrawals.withdrawal import OPENING

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

CALLS_MAX = 400
ROWS = (
    {"tx_hash": "", "debited": "yes"},
    {"request_id": "old-2", "tx_hash": "", "user": "2"},
    {"request_id": "old-3", "status": "processing", "wallet": "hot2", "debited": "yes"},
    {"request_id": "old-4", "status": "pending"},
)


async def taken_over(c: Counter, hashes: list[str]) -> None:
    """Import the file, and drive what there is of it a bit."""
    rows = [row | ({"tx_hash": hashes.pop(0)} if "tx_hash" in row else {}) for row in ROWS]
    assert (await imported(c, *rows)).problems == ()
    for id_ in ("old-1", "old-2", "old-3"):
        await c.step(id_)
        await c.till.step(await payout_of(c, id_))


async def dies(place: Place, town: Town, hashes: list[str], fault: str, call: int) -> bool:
    """One life, ended at this call; whether there was such a call."""
    ports = FaultyPorts()
    context = counter(place, town, ports=ports)
    c = await context.__aenter__()
    ports.arm(fault, call)
    work, death = asyncio.ensure_future(taken_over(c, list(hashes))), asyncio.ensure_future(ports.dead.wait())
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
async def test_import_survives_a_crash_at_every_call(place: Place, fault: str, tmp_path: Path) -> None:
    first = Town()
    async with counter(place, first) as c:
        await c.record_count()  # furnished
    copy(Path(place.path), tmp_path / "first.db")
    opening = dict(first.chain.tokens)
    for call in range(1, CALLS_MAX):
        copy(tmp_path / "first.db", tmp_path / "run.db")
        at, town = Place("sqlite", f"sqlite:///{tmp_path}/run.db"), Town()
        town.chain.tokens.update(opening)
        hashes = [await sent_there(town, number) for number in (0, 1)]
        reached = await dies(at, town, hashes, fault, call)
        async with counter(at, town) as c:
            await taken_over(c, list(hashes))
            await judge(c, hashes)
        if not reached:
            assert call > 20, "the process was not killed at all"
            return
    raise AssertionError("it never came to an end")


async def judge(c: Counter, hashes: list[str]) -> None:
    """Drive all of it to its end."""
    await c.paid("old-4")
    for id_ in ("old-1", "old-2", "old-3"):
        await c.until(id_, "queued") if (await c.record(id_)).state == "checking" else None
    for id_ in ("old-1", "old-2"):
        await c.till.until(await payout_of(c, id_), "confirmed")
    lost = await payout_of(c, "old-3")
    for person in (WHY, ALSO):
        await c.till.payouts.resolve(lost, paid=False, **person)
    views, _ = await c.withdrawals.page()
    assert {view.id: view.status for view in views} == {
        "old-1": "completed",
        "old-2": "completed",
        "old-3": "failed",
        "old-4": "completed",
    }
    assert [(await c.withdrawals.view(id_)).tx_hash for id_ in ("old-1", "old-2")] == hashes
    assert c.till.town.chain.tokens[CONTRACT, "@bob"] == 15_000_000 and len(c.till.town.signer.entries) == 1
    assert await c.till.minor(OPENING) == -12_000_000
    assert (await c.funds(1), await c.funds(2)) == (FUNDS + 6_000_000 - 6_000_000, FUNDS - 6_000_000)
    assert not any((await c.till.reserved()).values())
    await sound(c)
