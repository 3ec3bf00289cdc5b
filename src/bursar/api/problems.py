"""What is refused, as HTTP: `application/problem+json` (RFC 9457) with the specification's `code`.

One rule for the status: 400 if the request can't be read, 422 if it was read and is refused, and of its own where HTTP
has a word for it (`STATUSES`, documented in docs/reference/api.md). A `detail` is something a person can act on and
never tells about our inside: what is unexpected is logged with an id, and the id is all that the caller gets.
"""

from __future__ import annotations

import logging
from typing import Any

import msgspec
from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException

from bursar.flows.transfers import Code, TransferRefused
from bursar.model.errors import BursarError, Conflict, OutcomeUnknown, Refusal, StoreError
from bursar.ports import Ports

MEDIA_TYPE = "application/problem+json"
RETRY_S = 1
DAY_S = 86_400
DETAIL_LENGTH_MAX = 500

log = logging.getLogger("bursar.api")

# Codes beside those of the specification.
NOT_FOUND = "NOT_FOUND"
METHOD_NOT_ALLOWED = "METHOD_NOT_ALLOWED"
PAYLOAD_TOO_LARGE = "PAYLOAD_TOO_LARGE"
UNSUPPORTED_MEDIA_TYPE = "UNSUPPORTED_MEDIA_TYPE"
OVERLOADED = "OVERLOADED"
DATABASE_UNAVAILABLE = "DATABASE_UNAVAILABLE"
CORE_UNAVAILABLE = "CORE_UNAVAILABLE"

# Every code that has a status of its own; any other refusal is 422.
STATUSES: dict[str, int] = {
    Code.INVALID_REQUEST: 400,
    "INVALID_NAME": 400,
    Code.UNAUTHORIZED: 401,
    Code.FORBIDDEN: 403,
    Code.TRANSFER_NOT_FOUND: 404,
    "RECORD_NOT_FOUND": 404,
    NOT_FOUND: 404,
    METHOD_NOT_ALLOWED: 405,
    Code.DUPLICATE_REQUEST: 409,
    "OTHER_REQUEST": 409,
    "NOT_POSSIBLE": 409,
    "RECORD_MOVED": 409,
    PAYLOAD_TOO_LARGE: 413,
    UNSUPPORTED_MEDIA_TYPE: 415,
    Code.RATE_LIMIT_EXCEEDED: 429,
    Code.DAILY_LIMIT_EXCEEDED: 429,
    Code.DAILY_AMOUNT_EXCEEDED: 429,
    Code.SYSTEM_ERROR: 500,
    Code.TRANSFERS_PAUSED: 503,
    OVERLOADED: 503,
    DATABASE_UNAVAILABLE: 503,
    CORE_UNAVAILABLE: 503,
}
REFUSED = 422
_BY_STATUS = {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED, 413: PAYLOAD_TOO_LARGE, 415: UNSUPPORTED_MEDIA_TYPE}


class ProblemDetails(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a request was refused."""

    title: str
    status: int
    code: str
    detail: str
    type: str = "about:blank"
    id: str | None = None  # of an unexpected error, to be found in the log


class Problem(Exception):
    """Raised where a request is refused by the API itself."""

    def __init__(self, code: str, detail: str, *, id: str | None = None, **headers: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.id = id
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    @property
    def status(self) -> int:
        """Its HTTP status."""
        return STATUSES.get(self.code, REFUSED)

    def body(self) -> ProblemDetails:
        """What is sent."""
        return ProblemDetails(
            title=self.code.replace("_", " ").capitalize(),
            status=self.status,
            code=self.code,
            detail=self.detail[:DETAIL_LENGTH_MAX],
            id=self.id,
        )

    def all_headers(self) -> dict[str, str]:
        """Those that its status asks for, too."""
        found = dict(self.headers)
        if self.status == 401:
            found.setdefault("WWW-Authenticate", "Bearer")
        if self.status in (429, 503):
            found.setdefault("Retry-After", str(RETRY_S))
        return found


def answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The answer to a request that ended with an exception."""
    ports: Ports = request.app.state["ports"]
    problem = problem_of(error, ports)
    if problem.status >= 500 and problem.id is None:
        log.warning("%s %s: %s: %s", request.method, request.scope["path"], problem.code, problem.detail)
    content = msgspec.json.encode(problem.body())
    return Response(content, status_code=problem.status, media_type=MEDIA_TYPE, headers=problem.all_headers())


def problem_of(error: Exception, ports: Ports) -> Problem:
    """An exception as a problem."""
    match error:
        case Problem():
            return error
        case TransferRefused(reason=Code.RATE_LIMIT_EXCEEDED, why=why):
            return Problem(error.reason, f"too many transfers in this second: {why}")
        case TransferRefused(reason=Code.DAILY_LIMIT_EXCEEDED | Code.DAILY_AMOUNT_EXCEEDED, why=why):
            tomorrow = DAY_S - ports.now_us() // 1_000_000 % DAY_S
            return Problem(error.reason, f"used up for today (UTC): {why}", Retry_After=str(tomorrow))
        case TransferRefused():
            return Problem(error.reason, error.why)
        case OutcomeUnknown():
            detail = "the database went away while this was written; repeat it with the same client_order_id"
            return Problem(DATABASE_UNAVAILABLE, detail)
        case StoreError():
            log.error("the database can't be used: %s", error)
            return Problem(DATABASE_UNAVAILABLE, "the database can't be used just now; nothing was written, try again")
        case Conflict():
            return Problem(OVERLOADED, "others were faster, too often; nothing was written, try again")
        case Refusal():
            return Problem(error.code, str(error))
        case ConnectionError():
            log.error("a core can't be reached: %s", error)
            return Problem(
                CORE_UNAVAILABLE, "the trading core can't be reached just now; nothing was written, try again"
            )
        case HTTPException() if error.status_code < 500:
            return _of_http(error)
        case RecursionError():
            return Problem(Code.INVALID_REQUEST, "the body is nested too deeply")
    return _unexpected(error, ports)


def _of_http(error: HTTPException) -> Problem:
    """What the framework refused by itself."""
    code = _BY_STATUS.get(error.status_code, str(Code.INVALID_REQUEST))
    detail = error.detail
    if isinstance(error, ValidationException) and isinstance(error.extra, list):
        said = [f"{part.get('key', 'body')}: {part['message']}" for part in error.extra if isinstance(part, dict)]
        detail = "; ".join(said) or detail
    if code == METHOD_NOT_ALLOWED:
        detail = "this address does not know that method"
    elif code == NOT_FOUND:
        detail = "there is nothing at this address"
    elif code == PAYLOAD_TOO_LARGE:
        detail = "the body is too large"
    found = Problem(code, detail or "the request can't be read")
    found.headers = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return found


def _unexpected(error: Exception, ports: Ports) -> Problem:
    id_ = ports.token()
    surprise = error if not isinstance(error, BursarError) else None
    log.error("unexpected, %s: %s", id_, error, exc_info=surprise or error)
    detail = f"something unexpected happened; ask with this id: {id_}. Repeat it with the same client_order_id"
    return Problem(Code.SYSTEM_ERROR, detail, id=id_)
