"""One TRON node over HTTP: a POST per question, and strict reading of what comes back.

A node has two interfaces. `wallet/` is its newest state, which may still change and includes what only waits.
`walletsolidity/` is what it calls final. java-tron serves them on two ports, gateways on one. The URL of a node names
the first; a fragment names the port of the second, if it is another: `http://10.0.0.5:8090#8091`.

Everything is answered with HTTP status 200, errors too: `{"Error": …}`. `{}` stands for "unknown", "never used" and
"malformed question" alike, so a question must be right before its answer means anything. Values that are 0 are left
out.
"""

from __future__ import annotations

import asyncio
import errno
import re
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

import msgspec

from bursar.rails.nodes import ANSWER_BYTES_MAX, CallFailed, Endpoint, Malformed, NodeFailed, Post, Shown

_HEX: Final = re.compile(r"([0-9a-f]{2})*", re.ASCII)
_PORT: Final = re.compile(r"[1-9][0-9]{0,4}", re.ASCII)


class Http:
    """One node. Every method is safe to use concurrently."""

    def __init__(self, endpoint: Endpoint, post: Post, timeout_s: float) -> None:
        self.name = endpoint.name
        base, _, port = endpoint.url.partition("#")
        self._bases = {"wallet": base, "walletsolidity": _on_port(base, port) if port else base}
        self._headers = {"content-type": "application/json", **endpoint.headers}
        self._post = post
        self._timeout_s = timeout_s
        self._shown = Shown(endpoint)

    async def wallet(self, method: str, **params: Any) -> Any:
        """Ask about the newest state, or give it a transaction."""
        return await self._ask("wallet", method, params)

    async def solid(self, method: str, **params: Any) -> Any:
        """Ask about what is final."""
        return await self._ask("walletsolidity", method, params)

    def text(self, said: object) -> str:
        """What the node says, short, on one line, and without its URL."""
        return self._shown.text(str(said).encode())

    async def _ask(self, interface: str, method: str, params: dict[str, Any]) -> Any:
        url = f"{self._bases[interface].rstrip('/')}/{interface}/{method}"
        too_large = False
        try:
            async with asyncio.timeout(self._timeout_s):
                status, answer = await self._post(url, self._headers, msgspec.json.encode(params), self._timeout_s)
        except TimeoutError:
            why = f"no answer within {self._timeout_s:g} s"
        except OSError as error:
            too_large = error.errno == errno.EMSGSIZE
            why = "the answer is too large" if too_large else f"no answer ({type(error).__name__})"  # no text: the URL
        else:
            return self._value(f"{interface}/{method}", status, answer)
        # Outside of `except`, so that the transport's own error is not printed with this one.
        raise NodeFailed(self.name, why, too_large=too_large)

    def _value(self, what: str, status: int, answer: bytes) -> Any:
        if status != 200:
            raise NodeFailed(self.name, f"HTTP status {status} to {what}")
        if len(answer) > ANSWER_BYTES_MAX:
            raise NodeFailed(self.name, f"an answer of {len(answer)} bytes is too large", too_large=True)
        try:
            found = msgspec.json.decode(answer)
        except (msgspec.DecodeError, RecursionError):
            # Such as "this API is closed because this node is a lite fullnode", which is no JSON.
            said = self.text(answer.decode(errors="replace"))
            raise NodeFailed(self.name, f"the answer to {what} is no JSON: {said}") from None
        if isinstance(found, dict) and "Error" in found:
            raise CallFailed(f"{what}: {self.text(found['Error'])}")
        return found


def _on_port(base: str, port: str) -> str:
    if not _PORT.fullmatch(port):
        raise ValueError("what stands behind # in the URL of a TRON node is the port of its walletsolidity")
    parts = urlsplit(base)
    user, at, _ = parts.netloc.rpartition("@")
    host = f"[{parts.hostname}]" if parts.hostname and ":" in parts.hostname else parts.hostname or ""
    return urlunsplit(parts._replace(netloc=f"{user}{at}{host}:{port}"))


# --- values ----------------------------------------------------------------------------------------------------------


def record(value: Any) -> dict[str, Any]:
    """An object of JSON."""
    if not isinstance(value, dict):
        raise Malformed("not an object")
    return value


def items(value: Any) -> list[Any]:
    """A list, which is left out if it is empty."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise Malformed("not a list")
    return value


def integer(found: dict[str, Any], name: str) -> int:
    """A number, which is left out if it is 0. Never a float: those lose digits."""
    value = found.get(name, 0)
    if not isinstance(value, int) or isinstance(value, bool):
        raise Malformed(f"{name} is no whole number")
    return value


def amount(found: dict[str, Any], name: str) -> int:
    """A number that is not negative."""
    value = integer(found, name)
    if value < 0:
        raise Malformed(f"{name} is negative")
    return value


def text(found: dict[str, Any], name: str) -> str:
    """A text, which is left out if it is empty."""
    value = found.get(name, "")
    if not isinstance(value, str):
        raise Malformed(f"{name} is no text")
    return value


def hexadecimal(value: Any, size: int | None = None) -> str:
    """Bytes in lower-case hexadecimal digits, of a known size if one is given."""
    if not isinstance(value, str) or not _HEX.fullmatch(value) or (size is not None and len(value) != 2 * size):
        raise Malformed(
            "not bytes in hexadecimal digits" if size is None else f"not {size} bytes in hexadecimal digits"
        )
    return value
