"""T34: a core that did something other than what was decided. People are told, and the books show it in suspense.

Each contradiction on a real core: what it holds is what the ledger says (I5), nothing is in transit that is nobody's
(I4), every effect has its answer (I7), and `suspense:transfers` says how much is disputed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, Exchange, broken, exchange, ready

from bursar.engine import Answer, FlowRecord, Operators, Worker
from bursar.engine.late import record_answer
from bursar.flows.transfers import AccountType, Request, Transfers, View
from bursar.flows.transfers.conservation import conservation
from bursar.model.errors import InvalidState
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.model.retry import Retry
from bursar.rails.trading import Status

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

TEN = 10_000_000


class Held:
    """A call at the core that hangs until it is let go, before its effect or after it."""

    def __init__(self, here: Exchange, op: str, *, after: bool) -> None:
        self.reached, self.go = asyncio.Event(), asyncio.Event()
        self.answered: list[tuple[FlowRecord[Any], Answer]] = []
        rail = here.transfers.rails[AccountType.SPOT]
        real: Callable[[FlowRecord[Any]], Any] = getattr(rail, op)

        async def hold(item: FlowRecord[Any]) -> Answer:
            answer: Answer | None = await real(item) if after else None
            self.reached.set()
            await self.go.wait()
            said: Answer = await real(item) if answer is None else answer
            self.answered.append((item, said))
            return said

        setattr(rail, op, hold)


async def decided(here: Exchange, view: View, event: str, end: str) -> None:
    """Two people say how it ended, in another process, which goes on with it while the call hangs here."""
    cores = {AccountType.SPOT: await here.core.client()}
    retry, inline = Retry(first_s=0.01, cap_s=0.05), here.transfers.rails[AccountType.FUNDING].inline
    other = Transfers(here.bursar.ledger, cores, worker="other", retry=retry, inline=inline)
    rails = other.rails
    rails[AccountType.SPOT].cancel = lie  # type: ignore[method-assign, assignment]
    rails[AccountType.FUNDING].refund = here.transfers.rails[AccountType.FUNDING].refund  # type: ignore[method-assign]
    people = Operators(other.engine)
    for person in ("ann", "bob"):
        await people.force("transfers", view.req_id, event, actor=person, reason="ticket 17")
    worker = Worker(other.engine, scan_s=0.01)
    running = asyncio.create_task(worker.run())
    await here.until(view, end)
    worker.stop()
    await running
    await other.engine.finish(10)


async def started(here: Exchange, source: str, target: str, held: Held) -> tuple[View, asyncio.Task[View]]:
    going = asyncio.create_task(here.move(source, target, "10"))
    async with asyncio.timeout(20):
        await held.reached.wait()
        [view] = await here.transfers.list(ALICE, limit=1)
    return view, going


async def record_of(here: Exchange, view: View) -> Record:
    found = await here.transfers.engine.get("transfers", view.req_id)
    assert found is not None
    return found


async def suspense(here: Exchange) -> int:
    return (await here.bursar.ledger.balance("suspense:transfers", "USDT")).minor


async def check(here: Exchange) -> None:
    """I1 to I4, I7, I8 by audit, and I5 by asking the core."""
    assert await broken(here) == set()
    finding = await conservation(here.transfers, AccountType.SPOT, await here.core.client())
    assert (finding.broken, finding.judged) == ([], True)


async def contradictions(here: Exchange, view: View) -> list[str]:
    history = await here.transfers.engine.store.read.records.history(view.transfer_id)
    return [transition.event for transition in history if transition.event.startswith("LATE")]


async def alerts(here: Exchange) -> list[tuple[str, str]]:
    return [(alert.severity, alert.reason) for alert in await here.bursar.store.read.alerts.open()]


async def lie(_item: FlowRecord[Any], _op: str) -> Answer:
    """A core that promises that it never happened, and has forgotten: what T34's promise guards against."""
    return Answer(outcome=Outcome.EXPLICIT_FAIL, code="CANCELLED")


