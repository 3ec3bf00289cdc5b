"""T42: a transfer never uses an overdraft, in every mode, whatever the account's policy and however many race."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, Exchange, exchange

from bursar import CappedOverdraft, SystemAccount, UncappedOverdraft, pay
from bursar.flows.transfers import AccountType, Code, TransferRefused, View
from bursar.flows.transfers.rails import FundingRail
from bursar.model.accounts import Policy

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ACCOUNT = f"user:{ALICE}:funding"
CAPPED = CappedOverdraft("-1000", "USDT")
INLINE = pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])


def called(here: Exchange, inline: bool) -> None:
    rail = here.transfers.rails[AccountType.FUNDING]
    assert isinstance(rail, FundingRail)
    rail.inline = inline


async def results(here: Exchange, *amounts: str) -> list[str]:
    """What becomes of transfers that are asked for at the same time."""
    found = await asyncio.gather(*[here.move(FUNDING, SPOT, amount) for amount in amounts], return_exceptions=True)
    return [
        one.state if isinstance(one, View) else one.reason for one in found if isinstance(one, View | TransferRefused)
    ]


@INLINE
@pytest.mark.parametrize("policy", [CAPPED, UncappedOverdraft(), SystemAccount()], ids=["capped", "uncapped", "system"])
@scenario
async def test_an_overdraft_does_not_pay_for_a_transfer(
    place: Place, tmp_path: Path, inline: bool, policy: Policy
) -> None:
    """By a lone caller, and by many at once, who share the writer's groups."""
    async with exchange(place, tmp_path, funds="10") as here:
        called(here, inline)
        await here.bursar.ledger.change_policy(ACCOUNT, policy)
        assert await here.refused(FUNDING, SPOT, "10.000001") is Code.INSUFFICIENT_BALANCE
        assert set(await results(here, *["11"] * 20)) <= {Code.INSUFFICIENT_BALANCE, "FAILED"}
        assert await here.standing() == ("10.000000", 0)


@INLINE
@scenario
async def test_racing_transfers_from_an_overdraft_take_no_more_than_is_there(
    place: Place, tmp_path: Path, inline: bool
) -> None:
    """Two programs, and somebody who pays from the account beside them: its balance is guarded."""
    async with exchange(place, tmp_path) as here, place.bursar() as other:
        called(here, inline)
        await here.bursar.ledger.change_policy(ACCOUNT, CAPPED)
        paying = [asyncio.create_task(other.ledger.commit(pay(ACCOUNT, "bob", "USDT", "5"))) for _ in range(10)]
        found = await results(here, *["7"] * 30)
        await asyncio.gather(*paying)
        funding, spot = await here.standing()
        assert spot == 7_000_000 * found.count("COMMITTED")
        # The payments may use the overdraft; a transfer has left at least nothing.
        assert spot <= 100_000_000
        assert float(funding) == 100 - 50 - spot / 1e6
        assert float(funding) >= -50
        assert set(found) <= {"COMMITTED", "FAILED", Code.INSUFFICIENT_BALANCE}
        assert 7 <= found.count("COMMITTED") <= 14


@INLINE
@scenario
async def test_debts_count_beside_what_is_there(place: Place, tmp_path: Path, inline: bool) -> None:
    """The balance is what counts, not the postings that happen to be positive; and what is held is not there."""
    async with exchange(place, tmp_path, funds="10") as here:
        called(here, inline)
        ledger = here.bursar.ledger
        await ledger.change_policy(ACCOUNT, CAPPED)
        await ledger.authorize(ACCOUNT, "USDT", "4")
        assert await here.refused(FUNDING, SPOT, "6.000001") is Code.INSUFFICIENT_BALANCE
        await ledger.authorize(ACCOUNT, "USDT", "7")  # below zero, which its policy allows
        assert await here.refused(FUNDING, SPOT, "0.000001") is Code.INSUFFICIENT_BALANCE
        await here.transfers.fund(ALICE, "USDT", "3", reference="more")
        assert await here.refused(FUNDING, SPOT, "2.000001") is Code.INSUFFICIENT_BALANCE
        assert (await here.move(FUNDING, SPOT, "2")).state == "COMMITTED"
        assert await here.standing() == ("0.000000", 2_000_000)


@INLINE
@scenario
async def test_an_account_without_a_guarded_balance_is_no_source(place: Place, tmp_path: Path, inline: bool) -> None:
    """Nothing would stop two transfers that both have seen the same money."""
    async with exchange(place, tmp_path) as here:
        called(here, inline)
        await here.bursar.ledger.change_policy(ACCOUNT, UncappedOverdraft())
        assert await here.refused(FUNDING, SPOT, "1") is Code.TRANSFER_NOT_ALLOWED
        assert set(await results(here, *["1"] * 10)) == {Code.TRANSFER_NOT_ALLOWED}
        assert await here.standing() == ("100.000000", 0)
        await here.bursar.ledger.change_policy(ACCOUNT, CAPPED)
        await here.move(FUNDING, SPOT, "1")
        await here.bursar.ledger.change_policy(ACCOUNT, UncappedOverdraft())
        assert (await here.move(SPOT, FUNDING, "1")).state == "COMMITTED"
