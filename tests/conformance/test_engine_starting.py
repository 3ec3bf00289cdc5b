"""Starting records: the same request makes one, whoever sends it how often; limits are never exceeded by any order."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import msgspec
import pytest
from tests.builders import Place, outcome, scenario, seed
from tests.conformance.test_callers_transaction import Theirs
from tests.rows import Rows
from tests.toy import Order, Program, World, program

from bursar.engine import Flow, Started
from bursar.model.entries import Intent, Leg
from bursar.model.errors import (
    AccountClosed,
    AccountFrozen,
    Conflict,
    IdempotencyKeyReused,
    InsufficientFunds,
    InvalidName,
    LimitExceeded,
    UnknownAccount,
)
from bursar.model.outcome import Outcome
from bursar.store.batch import CommitUnknown
from bursar.writer import Change, Limit, Move, NewTransition, Operation

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

FOREVER_US = 2**60


def request(key: str = "k", what: str = "book", user: str = "alice", **more: Any) -> Operation:
    return Operation(scope=f"orders:{user}", id=key, op="create", fingerprint=what, **more)


def limit(most: int, *, key: str = "per day", amount_max: int = 10**30, **more: Any) -> Limit:
    return Limit(key=key, count_max=most, amount_max=amount_max, until_us=FOREVER_US, code="TOO_MANY", **more)


async def start(
    p: Program, key: str = "k", what: str = "book", limits: tuple[Limit, ...] = (), user: str = "alice"
) -> Any:
    """Start an order for a request; what came of it, or the refusal. Contention is no answer: ask again."""
    while True:
        wanted = p.engine.start("orders", Order(what), owner=user, operation=request(key, what, user), limits=limits)
        found = await outcome(wanted)
        if not isinstance(found, Conflict):
            return found


async def count(p: Program) -> int:
    return sum([found for found, _ in (await p.engine.store.read.records.counts()).values()])


@scenario
async def test_the_same_request_again_gets_the_record_of_the_first(place: Place) -> None:
    async with program(place, World()) as p:
        first = await start(p)
        again = await start(p)
        assert (first.replayed, again.replayed) == (False, True)
        assert again.record.id == first.record.id
        ended = await p.now(first.record)
        late = await start(p)
        assert (late.replayed, late.record.state, late.record.number) == (True, "DONE", ended.number)
        assert await count(p) == 1


@scenario
async def test_a_record_may_need_accounts_that_are_active(place: Place) -> None:
    """Nothing of theirs moves; and if one is not, nothing is written, whatever else the group does."""
    async with program(place, World()) as p, place.bursar() as other:
        for path in ("open", "frozen", "closed"):
            await other.ledger.create_account(path)
        await other.ledger.freeze("frozen")
        await other.ledger.close("closed")

        flows = cast("dict[str, Flow[Order]]", p.engine.flows)
        flows["orders"] = dataclasses.replace(flows["orders"], active=lambda order: tuple(order.what.split()))

        def wanted(*active: str) -> Any:
            return outcome(p.engine.start("orders", Order(" ".join(active))))

        wishes = [("open",), ("frozen",), (), ("open", "closed"), ("nobody",), ("open",)]
        found = await asyncio.gather(*[wanted(*active) for active in wishes])
        assert [type(one) for one in found] == [
            *(Started, AccountFrozen, Started, AccountClosed, UnknownAccount, Started)
        ]
        await other.ledger.unfreeze("frozen")
        assert isinstance(await wanted("frozen", "open"), Started)
        await other.ledger.freeze("open")
        assert isinstance(await wanted("open"), AccountFrozen)
        assert await count(p) == 4


@scenario
async def test_twenty_concurrent_requests_make_one_record(place: Place) -> None:
    async with program(place, World()) as p:
        found = await asyncio.gather(*[start(p) for _ in range(20)])
        assert len({f.record.id for f in found}) == 1
        assert [f.replayed for f in found].count(False) == 1
        assert await count(p) == 1


@scenario
async def test_the_same_request_to_two_programs_makes_one_record(place: Place) -> None:
    async with program(place, World()) as p, program(place, World(), worker="other") as q:
        for key in ("k1", "k2", "k3"):
            found = await asyncio.gather(*[start(who, key) for who in (p, q) * 5])
            assert len({f.record.id for f in found}) == 1
            assert [f.replayed for f in found].count(False) == 1
        assert await count(p) == 3


@pytest.mark.parametrize("at_once", [False, True])
@scenario
async def test_the_same_key_with_other_parameters_is_refused(place: Place, at_once: bool) -> None:
    async with program(place, World()) as p:
        if at_once:
            found = await asyncio.gather(*[start(p, what=what) for what in ("book", "hat", "book", "hat")])
        else:
            found = [await start(p, what=what) for what in ("book", "hat", "book", "hat")]
        kinds = [type(f) for f in found]
        assert sorted(kinds, key=str) == sorted([Started, Started, IdempotencyKeyReused, IdempotencyKeyReused], key=str)
        assert await count(p) == 1


@scenario
async def test_one_users_key_is_not_anothers(place: Place) -> None:
    async with program(place, World()) as p:
        mine, theirs = await start(p, user="alice"), await start(p, user="bob")
        assert mine.record.id != theirs.record.id
        assert theirs.record.owner == "bob"


@scenario
async def test_what_else_is_remembered_stays(place: Place) -> None:
    """Given details of the caller's own, then they are remembered beside the record's id; a bad key is refused."""
    async with program(place, World()) as p:
        started = await p.engine.start("orders", Order(), operation=request(detail='{"from":"app"}'))
        remembered = await p.engine.store.read.operations.get("orders:alice", "k", "create")
        assert remembered is not None
        assert msgspec.json.decode(remembered.detail) == {"from": "app", "record": started.record.id}
        for key in ("", "a\x00b", "x" * 129):
            assert isinstance(await start(p, key), InvalidName)


# --- limits --------------------------------------------------------------------------------------------------------


@scenario
async def test_the_last_allowed_and_the_first_refused(place: Place) -> None:
    async with program(place, World()) as p:
        found = [await start(p, f"k{n}", limits=(limit(3),)) for n in range(4)]
        assert [type(f) for f in found] == [Started, Started, Started, LimitExceeded]
        assert found[3].name == "TOO_MANY"
        assert await count(p) == 3
        assert isinstance(await start(p, "k4", limits=(limit(3, key="next day"),)), Started)


@scenario
async def test_amounts_exactly_met_and_exceeded_by_one(place: Place) -> None:
    async with program(place, World()) as p:
        large = 2**100
        allowed = [limit(9, amount=part, amount_max=large) for part in (large - 1, 1, 1)]
        found = [await start(p, f"k{n}", limits=(one,)) for n, one in enumerate(allowed)]
        assert [type(f) for f in found] == [Started, Started, LimitExceeded]


@scenario
async def test_a_replay_is_not_counted_and_not_refused(place: Place) -> None:
    """T12: looked up before the limits; also the next day, when its bucket is new and full (T37)."""
    async with program(place, World()) as p:
        first = await start(p, "mine", limits=(limit(1),))
        for _ in range(3):
            again = await start(p, "mine", limits=(limit(1),))
            assert (again.replayed, again.record.id) == (True, first.record.id)
        assert isinstance(await start(p, "other", limits=(limit(1),)), LimitExceeded)
        tomorrow = (limit(1, key="tomorrow"),)
        news, again, third = await asyncio.gather(
            start(p, "new", limits=tomorrow), start(p, "mine", limits=tomorrow), start(p, "third", limits=tomorrow)
        )
        assert (type(news), type(third)) == (Started, LimitExceeded)
        assert (type(again), again.record.id) == (Started, first.record.id)


@scenario
async def test_a_refused_request_is_not_counted(place: Place) -> None:
    async with program(place, World()) as p:
        await start(p, "k", "book")
        other = limit(1, key="other")
        assert isinstance(await start(p, "k", "hat", limits=(other,)), IdempotencyKeyReused)
        assert isinstance(await start(p, "k2", limits=(limit(0), other)), LimitExceeded)
        assert isinstance(await start(p, "k3", limits=(other,)), Started)


@scenario
async def test_limits_hold_in_two_programs_at_once(place: Place) -> None:
    async with program(place, World()) as p, program(place, World(), worker="other") as q:
        for turn in range(3):
            per_turn = (limit(5, key=f"turn {turn}"),)
            wanted = [start((p, q)[n % 2], f"{turn}-{n}", limits=per_turn) for n in range(16)]
            found = await asyncio.gather(*wanted)
            assert [type(f) for f in found].count(Started) == 5
            assert [type(f) for f in found].count(LimitExceeded) == 11
        assert await count(p) == 15


@scenario
async def test_a_limit_named_twice_and_limits_that_differ(place: Place) -> None:
    """Given one change that counts twice, and callers who disagree about the maximum, then each one's own holds."""
    async with program(place, World()) as p:
        assert isinstance(await start(p, "twice", limits=(limit(1), limit(1))), LimitExceeded)
        found = await asyncio.gather(*[start(p, f"k{n}", limits=(limit(most),)) for n, most in enumerate([1, 3, 3, 1])])
        assert [type(f) for f in found] == [Started, Started, Started, LimitExceeded]


