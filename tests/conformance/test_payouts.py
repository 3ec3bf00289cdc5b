"""Payouts on a paper chain: each step on disk before the next, every end with its proof, nothing paid twice."""

from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from tests.builders import Place, scenario
from tests.conformance.test_transfers import behind
from tests.till import CONTRACT, DOCUMENT, FEES, GAS, Till, Town, till, wallet_account

from bursar.engine import Operators, Started
from bursar.engine.forced import ask_due
from bursar.flows.payouts import PayoutRefused
from bursar.flows.payouts.coverage import wallets_cover
from bursar.flows.payouts.documents import CHAIN, WALLET
from bursar.flows.payouts.outside import order_of, sign_request
from bursar.flows.payouts.payout import REFUSALS_MAX, Attempt, Payout
from bursar.model.errors import IdempotencyKeyReused, InsufficientFunds
from bursar.model.flow_rows import RowTaken
from bursar.model.records import Record
from bursar.rails.chain import Decoded, Fee, InvalidAddress, NodesUnavailable, Shape, Slot
from bursar.signer.protocol import Signature, SignerRefused

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}
ALSO = {"actor": "ben", "reason": "so do I"}


async def money(t: Till) -> tuple[int, int, int]:
    """What alice has, what hot1 and hot2 have by the books (less bob's), and bob's on the chain."""
    books = sum([-await t.minor(wallet_account("paper", name)) for name in ("hot1", "hot2")])
    return await t.minor("alice"), books, t.town.chain.tokens.get((CONTRACT, "@bob"), 0)


def no_longer_reserved(reserved: dict[str, int]) -> bool:
    return not any(reserved.values())


