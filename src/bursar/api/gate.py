"""The gate before all routes: which requests are looked at, how many may be in progress, and what is counted.

A request takes one of the places when all of it is here: a body that never comes holds nothing but its own connection.
Beyond the limit the answer is 503 at once, with `Retry-After`: a queue without bound would only make everybody late.
One user gets a part of the places only. Health, readiness and metrics always get through; they are what one looks at
when it is full.

An address has one spelling here. The router would take `//metrics`, `/%6detrics` and `/metrics/` for `/metrics`, and
whoever blocks that address in a proxy would have blocked one of four.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPRequestEvent, HTTPScope, Message, Receive, Scope, Send

from bursar.api.metrics import Traffic
from bursar.api.problems import MEDIA_TYPE, NOT_FOUND, OVERLOADED, Problem
from bursar.api.rates import Rate, Turn
from bursar.api.tokens import Identity, Keys, Role
from bursar.config import Config
from bursar.flows.transfers import Code
from bursar.ports import Ports

ALWAYS_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
ONCE = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key"})
READS = frozenset({"GET", "HEAD", "OPTIONS"})
AUTHENTICATED = "bursar_identity"  # in a request's state: whose valid token came with it
UNIDENTIFIED = "bursar_unidentified"  # or why it is not one: said by the routes that ask for one
TURN = "bursar_turn"  # in a request's state: how it is counted, if it may move money
NO_ROUTE = "(none)"


class Routes:
    """Every address that there is, as it is spelled."""

    def __init__(self, templates: Iterable[str]) -> None:
        split = [tuple(template.encode().split(b"/")) for template in templates]
        self._plain = frozenset(b"/".join(parts) for parts in split if not any(p.startswith(b"{") for p in parts))
        self._others = [parts for parts in split if b"/".join(parts) not in self._plain]

    def know(self, raw_path: bytes) -> bool:
        """Whether an address is one of them, byte by byte; where a route has a parameter, anything but nothing is."""
        if raw_path in self._plain:
            return True
        parts = raw_path.split(b"/")
        return any(_fits(parts, template) for template in self._others)


def _fits(parts: Sequence[bytes], template: Sequence[bytes]) -> bool:
    return len(parts) == len(template) and all(
        part == wanted or (part and wanted.startswith(b"{")) for part, wanted in zip(parts, template, strict=True)
    )


class Gate:
    """An ASGI application in front of another."""

    def __init__(
        self, app: ASGIApp, ports: Ports, traffic: Traffic, config: Config, keys: Keys, routes: Iterable[str]
    ) -> None:
        self.traffic = traffic
        self._app = app
        self._ports = ports
        self._config = config
        self._keys = keys
        self._routes = Routes(routes)
        self._per_user: Counter[str] = Counter()  # requests in progress, and those whose body is being read
        self._moves = Rate(ports, config.limit_per_second, "requests to move money")
        self._reads = Rate(ports, config.limit_reads_per_second, "requests to read")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP:
            await self._app(scope, receive, send)
            return
        scope.setdefault("state", {})
        try:
            self._check_form(scope)
            if scope["path"] in ALWAYS_OPEN:
                await self._app(_as_get(scope), receive, send)
                return
            self._check_places()
            identity = self._identify(scope)
        except Problem as problem:
            await self._refuse(problem, send)
            return
        if identity is None:
            await self._answer(scope, receive, send)  # the route refuses it, before anything of its body is read
        else:
            await self._of_user(identity, scope, receive, send)

    def _check_form(self, scope: HTTPScope) -> None:
        raw_path = scope.get("raw_path") or scope["path"].encode()
        if not self._routes.know(raw_path):
            raise Problem(NOT_FOUND, "there is nothing at this address")
        names = [name for name, _ in scope["headers"]]
        for name in ONCE:
            if names.count(name) > 1:
                raise Problem(Code.INVALID_REQUEST, f"the header {name.decode()} is given twice")

    def _check_places(self) -> None:
        if self.traffic.in_progress >= self._config.requests_max:
            raise Problem(OVERLOADED, "too many requests are in progress; try again in a moment")

    def _identify(self, scope: HTTPScope) -> Identity | None:
        """Whose request it is, counted as such; None if nobody's that is known here."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        try:
            identity = self._keys.identify(header.decode("latin-1"))
        except Problem as problem:
            scope["state"][UNIDENTIFIED] = problem
            return None
        scope["state"][AUTHENTICATED] = identity
        if scope["method"] not in READS:
            if identity.has(Role.USER):
                scope["state"][TURN] = Turn(self._moves, identity.subject)
        elif not identity.is_staff:
            self._reads.count(identity.subject)
        most = self._config.requests_per_user_max
        if most and self._per_user[identity.subject] >= most:
            raise Problem(Code.RATE_LIMIT_EXCEEDED, f"{most} requests of yours are in progress; wait for their answers")
        return identity

    async def _of_user(self, identity: Identity, scope: HTTPScope, receive: Receive, send: Send) -> None:
        who = identity.subject
        self._per_user[who] += 1
        try:
            body = await self._whole_body(receive)
            if body is None:
                self.traffic.hung_up += 1
                return
            self._check_places()
            await self._answer(scope, _given(body, receive), send)
        except Problem as problem:
            await self._refuse(problem, send)
        finally:
            self._per_user[who] -= 1
            if not self._per_user[who]:
                del self._per_user[who]

    async def _whole_body(self, receive: Receive) -> bytes | None:
        """All of it, or as much as shows that it is too large; None if the caller hangs up before."""
        body = b""
        while True:
            message = await receive()
            if message["type"] != "http.request":
                return None
            body += message["body"]
            if not message["more_body"] or len(body) > self._config.body_bytes_max:
                return body

    async def _answer(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        traffic, status = self.traffic, 500
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

    async def _refuse(self, problem: Problem, send: Send) -> None:
        if problem.code == OVERLOADED:
            self.traffic.rejected += 1
        else:
            self.traffic.count(NO_ROUTE, NO_ROUTE, problem.status, 0.0)
        body = msgspec.json.encode(problem.body())
        headers = problem.all_headers() | {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}
        raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": problem.status, "headers": raw})
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _as_get(scope: HTTPScope) -> HTTPScope:
    """HEAD, as many load balancers ask, is GET whose body the server leaves out: the same status and headers."""
    return {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope


def _given(body: bytes, receive: Receive) -> Receive:
    """The body as one message; then whatever comes next, which is that the caller has gone."""
    messages: list[HTTPRequestEvent] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return messages.pop() if messages else await receive()

    return receiving
