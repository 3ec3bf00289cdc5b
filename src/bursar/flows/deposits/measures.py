"""Numbers of deposits from chains for metrics: what is open, what is held and for how long, and what is swept. Pure.

They are taken from the counts of what has not ended, which are along indexes: a look costs the same however much has
arrived. How much has ended is `bursar_records_completed_total`. How far chains are scanned is what each process knows
of its own looks (`scanning.Progress`): the records are written only from time to time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from bursar.flows.deposits.arrivals import ARRIVALS, ARRIVED, HELD
from bursar.flows.deposits.sweep import SWEEPING, SWEEPS

WAITING: Final = ((ARRIVALS.name, HELD),)  # states that no worker drives


class Measures(msgspec.Struct, frozen=True):
    """What was measured."""

    open: dict[str, int]  # arrivals that have not ended, by state
    held_since_us: int | None  # since when the oldest one is held; None: none is
    sweeps: int  # that are open
    sweeping_since_us: int | None  # since when the oldest of them is; None: there is none


def measured(counts: Mapping[tuple[str, str], tuple[int, int]]) -> Measures:
    """From (flow, state) → how many records, and since when the oldest is there. Pure."""
    nothing = (0, None)
    arrivals = {state: counts.get((ARRIVALS.name, state), nothing) for state in (ARRIVED, HELD)}
    sweeps, sweeping_since_us = counts.get((SWEEPS.name, SWEEPING), nothing)
    return Measures(
        open={state: count for state, (count, _) in arrivals.items()},
        held_since_us=arrivals[HELD][1],
        sweeps=sweeps,
        sweeping_since_us=sweeping_since_us,
    )
