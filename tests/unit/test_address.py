"""Addresses of databases as they may be printed: never with a password, however it was written."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bursar.config import Config
from bursar.model.errors import DatabaseUnavailable
from bursar.ports import SystemPorts
from bursar.store import connect
from bursar.store.address import printable

SECRET = "hunter2"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("sqlite:///data/bursar.db", "sqlite:///data/bursar.db"),
        ("postgresql://bursar@db.internal/bursar", "postgresql://bursar@db.internal/bursar"),
        (f"postgresql://bursar:{SECRET}@db:5432/bursar", "postgresql://bursar@db:5432/bursar"),
        (f"postgres://bursar:{SECRET}%40%2F@[::1]:5432/bursar", "postgres://bursar@[::1]:5432/bursar"),
        (f"postgresql://b:{SECRET}@a:1,b:2,c:3/bursar?target_session_attrs=any", "postgresql://b@a:1,b:2,c:3/bursar"),
        (f"postgresql://bursar@db/bursar?password={SECRET}", "postgresql://bursar@db/bursar"),
        (f"postgresql://bursar@db/bursar?password={SECRET}@x", "postgresql://bursar@db/bursar"),
        (f"postgresql://db/bursar?user=u&password={SECRET}", "postgresql://db/bursar"),
        (f"postgresql:///bursar?host=/tmp&pass%77ord={SECRET}", "postgresql:///bursar"),
        (f"postgresql://db/bursar?sslpassword={SECRET}", "postgresql://db/bursar"),
        (f"postgresql://bursar:{SECRET}@db", "postgresql://bursar@db"),
        (f"postgresql://bursar:{SECRET}", "postgresql://…"),
        (f"postgresql://bursar:{SECRET}#{SECRET}@db/bursar", "postgresql://…"),
        (f"postgresql://bursar:{SECRET}/{SECRET}@db/bursar", "postgresql://…"),
        (f"postgresql://bursar:12?{SECRET}@db/bursar", "postgresql://…"),
        (f"postgresql://bursar:12/{SECRET}@db/bursar", "postgresql://…"),
        (f"postgresql://bursar:{SECRET}@{SECRET}@db/bursar", "postgresql://…"),
        (f"mysql://bursar:{SECRET}@db/bursar", "mysql://…"),
        (f"host=db user=bursar password={SECRET}", "…"),
        (f"{SECRET}://x", "…"),
        ("", "…"),
    ],
)
def test_an_address_is_printed_without_its_password(url: str, shown: str) -> None:
    assert printable(url) == shown


@given(st.text(alphabet="hunter2:@/?#%&=[], \n'\"", max_size=20), st.sampled_from(["@db/name", "@db/name?x=1"]))
def test_whatever_a_password_is_made_of(noise: str, rest: str) -> None:
    """Also one that should have been encoded, and makes another address of it."""
    assert "Zebra9" not in printable(f"postgresql://bursar:Zebra9{noise}Zebra9{rest}")
    assert "Zebra9" not in printable(f"postgresql://bursar@db/name?password={noise}Zebra9")


@pytest.mark.parametrize(
    "url",
    [
        f"host=db password={SECRET}",
        f"mysql://u:{SECRET}@db/x",
        f"postgresql://u:{SECRET}#x@127.0.0.1:1/db",
        f"postgresql://u:{SECRET}/x@127.0.0.1:1/db",
        f"postgresql://u:{SECRET}[@127.0.0.1:1/db",
        f"postgresql://u:{SECRET}@127.0.0.1:1,127.0.0.1:{SECRET}/db",
        f"postgresql://u:{SECRET}@127.0.0.1:1/db?port={SECRET}",
        f"postgresql://u:{SECRET}@127.0.0.1:1/db?sslmode={SECRET}",
        f"postgresql://u:x@127.0.0.1:1/db?password={SECRET}",
    ],
)
def test_what_is_wrong_with_an_address_is_said_without_quoting_it(url: str) -> None:
    async def work() -> None:
        store = connect(url, SystemPorts())
        await store.open()

    with pytest.raises(DatabaseUnavailable) as refused:
        asyncio.run(work())
    said: BaseException | None = refused.value
    while said is not None:  # a traceback shows what it came from, too
        assert SECRET not in str(said)
        said = None if said.__suppress_context__ else said.__cause__ or said.__context__


def test_a_configuration_is_printed_without_its_database() -> None:
    assert SECRET not in repr(Config(database=f"postgresql://u:{SECRET}@db/x"))
