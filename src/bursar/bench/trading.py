"""The trading core's cases.

- `frames-N` for N of 1, 64 and 1,024 operations in a frame, 1 and 64 clients: operations per second of one core process
  over its Unix socket, durable, beside its `trading_baseline`, which is given the same frames. Each client sends a
  frame and waits for its answer. Frames are made before the clock starts: the core is measured, not the client.
- `restart-snapshot`, `restart-log`: remembered operations per second of a restart from a snapshot and from the log
  alone, beside what is allowed (10^6 in 5 s and in 30 s).
- `snapshot`: the rate while snapshots are being written, beside the rate before, with the longest wait of a frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from bursar.bench.measure import Row, row_of
from bursar.bench.places import DISKS
from bursar.bench.processes import started
from bursar.ports import Stream, SystemPorts
from bursar.rails.trading import Core, FixedLink, Known, protocol, snapshots
from bursar.rails.trading.connection import Target, connect
from bursar.rails.trading.frames import encode
from bursar.rails.trading.history import Item
from bursar.rails.trading.state import CoreState
from bursar.rails.trading.wal import Log

SIZES = (1, 64, 1_024)
CLIENTS = (1, 64)
USERS = 10_000
NAME = "bench"
IDENTITY = "0" * 32
SECRET = b"only for the benchmark"
STORE = "core"
FIRST_ID = 1_734_912_345_678_901_234
ALLOWED_SNAPSHOT_S, ALLOWED_LOG_S, ALLOWED_FOR = 5.0, 30.0, 1_000_000

Say = Callable[[str], None]


class TradingPace(msgspec.Struct, frozen=True):
    """How long, how often, how much."""

    windows: int
    operations: int  # in one window, for the largest frames
    remembered: int


FULL = TradingPace(5, 260_000, 1_000_000)
QUICK = TradingPace(3, 40_000, 100_000)


def steps() -> int:
    """How many times `run` will say something."""
    return 1 + len(SIZES) * len(CLIENTS) + 2


async def run(pace: TradingPace, say: Say) -> list[Row]:
    """All cases."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="bursar-bench-", dir=_disk()) as name:
        folder = Path(name)
        say("starting")
        async with _core(folder) as core, _baseline(folder) as baseline:
            for size, clients in itertools.product(SIZES, CLIENTS):
                say(f"frames of {size}, {clients} clients")
                rows.append(await _beside_baseline(core, baseline, size, clients, pace))
        say(f"restart with {pace.remembered:,} remembered operations")
        rows += await _restarts(folder, pace.remembered)
        say("while snapshots are written")
        rows.append(await _while_snapshots(folder, pace))
    return rows


def _disk() -> Path:
    """Where fsync means something."""
    return next(disk for disk in DISKS if disk.is_dir() and os.access(disk, os.W_OK))


# --- frames


