"""Documents on both stores: versions that only grow, two people where it matters, and a cache that notices others."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterable
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.builders import MovablePorts, Place, StoreAt, outcome, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_store_schema import raw

from bursar.documents import (
    DOCUMENTS_S,
    Citation,
    Document,
    DocumentKind,
    DocumentMoved,
    Documents,
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
from bursar.model.document_kinds import Other
from bursar.model.errors import DatabaseCorrupt, DatabaseUnavailable, InvalidName
from bursar.store import Store

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much may leave."""

    daily: int
    note: str = ""


def check(old: Limits | None, new: Limits) -> None:
    if new.daily < 0:
        raise ValueError("a limit is not negative")


def raises(old: Limits | None, new: Limits) -> bool:
    return old is None or new.daily > old.daily


LIMITS = DocumentKind(name="limits", body=Limits, two_people=raises, check=check)
NOTES = DocumentKind(name="notes", body=Limits, two_people=False)


def not_twice(new: Limits, others: Iterable[Other[Limits]]) -> None:
    for one in others:
        raise ValueError(f"{one.name} has {one.body.daily}{' and is retired' if one.retired else ''}")


ALONE = DocumentKind(
    name="alone", body=Limits, two_people=True, likeness=lambda body: body.daily, check_alike=not_twice
)


def not_above(name: str, new: Limits, note: Limits) -> None:
    if new.daily > note.daily:
        raise ValueError(f"{name} is above {note.daily}")


BELOW = DocumentKind(
    name="below", body=Limits, two_people=True, beside=lambda name: (NOTES, name), check_beside=not_above
)
KINDS = (LIMITS, NOTES, ALONE, BELOW)
ANN = {"author": "ann", "reason": "ticket 17"}
BOB = {"actor": "bob", "reason": "checked"}


def documents(store: Store) -> Documents:
    return Documents(store, KINDS)


async def put(docs: Documents, daily: int, base: int = 0, **by: str) -> Document:
    """A version that one person makes."""
    made = await docs.put(NOTES, "usdt", Limits(daily), base=base, **ANN | by)
    assert isinstance(made, Document)
    return made


async def propose(docs: Documents, daily: int, base: int = 0, **by: str) -> Proposal:
    made = await docs.put(LIMITS, "usdt", Limits(daily), base=base, **ANN | by)
    assert isinstance(made, Proposal)
    return made


async def alone(docs: Documents, name: str, daily: int, base: int = 0) -> Document:
    made = await docs.put(ALONE, name, Limits(daily), base=base, **ANN)
    assert isinstance(made, Proposal)
    return await docs.approve(ALONE, name, made.hash, **BOB)


@scenario
async def test_document_fits_the_one_beside_it_when_it_is_proposed_and_when_it_is_approved(store: Store) -> None:
    docs = documents(store)
    early = await docs.put(BELOW, "usdt", Limits(99), base=0, **ANN)
    assert isinstance(early, Proposal), "there is nothing yet that it could be compared with"
    await put(docs, 5)
    with pytest.raises(InvalidDocument, match="usdt is above 5"):
        await docs.put(BELOW, "usdt", Limits(6), base=0, **ANN)
    with pytest.raises(InvalidDocument, match="usdt is above 5"):
        await docs.approve(BELOW, "usdt", early.hash, **BOB)
    fits = await docs.put(BELOW, "usdt", Limits(5), base=0, **ANN)
    assert isinstance(fits, Proposal)
    assert (await docs.approve(BELOW, "usdt", fits.hash, **BOB)).version == 1


# --- versions --------------------------------------------------------------------------------------------------------


@scenario
async def test_versions_count_from_one_and_are_kept(store: Store) -> None:
    docs = documents(store)
    first = await put(docs, 5)
    second = await put(docs, 6, 1, author="Bob", reason="more")
    other = await docs.put(NOTES, "btc", {"daily": 1}, base=0, **ANN)
    assert isinstance(other, Document)
    assert [d.number for d in (first, second, other)] == [1, 2, 3]
    assert (second.version, second.author, second.reason, second.approved_by) == (2, "bob", "more", "")
    assert (second.body, second.previous) == ('{"daily":6,"note":""}', first.link)
    assert await docs.get(NOTES, "usdt") == second
    assert await docs.get(NOTES, "usdt", 1) == first
    assert await docs.history(NOTES, "usdt") == [second, first]
    assert await docs.history(NOTES, "usdt", before=2) == [first]
    assert await docs.list(NOTES) == [other, second]
    assert await docs.list(NOTES, after="btc") == [second]
    assert await docs.list(LIMITS) == []
    assert NOTES.read(second) == Limits(6)
    assert await docs.history(NOTES, "usdt", before=2**40) == [second, first]
    for version in (3, 0, -1, 2**40):
        with pytest.raises(UnknownDocument):
            await docs.get(NOTES, "usdt", version)
    with pytest.raises(UnknownDocument, match="there is no limits usdt"):
        await docs.get(LIMITS, "usdt")


