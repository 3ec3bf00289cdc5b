"""The freeze of a close: it lifts its own and no person's, and if it is interrupted an alert is raised (T44)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, Exchange, behind, exchange

from bursar import pay
from bursar.engine import Operators
from bursar.flows.transfers import AccountType
from bursar.flows.transfers.closing import alert_interrupted
from bursar.model.accounts import AccountStatus, CappedOverdraft
from bursar.model.errors import AccountNotEmpty, DatabaseUnavailable, InvalidName, OutcomeUnknown

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ACCOUNT = f"user:{ALICE}:funding"
REASON = f"close of {ACCOUNT} interrupted"
MINUTE_S = 60.0
ACTIVE, FROZEN, CLOSED = AccountStatus.ACTIVE, AccountStatus.FROZEN, AccountStatus.CLOSED


async def status(here: Exchange) -> AccountStatus:
    return (await here.bursar.ledger.account(ACCOUNT)).status


async def versions(here: Exchange) -> list[AccountStatus]:
    return [version.account.status for version in await here.bursar.ledger.account_history(ACCOUNT)]


async def closings(here: Exchange) -> list[str]:
    return [closing.path for closing in await here.bursar.store.read.closings.list()]


async def emptied(here: Exchange) -> None:
    await here.bursar.ledger.commit(pay(ACCOUNT, "bob", "USDT", await here.funding()))


async def alerts(here: Exchange) -> list[str]:
    await alert_interrupted(here.transfers.engine, MINUTE_S)
    return [alert.reason for alert in await here.bursar.store.read.alerts.open()]


def meanwhile(here: Exchange, act: Callable[[], Awaitable[object]]) -> None:
    """Do this when a close asks the core: after its freeze, and before it closes."""
    client: Any = here.transfers.cores[AccountType.SPOT]
    real = client.balances

    async def balances(user: int) -> Any:
        await act()
        return await real(user)

    client.balances = balances


async def began(place: Place, seconds: float) -> None:
    """The close began so long ago; or in the future, by a clock that was set back since."""
    ago = f"at - interval '{seconds} seconds'" if place.engine == "postgres" else f"at - {int(seconds * 1e6)}"
    await behind(place, f"UPDATE {{s}}closings SET at = {ago}")


# --- a person's freeze -----------------------------------------------------------------------------------------------


@scenario
async def test_a_freeze_by_a_person_during_a_close_survives_its_refusal(place: Place, tmp_path: Path) -> None:
    """Also from another program. It is a version of its own, although the account was frozen already."""
    async with exchange(place, tmp_path) as here, place.bursar() as elsewhere:
        meanwhile(here, lambda: elsewhere.ledger.freeze(ACCOUNT))
        with pytest.raises(AccountNotEmpty, match="balance"):
            await here.transfers.close_account(ACCOUNT)
        assert await versions(here) == [ACTIVE, FROZEN, FROZEN]
        assert await closings(here) == []
        with pytest.raises(AccountNotEmpty, match="balance"):  # nor does the next close lift it
            await here.transfers.close_account(ACCOUNT)
        assert await status(here) is FROZEN


@scenario
async def test_a_freeze_by_a_person_after_an_unfreeze_during_a_close_survives(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:

        async def thaw_and_freeze() -> None:
            await here.bursar.ledger.unfreeze(ACCOUNT)
            await here.bursar.ledger.freeze(ACCOUNT)

        meanwhile(here, thaw_and_freeze)
        with pytest.raises(AccountNotEmpty, match="balance"):
            await here.transfers.close_account(ACCOUNT)
        assert await versions(here) == [ACTIVE, FROZEN, ACTIVE, FROZEN]


@scenario
async def test_an_account_that_a_person_unfreezes_during_a_close_is_active(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        meanwhile(here, lambda: here.bursar.ledger.unfreeze(ACCOUNT))
        with pytest.raises(AccountNotEmpty, match="balance"):
            await here.transfers.close_account(ACCOUNT)
        assert await versions(here) == [ACTIVE, FROZEN, ACTIVE]
        assert await closings(here) == []


@scenario
async def test_a_new_policy_during_a_close_does_not_keep_the_account_frozen(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        policy = CappedOverdraft("-5", "USDT")
        meanwhile(here, lambda: here.bursar.ledger.change_policy(ACCOUNT, policy))
        with pytest.raises(AccountNotEmpty, match="balance"):
            await here.transfers.close_account(ACCOUNT)
        head = await here.bursar.ledger.account(ACCOUNT)
        assert (head.status, head.policy) == (ACTIVE, policy)


@scenario
async def test_a_freeze_by_a_person_does_not_stop_a_close(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        await emptied(here)
        meanwhile(here, lambda: here.bursar.ledger.freeze(ACCOUNT))
        await here.transfers.close_account(ACCOUNT)
        assert await versions(here) == [ACTIVE, FROZEN, FROZEN, CLOSED]
        assert await closings(here) == []


@scenario
async def test_to_freeze_a_frozen_account_twice_writes_one_version(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        await here.bursar.ledger.freeze(ACCOUNT)
        await here.bursar.ledger.freeze(ACCOUNT)
        assert await versions(here) == [ACTIVE, FROZEN]


@scenario
async def test_a_second_close_takes_the_freeze_of_the_first_over(place: Place, tmp_path: Path) -> None:
    """The first one's refusal lifts nothing while the second is under way; the second one's does."""
    async with exchange(place, tmp_path) as here:
        ledger = here.bursar.ledger
        await ledger.begin_close(ACCOUNT, "first")
        await ledger.begin_close(ACCOUNT, "second")
        await ledger.cancel_close(ACCOUNT, "first")
        assert await status(here) is FROZEN
        await ledger.cancel_close(ACCOUNT, "second")
        assert await versions(here) == [ACTIVE, FROZEN, ACTIVE]
        assert await closings(here) == []


@scenario
async def test_a_close_that_is_cancelled_lifts_its_freeze(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        asked = asyncio.Event()

        async def hang() -> None:
            asked.set()
            await asyncio.Event().wait()

        meanwhile(here, hang)
        closing = asyncio.create_task(here.transfers.close_account(ACCOUNT))
        await asked.wait()
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert await versions(here) == [ACTIVE, FROZEN, ACTIVE]


@scenario
async def test_only_funding_accounts_are_frozen_by_their_close(place: Place, tmp_path: Path) -> None:
    """A change of any other account does not look for a close that has frozen it."""
    async with exchange(place, tmp_path) as here:
        with pytest.raises(InvalidName, match="funding account"):
            await here.bursar.ledger.begin_close("bob", "a close")


# --- interrupted -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_money", [True, False], ids=["refused", "closed"])
@scenario
async def test_an_interrupted_close_raises_an_alert_and_another_close_ends_it(
    place: Place, tmp_path: Path, has_money: bool
) -> None:
    """The alert names the account and what to do, and comes only when no living close takes so long."""
    async with exchange(place, tmp_path) as here:
        if not has_money:
            await emptied(here)
        await here.bursar.ledger.begin_close(ACCOUNT, "of a process that died")
        assert await alerts(here) == []
        await began(place, MINUTE_S + 1)
        assert await alerts(here) == [REASON]
        [alert] = await here.bursar.store.read.alerts.open()
        assert f"account {ACCOUNT} is frozen by a close that has not ended" in alert.message
        assert f"bursar account close {ACCOUNT}" in alert.message
        assert f"bursar account unfreeze {ACCOUNT}" in alert.message
        await Operators(here.transfers.engine).acknowledge(0, REASON, actor="ann")
        assert await alerts(here) == []  # seen, and not raised again at every look
        if has_money:
            with pytest.raises(AccountNotEmpty, match="balance"):
                await here.transfers.close_account(ACCOUNT)
        else:
            await here.transfers.close_account(ACCOUNT)
        assert await status(here) is (ACTIVE if has_money else CLOSED)
        assert await closings(here) == []


@pytest.mark.parametrize("person", ["freeze", "unfreeze"])
@scenario
async def test_a_person_ends_an_interrupted_close(place: Place, tmp_path: Path, person: str) -> None:
    async with exchange(place, tmp_path) as here:
        await here.bursar.ledger.begin_close(ACCOUNT, "of a process that died")
        await began(place, MINUTE_S + 1)
        await getattr(here.bursar.ledger, person)(ACCOUNT)
        assert await closings(here) == []
        assert await alerts(here) == []
        assert await status(here) is (FROZEN if person == "freeze" else ACTIVE)


@scenario
async def test_a_clock_that_was_set_back_does_not_hide_an_interrupted_close(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        await here.bursar.ledger.begin_close(ACCOUNT, "of a process that died")
        await began(place, -3_600)
        assert await alerts(here) == [REASON]


# --- the reply to a COMMIT is lost -----------------------------------------------------------------------------------


def lose_reply(here: Exchange, method: str, *, is_written: bool) -> None:
    """The database goes away in the COMMIT of this method, and comes back at once."""
    ledger: Any = here.bursar.ledger
    real = getattr(ledger, method)

    async def lost(*args: Any, **options: Any) -> Any:
        if is_written:
            await real(*args, **options)
        raise OutcomeUnknown("none", "the connection broke")

    setattr(ledger, method, lost)


@pytest.mark.parametrize("is_written", [True, False], ids=["written", "not-written"])
@pytest.mark.parametrize("method", ["begin_close", "close_empty"])
@scenario
async def test_a_lost_reply_is_what_the_caller_is_told(
    place: Place, tmp_path: Path, method: str, is_written: bool
) -> None:
    """Whether it was written or not: the account is closed or as before, and nothing is said of the freeze."""
    async with exchange(place, tmp_path) as here:
        await emptied(here)
        lose_reply(here, method, is_written=is_written)
        with pytest.raises(OutcomeUnknown, match="the connection broke") as caught:
            await here.transfers.close_account(ACCOUNT)
        assert not hasattr(caught.value, "__notes__")
        is_closed = is_written and method == "close_empty"
        assert await status(here) is (CLOSED if is_closed else ACTIVE)
        assert await closings(here) == []


@scenario
async def test_a_freeze_that_cannot_be_lifted_is_a_note_to_the_first_error(
    place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And an alert, later: the row of the close is there."""
    async with exchange(place, tmp_path) as here:
        await emptied(here)
        ledger: Any = here.bursar.ledger
        lose_reply(here, "close_empty", is_written=False)

        async def cancel_close(*_: Any) -> None:
            raise DatabaseUnavailable("it is away")

        ledger.cancel_close = cancel_close
        with pytest.raises(OutcomeUnknown, match="the connection broke") as caught:
            await here.transfers.close_account(ACCOUNT)
        [note] = caught.value.__notes__
        assert f"account {ACCOUNT} may still be frozen" in note
        assert "it is away" in note
        assert note in caplog.text
        assert await status(here) is FROZEN
        await began(place, MINUTE_S + 1)
        assert await alerts(here) == [REASON]
