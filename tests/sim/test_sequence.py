"""Sequences under the simulator: hundreds of seeds, every crash point, and flows broken on purpose.

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
from click.testing import CliRunner

from bursar.engine import Answer, Booking, DatabaseClock, Engine, FlowRecord, Operators, Worker, staying
from bursar.flows.sequence import flow, sequences
from bursar.flows.sequence.machine import COMPENSATING, COMPENSATION_FAILED, RUNNING, STEP_DONE
from bursar.flows.sequence.steps import Sequence
from bursar.model.entries import EntryKind
from bursar.model.outcome import Outcome
from bursar.sim import CrashAt, Moment, SimDisk, engine, sequence, sequence_model, two_process
from bursar.sim.command import Job, command, every_crash, run_everywhere, run_jobs
from bursar.sim.oracle import Violation

SEEDS = int(os.environ.get("BURSAR_SEQUENCE_SEEDS", "60"))
FAILED_ONCE = (877, 1390, 2019, 2122, 3400, 4167, 5297, 5673)


def test_hundreds_of_seeds_break_nothing() -> None:
    """Given any seed, when it has healed, then every step happened once or is compensated, or a person is asked."""
    tally = run_everywhere("sequence", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.seeds == SEEDS
    assert tally.crashes >= SEEDS
    assert tally.commits >= 50 * SEEDS


def test_a_crash_at_every_port_call_breaks_nothing() -> None:
    """Given one small run, when it dies at each of its port calls, before or after its effect, then nothing is lost."""
    jobs = every_crash("sequence", 3, "any", small=True)
    jobs = jobs[:: max(1, len(jobs) // 60)] if "BURSAR_SEQUENCE_SEEDS" not in os.environ else jobs
    tally = run_jobs("sequence", jobs)
    assert tally.failures == []
    assert tally.crashes > len(jobs) // 4  # the rest are calls of the process beside it


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_a_seed_that_failed_once(seed: int) -> None:
    """Kept for ever: a compensation was refused to one process and done for the other, whose answer came late."""
    assert run_jobs("sequence", [Job(seed)]).failures == []


def test_a_clock_that_is_set_back_and_not_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """L24: five minutes back under a running worker, and everything would wait five minutes longer."""
    assert run_jobs("sequence", [Job(20)]).failures == []

    async def blind(_clock: DatabaseClock) -> int:
        return 0

    monkeypatch.setattr(DatabaseClock, "set_back", blind)
    assert len(run_jobs("sequence", [Job(20)]).failures) == 1


def test_the_same_seed_twice_is_the_same_run() -> None:
    """Same seed, same trace, in this process and in another one with another hash seed."""
    here = sequence.play(11)
    assert sequence.play(11).trace_hash == here.trace_hash
    assert sequence.play(12).trace_hash != here.trace_hash
    program = "from bursar.sim import sequence; print(sequence.play(11).trace_hash)"
    environment = {**os.environ, "PYTHONHASHSEED": "2"}
    other = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == here.trace_hash


def test_seeds_do_what_they_are_for() -> None:
    """Every end is reached, steps are undone and skipped, starts refused; both processes crash; some wait for ever."""
    runs = [sequence.play(seed) for seed in range(24)]
    ends: Counter[str] = sum((done.value.states for done in runs), Counter())
    assert min(ends[state] for state in (*sequence_model.ENDS, COMPENSATION_FAILED)) > 0, ends
    assert sum(done.value.undone for done in runs) > 40
    assert sum(done.value.skipped for done in runs) > 3
    assert all(done.value.refused == 1 for done in runs)
    assert {crash.process for done in runs for crash in done.crashes} == {"sequence", "sequence-2"}
    assert all(done.value.checks > 8 for done in runs)


def test_a_planned_crash_happens_where_it_was_planned() -> None:
    done = sequence.play(5, crashes=[CrashAt("sequence", 30, Moment.AFTER), CrashAt("sequence-2", 9, Moment.BEFORE)])
    assert {(c.process, c.call) for c in done.crashes} == {("sequence", 30), ("sequence-2", 9)}


def test_there_is_no_split_mode() -> None:
    with pytest.raises(ValueError, match="real units"):
        sequence.play(1, split=True)


def test_the_command_prints_the_usual_keys() -> None:
    found = CliRunner().invoke(command, ["sequence", "--seeds", "2", "--jobs", "1", "--json"])
    assert found.exit_code == 0
    told = msgspec.json.decode(found.stdout)
    wanted = {"scenario", "seeds", "commits", "port_calls", "crashes", "violations", "seconds", "failures"}
    assert told.keys() == wanted
    assert (told["scenario"], told["seeds"], told["violations"]) == ("sequence", 2, 0)


# --- flows that are broken on purpose ------------------------------------------------------------------------------


def broken(seeds: int = 8) -> list[str]:
    """What is wrong with the first seeds."""
    return [error for _, error in run_jobs("sequence", [Job(seed) for seed in range(seeds)]).failures]


def with_book(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    real = flow.book

    def book(item: FlowRecord[Sequence], event: str, answer: Answer) -> Booking:
        found = real(item, event, answer)
        return change(item, found) if found.intents else found

    monkeypatch.setattr(flow, "book", book)


def with_after(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    real = flow.next_body

    def after(item: FlowRecord[Sequence], event: str, answer: Answer) -> Sequence | None:
        found = real(item, event, answer)
        return found if found is None else change(item, event, found)

    monkeypatch.setattr(flow, "next_body", after)


def test_a_silence_taken_for_a_no_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Given an engine for which a lost reply is a failure, then what was done is neither kept nor undone."""

    def surprised(*_: Any) -> Answer:
        return Answer(outcome=Outcome.EXPLICIT_FAIL)

    monkeypatch.setattr(staying, "surprised", surprised)
    assert any("would be right" in error for error in broken())


