"""For those who watch: does it live, can it work, what has it done. No token is asked for, and nobody is named."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from typing import Any

import msgspec
from litestar import Request, Response, get

from bursar.api.documented import also
from bursar.api.gate import Traffic, family
from bursar.api.shapes import Health, Readiness
from bursar.model.errors import BursarError
from bursar.model.machine import Kind
from bursar.runtime import Runtime
from bursar.store.probe import OK

LOOK_S = 2.0  # how long the database may take to show that it takes writes
COUNTED_S = 5.0  # how old what was counted may be
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
    """503 while something is missing. The database has to commit a small write, not only to answer; one that was made
    in the last two seconds counts."""
    found = await _readiness(request.app.state["runtime"])
    return Response(found, status_code=200 if found.ready else 503)


async def _readiness(runtime: Runtime) -> Readiness:
    database = await runtime.probe.look(LOOK_S)
    cores = {
        kind.value: "ok" if client.is_connected else client.trouble or "no connection yet"
        for kind, client in runtime.cores.items()
    }
    ready = database == OK and set(cores.values()) <= {"ok"}
    return Readiness(ready=ready, database=database, cores=cores)


@get("/metrics", summary="Prometheus' text format", media_type=TEXT, security=[{}], tags=["health"])
async def metrics(request: Asked) -> Response[str]:
    """Requests, what is on its way by state and how long the oldest is there, what has ended here, alerts, cores."""
    traffic: Traffic = request.app.state["traffic"]
    runtime: Runtime = request.app.state["runtime"]
    watched: Watched = request.app.state["watched"]
    database, counted = await asyncio.gather(runtime.probe.look(LOOK_S), watched.lines())
    up = [("", int(database == OK))]
    lines = [
        *traffic.lines(),
        *family("bursar_database_up", "gauge", "Whether the database takes writes.", up),
        *counted,
        *_here(runtime),
    ]
    return Response("\n".join(lines) + "\n", media_type=TEXT)


class Watched:
    """What is counted in the database, at most once in a few seconds, however many ask.

    Only what has not ended is counted there, along the indexes that know it: what has ended grows for ever, and every
    process tells how much of it came to its end there.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = asyncio.Lock()
        self._seen: Seen | None = None

    async def lines(self) -> Iterable[str]:
        """Left out while the database is away, so that the rest can still be read."""
        try:
            async with asyncio.timeout(LOOK_S), self._lock:
                seen = await self._look()
        except (TimeoutError, BursarError):
            return []
        now_us = self._runtime.ports.now_us()
        ages = [(where, max(0, now_us - since_us) / 1e6) for where, (_, since_us) in seen.counts.items()]
        return [
            *family("bursar_records", "gauge", "Not ended.", [(where, n) for where, (n, _) in seen.counts.items()]),
            *family("bursar_record_oldest_seconds", "gauge", "Since when the oldest is in its state.", ages),
            *family("bursar_alerts", "gauge", "Not acknowledged.", seen.alerts),
        ]

    async def _look(self) -> Seen:
        now = self._runtime.ports.monotonic()
        if self._seen is None or now - self._seen.at > COUNTED_S:
            read = self._runtime.bursar.store.read
            counts = await read.records.open_counts(self._waiting())
            rung = Counter(alert.severity for alert in await read.alerts.open())
            self._seen = Seen(
                at=now,
                counts={_state(*key): counted for key, counted in counts.items()},
                alerts=[(f'{{severity="{severity}"}}', count) for severity, count in sorted(rung.items())],
            )
        return self._seen

    def _waiting(self) -> list[tuple[str, str]]:
        """States in which a record waits for somebody to speak, so that nobody drives it. Few."""
        machines = [flow.machine for engine in self._runtime.engines for flow in engine.flows.values()]
        return [(m.name, state.name) for m in machines for state in m.states if state.kind is Kind.WAIT]


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted, and when."""

    at: float
    counts: dict[str, tuple[int, int]]
    alerts: list[tuple[str, int]]


def _state(flow: str, state: str) -> str:
    return f'{{flow="{flow}",state="{state}"}}'


def _here(runtime: Runtime) -> Iterable[str]:
    """What this process knows by itself."""
    driven = sum(engine.in_progress for engine in runtime.engines)
    settled = [(_state(*key), count) for engine in runtime.engines for key, count in sorted(engine.settled.items())]
    up = [(f'{{core="{kind.value}"}}', int(client.is_connected)) for kind, client in runtime.cores.items()]
    floors = [
        (f'{{core="{kind.value}",floor="{name}"}}', height)
        for kind, client in runtime.cores.items()
        for name, height in (("room", client.floors.room), ("forget", client.floors.forget))
    ]
    return [
        *family("bursar_records_in_progress", "gauge", "Records that are being driven here.", [("", driven)]),
        *family("bursar_records_completed_total", "counter", "Records that came to an end here.", settled),
        *family("bursar_core_floor", "gauge", "Ids below which a core has no room for refunds, or forgets.", floors),
        *family("bursar_core_up", "gauge", "Whether there is a connection.", up),
    ]
