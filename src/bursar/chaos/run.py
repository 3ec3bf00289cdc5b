"""One chaos run from beginning to end: start, load, kill, heal, wait, check."""

from __future__ import annotations

import asyncio
import logging
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bursar.audit import Finding
from bursar.chaos.cluster import Cluster
from bursar.chaos.failover import Faults
from bursar.chaos.operators import Operators
from bursar.chaos.outages import Fault, Outage, plan
from bursar.chaos.paid import judge_payouts, look_at_payouts, open_payouts
from bursar.chaos.paying import CHAIN_NAME, MANDATE, TOKEN
from bursar.chaos.probe import DatabaseProbe, Pulses
from bursar.chaos.scene import DATABASE_AWAY, SIGNER, Scene, Victim, until
from bursar.testbed import Guard
from bursar.testbed.load import Habits, Load, PayoutHabits
from bursar.testbed.look import audited, look, open_transfers, trouble
from bursar.testbed.promises import CONFIRMED, FUNDING, Place, judge

USERS = range(1_001, 1_013)
ASSETS = {TOKEN: 6, "BTC": 8}
FEE = 7  # smallest units of TOKEN that a user pays us for a payout
PAYING_OUT = PayoutHabits(callers=3, think_s=0.4, operated=0.3, asset=TOKEN, chain=CHAIN_NAME, mandate=MANDATE, fee=FEE)
PULSES = range(1_013, 1_015)  # users who are never frozen, one per server
OPENING = 1_000_000  # smallest units, of each asset
HEAL_S = 60.0
SETTLE_S = 60.0
HOPELESS_S = 5.0  # for each further wait, once a wait has timed out: the run only checks then
REPEATED = 100  # accepted requests that are sent once more in the end
FOLDERS = (Path("/var/tmp"), Path("/tmp"))

Say = Callable[["Report"], None]


@dataclass
class Report:
    """What happened, and everything that is wrong with it."""

    store: str
    seed: int
    seconds: float
    phase: str = "starting"
    elapsed: float = 0.0  # of the time in which things die
    last: str = ""  # what was done last, in words
    kills: Counter[str] = field(default_factory=Counter)
    pauses: Counter[str] = field(default_factory=Counter)
    chain_faults: Counter[str] = field(default_factory=Counter)
    restarts: int = 0  # of programs that ended by themselves, because the database was away
    asked: int = 0
    requests: int = 0
    lost: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)  # of transfers
    payouts: Counter[str] = field(default_factory=Counter)  # by their ends
    operated: Counter[str] = field(default_factory=Counter)  # what operators did to payouts
    transactions: int = 0  # that were signed
    frozen: int = 0
    drain_s: float = 0.0
    network: str = ""  # how a node of the cluster is cut off
    outages: list[Outage] = field(default_factory=list)  # of the cluster
    database_writes: int = 0  # acknowledged by the cluster itself
    findings: list[Finding] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    folder: str = ""  # kept, if something is wrong

    @property
    def ok(self) -> bool:
        """Whether all is well: nothing wrong, and every invariant judged and found to hold."""
        return not self.wrong and bool(self.findings) and all(f.ok and f.judged for f in self.findings)


def chaos(store: str, *, seconds: float, seed: int, say: Say, faults: Iterable[Fault] | None = None) -> Report:
    """Run chaos tests on one store. The folder with its logs is kept if something is wrong.

    A cluster gets `faults`, in this order; without them, those of the seed, each kind before any comes again.
    """
    report = Report(store, seed, seconds)
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)  # an unreachable database is expected here
    parent = next((path for path in FOLDERS if path.is_dir()), None)  # short: a socket lies in it
    folder = Path(tempfile.mkdtemp(prefix="bursar-chaos-", dir=parent))
    guard = Guard("")
    try:
        scene = Scene(store, folder, guard, ASSETS)
        with scene.running():
            _Session(scene, report, say).run(faults)
        if report.ok:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            report.folder = str(folder)
    finally:
        guard.close()
    return report


