"""One engine, one worker and one cache of pauses per process, whatever the number of flows."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE, config_for, furnish, office, until
from tests.builders import scenario

from bursar.engine import Engine, FlowRefused, Operators, Worker
from bursar.engine.pauses import Pauses
from bursar.flows.sequence import Pay, Sequences
from bursar.instance import Bursar
from bursar.model.accounts import ExternalAccount
from bursar.ports import SystemPorts
from bursar.runtime import running


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How many of each were made."""
    count: Counter[str] = Counter()

    def counted(kind: type, real: Callable[..., None]) -> Callable[..., None]:
        def make(self: Any, *args: Any, **more: Any) -> None:
            count[kind.__name__] += 1
            real(self, *args, **more)

        return make

    for kind in (Engine, Worker, Pauses):
        monkeypatch.setattr(kind, "__init__", counted(kind, kind.__init__))
    return count


@scenario
async def test_serve_has_one_engine_and_one_worker_for_all_flows(url: str, tmp_path: Path, made: Counter[str]) -> None:
    async with office(url, tmp_path) as here:
        runtime = here.runtime
        assert made == {"Engine": 1, "Worker": 1, "Pauses": 1}
        assert sorted(runtime.engine.flows) == ["deposits", "transfers"]
        assert runtime.transfers.engine is runtime.deposits.engine is runtime.worker.engine is runtime.engine


@scenario
async def test_worker_has_one_engine_and_one_worker_for_all_flows(url: str, tmp_path: Path, made: Counter[str]) -> None:
    await furnish(url)
    async with running(config_for(url, tmp_path), SystemPorts(), "worker") as runtime:
        assert made == {"Engine": 1, "Worker": 1, "Pauses": 1}
        assert sorted(runtime.worker.flows) == ["deposits", "transfers"]


@scenario
async def test_the_one_cache_of_pauses_knows_those_of_each_flow(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path) as here:
        runtime, people = here.runtime, Operators(here.runtime.engine)
        for flow in ("deposits", "transfers"):
            await people.pause("flow", flow, actor="anna", reason="ticket 17")
            assert ("flow", flow) in runtime.worker.engine.pauses.now
        assert runtime.worker.flows == ["deposits", "transfers"]  # what they have sent goes on


@scenario
async def test_the_one_worker_raises_the_alert_of_a_deposit_that_waits(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deposit_confirm_above={"USDT": 0}, alert_waiting_s=1) as here:
        await here.fund(ALICE, "100")

        async def is_raised() -> bool:
            return [alert.reason for alert in await here.runtime.bursar.store.read.alerts.open()] == ["waiting"]

        await until(is_raised)


@scenario
async def test_sequences_with_a_given_engine_are_driven_by_its_worker(tmp_path: Path, made: Counter[str]) -> None:
    async with Bursar(f"sqlite:///{tmp_path}/bursar.db") as bursar:
        ledger = bursar.ledger
        await ledger.create_asset("USDT", 2)
        await ledger.create_account("bank", policy=ExternalAccount())
        await ledger.create_account("alice")
        engine = Engine(bursar.store, ledger.writer, ())
        worker = Worker(engine)
        async with Sequences(ledger, engine=engine) as sequences:
            assert made == {"Engine": 1, "Worker": 1, "Pauses": 1}
            started = await sequences.start([Pay("bank", "alice", "USDT", "5")], key="a", wait_s=0)
            async with asyncio.timeout(20):
                while (await sequences.get(started.id)).state != "COMPLETED":
                    await worker.look()
                    await asyncio.sleep(0.01)
        await engine.finish(10)
        with pytest.raises(FlowRefused):
            engine.register(sequences.flow)
