"""Versioned documents for chains, wallets and policies; two people where a change could move money."""

from bursar.documents.cache import DOCUMENTS_S, Current
from bursar.documents.documents import Documents
from bursar.model.document_kinds import DocumentKind, KindRefused
from bursar.model.documents import (
    Citation,
    Document,
    DocumentMoved,
    InvalidDocument,
    Proposal,
    ProposalOpen,
    SecondPersonNeeded,
    Standing,
    UnknownDocument,
    UnknownKind,
    UnknownProposal,
    UnreadableDocument,
)

__all__ = [
    "DOCUMENTS_S",
    "Citation",
    "Current",
    "Document",
    "DocumentKind",
    "DocumentMoved",
    "Documents",
    "InvalidDocument",
    "KindRefused",
    "Proposal",
    "ProposalOpen",
    "SecondPersonNeeded",
    "Standing",
    "UnknownDocument",
    "UnknownKind",
    "UnknownProposal",
    "UnreadableDocument",
]
