"""Internal transfers on both stores, against a real trading core on a real socket.

What is checked is money and rows: balances on both sides, what is in transit, states and history. Checks that need no
account are in tests/unit/test_transfer_checks.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import shutil
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import asyncpg
import msgspec
import pytest
from tests.builders import Place, scenario
from tests.unit.rails.desk import Desk, desk

from bursar import Bursar
from bursar.audit import audit
from bursar.engine import Answer, FlowRecord, Lift, Operators, Worker
from bursar.flows.transfers import AccountType, Code, Limits, Request, TransferRefused, Transfers, View
from bursar.flows.transfers.conservation import conservation
from bursar.flows.transfers.flow import ALARMS
from bursar.flows.transfers.rails import FundingRail
from bursar.flows.transfers.transfers import ASSETS_S
from bursar.flows.transfers.watch import watch
from bursar.model.errors import AccountNotEmpty, Conflict, InvalidName
from bursar.model.outcome import UNKNOWNS, Outcome
from bursar.model.records import Alert
from bursar.model.retry import Alarm, Retry
from bursar.ports import Ports
from bursar.rails.trading import FixedLink, Known, Status

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

ALICE = 1001
SOON = Retry(first_s=0.01, cap_s=0.05)
PATIENCE_S = 20  # shorter than a lease: nothing here should have to wait for one
FUNDING, SPOT = "FUNDING", "SPOT"


Task: TypeAlias = "asyncio.Task[None]"


class Exchange:
    """Ledger, core and transfers between them."""

    def __init__(self, bursar: Bursar, core: Desk, transfers: Transfers, worker: Worker, running: Task) -> None:
        self.bursar = bursar
        self.core = core
        self.transfers = transfers
        self._worker = worker
        self._running = running

    def request(self, source: str, target: str, amount: str, **more: Any) -> Request:
        return Request(user=ALICE, source=source, target=target, asset="USDT", amount=amount, **more)

    async def move(self, source: str, target: str, amount: str, **more: Any) -> View:
        return await self.transfers.create(self.request(source, target, amount, **more), deadline_s=10)

    async def refused(self, source: str, target: str, amount: str, **more: Any) -> Code:
        with pytest.raises(TransferRefused) as refusal:
            await self.move(source, target, amount, **more)
        return refusal.value.reason

    async def funding(self) -> str:
        return str(await self.bursar.ledger.balance(f"user:{ALICE}:funding", "USDT"))

    async def spot(self) -> int:
        client = await self.core.client()
        balance = (await client.balances(ALICE)).balances.get("USDT")
        return 0 if balance is None else balance.available

    async def standing(self) -> tuple[str, int]:
        """What the user has on each side; and nothing is in transit, and the ledger's side of the core agrees."""
        assert str(await self.bursar.ledger.balance("transit:transfers", "USDT")) == "0.000000"
        spot = await self.spot()
        booked = await self.bursar.ledger.balance("trading:spot", "USDT")
        assert booked.minor == spot
        return await self.funding(), spot

    async def path(self, view: View) -> list[str]:
        history = await self.transfers.engine.store.read.records.history(view.transfer_id)
        return [transition.target for transition in history]

    async def until(self, view: View, state: str) -> View:
        deadline = self.transfers.engine.ports.monotonic() + PATIENCE_S
        while (found := await self.transfers.get(ALICE, view.req_id)).fsm_state != state:
            if self.transfers.engine.ports.monotonic() > deadline:
                pytest.fail(f"not {state} after {PATIENCE_S} s:\n{await self.story(view)}")
            await self.transfers.engine.ports.sleep(0.01)
        return found

    async def rest(self) -> None:
        """No record is driven any more."""
        self._worker.stop()
        await self._running
        await self.transfers.engine.finish(10)

    async def story(self, view: View) -> str:
        """What happened when to a transfer, for whoever has to find out why."""
        records = self.transfers.engine.store.read.records
        told = [str(transition) for transition in await records.history(view.transfer_id)]
        record = await records.by_number(view.transfer_id)
        return "\n".join([*told, str(record), f"now {self.transfers.engine.ports.now_us()}"])

    def break_rail(self, kind: AccountType, op: str, *says: Any) -> None:
        """Let an operation of one end say something else for a while: before the effect (Outcome), or after it."""
        rail = self.transfers.rails[kind]
        if isinstance(rail, FundingRail):
            rail.inline = False  # or it would not be called at all
        real: Callable[[FlowRecord[Any]], Any] = getattr(rail, op)
        left = list(says)

        async def broken(item: FlowRecord[Any]) -> Answer:
            if not left:
                return await real(item)  # type: ignore[no-any-return]
            said = left.pop(0)
            if isinstance(said, tuple):  # the effect happens, the reply is lost
                await real(item)
                said = said[0]
            if isinstance(said, Exception):
                raise said
            return Answer(outcome=said, code="ACCOUNT_FROZEN" if said is Outcome.EXPLICIT_FAIL else "")

        setattr(rail, op, broken)


