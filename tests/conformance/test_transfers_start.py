"""What a transfer is checked for when it is started, by whichever way; and the last line of defence at its ends."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, Exchange, exchange

from bursar.engine import Answer, Booking, FlowRecord
from bursar.engine.clock import first_id_at
from bursar.flows.transfers import AccountType, Code, Transfer, TransferRefused, Transfers
from bursar.flows.transfers.rails import FundingRail
from bursar.flows.transfers.transfers import ASSETS_S
from bursar.model.errors import AccountFrozen
from bursar.model.money import AssetStatus
from bursar.model.outcome import Outcome
from bursar.model.records import Record

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


async def body(here: Exchange, **changes: Any) -> Transfer:
    asset = (await here.bursar.ledger.assets())[changes.get("asset", "USDT")]
    wanted: dict[str, Any] = {
        "user": ALICE,
        "source": AccountType.FUNDING,
        "target": AccountType.SPOT,
        "asset": asset.code,
        "asset_id": asset.id,
        "amount": "1000000",
    }
    return Transfer(**(wanted | changes))


async def by_hand(here: Exchange, **changes: Any) -> Record:
    """A record started below all that checks requests."""
    transfer = await body(here, **changes)
    fresh = f"sr-{first_id_at(here.bursar.store.ports.now_us())}"
    started = await here.transfers.engine.start("transfers", transfer, id=fresh, owner=str(transfer.user))
    return await here.transfers.engine.process_now(started.record, 10)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_a_record_started_by_hand_is_checked_like_a_request(place: Place, tmp_path: Path, inline: bool) -> None:
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.FUNDING]
        assert isinstance(rail, FundingRail)
        rail.inline = inline
        ledger = here.bursar.ledger
        await ledger.create_asset("PIN", 2, internal_transfer_enabled=False)
        await ledger.create_asset("OLD", 2)
        await ledger.change_asset("OLD", status=AssetStatus.SUSPENDED)
        await ledger.create_asset("LIM", 2, min_transfer="1.00", max_transfer="10.00")
        for asset in ("PIN", "LIM"):
            await here.transfers.fund(ALICE, asset, "1000", reference=asset)
        cases: list[tuple[dict[str, Any], Code]] = [
            ({"asset": "PIN"}, Code.TRANSFER_NOT_ALLOWED),
            ({"asset": "OLD"}, Code.ASSET_SUSPENDED),
            ({"asset": "LIM", "amount": "99"}, Code.AMOUNT_TOO_SMALL),
            ({"asset": "LIM", "amount": "1001"}, Code.AMOUNT_TOO_LARGE),
            ({"source": AccountType.SPOT}, Code.SAME_ACCOUNT),
            ({"target": AccountType.FUNDING}, Code.SAME_ACCOUNT),
            ({"target": AccountType.FUTURE}, Code.UNSUPPORTED_ACCOUNT_TYPE),
            ({"amount": "0"}, Code.INVALID_AMOUNT),
            ({"amount": "-5"}, Code.INVALID_AMOUNT),
            ({"amount": str(2**63)}, Code.OVERFLOW),
            ({"asset_id": 999}, Code.INVALID_ASSET),
            ({"user": 0}, Code.INVALID_REQUEST),
        ]
        for changes, code in cases:
            with pytest.raises(TransferRefused) as refusal:
                await by_hand(here, **changes)
            assert refusal.value.reason is code, changes
        await ledger.freeze(f"user:{ALICE}:funding")
        with pytest.raises(AccountFrozen):
            await by_hand(here)
        await ledger.unfreeze(f"user:{ALICE}:funding")
        assert await here.transfers.list(None) == []
        assert (await by_hand(here)).state == "COMMITTED"
        assert await here.standing() == ("99.000000", 1_000_000)


@scenario
async def test_a_new_asset_can_be_transferred_at_once(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here, place.bursar() as other:
        await here.move(FUNDING, SPOT, "1")  # which has read what assets there are
        await other.ledger.create_asset("NEW", 2)
        await here.transfers.fund(ALICE, "NEW", "5", reference="new")
        moved = msgspec.structs.replace(here.request(FUNDING, SPOT, "5"), asset="NEW")
        assert (await here.transfers.create(moved)).state == "COMMITTED"


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_the_ledgers_end_has_the_configured_bound_for_what_leaves_it(
    place: Place, tmp_path: Path, inline: bool
) -> None:
    """And a refusal for size is remembered; but what was answered before is the answer, and what comes back comes."""
    async with exchange(place, tmp_path) as here:
        narrow = Transfers(here.bursar.ledger, here.transfers.cores, safety_factor=2**45, inline=inline)
        rail = narrow.rails[AccountType.FUNDING]
        first = await here.move(FUNDING, SPOT, "10")  # above 2^64 / 2^45, under the usual factor
        record = await here.transfers.engine.get("transfers", first.req_id)
        assert record is not None
        item = here.transfers.flow.item(record)
        again = await rail.withdraw(item)
        assert (again.outcome, again.evidence["replayed"]) == (Outcome.SUCCESS, True)
        fresh = FlowRecord(msgspec.structs.replace(record, id="sr-77"), item.body)
        assert rail.inline_call(fresh, "withdraw", Booking()) is None
        for replayed in (False, True):
            refused = await rail.withdraw(fresh)
            assert (refused.outcome, refused.code) == (Outcome.EXPLICIT_FAIL, "OVERFLOW")
            assert refused.evidence["replayed"] is replayed
        assert await here.standing() == ("90.000000", 10_000_000)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_a_refund_is_never_refused_for_its_size(place: Place, tmp_path: Path, inline: bool) -> None:
    """The factor was raised while the money was on its way."""
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.FUNDING]
        assert isinstance(rail, FundingRail)
        rail.inline = inline
        core = here.transfers.rails[AccountType.SPOT]

        async def raised(item: FlowRecord[Any]) -> Answer:
            rail._safety_factor = 2**64  # what a program with another setting has
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code="ACCOUNT_FROZEN")

        core.deposit = raised  # type: ignore[method-assign]
        assert (await here.move(FUNDING, SPOT, "10")).state == "ROLLED_BACK"
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_both_ends_say_what_they_remember_of_an_operation(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        view = await here.move(FUNDING, SPOT, "10")
        record = await here.transfers.engine.get("transfers", view.req_id)
        assert record is not None
        item = here.transfers.flow.item(record)
        funding, spot = (here.transfers.rails[kind] for kind in (AccountType.FUNDING, AccountType.SPOT))
        found = [await funding.query(item, "withdraw"), await spot.query(item, "deposit")]
        assert [one.outcome for one in found] == [Outcome.SUCCESS, Outcome.SUCCESS]
        missing = [await funding.query(item, "refund"), await spot.query(item, "withdraw")]
        assert [one.outcome for one in missing] == [Outcome.UNKNOWN, Outcome.UNKNOWN]
        assert (await funding.cancel(item, "refund")).outcome is Outcome.EXPLICIT_FAIL
        assert (await funding.query(item, "refund")).code == "CANCELLED"
        assert await here.standing() == ("90.000000", 10_000_000)


@scenario
async def test_a_repeated_request_waits_like_the_first(place: Place, tmp_path: Path) -> None:
    """Here, where the transfer is driven, and in another program on the same database."""
    async with exchange(place, tmp_path) as here, place.bursar() as elsewhere:
        other = Transfers(elsewhere.ledger, here.transfers.cores, worker="other")
        rail = here.transfers.rails[AccountType.SPOT]
        real, go, asked = rail.deposit, asyncio.Event(), asyncio.Event()

        async def slow(item: FlowRecord[Any]) -> Answer:
            asked.set()
            await go.wait()
            return await real(item)

        rail.deposit = slow  # type: ignore[method-assign]
        request = here.request(FUNDING, SPOT, "10", client_order_id="mine")
        first = asyncio.create_task(here.transfers.create(request, deadline_s=10))
        await asked.wait()
        at_once = await other.create(request, deadline_s=0.05)
        assert (at_once.state, at_once.replayed) == ("PENDING", True)
        again = [asyncio.create_task(who.create(request, deadline_s=10)) for who in (here.transfers, other)]
        for _ in range(20):
            await asyncio.sleep(0)
        assert not any(task.done() for task in (first, *again))
        go.set()
        views = [await task for task in (first, *again)]
        assert [(view.state, view.req_id) for view in views] == [("COMMITTED", at_once.req_id)] * 3
        assert await here.standing() == ("90.000000", 10_000_000)


@pytest.mark.parametrize(("one", "two"), [("20", "20.00"), ("20.000000", "20.0"), ("0.5", "0.50")])
@scenario
async def test_the_same_amount_written_otherwise_is_the_same_request(
    place: Place, tmp_path: Path, one: str, two: str
) -> None:
    async with exchange(place, tmp_path) as here:
        views = [await here.move(FUNDING, SPOT, amount, client_order_id="mine") for amount in (one, two, one)]
        assert len({view.req_id for view in views}) == 1
        for other in ("20.01", "2", "200", "5"):
            assert await here.refused(FUNDING, SPOT, other, client_order_id="mine") is Code.DUPLICATE_REQUEST
        assert (await here.standing())[1] == int(float(one) * 1e6)


@scenario
async def test_a_new_transfer_has_no_id_that_a_core_may_have_forgotten(place: Place, tmp_path: Path) -> None:
    """By hand, an old id or one below a floor is refused; and ids are made above the floors, whatever the clock
    says."""
    async with exchange(place, tmp_path) as here:
        engine, store = here.transfers.engine, here.bursar.store
        wanted = await body(here)
        for req_id in ("sr-1", f"sr-{first_id_at(store.ports.now_us() - 1_900_000_000)}", "mine"):
            with pytest.raises(TransferRefused, match="INVALID_REQUEST"):
                await engine.start("transfers", wanted, id=req_id)
        ahead = first_id_at(store.ports.now_us() + 3_600_000_000)  # a clock was wrong for a while
        await store.single().cores.bind("spot", "the core")
        await store.single().cores.raise_floors("spot", ahead, ahead)
        await store.ports.sleep(ASSETS_S * 1.1)
        with pytest.raises(TransferRefused, match="too old"):
            await by_hand(here)
        view = await here.move(FUNDING, SPOT, "1")
        assert (view.state, int(view.req_id.removeprefix("sr-")) > ahead) == ("COMMITTED", True)
