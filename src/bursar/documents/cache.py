"""A cache of the current versions: at most `DOCUMENTS_S` seconds old, or the caller gets an error.

A number in the database moves with every change of any document. The cache compares it, and reads what has changed
since. If the database does not answer, cached versions are not used past that age: a policy that was tightened
meanwhile would be ignored.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

import msgspec

from bursar.model.document_kinds import DocumentKind, Other
from bursar.model.documents import Document, UnreadableDocument, hash_of
from bursar.model.errors import DatabaseCorrupt
from bursar.store import Store
from bursar.store.documents import Documents

DOCUMENTS_S = 2.0  # age at which a cached version is not used any more
PAGE_MAX = 500  # documents read at once

T = TypeVar("T", bound=msgspec.Struct)


class Current(msgspec.Struct, Generic[T], frozen=True):
    """The current version of a document that is in use, and its body as its kind's type."""

    document: Document
    body: T


class _Index:
    """The documents of a kind by their likeness, so that a change is not compared with each of thousands."""

    def __init__(self) -> None:
        self.names: dict[Hashable, set[str]] = {}
        self.changed: set[str] = set()  # names that are still to be put in
        self._likeness: dict[str, Hashable] = {}

    def put(self, name: str, likeness: Hashable) -> None:
        if name in self._likeness:
            self.names[self._likeness[name]].discard(name)
        self._likeness[name] = likeness
        self.names.setdefault(likeness, set()).add(name)


class Cache:
    """The newest versions of all documents, and the bodies of those that were asked for."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._heads: dict[str, dict[str, Document]] = {}  # by kind and name
        self._bodies: dict[tuple[str, str], Current[msgspec.Struct]] = {}
        self._indexes: dict[str, _Index] = {}  # by kind
        self._number = 0  # everything up to this change is known
        self._read_s = float("-inf")

    def expire(self) -> None:
        """This process has changed a document: read before the next use."""
        self._read_s = float("-inf")

    async def names(self, kind: DocumentKind[T], *, fresh: bool) -> list[str]:
        """Documents of a kind that are in use."""
        await self._look(fresh)
        return sorted(name for name, head in self._heads.get(kind.name, {}).items() if not head.retired)

    async def current(self, kind: DocumentKind[T], name: str, *, fresh: bool) -> Current[T] | None:
        """The current version; None if there is none, or it is retired."""
        await self._look(fresh)
        return self.known(kind, name)

    def known(self, kind: DocumentKind[T], name: str) -> Current[T] | None:
        """The current version as it was read last. Its body is decoded once per version."""
        head = self._heads.get(kind.name, {}).get(name)
        return None if head is None or head.retired else Current(head, self._body(kind, head))

    def _body(self, kind: DocumentKind[T], head: Document) -> T:
        kept = self._bodies.get((kind.name, head.name))
        if kept is not None and kept.document is head and isinstance(kept.body, kind.body):
            return kept.body
        body = kind.read(head)
        self._bodies[kind.name, head.name] = Current(head, body)
        return body

    async def alike(self, kind: DocumentKind[T], name: str, body: T, tables: Documents, number: int) -> list[Other[T]]:
        """The other documents of a kind with the likeness of a body, retired ones too, in a transaction that has
        locked their number. One that can't be read any more has none: nothing uses it."""
        assert kind.likeness is not None  # the caller has looked
        await self._catch_up(tables, number)
        index = self._indexes.setdefault(kind.name, _Index())
        heads = self._heads.get(kind.name, {})
        while index.changed:
            head = heads[index.changed.pop()]
            try:
                index.put(head.name, kind.likeness(self._body(kind, head)))
            except UnreadableDocument:
                index.put(head.name, None)
        names = index.names.get(kind.likeness(body), set()) - {name}
        return [Other(one, self._body(kind, heads[one]), heads[one].retired) for one in sorted(names)]

    async def _look(self, fresh: bool) -> None:
        asked_s = self._store.ports.monotonic()  # before the read: what is committed after it may not be in the answer
        if not fresh and asked_s - self._read_s < DOCUMENTS_S:
            return
        tables = self._store.read.documents
        await self._catch_up(tables, await tables.number())
        self._read_s = max(self._read_s, asked_s)

    async def _catch_up(self, tables: Documents, number: int) -> None:
        """Read what has changed up to a number."""
        if number < self._number:  # the database was restored from a backup
            self._heads, self._bodies, self._indexes, self._number = {}, {}, {}, 0
        known = self._number
        while known < number:
            page = await tables.heads_after(known, PAGE_MAX)
            for head in page:
                self._keep(intact(head))
            if not page:
                raise DatabaseCorrupt("the table of documents", f"there is no version of number {number}")
            known = page[-1].number
        self._number = max(self._number, known)

    def _keep(self, head: Document) -> None:
        """Two callers may read at once, and the slower one must not bring an older version back."""
        heads = self._heads.setdefault(head.kind, {})
        kept = heads.get(head.name)
        if kept is None or kept.version < head.version:
            heads[head.name] = head
            self._indexes.setdefault(head.kind, _Index()).changed.add(head.name)


def intact(document: Document) -> Document:
    """A version that hashes to what its row says. No other is ever used."""
    if hash_of(document) != document.hash:
        what = f"{document.kind} {document.name} version {document.version}"
        raise DatabaseCorrupt(what, "its content does not hash to what its row says")
    return document