@asynccontextmanager
async def exchange(
    place: Place,
    folder: Path,
    *,
    funds: str = "100",
    limits: Limits | None = None,
    retry: Retry = SOON,
    alarms: tuple[Alarm, ...] = ALARMS,
    works: bool = True,
    ports: Ports | None = None,
) -> AsyncIterator[Exchange]:
    """A running exchange; without a worker if it does not work, so that only requests drive."""
    async with place.bursar(ports) as bursar, desk(folder) as core:
        client = await core.client()
        transfers = Transfers(
            bursar.ledger,
            {AccountType.SPOT: client},
            limits=limits or Limits(per_second=None, per_day=None),
            retry=retry,
            alarms=alarms,
        )
        await transfers.prepare()
        if funds:
            await transfers.fund(ALICE, "USDT", funds, reference="seed")
        worker = Worker(transfers.engine, scan_s=0.02)
        if not works:
            worker.stop()
        running = asyncio.create_task(worker.run())
        here = Exchange(bursar, core, transfers, worker, running)
        try:
            yield here
        finally:
            await here.rest()


# --- happy -----------------------------------------------------------------------------------------------------------


@scenario
async def test_there_and_back(place: Place, tmp_path: Path) -> None:
    """FUNDING→SPOT creates the target lazily; SPOT→FUNDING takes exactly the whole balance."""
    async with exchange(place, tmp_path) as here:
        there = await here.move(FUNDING, SPOT, "40.5")
        assert (there.state, await here.standing()) == ("COMMITTED", ("59.500000", 40_500_000))
        assert await here.path(there) == ["INIT", "SOURCE_PENDING", "SOURCE_DONE", "TARGET_PENDING", "COMMITTED"]
        back = await here.move(SPOT, FUNDING, "40.5")
        assert (back.state, await here.standing()) == ("COMMITTED", ("100.000000", 0))


