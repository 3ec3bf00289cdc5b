"""Transfers over HTTP: create, look at, list; in the words of specification 000, and in those of 001 (T39).

A transfer that has come to its end answers 200, whatever the end is; one that has not by the deadline answers 202 and
PENDING, and goes on. A repeated `client_order_id` answers with the transfer of the first request.
"""

from __future__ import annotations

import base64
import re
from datetime import datetime
from typing import Annotated, Any, TypeVar

import msgspec
from litestar import Request, Response, get, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from msgspec import Meta, field

from bursar.api.answers import BODY, also, problems
from bursar.api.gate import TURN, Turn, allow
from bursar.api.problems import Problem
from bursar.api.tokens import ALL_ROLES, Identity, Role
from bursar.flows.transfers import MACHINE, AccountType, Code, Filter, TransferRefused, Transfers, View
from bursar.flows.transfers import Request as TransferRequest
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.transfers.request import NEWEST
from bursar.model.views import microseconds
from bursar.runtime import Runtime

PAGE_MAX = 200
PAGE = 50
ACCOUNT_TYPES_1 = {"funding": "FUNDING", "trading": "SPOT"}
STATES = ("PENDING", *(state.name for state in MACHINE.states))
_REQ_ID = re.compile(r"sr-[0-9]{1,19}")
Asked = Request[Identity, Any, Any]

KEY = HeaderParameter(
    name="Idempotency-Key", required=False, description="Another name for `client_order_id`; if both, they agree."
)
AmountText = Annotated[str, Meta(description="In units of the asset, as plain digits: `100.00`.")]
OwnNumber = Annotated[int, Meta(ge=1, le=USER_MAX, description="The token's user; anything else is FORBIDDEN.")]


