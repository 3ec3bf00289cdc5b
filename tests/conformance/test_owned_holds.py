"""Holds that a record owns (W34): made in the unit that starts it, settled by its own moves, and by nobody else.

The toy pays withdrawals out: it sets the money aside when it starts, asks somebody about large ones, sends, and then
pays the outside and a fee from the hold, or gives it back. One kind is sent in two parts.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from tests.builders import BANK, Crash, Place, balance, check_sound, outcome, scenario, seed

from bursar.audit import audit
from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord, Operators, holds
from bursar.engine.holds import Held
from bursar.ledger import Ledger
from bursar.model.accounts import HELD
from bursar.model.entries import HoldChange, HoldState, Intent, Leg
from bursar.model.errors import (
    AccountNotEmpty,
    Conflict,
    HoldOwned,
    InsufficientFunds,
    InvalidEntry,
    InvalidName,
    RecordMoved,
)
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.money import AssetStatus
from bursar.model.outcome import Outcome
from bursar.model.records import Record, owner_name
from bursar.model.retry import Retry
from bursar.writer import Change, Move, NewTransition, Operation

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

MILLION = 1_000_000
FEE = 250_000
PATIENCE_S = 30.0
WHO: dict[str, Any] = {"actor": "ann", "reason": "looks fine"}

MACHINE = Machine(
    name="payments out",
    initial="NEW",
    events=("GO", "ASK", "APPROVE", "REJECT", "HALF"),
    states=(
        State("NEW", Kind.AUTOMATIC, in_flight=True),
        State("ASKING", Kind.WAIT, awaits="approver", in_flight=True),
        State("SENDING", Kind.CALL, action="send", in_flight=True),
        State("SENDING_REST", Kind.CALL, action="send rest", in_flight=True),
        State("PAID", Kind.TERMINAL),
        State("GIVEN_BACK", Kind.TERMINAL, compensating=True),
    ),
    arrows=(
        Arrow("NEW", "GO", "SENDING"),
        Arrow("NEW", "ASK", "ASKING"),
        Arrow("ASKING", "APPROVE", "SENDING"),
        Arrow("ASKING", "REJECT", "GIVEN_BACK"),
        Arrow("SENDING", Outcome.SUCCESS, "PAID"),
        Arrow("SENDING", "HALF", "SENDING_REST", outcome=Outcome.SUCCESS),
        Arrow("SENDING", Outcome.EXPLICIT_FAIL, "GIVEN_BACK"),
        Arrow("SENDING_REST", Outcome.SUCCESS, "PAID"),
        Arrow("SENDING_REST", Outcome.EXPLICIT_FAIL, "GIVEN_BACK"),
    ),
)


class Payment(msgspec.Struct):
    minor: int
    ask: bool = False
    hold: int = 0  # its number, once a part was paid
    left: int = 0  # and what is left of it


def held(item: FlowRecord[Payment]) -> Held:
    body = item.body
    return Held(account="alice", asset="USDT", amount=body.minor, remaining=body.left or None, number=body.hold)


def book(item: FlowRecord[Payment], event: str, answer: Answer) -> Booking:
    if event in ("REJECT", Outcome.EXPLICIT_FAIL):
        return holds.void(item, held(item))
    if event == "HALF":
        return holds.confirm(item, held(item), (BANK, item.body.minor // 2), op="half")
    if answer.outcome is Outcome.SUCCESS and event == Outcome.SUCCESS:
        left = item.body.left or item.body.minor
        return holds.confirm(item, held(item), (BANK, left - FEE), ("fees", FEE))
    return Booking()


def after(item: FlowRecord[Payment], event: str, _answer: Answer) -> Payment | None:
    body = item.body
    if event != "HALF":
        return None
    return msgspec.structs.replace(body, hold=holds.number_of(item), left=body.minor - body.minor // 2)


class Outside:
    """Who is asked to send: what it says per payment, and what it did."""

    def __init__(self, **says: str) -> None:
        self.says = says
        self.sent: Counter[tuple[str, str]] = Counter()

    def action(self, name: str) -> Any:
        async def call(item: FlowRecord[Payment]) -> Answer:
            said = self.says.get(item.id.split("-")[0], "SUCCESS")
            if said == "EXPLICIT_FAIL":
                return Answer(outcome=Outcome.EXPLICIT_FAIL, code="NO")
            self.sent[item.id, name] = 1  # idempotent
            event = "HALF" if said == "HALF" and name == "send" else ""
            return Answer(outcome=Outcome.SUCCESS, event=event)

        return call

    def flow(self) -> Flow[Payment]:
        return Flow(
            machine=MACHINE,
            body=Payment,
            actions={name: self.action(name) for name in ("send", "send rest")},
            book_start=lambda item: holds.authorize(item, held(item)),
            book=book,
            next_body=after,
            choose=lambda item: "ASK" if item.body.ask else "GO",
            retry=Retry(first_s=0.01, cap_s=0.02),
        )


class Program:
    """One process that pays out."""

    def __init__(self, ledger: Ledger, outside: Outside) -> None:
        self.ledger = ledger
        self.engine = Engine(ledger.store, ledger.writer, [outside.flow()])
        self.people = Operators(self.engine)

    async def start(self, id: str = "w-1", minor: int = 4 * MILLION, **more: Any) -> Record:
        return (await self.engine.start("payments out", Payment(minor, **more), id=id)).record

    async def now(self, record: Record) -> Record:
        return await self.engine.process_now(record, PATIENCE_S)

    async def balances(self) -> list[str]:
        """alice, what is held, the outside and the fees."""
        return [await balance(self.ledger, path) for path in ("alice", HELD, BANK, "fees")]

    async def hold_of(self, record: Record) -> int:
        (found,) = [hold.id for hold in await self.ledger.holds("alice") if hold.owner.endswith(record.id)]
        return found


@contextlib.asynccontextmanager
async def program(place: Place, outside: Outside | None = None) -> AsyncIterator[Program]:
    async with place.bursar() as bursar:
        p = Program(bursar.ledger, outside or Outside())
        try:
            yield p
        finally:
            await p.engine.finish(0)
            await check_sound(bursar.ledger)
            await check_audit(bursar.ledger)


async def check_audit(ledger: Ledger) -> None:
    findings = await audit(ledger.store)
    assert [line for finding in findings for line in finding.broken] == []


# --- the record's own moves ------------------------------------------------------------------------------------------


@scenario
async def test_a_record_starts_with_its_hold_and_pays_from_it(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.start(ask=True)
        (hold,) = await p.ledger.holds("alice")
        assert (str(hold.amount), hold.owner, hold.expires) == ("4.000000", "payments out/w-1", None)
        assert await p.balances() == ["6.000000", "4.000000", "-10.000000", "0.000000"]

        await p.people.signal("payments out", "w-1", "APPROVE", **WHO)
        record = await p.now(await _at(p, record))

        assert (record.state, record.in_flight_posting) == ("PAID", 0)
        assert (await p.ledger.hold(hold.id)).state is HoldState.CONFIRMED
        assert await p.balances() == ["6.000000", "0.000000", "-6.250000", "0.250000"]


@scenario
async def test_what_has_happened_outside_is_booked_whatever_is_frozen_or_suspended_by_then(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.start()
        for path in ("alice", "fees"):
            await p.ledger.freeze(path)
        await p.ledger.change_asset("USDT", status=AssetStatus.SUSPENDED)

        assert (await p.now(record)).state == "PAID"

        assert await p.balances() == ["6.000000", "0.000000", "-6.250000", "0.250000"]


@scenario
async def test_a_record_gives_its_hold_back(place: Place) -> None:
    async with program(place, Outside(bad="EXPLICIT_FAIL")) as p:
        await seed(p.ledger, "alice", "10")
        first = await p.now(await p.start("bad-1"))
        second = await p.start("w-2", ask=True)
        second = await p.people.signal("payments out", "w-2", "REJECT", **WHO)

        assert (first.state, second.state) == ("GIVEN_BACK", "GIVEN_BACK")
        assert await p.balances() == ["10.000000", "0.000000", "-10.000000", "0.000000"]
        assert await p.ledger.holds("alice") == []


@scenario
async def test_a_hold_is_paid_in_parts(place: Place) -> None:
    """After the first part another posting is held, and it is still the same hold."""
    async with program(place, Outside(half="HALF")) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.start("half-1")
        hold = await p.hold_of(record)

        assert (await p.now(record)).state == "PAID"

        assert (await p.ledger.hold(hold)).state is HoldState.CONFIRMED
        assert await p.balances() == ["6.000000", "0.000000", "-6.250000", "0.250000"]


@scenario
async def test_a_record_whose_hold_is_refused_is_not_started(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "1")
        with pytest.raises(InsufficientFunds):
            await p.start()
        assert await p.engine.get("payments out", "w-1") is None
        await seed(p.ledger, "alice", "9")
        assert (await p.now(await p.start())).state == "PAID"


@scenario
async def test_a_repeated_start_holds_once(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        request = Operation(scope="payments:alice", id="mine", op="create", fingerprint="4")
        starts = [p.engine.start("payments out", Payment(4 * MILLION), operation=request) for _ in range(3)]
        started = await asyncio.gather(*starts)
        assert len({found.record.id for found in started}) == 1
        assert await p.balances() == ["6.000000", "4.000000", "-10.000000", "0.000000"]
        with pytest.raises(RecordMoved):
            await p.start("w-1")
            await p.start("w-1")
        await p.now(started[0].record)


@scenario
async def test_a_freeze_does_not_stop_what_has_happened_outside(place: Place) -> None:
    """T35."""
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.start()
        await p.ledger.freeze("alice")
        assert (await p.now(record)).state == "PAID"
        assert (await p.balances())[:2] == ["6.000000", "0.000000"]


# --- everybody else ---------------------------------------------------------------------------------------------------


@scenario
async def test_nobody_else_settles_the_hold_of_a_record(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.start(ask=True)
        hold = await p.hold_of(record)
        before = await p.balances()

        for attack in (
            p.ledger.void(hold),
            p.ledger.confirm(hold, "bob"),
            p.ledger.confirm(hold, "bob", "1", key="mine"),
        ):
            refusal = await outcome(attack)
            assert isinstance(refusal, HoldOwned)
            assert refusal.facts == {"hold": hold, "owner": "payments out/w-1"}
        assert await p.ledger.expire_holds() == []
        assert isinstance(await outcome(p.ledger.reverse(hold)), InvalidName)
        assert isinstance(await outcome(p.ledger.close("alice")), AccountNotEmpty)

        assert await p.balances() == before
        assert (await p.ledger.hold(hold)).state is HoldState.OPEN
        await p.people.signal("payments out", "w-1", "REJECT", **WHO)
        for late in (p.ledger.void(hold), p.ledger.confirm(hold, "bob")):  # closed or not: it is not theirs
            assert isinstance(await outcome(late), HoldOwned)


@scenario
async def test_what_a_record_has_paid_from_its_hold_is_not_reversed_by_hand(place: Place) -> None:
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record = await p.now(await p.start())
        paid = await p.ledger.envelope_by_key(f"{record.id}:confirm", scope="payments out")
        with pytest.raises(InvalidName, match="one side of what payments out does"):
            await p.ledger.reverse(paid.envelope)


def settling(record: Record, hold: int, *, owner: str, state: HoldState = HoldState.VOIDED) -> Intent:
    """Below the ledger: an entry that voids the hold of w-1, in whosever name."""
    return Intent(
        scope="mine",
        key="k",
        legs=(Leg(HELD, "alice", "USDT", 4 * MILLION),),
        consume=(record.in_flight_posting,),
        hold=HoldChange(
            id=hold, account="alice", asset="USDT", amount=4 * MILLION, remaining=0, state=state, owner=owner
        ),
    )


def moving(record: Record) -> Move:
    note = (NewTransition(record.state, "NOTE", record.state),)
    return Move(
        flow=record.flow,
        id=record.id,
        number=record.number,
        version=record.version,
        transitions=note,
        actor="ann",
        delay_us=None,
        in_flight_posting=record.in_flight_posting,
    )


@scenario
async def test_the_writer_refuses_whoever_is_not_the_record(place: Place) -> None:
    """Below the ledger: an entry without a move, with another record's move, or under no owner's name."""
    async with program(place) as p:
        await seed(p.ledger, "alice", "10")
        record, other = await p.start("w-1", ask=True), await p.start("w-2", ask=True)
        hold, before = await p.hold_of(record), await p.balances()
        mine = owner_name("payments out", "w-1")
        apply = p.ledger.writer.apply

        assert isinstance(await outcome(apply(Change((settling(record, hold, owner=mine),)))), HoldOwned)
        stolen = Change((settling(record, hold, owner=mine),), (moving(other),))
        assert isinstance(await outcome(apply(stolen)), HoldOwned)
        theirs = owner_name("payments out", "w-2")
        for lie in ("", theirs):  # the row itself knows better
            change = Change((settling(record, hold, owner=lie),), (moving(other),))
            assert isinstance(await outcome(apply(change)), Conflict)
        unsaid = msgspec.structs.replace(settling(record, hold, owner=""), hold=None)
        assert isinstance(await outcome(apply(Change((unsaid,), (moving(record),)))), InvalidEntry)

        assert await p.balances() == before
        for id in ("w-1", "w-2"):
            await p.people.signal("payments out", id, "REJECT", **WHO)


@scenario
async def test_a_hold_whose_record_does_not_know_of_it_is_found(place: Place) -> None:
    """The audit, on a record that was made to forget its hold."""
    async with place.bursar() as bursar:
        p = Program(bursar.ledger, Outside())
        await seed(p.ledger, "alice", "10")
        record = await p.start(ask=True)
        await check_audit(p.ledger)
        forgets = msgspec.structs.replace(moving(record), in_flight_posting=0)
        await p.ledger.writer.apply(Change(moves=(forgets,)))
        evidence = [line for finding in await audit(p.ledger.store) for line in finding.broken]
        assert len(evidence) == 1
        assert "belongs to payments out/w-1, which does not know of it" in evidence[0]


# --- crashes ----------------------------------------------------------------------------------------------------------

ENDS = {"good": "PAID", "bad": "GIVEN_BACK", "half": "PAID"}


async def drive(p: Program, turn: int) -> None:
    """As an API would: each with the client's own key, to its end."""
    for kind in ENDS:
        id = f"{kind}-{turn}"
        request = Operation(scope="payments:alice", id=id, op="create", fingerprint=id)
        started = await p.engine.start("payments out", Payment(2 * MILLION), id=id, operation=request)
        record = started.record
        while record.state not in ENDS.values():
            record = await p.now(record)


