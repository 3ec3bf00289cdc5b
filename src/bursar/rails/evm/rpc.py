"""JSON-RPC of one node: many calls in one request, and strict reading of what comes back.

The transport is injected (`bursar.http.Pool.post`, or a test's own). A node that does not answer, answers something
else than was asked, or is not HTTP at all has *failed* (`NodeFailed`), and its answer says nothing. An error that a
node gives to one call is a value (`CallError`): "already known" and "execution reverted" are answers.

A node's URL often carries an API key. It is in no error and no representation; what a node says is shown without it.
"""

from __future__ import annotations

import asyncio
import errno
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

Post = Callable[[str, Mapping[str, str], bytes, float], Awaitable[tuple[int, bytes]]]

CALLS_MAX = 100  # in one request: what hosted nodes commonly accept
ANSWER_BYTES_MAX = 32 << 20
MESSAGE_CHARS_MAX = 300
SECRET_CHARS_MIN = 6  # shorter parts of a URL are words such as "v1" or "rpc"

_QUANTITY = re.compile(r"0x(0|[1-9a-fA-F][0-9a-fA-F]*)", re.ASCII)
_DATA = re.compile(r"0x([0-9a-fA-F]{2})*", re.ASCII)
QUANTITY_DIGITS_MAX = 66  # 256 bits


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """One node as it is configured."""

    name: str
    url: str
    headers: dict[str, str] = {}

    def __repr__(self) -> str:
        return f"Endpoint(name={self.name!r})"  # URL and headers may contain keys


class Call(NamedTuple):
    """One method with its parameters."""

    method: str
    params: tuple[Any, ...] = ()


class CallError(msgspec.Struct, frozen=True):
    """What a node says instead of a result."""

    code: int
    message: str
    data: bytes = b""  # what a reverted call returned


class NodeFailed(Exception):
    """The node gave no answer that can be used. `why` contains nothing of its URL."""

    def __init__(self, node: str, why: str, *, too_large: bool = False) -> None:
        super().__init__(f"{node}: {why}")
        self.node = node
        self.why = why
        self.too_large = too_large  # fewer calls in one request may do


class Malformed(ValueError):
    """A value in an answer is not what the interface says."""


class CallFailed(Malformed):
    """An error came in place of a result that was needed. It may be the question's fault, and not the node's."""


class _Answer(msgspec.Struct):
    id: int | None = None
    result: Any = None
    error: dict[str, Any] | None = None


_answers = msgspec.json.Decoder(list[_Answer])


class Rpc:
    """One node. Every method is safe to use concurrently."""

    def __init__(self, endpoint: Endpoint, post: Post, timeout_s: float) -> None:
        self.name = endpoint.name
        self._url = endpoint.url
        self._headers = {"content-type": "application/json", **endpoint.headers}
        self._post = post
        self._timeout_s = timeout_s
        self._secrets = _secrets(endpoint)

    async def batch(self, calls: Sequence[Call]) -> list[Any]:
        """One result or `CallError` for each call, in order. `NodeFailed` if any of them got no answer."""
        results: list[Any] = []
        for start in range(0, len(calls), CALLS_MAX):
            results += await self._request(calls[start : start + CALLS_MAX])
        return results

    async def _request(self, calls: Sequence[Call]) -> list[Any]:
        body = msgspec.json.encode(
            [
                {"jsonrpc": "2.0", "id": number, "method": call.method, "params": call.params}
                for number, call in enumerate(calls)
            ]
        )
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

    def _results(self, calls: Sequence[Call], status: int, answer: bytes) -> list[Any]:
        if status != 200:
            raise NodeFailed(self.name, f"HTTP status {status}")
        if len(answer) > ANSWER_BYTES_MAX:
            raise NodeFailed(self.name, f"an answer of {len(answer)} bytes is too large", too_large=True)
        try:
            found = _answers.decode(answer)
        except (msgspec.DecodeError, RecursionError):
            raise NodeFailed(self.name, f"the answer is no JSON-RPC batch: {self._shown(answer)}") from None
        by_id = {one.id: one for one in found}
        if len(found) != len(calls) or any(number not in by_id for number in range(len(calls))):
            raise NodeFailed(self.name, f"{len(calls)} calls were made and {len(by_id)} were answered")
        return [self._result(by_id[number]) for number in range(len(calls))]

    def _result(self, one: _Answer) -> Any:
        if one.error is None:
            return one.result
        code, message, data = one.error.get("code"), one.error.get("message"), one.error.get("data")
        returned = bytes.fromhex(data[2:]) if isinstance(data, str) and _DATA.fullmatch(data) else b""
        return CallError(code if isinstance(code, int) else 0, self._shown(str(message).encode()), returned)

    def _shown(self, said: bytes) -> str:
        """What a node says, short, on one line, and without its URL."""
        text = said[: 4 * MESSAGE_CHARS_MAX].decode(errors="replace")
        for secret in self._secrets:
            text = text.replace(secret, "…")
        return "".join(c if c.isprintable() else " " for c in text)[:MESSAGE_CHARS_MAX]


def _secrets(endpoint: Endpoint) -> list[str]:
    """The parts of a URL and of its headers that could be a key, longest first."""
    parts = urlsplit(endpoint.url)
    found = {endpoint.url, parts.netloc, parts.path, parts.query, parts.username or "", parts.password or ""}
    found |= set(parts.path.split("/")) | set(re.split(r"[&=]", parts.query)) | set((parts.hostname or "").split("."))
    found |= {word for value in endpoint.headers.values() for word in (value, *value.split())}
    return sorted((one for one in found if len(one) >= SECRET_CHARS_MIN), key=len, reverse=True)


# --- values ----------------------------------------------------------------------------------------------------------


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


def field(record: Any, name: str) -> Any:
    """A field that must be there."""
    if not isinstance(record, dict) or name not in record:
        raise Malformed(f"{name} is missing")
    return record[name]
