"""What operators have of deposits from chains, over HTTP: the rules, which two people change; scans; sweeps.

Rules are a document per chain. Before they are approved, the address that they give user 1 is compared with the one
that `bursar signer xpub` printed on the signer's host: with another key, users would send money that can't be swept.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Response, get, post, put
from litestar.params import FromPath, JSONBody, QueryParameter
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.chain_deposits import checked_deposit, deposits_of, is_chain
from bursar.api.documents import (
    APPROVERS,
    PROPOSED,
    ApproveDocument,
    Base,
    DocumentPage,
    approve_document,
    list_documents,
    put_document,
    show_document,
)
from bursar.api.gate import allow
from bursar.api.payouts import OPERATORS, Reason
from bursar.api.problems import Problem
from bursar.api.tokens import STAFF
from bursar.api.transfers import PAGE, PAGE_MAX, Asked, In, Out, cursor_of, number_of, runtime_of
from bursar.flows.deposits import DepositRules, overview
from bursar.flows.deposits.overview import SWEEP_STATES, ScanView, SweepView
from bursar.flows.deposits.rules import DEPOSITS
from bursar.flows.payouts.documents import CHAIN
from bursar.flows.transfers import Code
from bursar.model.actors import check_actor
from bursar.model.documents import INTEGER_MAX, check_name
from bursar.model.views import moment

TAGS = ["deposits from chains"]


class PutDepositRules(In, frozen=True):
    """A new version of the rules of a chain."""

    base: Base
    reason: Reason
    body: DepositRules


class DepositRulesPage(DocumentPage, frozen=True):
    """The rules of a chain, and the change of them that waits."""

    first_address: Annotated[str, Meta(description="Of user 1, by the rules in use; empty: none, or no such chain.")]
    proposed_first_address: Annotated[
        str, Meta(description="Of user 1, by the proposal: compare it with the signer's before you approve.")
    ]


class Rescan(In, frozen=True):
    """From where, and why."""

    block: Annotated[int, Meta(ge=0, le=INTEGER_MAX, description="The first one that is read again.")]
    reason: Reason


class ScanAnswer(Out, frozen=True):
    """How a chain is scanned, as it was written down last."""

    chain: str
    block: Annotated[int, Meta(description="Everything up to it is read; written down at the latest every 10,000.")]
    error: Annotated[str, Meta(description="The last trouble; it may be over.")]
    updated_at: datetime


class SweepAnswer(Out, frozen=True):
    """A sweep of what has gathered at a user's address."""

    id: Annotated[str, Meta(description="Of the deposit with which it began.")]
    state: Annotated[str, Meta(description="sweeping, swept, or left (the rules want it no more).")]
    chain: str
    wallet: str
    address: str
    asset: str
    payout: Annotated[str, Meta(description="Under way, or the last one; empty: none yet.")]
    payouts: Annotated[list[str], Meta(description="All of them, those for gas among them.")]
    failed: Annotated[int, Meta(description="Payouts that failed, in a row.")]
    error: Annotated[str, Meta(description="Why it waits.")]
    created_at: datetime
    updated_at: datetime


class SweepPage(Out, frozen=True):
    """Some sweeps, newest first."""

    sweeps: list[SweepAnswer]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


# --- rules -----------------------------------------------------------------------------------------------------------


@get(
    "/api/v1/deposit_rules",
    opt=allow(*STAFF),
    summary="What is accepted from each chain",
    responses=problems(),
    tags=TAGS,
)
async def list_deposit_rules(request: Asked) -> list[DepositRulesPage]:
    """By chain, each with the change of it that waits."""
    return [await _with_addresses(request, one) for one in await list_documents(request, DEPOSITS)]


@get(
    "/api/v1/deposit_rules/{name:str}",
    opt=allow(*STAFF),
    summary="The rules of a chain",
    responses=problems(404),
    tags=TAGS,
)
async def show_deposit_rules(request: Asked, name: FromPath[str]) -> DepositRulesPage:
    """Their name is the chain's."""
    return await _with_addresses(request, await show_document(request, DEPOSITS, name))


