"""The payouts scenario: two processes on one disk, a signer on another, a chain with its nodes, and people.

Clients ask for payouts, and ask again with the same key after a crash. Both processes drive them; the signer dies and
comes back with its log; nodes lag, hang, lose requests and replies; the chain reorganises, gets dear, drops what waits.
Operators bump, cancel, hold, pause and halt. On some seeds the database goes back to a backup in the middle, on others
the chain is one on which transactions expire. After a while nothing breaks any more; then every payout must come to its
end in bounded time, and the oracle judges:

- at most one transaction of a payout, and of the reason it was made for, ever took effect on the chain;
- what users have, what was paid, and gas, add up to what there was; each wallet has what its account says (I9);
- nothing was signed but what was asked for, or a transfer of nothing to the wallet itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import Final

from bursar.documents import Documents
from bursar.engine import Engine, Worker, forced
from bursar.flows.payouts import KINDS, MACHINE, PayoutRefused, PayoutRequest, Payouts
from bursar.flows.payouts.machine import OPEN
from bursar.ledger import Ledger
from bursar.model.errors import BursarError, Conflict, Refusal
from bursar.sim.kernel import CrashAt, CrashSwarm, Kernel, Run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_chains import CHAIN_NAME, EVM
from bursar.sim.payout_chains import KINDS as CHAIN_KINDS
from bursar.sim.payout_faults import Plan
from bursar.sim.payout_judge import Judge
from bursar.sim.payout_people import Office
from bursar.sim.payout_run import HEALED_S, Beginning, PayoutRun, play_out, prepared
from bursar.sim.payout_town import Town, furnish
from bursar.sim.process import Process
from bursar.sim.records import RecordOracle
from bursar.sim.sharing import SharedPorts
from bursar.sim.two_process import LEASE_S, PATH, Client, WatchedStore

PROCESSES: Final = ("payouts", "payouts-2")
USERS: Final = 3
PAYOUTS_EACH: Final = 2
FUNDS: Final = 200  # USDT of each user
SCAN_S: Final = 1.0
LOOK_S: Final = 0.5
OFFICE_S: Final = 3.0
ASKS_S_MAX: Final = 4.0  # between two requests of a client
SWARM: Final = CrashSwarm(probability=0.004, budget=6)
STATES: Final = ", ".join(f"'{state}'" for state in OPEN)
OPEN_PAYOUTS: Final = f"SELECT id, state, error FROM records WHERE flow = 'payouts' AND state IN ({STATES})"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # transitions
    payouts: int
    confirmed: int
    failed: int
    replaced: int
    reorgs: int
    restored: int
    lied: int  # answers of a node that were not the truth
    named: bool  # whether the node that lies is one that a process has named
    deep: int  # reorganisations of final blocks
    behind: int  # times that the signer noticed that its log is an old one
    rebound: int  # times that a new one was put in its place
    decided: int  # payouts whose end people have decided
    contradicted: int  # payouts of which something else was heard after their end
    calls: int  # of nodes
    checks: int


class PayoutOracle(RecordOracle):
    """What must be true of payouts in the database."""

    machine = MACHINE
    late = ("LATE SUCCESS", "LATE EXPLICIT_FAIL")

    def look(self, *, others: bool = True) -> None:
        """After every commit of any process."""
        if not self.db.in_transaction:
            Oracle.look(self, others=others)
            self.judge_moved(MACHINE)

    def records(self) -> None:
        """Each arrow once, in order, and legal."""
        steps = self.steps()
        found = self.db.execute("SELECT number, id, state, version FROM records WHERE flow = 'payouts'")
        for number, id_, state, version in found:
            self.legal(number, id_, steps[number], state, version)

    def ended(self) -> None:
        """All have ended."""
        if found := self.db.execute(OPEN_PAYOUTS).fetchall():
            raise Violation(f"healed, and not ended: {found}")


class Scenario(PayoutRun[Outcome]):
    """One run."""

    processes = PROCESSES
    open = OPEN_PAYOUTS
    oracle: PayoutOracle
    look_s = LOOK_S

    def __init__(self, kernel: Kernel, size: Size, *, small: bool) -> None:
        town = Town(kernel, Plan(kernel.seed, small))
        self.image, self.past = beginning(town.kind.name)
        super().__init__(kernel, town, self.image, size)
        self.healed_s = HEALED_S

    def make_oracle(self) -> PayoutOracle:
        return PayoutOracle(self.host.open(PATH), self.past)

    def make_client(self, number: int, how_many: int) -> Client:
        wants = {f"c{number}-{n}": self.rng.randrange(1, 90) for n in range(how_many)}
        return Client(f"user:{number % USERS}", wants)

    # --- life --------------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        self.oracle = PayoutOracle(self.host.open(PATH))
        for client in self.clients:
            client.told.clear()

    async def serve(self, process: Process) -> None:
        """One life of a process."""
        store = WatchedStore(SharedPorts(process), PATH)
        store.watch = self.watch
        await store.open()
        ledger = Ledger(store)
        engine = Engine(store, ledger.writer, (), worker=process.name, lease_s=LEASE_S)
        async with self.town.client(process, store) as signer:
            documents = Documents(store, KINDS)
            payouts = Payouts(ledger, documents, {CHAIN_NAME: self.town.chain(process)}, signer, engine=engine)
            await payouts.prepare()
            async with asyncio.TaskGroup() as group:
                group.create_task(Worker(engine, scan_s=SCAN_S, queue_max=8, concurrency=6).run(), name="worker")
                group.create_task(payouts.reconciling.run(), name="reconciling")
                group.create_task(self.office(process, payouts), name="office")
                if self.plan.watched:
                    group.create_task(forced.keep_asking(engine), name="forced calls")
                if process.name == PROCESSES[0]:
                    for client in self.clients:
                        group.create_task(self.ask(client, process, payouts), name=client.user)

    async def ask(self, client: Client, process: Process, payouts: Payouts) -> None:
        """Every payout that a client wants; after a crash again, to get the same answer."""
        for key, amount in client.wants.items():
            if key in client.told and self.rng.random() < 0.5:
                continue
            if not self.town.calm:
                await process.ports.sleep(self.rng.random() * ASKS_S_MAX)
            request = PayoutRequest(
                account=client.user,
                asset="USDT",
                chain=CHAIN_NAME,
                to=recipient(key),
                amount=str(amount),
                source=key,
                mandate="auto",
                priority=("high", "normal", "low")[amount % 3],
            )
            told = ""
            while not told:
                try:
                    told = (await payouts.request(request, key=key)).id
                except PayoutRefused as refused:  # it was put back from the signer's log, under its own id
                    told = f"refused {refused.reason}"
                except (Conflict, Refusal) as error:
                    told = f"refused {error.code}"
            client.told[key] = told

    async def office(self, process: Process, payouts: Payouts) -> None:
        """Operators."""
        office = Office(payouts, self.town, self.rng, self.restart)
        while True:
            await process.ports.sleep(OFFICE_S * (0.5 + self.rng.random()))
            with contextlib.suppress(BursarError):
                await office.look()

    # --- judgement ---------------------------------------------------------------------------------------------------

    def judge(self) -> Outcome:
        oracle, town = self.oracle, self.town
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        if differing := oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")
        wanted = {recipient(key): minor * 10**6 for client in self.clients for key, minor in client.wants.items()}
        judge = Judge(oracle, town, wanted)
        judge.everything()
        if len(town.plan.nodes) > 2 and self.lied_by_then and town.liar.name not in town.named:
            raise Violation(f"W35: {town.liar.name} lied {self.lied_by_then} times to the end, and no process names it")
        read = oracle.db.execute
        states = Counter(state for (state,) in read("SELECT state FROM records WHERE flow = 'payouts'"))
        (commits,) = read("SELECT count(*) FROM transitions").fetchone()
        (replaced,) = read("SELECT count(*) FROM records WHERE flow = 'replacements'").fetchone()
        return Outcome(
            commits=commits,
            payouts=sum(states.values()),
            confirmed=states["confirmed"],
            failed=states["failed"],
            replaced=replaced,
            reorgs=town.reorgs,
            restored=self.restored,
            lied=town.liar.told + town.liar.shortened,
            named=town.liar.name in town.named,
            deep=town.depths.happened,
            behind=town.old_disk.noticed,
            rebound=town.rebound,
            decided=sum(one.decided for one in judge.payouts),
            contradicted=sum(bool(one.late) for one in judge.payouts),
            calls=town.nodes.calls,
            checks=oracle.checks,
        )


def recipient(key: str) -> str:
    """One address for each payout that a client wants."""
    number = int.from_bytes(key.encode(), "big")
    return EVM.address(number)


# --- the beginning of every seed -------------------------------------------------------------------------------------

_beginnings: dict[str, Beginning] = {}


def beginning(kind: str) -> Beginning:
    """A database with documents, accounts and money, and what the oracle has to say about it; made once."""
    if kind not in _beginnings:
        accounts = [f"user:{user}" for user in range(USERS)]
        _beginnings[kind] = prepared(lambda ledger: furnish(ledger, CHAIN_KINDS[kind], accounts, FUNDS))
    return _beginnings[kind]


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere. With a `size`, one payout is asked for."""
    wanted = Size(callers=USERS, entries_each=PAYOUTS_EACH) if size is None else Size(callers=1, entries_each=1)
    beginning(Plan(seed, small=size is not None).kind)  # before this run has the event loop

    def scenario(kernel: Kernel) -> Scenario:
        return Scenario(kernel, wanted, small=size is not None)

    return play_out(scenario, seed, crashes, SWARM, split=split, verbose=verbose)
