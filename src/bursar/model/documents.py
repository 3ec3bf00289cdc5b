"""Versioned documents: what a version is, the bytes that are hashed, and what a name and a body may contain. Pure.

A document is named by (kind, name). Its versions count from 1 and are never changed. The hash of a version covers its
content and the whole version before it, with the people who made that one: history can't be rewritten unseen. What a
*kind* is and which bodies fit it is in `document_kinds`; reading and writing is in `bursar.documents`.

The bytes that are hashed are UTF-8, in three lines:

    bursar document 1
    ["kind","name",version,"link to the version before, in hex",retired]
    the body as canonical JSON

Canonical JSON has its keys sorted by code point, no white space, and escapes only what JSON requires. What two programs
could read as two things is refused, never rounded or normalised: floats, integers beyond 2^53, text that is not NFC.
"""

from __future__ import annotations

import hashlib
import json
import re
import unicodedata
from enum import StrEnum
from typing import Any

import msgspec

from bursar.model.actors import same_person
from bursar.model.errors import InvalidName, Refusal, StoreError

LABEL = "bursar document 1"
LINK_LABEL = "bursar document link 1"
NO_LINK = b""  # what the first version has instead of a link
INTEGER_MAX = 2**53 - 1  # beyond, some readers of JSON round
BODY_BYTES_MAX = 65_536
DEPTH_MAX = 16
KIND_RULE = "1 to 32 ASCII characters: a letter, then letters, digits or _; in lower case"
NAME_RULE = "1 to 128 ASCII letters in lower case, digits or . _ : -, beginning and ending with a letter or digit"
_KIND = re.compile(r"[a-z][a-z0-9_]{0,31}", re.ASCII)
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9._:-]{0,126}[a-z0-9])?", re.ASCII)


# --- errors ----------------------------------------------------------------------------------------------------------


class DocumentRefusal(Refusal):
    """What is asked of a document can't be."""

    kind: str
    name: str


class InvalidDocument(DocumentRefusal):
    """The body of a document does not fit its kind, or can't be represented exactly."""

    why: str
    code = "INVALID_DOCUMENT"
    text = "{kind} {name} is refused: {why}"


class UnknownKind(Refusal):
    """This program declares no such kind of document."""

    kind: str
    known: str
    code = "DOCUMENT_KIND_NOT_FOUND"
    text = "there is no kind of document {kind}; known here: {known}"


class UnknownDocument(DocumentRefusal):
    """There is no such document, or no such version of it."""

    version: int  # 0: not even a first one
    code = "DOCUMENT_NOT_FOUND"
    text = "{kind} {name} has no version {version}"

    def __str__(self) -> str:
        return super().__str__() if self.version else f"there is no {self.kind} {self.name}"


class DocumentMoved(DocumentRefusal):
    """The change is based on a version that is no longer the current one."""

    base: int
    current: int
    code = "DOCUMENT_MOVED"
    text = "{kind} {name} is at version {current}, and the change is based on {base}; read it again"


class UnknownProposal(DocumentRefusal):
    """There is no open proposal with this hash: it was withdrawn, replaced or never made."""

    hash: str
    open: str  # the hash of the open one, or ""
    code = "PROPOSAL_NOT_FOUND"
    text = "{kind} {name} has no open proposal {hash} (open: {open}); list the proposals again"


class ProposalOpen(DocumentRefusal):
    """Another person's proposal for the same version is open."""

    author: str
    hash: str
    code = "PROPOSAL_OPEN"
    text = "{author} has proposed {hash} for {kind} {name}; approve it, or withdraw it first"


class SecondPersonNeeded(DocumentRefusal):
    """The change needs two people, and the approver's name is the author's or looks like it."""

    author: str
    actor: str
    code = "SECOND_PERSON_NEEDED"
    text = "{author} has proposed this change of {kind} {name}; another person must approve it, not {actor}"


class UnreadableDocument(StoreError):
    """A stored version is not what this program declares its kind to be."""

    kind: str
    name: str
    version: int
    why: str
    code = "DOCUMENT_UNREADABLE"
    text = "{kind} {name} version {version} does not fit this program ({why}); upgrade it, or put a version that fits"


# --- rows ------------------------------------------------------------------------------------------------------------


