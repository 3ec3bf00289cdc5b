"""Withdrawals under the simulator: many seeds, every crash point of one, and guards that are broken on purpose.

Most of what is broken here is guarded twice: the signer has rules of its own. So what must be noticed is not only that
money is lost, but that something was ordered which nothing had allowed.
"""

from __future__ import annotations

import itertools
import os
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from bursar.engine import holds
from bursar.flows.deposits import judging, scanning
from bursar.flows.deposits.arrivals import Arrived
from bursar.flows.withdrawals import deciding, risk, screening, withdrawal, withdrawals
from bursar.flows.withdrawals.deciding import Deciding
from bursar.flows.withdrawals.risk import Decision, Facts, Screening, Verdict
from bursar.sim import withdrawals as scenario
from bursar.sim.command import Job, every_crash, run_everywhere, run_jobs
from bursar.sim.expiry_chain import ExpiryChain
from bursar.sim.ledger import Size

SEEDS = int(os.environ.get("BURSAR_WITHDRAWALS_SEEDS", "1000"))


@pytest.mark.timeout(900)
def test_nothing_is_paid_that_was_not_allowed_whatever_breaks() -> None:
    tally = run_everywhere("withdrawals", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.seeds == SEEDS and tally.crashes > SEEDS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 1, 4], ids=["evm", "tron", "expiry"])
def test_crash_at_every_port_call_of_a_withdrawal_breaks_nothing(seed: int) -> None:
    jobs = every_crash("withdrawals", seed, "any", small=True)
    assert {job.crashes[0][0] for job in jobs if job.crashes} == {"withdrawals", "signer"}
    tally = run_everywhere("withdrawals", jobs, os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.crashes == len(jobs)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [2, 8, 14], ids=["evm", "tron", "expiry"])