@scenario
async def test_forced_back_and_the_core_has_it_after_all(place: Place, tmp_path: Path) -> None:
    """FUNDING → SPOT: the user has it in both places; suspense is below zero by as much."""
    async with exchange(place, tmp_path, works=False) as here:
        held = Held(here, "deposit", after=True)
        view, going = await started(here, FUNDING, SPOT, held)
        await decided(here, view, "EXPLICIT_FAIL", "ROLLED_BACK")
        held.go.set()
        assert (await going).fsm_state == "ROLLED_BACK"
        assert await contradictions(here, view) == ["LATE SUCCESS"]
        assert ("critical", "contradiction") in await alerts(here)
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("100.000000", TEN, -TEN)
        await check(here)


@scenario
async def test_while_it_is_still_being_given_back(place: Place, tmp_path: Path) -> None:
    """The same, heard while COMPENSATING: what is in transit stays the transfer's own, and I5 counts it once."""
    async with exchange(place, tmp_path, works=False) as here:
        here.break_rail(AccountType.FUNDING, "refund", *[Outcome.TIMEOUT] * 100_000)
        held = Held(here, "deposit", after=True)
        view, going = await started(here, FUNDING, SPOT, held)
        await decided(here, view, "EXPLICIT_FAIL", "COMPENSATING")
        held.go.set()
        async with asyncio.timeout(20):
            while not await contradictions(here, view):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await going
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("90.000000", TEN, -TEN)
        assert str(await here.bursar.ledger.balance("transit:transfers", "USDT")) == "10.000000"
        await check(here)


@scenario
async def test_forced_on_and_the_core_has_refused(place: Place, tmp_path: Path) -> None:
    """FUNDING → SPOT: people's word for a deposit that the core then refuses; we owe it to the user."""
    async with exchange(place, tmp_path, works=False) as here:
        held = Held(here, "deposit", after=False)
        view, going = await started(here, FUNDING, SPOT, held)
        await decided(here, view, "SUCCESS", "COMMITTED")
        client = await here.core.client()
        await client.set_status(ALICE, Status.FROZEN)
        held.go.set()
        await going
        assert await contradictions(here, view) == ["LATE EXPLICIT_FAIL"]
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("90.000000", 0, TEN)
        await check(here)


@scenario
async def test_given_up_and_the_core_has_taken_it_after_all(place: Place, tmp_path: Path) -> None:
    """SPOT → FUNDING: withdrawn from the core by a transfer that has failed; we owe it to the user."""
    async with exchange(place, tmp_path, works=False) as here:
        await ready(here, SPOT)
        held = Held(here, "withdraw", after=True)
        view, going = await started(here, SPOT, FUNDING, held)
        await decided(here, view, "EXPLICIT_FAIL", "FAILED")
        held.go.set()
        await going
        assert await contradictions(here, view) == ["LATE SUCCESS"]
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("90.000000", 0, TEN)
        await check(here)


@scenario
async def test_taken_at_peoples_word_and_the_core_has_refused(place: Place, tmp_path: Path) -> None:
    """SPOT → FUNDING: credited on people's word, and still at the core; the user has it twice."""
    async with exchange(place, tmp_path, works=False) as here:
        await ready(here, SPOT)
        held = Held(here, "withdraw", after=False)
        view, going = await started(here, SPOT, FUNDING, held)
        await decided(here, view, "SUCCESS", "COMMITTED")
        await (await here.core.client()).set_status(ALICE, Status.FROZEN)
        held.go.set()
        await going
        assert await contradictions(here, view) == ["LATE EXPLICIT_FAIL"]
        assert (await here.funding(), await here.spot(), await suspense(here)) == ("100.000000", TEN, -TEN)
        await check(here)


