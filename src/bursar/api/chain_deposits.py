"""Deposits from chains over HTTP: a user's own addresses, what has arrived at them, and what people decide about it.

A user sees what is his own, and is who the token says. Staff sees all of it; an operator may ask for a user's address.
Users read how a deposit stands, in words that tell nothing of our inside. The details are in `staff`, which is null for
them. What a payout of ours brings to an address (the gas of a sweep) is no money of the user's, and is not shown.

Not here: the rules of deposits, scans and sweeps (`deposit_rules`); what an operator books by hand (`money`).
"""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated

from litestar import get, post
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.addresses import Whose
from bursar.api.answers import BODY, problems
from bursar.api.approvals import DECIDERS
from bursar.api.gate import allow
from bursar.api.payouts import Why
from bursar.api.problems import PAYOUTS_NOT_CONFIGURED, Problem
from bursar.api.tokens import ALL_ROLES
from bursar.api.transfers import PAGE, PAGE_MAX, Asked, In, Out, check_user, cursor_of, number_of, runtime_of
from bursar.api.withdrawals import WRITERS, User, count, user_and_actor
from bursar.flows.deposits import ARRIVALS, ChainDeposits
from bursar.flows.deposits.arrivals import OWN
from bursar.flows.deposits.from_chains import AddressView, ArrivalView
from bursar.flows.deposits.words import NOT_SEEN, STATUSES, states_of
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.transfers import Code
from bursar.flows.transfers.checks import USER_MAX
from bursar.model.actors import check_actor
from bursar.model.errors import UnknownRecord
from bursar.model.views import moment

TAGS = ["deposits from chains"]
_ID = re.compile(r"[!-~]{1,256}")


class AskAddress(In, frozen=True):
    """On which chain."""

    chain: Annotated[str, Meta(description="The name of its document.")]
    user_id: User | None = None


class Accepted(Out, frozen=True):
    """An asset that is credited."""

    asset: str
    minimum: Annotated[str, Meta(description="The least that is credited by itself, in units of the asset.")]


class DepositAddress(Out, frozen=True):
    """Where a user's deposits from a chain go to."""

    chain: str
    address: str
    user_id: int
    assets: Annotated[list[Accepted], Meta(description="That are accepted there now.")]
    blocks: Annotated[int, Meta(description="That must be on top of a transfer's block.")]
    final_after: Annotated[str, Meta(description="When a transfer is looked at, in words.")]
    not_seen: Annotated[str, Meta(description="What does not arrive although it was sent, in words, to be shown.")]
    created_at: datetime


class InsideDeposit(Out, frozen=True):
    """What only staff sees of a deposit."""

    state: Annotated[str, Meta(description="The exact state; `own`: a payout of ours has brought it.")]
    wallet: str
    raw: Annotated[str, Meta(description="In the chain's smallest units.")]
    contract: Annotated[str, Meta(description="Of the token; empty: the chain's coin.")]
    sender: str
    account: Annotated[str, Meta(description="Where it is booked; empty: nowhere.")]
    why: Annotated[str, Meta(description="Why it is held, in suspense or rejected.")]
    confirmed_by: list[str]


class ChainDeposit(Out, frozen=True):
    """How a deposit stands."""

    id: str
    status: Annotated[
        str,
        Meta(description="pending, credited, under_review (it is there, and not credited), rejected; staff: ignored."),
    ]
    user_id: int
    chain: str
    asset: Annotated[str, Meta(description="Empty: unknown.")]
    amount: Annotated[str, Meta(description="In units of the asset; empty: unknown, or less than the smallest.")]
    address: Annotated[str, Meta(description="At which it has arrived.")]
    tx_hash: str
    block: int
    message: Annotated[str, Meta(description="Why it is not credited, or not yet, in words.")]
    created_at: Annotated[datetime, Meta(description="When it was seen; it was final by then.")]
    updated_at: datetime
    staff: Annotated[InsideDeposit | None, Meta(description="For staff; null for users.")]


class ChainDepositPage(Out, frozen=True):
    """Some deposits, newest first."""

    deposits: list[ChainDeposit]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


@post(
    "/api/v1/deposit_addresses",
    status_code=200,
    opt=allow(*WRITERS),
    summary="A user's own address on a chain",
    responses=problems(*BODY, 409, 422),
    tags=TAGS,
)
async def create_deposit_address(request: Asked, data: JSONBody[AskAddress]) -> DepositAddress:
    """Made at the first request; every later one is answered with the same.

    Only `assets` arrive there, and only when the transfer is final (`final_after`). Not seen are tokens that are not
    listed, and coin that a contract passes on (an internal transfer): tell users (`not_seen`). Less than `minimum`
    arrives, and is not credited by itself.
    """
    deposits, (user, actor) = deposits_of(request), user_and_actor(request, data.user_id)
    count(request)
    return _address(await deposits.issue(user, data.chain, actor=actor or str(user)))


@get(
    "/api/v1/deposit_addresses",
    opt=allow(*ALL_ROLES),
    summary="A user's addresses for deposits",
    responses=problems(422),
    tags=TAGS,
)
async def list_deposit_addresses(request: Asked, user_id: Whose = None) -> list[DepositAddress]:
    """Newest first. What arrives there is credited, also where no new addresses are given out."""
    user = user_id if user_id is not None and request.user.is_staff else check_user(request, user_id)
    return [_address(view) for view in await deposits_of(request).addresses(user)]


