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
import random
from collections import Counter
from contextvars import Context
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from bursar.documents import Documents
from bursar.engine import Engine, Operators, Worker
from bursar.flows.payouts import KINDS, MACHINE, PayoutRefused, PayoutRequest, Payouts
from bursar.flows.payouts.machine import OPEN
from bursar.flows.payouts.payout import Payout, wallet_account
from bursar.ledger import Ledger
from bursar.model.accounts import HELD
from bursar.model.errors import BursarError, Conflict, Refusal
from bursar.rails.chain import Shape
from bursar.signer.entries import for_callers
from bursar.signer.log import check_next, read_frames
from bursar.signer.state import State
from bursar.sim.disk import SimDisk
from bursar.sim.kernel import CrashAt, CrashSwarm, Kernel, Run, run
from bursar.sim.ledger import Size
from bursar.sim.net import SimHost
from bursar.sim.oracle import Oracle, Violation
from bursar.sim.payout_town import ADDRESSES, CHAIN_NAME, FOLDER, TOKEN, WALLETS, Town, codecs, furnish
from bursar.sim.process import Process
from bursar.sim.records import RecordOracle
from bursar.sim.sharing import SharedPorts
from bursar.sim.two_process import LEASE_S, PATH, Client, TwoProcessRun, WatchedStore, quiet
from bursar.store import connect
from bursar.store.sqlite.calls import amount_out

PROCESSES: Final = ("payouts", "payouts-2")
USERS: Final = 3
PAYOUTS_EACH: Final = 2
FUNDS: Final = 200  # USDT of each user
SCAN_S: Final = 1.0
CHAOS_S: Final = 25.0
HEALED_S: Final = 2_000.0  # within which everything must have ended: back-off is up to a quarter of an hour
OFFICE_S: Final = 3.0
ASKS_S_MAX: Final = 4.0  # between two requests of a client
RESTORED_EVERY: Final = 5  # to one seed in so many the database goes back to a backup
EXPIRES_EVERY: Final = 3  # one seed in so many pays on a chain on which transactions expire
MEDDLED_EVERY: Final = 2  # to one seed in so many operators come
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
    calls: int  # of nodes
    checks: int


class PayoutOracle(RecordOracle):
    """What must be true of payouts in the database."""

    machine = MACHINE
    late = ("LATE SUCCESS", "LATE EXPLICIT_FAIL")

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


