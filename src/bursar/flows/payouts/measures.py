"""Numbers of payouts for metrics: what is open by status, and what ended lately. Read from the database alone.

What a look costs does not grow with history. What is open is counted along an index of statuses. What has ended is
looked at for the last hour, along an index of ends, and no more than so many of it. Counts over the whole life are
`bursar_records_completed_total`, which each process counts for itself.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.flows.payouts.machine import CONFIRMED, OPEN, STATUS
from bursar.store import Store
from bursar.store.session import Table
from bursar.store.sql import bring

WINDOW_S: Final = 3_600
ENDED_MAX: Final = 10_000  # of the window, the newest

bring("bursar.flows.payouts")


class Ended(msgspec.Struct, frozen=True):
    """Payouts of one chain that ended in one state, within the window."""

    count: int
    retried: int  # needed more than one attempt, or were refused at least once
    sent: int
    sent_us: int  # from the first send to the end, of all of them
    with_gas: int
    gas: int

    @property
    def confirmation_s(self) -> float:
        """From the first send to the end, on average."""
        return self.sent_us / self.sent / 1e6 if self.sent else 0.0

    @property
    def gas_each(self) -> float:
        """Gas per payout, on average."""
        return self.gas / self.with_gas if self.with_gas else 0.0


class Measures(msgspec.Struct, frozen=True):
    """What was measured."""

    open: dict[str, int]  # by the specification's status
    ended: dict[tuple[str, str], Ended]  # by chain and status

    def retry_ratio(self, chain: str) -> float:
        """The share of what ended on a chain that was retried."""
        ends = [ended for (name, _), ended in self.ended.items() if name == chain]
        return sum(each.retried for each in ends) / sum(each.count for each in ends)

    @property
    def chains(self) -> list[str]:
        """On which something ended."""
        return sorted({chain for chain, _ in self.ended})

    def confirmed(self, chain: str) -> Ended | None:
        """What was confirmed on a chain."""
        return self.ended.get((chain, STATUS[CONFIRMED]))


class PayoutNumbers(Table):
    """The statements of this package."""

    async def measure(self) -> Measures:
        """Read them."""
        counts = await self._s.rows("payouts_open", sorted({STATUS[state] for state in OPEN}))
        rows = await self._s.rows("payouts_ended", WINDOW_S * 10**6, ENDED_MAX)
        return Measures(
            {row[0]: row[1] for row in counts},
            {(row[0] or "", STATUS[row[1]]): Ended(*map(int, row[2:])) for row in rows},
        )


async def measured(store: Store) -> Measures:
    """The numbers as they are now."""
    return await PayoutNumbers(store.read.session).measure()
