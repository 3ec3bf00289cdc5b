"""One HTTP connection, with a bound on everything that its other end decides: size and time of a request's head, size
and time of its body, how long it stays silent, how slowly it reads.

uvicorn's own protocol on httptools bounds none of it: a head without end is collected in memory, a head or a body that
never ends keeps its connection for ever, and a thousand requests in one packet become a thousand requests in memory. Of
such a pipeline only the first request is answered here, and the connection closed (RFC 9112 §9.3.2 allows it): today
only attackers send one.

Not here: how many connections there may be, and which are closed to make room (http_server).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from ipaddress import IPv6Address, ip_address
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as UvicornConnection
from uvicorn.server import ServerState

from bursar.api.gate import AUTHENTICATED
from bursar.api.metrics import Traffic
from bursar.api.problems import HEADERS_TOO_LARGE, OVERLOADED, PAYLOAD_TOO_LARGE, REQUEST_TIMEOUT, Problem
from bursar.config import Config as Settings
from bursar.flows.transfers import Code

HEADERS_MAX = 100
SLICE_BYTES = 16_384  # fed to the parser at a time: so much may pass a limit before it is noticed
FRAMING_FACTOR = 8  # bytes on the wire per byte of a chunked body: a chunk of one byte has six
FRAMING_BYTES = 65_536
CLOSING_S = 2.0  # for a last answer to be read


class Phase(Enum):
    """What is being waited for."""

    HEAD = "head"  # the head of a request, or its first byte on a new connection
    BODY = "body"  # the body
    BUSY = "busy"  # the answer
    REST = "rest"  # the rest of a body that was answered already
    IDLE = "idle"  # the next request


class _Refused(Exception):
    """Raised in the parser's callbacks, which stops it."""


