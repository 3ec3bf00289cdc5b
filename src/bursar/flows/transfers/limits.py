"""What one user may do in a second and in a day: limits as rows, counted in the transaction that writes the record
(T37)."""

from __future__ import annotations

import msgspec

from bursar.flows.transfers.checks import Code
from bursar.flows.transfers.flow import SCOPE
from bursar.flows.transfers.request import Transfer
from bursar.model.money import MINOR_MAX
from bursar.writer import Limit

COUNT_MAX = 2**62
SECOND_US, DAY_US = 1_000_000, 86_400_000_000


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What one user may do (000 §1.5.6). None: no limit."""

    per_second: int | None = 10
    per_day: int | None = 100
    amount_per_day: dict[str, int] = {}  # asset → smallest units

    def used_by(self, transfer: Transfer, now_us: int) -> tuple[Limit, ...]:
        """What a transfer uses up, in buckets of a second and of a day (UTC). Pure."""
        second, day = now_us // SECOND_US, now_us // DAY_US
        who = f"{SCOPE}:{transfer.user}"
        buckets = (
            (f"{who}:s:{second}", self.per_second, (second + 1) * SECOND_US, Code.RATE_LIMIT_EXCEEDED),
            (f"{who}:d:{day}", self.per_day, (day + 1) * DAY_US, Code.DAILY_LIMIT_EXCEEDED),
        )
        found = [
            Limit(key=key, count_max=most, amount_max=MINOR_MAX, until_us=until_us, code=code)
            for key, most, until_us, code in buckets
            if most is not None
        ]
        amount_max = self.amount_per_day.get(transfer.asset)
        if amount_max is not None:
            found.append(
                Limit(
                    key=f"{who}:a:{transfer.asset}:{day}",
                    count_max=COUNT_MAX,
                    amount_max=amount_max,
                    amount=transfer.minor,
                    until_us=(day + 1) * DAY_US,
                    code=Code.DAILY_AMOUNT_EXCEEDED,
                )
            )
        return tuple(found)