@scenario
async def test_a_change_names_the_version_it_is_based_on(store: Store) -> None:
    docs = documents(store)
    await put(docs, 5)
    for base in (0, 2, -1, 2**40):
        with pytest.raises(DocumentMoved) as caught:
            await put(docs, 6, base)
        assert (caught.value.base, caught.value.current) == (base, 1)
    assert len(await docs.history(NOTES, "usdt")) == 1


@scenario
async def test_of_many_writers_at_once_exactly_one_wins(place: Place) -> None:
    """Several programs, each with its own connection."""
    stores = [place.store() for _ in range(4)]
    for one in stores:
        await one.open()
    try:
        for base in range(3):
            work = [put(documents(one), 10 * base + n, base) for n, one in enumerate(stores)]
            found = await asyncio.gather(*[outcome(each) for each in work])
            assert sorted(type(one).__name__ for one in found) == ["Document", *["DocumentMoved"] * 3]
        history = await documents(stores[0]).history(NOTES, "usdt")
        assert [(d.version, d.number) for d in history] == [(3, 3), (2, 2), (1, 1)]
    finally:
        for one in stores:
            await one.close()


@scenario
async def test_writers_of_different_documents_at_once_all_succeed(place: Place) -> None:
    """One after the other, with numbers in the order of the commits: a cache that compares them misses none."""
    async with place.bursar() as one, place.bursar() as two:
        work = [
            documents(bursar.store).put(NOTES, f"n{n}", Limits(n), base=0, **ANN)
            for n, bursar in enumerate([one, two] * 4)
        ]
        found = await asyncio.gather(*work)
        assert sorted(made.number for made in found if isinstance(made, Document)) == list(range(1, 9))
        assert len(await documents(two.store).all(NOTES)) == 8


