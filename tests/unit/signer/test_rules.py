"""What a signer decides: what an honest caller gets, and what an attacker with the same rights does not."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
import pytest
from tests import signing
from tests.signing import (
    BANK,
    COLD,
    DENIED,
    FEE,
    HOT,
    HOUR_US,
    NOW_US,
    SHOP,
    TOKEN,
    approval,
    approved,
    cancelling,
    codecs,
    empty_state,
    payment,
    request,
    unsigned,
)

from bursar.model.authorizations import Approval, Authorization, DeadAttempt, Release
from bursar.rails.chain import Fee, Shape
from bursar.signer import entries, rules
from bursar.signer.entries import Entry
from bursar.signer.policy import Policy
from bursar.signer.protocol import Never, Signature, SignRequest
from bursar.signer.rules import Again, Decision, NeedsDeath, Reason, Refuse, Sign
from bursar.signer.state import State

SWAPS = Authorization(mandate="swaps")
SWEEP = Authorization(mandate="sweep")


class Signer:
    """The rules with a memory, and no disk: what is decided is applied."""

    def __init__(self, policy: Policy | None = None) -> None:
        self.policy = policy or signing.policy()
        self.state: State = empty_state()
        self.now_us = NOW_US

    def decide(self, asked: SignRequest) -> Decision:
        decision = rules.decide(self.state, self.policy, codecs, self.policy.wallet, asked, self.now_us)
        if isinstance(decision, Sign):
            raw = hashlib.sha256(asked.unsigned).digest()
            self._append(
                entries.Signed(
                    request=asked,
                    raw=raw,
                    hash=raw.hex(),
                    chain_id=decision.chain_id,
                    nonce=decision.nonce,
                    slot=decision.slot,
                    counted=decision.counted,
                )
            )
        return decision

    def signs(self, asked: SignRequest) -> None:
        decision = self.decide(asked)
        assert isinstance(decision, Sign), decision

    def refuses(self, asked: SignRequest, reason: Reason, *, denied: bool | None = None) -> None:
        decision = self.decide(asked)
        assert isinstance(decision, Refuse), decision
        assert decision.reason is reason, decision
        assert denied is None or decision.denied is denied, decision

    def tombstone(self, payout: str, attempt: int) -> None:
        self._append(entries.Tombstone(payout=payout, attempt=attempt))

    def declare_dead(self, payout: str, *attempts: int) -> None:
        dead = tuple(DeadAttempt(attempt=n, hash=self.state.payouts[payout].attempts[n].hash) for n in attempts)
        self._append(entries.DeclaredDead(release=Release(payout=payout, dead=dead)))

    def halt(self) -> None:
        self._append(entries.Halted(reason="a key may be stolen"))

    def _append(self, what: entries.What) -> None:
        number, sequence = self.state.number + 1, self.state.sequence + entries.is_promise(what)
        entry = Entry(number=number, sequence=sequence, previous="", at_us=self.now_us, caller="", what=what)
        self.state.apply(entry, "")


@pytest.fixture
def signer() -> Signer:
    return Signer()


# --- the same attempt again


def test_the_same_bytes_get_the_same_answer(signer: Signer) -> None:
    """Given a signed attempt whose answer was lost, then asking again gives the very same bytes (W30)."""
    signer.signs(request())
    again = signer.decide(request())
    assert isinstance(again, Again)
    first = again.attempt.answer
    assert isinstance(first, Signature)
    other_approvals = request(by=approved(payment(), "ann", "ben"))
    repeated = signer.decide(other_approvals)
    assert isinstance(repeated, Again)
    assert repeated.attempt.answer == first


@pytest.mark.parametrize(
    "other",
    [
        {"data": unsigned(nonce=1)},
        {"data": unsigned(fee=Fee(gas_limit=21_000, price=11))},
        {"shape": Shape.CANCEL, "data": cancelling()},
        {"wallet": "cold"},
    ],
)
def test_other_bytes_for_a_signed_attempt_are_refused(signer: Signer, other: dict[str, Any]) -> None:
    signer.signs(request())
    signer.refuses(request(**other), Reason.OTHER_BYTES)


def test_a_tombstone_is_for_ever(signer: Signer) -> None:
    """Given a cancelled attempt, then no bytes are ever signed for it, and the answer is never."""
    signer.tombstone("p1", 0)
    for asked in (request(), request(nonce=9)):
        again = signer.decide(asked)
        assert isinstance(again, Again)
        assert again.attempt.answer == Never(sequence=1)


def test_a_halt_refuses_all_that_is_new_and_repeats_what_is_not(signer: Signer) -> None:
    signer.signs(request())
    signer.halt()
    signer.refuses(request("p2", nonce=1), Reason.HALTED, denied=False)
    signer.refuses(request("p1", 1, shape=Shape.CANCEL), Reason.HALTED)
    assert isinstance(signer.decide(request()), Again)
    assert isinstance(signer_preview(signer), Refuse)


# --- the bytes are read, not believed


@pytest.mark.parametrize(
    "data",
    [
        unsigned(amount=501),
        unsigned(amount=499),
        unsigned(to=BANK),
        unsigned(to=HOT),
        unsigned(contract="0x" + "c1" * 20),
        unsigned(contract=""),
        unsigned(chain_id=1),
        unsigned(memo="x"),
        cancelling(),
    ],
)
def test_bytes_that_do_something_else_are_refused(signer: Signer, data: bytes) -> None:
    """Altered amount, recipient, contract, chain id or memo: whatever the payment says, the bytes decide."""
    signer.refuses(request(data=data), Reason.MISMATCH)


def test_bytes_that_cannot_be_read_are_refused(signer: Signer) -> None:
    signer.refuses(request(data=b"\x02garbage"), Reason.UNDECODABLE)
    signer.refuses(request(data=b"\x00" * 5_000), Reason.UNDECODABLE)
    signer.refuses(request(data=unsigned(nonce=-1)), Reason.UNDECODABLE)


@pytest.mark.parametrize(
    "wrong",
    [{"decimals": 6}, {"chain_id": 1}, {"contract": "0x" + "c1" * 20}, {"contract": ""}, {"to": "0x51"}],
)
def test_a_payment_that_is_not_the_policys_is_denied(signer: Signer, wrong: dict[str, Any]) -> None:
    """Also if it is approved, and its bytes say the same: the policy has its own contract, decimals and chain id."""
    signer.refuses(request(pays=payment(**wrong)), Reason.MISMATCH, denied=True)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (request(pays=payment(asset="USDC")), Reason.UNKNOWN_ASSET),
        (request(pays=payment(chain="tron")), Reason.UNKNOWN_CHAIN),
        (request(wallet="warm"), Reason.UNKNOWN_WALLET),
        (request(sender=COLD), Reason.MISMATCH),
        (request(chain="eth"), Reason.MISMATCH),
        (request("p2", pays=payment("p1")), Reason.MISMATCH),
        (request(pays=payment(amount_raw="0500"), data=unsigned()), Reason.MALFORMED),
        (request(pays=payment(amount_raw="0"), data=unsigned(amount=0)), Reason.MALFORMED),
        (request("", pays=payment("")), Reason.MALFORMED),
        (request("p" * 129), Reason.MALFORMED),
        (request(attempt=-1), Reason.MALFORMED),
    ],
)
def test_what_does_not_fit_together_is_refused(signer: Signer, asked: SignRequest, reason: Reason) -> None:
    signer.refuses(asked, reason)


@pytest.mark.parametrize("text", ["\u0665\u0660\u0660", "5e2", "-5", "+5", " 5", "5.0", "", "1" * 79])
def test_an_amount_is_plain_digits(signer: Signer, text: str) -> None:
    signer.refuses(request(pays=payment(amount_raw=text), data=unsigned()), Reason.MALFORMED)


def test_a_payout_is_one_payment(signer: Signer) -> None:
    """Given a signed payout, then another amount under its id is refused, also approved and in the same slot."""
    signer.signs(request())
    other = payment(amount=400)
    signer.refuses(request("p1", 1, pays=other), Reason.MISMATCH, denied=True)
    renewed = payment(expires_us=NOW_US + HOUR_US)
    signer.signs(request("p1", 1, pays=renewed, data=unsigned(fee=Fee(gas_limit=21_000, price=20))))


# --- approvals


def test_an_approval_for_another_payout_is_worth_nothing(signer: Signer) -> None:
    """Replayed approval: it covers the payout's id, so it signs no second payment."""
    signer.signs(request("p1"))
    signer.refuses(request("p2", nonce=1, by=approved(payment("p1"), "ann", "ben")), Reason.NOT_APPROVED, denied=False)


