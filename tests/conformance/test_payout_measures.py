"""Numbers of payouts for metrics: what they count, and that history costs nothing."""

from __future__ import annotations

import contextlib
import sqlite3

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_audit import behind_our_back
from tests.conformance.test_payout_views import in_every_state, plan_with_history
from tests.till import Town, till

from bursar.flows.payouts.measures import measured
from bursar.store.sql import statements

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@scenario
async def test_payouts_are_counted_by_status_and_measured_by_chain(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        jobs = await in_every_state(t)
        found = await measured(t.engine.store)
        assert found.open == {"pending": 3, "processing": 3, "confirming": 2}, "the sweep too"
        confirmed, failed = found.ended["bsc", "confirmed"], found.ended["bsc", "failed"]
        assert (confirmed.count, confirmed.retried, failed.count, failed.retried) == (1, 0, 2, 1)
        assert (found.chains, found.retry_ratio("bsc")) == (["bsc"], 1 / 3), "one was refused until it failed"
        record = await t.record(jobs["confirmed"])
        sent_us = t.engine.store.ports.now_us() - record.created_us
        assert confirmed.gas_each == 21_000 and 0 <= confirmed.confirmation_s <= sent_us / 1e6
        assert (failed.sent, failed.with_gas) == (0, 0), "nothing of those was ever sent"


@scenario
async def test_what_ended_more_than_an_hour_ago_is_not_measured(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        await in_every_state(t)
        ago = "now() - interval '61 minutes'" if place.engine == "postgres" else "since - 3660000000"
        await behind_our_back(place, f"UPDATE {{s}}records SET since = {ago} WHERE state IN ('confirmed', 'pending')")
        found = await measured(t.engine.store)
        assert found.ended.keys() == {("bsc", "failed")} and found.confirmed("bsc") is None
        assert found.open["pending"] == 3, "what is open counts, however old"


@scenario
@pytest.mark.parametrize(
    ("name", "index"), [("payouts_open", "records_payout_status"), ("payouts_ended", "records_payout_ended")]
)
async def test_measures_are_read_along_indexes(own_place: Place, name: str, index: str) -> None:
    async with till(own_place, Town(name="bsc")) as t:
        await in_every_state(t)
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
