"""Freezing and closing accounts that transfers and deposits have to do with (T35, T44)."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import Place, outcome, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, Exchange, exchange

from bursar import deposit, pay
from bursar.engine import Answer, FlowRecord
from bursar.engine.clock import first_id_at
from bursar.flows.deposits import Deposits
from bursar.flows.transfers import AccountType, Code, Transfer, TransferRefused, Transfers, View
from bursar.flows.transfers.rails import FundingRail
from bursar.model.accounts import Account, AccountStatus
from bursar.model.errors import AccountClosed, AccountNotEmpty, IdempotencyKeyReused, InvalidName
from bursar.model.outcome import Outcome
from bursar.store.postgres.batches import PostgresBatchSession

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ACCOUNT = f"user:{ALICE}:funding"
SUSPENSE = "suspense:deposits"
BOTH = [(FUNDING, SPOT), (SPOT, FUNDING)]


def deposits_of(here: Exchange, above: int = 0) -> Deposits:
    return Deposits(here.transfers, confirm_above={"USDT": above})


async def balance(here: Exchange, path: str) -> str:
    return str(await here.bursar.ledger.balance(path, "USDT"))


async def alerts(here: Exchange) -> list[str]:
    return [alert.reason for alert in await here.bursar.store.read.alerts.open()]


async def emptied(here: Exchange) -> None:
    """The funding account is empty, by a payment to somebody else."""
    await here.bursar.ledger.commit(pay(ACCOUNT, "bob", "USDT", await here.funding()))


@pytest.mark.parametrize("way", BOTH, ids="-".join)
@scenario
async def test_a_frozen_account_of_a_core_does_not_stop_what_has_happened_there(
    place: Place, tmp_path: Path, way: tuple[str, str]
) -> None:
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        await here.bursar.ledger.freeze("trading:spot")
        assert (await here.move(*way, "10")).state == "COMMITTED"
        assert await here.standing() == (("40.000000", 60_000_000) if way[0] == FUNDING else ("60.000000", 40_000_000))
        assert await alerts(here) == []


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_no_freeze_stops_a_refund(place: Place, tmp_path: Path, inline: bool) -> None:
    """T35: whatever is frozen while the target refuses it, also the account in which it is in transit."""
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.FUNDING]
        assert isinstance(rail, FundingRail)
        rail.inline = inline

        async def freezes(item: FlowRecord[Any]) -> Answer:
            for path in (ACCOUNT, "transit:transfers"):
                await here.bursar.ledger.freeze(path)
            return Answer(outcome=Outcome.EXPLICIT_FAIL, code="ACCOUNT_FROZEN")

        here.transfers.rails[AccountType.SPOT].deposit = freezes  # type: ignore[method-assign]
        assert (await here.move(FUNDING, SPOT, "10")).state == "ROLLED_BACK"
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_a_deposit_to_a_frozen_account_is_booked_there(place: Place, tmp_path: Path) -> None:
    """A small one, and one that a second person confirms. The account pays nobody meanwhile."""
    async with exchange(place, tmp_path) as here:
        await here.bursar.ledger.freeze(ACCOUNT)
        deposits = deposits_of(here, 5_000_000)
        small = await deposits.ask(ALICE, "USDT", "5", reference="small", actor="anna")
        await deposits.ask(ALICE, "USDT", "6", reference="large", actor="anna")
        large = await deposits.confirm(ALICE, "USDT", "6", reference="large", actor="ben")
        assert [(one.state, one.account) for one in (small, large)] == [("BOOKED", ACCOUNT)] * 2
        assert await here.funding() == "111.000000"
        assert await here.refused(FUNDING, SPOT, "1") is Code.ACCOUNT_FROZEN


@scenario
async def test_what_arrives_for_a_closed_account_is_in_suspense_and_alerted(place: Place, tmp_path: Path) -> None:
    """Small and large, and large ones that waited while it closed; each once, however often it is asked for."""
    async with exchange(place, tmp_path, funds="1") as here:
        deposits = deposits_of(here, 5_000_000)
        await deposits.ask(ALICE, "USDT", "6", reference="waits", actor="anna")
        await emptied(here)
        await here.transfers.close_account(ACCOUNT)
        for _ in range(2):
            small = await deposits.ask(ALICE, "USDT", "5", reference="small", actor="anna")
            large = await deposits.confirm(ALICE, "USDT", "6", reference="waits", actor="ben")
            assert [(one.state, one.account) for one in (small, large)] == [("BOOKED", SUSPENSE)] * 2
        assert (await deposits.ask(ALICE, "USDT", "6", reference="waits", actor="carl")).account == SUSPENSE
        assert await here.transfers.fund(ALICE, "USDT", "1", reference="plain") == SUSPENSE
        assert await balance(here, SUSPENSE) == "12.000000"
        assert await here.funding() == "0.000000"
        assert sorted(await alerts(here)) == [
            "account closed",
            "account closed: deposit plain",
            "account closed: deposit small",
        ]
        # What was booked before it closed is still known as such.
        assert await here.transfers.fund(ALICE, "USDT", "1", reference="seed") == ACCOUNT
        assert await balance(here, SUSPENSE) == "12.000000"


@pytest.mark.parametrize("way", BOTH, ids="-".join)
@scenario
async def test_an_account_that_is_an_end_of_a_transfer_under_way_cannot_close(
    place: Place, tmp_path: Path, way: tuple[str, str]
) -> None:
    """By the ledger itself, and by whoever asks the cores; and it is not frozen after a close that was refused."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "100")
        if way[0] == FUNDING:
            await here.move(SPOT, FUNDING, "100")
        rail = here.transfers.rails[AccountType.SPOT]
        op = "deposit" if way[0] == FUNDING else "withdraw"
        real, go, asked = getattr(rail, op), asyncio.Event(), asyncio.Event()

        async def slow(item: FlowRecord[Any]) -> Answer:
            asked.set()
            await go.wait()
            return await real(item)  # type: ignore[no-any-return]

        setattr(rail, op, slow)
        moving = asyncio.create_task(here.move(*way, "100"))
        await asked.wait()
        with pytest.raises(AccountNotEmpty, match=r"under way|in transit"):
            await here.bursar.ledger.close(ACCOUNT)
        with pytest.raises(AccountNotEmpty, match="under way"):
            await here.transfers.close_account(ACCOUNT, drain_s=0.05)
        assert (await here.bursar.ledger.account(ACCOUNT)).status is AccountStatus.ACTIVE
        go.set()
        assert (await moving).state == "COMMITTED"


