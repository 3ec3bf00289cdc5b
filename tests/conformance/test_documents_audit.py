"""Audit of documents: each row that is changed behind the triggers is found and named."""

from __future__ import annotations

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back, look, red, saved_aside
from tests.conformance.test_documents import ANN, BOB, LIMITS, NOTES, Limits, documents, propose, put

from bursar.store import Store

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


async def some_documents(store: Store) -> None:
    """Two documents of three and two versions, and one of a single version, in turn."""
    docs = documents(store)
    await put(docs, 5)
    await docs.approve(LIMITS, "usdt", (await propose(docs, 5)).hash, **BOB)
    await put(docs, 6, 1)
    await docs.approve(LIMITS, "usdt", (await propose(docs, 6, 1)).hash, **BOB)
    await put(docs, 7, 2)
    await docs.put(NOTES, "btc", Limits(1), base=0, **ANN)
    await propose(docs, 9, 2)


DAMAGES = {
    "body": (
        """UPDATE {s}documents SET body = '{"daily":500,"note":""}' WHERE kind = 'limits' AND version = 1""",
        ["document limits usdt version 1 hashes to"],
    ),
    "retired": (
        "UPDATE {s}documents SET retired = NOT retired WHERE name = 'btc'",
        ["document notes btc version 1 hashes to"],
    ),
    "hash": (
        "UPDATE {s}documents SET hash = (SELECT hash FROM {s}documents WHERE number = 1) WHERE number = 3",
        ["document notes usdt version 2 hashes to", "document notes usdt version 3 does not follow"],
    ),
    "author": (
        "UPDATE {s}documents SET author = 'eve' WHERE kind = 'notes' AND name = 'usdt' AND version = 2",
        ["document notes usdt version 3 does not follow from the version before it"],
    ),
    "approver": (
        "UPDATE {s}documents SET approved_by = 'eve' WHERE kind = 'limits' AND version = 1",
        ["document limits usdt version 2 does not follow"],
    ),
    "approved by the author": (
        "UPDATE {s}documents SET approved_by = 'a.nn' WHERE kind = 'limits' AND version = 2",
        ["document limits usdt version 2 was approved by its author"],
    ),
    "first version gone": (
        "DELETE FROM {s}documents WHERE kind = 'limits' AND version = 1",
        ["document limits usdt version 2 follows version 0", "6 versions of documents were made, 5 are there"],
    ),
    "newest version gone": (
        "DELETE FROM {s}documents WHERE kind = 'limits' AND version = 2",
        ["6 versions of documents were made, 5 are there"],
    ),
    "very newest gone": ("DELETE FROM {s}documents WHERE name = 'btc'", ["the highest number is 5"]),
    "another name": (
        "UPDATE {s}documents SET name = 'eth' WHERE name = 'btc'",
        ["document notes eth version 1 hashes to"],
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.parametrize("page", [1, 200])
@scenario
async def test_damage_to_a_document_is_found_and_named(
    place: Place, name: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bursar.audit.checks.DOCUMENTS_MAX", page)
    sql, says = DAMAGES[name]
    async with place.bursar() as bursar:
        await some_documents(bursar.store)
    [sound] = await look(place, "I8")
    assert (sound.ok, sound.checked) == (True, 6)

    async def hurt() -> None:
        await behind_our_back(place, sql)
        findings = await look(place)
        assert red(findings) == {"I8"}
        [evidence] = [finding.broken for finding in findings if not finding.ok]
        assert len(evidence) == len(says), evidence
        assert all(text in found for text, found in zip(says, evidence, strict=True)), evidence

    await saved_aside(place, "documents", hurt)
    assert red(await look(place)) == set()
