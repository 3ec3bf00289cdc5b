"""A supervised background task never fails silently: it is logged, alerted and run again; it stops when asked."""

from __future__ import annotations

import asyncio
import logging

import pytest

from bursar.supervise import BACKOFF_S, BACKOFF_S_MAX, STEADY_S, supervise


class Clock:
    """Time that passes only while a task sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class Work:
    """Fails as often as it is set to, then ends."""

    def __init__(self, clock: Clock, *failures: BaseException, lasts_s: float = 0.0) -> None:
        self.clock = clock
        self.failures = list(failures)
        self.lasts_s = lasts_s
        self.runs = 0

    async def __call__(self) -> None:
        self.runs += 1
        self.clock.now += self.lasts_s
        if self.failures:
            raise self.failures.pop(0)


def test_a_failed_task_is_logged_alerted_and_run_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, alerts = Clock(), list[str]()
    work = Work(clock, KeyError("row"), asyncio.CancelledError(), RuntimeError("bad"))

    async def alert(message: str) -> None:
        alerts.append(message)

    with caplog.at_level(logging.CRITICAL, "bursar.supervise"):
        asyncio.run(supervise("watch", work, clock, alert))
    assert work.runs == 4
    assert clock.slept == [BACKOFF_S, 2 * BACKOFF_S, 4 * BACKOFF_S]
    assert [text.split(": ")[1] for text in alerts] == ["KeyError", "CancelledError", "RuntimeError"]
    assert all("background task watch failed" in record.message for record in caplog.records)
    assert caplog.records[0].exc_info is not None  # with its traceback


def test_an_outage_is_one_line_without_an_alert(caplog: pytest.LogCaptureFixture) -> None:
    clock, alerts = Clock(), list[str]()
    work = Work(clock, ConnectionError("the database is away"), RuntimeError("bad"))

    async def alert(message: str) -> None:
        alerts.append(message)

    with caplog.at_level(logging.ERROR, "bursar.supervise"):
        asyncio.run(supervise("watch", work, clock, alert, (OSError,)))
    assert work.runs == 3
    assert [(record.levelname, bool(record.exc_info)) for record in caplog.records] == [
        ("ERROR", False),
        ("CRITICAL", True),
    ]
    assert [text.split(": ")[1] for text in alerts] == ["RuntimeError"]


def test_backoff_is_capped_and_begins_anew_after_a_steady_run() -> None:
    clock = Clock()
    asyncio.run(supervise("watch", Work(clock, *[OSError() for _ in range(12)]), clock))
    assert max(clock.slept) == clock.slept[-1] == BACKOFF_S_MAX
    clock = Clock()
    asyncio.run(supervise("watch", Work(clock, *[OSError() for _ in range(12)], lasts_s=STEADY_S + 1), clock))
    assert set(clock.slept) == {BACKOFF_S}


def test_an_alert_that_cannot_be_raised_does_not_end_the_task() -> None:
    clock = Clock()
    work = Work(clock, RuntimeError("bad"))

    async def alert(_message: str) -> None:
        raise OSError("the database is away")

    asyncio.run(supervise("watch", work, clock, alert))
    assert work.runs == 2


def test_a_supervised_task_ends_when_it_is_cancelled() -> None:
    async def play() -> bool:
        began = asyncio.Event()

        async def work() -> None:
            began.set()
            await asyncio.Event().wait()

        task = asyncio.create_task(supervise("watch", work, Clock()))
        await began.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return task.cancelled()

    assert asyncio.run(play())
