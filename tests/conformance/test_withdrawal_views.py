"""Specification 003 as a whole: every query of it as written there, over both layers; and the columns of layer 1.

What its layer 2 answers in detail is in `test_payout_views`, with the queries of its worker and its monitoring.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_payout_views import (
    ACTIVE,
    FAILED,
    HOT_WALLET,
    NEXT_JOB,
    STUCK,
    TO_CONFIRM,
    executed,
    plan_with_history,
    rows,
    values,
)
from tests.till import Town
from tests.withdrawing import Counter, counter

from bursar.engine import Operators
from bursar.flows.payouts.payout import REFUSALS_MAX
from bursar.flows.withdrawals.machine import MACHINE, STATUS
from bursar.flows.withdrawals.switches import of_user

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}

COLUMNS = ["id", "user_id", "amount", "to_address", "asset_id", "chain_id", "status", "queued_at", "final_tx_hash"]
COLUMNS += ["created_at", "updated_at", "memo"]

# Specification 003, its migration and its monitoring of layer 1, word for word.
PENDING = "SELECT COUNT(*) FROM withdrawal_requests WHERE status = 'pending';"
BACKUP = """
CREATE TABLE withdrawal_requests_backup AS
SELECT * FROM withdrawal_requests;
"""
REQUEST_COLUMNS = """
SELECT column_name, data_type
FROM information_schema.columns
WHERE table_name = 'withdrawal_requests'
ORDER BY ordinal_position;
"""
QUEUE_COLUMNS = """
SELECT column_name, data_type
FROM information_schema.columns
WHERE table_name = 'withdrawal_queue'
ORDER BY ordinal_position;
"""
TO_MIGRATE = """
SELECT
  wr.id,
  wr.chain_id,
  aoc.id,
  owa.id,
  wr.to_address,
  wr.amount_raw,
  wr.amount,
  'confirming',
  wr.tx_hash,
  wr.created_at
FROM withdrawal_requests_backup wr
JOIN asset_on_chain aoc ON aoc.asset_id = wr.asset_id AND aoc.chain_id = wr.chain_id
JOIN operation_wallet_addresses owa ON owa.chain_id = wr.chain_id AND owa.role = 'hot_wallet'
WHERE wr.tx_hash IS NOT NULL
  AND wr.status NOT IN ('completed', 'failed');