@scenario
async def test_a_contradiction_is_booked_once_and_booked_back_if_it_is_taken_back(place: Place, tmp_path: Path) -> None:
    """Heard again, by many at once: nothing. Said to be otherwise after all: the books follow, suspense is empty."""
    async with exchange(place, tmp_path, works=False) as here:
        held = Held(here, "deposit", after=True)
        view, going = await started(here, FUNDING, SPOT, held)
        await decided(here, view, "EXPLICIT_FAIL", "ROLLED_BACK")
        held.go.set()
        await going
        called, yes = held.answered[0]
        yes = msgspec.structs.replace(yes, evidence={"long": "x" * 100_000})  # cut where it is stored
        no = Answer(outcome=Outcome.EXPLICIT_FAIL, code="NOT_FOUND")
        engine = here.transfers.engine
        await asyncio.gather(*[record_answer(engine, called, yes) for _ in range(8)])
        assert (await contradictions(here, view), await suspense(here)) == (["LATE SUCCESS"], -TEN)
        await check(here)
        await asyncio.gather(*[record_answer(engine, called, no) for _ in range(8)])
        assert (await contradictions(here, view), await suspense(here)) == (["LATE SUCCESS", "LATE EXPLICIT_FAIL"], 0)
        await asyncio.gather(*[record_answer(engine, called, yes) for _ in range(8)])
        assert (len(await contradictions(here, view)), await suspense(here)) == (3, -TEN)
        await asyncio.gather(*[record_answer(engine, called, no) for _ in range(8)])
        assert (len(await contradictions(here, view)), await suspense(here)) == (4, 0)
        body = msgspec.json.decode((await record_of(here, view)).body)
        assert "disputed" not in body


@scenario
async def test_a_refund_that_another_call_saw_refused_is_no_contradiction(place: Place, tmp_path: Path) -> None:
    """A refund's refusal is never its last word (T31): one that comes after its success says nothing."""
    async with exchange(place, tmp_path) as here:
        await ready(here, SPOT)
        before = await here.standing()
        here.break_rail(AccountType.FUNDING, "deposit", Outcome.EXPLICIT_FAIL)
        here.break_rail(AccountType.SPOT, "refund", Outcome.EXPLICIT_FAIL)
        view = await here.until(await here.move(SPOT, FUNDING, "10"), "ROLLED_BACK")
        ended = await record_of(here, view)
        [called] = [
            msgspec.structs.replace(ended, state="COMPENSATING", version=transition.version)
            for transition in await here.transfers.engine.store.read.records.history(view.transfer_id)
            if (transition.source, transition.target) == ("TARGET_PENDING", "COMPENSATING")
        ]
        no = Answer(outcome=Outcome.EXPLICIT_FAIL, code="TEST")
        await record_answer(here.transfers.engine, here.transfers.flow.item(called), no)
        assert await contradictions(here, view) == []
        assert ("critical", "contradiction") not in await alerts(here)
        assert (await here.standing(), await suspense(here)) == (before, 0)
        await check(here)


@pytest.mark.parametrize(("source", "target", "op"), [(FUNDING, SPOT, "withdraw"), (SPOT, FUNDING, "deposit")])
@scenario
async def test_nobodys_word_is_taken_for_the_ledgers_own_end(
    place: Place, tmp_path: Path, source: str, target: str, op: str
) -> None:
    """It can always be asked. To force it back is possible: the ledger itself then promises that it never happens."""
    async with exchange(place, tmp_path) as here:
        await ready(here, source)
        before = await here.standing()
        here.break_rail(AccountType.FUNDING, op, *[Outcome.TIMEOUT] * 100_000)
        view = await here.transfers.create(request(source, target), deadline_s=0.2)
        people = Operators(here.transfers.engine)
        with pytest.raises(InvalidState, match="can always be asked"):
            await people.force("transfers", view.req_id, "SUCCESS", actor="ann", reason="I saw it")
        for person in ("ann", "bob"):
            for _ in range(50):
                try:
                    await people.force("transfers", view.req_id, "EXPLICIT_FAIL", actor=person, reason="stuck")
                    break
                except Exception as error:
                    assert getattr(error, "code", "") == "RECORD_MOVED", error
        await here.until(view, "FAILED" if op == "withdraw" else "ROLLED_BACK")
        assert (await here.standing(), await suspense(here)) == (before, 0)
        await check(here)


def request(source: str, target: str) -> Request:
    return Request(user=ALICE, source=source, target=target, asset="USDT", amount="10")