class In(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request."""


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""


T = TypeVar("T", bound=Out)


def answered(view: object, shape: type[T]) -> T:
    """A view as an answer of this shape: what has the same name is taken over."""
    return msgspec.convert(view, shape, from_attributes=True)


# --- in the words of specification 000


class CreateTransfer(In, frozen=True):
    """A request to move one's own money."""

    source: Annotated[str, Meta(description="`FUNDING`, `SPOT`, `FUTURE` or `MARGIN`.")] = field(name="from")
    target: Annotated[str, Meta(description="As `from`.")] = field(name="to")
    asset: str
    amount: AmountText
    client_order_id: (
        Annotated[str, Meta(min_length=1, description="Chosen by the caller: repeating it repeats nothing.")] | None
    ) = None
    user_id: OwnNumber | None = None


class TransferAnswer(Out, frozen=True):
    """How a transfer stands (000 §8.1)."""

    transfer_id: int
    req_id: str
    source: str = field(name="from")
    target: str = field(name="to")
    state: Annotated[str, Meta(description="COMMITTED, FAILED or ROLLED_BACK; PENDING until then.")]
    fsm_state: Annotated[str, Meta(description="The exact state (000 §2.1).")]
    message: str


class TransferDetails(TransferAnswer, frozen=True):
    """A transfer, whole (000 §8.2)."""

    asset: str
    amount: str
    created_at: datetime
    updated_at: datetime


class TransferPage(Out, frozen=True):
    """Some transfers, newest first."""

    transfers: list[TransferDetails]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


@post(
    "/api/v1/internal_transfer",
    status_code=200,
    opt=allow(Role.USER),
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
    return Response(answered(view, TransferAnswer), status_code=_status(view))


@get(
    "/api/v1/internal_transfer/{req_id:str}",
    opt=allow(*ALL_ROLES),
    summary="One transfer",
    responses=problems(404),
    tags=["transfers"],
)
async def show_transfer(request: Asked, req_id: FromPath[str]) -> TransferDetails:
    """One's own; any user's for staff."""
    return answered(await _get(request, req_id), TransferDetails)


@get(
    "/api/v1/internal_transfer",
    opt=allow(*ALL_ROLES),
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
        QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only. Without it: all users'."),
    ] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> TransferPage:
    """A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on until there is none."""
    user = user_id if request.user.is_staff else check_user(request, user_id)
    runtime = runtime_of(request)
    wanted = Filter(
        state=_state(in_state),
        asset=asset or "",
        source=_account_type("from", source),
        target=_account_type("to", target),
        since_us=_moment("since", since, 0),
        until_us=_moment("until", until, NEWEST),
    )
    before = number_of(cursor)
    # Only codes that there are get as far as the database: a text from outside may be one that it can't even compare.
    if asset is not None and asset not in await runtime.bursar.ledger.assets():
        return TransferPage(transfers=[], next_cursor=None)
    found, below = await runtime.transfers.page(user, wanted, before=before, limit=limit)
    return TransferPage(
        transfers=[answered(view, TransferDetails) for view in found], next_cursor=cursor_of(below) if below else None
    )


# --- in the words of specification 001 (T39)


class CreateTransfer1(In, frozen=True):
    """A request to move one's own money, as 001 writes it."""

    source: Annotated[str, Meta(description="`funding` or `trading`.")] = field(name="from")
    target: Annotated[str, Meta(description="As `from`.")] = field(name="to")
    asset: str
    amount: AmountText
    user_id: OwnNumber | None = None


class TransferAnswer1(Out, frozen=True):
    """How it stands (001 §12)."""

    req_id: str
    status: Annotated[str, Meta(description="`committed`, `pending` or `failed`.")]
    message: str


class TransferDetails1(Out, frozen=True):
    """A transfer (001 §12)."""

    req_id: str
    state: Annotated[str, Meta(description="The exact state, in lower case.")]
    created_at: Annotated[int, Meta(description="Milliseconds since 1970.")]


@post(
    "/api/v1/transfer",
    status_code=200,
    opt=allow(Role.USER),
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
        check_user(request, data.user_id)
        raise TransferRefused(Code.INVALID_ACCOUNT_TYPE, "from and to are `funding` or `trading`")
    if key == "":
        raise Problem(Code.INVALID_REQUEST, "Idempotency-Key is empty")
    view = await _create(request, data, str(kinds[0]), str(kinds[1]), key or "")
    status = {"COMMITTED": "committed", "PENDING": "pending"}.get(view.state, "failed")
    shown = TransferAnswer1(req_id=view.req_id, status=status, message=view.message)
    return Response(shown, status_code=_status(view))


@get(
    "/api/v1/transfer/{req_id:str}",
    opt=allow(*ALL_ROLES),
    summary="One transfer, in the words of specification 001",
    responses=problems(404),
    tags=["transfers (001)"],
)
async def show_transfer_1(request: Asked, req_id: FromPath[str]) -> TransferDetails1:
    """One's own; any user's for staff."""
    view = await _get(request, req_id)
    return TransferDetails1(req_id=view.req_id, state=view.fsm_state.lower(), created_at=view.created_us // 1000)


def runtime_of(request: Asked) -> Runtime:
    """What is behind the API."""
    runtime: Runtime = request.app.state["runtime"]
    return runtime


def check_user(request: Asked, claimed: int | None) -> int:
    """The token's user, who may be named in a request, too."""
    user = request.user.user
    if claimed not in (None, user):
        raise Problem(Code.FORBIDDEN, "user_id is not the token's user")
    return user


async def _create(request: Asked, data: CreateTransfer | CreateTransfer1, source: str, target: str, order: str) -> View:
    user = check_user(request, data.user_id)
    runtime = runtime_of(request)
    transfers: Transfers = runtime.transfers
    asked = TransferRequest(
        user=user, source=source, target=target, asset=data.asset, amount=data.amount, client_order_id=order
    )
    turn: Turn = request.scope["state"][TURN]
    view = await transfers.create(asked, deadline_s=runtime.config.deadline_ms / 1000, admit=turn.count)
    if view.replayed:
        turn.give_back()
    return view


async def _get(request: Asked, req_id: str) -> View:
    who = request.user
    if not _REQ_ID.fullmatch(req_id):
        raise TransferRefused(Code.TRANSFER_NOT_FOUND, "a transfer's id looks like sr-1734912345678901234")
    return await runtime_of(request).transfers.get(None if who.is_staff else who.user, req_id)


def _status(view: View) -> int:
    return 202 if view.state == "PENDING" else 200


def cursor_of(number: int) -> str:
    """The cursor of the page below a number."""
    return base64.urlsafe_b64encode(str(number).encode()).decode().rstrip("=")


def number_of(cursor: str | None) -> int:
    """The number that a cursor stands for."""
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
        return microseconds(found)
    except (msgspec.ValidationError, OverflowError):
        raise Problem(Code.INVALID_REQUEST, f"{name}: RFC 3339 with a zone is needed: 2026-01-31T12:00:00Z") from None
