"""A database that goes back to a backup, under the simulator: it is noticed, put right, and nobody gains or loses."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import msgspec
import pytest

from bursar.audit import Finding
from bursar.engine import Answer
from bursar.flows.transfers import reconcile, watch
from bursar.flows.transfers.flow import PAID_FROM_SUSPENSE, Calls
from bursar.sim import restored
from bursar.sim.exchange import USERS
from bursar.sim.oracle import Violation

SEEDS = int(os.environ.get("BURSAR_RESTORED_SEEDS", "60"))
PARTS = 2
KEPT = (15, 17, 18, 25, 42, 71, 75, 78, 84, 85, 94)  # each has failed once


@pytest.mark.parametrize("part", range(PARTS))
def test_no_restore_doubles_or_loses_money(part: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(part, SEEDS, PARTS):
        done = restored.play(seed)
        seen += Counter(done.value.trouble) + Counter(commits=done.value.commits)
    each = SEEDS // PARTS
    assert seen["restored"] > each // 2
    assert seen["noticed"] > each // 5
    assert seen["commits"] > 4 * each
    if part % 2:  # every other of its seeds spends what transfers that have arrived were to be paid with
        assert seen[PAID_FROM_SUSPENSE] > each // 20


@pytest.mark.parametrize("seed", KEPT)
def test_seeds_that_failed_once(seed: int) -> None:
    restored.play(seed)


def fails(seeds: int = 20) -> bool:
    for seed in range(seeds):
        try:
            restored.play(seed)
        except (ExceptionGroup, Violation):
            return True
    return False


def test_the_scenario_sees_a_watch_that_sees_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def blind(*_: object, **__: object) -> Finding:
        return Finding(invariant="I5", ok=True, checked=0, broken=[], seconds=0.0)

    monkeypatch.setattr(watch, "conservation", blind)
    assert fails()


def test_the_scenario_sees_a_refusal_of_what_has_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    """T48: the funding account can't pay it any more, and the core has it."""

    async def believed(_calls: Calls, _item: object, answer: Answer, **_: object) -> Answer:
        return answer

    monkeypatch.setattr(Calls, "_refused", believed)
    assert fails()


def test_the_scenario_sees_what_is_booked_for_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums of core and ledger agree all the same, so only what each user has tells."""
    right = reconcile.plan

    def wrong(*given: Any) -> reconcile.Plan | None:
        made = right(*given)
        if made is None:
            return None
        mine, other = f"user:{made.transfer.user}:", f"user:{made.transfer.user % USERS + 1}:"
        ends = {"source": made.source.replace(mine, other), "target": made.target.replace(mine, other)}
        return msgspec.structs.replace(made, **ends)

    monkeypatch.setattr(reconcile, "plan", wrong)
    assert fails()
