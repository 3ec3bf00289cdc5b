"""What `/metrics` says: collectors in a registry of our own, read when Prometheus scrapes.

    metrics = Metrics(runtime)       # one per application; the library's global registry is never used
    text = await metrics.text()      # Prometheus' text format, content type CONTENT_TYPE

The library writes the format; what is counted is counted here. Counters and histograms are plain numbers that a
collector hands over, not the library's own objects: those take a lock for each request, and add a `_created` series to
each metric unless a switch for the whole process is thrown.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from bursar.flows.deposits.measures import WAITING
from bursar.flows.deposits.measures import measured as measured_deposits
from bursar.flows.payouts.measures import Measures as PayoutMeasures
from bursar.flows.payouts.measures import measured as measured_payouts
from bursar.flows.withdrawals.measures import Measures as WithdrawalMeasures
from bursar.flows.withdrawals.measures import measured as measured_withdrawals
from bursar.model.errors import BursarError
from bursar.model.machine import Kind
from bursar.runtime import Runtime
from bursar.store.probe import OK

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
LOOK_S = 2.0  # how long the database may take to show that it takes writes, or to count
COUNTED_S = 5.0  # how old what was counted may be


class Traffic(Collector):
    """Requests and connections that this process has served, in numbers that only grow."""

    def __init__(self) -> None:
        self.in_progress = 0
        self.rejected = 0
        self.hung_up = 0
        self.connections = 0
        self.closed: dict[str, int] = defaultdict(int)  # reason → connections
        self.requests: dict[tuple[str, str, int], int] = defaultdict(int)  # method, route, status
        self.slower: dict[str, list[int]] = defaultdict(lambda: [0] * (len(BUCKETS_S) + 1))  # route → per bucket
        self.seconds: dict[str, float] = defaultdict(float)

    def count(self, method: str, route: str, status: int, seconds: float) -> None:
        """One request is over."""
        self.requests[method, route, status] += 1
        self.slower[route][bisect_left(BUCKETS_S, seconds)] += 1
        self.seconds[route] += seconds

    def collect(self) -> Iterable[Metric]:
        """The numbers as they are now."""
        yield GaugeMetricFamily("bursar_http_in_progress", "Requests in progress.", self.in_progress)
        yield CounterMetricFamily("bursar_http_rejected_total", "Requests refused: too many at once.", self.rejected)
        yield CounterMetricFamily("bursar_http_hung_up_total", "Requests whose body never came.", self.hung_up)
        yield GaugeMetricFamily("bursar_http_connections", "Open connections.", self.connections)
        closed = CounterMetricFamily("bursar_http_closed_total", "Connections closed by the server.", labels=["reason"])
        for reason, count in sorted(self.closed.items()):
            closed.add_metric([reason], count)
        yield closed
        requests = CounterMetricFamily(
            "bursar_http_requests_total", "Requests answered.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in sorted(self.requests.items()):
            requests.add_metric([method, route, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily("bursar_http_request_seconds", "Time from request to answer.", labels=["route"])
        for route, counted in sorted(self.slower.items()):
            seconds.add_metric([route], _cumulative(counted), self.seconds[route])
        yield seconds


def _cumulative(counted: list[int]) -> list[tuple[str, float]]:
    """Upper bound → requests that took at most so long, as Prometheus has histograms."""
    so_far, found = 0, []
    for most, count in zip([*map(str, BUCKETS_S), "+Inf"], counted, strict=True):
        so_far += count
        found.append((most, float(so_far)))
    return found


class Here(Collector):
    """What this process knows by itself: its engine, and its connections to the cores."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def collect(self) -> Iterable[Metric]:
        """Read from the engine and the clients, now."""
        engine, cores = self._runtime.engine, self._runtime.cores
        yield GaugeMetricFamily("bursar_records_in_progress", "Records that are being driven here.", engine.in_progress)
        settled = CounterMetricFamily(
            "bursar_records_completed_total", "Records that came to an end here.", labels=["flow", "state"]
        )
        for (flow, state), count in sorted(engine.settled.items()):
            settled.add_metric([flow, state], count)
        yield settled
        floors = GaugeMetricFamily(
            "bursar_core_floor",
            "Ids below which a core has no room for refunds, or forgets.",
            labels=["core", "floor"],
        )
        up = GaugeMetricFamily("bursar_core_up", "Whether there is a connection.", labels=["core"])
        for kind, client in cores.items():
            floors.add_metric([kind.value, "room"], client.floors.room)
            floors.add_metric([kind.value, "forget"], client.floors.forget)
            up.add_metric([kind.value], int(client.is_connected))
        yield floors
        yield up
        arrivals = self._runtime.arrivals
        progress = {} if arrivals is None else arrivals.scanning.progress
        moved = GaugeMetricFamily(
            "bursar_deposits_scan_seconds",
            "Since this process has read on in a chain; another one may have: take the least.",
            labels=["chain"],
        )
        behind = GaugeMetricFamily(
            "bursar_deposits_scan_behind_blocks", "Final, and not read at this process's last look.", labels=["chain"]
        )
        for chain, seen in sorted(progress.items()):
            moved.add_metric([chain], self._runtime.ports.monotonic() - seen.moved_s)
            behind.add_metric([chain], seen.behind)
        yield moved
        yield behind


class Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted in the database, and when."""

    at: float
    counts: dict[tuple[str, str], tuple[int, int]]  # flow, state → how many, and since when the oldest is there
    alerts: dict[str, int]  # severity → how many
    payouts: PayoutMeasures
    withdrawals: WithdrawalMeasures


class Database(Collector):
    """What is counted in the database, at most once in a few seconds, however many ask.

    Only what has not ended is counted there, along the indexes that know it: what has ended grows for ever, and every
    process says how much of it ended there.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._lock = asyncio.Lock()
        self._seen: Seen | None = None
        self._is_up = False
        self._shown: Seen | None = None

    async def look(self) -> None:
        """Ask the database. A collector can't wait, so this comes before; what it found is what is collected next."""
        state, seen = await asyncio.gather(self._runtime.probe.look(LOOK_S), self._counted())
        self._is_up, self._shown = state == OK, seen

    def collect(self) -> Iterable[Metric]:
        """What the last look found. Counts are left out while the database is away: the rest can still be read."""
        yield GaugeMetricFamily("bursar_database_up", "Whether the database takes writes.", int(self._is_up))
        if self._shown is None:
            return
        now_us = self._runtime.ports.now_us()
        records = GaugeMetricFamily("bursar_records", "Not ended.", labels=["flow", "state"])
        oldest = GaugeMetricFamily(
            "bursar_record_oldest_seconds", "Since when the oldest is in its state.", labels=["flow", "state"]
        )
        for where, (count, since_us) in sorted(self._shown.counts.items()):
            records.add_metric(where, count)
            oldest.add_metric(where, max(0, now_us - since_us) / 1e6)
        alerts = GaugeMetricFamily("bursar_alerts", "Not acknowledged.", labels=["severity"])
        for severity, count in sorted(self._shown.alerts.items()):
            alerts.add_metric([severity], count)
        yield records
        yield oldest
        yield alerts
        yield from _deposits(self._shown.counts, now_us)
        yield from _payouts(self._shown.payouts)
        yield from _withdrawals(self._shown.withdrawals)

    async def _counted(self) -> Seen | None:
        try:
            async with asyncio.timeout(LOOK_S), self._lock:
                return await self._fresh()
        except (TimeoutError, BursarError):
            return None

    async def _fresh(self) -> Seen:
        now = self._runtime.ports.monotonic()
        if self._seen is None or now - self._seen.at > COUNTED_S:
            read = self._runtime.bursar.store.read
            counts = await read.records.open_counts(self._waiting())
            alerts = Counter(alert.severity for alert in await read.alerts.open())
            self._seen = Seen(
                at=now,
                counts=counts,
                alerts=dict(alerts),
                payouts=await measured_payouts(self._runtime.bursar.store),
                withdrawals=await measured_withdrawals(self._runtime.bursar.store),
            )
        return self._seen

    def _waiting(self) -> list[tuple[str, str]]:
        """States in which a record waits for a signal, so that no worker drives it. Few."""
        machines = [flow.machine for flow in self._runtime.engine.flows.values()]
        found = [(m.name, state.name) for m in machines for state in m.states if state.kind is Kind.WAIT]
        return list(dict.fromkeys((*found, *WAITING)))  # also where this process knows no payouts


