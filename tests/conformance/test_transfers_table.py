"""`transfers_tb` of specification 000 §7.1 as a view, with the query of §6.2 as written there; and as another view
`trading.transfers` of specification 001 §11."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, exchange

from bursar.flows.transfers import MACHINE, AccountType
from bursar.model.machine import Kind
from bursar.model.outcome import Outcome
from bursar.writer import Change, Move, NewTransition

RECOVERY = """
SELECT * FROM transfers_tb
WHERE state IN (0, 10, 20, 30, -20) -- INIT, SOURCE_PENDING, SOURCE_DONE, TARGET_PENDING, COMPENSATING
  AND updated_at < NOW() - INTERVAL '1 minute'; -- Stale threshold
"""


@pytest.mark.parametrize("mode", ["postgres"], indirect=True)
@scenario
async def test_the_recovery_query_of_the_specification_runs_as_written(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        view = await here.move(FUNDING, SPOT, "10", client_order_id="mine")
        connection = await asyncpg.connect(place.url, server_settings={"search_path": "bursar"})
        try:
            assert await connection.fetch(RECOVERY) == []
            row = await connection.fetchrow("SELECT * FROM transfers_tb WHERE req_id = $1", view.req_id)
            assert row is not None
            kinds = (row["transfer_type"], row["source_type"], row["target_type"])
            assert (row["transfer_id"], row["user_id"], row["amount"], row["state"]) == (
                view.transfer_id,
                ALICE,
                10_000_000,
                40,
            )
            assert (kinds, row["client_order_id"], row["retry_count"]) == ((1, 1, 2), "mine", 0)
            for state in MACHINE.states:  # each has the specification's number, and the stale and open ones are found
                sql = "UPDATE records SET state = $1, updated_at = now() - interval '2 minutes' WHERE id = $2"
                await connection.execute(sql, state.name, view.req_id)
                code = await connection.fetchval("SELECT state FROM transfers_tb WHERE req_id = $1", view.req_id)
                assert code == state.code
                assert len(await connection.fetch(RECOVERY)) == (state.kind is not Kind.TERMINAL)
        finally:
            await connection.close()


async def rows(place: Place, sql: str) -> list[tuple[Any, ...]]:
    if place.engine == "postgres":
        connection = await asyncpg.connect(place.url, server_settings={"search_path": "bursar"})
        try:
            return [tuple(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()
    with contextlib.closing(sqlite3.connect(place.path)) as file:
        return file.execute(sql.replace("trading.transfers", "trading_transfers")).fetchall()


BOTH = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@BOTH
@scenario
async def test_the_table_of_specification_001_is_a_view(place: Place, tmp_path: Path) -> None:
    """Its columns, in its words, and why a transfer went back; and the condition of its index as written there."""
    async with exchange(place, tmp_path) as here:
        there = await here.move(FUNDING, SPOT, "10")
        here.break_rail(AccountType.FUNDING, "deposit", Outcome.EXPLICIT_FAIL)
        back = await here.move(SPOT, FUNDING, "4")
        asset = (await here.bursar.ledger.assets())["USDT"].id
        names = "req_id, source, target, user_id, asset_id, amount, state, error, retry_count"
        found = await rows(place, f"SELECT {names} FROM trading.transfers ORDER BY created_at, req_id")
        assert found == [
            (there.req_id, "funding", "trading", ALICE, asset, 10_000_000, "committed", None, 0),
            (back.req_id, "trading", "funding", ALICE, asset, 4_000_000, "rolled_back", "ACCOUNT_FROZEN", 0),
        ]
        times = await rows(place, "SELECT created_at, updated_at FROM trading.transfers ORDER BY created_at")
        shown = await here.transfers.get(ALICE, there.req_id)
        assert times[0] == (shown.created_us // 1000, shown.updated_us // 1000)
        assert all(isinstance(at, int) and at <= to for at, to in times)
        still = "state NOT IN ('committed', 'rolled_back', 'failed')"
        assert await rows(place, f"SELECT req_id FROM trading.transfers WHERE {still}") == []


@BOTH
@scenario
async def test_retries_count_over_the_whole_life(place: Place, tmp_path: Path) -> None:
    async with exchange(place, tmp_path) as here:
        here.break_rail(AccountType.FUNDING, "withdraw", Outcome.TIMEOUT, Outcome.UNKNOWN)
        here.break_rail(AccountType.SPOT, "deposit", Outcome.NETWORK_ERROR, Outcome.EXPLICIT_FAIL)
        here.break_rail(AccountType.FUNDING, "refund", Outcome.EXPLICIT_FAIL, Outcome.PENDING)
        view = await here.move(FUNDING, SPOT, "10")
        await here.until(view, "ROLLED_BACK")
        for table in ("transfers_tb", "trading.transfers"):
            assert await rows(place, f"SELECT retry_count FROM {table}") == [(5,)]


@BOTH
@scenario
async def test_amounts_are_numbers_as_far_as_the_store_has_them(place: Place, tmp_path: Path) -> None:
    """On SQLite integers up to 2^63 - 1, and text above: they are summed and compared as numbers."""
    async with exchange(place, tmp_path) as here:
        amounts = [9, 10, 2**63 - 1, 2**63, 10**19, 2**64 - 1]
        asset = (await here.bursar.ledger.assets())["USDT"].id
        moves = []
        for place_, minor in enumerate(amounts):
            body = {"user": ALICE, "source": FUNDING, "target": SPOT, "asset": "USDT", "asset_id": asset}
            text = msgspec.json.encode(body | {"amount": str(minor)}).decode()
            transition = NewTransition("", "CREATED", "FAILED")
            moves.append(
                Move(
                    flow="transfers",
                    id=f"sr-{place_}",
                    version=0,
                    transitions=(transition,),
                    actor="test",
                    delay_us=None,
                    body=text,
                )
            )
        await here.bursar.ledger.writer.apply(Change(moves=tuple(moves)))
        for table in ("transfers_tb", "trading.transfers"):
            found = [amount for (amount,) in await rows(place, f"SELECT amount FROM {table} ORDER BY req_id")]
            assert [int(amount) for amount in found] == amounts
            if place.engine == "sqlite":
                assert [type(amount) for amount in found] == [int] * 3 + [str] * 3
                assert await rows(place, f"SELECT max(amount) FROM {table} WHERE typeof(amount) = 'integer'") == [
                    (2**63 - 1,)
                ]
