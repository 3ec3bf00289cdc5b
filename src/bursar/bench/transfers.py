"""The cases of internal transfers: settled transfers per second, every second one back.

- `plain`, `dbos` at 1, 16, 64 and 256 callers, in process: beside the version that is written in an afternoon
  (`transfers_plain`) and the same two steps with DBOS (`transfers_dbos`; PostgreSQL only), on databases of the same
  server and against the same core. All take turns, window by window.
- `http` at the same numbers of clients: `bursar serve` in its own process beside the library in this one;
  `http-dbos`: beside DBOS behind the same web server.
- `half-rate`: transfers arrive at half of the highest rate, whether or not earlier ones have settled. The ratio is the
  allowed p99 (500 ms) over the measured.
- `overload-http`: twice as many clients as the server takes requests. How many of the accepted transfers settled.
- `recovery`: a process that has started many transfers and finished none is killed; how long until all have ended, with
  60 s allowed for 100,000.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

import bursar
from bursar.bench import transfers_http as http
from bursar.bench.measure import Row, row_of
from bursar.bench.places import DISKS, Place, place_of
from bursar.bench.processes import started
from bursar.bench.transfers_load import AMOUNT_TEXT, ASSET, CORE, PRECISION, SECRET, SEED, USERS, Job, Load
from bursar.bench.transfers_plain import PlainTransfers, PostgresPlain, SqlitePlain, ends
from bursar.engine import Worker
from bursar.flows.transfers import AccountType, Limits, Request, Transfers
from bursar.ledger import Ledger
from bursar.model.errors import AlreadyExists
from bursar.ports import SystemPorts
from bursar.rails.trading import TradingClient

CALLERS = (1, 16, 64, 256)
HTTP_PEER_CLIENTS = 64
P99_ALLOWED_S = 0.5
RECOVERY_ALLOWED_S, RECOVERY_OF = 60.0, 100_000
PEER_IDS = 10**16  # ids of peers begin far from ours and from each other
SEED_IDS = 9 * 10**18
PEERS = "peers"
CHUNK = 200
DEADLINE_S = 120.0

Say = Callable[[str], None]
Transfer = Callable[[Job], Awaitable[None]]


class TransfersPace(msgspec.Struct, frozen=True):
    """How long, how often, how much."""

    windows: int
    seconds: float
    warm_seconds: float
    in_flight: int  # transfers that a crash leaves behind
    callers: tuple[int, ...] = CALLERS


FULL = TransfersPace(5, 2.0, 0.5, RECOVERY_OF)
QUICK = TransfersPace(1, 0.2, 0.05, 1_000)


class Window(msgspec.Struct):
    """What was done in a stretch of time."""

    rate: float
    waits: list[float]

    def percentile(self, share: float) -> float:
        """In seconds."""
        return sorted(self.waits)[min(len(self.waits) - 1, int(len(self.waits) * share))]


def steps(stores: Iterable[str], pace: TransfersPace) -> int:
    """How many times `run` will say something."""
    return sum(4 + 2 * len(pace.callers) + (store == "postgres") for store in stores)


async def run(stores: Iterable[str], pace: TransfersPace, say: Say) -> list[Row]:
    """All cases on these stores."""
    rows: list[Row] = []
    for store in stores:
        say(f"{store}: starting")
        with place_of(store) as place, tempfile.TemporaryDirectory(prefix="bursar-bench-", dir=_disk()) as name:
            rows += await _on(place, Path(name), pace, say)
    return rows


def _disk() -> Path:
    """Where fsync means something."""
    return next(disk for disk in DISKS if disk.is_dir() and os.access(disk, os.W_OK))


async def _on(place: Place, folder: Path, pace: TransfersPace, say: Say) -> list[Row]:
    rows: list[Row] = []
    (folder / "secret").write_bytes(SECRET)
    (folder / "secret").chmod(0o600)
    # The peers have a core of their own: what they do there is in no ledger, and no server would take it for right.
    async with core_of(folder, "core") as client, core_of(folder, PEERS) as other:
        for one in (client, other):
            await _fund_core(one)
        address = await place.blank("transfers")
        async with bursar.open(address) as b, _peers(place, other) as peers:
            transfers = await prepared(b.ledger, client)
            await _fund(transfers)
            ours = _library(transfers)
            best = 0.0
            for callers in pace.callers:
                say(f"{place.store}: {callers} callers")
                made = await _beside_peers(place.store, ours, peers, callers, pace)
                rows += made
                best = max(best, made[0].ours_per_s)
            say(f"{place.store}: at half of the highest rate")
            rows.append(await _half_rate(place.store, ours, best / 2, pace))
            await transfers.engine.finish(DEADLINE_S)
        rows += await _over_http(place, folder, address, rows, pace, say)
        say(f"{place.store}: recovering {pace.in_flight:,} transfers")
        rows.append(await _recovery(place, folder, client, pace))
    return rows


# --- in process


@contextlib.asynccontextmanager
async def core_of(folder: Path, name: str) -> AsyncIterator[TradingClient]:
    """A trading core in its own process, on a disk, and a client of it."""
    words = ["--data", str(folder / name), "--listen", f"unix:{folder}/{name}.sock", "--name", CORE]
    program = [sys.executable, "-c", "from bursar.cli import main; main()"]
    with started([*program, "core", *words, "--secret-file", str(folder / "secret")]):
        async with TradingClient(SystemPorts(), f"unix:{folder}/{name}.sock", name=CORE, secret=SECRET) as client:
            yield client


async def prepared(ledger: Ledger, client: TradingClient) -> Transfers:
    """Transfers on a ledger, without limits, and their asset and accounts."""
    with contextlib.suppress(AlreadyExists):
        await ledger.create_asset(ASSET, precision=PRECISION)
    limits = Limits(per_second=None, per_day=None)
    transfers = Transfers(ledger, {AccountType.SPOT: client}, limits=limits)
    await transfers.prepare()
    return transfers


async def _fund_core(client: TradingClient) -> None:
    for first in range(1, USERS + 1, CHUNK):
        users = range(first, first + CHUNK)
        await asyncio.gather(*[client.deposit(SEED_IDS + user, user, ASSET, SEED) for user in users])


async def _fund(transfers: Transfers) -> None:
    """Money on the funding side; and in the books, what `_fund_core` has put into the core."""
    amount = SEED // 10**PRECISION
    await transfers.ledger.commit(
        bursar.deposit("external:deposits", "trading:spot", ASSET, str(amount * USERS), key="bench:core")
    )
    cores, client = transfers.ledger.store.single().cores, transfers.cores[AccountType.SPOT]
    await cores.bind(CORE, client.core_id)
    await cores.compared_to(CORE, client.sequence)  # no transfer has put it there, and the audit would report it
    for first in range(1, USERS + 1, CHUNK):
        users = range(first, first + CHUNK)
        await asyncio.gather(*[transfers.fund(u, ASSET, str(amount), reference=f"bench:{u}") for u in users])


def _library(transfers: Transfers) -> Transfer:
    async def transfer(job: Job) -> None:
        _, user, inward = job
        source, target = ends(inward)
        request = Request(user=user, source=source, target=target, asset=ASSET, amount=AMOUNT_TEXT)
        view = await transfers.create(request, deadline_s=DEADLINE_S)
        if view.state != "COMMITTED":
            raise RuntimeError(f"transfer {view.req_id} is {view.fsm_state}: {view.error}")

    return transfer


@contextlib.asynccontextmanager
async def _peers(place: Place, client: TradingClient) -> AsyncIterator[dict[str, Transfer]]:
    if place.store == "sqlite":
        plain: PlainTransfers = SqlitePlain((await place.blank("plain")).removeprefix("sqlite:///"), client)
        try:
            yield {"plain": plain.transfer}
        finally:
            await plain.close()
        return
    from bursar.bench import transfers_dbos  # noqa: PLC0415 (it needs `dbos`; SQLite does not)

    plain = await PostgresPlain.open(await place.blank("plain"), client)
    try:
        async with transfers_dbos.launched(await place.blank("dbos"), client):
            yield {"plain": plain.transfer, "dbos": transfers_dbos.transfer}
    finally:
        await plain.close()


_ids = itertools.count(1)


def _load() -> Load:
    """Transfers with ids of their own."""
    return Load(next(_ids) * PEER_IDS)


async def window(transfer: Transfer, load: Load, callers: int, seconds: float) -> Window:
    """Callers who each make one transfer after the other, until the time is up."""
    clock = time.perf_counter
    gc.collect()
    begun = clock()
    waits: list[float] = []

    async def caller() -> None:
        while True:
            asked = clock()
            await transfer(load.job())
            waits.append(clock() - asked)
            if clock() - begun > seconds:
                return

    await asyncio.gather(*[caller() for _ in range(callers)])
    return Window(len(waits) / (clock() - begun), waits)


async def _beside_peers(
    store: str, ours: Transfer, peers: dict[str, Transfer], callers: int, pace: TransfersPace
) -> list[Row]:
    lines = {"ours": ours, **peers}
    loads = {name: _load() for name in lines}
    found: dict[str, list[Window]] = {name: [] for name in lines}
    for name, transfer in lines.items():
        await window(transfer, loads[name], callers, pace.warm_seconds)
    for _ in range(pace.windows):
        for name, transfer in lines.items():
            found[name].append(await window(transfer, loads[name], callers, pace.seconds))
    return [_row(peer, store, callers, found["ours"], found[peer], against=peer) for peer in peers]


def _row(case: str, store: str, callers: int, mine: list[Window], other: list[Window], *, against: str) -> Row:
    samples = [(a.rate, b.rate) for a, b in zip(mine, other, strict=True)]
    row = row_of(case, store, callers, samples, against=against)
    row.p50_ms, row.p99_ms = (
        round(statistics.median(w.percentile(share) for w in mine) * 1000, 1) for share in (0.5, 0.99)
    )
    return row


async def _half_rate(store: str, ours: Transfer, rate: float, pace: TransfersPace) -> Row:
    """Arrivals by the clock, each a task of its own: a late one does not hold back the next."""
    load, clock = _load(), time.perf_counter
    waits: list[float] = []

    async def one() -> None:
        asked = clock()
        await ours(load.job())
        waits.append(clock() - asked)

    begun = clock()
    async with asyncio.TaskGroup() as group:
        for number in range(max(1, int(rate * pace.seconds * pace.windows))):
            delay = begun + number / rate - clock()
            if delay > 0:
                await asyncio.sleep(delay)
            group.create_task(one())
    done = Window(len(waits) / (clock() - begun), waits)
    p99 = done.percentile(0.99)
    row = row_of("half-rate", store, 0, [(1 / p99, 1 / P99_ALLOWED_S)], against="what is allowed")
    row.p50_ms, row.p99_ms = round(done.percentile(0.5) * 1000, 1), round(p99 * 1000, 1)
    row.note = f"p99 {p99 * 1000:.0f} ms at {done.rate:,.0f} transfers a second; {P99_ALLOWED_S * 1000:.0f} allowed"
    return row


# --- over HTTP


async def _over_http(
    place: Place, folder: Path, address: str, before: list[Row], pace: TransfersPace, say: Say
) -> list[Row]:
    rows: list[Row] = []
    library = {row.callers: row.ours_per_s for row in before if row.case == "plain"}
    async with http.serving(folder, address) as server:
        for callers in pace.callers:
            say(f"{place.store}: {callers} clients over HTTP")
            async with server.clients(callers) as transfer:
                await window(transfer, _load(), callers, pace.warm_seconds)
                found = [await window(transfer, _load(), callers, pace.seconds) for _ in range(pace.windows)]
            baseline = [Window(library[callers], []) for _ in found]
            rows.append(_row("http", place.store, callers, found, baseline, against="the library"))
        say(f"{place.store}: twice what the server takes")
        rows.append(await http.overload(server, place.store, pace.seconds * pace.windows))
        if place.store == "postgres":
            say("postgres: DBOS over HTTP")
            rows.append(await _beside_dbos(place, folder, server, pace))
    return rows


async def _beside_dbos(place: Place, folder: Path, server: http.Serving, pace: TransfersPace) -> Row:
    mine, other = [], []
    command = ["-m", "bursar.bench.transfers_dbos", await place.blank("dbos_http"), f"unix:{folder}/{PEERS}.sock"]
    with started([sys.executable, *command]) as port:
        async with server.clients(HTTP_PEER_CLIENTS) as ours, http.dbos_clients(int(port), HTTP_PEER_CLIENTS) as dbos:
            loads = (_load(), _load())
            for number in range(pace.windows + 1):
                seconds = pace.seconds if number else pace.warm_seconds
                pair = [
                    await window(transfer, load, HTTP_PEER_CLIENTS, seconds)
                    for transfer, load in zip((ours, dbos), loads, strict=True)
                ]
                if number:
                    mine.append(pair[0])
                    other.append(pair[1])
    return _row("http-dbos", place.store, HTTP_PEER_CLIENTS, mine, other, against="dbos")


# --- after a crash


async def _recovery(place: Place, folder: Path, client: TradingClient, pace: TransfersPace) -> Row:
    """Started by a process that dies without having finished one; ended by the worker of this one."""
    address = await place.blank("recovery")
    async with bursar.open(address) as b:
        await _fund(await prepared(b.ledger, client))
    words = [address, f"unix:{folder}/core.sock", str(pace.in_flight)]
    with started([sys.executable, "-m", "bursar.bench.transfers_crash", *words]) as said:
        if int(said) != pace.in_flight:
            raise RuntimeError(f"{said} transfers were started, not {pace.in_flight}")
    begun = time.perf_counter()
    async with bursar.open(address) as b:
        transfers = await prepared(b.ledger, client)
        worker = Worker(transfers.engine)
        running = asyncio.create_task(worker.run())
        while (settled := sum(transfers.engine.settled.values())) < pace.in_flight:  # noqa: ASYNC110 (rows, not events)
            await asyncio.sleep(0.05)
        seconds = time.perf_counter() - begun
        worker.stop()
        await running
        if still := await b.store.read.records.open_counts([]):
            raise RuntimeError(f"transfers are still open: {still}")
    allowed = RECOVERY_OF / RECOVERY_ALLOWED_S
    row = row_of("recovery", place.store, 1, [(settled / seconds, allowed)], against="what is allowed")
    row.note = f"{settled:,} in flight after a crash ended in {seconds:.1f} s; 100,000 are allowed 60 s"
    return row
