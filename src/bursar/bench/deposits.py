"""What deposits from chains cost: from final blocks to users' balances, and while nothing arrives.

The chain is simulated, and read by the real EVM rail at two nodes (`deposits_town`). The database only grows. At each
size some windows are measured: so many deposits lie in final blocks; half of them are a user's first, which makes two
accounts; the scan reads on until it has seen them all, and each is stored, judged and credited. Each window is measured
in turn with one on a database where hardly any are there (`deposits-N`), and with the same rows by bare statements
(`floor-N`, `deposits_bare`). What the simulated nodes use is left out, of CPU and of time alike.

`idle-N`: polls that find a new block and nothing in it for us, while so many addresses are issued. None may leave a row
of history. The addresses are an hour old: numbers of those of the last two minutes are read again at each poll.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterable

import msgspec

from bursar.bench.deposits_bare import Copy, database
from bursar.bench.deposits_town import NAME, TOKEN, Intake, Town, address_of, opened
from bursar.bench.measure import Row, row_of
from bursar.bench.places import Place, place_of
from bursar.flows.deposits.arrivals import ARRIVALS, CREDITED
from bursar.flows.deposits.scanning import SCANS
from bursar.flows.payouts.derived import ADDRESSES, DepositWallet, DerivedWallets
from bursar.instance import Bursar
from bursar.rails.chain import Chain

CHUNK = 500  # addresses that are issued at a time
FILL = 1_000  # deposits in blocks at a time, while the database grows
LOOK_S = 0.0005
DEADLINE_S = 600.0
HOUR_US = 3_600_000_000

Say = Callable[[str], None]


class DepositsPace(msgspec.Struct, frozen=True):
    """How much."""

    sizes: tuple[int, ...]  # deposits that are there when windows are measured
    window: int  # deposits
    windows: int  # at each size
    addresses: tuple[int, ...]  # issued, while nothing arrives
    polls: int  # in a sample
    samples: int


FULL = DepositsPace((100, 1_000, 10_000), 100, 5, (100, 10_000, 100_000), 200, 3)
QUICK = DepositsPace((100, 1_000), 100, 3, (100, 5_000), 50, 3)


class Window(msgspec.Struct, frozen=True):
    """What some deposits took: milliseconds for each."""

    cpu_ms: float  # of this process
    wall_ms: float
    nodes_ms: float  # which is in neither
    rail_ms: float  # of CPU: reading the same blocks once more, and nothing else
    bare_ms: float  # of time: the same rows by bare statements
    group: float  # deposits in a transaction of the writer


class AtSize(msgspec.Struct, frozen=True):
    """Windows while so many deposits were there."""

    there: int
    addresses: int
    windows: list[Window]
    small: list[Window]  # in turn with them, on a database where hardly any were there


class Polls(msgspec.Struct, frozen=True):
    """What polls took that found nothing."""

    addresses: int
    cpu_ms: list[float]
    wall_ms: list[float]
    history: int  # rows that they have left
    kib: int  # of memory, for all addresses


def steps(stores: Iterable[str], pace: DepositsPace) -> int:
    """How many times `run` will say something."""
    return sum(1 + len(pace.sizes) + len(pace.addresses) for _ in stores)


async def run(stores: Iterable[str], pace: DepositsPace, say: Say) -> list[Row]:
    """All cases on these stores."""
    rows: list[Row] = []
    for store in stores:
        say(f"{store}: starting")
        with place_of(store) as place:
            sizes = await _grown(place, pace, say)
            polls = await _idle(place, pace, say)
        rows += [_flat(store, pace.sizes[0], size) for size in sizes]
        rows += [_floor(store, size) for size in sizes]
        rows += [_polls(store, polls[0], one) for one in polls]
    return rows


# --- deposits --------------------------------------------------------------------------------------------------------


async def _grown(place: Place, pace: DepositsPace, say: Say) -> list[AtSize]:
    found = []
    bare = await place.blank("bare")
    async with Bursar(bare):
        pass  # makes the schema
    async with _desk(place, "deposits", bare) as grown:
        for size in pace.sizes:
            say(f"{place.store}: {size:,} deposits")
            while grown.there < size:  # the first ones warm up
                await grown.window(min(FILL, size - grown.there))
            async with _desk(place, f"small_{size}") as small:
                await small.window(pace.sizes[0])
                pairs = [
                    (await grown.window(pace.window), await small.window(pace.window)) for _ in range(pace.windows)
                ]
            found.append(AtSize(size, len(grown.users), [pair[0] for pair in pairs], [pair[1] for pair in pairs]))
        await _require_all(grown)
    return found


@contextlib.asynccontextmanager
async def _desk(place: Place, name: str, bare: str = "") -> AsyncIterator[Desk]:
    """A database of its own on a chain of its own; `bare`: where its rows are written once more."""
    town, address = Town(), await place.blank(name)
    async with Bursar(address) as bursar, contextlib.AsyncExitStack() as stack:
        intake, copy = await opened(bursar, town.chain()), None
        if bare:
            copy = Copy(await database(address), await database(bare))
            stack.push_async_callback(copy.close)
        desk = Desk(town, intake, copy)
        await desk.begin()
        yield desk


async def _require_all(desk: Desk) -> None:
    counts = await desk.intake.bursar.store.read.records.counts()
    found = {state: count for (flow, state), (count, _) in counts.items() if flow == ARRIVALS.name}
    if found != {CREDITED: desk.there}:
        raise RuntimeError(f"{desk.there} deposits should be credited, and they are {found}")


class Desk:
    """Makes deposits arrive, and waits until they are credited."""

    def __init__(self, town: Town, intake: Intake, copy: Copy | None) -> None:
        self.town = town
        self.intake = intake
        self.copy = copy
        self.users: list[str] = []  # addresses; the first is user 1's
        self.there = 0
        self._rail = town.chain()
        self._read: tuple[int, str] = (0, "")

    async def begin(self) -> None:
        """What is there now is of no deposit."""
        if self.copy is not None:
            await self.copy.begin()
        self._read = await self._rail.final_block()

    async def window(self, deposits: int) -> Window:
        """So many deposits, half of them to new addresses."""
        town, engine = self.town, self.intake.engine
        old = len(self.users)
        await self._issue(deposits // 2)
        to = self.users[old:] + town.dice.choices(self.users, k=deposits - deposits // 2)
        town.dice.shuffle(to)
        town.give(to)
        gc.collect()
        cpu, begun, nodes_s, written = time.process_time(), time.perf_counter(), town.nodes_s, self.intake.written
        await read_on(self.intake)
        while engine.in_progress_of(ARRIVALS.name):  # noqa: ASYNC110 (tasks of the engine's own)
            await asyncio.sleep(LOOK_S)
        cpu, wall, nodes_s = time.process_time() - cpu, time.perf_counter() - begun, town.nodes_s - nodes_s
        written = self.intake.written - written
        self.there += deposits
        bare_s = 0.0 if self.copy is None else await self.copy.write(max(1, written // 2))
        each = 1_000 / deposits
        return Window(
            cpu_ms=(cpu - nodes_s) * each,
            wall_ms=(wall - nodes_s) * each,
            nodes_ms=nodes_s * each,
            rail_ms=await self._read_again() * each,
            bare_ms=bare_s * each,
            group=2 * deposits / max(1, written),
        )

    async def _issue(self, count: int) -> None:
        """Addresses of new users, each looked at as a worker does."""
        first, engine = len(self.users) + 1, self.intake.engine
        made = await asyncio.gather(*[self.intake.deposits.issue(first + n, NAME) for n in range(count)])
        self.users += [view.address for view in made]
        records = [await engine.record(ADDRESSES.name, view.wallet) for view in made]
        await asyncio.gather(*[engine.process_now(record, DEADLINE_S) for record in records])

    async def _read_again(self) -> float:
        """Seconds of CPU in which the rail alone reads what the window has read."""
        owned = await self.intake.deposits.out.wallets.derived.of_chain(NAME)
        cpu, nodes_s = time.process_time(), self.town.nodes_s
        final, _ = await self._rail.final_block()
        while self._read[0] < final:
            page = await self._rail.arrivals(owned, frozenset({TOKEN}), *self._read, final)
            self._read = page.up_to, page.up_to_hash
        return time.process_time() - cpu - (self.town.nodes_s - nodes_s)


async def read_on(intake: Intake) -> None:
    """Poll until the scan has come to the final block."""
    chain: Chain = intake.deposits.payouts.chains[NAME]
    final, _ = await chain.final_block()
    while True:
        record = await intake.engine.record(SCANS.name, NAME)
        await intake.engine.step(record)
        after = await intake.engine.record(SCANS.name, NAME)
        if after.version == record.version:  # a poll that has found nothing
            return
        if msgspec.json.decode(after.body)["block"] >= final:
            return


# --- nothing arrives -------------------------------------------------------------------------------------------------


async def _idle(place: Place, pace: DepositsPace, say: Say) -> list[Polls]:
    found = []
    town, address = Town(), await place.blank("idle")
    async with Bursar(address) as bursar:
        intake = await opened(bursar, town.chain())
        there = 0
        for addresses in pace.addresses:
            say(f"{place.store}: {addresses:,} addresses")
            await _issue_many(intake, address, there, addresses)
            there = addresses
            await _poll(intake, town, 3)  # warm: the first reads all addresses
            history = await _history(address)
            samples = [await _poll(intake, town, pace.polls) for _ in range(pace.samples)]
            cpu_ms, wall_ms = ([sample[place] for sample in samples] for place in (0, 1))
            left = await _history(address) - history
            found.append(Polls(addresses, cpu_ms, wall_ms, left, await _kib(intake)))
    return found


async def _poll(intake: Intake, town: Town, polls: int) -> tuple[float, float]:
    """CPU and time of a poll, in milliseconds."""
    cpu_s = wall_s = 0.0
    record = await intake.engine.record(SCANS.name, NAME)
    for _ in range(polls):
        town.strangers()
        cpu, begun, nodes_s = time.process_time(), time.perf_counter(), town.nodes_s
        await intake.engine.step(record)
        nodes_s = town.nodes_s - nodes_s
        cpu_s += time.process_time() - cpu - nodes_s
        wall_s += time.perf_counter() - begun - nodes_s
    return cpu_s / polls * 1_000, wall_s / polls * 1_000


async def _issue_many(intake: Intake, address: str, first: int, addresses: int) -> None:
    """Their records as they are started, without the look at what lay there before; and all of it an hour ago."""
    for start in range(first, addresses, CHUNK):
        users = range(start + 1, min(addresses, start + CHUNK) + 1)
        bodies = [DepositWallet(chain=NAME, user=user, address=address_of(user)) for user in users]
        starts = [
            intake.engine.start(ADDRESSES.name, body, id=f"dep-{body.user}", owner=str(body.user)) for body in bodies
        ]
        await asyncio.gather(*starts)
    raw = await database(address)
    hour = "interval '1 hour'" if raw.schema else str(HOUR_US)
    ended = "due = NULL, state = 'issued'"
    await raw.run(f"UPDATE {raw.schema}records SET created_at = created_at - {hour}, {ended} WHERE state = 'new'")
    await raw.close()


async def _history(address: str) -> int:
    raw = await database(address)
    [(rows,)] = await raw.fetch(f"SELECT count(*) FROM {raw.schema}transitions")
    await raw.close()
    return int(rows)


async def _kib(intake: Intake) -> int:
    """Memory for all addresses: what a further copy of them takes."""
    gc.collect()
    tracemalloc.start()
    other = DerivedWallets(intake.bursar.store)
    known = await other.of_chain(NAME)
    took = tracemalloc.get_traced_memory()[0] if known else 0
    tracemalloc.stop()
    return took // 1_024


# --- rows ------------------------------------------------------------------------------------------------------------


def _flat(store: str, fewest: int, size: AtSize) -> Row:
    """Deposits per second of CPU, beside those where hardly any were there: 1 is flat, less is dearer."""
    pairs = zip(size.windows, size.small, strict=True)
    samples = [(1_000 / one.cpu_ms, 1_000 / other.cpu_ms) for one, other in pairs]
    row = row_of(f"deposits-{size.there}", store, size.there, samples, against=f"the same with {fewest}, in turn")
    row.group = round(_median(size.windows, "group"), 1)
    cpu, wall, rail, nodes = (_median(size.windows, what) for what in ("cpu_ms", "wall_ms", "rail_ms", "nodes_ms"))
    row.note = f"{cpu:.3f} ms of CPU and {wall:.3f} ms of time a deposit, {cpu / _median(size.small, 'cpu_ms'):.2f} "
    row.note += (
        f"times the CPU with {fewest}; reading the chain alone takes {rail:.3f} ms of it; the nodes' {nodes:.3f} "
    )
    row.note += f"ms are left out; {size.addresses:,} addresses were issued in the end"
    return row


def _floor(store: str, size: AtSize) -> Row:
    """Deposits per second, beside the same rows by bare statements."""
    samples = [(1_000 / one.wall_ms, 1_000 / one.bare_ms) for one in size.windows]
    row = row_of(f"floor-{size.there}", store, size.there, samples, against="the same rows by bare statements")
    row.group = round(_median(size.windows, "group"), 1)
    ours, bare = (_median(size.windows, what) for what in ("wall_ms", "bare_ms"))
    row.note = f"{ours:.3f} ms a deposit, and {bare:.3f} ms its rows alone"
    return row


def _polls(store: str, fewest: Polls, polls: Polls) -> Row:
    """Polls per second of CPU, beside those with the fewest addresses."""
    pairs = zip(polls.cpu_ms, fewest.cpu_ms, strict=True)
    samples = [(1_000 / one, 1_000 / other) for one, other in pairs]
    against = f"the same with {fewest.addresses}"
    row = row_of(f"idle-{polls.addresses}", store, polls.addresses, samples, against=against)
    cpu = statistics.median(polls.cpu_ms)
    row.note = f"{cpu:.3f} ms of CPU and {statistics.median(polls.wall_ms):.3f} ms of time a poll, "
    row.note += f"{cpu / statistics.median(fewest.cpu_ms):.2f} times the CPU with {fewest.addresses}; "
    row.note += f"{polls.history} rows of history; {polls.kib:,} KiB of memory for the addresses"
    return row


def _median(windows: list[Window], what: str) -> float:
    return statistics.median(float(getattr(window, what)) for window in windows)