@scenario
async def test_an_account_whose_user_has_money_at_a_core_cannot_close(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="10") as here:
        await here.move(FUNDING, SPOT, "10")
        with pytest.raises(AccountNotEmpty, match="trading core"):
            await here.bursar.ledger.close(ACCOUNT)  # which can't ask
        with pytest.raises(AccountNotEmpty, match="USDT at core SPOT"):
            await here.transfers.close_account(ACCOUNT)
        blind = Transfers(here.bursar.ledger, {})
        with pytest.raises(AccountNotEmpty, match="not switched on"):
            await blind.close_account(ACCOUNT)
        assert (await here.bursar.ledger.account(ACCOUNT)).status is AccountStatus.ACTIVE
        await here.move(SPOT, FUNDING, "10")
        await emptied(here)
        assert (await here.transfers.close_account(ACCOUNT)).status is AccountStatus.CLOSED
        assert await here.refused(FUNDING, SPOT, "1") is Code.ACCOUNT_DISABLED
        with pytest.raises(AccountClosed):
            await here.transfers.close_account(ACCOUNT)


@scenario
async def test_what_is_locked_by_orders_at_a_core_counts(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="10") as here:
        await here.move(FUNDING, SPOT, "10")
        client = await here.core.client()
        assert (await client.lock(1, ALICE, "USDT", 10_000_000)).outcome is Outcome.SUCCESS
        with pytest.raises(AccountNotEmpty, match="USDT at core SPOT"):
            await here.transfers.close_account(ACCOUNT)


@scenario
async def test_a_core_that_does_not_answer_refuses_the_close(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="") as here:
        await here.bursar.ledger.create_account(ACCOUNT)
        here.core.server.stop()
        client = here.transfers.cores[AccountType.SPOT]
        await here.core.until(lambda: not client.is_connected)
        with pytest.raises(AccountNotEmpty, match="core SPOT does not say"):
            await here.transfers.close_account(ACCOUNT)
        assert (await here.bursar.ledger.account(ACCOUNT)).status is AccountStatus.ACTIVE


