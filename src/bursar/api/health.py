"""For monitoring: does it live, can it work, what has it done. No token is asked for, and no user is named."""

from __future__ import annotations

from typing import Any

from litestar import Request, Response, get

from bursar.api.answers import also
from bursar.api.metrics import CONTENT_TYPE, LOOK_S, Metrics
from bursar.api.transfers import Out
from bursar.runtime import Runtime
from bursar.store.probe import OK

Asked = Request[Any, Any, Any]


class Health(Out, frozen=True):
    """Whether it lives."""

    status: str


class Readiness(Out, frozen=True):
    """Whether it can work, and what is missing."""

    ready: bool
    database: str
    cores: dict[str, str]


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
    runtime: Runtime = request.app.state["runtime"]
    database = await runtime.probe.look(LOOK_S)
    cores = {
        kind.value: "ok" if client.is_connected else client.trouble or "no connection yet"
        for kind, client in runtime.cores.items()
    }
    ready = database == OK and set(cores.values()) <= {"ok"}
    found = Readiness(ready=ready, database=database, cores=cores)
    return Response(found, status_code=200 if ready else 503)


@get("/metrics", summary="Prometheus' text format", media_type=CONTENT_TYPE, security=[{}], tags=["health"])
async def metrics(request: Asked) -> Response[bytes]:
    """Requests, what is on its way by state and how long the oldest is there, what has ended here, alerts, cores."""
    counted: Metrics = request.app.state["metrics"]
    # The framework adds the charset to every text by itself: given here, it would be in the header twice.
    return Response(await counted.text(), media_type=CONTENT_TYPE.removesuffix("; charset=utf-8"))
