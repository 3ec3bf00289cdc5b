"""Transfers over HTTP: create, look at, list; in the words of specification 000, and in those of 001 (T39).

A transfer that has come to its end answers 200, whatever the end is; one that has not by the deadline answers 202 and
PENDING, and goes on. A repeated `client_order_id` answers with the transfer of the first request.
"""

from __future__ import annotations

import base64
import re
from datetime import datetime, timedelta
from typing import Annotated, Any

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.auth import allow
from bursar.api.documented import BODY, also, problems
from bursar.api.gate import TURN
from bursar.api.problems import Problem
from bursar.api.rates import Turn
from bursar.api.shapes import (
    EPOCH,
    CreateTransfer,
    CreateTransfer1,
    TransferAnswer,
    TransferAnswer1,
    TransferDetails,
    TransferDetails1,
    TransferPage,
    answer1_of,
    answer_of,
    details1_of,
    details_of,
)
from bursar.api.tokens import EVERYBODY, USER_MAX, Identity, Role
from bursar.flows.transfers import MACHINE, AccountType, Code, Filter, TransferRefused, Transfers, View
from bursar.flows.transfers import Request as Wish
from bursar.runtime import Runtime

PAGE_MAX = 200
PAGE = 50
NEWEST = 2**63 - 1
MICROSECOND = timedelta(microseconds=1)
ACCOUNT_TYPES_1 = {"funding": "FUNDING", "trading": "SPOT"}
STATES = ("PENDING", *(state.name for state in MACHINE.states))
_REQ_ID = re.compile(r"sr-[0-9]{1,19}")
Asked = Request[Identity, Any, Any]

KEY = HeaderParameter(
    name="Idempotency-Key", required=False, description="Another name for `client_order_id`; if both, they agree."
)


@post(
    "/api/v1/internal_transfer",
    status_code=200,
    guards=[allow(Role.USER)],
    summary="Move one's own money between two accounts",
    responses=also(202, TransferAnswer, "Accepted, and still on its way: PENDING.") | problems(*BODY, 409, 422, 429),
    tags=["transfers"],
)
async def create_transfer(
    request: Asked, data: JSONBody[CreateTransfer], key: Annotated[str | None, KEY] = None
) -> Response[TransferAnswer]:
    """Checked in the order of 000 §1.5; nothing is written if it is refused."""
    if key is not None and data.client_order_id not in (None, key):
        raise Problem(Code.INVALID_REQUEST, "client_order_id and Idempotency-Key are given and differ")
    order = data.client_order_id if key is None else key
    if order == "":
        raise Problem(Code.INVALID_REQUEST, "Idempotency-Key is empty")
    view = await _create(request, data, data.source, data.target, order or "")
    return Response(answer_of(view), status_code=_status(view))


@get(
    "/api/v1/internal_transfer/{req_id:str}",
    guards=[allow(*EVERYBODY)],
    summary="One transfer",
    responses=problems(404),
    tags=["transfers"],
)
async def show_transfer(request: Asked, req_id: FromPath[str]) -> TransferDetails:
    """One's own; anybody's for staff."""
    return details_of(await _get(request, req_id))