def test_crash_at_every_port_call_of_a_deposit_breaks_nothing(seed: int) -> None:
    jobs = every_crash("withdrawals", seed, "any", small=True)
    assert scenario.play(seed, size=Size(callers=1, entries_each=1)).value.deposits == 1
    tally = run_everywhere("withdrawals", jobs, os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.crashes == len(jobs)


def test_seeds_do_what_they_are_for() -> None:
    runs = [scenario.play(seed) for seed in range(40)]
    again = scenario.play(4)
    assert again.trace_hash == runs[4].trace_hash != runs[5].trace_hash
    values = [run.value for run in runs]
    for name in (
        "refused",
        "completed",
        "failed",
        "rejected",
        "cancelled",
        "approved",
        "returned",
        "changes",
        "deposits",
        "swept",
        "imitated",
        "reorgs",
        "restored",
    ):
        assert sum(getattr(value, name) for value in values) > 0, name
    assert {crash.process for run in runs for crash in run.crashes} == {"withdrawals", "withdrawals-2", "signer"}


# --- broken on purpose -----------------------------------------------------------------------------------------------


def noticed(*words: str, seeds: range = range(120)) -> bool:
    """Whether some seed fails, in one of these words."""
    for seed in seeds:
        for _, error in run_jobs("withdrawals", [Job(seed)]).failures:
            if any(word in error for word in words):
                return True
    return False


def deciding_without(monkeypatch: pytest.MonkeyPatch, **known: Any) -> None:
    """Let the decision see these instead of the facts."""

    def decide(facts: Facts) -> Decision:
        return risk.decide(msgspec.structs.replace(facts, **known))

    monkeypatch.setattr(deciding, "decide", decide)


def test_withdrawal_that_needs_no_approval_any_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(risk, "people_counted", lambda *_: ("ann", "ben"))
    assert noticed("people have approved it")


def test_approval_whose_signature_is_not_checked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def believed(keys: dict[str, str], approvals: Any, _payment: Any) -> tuple[str, ...]:
        return tuple(one.approver for one in approvals if one.approver in keys)

    monkeypatch.setattr(deciding, "people_who_approve", believed)
    assert noticed("people have approved it")


def test_approval_by_who_has_asked_for_it_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under another spelling of the same name, too."""
    monkeypatch.setattr(risk, "same_person", lambda one, other: one == other)
    monkeypatch.setattr(withdrawals, "same_person", lambda one, other: one == other)
    assert noticed("people have approved it")


def test_one_approval_where_two_are_needed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    bounds = risk._bounds
    monkeypatch.setattr(risk, "_bounds", lambda *facts: msgspec.structs.replace(bounds(*facts), dual_above=10**18))
    assert noticed("1 people have approved it, and 2 are needed")


def test_approval_that_is_not_looked_at_again_before_the_first_attempt_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def certain(*_: Any) -> str:
        return ""

    monkeypatch.setattr(Deciding, "still_approved", certain)
    assert noticed("was begun")


def test_hold_that_is_given_back_although_it_was_paid_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    given_back = SimpleNamespace(
        authorize=holds.authorize, void=holds.void, confirm=lambda item, held, *_: holds.void(item, held)
    )
    monkeypatch.setattr(withdrawal, "holds", given_back)
    assert noticed("I6", "I9")


def test_cancellation_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding_without(monkeypatch, cancelled="")
    assert noticed("although it was cancelled")


def test_rejection_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding_without(monkeypatch, rejected="")
    assert noticed("although it was rejected")


def test_cancellation_that_is_forgotten_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    heard = withdrawal.heard
    monkeypatch.setattr(
        withdrawal, "heard", lambda body, event, more: body if event == "CANCEL" else heard(body, event, more)
    )
    assert noticed("was called off before it was ordered, and was paid")


def test_answer_of_the_screening_hook_that_is_not_signed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def believed(_secret: bytes, _question: bytes, answer: bytes) -> Screening:
        return Screening(Verdict(msgspec.json.decode(answer)["verdict"]))

    monkeypatch.setattr(screening, "read_answer", believed)
    assert noticed("the screening hook has never said clear")


def test_limits_that_are_not_counted_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(withdrawals, "limits", lambda *_: ())
    assert noticed("W44")


def test_account_that_is_frozen_and_pays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding_without(monkeypatch, frozen=False)
    assert noticed("although the account is frozen")


def test_address_that_is_too_new_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    deciding_without(monkeypatch, book_since_us=0)
    assert noticed("its address is not in the book, or too new", "its address is new")


# --- deposits --------------------------------------------------------------------------------------------------------

DEPOSITS = range(2, 120, 3)  # seeds on which strangers send something
UNSETTLED = "not ended in time: []"  # no record is open, and what has arrived is not what is known


def test_deposit_that_is_stored_under_another_name_each_time_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a block twice is harmless, as long as what was in it has a name for ever."""
    names = itertools.count()
    monkeypatch.setattr(scanning, "arrival_id", lambda chain, one: f"{chain}:{one.hash}:{next(names)}")

    def back(_: scanning.Scanning, body: scanning.Scan) -> scanning.Scan:
        return scanning.Scan(chain=body.chain, block=max(0, body.block - 3)) if body.block > 0 else body

    monkeypatch.setattr(scanning.Scanning, "_cursor", back)
    assert noticed("credited, and not there", UNSETTLED, seeds=DEPOSITS)


def test_gas_that_is_credited_to_a_user_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(body: Arrived, facts: judging.Facts) -> judging.Verdict:
        return real(body, msgspec.structs.replace(facts, own_payout=False, from_wallet=""))

    real = judging.judge
    monkeypatch.setattr(judging, "judge", judge)
    assert noticed("credited, and not there", UNSETTLED, seeds=DEPOSITS)


def test_cursor_that_passes_what_is_not_stored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def lost(*_: object) -> None:
        return None

    monkeypatch.setattr(scanning.Scanning, "_start", lost)
    assert noticed(UNSETTLED, seeds=DEPOSITS)


def test_deposit_that_is_credited_before_it_is_final_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def newest(chain: ExpiryChain) -> tuple[int, str]:
        head = chain._nodes.world.head
        return head.number, head.hash

    monkeypatch.setattr(ExpiryChain, "final_block", newest)
    assert noticed("credited, and not there", UNSETTLED, seeds=range(14, 1500, 15))


def test_amount_that_is_credited_wrongly_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "ledger_units", lambda raw, _decimals, _precision: (raw + 1, 0))
    assert noticed("credited, and not there", seeds=DEPOSITS)
