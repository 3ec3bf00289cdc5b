"""What every suite may ask for: a PostgreSQL server, and an empty database in it.

The server is real and starts with the first test that needs it, one per process (so one per xdist worker). A machine
without PostgreSQL fails here, with a message that says what to install; skipping would turn a suite green that has
proved nothing.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from hypothesis import settings
from tests.shared import Shared

from bursar import garbage
from bursar.testbed.devdb import throwaway_postgres

# A property is about what is true, not about how fast a busy machine finds out; examples are the same in every run.
settings.register_profile("bursar", deadline=None, derandomize=True)
settings.load_profile("bursar")

# A shell starts what runs in the background (`make test &`) with Ctrl-C ignored, and every process that tests start and
# then interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every process of a run makes all tests there are: the collector would walk over them again and again.
garbage.while_loading()

_numbers = count(1)

# Begun first: they last 40 seconds and more however fast the machine is, and at the end would have it for themselves.
LASTING = ("test_chaos_postgres.py", "test_chaos_sqlite.py")

# Runs only if it is named: it lasts for minutes, and needs requirements-cluster.lock, which `make setup` leaves out.
CLUSTER = Path(__file__).parent / "system" / "test_cluster.py"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Whether a file is left out; None: somebody else may decide. Not asked for a file that is named."""
    return True if collection_path == CLUSTER else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What lasts first, the others in the order of the folders."""
    items.sort(key=lambda item: not item.path.name.endswith(LASTING))


def pytest_collection_finish() -> None:
    """What is loaded stays until the end: whoever looks for garbage, the simulator after every crash, skips it."""
    garbage.relax_gc()


@pytest.fixture(scope="session")
def postgres_url() -> Iterator[str]:
    """The server's own database, shared by the whole session: leave nothing in it."""
    # Without fsync a committed row still survives kill -9 of the server (the kernel has it); only power loss is not
    # covered, and no test here cuts the power.
    with throwaway_postgres({"fsync": "off"}) as postgres:
        yield postgres.url


@pytest.fixture
def fresh_postgres(postgres_url: str) -> Iterator[str]:
    """A database of the test's own, empty, dropped afterwards with whoever is still connected."""
    yield from _database(postgres_url)


@pytest.fixture(scope="session")
def bare_postgres(postgres_url: str) -> Iterator[Shared]:
    """A database with nothing but our schema, to be put back whenever it is asked for."""
    with asyncio.Runner() as runner:
        yield Shared(postgres_url, "bare", runner)


@pytest.fixture
def empty_postgres(bare_postgres: Shared) -> str:
    """The same, put back: for a test that alters neither the schema nor the database's settings."""
    return bare_postgres.as_good_as_new()


@pytest.fixture(scope="module")
def module_postgres(postgres_url: str) -> Iterator[str]:
    """The same for all tests of a module."""
    yield from _database(postgres_url)


def _database(postgres_url: str) -> Iterator[str]:
    name = f"test_{next(_numbers)}"
    asyncio.run(_execute(postgres_url, f"CREATE DATABASE {name}"))
    yield urlunsplit(urlsplit(postgres_url)._replace(path=f"/{name}"))
    asyncio.run(_execute(postgres_url, f"DROP DATABASE {name} WITH (FORCE)"))


async def _execute(url: str, statement: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
