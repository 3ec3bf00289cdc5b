"""A call whose end people forced stays watched (T34): its rail is asked until it says what happened, and disagreement
is a critical alert with the disputed amount in suspense. Nothing is made to happen by asking."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_contradictions import TEN, alerts, check, contradictions, lie, suspense
from tests.conformance.test_transfers import FUNDING, SPOT, Exchange, behind, exchange

from bursar.engine import Operators
from bursar.engine.forced import QUESTIONS_MAX, UNCONFIRMED, ask_due
from bursar.flows.transfers import AccountType, View
from bursar.model.outcome import Outcome
from bursar.rails.trading import Op

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

UNKNOWN, EFFECT = Outcome.TIMEOUT, (Outcome.TIMEOUT,)


async def forced(here: Exchange, source: str, target: str, says: Any, event: str) -> View:
    """A transfer whose call at the core had no answer, and whose end two people say."""
    op = "deposit" if target == SPOT else "withdraw"
    here.break_rail(AccountType.SPOT, op, says)
    view = await here.move(source, target, "10")
    assert view.state == "PENDING"
    people = Operators(here.transfers.engine)
    for person in ("ann", "bob"):
        await people.force("transfers", view.req_id, event, actor=person, reason="ticket 17")
    record = await here.transfers.engine.get("transfers", view.req_id)
    assert record is not None
    await here.transfers.engine.process_now(record, 10)
    return await here.transfers.get(None, view.req_id)


async def due(here: Exchange, place: Place) -> int:
    """Let the time pass until the next question, and ask."""
    ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
    await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago} WHERE due IS NOT NULL")
    return await ask_due(here.transfers.engine)


@pytest.mark.parametrize(("source", "target"), [(FUNDING, SPOT), (SPOT, FUNDING)])
@scenario
async def test_a_rail_that_agrees_is_asked_once(place: Place, tmp_path: Path, source: str, target: str) -> None:
    async with exchange(place, tmp_path, works=False) as here:
        await here.move(FUNDING, SPOT, "20")
        view = await forced(here, source, target, EFFECT, "SUCCESS")
        assert view.state == "COMMITTED"
        assert await ask_due(here.transfers.engine) == 0  # not due yet
        assert len(await here.bursar.store.read.forced_calls.open()) == 1
        assert await due(here, place) == 1
        assert await here.bursar.store.read.forced_calls.open() == []
        assert (await alerts(here), await suspense(here)) == ([], 0)
        await check(here)


@scenario
async def test_forced_success_and_the_core_refused_it(place: Place, tmp_path: Path) -> None:
    """People said that the deposit happened, and the core had refused it: we owe it to the user, and say so."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        here.break_rail(AccountType.SPOT, "deposit", UNKNOWN)
        view = await here.move(FUNDING, SPOT, "10")
        await client.cancel(view.req_id, Op.DEPOSIT)
        people = Operators(here.transfers.engine)
        for person in ("ann", "bob"):
            await people.force("transfers", view.req_id, "SUCCESS", actor=person, reason="ticket 17")
        assert await due(here, place) == 1
        assert ("critical", "contradiction") in await alerts(here)
        assert await contradictions(here, view) == ["LATE EXPLICIT_FAIL"]
        assert await suspense(here) == TEN
        await check(here)
        assert await due(here, place) == 0  # and never again


@scenario
async def test_forced_back_and_the_core_has_it_is_found_by_asking(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for the core's answer any more: without a question only sums would show it."""
    async with exchange(place, tmp_path, works=False) as here:
        monkeypatch.setattr(here.transfers.rails[AccountType.SPOT], "cancel", lie)
        view = await forced(here, FUNDING, SPOT, EFFECT, "EXPLICIT_FAIL")
        assert view.state == "ROLLED_BACK"
        assert await due(here, place) == 1
        assert ("critical", "contradiction") in await alerts(here)
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("100.000000", TEN, -TEN)
        await check(here)


@scenario
async def test_a_core_that_knows_nothing_of_it_is_asked_again_and_an_alert_is_raised(
    place: Place, tmp_path: Path
) -> None:
    """Nothing on record is no proof: it may be on its way. Asking does not make it happen."""
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        view = await forced(here, FUNDING, SPOT, UNKNOWN, "SUCCESS")
        assert view.state == "COMMITTED"
        for _ in range(QUESTIONS_MAX):
            assert (UNCONFIRMED, "critical") not in {(r, s) for s, r in await alerts(here)}
            assert await due(here, place) == 0
        assert ("critical", UNCONFIRMED) in await alerts(here)
        assert await here.spot() == 0
        [call] = await here.bursar.store.read.forced_calls.open()
        assert (call.attempt, "NOT_FOUND" in call.said) == (QUESTIONS_MAX, True)
        await client.deposit(view.req_id, view.user, "USDT", TEN)  # it was on its way
        assert await due(here, place) == 1
        await check(here)


@scenario
async def test_a_forced_record_that_cannot_be_read_does_not_stop_the_others(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, works=False) as here:
        views = [await forced(here, FUNDING, SPOT, EFFECT, "SUCCESS") for _ in range(3)]
        await behind(place, f"UPDATE {{s}}records SET body = '[]' WHERE id = '{views[0].req_id}'")
        assert await due(here, place) == 2
        assert [call.record for call in await here.bursar.store.read.forced_calls.open()] == [views[0].transfer_id]
