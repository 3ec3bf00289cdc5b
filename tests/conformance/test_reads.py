"""Reads: balances now, then and below a path; history, postings, events; and tables that can be thrown away."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta

import pytest
from tests.builders import BANK, Place, balance, dust, outcome, scenario, seed

from bursar import CappedOverdraft, Entry, Event, EventKind, Money, Movement, UncappedOverdraft, deposit, pay
from bursar.audit import audit
from bursar.ledger import Ledger
from bursar.ledger.reads import WIDE
from bursar.model.errors import (
    BursarError,
    InvalidName,
    Refusal,
    UnknownAccount,
    UnknownAsset,
    UnknownBook,
    UnknownEnvelope,
)
from bursar.model.postings import PostingState

# --- balances --------------------------------------------------------------------------------------------------------


@scenario
async def test_balance_now(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1", "2.5")
    await seed(ledger, "alice", "0.1", asset="BTC")

    assert {c: str(m) for c, m in (await ledger.balances("alice")).items()} == {"USDT": "3.500000", "BTC": "0.10000000"}
    assert await balance(ledger, "alice", "ETH") == "0.000000000000000000"


@scenario
async def test_balance_of_what_does_not_exist(ledger: Ledger) -> None:
    with pytest.raises(UnknownAccount):
        await ledger.balance("nobody", "USDT")
    with pytest.raises(UnknownAsset):
        await ledger.balance("alice", "DOGE")


@scenario
async def test_balance_at_a_moment(ledger: Ledger) -> None:
    """At the very moment of an envelope it counts; a microsecond before, it does not."""
    receipts = await seed(ledger, "alice", "1", "2")
    receipts.append(await ledger.commit(pay("alice", "bob", "USDT", "2.5")))
    moments = [(await ledger.envelope(receipt.envelope)).at for receipt in receipts]
    assert moments == sorted(set(moments))

    async def then(at: datetime, who: str = "alice") -> str:
        return str(await ledger.balance(who, "USDT", at=at))

    assert await then(moments[0] - timedelta(microseconds=1)) == "0.000000"
    assert [await then(at) for at in moments] == ["1.000000", "3.000000", "0.500000"]
    assert await then(moments[2] - timedelta(microseconds=1)) == "3.000000"
    assert await then(moments[1], BANK) == "-3.000000"
    assert await then(moments[2], "bob") == "2.500000"


@scenario
async def test_balance_at_a_moment_without_a_zone_is_refused(ledger: Ledger) -> None:
    with pytest.raises(InvalidName, match="time zone"):
        await ledger.balance("alice", "USDT", at=datetime(2026, 1, 1))  # noqa: DTZ001 (that is the point)


@scenario
async def test_balance_by_prefix_is_the_account_and_all_below_it(ledger: Ledger) -> None:
    for path in ("user:1", "user:1:spot", "user:1:spot:cold", "user:10", "user"):
        await ledger.create_account(path)
        await seed(ledger, path, "1")

    assert str(await ledger.balance(prefix="user:1", asset="USDT")) == "3.000000"
    assert str(await ledger.balance(prefix="user", asset="USDT")) == "5.000000"
    assert await balance(ledger, "user:1") == "1.000000"
    assert str(await ledger.balance(prefix="nobody", asset="USDT")) == "0.000000"


@scenario
async def test_balance_by_prefix_at_a_moment(ledger: Ledger) -> None:
    for path in ("user:1", "user:1:spot", "user:10"):
        await ledger.create_account(path)
    first = (await seed(ledger, "user:1", "1"))[0]
    await seed(ledger, "user:1:spot", "1")
    await seed(ledger, "user:10", "1")
    at = (await ledger.envelope(first.envelope)).at

    assert str(await ledger.balance(prefix="user:1", asset="USDT", at=at)) == "1.000000"
    assert str(await ledger.balance(prefix="user:1", asset="USDT", at=datetime(2200, 1, 1, tzinfo=UTC))) == "2.000000"


@scenario
async def test_balance_needs_an_account_or_a_prefix(ledger: Ledger) -> None:
    with pytest.raises(InvalidName, match="either"):
        await ledger.balance(asset="USDT")
    with pytest.raises(InvalidName, match="either"):
        await ledger.balance("alice", "USDT", prefix="alice")


# --- what is disposable ----------------------------------------------------------------------------------------------


async def random_operations(ledger: Ledger, number: int, chance: random.Random) -> None:
    """Deposits, payments, withdrawals, holds, reversals, compactions and refusals, in a mix that repeats by seed."""
    accounts = ["alice", "bob", "carol", "fees", "credit", "loose"]
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-50", asset="USDT"))
    await ledger.create_account("loose", policy=UncappedOverdraft())
    holds: list[int] = []
    envelopes: list[int] = []
    for _ in range(number):
        asset = chance.choice(["USDT", "USDT", "BTC"])
        source, target = chance.sample(accounts, 2)
        amount = str(chance.randint(1, 30))
        match chance.randrange(10):
            case 0 | 1 | 2:
                envelopes += [r.envelope for r in await seed(ledger, target, amount, asset=asset)]
            case 3 | 4 | 5:
                done = await outcome(ledger.commit(pay(source, target, asset, amount)))
                envelopes += [] if isinstance(done, BursarError) else [done.envelope]
            case 6:
                done = await outcome(ledger.authorize(source, asset, amount))
                holds += [] if isinstance(done, BursarError) else [done.id]
            case 7 if holds:
                await outcome(ledger.confirm(chance.choice(holds), target, str(chance.randint(1, 5))))
            case 8 if holds:
                await outcome(ledger.void(chance.choice(holds)))
            case 9 if envelopes:
                await outcome(ledger.reverse(chance.choice(envelopes)))
            case _:
                await ledger.compact(chance.choice(["alice", "bob", "fees"]))


@scenario
async def test_the_cache_equals_the_sum_after_300_random_operations(ledger: Ledger) -> None:
    await random_operations(ledger, 300, random.Random(2026))
    await ledger.writer.consolidate(above=3)

    head, live = await ledger.account("fees"), await ledger.store.read.balances.of((await ledger.account("fees")).id)
    assert not head.pays_from_postings
    assert await ledger.store.read.balances.cached(head.id) == {asset: total for asset, (total, _) in live.items()}
    # The books are checked when the test is over: every cached and guarded balance, and conservation.


async def disposable_rows(ledger: Ledger) -> dict[str, object]:
    """All that a rebuild must bring back."""
    read = ledger.store.read
    accounts = await read.accounts.list(limit=1000)
    return {
        "live": [await read.postings.of_account(a.id, live_only=True, limit=10_000) for a in accounts],
        "heads": {key: total for key, total in (await read.balances.all_guarded()).items() if total},
        "wide": await read.balances.cached_accounts(),
        "cache": [
            {asset: total for asset, total in (await read.balances.cached(a.id)).items() if total} for a in accounts
        ],
    }


@scenario
async def test_rebuild_gives_the_same_rows(ledger: Ledger) -> None:
    await random_operations(ledger, 60, random.Random(7))
    before = await disposable_rows(ledger)

    live = await ledger.rebuild()

    assert await disposable_rows(ledger) == before
    assert live == (await ledger.store.read.checks.counts())["live"]
    await seed(ledger, "alice", "1")


@scenario
async def test_rebuild_mends_what_was_thrown_away(ledger: Ledger) -> None:
    await random_operations(ledger, 40, random.Random(9))
    before = await disposable_rows(ledger)
    async with ledger.store.transaction() as unit:
        await unit.balances.clear_cache()
        await unit.balances.clear_guarded()

    await ledger.rebuild()

    assert await disposable_rows(ledger) == before


@scenario
async def test_an_account_with_many_postings_gets_its_cache(ledger: Ledger) -> None:
    alice = (await ledger.account("alice")).id
    await dust(ledger, "alice", WIDE)
    assert await balance(ledger, "alice") == "0.001000"
    assert alice not in await ledger.store.read.balances.cached_accounts()

    await dust(ledger, "alice", 1)
    assert await balance(ledger, "alice") == "0.001001"
    assert alice in await ledger.store.read.balances.cached_accounts()

    await seed(ledger, "alice", "5")
    await ledger.commit(pay("alice", "bob", "USDT", "2"))
    assert await balance(ledger, "alice") == "3.001001"


@scenario
async def test_a_cache_made_by_one_program_is_kept_by_another(ledger: Ledger, place: Place) -> None:
    async with place.bursar() as other:
        await seed(other.ledger, "alice", "1")
        await dust(ledger, "alice", WIDE + 1)
        await balance(ledger, "alice")

        await seed(other.ledger, "alice", "1")

    assert await balance(ledger, "alice") == "2.001001"


@scenario
async def test_folding_changes_no_balance(ledger: Ledger) -> None:
    for _ in range(6):
        await seed(ledger, "alice", "1")

    assert await ledger.writer.consolidate(above=5) == 1
    assert await ledger.writer.consolidate(above=5) == 0
    assert await balance(ledger, BANK) == "-6.000000"


# --- compaction ------------------------------------------------------------------------------------------------------


@scenario
async def test_compact_merges_without_moving_anything(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1", "20", "3")
    await seed(ledger, "alice", "1", "2", asset="BTC")

    assert await ledger.compact("alice") == 5
    assert [str(p.amount) for p in await ledger.postings("alice")] == ["24.000000", "3.00000000"]
    assert (await ledger.history("alice"))[0].changes == ()


@scenario
async def test_compact_merges_the_smallest_first(ledger: Ledger) -> None:
    """What is merged is dust; the largest stays, so that a payment under way finds it."""
    await seed(ledger, "alice", "100", "9", "20", "1")

    await ledger.compact("alice", most=3)

    assert sorted(p.amount.minor for p in await ledger.postings("alice")) == [30_000_000, 100_000_000]


@scenario
async def test_compact_of_what_is_owed_in_parts(ledger: Ledger) -> None:
    await ledger.create_account("loose", policy=UncappedOverdraft())
    for _ in range(3):
        await ledger.commit(pay("loose", "bob", "USDT", "1"))

    assert await ledger.compact("loose") == 3
    assert [str(p.amount) for p in await ledger.postings("loose")] == ["-3.000000"]


@scenario
async def test_compact_of_a_capped_overdraft_keeps_its_guard(ledger: Ledger) -> None:
    await ledger.create_account("credit", policy=CappedOverdraft(floor="-5", asset="USDT"))
    for _ in range(3):
        await ledger.commit(pay("credit", "bob", "USDT", "1"))

    assert await ledger.compact("credit") == 3
    assert await balance(ledger, "credit") == "-3.000000"


@scenario
async def test_compact_of_nothing_merges_nothing(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1")

    assert await ledger.compact("alice") == 0


@pytest.mark.parametrize("account", ["held", "transit:transfers"])
@scenario
async def test_what_is_consumed_by_number_is_not_compacted(ledger: Ledger, account: str) -> None:
    """T36."""
    if account != "held":
        await ledger.create_account(account)

    with pytest.raises(Refusal):
        await ledger.compact(account)


# --- history, envelopes, postings ------------------------------------------------------------------------------------


@scenario
async def test_history_pages_newest_first(ledger: Ledger) -> None:
    receipts = await seed(ledger, "alice", "1", "2", "3", "4", "5")
    await seed(ledger, "bob", "1")

    first = await ledger.history("alice", limit=2)
    second = await ledger.history("alice", before=first[-1].envelope, limit=2)
    third = await ledger.history("alice", before=second[-1].envelope, limit=2)

    assert [line.envelope for line in (*first, *second, *third)] == [r.envelope for r in reversed(receipts)]


@scenario
async def test_history_within_a_span_of_time(ledger: Ledger) -> None:
    receipts = await seed(ledger, "alice", "1", "2", "3")
    at = [(await ledger.envelope(receipt.envelope)).at for receipt in receipts]

    assert [line.envelope for line in await ledger.history("alice", since=at[1], until=at[2])] == [receipts[1].envelope]


@scenario
async def test_history_says_what_the_account_gained_and_lost(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    await ledger.commit(
        Entry(movements=(Movement("alice", "bob", "USDT", "4"), Movement("alice", "fees", "USDT", "0.5")))
    )

    assert [str(m) for m in (await ledger.history("alice"))[0].changes] == ["-4.500000"]
    assert [str(m) for m in (await ledger.history("fees"))[0].changes] == ["0.500000"]


@scenario
async def test_an_envelope_by_number_hash_and_key(ledger: Ledger) -> None:
    receipt = await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))

    views = [await ledger.envelope(receipt.envelope), await ledger.envelope(receipt.id)]
    views.append(await ledger.envelope_by_key("k"))

    assert {view.envelope for view in views} == {receipt.envelope}
    assert {view.id for view in views} == {receipt.id}


@scenario
async def test_an_envelope_shows_who_spent_what_it_created(ledger: Ledger) -> None:
    (first,) = await seed(ledger, "alice", "10")
    second = await ledger.commit(pay("alice", "bob", "USDT", "4"))

    mine = [p for p in (await ledger.envelope(first.envelope)).creates if p.account == "alice"]
    assert [(p.state, p.spent_by) for p in mine] == [(PostingState.SPENT, second.envelope)]
    assert [p.id for p in (await ledger.envelope(second.envelope)).consumes] == [p.id for p in mine]


@pytest.mark.parametrize("envelope", [4711, "00" * 32, "zz", 2**63])
@scenario
async def test_an_unknown_envelope(ledger: Ledger, envelope: int | str) -> None:
    with pytest.raises(UnknownEnvelope):
        await ledger.envelope(envelope)


@scenario
async def test_envelopes_of_a_book_in_creation_order(ledger: Ledger) -> None:
    await ledger.create_book("retail")
    receipts = [await ledger.commit(deposit(BANK, "alice", "USDT", "1", book=b)) for b in ("retail", "main", "retail")]

    assert [view.envelope for view in await ledger.envelopes(book="retail")] == [
        receipts[0].envelope,
        receipts[2].envelope,
    ]
    assert [view.envelope for view in await ledger.envelopes(after=receipts[0].envelope, limit=1)] == [
        receipts[1].envelope
    ]


@scenario
async def test_envelopes_of_an_unknown_book(ledger: Ledger) -> None:
    with pytest.raises(UnknownBook):
        await ledger.envelopes(book="nowhere")


@scenario
async def test_pages_go_on_only_from_an_envelope_that_is_there(ledger: Ledger) -> None:
    """After a restore the follower's last envelope may be gone: to go on from nowhere would skip what is there."""
    with pytest.raises(UnknownEnvelope):
        await ledger.envelopes(after=10**9)
    with pytest.raises(UnknownEnvelope):
        await ledger.history("alice", before=10**9)