class _Session:
    """One chaos run, while everything runs."""

    def __init__(self, scene: Scene, report: Report, say: Say) -> None:
        self.scene = scene
        self.report = report
        self.rng = random.Random(report.seed)
        self._say = say
        habits = Habits(
            users=USERS,
            accounts=scene.accounts,
            assets=ASSETS,
            opening=OPENING,
            deposits=0.02,
            several_at_once=0.15,
            once_more=0.05,
            large=0.25,
            impossible=0.05,
            payouts=PAYING_OUT if scene.chain else None,
            quiet=PULSES if scene.cluster else range(0),
        )
        self.load = Load(scene.config, habits, scene.addresses(), report.seed)
        self.operators = Operators(scene.config, USERS, report.seed)

    def run(self, faults: Iterable[Fault] | None) -> None:
        """All of it."""
        self.load.open()
        self.load.start()
        self.operators.start()
        if self.scene.chain is not None:
            self.scene.chain.strike(self.report.seed)
        if self.scene.cluster is None:
            self._strike()
        else:
            self._strike_cluster(self.scene.cluster, plan(self.rng) if faults is None else faults)
        self._heal()
        self._judge()

    def say(self, phase: str, last: str = "") -> None:
        """Report progress to the observer."""
        report, tally = self.report, self.load.tally
        report.phase, report.last = phase, last or report.last
        report.asked, report.requests = len(self.load.asks), tally.requests
        report.lost, report.refusals = tally.lost, tally.refusals
        report.frozen, report.operated = self.operators.frozen, tally.operated
        if self.scene.chain is not None:
            report.chain_faults = self.scene.chain.faults
        self._say(report)

    def _strike(self) -> None:
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < self.report.seconds:
            self.report.elapsed = elapsed
            # Mostly when all of it works again; but a program that is just starting must survive a kill, too.
            if self.rng.random() < 0.7:
                until(lambda: all(v.is_ready for v in self.scene.victims), self.report.seconds - elapsed)
            self._wait(self.rng.uniform(0.2, 1.5), "striking")
            self._blow()
        self.report.elapsed = time.monotonic() - began

    def _strike_cluster(self, cluster: Cluster, faults: Iterable[Fault]) -> None:
        probe, pulses = DatabaseProbe(cluster), Pulses(self.load, self.scene.addresses(), PULSES)
        probe.start()
        pulses.start()
        self.report.network = cluster.network.kind
        self.say("striking")
        try:
            Faults(cluster, probe, pulses, self.scene.hired, self.report, self.say).run(faults)
        finally:
            pulses.stop()
            probe.stop()
        self.report.database_writes = len(probe.acknowledged)
        if lost := probe.lost():
            self.report.wrong.append(f"the cluster itself lost {lost} acknowledged writes")

    def _blow(self) -> None:
        many = self.rng.random()
        count = 1 if many < 0.75 else 2 if many < 0.9 else len(self.scene.victims)
        victims = self.rng.sample(self.scene.victims, count)
        names = " and ".join(victim.name for victim in victims)
        if self.rng.random() < 0.85:
            for victim in victims:
                victim.kill()
            self.report.kills.update(victim.name for victim in victims)
            self._wait(self.rng.choice([0.0, self.rng.uniform(0, 1.5)]), "striking", f"kill -9 {names}")
            self._revive(victims)
        else:
            for victim in victims:
                victim.pause()
            self.report.pauses.update(victim.name for victim in victims)
            self._wait(self.rng.uniform(0.3, 3.0), "striking", f"pause {names}")
            for victim in victims:
                victim.resume()

    def _revive(self, victims: list[Victim]) -> None:
        for victim in victims:
            victim.revive()

    def _wait(self, seconds: float, phase: str, last: str = "") -> None:
        self.say(phase, last)
        time.sleep(seconds)  # the time between two kills is part of the test

    def _heal(self) -> None:
        self.say("healing")
        if self.scene.chain is not None and (failed := self.scene.chain.heal()):
            self.report.wrong.append(failed)
        if thawed := self.operators.stop():
            self.report.wrong.append(thawed)
        if not self.scene.until_ready(HEAL_S):
            down = [victim.name for victim in self.scene.victims if not victim.is_ready]
            self.report.wrong.append(f"does not come up again: {', '.join(down)}")
        patience_s = SETTLE_S if self.load.finish(HEAL_S) else HOPELESS_S
        # A graceful stop, once: what a server was still doing has ended, or is stored, before requests are repeated.
        for hired in self.scene.hired:
            code = hired.dismiss()
            if code != 0:
                self.report.wrong.append(f"{hired.name} ended with {code} on SIGTERM")
        for hired in self.scene.hired:
            hired.revive()
        self.scene.until_ready(patience_s)
        self.say("settling")
        self.load.settle(patience_s, REPEATED)
        self.say("draining")
        began = time.monotonic()
        until(lambda: self._open() == 0, patience_s)
        self.report.drain_s = time.monotonic() - began

    def _open(self) -> int:
        try:
            payouts = 0 if self.scene.chain is None else open_payouts(self.scene.config)
            return open_transfers(self.scene.config) + payouts
        except Exception as error:
            if not trouble(error):
                raise
            return -1

    def _judge(self) -> None:
        self.say("judging")
        report = self.report
        try:
            self._look()
        except Exception as error:
            if not trouble(error):
                raise
            report.wrong.append(f"the result can't be read, though everything should be up: {error!r}")
        report.wrong += [f"unexpected: {text}" for text in self.load.tally.unexpected[:10]]
        for hired in self.scene.hired:
            report.restarts += hired.ended[DATABASE_AWAY]
            away = () if hired.name == SIGNER else (DATABASE_AWAY,)  # that code of the signer: its log can't be used
            others = {code: n for code, n in hired.ended.items() if code not in away}
            report.wrong += [f"{hired.name} ended by itself with {code}, {n} times" for code, n in others.items()]
        report.wrong += [f"a traceback: {text}" for text in self.scene.traces()[:10]]
        if not report.ends:
            report.wrong.append("no transfer was accepted: nothing is proved")
        if self.scene.chain is not None and not report.payouts[CONFIRMED]:
            report.wrong.append("no payout was confirmed: nothing is proved")
        self.say("judged")

    def _look(self) -> None:
        report = self.report
        found = look(self.scene.config, range(USERS.start, PULSES.stop))
        report.ends = Counter(row.state for row in found.rows)
        taken = self._look_at_payouts()
        # What was paid out has left the user's account, and nothing else may.
        deposits = Counter(self.load.deposits)
        deposits.subtract(taken)
        report.wrong += judge([ask for ask in self.load.asks if not ask.is_payout], deposits, found)
        report.findings = asyncio.run(audited(self.scene.config))
        report.wrong += [f"{f.invariant}: {text}" for f in report.findings for text in f.broken]

    def _look_at_payouts(self) -> Counter[Place]:
        """What confirmed payouts have taken from each user."""
        scene, report = self.scene, self.report
        if scene.chain is None or scene.signer is None:
            return Counter()
        found = look_at_payouts(scene.config, scene.chain, scene.signer.data)
        report.payouts = Counter(row.state for row in found.rows)
        report.transactions = len(found.signed)
        report.wrong += judge_payouts([ask for ask in self.load.asks if ask.is_payout], found)
        taken: Counter[Place] = Counter()
        for row in found.rows:
            if row.state == CONFIRMED:
                taken[row.user, FUNDING, row.asset] += row.minor + FEE
        return taken
