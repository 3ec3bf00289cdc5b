"""The store's postings: immutable, with a life from live over reserved to spent."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from tests.builders import Place, StoreAt, scenario
from tests.rows import Rows

from bursar.model.errors import BursarError
from bursar.model.money import MINOR_MAX, MINOR_MIN
from bursar.model.postings import Posting, PostingState, posting_id
from bursar.sim.split.tables import Saga
from bursar.store import Store
from bursar.store.sqlite import batches

ALICE, BOB, ALICE_SPOT = 11, 12, 13
USDT, BTC = 1, 2


def posting(seq: int, index: int = 0, amount: int = 100, account: int = ALICE, asset: int = USDT) -> Posting:
    return Posting(posting_id(seq, index), account, asset, amount)


async def live(store: Store, *postings: Posting) -> list[int]:
    """Write postings and make them live; returns their numbers."""
    async with store.transaction() as unit:
        await Rows(unit).insert(postings)
        await Rows(unit).enliven(postings)
        for p in postings:
            await Rows(unit).involve([p.account], p.envelope)
    return [p.id for p in postings]


async def saga(store: Store, name: str, fence: int = 1) -> str:
    """A commit under way, in whose name postings are claimed."""
    row = Saga(id=name, kind="commit", scope="user", key=name, phase="reserving", fence=fence, lease_us=0, data=b"")
    assert await Rows(store.single()).save(row) == 1
    return name


async def states(store: Store, ids: list[int]) -> list[PostingState]:
    return [found.state for found in await store.read.postings.get(ids)]


@scenario
async def test_insert_and_replay(store: Store) -> None:
    rows = [posting(1), posting(1, 1, -100, BOB)]

    assert await Rows(store.single()).insert(rows) == 2
    assert await Rows(store.single()).insert(rows) == 0
    assert [found.posting for found in await store.read.postings.get([p.id for p in rows])] == rows


@scenario
async def test_a_replay_makes_nothing_live_twice(store: Store) -> None:
    ids = await live(store, posting(1))

    assert await Rows(store.single()).enliven([posting(1)]) == 0
    assert await store.read.balances.of(ALICE) == {USDT: (100, 1)}
    assert await states(store, ids) == [PostingState.LIVE]


@scenario
async def test_a_missing_posting_is_missing(store: Store) -> None:
    assert await store.read.postings.get([posting_id(99, 0)]) == []
    assert await Rows(store.read).live([posting_id(99, 0)]) == []


@pytest.mark.parametrize("amount", [1, -1, 2**63, -(2**64), MINOR_MAX, MINOR_MIN])
@scenario
async def test_amounts_up_to_128_bits_come_back_exactly(store: Store, amount: int) -> None:
    await live(store, posting(1, amount=amount))

    assert await Rows(store.read).live([posting(1).id]) == [posting(1, amount=amount)]


@scenario
async def test_filter_by_asset(store: Store) -> None:
    await live(store, posting(1), posting(2, asset=BTC))

    found = await store.read.postings.of_account(ALICE, asset=BTC)

    assert [s.posting for s in found] == [posting(2, asset=BTC)]


@scenario
async def test_filter_by_state(store: Store) -> None:
    ids = await live(store, posting(1), posting(2))
    await Rows(store.single()).spend_directly(ids[:1], 7)

    assert [s.posting.id for s in await store.read.postings.of_account(ALICE, live_only=True)] == ids[1:]
    assert [s.posting.id for s in await store.read.postings.of_account(ALICE)] == ids


@scenario
async def test_children_are_kept_apart(store: Store) -> None:
    await live(store, posting(1), posting(1, 1, 50, ALICE_SPOT))

    assert [s.posting.amount for s in await store.read.postings.of_account(ALICE)] == [100]
    assert await store.read.balances.of(ALICE_SPOT) == {USDT: (50, 1)}


@scenario
async def test_pages_go_on_where_the_last_one_ended(store: Store) -> None:
    ids = await live(store, *[posting(seq) for seq in range(1, 6)])
    pages, after = [], 0
    while page := [s.posting.id for s in await store.read.postings.of_account(ALICE, after=after, limit=2)]:
        pages.append(page)
        after = page[-1]

    assert pages == [ids[:2], ids[2:4], ids[4:]]


@scenario
async def test_pages_split_an_envelope_with_several_postings(store: Store) -> None:
    ids = await live(store, posting(1, 0), posting(1, 1, asset=BTC), posting(2))

    page = await store.read.postings.of_account(ALICE, after=ids[0], limit=5)

    assert [s.posting.id for s in page] == ids[1:]


@pytest.mark.parametrize(
    ("order", "expected"),
    [("largest", [2**100, 9, 2]), ("most_negative", [-(2**100), -9, -2]), ("smallest", [-(2**100), -9, -2])],
)
@scenario
async def test_candidates_come_in_numerical_order(store: Store, order: str, expected: list[int]) -> None:
    amounts = [9, -9, 2**100, -(2**100), 2, -2]
    await live(store, *[posting(seq, amount=amount) for seq, amount in enumerate(amounts, 1)])

    assert [p.amount for p in await store.read.postings.candidates(order, ALICE, USDT, 3)] == expected


@scenario
async def test_what_an_envelope_created_is_found_by_its_number(store: Store) -> None:
    await live(store, posting(1), posting(2, 0), posting(2, 65_534), posting(3))

    found = await store.read.postings.of_envelopes(2, 2)

    assert [s.posting.id for s in found] == [posting_id(2, 0), posting_id(2, 65_534)]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_reserve(store: Store) -> None:
    ids = await live(store, posting(1), posting(2))
    owner = await saga(store, "s")

    assert await Rows(store.single()).reserve(ids, owner, 1) == 2
    assert await states(store, ids) == [PostingState.RESERVED] * 2
    assert await Rows(store.read).live(ids) == []
    assert await store.read.postings.candidates("largest", ALICE, USDT, 9) == []


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_to_reserve_what_is_ours_counts_again(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s")
    await Rows(store.single()).reserve(ids, owner, 1)

    assert await Rows(store.single()).reserve(ids, owner, 1) == 1


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_reserve_skips_what_is_taken(store: Store) -> None:
    ids = await live(store, posting(1), posting(2))
    first, second = await saga(store, "first"), await saga(store, "second")
    await Rows(store.single()).reserve(ids[:1], first, 1)

    assert await Rows(store.single()).reserve(ids, second, 1) == 1
    assert [s.reservation for s in await store.read.postings.get(ids)] == ["first", "second"]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_reserve_needs_a_saga_with_its_fence(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s", fence=2)

    assert await Rows(store.single()).reserve(ids, owner, 1) == 0
    assert await Rows(store.single()).reserve(ids, "nobody", 1) == 0
    assert await states(store, ids) == [PostingState.LIVE]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_release_only_ours(store: Store) -> None:
    ids = await live(store, posting(1), posting(2))
    first, second = await saga(store, "first"), await saga(store, "second")
    await Rows(store.single()).reserve(ids[:1], first, 1)
    await Rows(store.single()).reserve(ids[1:], second, 1)

    assert await Rows(store.single()).release(ids, second, 1) == 1
    assert await states(store, ids) == [PostingState.RESERVED, PostingState.LIVE]


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_spend_only_what_we_reserved(store: Store) -> None:
    ids = await live(store, posting(1), posting(2), posting(3))
    first, second = await saga(store, "first"), await saga(store, "second")
    await Rows(store.single()).reserve(ids[:1], first, 1)
    await Rows(store.single()).reserve(ids[1:2], second, 1)

    assert await Rows(store.single()).spend(ids, first, 1, 7) == 1
    assert await store.read.postings.spenders(ids) == {ids[0]: 7}


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_spend_needs_the_fence(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s")
    await Rows(store.single()).reserve(ids, owner, 1)
    (row,) = await Rows(store.read).list()
    await Rows(store.single()).take(row, 0, 0)  # recovery takes over: the fence is 2 now

    assert await Rows(store.single()).spend(ids, owner, 1, 7) == 0
    assert await Rows(store.single()).spend(ids, owner, 2, 7) == 1


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_spend_twice_is_once_and_names_the_first(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s")
    await Rows(store.single()).reserve(ids, owner, 1)

    assert await Rows(store.single()).spend(ids, owner, 1, 7) == 1
    assert await Rows(store.single()).spend(ids, owner, 1, 8) == 0
    assert await store.read.postings.spenders(ids) == {ids[0]: 7}


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_what_is_spent_can_not_live_again(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s")
    await Rows(store.single()).reserve(ids, owner, 1)
    await Rows(store.single()).spend(ids, owner, 1, 7)
    await Rows(store.single()).bury(ids, owner)

    assert await Rows(store.single()).enliven([posting(1)]) == 0
    assert await store.read.balances.of(ALICE) == {}


@pytest.mark.parametrize("mode", ["split"], indirect=True)
@scenario
async def test_what_is_not_spent_is_not_buried(store: Store) -> None:
    ids = await live(store, posting(1))
    owner = await saga(store, "s")
    await Rows(store.single()).reserve(ids, owner, 1)

    assert await Rows(store.single()).bury(ids, owner) == 0
    assert await states(store, ids) == [PostingState.RESERVED]


@scenario
async def test_states_of_many_in_the_order_asked_for(store: Store) -> None:
    ids = await live(store, posting(1), posting(2), posting(3))
    await Rows(store.single()).spend_directly(ids[:1], 7)

    asked = [ids[2], ids[0], ids[1]]

    assert [found.posting.id for found in await store.read.postings.get(asked)] == asked
    assert await states(store, asked) == [PostingState.LIVE, PostingState.SPENT, PostingState.LIVE]


@scenario
async def test_spent_ones_stay_readable(store: Store) -> None:
    ids = await live(store, posting(1))
    await Rows(store.single()).spend_directly(ids, 7)

    (found,) = await store.read.postings.get(ids)

    assert (found.posting, found.state, found.spender) == (posting(1), PostingState.SPENT, 7)


@scenario
async def test_rebuild_makes_the_live_table_from_postings_and_spends(store: Store) -> None:
    ids = await live(store, posting(1), posting(2), posting(3))
    await Rows(store.single()).spend_directly(ids[:1], 7, bury=False)

    async with store.transaction() as unit:
        assert await unit.postings.rebuild() == 2

    assert await states(store, ids) == [PostingState.SPENT, PostingState.LIVE, PostingState.LIVE]


@scenario
async def test_a_primitive_is_all_or_nothing(store: Store) -> None:
    """The last row can't be written: then the first must not be either, in split mode above all."""
    with pytest.raises((OverflowError, BursarError)):
        await Rows(store.single()).insert([posting(1), Posting(2**70, ALICE, USDT, 1)])

    assert await store.read.postings.get([posting(1).id]) == []