async def dies(p: Program, turn: int, moment: str) -> bool:
    """Whether there was a unit of that number; the process dies before it is written, or after."""
    apply, left = p.engine.writer.apply, turn

    async def dying(change: Any) -> Any:
        nonlocal left
        left -= 1
        if left == 0 and moment == "before":
            raise Crash
        done = await apply(change)
        if left == 0:
            raise Crash
        return done

    p.engine.writer.apply = dying  # type: ignore[method-assign]
    try:
        await drive(p, turn)
    except Crash:
        return True
    finally:
        p.engine.writer.apply = apply  # type: ignore[method-assign]
        await p.engine.finish(0)
    return False


@pytest.mark.parametrize("moment", ["before", "after"])
@scenario
async def test_a_crash_at_every_unit(place: Place, moment: str) -> None:
    """The process dies before or after each unit that it writes; the next one goes on, and all happens once."""
    outside = Outside(bad="EXPLICIT_FAIL", half="HALF")
    async with program(place, outside) as p:
        await seed(p.ledger, "alice", "100")
    turn, dead = 0, True
    while dead:
        turn += 1
        async with place.bursar() as bursar:
            dead = await dies(Program(bursar.ledger, outside), turn, moment)
        async with program(place, outside) as p:
            await drive(p, turn)
            for kind, end in ENDS.items():
                record = await p.engine.get("payments out", f"{kind}-{turn}")
                assert record is not None
                assert (record.state, record.in_flight_posting) == (end, 0)
            assert await p.balances() == [
                f"{100 - 4 * turn}.000000",
                "0.000000",
                f"{-100 + 4 * turn - 0.5 * turn:.6f}",
                f"{0.5 * turn:.6f}",
            ]
            sent = {("good", "send"), ("half", "send"), ("half", "send rest")}
            assert {(id.split("-")[0], op) for id, op in outside.sent} == sent
    assert turn > 6


async def _at(p: Program, record: Record) -> Record:
    found = await p.engine.store.read.records.by_number(record.number)
    assert found is not None
    return found
