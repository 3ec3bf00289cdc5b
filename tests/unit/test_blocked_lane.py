"""The lane of blocked changes: a change that needs a held row waits there, and no other waits behind it. Virtual time.

The store here is a dictionary in which some keys are blocked; whether PostgreSQL reports locks in time, and what that
costs other callers, is tested on a real one (conformance/test_held_rows.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from tests.memory import MemoryLedger

from bursar.model.accounts import Account, CappedOverdraft, ExternalAccount
from bursar.model.entries import Intent, Leg
from bursar.model.errors import Conflict, InsufficientFunds, OutcomeUnknown
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.ports import SystemPorts
from bursar.store.batch import CommitUnknown, Lane, LockTimeout, PreparedBatch
from bursar.writer import Change, Operation, Writer
from bursar.writer.blocked import HELD_S, WAIT_S, needs, own
from bursar.writer.change import Move, NewTransition
from bursar.writer.writer import CONSOLIDATE_EVERY

USERS = "abcdefgh"
ACCOUNTS = {path: Account(id=n, path=path) for n, path in enumerate(USERS, start=1)} | {
    "bank": Account(id=50, path="bank", policy=ExternalAccount()),
    "capped": Account(id=51, path="capped", policy=CappedOverdraft("-1", "USD")),
}


class QuickPorts(SystemPorts):
    """A clock that only pauses move."""

    def __init__(self) -> None:
        self.now = 100.0
        self.alarms: list[tuple[float, Callable[[], object]]] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, until)
        due = [alarm for alarm in self.alarms if alarm[0] <= self.now]
        self.alarms = [alarm for alarm in self.alarms if alarm[0] > self.now]
        for _, ring in due:
            ring()


class HoldingStore(MemoryLedger):
    """Each user has 1.00. Another transaction holds what the keys in `held` need; each attempt is noted, by lane."""

    split = False
    first_read = 2
    reuses_postings = False

    def __init__(self, *, overlaps: bool) -> None:
        live = [Posting(n << 16, n, 1, 100) for n in range(1, len(USERS) + 1)]
        super().__init__(Asset(id=1, code="USD", precision=2), ACCOUNTS.values(), live)
        self.overlaps = overlaps
        self.ports = QuickPorts()
        self.held: set[str] = set()
        self.poison: dict[str, Exception] = {}  # key → what goes wrong with it in the lane of blocked changes
        self.break_once = False
        self.lane: list[set[str]] = []
        self.aside: list[set[str]] = []
        self.set_aside = asyncio.Event()  # a change was
        self.meanwhile: Callable[[], object] = lambda: None  # while a change is tried in the blocked lane

    async def run_batch(self, work: Any, lane: Lane = Lane.WRITE) -> Any:
        return await work(self if lane is not Lane.BLOCKED else Beside(self))

    async def write(self, prepared: PreparedBatch) -> None:
        await self.put_noted(prepared, self.lane)

    async def put_noted(self, prepared: PreparedBatch, noted: list[set[str]]) -> None:
        keys = {row[3] for row in prepared.writes.envelopes}
        for key in keys if noted is self.aside else ():
            if key in self.poison:
                raise self.poison[key]
        noted.append(keys)
        if noted is self.aside:
            self.set_aside.set()
            self.meanwhile()
        await asyncio.sleep(0)
        if self.break_once:
            self.break_once = False
            raise CommitUnknown("the connection is lost")
        if keys & self.held:
            raise LockTimeout("held")
        self.put(prepared.writes)

    def written(self) -> list[str]:
        return sorted(key for _, key in self.entries)


class Beside:
    """The same store, on the connection of blocked changes."""

    def __init__(self, store: HoldingStore) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    async def write(self, prepared: PreparedBatch) -> None:
        await self._store.put_noted(prepared, self._store.aside)


class Scene:
    """A writer on such a store."""

    def __init__(self, store: HoldingStore) -> None:
        self.store = store
        self.writer = Writer(store)  # type: ignore[arg-type]  # as much of a store as a batch needs

    def pay(self, key: str, source: str, target: str = "h", minor: int = 10) -> asyncio.Task[Any]:
        return asyncio.ensure_future(self.writer.apply(payment(key, source, target, minor)))

    def after(self, seconds: float, ring: Callable[[], object]) -> None:
        self.store.ports.alarms.append((self.store.ports.now + seconds, ring))


def payment(key: str, source: str, target: str = "h", minor: int = 10, *, consume: tuple[int, ...] = ()) -> Change:
    return Change((Intent(scope="user", key=key, legs=(Leg(source, target, "USD", minor),), consume=consume),))


Play = Callable[[Scene], Coroutine[Any, Any, None]]


def scene(play: Play) -> Callable[[bool], None]:
    """Play it with a store that decides and writes apart, and with one that does not."""

    @pytest.mark.parametrize("overlaps", [True, False], ids=["apart", "in one"])
    def test(overlaps: bool) -> None:
        async def body() -> None:
            async with asyncio.timeout(20):
                await play(Scene(HoldingStore(overlaps=overlaps)))

        asyncio.run(body())

    test.__doc__ = play.__doc__
    return test


async def outcomes_of(*tasks: asyncio.Task[Any]) -> list[Any]:
    return list(await asyncio.gather(*tasks, return_exceptions=True))


@scene
async def test_blocked_change_gets_conflict_and_the_others_go_through(scene: Scene) -> None:
    """The writer tries such a batch once. The blocked caller gets `Conflict` after `WAIT_S`, and nothing of it was
    written."""
    scene.store.held = {"c1"}
    began = scene.store.ports.now
    outcomes = await outcomes_of(*[scene.pay(f"{user}1", user) for user in "abcdefg"])
    assert [type(outcome) for outcome in outcomes].count(Conflict) == 1
    assert isinstance(outcomes[2], Conflict)
    assert outcomes[2].tries > 4
    assert scene.store.written() == ["a1", "b1", "d1", "e1", "f1", "g1"]
    assert len(scene.store.lane) == 1
    assert WAIT_S < scene.store.ports.now - began < 2 * WAIT_S


@scene
async def test_blocked_change_goes_through_once_the_lock_is_released(scene: Scene) -> None:
    scene.store.held = {"c1"}
    scene.after(0.5, scene.store.held.clear)
    outcomes = await outcomes_of(scene.pay("c1", "c"), scene.pay("d1", "d"))
    assert [outcome.receipts[0].key for outcome in outcomes] == ["c1", "d1"]
    assert scene.store.written() == ["c1", "d1"]
    assert [p.amount for p in scene.store.live.values() if p.account == 3] == [90]


@scene
async def test_blocked_change_is_refused_on_the_balance_after_the_wait(scene: Scene) -> None:
    """Another transaction spends all the money, and then releases its lock."""

    def spent() -> None:
        scene.store.held.clear()
        del scene.store.live[3 << 16]

    scene.store.held = {"c1"}
    scene.after(0.5, spent)
    assert isinstance((await outcomes_of(scene.pay("c1", "c")))[0], InsufficientFunds)


@scene
async def test_change_that_needs_a_held_row_goes_to_the_blocked_lane_at_once(scene: Scene) -> None:
    """Given a held payer, when it pays again, then in the blocked lane; payments to it, or from elsewhere, go with the
    writer's batch. After `HELD_S`, its own payments do again, too."""
    scene.store.held = {"c1", "c2"}
    await outcomes_of(scene.pay("c1", "c"))
    outcomes = await outcomes_of(scene.pay("c2", "c"), scene.pay("d1", "d", "c"), scene.pay("e1", "bank", "c"))
    assert [type(outcome) is Conflict for outcome in outcomes] == [True, False, False]
    assert scene.store.lane == [{"c1"}, {"d1", "e1"}]
    scene.store.ports.now += HELD_S + 1
    scene.store.held.clear()
    await outcomes_of(scene.pay("c3", "c"))
    assert scene.store.lane[-1] == {"c3"}


