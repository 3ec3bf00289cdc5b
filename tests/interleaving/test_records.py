"""Records in every order: move against move, operation against operation, limit against limit, claim against both."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.interleaving.stage import GROUP, RECORDS, Actor
from tests.interleaving.world import ASSET, World, every_order
from tests.interleaving.world import Operation as Act

from bursar import pay
from bursar.model.entries import Intent, Leg
from bursar.model.errors import IdempotencyKeyReused, InsufficientFunds, LimitExceeded, RecordMoved
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.writer import Change, ChangeResult, Limit, Move, NewTransition, Operation

CLAIMS = frozenset({"claim_due"})
HOUR_US = 3_600_000_000
ORDERS_OF_TWO_WRITES = 6  # write and COMMIT of each, if none waits or conflicts
ORDERS_OF_RIVALS = 4  # if the second to write waits for the first one's COMMIT


def applying(change: Change) -> Act:
    return lambda actor: actor.ledger.writer.apply(change)


def making(world: World, id: str = "o", delay_us: int = HOUR_US) -> Move:
    """A new record."""
    flow = f"flow {world.stage.scenes}"
    return Move(
        flow=flow,
        id=id,
        version=0,
        transitions=(NewTransition("", "CREATED", "A"),),
        actor="x",
        delay_us=delay_us,
        worker="x",
    )


async def make(world: World, id: str = "o", delay_us: int = HOUR_US) -> int:
    done = await world.ledger.writer.apply(Change(moves=(making(world, id, delay_us),)))
    return done.records[0]


def moving(number: int, actor: str, target: str = "B", version: int = 1, **more: Any) -> Move:
    return Move(
        flow="f",
        id="o",
        number=number,
        version=version,
        transitions=(NewTransition("A", actor, target),),
        actor=actor,
        delay_us=HOUR_US,
        **more,
    )


def entry(world: World, key: str, source: str, target: str, minor: int) -> Intent:
    return Intent(scope="s", key=world.key(key), legs=(Leg(source, target, ASSET, minor),))


async def path(world: World, number: int) -> list[str]:
    history = await world.ledger.store.read.records.history(number)
    assert [t.version for t in history] == list(range(1, len(history) + 1))
    return [t.event for t in history]


async def record(world: World, number: int) -> Record:
    found = await world.ledger.store.read.records.by_number(number)
    assert found is not None
    return found


def kinds(outcomes: list[Any]) -> list[str]:
    return sorted(type(outcome).__name__ for outcome in outcomes)


# --- moves ---------------------------------------------------------------------------------------------------------


def test_move_against_move_of_one_record(empty_postgres: str) -> None:
    """One wins, the other gets `RecordMoved`; the record has one row of history more."""
    numbers: list[int] = []

    async def prepare(world: World) -> list[Act]:
        numbers.append(await make(world))
        return [applying(Change(moves=(moving(numbers[-1], who, who),))) for who in ("one", "two")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "RecordMoved"]
        winner = "one" if isinstance(outcomes[0], ChangeResult) else "two"
        assert await path(world, numbers[-1]) == ["CREATED", winner]
        assert (await record(world, numbers[-1])).state == winner

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS


def test_moves_of_two_records_never_get_in_each_others_way(empty_postgres: str) -> None:
    async def prepare(world: World) -> list[Act]:
        numbers = [await make(world, id) for id in ("a", "b")]
        return [applying(Change(moves=(moving(number, "go"),))) for number in numbers]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "ChangeResult"]
        assert "a:batch_read_records" not in world.stage.script

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) == ORDERS_OF_TWO_WRITES


def test_two_records_moved_by_both_in_opposite_order(empty_postgres: str) -> None:
    """A deadlock attempt: each change moves both, named in opposite order. Sorted locks make it a queue."""
    pairs: list[list[int]] = []

    async def prepare(world: World) -> list[Act]:
        pairs.append([await make(world, id) for id in ("a", "b")])
        one = tuple(moving(number, "one") for number in pairs[-1])
        two = tuple(moving(number, "two") for number in reversed(pairs[-1]))
        return [applying(Change(moves=one)), applying(Change(moves=two))]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "RecordMoved"]
        winner = "one" if isinstance(outcomes[0], ChangeResult) else "two"
        assert [await path(world, number) for number in pairs[-1]] == [["CREATED", winner]] * 2

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS


def test_a_record_made_by_two_at_once(empty_postgres: str) -> None:
    async def prepare(world: World) -> list[Act]:
        return [applying(Change(moves=(making(world),))) for _ in range(2)]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "RecordMoved"]
        (done,) = [o for o in outcomes if isinstance(o, ChangeResult)]
        found = await world.ledger.store.read.records.get(f"flow {world.stage.scenes}", "o")
        assert found is not None
        assert found.number == done.records[0]

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS


# --- moves with entries ----------------------------------------------------------------------------------------------


def test_two_movers_with_the_same_entry(empty_postgres: str) -> None:
    """Two workers got the same answer: one transition, one booking, and the record owns the posting that it made."""
    numbers: list[int] = []

    async def prepare(world: World) -> list[Act]:
        a, b = await world.account("a", "10"), await world.account("b")
        numbers.append(await make(world))
        booked = entry(world, "k", a, b, 400)
        return [
            applying(Change((booked,), moves=(moving(numbers[-1], who, in_flight_account=b),)))
            for who in ("one", "two")
        ]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "RecordMoved"]
        (done,) = [o for o in outcomes if isinstance(o, ChangeResult)]
        assert await world.balance("b") == "4.00"
        found = await record(world, numbers[-1])
        assert (found.version, found.in_flight_posting) == (2, done.postings[0])
        assert found.in_flight_posting >> 16 == done.receipts[0].envelope

    gates = GROUP | RECORDS
    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=gates)) >= 10


@pytest.mark.parametrize("enough", [True, False])
def test_a_move_with_its_entry_against_a_payment_of_the_same_posting(empty_postgres: str, enough: bool) -> None:
    """Move and entry happen together or not at all, whichever spends the posting first."""
    numbers: list[int] = []

    async def prepare(world: World) -> list[Act]:
        a = await world.account("a", "10")
        b, c = await world.account("b"), await world.account("c")
        numbers.append(await make(world))
        change = Change((entry(world, "k", a, b, 600),), moves=(moving(numbers[-1], "go", in_flight_account=b),))
        other = pay(a, c, ASSET, "4" if enough else "6", key=world.key("other"))
        return [applying(change), lambda actor: actor.ledger.commit(other)]

    async def check(world: World, outcomes: list[Any]) -> None:
        moved, paid = outcomes
        found = await record(world, numbers[-1])
        if isinstance(moved, ChangeResult):
            assert (found.version, await world.balance("b")) == (2, "6.00")
        else:
            assert isinstance(moved, InsufficientFunds)
            assert (found.version, found.in_flight_posting, await world.balance("b")) == (1, 0, "0.00")
        lost = [o for o in (moved, paid) if isinstance(o, InsufficientFunds)]
        assert len(lost) == (0 if enough else 1)

    gates = GROUP | RECORDS
    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=gates)) >= 10


# --- operations ------------------------------------------------------------------------------------------------------


def remembering(world: World, what: str = "x") -> Operation:
    return Operation(
        scope="rail", id=world.key("r"), op="pay", fingerprint=what, refusals=frozenset({"INSUFFICIENT_BALANCE"})
    )


def test_the_same_operation_from_two_is_answered_once(empty_postgres: str) -> None:
    """Success against success."""

    async def prepare(world: World) -> list[Act]:
        a, b = await world.account("a", "10"), await world.account("b")
        change = Change((entry(world, "k", a, b, 400),), operation=remembering(world))
        return [applying(change), applying(change)]

    async def check(world: World, outcomes: list[Any]) -> None:
        answers = [o.operation for o in outcomes]
        assert [answer.outcome for answer in answers] == [Outcome.SUCCESS] * 2
        assert sorted(answer.replayed for answer in answers) == [False, True]
        assert await world.balance("b") == "4.00"

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | RECORDS)) >= 10


def test_an_operation_that_one_finds_refused_and_the_other_not(empty_postgres: str) -> None:
    """Refusal against success, with the money coming in between: both get the same answer, and that is what
    happened."""

    async def prepare(world: World) -> list[Act]:
        a, b = await world.account("a", "3"), await world.account("b")
        spare = await world.account("spare", "10")
        change = Change((entry(world, "k", a, b, 400),), operation=remembering(world))

        async def richer(actor: Actor) -> Any:
            await actor.ledger.commit(pay(spare, a, ASSET, "5", key=world.key("in")))
            return await actor.ledger.writer.apply(change)

        return [applying(change), richer]

    async def check(world: World, outcomes: list[Any]) -> None:
        answers = [o.operation for o in outcomes]
        assert len({(answer.outcome, answer.code) for answer in answers}) == 1
        assert sorted(answer.replayed for answer in answers) == [False, True]
        assert await world.balance("b") == ("4.00" if answers[0].outcome is Outcome.SUCCESS else "0.00")
        seen.add(answers[0].outcome)

    seen: set[Outcome] = set()
    asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | RECORDS, at_least=20))
    assert seen == {Outcome.SUCCESS, Outcome.EXPLICIT_FAIL}


def test_one_name_for_two_requests(empty_postgres: str) -> None:
    """One is answered, the other is a mistake, whichever comes first."""

    async def prepare(world: World) -> list[Act]:
        a, b, c = await world.account("a", "10"), await world.account("b"), await world.account("c")
        return [
            applying(Change((entry(world, what, a, target, 400),), operation=remembering(world, what)))
            for what, target in (("x", b), ("y", c))
        ]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "IdempotencyKeyReused"]
        assert sorted([await world.balance("b"), await world.balance("c")]) == ["0.00", "4.00"]

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=GROUP | RECORDS)) >= 10


# --- limits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [0, 4], ids=["a new counter", "a counter with one left"])
def test_limit_against_limit(empty_postgres: str, used: int) -> None:
    """Room for one: exactly one gets it, and nothing of the other's is written."""

    async def prepare(world: World) -> list[Act]:
        limit = Limit(key=world.key("day"), count_max=used + 1, amount_max=10, until_us=HOUR_US, code="TOO_MANY")
        for n in range(used):
            await world.ledger.writer.apply(Change(moves=(making(world, f"before {n}"),), limits=(limit,)))
        return [applying(Change(moves=(making(world, who),), limits=(limit,))) for who in ("one", "two")]

    async def check(world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "LimitExceeded"]
        counts = await world.ledger.store.read.records.counts()
        assert counts[f"flow {world.stage.scenes}", "A"][0] == used + 1

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= ORDERS_OF_RIVALS


