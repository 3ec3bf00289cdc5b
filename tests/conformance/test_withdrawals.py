"""Withdrawals on a paper chain: money held from the request on, decided by policy and people, paid once or returned."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec
import pytest
from tests.builders import MovablePorts, Place, scenario
from tests.till import CONTRACT, FEES, Town, wallet_account
from tests.withdrawing import FUNDS, Counter, counter

from bursar.audit import audit
from bursar.engine import Operators, Worker
from bursar.flows.payouts.outside import order_of, sign_request
from bursar.flows.payouts.payout import Attempt, Payout
from bursar.flows.withdrawals import WithdrawalRefused, WithdrawalRequest
from bursar.flows.withdrawals.invariants import CHECKS
from bursar.flows.withdrawals.policy import ADDRESS_LIST, APPROVER, AddressBookRule, AddressList
from bursar.flows.withdrawals.screening import Screener, answer_signature
from bursar.flows.withdrawals.switches import of_asset, of_user
from bursar.model.authorizations import Approval, Authorization, Payment
from bursar.model.errors import (
    AccountFrozen,
    BursarError,
    IdempotencyKeyReused,
    InsufficientFunds,
    InvalidState,
    PrecisionOverflow,
)
from bursar.ports import Ports
from bursar.rails.chain import Fee, InvalidAddress, Shape, Slot

pytestmark = pytest.mark.parametrize("mode", ["sqlite", "postgres"], indirect=True)

WHY = {"actor": "ann", "reason": "because"}


async def refused(c: Counter, **wanted: object) -> str:
    """The code of a refusal, after which nothing was written."""
    before = await c.funds(), await c.withdrawals.page()
    with pytest.raises(BursarError) as error:
        await c.request(**wanted)  # type: ignore[arg-type]
    assert (await c.funds(), await c.withdrawals.page()) == before
    return str(getattr(error.value, "reason", error.value.code))


@scenario
async def test_small_withdrawal_is_approved_by_policy_paid_once_and_settles_its_hold(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("5")
        assert (made.status, await c.funds()) == ("pending", FUNDS - 6_000_000)
        done = await c.paid(made.id)
        assert (done.status, done.payout_status, done.tx_hash) == ("completed", "confirmed", town.chain.sends[0])
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000
        assert await c.till.minor(FEES) == 1_000_000 and await c.funds() == FUNDS - 6_000_000
        assert len(set(town.chain.sends)) == 1
        payout = await c.till.payouts.view(done.payout)
        assert (payout.source, payout.mandate, payout.approvals) == (made.id, "auto", ())


@scenario
async def test_above_the_limit_one_person_approves_and_above_the_dual_limit_two(place: Place) -> None:
    async with counter(place, Town()) as c:
        one = await c.request("20")
        await c.until(one.id, "waiting")
        assert (await c.withdrawals.view(one.id)).approvals_missing == 1
        await c.approve(one.id, "ann")
        assert (await c.paid(one.id)).status == "completed"
        two = await c.request("60", key="k2")
        await c.until(two.id, "waiting")
        assert (await c.withdrawals.view(two.id)).approvals_missing == 2
        await c.approve(two.id, "ann")
        await c.approve(two.id, "ann")  # one person twice is one person
        record = await c.until(two.id, "waiting")
        assert (await c.withdrawals.view(two.id)).status == "pending", record
        await c.approve(two.id, "ben")
        done = await c.paid(two.id)
        assert (await c.till.payouts.view(done.payout)).approvals == ("ann", "ben")


@scenario
async def test_two_approvals_at_the_same_moment_both_count(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await c.request("60")
        record = await c.until(made.id, "waiting")
        for name in ("ann", "ben"):  # both have read the same version
            evidence = {"approval": {"approver": name, "signature": (await c.approval(made.id, name)).signature}}
            await c.till.engine.signal(record, "APPROVE", name, evidence, sender=f"approval {name}")
            if name == "ann":
                record = await c.record(made.id)
        assert (await c.paid(made.id)).status == "completed"


@scenario
async def test_who_may_not_approve_is_refused_with_the_reason(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await c.request("20", requester="ann")
        await c.until(made.id, "waiting")
        cases = {
            "OWN_REQUEST": await c.approval(made.id, "ann"),
            "UNKNOWN_APPROVER": await c.approval(made.id, "mallory"),
            "WRONG_SIGNATURE": await c.approval(made.id, "ben", signed_by="mallory"),
        }
        for code, approval in cases.items():
            with pytest.raises(WithdrawalRefused) as error:
                await c.withdrawals.approve(made.id, approval)
            assert error.value.reason == code
        other = await c.request("20", key="k2")
        await c.until(other.id, "waiting")
        with pytest.raises(WithdrawalRefused) as error:  # one approval is for one request
            await c.withdrawals.approve(made.id, await c.approval(other.id, "ben"))
        assert error.value.reason == "WRONG_SIGNATURE"
        record = await c.record(made.id)
        with pytest.raises(InvalidState, match="bursar withdrawal approve"):
            await Operators(c.till.engine).signal("withdrawals", record.id, "APPROVE", actor="ann", reason="me")
        assert (await c.record(made.id)).state == "waiting" and await c.funds() == FUNDS - 42_000_000


@scenario
async def test_approval_that_another_one_in_the_same_name_has_displaced_can_be_given_again(place: Place) -> None:
    """A server that was broken into writes a wrong one past the front door. It counts for nothing, and ends nothing."""
    async with counter(place, Town()) as c:
        made = await c.request("60")
        await c.until(made.id, "waiting")
        await c.approve(made.id, "ann")
        record = await c.until(made.id, "waiting")
        wrong = {"approval": {"approver": "ann", "signature": "00" * 64}}
        await c.till.engine.signal(record, "APPROVE", "ann", wrong, sender="forged")
        await c.until(made.id, "waiting")
        assert (await c.withdrawals.view(made.id)).approvals_missing == 2
        for name in ("ann", "ben"):
            await c.approve(made.id, name)
        assert (await c.paid(made.id)).status == "completed"


@scenario
async def test_approver_who_is_switched_off_before_the_payment_counts_no_more(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("20")
        await c.until(made.id, "waiting")
        await c.approve(made.id, "ann")
        await c.until(made.id, "queued")
        found = await c.till.documents.current(APPROVER, "ann", fresh=True)
        assert found is not None
        await c.till.put(APPROVER, "ann", type(found.body)(public_key=found.body.public_key, active=False))
        payout = (await c.withdrawals.view(made.id)).payout
        await c.till.step(payout)  # before its first attempt, everything is asked once more
        assert (await c.till.record(payout)).state == "failed" and town.chain.sends == []
        view = await c.withdrawals.view(made.id)
        assert (view.status, view.approvals, await c.funds()) == ("pending", (), FUNDS - 21_000_000)
        await c.until(made.id, "waiting")
        await c.approve(made.id, "ben")
        done = await c.paid(made.id)
        assert done.status == "completed" and done.payout != payout
        assert town.chain.tokens[CONTRACT, "@bob"] == 20_000_000 and await c.funds() == FUNDS - 21_000_000


@scenario
async def test_rejected_and_cancelled_give_all_of_it_back(place: Place) -> None:
    async with counter(place, Town()) as c:
        rejected, cancelled = [await c.request("20", key=f"k{n}") for n in range(2)]
        for one in (rejected, cancelled):
            await c.until(one.id, "waiting")
        await c.withdrawals.reject(rejected.id, actor="ann", reason="unknown sender")
        await c.until(rejected.id, "rejected")
        assert await c.funds() == FUNDS - 21_000_000
        await c.withdrawals.cancel(cancelled.id, actor="1", user=1)
        await c.until(cancelled.id, "cancelled")
        assert await c.funds() == FUNDS
        assert (await c.withdrawals.view(rejected.id)).reason == "unknown sender"
        with pytest.raises(WithdrawalRefused) as error:
            await c.withdrawals.cancel(rejected.id, actor="1", user=1)
        assert error.value.reason == "INVALID_STATE"


@scenario
async def test_request_that_is_not_approved_in_time_expires_and_gives_the_money_back(place: Place) -> None:
    if place.engine == "postgres":
        pytest.skip("a test can't set the server's clock")
    ports = MovablePorts()
    async with counter(place, Town(), ports=ports) as c:
        made = await c.request("20")
        record = await c.until(made.id, "waiting")
        view = await c.withdrawals.view(made.id)
        assert record.timer_us == view.until_us and view.until_us - ports.now_us() > 86_000 * 10**6
        c.drives()
        worker = Worker(c.till.engine)
        await worker.look()
        assert (await c.record(made.id)).version == record.version, "not before its time"
        ports.ahead_us = 25 * 3_600 * 10**6
        await worker.look()
        await c.till.engine.finish(30)
        view = await c.withdrawals.view(made.id)
        assert (view.status, view.reason.split(":")[0], await c.funds()) == ("rejected", "EXPIRED", FUNDS)


@scenario
async def test_address_that_was_just_added_waits_until_it_is_old_enough(place: Place) -> None:
    ports = MovablePorts()
    async with counter(place, Town(), ports=ports) as c:
        await c.policy(address_book=AddressBookRule.REQUIRED, cooling_s=3_600)
        await c.withdrawals.addresses.add("1", "paper", "@bob", "mine")
        made = await c.request("5")
        await c.until(made.id, "waiting")
        view = await c.withdrawals.view(made.id)
        assert [reason.code for reason in view.reasons] == ["ADDRESS_COOLING"] and view.approvals_missing == 0
        assert 0 < view.until_us - ports.now_us() <= 3_600 * 10**6
        assert (await c.record(made.id)).timer_us == view.until_us
        assert await refused(c, user=2) == "ADDRESS_NOT_IN_BOOK", "another user's book is not theirs"


@scenario
async def test_cancel_is_possible_until_the_signer_is_asked(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        early = await c.request("5")
        await c.until(early.id, "queued")
        assert (await c.withdrawals.cancel(early.id, actor="1", user=1)).status == "queued"
        payout = (await c.withdrawals.view(early.id)).payout
        await c.till.until(payout, "failed")
        view = await c.withdrawals.view(early.id)
        assert (view.status, view.reason, await c.funds(), town.chain.sends) == (
            "cancelled",
            "CANCELLED: its user cancelled it",
            FUNDS,
            [],
        )
        late = await c.request("5", key="k2")
        await c.until(late.id, "queued")
        await c.till.until((await c.withdrawals.view(late.id)).payout, "signing")
        with pytest.raises(WithdrawalRefused) as error:
            await c.withdrawals.cancel(late.id, actor="1", user=1)
        assert error.value.reason == "TOO_LATE"
        assert (await c.paid(late.id)).status == "completed"


@scenario
async def test_failed_payout_fails_its_withdrawal_and_gives_the_money_back(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("5")
        await c.until(made.id, "queued")
        payout = (await c.withdrawals.view(made.id)).payout
        await c.till.until(payout, "confirming")
        await c.till.payouts.cancel(payout, **WHY)
        await c.till.step(payout)
        await c.till.replace(payout, 2)
        town.chain.mine()
        await c.till.until(payout, "failed")
        view = await c.withdrawals.view(made.id)
        assert (view.status, await c.funds()) == ("cancelled", FUNDS)
        assert CONTRACT not in {key[0] for key in town.chain.tokens if key[1] == "@bob"}
        gas = await c.till.minor(wallet_account("paper", (await c.till.payouts.view(payout)).wallet), "ETH")
        assert gas > 0, "the cancellation's gas is our cost"


@scenario
async def test_requests_that_are_refused_write_nothing(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(maximum="90")
        await c.till.put(ADDRESS_LIST, "paper", AddressList(deny=("@eve",)))
        assert await refused(c, amount="0.5") == "BELOW_MINIMUM"
        assert await refused(c, amount="91") == "ABOVE_MAXIMUM"
        assert await refused(c, asset="BTC") == "WITHDRAWAL_NOT_OFFERED"
        assert await refused(c, chain="nowhere") == "WITHDRAWAL_NOT_OFFERED"
        assert await refused(c, max_fee="0.99") == "FEE_CHANGED"
        assert await refused(c, to="bob") == InvalidAddress.code
        assert await refused(c, to="@hot1") == "OWN_ADDRESS"
        assert await refused(c, amount="5.0000001") == PrecisionOverflow.code
        assert await refused(c, amount="-5") == "INVALID_AMOUNT"
        assert await refused(c, to="@eve") == "ADDRESS_DENIED"
        await c.policy(maximum="1000", daily_user="")
        assert await refused(c, amount="100") == InsufficientFunds.code, "the fee is not covered"
        await c.policy(address_book=AddressBookRule.REQUIRED)
        assert await refused(c, amount="5") == "ADDRESS_NOT_IN_BOOK"
        await c.policy(enabled=False)
        assert await refused(c, amount="5") == "WITHDRAWAL_NOT_OFFERED"


@scenario
async def test_request_again_is_the_same_withdrawal_also_when_policy_has_changed(place: Place) -> None:
    async with counter(place, Town()) as c:
        first = await c.request("5.00")
        await c.policy(enabled=False)
        again = await c.request("5")
        assert (again.id, again.replayed, await c.funds()) == (first.id, True, FUNDS - 6_000_000)
        with pytest.raises(IdempotencyKeyReused):
            await c.request("6")
        with pytest.raises(WithdrawalRefused):
            await c.request("5", user=2)  # another user's key is another key
        with pytest.raises(WithdrawalRefused) as error:
            await c.withdrawals.view(first.id, user=2)
        assert error.value.reason == "WITHDRAWAL_NOT_FOUND"


@scenario
async def test_everything_can_be_withdrawn_less_the_fee(place: Place) -> None:
    async with counter(place, Town()) as c:
        wanted = WithdrawalRequest(user=1, asset="USDT", chain="paper", to="@bob", amount="all")
        quote = await c.withdrawals.quote(wanted)
        assert (quote.amount, quote.fee, quote.total) == ("99.000000", "1.000000", "100.000000")
        made = await c.request("all", max_fee=quote.fee)
        assert (made.amount, await c.funds()) == ("99.000000", 0)


@scenario
async def test_over_a_users_limit_is_refused_and_over_the_one_for_all_waits_for_people(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="8", daily_all="12", auto_approve_max="10")
        first = await c.request("8")
        assert await refused(c, key="k2", amount="1") == "DAILY_LIMIT_EXCEEDED"
        await c.until(first.id, "queued")
        second = await c.request("5", user=2)
        await c.until(second.id, "waiting")
        view = await c.withdrawals.view(second.id)
        assert view.approvals_missing == 1 and view.reasons
        await c.approve(second.id, "ann")
        await c.until(second.id, "queued")


@scenario
async def test_switches_stop_the_order_and_not_the_cancellation(place: Place) -> None:
    town = Town()
    async with counter(place, town) as c:
        await c.withdrawals.pause(of_asset("USDT"), **WHY)
        made, other = await c.request("5"), await c.request("5", key="k2")
        for one in (made, other):
            await c.until(one.id, "approved")
            assert "PAUSED" in (await c.step(one.id)).error
        await c.withdrawals.cancel(other.id, actor="1", user=1)
        await c.until(other.id, "cancelled")
        await c.withdrawals.resume(of_asset("USDT"), **WHY)
        await c.until(made.id, "queued")
        await c.withdrawals.pause(of_user(1), **WHY)  # also after it was ordered, before it is signed
        payout = (await c.withdrawals.view(made.id)).payout
        waiting = await c.till.step(payout)
        assert waiting.state == "pending" and "PAUSED" in waiting.error and town.chain.sends == []
        await c.withdrawals.resume(of_user(1), **WHY)
        assert (await c.paid(made.id)).status == "completed"


@scenario
async def test_frozen_account_goes_back_to_people_and_a_frozen_one_requests_nothing(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await c.request("5")
        await c.until(made.id, "queued")
        await c.till.ledger.freeze("user:1:funding")
        assert await refused(c, key="k2") == AccountFrozen.code
        payout = (await c.withdrawals.view(made.id)).payout
        await c.till.step(payout)
        assert (await c.withdrawals.view(made.id)).status == "pending"
        await c.until(made.id, "waiting")
        await c.withdrawals.reject(made.id, actor="ann", reason="frozen")
        await c.until(made.id, "rejected")
        assert await c.funds() == FUNDS


@scenario
async def test_the_same_money_is_not_withdrawn_twice(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="")
        await c.request("60")
        assert await refused(c, key="k2", amount="60") == InsufficientFunds.code


@scenario
async def test_of_five_requests_at_once_for_the_whole_balance_one_is_taken(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="")
        made = await asyncio.gather(*[c.request("99", key=f"k{n}") for n in range(5)], return_exceptions=True)
        refusals = [one for one in made if isinstance(one, BaseException)]
        assert [type(one) for one in refusals] == [InsufficientFunds] * 4 and await c.funds() == 0


@scenario
async def test_of_many_requests_at_once_no_more_than_the_limit_are_taken(place: Place) -> None:
    async with counter(place, Town()) as c:
        await c.policy(daily_user="30")
        made = await asyncio.gather(*[c.request("10", key=f"k{n}") for n in range(6)], return_exceptions=True)
        refusals = [one for one in made if isinstance(one, WithdrawalRefused)]
        assert [one.reason for one in refusals] == ["DAILY_LIMIT_EXCEEDED"] * 3
        assert await c.funds() == FUNDS - 33_000_000, "what was refused holds nothing"
        taken = next(n for n, one in enumerate(made) if not isinstance(one, BaseException))
        assert (await c.request("10", key=f"k{taken}")).replayed, "and a retry of an accepted one is not counted"


@scenario
async def test_the_same_request_from_many_callers_at_once_is_one_withdrawal(place: Place) -> None:
    async with counter(place, Town()) as c:
        made = await asyncio.gather(*[c.request("5") for _ in range(12)])
        assert len({one.id for one in made}) == 1 and await c.funds() == FUNDS - 6_000_000


async def clean(c: Counter) -> bool:
    return all(finding.ok for finding in await audit(c.till.engine.store, more=CHECKS))


async def signed_before(c: Counter, payment: Payment) -> None:
    """The signer has signed this payment, and the database was restored to a moment before that."""
    signer, chain = c.till.town.signer, c.till.town.chain
    authorization = Authorization(approvals=(Approval(approver="ann", signature="00"),))
    fee = Fee(gas_limit=21_000, price=10)
    body = Payout(payment=payment, authorization=authorization, native="ETH", sender="@hot1")
    order = order_of(payment.payout, body)
    unsigned = chain.codec.build(chain.network, "@hot1", order, Shape.PAY, Slot(nonce=0), fee)
    attempt = Attempt(number=1, shape=Shape.PAY, wallet="hot1", nonce=0, fee=fee, unsigned=unsigned.hex())
    await signer.sign(sign_request(payment.payout, "@hot1", payment, authorization, attempt))
    c.till.payouts.reconciling._checked = -1
    await c.till.payouts.reconciling.look()
    for person in ("ann", "ben"):
        await Operators(c.till.engine).resume("flow", "payouts", actor=person, reason="looked at it")


@scenario
async def test_payout_that_only_the_signer_remembers_is_taken_up_by_its_withdrawal(place: Place) -> None:
    """A database restored to a moment before the payout was ordered: it was signed, and is not paid a second time."""
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("20")
        await c.until(made.id, "waiting")
        payment = await c.withdrawals.payment(made.id)
        await signed_before(c, payment)
        assert (await c.record(made.id)).state == "queued"
        await c.till.until(payment.payout, "confirming")
        await c.till.step(payment.payout)  # no node has it: it is sent
        done = await c.paid(made.id)
        assert (done.status, done.payout) == ("completed", payment.payout)
        assert town.chain.tokens[CONTRACT, "@bob"] == 20_000_000 and await c.funds() == FUNDS - 21_000_000


@pytest.mark.parametrize("first", ["restored", "other"])
@scenario
async def test_withdrawal_is_ended_only_by_the_payout_that_was_signed(place: Place, first: str) -> None:
    """Restored to a moment before it came back to people and was ordered anew: the second payout was signed, and the
    first one is there again. That one is given up, which gives no money back."""
    town = Town()
    async with counter(place, town) as c:
        made = await c.request("5")
        await c.until(made.id, "queued")
        other = (await c.withdrawals.view(made.id)).payout
        payment = msgspec.structs.replace(await c.withdrawals.payment(made.id), payout="po-77")
        await signed_before(c, payment)
        assert await clean(c), "also while both are open"
        for id_ in ("po-77", other) if first == "restored" else (other, "po-77"):
            await c.till.step(id_)
            if id_ == "po-77":
                await c.till.until(id_, "confirming")
                await c.till.step(id_)
                town.chain.mine()
                await c.till.until(id_, "confirmed")
        assert (await c.till.record(other)).state == "failed"
        view = await c.withdrawals.view(made.id)
        assert (view.status, view.payout) == ("completed", "po-77")
        assert town.chain.tokens[CONTRACT, "@bob"] == 5_000_000 and await c.funds() == FUNDS - 6_000_000
        assert await clean(c)


@dataclass
class Hook:
    """A screening hook: what it says next, and how often it was asked. None: it hangs up."""

    verdict: str | None = "clear"
    secret: bytes = b"s" * 32
    asked: int = 0

    async def post(self, _url: str, _headers: object, body: bytes, _timeout_s: float) -> tuple[int, bytes]:
        self.asked += 1
        if self.verdict is None:
            raise ConnectionError("it hangs up")
        signed = answer_signature(self.secret, body, self.verdict, "because")
        return 200, msgspec.json.encode({"verdict": self.verdict, "reason": "because", "signature": signed})

    def screener(self, ports: Ports) -> Screener:
        return Screener(
            url="http://hook", secret=b"s" * 32, post=self.post, now_us=ports.now_us, token=ports.token, timeout_s=1
        )


@scenario
async def test_screening_clears_denies_or_leaves_it_to_people_and_is_asked_once(place: Place) -> None:
    hook = Hook()
    async with counter(place, Town(), screener=hook.screener(MovablePorts())) as c:
        await c.policy(screening=True)
        clear = await c.request("5", key="clear")
        await c.until(clear.id, "queued")
        assert hook.asked == 1
        hook.verdict = "denied"
        denied = await c.request("5", key="denied")
        await c.until(denied.id, "rejected")
        view = await c.withdrawals.view(denied.id)
        assert "SCREENING_DENIED" in view.reason and "because" not in view.reason
        assert await c.funds() == FUNDS - 6_000_000
        hook.verdict = "review"
        review = await c.request("5", key="review")
        await c.until(review.id, "waiting")
        await c.approve(review.id, "ann")
        await c.until(review.id, "queued")
        assert hook.asked == 3


@pytest.mark.parametrize("fault", ["silent", "stranger"])
@scenario
async def test_screening_that_does_not_answer_clears_nothing_and_people_decide(place: Place, fault: str) -> None:
    hook = Hook(verdict=None) if fault == "silent" else Hook(secret=b"another secret")
    async with counter(place, Town(), screener=hook.screener(MovablePorts())) as c:
        await c.policy(screening=True)
        made = await c.request("5")
        await c.until(made.id, "waiting")
        view = await c.withdrawals.view(made.id)
        assert "SCREENING_UNANSWERED" in [reason.code for reason in view.reasons] and hook.asked == 5
        await c.approve(made.id, "ann")
        assert (await c.paid(made.id)).status == "completed"