@pytest.mark.parametrize("change", [{"amount": "9"}, {"fee": "1"}, {"account": "user:2:funding"}, {"memo": ""}])
def test_an_approval_covers_every_detail(signer: Signer, change: dict[str, str]) -> None:
    asked = payment(memo="order 7")
    signed = approved(asked, "ann", "ben")
    changed = msgspec.structs.replace(asked, **change)
    signer.refuses(request(pays=changed, by=signed), Reason.NOT_APPROVED)


def test_two_people_above_the_dual_limit(signer: Signer) -> None:
    """At the limit one person, one unit above it two; the same one twice is one."""
    at, above = payment("p1", 1_000), payment("p2", 1_001)
    signer.signs(request("p1", pays=at))
    signer.refuses(request("p2", nonce=1, pays=above), Reason.NOT_APPROVED)
    twice = approved(above, "ann", "ann")
    signer.refuses(request("p2", nonce=1, pays=above, by=twice), Reason.NOT_APPROVED)
    signer.signs(request("p2", nonce=1, pays=above, by=approved(above, "ann", "ben")))


def test_approval_of_the_requester_does_not_count(signer: Signer) -> None:
    """Nor under a name that looks like the requester's: a server that was broken into can't leave that check out."""
    own, alike = payment(requester="ann"), payment(requester="A.nn")
    for asked in (own, alike):
        signer.refuses(request(pays=asked, by=approved(asked, "ann")), Reason.NOT_APPROVED)
    signer.signs(request(pays=own, by=approved(own, "ann", "ben")))


