"""Transfers with a second trading core, FUTURE beside SPOT: to and from funding, and between the two.

Account types are a registry: whatever core is configured can be either end, and what is not is refused by its own code.
Between two cores the money is in transit in the ledger as always: it leaves one core, is booked, and arrives at the
other; if that one refuses, it goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.unit.rails.desk import Desk, desk

from bursar import Bursar
from bursar.audit import audit
from bursar.engine import Answer, FlowRecord, Worker
from bursar.flows.transfers import AccountType, Code, Limits, Request, TransferRefused, Transfers, View
from bursar.flows.transfers.conservation import conservation
from bursar.model.outcome import Outcome
from bursar.model.retry import Retry
from bursar.rails.trading import Status, TradingClient

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ALICE = 1001
FUNDING, SPOT, FUTURE, MARGIN = "FUNDING", "SPOT", "FUTURE", "MARGIN"
UNIT = 10**6
PAIRS = [(FUNDING, FUTURE), (FUTURE, FUNDING), (SPOT, FUTURE), (FUTURE, SPOT)]


class House:
    """A ledger and two cores."""

    def __init__(self, bursar: Bursar, desks: dict[str, Desk], transfers: Transfers) -> None:
        self.bursar = bursar
        self.desks = desks
        self.transfers = transfers
        self.clients: dict[str, TradingClient] = {}

    async def move(self, source: str, target: str, amount: str) -> View:
        wish = Request(user=ALICE, source=source, target=target, asset="USDT", amount=amount)
        return await self.transfers.create(wish, deadline_s=10)

    async def refused(self, source: str, target: str, amount: str) -> Code:
        with pytest.raises(TransferRefused) as refusal:
            await self.move(source, target, amount)
        return refusal.value.reason

    async def standing(self) -> dict[str, int]:
        """What the user has everywhere. Nothing is in transit, and the ledger's side of each core agrees with it."""
        ledger = self.bursar.ledger
        assert (await ledger.balance("transit:transfers", "USDT")).minor == 0
        found = {FUNDING: (await ledger.balance(f"user:{ALICE}:funding", "USDT")).minor}
        for kind, client in self.clients.items():
            balance = (await client.balances(ALICE)).balances.get("USDT")
            found[kind] = 0 if balance is None else balance.available
            assert (await ledger.balance(f"trading:{kind.lower()}", "USDT")).minor == found[kind], kind
        assert all(finding.ok for finding in await audit(self.bursar.store))
        return found

    def break_rail(self, kind: str, op: str, outcome: Outcome, *, after: bool = False) -> None:
        """Let one end say something else, once: before the effect, or after it."""
        rail = self.transfers.rails[AccountType(kind)]
        rail.inline = False  # or it might not be called at all
        real = getattr(rail, op)

        async def broken(item: FlowRecord[Any]) -> Answer:
            setattr(rail, op, real)
            if after:
                await real(item)
            return Answer(outcome=outcome, code="ACCOUNT_FROZEN" if outcome is Outcome.EXPLICIT_FAIL else "")

        setattr(rail, op, broken)


@asynccontextmanager
async def house(place: Place, folder: Path, second: str = FUTURE) -> AsyncIterator[House]:
    """100 in funding, 50 in each core, all brought there by transfers."""
    for name in ("spot", second.lower()):
        (folder / name).mkdir()
    async with (
        place.bursar() as bursar,
        desk(folder / "spot", name="spot") as spot,
        desk(folder / second.lower(), name=second.lower()) as other,
    ):
        clients = {SPOT: await spot.client(), second: await other.client()}
        transfers = Transfers(
            bursar.ledger,
            {AccountType(kind): client for kind, client in clients.items()},
            limits=Limits(per_second=None, per_day=None),
            retry=Retry(first_s=0.01, cap_s=0.05),
        )
        await transfers.prepare()
        await transfers.fund(ALICE, "USDT", "200", reference="seed")
        worker = Worker(transfers.engine, scan_s=0.02)
        running = asyncio.create_task(worker.run())
        here = House(bursar, {SPOT: spot, second: other}, transfers)
        here.clients = clients
        try:
            for kind in clients:
                assert (await here.move(FUNDING, kind, "50")).state == "COMMITTED"
            yield here
        finally:
            worker.stop()
            await running
            await transfers.engine.finish(10)


@scenario
async def test_margin_is_a_core_like_the_others(place: Place, tmp_path: Path) -> None:
    """There and back, from and to another core, and given back where it is refused."""
    async with house(place, tmp_path, MARGIN) as here:
        before = await here.standing()
        for source, target in ((FUNDING, MARGIN), (MARGIN, SPOT), (SPOT, MARGIN), (MARGIN, FUNDING)):
            assert (await here.move(source, target, "10")).state == "COMMITTED"
        assert await here.standing() == before
        here.break_rail(MARGIN, "deposit", Outcome.EXPLICIT_FAIL)
        assert (await here.move(FUNDING, MARGIN, "10")).state == "ROLLED_BACK"
        assert await here.standing() == before


