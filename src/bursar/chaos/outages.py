"""Which faults a cluster gets, and how long nothing could be written meanwhile. Pure: no IO, no clock.

Two series of writes are measured side by side: a writer that talks to every node of the database directly, and users of
the API. The first says how long the failover took, whatever Patroni says; the second may last only a little longer.
"""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

BACK_WITHIN_S = 2.0  # how much longer than the database's own outage ours may be


class Fault(StrEnum):
    """What happens to a cluster."""

    KILL_LEADER = "kill -9 the leader's node"
    STOP_LEADER = "the leader's node goes silent"
    CUT_LEADER = "the leader's node is cut off"
    SWITCH_OVER = "switchover"
    CRASH_LEADER = "kill -9 the leader's PostgreSQL"
    RESTART_LEADER = "restart of the leader's PostgreSQL"
    KILL_STANDBY = "kill -9 the synchronous standby's node"
    STOP_STANDBY = "the synchronous standby goes silent"
    CUT_STANDBY = "the synchronous standby is cut off"
    STOP_STANDBYS = "both standbys go silent"
    STOP_ETCD = "etcd goes silent"
    KILL_ALL = "kill -9 every node"


# Those that have to end with another leader.
FAILOVERS = (Fault.KILL_LEADER, Fault.STOP_LEADER, Fault.CUT_LEADER, Fault.SWITCH_OVER)


def plan(rng: random.Random) -> Iterator[Fault]:
    """Faults without end: each once before any comes again, and a change of leader every other time at first."""
    while True:
        failovers, others = list(FAILOVERS), [fault for fault in Fault if fault not in FAILOVERS]
        rng.shuffle(failovers)
        rng.shuffle(others)
        for failover, other in zip(failovers, others, strict=False):
            yield failover
            yield other
        yield from others[len(failovers) :]


@dataclass(frozen=True)
class Gap:
    """A time in which no write succeeded."""

    began: float
    ended: float

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.ended - self.began


def longest_gap(successes: Sequence[float], start: float, end: float) -> Gap:
    """The longest time without a success between `start` and `end`, which may have begun before. Of sorted times."""
    first, last = bisect_left(successes, start), bisect_right(successes, end)
    points = [successes[first - 1] if first else start, *successes[first:last], end]
    return max((Gap(*pair) for pair in pairwise(points)), key=lambda gap: gap.seconds)


@dataclass(frozen=True)
class Outage:
    """One fault, and what it cost."""

    fault: Fault
    node: str  # which it hit
    at_s: float  # since the run began
    promoted_s: float | None  # until a new leader was promoted, by Patroni's own history; None: there was none
    database_s: float  # the longest time in which no node of the database took a write
    bursar_s: float  # and in which a server of ours acknowledged none, the slowest of them
    also: str = ""  # which program of ours was killed at the same time

    @property
    def late(self) -> str:
        """What is wrong with it; nothing, if all is well. A program that was killed has to start first."""
        if self.also or self.bursar_s <= self.database_s + BACK_WITHIN_S:
            return ""
        return (
            f"{self.fault} ({self.node}): the database was away for {self.database_s:.1f} s, "
            f"and transfers for {self.bursar_s:.1f} s: more than {BACK_WITHIN_S:g} s longer"
        )
