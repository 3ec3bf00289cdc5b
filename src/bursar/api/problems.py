"""What is refused, as HTTP: `application/problem+json` (RFC 9457) with the specification's `code`.

One rule for the status: 400 if the request can't be read, 422 if it was read and is refused, and of its own where HTTP
has a word for it (`STATUSES`, documented in docs/reference/api.md). A `detail` is something a person can act on and
never tells about our inside.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from bursar.flows.deposits import DepositCode
from bursar.flows.transfers import Code
from bursar.flows.withdrawals import WithdrawalCode
from bursar.flows.withdrawals.addresses import AddressCode

MEDIA_TYPE = "application/problem+json"
RETRY_S = 1
DETAIL_LENGTH_MAX = 500

# Codes beside those of the specification.
NOT_FOUND = "NOT_FOUND"
METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
REQUEST_TIMEOUT = "REQUEST_TIMEOUT"
PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
HEADERS_TOO_LARGE = "HEADERS_TOO_LARGE"
OVERLOADED = "OVERLOADED"
DATABASE_UNAVAILABLE = "DATABASE_UNAVAILABLE"
CORE_UNAVAILABLE = "CORE_UNAVAILABLE"
COMMIT_UNKNOWN = "COMMIT_UNKNOWN"
PAYOUTS_NOT_CONFIGURED = "PAYOUTS_NOT_CONFIGURED"
NODES_UNAVAILABLE = "NODES_UNAVAILABLE"

# Every code that has a status of its own; any other refusal is 422.
STATUSES: dict[str, int] = {
    Code.INVALID_REQUEST: 400,
    "INVALID_NAME": 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    WithdrawalCode.UNKNOWN_APPROVER: 403,
    WithdrawalCode.OWN_REQUEST: 403,
    Code.TRANSFER_NOT_FOUND: 404,
    "RECORD_NOT_FOUND": 404,
    "DOCUMENT_NOT_FOUND": 404,
    "PROPOSAL_NOT_FOUND": 404,
    WithdrawalCode.NOT_FOUND: 404,
    NOT_FOUND: 404,
    METHOD_NOT_ALLOWED: 405,
    REQUEST_TIMEOUT: 408,
    Code.DUPLICATE_REQUEST: 409,
    "IDEMPOTENCY_KEY_REUSED": 409,
    "INVALID_STATE": 409,
    "RECORD_MOVED": 409,
    "PAYOUT_EXISTS": 409,
    WithdrawalCode.FEE_CHANGED: 409,
    WithdrawalCode.ALREADY_ORDERED: 409,
    WithdrawalCode.TOO_LATE: 409,
    AddressCode.ADDRESS_EXISTS: 409,
    DepositCode.NOT_HELD: 409,
    DepositCode.SAME_PERSON: 409,
    "DOCUMENT_MOVED": 409,
    "PROPOSAL_OPEN": 409,
    "SECOND_PERSON_NEEDED": 409,
    PAYLOAD_TOO_LARGE: 413,
    UNSUPPORTED_MEDIA_TYPE: 415,
    Code.RATE_LIMIT_EXCEEDED: 429,
    Code.DAILY_LIMIT_EXCEEDED: 429,
    Code.DAILY_AMOUNT_EXCEEDED: 429,
    WithdrawalCode.HOURLY_LIMIT_EXCEEDED: 429,
    HEADERS_TOO_LARGE: 431,
    Code.SYSTEM_ERROR: 500,
    Code.TRANSFERS_PAUSED: 503,
    OVERLOADED: 503,
    DATABASE_UNAVAILABLE: 503,
    CORE_UNAVAILABLE: 503,
    NODES_UNAVAILABLE: 503,
    PAYOUTS_NOT_CONFIGURED: 503,
    DepositCode.NOT_READY: 503,
    COMMIT_UNKNOWN: 503,
}
REFUSED = 422
# Codes of which one cause refuses every request for as long as it lasts.
OUTAGES = frozenset({Code.TRANSFERS_PAUSED, OVERLOADED, DATABASE_UNAVAILABLE, CORE_UNAVAILABLE, PAYOUTS_NOT_CONFIGURED})
OUTAGE_OVER_S = 60.0

log = logging.getLogger("bursar.api")


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request was refused."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"
    id: str | None = None  # of an unexpected error, to be found in the log
    req_id: str | None = None  # of a transfer that may or may not have been written


class Problem(Exception):
    """Raised where a request is refused by the API itself."""

    def __init__(
        self, code: str, detail: str, *, id: str | None = None, req_id: str | None = None, **headers: str
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.id = id
        self.req_id = req_id
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def status(self) -> int:
        """Its HTTP status."""
        return STATUSES.get(self.code, REFUSED)

    def encoded(self) -> tuple[dict[str, str], bytes]:
        """Headers and body, as they are sent: with the headers that its status asks for, too."""
        found = dict(self.headers)
        if self.status == 401:
            found.setdefault("WWW-Authenticate", "Bearer")
        if self.status in (429, 503):
            found.setdefault("Retry-After", str(RETRY_S))
        details = ProblemDetails(
            title=self.code.replace("_", " ").capitalize(),
            status=self.status,
            code=self.code,
            detail=self.detail[:DETAIL_LENGTH_MAX],
            id=self.id,
            req_id=self.req_id,
        )
        body = msgspec.json.encode(details)
        return found | {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body))}, body


class OutageLog:
    """One log line when an outage begins, not one for each request that it refuses. It is over when no request was
    refused for a minute; every other code is logged each time."""

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._last: dict[str, float] = {}

    def log(self, code: str, what: str) -> None:
        """Log what was refused, unless it is part of an outage that was logged."""
        now, last = self._monotonic(), self._last.get(code, float("-inf"))
        if code not in OUTAGES:
            log.warning("%s: %s", code, what)
        elif now - last > OUTAGE_OVER_S:
            log.error("%s: %s; further ones are not logged until there was none for a minute", code, what)
        self._last[code] = now
