"""Transfers under the simulator: servers and core die everywhere, and no money is lost, made, or left on its way.

And what the scenario is worth: with each of some faults put in on purpose, some of the first seeds fail.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import count
from typing import Any

import msgspec
import pytest

from bursar.engine import Answer
from bursar.flows.transfers import incoming, rails
from bursar.flows.transfers import transfers as flow
from bursar.ledger.rules import RuleBook
from bursar.model.accounts import Account, AccountStatus
from bursar.model.outcome import Outcome
from bursar.rails.trading.wal import Log
from bursar.sim import transfers
from bursar.sim.command import Job, run_jobs
from bursar.sim.kernel import CrashAt
from bursar.sim.oracle import Violation
from bursar.sim.process import Moment
from bursar.store.operators import Closings
from bursar.store.sqlite import calls
from bursar.writer import Operation

SEEDS = int(os.environ.get("BURSAR_TRANSFERS_SEEDS", "240"))
PARTS = 4
SMALL = transfers.Size(callers=2, entries_each=2)
# Small runs whose every port call is a crash: some of the money arrives, and some goes back to either side. The
# ledger's end is inline in the first, and is called in the other (ADR 14). To die before a call is nearly to die after
# the one before it: once is enough.
SEEDS_OF_EVERY_CALL = (5328, 39)
EVERY = [(process, seed, Moment.AFTER) for process in ("server", "server-2", "core") for seed in SEEDS_OF_EVERY_CALL]
EVERY += [("core", 5328, Moment.BEFORE)]


@pytest.mark.parametrize("part", range(PARTS))
def test_no_seed_loses_or_makes_money(part: int) -> None:
    """Every end is reached, in both directions, with crashes of all processes and money given back; and everything that
    can go wrong between them does: cuts before and after, late bytes, partitions, pauses, jumps of a clock. In the
    middle of a close a person freezes the account, or the server dies."""
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        done = transfers.play(seed)
        value = done.value
        seen += Counter(commits=value.commits, refused=value.refusals, retried=value.retried, early=value.early)
        seen += Counter({f"back to {account}": times for account, times in value.rolled_back.items()})
        seen += Counter(value.trouble) + Counter(crash.process for crash in done.crashes if crash.moment)
        seen += Counter({"killed on the net": sum(crash.where.startswith("net") for crash in done.crashes)})
        seen += Counter({"driven by both": value.drivers > 1})
    each = SEEDS // PARTS
    assert seen["commits"] > 5 * each
    assert seen["early"] > 5 * each  # what begins when all is healed shows little
    assert min(seen["refused"], seen["retried"], seen["pauses"]) > each
    assert (
        min(seen["driven by both"], seen["late"], seen["clock jumps"], seen["forced"], seen["switched off"]) > each // 3
    )
    assert min(seen["cut before"], seen["cut after"]) > each // 6
    assert min(seen["server"], seen["server-2"], seen["killed on the net"], seen["swallowed"]) > each // 20
    assert min(seen["frozen while closing"], seen["closes interrupted"]) > each // 10
    assert seen["closes found interrupted"] > each // 60
    assert seen["back to FUNDING"] > each // 3
    assert seen["back to SPOT"] > each // 60  # few: a ledger's account must be frozen while the core is asked


@pytest.mark.parametrize("seed", SEEDS_OF_EVERY_CALL)
def test_what_dies_everywhere_has_both_directions_and_compensation_in_it(seed: int) -> None:
    """If this fails, the run has become another one: look for a seed that does it."""
    value = transfers.play(seed, crashes=[], size=SMALL).value
    assert value.rolled_back.keys() == {"FUNDING", "SPOT"}
    assert value.commits


@pytest.mark.parametrize(("process", "seed", "moment"), EVERY, ids=lambda value: str(getattr(value, "value", value)))
def test_a_crash_at_every_port_call_breaks_nothing(process: str, moment: Moment, seed: int) -> None:
    """Given one small run, when one process dies at each of its port calls, then everything still comes to its end."""
    died, last = 0, 0
    for call in count(1):
        done = transfers.play(seed, crashes=[CrashAt(process, call, moment)], size=SMALL)
        if any((crash.process, crash.call) == (process, call) and crash.where != "killed" for crash in done.crashes):
            died, last = died + 1, call
        elif call > last + 5:  # a sleep that was cut short does not kill; after so many, all was healed by then
            break
    assert died > (150 if process == "server" else 30)


def test_the_same_seed_twice_is_the_same_run() -> None:
    here = transfers.play(11).trace_hash
    assert transfers.play(11).trace_hash == here
    assert transfers.play(12).trace_hash != here
    program = "from bursar.sim import transfers; print(transfers.play(11).trace_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here


# --- transfers that are broken on purpose --------------------------------------------------------------------------


def noticed(times: int, seeds: int, step: int = 1) -> bool:
    """Whether so many of the first seeds fail."""
    found = 0
    for seed in range(0, seeds, step):
        found += len(run_jobs("transfers", [Job(seed)]).failures)
        if found == times:
            return True
    return False


def fails_with_a_crash_at(call: int) -> bool:
    """Whether a small run, in which the ledger's end is called, goes wrong if the server dies there."""
    try:
        transfers.play(39, crashes=[CrashAt("server", call, Moment.AFTER)], size=SMALL)
    except (Violation, BaseExceptionGroup):
        return True
    return False


