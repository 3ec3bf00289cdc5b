"""Every request is answered within its bound, whatever hangs behind it: the database, a disk, a core.

Whoever has not begun to answer by then is cancelled and not waited for, and the caller is told what that means: a read
can be repeated, and of a request that writes nobody knows whether it was carried out (its key tells). Time begins to
run when the body is there: how long a client may take to send it is another matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

import msgspec
from litestar.enums import ScopeType
from litestar.types import ASGIApp, Message, Receive, Scope, Send

from bursar.api.gate import ALWAYS_OPEN
from bursar.api.problems import COMMIT_UNKNOWN, DATABASE_UNAVAILABLE, MEDIA_TYPE, Problem
from bursar.api.strict import TAKES_BODY

log = logging.getLogger("bursar.api")


class Bound:
    """An ASGI application in front of another."""

    def __init__(self, app: ASGIApp, limit_s: float) -> None:
        self.app = app
        self._limit_s = limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != ScopeType.HTTP or scope["path"] in ALWAYS_OPEN:  # those have bounds of their own
            await self.app(scope, receive, send)
            return
        exchange = Exchange(receive, send, self._limit_s)
        running: Coroutine[Any, Any, None] = self.app(scope, exchange.receive, exchange.send)  # type: ignore[assignment]
        task = asyncio.get_running_loop().create_task(running, name="bursar-request")
        task.add_done_callback(exchange.end)
        if scope["method"] not in TAKES_BODY:
            exchange.start_clock()
        try:
            await exchange.ended
            if exchange.begun:  # the answer is on its way, at the client's own speed
                await asyncio.wait([task])
            limit = f"within {self._limit_s:g} s"
        except asyncio.CancelledError:  # the server stops: whoever has no answer yet gets one, and then it ends
            limit = "before the server was stopped"
        finally:
            exchange.over = True
            exchange.stop_clock()
            if not task.done():
                task.add_done_callback(_forget)
                task.cancel()
        if task.done():
            task.result()
            return
        if exchange.begun:
            return
        problem = _late(scope["method"], limit)
        log.warning("%s %s: %s: %s", scope["method"], scope["path"], problem.code, problem.detail)
        await _tell(send, problem)


class Exchange:
    """What passes between the client and the application, and how long that takes."""

    def __init__(self, receive: Receive, send: Send, limit_s: float) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # answered, or too late
        self.begun = False  # an answer is being sent
        self.over = False  # nothing that is said now counts
        self._receive = receive
        self._send = send
        self._limit_s = limit_s
        self._clock: asyncio.TimerHandle | None = None

    async def receive(self) -> Any:
        """The next part of the request; with the last one, time begins to run."""
        message = await self._receive()
        if self._clock is None and not message.get("more_body", False):
            self.start_clock()
        return message

    async def send(self, message: Message) -> None:
        """A part of the answer."""
        if not self.over:
            self.begun = True
            await self._send(message)

    def start_clock(self) -> None:
        """The request is here, all of it."""
        self._clock = asyncio.get_running_loop().call_later(self._limit_s, self.end)

    def stop_clock(self) -> None:
        """It is answered."""
        if self._clock is not None:
            self._clock.cancel()

    def end(self, *_: object) -> None:
        """There is nothing more to wait for."""
        if not self.ended.done():
            self.ended.set_result(None)


def _forget(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        log.info("after its time was over, a request ended with %s", task.exception())


def _late(method: str, limit: str) -> Problem:
    if method in TAKES_BODY:
        detail = f"no answer {limit}, and it may have been carried out or not; repeat it with the same key"
        return Problem(COMMIT_UNKNOWN, detail)
    return Problem(DATABASE_UNAVAILABLE, f"no answer {limit}; try again")


async def _tell(send: Send, problem: Problem) -> None:
    body = msgspec.json.encode(problem.body())
    headers = problem.all_headers() | {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}
    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
