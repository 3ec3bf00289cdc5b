"""Holds whose time is up are given back by whatever runs: `bursar serve` and `bursar worker` do it by themselves."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE, office, until

from bursar.ledger import Ledger
from bursar.model.entries import HoldState
from bursar.model.errors import DatabaseUnavailable

ACCOUNT = f"user:{ALICE}:funding"


@pytest.mark.parametrize("trouble", [None, DatabaseUnavailable("gone for a moment"), ValueError("a row of nonsense")])
def test_an_expired_hold_is_given_back_without_being_asked(
    either: str, tmp_path: Path, trouble: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever went wrong the time before: the next look finds it."""
    real, looks = Ledger.expire_holds, 0

    async def expire_holds(self: Ledger, *args: Any) -> Any:
        nonlocal looks
        looks += 1
        if trouble is not None and looks == 1:
            raise trouble
        return await real(self, *args)

    monkeypatch.setattr(Ledger, "expire_holds", expire_holds)

    async def scene() -> None:
        async with office(either, tmp_path, hold_expiry_interval_ms=20) as here:
            await here.fund(ALICE, "10")
            ledger = here.runtime.bursar.ledger
            hold = await ledger.authorize(ACCOUNT, "USDT", "4", expires_in=timedelta(milliseconds=100))
            kept = await ledger.authorize(ACCOUNT, "USDT", "1", expires_in=timedelta(hours=1))

            async def is_over() -> bool:
                return (await ledger.hold(hold.id)).state is HoldState.EXPIRED

            await until(is_over)
            assert (await ledger.hold(kept.id)).state is HoldState.OPEN
            assert str(await ledger.balance(ACCOUNT, "USDT")) == "9.000000"

    asyncio.run(scene())