def test_a_compare_and_set_that_compares_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two servers drive one record, one of them after a pause: the second must not write over the first."""
    blind = calls.SQL["batch_move"].replace("AND version = ?2", "AND ?2 = ?2")
    over = calls.SQL["batch_transition"].replace("INSERT INTO", "INSERT OR REPLACE INTO")
    assert (blind, over) != (calls.SQL["batch_move"], calls.SQL["batch_transition"])
    monkeypatch.setitem(calls.SQL, "batch_move", blind)
    monkeypatch.setitem(calls.SQL, "batch_transition", over)
    assert noticed(2, seeds=50)


def test_silence_taken_for_a_no_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A core that has not answered in time is not a core that has refused (T1): money would come back twice."""
    real = rails.TradingRail._told

    def told(self: rails.TradingRail, reply: Any) -> Answer:
        answer = real(self, reply)
        if answer.outcome.is_known:
            return answer
        # With a listed code, or the flow would not believe it (T26).
        return msgspec.structs.replace(answer, outcome=Outcome.EXPLICIT_FAIL, code="CANCELLED")

    monkeypatch.setattr(rails.TradingRail, "_told", told)
    assert noticed(3, seeds=40)


def test_a_core_that_answers_before_its_log_is_synced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it had said and then lost would be money made or lost (T6)."""
    real = Log.append

    def append(self: Log, *args: Any) -> Any:
        file = self._file
        assert file is not None
        with monkeypatch.context() as unsynced:
            unsynced.setattr(type(file), "sync", lambda _: None)
            return real(self, *args)

    monkeypatch.setattr(Log, "append", append)
    assert noticed(1, seeds=12)


def test_an_operation_of_the_ledgers_end_that_happens_at_every_call_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called again after a crash or a pause, it must be the same operation: one debit, one credit (T5)."""
    real, numbers = rails.FundingRail._operation, count()

    def operation(self: rails.FundingRail, *args: Any) -> tuple[Any, Any]:
        intent, remember = real(self, *args)
        id_ = f"{remember.id}~{next(numbers)}"
        again = msgspec.structs.replace(intent, key=f"{id_}:{remember.op}")
        return again, msgspec.structs.replace(remember, id=id_)

    monkeypatch.setattr(rails.FundingRail, "_operation", operation)
    # It takes one between two units of a transfer; before these calls nothing has begun.
    assert any(fails_with_a_crash_at(call) for call in range(80, 320))


def test_forcing_without_asking_the_core_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What people force back may still arrive, unless the core has promised that it will not (T34)."""

    async def cancel(*_: Any) -> Answer:
        return Answer(outcome=Outcome.EXPLICIT_FAIL, code="CANCELLED")

    monkeypatch.setattr(rails.TradingRail, "cancel", cancel)
    assert noticed(2, seeds=120, step=3)  # every third seed has operators


def test_an_order_that_only_one_server_knows_of_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same `client_order_id` at two servers at once is one transfer (T11)."""

    async def first(*_: Any) -> None:
        return None

    def remember(**said: Any) -> Any:
        return msgspec.structs.replace(real(**said), id=f"{said['id']}-{next(numbers)}")

    real, numbers = Operation, count()
    monkeypatch.setattr(flow.Transfers, "_first", first)
    monkeypatch.setattr("bursar.flows.transfers.transfers.Operation", remember)
    assert noticed(5, seeds=20)


def noticed_by_closers(times: int, seeds: int) -> bool:
    """Whether so many of the seeds fail in which accounts close while a person freezes them."""
    return sum(len(run_jobs("transfers", [Job(seed)]).failures) for seed in range(5, seeds, 7)) >= times


def test_a_close_that_lifts_any_freeze_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a person who has frozen the account meanwhile."""

    async def cancel_close(self: RuleBook, path: str, _token: str) -> None:
        await self.unfreeze(path)

    monkeypatch.setattr(RuleBook, "cancel_close", cancel_close)
    assert noticed_by_closers(2, seeds=20)


def test_a_freeze_that_leaves_no_trace_while_an_account_closes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The account is frozen already, by the close, which takes the freeze for its own."""
    real = RuleBook.freeze

    async def freeze(self: RuleBook, path: str) -> Account:
        head = await self.account(path)
        return head if head.status is AccountStatus.FROZEN else await real(self, path)

    monkeypatch.setattr(RuleBook, "freeze", freeze)
    assert noticed_by_closers(2, seeds=20)


def test_a_close_that_leaves_no_row_with_its_freeze_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies, and the account is frozen for no reason that any operator could find."""

    async def put(*_: Any) -> None:
        return None

    monkeypatch.setattr(Closings, "put", put)
    assert noticed_by_closers(2, seeds=40)


def noticed_by_arrivals(seeds: int) -> bool:
    """Whether one of the seeds fails in which money arrives from outside, and an account may owe."""
    return any(run_jobs("transfers", [Job(seed)]).failures for seed in range(2, seeds, 7))


def test_a_transfer_that_uses_an_overdraft_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """T42: the balance covers it, whatever the policy allows."""
    real = rails.FundingRail._operation

    def operation(self: rails.FundingRail, *args: Any) -> tuple[Any, Any]:
        intent, remember = real(self, *args)
        return msgspec.structs.replace(intent, no_overdraft=False), remember

    monkeypatch.setattr(rails.FundingRail, "_operation", operation)
    assert noticed_by_arrivals(150)


def test_a_deposit_that_a_freeze_refuses_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """T35: the money has arrived."""
    real = incoming.Deposit.intent

    def intent(self: incoming.Deposit, *args: Any) -> Any:
        return msgspec.structs.replace(real(self, *args), outside=False)

    monkeypatch.setattr(incoming.Deposit, "intent", intent)
    assert noticed_by_arrivals(20)
