"""A refusal and a replay write nothing: no number is used up, no disk is waited for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import bursar
from bursar import ExternalAccount, Refusal, deposit, pay


def test_a_refused_or_repeated_entry_writes_nothing_on_sqlite(tmp_path: Path) -> None:
    """Given a ledger, when entries are refused and repeated, then the log has not grown and the next number follows."""

    async def body() -> None:
        async with bursar.open(f"sqlite:///{tmp_path / 'funds.db'}") as b:
            await b.ledger.create_asset("USDT", precision=6)
            await b.ledger.create_account("bank", policy=ExternalAccount())
            await b.ledger.create_account("a")
            await b.ledger.create_account("b")
            first = await b.ledger.commit(deposit("bank", "a", "USDT", "1", key="first"))
            log = tmp_path / "funds.db-wal"
            before = log.stat().st_size
            for _ in range(3):
                with pytest.raises(Refusal):
                    await b.ledger.commit(pay("a", "b", "USDT", "2"))
                assert (await b.ledger.commit(deposit("bank", "a", "USDT", "1", key="first"))).replayed
            assert log.stat().st_size == before
            assert (await b.ledger.commit(pay("a", "b", "USDT", "1"))).envelope == first.envelope + 1

    asyncio.run(body())
