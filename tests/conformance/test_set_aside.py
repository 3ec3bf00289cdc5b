"""A commit that recovery sets aside raises an alert, shows in the audit, and can be given up (L12)."""

from __future__ import annotations

import contextlib

import pytest
from tests.builders import Crash, FaultyPorts, Place, balance, scenario, seed
from tests.conformance.test_audit import behind_our_back, look, red

from bursar import UncappedOverdraft, pay
from bursar.audit import Finding
from bursar.model.errors import Conflict, InvalidName, InvalidState, UnknownRecord
from bursar.sim.split import SplitBursar
from bursar.sim.split.tables import Saga, SplitTables

pytestmark = pytest.mark.parametrize("mode", ["split"], indirect=True)

WHO = {"actor": "ann", "reason": "the row was damaged"}


async def died(place: Place, steps: int) -> None:
    """A payment of 3 of alice's 10 whose program dies after so many calls to the database."""
    ports = FaultyPorts()
    async with SplitBursar(place.url, ports=ports) as b:
        ports.arm("before", steps)
        with contextlib.suppress(Crash):
            await b.ledger.commit(pay("alice", "bob", "USDT", "3", key="k"))
        ports.fails_at = 0


async def set_aside(place: Place, phase: str) -> str:
    """The payment has claimed alice's posting, or is past the point of no return, and its row can't be read."""
    async with SplitBursar(place.url) as b:
        await seed(b.ledger, "alice", "10")
    for steps in range(1, 40):
        await died(place, steps)
        async with SplitBursar(place.url) as b:
            sagas = await SplitTables(b.store.read).steps.list()
            live = [posting.id for posting in await b.ledger.postings("alice", "USDT")]
            claimed = any(stored.reservation for stored in await b.store.read.postings.get(live))
        if sagas and sagas[0].phase == phase and claimed:
            await behind_our_back(place, "UPDATE {s}sagas SET lease_us = 0, data = x'00'")
            return sagas[0].id
        await behind_our_back(place, "DELETE FROM {s}sagas", "UPDATE {s}live_postings SET reservation = NULL")
    pytest.fail(f"it was never {phase}")


async def i3(place: Place) -> Finding:
    return next(finding for finding in await look(place) if finding.invariant == "I3")


@scenario
async def test_what_is_set_aside_raises_an_alert_shows_and_can_be_released(place: Place) -> None:
    """Reserved, and then unreadable: alice's money is blocked. Nothing was written, so it can be given up."""
    id = await set_aside(place, "reserving")
    async with SplitBursar(place.url) as b:
        assert (await b.ledger.recover())["broken"] == 1
        [alert] = await b.store.read.alerts.open()
        assert (alert.reason, alert.severity) == (f"commit {id} set aside", "critical")
        assert "'k'" in alert.message
        assert (await b.ledger.recover())["broken"] == 1
        assert len(await b.store.read.alerts.open()) == 1
        with pytest.raises(Conflict):
            await b.ledger.commit(pay("alice", "bob", "USDT", "9", key="other"))
    finding = await i3(place)
    assert not finding.ok
    assert any("10.000000 USDT of alice" in text and "can't be spent" in text for text in finding.broken)
    async with SplitBursar(place.url) as b:
        with pytest.raises(InvalidName):
            await b.ledger.release_saga(id, actor="", reason="why")
        with pytest.raises(UnknownRecord):
            await b.ledger.release_saga("nothing", **WHO)
        assert await b.ledger.release_saga(id, **WHO) == 1
        assert await b.store.read.alerts.open() == []
        [action] = await b.store.read.actions.list(kind="commit")
        assert (action.action, action.name, action.actor, action.reason) == ("released", id, *WHO.values())
        await b.ledger.commit(pay("alice", "bob", "USDT", "9", key="other"))
        await b.ledger.commit(pay("alice", "bob", "USDT", "1", key="k"))  # its key is free, too
        assert await balance(b.ledger, "bob") == "10.000000"
    assert red(await look(place)) == set()


@scenario
async def test_what_is_half_written_is_not_released(place: Place) -> None:
    """Past the point of no return some of it may be in the value tables: then only a backup helps."""
    id = await set_aside(place, "finalizing")
    async with SplitBursar(place.url) as b:
        assert (await b.ledger.recover())["broken"] == 1
        await behind_our_back(
            place, "INSERT INTO {s}spends SELECT posting, 99999 FROM {s}live_postings WHERE reservation IS NOT NULL"
        )
        with pytest.raises(InvalidState, match="restore from a backup"):
            await b.ledger.release_saga(id, **WHO)
        assert len(await SplitTables(b.store.read).steps.list()) == 1


@scenario
async def test_one_damaged_row_does_not_stop_the_recovery_of_others(place: Place) -> None:
    """Whatever is wrong with it: no MessagePack, another shape, accounts or postings that are not there."""
    async with SplitBursar(place.url) as b:
        await seed(b.ledger, "alice", "10")
    rows = ["x'c0'", "x'90'", "x'96c0c0c0c0c0c0'", "x''"]
    for number, data in enumerate(rows):
        values = f"'s{number}', 'commit', 'user', 'k{number}', 'reserving', 1, 0, {data}"
        await behind_our_back(place, f"INSERT INTO {{s}}sagas VALUES ({values})")
    async with SplitBursar(place.url) as b:
        found = await b.ledger.recover()
        assert found == {"finished": 0, "abandoned": 0, "broken": len(rows), "alive": 0}
        assert len(await b.store.read.alerts.open()) == len(rows)
        for number in range(len(rows)):
            assert await b.ledger.release_saga(f"s{number}", **WHO) == 0
    assert red(await look(place)) == set()


@scenario
async def test_what_needs_whole_commits_is_refused_while_one_is_half_done(place: Place) -> None:
    """A posting that is on its way would be missed by a close, a new policy and a rebuild."""
    saga = Saga(id="s", kind="commit", scope="user", key="k", phase="finalizing", fence=1, lease_us=2**60, data=b"")
    async with SplitBursar(place.url) as b:
        steps = SplitTables(b.store.single()).steps
        assert await steps.save(saga) == 1
        for work in (
            b.ledger.close("alice"),
            b.ledger.change_policy("alice", UncappedOverdraft()),
            b.ledger.rebuild(),
        ):
            with pytest.raises(Conflict, match="under way"):
                await work
        await steps.delete("s", 1)
        await b.ledger.close("alice")
