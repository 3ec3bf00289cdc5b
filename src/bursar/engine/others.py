"""Other records that a booking starts, or sends signals to: in the same transaction, all of them or none.

Each is moved by a compare-and-set of its own. If one of them has moved since it was read, `RecordMoved` names it, and
the engine reads them again; the record whose booking it is was not touched.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import msgspec

from bursar.engine.flow import Booking, FlowRefused, RecordSignal
from bursar.engine.moves import for_any_worker
from bursar.engine.proofs import with_starts
from bursar.engine.signals import arrive
from bursar.model.entries import Intent, check_key
from bursar.model.records import Record
from bursar.writer import Move

if TYPE_CHECKING:
    from bursar.engine.engine import Engine

OTHERS_MAX = 16  # records in one change: what a person can still follow


class Turns:
    """Changes of this process that signal the same record are written one after the other.

    Each moves that record. At the same time, one of them would be written, and all the others would try in vain.
    """

    def __init__(self) -> None:
        self._locks = WeakValueDictionary[tuple[str, str], asyncio.Lock]()  # by the record that is signalled

    @contextlib.asynccontextmanager
    async def of(self, sent: Iterable[RecordSignal]) -> AsyncIterator[None]:
        """The turn of a change that sends these signals."""
        names = sorted({(signal.flow, signal.id) for signal in sent})  # in one order: none waits for another
        async with contextlib.AsyncExitStack() as turns:
            for lock in [self._locks.setdefault(name, asyncio.Lock()) for name in names]:
                await turns.enter_async_context(lock)
            yield


class Others(msgspec.Struct):
    """What goes with a change for the sake of other records."""

    intents: list[Intent] = []
    moves: list[Move] = []
    records: list[Record] = []  # as they were before those moves
    active: list[str] = []  # accounts that must be active for those that are started


async def gather(engine: Engine, own: Record, booking: Booking, actor: str) -> Others:
    """The moves of all that a booking starts and signals, and of what those bookings do in turn."""
    others = Others(intents=[], moves=[], records=[], active=[])
    source = {"flow": own.flow, "id": own.id}
    bookings = [booking]
    while bookings:
        booking = bookings.pop(0)
        for new in booking.starts:
            flow = engine.require(new.flow)
            await flow.admit(new.body, check_key(new.id))
            record = engine.moves.new_record(new.flow, new.id, new.owner, new.body)
            _, theirs, steps = engine.moves.begin(flow, record, new.body)
            move = engine.moves.move(record, steps, actor, theirs, body=record.body)
            others.active += flow.active(new.body)
            move = with_starts(for_any_worker(move, actor), theirs.starts)
            bookings.append(_add(own, others, record, theirs, move))
        for signal in booking.signals:
            found = await engine.record(signal.flow, signal.id)
            sent = await engine.store.read.records.signals(found.number) if found.inbox else ()
            sender = f"{own.flow}/{own.id}/{own.version}"  # once, as the move of the sender is
            evidence = signal.evidence | {"from": source}
            theirs, move = arrive(engine, found, sent, signal.event, evidence, sender=sender, actor=actor)
            bookings.append(_add(own, others, found, theirs, with_starts(move, theirs.starts)))
    return others


def _add(own: Record, others: Others, record: Record, booking: Booking, move: Move) -> Booking:
    names = [(own.flow, own.id), *((known.flow, known.id) for known in others.records)]
    if (record.flow, record.id) in names:
        raise FlowRefused(own.flow, f"{record.flow} {record.id} would be moved twice in one transaction")
    if len(names) > OTHERS_MAX:
        raise FlowRefused(own.flow, f"more than {OTHERS_MAX} records in one transaction")
    others.records.append(record)
    others.moves.append(move)
    others.intents += booking.intents
    return booking