@scenario
async def test_an_account_that_was_frozen_stays_so_when_its_close_is_refused(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        await here.bursar.ledger.freeze(ACCOUNT)
        with pytest.raises(AccountNotEmpty, match="balance"):
            await here.transfers.close_account(ACCOUNT)
        assert (await here.bursar.ledger.account(ACCOUNT)).status is AccountStatus.FROZEN


@scenario
async def test_accounts_in_which_flows_book_facts_stay_open(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="") as here:
        for path in ("trading:spot", "suspense:transfers", SUSPENSE, "external:deposits"):
            with pytest.raises(InvalidName, match="flows book there"):
                await here.bursar.ledger.close(path)


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_closing_and_starting_a_transfer_race(place: Place, tmp_path: Path, inline: bool) -> None:
    """From another program. Either it closes and the transfer is refused, or it does not: never both, in any order."""
    async with exchange(place, tmp_path, funds="") as here, place.bursar() as elsewhere:
        rail: Any = here.transfers.rails[AccountType.FUNDING]
        rail.inline = inline
        other = Transfers(elsewhere.ledger, here.transfers.cores)
        core, ended = await here.core.client(), set()
        for user in range(1, 31):
            account = f"user:{user}:funding"
            await here.bursar.ledger.create_account(account)
            await core.deposit(user, user, "USDT", 5)
            await here.bursar.ledger.commit(deposit("bank", "trading:spot", "USDT", "0.000005"))
            wish = msgspec.structs.replace(here.request(SPOT, FUNDING, "0.000005"), user=user)
            moved, closed = await asyncio.gather(
                outcome(here.transfers.create(wish, deadline_s=10)), outcome(other.close_account(account))
            )
            spot = (await core.balances(user)).balances["USDT"].available
            funding = (await here.bursar.ledger.balance(account, "USDT")).minor
            assert spot + funding == 5
            assert isinstance(closed, AccountNotEmpty), "there was money all the time"
            assert isinstance(moved, View | TransferRefused), moved
            ended.add((funding, spot))
        assert ended <= {(5, 0), (0, 5)}
        assert (await here.bursar.ledger.balance("transit:transfers", "USDT")).minor == 0


@scenario
async def test_a_transfer_that_is_decided_while_the_account_closes_is_refused(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close comes between what the group has read and its write: on PostgreSQL the write notices."""
    async with exchange(place, tmp_path, funds="") as here, place.bursar() as other:
        await here.bursar.ledger.create_account(ACCOUNT)
        rail: Any = here.transfers.rails[AccountType.FUNDING]
        rail.inline = False
        store: Any = here.bursar.store
        asset = (await here.bursar.ledger.assets())["USDT"].id
        transfer = Transfer(
            user=ALICE,
            source=AccountType.SPOT,
            target=AccountType.FUNDING,
            asset="USDT",
            asset_id=asset,
            amount="5",
        )
        real, closed = PostgresBatchSession.write, list[Account]()

        async def write(session: PostgresBatchSession, prepared: Any) -> None:
            if not closed:
                closed.append(await other.ledger.close(ACCOUNT))
            await real(session, prepared)

        if place.engine == "postgres":
            monkeypatch.setattr(PostgresBatchSession, "write", write)
        else:
            closed.append(await other.ledger.close(ACCOUNT))
        found = await outcome(
            here.transfers.engine.start(
                "transfers", transfer, id=f"sr-{first_id_at(store.ports.now_us())}", owner=str(ALICE)
            )
        )
        assert isinstance(found, AccountClosed), found
        assert isinstance(closed[0], Account)
        assert await here.transfers.list(None) == []


# --- deposits: one reference, one deposit ----------------------------------------------------------------------------


@scenario
async def test_a_mistaken_second_request_does_not_spoil_the_first(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="") as here:
        deposits = deposits_of(here, 10_000_000)
        first = await deposits.ask(ALICE, "USDT", "7", reference="wire-1", actor="anna")
        with pytest.raises(TransferRefused, match="used before"):
            await deposits.ask(ALICE, "USDT", "70", reference="wire-1", actor="ben")
        assert await deposits.waiting() == []
        again = await deposits.ask(ALICE, "USDT", "7", reference="wire-1", actor="ben")
        assert (again, again.asked_by) == (first, "anna")
        await deposits.ask(ALICE, "USDT", "70", reference="wire-2", actor="anna")
        with pytest.raises(IdempotencyKeyReused):
            await deposits.ask(ALICE, "USDT", "7", reference="wire-2", actor="ben")
        assert await here.funding() == "7.000000"


@scenario
async def test_one_reference_asked_for_in_both_ways_at_once_is_one_deposit(place: Place, tmp_path: Path) -> None:
    """Two programs with different settings, of which one would book at once and the other waits."""
    async with exchange(place, tmp_path, funds="") as here, place.bursar() as elsewhere:
        other = Deposits(Transfers(elsewhere.ledger, {}), confirm_above={"USDT": 0})
        deposits = deposits_of(here, 10**12)
        for number in range(20):
            asking = [
                outcome(who.ask(ALICE, "USDT", "1", reference=f"wire-{number}", actor="anna"))
                for who in (deposits, other)
            ]
            states = {one.state for one in await asyncio.gather(*asking)}
            assert len(states) == 1
            if states == {"ASKED"}:
                await deposits.confirm(ALICE, "USDT", "1", reference=f"wire-{number}", actor="ben")
        assert await here.funding() == "20.000000"


@scenario
async def test_a_users_own_key_does_not_reach_deposits(place: Place, tmp_path: Path) -> None:
    """L19: an entry of another program, under a key that is a deposit's reference."""
    async with exchange(place, tmp_path, funds="") as here:
        await here.bursar.ledger.commit(deposit("bank", "bob", "USDT", "3", key="wire-1"))
        found = await deposits_of(here, 10**12).ask(ALICE, "USDT", "7", reference="wire-1", actor="anna")
        assert (found.state, await here.funding()) == ("BOOKED", "7.000000")
