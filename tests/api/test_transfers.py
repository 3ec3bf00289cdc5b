"""Transfers over HTTP: in the words of 000 and of 001, once per `client_order_id`, listed by filter and page.

A few run on PostgreSQL too; that all of it holds on both stores is the business of tests/conformance.
"""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE, BOB, TRANSFERS, Office, office, refusal, token, until
from tests.builders import scenario

from bursar.engine import Answer, FlowRecord
from bursar.flows.transfers import AccountType
from bursar.flows.transfers.rails import FundingRail
from bursar.model.outcome import Outcome

F, S = "FUNDING", "SPOT"


def break_rail(here: Office, kind: AccountType, op: str, outcome: Outcome, times: int = 10**9) -> None:
    """Let one end say something else, so many times."""
    rail = here.runtime.transfers.rails[kind]
    if isinstance(rail, FundingRail):
        rail.inline = False  # or it would not be called at all
    real = getattr(rail, op)
    left = [outcome] * min(times, 1_000)

    async def broken(item: FlowRecord[Any]) -> Answer:
        if left:
            said = left.pop()
            return Answer(outcome=said, code="ACCOUNT_FROZEN" if said is Outcome.EXPLICIT_FAIL else "")
        return await real(item)  # type: ignore[no-any-return]

    setattr(rail, op, broken)


@scenario
async def test_there_and_back(either: str, tmp_path: Path) -> None:
    """Fields exactly as 000 §8, and `fsm_state` (T18)."""
    async with office(either, tmp_path) as here:
        await here.fund(ALICE, "100")
        answer = await here.transfer(ALICE, F, S, "40.50", user_id=ALICE)
        made = answer.json()
        assert answer.status_code == 200
        assert list(made) == ["transfer_id", "req_id", "from", "to", "state", "fsm_state", "message"]
        assert isinstance(made["transfer_id"], int)
        assert made["req_id"].startswith("sr-")
        assert (made["from"], made["to"], made["state"], made["fsm_state"]) == (F, S, "COMMITTED", "COMMITTED")
        assert made["message"] == "Transfer successful"
        seen = (await here.get(f"{TRANSFERS}/{made['req_id']}", by=token(ALICE))).json()
        assert made.items() <= seen.items()
        assert seen.keys() - made.keys() == {"asset", "amount", "created_at", "updated_at"}
        assert (seen["asset"], seen["amount"]) == ("USDT", "40.500000")
        assert all(seen[name].endswith("Z") for name in ("created_at", "updated_at"))
        assert datetime.fromisoformat(seen["created_at"]) <= datetime.fromisoformat(seen["updated_at"])
        assert await here.balances(ALICE) == {F: "59.500000", S: "40.500000"}
        assert (await here.transfer(ALICE, S, F, "40.5")).json()["state"] == "COMMITTED"
        assert await here.balances(ALICE) == {F: "100.000000", S: "0.000000"}


