"""Withdrawals over HTTP as users see them: quote, request, look at, list, cancel.

A user sees and moves what is his own, and is who the token says (T17). Staff sees all of them; an operator may ask for
a user, and is then the requester, whose approval does not count. A request is made once per `client_withdrawal_id`.

Users read why a withdrawal waits, until when, and why it ended, in words that tell nothing of our inside. The details
are in `staff`, which is null for them. Not here: what approvers and operators do (`approvals`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from datetime import datetime
from functools import partial
from typing import Annotated, Any, TypeVar

from litestar import Response, get, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.gate import TURN, Turn, allow
from bursar.api.payouts import OPERATORS, Reason, within_s
from bursar.api.problems import COMMIT_UNKNOWN, PAYOUTS_NOT_CONFIGURED, Problem
from bursar.api.tokens import ALL_ROLES, Role
from bursar.api.transfers import (
    PAGE,
    PAGE_MAX,
    Asked,
    In,
    Out,
    check_user,
    cursor_of,
    number_of,
    runtime_of,
)
from bursar.flows.payouts import MACHINE as PAYOUTS
from bursar.flows.transfers import Code
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.withdrawals import (
    MACHINE,
    WithdrawalCode,
    WithdrawalRefused,
    WithdrawalRequest,
    Withdrawals,
    WithdrawalView,
)
from bursar.flows.withdrawals.listing import STATUSES, listed, states_of
from bursar.flows.withdrawals.machine import QUEUED
from bursar.flows.withdrawals.risk import Reason as WhyItWaits
from bursar.flows.withdrawals.words import code_for_user
from bursar.model.actors import check_actor
from bursar.model.entries import check_key
from bursar.model.errors import InvalidName
from bursar.model.views import moment

TAGS = ["withdrawals"]
WRITERS = (Role.USER, *OPERATORS)
KEY = HeaderParameter(
    name="Idempotency-Key", required=False, description="Another name for `client_withdrawal_id`; if both, they agree."
)
User = Annotated[
    int, Meta(ge=1, le=USER_MAX, description="Whose. A user's own number, or FORBIDDEN; an operator names a user.")
]
_log = logging.getLogger("bursar.api")
_T = TypeVar("_T")


class AskWithdrawal(In, frozen=True):
    """What is wanted."""

    asset: str
    chain: Annotated[str, Meta(description="The name of its document.")]
    to: Annotated[str, Meta(description="The address that is paid.")]
    amount: Annotated[
        str,
        Meta(description="That arrives, in units of the asset: `25.00`. `all`: what is available, less the fee."),
    ]
    max_fee: Annotated[str, Meta(description="The fee of the quote: dearer is FEE_CHANGED. Empty: whatever it is.")] = (
        ""
    )
    memo: str = ""
    user_id: User | None = None


class CreateWithdrawal(AskWithdrawal, frozen=True):
    """A request to have one's own money paid out."""

    client_withdrawal_id: (
        Annotated[str, Meta(min_length=1, description="Chosen by the caller: repeating it repeats nothing.")] | None
    ) = None


class CancelWithdrawal(In, frozen=True):
    """Why it is not wanted any more."""

    reason: Reason | None = None


class WaitsFor(Out, frozen=True):
    """One thing that a withdrawal waits for."""

    code: str
    words: str


class QuoteAnswer(Out, frozen=True):
    """What a withdrawal would cost, as things stand. Give `fee` back as `max_fee`."""

    asset: str
    chain: str
    to: Annotated[str, Meta(description="As the chain writes it.")]
    amount: Annotated[str, Meta(description="That arrives.")]
    fee: str
    total: Annotated[str, Meta(description="That leaves the account.")]
    seconds: Annotated[int, Meta(description="From its approval until it is final, about.")]
    waits_for: Annotated[list[WaitsFor], Meta(description="What it would wait for, as far as can be said now.")]


class Inside(Out, frozen=True):
    """What only staff sees of a withdrawal."""

    state: Annotated[str, Meta(description="The exact state.")]
    requester: Annotated[str, Meta(description="Who asked for it; can't approve it.")]
    approvals: list[str]
    approvals_missing: Annotated[int, Meta(description="Of distinct people.")]
    details: Annotated[dict[str, str], Meta(description="What stands behind `waits_for`, by code.")]
    reason: Annotated[str, Meta(description="Why it ended without being paid.")]
    digest: Annotated[str, Meta(description="SHA-256 of what approvers sign.")]
    payout: Annotated[str, Meta(description="Its payout; empty: none was ordered.")]
    payout_status: Annotated[str, Meta(description="Of one withdrawal; empty in lists.")]


class WithdrawalAnswer(Out, frozen=True):
    """How a withdrawal stands."""

    id: str
    status: Annotated[
        str,
        Meta(description="pending, approved, queued, completed; failed, rejected or cancelled: the money is back."),
    ]
    user_id: int
    asset: str
    chain: str
    to: str
    memo: str
    amount: Annotated[str, Meta(description="That arrives.")]
    fee: str
    waits_for: list[WaitsFor]
    until: Annotated[datetime | None, Meta(description="When it is looked at again by itself, or expires.")]
    tx_hash: Annotated[str, Meta(description="Of the final transaction.")]
    message: Annotated[str, Meta(description="Why it ended without being paid, in words.")]
    created_at: datetime
    updated_at: datetime
    queued_at: datetime | None
    staff: Annotated[Inside | None, Meta(description="For staff; null for users.")]


