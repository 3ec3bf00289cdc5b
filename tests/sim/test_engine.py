"""The engine under the simulator: hundreds of seeds, every crash point, and engines broken on purpose.

The oracle is tested too: a check that can't fail would prove nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import msgspec
import pytest

from bursar.engine import Answer, Booking, Engine, FlowRecord, Worker, staying
from bursar.engine import engine as engine_module
from bursar.engine.moves import Moves
from bursar.engine.pauses import Pauses
from bursar.ledger.holds import Holds
from bursar.model import flow_rows
from bursar.model.entries import HoldChange
from bursar.model.outcome import Outcome
from bursar.model.records import Record
from bursar.sim import CrashAt, Moment, SimDisk, engine, orders, two_process
from bursar.sim.command import Job, every_crash, run_everywhere, run_jobs
from bursar.sim.oracle import Violation
from bursar.store.sqlite.calls import SQL
from bursar.store.sqlite.store import SqliteStore
from bursar.writer import decision

SEEDS = int(os.environ.get("BURSAR_ENGINE_SEEDS", "120"))


def test_hundreds_of_seeds_break_nothing() -> None:
    """Given any seed, when it has healed, then every order is at its end, and everything has happened once."""
    tally = run_everywhere("engine", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.seeds == SEEDS
    assert tally.crashes >= SEEDS
    assert tally.commits >= 40 * SEEDS


def test_a_crash_at_every_port_call_breaks_nothing() -> None:
    """Given one small run, when it dies at each of its port calls, before or after its effect, then nothing is lost."""
    jobs = every_crash("engine", 3, "any", small=True)
    jobs = jobs[:: max(1, len(jobs) // 100)] if "BURSAR_ENGINE_SEEDS" not in os.environ else jobs
    tally = run_jobs("engine", jobs)
    assert tally.failures == []
    assert tally.crashes > len(jobs) // 4  # the rest are calls of the process beside it


def test_the_same_seed_twice_is_the_same_run() -> None:
    """Same seed, same trace, in this process and in another one with another hash seed."""
    here = engine.play(11)
    assert engine.play(11).trace_hash == here.trace_hash
    assert engine.play(12).trace_hash != here.trace_hash
    program = "from bursar.sim import engine; print(engine.play(11).trace_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "2"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here.trace_hash


def test_seeds_do_what_they_are_for() -> None:
    """Some orders are refused by a limit, some by the rail; both processes crash; both drive."""
    runs = [engine.play(seed) for seed in range(12)]
    assert sum(done.value.refused for done in runs) > 5
    assert {crash.process for done in runs for crash in done.crashes} == {"engine", "engine-2"}
    assert all(done.value.calls > done.value.orders for done in runs)
    assert all(done.value.checks > done.value.orders for done in runs)
    assert sum(done.value.meddled for done in runs) > 5
    assert sum(done.value.lapsed for done in runs) > 5
    assert sum(done.value.early for done in runs) > 5
    assert sum(done.value.parcels for done in runs) > 5
    assert sum(done.value.unproved for done in runs) > 5
    switched = sum((done.value.switched for done in runs), Counter[str]())
    assert {"flow", "rail", "halt flow", "halt rail", "halt all"} & switched.keys() >= {"rail", "halt rail"}


def test_a_planned_crash_happens_where_it_was_planned() -> None:
    done = engine.play(5, crashes=[CrashAt("engine", 30, Moment.AFTER), CrashAt("engine-2", 9, Moment.BEFORE)])
    assert {(c.process, c.call) for c in done.crashes} == {("engine", 30), ("engine-2", 9)}


def test_there_is_no_split_mode() -> None:
    with pytest.raises(ValueError, match="real units"):
        engine.play(1, split=True)


# --- engines that are broken on purpose ----------------------------------------------------------------------------


def broken(seeds: int = 6) -> list[str]:
    """What is wrong with the first seeds."""
    return [error for _, error in run_jobs("engine", [Job(seed) for seed in range(seeds)]).failures]


def test_a_silence_taken_for_a_no_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an engine for which a lost reply is a failure, then money is given back that was spent."""

    def surprised(*_: Any) -> Answer:
        return Answer(outcome=Outcome.EXPLICIT_FAIL)

    monkeypatch.setattr(staying, "surprised", surprised)
    assert any("the rail said" in error for error in broken())


