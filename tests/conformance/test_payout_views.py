"""The tables of specification 003, layer 2, as views: its queries as written there, and what they answer.

SQLite has no NOW() and no INTERVAL; there each query is the same with SQLite's clock.
"""

from __future__ import annotations

import contextlib
import sqlite3
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.builders import Place, scenario
from tests.till import CONTRACT, Till, Town, till, wallet_account

from bursar.engine import Operators
from bursar.flows.payouts.documents import ASSET, WALLET, AssetDocument, Role, WalletDocument, WalletStatus
from bursar.flows.payouts.machine import MACHINE, STATUS
from bursar.flows.payouts.payout import REFUSALS_MAX
from bursar.writer import Change, Move, NewTransition

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}

# Specification 003, steps 3 to 5 and its monitoring, word for word.
HOT_WALLET = """
SELECT id FROM operation_wallet_addresses
WHERE chain_id = 'bsc'
  AND role = 'hot_wallet'
  AND status = 'active'
ORDER BY last_used_at ASC, balance_reserved ASC
LIMIT 1;
"""
NEXT_JOB = """
SELECT * FROM withdrawal_queue
WHERE status = 'pending'
  AND scheduled_at <= NOW()
  AND chain_id = 'bsc'
ORDER BY priority DESC, scheduled_at ASC
LIMIT 1;
"""
TO_CONFIRM = """
SELECT * FROM withdrawal_queue
WHERE status = 'confirming'
  AND tx_hash IS NOT NULL;
"""
ACTIVE = "SELECT COUNT(*) FROM withdrawal_queue WHERE status IN ('pending', 'processing', 'confirming');"
FAILED = """
SELECT id, withdrawal_request_id, error_message, retry_count
FROM withdrawal_queue
WHERE status = 'failed'
ORDER BY created_at DESC
LIMIT 10;
"""
STUCK = """
SELECT id, status, created_at, error_message
FROM withdrawal_queue
WHERE status = 'processing'
  AND created_at < NOW() - INTERVAL '5 minutes';
"""
ROUTES = """
SELECT aoc.id AS asset, owa.id AS wallet FROM (SELECT 'USDT' AS asset_id, 'bsc' AS chain_id) wr
JOIN asset_on_chain aoc ON aoc.asset_id = wr.asset_id AND aoc.chain_id = wr.chain_id
JOIN operation_wallet_addresses owa ON owa.chain_id = wr.chain_id AND owa.role = 'hot_wallet'
ORDER BY owa.id
"""
NOW = "CAST(strftime('%s', 'now') AS REAL) + 1"  # SQLite counts whole seconds
SQLITE = {
    "NOW() - INTERVAL '5 minutes'": f"{NOW} - 300",
    "NOW()": NOW,
    "column_name, data_type": "name AS column_name, type AS data_type",
    "WHERE table_name = ": "WHERE arg = ",
    "information_schema.columns": "pragma_table_info",
    "ORDER BY ordinal_position": "ORDER BY cid",
}


async def rows(place: Place, sql: str) -> list[dict[str, Any]]:
    """What a program with its own connection reads."""
    if place.engine == "postgres":
        connection = await asyncpg.connect(place.url, server_settings={"search_path": "bursar"})
        try:
            return [dict(row) for row in await connection.fetch(sql)]
        finally:
            await connection.close()
    with contextlib.closing(sqlite3.connect(place.path)) as file:
        file.row_factory = sqlite3.Row
        for written, ours in SQLITE.items():
            sql = sql.replace(written, ours)
        return [dict(row) for row in file.execute(sql)]


async def values(place: Place, sql: str) -> list[tuple[Any, ...]]:
    """The same without names, of which a query may have two alike."""
    if place.engine == "postgres":
        return [tuple(row.values()) for row in await rows(place, sql)]
    with contextlib.closing(sqlite3.connect(place.path)) as file:
        return file.execute(sql).fetchall()


async def pending(t: Till, key: str, **more: Any) -> str:
    """A payout that waits for a worker, and is due."""
    made = await t.request("1", key=key, **more)
    await Operators(t.engine).retry_now("payouts", made.id, actor="ann", reason="now")
    return made.id


@dataclass
class Jobs:
    """A payout in each state, by state; and others, by what they are."""

    ids: dict[str, str]

    def __getitem__(self, state: str) -> str:
        return self.ids[state]