@scenario
async def test_one_side_of_a_transfer_is_not_reversed(place: Place, tmp_path: Path) -> None:
    """The other side is in the core: the money would be in both places."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "40")
        await here.move(SPOT, FUNDING, "15")
        before = await here.standing()
        ledger = here.bursar.ledger
        booked = [view for view in await ledger.envelopes() if view.scope not in ("user", "deposits")]
        assert booked
        for view in booked:
            with pytest.raises(InvalidName, match="undo it there"):
                await ledger.reverse(view.envelope)
        assert await here.standing() == before


@scenario
async def test_many_at_once_lose_nothing(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        views = await asyncio.gather(*[here.move(FUNDING, SPOT, "1") for _ in range(60)])
        assert {view.state for view in views} == {"COMMITTED"}
        assert len({view.req_id for view in views}) == len({view.transfer_id for view in views}) == 60
        assert await here.standing() == ("40.000000", 60_000_000)


@scenario
async def test_a_balance_is_spent_once(place: Place, tmp_path: Path) -> None:
    """1,000 wanted twice, one wins: whoever comes second is refused, before anything is written or by the ledger."""
    async with exchange(place, tmp_path) as here:
        results = await asyncio.gather(*[here.move(FUNDING, SPOT, "100") for _ in range(2)], return_exceptions=True)
        states = [result.state if isinstance(result, View) else "refused" for result in results]
        assert states.count("COMMITTED") == 1
        assert set(states) <= {"COMMITTED", "FAILED", "refused"}
        assert await here.standing() == ("0.000000", 100_000_000)


# --- refused ---------------------------------------------------------------------------------------------------------


@scenario
async def test_what_the_accounts_refuse_writes_nothing(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        ledger = here.bursar.ledger
        assert await here.refused(FUNDING, SPOT, "100.000001") is Code.INSUFFICIENT_BALANCE
        assert await here.refused(SPOT, FUNDING, "1") is Code.SOURCE_ACCOUNT_NOT_FOUND
        await ledger.freeze(f"user:{ALICE}:funding")
        assert await here.refused(FUNDING, SPOT, "1") is Code.ACCOUNT_FROZEN
        await ledger.unfreeze(f"user:{ALICE}:funding")
        await here.move(FUNDING, SPOT, "1")
        client = await here.core.client()
        for status, code in ((Status.FROZEN, Code.ACCOUNT_FROZEN), (Status.DISABLED, Code.ACCOUNT_DISABLED)):
            await client.set_status(ALICE, status)
            assert await here.refused(SPOT, FUNDING, "1") is code
            assert await here.refused(FUNDING, SPOT, "1") is code
        assert len(await here.transfers.list(ALICE)) == 1
        assert await here.standing() == ("99.000000", 1_000_000)


@scenario
async def test_a_missing_funding_account_is_not_made_by_a_transfer(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, funds="") as here:
        assert await here.refused(FUNDING, SPOT, "1") is Code.SOURCE_ACCOUNT_NOT_FOUND
        client = await here.core.client()
        await client.deposit(1, ALICE, "USDT", 5)
        assert await here.refused(SPOT, FUNDING, "0.000001") is Code.TARGET_ACCOUNT_NOT_FOUND


@scenario
async def test_reading_is_only_for_the_owner(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        view = await here.move(FUNDING, SPOT, "1")
        assert (await here.transfers.get(ALICE, view.req_id)).amount == "1.000000"
        with pytest.raises(TransferRefused):
            await here.transfers.get(ALICE + 1, view.req_id)
        assert await here.transfers.list(ALICE + 1) == []


# --- idempotency -----------------------------------------------------------------------------------------------------


@scenario
async def test_one_client_order_id_is_one_transfer(place: Place, tmp_path: Path) -> None:
    """Sequentially, in 20 concurrent requests, with other parameters, from another user."""
    async with exchange(place, tmp_path) as here:
        views = await asyncio.gather(*[here.move(FUNDING, SPOT, "10", client_order_id="mine") for _ in range(20)])
        again = await here.move(FUNDING, SPOT, "10", client_order_id="mine")
        assert len({view.req_id for view in [*views, again]}) == 1
        assert await here.refused(FUNDING, SPOT, "11", client_order_id="mine") is Code.DUPLICATE_REQUEST
        await here.transfers.fund(ALICE + 1, "USDT", "10", reference="other")
        request = Request(
            user=ALICE + 1, source=FUNDING, target=SPOT, asset="USDT", amount="10", client_order_id="mine"
        )
        assert (await here.transfers.create(request)).req_id != again.req_id
        assert await here.funding() == "90.000000"


@pytest.mark.parametrize("order", ["", "mine"])
@scenario
async def test_a_request_whose_commit_was_not_heard_of_is_one_transfer(
    place: Place, tmp_path: Path, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record is written and the connection breaks: asked again, the database says that it is there already."""
    async with exchange(place, tmp_path) as here:
        writer = here.bursar.ledger.writer
        real = writer.apply
        lost: list[str] = []

        async def apply(change: Any) -> Any:
            done = await real(change)
            if change.moves and change.moves[0].version == 0 and not lost:
                lost.append(change.moves[0].id)
                return await real(change)  # as the writer does after a broken COMMIT
            return done

        monkeypatch.setattr(writer, "apply", apply)
        view = await here.move(FUNDING, SPOT, "10", client_order_id=order)
        assert (view.state, lost) == ("COMMITTED", [view.req_id])
        assert len(await here.transfers.list(ALICE)) == 1
        assert await here.standing() == ("90.000000", 10_000_000)


@scenario
async def test_a_valid_retry_is_never_refused_by_a_limit_or_a_balance(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path, limits=Limits(per_second=None, per_day=1)) as here:
        first = await here.move(FUNDING, SPOT, "100", client_order_id="all")
        assert (await here.move(FUNDING, SPOT, "100", client_order_id="all")).req_id == first.req_id
        await here.transfers.fund(ALICE, "USDT", "1", reference="more")
        assert await here.refused(FUNDING, SPOT, "1") is Code.DAILY_LIMIT_EXCEEDED


