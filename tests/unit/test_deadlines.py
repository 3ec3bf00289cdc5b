"""Deadlines that share timers: never early, hardly late, and gone when their owners are done."""

from __future__ import annotations

import asyncio

import pytest

from bursar.deadlines import PARTS, Deadlines

LENGTH = 0.2


def test_deadlines_share_timers_and_none_is_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a thousand of one length and one of another, then they expire in time by a handful of timers."""

    async def play() -> tuple[list[float], int]:
        loop = asyncio.get_running_loop()
        deadlines = Deadlines()
        timers = 0
        real = loop.call_at

        def call_at(*args: object, **more: object) -> asyncio.TimerHandle:
            nonlocal timers
            timers += 1
            return real(*args, **more)  # type: ignore[arg-type]

        monkeypatch.setattr(loop, "call_at", call_at)
        late: list[float] = []
        for length in [0.4] * 1_000 + [0.2]:
            begun = loop.time()
            deadlines.add(length, lambda begun=begun, length=length: late.append(loop.time() - begun - length))  # type: ignore[misc]
        counted = timers
        await asyncio.sleep(0.6)
        return late, counted

    late, timers = asyncio.run(play())
    assert len(late) == 1_001
    assert min(late) >= -1e-6
    assert sorted(late)[500] < 0.4 / PARTS + 0.1
    assert timers < 10


def test_deadline_that_is_removed_does_not_expire() -> None:
    """Given three of one moment, when one is done and the second ends the third, then only the second expires."""

    async def play() -> list[str]:
        deadlines = Deadlines()
        expired: list[str] = []

        def first() -> None:
            expired.append("first")

        def third() -> None:
            expired.append("third")

        def second() -> None:
            expired.append("second")
            pending.pop(third)

        part = LENGTH / PARTS
        await asyncio.sleep(part - asyncio.get_running_loop().time() % part)  # so that all fall into one
        pending = deadlines.add(LENGTH, first)
        deadlines.add(LENGTH, second)
        assert deadlines.add(LENGTH, third) is pending
        del pending[first]
        await asyncio.sleep(1.5 * LENGTH)
        return expired

    assert asyncio.run(play()) == ["second"]


def test_failing_callback_does_not_keep_the_others_waiting() -> None:
    """A caller waits for each of them."""

    async def play() -> tuple[list[str], list[str]]:
        failed: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(repr(context["exception"])))
        expired: list[str] = []
        part = LENGTH / PARTS
        await asyncio.sleep(part - asyncio.get_running_loop().time() % part)
        deadlines = Deadlines()
        deadlines.add(LENGTH, lambda: expired.append("first"))
        deadlines.add(LENGTH, lambda: expired.remove("unknown"))
        deadlines.add(LENGTH, lambda: expired.append("third"))
        await asyncio.sleep(1.5 * LENGTH)
        return expired, failed

    expired, failed = asyncio.run(play())
    assert expired == ["first", "third"]
    assert [error.split("(")[0] for error in failed] == ["ValueError"]


@pytest.mark.parametrize("length", [0.0, -1.0])
def test_timeout_of_zero_expires_at_once(length: float) -> None:
    async def play() -> bool:
        over = asyncio.Event()
        Deadlines().add(length, over.set)
        assert not over.is_set()  # not before the caller has gone on
        await asyncio.wait_for(over.wait(), 1)
        return over.is_set()

    assert asyncio.run(play())


def test_work_is_ended_when_its_time_is_up_and_left_alone_when_not() -> None:
    async def play() -> list[object]:
        deadlines = Deadlines()
        seen: list[object] = [await deadlines.keep(LENGTH, asyncio.sleep(0, "done"))]
        try:
            await deadlines.keep(LENGTH / 10, asyncio.sleep(60))
        except TimeoutError:
            seen.append("too late")
        task = asyncio.create_task(deadlines.keep(60, asyncio.sleep(60)))
        await asyncio.sleep(0)
        task.cancel()  # by another task: that is no deadline
        try:
            await task
        except asyncio.CancelledError:
            seen.append("cancelled")
        return seen

    assert asyncio.run(play()) == ["done", "too late", "cancelled"]


def test_waiting_for_a_task_ends_with_it_or_with_the_time_and_never_ends_the_task() -> None:
    async def play() -> list[bool]:
        deadlines = Deadlines()
        quick, slow = asyncio.create_task(asyncio.sleep(0)), asyncio.create_task(asyncio.sleep(2 * LENGTH))
        await deadlines.wait(quick, 60)
        await deadlines.wait(quick, 60)  # and one that is over already
        await deadlines.wait(slow, LENGTH / 10)
        seen = [quick.done(), slow.done()]
        impatient = asyncio.create_task(deadlines.wait(slow, 60))
        await asyncio.sleep(0)
        impatient.cancel()
        await slow
        return [*seen, slow.cancelled()]

    assert asyncio.run(play()) == [True, False, False]