class Citation(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a document, as records and approvals name it."""

    kind: str
    name: str
    version: int
    hash: bytes


class Standing(StrEnum):
    """What a cited version is now."""

    CURRENT = "current"
    SUPERSEDED = "superseded"  # there is a newer version
    RETIRED = "retired"  # it is the newest, and says that the document is no longer in use
    ALTERED = "altered"  # the version has another hash: it is not what was cited
    UNKNOWN = "unknown"  # there is no such version


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """One version of a document."""

    number: int  # of all versions of all documents, in the order in which they were committed, without gaps
    kind: str
    name: str
    version: int
    body: str  # canonical JSON
    retired: bool  # no longer in use; the body is that of the version before
    previous: bytes  # `link` of the version before; empty for the first
    hash: bytes
    author: str
    reason: str
    approved_by: str  # the second person; "" where one was enough
    approved_reason: str
    at_us: int

    @property
    def citation(self) -> Citation:
        """How records and approvals name it."""
        return Citation(kind=self.kind, name=self.name, version=self.version, hash=self.hash)

    @property
    def link(self) -> bytes:
        """What the next version's hash covers of this one: its hash, who made it, why and when."""
        people = [self.author, self.reason, self.approved_by, self.approved_reason]
        text = canonical_json([self.hash.hex(), *people, str(self.at_us)])
        return hashlib.sha256(f"{LINK_LABEL}\n{text}".encode()).digest()


class Proposal(msgspec.Struct, frozen=True, kw_only=True):
    """A version that is not there yet: its author has put it down, and another person may have to approve it."""

    kind: str
    name: str
    base: int  # the version it follows; 0: none
    body: str
    retired: bool
    previous: bytes
    hash: bytes
    author: str
    reason: str
    at_us: int = 0

    @property
    def version(self) -> int:
        """The version that it becomes."""
        return self.base + 1


# --- what is hashed --------------------------------------------------------------------------------------------------


def canonical_json(value: Any) -> str:
    """JSON in one way only. The value must have passed `check_plain`."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def canonical_bytes(one: Document | Proposal) -> bytes:
    """What the hash of a version is made of."""
    header = canonical_json([one.kind, one.name, one.version, one.previous.hex(), one.retired])
    return f"{LABEL}\n{header}\n{one.body}".encode()


def hash_of(one: Document | Proposal) -> bytes:
    """The hash that its content has, whatever its row says."""
    return hashlib.sha256(canonical_bytes(one)).digest()


def draft(
    head: Document | None, *, kind: str, name: str, body: str, retired: bool, author: str, reason: str
) -> Proposal:
    """The version that would follow the current one."""
    made = Proposal(
        kind=kind,
        name=name,
        base=head.version if head else 0,
        body=body,
        retired=retired,
        previous=head.link if head else NO_LINK,
        hash=b"",
        author=author,
        reason=reason,
    )
    return msgspec.structs.replace(made, hash=hash_of(made))


def repeats(document: Document, *, body: str, retired: bool, author: str) -> bool:
    """Whether a version is what its author puts once more, having lost the first answer."""
    return (document.body, document.retired, document.author) == (body, retired, author)


def flaws(document: Document, before: Document | None) -> list[str]:
    """What is wrong with a version, given the one before it. For audit: each reason is one line."""
    found = []
    expected = before.version + 1 if before else 1
    if document.version != expected:
        found.append(f"follows version {expected - 1}: versions between are missing")
    elif document.previous != (before.link if before else NO_LINK):
        found.append("does not follow from the version before it: that one, or its author or approver, was changed")
    if (hashed := hash_of(document)) != document.hash:
        found.append(f"hashes to {hashed.hex()[:16]}…, its row says {document.hash.hex()[:16]}…")
    if document.approved_by and same_person(document.author, document.approved_by):
        found.append(f"was approved by its author ({document.author}, {document.approved_by})")
    return found


# --- what may be in it -----------------------------------------------------------------------------------------------


def check_kind(kind: str) -> str:
    """The name of a kind. InvalidName if it is none."""
    if not _KIND.fullmatch(kind):
        raise InvalidName("kind of document", ascii(kind)[1:-1][:80], KIND_RULE)
    return kind


def check_name(name: object) -> str:
    """The name of a document. InvalidName if it is none."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidName("name of a document", ascii(name)[1:-1][:80] if isinstance(name, str) else "", NAME_RULE)
    return name


def check_plain(value: object, where: str = "body", depth: int = 0) -> None:
    """ValueError if a value can't be written as JSON in one way only; says where."""
    if depth > DEPTH_MAX:
        raise ValueError(f"{where} is nested deeper than {DEPTH_MAX}")
    if value is None or isinstance(value, bool):
        return
    if isinstance(value, int):
        if abs(value) > INTEGER_MAX:
            raise ValueError(f"{where} is beyond 2^53; write it as text")
    elif isinstance(value, str):
        _check_text(value, where)
    elif isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{where} has a key that is not text")
            _check_text(key, f"a key of {where}")
            check_plain(inner, f"{where}.{key}", depth + 1)
    elif isinstance(value, list | tuple):
        for place, inner in enumerate(value):
            check_plain(inner, f"{where}[{place}]", depth + 1)
    elif isinstance(value, float):
        raise ValueError(f"{where} is a float, which is not exact; write it as text")
    else:
        raise ValueError(f"{where} is {type(value).__name__}, which JSON does not have")


def _check_text(text: str, where: str) -> None:
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{where} has half of a surrogate pair, which UTF-8 can't represent")
    if not unicodedata.is_normalized("NFC", text):
        raise ValueError(f"{where} is not in Unicode's form NFC; text that looks alike must be the same text")
