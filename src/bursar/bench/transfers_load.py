"""What transfers are measured with: users who have money at both ends, and transfers that go there and back."""

from __future__ import annotations

import itertools

ASSET = "USDT"
PRECISION = 6
USERS = 400
SEED = 1_000_000 * 10**PRECISION  # what a user has at each end
AMOUNT = 10_000  # of one transfer: 0.01
AMOUNT_TEXT = "0.01"
CORE = "spot"  # the name of the trading core
SECRET = b"only for the benchmark"

Job = tuple[str, int, bool]  # request id, user, into the core


class Load:
    """Transfers that were not made before: user after user, every second one back."""

    def __init__(self, first_id: int) -> None:
        self._numbers = itertools.count()
        self._first_id = first_id

    def job(self) -> Job:
        """The next one."""
        number = next(self._numbers)
        return f"sr-{self._first_id + number}", number * 7919 % USERS + 1, number % 2 == 0
