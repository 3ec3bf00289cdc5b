"""What each route may answer, for the OpenAPI description."""

from __future__ import annotations

from typing import Any

from litestar.openapi.datastructures import ResponseSpec

from bursar.api.problems import MEDIA_TYPE, ProblemDetails

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
    503: "Not now: too many requests, or the database or a core is away. `Retry-After` says when to try again.",
}
BODY = (413, 415)  # what a route to which something is posted may answer
ALL = (400, 401, 403, 408, 429, 431, 500, 503)  # what any route that asks for a token may answer


def problems(*statuses: int) -> dict[int, ResponseSpec]:
    """Refusals of these kinds, and of those that any route knows."""
    return {
        status: ResponseSpec(ProblemDetails, generate_examples=False, description=WORDS[status], media_type=MEDIA_TYPE)
        for status in sorted({*statuses, *ALL})
    }


def also(status: int, shape: Any, words: str) -> dict[int, ResponseSpec]:
    """Another good answer."""
    return {status: ResponseSpec(shape, generate_examples=False, description=words)}
