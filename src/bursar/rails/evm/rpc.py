"""JSON-RPC of one node: many calls in one request, and strict reading of what comes back.

Calls of different callers travel together: a few requests are under way at a time, and what is asked meanwhile goes
with the next one, equal calls once. A request begins after everything that is in it was asked, so no answer is older
than its question.

The transport is injected (`bursar.http.Pool.post`, or a test's own). A node that does not answer, answers something
else than was asked, or is not HTTP at all has *failed* (`NodeFailed`), and its answer says nothing. An error that a
node gives to one call is a value (`CallError`): "already known" and "execution reverted" are answers.

A node's URL often carries an API key. It is in no error and no representation; what a node says is shown without it.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from bursar.rails.nodes import (
    ANSWER_BYTES_MAX,
    CallFailed,
    Endpoint,
    Malformed,
    NodeFailed,
    Post,
    Shown,
    field,
)

__all__ = [  # what the other modules of this rail need to talk to a node, in one place
    "ANSWER_BYTES_MAX",
    "Call",
    "CallError",
    "CallFailed",
    "Endpoint",
    "Malformed",
    "NodeFailed",
    "Post",
    "Rpc",
    "data",
    "field",
    "fixed",
    "quantity",
    "result",
]

CALLS_MAX = 100  # in one request: what hosted nodes commonly accept
REQUESTS_MAX = 2  # under way at one node: a slow one holds up no other, and a crowd does not become a crowd of requests

_QUANTITY = re.compile(r"0x(0|[1-9a-fA-F][0-9a-fA-F]*)", re.ASCII)
_DATA = re.compile(r"0x([0-9a-fA-F]{2})*", re.ASCII)
QUANTITY_DIGITS_MAX = 66  # 256 bits


class Call(NamedTuple):
    """One method with its parameters."""

    method: str
    params: tuple[Any, ...] = ()


class CallError(msgspec.Struct, frozen=True):
    """What a node says instead of a result."""

    code: int
    message: str
    data: bytes = b""  # what a reverted call returned


class _Answer(msgspec.Struct):
    id: int | None = None
    result: Any = None
    error: dict[str, Any] | None = None


_answers = msgspec.json.Decoder(list[_Answer])


class _Group(NamedTuple):
    """Calls of one caller, as they are written, and who waits for their results."""

    calls: list[bytes]
    results: asyncio.Future[list[Any]]


class Rpc:
    """One node. Every method is safe to use concurrently."""

    def __init__(self, endpoint: Endpoint, post: Post, timeout_s: float) -> None:
        self.name = endpoint.name
        self._url = endpoint.url
        self._headers = {"content-type": "application/json", **endpoint.headers}
        self._post = post
        self._timeout_s = timeout_s
        self._shown = Shown(endpoint)
        self._waiting: list[_Group] = []
        self._requests: set[asyncio.Task[None]] = set()  # under way

    async def batch(self, calls: Sequence[Call]) -> list[Any]:
        """One result or `CallError` for each call, in order. `NodeFailed` if any of them got no answer."""
        results: list[Any] = []
        for start in range(0, len(calls), CALLS_MAX):
            results += await self._asked([_written(call) for call in calls[start : start + CALLS_MAX]])
        return results

    async def _asked(self, calls: list[bytes]) -> list[Any]:
        """The results of so many calls, which go with the next request."""
        group = _Group(calls, asyncio.get_running_loop().create_future())
        self._waiting.append(group)
        self._requests = {task for task in self._requests if not task.done()}
        if len(self._requests) < REQUESTS_MAX:
            self._requests.add(asyncio.create_task(self._send(), name=f"requests to {self.name}"))
        return await group.results

    async def _send(self) -> None:
        """Requests with all that waits, one after the other, until nothing does."""
        taken: list[_Group] = []
        try:
            while taken := self._taken():
                await self._answer(taken)
        finally:
            for group in taken:
                group.results.cancel()  # of no effect, unless this task was cancelled: its process ends

    def _taken(self) -> list[_Group]:
        """As many of those that wait as fit into one request."""
        taken: list[_Group] = []
        calls: set[bytes] = set()
        while self._waiting and len(calls.union(self._waiting[0].calls)) <= CALLS_MAX:
            group = self._waiting.pop(0)
            if not group.results.done():  # its caller has not given up
                calls.update(group.calls)
                taken.append(group)
        return taken

    async def _answer(self, groups: list[_Group]) -> None:
        places: dict[bytes, int] = {}
        for group in groups:
            for call in group.calls:
                places.setdefault(call, len(places))
        try:
            results = await self._request(list(places))
        except NodeFailed as failed:
            if failed.too_large and len(groups) > 1:
                for group in groups:
                    await self._answer([group])
                return
            # What waits would only wait for the same again: one that hangs costs its timeout once.
            waiting = [] if failed.too_large else self._waiting
            self._waiting = self._waiting if failed.too_large else []
            for group in (*groups, *waiting):
                if not group.results.done():
                    group.results.set_exception(failed)
        else:
            for group in groups:
                if not group.results.done():
                    group.results.set_result([results[places[call]] for call in group.calls])

    async def _request(self, calls: list[bytes]) -> list[Any]:
        written = [b'{"jsonrpc":"2.0","id":%d,%b' % (number, call) for number, call in enumerate(calls)]
        body = b"[" + b",".join(written) + b"]"
        too_large = False
        try:
            async with asyncio.timeout(self._timeout_s):
                status, answer = await self._post(self._url, self._headers, body, self._timeout_s)
        except TimeoutError:
            why = f"no answer within {self._timeout_s:g} s"
        except OSError as error:
            too_large = error.errno == errno.EMSGSIZE
            why = "the answer is too large" if too_large else f"no answer ({type(error).__name__})"  # no text: the URL
        else:
            return self._results(calls, status, answer)
        # Outside of `except`, so that the transport's own error is not printed with this one.
        raise NodeFailed(self.name, why, too_large=too_large)

    def _results(self, calls: Sequence[bytes], status: int, answer: bytes) -> list[Any]:
        if status != 200:
            raise NodeFailed(self.name, f"HTTP status {status}")
        if len(answer) > ANSWER_BYTES_MAX:
            raise NodeFailed(self.name, f"an answer of {len(answer)} bytes is too large", too_large=True)
        try:
            found = _answers.decode(answer)
        except (msgspec.DecodeError, RecursionError):
            raise NodeFailed(self.name, f"the answer is no JSON-RPC batch: {self._shown.text(answer)}") from None
        by_id = {one.id: one for one in found}
        if len(found) != len(calls) or any(number not in by_id for number in range(len(calls))):
            raise NodeFailed(self.name, f"{len(calls)} calls were made and {len(by_id)} were answered")
        return [self._result(by_id[number]) for number in range(len(calls))]

    def _result(self, one: _Answer) -> Any:
        if one.error is None:
            return one.result
        code, message, data = one.error.get("code"), one.error.get("message"), one.error.get("data")
        returned = bytes.fromhex(data[2:]) if isinstance(data, str) and _DATA.fullmatch(data) else b""
        return CallError(code if isinstance(code, int) else 0, self._shown.text(str(message).encode()), returned)


def _written(call: Call) -> bytes:
    """Method and parameters, as they stand behind the number of a call."""
    return msgspec.json.encode({"method": call.method, "params": call.params})[1:]


# --- values ----------------------------------------------------------------------------------------------------------


def result(value: Any) -> Any:
    """A result; `CallFailed` if the node gave an error to a call that can't be refused."""
    if isinstance(value, CallError):
        raise CallFailed(f"error {value.code}: {value.message}")
    return value


def quantity(value: Any) -> int:
    """An integer: 0x and digits, without leading zeros."""
    if not isinstance(value, str) or len(value) > QUANTITY_DIGITS_MAX or not _QUANTITY.fullmatch(value):
        raise Malformed("not a quantity")
    return int(value, 16)


def data(value: Any) -> bytes:
    """Bytes: 0x and an even number of digits."""
    if not isinstance(value, str) or not _DATA.fullmatch(value):
        raise Malformed("not data")
    return bytes.fromhex(value[2:])


def fixed(value: Any, size: int) -> str:
    """Bytes of a known length (a hash, an address), as lower-case text."""
    if not isinstance(value, str) or len(value) != 2 + 2 * size or not _DATA.fullmatch(value):
        raise Malformed(f"not {size} bytes")
    return value.lower()
