"""The three modes that every test here runs in, each on a database as good as new.

For SQLite a test gets a copy of a file. On PostgreSQL all tests share two databases, one bare and one furnished, which
are put back into their first state before each; a test that alters the schema asks for `own_place` instead.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.builders import LedgerAt, Place, StoreAt
from tests.shared import Shared, folder_in_memory, make

MODES = ("sqlite", "split", "postgres")


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    yield from folder_in_memory(tmp_path)


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A furnished database in each mode."""
    if mode == "postgres":
        return Place(mode, request.getfixturevalue("furnished_postgres").as_good_as_new())
    shutil.copyfile(request.getfixturevalue("furnished_file"), tmp_path / "funds.db")
    return Place(mode, f"sqlite:///{tmp_path}/funds.db")


@pytest.fixture
def bare_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A database with nothing but our schema, in each mode (for SQLite not even that: opening it makes it)."""
    if mode == "postgres":
        return Place(mode, request.getfixturevalue("bare_postgres").as_good_as_new())
    return Place(mode, f"sqlite:///{tmp_path}/funds.db")


@pytest.fixture
def own_place(mode: str, tmp_path: Path, request: pytest.FixtureRequest) -> Place:
    """A furnished database that is nobody else's, so that even its schema may be altered."""
    url = request.getfixturevalue("fresh_postgres") if mode == "postgres" else f"sqlite:///{tmp_path}/own.db"
    asyncio.run(make(url, furnished=True))
    return Place(mode, url)


@pytest.fixture
def ledger(place: Place) -> LedgerAt:
    """A furnished ledger; `scenario` opens it, and checks its books when the test is over."""
    return LedgerAt(place)


@pytest.fixture
def store(bare_place: Place) -> StoreAt:
    """A bare store; `scenario` opens it."""
    return StoreAt(bare_place)


@pytest.fixture(scope="session")
def furnished_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("furnished") / "funds.db"
    asyncio.run(make(f"sqlite:///{path}", furnished=True))
    return path


@pytest.fixture(scope="session")
def furnished_postgres(postgres_url: str) -> Iterator[Shared]:
    with asyncio.Runner() as runner:
        yield Shared(postgres_url, "furnished", runner)
