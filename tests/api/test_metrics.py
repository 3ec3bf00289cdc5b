"""`/metrics` as Prometheus reads it: parsed by the library's own parser, not searched for strings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from tests.api.office import ALICE, TRANSFERS, office
from tests.builders import scenario

from bursar.api.metrics import BUCKETS_S, Metrics, Traffic
from bursar.writer import Change, Move, NewTransition

TYPES = {
    "bursar_http_in_progress": "gauge",
    "bursar_http_rejected": "counter",
    "bursar_http_hung_up": "counter",
    "bursar_http_connections": "gauge",
    "bursar_http_closed": "counter",
    "bursar_http_requests": "counter",
    "bursar_http_request_seconds": "histogram",
    "bursar_database_up": "gauge",
    "bursar_records": "gauge",
    "bursar_record_oldest_seconds": "gauge",
    "bursar_alerts": "gauge",
    "bursar_deposits": "gauge",
    "bursar_deposits_held_seconds": "gauge",
    "bursar_sweeps": "gauge",
    "bursar_sweeps_oldest_seconds": "gauge",
    "bursar_deposits_scan_seconds": "gauge",
    "bursar_deposits_scan_behind_blocks": "gauge",
    "bursar_payouts": "gauge",
    "bursar_payouts_ended": "gauge",
    "bursar_payouts_retry_ratio": "gauge",
    "bursar_payouts_confirmation_seconds": "gauge",
    "bursar_payouts_gas_used": "gauge",
    "bursar_withdrawals": "gauge",
    "bursar_withdrawals_ended": "gauge",
    "bursar_withdrawals_completion_ratio": "gauge",
    "bursar_withdrawals_approval_seconds": "gauge",
    "bursar_records_in_progress": "gauge",
    "bursar_records_completed": "counter",
    "bursar_core_floor": "gauge",
    "bursar_core_up": "gauge",
}


def parsed(text: str) -> dict[str, Metric]:
    """By name, without the `_total` of counters, which the parser takes off."""
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(family: Metric, name: str, **labels: str) -> float:
    """The one sample of a family that has this name and these labels."""
    (found,) = [sample.value for sample in family.samples if (sample.name, sample.labels) == (name, labels)]
    return float(found)


@scenario
async def test_metrics_have_their_names_types_help_and_values(url: str, tmp_path: Path) -> None:
    async with office(url, tmp_path, deposit_confirm_above={"LIM": 0}) as here:
        await here.fund(ALICE, "100")
        await here.fund(ALICE, "100", "LIM")
        assert (await here.transfer(ALICE, "FUNDING", "SPOT", "1")).json()["state"] == "COMMITTED"
        answer = await here.get("/metrics")
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        found = parsed(answer.text)
        assert {name: family.type for name, family in found.items()} == TYPES
        assert all(family.documentation for family in found.values())
        assert answer.text.count("# TYPE ") == answer.text.count("# HELP ") == len(TYPES)
        request = {"method": "POST", "route": TRANSFERS, "status": "200"}
        assert value(found["bursar_http_requests"], "bursar_http_requests_total", **request) == 1
        seconds = found["bursar_http_request_seconds"]
        assert value(seconds, "bursar_http_request_seconds_count", route=TRANSFERS) == 1
        assert value(seconds, "bursar_http_request_seconds_bucket", route=TRANSFERS, le="+Inf") == 1
        assert 0 < value(seconds, "bursar_http_request_seconds_sum", route=TRANSFERS) < 60
        settled = {"flow": "transfers", "state": "COMMITTED"}
        assert value(found["bursar_records_completed"], "bursar_records_completed_total", **settled) == 1
        assert value(found["bursar_records"], "bursar_records", flow="deposits", state="ASKED") == 1
        assert value(found["bursar_database_up"], "bursar_database_up") == 1
        assert value(found["bursar_core_up"], "bursar_core_up", core="SPOT") == 1
        assert "bursar" not in generate_latest(REGISTRY).decode()  # the library's global registry is not ours


@pytest.mark.parametrize("reason", ['say "no"', "two\nlines", "back\\slash", '\\"\n', "naïve ≥ 1", "{a=1},b"])
def test_a_label_value_survives_whatever_is_in_it(reason: str) -> None:
    traffic, registry = Traffic(), CollectorRegistry()
    registry.register(traffic)
    traffic.closed[reason] = 3
    found = parsed(generate_latest(registry).decode())
    assert value(found["bursar_http_closed"], "bursar_http_closed_total", reason=reason) == 3


def test_a_histogram_counts_each_request_in_every_bucket_it_fits() -> None:
    traffic, registry = Traffic(), CollectorRegistry()
    registry.register(traffic)
    for seconds in (0.001, 0.05, 0.2, 99.0):
        traffic.count("GET", "/x", 200, seconds)
    family = parsed(generate_latest(registry).decode())["bursar_http_request_seconds"]
    bounds = [*map(str, BUCKETS_S), "+Inf"]
    counts = [value(family, "bursar_http_request_seconds_bucket", route="/x", le=bound) for bound in bounds]
    assert counts == [1, 1, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4]
    assert value(family, "bursar_http_request_seconds_count", route="/x") == 4
    assert value(family, "bursar_http_request_seconds_sum", route="/x") == pytest.approx(99.251)


@scenario
async def test_payouts_have_their_metrics(either: str, tmp_path: Path) -> None:
    """From the database alone: no payouts are driven by this process."""
    async with office(either, tmp_path) as here:
        text = (await here.get("/metrics")).text
        empty = parsed(text)["bursar_payouts"]
        assert {s.labels["status"]: s.value for s in empty.samples} == {"pending": 0, "processing": 0, "confirming": 0}
        sent_us = here.runtime.ports.now_us() - 40_000_000
        paid = {"payment": {"chain": "bsc"}, "attempts": 2, "first_sent_us": sent_us, "result": {"gas_used": 21_000}}
        bodies = {"confirmed": paid, "failed": {"payment": {"chain": "bsc"}}, "disputed": paid, "signing": paid}
        moves = [
            Move(
                flow="payouts",
                id=f"po-{state}",
                version=0,
                transitions=(NewTransition("", "CREATED", state),),
                actor="test",
                delay_us=None,
                body=msgspec.json.encode(body).decode(),
            )
            for state, body in bodies.items()
        ]
        await here.runtime.bursar.ledger.writer.apply(Change(moves=tuple(moves)))
        found = parsed((await Metrics(here.runtime).text()).decode())  # one that has counted nothing yet
        assert value(found["bursar_payouts"], "bursar_payouts", status="processing") == 1
        assert value(found["bursar_payouts"], "bursar_payouts", status="confirming") == 1
        assert value(found["bursar_payouts_ended"], "bursar_payouts_ended", chain="bsc", status="failed") == 1
        assert value(found["bursar_payouts_retry_ratio"], "bursar_payouts_retry_ratio", chain="bsc") == 0.5
        assert value(found["bursar_payouts_gas_used"], "bursar_payouts_gas_used", chain="bsc") == 21_000
        name = "bursar_payouts_confirmation_seconds"
        assert 39 < value(found[name], name, chain="bsc") < 100


@scenario
async def test_withdrawals_have_their_metrics(either: str, tmp_path: Path) -> None:
    """From the database alone: no withdrawals are driven by this process."""
    async with office(either, tmp_path) as here:
        text = (await here.get("/metrics")).text
        empty = parsed(text)["bursar_withdrawals"]
        assert {s.labels["status"]: s.value for s in empty.samples} == {"pending": 0, "approved": 0, "queued": 0}
        payment, now_us = {"payment": {"chain": "bsc"}}, here.runtime.ports.now_us()
        bodies: dict[str, dict[str, Any]] = {
            "waiting": payment,
            "queued": payment,
            "completed": payment | {"approved_us": now_us + 60_000_000},
            "failed": payment | {"approved_us": now_us + 10_000_000, "mandate": "auto"},
            "rejected": payment,
            "cancelled": payment,
        }
        moves = [
            Move(
                flow="withdrawals",
                id=f"wd-{state}",
                version=0,
                transitions=(NewTransition("", "CREATED", state),),
                actor="test",
                delay_us=None,
                body=msgspec.json.encode(body).decode(),
            )
            for state, body in bodies.items()
        ]
        await here.runtime.bursar.ledger.writer.apply(Change(moves=tuple(moves)))
        found = parsed((await Metrics(here.runtime).text()).decode())  # one that has counted nothing yet
        assert value(found["bursar_withdrawals"], "bursar_withdrawals", status="pending") == 1
        assert value(found["bursar_withdrawals"], "bursar_withdrawals", status="queued") == 1
        assert value(found["bursar_withdrawals_ended"], "bursar_withdrawals_ended", chain="bsc", status="failed") == 1
        name = "bursar_withdrawals_completion_ratio"
        assert value(found[name], name, chain="bsc") == 0.25
        name = "bursar_withdrawals_approval_seconds"
        assert 30 < value(found[name], name, by="people") < 60 and 0 < value(found[name], name, by="mandate") < 10


@scenario
async def test_deposits_from_chains_have_their_metrics(either: str, tmp_path: Path) -> None:
    """From the database alone: no chain is scanned by this process. What has ended is not looked at."""
    async with office(either, tmp_path) as here:
        empty = parsed((await here.get("/metrics")).text)
        assert {s.labels["state"]: s.value for s in empty["bursar_deposits"].samples} == {"arrived": 0, "held": 0}
        assert value(empty["bursar_sweeps"], "bursar_sweeps") == 0
        assert value(empty["bursar_deposits_held_seconds"], "bursar_deposits_held_seconds") == 0
        assert empty["bursar_deposits_scan_seconds"].samples == []
        where = [("arrivals", "arrived", 0), ("arrivals", "held", None), ("arrivals", "credited", None)]
        where += [("sweeps", "sweeping", 0), ("sweeps", "swept", None)]
        moves = [
            Move(
                flow=flow,
                id=f"{flow}-{state}",
                version=0,
                transitions=(NewTransition("", "CREATED", state),),
                actor="test",
                delay_us=due,
                body="{}",
            )
            for flow, state, due in where
        ]
        await here.runtime.bursar.ledger.writer.apply(Change(moves=tuple(moves)))
        found = parsed((await Metrics(here.runtime).text()).decode())  # one that has counted nothing yet
        assert {s.labels["state"]: s.value for s in found["bursar_deposits"].samples} == {"arrived": 1, "held": 1}
        assert 0 < value(found["bursar_deposits_held_seconds"], "bursar_deposits_held_seconds") < 60
        assert value(found["bursar_sweeps"], "bursar_sweeps") == 1
        assert 0 < value(found["bursar_sweeps_oldest_seconds"], "bursar_sweeps_oldest_seconds") < 60
