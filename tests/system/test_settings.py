"""Settings of PostgreSQL that money rests on: made after connecting, verified, and where they can't hold, refused with
the name of what is in the way. With `require_synchronous`, only a server whose commits a standby has is used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import cast

import pytest
from click.testing import CliRunner
from tests.system.crew import ASSET, BANK, furnish
from tests.system.pooler import pooled
from tests.system.standby import standby
from tests.system.test_trouble import sql

import bursar
import bursar.sync
from bursar import Bursar, Receipt, deposit
from bursar.cli.app import root
from bursar.model.errors import BursarError, DatabaseUnavailable
from bursar.store import Options
from bursar.store.batch import Lane
from bursar.store.postgres import connecting
from bursar.store.postgres.connecting import Host, hosts_of
from bursar.store.postgres.store import PostgresStore
from bursar.testbed.devdb import ThrowawayPostgres, throwaway_postgres

STRICT = Options(require_synchronous=True)


@pytest.fixture(scope="module")
def server() -> Iterator[ThrowawayPostgres]:
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres


@pytest.fixture
def pg(server: ThrowawayPostgres) -> Iterator[str]:
    name = f"settings_{time.monotonic_ns()}"
    asyncio.run(sql(server.url, f"CREATE DATABASE {name}"))
    url = server.url_of(name)
    asyncio.run(furnish(url, "a"))
    yield url
    asyncio.run(sql(server.url, "ALTER SYSTEM RESET ALL", "SELECT pg_reload_conf()"))
    asyncio.run(sql(server.url, f"DROP DATABASE {name} WITH (FORCE)"))


async def refusal(url: str, options: Options) -> BursarError | None:
    try:
        async with Bursar(url, options=options) as bursar:
            await bursar.ledger.assets()
    except BursarError as error:
        assert "\n" not in str(error)
        return error
    return None


async def refusal_beside_standby(url: str) -> BursarError | None:
    async with standby(url, "one"):
        return await refusal(url, STRICT)


async def shown(url: str, name: str, options: Options = STRICT) -> str:
    bursar = Bursar(url, options=options)
    async with bursar, cast("PostgresStore", bursar.store).connection() as connection:
        return str(await connection.fetchval(f"SHOW {name}"))


async def set_standbys(url: str, names: str) -> None:
    await sql(url, f"ALTER SYSTEM SET synchronous_standby_names = '{names}'", "SELECT pg_reload_conf()")
    async with asyncio.timeout(20):
        while (await sql(url, "SHOW synchronous_standby_names"))[0][0] != names:  # noqa: ASYNC110 (the server's)
            await asyncio.sleep(0.01)


def database(url: str) -> str:
    return url.split("?", maxsplit=1)[0].rsplit("/", 1)[1]


def test_require_synchronous_refuses_a_server_without_standbys(pg: str) -> None:
    error = asyncio.run(refusal(pg, STRICT))
    assert isinstance(error, DatabaseUnavailable)
    assert "synchronous_standby_names is empty" in error.why
    assert asyncio.run(refusal(pg, Options())) is None, "it is off unless asked for"


@pytest.mark.parametrize("level", ["off", "local", "remote_write"])
@pytest.mark.parametrize("by", ["DATABASE", "ROLE"])
def test_require_synchronous_refuses_a_commit_that_does_not_wait(pg: str, level: str, by: str) -> None:
    """Whoever sets it: the default of the database, or that of the role."""
    asyncio.run(set_standbys(pg, "one"))
    name = database(pg) if by == "DATABASE" else "bursar"
    asyncio.run(sql(pg, "SET synchronous_commit = local", f"ALTER {by} {name} SET synchronous_commit = {level}"))
    try:
        error = asyncio.run(refusal(pg, STRICT))
        assert isinstance(error, DatabaseUnavailable)
        assert f"synchronous_commit is {level}" in error.why
    finally:
        asyncio.run(sql(pg, "SET synchronous_commit = local", f"ALTER {by} {name} RESET synchronous_commit"))
    assert asyncio.run(refusal_beside_standby(pg)) is None


@pytest.mark.parametrize("level", ["on", "remote_apply"])
def test_require_synchronous_takes_a_commit_that_waits(pg: str, level: str) -> None:
    asyncio.run(sql(pg, f"ALTER DATABASE {database(pg)} SET synchronous_commit = {level}"))

    async def body() -> None:
        await set_standbys(pg, "one")
        async with standby(pg, "one"):
            assert await shown(pg, "synchronous_commit") == level

    asyncio.run(body())


def test_require_synchronous_refuses_new_connections_once_the_standbys_are_gone(pg: str) -> None:
    """Patroni empties the list when there is no standby left, unless it is told to be strict."""

    async def body() -> None:
        await set_standbys(pg, "one")
        async with standby(pg, "one"), Bursar(pg, options=STRICT) as bursar:
            await bursar.ledger.assets()
            await set_standbys(pg, "")
            store = cast("PostgresStore", bursar.store)
            await store._reconnect()
            with pytest.raises(DatabaseUnavailable, match="synchronous_standby_names"):
                await bursar.ledger.assets()
            with pytest.raises(DatabaseUnavailable, match="synchronous_standby_names"):
                await bursar.ledger.commit(deposit(BANK, "a", ASSET, "1"))

    asyncio.run(body())


def test_shorter_statement_timeout_of_the_role_stays(pg: str) -> None:
    asyncio.run(sql(pg, f"ALTER DATABASE {database(pg)} SET statement_timeout = '700ms'"))
    assert asyncio.run(shown(pg, "statement_timeout", Options())) == "700ms"
    asyncio.run(sql(pg, f"ALTER DATABASE {database(pg)} SET statement_timeout = '1h'"))
    assert asyncio.run(shown(pg, "statement_timeout", Options())) == "5s"


def test_require_synchronous_is_known_to_programs_and_commands(pg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only to `serve`: a deposit by hand would be lost with its server just as well."""

    async def opens() -> None:
        async with bursar.open(pg, require_synchronous=True):
            pass

    with pytest.raises(DatabaseUnavailable, match="synchronous_standby_names is empty"):
        asyncio.run(opens())
    with (
        pytest.raises(DatabaseUnavailable, match="synchronous_standby_names is empty"),
        bursar.sync.open(pg, require_synchronous=True),
    ):
        pass
    command = ["--database", pg, "ledger", "deposit", BANK, "a", ASSET, "1", "--key", "by-hand"]
    assert CliRunner().invoke(root, command).exit_code == 0
    monkeypatch.setenv("BURSAR_REQUIRE_SYNCHRONOUS", "true")
    ran = CliRunner().invoke(root, command)
    assert (ran.exit_code, "synchronous_standby_names is empty" in ran.stderr) == (4, True)
    monkeypatch.setenv("BURSAR_REQUIRE_SYNCHRONOUS", "perhaps")
    ran = CliRunner().invoke(root, command)
    assert (ran.exit_code, "BURSAR_REQUIRE_SYNCHRONOUS" in ran.stderr) == (1, True)