@scenario
async def test_limits_last_allowed_first_refused(place: Place, tmp_path: Path) -> None:
    limits = Limits(per_second=None, per_day=3, amount_per_day={"USDT": 5_000_000})
    async with exchange(place, tmp_path, limits=limits) as here:
        assert (await here.move(FUNDING, SPOT, "3")).state == "COMMITTED"
        assert await here.refused(FUNDING, SPOT, "2.000001") is Code.DAILY_AMOUNT_EXCEEDED
        results = await asyncio.gather(*[here.move(FUNDING, SPOT, "1") for _ in range(4)], return_exceptions=True)
        refused = [result.reason for result in results if isinstance(result, TransferRefused)]
        assert len(refused) == 2
        assert set(refused) <= {Code.DAILY_LIMIT_EXCEEDED, Code.DAILY_AMOUNT_EXCEEDED}
        assert await here.standing() == ("95.000000", 5_000_000)


# --- the machine -----------------------------------------------------------------------------------------------------

DIRECTIONS = [(FUNDING, SPOT), (SPOT, FUNDING)]


async def ready(here: Exchange, source: str) -> None:
    """The source has 10."""
    if source == SPOT:
        await here.move(FUNDING, SPOT, "10")


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@scenario
async def test_an_explicit_refusal_of_the_target_gives_the_money_back(
    place: Place, tmp_path: Path, source: str, target: str
) -> None:
    async with exchange(place, tmp_path) as here:
        await ready(here, source)
        before = await here.standing()
        here.break_rail(AccountType(target), "deposit", Outcome.EXPLICIT_FAIL)
        view = await here.move(source, target, "10")
        assert view.state == "ROLLED_BACK"
        assert await here.standing() == before
        assert (await here.path(view))[-3:] == ["TARGET_PENDING", "COMPENSATING", "ROLLED_BACK"]


@pytest.mark.parametrize("lost", [False, True], ids=["before the effect", "after it"])
@pytest.mark.parametrize("op", ["withdraw", "deposit", "refund"])
@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@scenario
async def test_every_unknown_stays_and_is_asked_again(
    place: Place, tmp_path: Path, source: str, target: str, op: str, lost: bool
) -> None:
    """Each unknown in turn, and an exception, with and without the effect: it happens once."""
    async with exchange(place, tmp_path) as here:
        await ready(here, source)
        before = await here.standing()
        says = [*UNKNOWNS, RuntimeError("slipped")]
        kind = AccountType(target if op == "deposit" else source)
        here.break_rail(kind, op, *[(said,) if lost else said for said in says])
        if op == "refund":
            here.break_rail(AccountType(target), "deposit", Outcome.EXPLICIT_FAIL)
        view = await here.move(source, target, "10")
        ended = await here.until(view, "ROLLED_BACK" if op == "refund" else "COMMITTED")
        after = await here.standing()
        if op == "refund":
            assert after == before
        else:
            ten = -10_000_000 if source == SPOT else 10_000_000
            assert after[1] - before[1] == ten
        state = {"withdraw": "SOURCE_PENDING", "deposit": "TARGET_PENDING", "refund": "COMPENSATING"}[op]
        assert (await here.path(ended)).count(state) == len(says) + 1, await here.story(ended)


@scenario
async def test_a_refusal_of_the_source_fails_and_is_remembered(place: Place, tmp_path: Path) -> None:
    """A late duplicate of a refused withdraw is refused too, though the money is there by then (T8)."""
    async with exchange(place, tmp_path) as here:
        transfers = here.transfers
        rail = transfers.rails[AccountType.FUNDING]
        real_look = rail.look

        async def rich(transfer: Any) -> Any:
            return msgspec.structs.replace(await real_look(transfer), available=10**12)

        rail.look = rich  # type: ignore[method-assign]
        view = await here.move(FUNDING, SPOT, "500")
        assert (view.state, view.error.split(":")[0]) == ("FAILED", "INSUFFICIENT_BALANCE")
        await transfers.fund(ALICE, "USDT", "1000", reference="late")
        record = await transfers.engine.get("transfers", view.req_id)
        assert record is not None
        late = await rail.withdraw(transfers.flow.item(record))
        assert (late.outcome, late.code) == (Outcome.EXPLICIT_FAIL, "INSUFFICIENT_BALANCE")
        assert await here.standing() == ("1100.000000", 0)


