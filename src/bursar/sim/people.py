"""Operators in the transfers scenario: on some seeds two force transfers back, on others one switches something off."""

from __future__ import annotations

from collections import Counter
from typing import Final

from bursar.engine import Operators
from bursar.flows.transfers import MACHINE, Transfers, View
from bursar.model.errors import BursarError
from bursar.sim.process import Process

FORCES: Final = 6
FORCE_S_MAX: Final = 0.03
SWITCHES: Final = 2
SWITCH_S_MAX: Final = 3.0  # longer than it takes until every process knows of it
SWITCHED: Final = (("flow", "transfers"), ("rail", "funding"), ("rail", "spot"))


async def force(transfers: Transfers, process: Process, happened: Counter[str]) -> None:
    """Two operators force back what is on its way: the end that is being called has to promise it first (T34)."""
    people = Operators(transfers.engine)
    for _ in range(FORCES):
        await process.ports.sleep(process.kernel.rng.random() * FORCE_S_MAX)
        for state in ("TARGET_PENDING", "SOURCE_PENDING"):
            for view in await transfers.list(None, state=state, limit=2):
                await _force(people, view, happened)


async def _force(people: Operators, view: View, happened: Counter[str]) -> None:
    for person in ("ann", "bob"):
        try:
            await people.force(MACHINE.name, view.req_id, "EXPLICIT_FAIL", actor=person, reason="it takes too long")
        except BursarError:  # it has moved meanwhile, or the other side can't be asked
            return
    happened["forced"] += 1


async def switch(transfers: Transfers, process: Process, happened: Counter[str]) -> None:
    """An operator switches something off, and on again later; or it stays off, because the server has died."""
    people, rng = Operators(transfers.engine), process.kernel.rng
    for _ in range(SWITCHES):
        what = rng.choice(SWITCHED)
        await process.ports.sleep(rng.random() * SWITCH_S_MAX / 4)
        await people.pause(*what, actor="ann", reason="it looks strange")
        happened["switched off"] += 1
        await process.ports.sleep(rng.random() * SWITCH_S_MAX)
        await people.resume(*what, actor="bob", reason="it was nothing")


async def switch_on(transfers: Transfers) -> None:
    """What the servers' crashes have left switched off is switched on."""
    for what in SWITCHED:
        await Operators(transfers.engine).resume(*what, actor="bob", reason="we go home")