def test_an_entry_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_book(monkeypatch, lambda item, found: Booking() if item.record.state == COMPENSATING else found)
    assert any("not booked with it" in error for error in broken())


def test_a_reversal_of_another_amount_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def less(item: FlowRecord[Sequence], found: Booking) -> Booking:
        (intent,) = found.intents
        if intent.kind is not EntryKind.RETURN or intent.legs[0].amount == 1:
            return found
        leg = msgspec.structs.replace(intent.legs[0], amount=intent.legs[0].amount - 1)
        return msgspec.structs.replace(found, intents=(msgspec.structs.replace(intent, legs=(leg,)),))

    with_book(monkeypatch, less)
    assert any("the step says" in error for error in broken())


def test_an_index_that_is_not_persisted_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """L14: a sequence that begins again from its first step."""
    with_after(
        monkeypatch,
        lambda item, event, found: msgspec.structs.replace(found, index=0) if item.record.state == RUNNING else found,
    )
    assert broken() != []


def test_a_compensation_that_undoes_the_first_step_first_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys by another place than the step's: the depot is asked to undo what it never did."""
    real = flow._call

    def call(item: Any, step: Any, place: int, op: str) -> Any:
        return real(item, step, place if op == "do" else 0, op)

    monkeypatch.setattr(flow, "_call", call)
    assert broken() != []


def test_a_sequence_that_gives_up_after_the_first_undone_step_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = flow.choose

    def choose(item: FlowRecord[Sequence]) -> str:
        return real(item) if item.record.state == STEP_DONE or item.body.index != 1 else "UNDONE"

    monkeypatch.setattr(flow, "choose", choose)
    assert any("is FAILED; done" in error for error in broken())


def test_a_refused_compensation_taken_for_done_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = flow._told

    def told(answer: Any) -> Answer:
        found = real(answer)
        refused = found.outcome is Outcome.EXPLICIT_FAIL and found.evidence.get("rail") == "undo"
        return msgspec.structs.replace(found, outcome=Outcome.SUCCESS) if refused else found

    monkeypatch.setattr(flow, "_told", told)
    assert any("would be right" in error for error in broken(16))