class WithdrawalPage(Out, frozen=True):
    """Some withdrawals, newest first."""

    withdrawals: list[WithdrawalAnswer]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


@post(
    "/api/v1/withdrawals/quote",
    status_code=200,
    opt=allow(*WRITERS),
    summary="What a withdrawal would cost and wait for",
    responses=problems(*BODY, 409, 422),
    tags=TAGS,
)
async def quote_withdrawal(request: Asked, data: JSONBody[AskWithdrawal]) -> QuoteAnswer:
    """Nothing is written, and nothing is promised but the fee, if it is given back as `max_fee`."""
    withdrawals, (wanted, _) = withdrawals_of(request), _wanted(request, data)
    count(request)
    found = await withdrawals.quote(wanted)
    names = set(QuoteAnswer.__struct_fields__) - {"waits_for"}
    fields = {name: getattr(found, name) for name in names}
    return QuoteAnswer(**fields, waits_for=waits_for(request, found.reasons))


@post(
    "/api/v1/withdrawals",
    status_code=200,
    opt=allow(*WRITERS),
    summary="Request a withdrawal",
    responses=also(202, WithdrawalAnswer, "Written down, and it waits: `waits_for` says for what.")
    | problems(*BODY, 409, 422, 429),
    tags=TAGS,
)
async def create_withdrawal(
    request: Asked, data: JSONBody[CreateWithdrawal], key: Annotated[str | None, KEY] = None
) -> Response[WithdrawalAnswer]:
    """Amount and fee are held with it. Nothing is written if it is refused."""
    if key is not None and data.client_withdrawal_id not in (None, key):
        raise Problem(Code.INVALID_REQUEST, "client_withdrawal_id and Idempotency-Key are given and differ")
    found = data.client_withdrawal_id if key is None else key
    if not found:
        why = "give a client_withdrawal_id, or Idempotency-Key: a request without one could be made twice"
        raise Problem(Code.INVALID_REQUEST, why)
    withdrawals, (wanted, requester) = withdrawals_of(request), _wanted(request, data)
    work = withdrawals.request(
        wanted, key=found, requester=requester, within_s=within_s(request) / 2, admit=partial(count, request)
    )
    view = await in_time(request, work)
    if view.replayed and (turn := _turn(request)) is not None:
        turn.give_back()
    return Response(answer_of(request, view), status_code=202 if view.status == "pending" else 200)


