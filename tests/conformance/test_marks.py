"""High-water marks of any peer: a toy signer with a log of its own, and no code of a trading core (W33).

The signer numbers its signatures. Each answer carries its number, and the transition that relies on it writes it down.
At each connect, and then at each look, the one check says whether the signer or this database was restored.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from tests.builders import MovablePorts, Place, scenario
from tests.crashing import dies
from tests.payouts import Chain, Payout, approved, stuck
from tests.toy import Program, program

from bursar.engine import Answer, Engine, FlowRecord, Worker, set_pause
from bursar.model.marks import Restored, restored
from bursar.model.outcome import Outcome

MODES = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)
PEER = "signer:toy"
HOUR_US = 3_600_000_000


class Signer(Chain):
    """Signs once per payout, in a log that its disk keeps."""

    def __init__(self, **says: Any) -> None:
        super().__init__(**says)
        self.log: list[str] = []

    def action(self, name: str) -> Any:
        real = super().action(name)

        async def sign(item: FlowRecord[Payout]) -> Answer:
            self.calls["sign"] += 1
            if item.id not in self.log:
                self.log.append(item.id)
            at = self.log.index(item.id) + 1
            return Answer(outcome=Outcome.SUCCESS, evidence={"at": at}, high_water=((PEER, at), ("node:toy", 40 + at)))

        return sign if name == "sign" else real


async def look(p: Program, signer: Signer) -> Restored:
    """What a client of the signer does: read the mark, ask the signer, stop what sends if this database is behind."""
    mark = await p.engine.store.read.marks.highest(PEER)
    missing = [id for id in signer.log if await p.engine.get("payouts", id) is None]
    found = restored(mark=mark, sequence=len(signer.log), unknown=len(missing))
    if found is Restored.DATABASE:
        reason = f"the signer has signed {', '.join(missing)}, of which nothing is here: the database was restored"
        await set_pause(p.engine.store, "flow", "payouts", actor="signer", reason=reason, two_people=True)
    return found


@MODES
@scenario
async def test_a_mark_is_written_with_the_transition_that_relies_on_it(place: Place) -> None:
    signer = Signer()
    async with program(place, signer) as p, program(place, signer, worker="two") as q:
        marks = p.engine.store.read.marks
        assert [await marks.highest(peer) for peer in (PEER, "node:toy")] == [0, 0]
        await p.now(await approved(p, "p-1"))
        await q.now(await approved(q, "p-2"))
        assert [await marks.highest(peer) for peer in (PEER, "node:toy")] == [2, 42]
        assert await look(p, signer) is Restored.NEITHER
        await p.engine.store.single().marks.forget(PEER)
        assert [await marks.highest(peer) for peer in (PEER, "node:toy")] == [0, 42]


@MODES
@scenario
async def test_a_signer_whose_answer_was_lost_is_ahead_and_nothing_was_restored(place: Place) -> None:
    signer = Signer()
    async with program(place, signer) as p:
        record = await approved(p, "p-1")
        signer.log.append("p-1")  # it has signed, and nobody has heard of it
        assert await look(p, signer) is Restored.NEITHER
        assert (await p.now(record)).state == "DONE"
        assert await p.engine.store.read.marks.highest(PEER) == 1


@MODES
@scenario
async def test_a_signer_with_an_old_disk_is_recognised(place: Place) -> None:
    signer = Signer()
    async with program(place, signer) as p:
        for id in ("p-1", "p-2"):
            await p.now(await approved(p, id))
        signer.log = signer.log[:1]
        assert await look(p, signer) is Restored.PEER
        assert await p.engine.store.read.pauses.list() == []


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@scenario
async def test_a_database_with_an_old_disk_is_recognised_and_sends_stop(place: Place, tmp_path: Path) -> None:
    """What was under way at the time of the backup is learned; nothing new is signed until two people resume."""
    signer = Signer(confirm=[Outcome.EXPLICIT_FAIL])
    async with program(place, signer) as p:
        await stuck(p, "p-1")
    backup = Place("sqlite", f"sqlite:///{tmp_path}/backup.db")
    shutil.copyfile(place.path, backup.path)
    async with program(place, signer) as p:
        assert (await p.now(await approved(p, "p-2"))).state == "DONE"
    async with program(backup, signer) as p:
        assert await look(p, signer) is Restored.DATABASE
        [pause] = await p.engine.store.read.pauses.list()
        assert ("p-2" in pause.reason, pause.two_people) == (True, True)
        await p.engine.pauses.read()
        before = signer.calls["sign"]
        assert (await p.now(await approved(p, "p-3"))).state == "SIGNING"
        assert signer.calls["sign"] == before


@pytest.mark.parametrize("mode", ["sqlite"], indirect=True)
@pytest.mark.parametrize("fault", ["before", "after", "cancel"])
@scenario
async def test_a_crash_loses_no_mark_and_keeps_none_that_nothing_relies_on(
    place: Place, fault: str, tmp_path: Path
) -> None:
    async with program(place, Signer()) as p:
        await approved(p, "p-1")
    call = 0
    while True:
        call += 1
        copy = Place("sqlite", f"sqlite:///{tmp_path}/{call}.db")
        shutil.copyfile(place.path, copy.path)
        signer = Signer()

        async def drive(engine: Engine) -> None:
            record = await engine.get("payouts", "p-1")
            assert record is not None
            while record.state != "DONE":
                record = await engine.process_now(record, 60)

        reached = await dies(copy, [signer.flow()], drive, fault, call)
        clock = MovablePorts()
        clock.ahead_us = HOUR_US
        async with program(copy, signer, ports=clock) as p:
            record = await p.engine.get("payouts", "p-1")
            assert record is not None
            relied_on = 0 if record.state == "SIGNING" else 1
            assert await p.engine.store.read.marks.highest(PEER) == relied_on
            await Worker(p.engine).look()
            await p.until(record, "DONE")
            assert await p.engine.store.read.marks.highest(PEER) == 1
            assert await look(p, signer) is Restored.NEITHER
        if not reached:
            break
    assert call > 3