def test_two_limits_in_opposite_order(empty_postgres: str) -> None:
    """A deadlock attempt: both counters exist, and each change names them in another order."""

    async def prepare(world: World) -> list[Act]:
        limits = [
            Limit(key=world.key(name), count_max=3, amount_max=10, until_us=HOUR_US, code="TOO_MANY") for name in "xy"
        ]
        await world.ledger.writer.apply(Change(limits=tuple(limits)))
        return [applying(Change(limits=tuple(limits))), applying(Change(limits=tuple(reversed(limits))))]

    async def check(_world: World, outcomes: list[Any]) -> None:
        assert kinds(outcomes) == ["ChangeResult", "ChangeResult"]

    assert asyncio.run(every_order(empty_postgres, prepare, check, gates=RECORDS)) >= 2


# --- claims ----------------------------------------------------------------------------------------------------------


def claiming(world: World, limit: int = 10) -> Act:
    flows = [f"flow {world.stage.scenes}"]

    def claim(actor: Actor) -> Coroutine[Any, Any, Any]:
        return actor.ledger.store.single().records.claim_due(flows, actor.name, limit, HOUR_US, HOUR_US)

    return claim


def test_claim_against_claim(empty_postgres: str) -> None:
    """No record goes to both, and all are taken: in one round, or by the next claim."""
    numbers: list[list[int]] = []

    async def prepare(world: World) -> list[Act]:
        numbers.append([await make(world, id, delay_us=0) for id in "abc"])
        return [claiming(world, 2), claiming(world, 2)]

    async def check(world: World, outcomes: list[Any]) -> None:
        taken = Counter(found.number for claimed in outcomes for found in claimed)
        assert set(taken.values()) == {1}, "one record for both"
        assert set(taken) == set(numbers[-1])
        assert max(len(claimed) for claimed in outcomes) == 2
        for actor, claimed in zip("ab", outcomes, strict=True):
            assert {found.worker for found in claimed} <= {actor}

    asyncio.run(every_order(empty_postgres, prepare, check, gates=CLAIMS, at_least=4))