@get(
    "/api/v1/withdrawals",
    opt=allow(*ALL_ROLES),
    summary="Withdrawals, newest first",
    responses=problems(),
    tags=TAGS,
)
async def list_withdrawals(
    request: Asked,
    status: Annotated[str | None, QueryParameter(description="pending, …; for staff also an exact state.")] = None,
    asset: FromQuery[str | None] = None,
    chain: FromQuery[str | None] = None,
    user_id: Annotated[
        int | None, QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only. Without it: all users'.")
    ] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> WithdrawalPage:
    """A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on until there is none."""
    user = user_id if request.user.is_staff else check_user(request, user_id)
    states = states_of(status or "")
    if states is None:
        raise Problem(Code.INVALID_REQUEST, f"status: one of {', '.join(STATUSES)} is needed")
    found, below = await listed(
        withdrawals_of(request),
        user=user,
        states=states,
        asset=asset or "",
        chain=chain or "",
        before=number_of(cursor),
        limit=limit,
    )
    shown = [answer_of(request, view) for view in found]
    return WithdrawalPage(withdrawals=shown, next_cursor=cursor_of(below) if below else None)


@get(
    "/api/v1/withdrawals/{withdrawal_id:str}",
    opt=allow(*ALL_ROLES),
    summary="One withdrawal",
    responses=problems(404),
    tags=TAGS,
)
async def show_withdrawal(request: Asked, withdrawal_id: FromPath[str]) -> WithdrawalAnswer:
    """One's own; any user's for staff."""
    user = None if request.user.is_staff else request.user.user
    return answer_of(request, await withdrawals_of(request).view(checked_id(withdrawal_id), user))


@post(
    "/api/v1/withdrawals/{withdrawal_id:str}/cancel",
    status_code=200,
    opt=allow(*WRITERS),
    summary="Cancel a withdrawal that is not being paid yet",
    responses=problems(*BODY, 404, 409, 422, 429),
    tags=TAGS,
)
async def cancel_withdrawal(
    request: Asked, withdrawal_id: FromPath[str], data: JSONBody[CancelWithdrawal]
) -> WithdrawalAnswer:
    """Possible until the signer is asked. The money is back when the status is `cancelled`, as a rule at once."""
    withdrawals, id_ = withdrawals_of(request), checked_id(withdrawal_id)
    count(request)
    user = None if request.user.has(*OPERATORS) else request.user.user
    said = withdrawals.cancel(id_, actor=check_actor(request.user.subject), reason=data.reason or "", user=user)
    return answer_of(request, await in_time(request, carried_out(request, said, with_payout=True)))


# --- what the routes share -------------------------------------------------------------------------------------------


def withdrawals_of(request: Asked) -> Withdrawals:
    """Withdrawals, where payouts are configured."""
    paying = runtime_of(request).paying_out
    if paying is None:
        why = "no signer and no nodes are configured here; set signer and chain_nodes (docs/how-to/withdraw.md)"
        raise Problem(PAYOUTS_NOT_CONFIGURED, why)
    return paying.withdrawals


def checked_id(text: str) -> str:
    """An id of a withdrawal; what can be none is not looked up. One that was imported has the id of its old system."""
    try:
        return check_key(text)
    except InvalidName:
        raise WithdrawalRefused(WithdrawalCode.NOT_FOUND, "there is no such withdrawal") from None


def user_and_actor(request: Asked, claimed: int | None) -> tuple[int, str]:
    """Whose it is, and who asks for it, if that is another person (T17)."""
    if claimed is not None and request.user.has(*OPERATORS):
        return claimed, check_actor(request.user.subject)
    return check_user(request, claimed), ""


def waits_for(request: Asked, reasons: tuple[WhyItWaits, ...]) -> list[WaitsFor]:
    """What it waits for; two reasons that a user could not tell apart are one."""
    if request.user.is_staff:
        return [WaitsFor(code=reason.code, words=reason.words) for reason in reasons]
    found = {code_for_user(reason.code): reason.words for reason in reasons}
    return [WaitsFor(code=code, words=words) for code, words in found.items()]


def answer_of(request: Asked, view: WithdrawalView) -> WithdrawalAnswer:
    """A withdrawal as its reader may see it."""
    return WithdrawalAnswer(
        id=view.id,
        status=view.status,
        user_id=view.user,
        asset=view.asset,
        chain=view.chain,
        to=view.to,
        memo=view.memo,
        amount=view.amount,
        fee=view.fee,
        waits_for=waits_for(request, view.reasons),
        until=moment(view.until_us) if view.until_us else None,
        tx_hash=view.tx_hash,
        message=view.message,
        created_at=moment(view.created_us),
        updated_at=moment(view.updated_us),
        queued_at=moment(view.queued_us) if view.queued_us else None,
        staff=_inside(view) if request.user.is_staff else None,
    )


async def in_time(request: Asked, work: Coroutine[Any, Any, _T]) -> _T:
    """The answer, within the deadline (T45). What takes longer is not cancelled: it may be at its COMMIT."""
    task = asyncio.get_running_loop().create_task(work, name="bursar-withdrawal")
    limit_s = within_s(request)
    try:
        await asyncio.wait([task], timeout=limit_s)
    finally:
        if not task.done():
            task.add_done_callback(_told_late)
    if not task.done():
        why = f"no answer within {limit_s:g} s, and it may have been carried out or not"
        raise Problem(COMMIT_UNKNOWN, f"{why}; repeat the same request, under the same key, to learn it")
    return task.result()


async def carried_out(
    request: Asked, said: Coroutine[Any, Any, WithdrawalView], *, with_payout: bool = False
) -> WithdrawalView:
    """What was said to a withdrawal, and what becomes of that at once. `with_payout`: it was said to its payout."""
    withdrawals, engine = withdrawals_of(request), runtime_of(request).engine
    view = await said
    is_ordered = with_payout and view.state == QUEUED
    flow, id_ = (PAYOUTS.name, view.payout) if is_ordered else (MACHINE.name, view.id)
    await engine.process_now(await engine.record(flow, id_), within_s(request) / 2)
    return await withdrawals.view(view.id)


def _told_late(task: asyncio.Task[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        _log.info("after its time was over, a request about a withdrawal ended with %s", task.exception())


def count(request: Asked) -> None:
    """Count a request of a user (T46); a Problem if it is one too many."""
    if (turn := _turn(request)) is not None:
        turn.count()


def _turn(request: Asked) -> Turn | None:
    """How this request is counted; those of staff are not."""
    found: Turn | None = request.scope["state"].get(TURN)
    return found


def _wanted(request: Asked, data: AskWithdrawal) -> tuple[WithdrawalRequest, str]:
    user, requester = user_and_actor(request, data.user_id)
    wanted = WithdrawalRequest(
        user=user,
        asset=data.asset,
        chain=data.chain,
        to=data.to,
        amount=data.amount,
        max_fee=data.max_fee,
        memo=data.memo,
    )
    return wanted, requester


def _inside(view: WithdrawalView) -> Inside:
    return Inside(
        state=view.state,
        requester=view.requester,
        approvals=list(view.approvals),
        approvals_missing=view.approvals_missing,
        details={reason.code.value: reason.detail for reason in view.reasons if reason.detail},
        reason=view.reason,
        digest=view.digest,
        payout=view.payout,
        payout_status=view.payout_status,
    )
