"""For those who watch: does it live, can it work, what has it done. No token is asked for, and nobody is named."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from litestar import Request, Response, get

from bursar.api.documented import also
from bursar.api.gate import Traffic, family
from bursar.api.shapes import Health, Readiness
from bursar.model.errors import BursarError
from bursar.runtime import Runtime

LOOK_S = 2.0  # how long the database may take to show that it is there
TEXT = "text/plain; version=0.0.4; charset=utf-8"
Asked = Request[Any, Any, Any]


@get("/healthz", summary="Whether the process lives", security=[{}], tags=["health"])
async def healthz() -> Health:
    """It does, or there would be no answer."""
    return Health(status="ok")


@get(
    "/readyz",
    summary="Whether it can work: database and cores",
    responses=also(503, Readiness, "Something is missing."),
    security=[{}],
    tags=["health"],
)
async def readyz(request: Asked) -> Response[Readiness]:
    """503 while something is missing."""
    runtime: Runtime = request.app.state["runtime"]
    database = await _database(runtime)
    cores = {
        kind.value: "ok" if client.is_connected else client.trouble or "no connection yet"
        for kind, client in runtime.cores.items()
    }
    ready = database == "ok" and set(cores.values()) <= {"ok"}
    return Response(Readiness(ready=ready, database=database, cores=cores), status_code=200 if ready else 503)


@get("/metrics", summary="Prometheus' text format", media_type=TEXT, security=[{}], tags=["health"])
async def metrics(request: Asked) -> Response[str]:
    """Requests, transfers by state and how long the oldest is there, alerts, cores."""
    traffic: Traffic = request.app.state["traffic"]
    runtime: Runtime = request.app.state["runtime"]
    lines = [*traffic.lines(), *await _flows(runtime), *_cores(runtime)]
    return Response("\n".join(lines) + "\n", media_type=TEXT)


async def _database(runtime: Runtime) -> str:
    try:
        async with asyncio.timeout(LOOK_S):
            await runtime.bursar.store.read.pauses.list()
    except TimeoutError:
        return f"no answer within {LOOK_S} s"
    except BursarError as error:
        return error.code
    return "ok"


async def _flows(runtime: Runtime) -> Iterable[str]:
    """From the database; left out while it is away, so that the rest can still be read."""
    read = runtime.bursar.store.read
    try:
        async with asyncio.timeout(LOOK_S):
            counts, alerts = await read.records.counts(), await read.alerts.open()
    except (TimeoutError, BursarError):
        return family("bursar_database_up", "gauge", "Whether the database answers.", [("", 0)])
    now_us = runtime.ports.now_us()
    labels = {key: f'{{flow="{key[0]}",state="{key[1]}"}}' for key in counts}
    sums = [(labels[key], count) for key, (count, _) in counts.items()]
    ages = [(labels[key], max(0, now_us - since_us) / 1e6) for key, (_, since_us) in counts.items()]
    rung: dict[str, int] = {}
    for alert in alerts:
        rung[alert.severity] = rung.get(alert.severity, 0) + 1
    engine = runtime.transfers.engine
    return [
        *family("bursar_database_up", "gauge", "Whether the database answers.", [("", 1)]),
        *family("bursar_records", "gauge", "Records by flow and state.", sums),
        *family("bursar_record_oldest_seconds", "gauge", "Since when the oldest is in its state.", ages),
        *family("bursar_alerts", "gauge", "Not acknowledged.", [(f'{{severity="{s}"}}', n) for s, n in rung.items()]),
        *family("bursar_driven", "gauge", "Records that are being driven here.", [("", engine.in_hand)]),
        *family("bursar_settled_total", "counter", "Records that came to an end here.", [("", engine.settled)]),
    ]


def _cores(runtime: Runtime) -> Iterable[str]:
    up = [(f'{{core="{kind.value}"}}', int(client.is_connected)) for kind, client in runtime.cores.items()]
    return family("bursar_core_up", "gauge", "Whether there is a connection.", up)
