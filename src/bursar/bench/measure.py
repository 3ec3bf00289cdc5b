"""Windows, medians and rows: how anything is measured here.

A window is a stretch of work with its own start and end; what is compared takes turns, window by window. The figure is
the median of the windows, which tolerates a machine that was busy with something else for a while.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence

import msgspec

from bursar.bench.workload import Workload
from bursar.ledger import Ledger


class Pace(msgspec.Struct, frozen=True):
    """How long and how often to measure."""

    windows: int
    seconds: float  # of one window
    first_seconds: float  # of load on either database before anything is measured
    warm_seconds: float  # before each case
    grown_seconds: float  # of load on each database before its growth is measured
    growth_seconds: float  # of one window of growth
    sizes: tuple[int, ...]  # postings at which growth is measured
    memory_seconds: float


FULL = Pace(5, 1.0, 2.0, 0.6, 2.0, 1.0, (10_000, 100_000, 1_000_000), 20.0)
QUICK = Pace(3, 0.1, 1.5, 0.05, 0.5, 0.08, (10_000, 100_000), 0.4)


class Row(msgspec.Struct, kw_only=True):
    """One line of the result. `ratio` is ours / baseline: 1 is as good as can be, and more is better everywhere."""

    case: str
    store: str
    callers: int
    ours_per_s: float
    baseline_per_s: float
    ratio: float
    against: str  # what baseline_per_s is the rate of
    group: float = 0.0  # commits in one transaction, on average
    wal_bytes: int | None = None  # write-ahead bytes per commit
    p50_ms: float | None = None  # how long ours took, where that was measured
    p99_ms: float | None = None
    samples: list[tuple[float, float]] = []  # ours and baseline, window by window
    note: str = ""


class Window(msgspec.Struct, frozen=True):
    """What was done in a stretch of time."""

    done: int
    seconds: float
    groups: int

    @property
    def rate(self) -> float:
        """Per second."""
        return self.done / self.seconds

    @property
    def group(self) -> float:
        """Commits in one transaction, on average."""
        return self.done / max(1, self.groups)


async def ours(ledger: Ledger, workload: Workload, callers: int, seconds: float) -> Window:
    """Callers who each commit one payment after the other, until the time is up."""
    groups = ledger.writer.batches
    clock = time.perf_counter
    started = clock()
    deadline = started + seconds

    async def caller() -> int:
        done = 0
        while done == 0 or clock() < deadline:  # at least one: a machine that paused must not measure nothing
            await ledger.commit(workload.entry())
            done += 1
        return done

    done = sum(await asyncio.gather(*[caller() for _ in range(callers)]))
    return Window(done, clock() - started, ledger.writer.batches - groups)


def row_of(
    case: str, store: str, callers: int, samples: Sequence[tuple[float, float]], *, against: str, group: float = 0.0
) -> Row:
    """A row from pairs of rates."""
    mine = statistics.median(sample[0] for sample in samples)
    least = statistics.median(sample[1] for sample in samples)
    return Row(
        case=case,
        store=store,
        callers=callers,
        ours_per_s=round(mine, 1),
        baseline_per_s=round(least, 1),
        ratio=round(mine / least, 3),
        against=against,
        group=round(group, 1),
        samples=[(round(a, 1), round(b, 1)) for a, b in samples],
    )
