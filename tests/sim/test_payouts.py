"""Payouts under the simulator: many seeds, every crash point of one, and code that is broken on purpose.

What is broken on purpose are the lines that guard the money: each of them must show, or the oracle is blind there.
"""

from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from bursar.engine import Answer, FlowRecord
from bursar.flows.payouts.assigning import Assigning
from bursar.flows.payouts.confirming import Confirming
from bursar.flows.payouts.reconciling import Reconciling
from bursar.flows.payouts.signing import Signing
from bursar.flows.payouts.watching import Watching
from bursar.model.marks import Restored
from bursar.model.outcome import Outcome
from bursar.rails.chain import Dead, NodesUnavailable, Order, Pending, Shape, Slot, Unknown
from bursar.rails.evm.chain import EvmChain
from bursar.rails.evm.rpc import Call, quantity
from bursar.signer import rules
from bursar.signer.client import SignerClient
from bursar.sim import payouts
from bursar.sim.command import Job, every_crash, run_everywhere, run_jobs

SEEDS = int(os.environ.get("BURSAR_PAYOUTS_SEEDS", "1000"))


@pytest.mark.timeout(900)
def test_no_payout_is_made_twice_whatever_breaks() -> None:
    tally = run_everywhere("payouts", [Job(seed) for seed in range(SEEDS)], os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.seeds == SEEDS and tally.crashes > 2 * SEEDS


@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [0, 2])  # on the chain with nonces, and on the one that expires
def test_crash_at_every_port_call_of_a_payout_breaks_nothing(seed: int) -> None:
    jobs = every_crash("payouts", seed, "any", small=True)
    assert {job.crashes[0][0] for job in jobs if job.crashes} == {"payouts", "payouts-2", "signer"}
    tally = run_everywhere("payouts", jobs, os.cpu_count() or 1, show=False)
    assert tally.failures == []
    assert tally.crashes == len(jobs)


def test_seeds_do_what_they_are_for() -> None:
    runs = [payouts.play(seed) for seed in (*range(21), 50, 54, 156)]
    again = payouts.play(3)
    assert again.trace_hash == runs[3].trace_hash != runs[4].trace_hash
    values = [run.value for run in runs]
    for name in (
        "confirmed",
        "failed",
        "replaced",
        "reorgs",
        "restored",
        "lied",
        "named",
        "deep",
        "behind",
        "rebound",
        "decided",
    ):
        assert sum(getattr(value, name) for value in values) > 0, name
    assert {crash.process for run in runs for crash in run.crashes} == {"payouts", "payouts-2", "signer"}


def test_nodes_that_lie_to_the_end_are_named_and_stop_nothing() -> None:
    done = payouts.play(1).value
    assert done.lied > 0 and done.named and done.confirmed + done.failed == done.payouts


# --- broken on purpose -----------------------------------------------------------------------------------------------


def noticed(*words: str, seeds: range = range(30)) -> bool:
    """Whether some seed fails, in one of these words; any, if none is given."""
    for seed in seeds:
        for _, error in run_jobs("payouts", [Job(seed)]).failures:
            if not words or any(word in error for word in words):
                return True
    return False


def test_payout_that_is_given_back_on_silence_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = Confirming._settled

    async def hasty(self: Confirming, item: FlowRecord[Any], chain: Any, fate: Any, *more: Any) -> Answer:
        silent = isinstance(fate, Unknown) or (isinstance(fate, Pending) and not fate.seen)
        return await settled(self, item, chain, Dead(proof={"silence": 1}) if silent else fate, *more)

    monkeypatch.setattr(Confirming, "_settled", hasty)
    # The signer refuses a second slot for what may still pay: then the payout never ends, and nothing is lost.
    assert noticed("was paid", "I9", "NEEDS_RELEASE")


def test_transaction_that_counts_before_it_is_final_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settled = Confirming._settled

    async def hasty(self: Confirming, item: FlowRecord[Any], chain: Any, fate: Any, *more: Any) -> Answer:
        if isinstance(fate, Pending) and fate.block is not None:
            return Answer(outcome=Outcome.SUCCESS, evidence={"hash": ""})
        return await settled(self, item, chain, fate, *more)

    monkeypatch.setattr(Confirming, "_settled", hasty)
    assert noticed("was paid", "I9")