@scenario
async def test_postings_live_or_all_in_pages(ledger: Ledger) -> None:
    await seed(ledger, "alice", "1", "2", "3")
    await ledger.commit(pay("alice", "bob", "USDT", "3"))

    assert [str(p.amount) for p in await ledger.postings("alice")] == ["1.000000", "2.000000"]
    everything = await ledger.postings("alice", live_only=False)
    assert [p.state for p in everything] == [PostingState.LIVE, PostingState.LIVE, PostingState.SPENT]
    assert await ledger.postings("alice", live_only=False, after=everything[0].id, limit=1) == everything[1:2]


@scenario
async def test_every_envelope_hashes_to_its_id(ledger: Ledger) -> None:
    """I8: from nothing but rows, for every kind of envelope there is."""
    await random_operations(ledger, 40, random.Random(3))

    (finding,) = await audit(ledger.store, only=["I8"])

    assert finding.judged
    assert (finding.broken, finding.checked > 10) == ([], True)


# --- events ----------------------------------------------------------------------------------------------------------


@scenario
async def test_events_by_cursor(ledger: Ledger) -> None:
    start = (await ledger.events(limit=1000))[-1].cursor
    receipts = await seed(ledger, "alice", "1", "2", "3")

    first = await ledger.events(start, limit=2)
    second = await ledger.events(first[-1].cursor, limit=2)

    assert [e.subject for e in (*first, *second)] == [r.envelope for r in receipts]
    assert {e.kind for e in (*first, *second)} == {EventKind.COMMITTED}


