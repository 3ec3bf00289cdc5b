"""Transfers under the simulator: server and core die everywhere, and no money is lost, made, or left on its way."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter

import pytest

from bursar.sim import transfers
from bursar.sim.kernel import CrashAt
from bursar.sim.process import Moment

SEEDS = int(os.environ.get("BURSAR_TRANSFERS_SEEDS", "400"))
PARTS = 4
SMALL = transfers.Size(callers=2, entries_each=2)
EVERY_SEED = 5  # whose every port call is a crash


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_loses_or_makes_money(part: int) -> None:
    """Every end is reached, in both directions, with crashes of both processes and money given back."""
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        done = transfers.play(seed)
        seen += Counter(commits=done.value.commits, back=done.value.rolled_back, refused=done.value.refusals)
        seen += Counter(crash.process for crash in done.crashes)
    each = SEEDS // PARTS
    assert seen["commits"] > 5 * each
    assert min(seen["back"], seen["server"] // 2, seen["core"] // 2) > each // 20
    assert seen["refused"] > each


@pytest.mark.parametrize("moment", list(Moment), ids=lambda moment: moment.value)
@pytest.mark.parametrize("process", ["server", "core"])
def test_a_crash_at_every_port_call_breaks_nothing(process: str, moment: Moment) -> None:
    """Given one small run, when one process dies at each of its port calls, then everything still comes to its end."""
    died = 0
    for call in range(1, transfers.SPREAD[process]):
        done = transfers.play(EVERY_SEED, crashes=[CrashAt(process, call, moment)], size=SMALL)
        died += len(done.crashes)
        if not done.crashes and call > 20:
            break  # beyond its last call
    assert died > 40 or process == "core"
    assert died > 15


def test_the_same_seed_twice_is_the_same_run() -> None:
    here = transfers.play(11).trace_hash
    assert transfers.play(11).trace_hash == here
    assert transfers.play(12).trace_hash != here
    program = "from bursar.sim import transfers; print(transfers.play(11).trace_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here
