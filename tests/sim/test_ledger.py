"""The ledger under the simulator: thousands of seeds, every crash point, and the seeds that once failed.

The oracle itself is tested too: a check that can't fail would prove nothing.
"""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from functools import partial
from pathlib import Path

import msgspec
import pytest

from bursar.ledger import Ledger
from bursar.model.entries import pay
from bursar.sim import CrashAt, Kernel, Moment, SimDisk, ledger, run
from bursar.sim.command import Job, every_crash, run_everywhere, run_jobs
from bursar.sim.oracle import Oracle, Violation
from bursar.store import connect

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
        assert done.value.checks >= 60  # and the oracle has looked at each
    assert ledger.Size().callers == 8


@pytest.mark.parametrize("mode", ["group", "split"])
def test_the_same_seed_twice_is_the_same_run(mode: str) -> None:
    """Same seed, same trace, in this process and in another one with another hash seed."""
    split = mode == "split"
    here = ledger.play(11, split=split)
    assert ledger.play(11, split=split).trace_hash == here.trace_hash
    assert ledger.play(12, split=split).trace_hash != here.trace_hash
    program = f"from bursar.sim import ledger; print(ledger.play(11, split={split}).trace_hash)"
    for hash_seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        other = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert other.stdout.strip() == here.trace_hash


def test_a_planned_crash_happens_where_it_was_planned() -> None:
    """Given a plan, then the run says where it died."""
    done = ledger.play(5, crashes=[CrashAt("ledger", 30, Moment.AFTER)], split=True)
    crashes = [(c.call, c.moment) for c in done.crashes if c.process == "ledger"]
    assert crashes == [(30, Moment.AFTER)]  # the rival may have died with it


LAST = "(SELECT max(posting) FROM live_postings)"
TAMPERING = {
    "I1: live": f"UPDATE live_postings SET amount = zeroblob(16) WHERE posting = {LAST}",
    "I1: an entry": f"UPDATE postings SET amount = zeroblob(16) WHERE id = {LAST}",
    "I2: a spend too many": "INSERT INTO spends SELECT max(posting), 1 FROM live_postings",
    "I2: a spend too few": "DELETE FROM spends",
    "I2: another spender": "UPDATE spends SET envelope = envelope + 1",
    "I3: live too few": "DELETE FROM live_postings WHERE account IN (SELECT id FROM accounts WHERE path = 'user:1')",
    "I3: live too many": "INSERT INTO live_postings SELECT id + 9, account, asset, amount, NULL FROM postings LIMIT 2",
    "I3: live elsewhere": f"UPDATE live_postings SET account = account + 1 WHERE posting = {LAST}",
    "I8: metadata": "UPDATE envelopes SET metadata = '{\"a\":1}' WHERE seq = 1",
    "I8: key": "UPDATE envelopes SET key = 'other' WHERE seq = 1",
    "I8: movements": "UPDATE envelopes SET legs = (SELECT legs FROM envelopes WHERE seq = 2) WHERE seq = 1",
    "I8: hash": "UPDATE envelopes SET id = zeroblob(32) WHERE seq = 1",
    "I8: a posting's owner": "UPDATE postings SET account = account + 1 WHERE id = (SELECT max(id) FROM postings)",
    "I8: a posting of nobody": "INSERT INTO postings SELECT max(id) + (7 << 16), account, asset, amount FROM postings",
    "I8: no posting": "DELETE FROM postings WHERE id = (SELECT max(id) FROM postings)",
    "I8: no envelope": "DELETE FROM envelopes WHERE seq = 3",
    "I8: no event": "DELETE FROM events WHERE kind = 1 AND subject = 3",
    "cached": "UPDATE balance_cache SET amount = '1' WHERE asset = 1",
    "not cached": "DELETE FROM balance_cache",
    "guarded": "INSERT INTO account_heads VALUES (3, 1, '1', 0, NULL)",
    "held": "INSERT INTO holds VALUES (9, 4, 1, zeroblob(16), zeroblob(16), 1, 'open', '', NULL, NULL)",
}


