"""Deposits: once per reference, by two people above the limit (L25), and never by the one who asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.api.office import ALICE, BOB, Office, office, refusal, token
from tests.builders import scenario

from bursar.config import ConfigRefused

DEPOSITS = "/api/v1/deposits"
ANNA, BEN = token("anna", "operator", "approver"), token("ben", "approver")
LARGE = {"user_id": ALICE, "asset": "USDT", "amount": "10.000001"}


async def ask(here: Office, *, by: str = ANNA, **changes: Any) -> httpx.Response:
    return await here.send("POST", DEPOSITS, LARGE | {"reference": "wire-7"} | changes, by=by)


async def confirm(here: Office, *, by: str = BEN, reference: str = "wire-7", **changes: Any) -> httpx.Response:
    return await here.send("POST", f"{DEPOSITS}/{reference}/confirm", LARGE | changes, by=by)


@scenario
async def test_a_deposit_makes_the_account_and_is_booked_once(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path) as here:
        assert await here.balances(ALICE) == {}
        first = await here.fund(ALICE, "7.5", reference="wire-1")
        again = await here.fund(ALICE, "7.50", reference="wire-1")
        assert first.json() == again.json()
        assert (first.status_code, first.json()["state"], first.json()["amount"]) == (200, "BOOKED", "7.500000")
        assert await here.balances(ALICE) == {"FUNDING": "7.500000"}
        for change in ({"amount": "8"}, {"user_id": BOB}):
            body = {"user_id": ALICE, "asset": "USDT", "amount": "7.5", "reference": "wire-1"} | change
            assert refusal(await here.send("POST", DEPOSITS, body, by=ANNA)) == (409, "DUPLICATE_REQUEST")
        assert await here.balances(ALICE) == {"FUNDING": "7.500000"}


@scenario
async def test_a_large_one_needs_two_people_who_say_the_same(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path, deposit_confirm_above={"USDT": 10_000_000}) as here:
        assert (await here.fund(BOB, "10")).status_code == 200
        asked = await ask(here)
        assert (asked.status_code, asked.json()["state"], asked.json()["asked_by"]) == (202, "ASKED", "anna")
        assert (await ask(here)).json() == asked.json()
        assert [one["reference"] for one in (await here.get(DEPOSITS, by=BEN)).json()] == ["wire-7"]
        assert await here.balances(ALICE) == {}
        assert refusal(await ask(here, amount="1")) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert refusal(await confirm(here, by=ANNA)) == (409, "INVALID_STATE")
        for alias in ("ANNA", "an.na", "anna+2"):
            assert refusal(await confirm(here, by=token(alias, "approver"))) == (409, "INVALID_STATE")
        for alias in ("anna ", "\u0430nna", "\uff41nna", "ann\u200ba"):
            assert refusal(await confirm(here, by=token(alias, "approver")))[1] in ("INVALID_NAME", "UNAUTHORIZED")
        assert refusal(await confirm(here, amount="10.000002")) == (409, "IDEMPOTENCY_KEY_REUSED")
        assert refusal(await confirm(here, reference="wire-8")) == (404, "RECORD_NOT_FOUND")
        assert await here.balances(ALICE) == {}
        booked = await confirm(here)
        assert (booked.status_code, booked.json()["state"]) == (200, "BOOKED")
        assert (await confirm(here)).json() == booked.json()
        assert (await ask(here)).json()["state"] == "BOOKED"
        assert await here.balances(ALICE) == {"FUNDING": "10.000001"}
        assert (await here.get(DEPOSITS, by=BEN)).json() == []
        assert refusal(await here.send("POST", f"{DEPOSITS}/wire-7/reject", {}, by=BEN)) == (409, "INVALID_STATE")


@scenario
async def test_a_rejected_one_is_never_booked(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deposit_confirm_above={"USDT": 0}) as here:
        await ask(here)
        answer = await here.send("POST", f"{DEPOSITS}/wire-7/reject", by=BEN)
        assert (answer.status_code, answer.json()["state"]) == (200, "REJECTED")
        assert refusal(await confirm(here)) == (409, "INVALID_STATE")
        assert (await ask(here)).json()["state"] == "REJECTED"
        assert await here.balances(ALICE) == {}


@scenario
async def test_what_is_no_deposit(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        cases: list[tuple[dict[str, Any], tuple[int, str]]] = [
            ({"amount": "0"}, (422, "INVALID_AMOUNT")),
            ({"amount": "-1"}, (422, "INVALID_AMOUNT")),
            ({"amount": "1e3"}, (422, "INVALID_AMOUNT")),
            ({"amount": "0.0000001"}, (422, "PRECISION_OVERFLOW")),
            ({"amount": "9" * 40}, (422, "AMOUNT_TOO_LARGE")),
            ({"asset": "DOGE"}, (422, "INVALID_ASSET")),
            ({"asset": "OLD", "amount": "1"}, (422, "ASSET_SUSPENDED")),
            ({"user_id": 0}, (400, "INVALID_REQUEST")),
            ({"user_id": 2**63}, (400, "INVALID_REQUEST")),
            ({"reference": ""}, (400, "INVALID_NAME")),
            ({"reference": "a b"}, (400, "INVALID_NAME")),
            ({"reference": "x" * 101}, (400, "INVALID_NAME")),
            ({"note": "x"}, (400, "INVALID_REQUEST")),
        ]
        for change, found in cases:
            assert refusal(await ask(here, **change)) == found, change
        assert here.written()["envelopes"] == 0


@scenario
async def test_a_refused_deposit_makes_no_account(url: str, tmp_path: Path) -> None:
    """Nor does one that waits, or is rejected."""
    async with office(url, tmp_path, deposit_confirm_above={"USDT": 10_000_000}) as here:
        before = here.written()["accounts"]
        assert refusal(await ask(here, asset="OLD", amount="1")) == (422, "ASSET_SUSPENDED")
        assert refusal(await ask(here, amount="0")) == (422, "INVALID_AMOUNT")
        assert (await here.fund(BOB, "1", reference="wire-1")).status_code == 200
        assert refusal(await ask(here, reference="wire-1", amount="2")) == (409, "DUPLICATE_REQUEST")
        assert (await ask(here)).status_code == 202
        assert (await here.send("POST", f"{DEPOSITS}/wire-7/reject", by=BEN)).status_code == 200
        assert here.written()["accounts"] == before + 1  # Bob's


@scenario
async def test_asked_by_is_who_asked_first(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path, deposit_confirm_above={"USDT": 10_000_000}) as here:
        for amount in ("1", "10.000001"):
            asked = [
                await ask(here, by=token(who, "operator"), amount=amount, reference=f"wire-{amount}")
                for who in ("anna", "carl", "anna")
            ]
            assert [answer.json()["asked_by"] for answer in asked] == ["anna"] * 3


@scenario
async def test_a_mistaken_second_request_is_refused_and_the_first_stays_known(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path, deposit_confirm_above={"USDT": 10_000_000}) as here:
        assert (await ask(here, amount="1")).json()["state"] == "BOOKED"
        assert refusal(await ask(here, amount="11")) == (409, "DUPLICATE_REQUEST")
        assert (await here.get(DEPOSITS, by=BEN)).json() == []
        again = await ask(here, amount="1.0")
        assert (again.status_code, again.json()["state"], again.json()["account"]) == (
            200,
            "BOOKED",
            f"user:{ALICE}:funding",
        )
        assert await here.balances(ALICE) == {"FUNDING": "1.000000"}


@pytest.mark.parametrize("setting", ["deposit_confirm_above", "limit_amount_per_day"])
@scenario
async def test_settings_that_name_no_asset_are_refused_at_start(url: str, tmp_path: Path, setting: str) -> None:
    """A limit on a misspelt asset would limit nothing."""
    settings: dict[str, Any] = {setting: {"USDT": 1, "USTD": 1}}
    with pytest.raises(ConfigRefused, match=f"{setting}: there is no asset USTD"):
        async with office(url, tmp_path, **settings):
            pass
