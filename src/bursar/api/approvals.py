"""What people decide about withdrawals, over HTTP: what waits for them, approvals, rejections, switches.

An approval is a signature that was made with the approver's own key (`bursar withdrawal approve`, or a program of the
approver's). This carries it to the withdrawal, which checks it; the signer checks it once more before it signs. The
token's subject must be the approver: a signature that was stolen is no approval.
"""

from __future__ import annotations

from typing import Annotated

from litestar import Response, get, post
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.documents import APPROVERS
from bursar.api.gate import allow
from bursar.api.payouts import OPERATORS, Approve, Reason, Why
from bursar.api.problems import Problem
from bursar.api.tokens import STAFF, Role
from bursar.api.transfers import PAGE_MAX, Asked, In, Out, runtime_of
from bursar.api.withdrawals import (
    TAGS,
    User,
    WithdrawalAnswer,
    answer_of,
    carried_out,
    checked_id,
    in_time,
    withdrawals_of,
)
from bursar.engine import Lift
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.payouts.words import covered
from bursar.flows.transfers import Code
from bursar.flows.withdrawals.listing import waiting_for_people
from bursar.flows.withdrawals.switches import EVERYTHING, Switch, is_switch, of_asset, of_chain, of_user
from bursar.model.actors import check_actor
from bursar.model.authorizations import Approval, Payment
from bursar.model.documents import check_name

DECIDERS = (Role.OPERATOR, Role.APPROVER, Role.ADMIN)


class Covered(Out, frozen=True):
    """One thing that the signature covers."""

    name: str
    value: str


class PaymentAnswer(Out, frozen=True):
    """Exactly what an approver signs."""

    withdrawal_id: str
    payment: Payment
    digest: Annotated[str, Meta(description="SHA-256 of `signed_text`: what approvers compare.")]
    words: Annotated[list[Covered], Meta(description="What the signature covers: all of it, and nothing else.")]
    signed_text: Annotated[str, Meta(description="Its UTF-8 bytes are what is signed, with Ed25519.")]
    approvals: list[str]
    approvals_missing: Annotated[int, Meta(description="Of distinct people.")]


class SwitchRequest(In, frozen=True):
    """Which withdrawals, and why: exactly one of `user_id`, `asset`, `chain`, and `all`."""

    reason: Reason
    user_id: User | None = None
    asset: str | None = None
    chain: str | None = None
    all: bool = False


class SwitchAnswer(Out, frozen=True):
    """How a switch stands now."""

    switch: Annotated[str, Meta(description="Its name, as `bursar flow` and the alerts have it.")]
    paused: bool
    changed: Annotated[bool, Meta(description="Whether this request has changed it.")]


class PausedSwitch(Out, frozen=True):
    """A switch that is off."""

    switch: str
    by: str
    reason: str


@get(
    "/api/v1/withdrawals/waiting",
    opt=allow(*STAFF),
    summary="Withdrawals that wait for people",
    responses=problems(),
    tags=TAGS,
)
async def list_waiting(request: Asked) -> list[WithdrawalAnswer]:
    """Newest first, at most 200; those that only time or a switch holds up are left out."""
    return [answer_of(request, view) for view in await waiting_for_people(withdrawals_of(request), PAGE_MAX)]


@get(
    "/api/v1/withdrawals/{withdrawal_id:str}/payment",
    opt=allow(*STAFF),
    summary="What an approver signs",
    responses=problems(404),
    tags=TAGS,
)
async def show_payment(request: Asked, withdrawal_id: FromPath[str]) -> PaymentAnswer:
    """The exact payment, in words, and as the text that is signed."""
    withdrawals, id_ = withdrawals_of(request), checked_id(withdrawal_id)
    view, payment = await withdrawals.view(id_), await withdrawals.payment(id_)
    asset = await withdrawals.ledger.asset(payment.asset)
    return PaymentAnswer(
        withdrawal_id=id_,
        payment=payment,
        digest=payment.digest(),
        words=[Covered(name=name, value=value) for name, value in covered(payment, asset)],
        signed_text=payment.canonical().decode(),
        approvals=list(view.approvals),
        approvals_missing=view.approvals_missing,
    )