@scene
async def test_deposit_blocked_by_its_key_does_not_block_the_external_account(scene: Scene) -> None:
    scene.store.held = {"in1"}
    first = scene.pay("in1", "bank", "a")
    await scene.store.set_aside.wait()
    second = scene.pay("in2", "bank", "b")
    assert [type(outcome) is Conflict for outcome in await outcomes_of(first, second)] == [True, False]
    assert scene.store.lane == [{"in1"}, {"in2"}]
    await outcomes_of(scene.pay("in1", "bank", "a"))  # but the same key again is known
    assert len(scene.store.lane) == 2


@scene
async def test_payments_from_the_same_account_that_need_nothing_held_go_through(scene: Scene) -> None:
    """Given a blocked payment, when others pay from the same account but need nothing that is held, then they go
    through."""
    scene.store.held = {"c0"}
    outcomes = await outcomes_of(*[scene.pay(f"c{n}", "c", minor=1) for n in range(6)])
    assert [type(outcome) is Conflict for outcome in outcomes] == [True] + [False] * 5
    assert scene.store.written() == [f"c{n}" for n in range(1, 6)]


@scene
async def test_every_blocked_change_is_tried_alone_before_any_is_again(scene: Scene) -> None:
    """Given more blocked changes than are tried alone at a time, then one that waits behind them is tried, too."""
    scene.store.held = {"c0", "c1", "c2", "c3", "c4"}
    outcomes = await outcomes_of(*[scene.pay(f"c{n}", "c", minor=1) for n in range(6)])
    assert [type(outcome) is Conflict for outcome in outcomes] == [True] * 5 + [False]