@scenario
async def test_old_counters_are_forgotten(place: Place) -> None:
    async with program(place, World()) as p:
        gone = Limit(key="gone", count_max=1, amount_max=1, until_us=1_000, code="X")
        await start(p, "k1", limits=(gone, limit(1)))
        assert await p.engine.store.single().operations.drop_counters(0) == 1
        assert isinstance(await start(p, "k2", limits=(limit(1),)), LimitExceeded)
        assert isinstance(await start(p, "k3", limits=(gone,)), Started)


# --- operations of rails that live in this database ----------------------------------------------------------------


def operation(key: str, minor: int, refusals: tuple[str, ...] = (), what: str = "") -> Change:
    entry = Intent(scope="rail", key=key, legs=(Leg("alice", "bob", "USDT", minor),))
    remember = Operation(
        scope="rail",
        id=key,
        op="pay",
        fingerprint=what or str(minor),
        refusals=frozenset(refusals),
        in_flight_account="bob",
    )
    return Change((entry,), operation=remember)


@scenario
async def test_a_refusal_on_the_list_is_an_answer_for_ever(place: Place) -> None:
    """T8: a late duplicate must not succeed after it was refused, whatever has come in since."""
    async with program(place, World()) as p:
        wanted = operation("o-1", 5, ("INSUFFICIENT_BALANCE",))
        first = (await p.engine.writer.apply(wanted)).operation
        assert first is not None
        assert (first.outcome, first.code, first.replayed) == (Outcome.EXPLICIT_FAIL, "INSUFFICIENT_BALANCE", False)
        await seed(p.ledger, "alice", "10")
        for again in (wanted, wanted):
            found = (await p.engine.writer.apply(again)).operation
            assert found is not None
            assert (found.outcome, found.code, found.replayed) == (Outcome.EXPLICIT_FAIL, first.code, True)
        assert await p.balances() == [10_000_000, 0, 0]


