"""Databases for the API's tests: an empty SQLite file; or, where a test asks for `either`, PostgreSQL too.

`served` is the API on a real socket, for fuzzers; payouts are configured, on a simulated chain.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.api.office import ALICE, Office, office, until
from tests.evm_town import ASSETS, CHAIN, DEPOSIT_RULES, POLICY_OF_WITHDRAWALS, WALLET, Town, evm_town
from tests.shared import folder_in_memory
from tests.signing import public_half

from bursar.cli.http_server import Server
from bursar.documents import DocumentKind
from bursar.flows.deposits import DEPOSITS
from bursar.flows.deposits.scanning import SCANS, Scan
from bursar.flows.payouts.documents import ASSET as ASSET_KIND
from bursar.flows.payouts.documents import CHAIN as CHAIN_KIND
from bursar.flows.payouts.documents import WALLET as WALLET_KIND
from bursar.flows.withdrawals.policy import APPROVER, POLICY


@pytest.fixture
def tmp_path(tmp_path: Path) -> Iterator[Path]:
    yield from folder_in_memory(tmp_path)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/bursar.db"


@pytest.fixture(params=["sqlite", "postgres"])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "postgres":
        return str(request.getfixturevalue("fresh_postgres"))
    return f"sqlite:///{tmp_path}/bursar.db"


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def served(request: pytest.FixtureRequest) -> str:
    """The API on a socket, with a user who has some money."""
    return str(request.getfixturevalue(f"served_by_{request.param}"))


@pytest.fixture(scope="module")
def served_by_sqlite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("fuzz")
    with _serving(f"sqlite:///{folder}/bursar.db", folder) as address:
        yield address


@pytest.fixture(scope="module")
def served_by_postgres(tmp_path_factory: pytest.TempPathFactory, module_postgres: str) -> Iterator[str]:
    with _serving(module_postgres, tmp_path_factory.mktemp("fuzz")) as address:
        yield address


async def _furnish(here: Office) -> None:
    """What payouts and withdrawals need, so that requests get further than to a document that is missing."""
    await here.runtime.bursar.ledger.create_asset("SIM", 18)
    wanted: list[tuple[DocumentKind[Any], str, dict[str, Any]]] = [
        (CHAIN_KIND, "sim", CHAIN),
        *((ASSET_KIND, name, body) for name, body in ASSETS.items()),
        (WALLET_KIND, "hot", WALLET),
        (POLICY, "usdt:sim", POLICY_OF_WITHDRAWALS),
        (DEPOSITS, "sim", DEPOSIT_RULES),
        (APPROVER, "approver", {"public_key": public_half("ann")}),
    ]
    documents = here.runtime.documents
    for kind, name, body in wanted:
        made = await documents.put(kind, name, body, base=0, author="ann", reason="test")
        await documents.approve(kind, name, made.hash, actor="ben", reason="test")

    async def scanned() -> bool:  # addresses for deposits are given out from then on
        scan = await here.runtime.engine.get(SCANS.name, "sim")
        return scan is not None and msgspec.json.decode(scan.body, type=Scan).block >= 0

    await until(scanned)


@contextlib.contextmanager
def _serving(url: str, folder: Path) -> Iterator[str]:
    """It is run by a thread of its own."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    ready, stop = threading.Event(), threading.Event()

    async def serve(town: Town) -> None:
        async with office(url, folder, deposit_confirm_above={"USDT": 10**9}, **town.settings) as here:
            await here.fund(ALICE, "100")
            await _furnish(here)
            server = Server(here.app, here.runtime.config, 100)
            task = asyncio.create_task(server.serve(sockets=[listener]))
            ready.set()
            while not stop.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.02)
            server.should_exit = True
            await task

    with evm_town(folder) as town:
        thread = threading.Thread(target=lambda: asyncio.run(serve(town)))
        thread.start()
        assert ready.wait(30)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        stop.set()
        thread.join()
