"""`transfers_tb`, specification 000 §7.1: the table as a view, and the query of §6.2 as it is written there."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import ALICE, FUNDING, SPOT, exchange

from bursar.flows.transfers import MACHINE
from bursar.model.machine import Kind

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