@scenario
async def test_every_change_tells_of_itself_once(ledger: Ledger) -> None:
    start = (await ledger.events(limit=1000))[-1].cursor
    await ledger.create_asset("EUR", 2)
    await ledger.change_asset("EUR", min_transfer="1")
    await ledger.create_book("retail")
    account = await ledger.create_account("dora")
    await ledger.freeze("dora")
    await ledger.create_account("dora", policy=account.policy)
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))
    await ledger.commit(deposit(BANK, "alice", "USDT", "1", key="k"))

    found = await ledger.events(start)

    assert [e.kind for e in found] == [
        EventKind.ASSET_CREATED,
        EventKind.ASSET_CHANGED,
        EventKind.BOOK_CREATED,
        EventKind.ACCOUNT_CREATED,
        EventKind.ACCOUNT_CHANGED,
        EventKind.COMMITTED,
    ]
    assert [e.version for e in found if e.subject == account.id and e.kind is EventKind.ACCOUNT_CHANGED] == [2]


@scenario
async def test_events_followed(ledger: Ledger) -> None:
    """`async for`: what was there, and then what is to come."""
    start = (await ledger.events(limit=1000))[-1].cursor
    await seed(ledger, "alice", "1")
    seen: asyncio.Queue[Event] = asyncio.Queue()

    async def follow() -> None:
        async for event in ledger.follow(start):
            seen.put_nowait(event)

    follower = asyncio.create_task(follow())
    await seen.get()
    receipts = await seed(ledger, "alice", "2", "3")
    later = [await seen.get(), await seen.get()]
    follower.cancel()

    assert [e.subject for e in later] == [r.envelope for r in receipts]


