"""Chains, assets on chains and wallets over HTTP: as they are now, and their documents, which two people change.

A PUT names the version that it is based on and is a proposal (202); another person approves exactly its hash. The same
PUT or approval again answers with what it has made. What a wallet or a chain has at this moment is asked of the nodes;
where they do not answer, the answer says so and has the rest.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Response, get, post, put
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.gate import allow
from bursar.api.payouts import OPERATORS, Reason, within_s
from bursar.api.tokens import STAFF, Role
from bursar.api.transfers import Asked, In, Out, runtime_of
from bursar.documents import Document, DocumentKind, Proposal
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, ChainDocument, WalletDocument
from bursar.flows.payouts.overview import Overview
from bursar.model.documents import check_name
from bursar.model.views import moment
from bursar.rails.chain import NodeStatus
from bursar.store.documents import VERSION_MAX

TAGS = ["chains and wallets"]
APPROVERS = (Role.APPROVER, Role.ADMIN)
Base = Annotated[
    int, Meta(ge=0, le=VERSION_MAX, description="The version that the change is based on; 0: there is none yet.")
]
PROPOSED = "Proposed: another person must approve its hash."


class PutChain(In, frozen=True):
    """A new version of a chain's document."""

    base: Base
    reason: Reason
    body: ChainDocument


class PutAsset(In, frozen=True):
    """A new version of the document of an asset on a chain."""

    base: Base
    reason: Reason
    body: AssetDocument


class PutWallet(In, frozen=True):
    """A new version of a wallet's document."""

    base: Base
    reason: Reason
    body: WalletDocument


class ApproveDocument(In, frozen=True):
    """What is approved."""

    hash: Annotated[str, Meta(pattern="^[0-9a-f]{64}$", description="Of the proposal.")]
    reason: Reason


class ProposalAnswer(Out, frozen=True):
    """A change that waits for a second person."""

    kind: str
    name: str
    base: int
    hash: Annotated[str, Meta(description="What the second person approves.")]
    body: Any
    retired: bool
    author: str
    reason: str
    at: datetime


class DocumentAnswer(Out, frozen=True):
    """A version of a document that is in use, or was."""

    kind: str
    name: str
    version: int
    hash: str
    body: Any
    retired: bool
    author: str
    reason: str
    approved_by: str
    at: datetime


class DocumentPage(Out, frozen=True):
    """A document, and the change of it that waits."""

    document: DocumentAnswer | None
    proposal: ProposalAnswer | None


class WalletAnswer(Out, frozen=True):
    """A wallet, what it has and what is reserved of it."""

    name: str
    chain: str
    role: str
    address: str
    status: str
    version: int
    paused: Annotated[str, Meta(description="Why it pays nothing new; empty: it does.")]
    last_used_at: datetime | None
    unconfirmed: Annotated[int, Meta(description="Transactions that are not final yet.")]
    reserved: dict[str, str]
    balances: Annotated[dict[str, str] | None, Meta(description="At the last final block; null if no node can say.")]
    trouble: str


class ChainAnswer(Out, frozen=True):
    """A chain and its nodes."""

    name: str
    version: int
    document: ChainDocument
    assets: dict[str, AssetDocument]
    paused: str
    configured: Annotated[bool, Meta(description="Whether its nodes are configured in this process.")]
    nodes: list[NodeStatus]
    trouble: str


@get(
    "/api/v1/wallets",
    opt=allow(*STAFF),
    summary="All wallets, with what they have",
    responses=problems(),
    tags=TAGS,
)
async def list_wallets(request: Asked) -> list[WalletAnswer]:
    """By name."""
    found = []
    for view in await _overview(request).wallets():
        fields = {name: getattr(view, name) for name in view.__struct_fields__ if name != "last_used_us"}
        used = None if view.last_used_us is None else moment(view.last_used_us)
        found.append(WalletAnswer(**fields, last_used_at=used))
    return found


@get(
    "/api/v1/chains",
    opt=allow(*STAFF),
    summary="All chains, with the health of their nodes",
    responses=problems(),
    tags=TAGS,
)
async def list_chains(request: Asked) -> list[ChainAnswer]:
    """By name."""
    return [msgspec.convert(view, ChainAnswer, from_attributes=True) for view in await _overview(request).chains()]


# --- documents: a GET, a PUT and an approval for each of the three kinds ---------------------------------------------


@get(
    "/api/v1/chains/{name:str}",
    opt=allow(*STAFF),
    summary="The document of a chain",
    responses=problems(404),
    tags=TAGS,
)
async def show_chain(request: Asked, name: FromPath[str]) -> DocumentPage:
    """The newest version, and what is proposed."""
    return await _show(request, CHAIN, name)


