"""Operations at the ledger's own end that are part of a transition's unit (ADR 14), on both stores with a real core.

The same money, states and answers as when it is called; fewer units; and whatever can't be part of the unit is called.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, Exchange, broken, exchange

from bursar.engine import Answer, FlowRecord, Operators
from bursar.flows.transfers import AccountType, Code, Request
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.rails import FundingRail
from bursar.model.outcome import Outcome
from bursar.writer import Writer

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WAYS = [(FUNDING, SPOT), (SPOT, FUNDING)]
STATES = ["INIT", "SOURCE_PENDING", "SOURCE_DONE", "TARGET_PENDING", "COMMITTED"]


def forbid_calls(here: Exchange) -> list[str]:
    """From now on the ledger's end notes who calls it, before it answers."""
    called: list[str] = []
    rail = here.transfers.rails[AccountType.FUNDING]
    for op in ("withdraw", "deposit", "refund"):
        real = getattr(rail, op)

        async def noted(item: FlowRecord[Any], op: str = op, real: Any = real) -> Answer:
            called.append(op)
            return await real(item)  # type: ignore[no-any-return]

        setattr(rail, op, noted)
    return called


async def remembered(here: Exchange, req_id: str) -> dict[str, str]:
    found = await here.transfers.ledger.store.read.operations.of("funding", req_id)
    return {op: answer.outcome.value for op, answer in found.items()}


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@scenario
async def test_two_units_and_every_state_on_record(place: Place, tmp_path: Path, way: tuple[str, str]) -> None:
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        called = forbid_calls(here)
        groups = here.bursar.ledger.writer.batches
        view = await here.move(*way, "10")
        assert (view.state, await here.path(view)) == ("COMMITTED", STATES)
        assert (here.bursar.ledger.writer.batches - groups, called) == (2, [])
        assert await remembered(here, view.req_id) == {"withdraw" if way[0] == FUNDING else "deposit": "SUCCESS"}
        assert await here.standing() == (("40.000000", 60_000_000) if way[0] == FUNDING else ("60.000000", 40_000_000))
        assert await broken(here) == set()
        client = await here.core.client()
        assert (await conservation(here.transfers, AccountType.SPOT, client)).ok


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@scenario
async def test_a_call_that_comes_late_finds_what_rode(place: Place, tmp_path: Path, way: tuple[str, str]) -> None:
    """Whoever asks for the operation again gets its answer, and nothing moves twice."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        view = await here.move(*way, "10")
        before = await here.standing()
        record = await here.transfers.engine.get("transfers", view.req_id)
        assert record is not None
        rail = here.transfers.rails[AccountType.FUNDING]
        item = here.transfers.flow.item(record)
        late = await (rail.withdraw(item) if way[0] == FUNDING else rail.deposit(item))
        assert (late.outcome, late.evidence["replayed"]) == (Outcome.SUCCESS, True)
        assert await here.standing() == before


@scenario
async def test_a_refusal_of_the_target_gives_back_in_its_own_unit(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        called = forbid_calls(here)
        here.break_rail(AccountType.SPOT, "deposit", Outcome.EXPLICIT_FAIL)
        groups = here.bursar.ledger.writer.batches
        view = await here.move(FUNDING, SPOT, "10")
        assert (view.state, view.error, await here.path(view)) == (
            "ROLLED_BACK",
            "",
            [*STATES[:-1], "COMPENSATING", "ROLLED_BACK"],
        )
        assert (here.bursar.ledger.writer.batches - groups, called) == (2, [])
        assert await remembered(here, view.req_id) == {"withdraw": "SUCCESS", "refund": "SUCCESS"}
        assert await here.standing() == ("100.000000", 0)
        assert await broken(here) == set()


@scenario
async def test_a_frozen_target_is_called_refuses_and_the_core_takes_back(place: Place, tmp_path: Path) -> None:
    """The ledger refuses what would ride: then the end is called, its refusal is remembered, and compensated."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        called = forbid_calls(here)
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.withdraw

        async def freeze_first(item: FlowRecord[Any]) -> Answer:
            await here.bursar.ledger.freeze(f"user:{ALICE}:funding")
            return await real(item)

        rail.withdraw = freeze_first  # type: ignore[method-assign]
        view = await here.move(SPOT, FUNDING, "10")
        assert (view.state, called) == ("ROLLED_BACK", ["deposit"])
        assert await remembered(here, view.req_id) == {"deposit": "EXPLICIT_FAIL"}
        assert await here.standing() == ("50.000000", 50_000_000)
        assert await broken(here) == set()


