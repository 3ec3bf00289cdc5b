"""Deposits after a restore: chain and signer's log have what arrived and was swept, and this database has not.

The backup is of a time before the address was issued. The user asks again and gets the same one; the chain is read
again; and what the signer has signed is put back (W33), so that nothing is credited or swept twice.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from tests.arriving import CONTRACT, UNIT, Intake, intake
from tests.builders import Place, scenario
from tests.conformance.test_payouts_crash import copy
from tests.till import Town, wallet_account

from bursar.audit import audit
from bursar.engine import Operators
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.payout import SUSPENSE, Payout
from bursar.model.records import Record

pytestmark = pytest.mark.parametrize("mode", ["sqlite"], indirect=True)

ANN = {"actor": "ann", "reason": "compared"}
BEN = {"actor": "ben", "reason": "so have I"}


async def drive(c: Intake, sweep: str, *, until: str) -> Record:
    """A sweep and its payouts, until the newest payout is in a state, or the sweep itself."""
    why = ""
    for _ in range(60):
        record = await c.step("sweeps", sweep)
        found = await c.till.payouts.list()
        why = f"{record.error}; {[(one.wallet, one.state, one.error) for one in found]}"
        if until in (record.state, *(f"{one.wallet} {one.state}" for one in found)):
            return record
        for one in found:
            if one.status not in ("confirmed", "failed"):
                await c.till.step(one.id)
        c.till.town.chain.mine()
    raise AssertionError(f"not {until}: {why}")


@asynccontextmanager
async def after_a_restore(place: Place, tmp_path: Path, *, far: str) -> AsyncIterator[tuple[Intake, str, int]]:
    """A process on the copy that was made before the address of user 1 was issued; what it has forgotten came so far.

    With the hash of the deposit, and the block in which it arrived.
    """
    town = Town()
    async with intake(place, town):
        pass
    copy(Path(place.path), tmp_path / "backup.db")
    async with intake(place, town) as c:
        record = await c.arrive(60 * UNIT)
        hash_, block = msgspec.json.decode(record.body)["hash"], town.chain.height
        await drive(c, record.id, until=far)
    async with intake(Place("sqlite", f"sqlite:///{tmp_path}/backup.db"), town) as c:
        yield c, hash_, block


async def resumed(c: Intake) -> None:
    """By two people, who have looked."""
    pauses = await c.till.ledger.store.read.pauses.list()
    assert [(pause.kind, pause.name, pause.two_people) for pause in pauses] == [("flow", "payouts", True)]
    await Operators(c.till.engine).resume("flow", "payouts", **ANN)
    assert (await c.till.ledger.store.read.pauses.list()) != [], "one person is not enough"
    await Operators(c.till.engine).resume("flow", "payouts", **BEN)


async def judged(c: Intake) -> None:
    """Everything that was seen."""
    for record in await c.till.ledger.store.read.records.list("arrivals", states=("arrived",)):
        await c.till.engine.step(record)


async def well(c: Intake) -> None:
    """The money is there once: the user's, in our wallet, and no invariant is broken."""
    chain = c.till.town.chain
    assert await c.funds() == 60 * UNIT
    assert await c.funds(asset="ETH") == 0
    assert chain.tokens[CONTRACT, "@dep1"] == 0
    assert await c.of_wallet() == 0
    assert -await c.till.minor(wallet_account("paper", "dep-1"), "ETH") == chain.coin["@dep1"], (
        "what is left of the gas"
    )
    assert not await c.till.ledger.store.read.accounts.heads([SUSPENSE]) or await c.till.minor(SUSPENSE, "ETH") == 0
    assert len(chain.mined) == 3, "a deposit, its gas and its sweep: nothing was sent twice"
    covered = await wallets_cover(c.till.engine.store, c.till.payouts.chains)
    assert covered.ok and covered.judged, covered
    assert [one for one in await audit(c.till.engine.store, more=CHECKS) if not one.ok] == []


@scenario
@pytest.mark.parametrize("far", ["hot1 confirming", "hot1 confirmed", "dep-1 confirming", "swept"])
async def test_money_that_arrived_after_the_backup_is_credited_and_swept_once(
    place: Place, tmp_path: Path, far: str
) -> None:
    async with after_a_restore(place, tmp_path, far=far) as (c, hash_, block):
        assert await c.address(1) == "@dep1", "the same: it follows from the user's number"
        await c.step("deposit_addresses", "dep-1")
        alerts = await c.till.ledger.store.read.alerts.open()
        (used,) = (one for one in alerts if one.reason == "address was used before")
        assert "bursar deposit rescan paper BLOCK" in used.message
        for _ in range(2):
            await c.deposits.rescan("paper", block, actor="ann", reason="the database was restored")
            await c.scan()
            await judged(c)
        assert await c.funds() == 60 * UNIT
        await resumed(c)
        await drive(c, c.id_of(hash_), until="swept")
        for payout in await c.till.payouts.list():
            await c.till.until(payout.id, "confirmed")
        await c.scan()
        await judged(c)
        await well(c)
        states = [one.state for one in await c.till.ledger.store.read.records.list("arrivals")]
        assert sorted(states) == ["credited", "own"], "the gas waits for its payout, and for no person"


@scenario
async def test_a_sweep_from_an_address_that_was_not_asked_for_again_says_what_to_do(
    place: Place, tmp_path: Path
) -> None:
    async with after_a_restore(place, tmp_path, far="dep-1 confirming") as (c, hash_, block):
        await resumed(c)
        gas, sweep = (await c.till.payouts.list())[::-1]
        assert msgspec.json.decode((await c.till.record(sweep.id)).body, type=Payout).requested_wallet == "dep-1"
        await c.till.until(gas.id, "confirmed")
        waits = await c.till.step(sweep.id)
        assert (waits.state, waits.error.split(":")[0]) == ("pending", "SIGNED_BEFORE")
        assert "bursar deposit address paper --user 1" in waits.error
        assert await c.address(1) == "@dep1"
        c.till.town.chain.mine()
        await c.till.until(sweep.id, "confirmed")
        await c.deposits.rescan("paper", block, actor="ann", reason="the database was restored")
        await c.scan()
        await judged(c)
        if await c.till.engine.get("sweeps", c.id_of(hash_)) is not None:
            await drive(c, c.id_of(hash_), until="swept")
        await well(c)
