"""Payouts after a restore: what this database has forgotten, and the signer and the chain have not (W33)."""

from __future__ import annotations

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.till import CONTRACT, Till, Town, till, wallet_account

from bursar.engine import Operators
from bursar.flows.payouts.outside import order_of, sign_request
from bursar.flows.payouts.payout import Attempt, Payout
from bursar.model.errors import Conflict
from bursar.model.records import Record
from bursar.rails.chain import Fee, Shape, Slot
from bursar.signer.protocol import Signature, SignerUnavailable

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}
ALSO = {"actor": "ben", "reason": "so do I"}


async def body_of(t: Till, id_: str) -> Payout:
    return msgspec.json.decode((await t.record(id_)).body, type=Payout)


async def signed_elsewhere(
    t: Till, id_: str, payout: Payout, number: int, *, nonce: int, price: int = 20, wallet: str = "hot1"
) -> Signature:
    """What signer and nodes have of a payout, and this database has not."""
    chain, fee = t.town.chain, Fee(gas_limit=21_000, price=price)
    unsigned = chain.codec.build(chain.network, f"@{wallet}", order_of(id_, payout), Shape.PAY, Slot(nonce=nonce), fee)
    attempt = Attempt(number=number, shape=Shape.PAY, wallet=wallet, nonce=nonce, fee=fee, unsigned=unsigned.hex())
    said = await t.town.signer.sign(sign_request(id_, f"@{wallet}", payout.payment, payout.authorization, attempt))
    assert isinstance(said, Signature)
    await chain.send(said.raw)
    return said


async def resumed(t: Till) -> None:
    operators = Operators(t.engine)
    await operators.resume("flow", "payouts", **WHY)
    await operators.resume("flow", "payouts", **ALSO)


@scenario
@pytest.mark.parametrize("cancelled", [False, True])
async def test_attempt_in_another_slot_that_was_forgotten_is_adopted_when_the_first_is_dead(
    place: Place, cancelled: bool
) -> None:
    """The backup is of the time of the first attempt. That one failed in a block, and another wallet has paid since."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        payout = msgspec.json.decode((await t.until(made.id, "confirming")).body, type=Payout)
        town.chain.failing.add("@bob")
        town.chain.mine()
        town.chain.failing.clear()
        second = await signed_elsewhere(t, made.id, payout, 2, nonce=0, wallet="hot2")
        assert await t.payouts.reconciling.look() == "database"
        assert await t.payouts.reconciling.look() == "neither", "it is known from now on"
        if cancelled:
            await t.payouts.cancel(made.id, **WHY)
        assert (await t.step(made.id)).state == "pending", "nothing is given back: the second one may pay"
        await resumed(t)
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "confirmed")
        view = await t.payouts.view(made.id)
        assert (view.tx_hash, view.wallet) == (second.hash, "hot2")
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000 and await t.minor("alice") == 95_000_000
        assert not any((await t.reserved()).values())
        gas = [-await t.minor(wallet_account("paper", name), "ETH") for name in ("hot1", "hot2")]
        assert gas == [-210_000, -420_000]


@scenario
async def test_payout_with_attempts_in_two_slots_is_adopted_with_the_last(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        payout = await body_of(t, made.id)
        town.chain.failing.add("@bob")
        await signed_elsewhere(t, made.id, payout, 1, nonce=0)
        town.chain.mine()
        town.chain.failing.clear()
        second = await signed_elsewhere(t, made.id, payout, 2, nonce=0, wallet="hot2")
        await t.town.signer.cancel(made.id, 3)
        assert (await t.step(made.id)).state == "confirming"
        town.chain.pool.clear()
        assert (await t.step(made.id)).state == "confirming"
        assert town.chain.sends[-1] == second.hash, "it is sent again, and not the tombstone behind it"
        town.chain.mine()
        await t.until(made.id, "confirmed")
        view = await t.payouts.view(made.id)
        assert (view.tx_hash, view.wallet) == (second.hash, "hot2")
        assert [one.outcome for one in view.attempts] == ["dead", "final", "never signed"]


@scenario
async def test_nothing_is_signed_before_the_signers_log_was_compared(place: Place) -> None:
    """Or the mark of this signature would hide what the log has before it."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "signing")
        payout = await body_of(t, made.id)
        gone = msgspec.structs.replace(payout, payment=msgspec.structs.replace(payout.payment, payout="po-1"))
        await signed_elsewhere(t, "po-1", gone, 1, nonce=5, wallet="hot2")
        t.payouts.out.reconciled = False  # as in a process that has just started on the restored database
        assert "SIGNER_UNCHECKED" in (await t.step(made.id)).error
        assert await t.payouts.reconciling.look() == "database"
        assert await t.engine.get("payouts", "po-1") is not None


@scenario
async def test_replacement_that_was_put_back_is_told_to_its_payout_whatever_dies_between(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        payout = msgspec.json.decode((await t.until(made.id, "confirming")).body, type=Payout)
        town.chain.pool.clear()
        second = await signed_elsewhere(t, made.id, payout, 2, nonce=0)

        async def dies(*_args: object, **_more: object) -> Record:
            raise Conflict("the process dies here", 1)

        with monkeypatch.context() as patched:
            patched.setattr(t.engine, "signal", dies)
            with pytest.raises(Conflict):
                await t.payouts.reconciling.look()
        assert await t.payouts.reconciling.look() == "database"
        assert (await body_of(t, made.id)).replacements == (2,)
        await t.replace(made.id, 2)
        town.chain.mine()
        await t.until(made.id, "confirmed")
        assert (await t.payouts.view(made.id)).tx_hash == second.hash
        assert await t.payouts.reconciling.look() == "neither"


@scenario
async def test_payout_of_an_account_that_is_frozen_since_is_put_back_from_suspense(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        payout = await body_of(t, made.id)
        gone = msgspec.structs.replace(
            payout, payment=msgspec.structs.replace(payout.payment, payout="po-1", source="x")
        )
        await signed_elsewhere(t, "po-1", gone, 1, nonce=0, wallet="hot2")
        await t.ledger.freeze("alice")
        assert await t.payouts.reconciling.look() == "database"
        assert await t.engine.get("payouts", "po-1") is not None


@scenario
async def test_process_without_nodes_of_a_chain_signs_nothing_until_it_has_put_back_what_was_signed_there(
    place: Place,
) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "signing")
        payout = await body_of(t, made.id)
        gone = msgspec.structs.replace(payout, payment=msgspec.structs.replace(payout.payment, payout="po-1"))
        await signed_elsewhere(t, "po-1", gone, 1, nonce=5, wallet="hot2")
        t.payouts.out.reconciled = False
        chains = t.payouts.out.chains
        assert isinstance(chains, dict)
        there = dict(chains)
        chains.clear()
        with pytest.raises(SignerUnavailable, match=r"\(paper\): set chain_nodes"):
            await t.payouts.reconciling.look()
        assert not t.payouts.out.reconciled
        chains.update(there)
        assert await t.payouts.reconciling.look() == "database"
        assert await t.engine.get("payouts", "po-1") is not None