@pytest.mark.parametrize("cursor", ["x", "1.2", "1.2.-3", "1.2.٣", "0.0.9999999999999999999", "9999999999.0.0"])
@scenario
async def test_a_malformed_cursor_is_refused(ledger: Ledger, cursor: str) -> None:
    with pytest.raises(InvalidName, match="cursor"):
        await ledger.events(cursor)


# --- names, reversals, sums ------------------------------------------------------------------------------------------


@scenario
async def test_events_name_what_they_are_about(ledger: Ledger) -> None:
    await ledger.create_book("retail")
    await ledger.create_account("user:7")
    await ledger.freeze("user:7")
    await ledger.create_asset("EUR", 2)
    (receipt,) = await seed(ledger, "alice", "1")

    told = [(event.kind.name, event.name) for event in await ledger.events(limit=1000)][-5:]

    assert told == [
        ("BOOK_CREATED", "retail"),
        ("ACCOUNT_CREATED", "user:7"),
        ("ACCOUNT_CHANGED", "user:7"),
        ("ASSET_CREATED", "EUR"),
        ("COMMITTED", ""),
    ]
    assert (await ledger.events(limit=1000))[-1].subject == receipt.envelope


@scenario
async def test_an_envelope_says_that_it_was_reversed_and_by_which(ledger: Ledger) -> None:
    await seed(ledger, "alice", "10")
    paid = await ledger.commit(pay("alice", "bob", "USDT", "4"))
    assert (await ledger.envelope(paid.envelope)).reversed_by is None

    back = await ledger.reverse(paid.envelope)

    assert (await ledger.envelope(paid.envelope)).reversed_by == back.envelope
    assert (await ledger.envelope(back.envelope)).reversed_by is None
    lines = {line.envelope: (line.reverses, line.reversed_by) for line in await ledger.history("bob")}
    assert lines == {paid.envelope: (None, back.envelope), back.envelope: (paid.envelope, None)}
    again = await ledger.reverse(back.envelope)
    assert (await ledger.envelope(back.envelope)).reversed_by == again.envelope


