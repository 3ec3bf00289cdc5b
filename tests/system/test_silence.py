"""A PostgreSQL that goes silent without closing its connections, as behind a cut network: nobody waits for it for long,
nobody is told that nothing was written where something may have been, and other hosts of the address are used."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import asyncpg
import pytest
from tests.system.crew import ASSET, BANK, furnish
from tests.system.proxy import Proxy, proxied
from tests.system.test_trouble import sql
from tests.system.trouble import put_in

from bursar import Bursar, BursarError, Receipt, deposit
from bursar.audit import audit
from bursar.model.errors import Conflict, DatabaseUnavailable, OutcomeUnknown
from bursar.store import Options
from bursar.store.batch import Lane
from bursar.store.postgres.store import PostgresStore
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

LIMIT_S = 0.5
SOON_S = 3.0  # far below any limit that is not ours, far above what a busy machine needs


@pytest.fixture(scope="module")
def server() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


@pytest.fixture
def pg(server: ThrowawayPostgres) -> Iterator[str]:
    """A database with one deposit of 1."""
    name = f"silence_{time.monotonic_ns()}"
    asyncio.run(sql(server.url, f"CREATE DATABASE {name}"))
    url = server.url_of(name)
    asyncio.run(furnish(url, "a"))
    assert isinstance(asyncio.run(put_in(url, "first")), Receipt)
    yield url
    asyncio.run(sql(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


@pytest.fixture
def proxy(pg: str) -> Iterator[Proxy]:
    with proxied(pg) as made:
        yield made


def limited(url: str, seconds: float = LIMIT_S) -> Bursar:
    return Bursar(url, options=Options(statement_s=seconds))


async def balance(bursar: Bursar) -> str:
    return str((await bursar.ledger.balance("a", ASSET)).decimal)


@contextmanager
def soon(most_s: float = SOON_S) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < most_s


def test_reads_end_within_the_limit_and_the_next_ones_go_through_another_connection(proxy: Proxy) -> None:
    """More readers than the pool has connections; what was connected stays silent, what connects anew is answered."""

    async def body() -> None:
        async with limited(proxy.url) as bursar:
            await asyncio.gather(*[balance(bursar) for _ in range(4)])
            proxy.go_silent(for_new=False)
            with soon():
                told = await asyncio.gather(*[balance(bursar) for _ in range(8)], return_exceptions=True)
            assert any(isinstance(one, DatabaseUnavailable) for one in told), told
            assert {str(one) for one in told if not isinstance(one, DatabaseUnavailable)} <= {"1.00"}
            assert await balance(bursar) == "1.00"

    asyncio.run(body())


def test_reader_who_stops_waiting_does_not_wait_for_a_silent_server(proxy: Proxy) -> None:
    """Not for a statement to be cancelled, nor for a transaction to be rolled back, nor to give its connection back."""

    async def read(bursar: Bursar) -> None:
        await bursar.ledger.account("a")

    async def transaction(bursar: Bursar) -> None:
        await bursar.ledger.create_account("b")

    async def snapshot(bursar: Bursar) -> None:
        await audit(bursar.store)

    async def body() -> None:
        for work in (read, transaction, snapshot):
            async with limited(proxy.url, 60) as bursar:
                await balance(bursar)
                proxy.go_silent()
                with soon(), pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.2):
                        await work(bursar)
            proxy.speak()
        assert proxy.cancels == 0

    with soon(20):
        asyncio.run(body())


def test_commit_whose_answer_is_lost_is_unknown_and_not_cancelled(proxy: Proxy, pg: str) -> None:
    """Given a server that does what it is told and whose answers are lost, when an account is made, then nobody is told
    that nothing was written; and no request to cancel is sent, which would end a wait for a standby."""

    async def body() -> None:
        async with limited(proxy.url) as bursar:
            await balance(bursar)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(asyncpg.pool.PoolConnectionProxy, "transaction", lambda one, **o: _of(one, proxy, o))
                with soon(), pytest.raises(OutcomeUnknown):
                    await bursar.ledger.create_account("b")
            proxy.speak()
            assert (await bursar.ledger.account("b")).path == "b"
        assert proxy.cancels == 0

    asyncio.run(body())


def _of(connection: Any, proxy: Proxy, options: dict[str, Any]) -> Any:
    """A transaction whose answers are swallowed from its COMMIT on."""
    made = connection._con.transaction(**options)

    class Swallowed:
        start, rollback = made.start, made.rollback

        async def commit(self) -> None:
            proxy.swallow_answers()
            await made.commit()

    return Swallowed()


def test_group_whose_answer_is_lost_is_written_once(proxy: Proxy) -> None:
    """The key is asked for on another connection, and says that it is there."""

    async def body() -> None:
        async with limited(proxy.url) as bursar:
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            proxy.swallow_answers()
            with soon():
                receipt = await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="third"))
            assert receipt.replayed or receipt.envelope
            assert await balance(bursar) == "3.00"
        assert proxy.cancels == 0

    asyncio.run(body())


def test_idle_connections_to_a_silent_server_are_not_used_again(proxy: Proxy) -> None:
    """Given connections for groups, idle while their server goes silent, when a read has got no answer,
    then no group waits for its own limit to find out the same: two seconds after a failover all of it works again."""

    async def deposits(bursar: Bursar, name: str) -> None:
        async def three(caller: int) -> None:
            for n in range(3):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key=f"{name}-{caller}-{n}"))

        await asyncio.gather(*map(three, range(100)))

    async def body() -> None:
        limit_s = 2.0
        async with limited(proxy.url, limit_s) as bursar:
            await deposits(bursar, "before")
            store = cast("PostgresStore", bursar.store)
            assert store._lanes[Lane.PREPARE] is not None, "a hundred at once are prepared beside others"
            proxy.go_silent(for_new=False)
            with pytest.raises(DatabaseUnavailable):
                await balance(bursar)
            with soon(limit_s):
                await deposits(bursar, "after")
            assert await balance(bursar) == "601.00"

    asyncio.run(body())


def test_idle_connections_are_not_used_again_after_no_new_one_could_be_made(proxy: Proxy) -> None:
    """Given readers who stop waiting before their limit, as requests with a deadline do, so that no statement ever runs
    into it; when the server is away and comes back, then a group does not wait for the connection it had before."""

    async def body() -> None:
        limit_s = 5.0
        async with limited(proxy.url, limit_s) as bursar:
            await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="before"))
            await asyncio.gather(*[balance(bursar) for _ in range(4)])
            proxy.go_silent(for_new=False)
            proxy.refuses = True
            for _ in range(4):  # as many as the pool has
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.1):
                        await balance(bursar)
            with pytest.raises(DatabaseUnavailable):
                await balance(bursar)
            proxy.refuses = False
            with soon(limit_s - 1):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="after"))

    asyncio.run(body())


def test_statement_of_a_pool_that_only_writes_is_unknown_when_its_answer_is_lost(proxy: Proxy) -> None:
    """A pause is one statement without a transaction around it."""

    async def body() -> None:
        async with limited(proxy.url) as bursar:
            pauses = bursar.store.single().pauses
            assert await pauses.add("flow", "deposits", "anna", "why not")  # from now on it is prepared
            proxy.swallow_answers()
            with soon(), pytest.raises(OutcomeUnknown):
                await pauses.add("flow", "transfers", "anna", "why not")
            proxy.speak()
            assert [pause.name for pause in await pauses.list()] == ["deposits", "transfers"]

    asyncio.run(body())


def test_database_that_can_not_be_reached_leaves_no_doubt(proxy: Proxy) -> None:
    """Nothing could be sent, so nothing was written: said so, within the writer's patience."""

    async def body() -> None:
        async with limited(proxy.url) as bursar:
            bursar.ledger.writer.runner.patience_s = 0.5
            await balance(bursar)
            proxy.refuses = True
            proxy.go_silent(for_new=False)
            for link in list(proxy.links):
                link.client.shutdown(socket.SHUT_RDWR)
            with soon(), pytest.raises(BursarError) as raised:
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="second"))
            assert isinstance(raised.value, DatabaseUnavailable), raised.value

    asyncio.run(body())