def test_a_look_alike_is_the_same_person() -> None:
    """Given a policy that was written before the check of names, then `ann` and `a.nn` are still one person."""
    signer = Signer()
    approvers = signer.policy.approvers | {"a.nn": signing.public_half("eve")}
    signer.policy = msgspec.structs.replace(signer.policy, approvers=approvers)
    above = payment(amount=1_001)
    other = Approval(approver="a.nn", signature=approval(above, "eve").signature)
    both = Authorization(approvals=(approval(above, "ann"), other))
    signer.refuses(request(pays=above, by=both), Reason.NOT_APPROVED)


def test_an_approver_that_the_policy_does_not_have_does_not_count(signer: Signer) -> None:
    asked = payment()
    signer.refuses(request(by=approved(asked, "eve")), Reason.NOT_APPROVED)
    forged = Approval(approver="ann", signature=approval(asked, "eve").signature)
    for signature in (forged, Approval(approver="ann", signature="zz"), Approval(approver="ann", signature="")):
        signer.refuses(request(by=Authorization(approvals=(signature,))), Reason.NOT_APPROVED)
    signer.refuses(request(by=Authorization()), Reason.NOT_APPROVED)


def test_an_expired_payment_is_not_signed(signer: Signer) -> None:
    pays = payment(expires_us=NOW_US)
    signer.signs(request(pays=pays))
    signer.now_us += 1
    late = payment("p2", expires_us=NOW_US)
    signer.refuses(request("p2", nonce=1, pays=late), Reason.EXPIRED, denied=True)


def test_too_many_approvals_are_not_even_verified(signer: Signer) -> None:
    asked = payment()
    many = Authorization(approvals=(approval(asked, "ann"),) * 17)
    signer.refuses(request(by=many), Reason.MALFORMED)


# --- limits


def test_the_limit_of_one_payment(signer: Signer) -> None:
    """The last amount that is allowed, and the first that is not."""
    signer.refuses(
        request(pays=(p := payment(amount=5_001)), by=approved(p, "ann", "ben")), Reason.OVER_LIMIT, denied=True
    )
    signer.signs(request(pays=(p := payment(amount=5_000)), by=approved(p, "ann", "ben")))