@post(
    "/api/v1/withdrawals/{withdrawal_id:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Add a person's signature over the payment",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_withdrawal(request: Asked, withdrawal_id: FromPath[str], data: JSONBody[Approve]) -> WithdrawalAnswer:
    """Made with the approver's own key, over this payment and no other. The requester can't approve."""
    withdrawals, person = withdrawals_of(request), check_actor(request.user.subject)
    if check_actor(data.approver) != person:
        raise Problem(Code.FORBIDDEN, f"the approval is of {check_actor(data.approver)}, and the token is of {person}")
    said = withdrawals.approve(checked_id(withdrawal_id), Approval(approver=person, signature=data.signature))
    return answer_of(request, await in_time(request, carried_out(request, said)))


@post(
    "/api/v1/withdrawals/{withdrawal_id:str}/reject",
    status_code=200,
    opt=allow(*DECIDERS),
    summary="Reject a withdrawal that is not ordered yet",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def reject_withdrawal(request: Asked, withdrawal_id: FromPath[str], data: JSONBody[Why]) -> WithdrawalAnswer:
    """The money goes back to its user, who reads that it was rejected, and not the reason."""
    withdrawals, person = withdrawals_of(request), check_actor(request.user.subject)
    said = withdrawals.reject(checked_id(withdrawal_id), actor=person, reason=data.reason)
    return answer_of(request, await in_time(request, carried_out(request, said)))


@get(
    "/api/v1/withdrawal_switches",
    opt=allow(*STAFF),
    summary="Withdrawals that are switched off",
    responses=problems(),
    tags=TAGS,
)
async def list_switches(request: Asked) -> list[PausedSwitch]:
    """Of users, assets, chains, or all."""
    return [
        PausedSwitch(switch=pause.name, by=pause.actor, reason=pause.reason)
        for pause in await runtime_of(request).bursar.store.read.pauses.list()
        if is_switch(pause.kind, pause.name)
    ]


@post(
    "/api/v1/withdrawal_switches/pause",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Switch withdrawals off: of a user, an asset, a chain, or all",
    responses=problems(*BODY, 422),
    tags=TAGS,
)
async def pause_withdrawals(request: Asked, data: JSONBody[SwitchRequest]) -> SwitchAnswer:
    """What is requested meanwhile is written down and waits. What was signed is confirmed."""
    withdrawals, switch = withdrawals_of(request), await _switch(request, data)
    changed = await withdrawals.pause(switch, actor=check_actor(request.user.subject), reason=data.reason)
    return SwitchAnswer(switch=switch[1], paused=True, changed=changed)


@post(
    "/api/v1/withdrawal_switches/resume",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Switch withdrawals on again",
    responses=also(202, SwitchAnswer, "Proposed: another person must say the same.") | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def resume_withdrawals(request: Asked, data: JSONBody[SwitchRequest]) -> Response[SwitchAnswer]:
    """What waited for it goes on within a minute."""
    withdrawals, switch = withdrawals_of(request), await _switch(request, data)
    lift = await withdrawals.resume(switch, actor=check_actor(request.user.subject), reason=data.reason)
    proposed = lift is Lift.PROPOSED
    shown = SwitchAnswer(switch=switch[1], paused=proposed, changed=lift is Lift.LIFTED)
    return Response(shown, status_code=202 if proposed else 200)


async def _switch(request: Asked, data: SwitchRequest) -> Switch:
    """The switch that is meant. One with a typing error would stop nothing."""
    given = [name for name in ("user_id", "asset", "chain") if getattr(data, name) is not None]
    if len(given) + data.all != 1:
        raise Problem(Code.INVALID_REQUEST, "give exactly one of user_id, asset, chain, and all")
    if data.user_id is not None:
        return of_user(data.user_id)
    if data.asset is not None:
        return of_asset((await withdrawals_of(request).ledger.asset(data.asset)).code)
    if data.chain is not None:
        await runtime_of(request).documents.get(CHAIN, check_name(data.chain))
        return of_chain(data.chain)
    return EVERYTHING
