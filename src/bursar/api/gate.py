"""The gate before all routes: how many requests may be in progress, and what is counted for those who watch.

Beyond the limit the answer is 503 at once, with `Retry-After`: a queue without bound would only make everybody late.
Health, readiness and metrics always get through; they are what one looks at when it is full. Metrics are Prometheus'
text format, written by hand: a few lines, against a library with a registry for the whole process.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from bursar.api.problems import MEDIA_TYPE, OVERLOADED, Problem
from bursar.ports import Ports

ALWAYS_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
NO_ROUTE = "(none)"


class Traffic:
    """What has gone through, in numbers that only grow."""

    def __init__(self) -> None:
        self.in_progress = 0
        self.turned_away = 0
        self.requests: dict[tuple[str, str, int], int] = defaultdict(int)  # method, route, status
        self.slower: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))  # route → per bucket
        self.seconds: dict[str, float] = defaultdict(float)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request is over."""
        self.requests[method, route, status] += 1
        place = next((i for i, most in enumerate(BUCKETS_S) if seconds <= most), len(BUCKETS_S))
        self.slower[route][place] += 1
        self.seconds[route] += seconds

    def lines(self) -> Iterable[str]:
        """As Prometheus reads it."""
        yield from family("bursar_http_in_progress", "gauge", "Requests in progress.", [("", self.in_progress)])
        turned = [("", self.turned_away)]
        yield from family("bursar_http_turned_away_total", "counter", "Requests refused: too many at once.", turned)
        counts = [
            (f'{{method="{method}",route="{route}",status="{status}"}}', count)
            for (method, route, status), count in sorted(self.requests.items())
        ]
        yield from family("bursar_http_requests_total", "counter", "Requests answered.", counts)
        name = "bursar_http_request_seconds"
        yield f"# HELP {name} How long they took."
        yield f"# TYPE {name} histogram"
        for route, counted in sorted(self.slower.items()):
            so_far = 0
            for most, count in zip([*map(str, BUCKETS_S), "+Inf"], counted, strict=True):
                so_far += count
                yield f'{name}_bucket{{route="{route}",le="{most}"}} {so_far}'
            yield f'{name}_sum{{route="{route}"}} {self.seconds[route]:.6f}'
            yield f'{name}_count{{route="{route}"}} {so_far}'


def family(name: str, kind: str, what: str, values: Iterable[tuple[str, float]]) -> Iterable[str]:
    """One metric with its values, each with its labels."""
    yield f"# HELP {name} {what}"
    yield f"# TYPE {name} {kind}"
    for labels, value in values:
        yield f"{name}{labels} {value}"


class Gate:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, ports: Ports, traffic: Traffic, *, requests_max: int) -> None:
        self._app = app
        self._ports = ports
        self._traffic = traffic
        self._requests_max = requests_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["path"] in ALWAYS_OPEN:
            await self._app(scope, receive, send)
            return
        traffic = self._traffic
        if traffic.in_progress >= self._requests_max:
            traffic.turned_away += 1
            await _turn_away(send)
            return
        status = 500
        traffic.in_progress += 1
        began = self._ports.monotonic()

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        finally:
            traffic.in_progress -= 1
            known = status not in (404, 405)  # or whoever asks for random addresses makes a counter for each
            route = str(scope.get("path_template") or NO_ROUTE) if known else NO_ROUTE
            method = scope["method"] if known else NO_ROUTE
            traffic.count(method, route, status, self._ports.monotonic() - began)


async def _turn_away(send: Send) -> None:
    problem = Problem(OVERLOADED, "too many requests are in progress; try again in a moment")
    body = msgspec.json.encode(problem.body())
    headers = problem.all_headers() | {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
