"""What audit asks about documents, as part of I8: every version hashes to what its row says and follows from the one
before it, and none is missing. What is wrong with a version is decided in `model.documents`.
"""

from __future__ import annotations

from bursar.audit.finding import Evidence
from bursar.model.documents import Document, flaws
from bursar.store.tables import Tables

PAGE_MAX = 200  # versions read at once: each may be 64 KiB


async def check_documents(tables: Tables, evidence: Evidence) -> int:
    """Follow the chain of every document; how many versions were looked at."""
    seen = 0
    last: Document | None = None
    after = ("", "", 0)
    while page := await tables.documents.after(*after, PAGE_MAX):
        for document in page:
            seen += 1
            same = last is not None and (last.kind, last.name) == (document.kind, document.name)
            for flaw in flaws(document, last if same else None):
                evidence.add(f"document {document.kind} {document.name} version {document.version} {flaw}")
            last = document
        after = (page[-1].kind, page[-1].name, page[-1].version)
    await _check_numbers(tables, evidence)
    return seen


async def _check_numbers(tables: Tables, evidence: Evidence) -> None:
    """Numbers have no gaps. A chain alone would not show that its newest versions were deleted."""
    count, highest = await tables.documents.count()
    number = await tables.documents.number()
    if not count == highest == number:
        text = f"{number} versions of documents were made, {count} are there and the highest number is {highest}"
        evidence.add(f"{text}: versions were deleted or added")