async def in_every_state(t: Till) -> Jobs:
    """One payout in every state in which one can be at rest, and a sweep."""
    ids: dict[str, str] = {}
    town = t.town
    ids["confirmed"] = (await t.request("5", key="done")).id
    await t.until(ids["confirmed"], "confirming")
    town.chain.mine()
    await t.until(ids["confirmed"], "confirmed")
    town.chain.shy.add("@eve")
    ids["disputed"] = (await t.request("2", key="disputed", to="@eve")).id
    await t.until(ids["disputed"], "confirming")
    town.chain.mine()
    await t.until(ids["disputed"], "disputed")
    for state in ("processing", "signing", "sending", "confirming"):
        ids[state] = (await t.request("3", key=state)).id
        await t.until(ids[state], state)
    town.chain.reverts.add("@mallory")
    ids["failed"] = (await t.request("1", key="refused", to="@mallory")).id
    await t.until(ids["failed"], "failed")
    ids["cancelled"] = (await t.request("1", key="cancelled")).id
    await t.payouts.cancel(ids["cancelled"], **WHY)
    await t.until(ids["cancelled"], "failed")
    ids["low"] = await pending(t, "low", priority="low")
    ids["pending"] = await pending(t, "normal")
    into = wallet_account(town.name, "hot2")
    ids["sweep"] = await pending(t, "sweep", to="@hot2", wallet="hot1", priority="high", account=into)
    return Jobs(ids)


