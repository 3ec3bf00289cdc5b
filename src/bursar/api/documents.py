"""Documents over HTTP: what the routes of every kind share.

A PUT names the version that it is based on. Where two people are needed it is a proposal (202), and another person
approves exactly its hash. The same PUT or approval again answers with what it has made.

Not here: the routes, which each kind of document has in the words of its own (`chains`, `withdrawal_rules`).
"""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any

import msgspec
from litestar import Response
from msgspec import Meta

from bursar.api.payouts import Reason
from bursar.api.tokens import Role
from bursar.api.transfers import Asked, In, Out, runtime_of
from bursar.documents import Document, DocumentKind, Proposal
from bursar.model.documents import check_name
from bursar.model.views import moment
from bursar.store.documents import VERSION_MAX

APPROVERS = (Role.APPROVER, Role.ADMIN)
PROPOSED = "Proposed: another person must approve its hash."
Base = Annotated[
    int, Meta(ge=0, le=VERSION_MAX, description="The version that the change is based on; 0: there is none yet.")
]


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


async def show_document(request: Asked, kind: DocumentKind[Any], name: str) -> DocumentPage:
    """The newest version, and what is proposed."""
    documents, name = runtime_of(request).documents, check_name(name)
    waiting = [one for one in await documents.proposals(kind) if one.name == name]
    proposal = _proposal(waiting[0]) if waiting else None
    known = await runtime_of(request).bursar.store.read.documents.head(kind.name, name)
    if known is None and proposal is not None:
        return DocumentPage(document=None, proposal=proposal)
    return DocumentPage(document=_document(await documents.get(kind, name)), proposal=proposal)


async def list_documents(request: Asked, kind: DocumentKind[Any]) -> list[DocumentPage]:
    """Every document of a kind by name, retired ones too, each with what is proposed; then those that are only that."""
    documents = runtime_of(request).documents
    waiting = {one.name: _proposal(one) for one in await documents.proposals(kind)}
    found = [
        DocumentPage(document=_document(one), proposal=waiting.pop(one.name, None))
        for one in await documents.list(kind)
    ]
    return [*found, *(DocumentPage(document=None, proposal=one) for one in waiting.values())]


async def put_document(
    request: Asked, kind: DocumentKind[Any], name: str, base: int, reason: str, body: msgspec.Struct
) -> Response[DocumentPage]:
    """Propose a version, or make it where one person is enough."""
    author = request.user.subject
    made = await runtime_of(request).documents.put(kind, name, body, base=base, author=author, reason=reason)
    if isinstance(made, Proposal):
        return Response(DocumentPage(document=None, proposal=_proposal(made)), status_code=202)
    return Response(DocumentPage(document=_document(made), proposal=None))


async def approve_document(request: Asked, kind: DocumentKind[Any], name: str, data: ApproveDocument) -> DocumentPage:
    """Approve what another person has proposed."""
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