class Scenario(TwoProcessRun[Outcome]):
    """One run."""

    processes = PROCESSES
    open = OPEN_PAYOUTS
    oracle: PayoutOracle
    chaos_s = CHAOS_S

    def __init__(self, kernel: Kernel, size: Size, *, small: bool) -> None:
        self.town = Town(kernel, expires=expires(kernel.seed))
        host = SimHost(self.town.net, f"{kernel.seed} servers")
        host.install(PATH, beginning(self.town.kind)[0])
        self.host = host
        self.restored = 0
        self.is_calm = False
        self.backup: bytes = b""
        super().__init__(kernel, host, size)
        self.town.calm = small  # one payout, and nothing breaks but what the caller has planned
        if not small:
            self.town.nodes.trouble = 0.12
            self.town.net.cut_probability = 0.01

    def make_rail(self) -> Any:
        return self.town.nodes

    def make_oracle(self) -> PayoutOracle:
        return PayoutOracle(self.host.open(PATH), beginning(self.town.kind)[1])

    def make_client(self, number: int, how_many: int) -> Client:
        wants = {f"c{number}-{n}": self.rng.randrange(1, 90) for n in range(how_many)}
        return Client(f"user:{number % USERS}", wants)

    # --- life --------------------------------------------------------------------------------------------------------

    async def play(self) -> Outcome:
        """Chaos, healing, judgement."""
        self.kernel.on_crash = self.crashed
        self.town.start_signer()
        self.town.tick()
        for name in self.processes:
            self.boot(name)
        loop = self.kernel.loop
        if self.kernel.seed % RESTORED_EVERY == RESTORED_EVERY - 1 and not self.town.calm:
            loop.call_later(0.2 + self.rng.random() * 5, self.back_up, context=Context())
        if not await self.over_by(CHAOS_S):
            self.heal()
            if not await self.over_by(CHAOS_S + HEALED_S):
                raise Violation(f"not ended in time: {self.oracle.db.execute(self.open).fetchall()}")
        self.heal()
        await self.rest()
        return self.judge()

    async def rest(self) -> None:
        """Until what took effect last is final, and booked."""
        later: asyncio.Future[None] = self.kernel.loop.create_future()
        self.kernel.loop.call_later(6.0, later.set_result, None)
        await later

    def heal(self) -> None:
        """From now on nothing breaks."""
        self.is_calm = True
        self.kernel.calm()
        self.town.heal()

    def crashed(self, process: Process) -> None:
        """The signer comes back as the others do."""
        if process.name == "signer":
            delay = 0.05 + self.rng.random()
            self.kernel.loop.call_later(delay, self.town.start_signer, context=Context())
            return
        super().crashed(process)

    def back_up(self) -> None:
        """A copy of the database between two transactions; it is put back later."""
        if self.is_calm:
            return
        db, loop = self.host.open(PATH), self.kernel.loop
        if self.host.held() or db.in_transaction:
            loop.call_later(0.003, self.back_up, context=Context())
            return
        self.backup = self.host.image(PATH)
        loop.call_later(1 + self.rng.random() * 8, self.restore, context=Context())

    def restore(self) -> None:
        """All servers stop, and an older database is put back. What clients were answered since is no promise."""
        if self.is_calm:
            return
        self.restored += 1
        for name in PROCESSES:
            process = self.kernel.processes[name]
            if process.alive:
                process.crash()
        self.host.restore(PATH, self.backup)
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
        """Operators: they meddle on some seeds, and in the end let everything go on."""
        operators, dice = Operators(payouts.engine), self.rng
        meddles = self.kernel.seed % MEDDLED_EVERY == 0
        while True:
            await process.ports.sleep(OFFICE_S * (0.5 + dice.random()))
            with contextlib.suppress(BursarError):
                if self.is_calm or dice.random() < 0.5:
                    await self.tidy(operators, payouts)
                elif meddles:
                    await self.meddle(operators, payouts, dice)

    async def meddle(self, operators: Operators, payouts: Payouts, dice: random.Random) -> None:
        """Something that an operator may do at any time."""
        found = await payouts.list(states=OPEN, limit=20)
        what = dice.choice(("bump", "cancel", "hold", "pause", "halt"))
        if what == "pause":
            await operators.pause("rail", f"chain {CHAIN_NAME}", actor="ann", reason="drill")
        elif what == "halt":
            await operators.halt("flow", MACHINE.name, actor="ann", reason="drill")
        elif found:
            one = dice.choice(found)
            await getattr(payouts, what)(one.id, actor="ann", reason="drill")

    async def tidy(self, operators: Operators, payouts: Payouts) -> None:
        """Lift what is switched off, by two people; end what was requested twice; let go what is held."""
        store = payouts.engine.store
        for pause in await store.read.pauses.list():
            for person in ("ann", "ben"):
                with contextlib.suppress(BursarError):
                    if pause.kind.startswith("halt"):
                        kind = pause.kind.removeprefix("halt").strip()
                        await operators.unhalt("" if kind == "all" else kind, pause.name, actor=person, reason="over")
                    else:
                        await operators.resume(pause.kind, pause.name, actor=person, reason="over")
        for one in await payouts.list(states=("pending",), limit=50):
            if "before the database was restored" in one.held:
                await payouts.cancel(one.id, actor="ann", reason=one.held)
            elif one.held:
                await payouts.release(one.id, actor="ann", reason="over")
        if self.is_calm:
            for one in await payouts.list(states=("disputed",), limit=50):
                raise Violation(f"{one.id} is disputed: {one.error}")
            for record in await store.read.records.list(MACHINE.name, states=OPEN, limit=50):
                if "NEEDS_PEOPLE" in record.error:
                    raise Violation(f"{record.id} needs people: {record.error}")

    # --- judgement ---------------------------------------------------------------------------------------------------

    def judge(self) -> Outcome:
        oracle, town = self.oracle, self.town
        oracle.everything(every_column=True)
        oracle.records()
        oracle.ended()
        if differing := oracle.unbalanced():
            raise Violation(f"balances are not what the movements add up to: {differing}")
        self.judge_effects()
        self.judge_signatures()
        self.judge_money()
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
            calls=town.nodes.calls,
            checks=oracle.checks,
        )

    def judge_effects(self) -> None:
        """At most one transaction for each reason took effect: exactly one if a payout for it is confirmed."""
        found = self.oracle.db.execute("SELECT id, state, body FROM records WHERE flow = 'payouts'").fetchall()
        paid: Counter[str] = Counter()
        amounts: dict[str, int] = {}
        for _, state, body in found:
            payout = msgspec.json.decode(body, type=Payout)
            paid[payout.payment.to] += state == "confirmed"
            amounts[payout.payment.to] = payout.order_amount
        for client in self.clients:
            for key in client.wants:
                to = recipient(key)
                effects = self.town.effects(to)
                if len(effects) > 1:
                    raise Violation(f"I7: {key} was paid {len(effects)} times: {effects}")
                if len(effects) != paid[to]:
                    raise Violation(f"{key} was paid {len(effects)} times, and {paid[to]} payouts say so")
                if effects and effects[0].amount != amounts[to]:
                    raise Violation(f"{key} was paid {effects[0].amount}, not {amounts[to]}")

    def judge_signatures(self) -> None:
        """Every signature is of what a client asked for, or moves nothing."""
        wanted = {recipient(key): minor * 10**6 for client in self.clients for key, minor in client.wants.items()}
        state, codec = State(), codecs(self.town.kind)
        files = self.town.signer_host.files(self.kernel.processes["signer"])
        for offset, entries in read_frames(files, f"{FOLDER}/log"):
            for hash_, data in entries if isinstance(entries, list) else ():
                entry = check_next("log", offset, state, hash_, data)
                state.apply(entry, hash_)
                shown = for_callers(entry)
                if shown is None or not shown.raw or shown.request is None:
                    continue
                does, sender, _ = codec.read(shown.raw)
                if shown.request.shape is Shape.CANCEL:
                    fine = does.to == sender and does.amount == 0 and not does.contract
                else:
                    fine = does.contract == TOKEN and wanted.get(does.to) == does.amount
                if not fine:
                    raise Violation(f"{shown.payout} {shown.attempt} was signed, and no client asked for it: {does}")

    def judge_money(self) -> None:
        """Wallets have what their accounts say (I9); nothing is reserved or held any more."""
        for name in WALLETS:
            for asset, contract in (("USDT", TOKEN), ("ETH", "")):
                here = -self.balance(wallet_account(CHAIN_NAME, name), asset)
                there = self.town.world.balance(ADDRESSES[name], contract)
                if here != there:
                    raise Violation(f"I9: {name} has {there} {asset} on the chain, and {here} by the books")
        rows = "SELECT kind, key, amount FROM flow_rows WHERE kind IN ('reserved', 'unconfirmed') AND state = 'total'"
        if left := [row for row in self.oracle.db.execute(rows) if int(row[2])]:
            raise Violation(f"reserved by no payout: {left}")
        if self.balance(HELD, "USDT"):
            raise Violation("something is held by no payout")

    def balance(self, account: str, asset: str) -> int:
        """By the live postings, in smallest units."""
        sql = """SELECT l.amount FROM live_postings l WHERE l.account = (SELECT id FROM accounts WHERE path = ?)
                 AND l.asset = (SELECT id FROM assets WHERE code = ?)"""
        return sum(amount_out(amount) for (amount,) in self.oracle.db.execute(sql, (account, asset)))


