"""A background task that never fails silently: its error is logged, an alert is raised, and it is run again.

Without this, a failed task is an exception that no caller retrieves: the process goes on, looks healthy, and no longer
checks conservation, delivers alerts or scans for due records. `supervise` returns only when the work itself returns (it
was asked to stop) or when the task that runs it is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Protocol

BACKOFF_S = 1.0
BACKOFF_S_MAX = 60.0
STEADY_S = 120.0  # after it has run for so long, the next back-off starts over

Alert = Callable[[str], Awaitable[object]]  # what went wrong, in one line

log = logging.getLogger("bursar.supervise")


class Clock(Protocol):
    """What is needed of the ports."""

    def monotonic(self) -> float:
        """Seconds that never run backwards."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""


async def supervise(
    name: str,
    work: Callable[[], Awaitable[object]],
    clock: Clock,
    alert: Alert | None = None,
    outages: tuple[type[Exception], ...] = (),
) -> None:
    """Run `work` until it returns; if it raises, log it, wait with exponential back-off, and run it again.

    `outages` are failures of an outside system that affect every task and pass: one line, and no alert.
    """
    wait_s = BACKOFF_S
    while True:
        began = clock.monotonic()
        try:
            await work()
            return
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise  # the supervisor itself is to stop
            failure: BaseException = error  # something inside the work was cancelled
        except Exception as error:
            failure = error
        if clock.monotonic() - began > STEADY_S:
            wait_s = BACKOFF_S
        what = f"background task {name} failed: {type(failure).__name__}: {failure}"
        if isinstance(failure, outages):
            log.error("%s; it is run again in %g s", what, wait_s)
        else:
            log.critical("%s; it is run again in %g s", what, wait_s, exc_info=failure)
            await _raise_alert(name, what, alert)
        await clock.sleep(wait_s)
        wait_s = min(2 * wait_s, BACKOFF_S_MAX)


async def _raise_alert(name: str, what: str, alert: Alert | None) -> None:
    """The log has it already: an alert that can't be raised (the database may be away) is no failure."""
    if alert is None:
        return
    try:
        await alert(what)
    except Exception as error:
        log.error("no alert could be raised for %s: %s: %s", name, type(error).__name__, error)
