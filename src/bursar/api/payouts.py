"""Payouts over HTTP: request, look at, list, quote, and what operators and approvers do to one.

Who acts is the token's subject. A payout is requested once per `key`; the other requests are repeated safely under an
`Idempotency-Key`. An approval is a signature that was made with the approver's own key (`bursar payout approve`): this
only carries it to the payout, and the signer alone decides what it is worth.
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Response, get, post
from litestar.params import FromPath, FromQuery, HeaderParameter, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.gate import allow
from bursar.api.problems import PAYOUTS_NOT_CONFIGURED, Problem
from bursar.api.tokens import STAFF, Role
from bursar.api.transfers import PAGE, PAGE_MAX, AmountText, Asked, In, Out, cursor_of, number_of, runtime_of
from bursar.flows.payouts import MACHINE, PayoutRequest, Payouts, PayoutView
from bursar.flows.payouts.machine import STATUS
from bursar.flows.payouts.overview import Quote, quote
from bursar.flows.payouts.payout import Attempt
from bursar.flows.transfers import Code
from bursar.model.accounts import check_path
from bursar.model.actors import REASON_LENGTH_MAX, check_actor
from bursar.model.authorizations import Approval, Payment
from bursar.model.documents import INTEGER_MAX
from bursar.model.errors import UnknownRecord
from bursar.model.views import moment

ANSWER_S_MIN = 0.5
_ID = re.compile(r"po-[0-9]{1,19}", re.ASCII)
OPERATORS = (Role.OPERATOR, Role.ADMIN)
TAGS = ["payouts"]
KEY = HeaderParameter(
    name="Idempotency-Key", required=False, description="Another name for `key`; if both, they agree."
)
SENT = HeaderParameter(
    name="Idempotency-Key", required=False, description="Chosen by the caller: repeating it repeats nothing."
)
Reason = Annotated[str, Meta(min_length=1, max_length=REASON_LENGTH_MAX, description="Why; it is written down.")]
Name = Annotated[str, Meta(max_length=128)]


class CreatePayout(In, frozen=True):
    """A payment that is to leave on a chain."""

    account: Annotated[str, Meta(description="Whose money it is, in the ledger: `user:1001:funding`.")]
    asset: str
    chain: Annotated[str, Meta(description="The name of its document.")]
    to: Annotated[str, Meta(description="The address that is paid.")]
    amount: AmountText
    source: Annotated[
        str, Meta(description="What it is for: one payout that has not failed per source, `withdrawal:wr-17`.")
    ]
    fee: Annotated[str, Meta(description="What the account pays us beside it.")] = "0"
    memo: str = ""
    priority: Annotated[str, Meta(description="`high`, `normal` or `low`.")] = "normal"
    mandate: Annotated[Name, Meta(description="Under which the signer signs. Empty: people approve it.")] = ""
    wallet: Annotated[Name, Meta(description="The wallet that pays; only for sweeps and refills.")] = ""
    expires_us: Annotated[
        int, Meta(ge=0, le=INTEGER_MAX, description="Microseconds since 1970, after which nothing is signed. 0: never.")
    ] = 0
    key: (
        Annotated[str, Meta(min_length=1, description="Chosen by the caller: repeating it repeats nothing.")] | None
    ) = None


class Why(In, frozen=True):
    """A reason."""

    reason: Reason


class Resolve(In, frozen=True):
    """What two people decide."""

    paid: Annotated[bool, Meta(description="Whether it was paid. If not, the money goes back.")]
    reason: Reason


class Approve(In, frozen=True):
    """A signature over the payment, made with the approver's own key."""

    approver: Annotated[str, Meta(max_length=64, description="The token's subject, and a name in the signer's policy.")]
    signature: Annotated[str, Meta(pattern="^[0-9a-f]{128}$", description="Ed25519, hexadecimal.")]


class AttemptAnswer(Out, frozen=True):
    """One transaction that was made, or may have been made, for a payout."""

    number: int
    shape: Annotated[str, Meta(description="`pay`, or `cancel`.")]
    wallet: str
    nonce: int | None
    gas_limit: int
    price: Annotated[str, Meta(description="The most per unit of gas, in the coin's smallest unit.")]
    hash: str
    outcome: Annotated[
        str, Meta(description="Empty while it is open; final, dead, replaced, mismatch, or never signed.")
    ]
    made_at: datetime | None


