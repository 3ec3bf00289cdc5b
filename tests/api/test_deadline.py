"""T45: a request to transfer is answered within its deadline, whatever hangs, and says whether anything was written."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from tests.api.office import ALICE, TRANSFERS, Office, office, refusal, token, until
from tests.builders import scenario

from bursar.flows.transfers import AccountType
from bursar.flows.transfers.rails import FundingRail
from bursar.rails.trading import Status

F, S = "FUNDING", "SPOT"
DEADLINE_MS = 600
LATE_S = 5.0  # far below what hangs here takes, far above what a busy machine adds


@contextlib.asynccontextmanager
async def timely() -> AsyncIterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < LATE_S


async def hangs(*_: Any, **__: Any) -> Any:
    await asyncio.Event().wait()


@pytest.mark.parametrize("way", [(F, S), (S, F)], ids="-".join)
@scenario
async def test_a_core_that_hangs_before_anything_is_written(url: str, tmp_path: Path, way: tuple[str, str]) -> None:
    async with office(url, tmp_path, deadline_ms=DEADLINE_MS) as here:
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "10")).status_code == 200
        here.runtime.transfers.rails[AccountType.SPOT].look = hangs  # type: ignore[method-assign]
        before = here.written()
        async with timely():
            answer = await here.transfer(ALICE, *way, "10")
        assert refusal(answer) == (503, "CORE_UNAVAILABLE")
        assert "nothing was written" in answer.json()["detail"]
        assert here.written() == before


@scenario
async def test_a_database_that_hangs_before_anything_is_written(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deadline_ms=DEADLINE_MS) as here:
        await here.fund(ALICE, "100")
        before = here.written()
        here.runtime.transfers._assets_now = hangs  # type: ignore[method-assign]
        async with timely():
            answer = await here.transfer(ALICE, F, S, "10")
        assert refusal(answer) == (503, "DATABASE_UNAVAILABLE")
        assert here.written() == before


@pytest.mark.parametrize("inline", [True, False], ids=["inline", "called"])
@scenario
async def test_while_a_commit_hangs_the_answer_names_the_transfer(
    fresh_postgres: str, tmp_path: Path, inline: bool
) -> None:
    """It goes on when the database does; and the same request then gets it."""
    async with office(fresh_postgres, tmp_path, deadline_ms=DEADLINE_MS) as here:
        rail = here.runtime.transfers.rails[AccountType.FUNDING]
        assert isinstance(rail, FundingRail)
        rail.inline = inline
        await here.fund(ALICE, "100")
        assert (await here.transfer(ALICE, F, S, "1")).status_code == 200
        blocker = await asyncpg.connect(fresh_postgres)
        try:
            async with blocker.transaction():
                await blocker.execute("LOCK TABLE bursar.records IN EXCLUSIVE MODE")
                async with timely():
                    answer = await here.transfer(ALICE, F, S, "10", client_order_id="mine")
                assert refusal(answer) == (503, "COMMIT_UNKNOWN")
                req_id = answer.json()["req_id"]
                assert req_id in answer.json()["detail"]
        finally:
            await blocker.close()

        async def ended() -> bool:
            found = await here.get(f"{TRANSFERS}/{req_id}", by=token(ALICE))
            return found.status_code == 200 and found.json()["state"] == "COMMITTED"

        await until(ended)
        again = await here.transfer(ALICE, F, S, "10", client_order_id="mine")
        assert (again.status_code, again.json()["req_id"]) == (200, req_id)
        assert await here.balances(ALICE) == {F: "89.000000", S: "11.000000"}


@scenario
async def test_a_transfer_whose_call_hangs_is_pending(either: str, tmp_path: Path) -> None:
    """And so is the same request again, which waits for it."""
    async with office(either, tmp_path, deadline_ms=DEADLINE_MS) as here:
        await here.fund(ALICE, "100")
        rail = here.runtime.transfers.rails[AccountType.SPOT]
        real, go = rail.deposit, asyncio.Event()

        async def slow(item: Any) -> Any:
            await go.wait()
            return await real(item)

        rail.deposit = slow  # type: ignore[method-assign]
        for _ in range(2):
            async with timely():
                answer = await here.transfer(ALICE, F, S, "10", client_order_id="mine")
            assert (answer.status_code, answer.json()["fsm_state"]) == (202, "TARGET_PENDING")
        waiting = asyncio.create_task(here.transfer(ALICE, F, S, "10.00", client_order_id="mine"))
        await asyncio.sleep(0)
        go.set()
        assert (await waiting).json()["state"] == "COMMITTED"


@scenario
async def test_a_deadline_of_zero_waits_until_it_is_written_down(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deadline_ms=0) as here:
        await here.fund(ALICE, "100")
        answer = await here.transfer(ALICE, F, S, "10")
        assert (answer.status_code, answer.json()["state"]) == (202, "PENDING")

        async def ended() -> bool:
            found = await here.get(f"{TRANSFERS}/{answer.json()['req_id']}", by=token(ALICE))
            return bool(found.json()["state"] == "COMMITTED")

        await until(ended)


def inside(here: Office, text: str) -> list[str]:
    """What of our inside a text tells."""
    return [word for word in (f"user:{ALICE}", "transfers:", "transit", ":s:", ":d:", ":a:", "limit 1") if word in text]


@scenario
async def test_limits_are_told_in_words(url: str, tmp_path: Path) -> None:
    limits: list[tuple[dict[str, Any], str, str]] = [
        ({"limit_per_day": 1}, "DAILY_LIMIT_EXCEEDED", "at most 1 transfers in a day"),
        ({"limit_amount_per_day": {"USDT": 2_500_000}}, "DAILY_AMOUNT_EXCEEDED", "at most 2.500000 USDT in a day"),
    ]
    for number, (settings, code, words) in enumerate(limits):
        folder = tmp_path / str(number)
        folder.mkdir()
        async with office(f"{url}{number}", folder, **settings) as here:
            await here.fund(ALICE, "100")
            await here.transfer(ALICE, F, S, "2")
            answer = await here.transfer(ALICE, F, S, "2")
            assert refusal(answer) == (429, code)
            assert words in answer.json()["detail"]
            assert inside(here, answer.text) == []


@scenario
async def test_a_transfer_that_failed_or_went_back_says_why(either: str, tmp_path: Path) -> None:
    async with office(either, tmp_path) as here:
        await here.fund(ALICE, "100")
        rail = here.runtime.transfers.rails[AccountType.SPOT]
        real = rail.deposit

        async def frozen(item: Any) -> Any:
            await here.runtime.cores[AccountType.SPOT].set_status(ALICE, Status.FROZEN)
            return await real(item)

        rail.deposit = frozen  # type: ignore[method-assign]
        back = (await here.transfer(ALICE, F, S, "10")).json()
        assert back["state"] == "ROLLED_BACK"
        shown = (await here.get(f"{TRANSFERS}/{back['req_id']}", by=token(ALICE))).json()
        assert back["message"] == shown["message"]
        assert "refunded: ACCOUNT_FROZEN (the account is frozen)" in back["message"]
        rail.deposit = real  # type: ignore[method-assign]
        await here.runtime.cores[AccountType.SPOT].set_status(ALICE, Status.ACTIVE)
        funding = here.runtime.transfers.rails[AccountType.FUNDING]
        assert isinstance(funding, FundingRail)
        funding.inline = False
        ledger = here.runtime.bursar.ledger
        looked = funding.look

        async def then_frozen(transfer: Any) -> Any:
            found = await looked(transfer)
            return msgspec.structs.replace(found, available=10**12)

        funding.look = then_frozen  # type: ignore[method-assign]
        failed = (await here.transfer(ALICE, F, S, "1000")).json()
        assert failed["state"] == "FAILED"
        assert "INSUFFICIENT_BALANCE (there was not enough in the account)" in failed["message"]
        assert inside(here, failed["message"]) == []
        assert (await ledger.balance(f"user:{ALICE}:funding", "USDT")).minor == 100_000_000


@pytest.mark.parametrize("path", [TRANSFERS, "/api/v1/transfer", "/api/v1/deposits"])
@pytest.mark.parametrize("body", [b"", b"null"])
@scenario
async def test_an_empty_body_is_told_as_one(url: str, tmp_path: Path, path: str, body: bytes) -> None:
    async with office(url, tmp_path) as here:
        by = token("anna", "operator") if path.endswith("deposits") else token(ALICE)
        headers = {"Authorization": f"Bearer {by}", "Content-Type": "application/json"}
        answer = await here.http.post(path, content=body, headers=headers)
        assert refusal(answer) == (400, "INVALID_REQUEST")
        assert "data" not in answer.json()["detail"]
        assert "body" in answer.json()["detail"]
