"""What governs withdrawals, over HTTP: policies, lists of addresses and approvers, as documents that two people change.

Each kind has the same four routes: all of them, one, a new version, its approval. Not here: the address book of a user
(`addresses`), which is the user's own.
"""

from __future__ import annotations

from litestar import Response, get, post, put
from litestar.params import FromPath, JSONBody

from bursar.api.answers import BODY, also, problems
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
from bursar.api.tokens import STAFF
from bursar.api.transfers import Asked, In
from bursar.flows.withdrawals.policy import ADDRESS_LIST, APPROVER, POLICY, AddressList, Approver, WithdrawalPolicy

TAGS = ["withdrawal rules"]


class PutPolicy(In, frozen=True):
    """A new version of a policy."""

    base: Base
    reason: Reason
    body: WithdrawalPolicy


class PutAddressList(In, frozen=True):
    """A new version of a list of addresses."""

    base: Base
    reason: Reason
    body: AddressList


class PutApprover(In, frozen=True):
    """A new version of an approver."""

    base: Base
    reason: Reason
    body: Approver


@get(
    "/api/v1/withdrawal_policies",
    opt=allow(*STAFF),
    summary="What withdrawals of an asset on a chain cost and need",
    responses=problems(),
    tags=TAGS,
)
async def list_policies(request: Asked) -> list[DocumentPage]:
    """By name, each with the change of it that waits."""
    return await list_documents(request, POLICY)


@get(
    "/api/v1/withdrawal_policies/{name:str}",
    opt=allow(*STAFF),
    summary="The document of a policy",
    responses=problems(404),
    tags=TAGS,
)
async def show_policy(request: Asked, name: FromPath[str]) -> DocumentPage:
    """Its name is `asset:chain`, in lower case."""
    return await show_document(request, POLICY, name)


@put(
    "/api/v1/withdrawal_policies/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of a policy",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_policy(request: Asked, name: FromPath[str], data: JSONBody[PutPolicy]) -> Response[DocumentPage]:
    """Its name is `asset:chain`, in lower case."""
    return await put_document(request, POLICY, name, data.base, data.reason, data.body)


@post(
    "/api/v1/withdrawal_policies/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_policy(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use."""
    return await approve_document(request, POLICY, name, data)


@get(
    "/api/v1/withdrawal_address_lists",
    opt=allow(*STAFF),
    summary="Addresses that are allowed or denied",
    responses=problems(),
    tags=TAGS,
)
async def list_address_lists(request: Asked) -> list[DocumentPage]:
    """By name, each with the change of it that waits."""
    return await list_documents(request, ADDRESS_LIST)


@get(
    "/api/v1/withdrawal_address_lists/{name:str}",
    opt=allow(*STAFF),
    summary="The document of a list of addresses",
    responses=problems(404),
    tags=TAGS,
)
async def show_address_list(request: Asked, name: FromPath[str]) -> DocumentPage:
    """Its name is `chain`, or `asset:chain` in lower case."""
    return await show_document(request, ADDRESS_LIST, name)


@put(
    "/api/v1/withdrawal_address_lists/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of a list of addresses",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_address_list(
    request: Asked, name: FromPath[str], data: JSONBody[PutAddressList]
) -> Response[DocumentPage]:
    """Its name is `chain`, or `asset:chain` in lower case."""
    return await put_document(request, ADDRESS_LIST, name, data.base, data.reason, data.body)


@post(
    "/api/v1/withdrawal_address_lists/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_address_list(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use."""
    return await approve_document(request, ADDRESS_LIST, name, data)


@get(
    "/api/v1/withdrawal_approvers",
    opt=allow(*STAFF),
    summary="People who may approve withdrawals",
    responses=problems(),
    tags=TAGS,
)
async def list_approvers(request: Asked) -> list[DocumentPage]:
    """By name, each with the change of it that waits."""
    return await list_documents(request, APPROVER)


@get(
    "/api/v1/withdrawal_approvers/{name:str}",
    opt=allow(*STAFF),
    summary="The document of an approver",
    responses=problems(404),
    tags=TAGS,
)
async def show_approver(request: Asked, name: FromPath[str]) -> DocumentPage:
    """Its name is the person's; the key has to be in the signer's policy, too."""
    return await show_document(request, APPROVER, name)


@put(
    "/api/v1/withdrawal_approvers/{name:str}",
    status_code=200,
    opt=allow(*OPERATORS),
    summary="Propose a version of an approver",
    responses=also(202, DocumentPage, PROPOSED) | problems(*BODY, 409, 422),
    tags=TAGS,
)
async def put_approver(request: Asked, name: FromPath[str], data: JSONBody[PutApprover]) -> Response[DocumentPage]:
    """Its name is the person's; the key has to be in the signer's policy, too."""
    return await put_document(request, APPROVER, name, data.base, data.reason, data.body)


@post(
    "/api/v1/withdrawal_approvers/{name:str}/approve",
    status_code=200,
    opt=allow(*APPROVERS),
    summary="Approve what another person has proposed",
    responses=problems(*BODY, 404, 409, 422),
    tags=TAGS,
)
async def approve_approver(request: Asked, name: FromPath[str], data: JSONBody[ApproveDocument]) -> DocumentPage:
    """From then on it is in use."""
    return await approve_document(request, APPROVER, name, data)
