"""What is there in the end: the database by SQL of our own, the cores by their query, and then the product's audit."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import asyncpg

from bursar.audit import Finding, audit
from bursar.config import Config
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.transfers.conservation import conservation
from bursar.instance import Bursar
from bursar.model.errors import BursarError
from bursar.model.outcome import Outcome
from bursar.ports import SystemPorts
from bursar.runtime import opened
from bursar.testbed.promises import ENDS, FUNDING, Found, Place, Row

ACCOUNTS = {1: "FUNDING", 2: "SPOT", 3: "FUTURE", 4: "MARGIN"}
STATES = {
    0: "INIT",
    10: "SOURCE_PENDING",
    20: "SOURCE_DONE",
    30: "TARGET_PENDING",
    40: "COMMITTED",
    -10: "FAILED",
    -20: "COMPENSATING",
    -30: "ROLLED_BACK",
}
AMOUNT_OFFSET = 2**127  # a SQLite amount is 16 bytes that sort as the numbers do
# Alerts that must never be raised here, whatever dies; others only say that something takes long.
ALARMING = ("contradiction", "booking refused", "can't be driven", "needs people", "disputed")
ASK_S = 30.0
AGAIN_S = 0.05

# Not through the store: the system under test does not report on itself.
TRANSFERS = """SELECT client_order_id, user_id, req_id, source_type, target_type, code, amount, state
    FROM {schema}transfers_tb JOIN {schema}assets ON assets.id = asset_id"""
UNSPENT = """SELECT path, code, amount FROM {schema}postings
    JOIN (SELECT DISTINCT id, path FROM {schema}accounts) AS named ON named.id = postings.account
    JOIN {schema}assets ON assets.id = postings.asset
    WHERE path LIKE 'user:%:funding' AND NOT EXISTS (SELECT 1 FROM {schema}spends WHERE posting = postings.id)"""
STOPPED = "SELECT name, reason FROM {schema}pauses"
ALERTS = "SELECT reason, message FROM {schema}alerts"


def select(config: Config, *statements: str) -> list[list[tuple[Any, ...]]]:
    """The rows of some statements, by a connection of our own."""
    if config.is_embedded:
        connection = sqlite3.connect(config.database_url.removeprefix("sqlite:///"))
        try:
            return [connection.execute(text.format(schema="")).fetchall() for text in statements]
        finally:
            connection.close()
    return asyncio.run(_select(config.database_url, statements))


async def _select(url: str, statements: tuple[str, ...]) -> list[list[tuple[Any, ...]]]:
    connection = await asyncpg.connect(url)
    try:
        return [[tuple(row) for row in await connection.fetch(text.format(schema="bursar."))] for text in statements]
    finally:
        await connection.close()


def open_transfers(config: Config) -> int:
    """How many transfers have not ended."""
    [rows] = select(config, TRANSFERS)
    return sum(STATES[row[7]] not in ENDS for row in rows)


def look(config: Config, users: range) -> Found:
    """Everything that is checked."""
    transfers, unspent, stopped, alerts = select(config, TRANSFERS, UNSPENT, STOPPED, ALERTS)
    balances: Counter[Place] = Counter()
    for path, code, amount in unspent:
        balances[int(path.split(":")[1]), FUNDING, code] += minor_of(amount)
    balances.update(asyncio.run(in_cores(config, users)))
    return Found(
        rows=[
            Row(order or "", user, req_id, ACCOUNTS[source], ACCOUNTS[target], code, int(amount), STATES[state])
            for order, user, req_id, source, target, code, amount, state in transfers
        ],
        balances=dict(balances),
        paused=[f"{name}: {reason}" for name, reason in stopped],
        alarms=[f"{reason}: {text}" for reason, text in alerts if reason in ALARMING or reason.endswith("is broken")],
    )


def minor_of(amount: Any) -> int:
    """A stored amount as a number."""
    return int.from_bytes(amount, "big") - AMOUNT_OFFSET if isinstance(amount, bytes) else int(amount)


async def in_cores(config: Config, users: range) -> Counter[Place]:
    """What each user has in each core, frozen money too."""
    found: Counter[Place] = Counter()
    async with opened(config, SystemPorts(), "judge") as runtime:
        for kind, client in runtime.cores.items():
            for user in users:
                reply = await _answered(partial(client.balances, user))
                for asset, balance in reply.balances.items():
                    found[user, kind.value, asset] += balance.available + balance.frozen
    return found


async def audited(config: Config) -> list[Finding]:
    """The product's own audit, I5 of every core and I9 of wallets included."""
    async with opened(config, SystemPorts(), "judge") as runtime:
        findings = await audit(runtime.bursar.store, more=CHECKS)
        if runtime.payouts is not None:
            findings.append(await wallets_cover(runtime.bursar.store, runtime.payouts.chains))
        for kind, client in runtime.cores.items():
            await _answered(client.totals)
            findings.append(await conservation(runtime.transfers, kind, client))
    return findings


async def _answered(ask: Callable[[], Awaitable[Any]]) -> Any:
    """Ask a core until it answers: the client may still be connecting."""
    async with asyncio.timeout(ASK_S):
        while (reply := await ask()).outcome is not Outcome.SUCCESS:  # noqa: ASYNC110
            await asyncio.sleep(AGAIN_S)
    return reply


async def create_assets(config: Config, assets: dict[str, int]) -> None:
    """The assets that are moved, with their precision."""
    async with Bursar(config.database_url) as b:
        for code, precision in assets.items():
            await b.ledger.create_asset(code, precision)


def trouble(error: BaseException) -> bool:
    """Whether the read failed because the database or a core is away."""
    return isinstance(error, BursarError | OSError | asyncpg.PostgresError | sqlite3.Error | TimeoutError)
