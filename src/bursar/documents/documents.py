"""Documents: put a version, approve one, read them. Each change is one transaction.

A change names the version that it is based on, and is refused if that is no longer the current one (compare-and-set).
Changes of documents happen one after the other; the key (kind, name, version) of the table has the last word. Where a
change needs two people, the first one's put is a proposal. Another person approves exactly its hash; a look-alike of
the author's name is refused. A put or an approval whose answer was lost is repeated, and returns what it has made.

What a kind is and what is hashed is in `bursar.model`. Not here: which kinds there are. The features that read
documents declare those.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from bursar.documents.cache import Cache, Current, intact
from bursar.model.actors import check_actor, check_reason, same_person
from bursar.model.document_kinds import DocumentKind
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
    check_kind,
    check_name,
    draft,
    hash_of,
    repeats,
)
from bursar.model.errors import DatabaseCorrupt
from bursar.store import Store
from bursar.store.documents import VERSION_MAX
from bursar.store.tables import Tables

T = TypeVar("T", bound=msgspec.Struct)

PROPOSED, WITHDRAWN, APPROVED = "change proposed", "proposal withdrawn", "change approved"
SUBJECT = "document"  # what operator_actions calls them


class Documents:
    """The documents of some kinds in one database."""

    def __init__(self, store: Store, kinds: Iterable[DocumentKind[Any]]) -> None:
        self._store = store
        self._cache = Cache(store)
        self._kinds: dict[str, DocumentKind[Any]] = {}
        for kind in kinds:
            if kind.name in self._kinds:
                raise ValueError(f"kind {kind.name} is declared twice")
            self._kinds[kind.name] = kind

    def kind(self, name: str) -> DocumentKind[Any]:
        """The kind of this name; UnknownKind if it was not declared."""
        found = self._kinds.get(name)
        if found is None:
            raise UnknownKind(name, ", ".join(sorted(self._kinds)) or "none")
        return found

    # --- change ------------------------------------------------------------------------------------------------------

    async def put(
        self, kind: DocumentKind[T], name: str, body: T | dict[str, Any], *, base: int, author: str, reason: str
    ) -> Document | Proposal:
        """The version after `base` (0: the first one); a proposal of it, where two people are needed.

        The same author who puts the same body on the same base once more gets what is there.
        """
        self._declared(kind)
        new, text = kind.write(check_name(name), body)
        return await self._change(kind, name, text, new, base=base, author=author, reason=reason)

    async def retire(
        self, kind: DocumentKind[T], name: str, *, base: int, author: str, reason: str
    ) -> Document | Proposal:
        """A version with the same body that says: no longer in use. `put` brings the document back."""
        self._declared(kind)
        before = await self.get(kind, name, base)
        return await self._change(kind, name, before.body, None, base=base, author=author, reason=reason)

    async def _change(
        self, kind: DocumentKind[T], name: str, text: str, new: T | None, *, base: int, author: str, reason: str
    ) -> Document | Proposal:
        """Put a body; None: retire what is there."""
        person, why, retired = check_actor(author), check_reason(reason), new is None
        try:
            async with self._store.transaction() as tx:
                number = await tx.documents.lock()
                head = await _head(tx, kind.name, name)
                current = head.version if head else 0
                if current != base:
                    done = await tx.documents.version(kind.name, name, base + 1) if 0 <= base < current else None
                    if done is not None and repeats(done, body=text, retired=retired, author=person):
                        return intact(done)
                    raise DocumentMoved(kind.name, name, base, current)
                if head is not None and (head.body, head.retired) == (text, retired):
                    raise InvalidDocument(kind.name, name, f"version {current} says the same")
                made = draft(head, kind=kind.name, name=name, body=text, retired=retired, author=person, reason=why)
                if new is None:
                    needs_two = kind.retiring_needs_two
                else:
                    needs_two = await self._judge(tx, number, kind, name, head, new)
                return await (_propose(tx, made) if needs_two else _insert(tx, number, made))
        finally:
            self._cache.expire()  # also if the answer to COMMIT was lost: it may be there

    async def approve(self, kind: DocumentKind[T], name: str, hash_: bytes, *, actor: str, reason: str) -> Document:
        """The proposal of this hash becomes a version. The same person who approves it once more gets that version."""
        self._declared(kind)
        person, why = check_actor(actor), check_reason(reason)
        try:
            async with self._store.transaction() as tx:
                number = await tx.documents.lock()
                head = await _head(tx, kind.name, name)
                current = head.version if head else 0
                made = await tx.documents.proposal(kind.name, name)
                if made is None or made.hash != hash_:
                    done = await tx.documents.of_hash(kind.name, name, hash_)
                    if done is None:
                        raise UnknownProposal(kind.name, name, hash_.hex(), made.hash.hex() if made else "none")
                    if done.approved_by == person:
                        return intact(done)
                    raise DocumentMoved(kind.name, name, done.version - 1, current)
                if made.base != current:
                    raise DocumentMoved(kind.name, name, made.base, current)
                if same_person(made.author, person):
                    raise SecondPersonNeeded(kind.name, name, made.author, person)
                # The row of a proposal may change, so what it says now must be what its author's hash stands for.
                if hash_of(made) != hash_ or made.previous != (head.link if head else b""):
                    raise DatabaseCorrupt(f"the proposal for {kind.name} {name}", "it is not what its hash says")
                if not made.retired:
                    # The program may be another one than the author's, and other documents may have changed since.
                    await self._judge(tx, number, kind, name, head, kind.read(made))
                document = await _insert(tx, number, made, approved_by=person, approved_reason=why)
                await tx.documents.drop_proposal(kind.name, name)
                await _note(tx, APPROVED, made, actor=person, reason=why, proposed_by=made.author)
                return document
        finally:
            self._cache.expire()

    async def _judge(
        self, tx: Tables, number: int, kind: DocumentKind[T], name: str, head: Document | None, new: T
    ) -> bool:
        """Whether a change needs two people; raises why it is refused. `number` is that of the newest version of all,
        which this transaction has locked."""
        needs_two = kind.judge(name, head, new)
        if kind.likeness is not None:
            kind.judge_alike(name, new, await self._cache.alike(kind, name, new, tx.documents, number))
        if kind.beside is not None:
            other, its_name = kind.beside(name)
            if (found := await _head(tx, other.name, its_name)) is not None:
                kind.judge_beside(name, new, other.read(found))
        return needs_two

    async def withdraw(self, kind: DocumentKind[T], name: str, hash_: bytes, *, actor: str, reason: str) -> bool:
        """Drop the open proposal of this hash, any person's; whether there was one."""
        self._declared(kind)
        person, why = check_actor(actor), check_reason(reason)
        async with self._store.transaction() as tx:
            await tx.documents.lock()
            made = await tx.documents.proposal(kind.name, check_name(name))
            if made is None or made.hash != hash_:
                return False
            await tx.documents.drop_proposal(kind.name, name)
            await _note(tx, WITHDRAWN, made, actor=person, reason=why, proposed_by=made.author)
            return True

    # --- read from the database --------------------------------------------------------------------------------------

    async def get(self, kind: DocumentKind[T], name: str, version: int | None = None) -> Document:
        """One version, or the newest, retired or not; UnknownDocument if it is not there."""
        tables = self._store.read.documents
        self._declared(kind)
        if version is None:
            found = await tables.head(kind.name, check_name(name))
        elif not 1 <= version <= VERSION_MAX:  # which PostgreSQL could not compare
            found = None
        else:
            found = await tables.version(kind.name, check_name(name), version)
        if found is None:
            raise UnknownDocument(kind.name, name, version or 0)
        return intact(found)

    async def history(
        self, kind: DocumentKind[T], name: str, *, before: int = VERSION_MAX, limit: int = 100
    ) -> list[Document]:
        """The versions of a document, newest first."""
        self._declared(kind)
        found = await self._store.read.documents.history(
            kind.name, check_name(name), before=min(before, VERSION_MAX), limit=limit
        )
        return [intact(document) for document in found]

    async def list(self, kind: DocumentKind[T], *, after: str = "", limit: int = 1_000) -> list[Document]:
        """The newest version of each document of a kind, retired or not, by name."""
        self._declared(kind)
        found = await self._store.read.documents.list(kind.name, after=after and check_name(after), limit=limit)
        return [intact(document) for document in found]

    async def number(self) -> int:
        """A number that moves with every change of any document. Reads the database, not the cache."""
        return await self._store.read.documents.number()

    async def proposals(self, kind: DocumentKind[T] | None = None) -> tuple[Proposal, ...]:
        """Changes that wait for a second person. One whose base is no longer current can't be approved any more."""
        return tuple(await self._store.read.documents.proposals(kind.name if kind else ""))

    async def verify(self, citation: Citation) -> Standing:
        """What a version that a record or an approval cites is now. Reads the database, not the cache."""
        tables = self._store.read.documents
        head = await tables.head(check_kind(citation.kind), check_name(citation.name))
        if head is None or not 1 <= citation.version <= head.version:
            return Standing.UNKNOWN
        cited = head
        if citation.version != head.version:
            older = await tables.version(citation.kind, citation.name, citation.version)
            if older is None:
                return Standing.UNKNOWN
            cited = older
        if not citation.hash == cited.hash == hash_of(cited):
            return Standing.ALTERED
        if cited is not head:
            return Standing.SUPERSEDED
        return Standing.RETIRED if head.retired else Standing.CURRENT

    # --- read through the cache --------------------------------------------------------------------------------------

    async def current(self, kind: DocumentKind[T], name: str, *, fresh: bool = False) -> Current[T] | None:
        """The version in use; None if there is none, or it is retired. At most `DOCUMENTS_S` old; `fresh`: now."""
        self._declared(kind)
        return await self._cache.current(kind, name, fresh=fresh)

    async def all(self, kind: DocumentKind[T], *, fresh: bool = False) -> Mapping[str, Current[T]]:
        """All documents of a kind that are in use, by name, as `current` would return them."""
        self._declared(kind)
        names = await self._cache.names(kind, fresh=fresh)
        found = {name: self._cache.known(kind, name) for name in names}
        return {name: current for name, current in found.items() if current is not None}

    def _declared(self, kind: DocumentKind[Any]) -> None:
        if self.kind(kind.name) is not kind:
            raise ValueError(f"another kind is declared as {kind.name}")