@scenario
async def test_worker_queries_of_the_specification_answer_as_written(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        jobs = await in_every_state(t)
        (job,) = await rows(place, NEXT_JOB)
        assert job["id"] == jobs["pending"], "low comes later, and a sweep is no withdrawal"
        urgent = await pending(t, "urgent", priority="high")
        (job,) = await rows(place, NEXT_JOB)
        assert job["id"] == urgent, "the newest, but the most urgent"
        await t.step(urgent)  # it leaves pending, or waits for room until later
        assert [row["id"] for row in await rows(place, NEXT_JOB)] == [jobs["pending"]]
        confirming = {row["id"]: row["tx_hash"] for row in await rows(place, TO_CONFIRM)}
        assert confirming.keys() == {jobs["confirming"], jobs["disputed"]}
        assert confirming[jobs["confirming"]] in t.town.chain.pool


@scenario
async def test_monitoring_queries_of_the_specification_answer_as_written(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        jobs = await in_every_state(t)
        (count,) = await rows(place, ACTIVE)
        assert list(count.values()) == [7], "two pending, three processing, two confirming; no sweep"
        failed = [tuple(row.values()) for row in await rows(place, FAILED)]
        assert [(id_, request, retries) for id_, request, _, retries in failed] == [
            (jobs["cancelled"], "test:cancelled", 1),
            (jobs["failed"], "test:refused", REFUSALS_MAX),
        ]
        assert "because" in failed[0][2] and "blacklisted" in failed[1][2]
        assert await rows(place, STUCK) == []
        await aged(place, jobs["signing"], jobs["pending"])
        (stuck,) = await rows(place, STUCK)
        assert (stuck["id"], stuck["status"], stuck["error_message"]) == (jobs["signing"], "processing", None)


async def executed(place: Place, sql: str) -> None:
    """What a program with its own connection does."""
    if place.engine == "postgres":
        await rows(place, sql)
    else:
        with contextlib.closing(sqlite3.connect(place.path)) as file, file:
            file.execute(sql)


async def aged(place: Place, *ids: str) -> None:
    """These were requested an hour ago."""
    for id_ in ids:
        then = "now() - interval '1 hour'" if place.engine == "postgres" else "created_at - 3600000000"
        await executed(place, f"UPDATE records SET created_at = {then} WHERE id = '{id_}'")


@scenario
async def test_wallet_query_takes_the_one_used_least_recently_and_never_used_first(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        assert [tuple(row.values()) for row in await rows(place, ROUTES)] == [
            ("usdt:bsc", "hot1"),
            ("usdt:bsc", "hot2"),
        ]
        made = await t.request("5")
        await t.until(made.id, "confirming")
        assert (await t.payouts.view(made.id)).wallet == "hot1"
        assert await rows(place, HOT_WALLET) == [{"id": "hot2"}], "it was never used"
        second = await t.request("1", key="k2")
        await t.until(second.id, "confirming")
        assert (await t.payouts.view(second.id)).wallet == "hot2"
        assert await rows(place, HOT_WALLET) == [{"id": "hot1"}]
        known = {row["id"]: row for row in await rows(place, "SELECT * FROM operation_wallet_addresses")}
        assert float(known["hot1"]["balance_reserved"]) == 5 + 21_000 * 10 / 10**18, "with the fee, in ETH"
        assert (known["hot1"]["address"], known["hot1"]["derivation_path"]) == ("@hot1", None)
        assert known["hot1"]["last_used_at"] < known["hot2"]["last_used_at"]
        await t.put(WALLET, "hot1", WalletDocument(chain="bsc", address="@hot1", status=WalletStatus.DRAINING))
        cold = WalletDocument(chain="bsc", address="@cold", role=Role.COLD, derivation_path="m/44'/60'/0'/0/7")
        await t.put(WALLET, "cold", cold)
        assert await rows(place, HOT_WALLET) == [{"id": "hot2"}]
        (found,) = await rows(place, "SELECT * FROM operation_wallet_addresses WHERE role = 'cold_wallet'")
        assert (found["id"], found["status"], found["derivation_path"]) == ("cold", "active", "m/44'/60'/0'/0/7")


@scenario
async def test_assets_on_chains_are_the_newest_versions_that_are_not_retired(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        await t.put(
            ASSET,
            "usdt:bsc",
            AssetDocument(asset="USDT", chain="bsc", contract=CONTRACT, decimals=6, minimum="5", active=False),
        )
        eth, usdt = await rows(place, "SELECT * FROM asset_on_chain ORDER BY id")
        names = ("id", "asset_id", "chain_id", "contract", "decimals", "gas_limit_max")
        assert [usdt[name] for name in names] == ["usdt:bsc", "USDT", "bsc", CONTRACT, 6, 200_000]
        assert (int(usdt["minimum"]), bool(usdt["active"])) == (5, False)
        assert (eth["id"], eth["contract"], eth["decimals"], bool(eth["active"])) == ("eth:bsc", None, 18, True)
        head = await t.documents.current(ASSET, "eth:bsc", fresh=True)
        assert head is not None
        proposal = await t.documents.retire(ASSET, "eth:bsc", base=head.document.version, author="ann", reason="test")
        await t.documents.approve(ASSET, "eth:bsc", proposal.hash, actor="ben", reason="test")
        assert [row["id"] for row in await rows(place, "SELECT id FROM asset_on_chain")] == ["usdt:bsc"]


@scenario
async def test_queue_has_the_columns_of_the_specification(place: Place) -> None:
    async with till(place, Town(name="bsc")) as t:
        jobs = await in_every_state(t)
        queue = {row["id"]: row for row in await rows(place, "SELECT * FROM withdrawal_queue")}
        assert queue.keys() == set(jobs.ids.values()) - {jobs["sweep"]}
        done, view = queue[jobs["confirmed"]], await t.payouts.view(jobs["confirmed"])
        assert (done["withdrawal_request_id"], done["chain_id"], done["asset_on_chain_id"]) == (
            "test:done",
            "bsc",
            "usdt:bsc",
        )
        assert (done["operation_wallet_address_id"], done["to_address"]) == ("hot1", "@bob")
        assert (done["amount_raw"], done["amount_human"]) == ("5000000", Decimal(5))
        assert (done["tx_hash"], done["gas_used"], done["gas_price"]) == (view.tx_hash, "21000", "10")
        assert (done["status"], done["retry_count"], done["max_retries"]) == ("confirmed", 1, REFUSALS_MAX)
        assert done["created_at"] <= done["processed_at"] == done["scheduled_at"]
        new = queue[jobs["pending"]]
        names = ("operation_wallet_address_id", "tx_hash", "gas_used", "gas_price", "error_message", "processed_at")
        assert [new[name] for name in names] == [None] * 6 and new["retry_count"] == 0
        for state in MACHINE.states:
            if state.name in jobs.ids:
                assert queue[jobs[state.name]]["status"] == STATUS[state.name]
        for id_, row in queue.items():
            assert row["tx_hash"] == ((await t.payouts.view(id_)).tx_hash or None)


@scenario
async def test_every_state_has_its_status(place: Place) -> None:
    """Also those in which a payout is never at rest."""
    async with till(place, Town(name="bsc")) as t:
        made = await t.request("1")
        for state in MACHINE.states:
            await executed(place, f"UPDATE records SET state = '{state.name}' WHERE id = '{made.id}'")
            assert await rows(place, "SELECT status FROM withdrawal_queue") == [{"status": STATUS[state.name]}]


@scenario
async def test_attempts_after_a_death_are_claims(place: Place) -> None:
    town = Town(name="bsc")
    async with till(place, town) as t:
        town.chain.failing.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.step(made.id)
        assert await rows(place, "SELECT status, retry_count FROM withdrawal_queue") == [
            {"status": "pending", "retry_count": 1}
        ]
        await t.until(made.id, "processing")
        assert await rows(place, "SELECT retry_count FROM withdrawal_queue") == [{"retry_count": 2}]


@scenario
async def test_amounts_are_exact_with_as_many_decimals_as_a_chain_has(place: Place) -> None:
    """On SQLite they are numbers as far as those are exact, and text above."""
    cases = {
        ("123", 0): "123",
        ("5000000", 6): "5",
        ("1", 18): "0.000000000000000001",
        ("100000000000000000001", 18): "100.000000000000000001",
        ("1234567890123456789", 36): "0.000000000000000001234567890123456789",
        ("340282366920938463463374607431768211455", 18): "340282366920938463463.374607431768211455",
        ("12345678901234567890", 0): "12345678901234567890",
    }
    async with till(place, Town(name="bsc")) as t:
        body = msgspec.json.decode((await t.record((await t.request("1")).id)).body)
        moves = []
        for number, (raw, decimals) in enumerate(cases):
            body["payment"] |= {"amount_raw": raw, "decimals": decimals}
            text = msgspec.json.encode(body).decode()
            transition = NewTransition("", "CREATED", "failed")
            moves.append(
                Move(
                    flow="payouts",
                    id=f"po-{number}",
                    version=0,
                    transitions=(transition,),
                    actor="test",
                    delay_us=None,
                    body=text,
                )
            )
        await t.ledger.writer.apply(Change(moves=tuple(moves)))
        found = await rows(
            place, "SELECT amount_raw, amount_human FROM withdrawal_queue WHERE status = 'failed' ORDER BY id"
        )
        assert [row["amount_raw"] for row in found] == [raw for raw, _ in cases]
        shown = [row["amount_human"] for row in found]
        assert [Decimal(str(amount)) for amount in shown] == [Decimal(text) for text in cases.values()]
        if place.engine == "sqlite":
            assert [type(amount) for amount in shown] == [int, int, float, str, str, str, str]


# --- what a query costs ----------------------------------------------------------------------------------------------

HISTORY = """
INSERT INTO bursar.records (number, flow, id, owner, state, version, attempt, transit, worker, body, error,
    since, created_at)
SELECT 1000000 + i, 'payouts', 'old-' || i, 'alice', 'confirmed', 4, 0, 0, '', r.body, '', at, at
FROM (SELECT body FROM bursar.records WHERE state = 'confirmed' LIMIT 1) r, generate_series(1, 5000) AS i,
    LATERAL (SELECT now() - i * interval '10 minutes' AS at) a;
INSERT INTO bursar.records (number, flow, id, owner, state, version, attempt, transit, worker, body, error,
    since, created_at)
SELECT 2000000 + i, 'withdrawals', 'old-' || i, 'alice', 'completed', 4, 0, 0, '', '{}', '', at, at
FROM generate_series(1, 5000) AS i, LATERAL (SELECT now() - i * interval '10 minutes' AS at) a;
INSERT INTO bursar.transitions (record, version, source, event, target, attempt, actor, evidence)
SELECT 1000000 + i, v, 'pending', 'SUCCESS', 'processing', 0, '', '{}'
FROM generate_series(1, 5000) AS i, generate_series(1, 4) AS v;
ANALYZE;
"""


@scenario
async def test_worker_query_reads_the_payouts_in_its_status_and_no_table_from_end_to_end(own_place: Place) -> None:
    async with till(own_place, Town(name="bsc")) as t:
        await in_every_state(t)
        if own_place.engine == "postgres":
            plan = await plan_with_history(own_place, NEXT_JOB)
            assert "using records_payout_status" in plan or "on records_payout_status" in plan, plan
            assert "transitions_pkey" in plan and "Seq Scan" not in plan, plan
        else:
            plan = "\n".join(row["detail"] for row in await rows(own_place, f"EXPLAIN QUERY PLAN {NEXT_JOB}"))
            assert "SEARCH r USING INDEX records_payout_status" in plan
            assert "SEARCH t USING PRIMARY KEY (record=?)" in plan and "SCAN" not in plan


async def plan_with_history(place: Place, sql: str) -> str:
    """How PostgreSQL runs a query once five thousand payouts have ended, and it has statistics of them."""
    connection = await asyncpg.connect(place.url, server_settings={"search_path": "bursar"})
    try:
        await connection.execute(HISTORY)
        return "\n".join(row[0] for row in await connection.fetch(f"EXPLAIN {sql}"))
    finally:
        await connection.close()
