"""A close that was interrupted raises an alert by whatever runs: `bursar serve` and `bursar worker` look for it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.api.office import ALICE, furnish, office, until

from bursar import Bursar
from bursar.flows.transfers import closing

ACCOUNT = f"user:{ALICE}:funding"


def test_an_interrupted_close_raises_an_alert_at_the_next_start(
    either: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(closing, "INTERRUPTED_S", 0.001)

    async def scene() -> None:
        await furnish(either)
        async with Bursar(either) as bursar:
            await bursar.ledger.create_account(ACCOUNT)
            await bursar.ledger.begin_close(ACCOUNT, "of a process that died")
        async with office(either, tmp_path) as here:
            [alert] = await until(here.runtime.bursar.store.read.alerts.open)
            assert alert.reason == f"close of {ACCOUNT} interrupted"

    asyncio.run(scene())
