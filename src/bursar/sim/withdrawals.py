"""The withdrawals scenario: users who ask, people who approve, rules that change, and payouts on simulated chains.

A run is one of payouts (`payout_run`) with withdrawals on top. Users ask for little, for much, for everything at once
and again with the same key, and call off. Approvers sign with keys of their own; some are slow, one rejects, one is
wicked. Policies, lists and approvers change, switches go off, accounts freeze, the screening hook hangs and is
imitated. Servers and signer die anywhere; on some seeds nodes fail and the chain reorganises, or the database goes back
to a backup. After a while nothing breaks any more; then every withdrawal must come to its end in bounded time, and the
oracle judges (`withdrawal_judge`):

- per user, held + available + paid + fees = what there was;
- each payment on the chain is one withdrawal's, exact to address and amount, and was allowed when it began: by a policy
  that was in force, or by the signatures of enough people, none of whom has asked for it;
- what was rejected, cancelled or denied was not paid;
- what strangers have sent to users is credited once, and lies where the books say (`withdrawal_deposits`);
- the audit finds nothing (I1 to I9).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Final

import msgspec

from bursar.audit import audit
from bursar.documents import Documents
from bursar.engine import Engine, Worker
from bursar.flows.catalog import KINDS
from bursar.flows.deposits import ARRIVALS, ChainDeposits
from bursar.flows.deposits.invariants import CHECKS
from bursar.flows.payouts import MACHINE as PAYOUTS
from bursar.flows.payouts import Payouts
from bursar.flows.payouts.machine import OPEN as PAYOUTS_OPEN
from bursar.flows.withdrawals import MACHINE, Withdrawals
from bursar.flows.withdrawals.machine import OPEN
from bursar.flows.withdrawals.withdrawal import Withdrawal
from bursar.ledger import Ledger
from bursar.model.authorizations import Payment
from bursar.model.machine import Machine
from bursar.sim.kernel import CrashAt, CrashSwarm, Kernel, Run
from bursar.sim.ledger import Size
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_chains import CHAIN_NAME
from bursar.sim.payout_people import Office
from bursar.sim.payout_run import HEALED_S, Beginning, PayoutRun, play_out, prepared
from bursar.sim.payout_town import Town
from bursar.sim.process import Process
from bursar.sim.records import RecordOracle
from bursar.sim.sharing import SharedPorts
from bursar.sim.two_process import LEASE_S, PATH, Client, WatchedStore
from bursar.sim.withdrawal_deposits import OPEN as DEPOSITS
from bursar.sim.withdrawal_deposits import Receiver, Strangers, derive, gifts_of
from bursar.sim.withdrawal_judge import Decisions, WithdrawalJudge
from bursar.sim.withdrawal_people import Approvers, Desk, Hook, User
from bursar.sim.withdrawal_plan import KINDS as CHAIN_KINDS
from bursar.sim.withdrawal_plan import USERS, Plan, Requests, UserRequest
from bursar.sim.withdrawal_rules import Rules, furnish, signer_rules
from bursar.store import connect

PROCESSES: Final = ("withdrawals", "withdrawals-2")
SCAN_S: Final = 2.0
CHAOS_S: Final = 14.0
LOOK_S: Final = 0.5
PEOPLE_S: Final = 1.5  # between two looks of the approvers, about
DESK_S: Final = 2.5  # and of the operators
RECEIVERS: Final = range(1, USERS)  # users who have addresses of their own
DEPOSITED_S: Final = 300.0  # within which all that has arrived must be credited, and swept
SWARM: Final = CrashSwarm(probability=0.004, budget=4)


def _open(flow: str, states: tuple[str, ...]) -> str:
    listed = ", ".join(f"'{state}'" for state in states)
    return f"SELECT id, state, error FROM records WHERE flow = '{flow}' AND state IN ({listed})"


OPEN_RECORDS: Final = f"{_open(MACHINE.name, OPEN)} UNION ALL {_open(PAYOUTS.name, PAYOUTS_OPEN)} UNION ALL {DEPOSITS}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one seed did."""

    commits: int  # transitions
    withdrawals: int
    refused: int  # requests of which nothing was written
    completed: int
    failed: int
    rejected: int
    cancelled: int
    approved: int  # by people
    returned: int  # times that one came back to people after it was ordered
    changes: int  # of the rules, switches and accounts
    deposits: int  # that were credited
    swept: int  # sweeps that brought something
    imitated: int  # answers that came in the name of the screening hook
    reorgs: int
    restored: int
    calls: int  # of nodes
    checks: int


