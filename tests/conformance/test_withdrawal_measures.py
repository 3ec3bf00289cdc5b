"""Numbers of withdrawals for metrics: what they count, and that history costs nothing."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_payout_views import plan_with_history
from tests.conformance.test_withdrawal_views import in_every_status
from tests.till import Town
from tests.withdrawing import counter

from bursar.flows.withdrawals.measures import MANDATE, PEOPLE, measured
from bursar.store.sql import statements

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@scenario
async def test_withdrawals_are_counted_by_status_and_measured_by_chain(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        await in_every_status(c)
        people = (await c.request("20", key="people", user=2)).id
        await c.until(people, "waiting")
        await c.approve(people, "ann")
        await c.paid(people)
        found = await measured(c.till.engine.store)
        assert found.open == {"pending": 1, "approved": 1, "queued": 2}
        assert found.ended == {
            ("bsc", "completed"): 2,
            ("bsc", "failed"): 1,
            ("bsc", "rejected"): 1,
            ("bsc", "cancelled"): 1,
        }
        assert (found.chains, found.completion_ratio("bsc")) == (["bsc"], 2 / 5)
        assert (found.approved[MANDATE].count, found.approved[PEOPLE].count) == (2, 1), "what was refused is in neither"
        record = await c.record(people)
        assert 0 <= found.approved[PEOPLE].seconds <= (c.till.engine.ports.now_us() - record.created_us) / 1e6


@scenario
async def test_what_ended_more_than_an_hour_ago_is_not_measured(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        await in_every_status(c)
        ago = "now() - interval '61 minutes'" if place.engine == "postgres" else "since - 3660000000"
        await behind_our_back(place, f"UPDATE {{s}}records SET since = {ago} WHERE state IN ('completed', 'waiting')")
        found = await measured(c.till.engine.store)
        assert found.ended.keys() == {("bsc", "failed"), ("bsc", "rejected"), ("bsc", "cancelled")}
        assert found.completion_ratio("bsc") == 0 and found.open["pending"] == 1, "what is open counts, however old"


@scenario
@pytest.mark.parametrize(
    ("name", "index"),
    [("withdrawals_open", "records_withdrawal_status"), ("withdrawals_ended", "records_withdrawal_ended")],
)
async def test_measures_are_read_along_indexes(own_place: Place, name: str, index: str) -> None:
    async with counter(own_place, Town(name="bsc")) as c:
        await in_every_status(c)
        sql = statements(own_place.engine)[name]
        if own_place.engine == "postgres":
            text = (
                sql.replace("$1::bigint", "3600000000").replace("$1::text[]", "'{pending}'::text[]").replace("$2", "9")
            )
            plan = await plan_with_history(own_place, text)
            assert f"using {index}" in plan or f"on {index}" in plan, plan
            assert "Seq Scan" not in plan, plan
            return
        with contextlib.closing(sqlite3.connect(own_place.path)) as file:
            text = sql.replace("now_us()", "0").replace("?1", "1").replace("?2", "9").replace("(?)", "('[1]')")
            plan = str(file.execute(f"EXPLAIN QUERY PLAN {text}").fetchall())
            assert f"INDEX {index}" in plan, plan
