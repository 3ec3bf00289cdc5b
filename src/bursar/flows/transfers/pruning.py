"""What a core may let go of: how far its two floors can be raised, and raising them (T32).

A core reserves room for every withdraw that could still be refunded, and remembers every operation, so that none
happens twice. Both end with time. Below the *room* floor no transfer is open, so nothing is refunded any more; it
follows soon. Below the *forget* floor nothing is remembered; it waits as long as backups are kept, because a database
that is restored learns from the core what it has forgotten itself (`behind`).

Each is the older of the oldest open transfer and a horizon. It is written to the database before the core is asked, so
that a core whose floor is higher than the database's shows that the database was restored. What two operators
forced is kept: a core may still contradict them (T34).
"""

from __future__ import annotations

import msgspec

from bursar.engine.clock import first_id_at
from bursar.flows.transfers import behind
from bursar.flows.transfers.checks import Horizons
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import NEW_TRANSFERS
from bursar.model.outcome import Outcome
from bursar.rails.trading import Floors, TradingClient
from bursar.rails.trading.rules import PREFIX
from bursar.store import Store


def floors(now_us: int, oldest_open: int | None, highest: int, horizons: Horizons) -> Floors:
    """How high the floors may be. Pure. Not above what the core has seen: it refuses that as a mistake."""

    def floor(after_s: float) -> int:
        found = min(first_id_at(now_us - int(after_s * 1_000_000)), highest)
        return max(1, found if oldest_open is None else min(found, oldest_open))

    return Floors(room=floor(horizons.room_after_s), forget=floor(horizons.forget_after_s))


class Pruned(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it."""

    rail: str
    floors: Floors | None = None  # that the core has taken
    kept: int = 0  # forced transfers that are remembered for ever
    note: str = ""  # why there was nothing to do, or it could not be done
    refused: bool = False  # the core has said no, and not nothing: it grows without end


async def prune(store: Store, rail: str, client: TradingClient, horizons: Horizons) -> Pruned:
    """Raise a core's floors as far as they go; not while core and database may disagree: what the core remembers is the
    evidence then."""
    if await store.read.cores.get(rail) is None:
        return Pruned(rail=rail, note="there was no contact with this core yet")
    if any((pause.kind, pause.name) == NEW_TRANSFERS for pause in await store.read.pauses.list()):
        return Pruned(rail=rail, note="no new transfers are taken; nothing is forgotten until they are")
    known = await behind.look(store, rail, client)
    if known.is_behind or known.note:
        return Pruned(rail=rail, note=known.note or f"core {rail} is ahead of this database; reconcile first")
    described = await client.describe()
    if described.outcome is not Outcome.SUCCESS:
        return Pruned(rail=rail, note=f"core {rail} does not answer: {described.code}")
    oldest, now_us = await store.read.cores.oldest_open(MACHINE.name, PREFIX)
    wanted = floors(now_us, oldest, described.highest_id, horizons)
    if wanted.room <= described.floors.room and wanted.forget <= described.floors.forget:
        return Pruned(rail=rail, floors=described.floors, note="nothing has become old enough")
    # Written down first: a crash right after this leaves floors here that the core does not have yet, never the other
    # way.
    room, forget = await store.single().cores.raise_floors(rail, wanted.room, wanted.forget)
    keep = await store.read.cores.forced(MACHINE.name)
    said = await client.prune(room=room, forget=forget, keep=keep)
    if said.outcome is not Outcome.SUCCESS:
        why = f"core {rail} did not take the floors: {said.code} {said.detail}".rstrip()
        return Pruned(rail=rail, note=why, refused=said.outcome is Outcome.UNKNOWN)
    await store.single().cores.floors_taken(rail)
    return Pruned(rail=rail, floors=Floors(room=room, forget=forget), kept=len(keep))