@scenario
async def test_in_the_words_of_001(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        body = {"from": "funding", "to": "trading", "user_id": ALICE, "asset": "USDT", "amount": "1.5"}
        answer = await here.send("POST", "/api/v1/transfer", body, by=token(ALICE))
        made = answer.json()
        assert (answer.status_code, list(made)) == (200, ["req_id", "status", "message"])
        assert made["status"] == "committed"
        seen = (await here.get(f"/api/v1/transfer/{made['req_id']}", by=token(ALICE))).json()
        assert (list(seen), seen["state"]) == (["req_id", "state", "created_at"], "committed")
        same = (await here.get(f"{TRANSFERS}/{made['req_id']}", by=token(ALICE))).json()
        assert seen["created_at"] == int(datetime.fromisoformat(same["created_at"]).timestamp() * 1000)
        assert (same["from"], same["to"], same["amount"]) == (F, S, "1.500000")


@scenario
async def test_one_client_order_id_is_one_transfer(either: str, tmp_path: Path) -> None:
    """Sequentially, in 20 concurrent requests, with other parameters, from another user; by body and by header."""
    async with office(either, tmp_path) as here:
        await here.fund(ALICE, "100")
        await here.fund(BOB, "100")
        calls = [here.transfer(ALICE, F, S, "10", client_order_id="mine") for _ in range(10)]
        calls += [here.transfer(ALICE, F, S, "10", headers={"Idempotency-Key": "mine"}) for _ in range(10)]
        answers = await asyncio.gather(*calls)
        assert {answer.status_code for answer in answers} <= {200, 202}
        assert len({answer.json()["req_id"] for answer in answers}) == 1
        again = await here.transfer(ALICE, F, S, "10", client_order_id="mine")
        assert (again.status_code, again.json()["req_id"]) == (200, answers[0].json()["req_id"])
        both = await here.transfer(ALICE, F, S, "10", client_order_id="mine", headers={"Idempotency-Key": "mine"})
        assert both.json() == again.json()
        differ = await here.transfer(ALICE, F, S, "10", client_order_id="mine", headers={"Idempotency-Key": "other"})
        assert refusal(differ) == (400, "INVALID_REQUEST")
        for other in ((F, S, "11"), (S, F, "10")):
            assert refusal(await here.transfer(ALICE, *other, client_order_id="mine")) == (409, "DUPLICATE_REQUEST")
        bobs = await here.transfer(BOB, F, S, "10", client_order_id="mine")
        assert bobs.json()["req_id"] != again.json()["req_id"]
        assert (await here.balances(ALICE), await here.balances(BOB)) == ({F: "90.000000", S: "10.000000"},) * 2


@scenario
async def test_what_takes_too_long_is_pending_and_goes_on(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path, deadline_ms=100) as here:
        await here.fund(ALICE, "100")
        break_rail(here, AccountType.SPOT, "deposit", Outcome.TIMEOUT, times=12)
        answer = await here.transfer(ALICE, F, S, "10")
        made = answer.json()
        assert (answer.status_code, made["state"], made["fsm_state"]) == (202, "PENDING", "TARGET_PENDING")
        shown = (await here.get("/api/v1/balances", by=token(ALICE))).json()
        line = shown["accounts"][0]["balances"][0]
        assert (line["available"], line["in_flight"]) == ("90.000000", "10.000000")
        old = {"from": "funding", "to": "trading", "asset": "USDT", "amount": "1"}
        break_rail(here, AccountType.SPOT, "deposit", Outcome.TIMEOUT, times=12)
        answer = await here.send("POST", "/api/v1/transfer", old, by=token(ALICE))
        assert (answer.status_code, answer.json()["status"]) == (202, "pending")

        async def ended() -> bool:
            seen = (await here.get(f"{TRANSFERS}?state=PENDING", by=token(ALICE))).json()
            return not seen["transfers"]

        await until(ended)
        assert await here.balances(ALICE) == {F: "89.000000", S: "11.000000"}


@scenario
async def test_a_transfer_that_fails_on_the_way_answers_with_its_end(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        await here.fund(ALICE, "100")
        break_rail(here, AccountType.SPOT, "deposit", Outcome.EXPLICIT_FAIL, times=1)
        answer = await here.transfer(ALICE, F, S, "10")
        assert (answer.status_code, answer.json()["state"]) == (200, "ROLLED_BACK")
        break_rail(here, AccountType.FUNDING, "withdraw", Outcome.EXPLICIT_FAIL, times=1)
        answer = await here.transfer(ALICE, F, S, "10")
        assert (answer.status_code, answer.json()["state"]) == (200, "FAILED")
        assert await here.balances(ALICE) == {F: "100.000000"}


@pytest.mark.parametrize("limit", [1, 3, 200])
@scenario
async def test_lists_by_filter_and_page(either: str, tmp_path: Path, limit: int) -> None:
    async with office(either, tmp_path) as here:
        await here.fund(ALICE, "100")
        await here.fund(ALICE, "100", "LIM")
        ids: dict[str, list[str]] = {"USDT": [], "LIM": [], "back": []}
        for _ in range(3):
            ids["USDT"].append((await here.transfer(ALICE, F, S, "2")).json()["req_id"])
            ids["LIM"].append((await here.transfer(ALICE, F, S, "2", "LIM")).json()["req_id"])
        middle = (await here.get(f"{TRANSFERS}/{ids['LIM'][-1]}", by=token(ALICE))).json()["created_at"]
        ids["back"].append((await here.transfer(ALICE, S, F, "2", "LIM")).json()["req_id"])
        newest_first = sorted([id for some in ids.values() for id in some], reverse=True)

        async def listed(**query: str) -> list[str]:
            found: list[str] = []
            params: dict[str, str] = {"limit": str(limit)} | query
            while True:
                answer = await here.http.get(
                    TRANSFERS, params=params, headers={"Authorization": f"Bearer {token(ALICE)}"}
                )
                page = answer.json()
                assert len(page["transfers"]) <= limit
                found += [one["req_id"] for one in page["transfers"]]
                if page["next_cursor"] is None:
                    return found
                params["cursor"] = page["next_cursor"]

        assert await listed() == newest_first
        assert await listed(asset="USDT") == sorted(ids["USDT"], reverse=True)
        assert await listed(**{"from": S}) == await listed(to=F) == await listed(asset="LIM", to=F) == ids["back"]
        assert await listed(state="COMMITTED") == newest_first
        assert await listed(state="PENDING") == await listed(asset="DOGE") == []
        assert await listed(state="PENDING", asset="USDT") == await listed(state="FAILED", to=F) == []
        assert set(await listed(until=middle)) == {*ids["USDT"], *ids["LIM"][:-1]}
        assert set(await listed(since=middle)) == {ids["LIM"][-1], *ids["back"]}