def pay(signer: Signer, number: int, amount: int, by: Authorization | None = None) -> SignRequest:
    pays = payment(f"p{number}", amount)
    return request(f"p{number}", nonce=number, pays=pays, by=by or approved(pays, "ann", "ben"))


def test_the_hourly_cap_of_a_wallet(signer: Signer) -> None:
    """8,000 within 60 minutes: exactly met, exceeded by one unit, free again after the hour."""
    signer.signs(pay(signer, 1, 5_000))
    signer.refuses(pay(signer, 2, 3_001), Reason.OVER_LIMIT, denied=False)
    signer.signs(pay(signer, 3, 3_000))
    signer.refuses(pay(signer, 4, 1), Reason.OVER_LIMIT)
    signer.now_us += HOUR_US - 1
    signer.refuses(pay(signer, 4, 1), Reason.OVER_LIMIT)
    signer.now_us += 1
    signer.signs(pay(signer, 4, 4_000))
    signer.refuses(pay(signer, 5, 1), Reason.OVER_LIMIT)  # 12,000 within 24 hours
    signer.now_us += 24 * HOUR_US
    signer.signs(pay(signer, 5, 5_000))


def test_caps_are_of_each_wallet(signer: Signer) -> None:
    signer.signs(pay(signer, 1, 5_000))
    signer.signs(pay(signer, 2, 3_000))
    other = payment("p3", 5_000)
    data = unsigned(amount=5_000)
    signer.signs(request("p3", pays=other, by=approved(other, "ann", "ben"), wallet="cold", data=data))


def test_a_clock_that_is_set_back_gives_no_new_quota(signer: Signer) -> None:
    signer.signs(pay(signer, 1, 5_000))
    signer.signs(pay(signer, 2, 3_000))
    signer.now_us -= 48 * HOUR_US
    signer.refuses(pay(signer, 3, 1), Reason.OVER_LIMIT)


def test_a_bump_does_not_count_again(signer: Signer) -> None:
    """Given a cap that is nearly used up, then raising the fee ten times uses no more of it."""
    signer.signs(pay(signer, 1, 5_000))
    first = pay(signer, 2, 3_000)
    signer.signs(first)
    for attempt in range(1, 11):
        data = unsigned(amount=3_000, nonce=2, fee=Fee(gas_limit=21_000, price=10 + attempt))
        signer.signs(msgspec.structs.replace(first, attempt=attempt, unsigned=data))
    assert signer.state.used(f"asset:56:{HOT}:{TOKEN}", 0) == 8_000


def test_destinations(signer: Signer) -> None:
    denied = payment(to=DENIED)
    signer.refuses(request(pays=denied), Reason.DESTINATION, denied=True)
    coin: dict[str, Any] = {"asset": "BNB", "contract": "", "amount": 50}
    signer.refuses(request("p2", pays=payment("p2", **coin)), Reason.DESTINATION, denied=True)
    signer.signs(request("p3", pays=payment("p3", to=BANK, **coin)))


# --- mandates


def test_a_mandate_has_limits_of_its_own(signer: Signer) -> None:
    """900 at a time, 1,500 an hour, 2,000 a day: each met exactly, and exceeded by one unit."""
    signer.refuses(pay(signer, 1, 901, SWAPS), Reason.OVER_LIMIT, denied=True)
    signer.signs(pay(signer, 1, 900, SWAPS))
    signer.refuses(pay(signer, 2, 601, SWAPS), Reason.OVER_LIMIT, denied=False)
    signer.signs(pay(signer, 2, 600, SWAPS))
    signer.now_us += HOUR_US
    signer.refuses(pay(signer, 3, 501, SWAPS), Reason.OVER_LIMIT, denied=False)
    signer.signs(pay(signer, 3, 500, SWAPS))


def test_a_sweep_pays_own_wallets_alone(signer: Signer) -> None:
    signer.refuses(request(by=SWEEP), Reason.DESTINATION, denied=True)
    signer.signs(request(pays=payment(to=COLD), by=SWEEP))


