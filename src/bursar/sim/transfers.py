"""The transfers scenario: two servers with their workers on one disk, a trading core, callers; all of it breaks.

Callers are outside: each remembers what it asked for, under a `client_order_id` of its own, and what was
answered, and asks again until it knows how each transfer ended; both servers at once, which must say the same. A person
freezes and thaws accounts on both sides meanwhile, also in the moment between a check and the call that relies on it,
so that targets refuse and money has to go back. On some seeds two operators force back what they find on its way, and
on others one switches the flow or a rail off for a while (people), money arrives from outside for accounts that are
frozen or closing (arrivals), or accounts close while a person freezes them (closers).
Every process dies, is paused past its leases, and finds that the clock has jumped. The network cuts, delays and parts:
replies are lost, requests arrive twice. The core's disk loses what was not synced. In the end everything is healed, and
then: every transfer has ended, none happened twice, what users have on both sides is what the transfers add up to,
nothing is in transit, and the ledger's side of the core is what the core says (I4, I5, I7), beside I1, I2, I3 and I8.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass

from bursar.audit import audit
from bursar.engine import Worker, keep_asking
from bursar.flows.transfers import AccountType, Limits, Request, TransferRefused, Transfers, View
from bursar.flows.transfers.checks import Code, Horizons
from bursar.flows.transfers.pruning import prune
from bursar.flows.transfers.request import funding_account
from bursar.flows.transfers.watch import look_at_cores
from bursar.ledger import Ledger
from bursar.model.errors import BursarError
from bursar.model.outcome import Outcome as Said
from bursar.model.retry import Retry
from bursar.rails.trading import Core, CoreStopped, Server, Status, TradingClient
from bursar.sim import people
from bursar.sim.arrivals import Arrivals
from bursar.sim.closers import Closers
from bursar.sim.exchange import (
    ADDRESS,
    FUNDS,
    PATH,
    SECRET,
    USERS,
    Caller,
    FaultyClient,
    TransferOracle,
    empty,
    furnish,
    wishes,
)
from bursar.sim.kernel import CrashAt, Kernel, Run, run
from bursar.sim.net import SimHost, SimNet
from bursar.sim.oracle import Violation
from bursar.sim.process import Moment, Process
from bursar.sim.sharing import SharedPorts
from bursar.sim.two_process import quiet
from bursar.store import connect

URL = f"sqlite:///{PATH}"
FOLDER = "/core"
CALLERS = 4
TRANSFERS_EACH = 5
CRASHES = 3
SERVERS = ("server", "server-2")  # on one machine; the first one judges
SPREAD = {"server": 400, "server-2": 300, "core": 150}  # port calls within which each process dies
LEASE_S = 0.1  # of a record; pauses are shorter and longer
PAUSES = 3
PAUSES_S = (0.05, 0.3, 1.0)
PARTITION_S_MAX = 0.8
TROUBLE_S = 1.0  # virtual seconds within which pauses and partitions begin
JUMP_SHARE = 0.2  # of the boots find another time
JUMPS_S = (-36_000, -3_600, -5, 5, 3_600, 36_000)
TRIES = 12  # of a request, until there is an answer
AGAIN_S_MAX = 0.05
ASKED_TWICE = 0.5  # of the requests go to the second server too
LATE = 0.08  # of the writes to the network
RESTART_S_MAX = 0.3
CUT = 0.03  # of the writes to the network
HEALED_S = 30.0  # virtual seconds within which all must have ended
FREEZES = 4
FREEZE_S_MAX = 0.03
FREEZE_SHARE = 0.1  # of the calls find that the target has been frozen in that moment
RETRY = Retry(first_s=0.05, cap_s=0.5)
PRUNES = 6
PRUNE_S_MAX = 0.8
CALLBACKS_MAX = 200_000  # sixteen times what a run takes: it goes round in circles
HORIZONS = Horizons(room_after_s=1.0, forget_after_s=3.0)  # longer than any process is paused


@dataclass(frozen=True, kw_only=True)
class Size:
    """How much one seed does."""

    callers: int = CALLERS
    entries_each: int = TRANSFERS_EACH


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # transfers that arrived
    rolled_back: dict[str, int]  # by where the money came from, and went back to
    refusals: int
    early: int  # transfers that were begun before all was healed
    retried: int  # calls whose answer was not known
    drivers: int  # servers that moved a record
    trouble: dict[str, int]  # what the network did, pauses, jumps of a clock


class Scenario:
    """One run."""

    def __init__(self, kernel: Kernel, size: Size) -> None:
        self.kernel = kernel
        self.rng = kernel.rng
        self.net = SimNet(kernel)
        self.net.cut_probability = CUT
        self.net.late_probability = LATE
        machine, core = (SimHost(self.net, f"{kernel.seed} {name}") for name in ("server", "core"))
        self.hosts = dict.fromkeys(SERVERS, machine) | {"core": core}
        self.ahead_us = dict.fromkeys((machine, core), 0)  # one machine, one clock
        self.callers = [Caller(n, wishes(kernel.seed, n, size.entries_each)) for n in range(size.callers)]
        self.arrivals = Arrivals(kernel.seed)
        self.closers = Closers(kernel.seed, self.net)
        self.oracle: TransferOracle | None = None  # from when there is something to look at
        self.asking: set[Process] = set()  # whose callers have not all been answered
        self.healed = False
        self.prunes = kernel.seed % 5 == 2
        self.early = 0  # transfers that were begun by then
        self.over = False
        self.finished: asyncio.Future[None] = kernel.loop.create_future()

    async def play(self) -> Outcome:
        """Start everything, let it die and come back, heal, and judge."""
        self.kernel.on_crash = self.crashed
        for name in self.hosts:
            self.boot(name)
        self.trouble()
        await self.finished
        views = [view for caller in self.callers for view in caller.told.values()]
        ends = Counter(view.fsm_state for view in views)
        refusals = ends["FAILED"] + sum(len(caller.refused) for caller in self.callers)
        db = self.hosts["server"].open(PATH)
        (retried,) = db.execute("SELECT count(*) FROM transitions WHERE attempt > 0").fetchone()
        (drivers,) = db.execute("SELECT count(DISTINCT actor) FROM transitions WHERE version > 1").fetchone()
        return Outcome(
            commits=ends["COMMITTED"],
            rolled_back=dict(Counter(view.source.value for view in views if view.fsm_state == "ROLLED_BACK")),
            refusals=refusals,
            early=self.early,
            retried=retried,
            drivers=drivers,
            trouble=dict(self.net.happened),
        )

    def boot(self, name: str) -> None:
        if self.over:
            return
        host = self.hosts[name]
        process = self.kernel.start(name, disk=host)
        if not self.healed and not self.prunes and self.rng.random() < JUMP_SHARE:
            self.ahead_us[host] += self.rng.choice(JUMPS_S) * 1_000_000
            self.net.happened["clock jumps"] += 1
        for each in self.kernel.processes.values():
            each.clock_offset_us = self.ahead_us[self.hosts[each.name]]
        life = self.core(process) if name == "core" else self.live(process)
        process.spawn(life, name=name)

    def crashed(self, process: Process) -> None:
        self.asking.discard(process)
        try:
            self.look()
        except Violation as violation:  # no task waits for this callback: the run would go on without this process
            if not self.finished.done():
                self.finished.set_exception(violation)
            return
        delay = self.rng.random() * RESTART_S_MAX
        self.kernel.loop.call_later(delay, self.boot, process.name, context=Context())

    def look(self) -> TransferOracle | None:
        """After every crash, unless another process is in the middle of something; and in the end."""
        if self.hosts["server"].held():
            return self.oracle
        db = self.hosts["server"].open(PATH)
        if self.oracle is None and db.execute("SELECT 1 FROM records LIMIT 1").fetchone():
            self.oracle = TransferOracle(db)
        if self.oracle is not None and not db.in_transaction:
            self.oracle.records()
        return self.oracle

    def trouble(self) -> None:
        """Pauses past a lease, and a partition, at some time."""
        loop = self.kernel.loop
        for _ in range(PAUSES):
            name, seconds = self.rng.choice(tuple(self.hosts)), self.rng.choice(PAUSES_S)
            loop.call_later(self.rng.random() * TROUBLE_S, self.pause, name, seconds, context=Context())
        server = self.rng.choice(SERVERS)
        begins = self.rng.random() * TROUBLE_S
        ends = begins + self.rng.random() * PARTITION_S_MAX
        loop.call_later(begins, self.part, server, context=Context())
        loop.call_later(ends, self.net.mend, server, "core", context=Context())

    def pause(self, name: str, seconds: float) -> None:
        if not self.healed:
            self.net.happened["pauses"] += 1
            self.kernel.pause(self.kernel.processes[name], seconds)

    def part(self, server: str) -> None:
        if not self.healed:
            self.net.partition(server, "core")

    async def core(self, process: Process) -> None:
        """One life of the core."""
        try:
            core = await Core.open(process.ports, FOLDER, "spot", segment_bytes=2_000, snapshot_bytes=3_000)
            await Server(process.ports, core, SECRET, log=lambda _: None).run(ADDRESS, lambda _: None)
        except (CoreStopped, OSError):
            self.kernel.loop.call_soon(process.crash, context=Context())

    async def live(self, process: Process) -> None:
        """Serve to the end; what goes wrong is the scenario's, unless it is only that the process died."""
        try:
            await self.serve(process)
        except Exception as error:
            if process.alive and not self.finished.done():
                self.finished.set_exception(error)
        else:
            self.finished.set_result(None)

    async def serve(self, process: Process) -> None:
        """One life of a server: open, set up what is missing, drive what the dead one left, answer the callers."""
        store = connect(URL, SharedPorts(process))
        await store.open()
        ledger = Ledger(store)
        async with FaultyClient(process, ledger, self.strikes, self.closers) as client:
            transfers = Transfers(
                ledger,
                {AccountType.SPOT: client},
                limits=Limits(per_second=None, per_day=None),
                retry=RETRY,
                worker=process.name,
                inline=self.kernel.seed % 2 == 0,  # half of the seeds call the ledger's end like any other (ADR 14)
                horizons=HORIZONS if self.prunes else None,
            )
            transfers.engine.lease_us = int(LEASE_S * 1e6)
            transfers.unchecked.add(AccountType.SPOT)
            if process.name == SERVERS[0]:
                await furnish(ledger, transfers)
                await self.arrivals.furnish(ledger)
                await self.closers.furnish(transfers)
            await self.opened(ledger)
            worker, watching = Worker(transfers.engine, scan_s=0.1), None
            async with asyncio.TaskGroup() as group:
                driving = group.create_task(worker.run(), name="worker")
                if self.kernel.seed % 3 == 0:  # operators force some of them
                    watching = group.create_task(keep_asking(transfers.engine), name="forced-calls")
                await self.compare(process, transfers, client)
                await self.ask(process, transfers, client)
                if process.name != SERVERS[0]:
                    await driving  # for ever: the other one ends the run
                await self.heal(process)
                await self.end(process, transfers, client)
                worker.stop()
                await driving
                if watching is not None:
                    watching.cancel()
            self.over = True
            self.kernel.processes[SERVERS[1]].crash()
            await self.judge(ledger, transfers, client, process)

    async def opened(self, ledger: Ledger) -> None:
        """The database can be used, and nothing is driven yet."""

    async def compare(self, process: Process, transfers: Transfers, client: TradingClient) -> None:
        """As at every start: no new transfer before core and ledger were compared."""
        found: list[str] = []
        while transfers.unchecked:
            with contextlib.suppress(BursarError):
                findings = await look_at_cores(transfers, {AccountType.SPOT: client})
                found = [text for finding in findings for text in finding.broken]
            await process.ports.sleep(0.02)
        await self.compared(process, transfers, client, found)

    async def compared(self, process: Process, transfers: Transfers, client: TradingClient, broken: list[str]) -> None:
        """They must agree: nothing was restored."""
        if broken:
            raise Violation(f"core and ledger do not agree: {broken}")

    async def prune(self, transfers: Transfers, client: TradingClient, process: Process) -> None:
        """The core sets room free and forgets, in the middle of everything; on seeds on which no clock jumps."""
        for _ in range(PRUNES):
            await process.ports.sleep(self.rng.random() * PRUNE_S_MAX)
            with contextlib.suppress(BursarError):
                found = await prune(transfers.ledger.store, "spot", client, HORIZONS)
                self.net.happened["pruned"] += not found.note

    async def ask(self, process: Process, transfers: Transfers, client: TradingClient) -> None:
        """Let all callers ask; the second server is asked for some of it, at the same time."""
        if self.healed and process.name != SERVERS[0]:
            return
        self.asking.add(process)
        async with asyncio.TaskGroup() as asking:
            for caller in self.callers:
                share = 1.0 if process.name == SERVERS[0] else ASKED_TWICE
                asking.create_task(self.call(caller, transfers, process, share), name=f"c{caller.number}")
            if self.closers.takes_part:
                asking.create_task(self.closers.close(transfers, process), name="closer")
            if process.name == SERVERS[0]:
                asking.create_task(self.freeze(transfers, client, process), name="freezer")
                if self.closers.takes_part:
                    asking.create_task(self.closers.freeze(transfers.ledger, process), name="person")
                if self.arrivals.takes_part:
                    asking.create_task(self.leave(transfers), name="leaver")
                if self.kernel.seed % 3 == 0:
                    asking.create_task(people.force(transfers, process, self.net.happened), name="operators")
                if self.prunes:
                    asking.create_task(self.prune(transfers, client, process), name="pruner")
                if self.kernel.seed % 5 == 1:
                    asking.create_task(people.switch(transfers, process, self.net.happened), name="operator")
        self.asking.discard(process)

    async def call(self, caller: Caller, transfers: Transfers, process: Process, share: float = 1.0) -> None:
        """Ask for everything that is not answered yet, again and again; PENDING is an answer for now."""
        for wish in caller.wishes:
            if self.rng.random() < share:
                for _ in range(TRIES):
                    if await self.wish(caller, wish, transfers):
                        break
                    await process.ports.sleep(self.rng.random() * AGAIN_S_MAX)

    async def wish(self, caller: Caller, wish: Request, transfers: Transfers) -> bool:
        """Ask once; whether there was an answer."""
        order = wish.client_order_id
        if order in caller.told or order in caller.refused:
            return True
        try:
            view = await transfers.create(wish, deadline_s=0.2 + self.rng.random())
        except TransferRefused as refusal:
            if refusal.reason is Code.TRANSFERS_PAUSED:
                return False
            if self.healed:  # until then the same request may be under way at the other server
                caller.refused.add(order)
            return self.healed
        except (BursarError, ConnectionError):
            return False  # the core or the database could not be asked
        self.hear(caller, order, view)
        return True

    def hear(self, caller: Caller, order: str, view: View) -> None:
        """Every answer to a request is the same."""
        if caller.named.setdefault(order, view.req_id) != view.req_id:
            raise Violation(f"{order} is {caller.named[order]}, and at another server {view.req_id}")
        if view.state != "PENDING":
            before = caller.told.setdefault(order, view)
            if before.fsm_state != view.fsm_state:
                raise Violation(f"{order} was answered {before.fsm_state}, and then {view.fsm_state}")

    async def leave(self, transfers: Transfers) -> None:
        """Somebody's account closes while a deposit waits for it; what can't be asked just now is asked in the end."""
        with contextlib.suppress(BursarError, ConnectionError):
            await self.arrivals.leave(transfers)

    async def freeze(self, transfers: Transfers, client: TradingClient, process: Process) -> None:
        """Accounts are frozen on either side for a moment, in the middle of everything."""
        ledger = transfers.ledger
        for turn in range(FREEZES):
            owner = 1 + self.rng.randrange(USERS)
            account = funding_account(owner)
            user = 1 + self.rng.randrange(USERS)
            await ledger.freeze(account)
            await self.arrivals.arrive(transfers, owner, turn)
            await client.set_status(user, Status.FROZEN)
            await process.ports.sleep(self.rng.random() * FREEZE_S_MAX)
            await ledger.unfreeze(account)
            await client.set_status(user, Status.ACTIVE)
            await process.ports.sleep(self.rng.random() * FREEZE_S_MAX)

    def strikes(self) -> bool:
        """Whether the next call is to find its target frozen."""
        return not self.healed and self.rng.random() < FREEZE_SHARE

    async def heal(self, process: Process) -> None:
        """Nothing breaks from now on, and no other caller asks any more."""
        if not self.healed:
            self.early = len({id_ for caller in self.callers for id_ in caller.named.values()})
        self.healed = True
        self.kernel.calm()
        self.closers.calm()
        self.net.heal()
        for host in self.hosts.values():
            host.state.cut_probability = 0.0
        while self.asking:
            await process.ports.sleep(0.05)

    async def end(self, process: Process, transfers: Transfers, client: TradingClient) -> None:
        """Nothing goes wrong any more: ask until every request has ended."""
        deadline = self.kernel.loop.now + HEALED_S
        await people.switch_on(transfers)
        for user in range(1, USERS + 1):
            await transfers.ledger.unfreeze(funding_account(user))
            while (await client.set_status(user, Status.ACTIVE)).outcome is not Said.SUCCESS:
                if self.kernel.loop.now > deadline:
                    raise Violation("healed, but the core does not serve")
                await process.ports.sleep(0.1)
        while any(len(c.told) + len(c.refused) < len(c.wishes) for c in self.callers):
            if self.kernel.loop.now > deadline:
                raise Violation("healed, but transfers have not come to an end")
            for caller in self.callers:
                await self.call(caller, transfers, process)
            await process.ports.sleep(0.3)

    async def settled(self, process: Process) -> None:
        """Wait until no transaction is open: a server thaws an account, or tells of an alert."""
        deadline, machine = self.kernel.loop.now + HEALED_S, self.hosts["server"]
        while machine.held() or machine.open(PATH).in_transaction:
            if self.kernel.loop.now > deadline:
                raise Violation("healed, but a transaction stays open")
            await process.ports.sleep(0.01)

    async def judge(self, ledger: Ledger, transfers: Transfers, client: TradingClient, process: Process) -> None:
        """Every answer is true, and nothing else happened."""
        await self.settled(process)
        arrived = await self.arrivals.settle(transfers)
        await self.arrivals.judge(ledger)
        await self.closers.judge(transfers, process)
        oracle = self.look()
        assert oracle is not None
        oracle.everything(every_column=True)
        oracle.ended()
        broken = [text for finding in await audit(ledger.store) for text in finding.broken]
        if broken:
            raise Violation(f"audit: {broken}")
        expected = {user: [FUNDS * 100 + arrived.get(user, 0), 0] for user in range(1, USERS + 1)}
        for caller in self.callers:
            for order, view in caller.told.items():
                now = await transfers.get(view.user, view.req_id)
                if (now.fsm_state, now.client_order_id) != (view.fsm_state, order):
                    raise Violation(f"{order} was answered {view.fsm_state}, and is {now.fsm_state}")
                if view.fsm_state == "COMMITTED":
                    minor = int(view.amount.replace(".", "")) * (1 if view.target is AccountType.SPOT else -1)
                    expected[view.user][0] -= minor
                    expected[view.user][1] += minor
        asked = sum(len(caller.told) for caller in self.callers)
        made = sum([len(await transfers.list(user, limit=1_000)) for user in expected])
        if made != asked:
            raise Violation(f"{asked} transfers were asked for and not refused, {made} were made")
        await self._compare(ledger, client, process, expected)

    async def _compare(
        self, ledger: Ledger, client: TradingClient, process: Process, expected: dict[int, list[int]]
    ) -> None:
        for user, (funding, spot) in expected.items():
            while (found := await client.balances(user)).outcome is not Said.SUCCESS:
                await process.ports.sleep(0.1)
            held = found.balances.get("USD")
            there = 0 if held is None else held.available
            here = (await ledger.balance(funding_account(user), "USD")).minor
            if (here, there) != (funding, spot):
                raise Violation(f"user {user} has {here} and {there}, the transfers add up to {funding} and {spot}")
        total = sum(spot for _, spot in expected.values())
        booked = (await ledger.balance("trading:spot", "USD")).minor
        transit = (await ledger.balance("transit:transfers", "USD")).minor
        if (booked, transit) != (total, 0):
            raise Violation(f"the ledger says {booked} at the core and {transit} in transit; the core says {total}")


def crash_points(dice: random.Random) -> list[CrashAt]:
    """A server and the core die at least once."""
    names = [dice.choice(SERVERS), "core", dice.choice(tuple(SPREAD))]
    calls = {(name, 1 + dice.randrange(SPREAD[name])) for name in names}
    return [CrashAt(name, call, dice.choice((Moment.BEFORE, Moment.AFTER))) for name, call in sorted(calls)]


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
    scenario: type[Scenario] = Scenario,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, the seed decides where they fall; there is no split mode of this scenario."""
    if split:
        raise ValueError("records need a store with real units; there is no split mode here")
    points = crash_points(random.Random(f"{seed} shape")) if crashes is None else crashes

    schema = empty()
    with quiet(), contextlib.ExitStack() as stack:

        async def main(kernel: Kernel) -> Outcome:
            playing = scenario(kernel, size or Size())
            machine = playing.hosts["server"]
            machine.install(PATH, schema)
            stack.callback(machine.close)
            return await playing.play()

        return run(main, seed, crashes=points, max_callbacks=CALLBACKS_MAX, verbose=verbose)