def test_claim_against_move(empty_postgres: str) -> None:
    """The move happens, whatever a claim does meanwhile; and what has moved away from being due is not claimed."""
    numbers: list[int] = []

    async def prepare(world: World) -> list[Act]:
        numbers.append(await make(world, delay_us=0))
        return [applying(Change(moves=(moving(numbers[-1], "go", worker="mover"),))), claiming(world)]

    async def check(world: World, outcomes: list[Any]) -> None:
        moved, claimed = outcomes
        assert isinstance(moved, ChangeResult)
        found = await record(world, numbers[-1])
        assert (found.version, found.state) == (2, "B")
        if world.stage.commits[0] == "a":
            assert list(claimed) == []
            assert found.worker == "mover"
        else:
            assert [one.version for one in claimed] in ([1], [])

    asyncio.run(every_order(empty_postgres, prepare, check, gates=CLAIMS | RECORDS, at_least=4))


REFUSALS = (RecordMoved, LimitExceeded, IdempotencyKeyReused)  # all that a race may end in here, besides success


def test_everything_at_once(empty_postgres: str) -> None:
    """Two starts of one request under a limit of one, beside a claim of what they make."""

    async def prepare(world: World) -> list[Act]:
        limit = Limit(key=world.key("day"), count_max=1, amount_max=10, until_us=HOUR_US, code="TOO_MANY")
        request = Operation(scope="api", id=world.key("r"), op="create", fingerprint="x")
        starts = [
            applying(Change(moves=(making(world, id, delay_us=0),), operation=request, limits=(limit,)))
            for id in ("one", "two")
        ]
        return [*starts, claiming(world)]

    async def check(world: World, outcomes: list[Any]) -> None:
        one, two, claimed = outcomes
        assert not any(isinstance(outcome, REFUSALS) for outcome in (one, two)), "a replay is never refused by a limit"
        assert sorted(len(outcome.records) for outcome in (one, two)) == [0, 1]
        assert len(claimed) <= 1
        counts = await world.ledger.store.read.records.counts()
        assert counts[f"flow {world.stage.scenes}", "A"][0] == 1

    gates = CLAIMS | RECORDS
    asyncio.run(every_order(empty_postgres, prepare, check, actors=3, gates=gates, at_least=20))
