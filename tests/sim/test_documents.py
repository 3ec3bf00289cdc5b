"""Versioned documents under the simulator: many seeds, every crash point, and code that is broken on purpose."""

from __future__ import annotations

import os
from typing import Any

import pytest

from bursar.documents import Documents
from bursar.documents import documents as code
from bursar.model.documents import Document, draft
from bursar.sim import SimDisk, documents, engine, two_process
from bursar.sim.command import Job, every_crash, run_everywhere, run_jobs
from bursar.sim.oracle import Violation

SEEDS = int(os.environ.get("BURSAR_DOCUMENTS_SEEDS", "60"))


def test_every_change_is_made_once_whatever_crashes() -> None:
    """Given any seed, then each change is one version, and a raised limit has two people."""
    tally = run_everywhere("documents", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert (tally.seeds, tally.commits) == (SEEDS, SEEDS * len(documents.PEOPLE) * documents.CHANGES_EACH)
    assert tally.crashes >= SEEDS


def test_a_crash_at_every_port_call_breaks_nothing() -> None:
    jobs = every_crash("documents", 3, "any", small=True)
    jobs = jobs if "BURSAR_DOCUMENTS_SEEDS" in os.environ else jobs[:: max(1, len(jobs) // 60)]
    tally = run_jobs("documents", jobs)
    assert tally.failures == []
    assert tally.crashes > len(jobs) // 4  # the rest are calls of the process beside it


def test_seeds_do_what_they_are_for() -> None:
    runs = [documents.play(seed) for seed in range(12)]
    assert documents.play(5).trace_hash == documents.play(5).trace_hash != documents.play(6).trace_hash
    assert all(done.value.approved > 0 and done.value.reads > 0 for done in runs)
    assert sum(done.value.refused for done in runs) > 10
    assert sum(done.value.moved for done in runs) > 10
    assert {crash.process for done in runs for crash in done.crashes} == set(documents.PROCESSES)


# --- broken on purpose ---------------------------------------------------------------------------------------------


def broken(seeds: int = 12) -> list[str]:
    return [error for _, error in run_jobs("documents", [Job(seed) for seed in range(seeds)]).failures]


def test_a_cache_that_is_too_old_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.documents.cache.DOCUMENTS_S", 30.0)
    assert any("the cache has version" in error for error in broken())


def test_a_repeated_change_that_is_made_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "repeats", lambda *_, **__: False)
    assert any("changes that were not made once" in error or "and now" in error for error in broken(24))


def test_an_author_who_approves_under_another_name_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(code, "same_person", lambda *_: False)
    assert any("approved by its author" in error for error in broken())


def test_a_change_for_which_one_person_was_enough_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents.LIMITS.__class__, "judge", lambda *_: False)
    assert any(" and ''" in error for error in broken(4))


def test_an_approval_that_makes_no_version_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def approve(self: Documents, *_: object, **__: object) -> Document | None:
        return None

    monkeypatch.setattr(Documents, "approve", approve)
    monkeypatch.setattr(two_process, "HEALED_S", 10.0)
    assert any("not ended in time" in error for error in broken(3))


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE documents SET body = replace(body, '5', '6') WHERE version = 1",
        "UPDATE documents SET author = 'dave' WHERE version = 1",
        "DELETE FROM documents WHERE version = 2",
        "UPDATE documents SET number = 7 WHERE version = 2",
    ],
)
def test_the_oracle_notices(statement: str) -> None:
    """Given a sound database, when a row is changed behind its back, then the oracle says so."""
    disk = SimDisk()
    disk.install(two_process.PATH, engine.beginning()[0])
    db = disk.open(two_process.PATH)
    for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
        db.execute(f"DROP TRIGGER {name}")
    scenario: list[Document] = []
    for most in (5, 4):
        head = scenario[-1] if scenario else None
        made = draft(
            head,
            kind="limits",
            name="btc",
            body=f'{{"change":"c{most}","most":{most}}}',
            retired=False,
            author="bill",
            reason="r",
        )
        two = "" if head else "carol"
        fields: dict[str, Any] = {"approved_by": two, "approved_reason": two, "at_us": 0, "number": len(scenario) + 1}
        fields |= {name: getattr(made, name) for name in Document.__struct_fields__ if name not in fields}
        scenario.append(Document(**fields))
        row = [getattr(scenario[-1], name) for name in Document.__struct_fields__]
        db.execute(f"INSERT INTO documents ({documents.COLUMNS}) VALUES ({', '.join('?' * len(row))})", row)

    class Still:
        class loop:
            now = 0.0

    oracle = documents.DocumentOracle(Still, db, engine.beginning()[1])  # type: ignore[arg-type]
    oracle.records()
    db.execute(statement)
    with pytest.raises(Violation):
        oracle.records()
