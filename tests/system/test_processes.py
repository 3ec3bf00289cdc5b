"""Several real processes on one database, and what happens when one of them, or the database, is killed.

The same scenes on PostgreSQL and on a SQLite file. Nothing is lost, nothing happens twice, and whoever is told no is
told so by a typed error.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
from tests.builders import check_sound
from tests.system.crew import ASSET, BANK, crew, furnish, outcome, until

from bursar import CappedOverdraft, Receipt, deposit, pay
from bursar import open as open_bursar
from bursar.ledger import Ledger
from bursar.model.errors import StoreError
from bursar.store.batch import Lane, WriteConflict
from bursar.store.sqlite import store as sqlite
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres


@pytest.fixture(params=["postgres", "sqlite"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "postgres":
        return str(request.getfixturevalue("fresh_postgres"))
    return f"sqlite:///{tmp_path / 'funds.db'}"


async def balances(url: str, *accounts: str) -> list[str]:
    """What accounts have, in a database whose books are sound."""
    async with open_bursar(url) as bursar:
        await check_sound(bursar.ledger)
        return [str((await bursar.ledger.balance(account, ASSET)).decimal) for account in accounts]


async def pay_once(_say: Any, url: str, source: str, target: str, amount: str, key: str) -> Any:
    async with open_bursar(url) as bursar:
        return await outcome(bursar.ledger.commit(pay(source, target, ASSET, amount, key=key)))


def test_eight_racers_for_one_posting(url: str) -> None:
    """Eight racers for one posting, one winner."""

    async def prepare() -> None:
        await furnish(url, "a", "b")
        async with open_bursar(url) as bursar:
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "10"))

    asyncio.run(prepare())
    with crew(*[(pay_once, url, "a", "b", "10", f"racer-{i}") for i in range(8)]) as racers:
        results = [racer.result() for racer in racers]
    assert Counter(r if isinstance(r, str) else "paid" for r in results) == {"paid": 1, "INSUFFICIENT_BALANCE": 7}
    assert asyncio.run(balances(url, "a", "b")) == ["0.00", "10.00"]


def test_ten_times_a_thousand_against_five_thousand(url: str) -> None:
    """10 × 1,000 against 5,000: exactly five."""

    async def prepare() -> None:
        await furnish(url, "a", "b")
        async with open_bursar(url) as bursar:
            for _ in range(4):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1250"))

    asyncio.run(prepare())
    with crew(*[(pay_once, url, "a", "b", "1000", f"racer-{i}") for i in range(10)]) as racers:
        results = [racer.result() for racer in racers]
    assert Counter(r if isinstance(r, str) else "paid" for r in results) == {"paid": 5, "INSUFFICIENT_BALANCE": 5}
    assert asyncio.run(balances(url, "a", "b")) == ["0.00", "5000.00"]


async def pay_many(_say: Any, url: str, name: str, source: str, target: str, count: int, at_once: int) -> Any:
    """Many payments from several callers of one process; counts outcomes, and how often a group was tried again."""
    lost = 0
    async with open_bursar(url) as bursar:
        run_batch = bursar.store.run_batch

        async def counted(work: Any, lane: Lane = Lane.WRITE) -> Any:
            nonlocal lost
            try:
                return await run_batch(work, lane)
            except WriteConflict:
                lost += 1
                raise

        bursar.store.run_batch = counted  # type: ignore[method-assign]
        found: Counter[str] = Counter()

        async def caller(number: int) -> None:
            for i in range(number, count, at_once):
                result = await outcome(bursar.ledger.commit(pay(source, target, ASSET, "1", key=f"{name}-{i}")))
                found[result if isinstance(result, str) else "paid"] += 1

        await asyncio.gather(*[caller(number) for number in range(at_once)])
        return dict(found), lost, bursar.ledger.writer.batches


def test_capped_floor_raced_from_two_processes(url: str) -> None:
    """Two capped accounts racing to the floor, never below, and exactly down to it."""
    asyncio.run(furnish(url, "a", "b", policy=CappedOverdraft("-100", ASSET)))
    asyncio.run(furnish(url, "shop"))
    works = [(pay_many, url, f"{who}{p}", who, "shop", 80, 4) for p in range(2) for who in "ab"]
    with crew(*works) as racers:
        results = [racer.result() for racer in racers]
    total: Counter[str] = Counter()
    for found, _, _ in results:
        total += Counter(found)
    assert total == {"paid": 200, "OVERDRAFT_FLOOR": 120}
    assert asyncio.run(balances(url, "a", "b", "shop")) == ["-100.00", "-100.00", "200.00"]


@pytest.mark.parametrize("hot", ["source", "target"])
def test_hot_account_from_two_processes(url: str, hot: str, record_property: Callable[[str, object], None]) -> None:
    """A hot account as only source and as only target: all succeed, nobody is told Conflict."""

    async def prepare() -> None:
        await furnish(url, "hot", "cold0", "cold1")
        async with open_bursar(url) as bursar:
            for account in ("hot",) if hot == "source" else ("cold0", "cold1"):
                await bursar.ledger.commit(deposit(BANK, account, ASSET, "1000"))

    asyncio.run(prepare())
    ends = [("hot", f"cold{p}") if hot == "source" else (f"cold{p}", "hot") for p in range(2)]
    with crew(*[(pay_many, url, f"p{p}", *ends[p], 300, 8) for p in range(2)]) as racers:
        results = [racer.result() for racer in racers]
    lost, groups = sum(r[1] for r in results), sum(r[2] for r in results)
    record_property("groups_tried_again", f"{lost} of {groups}")
    print(f"{url[:6]}, hot {hot}: {lost} tries lost for {groups} groups written")
    assert [found for found, _, _ in results] == [{"paid": 300}, {"paid": 300}]
    if hot == "target":
        assert lost == 0, "who is only paid gets in nobody's way"
        assert asyncio.run(balances(url, "hot")) == ["600.00"]
    else:
        assert asyncio.run(balances(url, "hot", "cold0", "cold1")) == ["400.00", "300.00", "300.00"]


async def pay_until_frozen(say: Any, url: str, name: str) -> Any:
    """Pay in a loop; say when it runs, and which envelope was the last before the refusal."""
    async with open_bursar(url) as bursar:
        last, count = 0, 0
        while True:
            result = await outcome(bursar.ledger.commit(pay("a", "b", ASSET, "0.01", key=f"{name}-{count}")))
            if isinstance(result, str):
                return result, count, last
            last, count = result.envelope, count + 1
            if count == 20:
                say("running")


def test_freeze_while_others_pay(url: str) -> None:
    """Freeze from one process while others pay in a loop: it returns soon, and after it nothing is committed."""

    async def prepare() -> None:
        await furnish(url, "a", "b")
        async with open_bursar(url) as bursar:
            for _ in range(8):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "100"))

    async def freeze() -> tuple[set[int], float]:
        async with open_bursar(url) as bursar:
            began = time.monotonic()
            await bursar.ledger.freeze("a")
            took = time.monotonic() - began
            # Newest first by their events; numbers are given ahead, and the last to commit need not have the highest.
            return {line.envelope for line in await bursar.ledger.history("a", limit=10_000)}, took

    asyncio.run(prepare())
    with crew(*[(pay_until_frozen, url, f"p{p}") for p in range(3)]) as payers:
        for payer in payers:
            assert payer.get() == ("said", "running")
        newest, took = asyncio.run(freeze())
        results = [payer.result() for payer in payers]
    print(f"{url[:6]}: freeze took {took * 1000:.0f} ms against three paying processes")
    assert {code for code, _, _ in results} == {"ACCOUNT_FROZEN"}
    assert {last for _, _, last in results} <= newest, "committed after the freeze had returned"
    paid = sum(count for _, count, _ in results)
    assert asyncio.run(balances(url, "b")) == [f"{paid / 100:.2f}"]


async def stream(say: Any, url: str, start: int, count: int, at_once: int = 4) -> Any:
    """Deposits with keys 0, 1, 2…; says each that was acknowledged."""
    async with open_bursar(url) as bursar:
        say(-1)

        async def caller(number: int) -> None:
            for i in range(start + number, start + count, at_once):
                await commit_stubbornly(bursar.ledger, i)
                say(i)

        await asyncio.gather(*[caller(number) for number in range(at_once)])


async def commit_stubbornly(ledger: Ledger, number: int) -> Receipt:
    """Send the same key until there is an answer."""
    deadline = time.monotonic() + 45
    while True:
        try:
            return await ledger.commit(deposit(BANK, "a", ASSET, "1", key=f"deposit-{number}"))
        except StoreError as error:
            assert "\n" not in str(error)
            assert time.monotonic() < deadline, f"no recovery: {error}"
            await asyncio.sleep(0.05)


def test_kill_a_client_in_the_middle_of_its_commits(url: str) -> None:
    """kill -9 of a client, again and again; restarted with the same keys, each happened exactly once."""
    asyncio.run(furnish(url, "a"))
    acknowledged: set[int] = set()
    for fraction in (5, 40, 90):
        with crew((stream, url, 0, 4000)) as (client,):
            said = [client.get() for _ in range(fraction)]
            client.kill()
            assert {kind for kind, _ in said} == {"said"}
            acknowledged.update(number for number in [n for _, n in said] + client.reported() if number >= 0)

    async def check() -> None:
        async with open_bursar(url) as bursar:
            for number in acknowledged:
                receipt = await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=f"deposit-{number}"))
                assert receipt.replayed, f"deposit-{number} was acknowledged and is gone"

    asyncio.run(check())
    with crew((stream, url, 0, 200)) as (client,):
        client.result()
    (total,) = asyncio.run(balances(url, "a"))
    distinct = asyncio.run(count_envelopes(url))
    assert total == f"{distinct}.00"
    assert distinct >= 200


async def count_envelopes(url: str) -> int:
    async with open_bursar(url) as bursar:
        return int((await bursar.store.read.checks.counts())["envelopes"])


def test_an_open_transaction_of_a_user_does_not_stop_unrelated_commits(fresh_postgres: str) -> None:
    """Whoever wants the posting that it spends has to wait for it; everybody else in the process need not."""

    async def body() -> None:
        await furnish(fresh_postgres, "a", "b", "c", "d")
        async with open_bursar(fresh_postgres) as bursar:
            ledger = bursar.ledger
            await ledger.commit_many([deposit(BANK, account, ASSET, "10") for account in "ac"])
            connection = await asyncpg.connect(fresh_postgres)
            async with connection.transaction():
                await ledger.commit(pay("a", "b", ASSET, "1"), connection=connection)
                contended = asyncio.create_task(ledger.commit(pay("a", "b", ASSET, "1", key="contended")))
                waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
                async with asyncio.timeout(5):
                    while not await connection.fetchval(waits):  # noqa: ASYNC110 (the condition is the server's)
                        await asyncio.sleep(0.005)
                try:
                    async with asyncio.timeout(3):
                        assert isinstance(await ledger.commit(pay("c", "d", ASSET, "1")), Receipt)
                finally:
                    contended.cancel()
            await connection.close()

    asyncio.run(body())


# --- the database goes away -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[ThrowawayPostgres]:
    """A server that may be killed."""
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


@pytest.fixture
def mortal(own_postgres: ThrowawayPostgres, request: pytest.FixtureRequest) -> Iterator[ThrowawayPostgres]:
    """The same, running, with a clean slate."""
    own_postgres.start()

    async def clean() -> None:
        connection = await asyncpg.connect(own_postgres.url)
        await connection.execute("DROP SCHEMA IF EXISTS bursar CASCADE")
        await connection.close()

    asyncio.run(clean())
    yield own_postgres
    own_postgres.start()


def check_each_once(url: str, count: int) -> None:
    (total,) = asyncio.run(balances(url, "a"))
    assert total == f"{count}.00"
    assert asyncio.run(count_envelopes(url)) == count


def acknowledged_at_least(member: Any, count: int) -> None:
    for _ in range(count):
        kind, value = member.get()
        assert kind == "said", value


def test_kill_postgres_under_load(mortal: ThrowawayPostgres) -> None:
    """kill -9 of PostgreSQL, twice, under load from two processes: each deposit happens exactly once."""
    asyncio.run(furnish(mortal.url, "a"))
    with crew((stream, mortal.url, 0, 600), (stream, mortal.url, 600, 600)) as clients:
        for _ in range(2):
            for client in clients:
                acknowledged_at_least(client, 60)
            mortal.kill()
            mortal.start()
        for client in clients:
            client.result()
    check_each_once(mortal.url, 1200)


def test_postgres_stopped_for_three_seconds(mortal: ThrowawayPostgres) -> None:
    """A planned restart: callers wait, nobody sees an error from commit."""

    async def work(say: Any, url: str) -> Any:
        async with open_bursar(url) as bursar:
            say("open")
            results = []
            for i in range(400):
                results.append(await outcome(bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=f"d{i}"))))
                say(i)
            return [r for r in results if isinstance(r, str)]

    asyncio.run(furnish(mortal.url, "a"))
    with crew((work, mortal.url)) as (client,):
        acknowledged_at_least(client, 50)
        mortal.stop()
        back = time.monotonic() + 3
        until(lambda: time.monotonic() >= back)
        mortal.start()
        assert client.result() == []
    check_each_once(mortal.url, 400)


def test_connection_of_the_writer_is_cut_repeatedly(mortal: ThrowawayPostgres) -> None:
    """pg_terminate_backend of the writer in mid-commit, twenty times: no error, each exactly once."""

    async def work(say: Any, url: str) -> Any:
        async with open_bursar(url) as bursar:
            say("open")
            done = 0

            async def caller(number: int) -> list[Any]:
                nonlocal done
                found = []
                for i in range(200):
                    entry = deposit(BANK, "a", ASSET, "1", key=f"{number}-{i}")
                    found.append(await outcome(bursar.ledger.commit(entry)))
                    done += 1
                return found

            results = await asyncio.gather(*[caller(number) for number in range(4)])
            return [r for found in results for r in found if isinstance(r, str)]

    async def cut() -> int:
        connection = await asyncpg.connect(mortal.url)
        cuts = 0
        # Only a backend in the middle of a write: that is where an answer can be lost.
        for _ in range(3000):
            cuts += await connection.fetchval(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
                "WHERE application_name = 'bursar' AND state = 'active' AND query LIKE '%write_group%'"
            )
            if cuts >= 20:
                break
        await connection.close()
        return cuts

    asyncio.run(furnish(mortal.url, "a"))
    with crew((work, mortal.url)) as (client,):
        acknowledged_at_least(client, 1)
        cuts = asyncio.run(cut())
        assert client.result() == []
    assert cuts >= 3, "the writer was never caught"
    check_each_once(mortal.url, 800)


# --- memory ----------------------------------------------------------------------------------------------------


def rss_mb() -> float:
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize() / 2**20


async def commit_and_weigh(_say: Any, url: str) -> list[float]:
    """20,000 commits; what the process weighs after every 5,000."""
    weights = []
    sqlite.CACHE_KIB = 1_024  # SQLite keeps pages of a growing file until its cache is full: not what is weighed here
    async with open_bursar(url) as bursar:
        for part in range(4):
            entries = [pay("hot", "b", ASSET, "0.01", key=f"{part}-{i}") for i in range(5000)]
            for start in range(0, 5000, 500):
                results = await bursar.ledger.commit_many(entries[start : start + 500])
                assert all(isinstance(r, Receipt) for r in results)
            del entries
            weights.append(rss_mb())
    return weights


def test_memory_does_not_grow(url: str) -> None:
    """15,000 commits after warm-up do not grow the process by two megabytes."""

    async def prepare() -> None:
        await furnish(url, "hot", "b")
        async with open_bursar(url) as bursar:
            await bursar.ledger.commit(deposit(BANK, "hot", ASSET, "1000"))

    asyncio.run(prepare())
    with crew((commit_and_weigh, url)) as (client,):
        weights = client.result()
    print(f"{url[:6]}: {[f'{w:.1f}' for w in weights]} MB")
    assert weights[-1] - weights[0] < 2
