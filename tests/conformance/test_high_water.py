"""T33: the database keeps, with the transitions that rely on it, how far a core's log is known."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import FUNDING, SPOT, exchange

from bursar.model.errors import RecordMoved
from bursar.writer import Change, Move, NewTransition

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)


@scenario
async def test_what_a_transition_relies_on_is_written_with_it(place: Place, tmp_path: Path) -> None:
    """Deposits, withdraws and refusals of the core: the highest sequence among them, once they are written down."""
    async with exchange(place, tmp_path) as here:
        marks = here.bursar.store.read.marks
        assert await marks.highest("spot") == 0
        await here.move(FUNDING, SPOT, "40")
        assert await marks.highest("spot") == here.core.core.state.sequence == 1
        await asyncio.gather(*[here.move(SPOT, FUNDING, "1") for _ in range(20)])
        assert await marks.highest("spot") == here.core.core.state.sequence == 21
        client = await here.core.client()
        await client.lock(77, 1001, "USDT", 5)  # not ours: nothing here relies on it
        assert (await marks.highest("spot"), here.core.core.state.sequence) == (21, 22)


@scenario
async def test_each_worker_has_a_row_of_its_own_and_the_highest_counts(place: Place) -> None:
    async with place.bursar() as bursar:
        marks, apply = bursar.store.read.marks, bursar.ledger.writer.apply

        def noted(id_: str, worker: str, sequence: int, version: int = 0) -> Change:
            move = Move(
                flow="toy",
                id=id_,
                version=version,
                transitions=(NewTransition("", "X", "A"),),
                actor=worker,
                delay_us=None,
            )
            return Change(moves=(move,), high_water=(("spot", worker, sequence),))

        await asyncio.gather(*[apply(noted(f"a{n}", "one", n)) for n in (7, 9, 8)], apply(noted("b", "two", 5)))
        assert await marks.highest("spot") == 9
        await apply(noted("c", "one", 3))  # an answer remembered from long ago takes nothing back
        assert await marks.highest("spot") == 9
        with pytest.raises(RecordMoved):
            await apply(noted("c", "one", 50))
        assert await marks.highest("spot") == 9, "nothing that is refused is relied on"
        assert await marks.highest("future") == 0