def test_a_compensation_that_fails_in_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def report(*_: Any) -> Answer:
        return Answer(outcome=Outcome.SUCCESS)

    monkeypatch.setattr(flow.Actions, "report", report)
    assert any("without an alert" in error for error in broken())


def test_a_refusal_that_is_not_taken_for_an_answer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with_book(monkeypatch, lambda _, found: msgspec.structs.replace(found, refused={}))
    monkeypatch.setattr(two_process, "HEALED_S", 10.0)
    assert any("not ended in time" in error and "the booking of SUCCESS" in error for error in broken())


def test_a_step_that_does_things_twice_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(self: sequence_model.Depot, id: str, op: str) -> Outcome:
        self.effects.append((id, op))
        self.answers[id, op] = Outcome.SUCCESS
        return Outcome.SUCCESS

    monkeypatch.setattr(sequence_model.Depot, "execute", execute)
    assert any("I7" in error for error in broken())


def test_a_worker_that_finds_nothing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def look(_self: Worker) -> int:
        return 0

    monkeypatch.setattr(Worker, "look", look)
    monkeypatch.setattr(two_process, "HEALED_S", 10.0)
    assert any("not ended in time" in error for error in broken(3))


def test_a_start_that_forgets_its_key_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Engine.start

    async def start(self: Engine, *args: Any, **more: Any) -> Any:
        return await real(self, *args, **(more | {"remember": None}))

    monkeypatch.setattr(Engine, "start", start)
    assert broken(10) != []


def test_people_who_are_not_heard_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def signal(_self: Operators, flow: str, id: str, *_: Any, **__: Any) -> Any:
        return await _self._engine.get(flow, id)

    monkeypatch.setattr(Operators, "signal", signal)
    monkeypatch.setattr(two_process, "HEALED_S", 10.0)
    assert any("not ended in time" in error for error in broken())


def test_a_fingerprint_that_does_not_cover_the_steps_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequences, "fingerprint", lambda _: "always the same")
    assert any("was started with other steps" in error for error in broken(4))


TAMPERING = {
    "a state": "UPDATE records SET state = 'COMPLETED'",
    "a version": "UPDATE records SET version = version + 1",
    "an owner of something": "UPDATE records SET transit = 65536",
    "an index": "UPDATE records SET body = json_set(body, '$.index', 1)",
    "a step that was skipped": "UPDATE records SET body = json_set(body, '$.skipped', json('[0]'))",
    "a transition of another kind": "UPDATE transitions SET event = 'NEXT' WHERE version = 2",
    "a transition to elsewhere": "UPDATE transitions SET target = 'FAILED' WHERE version = 2",
    "a step done without its entry": "INSERT INTO transitions VALUES (1000, 3, 'RUNNING', 'SUCCESS', 'STEP_DONE', 0, "
    "'', '{}', 0); UPDATE records SET version = 3, state = 'STEP_DONE', "
    "body = json_set(body, '$.index', 1, '$.results', json('[{}]'))",
}
BODY = (
    b'{"steps":[{"type":"entry","kind":"pay","source":"user:1","target":"user:2","asset":"USD","amount":"5",'
    b'"units":"0.05"}]}'
)


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
        "since, created_at, updated_at) VALUES (1000, 'sequence', 's', '', 'RUNNING', 2, 0, 0, 1, '', ?, '', 0, 0, 0)",
        (BODY.decode(),),
    )
    for step in ((1, "", "CREATED", "RUNNING"), (2, "RUNNING", "TIMEOUT", "RUNNING")):
        connection.execute("INSERT INTO transitions VALUES (1000, ?, ?, ?, ?, 0, '', '{}', 0)", step)
    depot = sequence_model.Depot.__new__(sequence_model.Depot)
    oracle = sequence_model.SequenceOracle(connection, depot, engine.beginning()[1])
    oracle.look()
    for statement in TAMPERING[what].split("; "):
        connection.execute(statement)
    with pytest.raises(Violation):
        oracle.look()
