"""Numbers of withdrawals for metrics: what is open by status, and what ended lately. Read from the database alone.

What a look costs does not grow with history, for the same reasons as that of payouts (payouts/measures).
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.flows.payouts.measures import ENDED_MAX, WINDOW_S
from bursar.flows.withdrawals.machine import COMPLETED, OPEN, STATUS
from bursar.store import Store
from bursar.store.session import Table
from bursar.store.sql import bring

MANDATE: Final = "mandate"  # who has approved
PEOPLE: Final = "people"

bring("bursar.flows.withdrawals")


class Approved(msgspec.Struct, frozen=True):
    """Withdrawals that ended within the window and had been approved, by a mandate or by people."""

    count: int
    took_us: int  # from the request to the approval, of all of them

    @property
    def seconds(self) -> float:
        """From the request to the approval, on average."""
        return self.took_us / self.count / 1e6


class Measures(msgspec.Struct, frozen=True):
    """What was measured."""

    open: dict[str, int]  # by the specification's status
    ended: dict[tuple[str, str], int]  # by chain and status, within the window
    approved: dict[str, Approved]  # by who has approved

    @property
    def chains(self) -> list[str]:
        """On which something ended."""
        return sorted({chain for chain, _ in self.ended})

    def completion_ratio(self, chain: str) -> float:
        """The share of what ended on a chain that was paid."""
        ends = {status: count for (name, status), count in self.ended.items() if name == chain}
        return ends.get(STATUS[COMPLETED], 0) / sum(ends.values())


class WithdrawalNumbers(Table):
    """The statements of metrics."""

    async def measure(self) -> Measures:
        """Read them."""
        counts = await self._s.rows("withdrawals_open", sorted({STATUS[state] for state in OPEN}))
        ended: dict[tuple[str, str], int] = {}
        approved: dict[str, Approved] = {}
        for chain, state, automatic, count, decided, took_us in await self._s.rows(
            "withdrawals_ended", WINDOW_S * 10**6, ENDED_MAX
        ):
            where = (chain or "", STATUS[state])
            ended[where] = ended.get(where, 0) + int(count)
            if decided:
                by = MANDATE if automatic else PEOPLE
                before = approved.get(by, Approved(0, 0))
                approved[by] = Approved(before.count + int(decided), before.took_us + int(took_us))
        return Measures({row[0]: row[1] for row in counts}, ended, approved)


async def measured(store: Store) -> Measures:
    """The numbers as they are now."""
    return await WithdrawalNumbers(store.read.session).measure()
