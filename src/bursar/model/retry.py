"""Retry: when to call again, and when to raise an alert. Pure; chance comes in as a number.

Back-off is exponential with jitter and a cap, and never gives up: only evidence ends a record, never a number of tries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from bursar.model.outcome import Outcome

ATTEMPTS_MAX = 64  # beyond which the exponent no longer grows; the cap was reached long before
FACTOR_MAX = 1_000.0  # to the power of that, it still is a number
CAP_MAX_S = 30 * 86_400.0


@dataclass(frozen=True, kw_only=True)
class Retry:
    """How long to wait before a call is made again."""

    first_s: float = 0.2
    factor: float = 2.0
    cap_s: float = 60.0
    jitter: float = 0.5  # random part of the delay, so that many records do not retry at the same moment

    def __post_init__(self) -> None:
        within = 0 < self.first_s <= self.cap_s <= CAP_MAX_S and 1 <= self.factor <= FACTOR_MAX
        if not (within and 0 <= self.jitter < 1):
            raise ValueError(f"{self} would wait for ever, or not at all")

    def delay_us(self, attempt: int, chance: float) -> int:
        """After so many calls without an answer (at least one), with `chance` in [0, 1)."""
        whole = min(self.cap_s, self.first_s * self.factor ** min(max(attempt, 1) - 1, ATTEMPTS_MAX))
        return int(whole * (1 - self.jitter * chance) * 1e6)


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """When a record raises an alert: after so many calls in a state or so long in it, whichever is earlier."""

    reason: str
    severity: str = "warning"  # or "critical"
    state: str = ""  # "": any that is not terminal, also one without a call
    tries: int | None = None
    seconds: float | None = None
    outcome: Outcome | None = None  # only if the last call ended so
    whole_life: bool = False  # whether the seconds count from the record's creation, not from its state's start

    def rings(self, state: str, attempt: int, age_us: int, outcome: Outcome | None, life_us: int = 0) -> bool:
        """Whether it is time, by the age in this state and since the record was created.

        An age as far below zero counts too: the clock was set back (L24), and too early is better than never.
        """
        if (self.state and self.state != state) or (self.outcome is not None and self.outcome is not outcome):
            return False
        tried = self.tries is not None and attempt >= self.tries
        return tried or (self.seconds is not None and abs(self.counts(age_us, life_us)) >= self.seconds * 1e6)

    def counts(self, age_us: int, life_us: int) -> int:
        """The age that counts for it."""
        return max(age_us, life_us) if self.whole_life else age_us


def until_alarm_us(alarms: Iterable[Alarm], state: str, age_us: int, life_us: int = 0) -> int | None:
    """How long until age alone raises the next alert; None if it raises no further one."""
    left_us = [
        int(a.seconds * 1e6) - a.counts(age_us, life_us)
        for a in alarms
        if a.seconds is not None and a.outcome is None and a.state in ("", state)
    ]
    return min((left for left in left_us if left > 0), default=None)


USUAL_RETRY = Retry()
# T28: at the earlier of the two.
USUAL_ALARMS = (Alarm(reason="stuck", tries=10, seconds=300),)
