"""Tables of documents: their versions, which are insert-only, and proposals that wait for a second person."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.model.documents import Document, Proposal
from bursar.store.columns import reader
from bursar.store.session import Table

VERSION_MAX = 2**31 - 1

_document = reader("document", Document)
_proposal = reader("proposal", Proposal)


class Documents(Table):
    """Versions of documents, and open proposals."""

    async def lock(self) -> int:
        """The number of the newest version of all. No other transaction changes documents until this one ends."""
        return int(await self._one("lock_documents"))

    async def number(self) -> int:
        """The number of the newest version of all: it moves with every change."""
        return int(await self._one("documents_number"))

    async def insert(self, number: int, made: Proposal, *, approved_by: str, approved_reason: str) -> Document | None:
        """A proposal as the next version; None if that version is there already. The caller has locked the number."""
        columns = (made.kind, made.name, made.version, made.body, made.retired, made.previous, made.hash)
        people = (made.author, made.reason, approved_by, approved_reason)
        found = await self._first(_document, "insert_document", number, *columns, *people)
        if found is not None:
            await self._s.rows("count_document", number)
        return found

    async def head(self, kind: str, name: str) -> Document | None:
        """The newest version."""
        return await self._first(_document, "document_head", kind, name)

    async def version(self, kind: str, name: str, version: int) -> Document | None:
        """One version."""
        return await self._first(_document, "document_version", kind, name, version)

    async def of_hash(self, kind: str, name: str, hash_: bytes) -> Document | None:
        """The version that has this hash."""
        return await self._first(_document, "document_of_hash", kind, name, hash_)

    async def history(self, kind: str, name: str, *, before: int = VERSION_MAX, limit: int = 100) -> list[Document]:
        """The versions of a document, newest first."""
        return await self._all(_document, "document_history", kind, name, before, limit)

    async def list(self, kind: str, *, after: str = "", limit: int = 1_000) -> list[Document]:
        """The newest version of each document of a kind, by name."""
        return await self._all(_document, "document_list", kind, after, limit)

    async def heads_after(self, number: int, limit: int) -> Sequence[Document]:
        """The newest version of each document that has changed after this number, in the order of the changes."""
        return await self._all(_document, "document_heads", number, limit)

    async def after(self, kind: str, name: str, version: int, limit: int) -> Sequence[Document]:
        """All versions of all documents, by kind, name and version: those after this one."""
        return await self._all(_document, "documents_after", kind, name, version, limit)

    async def count(self) -> tuple[int, int]:
        """How many versions there are of all documents, and the highest number."""
        [row] = await self._s.rows("documents_count")
        return row[0], row[1]

    async def proposal(self, kind: str, name: str) -> Proposal | None:
        """The open proposal for a document."""
        return await self._first(_proposal, "document_proposal", kind, name)

    async def proposals(self, kind: str = "", *, limit: int = 1_000) -> Sequence[Proposal]:
        """Open proposals; of one kind, if it is named."""
        return await self._all(_proposal, "document_proposals", kind, limit)

    async def propose(self, made: Proposal) -> int:
        """Open this proposal, instead of the one that is open. Returns when."""
        columns = (made.kind, made.name, made.base, made.body, made.retired, made.previous, made.hash)
        return int(await self._one("put_proposal", *columns, made.author, made.reason))

    async def drop_proposal(self, kind: str, name: str) -> None:
        """It was approved or withdrawn."""
        await self._s.rows("drop_proposal", kind, name)
