"""The tasks beside a worker: each supervised, and all of them stopped within the time that there is.

A task that fails is run again and an alert is raised, whatever it is (supervise). Records that are being driven when
the time is up stay where they are, as a crash would leave them, and the next worker goes on with them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial

from bursar.engine.alerts import AlertDispatcher, Sink
from bursar.engine.engine import Engine
from bursar.engine.forced import keep_asking
from bursar.engine.pauses import watch_pauses
from bursar.engine.worker import Worker
from bursar.model.errors import Conflict, DatabaseUnavailable, OutcomeUnknown
from bursar.stopping import Stopping
from bursar.supervise import supervise

AWAY = (DatabaseUnavailable, OutcomeUnknown, Conflict)  # the database is away for all callers, or slow, and comes back
Job = Callable[[], Awaitable[object]]

log = logging.getLogger("bursar.engine")


def background(engine: Engine, name: str, job: Job) -> asyncio.Task[None]:
    """A task that does not end in silence: it is run again, and an alert is raised."""

    async def alert(message: str) -> None:
        await engine.alert(None, f"{name} failed", "critical", message)

    return asyncio.create_task(supervise(name, job, engine.ports, alert, AWAY), name=name)


def usual_jobs(engine: Engine, sinks: Mapping[str, Sink], paused_s: float) -> dict[str, Job]:
    """What every process with a worker runs: deliver alerts, watch pauses, ask about forced calls."""
    return {
        "bursar-alerts": AlertDispatcher(engine.store, sinks).run,
        "bursar-pauses": partial(watch_pauses, engine, paused_s),
        "bursar-forced-calls": partial(keep_asking, engine),
    }


@asynccontextmanager
async def running(worker: Worker, jobs: Mapping[str, Job], stopping: Stopping) -> AsyncIterator[None]:
    """A worker and other jobs, until the context ends; then they are stopped, and records are waited for."""
    engine = worker.engine
    engine.logs_alerts = False  # the dispatcher does, once
    working = background(engine, "bursar-worker", worker.run)
    beside = [background(engine, name, job) for name, job in jobs.items()]
    try:
        yield
    finally:
        worker.stop()
        for task in beside:
            task.cancel()
        await asyncio.wait([working, *beside], timeout=stopping.left_s(0.3))
        for task in (working, *beside):  # in the middle of a look, or of what can't be cancelled
            task.cancel()
        await asyncio.wait([working, *beside], timeout=stopping.left_s(0.3))


async def finish(engine: Engine, stopping: Stopping) -> None:
    """Wait for what is being driven, and leave the rest to the next worker."""
    left = await engine.finish(stopping.left_s(0.5))
    if left:
        log.warning("%s records are left where they are; the next worker goes on with them", left)
