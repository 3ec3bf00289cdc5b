"""The demo, run as a newcomer runs it: a real kill -9, and an exit code that can be trusted."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from bursar import Bursar
from bursar.demo import Answer, Day, Report, plan

DEMO = [sys.executable, "-c", "from bursar.cli import main; main()", "demo", "--seconds", "5"]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*DEMO, *words], capture_output=True, text=True, check=False, timeout=100)


def check(told: dict[str, Any]) -> None:
    """What has to be true of every run."""
    assert told["ok"] is True, told
    assert told["wrong"] == []
    assert told["unanswered"] > 0
    assert told["had_happened"] + told["happened_now"] + told["refused_now"] == told["unanswered"]
    assert told["committed"] == told["envelopes"] > 100
    assert [f["ok"] for f in told["audit"]] == [True] * 6


def test_it_tells_its_story_and_ends_by_itself(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/demo.db"
    start = time.monotonic()
    ran = run("--database", url)
    assert time.monotonic() - start < 20
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout + ran.stderr
    story = ["callers at once", "kill -9 of process", "were sent again", "The day is over", "Balances", "Last events"]
    story += ["as the ledger has it", "◀─", "Audit", "All is well"]
    places = [ran.stdout.index(words) for words in story]
    assert places == sorted(places)
    assert "\x1b" not in ran.stdout
    audit = subprocess.run([*DEMO[:3], "--database", url, "audit"], capture_output=True, check=False)
    assert audit.returncode == 0


def test_it_refuses_a_database_in_which_there_is_something(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/mine.db"

    async def make() -> None:
        async with Bursar(url) as b:
            await b.ledger.create_account("mine")

    asyncio.run(make())
    ran = run("--database", url)
    assert ran.returncode == 4
    assert ran.stderr.startswith("error: DATABASE_UNAVAILABLE: ")


def test_for_programs_and_on_postgresql(fresh_postgres: str) -> None:
    ran = run("--json", "--database", fresh_postgres)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    check(json.loads(ran.stdout))


def test_the_same_seed_is_the_same_day() -> None:
    assert plan(7, 200) == plan(7, 200)
    assert plan(7, 200) != plan(8, 200)


@pytest.mark.parametrize("lie", ["forgotten", "invented"])
def test_a_broken_promise_is_not_well(tmp_path: Path, lie: str) -> None:
    """The verdict compares: an entry that happened unasked, or was promised and is not there, is found."""
    day = Day(f"sqlite:///{tmp_path}/demo.db", 5, lambda _minute, _done: None, lambda _what, _report: None)

    async def judge() -> Report:
        await day.open_accounts()
        if lie == "forgotten":
            day.answers[0] = Answer(refused="NOTHING_TO_DO")
        else:
            entry = next(ask for ask in day.asks.values() if ask.number not in day.answers and ask.what == "entry")
            day.answers[entry.number] = Answer(envelope=999)
        async with Bursar(day.url) as b:
            await day.judge(b)
        return day.report

    report = asyncio.run(judge())
    assert not report.ok
    assert any("entries were promised" in text for text in report.wrong)
    assert any("should have" in text for text in report.wrong)
