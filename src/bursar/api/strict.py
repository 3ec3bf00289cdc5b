"""How requests are read: exactly as described, or refused with 400, 413 or 415 before anybody acts on them.

The framework would take the text `"1001"` for the number 1001, the last of two fields with one name, and a filter whose
name is misspelt for no filter. Where money is moved each of these is a mistake of the caller's that somebody pays for:
a number is a JSON number, a field is given once, and what nobody knows is refused.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import msgspec
from litestar import Request

from bursar.api.problems import UNSUPPORTED_MEDIA_TYPE, Problem
from bursar.flows.transfers import Code

TAKES_BODY = frozenset({"POST", "PUT", "PATCH"})
QueryNames = dict[tuple[str, str], frozenset[str]]  # method, route → parameters
NOTHING = (b"", b"{}")  # what a route may be sent that asks for no body


class StrictRequest(Request[Any, Any, Any]):
    """A request whose JSON is read once, into what its route asks for."""

    async def json(self) -> Any:
        """The body as its route's own shape; the framework passes that through as it is."""
        shape = self.route_handler.parsed_fn_signature.parameters["data"].annotation
        return read_json(await self.body(), shape)


def read_json(body: bytes, shape: Any) -> Any:
    """A body, if it is exactly such a one."""
    try:
        found = _decoder(shape).decode(body)
        json.loads(body, object_pairs_hook=_once)
    except UnicodeError:
        raise Problem(Code.INVALID_REQUEST, "the body is not UTF-8") from None
    except (msgspec.MsgspecError, _Twice) as error:
        raise Problem(Code.INVALID_REQUEST, f"body: {error}") from None
    except RecursionError:
        raise Problem(Code.INVALID_REQUEST, "the body is nested too deeply") from None
    return found


async def check_request(request: Request[Any, Any, Any]) -> None:
    """What holds for all routes, before any of them is called."""
    fields = request.route_handler.parsed_fn_signature.parameters
    _check_query(request)
    if request.method not in TAKES_BODY:
        return
    _check_media_type(request)
    if "data" not in fields and (await request.body()).strip() not in NOTHING:
        raise Problem(Code.INVALID_REQUEST, "this takes no body")


def _check_query(request: Request[Any, Any, Any]) -> None:
    names: QueryNames = request.app.state["query_names"]
    known = names.get((request.method, request.scope["path_template"]))
    if known is None:  # not one of the routes that are described
        return
    seen = [name for name, _ in request.query_params.multi_items()]
    for name in seen:
        if name not in known:
            raise Problem(Code.INVALID_REQUEST, f"{name[:64]!r} is no parameter here")
        if seen.count(name) > 1:
            raise Problem(Code.INVALID_REQUEST, f"{name} is given twice")


def _check_media_type(request: Request[Any, Any, Any]) -> None:
    """A body is JSON, or refused: no form of another site's page gets through."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    is_empty = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers
    if kind != "application/json" and not (is_empty and not kind):
        raise Problem(UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")


class _Twice(ValueError):
    """A field was given twice."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Twice("a field is given twice")
    return found


@cache
def _decoder(shape: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(shape)
