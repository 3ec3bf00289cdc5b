"""The peer that a team would use instead: the same two steps as a DBOS workflow.

A workflow of two steps: the ledger's end is the statement that `transfers_plain` uses (idempotent, one transaction),
the core's end the same call by the same client. DBOS writes the workflow's status and each step's output into its own
tables of the same PostgreSQL, which is what makes it durable. In process, or as a server of one route:

    python -m bursar.bench.transfers_dbos DATABASE CORE
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import uvicorn
from dbos import DBOS, DBOSConfig, SetWorkflowID
from litestar import Litestar, post

from bursar.bench.transfers_load import AMOUNT, ASSET, CORE, SECRET, Job
from bursar.bench.transfers_plain import CREDIT, DEBIT, POOL, prepare, sure
from bursar.ports import SystemPorts
from bursar.rails.trading import TradingClient


class _Reach:
    """What the steps use. DBOS finds workflows by name, in one registry per process, so they are functions."""

    pool: asyncpg.Pool
    core: TradingClient


@DBOS.step()
async def _take(req_id: str, user: int, inward: bool) -> None:
    if inward:
        await _Reach.pool.execute(DEBIT, req_id, user, ASSET, AMOUNT)
    else:
        sure((await _Reach.core.withdraw(req_id, user, ASSET, AMOUNT)).outcome)


@DBOS.step()
async def _give(req_id: str, user: int, inward: bool) -> None:
    if inward:
        sure((await _Reach.core.deposit(req_id, user, ASSET, AMOUNT)).outcome)
    else:
        await _Reach.pool.execute(CREDIT, req_id, user, ASSET, AMOUNT)


@DBOS.workflow()
async def _transfer(req_id: str, user: int, inward: bool) -> str:
    await _take(req_id, user, inward)
    await _give(req_id, user, inward)
    return "COMMITTED"


async def transfer(job: Job) -> None:
    """One transfer, to its end."""
    with SetWorkflowID(job[0]):
        await _transfer(*job)


@contextlib.asynccontextmanager
async def launched(address: str, core: TradingClient) -> AsyncIterator[None]:
    """DBOS on a database, with balances in it."""
    _Reach.pool = await asyncpg.create_pool(address, min_size=POOL, max_size=POOL)
    _Reach.core = core
    await prepare(_Reach.pool)
    config = DBOSConfig(
        name="bench", system_database_url=address, sys_db_pool_size=POOL, log_level="ERROR", run_migrations=True
    )
    DBOS(config=config)
    DBOS.launch()
    try:
        yield
    finally:
        DBOS.destroy()
        await _Reach.pool.close()


def main() -> None:
    """A server of one route, on the web server that `bursar serve` uses."""
    address, core_address = sys.argv[1:]
    client = TradingClient(SystemPorts(), core_address, name=CORE, secret=SECRET)

    @post("/transfer", status_code=200)
    async def create(data: dict[str, Any]) -> dict[str, str]:
        await transfer((data["req_id"], data["user"], data["inward"]))
        return {"req_id": data["req_id"], "state": "COMMITTED"}

    @contextlib.asynccontextmanager
    async def life(_app: Litestar) -> AsyncIterator[None]:
        async with client, launched(address, client):
            yield

    logging.disable(logging.WARNING)
    app = Litestar([create], lifespan=[life])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", access_log=False))

    async def serve() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():  # uvicorn sends no notice  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        if server.started:
            print(server.servers[0].sockets[0].getsockname()[1], flush=True)
        await task

    asyncio.run(serve())


if __name__ == "__main__":
    main()