def test_what_no_mandate_allows_is_refused(signer: Signer) -> None:
    signer.refuses(request(by=Authorization(mandate="other")), Reason.UNKNOWN_MANDATE)
    coin = payment(asset="BNB", contract="", amount=50, to=BANK)
    signer.refuses(request(pays=coin, by=SWAPS), Reason.UNKNOWN_MANDATE)
    both = Authorization(mandate="swaps", approvals=approved(payment(), "ann").approvals)
    signer.refuses(request(by=both), Reason.NOT_APPROVED)


# --- slots


def test_a_nonce_has_one_payout_for_ever(signer: Signer) -> None:
    """Also when the first payout's attempts are dead, and for a cancellation."""
    signer.signs(request("p1", nonce=7))
    signer.refuses(request("p2", nonce=7), Reason.NONCE_TAKEN, denied=False)
    signer.declare_dead("p1", 0)
    signer.refuses(request("p2", nonce=7), Reason.NONCE_TAKEN)
    signer.tombstone("p2", 1)
    signer.refuses(request("p2", 2, nonce=7, shape=Shape.CANCEL), Reason.NONCE_TAKEN)
    signer.signs(request("p2", 3, nonce=7, wallet="cold"))  # another wallet's seventh is another slot


def test_a_second_nonce_waits_for_proof_that_the_first_is_dead(signer: Signer) -> None:
    """Given a live attempt, then the payout is not signed in another slot, however often a stolen worker asks (W31)."""
    signer.signs(request())
    needs = signer.decide(request("p1", 1, nonce=1))
    assert isinstance(needs, NeedsDeath)
    assert [attempt.number for attempt in needs.attempts] == [0]
    assert (needs.order.to, needs.order.amount, needs.order.contract) == (SHOP, 500, TOKEN)
    elsewhere = signer.decide(request("p1", 1, nonce=0, wallet="cold"))
    assert isinstance(elsewhere, NeedsDeath)
    signer.declare_dead("p1", 0)
    signer.signs(request("p1", 1, nonce=1))


def test_a_released_slot_stays_dead(signer: Signer) -> None:
    """Given a release, then the old slot pays no more, or both could be paid; it may still be cancelled."""
    signer.signs(request())
    signer.declare_dead("p1", 0)
    signer.signs(request("p1", 1, nonce=1))
    signer.refuses(request("p1", 2, nonce=0), Reason.DECLARED_DEAD)
    signer.signs(request("p1", 3, nonce=0, shape=Shape.CANCEL))


def test_another_slot_after_tombstones(signer: Signer) -> None:
    """Given attempts that were never signed, then the payout may have any slot."""
    signer.tombstone("p1", 0)
    signer.signs(request("p1", 1, nonce=4))


def test_a_bump_is_identical_but_for_fees(signer: Signer) -> None:
    signer.signs(request())
    dearer = Fee(gas_limit=30_000, price=20)
    signer.refuses(request("p1", 1, data=unsigned(to=BANK, fee=dearer)), Reason.MISMATCH)
    signer.refuses(request("p1", 1, data=unsigned(amount=501, fee=dearer)), Reason.MISMATCH)
    signer.refuses(request("p1", 1, data=unsigned(contract="", fee=dearer)), Reason.MISMATCH)
    signer.signs(request("p1", 1, data=unsigned(fee=dearer)))


def test_the_fee_has_a_cap(signer: Signer) -> None:
    """2,000,000 for a payment, 1,000,000 for a cancellation: met exactly, and exceeded by one unit."""
    over, at = Fee(gas_limit=1, price=2_000_001), Fee(gas_limit=20_000, price=100)
    signer.refuses(request(data=unsigned(fee=over)), Reason.FEE_TOO_HIGH)
    signer.signs(request(data=unsigned(fee=at)))
    over, at = Fee(gas_limit=1_000_001, price=1), Fee(gas_limit=10_000, price=100)
    signer.refuses(request("p1", 1, shape=Shape.CANCEL, data=cancelling(fee=over)), Reason.FEE_TOO_HIGH)
    signer.signs(request("p1", 1, shape=Shape.CANCEL, data=cancelling(fee=at)))


# --- cancellations