def _deposits(counts: dict[tuple[str, str], tuple[int, int]], now_us: int) -> Iterable[Metric]:
    """Deposits from chains, and what is swept of them."""
    measures = measured_deposits(counts)

    def age_s(since_us: int | None) -> float:
        return 0.0 if since_us is None else max(0, now_us - since_us) / 1e6

    open_ = GaugeMetricFamily("bursar_deposits", "Deposits from chains that have not ended.", labels=["state"])
    for state, count in sorted(measures.open.items()):
        open_.add_metric([state], count)
    yield open_
    held_s, sweeping_s = age_s(measures.held_since_us), age_s(measures.sweeping_since_us)
    yield GaugeMetricFamily("bursar_deposits_held_seconds", "How long the oldest one is held; 0: none is.", held_s)
    yield GaugeMetricFamily("bursar_sweeps", "Sweeps that have not ended.", measures.sweeps)
    yield GaugeMetricFamily("bursar_sweeps_oldest_seconds", "Since when the oldest is open; 0: none is.", sweeping_s)


def _payouts(measures: PayoutMeasures) -> Iterable[Metric]:
    """The specification's numbers of its execution layer (W24)."""
    open_ = GaugeMetricFamily("bursar_payouts", "Payouts that have not ended.", labels=["status"])
    for status, count in sorted(measures.open.items()):
        open_.add_metric([status], count)
    ended = GaugeMetricFamily("bursar_payouts_ended", "Ended in the last hour.", labels=["chain", "status"])
    for where, each in sorted(measures.ended.items()):
        ended.add_metric(where, each.count)
    retried = GaugeMetricFamily(
        "bursar_payouts_retry_ratio", "Of those ended in the last hour, the share that was retried.", labels=["chain"]
    )
    seconds = GaugeMetricFamily(
        "bursar_payouts_confirmation_seconds",
        "From the first send to finality, on average of the last hour.",
        labels=["chain"],
    )
    gas = GaugeMetricFamily(
        "bursar_payouts_gas_used", "Gas per payout confirmed, on average of the last hour.", labels=["chain"]
    )
    for chain in measures.chains:
        retried.add_metric([chain], measures.retry_ratio(chain))
        if (confirmed := measures.confirmed(chain)) is not None:
            seconds.add_metric([chain], confirmed.confirmation_s)
            gas.add_metric([chain], confirmed.gas_each)
    yield from (open_, ended, retried, seconds, gas)


def _withdrawals(measures: WithdrawalMeasures) -> Iterable[Metric]:
    """The specification's numbers of its intent layer (W24)."""
    open_ = GaugeMetricFamily("bursar_withdrawals", "Withdrawals that have not ended.", labels=["status"])
    for status, count in sorted(measures.open.items()):
        open_.add_metric([status], count)
    ended = GaugeMetricFamily("bursar_withdrawals_ended", "Ended in the last hour.", labels=["chain", "status"])
    for where, count in sorted(measures.ended.items()):
        ended.add_metric(where, count)
    completed = GaugeMetricFamily(
        "bursar_withdrawals_completion_ratio",
        "Of those ended in the last hour, the share that was paid.",
        labels=["chain"],
    )
    for chain in measures.chains:
        completed.add_metric([chain], measures.completion_ratio(chain))
    approval = GaugeMetricFamily(
        "bursar_withdrawals_approval_seconds",
        "From the request to its approval, on average of those that ended in the last hour.",
        labels=["by"],
    )
    for by, approved in sorted(measures.approved.items()):
        approval.add_metric([by], approved.seconds)
    yield from (open_, ended, completed, approval)


class Metrics:
    """All of it, for one application."""

    def __init__(self, runtime: Runtime) -> None:
        self.traffic = Traffic()
        self.database = Database(runtime)
        self.registry = CollectorRegistry(auto_describe=False)  # names would be asked for before there are values
        for collector in (self.traffic, self.database, Here(runtime)):
            self.registry.register(collector)

    async def text(self) -> bytes:
        """Everything, in Prometheus' text format. Nothing is awaited between the look and the text: another scrape
        that fails to reach the database can't take the counts out of this one."""
        await self.database.look()
        return generate_latest(self.registry)