@scene
async def test_change_that_arrives_during_a_retry_is_tried_too(scene: Scene) -> None:
    coming: list[asyncio.Task[Any]] = []

    def come() -> None:
        if len(coming) < 3:
            coming.append(scene.pay(f"c{len(coming) + 2}", "c", minor=1))

    scene.store.held = {"c1"}
    scene.store.meanwhile = come
    assert isinstance((await outcomes_of(scene.pay("c1", "c")))[0], Conflict)
    assert len(await outcomes_of(*coming)) == 3
    assert scene.store.written() == ["c2", "c3", "c4"]


@scene
async def test_many_changes_blocked_together_are_found_in_few_tries(scene: Scene) -> None:
    """Given 64 payments from one held account, then finding that out takes a few tries, not a hundred."""
    scene.store.held = {f"c{n}" for n in range(64)}
    outcomes = await outcomes_of(*[scene.pay(f"c{n}", "c", minor=1) for n in range(64)])
    assert all(isinstance(outcome, Conflict) for outcome in outcomes)
    assert len(scene.store.lane) <= 2
    assert len(scene.store.aside) < 40
    assert scene.store.written() == []


@scene
async def test_blocked_change_that_may_be_written_gets_outcome_unknown(scene: Scene) -> None:
    """Given a connection lost while writing, when the lock may be that first try's own, then the change waits as long
    as any ambiguous commit; other blocked changes still get `Conflict` after `WAIT_S`."""
    scene.writer.runner.patience_s = 10.0
    scene.store.held, scene.store.break_once = {"c1"}, True
    began = scene.store.ports.now
    (unknown,) = await outcomes_of(scene.pay("c1", "c"))
    assert isinstance(unknown, OutcomeUnknown)
    assert "c1" in unknown.keys
    assert scene.store.ports.now - began > 10
    scene.store.held = {"d1"}
    assert isinstance((await outcomes_of(scene.pay("d1", "d")))[0], Conflict)


@scene
async def test_connection_lost_in_the_blocked_lane_gives_outcome_unknown(scene: Scene) -> None:
    scene.writer.runner.patience_s = 10.0
    scene.store.held = {"c1"}

    def cut() -> None:
        scene.store.break_once = True

    scene.after(0.2, cut)
    assert isinstance((await outcomes_of(scene.pay("c1", "c")))[0], OutcomeUnknown)


@scene
async def test_error_in_the_blocked_lane_reaches_its_own_caller_only(scene: Scene) -> None:
    scene.store.held = {"a1"}
    scene.store.poison = {"c1": ZeroDivisionError("a bug")}
    outcomes = await outcomes_of(*[scene.pay(f"{user}1", user) for user in "abcdefg"])
    assert [type(outcomes[0]), type(outcomes[2])] == [Conflict, ZeroDivisionError]
    assert scene.store.written() == ["b1", "d1", "e1", "f1", "g1"]