@get(
    "/api/v1/chain_deposits",
    opt=allow(*ALL_ROLES),
    summary="Deposits from chains, newest first",
    responses=problems(),
    tags=TAGS,
)
async def list_chain_deposits(
    request: Asked,
    status: Annotated[str | None, QueryParameter(description="pending, …; for staff also an exact state.")] = None,
    chain: Annotated[str | None, QueryParameter(description="From this chain only.")] = None,
    user_id: Annotated[
        int | None, QueryParameter(ge=1, le=USER_MAX, description="Whose; staff only. Without it: all users'.")
    ] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> ChainDepositPage:
    """A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on until there is none."""
    user = user_id if request.user.is_staff else check_user(request, user_id)
    states = states_of(status or "", is_staff=request.user.is_staff)
    if states is None:
        raise Problem(Code.INVALID_REQUEST, f"status: one of {', '.join(STATUSES)} is needed")
    deposits, before = deposits_of(request), number_of(cursor)
    if not await is_chain(request, chain):
        return ChainDepositPage(deposits=[], next_cursor=None)
    found, below = await deposits.page(user=user or 0, states=states, chain=chain or "", before=before, limit=limit)
    shown = [_answer(request, view) for view in found]
    return ChainDepositPage(deposits=shown, next_cursor=cursor_of(below) if below else None)


@get(
    "/api/v1/chain_deposits/{deposit_id:str}",
    opt=allow(*ALL_ROLES),
    summary="One deposit from a chain",
    responses=problems(404),
    tags=TAGS,
)
async def show_chain_deposit(request: Asked, deposit_id: FromPath[str]) -> ChainDeposit:
    """One's own; any user's for staff. Its id is `chain:hash:part`."""
    view = await deposits_of(request).view(checked_deposit(deposit_id))
    if not request.user.is_staff and (view.user != request.user.user or view.state == OWN):
        raise UnknownRecord(ARRIVALS.name, deposit_id)
    return _answer(request, view)


@post(
    "/api/v1/chain_deposits/{deposit_id:str}/confirm",
    status_code=200,
    opt=allow(*DECIDERS),
    summary="Say that a deposit that is held is there",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def confirm_chain_deposit(request: Asked, deposit_id: FromPath[str], data: JSONBody[Why]) -> ChainDeposit:
    """It is judged anew, and credited at once if no second person has to say the same: `staff.why` says so.

    The same person again is 409 `SAME_PERSON`; one that is not held any more is 409 `NOT_HELD`.
    """
    deposits, id_ = deposits_of(request), checked_deposit(deposit_id)
    view = await deposits.confirm(id_, actor=check_actor(request.user.subject), reason=data.reason)
    return _answer(request, view)


@post(
    "/api/v1/chain_deposits/{deposit_id:str}/reject",
    status_code=200,
    opt=allow(*DECIDERS),
    summary="Never credit a deposit that is held",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def reject_chain_deposit(request: Asked, deposit_id: FromPath[str], data: JSONBody[Why]) -> ChainDeposit:
    """Its user reads that it was not credited, and not why."""
    deposits, id_ = deposits_of(request), checked_deposit(deposit_id)
    view = await deposits.reject(id_, actor=check_actor(request.user.subject), reason=data.reason)
    return _answer(request, view)


# --- what the routes share -------------------------------------------------------------------------------------------


def deposits_of(request: Asked) -> ChainDeposits:
    """Deposits from chains, where payouts are configured."""
    found = runtime_of(request).arrivals
    if found is None:
        why = "no signer and no nodes are configured here; set signer and chain_nodes (docs/how-to/deposits.md)"
        raise Problem(PAYOUTS_NOT_CONFIGURED, why)
    return found


def checked_deposit(text: str) -> str:
    """An id of a deposit; what can be none is not looked up."""
    if not _ID.fullmatch(text):
        raise UnknownRecord(ARRIVALS.name, ascii(text)[1:-1][:40])
    return text


async def is_chain(request: Asked, name: str | None) -> bool:
    """Whether nothing was named, or a chain. Only those get as far as the database."""
    return name is None or await runtime_of(request).documents.current(CHAIN, name) is not None


def _address(view: AddressView) -> DepositAddress:
    return DepositAddress(
        chain=view.chain,
        address=view.address,
        user_id=view.user,
        assets=[Accepted(asset=code, minimum=minimum) for code, minimum in view.assets.items()],
        blocks=view.blocks,
        final_after=view.final_after,
        not_seen=NOT_SEEN,
        created_at=moment(view.created_us),
    )


def _answer(request: Asked, view: ArrivalView) -> ChainDeposit:
    return ChainDeposit(
        id=view.id,
        status=view.status,
        user_id=view.user,
        chain=view.chain,
        asset=view.asset,
        amount=view.amount,
        address=view.to,
        tx_hash=view.hash,
        block=view.block,
        message=view.words,
        created_at=moment(view.created_us),
        updated_at=moment(view.updated_us),
        staff=_inside(view) if request.user.is_staff else None,
    )


def _inside(view: ArrivalView) -> InsideDeposit:
    return InsideDeposit(
        state=view.state,
        wallet=view.wallet,
        raw=view.raw,
        contract=view.contract,
        sender=view.sender,
        account=view.account,
        why=view.why,
        confirmed_by=list(view.confirmed_by),
    )
