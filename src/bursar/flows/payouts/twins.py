"""Payouts for one reason, of which one has turned out to be paid or signed while the other one is open (W3).

One payout per source that has not failed is what the rows see to. They can't help where a payout fails by the word of
people and is paid after all, or is forgotten by a restored database: by then another one may have been requested for
the same reason. If that one is not signed yet it is held, and people cancel it; else an alert says so. Nothing here
decides which of the two is right.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from bursar.engine import Engine, FlowRecord
from bursar.flows.payouts.machine import FAILED, HOLD, MACHINE, STATUS
from bursar.flows.payouts.outside import Outside
from bursar.flows.payouts.payout import SOURCE, Payout
from bursar.model.errors import Conflict, RecordMoved
from bursar.model.flow_rows import RowState

CANCEL_IT: Final = "cancel this one"  # in the reason of a hold


class Twins:
    """Stops the other payout."""

    def __init__(self, out: Outside, engine: Engine) -> None:
        self.out = out
        self.engine = engine

    async def paid_after_all(self, item: FlowRecord[Payout]) -> None:
        """A payout that ended is paid. Another one for the same reason must not be."""
        row = await self.out.store.read.flow_rows.get(MACHINE.name, SOURCE.name, item.body.payment.source)
        if row is not None and row.state is RowState.HELD and row.record != item.record.number:
            why = f"{item.id} was paid for the same reason, after it had failed"
            await self.stop(row.record, item.id, why, "paid after all, and requested again", actor="watcher")

    async def paid_before(self, source: str) -> str:
        """The payout for this reason that has failed and was paid after all, if it was the last one; "": none was."""
        row = await self.out.store.read.flow_rows.get(MACHINE.name, SOURCE.name, source)
        if row is None or row.state is not RowState.RELEASED:
            return ""
        record = await self.out.store.read.records.by_number(row.record)
        if record is None or record.state != FAILED:
            return ""
        return record.id if msgspec.json.decode(record.body, type=Payout).contradicted else ""

    async def stop(self, number: int, payout: str, why: str, alert: str, *, actor: str) -> None:
        """Hold a payout (by its record's number) of which nothing is signed, and tell people about it in any case."""
        record = await self.out.store.read.records.by_number(number)
        if record is None or record.state == FAILED:
            return
        reason = f"{why}; {CANCEL_IT}"
        if STATUS[record.state] == "pending":
            with contextlib.suppress(RecordMoved, Conflict):  # into another state: people cancel what can be cancelled
                await self.engine.signal(record, HOLD, actor, {"reason": reason}, sender=f"hold for {payout}")
        await self.out.alert(record, alert, "critical", f"{record.id}: {reason}")
