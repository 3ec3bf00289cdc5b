"""The store's envelopes, sagas, events and books."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.builders import FaultyPorts, Place, scenario, seed
from tests.rows import Rows

from bursar.ledger import Ledger
from bursar.model.accounts import Book
from bursar.model.entries import EntryKind
from bursar.model.envelope import Envelope
from bursar.model.errors import BursarError
from bursar.model.money import Asset
from bursar.model.records import Event, EventKind, StoredEnvelope
from bursar.sim.split.tables import Saga
from bursar.store import Store
from bursar.store.envelopes import FIRST_PLACE
from bursar.store.rows import envelope_of, envelope_row

ALICE, BOB = 11, 12


def envelope(seq: int, *, key: str | None = None, book: int = 1, metadata: str = "{}") -> Envelope:
    return Envelope(
        seq=seq,
        scope="user",
        key=f"key-{seq}" if key is None else key,
        book=Book(id=book, name="main"),
        kind=EntryKind.ENTRY,
        reverses=0,
        legs=(),
        accounts=(),
        assets=(),
        consumes=(),
        creates=(),
        metadata=metadata,
    )


async def put(store: Store, *envelopes: Envelope, accounts: tuple[int, ...] = (ALICE,)) -> None:
    async with store.transaction() as unit:
        for row in envelopes:
            assert await Rows(unit).store(row, row.id()) == 1
            await Rows(unit).involve(accounts, row.seq)
            await unit.events.append(EventKind.COMMITTED, row.seq)


def seqs(envelopes: list[StoredEnvelope]) -> list[int]:
    return [found.seq for found in envelopes]


# --- envelopes -------------------------------------------------------------------------------------------------------


@scenario
async def test_envelopes_store_and_replay(store: Store) -> None:
    row = envelope(1, metadata='{"b":1, "a":  "ü"}')
    await put(store, row)

    assert await Rows(store.single()).store(row, row.id()) == 0
    (found,) = await store.read.envelopes.get([1])
    assert (found.id, found.key, found.metadata) == (row.id(), row.key, row.metadata)
    assert found.at_us > 0


@scenario
async def test_a_key_that_is_taken_is_not_written_again(store: Store) -> None:
    await put(store, envelope(1, key="k"))

    assert await Rows(store.single()).store(envelope(2, key="k"), bytes(32)) == 0
    assert (await store.read.envelopes.existing([("user", "k"), ("user", "free")])).keys() == {("user", "k")}


@scenario
async def test_the_same_key_in_another_scope_is_another_key(store: Store) -> None:
    await put(store, envelope(1, key="k"))

    assert await store.read.envelopes.existing([("reverse", "k")]) == {}


@scenario
async def test_envelopes_by_account_newest_first(store: Store) -> None:
    await put(store, envelope(1), envelope(2), accounts=(ALICE, BOB))
    await put(store, envelope(3), accounts=(BOB,))

    assert seqs(await store.read.envelopes.of_account(ALICE)) == [2, 1]
    assert seqs(await store.read.envelopes.of_account(BOB)) == [3, 2, 1]


@scenario
async def test_envelopes_by_account_in_pages(store: Store) -> None:
    await put(store, *[envelope(seq) for seq in range(1, 6)])

    first = seqs(await store.read.envelopes.of_account(ALICE, limit=2))
    place = await store.read.envelopes.place(first[-1])
    assert place is not None
    second = seqs(await store.read.envelopes.of_account(ALICE, before=first[-1], place=place, limit=2))

    assert (first, second) == ([5, 4], [3, 2])


@scenario
async def test_envelopes_in_the_order_of_their_events(store: Store) -> None:
    """Not by number: a lower one may have been committed later."""
    for seq in (4, 2, 5, 1, 3):
        await put(store, envelope(seq, book=1 + seq % 2))

    assert seqs(await store.read.envelopes.after_place(FIRST_PLACE)) == [4, 2, 5, 1, 3]
    place = await store.read.envelopes.place(2)
    assert place is not None
    assert seqs(await store.read.envelopes.after_place(place, limit=2)) == [5, 1]
    assert seqs(await store.read.envelopes.after_place(place, book=2)) == [5, 1, 3]
    assert seqs(await store.read.envelopes.of_account(ALICE)) == [3, 1, 5, 2, 4]
    assert seqs(await store.read.envelopes.of_account(ALICE, before=2, place=place)) == [4]
    assert await store.read.envelopes.place(6) is None


@scenario
async def test_envelopes_by_account_within_a_span_of_time(store: Store) -> None:
    """From a moment on, and before a moment."""
    for seq in (1, 2, 3):
        await put(store, envelope(seq))
    times = [found.at_us for found in await store.read.envelopes.get([1, 2, 3])]
    assert times[0] < times[1] < times[2]

    found = await store.read.envelopes.of_account(ALICE, since_us=times[1], until_us=times[2])

    assert seqs(found) == [2]


@scenario
async def test_envelopes_by_book(store: Store) -> None:
    await put(store, envelope(1), envelope(2, book=2), envelope(3))

    assert seqs(await store.read.envelopes.after(0, book=2)) == [2]
    assert seqs(await store.read.envelopes.after(0)) == [1, 2, 3]


@scenario
async def test_envelopes_by_range_in_pages_and_in_creation_order(store: Store) -> None:
    await put(store, *[envelope(seq) for seq in (4, 2, 5, 1, 3)])

    first = seqs(await store.read.envelopes.after(1, limit=3))
    second = seqs(await store.read.envelopes.after(first[-1], limit=3))

    assert (first, second) == ([2, 3, 4], [5])


@scenario
async def test_envelopes_by_number_and_by_hash(store: Store) -> None:
    await put(store, envelope(1), envelope(2))

    assert seqs(await store.read.envelopes.get([2, 9, 1])) == [1, 2]
    assert await store.read.envelopes.by_hash(envelope(2).id()) == 2
    assert await store.read.envelopes.by_hash(b"\x09" * 32) is None


@scenario
async def test_numbers_are_never_given_twice(store: Store) -> None:
    first = await Rows(store.single()).take_numbers(3)
    second = await Rows(store.single()).take_numbers(1)

    assert second > first >= 3


# --- sagas -----------------------------------------------------------------------------------------------------------


def saga(name: str, *, key: str = "k", kind: str = "commit", phase: str = "reserving", lease_us: int = 0) -> Saga:
    return Saga(id=name, kind=kind, scope="user", key=key, phase=phase, fence=1, lease_us=lease_us, data=b"\x00\xff")


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_sagas_save_list_delete(store: Store) -> None:
    sagas = Rows(store.single())
    assert await sagas.save(saga("b", key="1")) == 1
    assert await sagas.save(saga("a", key="2")) == 1

    assert await sagas.list() == [saga("a", key="2"), saga("b", key="1")]
    assert await sagas.delete("a", 1) == 1
    assert await sagas.list() == [saga("b", key="1")]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_saga_kinds_come_back_as_they_were(store: Store) -> None:
    await Rows(store.single()).save(saga("a", key="1", kind="commit"))
    await Rows(store.single()).save(saga("b", key="2", kind="something-else"))

    assert [s.kind for s in await Rows(store.read).list()] == ["commit", "something-else"]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_two_sagas_can_not_have_one_key(store: Store) -> None:
    await Rows(store.single()).save(saga("a"))

    assert await Rows(store.single()).save(saga("b")) == 0


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_a_saga_is_taken_over_when_its_lease_has_run_out(store: Store) -> None:
    await Rows(store.single()).save(saga("a", lease_us=100))

    assert await Rows(store.single()).take(saga("a"), 300, 99) == 0
    assert await Rows(store.single()).take(saga("a"), 300, 100) == 1
    (found,) = await Rows(store.read).list()
    assert (found.fence, found.lease_us) == (2, 300)


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_an_old_fence_changes_nothing(store: Store) -> None:
    await Rows(store.single()).save(saga("a"))
    await Rows(store.single()).take(saga("a"), 0, 0)
    generation = await store.read.rules.generation()

    assert await Rows(store.single()).take(saga("a"), 0, 0) == 0
    assert await Rows(store.single()).finalize("a", 1, b"", generation) == 0
    assert await Rows(store.single()).delete("a", 1) == 0


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_a_saga_that_passes_the_point_of_no_return_is_not_taken_as_it_was_before(store: Store) -> None:
    await Rows(store.single()).save(saga("a"))
    await Rows(store.single()).finalize("a", 1, b"", await store.read.rules.generation())

    assert await Rows(store.single()).take(saga("a"), 0, 0) == 0
    assert await Rows(store.single()).take(saga("a", phase="finalizing"), 0, 0) == 1


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_an_envelope_is_published_only_with_the_sagas_fence(store: Store) -> None:
    await Rows(store.single()).save(saga("a"))
    row = envelope_of((*envelope_row(envelope(1), bytes(32)), 0))

    assert await Rows(store.single()).publish(row, [ALICE], [(ALICE, 1, 5)], None, "a", 2) == 0
    assert await store.read.envelopes.get([1]) == []
    assert await Rows(store.single()).publish(row, [ALICE], [(ALICE, 1, 5)], None, "a", 1) == 1
    assert seqs(await store.read.envelopes.of_account(ALICE)) == [1]
    assert await store.read.balances.cached(ALICE) == {1: 5}
    assert [e.subject for e in await read_all(store)] == [1]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_a_saga_is_not_finalized_under_changed_rules(store: Store) -> None:
    await Rows(store.single()).save(saga("a"))
    generation = await store.single().rules.generation()
    await store.single().rules.bump()

    assert await Rows(store.single()).finalize("a", 1, b"", generation) == 0
    assert await Rows(store.single()).finalize("a", 1, b"new", generation + 1) == 1
    assert [(s.phase, s.data) for s in await Rows(store.read).list()] == [("finalizing", b"new")]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_a_corrupt_row_is_set_aside_and_the_others_stay(store: Store) -> None:
    await Rows(store.single()).save(saga("corrupt", key="1"))
    await Rows(store.single()).save(saga("fine", key="2"))

    await Rows(store.single()).set_aside("corrupt")

    assert [(s.id, s.phase) for s in await Rows(store.read).list()] == [("corrupt", "broken"), ("fine", "reserving")]
    assert await Rows(store.single()).take(saga("corrupt"), 0, 0) == 0
    assert await Rows(store.read).count() == 1


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_what_a_commit_that_was_set_aside_has_claimed_is_seen_and_released(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    tables = Rows(ledger.store.single())
    [posting] = await ledger.postings("alice", "USDT")
    await tables.save(saga("a"))
    assert await tables.reserve([posting.id], "a", 1) == 1
    assert (await tables.claims(10), await tables.release_claims("a")) == ([], 0)  # it is under way
    await tables.set_aside("a")
    assert list(await tables.claims(10)) == [(posting.id, "a")]
    assert await tables.release_claims("a") == 1
    assert list(await tables.claims(10)) == []
    assert await tables.delete("a", 1) == 1


# --- events ----------------------------------------------------------------------------------------------------------


async def read_all(store: Store, after: str = "", page: int = 100) -> list[Event]:
    found: list[Event] = []
    while events := await store.read.events.since(after, page):
        found += events
        after = events[-1].cursor
    return found


@scenario
async def test_events_in_the_order_of_writing(store: Store) -> None:
    for subject in (5, 3, 4):
        await store.single().events.append(EventKind.COMMITTED, subject)

    assert [e.subject for e in await read_all(store)] == [5, 3, 4]


@scenario
async def test_an_events_cursor_goes_on_after_it(store: Store) -> None:
    for subject in range(1, 8):
        await store.single().events.append(EventKind.COMMITTED, subject)
    third = (await store.read.events.since("", 3))[-1]

    assert [e.subject for e in await read_all(store, third.cursor, page=2)] == [4, 5, 6, 7]


@scenario
async def test_events_of_one_unit_can_be_read_in_parts(store: Store) -> None:
    async with store.transaction() as unit:
        for subject in range(1, 6):
            await unit.events.append(EventKind.COMMITTED, subject)

    assert [e.subject for e in await read_all(store, page=2)] == [1, 2, 3, 4, 5]


@scenario
async def test_events_are_written_once(store: Store) -> None:
    """Dedup: a commit that is retried tells of itself once."""
    assert await store.single().events.append(EventKind.ACCOUNT_CHANGED, 7, 2) == 1
    assert await store.single().events.append(EventKind.ACCOUNT_CHANGED, 7, 2) == 0
    assert await store.single().events.append(EventKind.ACCOUNT_CHANGED, 7, 3) == 1
    assert [(e.subject, e.version) for e in await read_all(store)] == [(7, 2), (7, 3)]


@scenario
async def test_events_leave_no_gap_under_concurrency(store: Store) -> None:
    """A reader that goes on from each cursor while others write misses none and sees none twice."""
    seen: list[int] = []
    done = asyncio.Event()

    async def write(first: int) -> None:
        for subject in range(first, first + 20):
            async with store.transaction() as unit:
                await unit.events.append(EventKind.COMMITTED, subject)

    async def read() -> None:
        after = ""
        while True:
            last_look = done.is_set()
            while events := await store.read.events.since(after, 7):
                seen.extend(e.subject for e in events)
                after = events[-1].cursor
            if last_look:
                return

    reader = asyncio.create_task(read())
    await asyncio.gather(*[write(first) for first in (100, 200, 300)])
    done.set()
    await reader

    assert sorted(seen) == [first + i for first in (100, 200, 300) for i in range(20)]


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_a_cursor_waits_for_a_transaction_that_is_still_open(store: Store) -> None:
    """Only PostgreSQL has several writers: event 2 commits while event 1 is still on its way."""
    async with store.transaction() as slow:
        await slow.events.append(EventKind.COMMITTED, 1)
        async with store.transaction() as fast:
            await fast.events.append(EventKind.COMMITTED, 2)
        assert await store.read.events.since("", 9) == []

    assert [e.subject for e in await read_all(store)] == [1, 2]


# --- books and assets ------------------------------------------------------------------------------------------------


@scenario
async def test_books_are_created_once_and_come_back_whole(store: Store) -> None:
    book = Book(name="retail", assets=("USDT", "BTC"), accounts=("user", "fees"))

    assert await store.single().rules.create_book(book) == 1
    assert await store.single().rules.create_book(Book(name="retail")) == 0
    found = (await store.read.rules.books())["retail"]
    assert (found.assets, found.accounts) == (book.assets, book.accounts)


@scenario
async def test_the_main_book_is_there_from_the_start_and_admits_all(store: Store) -> None:
    books = await store.read.rules.books()

    assert list(books) == ["main"]
    assert books["main"].assets == books["main"].accounts == ()


@scenario
async def test_assets_keep_code_and_precision(store: Store) -> None:
    asset = Asset(code="ETH", precision=18, min_transfer=10**15, max_transfer=2**127 - 1)
    assert await store.single().rules.create_asset(asset) == 1
    assert await store.single().rules.create_asset(Asset(code="ETH", precision=6)) == 0

    await store.single().rules.update_asset(Asset(code="ETH", precision=6, min_transfer=7))

    found = (await store.read.rules.assets())["ETH"]
    assert (found.precision, found.min_transfer, found.max_transfer) == (18, 7, 2**127 - 1)


@scenario
async def test_every_bump_is_a_new_generation(store: Store) -> None:
    before = await store.read.rules.generation()

    assert await store.single().rules.bump() == before + 1
    assert await store.read.rules.generation() == before + 1


# --- units -----------------------------------------------------------------------------------------------------------


class Mishap(Exception):
    pass


@scenario
async def test_a_unit_that_fails_leaves_nothing(store: Store) -> None:
    with pytest.raises(Mishap):
        async with store.transaction() as unit:
            await unit.rules.create_book(Book(name="retail"))
            raise Mishap

    assert "retail" not in await store.read.rules.books()


@scenario
async def test_a_unit_is_not_seen_before_it_is_over(store: Store) -> None:
    async with store.transaction() as unit:
        await unit.rules.create_book(Book(name="retail"))
        assert "retail" not in await store.read.rules.books()

    assert "retail" in await store.read.rules.books()


@scenario
async def test_a_snapshot_sees_one_moment(store: Store) -> None:
    async with store.snapshot() as moment:
        before = await moment.rules.generation()
        await store.single().rules.bump()
        assert await moment.rules.generation() == before

    assert await store.read.rules.generation() == before + 1


@scenario
async def test_a_primitive_of_its_own_survives_anothers_failed_unit(store: Store) -> None:
    """A step of a saga that reports success must not be undone by a unit that happens to be open beside it."""
    steps: list[asyncio.Task[int]] = []
    with pytest.raises(Mishap):
        async with store.transaction() as unit:
            steps.append(asyncio.create_task(store.single().events.append(EventKind.COMMITTED, 7)))
            for _ in range(3):
                await unit.envelopes.after(0)  # the step has every chance to slip in
            raise Mishap

    assert await steps[0] == 1
    assert [e.subject for e in await read_all(store)] == [7]


async def cancelled(store: Store, ports: FaultyPorts, call: int, work: Coroutine[Any, Any, None]) -> None:
    """Run something, and cancel it while it waits for its n-th call to the database."""
    ports.arm("cancel", call)
    task = asyncio.create_task(work)
    await asyncio.wait([task])
    assert task.cancelled()
    assert ports.reached


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize("call", [1, 2, 3], ids=["begin", "write", "commit"])
@scenario
async def test_a_unit_cancelled_at_any_moment_leaves_the_store_usable(bare_place: Place, call: int) -> None:
    ports = FaultyPorts()
    async with bare_place.bursar(ports) as bursar:
        store = bursar.store

        async def change() -> None:
            async with store.transaction() as unit:
                await unit.rules.create_book(Book(name="retail"))

        await cancelled(store, ports, call, change())

        async with store.transaction() as unit:
            await unit.rules.create_book(Book(name="next"))
        assert "next" in await store.read.rules.books()


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize("call", [1, 2, 3, 4, 5], ids=["open", "begin", "read", "end", "close"])
@scenario
async def test_a_snapshot_cancelled_at_any_moment_leaves_the_store_readable(bare_place: Place, call: int) -> None:
    """Above all, reads must not go on seeing the moment of the snapshot for ever."""
    ports = FaultyPorts()
    async with bare_place.bursar(ports) as bursar:
        store = bursar.store

        async def look() -> None:
            async with store.snapshot() as moment:
                await moment.rules.books()

        await cancelled(store, ports, call, look())
        await store.read.rules.books()
        await store.single().rules.create_book(Book(name="next"))

        assert "next" in await store.read.rules.books()
        async with store.snapshot() as moment:
            assert "next" in await moment.rules.books()


@scenario
async def test_a_store_that_is_not_open_says_so(bare_place: Place) -> None:
    store = bare_place.store()

    with pytest.raises(BursarError, match="not open"):
        await store.read.rules.books()
    await store.close()