@pytest.mark.parametrize("knows", ["nothing", "everything", "the template"])
@pytest.mark.parametrize("what", TAMPERING)
def test_the_oracle_notices(what: str, knows: str) -> None:
    """Given a sound database, when a row is changed behind the oracle's back, then it says so, whatever it has seen."""
    connection = database()
    past = ledger.beginning()[1] if knows == "the template" else None
    oracle = Oracle(connection, past)
    if knows == "everything":
        oracle.everything(every_column=True)
    connection.execute(TAMPERING[what])
    # Moving value from one account to nowhere shows in more than one invariant; the first one found is named.
    with pytest.raises(Violation):
        oracle.everything(every_column=True)


NOTICED_AT_ONCE = ["I1: an entry", "I2: another spender", "I3: live too few", "I8: metadata", "I8: hash", "I8: key"]


@pytest.mark.parametrize("what", [*NOTICED_AT_ONCE, "I2: a spend too few", "I8: no envelope", "I8: movements"])
def test_the_oracle_notices_with_the_commit(what: str) -> None:
    """Given an envelope that has just been announced, when its rows are wrong, then a look is enough to see it."""
    connection = database()
    connection.execute(TAMPERING[what])
    with pytest.raises(Violation):
        Oracle(connection).look()


AT_A_CRASH = [what for what in TAMPERING if what.startswith(("I2", "I3"))]
AT_A_CRASH += ["I8: hash", "I8: a posting of nobody", "I8: no posting", "I8: no envelope", "I8: no event"]
AT_A_CRASH += ["cached", "not cached", "guarded", "held"]


@pytest.mark.parametrize("what", AT_A_CRASH)
def test_the_oracle_notices_at_a_crash(what: str) -> None:
    """Given all that was announced is known, when a row comes, goes or changes its hash, then the next crash shows."""
    connection = database()
    oracle = Oracle(connection)
    oracle.everything()
    connection.execute(TAMPERING[what])
    with pytest.raises(Violation):
        oracle.everything()


def database() -> sqlite3.Connection:
    """The template after one payment, so that something has been spent, without what guards its rows."""
    disk = SimDisk()
    disk.install("funds.db", ledger.template())

    async def main(kernel: Kernel) -> None:
        store = connect(ledger.URL, kernel.start("ledger", disk=disk).ports)
        await store.open()
        await Ledger(store).commit(pay("user:1", "user:2", "USD", "3.00", key="x"))

    run(main, 0)
    connection = disk.open("funds.db")
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    return connection


def test_a_run_with_a_broken_ledger_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a store that leaves spent postings in the live table, then seeds fail and say how to replay them."""
    from bursar.store.sqlite import batches, calls  # noqa: PLC0415

    many = calls.SQL["batch_dead"].replace("SELECT value", "SELECT -value")
    one = calls.SQL["batch_dead_one"].replace("= ?", "= -?")
    monkeypatch.setattr(batches, "SQL", dict(calls.SQL, batch_dead=many, batch_dead_one=one))
    tally = run_jobs("ledger", [Job(1, None, "group")])
    assert len(tally.failures) == 1
    job, _error = tally.failures[0]
    assert job.command("ledger") == "bursar sim ledger --seed 1 --mode group --verbose"


def test_the_command_reports_and_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """`bursar sim ledger --json` has the promised keys; a wrong option is refused in words."""
    from click.testing import CliRunner  # noqa: PLC0415

    from bursar.sim.command import command  # noqa: PLC0415

    invoke = partial(CliRunner().invoke, command)
    done = invoke(["ledger", "--seeds", "3", "--jobs", "1", "--json"])
    assert done.exit_code == 0
    keys = {"scenario", "seeds", "commits", "port_calls", "crashes", "violations", "seconds"}
    result = msgspec.json.decode(done.output)
    assert keys <= result.keys()
    assert (result["seeds"], result["violations"]) == (3, 0)
    assert result["crashes"] >= 9
    wrong = invoke(["ledger", "--seed", "1", "--crash-at", "soon"])
    assert wrong.exit_code == 2
    assert "17:after" in wrong.output
