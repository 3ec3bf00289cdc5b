"""How people are told: once per alert and sink, again until it worked, whatever the other sinks do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import asyncpg
import pytest
from tests.builders import Place, scenario
from tests.toy import Program, World, program

from bursar.engine import AlertDispatcher, Notice
from bursar.engine.alerts import FAILURES_MAX, LEASE_S
from bursar.model.retry import Retry
from bursar.store import Store

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

AT_ONCE = Retry(first_s=1e-6, cap_s=1e-6)
LATER = Retry(first_s=50, cap_s=50, jitter=0)
WAIT_S = 30.0


class Pager:
    """A sink that can be broken, for all alerts or for some."""

    def __init__(self, *broken: str) -> None:
        self.broken = set(broken)
        self.tried: list[str] = []
        self.told: list[Notice] = []

    async def __call__(self, notice: Notice) -> None:
        self.tried.append(notice.reason)
        if self.broken & {"all", notice.reason}:
            raise ConnectionError("nobody\x00 answers")
        self.told.append(notice)

    @property
    def reasons(self) -> list[str]:
        return [notice.reason for notice in self.told]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def raised(p: Program, *reasons: str) -> None:
    for reason in reasons:
        await p.engine.alert(None, reason, "warning", f"look at {reason}")


@scenario
async def test_an_alert_is_told_once_and_again_after_it_was_acknowledged(place: Place) -> None:
    async with program(place, World()) as p:
        pager = Pager()
        dispatcher = AlertDispatcher(p.engine.store, {"pager": pager})
        record = await p.order("o-1")
        for _ in range(3):
            await p.engine.alert(record, "stuck", "warning", "look")
            await dispatcher.dispatch()
        await p.engine.alert(None, "disk", "critical", "full")
        await p.engine.alert(record, "other", "critical", "look")
        assert await dispatcher.dispatch() == 2
        assert sorted(pager.reasons) == ["disk", "other", "stuck"]
        first = pager.told[0]
        assert (first.record, first.flow, first.record_id, first.severity, first.message, first.attempt) == (
            record.number,
            "orders",
            "o-1",
            "warning",
            "look",
            1,
        )
        assert await p.people.acknowledge(record.number, "stuck", actor="ann")
        assert await dispatcher.dispatch() == 0
        await p.engine.alert(record, "stuck", "warning", "look again")
        assert await dispatcher.dispatch() == 1
        assert pager.told[-1].message == "look again"
        assert len({notice.id for notice in pager.told}) == 4


@scenario
async def test_a_sink_that_is_down_repeats_none_of_the_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given one of two that is down, then the other is told once; and the first when it is back, once."""
    monkeypatch.setattr("bursar.engine.alerts.LEASE_S", 0.0)  # what keeps it from being told again is that it was told
    async with program(place, World()) as p:
        broken, fine = Pager("all"), Pager()
        dispatcher = AlertDispatcher(p.engine.store, {"broken": broken, "fine": fine}, back_off=AT_ONCE)
        await raised(p, "one", "two")
        assert await dispatcher.dispatch() == 2
        for _ in range(3):
            assert await dispatcher.dispatch() == 0
        assert (fine.reasons, broken.told) == (["one", "two"], [])
        assert broken.tried.count("one") == 4
        broken.broken.clear()
        assert await dispatcher.dispatch() == 2
        assert broken.reasons == ["one", "two"]
        assert {notice.attempt for notice in broken.told} == {5}
        assert await dispatcher.dispatch() == 0
        assert fine.reasons == ["one", "two"]


@scenario
async def test_what_was_not_told_is_told_after_a_restart_and_the_rest_is_not(place: Place) -> None:
    async with program(place, World()) as p:
        await raised(p, "one", "two")
        await AlertDispatcher(p.engine.store, {"fine": Pager(), "picky": Pager("two")}, back_off=AT_ONCE).dispatch()
    async with program(place, World()) as p:
        fine, picky, new = Pager(), Pager(), Pager()
        await AlertDispatcher(p.engine.store, {"fine": fine, "picky": picky, "new": new}).dispatch()
        assert (fine.reasons, picky.reasons, new.reasons) == ([], ["two"], ["one", "two"])


@scenario
async def test_between_two_attempts_it_backs_off(place: Place) -> None:
    async with program(place, World()) as p:
        pager = Pager("all")
        dispatcher = AlertDispatcher(p.engine.store, {"pager": pager}, back_off=LATER)
        await raised(p, "one")
        for _ in range(3):
            await dispatcher.dispatch()
        assert pager.tried == ["one"]
        assert await rows(p.engine.store, place) == [
            ("one", "pager", 1, "ConnectionError: nobody\ufffd answers", False)
        ]