def expires(seed: int) -> bool:
    """Whether a seed pays on a chain on which transactions expire."""
    return seed % EXPIRES_EVERY == EXPIRES_EVERY - 1


def recipient(key: str) -> str:
    """One address for each payout that a client wants."""
    number = int.from_bytes(key.encode(), "big")
    return codecs("evm").check_address("sim", f"0x{number:040x}")


# --- the beginning of every seed -------------------------------------------------------------------------------------

_beginnings: dict[str, tuple[bytes, Oracle]] = {}


def beginning(kind: str) -> tuple[bytes, Oracle]:
    """A database with documents, accounts and money, and what the oracle has to say about it; made once."""
    if kind not in _beginnings:
        disk = SimDisk()

        async def prepare(kernel: Kernel) -> None:
            store = connect(f"sqlite:///{PATH}", kernel.start("prepare", disk=disk).ports)
            await store.open()
            await furnish(Ledger(store), kind, USERS, FUNDS)

        run(prepare, 0)
        oracle = Oracle(disk.open(PATH))
        oracle.everything()
        _beginnings[kind] = (disk.image(PATH), oracle)
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
    if split:
        raise ValueError("records need a store with real transactions: there is no split mode here")
    wanted = Size(callers=USERS, entries_each=PAYOUTS_EACH) if size is None else Size(callers=1, entries_each=1)
    scenes: list[Scenario] = []
    beginning("expiry" if expires(seed) else "evm")  # before this run has the event loop

    async def main(kernel: Kernel) -> Outcome:
        scenes.append(Scenario(kernel, wanted, small=size is not None))
        return await scenes[0].play()

    try:
        with quiet():
            return run(main, seed, crashes=crashes or (), swarm=SWARM if crashes is None else None, verbose=verbose)
    finally:
        for scene in scenes:
            scene.host.close()