@scenario
async def test_a_frozen_target_that_comes_too_late_gives_back_to_a_frozen_source(place: Place, tmp_path: Path) -> None:
    """Refunds are always accepted, whatever has happened to the account meanwhile (T15, T35)."""
    async with exchange(place, tmp_path) as here:
        core = await here.core.client()
        rail = here.transfers.rails[AccountType.SPOT]
        real = rail.deposit

        async def freeze_first(item: FlowRecord[Any]) -> Answer:
            await core.set_status(ALICE, Status.FROZEN)
            await here.bursar.ledger.freeze(f"user:{ALICE}:funding")
            return await real(item)

        rail.deposit = freeze_first  # type: ignore[method-assign]
        view = await here.move(FUNDING, SPOT, "10")
        assert (view.state, view.error) == ("ROLLED_BACK", "")
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_an_account_with_money_in_transit_cannot_close(place: Place, tmp_path: Path) -> None:
    """Otherwise a refund would find its account closed, and bookings of outside facts are never refused (T35)."""
    async with exchange(place, tmp_path) as here:
        account = f"user:{ALICE}:funding"
        here.break_rail(AccountType.SPOT, "deposit", *[Outcome.TIMEOUT] * 3, Outcome.EXPLICIT_FAIL)
        view = await here.transfers.create(
            Request(user=ALICE, source=FUNDING, target=SPOT, asset="USDT", amount="100"), deadline_s=0
        )
        refused = 0
        while (await here.transfers.get(ALICE, view.req_id)).state == "PENDING":
            if (await here.transfers.get(ALICE, view.req_id)).fsm_state != "SOURCE_PENDING":
                with contextlib.suppress(Conflict), pytest.raises(AccountNotEmpty):
                    await here.bursar.ledger.close(account)
                refused += 1
        assert (await here.transfers.get(ALICE, view.req_id)).state == "ROLLED_BACK"
        assert refused
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_forcing_back_asks_the_rail_first(place: Place, tmp_path: Path) -> None:
    """Two people; and if the deposit has happened after all, that counts, and the money is not given back (T34)."""
    async with exchange(place, tmp_path) as here:
        people = Operators(here.transfers.engine)
        here.break_rail(AccountType.SPOT, "deposit", *[(Outcome.TIMEOUT,)] + [Outcome.TIMEOUT] * 500)
        happened = await here.move(FUNDING, SPOT, "10")
        here.break_rail(AccountType.SPOT, "deposit", *[Outcome.TIMEOUT] * 500)
        not_yet = await here.move(FUNDING, SPOT, "20")
        for view, end in ((happened, "COMMITTED"), (not_yet, "ROLLED_BACK")):
            for person in ("ann", "ann", "bob"):
                for _ in range(50):  # it is being tried meanwhile, and whoever comes too late looks again
                    try:
                        await people.force("transfers", view.req_id, "EXPLICIT_FAIL", actor=person, reason="stuck")
                        break
                    except Exception as error:
                        assert getattr(error, "code", "") == "RECORD_MOVED", error
            await here.until(view, end)
        assert await here.standing() == ("90.000000", 10_000_000)


# --- pauses --------------------------------------------------------------------------------------------------------

WHY = {"actor": "ann", "reason": "the core moves"}


async def noticed(here: Exchange) -> None:
    """As long as a pause may take to be noticed."""
    await here.transfers.engine.pauses.read()
    await asyncio.sleep(ASSETS_S)


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@pytest.mark.parametrize("paused", ["spot", "funding"])
@scenario
async def test_a_paused_rail_stops_what_would_call_it(
    place: Place, tmp_path: Path, source: str, target: str, paused: str
) -> None:
    """Either end, either direction: what is under way waits where it would call that rail, and calls the other."""
    async with exchange(place, tmp_path) as here:
        await ready(here, source)
        before = await here.standing()
        people = Operators(here.transfers.engine)
        held = asyncio.Event()
        reached: list[str] = []
        hold_after(here, AccountType(source), "withdraw", held, reached)
        going = asyncio.create_task(here.move(source, target, "10"))
        async with asyncio.timeout(20):
            while not reached:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await people.pause("rail", paused, **WHY)
        await noticed(here)
        held.set()  # the call that is being made is not taken back: its answer counts
        if paused == source.lower():
            assert (await going).state == "COMMITTED"
            return
        view = await going
        assert (view.fsm_state, view.error) == ("TARGET_PENDING", "")
        assert await broken(here) == set()
        assert await here.refused(source, target, "1") is Code.TRANSFERS_PAUSED
        assert await people.resume("rail", paused, **WHY) is Lift.LIFTED
        await noticed(here)
        await here.until(view, "COMMITTED")
        ten = -10_000_000 if source == SPOT else 10_000_000
        assert (await here.standing())[1] - before[1] == ten


