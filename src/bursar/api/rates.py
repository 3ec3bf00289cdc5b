"""How often each user may ask in a second (T46): counted in memory, because a row for each request that is refused
would make a flood of them dearer for us than for whoever sends it.

Per process, then. What is *accepted* is counted once more in the transaction that writes the transfer, so that many
hosts agree on it. Both count by the same seconds of the clock. Only the current second is remembered: no more users
than can ask in one.
"""

from __future__ import annotations

from bursar.api.problems import Problem
from bursar.flows.transfers import Code
from bursar.ports import Ports

SECOND_US = 1_000_000


class Rate:
    """What each user has used up of the current second."""

    def __init__(self, ports: Ports, per_second: int, what: str) -> None:
        """`per_second` 0: no limit."""
        self._ports = ports
        self._per_second = per_second
        self._what = what
        self._second = 0
        self._counts: dict[str, int] = {}

    def count(self, who: str) -> None:
        """Count one request; a Problem if it is one too many."""
        if not self._per_second:
            return
        self._now()
        used = self._counts.get(who, 0)
        if used >= self._per_second:
            raise Problem(
                Code.RATE_LIMIT_EXCEEDED,
                f"more than {self._per_second} {self._what} in this second; try again in the next",
            )
        self._counts[who] = used + 1

    def give_back(self, who: str) -> None:
        """It turned out not to count."""
        self._now()
        if self._counts.get(who):
            self._counts[who] -= 1

    def _now(self) -> None:
        second = self._ports.now_us() // SECOND_US
        if second != self._second:  # also if the clock was set back
            self._second = second
            self._counts = {}


class Turn:
    """One request that wants to move money: counted once, whether it is carried out or refused; not if it repeats one
    that was accepted (T12)."""

    def __init__(self, rate: Rate, who: str) -> None:
        self._rate = rate
        self._who = who
        self._is_counted = False

    def count(self) -> None:
        """Count it; a Problem if it is one too many."""
        if not self._is_counted:
            self._rate.count(self._who)
            self._is_counted = True

    def give_back(self) -> None:
        """It was answered with what an earlier request got."""
        if self._is_counted:
            self._rate.give_back(self._who)
            self._is_counted = False