@contextmanager
def accepts_and_says_nothing() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def does_not_even_accept() -> Iterator[str]:
    """A listener whose queue is full: the kernel drops who knocks, as a host does that is not there."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        knocking = [socket.socket() for _ in range(4)]
        for one in knocking:
            one.setblocking(False)
            one.connect_ex(address)
        yield f"127.0.0.1:{address[1]}"
        for one in knocking:
            one.close()


@pytest.mark.parametrize("silent", [accepts_and_says_nothing, does_not_even_accept])
@pytest.mark.parametrize("place", ["first", "last", "as query"])
def test_silent_host_does_not_block_the_others(proxy: Proxy, silent: Callable[[], Any], place: str) -> None:
    with silent() as other:
        hosts = [proxy.host, other] if place == "last" else [other, proxy.host]
        url = proxy.url.replace(proxy.host, ",".join(hosts))
        if place == "as query":
            names, ports = zip(*[host.split(":") for host in hosts], strict=True)
            before, after = proxy.url.split(proxy.host)
            url = f"{before}{after}?host={','.join(names)}&port={','.join(ports)}"

        async def body() -> None:
            async with limited(url) as bursar:
                assert await balance(bursar) == "1.00"
                assert isinstance(await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1", key="x")), Receipt)

        with soon():
            asyncio.run(body())


def test_host_that_refuses_is_tried_again_while_a_silent_one_is_waited_for(proxy: Proxy) -> None:
    """The leader goes silent, and a standby refuses us until it is promoted: then it is not the silent one's limit that
    decides when it is found."""

    async def body(url: str) -> None:
        proxy.refuses = True
        opening = asyncio.create_task(_open(url))
        async with asyncio.timeout(20):
            while proxy.refused < 2 and not opening.done():  # noqa: ASYNC110 (a thread's)
                await asyncio.sleep(0.01)
        proxy.refuses = False
        await opening

    with accepts_and_says_nothing() as silent, soon():
        asyncio.run(body(proxy.url.replace(proxy.host, f"{silent},{proxy.host}")))


def test_only_silent_hosts_are_named_in_the_error() -> None:
    with accepts_and_says_nothing() as one, accepts_and_says_nothing() as two:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("bursar.store.postgres.connecting.HOST_S", 0.5)
            with soon(), pytest.raises(DatabaseUnavailable, match="no answer within") as raised:
                asyncio.run(_open(f"postgresql://bursar@{one},{two}/x"))
        assert one in str(raised.value)
        assert two in str(raised.value)


async def _open(url: str) -> None:
    async with Bursar(url):
        pass


def test_audit_has_no_limit_and_other_statements_have_one(pg: str) -> None:
    """Given a table that is locked for longer than the limit, then a balance is not waited for, and an audit waits."""

    async def body() -> None:
        async with limited(pg, 0.3) as bursar:
            await balance(bursar)
            holder = await asyncpg.connect(pg)
            lock = holder.transaction()
            await lock.start()
            await holder.execute("LOCK TABLE bursar.live_postings IN ACCESS EXCLUSIVE MODE")
            auditing = asyncio.create_task(audit(bursar.store))
            with soon(), pytest.raises((Conflict, DatabaseUnavailable)):
                await balance(bursar)
            await asyncio.wait([auditing], timeout=1.0)
            assert not auditing.done()
            await lock.rollback()
            await holder.close()
            assert all(finding.ok for finding in await auditing)

    asyncio.run(body())


def test_server_lets_go_of_what_a_client_that_has_gone_holds(proxy: Proxy, pg: str) -> None:
    """Given a unit that holds the rules and works for long, when its caller goes, then so do its locks, long before the
    statement would end."""
    slow = (
        "CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(60); RETURN NULL; END $$"
    )
    asyncio.run(
        sql(pg, slow, "CREATE TRIGGER slow AFTER INSERT ON bursar.accounts FOR EACH ROW EXECUTE FUNCTION slow()")
    )

    async def body() -> None:
        async with limited(proxy.url, 60) as bursar:
            await balance(bursar)
            task = asyncio.create_task(bursar.ledger.create_account("b"))
            asleep = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            async with asyncio.timeout(20):
                while not (await sql(pg, asleep))[0][0]:  # noqa: ASYNC110 (the condition is the server's)
                    await asyncio.sleep(0.01)
                task.cancel()
                await asyncio.wait([task])
                while (await sql(pg, asleep))[0][0]:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    asyncio.run(body())


def test_sockets_notice_a_host_that_vanishes(proxy: Proxy) -> None:
    """Keepalive while idle, and an end to waiting for acknowledgements: at our end, and at the server's."""

    async def body() -> None:
        async with limited(proxy.url) as bursar, cast("PostgresStore", bursar.store).connection() as connection:
            ours = cast("Any", connection)._transport.get_extra_info("socket")
            assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                assert ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 15_000
            for name, value in (
                ("statement_timeout", "500ms"),
                ("idle_in_transaction_session_timeout", "500ms"),
                ("client_connection_check_interval", "2s"),
            ):
                assert await connection.fetchval(f"SHOW {name}") == value

    asyncio.run(body())