@pytest.mark.parametrize(("source", "target"), PAIRS)
@scenario
async def test_either_core_is_either_end(place: Place, tmp_path: Path, source: str, target: str) -> None:
    async with house(place, tmp_path) as here:
        before = await here.standing()
        view = await here.move(source, target, "30")
        history = await here.transfers.engine.store.read.records.history(view.transfer_id)
        assert [one.target for one in history] == [
            "INIT",
            "SOURCE_PENDING",
            "SOURCE_DONE",
            "TARGET_PENDING",
            "COMMITTED",
        ]
        assert await here.standing() == before | {
            source: before[source] - 30 * UNIT,
            target: before[target] + 30 * UNIT,
        }


@pytest.mark.parametrize(("source", "target"), PAIRS)
@scenario
async def test_what_the_target_refuses_goes_back_to_the_source(
    place: Place, tmp_path: Path, source: str, target: str
) -> None:
    async with house(place, tmp_path) as here:
        before = await here.standing()
        here.break_rail(target, "deposit", Outcome.EXPLICIT_FAIL)
        assert (await here.move(source, target, "30")).state == "ROLLED_BACK"
        assert await here.standing() == before


@pytest.mark.parametrize(("source", "target"), PAIRS)
@pytest.mark.parametrize(("end", "op"), [("source", "withdraw"), ("target", "deposit")])
@scenario
async def test_a_reply_that_is_lost_after_the_effect_is_asked_for_again(
    place: Place, tmp_path: Path, source: str, target: str, end: str, op: str
) -> None:
    async with house(place, tmp_path) as here:
        before = await here.standing()
        here.break_rail(source if end == "source" else target, op, Outcome.TIMEOUT, after=True)
        view = await here.move(source, target, "30")
        async with asyncio.timeout(20):
            while (await here.transfers.get(ALICE, view.req_id)).state != "COMMITTED":
                await here.transfers.engine.ports.sleep(0.01)
        assert await here.standing() == before | {
            source: before[source] - 30 * UNIT,
            target: before[target] + 30 * UNIT,
        }


@scenario
async def test_a_refusal_relies_on_the_logs_of_both_cores(place: Place, tmp_path: Path) -> None:
    """T33: the source core has refused, the target core has promised that nothing arrives; neither may forget it."""
    async with house(place, tmp_path) as here:
        spot, future = [here.desks[kind].core.state for kind in (SPOT, FUTURE)]
        client = here.clients[SPOT]
        await client.lock(77, ALICE, "USDT", 1)  # the core's log is ahead of what the database relies on
        marks = here.bursar.store.read.marks
        assert await marks.highest("spot") < spot.sequence

        async def refuse(_item: FlowRecord[Any]) -> Answer:
            return Answer(
                outcome=Outcome.EXPLICIT_FAIL, code="INSUFFICIENT_BALANCE", high_water=(("spot", spot.sequence),)
            )

        here.transfers.rails[AccountType.SPOT].withdraw = refuse  # type: ignore[method-assign, assignment]
        assert (await here.move(SPOT, FUTURE, "1")).state == "FAILED"
        assert [await marks.highest(rail) for rail in ("spot", "future")] == [spot.sequence, future.sequence]


@scenario
async def test_what_is_refused(place: Place, tmp_path: Path) -> None:
    """A type that is not switched on; one core twice; more than is there; a frozen account at either core."""
    async with house(place, tmp_path) as here:
        before = await here.standing()
        for way in ((FUNDING, "MARGIN"), ("MARGIN", FUNDING), (SPOT, "MARGIN")):
            assert await here.refused(*way, "1") is Code.UNSUPPORTED_ACCOUNT_TYPE
        assert await here.refused(FUTURE, FUTURE, "1") is Code.SAME_ACCOUNT
        assert await here.refused(FUTURE, SPOT, "50.000001") is Code.INSUFFICIENT_BALANCE
        await here.clients[FUTURE].set_status(ALICE, Status.FROZEN)
        for way in ((SPOT, FUTURE), (FUTURE, SPOT), (FUNDING, FUTURE)):
            assert await here.refused(*way, "1") is Code.ACCOUNT_FROZEN
        assert (await here.move(FUNDING, SPOT, "1")).state == "COMMITTED"
        await here.clients[FUTURE].set_status(ALICE, Status.ACTIVE)
        assert (await here.standing())[FUTURE] == before[FUTURE]


@scenario
async def test_a_core_that_is_away_stops_nobody_else(place: Place, tmp_path: Path) -> None:
    async with house(place, tmp_path) as here:
        here.desks[FUTURE].server.stop()
        await here.desks[FUTURE].until(lambda: not here.clients[FUTURE].is_connected)
        with pytest.raises(ConnectionError):
            await here.move(SPOT, FUTURE, "1")
        assert (await here.move(FUNDING, SPOT, "1")).state == "COMMITTED"


@scenario
async def test_each_core_is_compared_with_its_own_side_of_the_ledger(place: Place, tmp_path: Path) -> None:
    """I5 with two cores: something put into one behind our back is found there, and only there."""
    async with house(place, tmp_path) as here:
        await asyncio.gather(*[here.move(*PAIRS[n % 4], "1") for n in range(20)])
        for kind in (SPOT, FUTURE):
            assert (await conservation(here.transfers, AccountType(kind), here.clients[kind])).ok, kind
        await here.clients[FUTURE].deposit(7, ALICE, "USDT", 1)
        assert (await conservation(here.transfers, AccountType.SPOT, here.clients[SPOT])).ok
        found = await conservation(here.transfers, AccountType.FUTURE, here.clients[FUTURE])
        assert (found.judged, found.ok) == (True, False)
