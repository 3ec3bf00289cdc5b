"""The ledger under the simulator: thousands of seeds, every crash point, and the seeds that once failed.

The oracle itself is tested too: a check that can't fail would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bursar.cli.commands.sim import Job, every_crash, run_everywhere, run_jobs
from bursar.sim import CrashAt, Moment, SimDisk, ledger
from bursar.sim.oracle import Oracle, Violation

SEEDS = int(os.environ.get("BURSAR_SIM_SEEDS", "5000"))
FAILED_ONCE = msgspec.json.decode((Path(__file__).parent / "seeds.json").read_bytes())


@pytest.mark.timeout(420)
def test_thousands_of_seeds_break_nothing() -> None:
    """Given any seed, with its callers and three crashes, when it has healed, then I1, I2, I3 and I8 hold."""
    tally = run_everywhere("ledger", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.seeds == SEEDS
    assert tally.crashes >= 3 * SEEDS
    assert tally.commits >= 60 * SEEDS


@pytest.mark.parametrize("mode", ["group", "split"])
def test_a_crash_at_every_port_call_breaks_nothing(mode: str) -> None:
    """Given one small run, when it dies at each of its port calls, before or after its effect, then nothing is lost."""
    jobs = every_crash("ledger", 7, mode, small=True)
    tally = run_jobs("ledger", jobs)
    assert tally.failures == []
    assert tally.crashes > len(jobs) // 2


@pytest.mark.parametrize("case", FAILED_ONCE, ids=lambda case: f"seed {case['seed']}: {case['was']}")
def test_a_seed_that_failed_once(case: dict[str, str | int]) -> None:
    """Kept for ever."""
    tally = run_jobs("ledger", [Job(int(case["seed"]), None, str(case["mode"]))])
    assert tally.failures == []


def test_every_seed_is_as_large_as_it_says() -> None:
    """A seed is at least 60 commits by 8 callers, with 3 crashes."""
    for seed in range(12):
        done = ledger.play(seed)
        assert done.value.commits >= 60
        assert len(done.crashes) >= 3
        assert done.value.checks >= 60
    assert ledger.Size().callers == 8


def test_the_same_seed_twice_is_the_same_run() -> None:
    """Same seed, same trace, in this process and in another one with another hash seed."""
    here = ledger.play(11)
    assert ledger.play(11).trace_hash == here.trace_hash
    assert ledger.play(12).trace_hash != here.trace_hash
    program = "from bursar.sim import ledger; print(ledger.play(11).trace_hash)"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        other = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == here.trace_hash


def test_a_planned_crash_happens_where_it_was_planned() -> None:
    """Given a plan, then the run says where it died."""
    done = ledger.play(5, crashes=[CrashAt("ledger", 30, Moment.AFTER)], split=True)
    assert [(c.call, c.moment) for c in done.crashes] == [(30, Moment.AFTER)]


TAMPERING = {
    "I1": ["UPDATE live_postings SET amount = zeroblob(16) WHERE posting = (SELECT max(posting) FROM live_postings)"],
    "I2": ["INSERT INTO spends SELECT max(posting), 1 FROM live_postings"],
    "I3": ["DELETE FROM live_postings WHERE account IN (SELECT id FROM accounts WHERE path = 'user:1')"],
    "I8": ["DROP TRIGGER envelopes_no_update", "UPDATE envelopes SET metadata = '{\"a\":1}' WHERE seq = 1"],
    "cached": ["UPDATE balance_cache SET amount = '1' WHERE asset = 1"],
}


@pytest.mark.parametrize("what", TAMPERING)
def test_the_oracle_notices(what: str) -> None:
    """Given a sound database, when a row is changed behind its back, then the oracle says which invariant broke."""
    disk = SimDisk()
    disk.install("funds.db", ledger.template())
    connection = disk.open("funds.db")
    Oracle(connection).everything()
    for statement in TAMPERING[what]:
        connection.execute(statement)
    # Moving value from one account to nowhere shows in more than one invariant; the first one found is named.
    with pytest.raises(Violation):
        Oracle(connection).everything()


def test_a_run_with_a_broken_ledger_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a store that leaves spent postings in the live table, then seeds fail and say how to replay them."""
    from bursar.store.sqlite import calls  # noqa: PLC0415

    sql = dict(calls.SQL, delete_live="DELETE FROM live_postings WHERE posting = -? AND reservation IS NULL")
    monkeypatch.setattr(calls, "SQL", sql)
    tally = run_jobs("ledger", [Job(1, None, "group")])
    assert len(tally.failures) == 1
    job, _error = tally.failures[0]
    assert job.command("ledger") == "bursar sim ledger --seed 1 --mode group --verbose"


def test_the_command_reports_and_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bursar sim ledger --json` has the promised keys; a wrong option is refused in words."""
    from click.testing import CliRunner  # noqa: PLC0415

    from bursar.cli.commands.sim import command  # noqa: PLC0415

    invoke = partial(CliRunner().invoke, command)
    done = invoke(["ledger", "--seeds", "3", "--jobs", "1", "--json"])
    assert done.exit_code == 0
    keys = {"scenario", "seeds", "commits", "port_calls", "crashes", "violations", "seconds"}
    result = msgspec.json.decode(done.output)
    assert keys <= result.keys()
    assert (result["seeds"], result["violations"], result["crashes"]) == (3, 0, 9)
    wrong = invoke(["ledger", "--seed", "1", "--crash-at", "soon"])
    assert wrong.exit_code == 2
    assert "17:after" in wrong.output
