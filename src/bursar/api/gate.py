"""The gate before all routes: which requests are looked at, who sends them, how many, how often, and for how long.

A request takes one of the places when all of it is here: a body that never comes holds nothing but its own connection.
Beyond the limit the answer is 503 at once, with `Retry-After`: a queue without bound would only make every answer late.
One user gets a part of the places only. Health, readiness and metrics always get through; they are what one looks at
when it is full.

An address has one spelling here. The router would take `//metrics`, `/%6detrics` and `/metrics/` for `/metrics`, and a
proxy that blocks that address would have blocked one of four.

In the order of a request: `Gate` (form, places, token, rate), `Bound` (the time for an answer), then `check_role` (the
roles that the route allows).
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any

from litestar import Request
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPRequestEvent, HTTPScope, Message, Receive, Scope, Send

from bursar.api.metrics import Traffic
from bursar.api.problems import COMMIT_UNKNOWN, DATABASE_UNAVAILABLE, NOT_FOUND, OVERLOADED, OutageLog, Problem
from bursar.api.tokens import Identity, Keys, Role
from bursar.config import Config
from bursar.deadlines import Deadlines
from bursar.flows.transfers import Code
from bursar.ports import Ports

ALWAYS_OPEN = frozenset({"/healthz", "/readyz", "/metrics"})
ONCE = frozenset({b"authorization", b"content-length", b"content-type", b"host", b"idempotency-key"})
READS = frozenset({"GET", "HEAD", "OPTIONS"})
TAKES_BODY = frozenset({"POST", "PUT", "PATCH"})
AUTHENTICATED = "bursar_identity"  # in a request's state: whose valid token came with it
UNIDENTIFIED = "bursar_unidentified"  # or why it is not one: said by the routes that ask for one
ROLES = "bursar_roles"  # in a route's `opt`: those that may call it
TURN = "bursar_turn"  # in a request's state: how it is counted, if it may move money
NO_ROUTE = "(none)"
SECOND_US = 1_000_000

log = logging.getLogger("bursar.api")


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
                if scope["method"] == "HEAD":  # as many load balancers ask: a GET whose body the server leaves out
                    scope = {**scope, "method": "GET"}
                await self._app(scope, receive, send)
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
        """Whose request it is, counted as such; None if no valid token came with it."""
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        try:
            identity = self._keys.identify(header.decode("latin-1"), self._ports.now_us())
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
            known = status not in (404, 405)  # or random addresses would make a counter for each
            route = str(scope.get("path_template") or NO_ROUTE) if known else NO_ROUTE
            method = scope["method"] if known else NO_ROUTE
            traffic.count(method, route, status, self._ports.monotonic() - began)

    async def _refuse(self, problem: Problem, send: Send) -> None:
        if problem.code == OVERLOADED:
            self.traffic.rejected += 1
        else:
            self.traffic.count(NO_ROUTE, NO_ROUTE, problem.status, 0.0)
        await _answer_with(problem, send)


def _given(body: bytes, receive: Receive) -> Receive:
    """The body as one message; then whatever comes next, which is that the caller has gone."""
    messages: list[HTTPRequestEvent] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return messages.pop() if messages else await receive()

    return receiving


class Rate:
    """What each user has used up of the current second (T46), counted in memory: a row for each refused request would
    make a flood of them cost us more than its sender.

    Per process, then. What is *accepted* is counted once more in the transaction that writes the transfer, so that many
    hosts agree on it. Both count by the same seconds of the clock, and only the current one is remembered.
    """

    def __init__(self, ports: Ports, per_second: int, what: str) -> None:
        """`per_second` 0: no limit."""
        self._ports = ports
        self._per_second = per_second
        self._what = what
        self._second = 0
        self._counts: dict[str, int] = {}

    def count(self, who: str) -> None:
        """Count one request; a Problem if it is one too many."""
        if not self._per_second:
            return
        self._now()
        used = self._counts.get(who, 0)
        if used >= self._per_second:
            raise Problem(
                Code.RATE_LIMIT_EXCEEDED,
                f"more than {self._per_second} {self._what} in this second; try again in the next",
            )
        self._counts[who] = used + 1

    def give_back(self, who: str) -> None:
        """It turned out not to count."""
        self._now()
        if self._counts.get(who):
            self._counts[who] -= 1

    def _now(self) -> None:
        second = self._ports.now_us() // SECOND_US
        if second != self._second:  # also if the clock was set back
            self._second = second
            self._counts = {}


class Turn:
    """One request that wants to move money: counted once, whether it is carried out or refused; not if it repeats one
    that was accepted (T12)."""

    def __init__(self, rate: Rate, who: str) -> None:
        self._rate = rate
        self._who = who
        self._is_counted = False

    def count(self) -> None:
        """Count it; a Problem if it is one too many."""
        if not self._is_counted:
            self._rate.count(self._who)
            self._is_counted = True

    def give_back(self) -> None:
        """It was answered with what an earlier request got."""
        if self._is_counted:
            self._rate.give_back(self._who)
            self._is_counted = False


class Bound:
    """An ASGI application in front of another, which answers within a limit, whatever hangs behind it: the database, a
    disk, a core.

    A request that has not begun to be answered by then is cancelled and not waited for, and the answer says what that
    means: a read can be repeated; a request that writes may have been carried out or not (its key tells). The gate has
    read the body before: how long a client may take to send it is another matter.
    """

    def __init__(self, app: ASGIApp, limit_s: float, outages: OutageLog) -> None:
        self.app = app
        self._limit_s = limit_s
        self._outages = outages
        self._deadlines = Deadlines()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["path"] in ALWAYS_OPEN:  # those have bounds of their own
            await self.app(scope, receive, send)
            return
        is_begun = is_over = False  # whether an answer is being sent; whether nothing that is said now counts

        async def sending(message: Message) -> None:
            nonlocal is_begun
            if not is_over:
                is_begun = True
                await send(message)

        running: Coroutine[Any, Any, None] = self.app(scope, receive, sending)  # type: ignore[assignment]
        task = asyncio.get_running_loop().create_task(running, name="bursar-request")
        deadline = self._deadlines.begin(self._limit_s)
        try:
            await deadline.wait(task)
            if is_begun and not task.done():  # the answer is on its way, at the client's own speed
                await asyncio.wait([task])
            limit = f"within {self._limit_s:g} s"
        except asyncio.CancelledError:  # the server stops: a request without an answer gets one, and then it ends
            limit = "before the server was stopped"
        finally:
            is_over = True
            deadline.end()
            if not task.done():
                task.add_done_callback(_forget)
                task.cancel()
        if task.done():
            task.result()
            return
        if is_begun:
            return
        problem = _late(scope["method"], limit)
        self._outages.log(problem.code, f"{scope['method']} {scope['path']}: {problem.detail}")
        await _answer_with(problem, send)


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.info("after its time was over, a request ended with %s", task.exception())


def _late(method: str, limit: str) -> Problem:
    if method in TAKES_BODY:
        detail = f"no answer {limit}, and it may have been carried out or not; repeat it with the same key"
        return Problem(COMMIT_UNKNOWN, detail)
    return Problem(DATABASE_UNAVAILABLE, f"no answer {limit}; try again")


async def _answer_with(problem: Problem, send: Send) -> None:
    headers, body = problem.encoded()
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})


def allow(*roles: Role) -> dict[str, Any]:
    """A route's `opt`: only callers with one of these roles are let in."""
    return {ROLES: roles}


def check_role(request: Request[Any, Any, Any]) -> None:
    """Let in whom the route allows, before the body is read, and note whose request it is.

    Not a guard of the framework, which copies the route for each request that it asks a guard about.
    """
    roles = request.route_handler.opt.get(ROLES)
    if roles is None:  # health, and the description
        return
    state = request.scope["state"]
    if UNIDENTIFIED in state:  # the gate has looked already: checking a signature takes long
        raise state[UNIDENTIFIED]
    identity: Identity = state[AUTHENTICATED]
    if not identity.has(*roles):
        raise Problem(Code.FORBIDDEN, f"this needs the role {' or '.join(roles)}")
    request.scope["user"] = identity