@scene
async def test_close_waits_for_blocked_changes(scene: Scene) -> None:
    scene.store.held = {"c1"}
    scene.after(0.5, scene.store.held.clear)
    paying = scene.pay("c1", "c")
    await asyncio.sleep(0)
    await scene.writer.close()
    assert paying.done()
    assert scene.store.written() == ["c1"]


@scene
async def test_cancelled_caller_cancels_no_other(scene: Scene) -> None:
    """Its own change happens all the same, once."""
    scene.store.held = {"c1", "d1"}
    gone, other = scene.pay("c1", "c"), scene.pay("d1", "d")
    await scene.store.set_aside.wait()
    gone.cancel()
    scene.store.held.clear()
    await outcomes_of(other)
    await scene.writer.close()
    assert scene.store.written() == ["c1", "d1"]


def test_rows_shared_with_other_callers_are_not_taken_for_held() -> None:
    """Held money and what is in transit are in one account for all: there, one posting is meant."""
    plain = payment("k", "a", "b")
    assert list(own(plain, ACCOUNTS)) == ["a", ("user", "k")]
    assert list(own(payment("k", "bank", "capped"), ACCOUNTS)) == ["to capped", ("user", "k")]
    assert list(own(payment("k", "a", "b", consume=(7,)), ACCOUNTS)) == [7, ("user", "k")]
    assert list(own(plain, {})) == [("user", "k")]
    assert list(needs(plain)) == ["a", "to b", ("user", "k")]
    moved = Change(
        moves=(
            Move(flow="f", id="1", version=0, transitions=(NewTransition("", "e", "t"),), actor="me", delay_us=None),
        ),
        operation=Operation(scope="s", id="1", op="pay", fingerprint="x"),
    )
    assert list(own(moved, {})) == [("f", "1"), ("s", "1", "pay")]


@scene
async def test_bug_in_the_writer_is_raised_at_waiting_callers_and_the_next_go_through(scene: Scene) -> None:
    """Without an answer they would wait for ever. Whether they were written is unknown: no caller gets `Conflict`."""
    real, calls = scene.writer._count, 0

    async def mistaken() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            scene.pay("late", "d")
            waiting.append(scene.pay("b1", "b"))
            await asyncio.sleep(0)  # they wait behind this batch by now
            raise AssertionError("a mistake of ours")
        await real()

    scene.writer._count = mistaken  # type: ignore[method-assign]
    waiting: list[asyncio.Task[Any]] = []
    first = await outcomes_of(scene.pay("a1", "a"))
    assert first[0].receipts[0].key == "a1"
    assert isinstance((await outcomes_of(*waiting))[0], AssertionError)
    assert (await outcomes_of(scene.pay("c1", "c")))[0].receipts[0].key == "c1"


@scene
async def test_bug_in_the_blocked_lane_is_raised_at_its_callers(scene: Scene) -> None:
    scene.store.held = {"c1"}

    def mistaken(*_: object) -> None:
        raise AssertionError("a mistake of ours")

    scene.writer._blocked._mark = mistaken  # type: ignore[method-assign, assignment]
    assert isinstance((await outcomes_of(scene.pay("c1", "c")))[0], OutcomeUnknown)
    assert (await outcomes_of(scene.pay("d1", "d")))[0].receipts[0].key == "d1"


@scene
async def test_failed_consolidation_does_not_stop_the_writer(scene: Scene) -> None:
    waiting: list[asyncio.Task[Any]] = []

    async def damaged(above: int = 0) -> int:
        waiting.append(scene.pay("b1", "b"))
        await asyncio.sleep(0)  # it waits behind this batch by now
        raise ValueError("no number")

    scene.writer.consolidate = damaged  # type: ignore[method-assign]
    scene.writer.batches = CONSOLIDATE_EVERY - 1
    assert (await outcomes_of(scene.pay("a1", "a")))[0].receipts[0].key == "a1"
    assert (await outcomes_of(*waiting))[0].receipts[0].key == "b1"