def test_money_given_back_without_proof_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(*_: Any) -> None:
        return None

    monkeypatch.setattr(engine_module, "check_proof", check)
    assert any("S44" in error for error in broken(10))


@pytest.mark.parametrize("rule", ["W15", "W21"])
def test_an_engine_that_obeys_no_switch_is_noticed(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    async def stop(*_: Any, **__: Any) -> bool:
        return False

    monkeypatch.setattr(Pauses, "stop", stop)
    assert any(rule in error for error in broken(13))


def test_a_halt_that_is_obeyed_late_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an engine that goes by what it has read a moment ago, then something signs after the halt (W21)."""
    real = Pauses._switches

    async def switches(self: Pauses) -> Any:
        return (
            self.now
            if self._read_s > self._store.ports.monotonic() - 0.2 and self.now is not None
            else await real(self)
        )

    monkeypatch.setattr(Pauses, "_switches", switches)
    assert any("W21" in error for error in broken(30))


def test_an_entry_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = orders.book

    def book(item: FlowRecord[orders.Order], event: str, answer: Answer) -> Booking:
        return Booking(clears_in_flight=True) if item.record.state == "REFUNDING" else real(item, event, answer)

    monkeypatch.setattr(orders, "book", book)
    assert any("not booked with it" in error for error in broken())


def test_a_posting_that_nobody_owns_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = orders.book

    def book(item: FlowRecord[orders.Order], event: str, answer: Answer) -> Booking:
        found = real(item, event, answer)
        return Booking(found.intents, clears_in_flight=found.clears_in_flight)

    monkeypatch.setattr(orders, "book", book)
    assert any("I4" in error for error in broken(2))


def test_a_hold_that_its_record_forgets_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """W34: refused, and the money stays set aside for ever."""
    real = orders.book

    def book(item: FlowRecord[orders.Order], event: str, answer: Answer) -> Booking:
        found = real(item, event, answer)
        forgets = item.record.state == "CHARGING" and answer.outcome is Outcome.EXPLICIT_FAIL
        return Booking(clears_in_flight=True) if forgets else found

    monkeypatch.setattr(orders, "book", book)
    assert any("void" in error and "not booked with it" in error for error in broken())


def test_a_hold_that_anybody_can_settle_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger's guard and the writer's are gone; the row's own compares the owner, which is the right one here."""
    monkeypatch.setattr(Holds, "_settleable", Holds._hold_row)
    real = decision.hold_row

    def unguarded(hold: HoldChange, plan: Any, ground: Any, _moves: Any = ()) -> Any:
        made = real(msgspec.structs.replace(hold, owner=""), plan, ground)
        return msgspec.structs.replace(made, owner=hold.owner)

    monkeypatch.setattr(decision, "hold_row", unguarded)
    assert any("W34" in error for error in broken())


def test_a_rail_that_does_things_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: orders.Rail, id: str, op: str) -> Outcome:
        self.effects.append((id, op))
        self.answers[id, op] = Outcome.SUCCESS
        return Outcome.SUCCESS

    monkeypatch.setattr(orders.Rail, "execute", execute)
    assert any("I7" in error for error in broken())


def test_a_worker_that_finds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(_self: Worker) -> int:
        return 0

    monkeypatch.setattr(Worker, "look", look)
    monkeypatch.setattr(two_process, "HEALED_S", 10.0)
    assert any("not ended in time" in error for error in broken(3))


def test_a_start_that_forgets_its_request_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.start

    async def start(self: Engine, *args: Any, **more: Any) -> Any:
        return await real(self, *args, **(more | {"remember": None}))

    monkeypatch.setattr(Engine, "start", start)
    assert broken(10) != []


def test_a_timer_that_fires_early_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SQL, "claim_due", SQL["claim_due"].replace("timer <= now_us()", "timer <= now_us() + 500000"))
    real = SqliteStore.now_us

    async def ahead(self: SqliteStore) -> int:
        return await real(self) + 500_000

    monkeypatch.setattr(SqliteStore, "now_us", ahead)
    assert any("lapsed at" in error for error in broken())