class Load:
    """Frames of operations that were never sent before: three deposits of a user and a withdraw, then the next user."""

    def __init__(self) -> None:
        self._next = FIRST_ID
        self._number = 0

    def frame(self, size: int) -> bytes:
        """One request."""
        start = self._next
        self._next += size
        self._number += 1
        items: list[Item] = [
            (2 if id_ % 4 == 3 else 1, id_, id_ // 4 * 7919 % USERS, 0, 5, 0) for id_ in range(start, start + size)
        ]
        return protocol.frame(protocol.Execute(self._number, ["USDT"], items))


class Window(msgspec.Struct):
    """What was measured."""

    rate: float
    longest_s: float


async def _window(streams: list[Stream], frames: list[bytes], size: int) -> Window:
    """Send frames over all streams, each waiting for its answer; operations per second."""
    left = iter(frames)
    longest = 0.0

    async def client(stream: Stream) -> None:
        nonlocal longest
        splitter = protocol.Splitter(protocol.ANSWER_BYTES_MAX)
        for frame in left:
            sent = time.perf_counter()
            stream.write(frame)
            while not splitter.feed(await stream.read()):
                pass
            longest = max(longest, time.perf_counter() - sent)

    gc.collect()
    started = time.perf_counter()
    await asyncio.gather(*[client(stream) for stream in streams])
    return Window(len(frames) * size / (time.perf_counter() - started), longest)


async def _beside_baseline(core: str, baseline: str, size: int, clients: int, pace: TradingPace) -> Row:
    ports = SystemPorts()
    count = max(clients * 4, min(pace.operations // size, pace.operations // 64))
    mine, least = Load(), Load()
    mine._next += size * clients * 10**12  # ids of this case alone, since the core remembers all
    least._next = mine._next
    ours = [await _log_in(ports, core) for _ in range(clients)]
    bare = [await ports.connect(baseline) for _ in range(clients)]
    samples = []
    for number in range(pace.windows + 1):
        window = await _window(ours, [mine.frame(size) for _ in range(count)], size)
        beside = await _window(bare, [least.frame(size) for _ in range(count)], size)
        if number:  # the first one warms up
            samples.append((window.rate, beside.rate))
    for stream in (*ours, *bare):
        stream.close()
    return row_of(f"frames-{size}", STORE, clients, samples, against="baseline", group=float(size))


async def _log_in(ports: SystemPorts, address: str) -> Stream:
    return (await connect(ports, Target(address, NAME, SECRET), FixedLink(), Known(), 10.0)).stream


# --- processes


@contextlib.asynccontextmanager
async def _core(folder: Path, *options: str) -> AsyncIterator[str]:
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    address = f"unix:{folder}/core.sock"
    words = ["--data", str(folder / "data"), "--listen", address, "--secret-file", str(secret), "--name", NAME]
    command = [sys.executable, "-c", "from bursar.cli import main; main()", "core", *words, *options]
    with started(command):
        yield address


@contextlib.asynccontextmanager
async def _baseline(folder: Path) -> AsyncIterator[str]:
    socket = f"{folder}/baseline.sock"
    with started([sys.executable, "-m", "bursar.bench.trading_baseline", socket, f"{folder}/baseline.log"]):
        yield f"unix:{socket}"


# --- restarts


async def _restarts(folder: Path, count: int) -> list[Row]:
    data = str(folder / "restart")
    state = _write_log(data, count)
    log_s = await _restart_s(data)
    snapshots.write(SystemPorts().files(), data, snapshots.capture(state, NAME, IDENTITY))
    del state
    snapshot_s = await _restart_s(data)
    return [
        _restart_row("restart-snapshot", count, snapshot_s, ALLOWED_SNAPSHOT_S),
        _restart_row("restart-log", count, log_s, ALLOWED_LOG_S),
    ]


def _restart_row(case: str, count: int, seconds: float, allowed_s: float) -> Row:
    row = row_of(case, STORE, 1, [(count / seconds, ALLOWED_FOR / allowed_s)], against="what is allowed")
    row.note = f"{count:,} remembered operations in {seconds:.2f} s; 10^6 are allowed {allowed_s:g} s"
    return row


async def _restart_s(data: str) -> float:
    gc.collect()
    core = await Core.open(SystemPorts(), data, NAME)
    core.close()
    return core.recovery.seconds


def _write_log(data: str, count: int) -> CoreState:
    """A log of so many operations, in frames of a thousand, written without waiting for the disk each time."""
    files = SystemPorts().files()
    files.make_folder(data)
    log = Log(files, data, NAME)
    list(log.read_all())
    log.open(1, IDENTITY)
    state = CoreState()
    for start in range(0, count, 1_000):
        first = state.sequence + 1
        state.execute(["USDT"], [(1, FIRST_ID + n, n * 7919 % USERS, 0, 5, 0) for n in range(start, start + 1_000)])
        log.append(encode(state.drain(), first, state.sequence - first + 1), first)
    log.close()
    return state


# --- snapshots


async def _while_snapshots(folder: Path, pace: TradingPace) -> Row:
    """The rate of a core that remembers much and writes a snapshot every few MiB, beside one that writes none."""
    rates: list[list[Window]] = []
    size, clients = 64, 16
    count = max(clients * 4, pace.operations // size)
    for name, every in (("often", "2"), ("never", "4096")):
        home = folder / name
        home.mkdir()
        (folder / "restart").rename(home / "data")
        async with _core(home, "--snapshot-mib", every) as address:
            load = Load()
            load._next += 10**15
            streams = [await _log_in(SystemPorts(), address) for _ in range(clients)]
            made = [await _window(streams, [load.frame(size) for _ in range(count)], size) for _ in range(pace.windows)]
            rates.append(made)
            for stream in streams:
                stream.close()
        (home / "data").rename(folder / "restart")
    often, never = rates
    samples = [(mine.rate, other.rate) for mine, other in zip(often, never, strict=True)]
    row = row_of("snapshot", STORE, clients, samples, against="the same without snapshots", group=float(size))
    waits = [max(window.longest_s for window in made) * 1000 for made in rates]
    row.note = f"longest wait of a frame {waits[0]:.0f} ms, {waits[1]:.0f} ms without snapshots"
    return row