@scenario
async def test_payout_is_sent_once_and_confirmed_with_its_gas_booked(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        before = await money(t)
        made = await t.request("5", fee="1")
        assert (made.status, made.state, await t.minor("alice")) == ("pending", "pending", before[0] - 6_000_000)
        record = await t.until(made.id, "confirming")
        assert len(town.chain.sends) == 1 and record.version > 0
        history = await t.engine.store.read.records.history(record.number)
        await t.step(made.id)  # a poll that says nothing new
        assert len(await t.engine.store.read.records.history(record.number)) == len(history), "no row per poll"
        assert not no_longer_reserved(await t.reserved())
        town.chain.mine()
        await t.until(made.id, "confirmed")
        done = await t.payouts.view(made.id)
        assert (done.status, done.tx_hash, done.gas_used) == ("confirmed", town.chain.sends[0], 21_000)
        assert [a.nonce for a in done.attempts] == [0] and done.attempts[0].raw
        alice, books, bob = await money(t)
        assert (before[0] - alice, before[1] - books, bob) == (6_000_000, 5_000_000, 5_000_000)
        assert await t.minor(FEES) == 1_000_000
        assert await t.minor(GAS, "ETH") == -210_000 == -await t.minor(wallet_account("paper", done.wallet), "ETH")
        assert no_longer_reserved(await t.reserved())


@scenario
async def test_wallets_take_turns_and_each_has_its_own_nonces(place: Place) -> None:
    async with till(place, Town()) as t:
        used = []
        for number in range(4):
            made = await t.request("1", key=f"k{number}")
            record = await t.until(made.id, "confirming")
            view = await t.payouts.view(record.id)
            used.append((view.wallet, view.attempts[0].nonce))
        assert used == [("hot1", 0), ("hot2", 0), ("hot1", 1), ("hot2", 1)]


@scenario
async def test_only_so_many_transactions_of_a_wallet_are_unconfirmed(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        ids = [(await t.request("1", key=f"k{n}")).id for n in range(7)]
        for id_ in ids[:6]:
            await t.until(id_, "confirming")
        late = await t.step(ids[6])
        assert late.state == "pending" and "NO_ROOM" in late.error
        town.chain.mine()
        await t.until(ids[0], "confirmed")
        assert (await t.until(ids[6], "confirming")).state == "confirming"


@scenario
async def test_request_again_is_the_same_payout_and_a_source_has_one(place: Place) -> None:
    async with till(place, Town()) as t:
        first = await t.request("5.00")
        assert (await t.request("5")).id == first.id
        with pytest.raises(IdempotencyKeyReused):
            await t.request("6")
        with pytest.raises(PayoutRefused) as refused:
            await t.request("5", key="k2", source="test:k1")
        assert refused.value.reason == "PAYOUT_EXISTS"
        await t.payouts.cancel(first.id, **WHY)
        await t.until(first.id, "failed")
        assert (await t.request("5", key="k2", source="test:k1")).id != first.id, "the first one has failed"


@scenario
async def test_requests_that_are_refused_write_nothing(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        cases = {
            "UNKNOWN_CHAIN": {"chain": "nowhere"},
            "ASSET_NOT_ON_CHAIN": {"asset": "BTC"},
            "INVALID_PRIORITY": {"priority": "urgent"},
            "BELOW_MINIMUM": {"amount": "0.000999"},
            "INVALID_AMOUNT": {"amount": "0"},
            "OWN_ADDRESS": {"to": "@hot2"},
            "DESTINATION_IS_TOKEN": {"to": CONTRACT},
            "NOT_OWN_ADDRESS": {"wallet": "hot1"},
        }
        for code, wanted in cases.items():
            with pytest.raises(PayoutRefused) as refused:
                await t.request(**{"amount": "5", **wanted})
            assert refused.value.reason == code
        with pytest.raises(InvalidAddress):
            await t.request(to="bob")
        with pytest.raises(InsufficientFunds):
            await t.request("100.000001")
        assert await t.payouts.list() == []
        await t.put(CHAIN, "paper", msgspec.structs.replace(DOCUMENT, active=False))
        with pytest.raises(PayoutRefused) as refused:
            await t.request()
        assert refused.value.reason == "CHAIN_INACTIVE"


@scenario
@pytest.mark.parametrize("first_wins", [True, False])
async def test_stuck_transaction_is_bumped_and_either_one_counts_once(place: Place, first_wins: bool) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request("5")
        await t.until(made.id, "confirming")
        town.chain.price = 50  # nothing is mined at the old price
        town.chain.mine()
        kept = dict(town.chain.pool)
        await t.payouts.bump(made.id, **WHY)
        assert (await t.step(made.id)).state == "confirming"
        assert (await t.replace(made.id, 2)).state == "sent"
        if first_wins:  # another node had the first one
            town.chain.pool, town.chain.price = kept, 10
        town.chain.mine()
        await t.until(made.id, "confirmed")
        view = await t.payouts.view(made.id)
        one, two = view.attempts
        assert (one.nonce, two.nonce) == (0, 0) and two.fee.price >= one.fee.price * 9 / 8
        assert view.tx_hash == (one.hash if first_wins else two.hash)
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000
        assert no_longer_reserved(await t.reserved())


@scenario
async def test_bump_while_nodes_are_away_waits_for_them(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """They answer what became of it, and are gone when they are asked for a higher fee."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request("5")
        await t.until(made.id, "confirming")
        town.chain.price = 50
        town.chain.mine()
        await t.payouts.bump(made.id, **WHY)
        monkeypatch.setattr(town.chain, "higher", gone)
        waiting = await t.step(made.id)
        assert waiting.state == "confirming" and waiting.error.startswith("NODES_UNAVAILABLE")
        monkeypatch.undo()
        assert (await t.step(made.id)).state == "confirming"
        assert (await t.replace(made.id, 2)).state == "sent"


async def gone(*_: object) -> Fee | None:
    raise NodesUnavailable("paper", "no node answers")


@scenario
@pytest.mark.parametrize("verb", ["bump", "cancel"])
async def test_operator_is_heard_though_the_payout_moves_at_that_moment(
    place: Place, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with till(place, Town()) as t:
        made = await t.request("5")
        look, moves = t.engine.record, 3

        async def looked_at_too_early(flow: str, id_: str) -> Record:
            nonlocal moves
            found = await look(flow, id_)
            if (moves := moves - 1) >= 0:
                await t.step(id_)
            return found

        monkeypatch.setattr(t.engine, "record", looked_at_too_early)
        await getattr(t.payouts, verb)(made.id, **WHY)
        monkeypatch.undo()
        body = msgspec.json.decode((await t.record(made.id)).body, type=Payout)
        assert (body.bumps, body.cancel) == ((1, "") if verb == "bump" else (0, WHY["reason"]))


@scenario
async def test_stuck_transaction_is_bumped_by_itself_after_a_while(place: Place) -> None:
    town = Town(document=msgspec.structs.replace(DOCUMENT, bump_after_s=60))
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        assert (await t.step(made.id)).version == (await t.step(made.id)).version, "not yet"
        t.payouts.out.ports = Later(t.payouts.out.ports, 61)  # type: ignore[assignment]
        await t.step(made.id)
        assert (await t.replace(made.id, 2)).state == "sent"
        before = await t.record(made.id)
        assert (await t.step(made.id)).version == before.version, "the next one after as long again"


class Later:
    """Ports whose wall clock is ahead."""

    def __init__(self, ports: object, seconds: int) -> None:
        self._ports, self._us = ports, seconds * 10**6

    def now_us(self) -> int:
        return int(self._ports.now_us()) + self._us  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._ports, name)


@scenario
@pytest.mark.parametrize("state", ["pending", "processing", "signing", "sending", "confirming"])
async def test_cancelled_in_each_state_is_never_paid_and_leaves_no_gap(place: Place, state: str) -> None:
    town = Town()
    async with till(place, town) as t:
        before = await money(t)
        made = await t.request("5")
        await t.until(made.id, state)
        town.chain.price = 50  # what was sent is not mined at its price
        await t.payouts.cancel(made.id, **WHY)
        for _ in range(8):
            record = await t.step(made.id)
            for number in (2, 3):
                if await t.engine.get("replacements", f"{made.id}-r{number}") is not None:
                    await t.replace(made.id, number)
            town.chain.price = 10
            town.chain.mine()
            if record.state == "failed":
                break
        record = await t.record(made.id)
        assert record.state == "failed", record.error
        assert (await money(t))[0] == before[0] and (await money(t))[2] == 0
        wallet = (await t.payouts.view(made.id)).wallet
        used = town.chain.nonces.get(f"@{wallet}", 0)
        assert used == (0 if state == "pending" else 1), "its nonce is used up by a transfer to itself"
        assert no_longer_reserved(await t.reserved())
        another = await t.request("5", key="k2")
        await t.until(another.id, "confirming")
        town.chain.mine()
        await t.until(another.id, "confirmed")


@scenario
async def test_signer_whose_answer_is_lost_is_asked_for_the_same_bytes(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "signing")
        town.signer.loses_answer = True
        stays = await t.step(made.id)
        assert stays.state == "signing" and len(town.signer.entries) == 1
        await t.until(made.id, "confirming")
        assert len(town.signer.entries) == 1


@scenario
async def test_outages_and_empty_wallets_wait_and_count_no_refusal(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        tokens = dict(town.chain.tokens)
        town.chain.tokens.clear()
        assert "LOW_BALANCE" in (await t.step(made.id)).error
        assert [a.reason for a in await t.engine.store.read.alerts.open()] == ["low balance"]
        town.chain.tokens |= tokens
        town.chain.away = True
        assert "NODES_UNAVAILABLE" in (await t.step(made.id)).error
        town.chain.away, town.signer.away = False, True
        assert "SIGNER_UNAVAILABLE" in (await t.step(made.id)).error
        town.signer.away, town.chain.price = False, 1_000
        waiting = await t.step(made.id)
        assert "FEE_ABOVE_CEILING" in waiting.error
        assert (await t.step(made.id)).version == waiting.version, "the same cause again is no news"
        town.chain.price = 10
        town.chain.mine()
        await t.until(made.id, "confirming")


@scenario
async def test_payment_that_the_chain_would_refuse_fails_after_some_tries_and_gives_back(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        town.chain.reverts.add("@bob")
        made = await t.request()
        for _ in range(4):
            assert (await t.step(made.id)).state == "pending"
        assert (await t.step(made.id)).state == "failed"
        assert await t.minor("alice") == 100_000_000 and town.signer.entries == []


@scenario
async def test_signer_that_denies_a_payment_ends_it_without_a_nonce(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        town.signer.refusal = SignerRefused("NOT_APPROVED", "two people approve this", False, 0)
        for _ in range(6):
            assert (await t.step(made.id)).state == "pending", "it waits for its approvals"
        town.signer.refusal = SignerRefused("DENIED", "not on the list", True, 0)
        for _ in range(4):
            assert (await t.step(made.id)).state == "pending"
        assert (await t.step(made.id)).state == "failed"
        assert town.chain.nonces == {} and await t.minor("alice") == 100_000_000


@scenario
async def test_signer_that_denies_after_the_nonce_was_taken_has_it_filled(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "signing")
        town.signer.refusal = SignerRefused("DENIED", "not on the list", True, 0)
        record = await t.step(made.id)
        assert record.state == "processing"
        town.signer.refusal = None
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "failed")
        assert town.chain.nonces == {"@hot1": 1} and (CONTRACT, "@bob") not in town.chain.tokens
        assert await t.minor("alice") == 100_000_000 and await t.minor(GAS, "ETH") == -210_000


@scenario
async def test_final_and_failed_is_tried_again_with_another_nonce_and_costs_us(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        town.chain.failing.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        again = await t.step(made.id)
        assert again.state == "pending" and no_longer_reserved(await t.reserved())
        town.chain.failing.clear()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "confirmed")
        assert await t.minor(GAS, "ETH") == -420_000, "both cost gas, and it is ours"
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000


@scenario
@pytest.mark.parametrize("ends", ["released", "cancelled"])
async def test_payout_waits_while_the_signer_has_not_seen_that_its_attempt_is_dead(place: Place, ends: str) -> None:
    """It neither fails nor waits in silence: an operator reads what two approvers would sign (W31)."""
    town = Town()
    release = '{"payout":"p","dead":[{"attempt":1,"hash":"0x1"}]}'
    async with till(place, town) as t:
        before = await t.minor("alice")
        town.chain.failing.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        town.signer.refusal = SignerRefused("SECOND_SLOT", f"two approvers release it: {release}", False, 1)
        await t.step(made.id)
        town.chain.failing.clear()
        assert (await t.step(made.id)).error.startswith("SECOND_SLOT"), "the signer's nodes may be a moment behind"
        assert await t.engine.store.read.alerts.open() == []
        for _ in range(REFUSALS_MAX):
            await t.step(made.id)
        waits = await t.step(made.id)
        assert waits.state == "pending" and waits.error.startswith("NEEDS_RELEASE") and release in waits.error
        (alert,) = await t.engine.store.read.alerts.open()
        assert (alert.severity, alert.reason) == ("critical", "needs release")
        assert made.id in alert.message and release in alert.message and "payout cancel" in alert.message
        if ends == "cancelled":
            await t.payouts.cancel(made.id, **WHY)
            await t.until(made.id, "failed")
            assert await t.minor("alice") == before
            return
        town.signer.refusal = None
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "confirmed")
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000


@scenario
@pytest.mark.parametrize("paid", [True, False])
async def test_final_without_the_transfer_waits_for_two_people(place: Place, paid: bool) -> None:
    town = Town()
    async with till(place, town) as t:
        town.chain.shy.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        assert (await t.step(made.id)).state == "disputed"
        for _ in range(2):
            await t.payouts.resolve(made.id, paid=paid, **WHY)
        assert (await t.record(made.id)).state == "disputed", "one person, however often"
        await t.payouts.resolve(made.id, paid=paid, **ALSO)
        assert (await t.record(made.id)).state == ("confirmed" if paid else "failed")
        assert await t.minor("alice") == (95_000_000 if paid else 100_000_000)
        assert no_longer_reserved(await t.reserved())


@scenario
@pytest.mark.parametrize("dropped", [True, False])
async def test_payout_that_was_declared_not_paid_is_not_contradicted_by_its_event_alone(
    place: Place, dropped: bool
) -> None:
    """Balances were not what its event says, and nodes drop old balances; seen anew, they count."""
    town = Town()
    async with till(place, town) as t:
        town.chain.shy.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "disputed")
        for person in (WHY, ALSO):
            await t.payouts.resolve(made.id, paid=False, **person)
        town.chain.shy.clear()
        town.chain.dropped = dropped
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago}")
        assert await ask_due(t.engine) == (not dropped)
        alerts = {alert.reason for alert in await t.engine.store.read.alerts.open()}
        assert ("contradiction" in alerts) is not dropped
        assert bool(await t.engine.store.read.pauses.list()) is not dropped


@scenario
@pytest.mark.parametrize("signed", [False, True])
async def test_payout_for_the_reason_of_one_that_is_paid_after_all_is_held_or_people_are_told(
    place: Place, signed: bool
) -> None:
    """Two people were wrong, and the same was requested again: known in time, it is not paid a second time."""
    town = Town()
    async with till(place, town) as t:
        town.chain.shy.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "disputed")
        for person in (WHY, ALSO):
            await t.payouts.resolve(made.id, paid=False, **person)
        again = await t.request(key="k2", source="test:k1")
        if signed:
            await t.until(again.id, "confirming")
        town.chain.shy.clear()
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago}")
        assert await ask_due(t.engine) == 1
        alerts = [alert for alert in await t.engine.store.read.alerts.open() if alert.reason.startswith("paid after")]
        assert [again.id in alert.message and "cancel this one" in alert.message for alert in alerts] == [True]
        for person in (WHY, ALSO):
            await Operators(t.engine).unhalt("flow", "payouts", **person)
        record = await t.step(again.id)
        if not signed:
            assert record.state == "pending" and f"HELD: an operator holds it: {made.id} was paid" in record.error
            await t.payouts.cancel(again.id, **WHY)
            await t.until(again.id, "failed")
            assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000


@scenario
async def test_reason_of_a_payout_that_was_paid_after_all_is_paid_no_more(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        town.chain.shy.add("@bob")
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "disputed")
        for person in (WHY, ALSO):
            await t.payouts.resolve(made.id, paid=False, **person)
        town.chain.shy.clear()
        ago = "now() - interval '1 second'" if place.engine == "postgres" else "0"
        await behind(place, f"UPDATE {{s}}forced_calls SET due = {ago}")
        assert await ask_due(t.engine) == 1
        with pytest.raises(
            PayoutRefused, match=f"{made.id} was for test:k1, and was paid after it had failed"
        ) as refused:
            await t.request(key="k2", source="test:k1")
        assert refused.value.reason == "PAYOUT_EXISTS"
        assert (await t.request(key="k3")).state == "pending", "another reason"


@scenario
async def test_payout_that_was_signed_before_a_restore_is_adopted_and_not_paid_again(place: Place) -> None:
    """The database was restored to a time before the nonce was taken; the signer's log knows better (W33)."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        body = msgspec.json.decode((await t.payouts._record(made.id)).body, type=Payout)
        await signed_elsewhere(t, made.id, body)
        assert (await t.step(made.id)).state == "confirming"
        assert len(town.signer.entries) == 1 and town.chain.tokens[CONTRACT, "@bob"] == 5_000_000
        await t.until(made.id, "confirmed")
        view = await t.payouts.view(made.id)
        assert view.tx_hash == town.signer.entries[0].hash and view.wallet == "hot2"
        assert no_longer_reserved(await t.reserved())


async def signed_elsewhere(t: Till, id_: str, payout: Payout, number: int = 1, price: int = 10) -> None:
    """What signer and chain know of a payout, and this database does not: it was signed after the backup."""
    chain, fee = t.town.chain, Fee(gas_limit=21_000, price=price)
    wallet = payout.wallet or "hot2"
    unsigned = chain.codec.build(chain.network, f"@{wallet}", order_of(id_, payout), Shape.PAY, Slot(nonce=0), fee)
    attempt = Attempt(number=number, shape=Shape.PAY, wallet=wallet, nonce=0, fee=fee, unsigned=unsigned.hex())
    request = sign_request(id_, f"@{wallet}", payout.payment, payout.authorization, attempt)
    said = await t.town.signer.sign(request)
    assert isinstance(said, Signature)
    await chain.send(said.raw)
    chain.mine()


@scenario
async def test_held_payout_waits_until_it_is_released(place: Place) -> None:
    async with till(place, Town()) as t:
        made = await t.request()
        await t.payouts.hold(made.id, **WHY)
        assert "HELD" in (await t.step(made.id)).error
        await t.payouts.release(made.id, **WHY)
        await t.until(made.id, "confirming")
        with pytest.raises(PayoutRefused):
            await t.payouts.hold(made.id, **WHY)


@scenario
async def test_pause_of_the_chain_stops_first_sends_and_never_confirmation(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        sent, new = await t.request(), await t.request(key="k2")
        await t.until(sent.id, "confirming")
        await Operators(t.engine).pause("rail", "chain paper", **WHY)
        assert (await t.step(new.id)).state == "pending"
        town.chain.mine()
        await t.until(sent.id, "confirmed")
        await Operators(t.engine).resume("rail", "chain paper", **WHY)
        await t.until(new.id, "confirming")


# --- the watcher and the signer's log --------------------------------------------------------------------------------


@pytest.mark.parametrize("same", [True, False])
@scenario
async def test_request_whose_source_is_taken_meanwhile_gets_its_own_payout_or_a_refusal(
    place: Place, same: bool
) -> None:
    """Another process has written a payout for the same source since this one has looked: for this very request, or
    for another one."""
    town = Town()
    async with till(place, town) as t, till(place, town, worker="other") as other:
        start, made = t.engine.start, []

        async def overtaken(*args: Any, **more: Any) -> Started:
            made.append(await other.request(key="k1" if same else "k2", source="order 17"))
            number = (await t.record(made[0].id)).number
            with contextlib.suppress(RowTaken):
                await start(*args, **more)
            raise RowTaken("payouts", "source", "order 17", number)

        t.engine.start = overtaken  # type: ignore[method-assign]
        if same:
            assert (await t.request(source="order 17")).id == made[0].id
        else:
            with pytest.raises(PayoutRefused) as error:
                await t.request(source="order 17")
            assert error.value.reason == "PAYOUT_EXISTS"
        assert len(await t.payouts.list()) == 1 and await t.minor("alice") == 95_000_000


async def watch(t: Till) -> None:
    """The watcher of the chain looks once more."""
    record = await t.engine.get("chains", "paper")
    assert record is not None
    await t.engine.step(record)


@scenario
async def test_watcher_halts_a_wallet_with_a_transaction_that_no_payout_explains(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        await watch(t)
        known = await t.request()
        await t.until(known.id, "confirming")
        town.chain.mine()
        await watch(t)
        assert await t.engine.store.read.alerts.open() == [], "a payout of ours is no surprise"
        stolen = Decoded(
            chain_id=7, to="@thief", contract="", amount=1, slot=Slot(nonce=0), fee=Fee(gas_limit=1, price=10)
        )
        town.chain.include("stolen", stolen, "@hot2")
        town.chain.height += 1
        town.chain.mined["stolen"] = (stolen, "@hot2", town.chain.height)
        await watch(t)
        assert [a.reason for a in await t.engine.store.read.alerts.open()] == ["unknown transaction of hot2"]
        for number in range(2):
            made = await t.request(key=f"k{number + 2}")
            await t.until(made.id, "confirming")
            assert (await t.payouts.view(made.id)).wallet == "hot1", "the other wallet goes on"
        assert await t.engine.store.read.flow_rows.get("chains", "spent", "paper/@hot2/0") is not None


@scenario
async def test_watcher_sees_a_transaction_of_a_wallet_that_was_retired(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        await watch(t)
        head = await t.documents.current(WALLET, "hot2", fresh=True)
        assert head is not None
        proposal = await t.documents.retire(
            WALLET, "hot2", base=head.document.version, author="ann", reason="its key is old"
        )
        await t.documents.approve(WALLET, "hot2", proposal.hash, actor="ben", reason="so it is")
        stolen = Decoded(
            chain_id=7, to="@thief", contract="", amount=1, slot=Slot(nonce=0), fee=Fee(gas_limit=1, price=10)
        )
        town.chain.height += 1
        town.chain.include("stolen", stolen, "@hot2")
        await watch(t)
        assert [a.reason for a in await t.engine.store.read.alerts.open()] == ["unknown transaction of hot2"]


@scenario
async def test_watcher_leaves_no_history_where_nothing_of_ours_happened(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        await watch(t)
        record = await t.engine.get("chains", "paper")
        for _ in range(5):
            town.chain.mine()
            await watch(t)
        assert record is not None and (await t.engine.get("chains", "paper")).version == record.version  # type: ignore[union-attr]


@scenario
async def test_deep_reorganisation_stops_the_chain_and_sends_the_same_bytes_again(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "confirmed")
        await watch(t)
        hash_ = (await t.payouts.view(made.id)).tx_hash
        town.chain.forget(hash_)
        town.chain.fork = "other"
        await watch(t)
        assert town.chain.sends.count(hash_) == 2
        assert [a.severity for a in await t.engine.store.read.alerts.open()] == ["critical"]
        late = await t.request(key="k2")
        assert (await t.step(late.id)).state == "pending", "nothing is sent until two people have looked"
        assert (await t.record(made.id)).state == "confirmed", "terminal records never move"
        asked = await t.engine.store.read.forced_calls.open()
        assert [call.state for call in asked] == ["confirming"], "what became of it is asked again"


@scenario
async def test_what_used_up_the_nonce_of_a_cancelled_payout_is_sent_again_after_a_deep_reorganisation(
    place: Place,
) -> None:
    """Without it the nonce would be a hole, and whatever the wallet sends after it would wait for ever."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.price = 50  # what was sent is not mined at its price
        await t.payouts.cancel(made.id, **WHY)
        for _ in range(8):
            await t.step(made.id)
            if await t.engine.get("replacements", f"{made.id}-r2") is not None:
                await t.replace(made.id, 2)
            town.chain.price = 10
            town.chain.mine()
        await watch(t)
        record = await t.record(made.id)
        hash_ = msgspec.json.decode(record.body, type=Payout).result.hash
        assert record.state == "failed" and hash_
        before = town.chain.sends.count(hash_)
        town.chain.forget(hash_)
        town.chain.fork = "other"
        await watch(t)
        assert town.chain.sends.count(hash_) == before + 1
        assert [call.state for call in await t.engine.store.read.forced_calls.open()] == ["confirming"]


@scenario
async def test_what_deep_reorganisations_take_back_again_and_again_is_booked_back_each_time(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the payment is gone and its nonce used by another, then it is there again: the wallet has what the books
    say (I9), and suspense what is owed."""
    monkeypatch.setattr("bursar.flows.payouts.watching.ASK_AGAIN_S", 0.0)
    town = Town()
    chain = town.chain
    async with till(place, town) as t:
        await watch(t)
        made = await t.request()
        await t.until(made.id, "confirming")
        chain.mine()
        await t.until(made.id, "confirmed")
        await watch(t)
        hash_ = (await t.payouts.view(made.id)).tx_hash
        payment, sender, _ = chain.mined[hash_]
        other = msgspec.structs.replace(payment, contract="", amount=0)
        before = await t.minor(wallet_account("paper", "hot1"))
        chain.keeps = False  # what is sent again comes too late
        for turn in range(4):
            gone, come = ((hash_, payment), ("other", other))[:: -1 if turn % 2 else 1]
            chain.forget(gone[0])
            moved = payment.amount if gone[0] == hash_ else 0
            chain.tokens[CONTRACT, sender] += moved
            chain.tokens[CONTRACT, payment.to] -= moved
            chain.fork = f"fork {turn}"
            chain.include(*come, sender)
            await watch(t)
            await Operators(t.engine).signal("chains", "paper", "REBASE", actor="ann", reason="looked it up")
            await watch(t)
            assert await ask_due(t.engine) == 1
            owed = 0 if turn % 2 else payment.amount
            assert await t.minor("suspense:payouts") == owed
            assert await t.minor(wallet_account("paper", "hot1")) == before - owed
            assert (await wallets_cover(t.engine.store, t.payouts.chains)).broken == []
            assert (await t.record(made.id)).state == "confirmed", "terminal records never move"


@scenario
async def test_watcher_goes_on_from_where_it_began_again_once_people_have_looked(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.mine()
        await t.until(made.id, "confirmed")
        await watch(t)
        town.chain.fork = "other"
        await watch(t)
        await Operators(t.engine).signal("chains", "paper", "REBASE", actor="ann", reason="looked it up")
        await watch(t)
        record = await t.engine.get("chains", "paper")
        assert record is not None and msgspec.json.decode(record.body)["hash"], "its place is written down again"


@scenario
async def test_signer_that_was_restored_from_an_old_disk_stops_payouts(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.signer.entries.clear()
        assert await t.payouts.reconciling.look() == "peer"
        late = await t.request(key="k2")
        assert (await t.step(late.id)).state == "pending"


@scenario
async def test_payout_that_a_restored_database_does_not_have_is_put_back_and_watched(place: Place) -> None:
    """The whole record is gone; the signer's log has its payment (W33). It is not paid a second time."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        payout = msgspec.json.decode((await t.payouts._record(made.id)).body, type=Payout)
        gone = msgspec.structs.replace(payout.payment, payout="po-1", amount="3000000", amount_raw="3000000")
        payout = msgspec.structs.replace(payout, payment=gone)
        await signed_elsewhere(t, "po-1", payout)
        assert await t.payouts.reconciling.look() == "database"
        assert (await t.record("po-1")).state == "pending" and await t.minor("alice") == 92_000_000
        assert (await t.step("po-1")).state == "pending", "payouts stop until two people have looked"
        operators = Operators(t.engine)
        await operators.resume("flow", "payouts", **WHY)
        await operators.resume("flow", "payouts", **ALSO)
        await t.until("po-1", "confirmed")
        assert town.chain.tokens[CONTRACT, "@bob"] == 3_000_000 and len(town.signer.entries) == 1
        assert await t.payouts.reconciling.look() == "neither"


@scenario
async def test_replacement_that_a_restored_database_does_not_have_is_put_back(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        record = await t.until(made.id, "confirming")
        payout = msgspec.json.decode(record.body, type=Payout)
        town.chain.pool.clear()
        await signed_elsewhere(t, made.id, payout, number=2, price=20)
        assert await t.payouts.reconciling.look() == "database"
        assert (await t.replace(made.id, 2)).state == "sent"
        await t.until(made.id, "confirmed")
        assert (await t.payouts.view(made.id)).tx_hash == town.signer.entries[1].hash


@scenario
async def test_decision_that_came_too_late_contradicts_nothing(place: Place) -> None:
    """Two workers poll: one decides to replace, the other one has seen the payment final. No alarm (W46)."""
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        seen = await t.until(made.id, "confirming")
        await t.payouts.bump(made.id, **WHY)
        seen = await t.record(made.id)
        flow = t.engine.flows["payouts"]
        late = await flow.actions["confirm"](flow.item(seen))
        assert late.event == "REPLACE"
        town.chain.mine()
        await t.until(made.id, "confirmed")
        await t.engine.apply_answer(seen, late)
        assert (await t.record(made.id)).state == "confirmed"
        assert await t.engine.store.read.alerts.open() == []


@scenario
@pytest.mark.parametrize("paid", [True, False])
async def test_nonce_that_an_unknown_transaction_used_up_waits_for_two_people(place: Place, paid: bool) -> None:
    town = Town()
    async with till(place, town) as t:
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.pool.clear()
        town.chain.nonces["@hot1"] = 1
        assert "UNCLEAR" in (await t.step(made.id)).error, "the watcher may read its block in a moment"
        assert "NEEDS_PEOPLE" in (await t.step(made.id)).error
        assert ("critical", "needs people") in [(a.severity, a.reason) for a in await t.engine.store.read.alerts.open()]
        await t.payouts.resolve(made.id, paid=paid, **WHY)
        assert (await t.record(made.id)).state == "confirming"
        await t.payouts.resolve(made.id, paid=paid, **ALSO)
        assert (await t.record(made.id)).state == ("confirmed" if paid else "failed")
        assert await t.minor("alice") == (95_000_000 if paid else 100_000_000)


@scenario
async def test_nonce_that_the_watcher_saw_used_up_is_dead(place: Place) -> None:
    town = Town()
    async with till(place, town) as t:
        await watch(t)
        made = await t.request()
        await t.until(made.id, "confirming")
        town.chain.pool.clear()
        other = Decoded(
            chain_id=7, to="@carol", contract="", amount=1, slot=Slot(nonce=0), fee=Fee(gas_limit=1, price=10)
        )
        town.chain.height += 1
        town.chain.include("other", other, "@hot1")
        await watch(t)
        assert (await t.step(made.id)).state == "pending", "dead, and tried again with another wallet"
        await t.until(made.id, "confirming")
        assert (await t.payouts.view(made.id)).wallet == "hot2", "the first one is stopped"