@pytest.mark.parametrize(("source", "target"), DIRECTIONS)
@scenario
async def test_a_paused_rail_still_takes_refunds(place: Place, tmp_path: Path, source: str, target: str) -> None:
    async with exchange(place, tmp_path) as here:
        await ready(here, source)
        before = await here.standing()
        held = asyncio.Event()
        reached: list[str] = []
        here.break_rail(AccountType(target), "deposit", Outcome.EXPLICIT_FAIL)
        hold_after(here, AccountType(target), "deposit", held, reached)
        going = asyncio.create_task(here.move(source, target, "10"))
        async with asyncio.timeout(20):
            while not reached:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await Operators(here.transfers.engine).pause("rail", source.lower(), **WHY)
        await noticed(here)
        held.set()
        assert (await going).state == "ROLLED_BACK"
        assert await here.standing() == before


@scenario
async def test_rails_are_known_by_name(place: Place, tmp_path: Path) -> None:
    """`future` is not switched on here: pausing it would pause nothing, and nobody would notice."""
    async with exchange(place, tmp_path) as here:
        people = Operators(here.transfers.engine)
        for name in ("future", "SPOT", "sport", "transfers", ""):
            with pytest.raises(InvalidName, match="rails: funding, spot"):
                await people.pause("rail", name, **WHY)
        assert await here.bursar.store.read.pauses.list() == []


# --- watch ---------------------------------------------------------------------------------------------------------


async def alerted(here: Exchange, view: View) -> dict[str, Alert]:
    """Open alerts of a transfer, by reason."""
    return {a.reason: a for a in await here.bursar.store.read.alerts.open() if a.record == view.transfer_id}


async def until_alerted(here: Exchange, view: View, reason: str) -> Alert:
    async with asyncio.timeout(20):
        while reason not in (found := await alerted(here, view)):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return found[reason]


@scenario
async def test_target_pending_over_a_minute(place: Place, tmp_path: Path) -> None:
    """Watch: it is told when it is that old, not when its back-off is over; once, and not of other states.

    A minute is told here as 0.4 s; the source may be pending as long.
    """
    [minute] = [alarm for alarm in ALARMS if alarm.state == "TARGET_PENDING"]
    assert (minute.seconds, minute.severity) == (60, "warning")
    alarms = (dataclasses.replace(minute, seconds=0.4),)
    async with exchange(place, tmp_path, retry=Retry(first_s=0.1, factor=1000, cap_s=500), alarms=alarms) as here:
        here.break_rail(AccountType.SPOT, "deposit", *[Outcome.TIMEOUT] * 1_000)
        view = await here.move(FUNDING, SPOT, "1")
        alert = await until_alerted(here, view, "target pending")
        record = await here.transfers.engine.get("transfers", view.req_id)
        assert record is not None
        assert (record.state, record.attempt) == ("TARGET_PENDING", 3)
        assert 0.4e6 <= alert.raised_us - record.since_us < 10e6
        here.break_rail(AccountType.FUNDING, "withdraw", Outcome.TIMEOUT, Outcome.TIMEOUT)
        source = await here.move(FUNDING, SPOT, "1")
        assert await alerted(here, source) == {}


@scenario
async def test_three_failed_refunds_are_critical_and_told_once(place: Place, tmp_path: Path) -> None:
    """Watch, T21: two are not told, three are; it stays COMPENSATING and goes on, with one alert however often."""
    async with exchange(place, tmp_path) as here:
        for refusals, reasons in ((2, []), (3, ["critical"]), (9, ["critical"])):
            here.break_rail(AccountType.SPOT, "deposit", Outcome.EXPLICIT_FAIL)
            here.break_rail(AccountType.FUNDING, "refund", *[Outcome.EXPLICIT_FAIL] * refusals)
            view = await here.until(await here.move(FUNDING, SPOT, "1"), "ROLLED_BACK")
            assert [alert.severity for alert in (await alerted(here, view)).values()] == reasons
            assert (await here.path(view)).count("COMPENSATING") == refusals + 1
        assert await here.standing() == ("100.000000", 0)


# --- audit -----------------------------------------------------------------------------------------------------------


async def broken(here: Exchange) -> set[str]:
    return {finding.invariant for finding in await audit(here.bursar.store) if not finding.ok}