@scenario
async def test_a_remembered_refusal_is_told_also_when_it_would_be_refused_otherwise_now(place: Place) -> None:
    """Given an answer, when the same operation would now fail for a reason off its list, then the answer stands."""
    async with program(place, World()) as p:
        wanted = operation("o-1", 5, ("INSUFFICIENT_BALANCE",))
        await p.engine.writer.apply(wanted)
        await seed(p.ledger, "alice", "10")
        await p.ledger.freeze("alice")
        found = (await p.engine.writer.apply(wanted)).operation
        assert found is not None
        assert (found.code, found.replayed) == ("INSUFFICIENT_BALANCE", True)
        with pytest.raises(IdempotencyKeyReused):
            await p.engine.writer.apply(operation("o-1", 6, ("INSUFFICIENT_BALANCE",)))


@scenario
async def test_a_refusal_off_the_list_is_no_answer(place: Place) -> None:
    async with program(place, World()) as p:
        wanted = operation("o-1", 5)
        with pytest.raises(InsufficientFunds):
            await p.engine.writer.apply(wanted)
        assert await p.engine.store.read.operations.get("rail", "o-1", "pay") is None
        await seed(p.ledger, "alice", "10")
        done = await p.engine.writer.apply(wanted)
        assert done.operation is not None
        assert (done.operation.outcome, done.operation.replayed) == (Outcome.SUCCESS, False)
        posting = msgspec.json.decode(done.operation.detail)["posting"]
        assert [found.amount for found in await Rows(p.engine.store.read).live([posting])] == [5]
        again = await p.engine.writer.apply(wanted)
        assert (again.operation is not None and again.operation.replayed, again.receipts) == (True, ())
        with pytest.raises(IdempotencyKeyReused):
            await p.engine.writer.apply(operation("o-1", 6))
        assert (await p.balances())[2] == 5