class WithdrawalOracle(RecordOracle):
    """What must be true of withdrawals and their payouts in the database, after every commit."""

    machine = MACHINE
    decisions: Decisions
    judges = True  # whether what is seen for the first time has just happened

    def look(self, *, others: bool = True) -> None:
        """After every commit of any process."""
        if not self.db.in_transaction:
            Oracle.look(self, others=others)
            self.decisions.look(self.db)
            self.judge_moved(MACHINE)
            self.judge_moved(PAYOUTS)

    def stepped(self, machine: Machine, id: str, steps: list[tuple[object, ...]], known: int) -> None:
        """What it did just now was allowed."""
        for place in range(known, len(steps)) if self.judges else ():
            self.decisions.judge(self.db, machine.name, id, steps[: place + 1])

    def records(self) -> None:
        """Each arrow once, in order, and legal."""
        steps = self.steps()
        for machine in (MACHINE, PAYOUTS):
            found = self.db.execute("SELECT number, id, state, version FROM records WHERE flow = ?", (machine.name,))
            for number, id_, state, version in found.fetchall():
                self.legal(number, id_, steps[number], state, version, machine)

    def ended(self) -> None:
        """All have ended."""
        if found := self.db.execute(OPEN_RECORDS).fetchall():
            raise Violation(f"healed, and not ended: {found}")