@pytest.mark.parametrize(
    "data",
    [cancelling(amount=1), cancelling(to=SHOP), cancelling(to=COLD), cancelling(contract=TOKEN), cancelling(memo="x")],
)
def test_a_cancellation_moves_nothing(signer: Signer, data: bytes) -> None:
    """Cancel with a value, to another address, or with data: refused, since it needs no approval."""
    signer.signs(request())
    signer.refuses(request("p1", 1, shape=Shape.CANCEL, data=data), Reason.MISMATCH)


def test_a_cancellation_needs_no_approval(signer: Signer) -> None:
    signer.signs(request(pays=payment(expires_us=NOW_US)))
    signer.now_us += HOUR_US
    signer.signs(request("p1", 1, shape=Shape.CANCEL, by=Authorization()))


def test_a_gap_is_filled_by_the_payout_that_had_the_nonce(signer: Signer) -> None:
    """Given a nonce that was taken and tombstoned, then its payout cancels it, and no other payout gets it."""
    signer.refuses(request("p1", 0, nonce=5, shape=Shape.CANCEL), Reason.NOTHING_TO_CANCEL)
    signer.tombstone("p1", 0)
    signer.signs(request("p1", 1, nonce=5, shape=Shape.CANCEL))
    signer.refuses(request("p2", nonce=5), Reason.NONCE_TAKEN)
    signer.signs(request("p1", 2, nonce=6))  # nothing of it can pay: it may have another slot


def test_cancellations_have_a_daily_cap(signer: Signer) -> None:
    """Given a stolen worker, then it can't burn the wallet's coin in cancellations without end."""
    signer.tombstone("p1", 0)
    for number in range(1, 4):
        signer.signs(request("p1", number, nonce=number, shape=Shape.CANCEL))
    signer.refuses(request("p1", 4, nonce=4, shape=Shape.CANCEL), Reason.OVER_LIMIT)
    signer.now_us += 24 * HOUR_US
    signer.signs(request("p1", 4, nonce=4, shape=Shape.CANCEL))


def test_attempts_have_an_end(signer: Signer) -> None:
    for number in range(rules.ATTEMPTS_MAX):
        signer.tombstone("p1", number)
    signer.refuses(request("p1", 999), Reason.TOO_MANY_ATTEMPTS)


# --- previews and releases


def signer_preview(signer: Signer, **changes: Any) -> Refuse | int:
    asked = request(**changes)
    return rules.preview(
        signer.state,
        signer.policy,
        codecs,
        signer.policy.wallet,
        asked.payment,
        asked.authorization,
        asked.wallet,
        signer.now_us,
    )


def test_a_preview_says_what_signing_would_say(signer: Signer) -> None:
    assert signer_preview(signer) == 0
    signer.signs(request("p1", nonce=7))
    assert signer_preview(signer, payout="p2") == 8
    over = signer_preview(signer, pays=payment("p3", 5_001))
    assert isinstance(over, Refuse)
    assert over.reason is Reason.OVER_LIMIT
    assert over.denied


def test_a_release_names_what_was_signed(signer: Signer) -> None:
    signer.signs(request())
    hash_ = signer.state.payouts["p1"].attempts[0].hash
    right = Release(payout="p1", dead=(DeadAttempt(attempt=0, hash=hash_),))
    assert rules.check_release(signer.state, right, ["ann", "ben"]) is None
    for wrong, people, reason in (
        (right, ["ann"], Reason.NOT_RELEASED),
        (Release(payout="p1", dead=()), ["ann", "ben"], Reason.MALFORMED),
        (Release(payout="p1", dead=(DeadAttempt(attempt=0, hash="0x00"),)), ["ann", "ben"], Reason.MISMATCH),
        (Release(payout="p2", dead=(DeadAttempt(attempt=0, hash=hash_),)), ["ann", "ben"], Reason.MISMATCH),
    ):
        refused = rules.check_release(signer.state, wrong, people)
        assert refused is not None
        assert refused.reason is reason


def test_labels_keep_kinds_of_approvals_apart() -> None:
    """A signature over one kind of thing can never be used for another."""
    kinds = (payment().canonical(), Release(payout="p1", dead=()).canonical())
    assert kinds[0].startswith(b"bursar payout approval 1\n")
    assert kinds[1].startswith(b"bursar payout release 1\n")


def test_fees_of_the_builder_are_within_the_policy() -> None:
    assert FEE.worst < 1_000_000