@put(
    "/api/v1/deposit_rules/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of the rules of a chain",
    responses=also(202, DepositRulesPage, PROPOSED) | problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def put_deposit_rules(
    request: Asked, name: FromPath[str], data: JSONBody[PutDepositRules]
) -> Response[DepositRulesPage]:
    """Another `xpub` needs another name of its wallets."""
    await runtime_of(request).documents.get(CHAIN, check_name(name))  # or the address could not be compared
    made = await put_document(request, DEPOSITS, name, data.base, data.reason, data.body)
    return Response(await _with_addresses(request, made.content), status_code=made.status_code)


@post(
    "/api/v1/deposit_rules/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_deposit_rules(
    request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]
) -> DepositRulesPage:
    """From then on they are in use, and the chain is scanned. Compare `proposed_first_address` first."""
    found = await approve_document(request, DEPOSITS, name, data)
    if (deposits := runtime_of(request).arrivals) is not None:
        await deposits.prepare()
    return await _with_addresses(request, found)


# --- scans -----------------------------------------------------------------------------------------------------------


@get("/api/v1/deposit_scans", opt=allow(*STAFF), summary="How far chains are scanned", responses=problems(), tags=TAGS)
async def list_deposit_scans(request: Asked) -> list[ScanAnswer]:
    """By chain."""
    return [_scan(view) for view in await overview.scans(runtime_of(request).bursar.store)]


@post(
    "/api/v1/deposit_scans/{name:str}/rescan",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Read a chain again from a block on",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def rescan_chain(request: Asked, name: FromPath[str], data: JSONBody[Rescan]) -> ScanAnswer:
    """What was seen before stays as it is, so that it can be repeated. It is never sent forward."""
    deposits, chain = deposits_of(request), check_name(name)
    await deposits.rescan(chain, data.block, actor=check_actor(request.user.subject), reason=data.reason)
    found = await overview.scans(runtime_of(request).bursar.store)
    return next(_scan(view) for view in found if view.chain == chain)


# --- sweeps ----------------------------------------------------------------------------------------------------------


@get("/api/v1/sweeps", opt=allow(*STAFF), summary="Sweeps, newest first", responses=problems(), tags=TAGS)
async def list_sweeps(
    request: Asked,
    in_state: Annotated[str | None, QueryParameter(name="state", description="sweeping, swept or left.")] = None,
    chain: Annotated[str | None, QueryParameter(description="On this chain only.")] = None,
    cursor: Annotated[str | None, QueryParameter(description="`next_cursor` of the page before.")] = None,
    limit: Annotated[int, QueryParameter(ge=1, le=PAGE_MAX)] = PAGE,
) -> SweepPage:
    """A page may be shorter than `limit`, even empty, and still have a `next_cursor`: go on until there is none."""
    if in_state is not None and in_state not in SWEEP_STATES:
        raise Problem(Code.INVALID_REQUEST, f"state: one of {', '.join(SWEEP_STATES)} is needed")
    store, before = runtime_of(request).bursar.store, number_of(cursor)
    if not await is_chain(request, chain):
        return SweepPage(sweeps=[], next_cursor=None)
    states = () if in_state is None else (in_state,)
    found, below = await overview.sweeps(store, states=states, chain=chain or "", before=before, limit=limit)
    return SweepPage(sweeps=[_sweep(view) for view in found], next_cursor=cursor_of(below) if below else None)


@get("/api/v1/sweeps/{sweep_id:str}", opt=allow(*STAFF), summary="One sweep", responses=problems(404), tags=TAGS)
async def show_sweep(request: Asked, sweep_id: FromPath[str]) -> SweepAnswer:
    """Its id is that of the deposit with which it began."""
    return _sweep(await overview.sweep(runtime_of(request).bursar.store, checked_deposit(sweep_id)))


async def _with_addresses(request: Asked, page: DocumentPage) -> DepositRulesPage:
    """With the address of user 1, by what is in use and by what is proposed."""
    document, proposal = page.document, page.proposal
    return DepositRulesPage(
        document=document,
        proposal=proposal,
        first_address="" if document is None else await _first(request, document.name, document.body),
        proposed_first_address="" if proposal is None else await _first(request, proposal.name, proposal.body),
    )


async def _first(request: Asked, chain: str, body: Any) -> str:
    return await overview.first_address(runtime_of(request).documents, chain, msgspec.convert(body, DepositRules))


def _scan(view: ScanView) -> ScanAnswer:
    return ScanAnswer(chain=view.chain, block=view.block, error=view.error, updated_at=moment(view.updated_us))


def _sweep(view: SweepView) -> SweepAnswer:
    fields = {name: getattr(view, name) for name in SweepAnswer.__struct_fields__ if not name.endswith("_at")}
    fields["payouts"] = list(view.payouts)
    return SweepAnswer(**fields, created_at=moment(view.created_us), updated_at=moment(view.updated_us))