class Connection(UvicornConnection):
    """uvicorn's protocol, bounded."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        bounds: Settings,
        traffic: Traffic,
        made: Callable[[Connection], None],
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._bounds = bounds
        self._traffic = traffic
        self._made = made
        self.phase = Phase.HEAD
        self.since = self.loop.time()  # of the phase
        self.address = ""
        self.is_known = False  # a valid token came over it
        self._stalled_since: float | None = None  # the other end does not read
        self._received = 0  # bytes, of a head or of a body
        self._head_bytes = 0  # of a head, as far as it is parsed
        self._is_deaf = False  # nothing more is read from it
        self._refusal: Problem | None = None

    # --- what asyncio calls --------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._traffic.connections += 1
        self.address = network_of(self.client)
        self._made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._traffic.connections -= 1
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        for start in range(0, len(data), SLICE_BYTES):
            if self._is_deaf:
                return
            self._feed(data if len(data) <= SLICE_BYTES else data[start : start + SLICE_BYTES])

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """The other end has sent all that it will. It may still wait for the answer to a whole request."""
        if self.phase is not Phase.BUSY:
            return None
        self._close_after_answer()
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = None

    # --- what the parser calls -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.phase is Phase.BUSY:  # a pipeline
            self._close_after_answer()
            raise _Refused
        self._head_bytes = 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self.phase is not Phase.HEAD:
            return  # a trailer: it must not pass for a header that was checked
        if len(self.headers) >= HEADERS_MAX:
            raise self._refused(HEADERS_TOO_LARGE, f"more than {HEADERS_MAX} headers")
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if b"#" in self.url:  # a proxy in front of us may read the path otherwise than we do
            raise self._refused(Code.INVALID_REQUEST, "a fragment (#) is no part of an address that is sent")
        self._enter(Phase.BODY)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter(Phase.IDLE if self.phase is Phase.REST else Phase.BUSY)

    # --- what the application's answer calls ---------------------------------------------------------------------

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        self.is_known = self.is_known or AUTHENTICATED in self.cycle.scope["state"]
        if self.phase is Phase.BODY:
            self.phase = Phase.REST  # since the body began
        elif self.phase is Phase.BUSY:
            self._enter(Phase.IDLE)
        if not self.transport.is_closing():
            self.flow.resume_reading()

    # --- what the server calls -----------------------------------------------------------------------------------

    @property
    def rank(self) -> int | None:
        """How soon it is closed to make room, lowest first; None: not while it is being answered."""
        if self.phase is Phase.BUSY:
            return None
        if self.phase is Phase.BODY:
            return 3
        if not self.is_known:
            return 0
        return 2 if self.phase is Phase.HEAD else 1

    def check_time(self, now: float) -> None:
        """Close it if it has taken longer than it may."""
        if self.transport.is_closing():
            if now - self.since > CLOSING_S:
                self.transport.abort()  # what is left to be sent is not being read
            return
        if self._stalled_since is not None and now - self._stalled_since > self._bounds.body_timeout_ms / 1000:
            self.close_now("answer_not_read")
            return
        limit_s = self._limit_s()
        if limit_s is None or now - self.since <= limit_s:
            return
        if self.phase is Phase.BODY or (self.phase is Phase.HEAD and self._received):
            which = "headers" if self.phase is Phase.HEAD else "body"
            self._refuse(Problem(REQUEST_TIMEOUT, f"the {which} did not come within {limit_s:g} s"), f"{which}_timeout")
        else:
            self.close_now("idle_timeout" if self.phase is Phase.IDLE else f"{self.phase.value}_timeout")

    def _limit_s(self) -> float | None:
        """How long it may stay in its phase; None: as long as the answer takes."""
        match self.phase:
            case Phase.HEAD:
                return self._bounds.header_timeout_ms / 1000
            case Phase.BODY | Phase.REST:
                return self._bounds.body_timeout_ms / 1000
            case Phase.IDLE:
                return self._bounds.idle_timeout_ms / 1000
            case Phase.BUSY:
                return None

    def close_now(self, reason: str) -> None:
        """Close it without a word."""
        self._traffic.closed[reason] += 1
        self._is_deaf = True
        self.connections.discard(self)  # at once, or the next newcomer would close another one for it
        self.transport.abort()

    def turn_away(self) -> None:
        """There is no room for it."""
        self._refuse(Problem(OVERLOADED, "too many connections; try again in a moment"), "no_room")

    def shutdown(self) -> None:
        """The server ends. A request that is not here as a whole is not waited for."""
        if self.phase is Phase.BUSY:
            self.cycle.keep_alive = False
        elif self.phase is Phase.BODY:
            self.transport.abort()
        else:
            self.transport.close()

    # --- inside --------------------------------------------------------------------------------------------------

    def _enter(self, phase: Phase) -> None:
        self.phase, self.since, self._received = phase, self.loop.time(), 0

    def _feed(self, data: bytes) -> None:
        if self.phase is Phase.IDLE:
            self._enter(Phase.HEAD)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # answered as if it had not asked for another protocol
            self._close_after_answer()
        except httptools.HttpParserError:
            if not self._is_deaf:
                problem = self._refusal or Problem(Code.INVALID_REQUEST, "this is not HTTP/1.1 as RFC 9112 has it")
                self._refuse(problem, "malformed" if problem.code == Code.INVALID_REQUEST else "headers_too_large")
        else:
            self._received += len(data)
            self._check_size()

    def _check_size(self) -> None:
        bounds = self._bounds
        body_wire_bytes = FRAMING_FACTOR * bounds.body_bytes_max + FRAMING_BYTES
        if self.phase is Phase.HEAD and self._received > bounds.header_bytes_max + SLICE_BYTES:
            self._refuse(_head_too_large(bounds), "headers_too_large")
        elif self.phase in (Phase.BODY, Phase.REST) and self._received > body_wire_bytes:
            self._refuse(Problem(PAYLOAD_TOO_LARGE, "the body is too large"), "body_too_large")

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > self._bounds.header_bytes_max:
            self._refusal = _head_too_large(self._bounds)
            raise _Refused

    def _refused(self, code: str, detail: str) -> _Refused:
        self._refusal = Problem(code, detail)
        return _Refused()

    def _close_after_answer(self) -> None:
        self._is_deaf = True
        self.flow.pause_reading()
        self.cycle.keep_alive = False

    def _refuse(self, problem: Problem, reason: str) -> None:
        """Answer in place of the application, if it has not begun to, and close."""
        self._traffic.closed[reason] += 1
        self._is_deaf = True
        if self.phase in (Phase.BUSY, Phase.REST):
            self.transport.abort()
            return
        headers, body = problem.encoded()
        lines = [f"{name.lower()}: {value}\r\n".encode() for name, value in (headers | {"Connection": "close"}).items()]
        self.transport.write(b"".join([STATUS_LINE[problem.status], *lines, b"\r\n", body]))
        self.since = self.loop.time()
        self.transport.close()


def network_of(client: tuple[str, int] | None) -> str:
    """Whose connection it is: an IPv4 address, or the half of an IPv6 address that a customer gets as a whole."""
    try:
        address = ip_address(client[0].partition("%")[0] if client else "")
    except ValueError:
        return ""
    if not isinstance(address, IPv6Address):
        return str(address)
    return str(address.ipv4_mapped or address.packed[:8].hex())


def _head_too_large(bounds: Settings) -> Problem:
    return Problem(HEADERS_TOO_LARGE, f"address and headers are larger than {bounds.header_bytes_max} bytes")
