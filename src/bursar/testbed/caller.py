"""A caller of the API: one connection, one thread, the standard library alone.

Every failure on the way is `NoAnswer`: the request may have been carried out, or not, or may still be. A caller that
wants to know repeats it with the same client_order_id.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_S = 10.0


class NoAnswer(Exception):
    """The outcome of the request is unknown."""


@dataclass(frozen=True)
class Answered:
    """An answer, whatever it says."""

    status: int
    body: Any

    @property
    def code(self) -> str:
        """Why it was refused; nothing if it was not."""
        return str(self.body.get("code", "")) if isinstance(self.body, dict) else ""


class Caller:
    """Sends requests to wherever `address` says at the moment. Not for two threads at once."""

    def __init__(self, address: Callable[[], str | None], *, timeout_s: float = TIMEOUT_S) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._connection: http.client.HTTPConnection | None = None
        self._connected_to = ""

    def send(self, method: str, path: str, token: str, body: Any = None, key: str = "") -> Answered:
        """A request, perhaps under an `Idempotency-Key`, and its answer; NoAnswer if there is none."""
        address = self._address()
        if not address:
            raise NoAnswer("no process listens")
        headers = {"Authorization": f"Bearer {token}"} | ({} if body is None else {"Content-Type": "application/json"})
        headers |= {"Idempotency-Key": key} if key else {}
        try:
            connection = self._connect(address)
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            return Answered(response.status, json.loads(response.read() or b"null"))
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise NoAnswer(f"{type(error).__name__}: {error}") from error

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.close()

    def _connect(self, address: str) -> http.client.HTTPConnection:
        if self._connection is None or self._connected_to != address:
            self.close()
            parts = urlsplit(address)
            self._connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=self._timeout_s)
            self._connected_to = address
        return self._connection