class Scenario(PayoutRun[Outcome]):
    """One run."""

    open = OPEN_RECORDS
    oracle: WithdrawalOracle
    look_s = LOOK_S
    chaos_s = CHAOS_S
    plan: Plan

    def __init__(self, kernel: Kernel, plan: Plan) -> None:
        kind = CHAIN_KINDS[plan.kind]
        town = Town(kernel, plan, signer_rules(kind))
        image, self.past = beginning(plan)
        self.processes = PROCESSES if plan.pair else PROCESSES[:1]
        self.hook = Hook(kernel, town)
        self.decisions = Decisions(lambda: kernel.loop.now, self.hook.said)
        self.requests = Requests(plan)
        self.before: dict[str, Payment] = {}  # what was requested when the database was put back
        self.lost: list[Payment] = []  # what it has forgotten of that
        self.findings: list[str] | None = None
        gifts = gifts_of(plan.seed, RECEIVERS, kind, small=plan.small) if plan.deposits else []
        self.strangers = Strangers(town, gifts)
        super().__init__(kernel, town, image, Size(callers=plan.users, entries_each=0))
        self.healed_s = HEALED_S
        if plan.blacklists:
            kernel.loop.call_later(kernel.rng.random() * CHAOS_S / 2, self.blacklist)
        if not plan.stormy:
            self.town.nodes.trouble = 0.0 if plan.small else 0.01
            self.town.net.cut_probability = 0.0 if plan.small else 0.002

    def blacklist(self) -> None:
        """The token refuses the addresses of the first user."""
        (token,) = self.town.world.tokens.values()
        token.blacklist.update(user_request.to for user_request in self.clients[0].wants.values())

    def make_oracle(self) -> WithdrawalOracle:
        oracle = WithdrawalOracle(self.host.open(PATH), self.past)
        oracle.decisions = self.decisions
        return oracle

    def make_client(self, number: int, how_many: int) -> Client:
        user_requests = self.requests.of(number, CHAIN_KINDS[self.plan.kind])
        return Client(f"user {number}", {user_request.key: user_request for user_request in user_requests})

    @property
    def user_requests(self) -> list[tuple[UserRequest, str]]:
        """All, with what their users were told."""
        return [
            (user_request, client.told[key]) for client in self.clients for key, user_request in client.wants.items()
        ]

    # --- life --------------------------------------------------------------------------------------------------------

    def boot(self, name: str) -> None:
        super().boot(name)
        self.decisions.ahead_us = self.ahead_us

    def remember(self) -> None:
        self.before = self.payments()

    def forget(self) -> None:
        """What the database has forgotten is not asked for again: it would be another request."""
        self.oracle = WithdrawalOracle(self.host.open(PATH))
        self.oracle.decisions, self.oracle.judges = self.decisions, False
        self.oracle.records()  # what is there again was judged when it happened
        self.oracle.judges = True
        there = self.payments()
        self.lost += [payment for to, payment in self.before.items() if to not in there]
        gone = {payment.to for payment in self.lost}
        for client in self.clients:
            client.wants = {
                key: user_request for key, user_request in client.wants.items() if user_request.to not in gone
            }
            client.told.clear()
            for user_request in client.wants.values():
                user_request.cancelled = False

    def payments(self) -> dict[str, Payment]:
        """What is requested, by its address."""
        found = self.oracle.db.execute("SELECT body FROM records WHERE flow = 'withdrawals'")
        all_ = [msgspec.json.decode(body, type=Withdrawal).payment for (body,) in found]
        return {payment.to: payment for payment in all_}

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
            deposits = ChainDeposits(payouts, engine=engine, derive=derive) if self.plan.deposits else None
            screener = self.hook.screener(process)
            withdrawals = Withdrawals(ledger, documents, payouts, engine=engine, screener=screener)
            await payouts.prepare()
            if deposits is not None:
                await deposits.prepare()
            async with asyncio.TaskGroup() as group:
                group.create_task(Worker(engine, scan_s=SCAN_S, queue_max=8, concurrency=6).run(), name="worker")
                group.create_task(payouts.reconciling.run(), name="reconciling")
                self.people(group, process, withdrawals, payouts)
                if deposits is not None and process.name == PROCESSES[0]:
                    receiver = Receiver(deposits, process, self.strangers)
                    for user in RECEIVERS:
                        group.create_task(receiver.ask(user), name=f"receiver {user}")

    def people(self, group: asyncio.TaskGroup, process: Process, withdrawals: Withdrawals, payouts: Payouts) -> None:
        """Approvers come to each server; users and operators to the first one."""
        loop = self.kernel.loop
        approvers = Approvers(withdrawals, self.town, self.rng, lambda: loop.now)
        group.create_task(self.every(process, PEOPLE_S, approvers), name="approvers")
        if process.name != PROCESSES[0]:
            return
        for client in self.clients:
            user = User(withdrawals, process, self.town, client.told)
            group.create_task(self.ask(group, client, user), name=client.user)
        office = Office(payouts, self.town, self.rng, self.restart)
        rules = Rules(withdrawals.documents, self.plan.variant, self.rng)
        addresses = [user_request.to for client in self.clients for user_request in client.wants.values()]
        desk = Desk(withdrawals, office, rules, addresses)
        group.create_task(self.every(process, DESK_S, desk), name="desk")

    async def every(self, process: Process, seconds: float, people: Approvers | Desk) -> None:
        """People look from time to time."""
        while True:
            await process.ports.sleep(seconds * (0.5 + self.rng.random()))
            await people.look()

    async def ask(self, group: asyncio.TaskGroup, client: Client, user: User) -> None:
        """Everything that a user wants; after a crash again, to get the same answer."""
        asked = []
        for key, user_request in client.wants.items():
            told = client.told.get(key, "")
            if told.startswith("refused") or (told and not (user_request.again or user_request.cancel_s is not None)):
                continue
            asked.append(group.create_task(user.ask(user_request), name=key))
            if user_request.after_s:
                await asked[-1]

    async def last_look(self) -> None:
        """What was sent to users is credited, and swept; then the audit, by a process of its own."""
        await self.settle_deposits()
        process = self.kernel.start("audit", disk=self.host)
        task = process.spawn(self._audit(process), name="audit")
        while self.findings is None:
            if task.done():
                task.result()
            await self.rest(LOOK_S)
        if self.findings:
            raise Violation(f"audit: {'; '.join(self.findings)}")

    async def over_by(self, deadline_s: float) -> bool:
        while await super().over_by(deadline_s):
            if self.settled():
                return True
        return False

    def settled(self) -> bool:
        """Whether all that strangers send has arrived, and nothing of it is open."""
        if not self.strangers.gifts:
            return True
        count = f"SELECT count(*) FROM records WHERE flow = '{ARRIVALS.name}' AND state <> 'own'"
        (known,) = self.oracle.db.execute(count).fetchone()
        if self.strangers.waits() or known != len(self.strangers.arrived()):
            return False
        return not self.oracle.db.execute(OPEN_RECORDS).fetchall()

    async def settle_deposits(self) -> None:
        """In bounded time after nothing breaks any more."""
        deadline = self.kernel.loop.now + DEPOSITED_S
        while not self.settled():
            if self.kernel.loop.now > deadline:
                known = self.oracle.db.execute("SELECT count(*) FROM records WHERE flow = 'arrivals'").fetchone()[0]
                raise Violation(f"{len(self.strangers.arrived())} transfers have arrived, and {known} are known")
            await self.rest(LOOK_S)
        if self.strangers.gifts:
            await self.rest()

    async def _audit(self, process: Process) -> None:
        store = connect(f"sqlite:///{PATH}", SharedPorts(process))
        await store.open()
        findings = await audit(store, more=CHECKS)
        self.findings = [f"{one.invariant}: {text}" for one in findings for text in one.broken]

    # --- judgement ---------------------------------------------------------------------------------------------------

    def judge(self) -> Outcome:
        oracle, town = self.oracle, self.town
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        if differing := oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")
        judge = WithdrawalJudge(oracle, town, self.user_requests, self.decisions, self.lost, self.strangers)
        judge.everything()
        read = oracle.db.execute
        states = Counter(one.state for one in judge.withdrawals)
        (commits,) = read("SELECT count(*) FROM transitions").fetchone()
        (returned,) = read("SELECT count(*) FROM transitions WHERE event = 'PAYOUT_RETURNED'").fetchone()
        return Outcome(
            commits=commits,
            withdrawals=len(judge.withdrawals),
            refused=sum(told.startswith("refused") for _, told in self.user_requests),
            completed=states["completed"],
            failed=states["failed"],
            rejected=states["rejected"],
            cancelled=states["cancelled"],
            approved=sum(bool(one.body.approvals) and one.state == "completed" for one in judge.withdrawals),
            returned=returned,
            changes=self.decisions.changes,
            imitated=self.hook.lied,
            deposits=sum(judge.deposits.credits.values()),
            swept=judge.deposits.swept(),
            reorgs=town.reorgs,
            restored=self.restored,
            calls=town.nodes.calls,
            checks=oracle.checks,
        )


# --- the beginning of every seed -------------------------------------------------------------------------------------

_beginnings: dict[tuple[str, str], Beginning] = {}


def beginning(plan: Plan) -> Beginning:
    """A database with documents, accounts and money, and what the oracle has to say about it; made once."""
    key = plan.kind, plan.variant
    if key not in _beginnings:
        _beginnings[key] = prepared(lambda ledger: furnish(ledger, CHAIN_KINDS[plan.kind], plan.variant))
    return _beginnings[key]


def play(
    seed: int,
    *,
    crashes: list[CrashAt] | None = None,
    split: bool | None = None,
    size: Size | None = None,
    verbose: bool = False,
) -> Run[Outcome]:
    """Run one seed. Without `crashes`, a swarm of them falls anywhere. With a `size`, one withdrawal is asked for."""
    plan = Plan(seed, small=size is not None)
    beginning(plan)  # before this run has the event loop

    def scenario(kernel: Kernel) -> Scenario:
        return Scenario(kernel, plan)

    return play_out(scenario, seed, crashes, SWARM, split=split, verbose=verbose)