def test_a_waiting_order_that_forgets_its_inbox_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an engine that rests in a waiting state whatever is in the inbox, then early signals are left there."""
    real = Moves.move

    def move(self: Moves, record: Record, *args: Any, **more: Any) -> Any:
        return real(self, msgspec.structs.replace(record, inbox=0), *args, **(more | {"inbox": 0}))

    monkeypatch.setattr(Moves, "move", move)
    assert any("in its inbox are" in error for error in broken())


def test_a_signal_that_is_consumed_and_not_crossed_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Moves.signalled

    def signalled(self: Moves, *args: Any, **more: Any) -> Any:
        return real(self, *args, **(more | {"signal": None, "inbox": 0}))

    monkeypatch.setattr(Moves, "signalled", signalled)
    assert any("has consumed" in error for error in broken())


def test_a_signal_whose_change_of_the_body_is_lost_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "on_signal", lambda *_: None)
    assert any("was rushed 0 times" in error for error in broken())


def test_a_parcel_that_is_started_without_its_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = orders.book

    def book(item: FlowRecord[orders.Order], event: str, answer: Answer) -> Booking:
        found = real(item, event, answer)
        return msgspec.structs.replace(found, starts=())

    monkeypatch.setattr(orders, "book", book)
    assert any("has a parcel, and was not shipped" in error for error in broken())


TAMPERING = {
    "a state": "UPDATE records SET state = 'DONE'",
    "a version": "UPDATE records SET version = version + 1",
    "an owner of nothing": "UPDATE records SET transit = 65536",
    "a transition left out": "DELETE FROM transitions WHERE version = 2",
    "a transition of another kind": "UPDATE transitions SET event = 'SUCCESS' WHERE event = 'GO'",
    "a transition to elsewhere": "UPDATE transitions SET target = 'FAILED' WHERE version = 2",
    "a transition too many": "INSERT INTO transitions SELECT record, 9, source, event, target, 0, '', '{}', 0 "
    "FROM transitions WHERE version = 2",
}


@pytest.mark.parametrize("what", TAMPERING)
def test_the_oracle_notices(what: str) -> None:
    """Given a sound database, when a row is changed behind the oracle's back, then it says so."""
    disk = SimDisk()
    disk.install(two_process.PATH, engine.beginning()[0])
    connection = disk.open(two_process.PATH)
    for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        connection.execute(f"DROP TRIGGER {name}")
    connection.execute(
        "INSERT INTO records (number, flow, id, owner, state, version, attempt, transit, due, worker, body, error, "
        "since, created_at, updated_at) VALUES (1000, 'orders', 'o', '', 'CHARGING', 2, 0, 0, 1, '', "
        '\'{"user":"user:1","minor":5}\', \'\', 0, 0, 0)'
    )
    for step in ((1, "", "CREATED", "NEW"), (2, "NEW", "GO", "CHARGING")):
        connection.execute("INSERT INTO transitions VALUES (1000, ?, ?, ?, ?, 0, '', '{}', 0)", step)
    rail = orders.Rail.__new__(orders.Rail)
    oracle = orders.OrderOracle(connection, rail, engine.beginning()[1])
    oracle.look()
    connection.execute(TAMPERING[what])
    with pytest.raises(Violation):
        oracle.look()


def test_a_number_that_is_given_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given a sequence that starts over whenever an order ends, then a number is taken twice, or the row conflicts."""
    real = flow_rows.apply

    def apply(flow: str, id_: str, record: int, operation: Any, find: Any) -> Any:
        if isinstance(operation, flow_rows.Next):
            found = real(flow, id_, record, operation, find)
            return [found[0], msgspec.structs.replace(found[1], key=f"{operation.key}/{id_}")]
        return real(flow, id_, record, operation, find)

    monkeypatch.setattr(flow_rows, "apply", apply)
    assert any("I7: numbers" in error for error in broken(3))


def test_a_reserved_amount_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "_ended", lambda _item: ())
    assert any("I7: the rows" in error for error in broken(3))
