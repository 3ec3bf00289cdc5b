"""Faults of a cluster under load: each is injected, healed and measured before the next one.

A lost leader stays lost until the database takes writes elsewhere and every server of ours has acknowledged a transfer
since: recovery only because the old leader came back would prove nothing. Now and then a program of ours dies at the
same moment; then only the money is checked, not the time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from bursar.chaos.cluster import POLL_S, Cluster, Node, View
from bursar.chaos.outages import FAILOVERS, Fault, Outage, longest_gap
from bursar.chaos.probe import DatabaseProbe, Pulses

if TYPE_CHECKING:
    from bursar.chaos.run import Report
    from bursar.chaos.scene import Hired

WHOLE_S = 120.0  # for a node to come back: it may have to be copied again
FAILOVER_S = 60.0
BACK_S = 60.0
QUIET_S = 1.0  # before a fault, so that its gap is its own
RESTART_S = 3.0  # a planned restart takes that long to begin and end
SILENT_S = (4.0, 8.0)
ETCD_S = 25.0  # longer than ttl: without failsafe_mode the leader would step down
ALSO = 0.2

Say = Callable[[str, str], None]


class Faults:
    """The faults of one chaos run."""

    def __init__(
        self, cluster: Cluster, probe: DatabaseProbe, pulses: Pulses, hired: list[Hired], report: Report, say: Say
    ) -> None:
        self._cluster = cluster
        self._probe = probe
        self._pulses = pulses
        self._hired = hired
        self._report = report
        self._say = say
        self._rng = random.Random(f"{report.seed}:faults")

    def run(self, faults: Iterable[Fault]) -> None:
        """One after the other, until the time is up or there are no more."""
        began = time.monotonic()
        for fault in faults:
            self._report.elapsed = time.monotonic() - began
            if self._report.elapsed >= self._report.seconds:
                break
            time.sleep(QUIET_S + self._rng.random())  # all is well meanwhile, or the fault before would be measured
            view = self._until_whole()
            if view is None:
                break
            outage = self._strike(fault, view, time.monotonic() - began)
            self._report.outages.append(outage)
            if outage.late:
                self._report.wrong.append(outage.late)
        self._report.elapsed = time.monotonic() - began

    def _strike(self, fault: Fault, view: View, at_s: float) -> Outage:
        leader, standby = self._cluster.node(view.leader), self._cluster.node(view.sync[0])
        also = self._rng.choice(self._hired) if self._rng.random() < ALSO else None
        began, began_wall = time.monotonic(), time.time()
        node, undo = self._inject(fault, leader, standby)
        if also is not None:
            also.kill()
            also.revive()
            self._report.kills[also.name] += 1
        self._say("striking", f"{fault} ({node})" + (f" and kill -9 {also.name}" if also else ""))
        self._see_through(fault, leader.name, began)
        healed = time.monotonic()
        undo()
        self._until_whole()
        self._until_back(time.monotonic(), BACK_S)
        ended = time.monotonic()
        if fault is Fault.STOP_STANDBYS:
            self._judge_strictness(began, healed)
        promoted = [each.at - began_wall for each in self._cluster.promotions() if each.at > began_wall]
        return Outage(
            fault=fault,
            node=node,
            at_s=at_s,
            promoted_s=min(promoted, default=None),
            database_s=longest_gap(self._probe.successes, began, ended).seconds,
            bursar_s=max(
                longest_gap([beat.answered for beat in beats], began, ended).seconds for beats in self._pulses.beats
            ),
            also=also.name if also else "",
        )

    def _inject(self, fault: Fault, leader: Node, standby: Node) -> tuple[str, Callable[[], None]]:
        """Inject it; which node it hits, and how it is undone."""
        network = self._cluster.network
        match fault:
            case Fault.KILL_LEADER | Fault.KILL_STANDBY:
                node = leader if fault is Fault.KILL_LEADER else standby
                node.kill()
                self._report.kills[node.name] += 1
                return node.name, node.start
            case Fault.STOP_LEADER | Fault.STOP_STANDBY:
                node = leader if fault is Fault.STOP_LEADER else standby
                node.pause()
                self._report.pauses[node.name] += 1
                return node.name, node.resume
            case Fault.CUT_LEADER | Fault.CUT_STANDBY:
                node = leader if fault is Fault.CUT_LEADER else standby
                network.cut(node.number)
                return node.name, lambda: network.heal(node.number)
            case Fault.SWITCH_OVER:
                if refused := self._cluster.switch_over(leader.name, standby.name):
                    self._report.wrong.append(f"Patroni refuses the switchover: {refused}")
                return f"{leader.name} to {standby.name}", lambda: None
            case Fault.CRASH_LEADER:
                leader.crash()
                self._report.kills[f"postgres of {leader.name}"] += 1
                return leader.name, lambda: None
            case Fault.RESTART_LEADER:
                leader.ask("/restart", method="POST", body={})
                return leader.name, lambda: None
            case Fault.STOP_STANDBYS:
                others = self._cluster.others(leader.name)
                for node in others:
                    node.pause()
                    self._report.pauses[node.name] += 1
                return " and ".join(node.name for node in others), lambda: _each(others, Node.resume)
            case Fault.STOP_ETCD:
                self._cluster.pause_etcd()
                self._report.pauses["etcd"] += 1
                return "etcd", self._cluster.resume_etcd
            case Fault.KILL_ALL:
                for node in self._cluster.nodes:
                    node.kill()
                    self._report.kills[node.name] += 1
                return "all", lambda: _each(self._cluster.nodes, Node.start)

    def _see_through(self, fault: Fault, leader: str, began: float) -> None:
        """Wait until the fault has had its effect, and the system has got over it where it can."""
        if fault in FAILOVERS:
            if not self._cluster.until(lambda: self._written_elsewhere(leader, began), FAILOVER_S):
                self._report.wrong.append(f"{fault} ({leader}): no other node took over within {FAILOVER_S:g} s")
            self._until_back(time.monotonic(), BACK_S)
            time.sleep(self._rng.random())  # whether the old one comes back at once or a little later
        elif fault in (Fault.STOP_STANDBYS, Fault.STOP_ETCD):
            time.sleep(ETCD_S if fault is Fault.STOP_ETCD else self._rng.uniform(*SILENT_S))  # how long it lasts
        elif fault is not Fault.KILL_ALL:
            time.sleep(RESTART_S)  # it has begun by then
            self._cluster.until(lambda: self._probe.last()[1] > began + RESTART_S, FAILOVER_S)
            self._until_back(time.monotonic(), BACK_S)

    def _written_elsewhere(self, leader: str, began: float) -> bool:
        who, when = self._probe.last()
        return who != leader and when > began

    def _until_back(self, since: float, timeout_s: float) -> None:
        if not self._cluster.until(lambda: self._pulses.last() > since, timeout_s):
            self._report.wrong.append(
                f"no transfer was acknowledged within {timeout_s:g} s, though the database is back"
            )

    def _until_whole(self) -> View | None:
        deadline = time.monotonic() + WHOLE_S
        while not (view := self._cluster.view()).is_whole:
            if time.monotonic() > deadline:
                self._report.wrong.append(f"the cluster is not whole again after {WHOLE_S:g} s: {view}")
                return None
            time.sleep(POLL_S)  # Patroni sends no notice
        return view

    def _judge_strictness(self, began: float, healed: float) -> None:
        """Without a standby nothing may be acknowledged that was asked for since."""
        early = [beat for beats in self._pulses.beats for beat in beats if beat.sent > began and beat.answered < healed]
        if early:
            self._report.wrong.append(f"{len(early)} transfers were acknowledged while no standby could know of them")


def _each(nodes: list[Node], do: Callable[[Node], None]) -> None:
    for node in nodes:
        do(node)