@get(
    "/api/v1/internal_transfer",
    guards=[allow(*EVERYBODY)],
    summary="Transfers, newest first",
    responses=problems(),
    tags=["transfers"],
)
async def list_transfers(
    request: Asked,
    in_state: Annotated[str | None, QueryParameter(name="state", description="PENDING, or an exact state.")] = None,
    asset: FromQuery[str | None] = None,
    source: Annotated[str | None, QueryParameter(name="from")] = None,
    target: Annotated[str | None, QueryParameter(name="to")] = None,
    since: Annotated[str | None, QueryParameter(description="Created then or later, RFC 3339.")] = None,
    until: Annotated[str | None, QueryParameter(description="Created before then, RFC 3339.")] = None,
    user_id: Annotated[
        int | None,
        QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only. Without it: everybody's."),
    ] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> TransferPage:
    """A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on until there is none."""
    who = request.user
    user = user_id if who.is_staff else who.user
    if not who.is_staff and user_id not in (None, user):
        raise Problem(Code.FORBIDDEN, "user_id is not the token's user")
    runtime = _runtime(request)
    wanted = Filter(
        state=_state(in_state),
        asset=asset or "",
        source=_account_type("from", source),
        target=_account_type("to", target),
        since_us=_moment("since", since, 0),
        until_us=_moment("until", until, NEWEST),
    )
    before = _number(cursor)
    # Only codes that there are get as far as the database: a text from outside may be one that it can't even compare.
    if asset is not None and asset not in await runtime.bursar.ledger.assets():
        return TransferPage(transfers=[], next_cursor=None)
    found, below = await runtime.transfers.page(user, wanted, before=before, limit=limit)
    return TransferPage(transfers=[details_of(view) for view in found], next_cursor=_cursor(below) if below else None)


@post(
    "/api/v1/transfer",
    status_code=200,
    guards=[allow(Role.USER)],
    summary="The same, in the words of specification 001",
    responses=also(202, TransferAnswer1, "Accepted, and still on its way: pending.") | problems(*BODY, 409, 422, 429),
    tags=["transfers (001)"],
)
async def create_transfer_1(
    request: Asked, data: JSONBody[CreateTransfer1], key: Annotated[str | None, KEY] = None
) -> Response[TransferAnswer1]:
    """`funding` and `trading` are FUNDING and SPOT."""
    kinds = [ACCOUNT_TYPES_1.get(name) for name in (data.source, data.target)]
    if None in kinds:
        _check_user(request, data.user_id)
        raise TransferRefused(Code.INVALID_ACCOUNT_TYPE, "from and to are `funding` or `trading`")
    if key == "":
        raise Problem(Code.INVALID_REQUEST, "Idempotency-Key is empty")
    view = await _create(request, data, str(kinds[0]), str(kinds[1]), key or "")
    return Response(answer1_of(view), status_code=_status(view))


@get(
    "/api/v1/transfer/{req_id:str}",
    guards=[allow(*EVERYBODY)],
    summary="One transfer, in the words of specification 001",
    responses=problems(404),
    tags=["transfers (001)"],
)
async def show_transfer_1(request: Asked, req_id: FromPath[str]) -> TransferDetails1:
    """One's own; anybody's for staff."""
    return details1_of(await _get(request, req_id))


def _runtime(request: Asked) -> Runtime:
    runtime: Runtime = request.app.state["runtime"]
    return runtime


def _check_user(request: Asked, claimed: int | None) -> int:
    user = request.user.user
    if claimed not in (None, user):
        raise Problem(Code.FORBIDDEN, "user_id is not the token's user")
    return user


async def _create(request: Asked, data: CreateTransfer | CreateTransfer1, source: str, target: str, order: str) -> View:
    user = _check_user(request, data.user_id)
    runtime = _runtime(request)
    transfers: Transfers = runtime.transfers
    wish = Wish(user=user, source=source, target=target, asset=data.asset, amount=data.amount, client_order_id=order)
    turn: Turn = request.scope["state"][TURN]
    view = await transfers.create(wish, deadline_s=runtime.config.deadline_ms / 1000, admit=turn.count)
    if view.replayed:
        turn.give_back()
    return view


async def _get(request: Asked, req_id: str) -> View:
    who = request.user
    if not _REQ_ID.fullmatch(req_id):
        raise TransferRefused(Code.TRANSFER_NOT_FOUND, "a transfer's id looks like sr-1734912345678901234")
    return await _runtime(request).transfers.get(None if who.is_staff else who.user, req_id)


def _status(view: View) -> int:
    return 202 if view.state == "PENDING" else 200


def _cursor(number: int) -> str:
    return base64.urlsafe_b64encode(str(number).encode()).decode().rstrip("=")


def _number(cursor: str | None) -> int:
    if cursor is None:
        return NEWEST
    try:
        text = base64.urlsafe_b64decode(cursor.encode() + b"=" * (-len(cursor) % 4)).decode()
        if not (text.isascii() and text.isdigit() and 0 < int(text) <= NEWEST):
            raise ValueError
    except ValueError:
        raise Problem(Code.INVALID_REQUEST, "cursor: not one that was given out here") from None
    return int(text)


def _state(name: str | None) -> str:
    if name is not None and name not in STATES:
        raise Problem(Code.INVALID_REQUEST, f"state: one of {', '.join(STATES)} is needed")
    return name or ""


def _account_type(where: str, name: str | None) -> AccountType | None:
    try:
        return None if name is None else AccountType(name)
    except ValueError:
        raise Problem(Code.INVALID_REQUEST, f"{where}: one of {', '.join(AccountType)} is needed") from None


def _moment(name: str, text: str | None, otherwise: int) -> int:
    if text is None:
        return otherwise
    try:
        found: datetime = msgspec.convert(text, Annotated[datetime, Meta(tz=True)])
        return (found - EPOCH) // MICROSECOND
    except (msgspec.ValidationError, OverflowError):
        raise Problem(Code.INVALID_REQUEST, f"{name}: RFC 3339 with a zone is needed: 2026-01-31T12:00:00Z") from None
