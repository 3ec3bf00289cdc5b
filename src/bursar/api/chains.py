"""Chains, assets on chains and wallets over HTTP: as they are now, and their documents, which two people change.

What a wallet or a chain has at this moment is asked of the nodes; where they do not answer, the answer says so and has
the rest.
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import msgspec
from litestar import Response, get, post, put
from litestar.params import FromPath, JSONBody
from msgspec import Meta

from bursar.api.answers import BODY, also, problems
from bursar.api.documents import (
    APPROVERS,
    PROPOSED,
    ApproveDocument,
    Base,
    DocumentPage,
    approve_document,
    put_document,
    show_document,
)
from bursar.api.gate import allow
from bursar.api.payouts import OPERATORS, Reason, within_s
from bursar.api.tokens import STAFF
from bursar.api.transfers import Asked, In, Out, runtime_of
from bursar.flows.payouts.documents import ASSET, CHAIN, WALLET, AssetDocument, ChainDocument, WalletDocument
from bursar.flows.payouts.overview import Overview
from bursar.model.views import moment
from bursar.rails.chain import NodeStatus

TAGS = ["chains and wallets"]


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
    return await show_document(request, CHAIN, name)


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
    return await put_document(request, CHAIN, name, data.base, data.reason, data.body)


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
    return await approve_document(request, CHAIN, name, data)


@get(
    "/api/v1/assets-on-chain/{name:str}",
    opt=allow(*STAFF),
    summary="The document of an asset on a chain",
    responses=problems(404),
    tags=TAGS,
)
async def show_asset(request: Asked, name: FromPath[str]) -> DocumentPage:
    """Its name is `asset:chain`, in lower case."""
    return await show_document(request, ASSET, name)


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
    return await put_document(request, ASSET, name, data.base, data.reason, data.body)


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
    return await approve_document(request, ASSET, name, data)


@get(
    "/api/v1/wallets/{name:str}",
    opt=allow(*STAFF),
    summary="The document of a wallet",
    responses=problems(404),
    tags=TAGS,
)
async def show_wallet(request: Asked, name: FromPath[str]) -> DocumentPage:
    """The newest version, and what is proposed."""
    return await show_document(request, WALLET, name)


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
    return await put_document(request, WALLET, name, data.base, data.reason, data.body)


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
    found = await approve_document(request, WALLET, name, data)
    if (payouts := runtime_of(request).payouts) is not None:
        await payouts.prepare()
    return found


def _overview(request: Asked) -> Overview:
    runtime = runtime_of(request)
    chains = {} if runtime.payouts is None else runtime.payouts.chains
    return Overview(runtime.bursar.store, runtime.documents, chains, within_s=within_s(request))