async def behind(place: Place, sql: str) -> None:
    """Change a row behind everybody's back."""
    if place.engine == "sqlite":
        with contextlib.closing(sqlite3.connect(place.path, isolation_level=None)) as file:
            file.execute("PRAGMA busy_timeout = 5000")
            for name in ("outcomes_no_update", "outcomes_no_delete"):
                file.execute(f"DROP TRIGGER IF EXISTS {name}")
            file.execute(sql.format(s=""))
        return
    connection = await asyncpg.connect(place.url)
    try:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(sql.format(s="bursar."))
    finally:
        await connection.close()


@scenario
async def test_money_in_flight_is_somebodys_at_every_moment(place: Place, tmp_path: Path) -> None:
    """I4 holds while calls hang on either side of the ledger's own units (T20), and at the end."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "10")
        held = asyncio.Event()
        reached: list[str] = []
        for kind in AccountType.FUNDING, AccountType.SPOT:
            for op in "withdraw", "deposit":
                hold_after(here, kind, op, held, reached)
        going = [asyncio.create_task(here.move(*way, "5")) for way in DIRECTIONS]
        async with asyncio.timeout(20):
            while len(reached) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert await broken(here) == set()
        held.set()
        assert {view.state for view in await asyncio.gather(*going)} == {"COMMITTED"}
        assert await broken(here) == set()


@scenario
async def test_core_and_ledger_agree_while_both_work(place: Place, tmp_path: Path) -> None:
    """I5 at any moment under load, in both directions and with money coming back; and not after a deposit by hand."""
    async with exchange(place, tmp_path, funds="1000") as here:
        client = await here.core.client()
        for _ in range(20):
            await here.move(FUNDING, SPOT, "10")
        here.break_rail(AccountType.FUNDING, "deposit", *[Outcome.EXPLICIT_FAIL, (Outcome.TIMEOUT,)] * 5)
        here.break_rail(AccountType.SPOT, "deposit", *[(Outcome.TIMEOUT,), Outcome.EXPLICIT_FAIL] * 5)
        going = [asyncio.create_task(here.move(*DIRECTIONS[n % 2], "1")) for n in range(60)]
        looks = 0
        while not all(task.done() for task in going):
            finding = await conservation(here.transfers, AccountType.SPOT, client)
            assert (finding.broken, finding.judged) == ([], True)
            looks += 1
        await asyncio.gather(*going)
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        assert (finding.ok, finding.judged, looks > 0) == (True, True, True)
        await client.deposit(1, ALICE, "USDT", 1)
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        assert not finding.ok
        assert "USDT" in finding.broken[0]


@pytest.mark.parametrize("gap", ["between the two lists", "visible late"])
@scenario
async def test_a_transfer_that_slips_between_two_looks_is_no_loss(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: str
) -> None:
    """Started while open transfers are listed, or visible after one with a higher number; it ends after the core's
    total was taken and before the ledger is looked at."""
    async with exchange(place, tmp_path) as here:
        client = await here.core.client()
        records = here.bursar.store.read.records
        real_list, real_totals = records.list, client.totals
        reached: list[str] = []
        on = asyncio.Event()
        going: list[asyncio.Task[View]] = []

        async def newest(flow: str, **more: Any) -> Any:
            if gap == "visible late":
                found = await real_list(flow, **more)
                return [msgspec.structs.replace(found[0], number=found[0].number + 1_000)]
            if not going:
                hold_after(here, AccountType.FUNDING, "withdraw", on, reached)
                going.append(asyncio.create_task(here.move(FUNDING, SPOT, "1")))
                while not reached:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            return await real_list(flow, **more)

        async def totals() -> Any:
            found = await real_totals()
            on.set()
            if not going:
                going.append(asyncio.create_task(here.move(FUNDING, SPOT, "1")))
            assert (await going[0]).state == "COMMITTED"
            monkeypatch.setattr(records, "list", real_list)
            return found

        await here.move(FUNDING, SPOT, "10")
        monkeypatch.setattr(records, "list", newest)
        monkeypatch.setattr(client, "totals", totals)
        finding = await conservation(here.transfers, AccountType.SPOT, client)
        assert (finding.broken, finding.judged, len(going)) == ([], True, 1)


@scenario
async def test_broken_conservation_stops_new_transfers_and_not_refunds(place: Place, tmp_path: Path) -> None:
    """Conservation broken behind our back: critical, new transfers stop, refunds go on; one alert, not one per look."""
    async with exchange(place, tmp_path) as here:
        client = await here.core.client()
        cores = {AccountType.SPOT: client}
        here.break_rail(AccountType.SPOT, "deposit", *[Outcome.TIMEOUT] * 20, Outcome.EXPLICIT_FAIL)
        under_way = await here.move(FUNDING, SPOT, "10", client_order_id="before")
        assert all(finding.ok for finding in await watch(here.transfers, cores))
        await client.deposit(1, ALICE + 1, "USDT", 1)
        for _ in range(2):
            assert [f.invariant for f in await watch(here.transfers, cores) if not f.ok] == ["I5"]
        alerts = await here.bursar.store.read.alerts.open()
        assert [(alert.reason, alert.severity) for alert in alerts if alert.record == 0] == [
            ("I5 is broken", "critical")
        ]
        await asyncio.sleep(ASSETS_S)  # as long as it may take to be noticed
        assert await here.refused(FUNDING, SPOT, "1") is Code.TRANSFERS_PAUSED
        assert (await here.move(FUNDING, SPOT, "10", client_order_id="before")).req_id == under_way.req_id
        await here.until(under_way, "ROLLED_BACK")
        assert await here.standing() == ("100.000000", 0)


@scenario
async def test_a_core_on_an_old_disk_that_has_gone_on_is_noticed_by_what_it_holds(place: Place, tmp_path: Path) -> None:
    """T33: its sequence is past what was heard, so that the handshake says nothing; I5 does, and new transfers stop."""
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "10")
    old = tmp_path / "old"
    shutil.copytree(tmp_path / "data", old / "data")
    async with exchange(place, tmp_path, funds="") as here:
        await here.move(FUNDING, SPOT, "20")
        client = await here.core.client()
        heard = (await client.totals()).sequence
    async with exchange(place, old, funds="") as here:
        others = await here.core.client()
        while (await others.totals()).sequence < heard:
            sequence = (await others.totals()).sequence
            await others.deposit(10**6 + sequence, ALICE + 1, "USDT", 1)
            await others.withdraw(10**6 + sequence, ALICE + 1, "USDT", 1)
        client = await here.core.client(link=FixedLink(Known(seen=heard)))
        assert (await client.totals()).outcome is Outcome.SUCCESS
        findings = await watch(here.transfers, {AccountType.SPOT: client})
        assert [finding.invariant for finding in findings if not finding.ok] == ["I5"]
        await asyncio.sleep(ASSETS_S)  # as long as it may take to be noticed
        assert await here.refused(FUNDING, SPOT, "1") is Code.TRANSFERS_PAUSED


def hold_after(here: Exchange, kind: AccountType, op: str, until: asyncio.Event, reached: list[str]) -> None:
    """The effect has happened, and the answer does not come yet."""
    rail = here.transfers.rails[kind]
    if isinstance(rail, FundingRail):
        rail.inline = False
    real: Callable[[FlowRecord[Any]], Any] = getattr(rail, op)

    async def slow(item: FlowRecord[Any]) -> Answer:
        answer: Answer = await real(item)
        reached.append(op)
        await until.wait()
        return answer

    setattr(rail, op, slow)


@pytest.mark.parametrize(
    ("sql", "invariant"),
    [
        ("UPDATE {s}records SET transit = transit + 65536 WHERE state = 'TARGET_PENDING'", "I4"),
        ("UPDATE {s}records SET state = 'COMMITTED', due = NULL WHERE state = 'TARGET_PENDING'", "I4"),
        ("UPDATE {s}outcomes SET outcome = 'EXPLICIT_FAIL' WHERE op = 'withdraw'", "I7"),
        ("DELETE FROM {s}outcomes WHERE op = 'withdraw' AND id = (SELECT max(id) FROM {s}outcomes)", "I7"),
    ],
)
@scenario
async def test_audit_sees_what_was_changed_behind_our_back(
    place: Place, tmp_path: Path, sql: str, invariant: str
) -> None:
    async with exchange(place, tmp_path) as here:
        await here.move(FUNDING, SPOT, "1")
        here.break_rail(AccountType.SPOT, "deposit", *[Outcome.TIMEOUT] * 10_000)
        sent = await here.transfers.create(here.request(FUNDING, SPOT, "1"), deadline_s=0)
        await here.until(sent, "TARGET_PENDING")
        assert await broken(here) == set()
        await here.rest()  # or the worker, which calls again and again, would write over what is changed
        await behind(place, sql)
        assert invariant in await broken(here)