class PayoutAnswer(Out, frozen=True):
    """How a payout stands."""

    id: str
    status: Annotated[str, Meta(description="pending, processing, confirming, confirmed or failed.")]
    state: Annotated[str, Meta(description="The exact state.")]
    account: str
    asset: str
    chain: str
    to: str
    amount: str
    fee: str
    memo: str
    priority: str
    source: str
    wallet: str
    tx_hash: str
    gas_used: int
    gas_price: str
    error: Annotated[str, Meta(description="Why it waits, or failed.")]
    cancel: Annotated[str, Meta(description="Why it was cancelled; empty: it was not.")]
    held: Annotated[str, Meta(description="Why an operator holds it; empty: none does.")]
    digest: Annotated[str, Meta(description="SHA-256 of what approvers sign.")]
    approvals: list[str]
    mandate: str
    created_at: datetime
    updated_at: datetime


class PayoutDetails(PayoutAnswer, frozen=True):
    """A payout, whole."""

    payment: Annotated[Payment, Meta(description="Exactly what approvers sign.")]
    attempts: list[AttemptAnswer]


class PayoutPage(Out, frozen=True):
    """Some payouts, newest first."""

    payouts: list[PayoutAnswer]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


@post(
    "/api/v1/payouts",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Request a payout",
    responses=problems(*BODY, 409, 422),
    tags=TAGS,
)
async def create_payout(
    request: Asked, data: JSONBody[CreatePayout], key: Annotated[str | None, KEY] = None
) -> PayoutDetails:
    """Its money is held with it. Nothing is written if it is refused."""
    if key is not None and data.key not in (None, key):
        raise Problem(Code.INVALID_REQUEST, "key and Idempotency-Key are given and differ")
    found = data.key if key is None else key
    if not found:
        raise Problem(Code.INVALID_REQUEST, "give a key, or Idempotency-Key: a request without one could be made twice")
    payouts = payouts_of(request)
    fields = {name: getattr(data, name) for name in PayoutRequest.__struct_fields__}
    view = await payouts.request(PayoutRequest(**fields), key=found, actor=_actor(request))
    return await _details(payouts, view)


