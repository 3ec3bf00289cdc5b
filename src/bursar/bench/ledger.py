"""The ledger's cases.

- `uniform`, `hot-source`, `hot-target` at 1, 16 and 256 callers: the ledger beside its `baseline`, which writes
  the same rows in batches of the size that the ledger itself reached. One database for each, on the same server.
- `plain-uniform`: the ledger beside a table of balances (`plain`), one transaction per payment.
- `growth-uniform-N`, `growth-hot-N`: the ledger on a database of N postings beside the same on 10^4, with the
  write-ahead bytes of a commit. One database per size, all open at once, window by window in turn.
- `memory`: resident bytes of this process after the first half of many commits, over those at the end.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path

import bursar
from bursar.bench import baseline as baselines
from bursar.bench import plain as plains
from bursar.bench.baseline import Baseline
from bursar.bench.load import BASE
from bursar.bench.measure import Pace, Row, ours, row_of
from bursar.bench.places import Place, place_of
from bursar.bench.workload import Workload
from bursar.ledger import Ledger

CALLERS = (1, 16, 256)
SHAPES = ("uniform", "hot-source", "hot-target")
MANY = CALLERS[-1]
GROWTH = ("uniform", "hot")
PAGE = 4096
SETTLE_GROUPS = 9  # to find the baseline's fastest way at a batch size
SETTLE_PAYMENTS = 60

Say = Callable[[str], None]


def steps(stores: Iterable[str], pace: Pace) -> int:
    """How many times `run` will say something: for a progress bar."""
    return len(list(stores)) * (len(SHAPES) * len(CALLERS) + 1 + len(GROWTH) + 1 + 3 + len(pace.sizes) - 1)


async def run(stores: Iterable[str], pace: Pace, say: Say) -> list[Row]:
    """All cases on these stores."""
    rows: list[Row] = []
    for store in stores:
        say(f"{store}: starting")
        with place_of(store) as place:
            rows += await _on(place, pace, say)
    return rows


async def _on(place: Place, pace: Pace, say: Say) -> list[Row]:
    rows: list[Row] = []
    base = await place.make("base", BASE)
    mine, bare = await place.copy(base, "mine"), await place.copy(base, "bare")
    async with bursar.open(mine) as b, place.baseline(bare, BASE) as baseline:
        lines = {shape: (Workload(shape), Workload(shape)) for shape in SHAPES}
        say(f"{place.store}: warming up")
        await _warm_up(b.ledger, baseline, lines["uniform"], pace)
        await place.settle()
        for shape in SHAPES:
            for callers in CALLERS:
                say(f"{place.store}: {shape}, {callers} callers")
                rows.append(await _beside_baseline(place, b.ledger, baseline, lines[shape], callers, pace))
        say(f"{place.store}: beside a table of balances")
        rows.append(await _beside_plain(place, b.ledger, lines["uniform"][0], pace))
        say(f"{place.store}: memory")
        # Here, where the database's own cache has filled up.
        memory = await _memory(place, b.ledger, lines["uniform"][0], pace)
    return [*rows, *await _growth(place, base, pace, say), memory]


async def _warm_up(ledger: Ledger, baseline: Baseline, lines: tuple[Workload, Workload], pace: Pace) -> None:
    """Load on both, until both have their caches full and have been round their write-ahead log.

    A log that is still growing makes every sync dearer. The faster side is done with that sooner, and would be measured
    without it beside a side that is not.
    """
    ours_line, baseline_line = lines
    rate = (await ours(ledger, ours_line, MANY, pace.first_seconds)).rate
    await baselines.window(baseline, baseline_line, MANY, pace.first_seconds, 2 * rate)


async def _beside_baseline(
    place: Place, ledger: Ledger, baseline: Baseline, lines: tuple[Workload, Workload], callers: int, pace: Pace
) -> Row:
    ours_line, baseline_line = lines
    warm = await ours(ledger, ours_line, callers, pace.warm_seconds)
    size = max(1, round(warm.group))
    await baselines.settle(baseline, baseline_line, size, max(SETTLE_GROUPS, SETTLE_PAYMENTS // size))
    rate = (await baselines.window(baseline, baseline_line, size, pace.warm_seconds, warm.rate)).rate
    samples, groups = [], []
    gc.collect()
    for _ in range(pace.windows):
        window = await ours(ledger, ours_line, callers, pace.seconds)
        size = max(1, round(window.group))
        least = await baselines.window(baseline, baseline_line, size, pace.seconds, rate)
        rate = least.rate
        samples.append((window.rate, least.rate))
        groups.append(window.group)
    return row_of(ours_line.shape, place.store, callers, samples, against="baseline", group=statistics.median(groups))


async def _beside_plain(place: Place, ledger: Ledger, line: Workload, pace: Pace) -> Row:
    samples, groups = [], []
    async with place.plain("plain") as plain:
        other = Workload("uniform")
        await plains.window(plain, other, MANY, pace.warm_seconds)
        for _ in range(pace.windows):
            window = await ours(ledger, line, MANY, pace.seconds)
            peer = await plains.window(plain, other, MANY, pace.seconds)
            samples.append((window.rate, peer.rate))
            groups.append(window.group)
    row = row_of("plain-uniform", place.store, MANY, samples, against="plain", group=statistics.median(groups))
    row.note = "beside a table of balances, one transaction per payment"
    return row


async def _growth(place: Place, base: str, pace: Pace, say: Say) -> list[Row]:
    rows: list[Row] = []
    addresses: dict[int, str] = {}
    for size in pace.sizes:
        if size == BASE:
            addresses[size] = await place.copy(base, "growth_base")
            continue
        say(f"{place.store}: filling a database with {size:,} postings")
        addresses[size] = await place.make(f"growth_{size}", size)
    await place.settle()
    async with contextlib.AsyncExitStack() as stack:
        ledgers = {
            size: (await stack.enter_async_context(bursar.open(address))).ledger for size, address in addresses.items()
        }
        for shape in GROWTH:
            say(f"{place.store}: growth, {shape}")
            rows += await _growth_of(place, shape, addresses, ledgers, pace)
    return rows


async def _growth_of(
    place: Place, shape: str, addresses: dict[int, str], ledgers: dict[int, Ledger], pace: Pace
) -> list[Row]:
    lines = {size: Workload(shape) for size in ledgers}
    rates: dict[int, list[float]] = {size: [] for size in ledgers}
    bytes_each: dict[int, int] = {}
    groups: dict[int, float] = {}
    for size, ledger in ledgers.items():
        await ours(ledger, lines[size], MANY, pace.grown_seconds)  # as in `_warm_up`
    await place.settle()
    for _ in range(pace.windows):
        for size, ledger in ledgers.items():
            window = await ours(ledger, lines[size], MANY, pace.growth_seconds)
            rates[size].append(window.rate)
            groups[size] = window.group
    for size, ledger in ledgers.items():
        async with place.wal(addresses[size]) as counted:
            window = await ours(ledger, lines[size], MANY, pace.growth_seconds)
        bytes_each[size] = counted[0] // window.done
    rows = []
    for size in ledgers:
        samples = list(zip(rates[size], rates[BASE], strict=True))
        against = f"the same at {BASE:,} postings"
        row = row_of(f"growth-{shape}-{size}", place.store, MANY, samples, against=against, group=groups[size])
        row.wal_bytes = bytes_each[size]
        rows.append(row)
    return rows


async def _memory(place: Place, ledger: Ledger, line: Workload, pace: Pace) -> Row:
    await ours(ledger, line, MANY, pace.memory_seconds / 4)
    halves, resident = [], []
    for _ in range(2):
        window = await ours(ledger, line, MANY, pace.memory_seconds / 2)
        halves.append(window)
        gc.collect()
        resident.append(_resident())
    first, second = halves
    row = row_of(
        "memory", place.store, MANY, [(second.rate, first.rate)], against="its own first half", group=second.group
    )
    row.ratio = round(resident[0] / resident[1], 3)
    grown = resident[1] - resident[0]
    row.note = f"ratio of resident bytes; {grown / second.done:.0f} bytes more per commit over {second.done:,} commits"
    return row


def _resident() -> int:
    """Resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * PAGE