def test_attempt_that_is_built_anew_at_each_try_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other bytes for an attempt whose signature was lost: the signer refuses them, and the payout never ends (W30)."""
    signed = Signing._signed

    async def forgetful(self: Signing, item: Any, request: Any, **more: Any) -> Any:
        chain = self.out.chains[request.chain]
        does = chain.codec.decode(request.unsigned)
        fee = msgspec.structs.replace(does.fee, price=does.fee.price + 1 + item.record.attempt)
        order = Order(payout=request.payout, to=does.to, contract=does.contract, amount=does.amount)
        other = chain.codec.build(chain.network, request.sender, order, Shape.PAY, does.slot, fee)
        return await signed(self, item, msgspec.structs.replace(request, unsigned=other), **more)

    monkeypatch.setattr(Signing, "_signed", forgetful)
    monkeypatch.setattr(payouts, "HEALED_S", 200.0)
    assert noticed("not ended in time")


def test_restored_database_that_is_not_compared_with_the_signer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def blind(self: Reconciling) -> Restored:
        self.out.reconciled = True
        return Restored.NEITHER

    async def nothing(self: SignerClient, payout: str) -> tuple[()]:
        return ()

    monkeypatch.setattr(Reconciling, "look", blind)
    monkeypatch.setattr(SignerClient, "attempts", nothing)
    monkeypatch.setattr(payouts, "HEALED_S", 200.0)
    assert noticed("was paid", seeds=range(24, 160, 135))  # their databases go back to a backup


def test_signer_that_signs_a_second_slot_for_a_live_payout_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a worker that takes another slot whenever it is not answered."""
    monkeypatch.setattr(rules._Case, "_other_slots", lambda *_: ())
    monkeypatch.setattr("bursar.signer.service.Service._live", lambda *_: ())
    settled = Confirming._settled

    async def impatient(self: Confirming, item: FlowRecord[Any], chain: Any, fate: Any, *more: Any) -> Answer:
        waits = isinstance(fate, Pending) and not item.body.dead
        return await settled(self, item, chain, Dead(proof={"impatience": 1}) if waits else fate, *more)

    monkeypatch.setattr(Confirming, "_settled", impatient)
    assert noticed("I7", "was paid", "I9")


def test_gas_that_is_not_booked_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.flows.payouts.payout._gas", lambda *_: ())
    assert noticed("I9")


def test_reservation_that_is_not_given_back_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bursar.flows.payouts.payout._given_back", lambda *_: ())
    monkeypatch.setattr(payouts, "HEALED_S", 200.0)
    assert noticed()


def test_nonce_below_what_the_signer_has_signed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restore the database would give out nonces that were used: the signer's floor and the chain forbid it."""
    taken = Assigning._taken

    def low(
        self: Assigning,
        item: Any,
        chain: Any,
        network: Any,
        candidate: Any,
        order: Any,
        fee: Any,
        slot: Any,
        floor: int,
    ) -> Answer:
        low_slot = msgspec.structs.replace(slot, nonce=None if slot.nonce is None else 0)
        return taken(self, item, chain, network, candidate, order, fee, low_slot, 0)

    monkeypatch.setattr(Assigning, "_taken", low)
    monkeypatch.setattr(payouts, "HEALED_S", 200.0)
    assert noticed(seeds=range(4, 504, 5))


def test_node_that_is_believed_alone_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nonce that any single node names leaves a hole, behind which a wallet's payouts wait for ever."""

    async def credulous(self: EvmChain, sender: str) -> Slot:
        call = Call("eth_getTransactionCount", (sender, "latest"))
        said = await self._nodes.ask([call], None, lambda results: quantity(results[0]))
        if not said:
            raise NodesUnavailable(self.network.name, "no node answers")
        return Slot(nonce=max(said.values()))

    monkeypatch.setattr(EvmChain, "slot", credulous)
    monkeypatch.setattr(payouts, "HEALED_S", 200.0)
    assert noticed("not ended in time", seeds=range(207, 208))


def test_final_block_that_is_gone_and_not_looked_at_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def blind(*_: Any) -> None:
        return None

    monkeypatch.setattr(Watching, "_incident", blind)
    monkeypatch.setattr(payouts, "HEALED_S", 100.0)
    assert noticed("W19", "was paid", "not ended", seeds=range(18, 400, 13))