@put(
    "/api/v1/chains/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of a chain's document",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_chain(request: Asked, name: FromPath[str], data: JSONBody[PutChain]) -> Response[DocumentPage]:
    """Its kind, id, coin and decimals never change."""
    return await _put(request, CHAIN, name, data.base, data.reason, data.body)


@post(
    "/api/v1/chains/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_chain(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use."""
    return await _approve(request, CHAIN, name, data)


@get(
    "/api/v1/assets-on-chain/{name:str}",
    opt=allow(*STAFF),
    summary="The document of an asset on a chain",
    responses=problems(404),
    tags=TAGS,
)
async def show_asset(request: Asked, name: FromPath[str]) -> DocumentPage:
    """Its name is `asset:chain`, in lower case."""
    return await _show(request, ASSET, name)


@put(
    "/api/v1/assets-on-chain/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of the document of an asset on a chain",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_asset(request: Asked, name: FromPath[str], data: JSONBody[PutAsset]) -> Response[DocumentPage]:
    """Its contract and decimals never change."""
    return await _put(request, ASSET, name, data.base, data.reason, data.body)


@post(
    "/api/v1/assets-on-chain/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_asset(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use."""
    return await _approve(request, ASSET, name, data)


@get(
    "/api/v1/wallets/{name:str}",
    opt=allow(*STAFF),
    summary="The document of a wallet",
    responses=problems(404),
    tags=TAGS,
)
async def show_wallet(request: Asked, name: FromPath[str]) -> DocumentPage:
    """The newest version, and what is proposed."""
    return await _show(request, WALLET, name)


@put(
    "/api/v1/wallets/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of a wallet's document",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_wallet(request: Asked, name: FromPath[str], data: JSONBody[PutWallet]) -> Response[DocumentPage]:
    """Its chain and address never change."""
    return await _put(request, WALLET, name, data.base, data.reason, data.body)


@post(
    "/api/v1/wallets/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_wallet(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use; its account in the ledger is made."""
    found = await _approve(request, WALLET, name, data)
    if (payouts := runtime_of(request).payouts) is not None:
        await payouts.prepare()
    return found


def _overview(request: Asked) -> Overview:
    runtime = runtime_of(request)
    chains = {} if runtime.payouts is None else runtime.payouts.chains
    return Overview(runtime.bursar.store, runtime.documents, chains, within_s=within_s(request))


async def _show(request: Asked, kind: DocumentKind[Any], name: str) -> DocumentPage:
    documents, name = runtime_of(request).documents, check_name(name)
    waiting = [one for one in await documents.proposals(kind) if one.name == name]
    proposal = _proposal(waiting[0]) if waiting else None
    known = await runtime_of(request).bursar.store.read.documents.head(kind.name, name)
    if known is None and proposal is not None:
        return DocumentPage(document=None, proposal=proposal)
    return DocumentPage(document=_document(await documents.get(kind, name)), proposal=proposal)


async def _put(
    request: Asked, kind: DocumentKind[Any], name: str, base: int, reason: str, body: msgspec.Struct
) -> Response[DocumentPage]:
    author = request.user.subject
    made = await runtime_of(request).documents.put(kind, name, body, base=base, author=author, reason=reason)
    if isinstance(made, Proposal):
        return Response(DocumentPage(document=None, proposal=_proposal(made)), status_code=202)
    return Response(DocumentPage(document=_document(made), proposal=None))


async def _approve(request: Asked, kind: DocumentKind[Any], name: str, data: ApproveDocument) -> DocumentPage:
    documents, actor = runtime_of(request).documents, request.user.subject
    made = await documents.approve(kind, check_name(name), bytes.fromhex(data.hash), actor=actor, reason=data.reason)
    return DocumentPage(document=_document(made), proposal=None)


def _proposal(made: Proposal) -> ProposalAnswer:
    return ProposalAnswer(
        kind=made.kind,
        name=made.name,
        base=made.base,
        hash=made.hash.hex(),
        body=msgspec.json.decode(made.body),
        retired=made.retired,
        author=made.author,
        reason=made.reason,
        at=moment(made.at_us),
    )


def _document(made: Document) -> DocumentAnswer:
    return DocumentAnswer(
        kind=made.kind,
        name=made.name,
        version=made.version,
        hash=made.hash.hex(),
        body=msgspec.json.decode(made.body),
        retired=made.retired,
        author=made.author,
        reason=made.reason,
        approved_by=made.approved_by,
        at=moment(made.at_us),
    )