@scenario
async def test_one_operation_from_two_programs_happens_once(place: Place) -> None:
    async with program(place, World()) as p, program(place, World()) as q:
        await seed(p.ledger, "alice", "10")

        async def persistent(who: Program) -> Any:
            while True:
                found = await outcome(who.engine.writer.apply(operation("o-1", 5)))
                if not isinstance(found, Conflict):
                    return found.operation

        found = await asyncio.gather(*[persistent(who) for who in (p, q) * 8])
        assert [f.replayed for f in found].count(False) == 1
        assert len({f.detail for f in found}) == 1
        assert (await p.balances())[2] == 5


@pytest.mark.parametrize("named", [False, True])
@scenario
async def test_a_start_whose_commit_was_not_heard_of_is_found_again(
    place: Place, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L18: the reply to COMMIT is lost; the record is there once, and its starter learns of it."""
    async with program(place, World()) as p:
        await p.order()
        store = p.engine.store
        real, unheard = store.run_batch, [True]

        async def run_batch(*args: Any) -> Any:
            result = await real(*args)
            if unheard:
                unheard.clear()
                raise CommitUnknown("the reply is lost")
            return result

        monkeypatch.setattr(store, "run_batch", run_batch)
        monkeypatch.setattr(store, "overlaps", False)
        remember = request() if named else None
        started = await p.engine.start("orders", Order(), operation=remember)
        assert not unheard
        assert (started.replayed, await count(p)) == (False, 2)
        assert (await p.now(started.record)).state == "DONE"


@pytest.mark.parametrize("how", ["COMMIT", "ROLLBACK"])
@scenario
async def test_an_operation_in_the_callers_own_transaction(place: Place, how: str) -> None:
    """Entry, answer, record and limit are there if and when the caller commits; asked again in it, the same answer."""
    async with program(place, World()) as p:
        await seed(p.ledger, "alice", "10")
        move = Move(
            flow="orders", id="o", version=0, transitions=(NewTransition("", "CREATED", "NEW"),), actor="x", delay_us=1
        )
        change = msgspec.structs.replace(operation("o-1", 5), moves=(move,), limits=(limit(1),))
        theirs = await Theirs(place).begin()
        first = await p.engine.writer.apply_in(theirs.connection, change)
        again = await p.engine.writer.apply_in(theirs.connection, change)
        await theirs.end(how)
        assert (len(first.records), first.operation is not None and first.operation.replayed) == (1, False)
        assert (len(again.records), again.operation is not None and again.operation.replayed) == (0, True)
        happened = int(how == "COMMIT")
        assert (await p.balances())[2] == 5 * happened
        assert await count(p) == happened
        later = await p.engine.writer.apply(change)
        assert later.operation is not None
        assert later.operation.replayed == bool(happened)
        assert await count(p) == 1