@scenario
async def test_a_batch_larger_than_any_parameter_limit(own_place: Place) -> None:
    """70,000 rows: above SQLite's 32,766 parameters and PostgreSQL's 65,535.

    In a database of its own: where a table was emptied for the next test, and analysed just then, PostgreSQL expects
    one row, and compares every posting with every number.
    """
    rows = [posting(1_000 + i // 60_000, i % 60_000) for i in range(70_000)]
    ids = [p.id for p in rows]
    async with StoreAt(own_place).open() as store:
        async with store.transaction() as unit:
            assert await Rows(unit).insert(rows) == len(rows)
            assert await Rows(unit).enliven(rows) == len(rows)

        assert [found.posting.id for found in await store.read.postings.get(ids)] == ids


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_many_pools_are_read_as_each_would_be_alone(store: Store, bare_place: Place) -> None:
    """A large group reads the pools of all its payers in one statement: the largest of each, none that is reserved."""
    amounts = [5, -7, 300, 2, -1, 300, MINOR_MAX, MINOR_MIN, 40, -40]
    ids = await live(
        store, *(posting(100 * a + i, 0, n, account=a) for a in range(1, 9) for i, n in enumerate(amounts))
    )
    await Rows(store.single()).reserve(ids[6:8], await saga(store, "s"), 1)
    asked = {(account, USDT, sign): 1 + account % 3 for account in range(1, 10) for sign in (1, -1)}

    with contextlib.closing(sqlite3.connect(bare_place.path)) as database:
        together = batches._pools(database, asked)
        alone = {pool: batches._pools(database, {pool: most})[pool] for pool, most in asked.items()}

    assert {pool: {p.id: p for p in found} for pool, found in together.items()} == {
        pool: {p.id: p for p in found} for pool, found in alone.items()
    }
    assert [len(together[1, USDT, sign]) for sign in (1, -1)] == [2, 2]
    assert MINOR_MAX not in [p.amount for p in together[1, USDT, 1]]
    assert [len(together[9, USDT, sign]) for sign in (1, -1)] == [0, 0]