@get(
    "/api/v1/payouts",
    opt=allow(*STAFF),
    summary="Payouts, newest first",
    responses=problems(422),
    tags=TAGS,
)
async def list_payouts(
    request: Asked,
    status: Annotated[str | None, QueryParameter(description="pending, …; or an exact state.")] = None,
    account: Annotated[str | None, QueryParameter(description="Of this account only.")] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> PayoutPage:
    """Without their attempts. A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on
    until there is none."""
    found, below = await payouts_of(request).page(
        owner=check_path(account) if account else "",
        states=states_of(status),
        before=number_of(cursor),
        limit=limit,
    )
    return PayoutPage(payouts=[_answer(view) for view in found], next_cursor=cursor_of(below) if below else None)


@get(
    "/api/v1/payouts/quote",
    opt=allow(*STAFF),
    summary="The fee that a payout would offer now",
    responses=problems(422),
    tags=TAGS,
)
async def quote_payout(
    request: Asked,
    chain: FromQuery[str],
    asset: FromQuery[str],
    amount: FromQuery[str],
    to: FromQuery[str],
    priority: FromQuery[str] = "normal",
) -> Quote:
    """After a dry run at the nodes. Nothing is reserved."""
    wanted = PayoutRequest(
        account="quote", asset=asset, chain=chain, to=to, amount=amount, priority=priority, source="quote"
    )
    return await quote(payouts_of(request), wanted, within_s=within_s(request))


@get(
    "/api/v1/payouts/{payout_id:str}",
    opt=allow(*STAFF),
    summary="One payout, with its attempts",
    responses=problems(404, 422),
    tags=TAGS,
)
async def show_payout(request: Asked, payout_id: FromPath[str]) -> PayoutDetails:
    """With the exact payment that approvers sign."""
    payouts = payouts_of(request)
    return await _details(payouts, await payouts.view(_id(payout_id)))


@post(
    "/api/v1/payouts/{payout_id:str}/bump",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Raise the fee of what was sent",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def bump_payout(
    request: Asked, payout_id: FromPath[str], data: JSONBody[Why], key: Annotated[str | None, SENT] = None
) -> PayoutDetails:
    """On the same nonce, within the ceiling of its priority."""
    payouts = payouts_of(request)
    view = await payouts.bump(_id(payout_id), actor=_actor(request), reason=data.reason, sender=key or "")
    return await _details(payouts, view)


@post(
    "/api/v1/payouts/{payout_id:str}/cancel",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Make sure that it is not paid, if that can still be",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def cancel_payout(
    request: Asked, payout_id: FromPath[str], data: JSONBody[Why], key: Annotated[str | None, SENT] = None
) -> PayoutDetails:
    """What is final stays final. The money is back when the status is `failed`."""
    payouts = payouts_of(request)
    view = await payouts.cancel(_id(payout_id), actor=_actor(request), reason=data.reason, sender=key or "")
    return await _details(payouts, view)


@post(
    "/api/v1/payouts/{payout_id:str}/hold",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Let it wait before anything of it is signed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def hold_payout(
    request: Asked, payout_id: FromPath[str], data: JSONBody[Why], key: Annotated[str | None, SENT] = None
) -> PayoutDetails:
    """Only what is pending."""
    payouts = payouts_of(request)
    view = await payouts.hold(_id(payout_id), actor=_actor(request), reason=data.reason, sender=key or "")
    return await _details(payouts, view)


@post(
    "/api/v1/payouts/{payout_id:str}/release",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Let a payout go on that was held",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def release_payout(
    request: Asked, payout_id: FromPath[str], data: JSONBody[Why], key: Annotated[str | None, SENT] = None
) -> PayoutDetails:
    """It is chosen for within half a minute."""
    payouts = payouts_of(request)
    view = await payouts.release(_id(payout_id), actor=_actor(request), reason=data.reason, sender=key or "")
    return await _details(payouts, view)


@post(
    "/api/v1/payouts/{payout_id:str}/resolve",
    status_code=200,
    opt=allow(Role.OPERATOR, Role.APPROVER, Role.ADMIN),
    summary="Decide what the chain can't say; two people must say the same",
    responses=also(202, PayoutDetails, "Asked for: another person must say the same.") | problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def resolve_payout(request: Asked, payout_id: FromPath[str], data: JSONBody[Resolve]) -> Response[PayoutDetails]:
    """For a final transaction that moved something else, and for a nonce that an unknown transaction used up."""
    payouts, id_ = payouts_of(request), _id(payout_id)
    before = await payouts.view(id_)
    view = await payouts.resolve(id_, paid=data.paid, actor=_actor(request), reason=data.reason)
    return Response(await _details(payouts, view), status_code=202 if view.state == before.state else 200)


@post(
    "/api/v1/payouts/{payout_id:str}/approve",
    status_code=200,
    opt=allow(Role.APPROVER, Role.ADMIN),
    summary="Add a person's signature over the payment",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_payout(request: Asked, payout_id: FromPath[str], data: JSONBody[Approve]) -> PayoutDetails:
    """Made with the approver's own key. The signer verifies it before it signs."""
    payouts, person = payouts_of(request), _actor(request)
    if check_actor(data.approver) != person:
        raise Problem(Code.FORBIDDEN, f"the approval is of {check_actor(data.approver)}, and the token is of {person}")
    view = await payouts.approve(_id(payout_id), Approval(approver=person, signature=data.signature))
    return await _details(payouts, view)


def payouts_of(request: Asked) -> Payouts:
    """Payouts, where they are configured."""
    payouts = runtime_of(request).payouts
    if payouts is None:
        why = "no signer and no nodes are configured here; set signer and chain_nodes (docs/how-to/pay-out.md)"
        raise Problem(PAYOUTS_NOT_CONFIGURED, why)
    return payouts


def within_s(request: Asked) -> float:
    """How long a question to nodes may take, so that the request is answered in time."""
    return max(ANSWER_S_MIN, runtime_of(request).config.deadline_ms / 1000)


def states_of(status: str | None) -> tuple[str, ...]:
    """The exact states that a status stands for."""
    if not status:
        return ()
    found = tuple(state for state, of in STATUS.items() if status in (state, of))
    if not found:
        known = sorted({*STATUS, *STATUS.values()})
        raise Problem(Code.INVALID_REQUEST, f"status: one of {', '.join(known)} is needed")
    return tuple(state for state in found if STATUS[state] == status) or found


def _actor(request: Asked) -> str:
    return check_actor(request.user.subject)


def _id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise UnknownRecord(MACHINE.name, ascii(text)[1:-1][:40])
    return text


def _answer(view: PayoutView) -> PayoutAnswer:
    return PayoutAnswer(**_facts(view))


def _facts(view: PayoutView) -> dict[str, Any]:
    times = {"created_at": moment(view.created_us), "updated_at": moment(view.updated_us)}
    names = set(PayoutAnswer.__struct_fields__) - times.keys()
    return {name: getattr(view, name) for name in names} | {"approvals": list(view.approvals)} | times


async def _details(payouts: Payouts, view: PayoutView) -> PayoutDetails:
    attempts = [_attempt(one) for one in view.attempts]
    return msgspec.convert(
        _facts(view) | {"payment": await payouts.payment(view.id), "attempts": attempts},
        PayoutDetails,
    )


def _attempt(attempt: Attempt) -> AttemptAnswer:
    return AttemptAnswer(
        number=attempt.number,
        shape=attempt.shape.value,
        wallet=attempt.wallet,
        nonce=attempt.nonce,
        gas_limit=attempt.fee.gas_limit,
        price=str(attempt.fee.price),
        hash=attempt.hash,
        outcome=attempt.outcome,
        made_at=moment(attempt.made_us) if attempt.made_us else None,
    )