@scenario
async def test_balances_of_all_assets_at_a_moment_and_below_a_prefix(ledger: Ledger) -> None:
    for path in ("user:1", "user:1:spot", "user:10"):
        await ledger.create_account(path)
    await seed(ledger, "user:1", "1")
    await seed(ledger, "user:1:spot", "2", asset="BTC")
    receipt = (await seed(ledger, "user:10", "5"))[0]
    then = (await ledger.envelope(receipt.envelope)).at
    await ledger.commit(pay("user:1", "user:10", "USDT", "1"))
    await seed(ledger, "user:1:spot", "1", asset="BTC")

    def told(found: dict[str, Money]) -> dict[str, str]:
        return {code: str(money) for code, money in found.items()}

    assert told(await ledger.balances("user:1")) == {}
    assert told(await ledger.balances("user:1", at=then)) == {"USDT": "1.000000"}
    assert told(await ledger.balances(prefix="user:1")) == {"BTC": "3.00000000"}
    assert told(await ledger.balances(prefix="user:1", at=then)) == {"USDT": "1.000000", "BTC": "2.00000000"}
    assert told(await ledger.balances(prefix="user")) == {"USDT": "6.000000", "BTC": "3.00000000"}
    assert told(await ledger.balances(prefix="nobody", at=then)) == {}
    for wrong in (ledger.balances(), ledger.balances("alice", prefix="alice")):
        with pytest.raises(InvalidName, match="either an account or a prefix"):
            await wrong


@scenario
async def test_a_prefix_is_an_account_and_all_below_it_everywhere(ledger: Ledger) -> None:
    for path in ("user:1", "user:1:spot", "user:10"):
        await ledger.create_account(path)
    assert [a.path for a in await ledger.accounts("user:1")] == ["user:1", "user:1:spot"]
    assert [a.path for a in await ledger.accounts("user:1", after="user:1", limit=5)] == ["user:1:spot"]
    for wrong in ("user:", "us er", ":"):
        with pytest.raises(InvalidName):
            await ledger.accounts(wrong)


@scenario
async def test_times_are_datetimes_in_utc(ledger: Ledger) -> None:
    (receipt,) = await seed(ledger, "alice", "5")
    hold = await ledger.authorize("alice", "USDT", "1", expires_in=timedelta(hours=1))
    times = [
        (await ledger.envelope(receipt.envelope)).at,
        (await ledger.history("alice"))[0].at,
        (await ledger.account_history("alice"))[0].at,
        hold.expires,
        (await ledger.holds("alice"))[0].expires,
    ]
    assert all(isinstance(at, datetime) and at.utcoffset() == timedelta(0) for at in times)
    assert times[3] == times[4]
