"""Who lifts a stop takes the same care as who sets one (T47): actor, reason, history; two people where it says so."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, exchange

from bursar.engine import Lift, lift_pause, set_pause
from bursar.flows.transfers import AccountType, Code
from bursar.flows.transfers.watch import watch
from bursar.model.errors import InvalidName, InvalidState
from bursar.store import Store

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

RAIL = ("rail", "spot")


async def told(store: Store) -> list[tuple[str, str, str, str]]:
    found = await store.read.actions.list()
    return [(a.action, a.actor, a.proposed_by, a.reason) for a in reversed(found)]


@scenario
async def test_a_pause_is_set_and_lifted_with_names_and_reasons_that_are_kept(place: Place) -> None:
    async with place.bursar() as bursar:
        store = bursar.store
        assert await set_pause(store, *RAIL, actor="ann", reason="the core moves")
        assert not await set_pause(store, *RAIL, actor="bob", reason="me too")
        for name, why in (("", "why"), ("b\u043eb", "why"), ("ann", " "), ("audit", "it is fine")):
            with pytest.raises(InvalidName):
                await lift_pause(store, *RAIL, actor=name, reason=why)
        assert [pause.actor for pause in await store.read.pauses.list()] == ["ann"]
        assert await lift_pause(store, *RAIL, actor="Ann", reason="the core is back") is Lift.LIFTED
        assert await lift_pause(store, *RAIL, actor="ann", reason="again") is Lift.NOT_PAUSED
        assert await store.read.pauses.list() == []
        assert await told(store) == [
            ("paused", "ann", "", "the core moves"),
            ("resumed", "ann", "", "the core is back"),
        ]
        assert await store.read.actions.list(kind="rail", name="future") == []


@scenario
async def test_where_two_people_are_needed_the_second_is_another_person(place: Place) -> None:
    async with place.bursar() as bursar:
        store = bursar.store
        await set_pause(store, *RAIL, actor="audit", reason="I5 is broken", two_people=True)
        assert await lift_pause(store, *RAIL, actor="bill", reason="it holds") is Lift.PROPOSED
        for alias in ("bill", "BILL", "bi11", "bi.ll"):
            with pytest.raises(InvalidState, match="another must agree"):
                await lift_pause(store, *RAIL, actor=alias, reason="I am another")
        [pause] = await store.read.pauses.list()
        assert (pause.two_people, pause.proposed_by, pause.proposed_reason) == (True, "bill", "it holds")
        assert await lift_pause(store, *RAIL, actor="carol", reason="seen") is Lift.LIFTED
        assert await told(store) == [
            ("paused", "audit", "", "I5 is broken"),
            ("resume proposed", "bill", "", "it holds"),
            ("resumed", "carol", "bill", "seen"),
        ]


@scenario
async def test_a_new_cause_is_added_and_ends_a_proposal(place: Place) -> None:
    """An operator's own stop needs two from then on; and nobody has agreed to what was found after the proposal."""
    async with place.bursar() as bursar:
        store = bursar.store
        await set_pause(store, *RAIL, actor="ann", reason="ticket 17")
        await set_pause(store, *RAIL, actor="audit", reason="I5 is broken", two_people=True)
        assert await lift_pause(store, *RAIL, actor="ann", reason="mine") is Lift.PROPOSED
        await set_pause(store, *RAIL, actor="audit", reason="I5 is broken", two_people=True)  # seen again, no news
        assert [pause.proposed_by for pause in await store.read.pauses.list()] == ["ann"]
        await set_pause(store, *RAIL, actor="audit", reason="I4 is broken", two_people=True)
        [pause] = await store.read.pauses.list()
        assert (pause.reason, pause.proposed_by) == ("ticket 17; I5 is broken; I4 is broken", "")
        assert await lift_pause(store, *RAIL, actor="bob", reason="it holds") is Lift.PROPOSED
        assert await lift_pause(store, *RAIL, actor="ann", reason="yes") is Lift.LIFTED
        assert [action for action, *_ in await told(store)].count("two people needed") == 2


@scenario
async def test_many_at_once_are_not_two_people(place: Place) -> None:
    """The same person in many windows: one proposal, and it stays paused."""
    async with place.bursar() as bursar:
        store = bursar.store
        await set_pause(store, *RAIL, actor="audit", reason="I5 is broken", two_people=True)
        lifts = await asyncio.gather(
            *[lift_pause(store, *RAIL, actor="ann", reason="now") for _ in range(8)], return_exceptions=True
        )
        assert [lift for lift in lifts if not isinstance(lift, InvalidState)] == [Lift.PROPOSED]
        assert len(await store.read.pauses.list()) == 1


@scenario
async def test_after_broken_conservation_two_people_allow_new_transfers(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, works=False) as here:
        client = await here.core.client()
        await here.move(FUNDING, SPOT, "10")
        await here.transfers.pause_intake("ann", "ticket 17")
        await client.deposit(1, ALICE, "USDT", 7)
        await watch(here.transfers, {AccountType.SPOT: client})
        assert await here.transfers.resume_intake("ann", "it is fine") is Lift.PROPOSED
        here.transfers._assets_read = float("-inf")
        assert await here.refused(FUNDING, SPOT, "1") is Code.TRANSFERS_PAUSED
        assert await here.transfers.resume_intake("bob", "seen") is Lift.LIFTED
        here.transfers._assets_read = float("-inf")
        assert (await here.move(FUNDING, SPOT, "1")).state == "COMMITTED"