@scenario
async def test_the_key_of_the_table_has_the_last_word(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that read an old version in spite of the lock writes nothing."""
    docs = documents(store)
    await put(docs, 5)

    async def nothing(*_: object) -> None:
        return None

    monkeypatch.setattr("bursar.documents.documents._head", nothing)
    with pytest.raises(DocumentMoved) as caught:
        await put(docs, 6)
    assert caught.value.current == 1
    assert len(await docs.history(NOTES, "usdt")) == 1


@scenario
async def test_the_same_author_putting_the_same_again_gets_what_is_there(store: Store) -> None:
    docs = documents(store)
    first = await put(docs, 5)
    assert await put(docs, 5) == first
    second = await put(docs, 6, 1)
    assert await put(docs, 5) == first
    assert await put(docs, 6, 1, reason="in other words") == second
    for another in ({"author": "bob"}, {"daily": 7}):
        with pytest.raises(DocumentMoved):
            await put(docs, **{"daily": 6, "base": 1} | another)
    with pytest.raises(InvalidDocument, match="version 2 says the same"):
        await put(docs, 6, 2)


@scenario
async def test_what_is_refused_writes_nothing(store: Store) -> None:
    docs = documents(store)
    for name, body, error in (
        ("usdt", {"daily": 1.5}, InvalidDocument),
        ("usdt", {"daily": 1, "more": 2}, InvalidDocument),
        ("usdt", {"daily": -1}, InvalidDocument),
        ("USDT", {"daily": 1}, InvalidName),
    ):
        with pytest.raises(error):
            await docs.put(LIMITS, name, body, base=0, **ANN)
    for by in (
        {"author": "b\u043eb", "reason": "x"},
        {"author": "audit", "reason": "x"},
        {"author": "ann", "reason": ""},
    ):
        with pytest.raises(InvalidName):
            await docs.put(LIMITS, "usdt", Limits(1), base=0, **by)
    stranger = DocumentKind(name="stranger", body=Limits, two_people=False)
    with pytest.raises(UnknownKind, match="known here: alone, below, limits, notes"):
        await docs.put(stranger, "usdt", Limits(1), base=0, **ANN)
    assert await store.read.documents.count() == (0, 0)
    assert await docs.proposals() == ()


@scenario
async def test_a_retired_document_keeps_its_body_and_can_come_back(store: Store) -> None:
    docs = documents(store)
    with pytest.raises(UnknownDocument):
        await docs.retire(NOTES, "usdt", base=1, **ANN)
    first = await put(docs, 5)
    gone = await docs.retire(NOTES, "usdt", base=1, **ANN)
    assert isinstance(gone, Document)
    assert (gone.version, gone.retired, gone.body) == (2, True, first.body)
    assert await docs.retire(NOTES, "usdt", base=1, **ANN) == gone
    assert await docs.current(NOTES, "usdt") is None
    assert await docs.all(NOTES) == {}
    assert await docs.list(NOTES) == [gone]
    assert await docs.verify(gone.citation) is Standing.RETIRED
    with pytest.raises(InvalidDocument, match="version 2 says the same"):
        await docs.retire(NOTES, "usdt", base=2, **ANN)
    assert not (await put(docs, 5, 2)).retired
    assert (await docs.all(NOTES))["usdt"].body == Limits(5)


@pytest.mark.parametrize("change", ["UPDATE documents SET author = 'eve'", "DELETE FROM documents"])
@scenario
async def test_the_database_refuses_to_change_a_version(bare_place: Place, change: str) -> None:
    async with bare_place.bursar() as bursar:
        await put(documents(bursar.store), 5)
    async with raw(bare_place) as intruder:
        with pytest.raises((sqlite3.IntegrityError, asyncpg.PostgresError), match="insert-only"):
            await intruder.execute(change)
        if bare_place.engine == "sqlite":  # which would get past the triggers that refuse changes
            await intruder.execute("INSERT OR REPLACE INTO documents SELECT * FROM documents")
            await intruder.execute(
                "INSERT OR REPLACE INTO documents"
                " SELECT 9, kind, name, version, '{}', 0, previous, hash, 'eve', '', '', '', 0 FROM documents"
            )
        else:
            with pytest.raises(asyncpg.PostgresError, match="insert-only"):
                await intruder.execute("TRUNCATE documents")
        assert await intruder.count("documents WHERE author = 'ann' AND number = 1") == 1
        assert await intruder.count("documents") == 1


@scenario
async def test_any_text_is_kept_to_the_letter(store: Store) -> None:
    docs = documents(store)
    body = Limits(1, note='\x00\x1f\n "\\ \u00e9 \u2028 \U0001f600')
    await docs.put(NOTES, "usdt", body, base=0, author="ann", reason="\u00e9 \U0001f600")
    found = await docs.current(NOTES, "usdt")
    assert found is not None
    assert found.body == body
    assert found.document.reason == "\u00e9 \U0001f600"


@scenario
async def test_what_no_two_documents_may_have_is_refused_when_it_is_put_and_when_it_is_approved(place: Place) -> None:
    async with place.bursar() as one, place.bursar() as two:
        here, there = documents(one.store), documents(two.store)
        early = await here.put(ALONE, "early", Limits(5), base=0, **ANN)
        assert isinstance(early, Proposal)
        await alone(there, "late", 5)  # proposed later, approved sooner, and by another process
        for refused in (
            here.put(ALONE, "more", Limits(5), base=0, **ANN),
            here.approve(ALONE, "early", early.hash, **BOB),
        ):
            with pytest.raises(InvalidDocument, match="late has 5"):
                await refused
        await alone(here, "late", 6, base=1)
        await alone(here, "early", 5)
        gone = await there.retire(ALONE, "early", base=1, **ANN)
        assert isinstance(gone, Proposal)
        await there.approve(ALONE, "early", gone.hash, **BOB)
        with pytest.raises(InvalidDocument, match="early has 5 and is retired"):
            await alone(here, "more", 5)
        await alone(here, "early", 5, base=2)  # itself is no other


# --- two people ------------------------------------------------------------------------------------------------------


@scenario
async def test_a_change_that_needs_two_people_is_a_proposal_until_another_approves_its_hash(store: Store) -> None:
    docs = documents(store)
    made = await propose(docs, 5)
    assert await docs.proposals() == (made,) == await docs.proposals(LIMITS)
    assert await docs.proposals(NOTES) == ()
    assert await docs.list(LIMITS) == []
    assert await docs.current(LIMITS, "usdt") is None
    version = await docs.approve(LIMITS, "usdt", made.hash, **BOB)
    assert (version.version, version.hash, version.author, version.approved_by) == (1, made.hash, "ann", "bob")
    assert (version.reason, version.approved_reason) == ("ticket 17", "checked")
    assert await docs.get(LIMITS, "usdt") == version
    assert await docs.proposals() == ()
    less = await docs.put(LIMITS, "usdt", Limits(4), base=1, **ANN)
    assert isinstance(less, Document)  # the kind says that one person may lower a limit
    assert [(a.action, a.name, a.actor, a.proposed_by) for a in await store.read.actions.list(kind="document")] == [
        ("change approved", "limits/usdt", "bob", "ann"),
        ("change proposed", "limits/usdt", "ann", ""),
    ]


@pytest.mark.parametrize("alias", ["bill", "BILL", "bi11", "b.ill", "bill+ops"])
@scenario
async def test_a_look_alike_of_the_author_is_no_second_person(store: Store, alias: str) -> None:
    docs = documents(store)
    made = await propose(docs, 5, author="bill")
    with pytest.raises((SecondPersonNeeded, InvalidName)) as caught:
        await docs.approve(LIMITS, "usdt", made.hash, actor=alias, reason="I am another")
    assert isinstance(caught.value, SecondPersonNeeded)
    assert await docs.list(LIMITS) == []


@scenario
async def test_exactly_the_hash_that_was_proposed_is_approved(store: Store) -> None:
    docs = documents(store)
    first = await propose(docs, 5)
    assert await propose(docs, 5, reason="again") == first
    second = await propose(docs, 6)
    assert await docs.proposals() == (second,)
    with pytest.raises(UnknownProposal) as caught:
        await docs.approve(LIMITS, "usdt", first.hash, **BOB)
    assert caught.value.open == second.hash.hex()
    with pytest.raises(ProposalOpen) as taken:
        await propose(docs, 7, author="carol")
    assert (taken.value.author, taken.value.hash) == ("ann", second.hash.hex())
    assert not await docs.withdraw(LIMITS, "usdt", first.hash, **BOB)
    assert await docs.withdraw(LIMITS, "usdt", second.hash, **BOB)
    assert not await docs.withdraw(LIMITS, "usdt", second.hash, **BOB)
    with pytest.raises(UnknownProposal, match="open: none"):
        await docs.approve(LIMITS, "usdt", second.hash, **BOB)
    assert (await propose(docs, 7, author="carol")).author == "carol"
    assert await docs.list(LIMITS) == []


@scenario
async def test_a_proposal_whose_base_has_moved_can_not_be_approved(store: Store) -> None:
    docs = documents(store)
    await docs.approve(LIMITS, "usdt", (await propose(docs, 5)).hash, **BOB)
    stale = await propose(docs, 9, 1)
    await docs.put(LIMITS, "usdt", Limits(4), base=1, author="carol", reason="ticket 18")
    with pytest.raises(DocumentMoved) as caught:
        await docs.approve(LIMITS, "usdt", stale.hash, **BOB)
    assert (caught.value.base, caught.value.current) == (1, 2)
    fresh = await propose(docs, 9, 2, author="carol")  # which may replace another person's that is stale
    assert await docs.proposals() == (fresh,)
    assert (await docs.approve(LIMITS, "usdt", fresh.hash, **BOB)).version == 3


@scenario
async def test_an_approval_that_is_repeated_gets_the_version(store: Store) -> None:
    docs = documents(store)
    made = await propose(docs, 5)
    version = await docs.approve(LIMITS, "usdt", made.hash, **BOB)
    assert await docs.approve(LIMITS, "usdt", made.hash, **BOB) == version
    assert await docs.put(LIMITS, "usdt", Limits(5), base=0, **ANN) == version
    for actor in ("carol", "ann"):
        with pytest.raises(DocumentMoved):
            await docs.approve(LIMITS, "usdt", made.hash, actor=actor, reason="me too")


@scenario
async def test_of_two_people_who_approve_at_once_one_is_written_down(place: Place) -> None:
    async with place.bursar() as one, place.bursar() as two:
        here, there = documents(one.store), documents(two.store)
        made = await propose(here, 5)
        found = await asyncio.gather(
            outcome(here.approve(LIMITS, "usdt", made.hash, **BOB)),
            outcome(there.approve(LIMITS, "usdt", made.hash, actor="carol", reason="seen")),
        )
        assert sorted(type(each).__name__ for each in found) == ["Document", "DocumentMoved"]
        assert len(await here.history(LIMITS, "usdt")) == 1


@scenario
async def test_retiring_and_bringing_back_needs_two_people_where_a_change_may(store: Store) -> None:
    docs = documents(store)
    await docs.approve(LIMITS, "usdt", (await propose(docs, 5)).hash, **BOB)
    gone = await docs.retire(LIMITS, "usdt", base=1, **ANN)
    assert isinstance(gone, Proposal)
    assert (await docs.current(LIMITS, "usdt")) is not None
    assert (await docs.approve(LIMITS, "usdt", gone.hash, **BOB)).retired
    assert await docs.current(LIMITS, "usdt") is None
    assert (await propose(docs, 1, 2)).base == 2


@scenario
async def test_a_proposal_that_was_changed_in_the_database_is_not_approved(bare_place: Place) -> None:
    """The author's hash stands for what the author proposed."""
    async with bare_place.bursar() as bursar:
        docs = documents(bursar.store)
        made = await propose(docs, 5)
        await behind_our_back(bare_place, """UPDATE {s}document_proposals SET body = '{"daily":500,"note":""}'""")
        with pytest.raises(DatabaseCorrupt, match="not what its hash says"):
            await docs.approve(LIMITS, "usdt", made.hash, **BOB)
        assert await docs.list(LIMITS) == []


@scenario
async def test_the_approvers_program_checks_again(store: Store) -> None:
    made = await propose(documents(store), 5)

    def stricter(old: Limits | None, new: Limits) -> None:
        raise ValueError("at most 4")

    kind = DocumentKind(name="limits", body=Limits, two_people=True, check=stricter)
    with pytest.raises(InvalidDocument, match="at most 4"):
        await Documents(store, [kind]).approve(kind, "usdt", made.hash, **BOB)


# --- reading ---------------------------------------------------------------------------------------------------------


class Clock(MovablePorts):
    """A monotonic clock that stands still until it is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.at_s = 0.0

    def monotonic(self) -> float:
        return self.at_s


@scenario
async def test_another_process_sees_a_change_within_two_seconds(place: Place) -> None:
    clock = Clock()
    async with place.bursar() as one, place.bursar(clock) as two:
        here, there = documents(one.store), documents(two.store)
        assert await there.current(NOTES, "usdt") is None
        first = await put(here, 5)
        assert await there.current(NOTES, "usdt") is None
        clock.at_s += DOCUMENTS_S
        known = await there.current(NOTES, "usdt")
        assert known is not None
        assert (known.document, known.body) == (first, Limits(5))
        await put(here, 6, 1)
        await here.put(NOTES, "btc", Limits(1), base=0, **ANN)
        clock.at_s += DOCUMENTS_S * 0.9
        assert await there.all(NOTES) == {"usdt": known}
        assert {name: c.body for name, c in (await there.all(NOTES, fresh=True)).items()} == {
            "btc": Limits(1),
            "usdt": Limits(6),
        }


@scenario
async def test_a_process_sees_its_own_change_at_once(store: Store) -> None:
    docs = documents(store)
    for version in range(3):
        await put(docs, version, version)
        known = await docs.current(NOTES, "usdt")
        assert known is not None
        assert known.body == Limits(version)


@scenario
async def test_nothing_is_read_while_nothing_has_changed(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    async with place.bursar(clock) as bursar:
        docs, asked = documents(bursar.store), list[str]()
        await put(docs, 5)
        first = await docs.current(NOTES, "usdt")
        tables: Any = bursar.store.read.documents
        for name in ("number", "heads_after"):
            real = getattr(tables, name)

            async def counted(*args: Any, name: str = name, real: Any = real) -> Any:
                asked.append(name)
                return await real(*args)

            monkeypatch.setattr(tables, name, counted)
        again = await docs.current(NOTES, "usdt")
        assert again == first
        assert asked == []
        clock.at_s += DOCUMENTS_S
        await docs.current(NOTES, "usdt")
        assert asked == ["number"]


@scenario
async def test_many_documents_are_read_page_by_page(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.documents.cache.PAGE_MAX", 2)
    docs = documents(store)
    for n in range(5):
        await docs.put(NOTES, f"n{n}", Limits(n), base=0, **ANN)
    await docs.put(NOTES, "n0", Limits(9), base=1, **ANN)
    found = await documents(store).all(NOTES)
    assert {name: c.body.daily for name, c in found.items()} == {"n0": 9, "n1": 1, "n2": 2, "n3": 3, "n4": 4}


@scenario
async def test_a_database_that_does_not_answer_is_an_error_and_not_an_old_policy(place: Place) -> None:
    clock = Clock()
    async with place.bursar(clock) as bursar:
        docs = documents(bursar.store)
        await put(docs, 5)
        assert await docs.current(NOTES, "usdt") is not None
    assert await docs.current(NOTES, "usdt") is not None
    clock.at_s += DOCUMENTS_S
    for _ in range(2):
        with pytest.raises(DatabaseUnavailable):
            await docs.current(NOTES, "usdt")


@scenario
async def test_a_restored_database_is_read_anew(bare_place: Place) -> None:
    """The number goes back, and so does what is known."""
    async with bare_place.bursar() as bursar:
        docs = documents(bursar.store)
        await put(docs, 5)
        await put(docs, 6, 1)
        assert await docs.current(NOTES, "usdt") is not None
        back = "UPDATE {s}document_counter SET number = 1"
        await behind_our_back(bare_place, "DELETE FROM {s}documents WHERE version = 2", back)
        known = await docs.current(NOTES, "usdt", fresh=True)
        assert known is not None
        assert known.body == Limits(5)


@scenario
async def test_a_damaged_version_is_never_used(bare_place: Place) -> None:
    async with bare_place.bursar() as bursar:
        docs = documents(bursar.store)
        first = await put(docs, 5)
        await behind_our_back(bare_place, """UPDATE {s}documents SET body = '{"daily":500,"note":""}'""")
        other = documents(bursar.store)
        for work in (
            other.current(NOTES, "usdt"),
            other.get(NOTES, "usdt"),
            put(other, 6, 1),
            other.history(NOTES, "usdt"),
        ):
            with pytest.raises(DatabaseCorrupt, match="notes usdt version 1"):
                await work
        assert await other.verify(first.citation) is Standing.ALTERED


@scenario
async def test_a_version_that_does_not_fit_the_declaration_is_an_error_and_can_be_replaced(store: Store) -> None:
    class Other(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        weekly: int

    await put(documents(store), 5)
    kind = DocumentKind(name="notes", body=Other, two_people=lambda old, new: False)
    docs = Documents(store, [kind])
    for work in (docs.current(kind, "usdt"), docs.all(kind)):
        with pytest.raises(UnreadableDocument, match="version 1 does not fit this program"):
            await work
    made = await docs.put(kind, "usdt", Other(7), base=1, **ANN)
    assert isinstance(made, Proposal)  # what can't be compared needs two people
    await docs.approve(kind, "usdt", made.hash, **BOB)
    known = await docs.current(kind, "usdt")
    assert known is not None
    assert known.body == Other(7)


@scenario
async def test_a_version_that_can_not_be_read_is_like_no_other(store: Store) -> None:
    class Weekly(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
        weekly: int

    def refuse(new: Weekly, others: Iterable[Other[Weekly]]) -> None:
        if names := [one.name for one in others]:
            raise ValueError(f"like {names}")

    await put(documents(store), 5)
    kind = DocumentKind(
        name="notes", body=Weekly, two_people=False, likeness=lambda body: body.weekly, check_alike=refuse
    )
    docs = Documents(store, [kind])
    await docs.put(kind, "btc", Weekly(7), base=0, **ANN)
    with pytest.raises(InvalidDocument, match=r"like \['btc'\]"):
        await docs.put(kind, "eth", Weekly(7), base=0, **ANN)


@scenario
async def test_a_citation_is_verified_against_the_database(store: Store) -> None:
    docs = documents(store)
    first = await put(docs, 5)
    assert await docs.verify(first.citation) is Standing.CURRENT
    second = await put(docs, 6, 1)
    assert await docs.verify(first.citation) is Standing.SUPERSEDED
    assert await docs.verify(second.citation) is Standing.CURRENT
    for version, hash_ in ((1, second.hash), (2, first.hash)):
        cited = Citation(kind="notes", name="usdt", version=version, hash=hash_)
        assert await docs.verify(cited) is Standing.ALTERED
    for name, version in (("usdt", 3), ("usdt", 0), ("usdt", 2**40), ("usdt", -(2**40)), ("btc", 1)):
        cited = Citation(kind="notes", name=name, version=version, hash=first.hash)
        assert await docs.verify(cited) is Standing.UNKNOWN


def test_two_kinds_of_one_name_are_refused(store: StoreAt) -> None:
    with pytest.raises(ValueError, match="declared twice"):
        Documents(store.place.store(), [NOTES, NOTES])
