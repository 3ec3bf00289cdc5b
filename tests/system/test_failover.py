"""A leader and a standby in one address: the one that takes writes is used, and when that changes, whoever is it then.

The leader is stopped in the middle of everything (SIGSTOP: silent, not gone), or demoted to read-only; the standby is
promoted, and what was asked for meanwhile happens once."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.system.crew import ASSET, BANK, furnish
from tests.system.pair import Standby, standby_of
from tests.system.proxy import Proxy, proxied
from tests.system.test_trouble import sql

from bursar import Bursar, Receipt, deposit
from bursar.model.errors import AccountFrozen, DatabaseUnavailable
from bursar.store import Options
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

LIMIT_S = 1.0


@pytest.fixture
def leader() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        asyncio.run(furnish(postgres.url, "a"))
        yield postgres


@pytest.fixture
def standby(leader: ThrowawayPostgres) -> Iterator[Standby]:
    with standby_of(leader) as made:
        yield made


@pytest.fixture
def both(leader: ThrowawayPostgres, standby: Standby) -> Iterator[tuple[Proxy, Proxy]]:
    with proxied(leader.url) as one, proxied(standby.url) as two:
        yield one, two


def address(*proxies: Proxy) -> str:
    return proxies[0].url.replace(proxies[0].host, ",".join(proxy.host for proxy in proxies))


def pay_in(bursar: Bursar, key: str) -> asyncio.Task[Receipt]:
    return asyncio.create_task(bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=key)))


async def balance(bursar: Bursar) -> str:
    return str((await bursar.ledger.balance("a", ASSET)).decimal)


@contextmanager
def stopped(server: ThrowawayPostgres) -> Iterator[None]:
    """The server and all its processes hang; their connections stay open."""
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    processes = [server.pid, *map(int, children)]
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in processes:
            os.kill(pid, signal.SIGCONT)


def test_host_that_takes_writes_is_used_whatever_the_order(both: tuple[Proxy, Proxy]) -> None:
    async def body(url: str, key: str) -> None:
        async with Bursar(url) as bursar:
            assert not (await pay_in(bursar, key)).replayed

    one, two = both
    asyncio.run(body(address(one, two), "first"))
    asyncio.run(body(address(two, one), "second"))
    with pytest.raises(DatabaseUnavailable):
        asyncio.run(body(f"{address(two, one)}?target_session_attrs=standby", "third"))


def test_leader_that_hangs_is_left_for_the_new_one(
    leader: ThrowawayPostgres, standby: Standby, both: tuple[Proxy, Proxy]
) -> None:
    """While it hangs: with what has been asked for, and what is."""

    async def body() -> None:
        async with Bursar(address(*both), options=Options(statement_s=LIMIT_S)) as bursar:
            assert not (await pay_in(bursar, "first")).replayed
            await asyncio.to_thread(standby.catch_up)
            with stopped(leader):
                waiting = [pay_in(bursar, f"k{n}") for n in range(20)]
                await asyncio.to_thread(standby.promote)
                began = time.monotonic()
                async with asyncio.timeout(LIMIT_S + 15):
                    receipts = await asyncio.gather(*waiting)
                    assert await balance(bursar) == "21.00"
                assert time.monotonic() - began < LIMIT_S + 8
            assert not any(receipt.replayed for receipt in receipts)
            assert [receipt.envelope for receipt in receipts] == [
                (await pay_in(bursar, f"k{n}")).envelope for n in range(20)
            ]

    asyncio.run(body())


def test_leader_that_turns_read_only_is_left_at_once(
    leader: ThrowawayPostgres, standby: Standby, both: tuple[Proxy, Proxy]
) -> None:
    """A demoted leader answers reads and refuses writes: the first refusal is the last that is heard of it."""

    async def body() -> None:
        async with Bursar(address(*both)) as bursar:
            assert not (await pay_in(bursar, "first")).replayed
            assert await balance(bursar) == "1.00"
            await asyncio.to_thread(standby.catch_up)
            await asyncio.to_thread(standby.promote)
            await sql(leader.url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
            async with asyncio.timeout(20):
                while (await sql(leader.url, "SHOW default_transaction_read_only"))[0][0] != "on":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            async with asyncio.timeout(5):
                assert not (await pay_in(bursar, "second")).replayed
                assert await balance(bursar) == "2.00"
                await bursar.ledger.freeze("a")
        assert (await sql(leader.url, "SELECT count(*) FROM bursar.envelopes"))[0][0] == 1

    asyncio.run(body())


def test_rules_of_the_new_leader_hold_although_they_have_the_same_number(
    leader: ThrowawayPostgres, standby: Standby, both: tuple[Proxy, Proxy]
) -> None:
    """Given a change of rules that only the old leader had, and another one at the new leader: both are the same
    generation. What was known of accounts from the old one must not let money into an account that is frozen now."""

    async def freeze(url: str, path: str) -> None:
        async with Bursar(url) as other:
            await other.ledger.freeze(path)

    async def body() -> None:
        async with Bursar(leader.url) as setup:
            await setup.ledger.create_account("b")
            await setup.ledger.create_account("c")
        await asyncio.to_thread(standby.catch_up)
        async with Bursar(address(*both)) as bursar:
            await asyncio.to_thread(standby.promote)
            await freeze(leader.url, "b")
            await freeze(standby.url, "c")
            await bursar.ledger.commit(deposit(BANK, "c", ASSET, "1", key="at the old leader"))
            await sql(leader.url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
            async with asyncio.timeout(20):
                while (await sql(leader.url, "SHOW default_transaction_read_only"))[0][0] != "on":  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            with pytest.raises(AccountFrozen):
                await bursar.ledger.commit(deposit(BANK, "c", ASSET, "1", key="at the new leader"))

    asyncio.run(body())
