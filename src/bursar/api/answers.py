"""What a route may answer, and exceptions as answers.

A refusal says why. What is unexpected is logged with an id, and the id is all that the caller gets.
"""

from __future__ import annotations

import logging
from typing import Any

from litestar import Request, Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.openapi.datastructures import ResponseSpec

from bursar.api.gate import TURN, Turn
from bursar.api.problems import (
    COMMIT_UNKNOWN,
    CORE_UNAVAILABLE,
    DATABASE_UNAVAILABLE,
    MEDIA_TYPE,
    METHOD_NOT_ALLOWED,
    NODES_UNAVAILABLE,
    NOT_FOUND,
    OVERLOADED,
    PAYLOAD_TOO_LARGE,
    UNSUPPORTED_MEDIA_TYPE,
    OutageLog,
    Problem,
    ProblemDetails,
)
from bursar.flows.deposits import DepositRefused
from bursar.flows.payouts import PayoutRefused
from bursar.flows.transfers import Code, CommitUnknown, TransferRefused
from bursar.flows.withdrawals import WithdrawalCode, WithdrawalRefused
from bursar.flows.withdrawals.addresses import AddressRefused
from bursar.model.errors import Conflict, OutcomeUnknown, Refusal, StoreError
from bursar.ports import Ports
from bursar.rails.chain import FeeTooHigh, NodesUnavailable

WORDS = {
    400: "The request can't be read.",
    401: "No token, or not a valid one.",
    403: "Not with this token.",
    404: "There is nothing of that name for this caller.",
    408: "The headers or the body did not come in time.",
    409: "Something else was asked for under that name before, or it is decided already.",
    413: "The body is too large.",
    415: "The body is not `application/json`.",
    422: "Read, and refused; `code` says why.",
    429: "A limit is used up; `Retry-After` says until when.",
    431: "Address and headers are too large.",
    500: "Unexpected; `id` is in the log.",
    503: "Not now: too many requests, or the database, a core or nodes are away. `Retry-After` says when to try again.",
}
BODY = (413, 415)  # what a route to which something is posted may answer
ALL = (400, 401, 403, 408, 429, 431, 500, 503)  # what any route that asks for a token may answer
HOUR_S, DAY_S = 3_600, 86_400
_BY_STATUS = {404: NOT_FOUND, 405: METHOD_NOT_ALLOWED, 413: PAYLOAD_TOO_LARGE, 415: UNSUPPORTED_MEDIA_TYPE}

log = logging.getLogger("bursar.api")


def problems(*statuses: int) -> dict[int, ResponseSpec]:
    """Refusals of these kinds, and of those that any route knows."""
    return {
        status: ResponseSpec(ProblemDetails, generate_examples=False, description=WORDS[status], media_type=MEDIA_TYPE)
        for status in sorted({*statuses, *ALL})
    }


def also(status: int, shape: Any, words: str) -> dict[int, ResponseSpec]:
    """Another good answer."""
    return {status: ResponseSpec(shape, generate_examples=False, description=words)}


def answer(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """The answer to a request that ended with an exception."""
    ports: Ports = request.app.state["ports"]
    problem = problem_of(error, ports)
    turn: Turn | None = request.scope["state"].get(TURN)
    if turn is not None:
        try:
            turn.count()  # what is refused counts too, however early it was refused (T46)
        except Problem as too_many:
            problem = too_many
    if problem.status >= 500 and problem.id is None:
        outages: OutageLog = request.app.state["outages"]
        outages.log(problem.code, f"{request.method} {request.scope['path']}: {error}")
    headers, content = problem.encoded()
    return Response(content, status_code=problem.status, media_type=MEDIA_TYPE, headers=headers)


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
        case CommitUnknown(req_id=req_id):
            detail = (
                f"transfer {req_id} may or may not have been written: repeat the request with the same "
                "client_order_id, or, if it had none, look for the transfer before you ask for another one"
            )
            return Problem(COMMIT_UNKNOWN, detail, req_id=req_id)
        case OutcomeUnknown():
            detail = "the database went away while this was written; repeat the same request to learn what became of it"
            return Problem(COMMIT_UNKNOWN, detail)
        case StoreError():
            return Problem(DATABASE_UNAVAILABLE, "the database can't be used just now; nothing was written, try again")
        case Conflict():
            return Problem(
                OVERLOADED,
                "other transactions changed the same accounts, again and again; nothing was written, try again",
            )
        case WithdrawalRefused(reason=WithdrawalCode.HOURLY_LIMIT_EXCEEDED | WithdrawalCode.DAILY_LIMIT_EXCEEDED):
            span_s = HOUR_S if error.reason is WithdrawalCode.HOURLY_LIMIT_EXCEEDED else DAY_S
            left_s = span_s - ports.now_us() // 1_000_000 % span_s
            return Problem(error.reason, f"used up: {error.why}", Retry_After=str(left_s))
        case PayoutRefused() | WithdrawalRefused() | AddressRefused() | DepositRefused():
            return Problem(error.reason, error.why)
        case Refusal() | FeeTooHigh():
            return Problem(error.code, str(error))
        case NodesUnavailable():
            return Problem(NODES_UNAVAILABLE, f"{error}; nothing was written, try again")
        case ConnectionError():
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
        said = [_said(part) for part in error.extra if isinstance(part, dict)]
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


def _said(part: dict[str, Any]) -> str:
    """What is wrong with one part of a request. The framework calls the body `data`, and an empty one just so."""
    key, message = str(part.get("key", "body")), str(part["message"])
    if key == "data":
        return "the body is empty; a JSON object is needed" if message == "'data'" else f"body: {message}"
    return f"{key}: {message}"


def _unexpected(error: Exception, ports: Ports) -> Problem:
    id_ = ports.token()
    log.error("unexpected, %s: %s", id_, error, exc_info=error)
    detail = f"something unexpected happened; ask with this id: {id_}. Repeat it with the same client_order_id"
    return Problem(Code.SYSTEM_ERROR, detail, id=id_)