@scenario
async def test_an_alert_that_nobody_can_take_does_not_hold_up_the_others(place: Place) -> None:
    """The sink refuses some alerts for ever: those that were never told come first, and are told."""
    async with program(place, World()) as p:
        bad = [f"bad-{n}" for n in range(FAILURES_MAX + 2)]
        pager = Pager(*bad)
        dispatcher = AlertDispatcher(p.engine.store, {"pager": pager}, back_off=AT_ONCE)
        await raised(p, *bad, "good")
        await dispatcher.dispatch()
        assert pager.tried == bad[:FAILURES_MAX]  # it may be down: it is not asked a hundred times in a row
        await dispatcher.dispatch()
        assert pager.reasons == ["good"]


@scenario
async def test_a_sink_that_hangs_holds_up_nobody(place: Place) -> None:
    async with program(place, World()) as p:
        hanging, fine = asyncio.Event(), Pager()
        reached: list[str] = []

        async def hangs(notice: Notice) -> None:
            reached.append(notice.reason)
            await hanging.wait()

        dispatcher = AlertDispatcher(p.engine.store, {"hangs": hangs, "fine": fine}, poll_s=0.01)
        running = asyncio.create_task(dispatcher.run())
        await raised(p, "one")
        await until(lambda: fine.reasons == ["one"] and reached == ["one"])
        await raised(p, "two")
        await until(lambda: fine.reasons == ["one", "two"])
        assert reached == ["one"]
        hanging.set()
        await until(lambda: reached == ["one", "two"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@scenario
async def test_a_store_that_fails_ends_no_bell(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async with program(place, World()) as p:
        pager, failures = Pager(), 0
        real = AlertDispatcher._round

        async def shaky(self: AlertDispatcher, name: str) -> tuple[int, float]:
            nonlocal failures
            if failures < 3:
                failures += 1
                raise OSError("the disk is gone")
            return await real(self, name)

        monkeypatch.setattr(AlertDispatcher, "_round", shaky)
        running = asyncio.create_task(AlertDispatcher(p.engine.store, {"pager": pager}, poll_s=0.01).run())
        await raised(p, "one")
        await until(lambda: pager.reasons == ["one"])
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@scenario
async def test_of_several_processes_one_tells(place: Place) -> None:
    async with program(place, World()) as p, program(place, World(), worker="two") as q:
        told: list[str] = []

        async def slow(notice: Notice) -> None:
            told.append(notice.reason)
            await asyncio.sleep(0.02)

        reasons = [f"r-{n:02}" for n in range(10)]
        await raised(p, *reasons)
        dispatchers = [AlertDispatcher(one.engine.store, {"pager": slow}) for one in (p, q, p, q)]
        assert sum(await asyncio.gather(*[dispatcher.dispatch() for dispatcher in dispatchers])) == 10
        assert sorted(told) == reasons


@scenario
async def test_whoever_dies_while_telling_leaves_it_to_others(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a process that is killed between telling and writing it down, then somebody tells again: never is worse."""
    monkeypatch.setattr("bursar.engine.alerts.LEASE_S", 0.2)
    async with program(place, World()) as p:
        reached = asyncio.Event()

        async def dies(_: Notice) -> None:
            reached.set()
            await asyncio.Event().wait()

        await raised(p, "one")
        dying = asyncio.create_task(AlertDispatcher(p.engine.store, {"pager": dies}).dispatch())
        await reached.wait()
        pager = Pager()
        dispatcher = AlertDispatcher(p.engine.store, {"pager": pager})
        assert await dispatcher.dispatch() == 0  # it is being told
        dying.cancel()
        await asyncio.gather(dying, return_exceptions=True)
        async with asyncio.timeout(WAIT_S):
            while not await dispatcher.dispatch():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert [(n.reason, n.attempt) for n in pager.told] == [("one", 2)]
        assert LEASE_S > 60


@scenario
async def test_an_alert_raised_anew_while_the_old_one_is_told_is_told_too(place: Place) -> None:
    async with program(place, World()) as p:
        record = await p.order()
        told: list[str] = []

        async def slow(notice: Notice) -> None:
            told.append(notice.message)
            if len(told) == 1:
                await p.people.acknowledge(record.number, "stuck", actor="ann")
                await p.engine.alert(record, "stuck", "warning", "again")

        dispatcher = AlertDispatcher(p.engine.store, {"slow": slow})
        await p.engine.alert(record, "stuck", "warning", "first")
        await dispatcher.dispatch()
        await dispatcher.dispatch()
        await dispatcher.dispatch()
        assert told == ["first", "again"]


async def rows(store: Store, place: Place) -> list[tuple[Any, ...]]:
    """What is written down of deliveries: reason, sink, attempts, error, whether it was told."""
    schema = "bursar." if place.engine == "postgres" else ""
    sql = f"SELECT reason, sink, attempts, error, delivered_at IS NOT NULL FROM {schema}alert_deliveries"
    if place.engine == "postgres":
        connection = await asyncpg.connect(place.url)
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()
    file = store.ports.sqlite(str(place.path), read_only=True)
    try:
        return [(*row[:4], bool(row[4])) for row in file.execute(sql)]
    finally:
        file.close()
