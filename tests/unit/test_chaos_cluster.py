"""The pure parts of the chaos tests of a cluster: which faults, how long an outage was, what Patroni answers mean."""

from __future__ import annotations

import random
import socket
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from bursar.chaos.cluster import NODES, Promotion, Secrets, View, configuration, promotions_of, view_of
from bursar.chaos.network import Place, Relays
from bursar.chaos.outages import FAILOVERS, Fault, Gap, Outage, longest_gap, plan

HISTORY_TIME = 1_794_974_378.0
HOW_TO = Path(__file__).parents[2] / "docs" / "how-to" / "cluster.md"
DOCUMENTED = configuration(
    "n1",
    Place(
        listen="10.0.0.11",
        port=5432,
        rest_port=8008,
        reach="10.0.0.11",
        reach_port=5432,
        reach_rest_port=8008,
        etcd="10.0.0.11:2379, 10.0.0.12:2379, 10.0.0.13:2379",
        network="10.0.0.0/24",
    ),
    Secrets("superuser-secret", "replication-secret", "rewind-secret", "api-secret", "another-secret"),
    folder="/var/lib/postgresql/bursar",
    bin_dir="/usr/lib/postgresql/17/bin",
)


def test_every_fault_comes_once_before_any_comes_again() -> None:
    faults = list(islice(plan(random.Random(1)), 2 * len(Fault)))

    assert set(faults[: len(Fault)]) == set(faults[len(Fault) :]) == set(Fault)
    assert all(fault in FAILOVERS for fault in faults[0 : 2 * len(FAILOVERS) : 2])


def test_the_seed_decides_the_order_of_faults() -> None:
    first, again, other = (list(islice(plan(random.Random(seed)), len(Fault))) for seed in (1, 1, 2))

    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("successes", "gap"),
    [
        ([9.0, 10.5, 11.0, 25.0, 25.1], Gap(11.0, 25.0)),
        ([9.0, 31.0], Gap(9.0, 30.0)),  # what comes later is not known yet
        ([9.5, 10.0, 29.0, 31.0], Gap(10.0, 29.0)),
        ([9.5, 10.0], Gap(10.0, 30.0)),  # never back: at least until the end
        ([], Gap(10.0, 30.0)),
        ([1.0, 9.0, 10.0, 15.0, 20.0, 25.0, 30.0, 90.0], Gap(10.0, 15.0)),
    ],
)
def test_outage_is_the_longest_time_without_a_write(successes: list[float], gap: Gap) -> None:
    assert longest_gap(successes, 10.0, 30.0) == gap


@pytest.mark.parametrize(
    ("database_s", "bursar_s", "also", "late"),
    [(20.0, 22.0, "", False), (20.0, 22.1, "", True), (20.0, 40.0, "api-a", False), (4.0, 0.3, "", False)],
)
def test_transfers_are_late_two_seconds_after_the_database(
    database_s: float, bursar_s: float, also: str, late: bool
) -> None:
    outage = Outage(Fault.STOP_LEADER, "n1", 0.0, None, database_s, bursar_s, also)

    assert bool(outage.late) is late


def member(name: str, role: str, state: str, timeline: int = 3) -> dict[str, Any]:
    return {"name": name, "role": role, "state": state, "timeline": timeline}


LEADER = member("n1", "leader", "running")
SYNC = member("n2", "sync_standby", "streaming")
REPLICA = member("n3", "replica", "streaming")


@pytest.mark.parametrize(
    ("members", "view", "whole"),
    [
        ([LEADER, SYNC, REPLICA], View("n1", ("n2",), NODES), True),
        (
            [LEADER, member("n2", "replica", "streaming"), REPLICA],
            View("n1", (), NODES),
            False,
        ),  # no standby
        ([LEADER, SYNC, member("n3", "replica", "stopped")], View("n1", ("n2",), 2), False),
        (
            [LEADER, member("n2", "sync_standby", "streaming", 2), REPLICA],
            View("n1", ("n2",), 0),
            False,
        ),  # old timeline
    ],
)
def test_cluster_is_whole_when_all_nodes_stream_and_one_is_synchronous(
    members: list[dict[str, Any]], view: View, whole: bool
) -> None:
    assert view_of(members) == view
    assert view.is_whole is whole


def test_promotions_are_read_from_patronis_history() -> None:
    history = [
        [1, 5, "no recovery target specified"],
        [2, 9, "no recovery target specified", "2026-11-18T03:59:38+00:00", "n3"],
    ]

    assert promotions_of(history) == [Promotion(3, "n3", HISTORY_TIME)]


def test_nodes_are_synchronous_and_strict() -> None:
    place = Place("10.0.0.1", 1, 2, "10.0.0.2", 3, 4, "10.0.0.3:5", "10.0.0.0/24")
    text = configuration("n1", place, Secrets("a", "b", "c", "d", "e"), folder="/f", bin_dir="/b")

    found = yaml.safe_load(text)

    dcs = found["bootstrap"]["dcs"]
    assert dcs["synchronous_mode"] is True
    assert dcs["synchronous_mode_strict"] is True
    assert dcs["loop_wait"] + 2 * dcs["retry_timeout"] <= dcs["ttl"]  # Patroni would silently use other values
    assert found["postgresql"]["listen"] == "10.0.0.1:1"
    assert found["postgresql"]["connect_address"] == "10.0.0.2:3"
    assert found["restapi"]["connect_address"] == "10.0.0.2:4"
    assert found["etcd3"]["hosts"] == ["10.0.0.3:5"]


def test_documented_patroni_file_is_the_one_under_test() -> None:
    assert f"```yaml\n{DOCUMENTED}```" in HOW_TO.read_text(encoding="utf-8")


def test_relay_that_is_cut_is_silent_and_passes_on_later() -> None:
    relays = Relays(1)
    try:
        place = relays.places[0]
        with socket.create_server((place.listen, place.port)) as server:
            ours = socket.create_connection((place.reach, place.reach_port), timeout=10)
            theirs, _ = server.accept()
            with ours, theirs:
                ours.sendall(b"before")
                theirs.settimeout(10)
                assert theirs.recv(16) == b"before"
                relays.cut(0)
                ours.sendall(b"during")
                theirs.settimeout(0.2)
                with pytest.raises(TimeoutError):
                    theirs.recv(16)
                relays.heal(0)
                theirs.settimeout(10)
                assert theirs.recv(16) == b"during"
    finally:
        relays.close()