@scenario
async def test_a_cancelled_operation_never_rides(place: Place, tmp_path: Path) -> None:
    """A refusal that was installed on purpose (T34) stands, though what comes later could be booked."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.withdraw

        async def cancel_first(item: FlowRecord[Any]) -> Answer:
            assert (await here.transfers.rails[AccountType.FUNDING].cancel(item, "deposit")).code == "CANCELLED"
            return await real(item)

        rail.withdraw = cancel_first  # type: ignore[method-assign]
        view = await here.move(SPOT, FUNDING, "10")
        assert (view.state, await here.standing()) == ("ROLLED_BACK", ("50.000000", 50_000_000))
        assert await broken(here) == set()


@scenario
async def test_what_is_paused_does_not_ride(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        people = Operators(here.transfers.engine)
        await people.pause("flow", "transfers", actor="ann", reason="looking into it")
        await here.transfers.engine.pauses.read()  # or it takes a moment to be known here
        request = Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="10")
        view = await here.transfers.create(request, deadline_s=0.2)
        assert (view.fsm_state, await here.funding()) == ("SOURCE_PENDING", "100.000000")
        await people.resume("flow", "transfers", actor="ann", reason="all is well")
        await people.retry_now("transfers", view.req_id, actor="ann", reason="not in half a minute")
        await here.until(view, "COMMITTED")
        assert await here.standing() == ("90.000000", 10_000_000)


@scenario
async def test_what_is_paused_does_not_ride_after_a_call_that_was_repeated(place: Place, tmp_path: Path) -> None:
    """The source was called twice; the deposit is a first call all the same, and waits (W15)."""
    async with exchange(place, tmp_path, works=False) as here:
        await here.move(FUNDING, SPOT, "50")
        here.break_rail(AccountType.SPOT, "withdraw", Outcome.TIMEOUT)
        engine = here.transfers.engine
        view = await here.move(SPOT, FUNDING, "10")
        record = await engine.get("transfers", view.req_id)
        assert record is not None
        assert (record.state, record.attempt) == ("SOURCE_PENDING", 1)
        await Operators(engine).pause("rail", "funding", actor="ann", reason="looking into it")
        record = await engine.process_now(record, 10)
        assert (record.state, await here.funding()) == ("TARGET_PENDING", "50.000000")
        await Operators(engine).resume("rail", "funding", actor="ann", reason="all is well")
        assert (await engine.process_now(record, 10)).state == "COMMITTED"
        assert await here.standing() == ("60.000000", 40_000_000)


@scenario
async def test_racers_for_the_last_coin(place: Place, tmp_path: Path) -> None:
    """Twenty at once for what ten can have: ten arrive, ten are refused or fail, nobody is left in between."""
    async with exchange(place, tmp_path, funds="10") as here:

        async def one() -> str:
            try:
                return (await here.move(FUNDING, SPOT, "1")).state
            except Exception as error:
                return str(getattr(error, "reason", error))

        ends = await asyncio.gather(*[one() for _ in range(20)])
        assert ends.count("COMMITTED") == 10
        assert set(ends) <= {"COMMITTED", "FAILED", "INSUFFICIENT_BALANCE"}
        assert await here.standing() == ("0.000000", 10_000_000)
        assert await broken(here) == set()


@scenario
async def test_it_is_called_where_it_is_told_to_be(place: Place, tmp_path: Path) -> None:
    """Switched off, the ledger's end is one like any other: units of its own, the same result."""
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.FUNDING]
        assert isinstance(rail, FundingRail)
        rail.inline = False
        called = forbid_calls(here)
        groups = here.bursar.ledger.writer.batches
        view = await here.move(FUNDING, SPOT, "10")
        assert (view.state, await here.path(view)) == ("COMMITTED", STATES)
        assert (here.bursar.ledger.writer.batches - groups, called) == (4, ["withdraw"])
        assert await here.standing() == ("90.000000", 10_000_000)


@scenario
async def test_nothing_rides_from_a_frozen_source(place: Place, tmp_path: Path) -> None:
    """Frozen after the target was looked at: the unit is refused, a closer look says why, and nothing is written."""
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.look
        rail.look = lambda transfer: _then_freeze(here, real(transfer))  # type: ignore[method-assign]
        assert await here.refused(FUNDING, SPOT, "10") is Code.ACCOUNT_FROZEN
        assert await here.transfers.list(ALICE) == []
        await here.bursar.ledger.unfreeze(f"user:{ALICE}:funding")
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_beside_others_the_unit_that_starts_it_looks_at_the_target(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asks the ledger's end before; frozen in the last moment, it refuses, and nothing is written."""
    monkeypatch.setattr(Writer, "busy", True)
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "50")
        asked: list[str] = []
        ledger, core = here.transfers.rails[AccountType.FUNDING], here.transfers.rails[AccountType.SPOT]
        real, real_core = ledger.look, core.look
        ledger.look = lambda transfer: asked.append("ledger") or real(transfer)  # type: ignore[method-assign,func-returns-value]
        assert (await here.move(SPOT, FUNDING, "10")).state == "COMMITTED"
        assert asked == []
        core.look = lambda transfer: _then_freeze(here, real_core(transfer))  # type: ignore[method-assign]
        assert await here.refused(SPOT, FUNDING, "10") is Code.ACCOUNT_FROZEN
        assert asked == ["ledger"]  # to say why
        core.look = real_core  # type: ignore[method-assign]
        assert await here.refused(SPOT, FUNDING, "41") is Code.ACCOUNT_FROZEN
        await here.bursar.ledger.unfreeze(f"user:{ALICE}:funding")
        assert await here.refused(SPOT, FUNDING, "41") is Code.INSUFFICIENT_BALANCE
        assert len(await here.transfers.list(ALICE)) == 2
        assert await here.standing() == ("60.000000", 40_000_000)