async def _head(tx: Tables, kind: str, name: str) -> Document | None:
    head = await tx.documents.head(kind, check_name(name))
    return None if head is None else intact(head)


async def _propose(tx: Tables, made: Proposal) -> Proposal:
    """Open a proposal. It replaces one of the same author, and one whose base is no longer current."""
    before = await tx.documents.proposal(made.kind, made.name)
    if before is not None and before.base == made.base:
        if before.author != made.author:
            raise ProposalOpen(made.kind, made.name, before.author, before.hash.hex())
        if before.hash == made.hash:
            return before  # its author retries after a lost answer
    at_us = await tx.documents.propose(made)
    await _note(tx, PROPOSED, made, actor=made.author, reason=made.reason)
    return msgspec.structs.replace(made, at_us=at_us)


async def _insert(
    tx: Tables, number: int, made: Proposal, *, approved_by: str = "", approved_reason: str = ""
) -> Document:
    """Make a version of it. `number` is that of the newest version of all, which this transaction has locked."""
    document = await tx.documents.insert(number + 1, made, approved_by=approved_by, approved_reason=approved_reason)
    if document is None:  # the table's key has the last word
        head = await tx.documents.head(made.kind, made.name)
        raise DocumentMoved(made.kind, made.name, made.base, head.version if head else 0)
    return document


async def _note(tx: Tables, action: str, made: Proposal, *, actor: str, reason: str, proposed_by: str = "") -> None:
    """Proposals come and go; what people did with them is kept."""
    name = f"{made.kind}/{made.name}"
    await tx.actions.note(action, SUBJECT, name, actor=actor, reason=reason, proposed_by=proposed_by)