def test_setting_that_does_not_hold_is_refused(pg: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read back in another transaction: what was made for one alone, as by a pooler, is gone by then."""
    made = connecting._make
    monkeypatch.setattr(connecting, "_make", lambda wanted: made(wanted).replace(", false)", ", true)"))
    error = asyncio.run(refusal(pg, Options()))
    assert isinstance(error, DatabaseUnavailable)
    assert "does not hold" in error.why
    assert "pool_mode = session" in error.why


def test_pooler_with_a_connection_per_session_works(pg: str) -> None:
    """And needs no settings: what we need is no parameter of the start-up packet."""

    async def body() -> None:
        with pooled(pg, "session") as pooler:
            async with Bursar(pooler.url) as bursar:
                store = cast("PostgresStore", bursar.store)
                async with store.connection() as connection:
                    assert connection.get_server_pid() != await connection.fetchval("SELECT pg_backend_pid()")
                    assert await connection.fetchval("SHOW plan_cache_mode") == "force_custom_plan"
                entries = [deposit(BANK, "a", ASSET, "1", key=f"k{n}") for n in range(100)]
                assert all(isinstance(one, Receipt) for one in await bursar.ledger.commit_many(entries))
                writer = store._lanes[Lane.WRITE]
                assert writer is not None
                assert await writer.fetchval("SHOW plan_cache_mode") == "force_generic_plan"

    asyncio.run(body())


def test_pooler_with_a_connection_per_transaction_is_refused_by_name(pg: str) -> None:
    """At once, before anything is written with settings that are somebody else's."""
    with pooled(pg, "transaction") as pooler:
        error = asyncio.run(refusal(pooler.url, Options()))
    assert isinstance(error, DatabaseUnavailable)
    assert "pgbouncer" in error.why
    assert "pool_mode = session" in error.why


def test_pooler_that_refuses_a_parameter_of_the_address_is_named(pg: str) -> None:
    with pooled(pg, "session") as pooler:
        error = asyncio.run(refusal(f"{pooler.url}?work_mem=8MB", Options()))
    assert isinstance(error, DatabaseUnavailable)
    assert "pgbouncer" in error.why
    assert "work_mem" in error.why


@pytest.mark.parametrize(
    ("url", "hosts"),
    [
        ("postgresql://u@db/x", []),
        ("postgresql://u@/x?host=/tmp", []),
        ("postgresql:///x", []),
        ("postgresql://u:p@a,b:6432/x", [Host("a", None), Host("b", 6432)]),
        ("postgresql://a:1,b:2/x", [Host("a", 1), Host("b", 2)]),
        ("postgresql://u@[::1]:7,[fe80::2]/x", [Host("::1", 7), Host("fe80::2", None)]),
        ("postgresql://u@/x?host=a,b&port=1,2", [Host("a", 1), Host("b", 2)]),
        ("postgresql://u@/x?host=a,b&port=9", [Host("a", 9), Host("b", 9)]),
        ("postgresql://u@/x?host=/run/a,b", [Host("/run/a", None), Host("b", None)]),
    ],
)
def test_hosts_of_an_address(url: str, hosts: list[Host]) -> None:
    assert hosts_of(url) == hosts


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://a,:5/x",
        "postgresql://a:x,b/x",
        "postgresql:///x?host=a,b,c&port=1,2",
        "postgresql://u:hunter@2,more@a,b/x",
        "postgresql://u:hunter2,b/x",
    ],
)
def test_address_that_makes_no_sense_is_refused_in_one_line_without_its_password(url: str) -> None:
    error = asyncio.run(refusal(url, Options()))
    assert isinstance(error, DatabaseUnavailable)
    assert "address can't be read" in error.why
    assert "hunter" not in str(error)
    assert "more" not in str(error)