"""


@dataclass
class Asked:
    """A withdrawal in each status, by status; `confirming` is queued, and its payout was sent."""

    ids: dict[str, str]

    def __getitem__(self, status: str) -> str:
        return self.ids[status]


async def in_every_status(c: Counter) -> Asked:
    """Withdrawals of all three users in every status; two of them wait for a payout."""
    town, ids = c.till.town, dict[str, str]()
    ids["completed"] = (await c.request("5", key="done", memo="m1")).id
    await c.paid(ids["completed"])
    for status in ("failed", "confirming", "queued"):
        town.chain.reverts.add("@mallory")
        ids[status] = (await c.request("6", key=status, user=2, to="@mallory" if status == "failed" else "@bob")).id
        await c.until(ids[status], "queued")
    await c.till.until(await payout_of(c, ids["failed"]), "failed")
    await c.till.until(await payout_of(c, ids["confirming"]), "confirming")
    for status in ("rejected", "cancelled", "pending"):
        ids[status] = (await c.request("20", key=status, user=3, requester="cara" if status == "pending" else "")).id
        await c.until(ids[status], "waiting")
    await c.withdrawals.reject(ids["rejected"], actor="ann", reason="unknown sender")
    await c.until(ids["rejected"], "rejected")
    await c.withdrawals.cancel(ids["cancelled"], actor="3", user=3)
    await c.until(ids["cancelled"], "cancelled")
    ids["approved"] = (await c.request("20", key="approved")).id
    await c.until(ids["approved"], "waiting")
    await c.approve(ids["approved"], "ann")
    await c.withdrawals.pause(of_user(1), **WHY)
    await c.until(ids["approved"], "approved")
    return Asked(ids)


async def payout_of(c: Counter, id_: str) -> str:
    return (await c.withdrawals.view(id_)).payout


@scenario
async def test_every_query_of_the_specification_runs_as_written_over_both_layers(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        asked = await in_every_status(c)
        paid, sent = await payout_of(c, asked["completed"]), await payout_of(c, asked["confirming"])
        waiting = await payout_of(c, asked["queued"])
        await Operators(c.till.engine).retry_now("payouts", waiting, actor="ann", reason="now")
        assert await values(place, PENDING) == [(1,)]
        assert await values(place, ACTIVE) == [(2,)]
        (job,) = await rows(place, NEXT_JOB)
        assert (job["id"], job["withdrawal_request_id"]) == (waiting, asked["queued"])
        (confirming,) = await rows(place, TO_CONFIRM)
        assert (confirming["id"], confirming["withdrawal_request_id"]) == (sent, asked["confirming"])
        (failed,) = await rows(place, FAILED)
        assert (failed["withdrawal_request_id"], failed["retry_count"]) == (asked["failed"], REFUSALS_MAX)
        assert await rows(place, STUCK) == [] and len(await rows(place, HOT_WALLET)) == 1
        requests = [row["column_name"] for row in await rows(place, REQUEST_COLUMNS)]
        assert requests[: len(COLUMNS)] == COLUMNS
        queue = [row["column_name"] for row in await rows(place, QUEUE_COLUMNS)]
        assert queue[0:3] == ["id", "withdrawal_request_id", "chain_id"]
        await executed(place, BACKUP)
        assert await values(place, TO_MIGRATE) == [], "what is under way has no hash here: that is in the queue"
        await executed(place, f"UPDATE withdrawal_requests_backup SET tx_hash = '0xDEF' WHERE id = '{asked['queued']}'")
        found = await values(place, TO_MIGRATE.replace("aoc.id,\n  owa.id,", "aoc.id AS a,\n  owa.id AS o,"))
        assert [row[:6] for row in sorted(found, key=str)] == [
            (asked["queued"], "bsc", "usdt:bsc", wallet, "@bob", "6000000") for wallet in ("hot1", "hot2")
        ], "one row for each hot wallet, as the specification writes it: the import asks the chain which one it was"
        assert paid not in (sent, waiting)


@scenario
async def test_requests_have_the_columns_of_the_specification(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        asked = await in_every_status(c)
        found = {row["id"]: row for row in await rows(place, "SELECT * FROM withdrawal_requests")}
        assert {status: found[id_]["status"] for status, id_ in asked.ids.items()} == {
            **{status: status for status in asked.ids},
            "confirming": "queued",
        }
        done, view = found[asked["completed"]], await c.withdrawals.view(asked["completed"])
        names = ("user_id", "amount", "fee", "to_address", "asset_id", "chain_id", "memo", "amount_raw", "mandate")
        assert [done[name] for name in names] == ["1", 5, 1, "@bob", "USDT", "bsc", "m1", "5000000", "auto"]
        assert done["final_tx_hash"] == done["tx_hash"] == view.tx_hash and done["queue_id"] == view.payout
        assert done["created_at"] <= done["approved_at"] <= done["queued_at"] <= done["updated_at"] < done["expires_at"]
        waits = found[asked["pending"]]
        assert (waits["requester"], waits["approvals_missing"], as_list(waits["approvals"])) == ("cara", 1, [])
        assert as_list(waits["reasons"]) == [reason.code for reason in (await c.withdrawals.view(waits["id"])).reasons]
        empty = ("queued_at", "final_tx_hash", "tx_hash", "memo", "mandate", "approved_at", "queue_id", "reason")
        assert [waits[name] for name in empty] == [None] * 8
        ready = found[asked["approved"]]
        assert (as_list(ready["approvals"]), ready["approvals_missing"], ready["queued_at"]) == (["ann"], 0, None)
        assert ready["approved_at"] is not None
        assert found[asked["confirming"]]["final_tx_hash"] is None, "its hash is in the queue until it is final"
        assert found[asked["rejected"]]["reason"] == "unknown sender"
        assert "blacklisted" in found[asked["failed"]]["reason"]
        assert found[asked["cancelled"]]["reason"] == "its user cancelled it"
        assert {row["screening_verdict"] for row in found.values()} == {None}


def as_list(value: Any) -> list[str]:
    """A list as PostgreSQL gives it, or in JSON."""
    found: list[str] = msgspec.json.decode(value) if isinstance(value, str) else value
    return found


@scenario
async def test_every_state_of_a_withdrawal_has_its_status(place: Place) -> None:
    async with counter(place, Town(name="bsc")) as c:
        made = await c.request("5")
        for state in MACHINE.states:
            await executed(place, f"UPDATE records SET state = '{state.name}' WHERE id = '{made.id}'")
            assert await values(place, "SELECT status FROM withdrawal_requests") == [(STATUS[state.name],)]


@scenario
async def test_count_of_pending_withdrawals_reads_no_history(own_place: Place) -> None:
    async with counter(own_place, Town(name="bsc")) as c:
        await in_every_status(c)
        if own_place.engine == "postgres":
            plan = await plan_with_history(own_place, PENDING)
            assert "using records_withdrawal_status" in plan or "on records_withdrawal_status" in plan, plan
            assert "Seq Scan" not in plan, plan
        else:
            plan = "\n".join(row["detail"] for row in await rows(own_place, f"EXPLAIN QUERY PLAN {PENDING}"))
            assert "INDEX records_withdrawal_status" in plan and "SCAN" not in plan, plan