@scenario
async def test_beside_others_a_missing_target_is_not_made(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Writer, "busy", True)
    async with exchange(place, tmp_path, funds="") as here:
        client = await here.core.client()
        await client.deposit(1, ALICE, "USDT", 5)
        assert await here.refused(SPOT, FUNDING, "0.000001") is Code.TARGET_ACCOUNT_NOT_FOUND
        assert await here.transfers.list(ALICE) == []


async def _then_freeze(here: Exchange, asked: Any) -> Any:
    found = await asked
    await here.bursar.ledger.freeze(f"user:{ALICE}:funding")
    return found


@pytest.mark.parametrize("way", WAYS, ids="-".join)
@scenario
async def test_rules_that_change_while_the_core_is_asked(place: Place, tmp_path: Path, way: tuple[str, str]) -> None:
    """Another process changes the rules: the unit that was decided without a read fails, and is decided again."""
    async with exchange(place, tmp_path) as here, place.bursar() as other:
        await here.move(FUNDING, SPOT, "50")
        await other.ledger.create_account("bystander")
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.deposit if way[0] == FUNDING else rail.withdraw

        async def change_first(item: FlowRecord[Any]) -> Answer:
            await other.ledger.freeze("bystander")
            return await real(item)

        setattr(rail, "deposit" if way[0] == FUNDING else "withdraw", change_first)
        view = await here.move(*way, "10")
        assert (view.state, await here.path(view)) == ("COMMITTED", STATES)
        assert await broken(here) == set()


@scenario
async def test_another_worker_finishes_what_rode_here(place: Place, tmp_path: Path) -> None:
    """What this process keeps in mind of a posting is worth nothing once another has spent it; and it notices."""
    async with exchange(place, tmp_path) as here:
        here.break_rail(AccountType.SPOT, "deposit", Outcome.TIMEOUT)
        engine = here.transfers.engine
        request = Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="10")
        view = await here.transfers.create(request, deadline_s=10)
        record = await engine.get("transfers", view.req_id)
        assert record is not None
        await here.until(view, "COMMITTED")
        late = await engine.apply_answer(record, Answer(outcome=Outcome.SUCCESS))  # the same word, long gone
        assert late is not None
        assert late.state == "COMMITTED"
        assert await here.standing() == ("90.000000", 10_000_000)
        assert await broken(here) == set()


@scenario
async def test_a_mark_in_what_is_said_disturbs_nobody(place: Place, tmp_path: Path) -> None:
    """U+001F separates texts on their way to PostgreSQL. In what comes from outside it is replaced."""
    async with exchange(place, tmp_path) as here:
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.deposit

        async def odd(_item: FlowRecord[Any]) -> Answer:
            rail.deposit = real  # type: ignore[method-assign]
            return Answer(outcome=Outcome.UNKNOWN, code="O\x1fDD", message="a\x1fb", evidence={"c": "d\x1fe"})

        rail.deposit = odd  # type: ignore[method-assign, assignment]
        both = await asyncio.gather(here.move(FUNDING, SPOT, "10"), here.move(FUNDING, SPOT, "20"))
        for view in both:
            await here.until(view, "COMMITTED")
        said = [
            transition.evidence
            for view in both
            for transition in await here.transfers.engine.store.read.records.history(view.transfer_id)
        ]
        assert any("d\\u001fe" in evidence for evidence in said)
        assert await here.standing() == ("70.000000", 30_000_000)


@pytest.mark.parametrize("inline", [True, False])
@pytest.mark.parametrize("way", WAYS, ids="-".join)
@scenario
async def test_a_request_overtaken_by_itself(place: Place, tmp_path: Path, way: tuple[str, str], inline: bool) -> None:
    """The same `client_order_id` twice for the whole balance; the second takes all of it after the first has looked
    whether it is known. The first finds nothing left, and still gets that transfer (T11, T12)."""
    async with exchange(place, tmp_path) as here:
        here.transfers.rails[AccountType.FUNDING].inline = inline
        if way[0] == SPOT:
            await here.move(FUNDING, SPOT, "100")
        faster: list[str] = []
        real = here.transfers._assets_now

        async def overtaken() -> Any:
            here.transfers._assets_now = real  # type: ignore[method-assign]
            faster.append((await here.move(*way, "100", client_order_id="all")).req_id)
            return await real()

        here.transfers._assets_now = overtaken  # type: ignore[method-assign]
        view = await here.move(*way, "100", client_order_id="all")
        assert (view.req_id, view.state, view.replayed) == (faster[0], "COMMITTED", True)
        assert await here.refused(*way, "100", client_order_id="another") is Code.INSUFFICIENT_BALANCE
