"""What the rules say about a withdrawal: refused, screened first, waiting for people or time, or approved."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.flows.withdrawals.policy import AddressBookRule, Lists, WithdrawalPolicy
from bursar.flows.withdrawals.risk import (
    DAY_US,
    HOUR_US,
    SECOND_US,
    Approve,
    Code,
    Decision,
    Facts,
    Refuse,
    Screen,
    Screening,
    Verdict,
    Wait,
    decide,
    limits,
    people_counted,
)
from bursar.model.actors import same_person
from bursar.model.errors import PrecisionOverflow
from bursar.model.money import Asset

USDT = Asset(code="USDT", precision=6)
UNIT = 10**6
NOW_US = 1_772_366_400 * SECOND_US  # 2026-03-01 12:00 UTC
EXPIRES_US = NOW_US + DAY_US
POLICY = WithdrawalPolicy(
    asset="USDT",
    chain="bsc",
    maximum="1000",
    auto_approve_max="100",
    mandate="small",
    dual_above="500",
    cooling_s=3_600,
    screening=True,
)
CLEAR = Screening(Verdict.CLEAR)
CALM = Facts(
    asset=USDT,
    amount=50 * UNIT,
    now_us=NOW_US,
    requester="user-42",
    policy=POLICY,
    lists=Lists(),
    unreadable="",
    to="@bob",
    book_since_us=NOW_US - DAY_US,
    screening=CLEAR,
    over_all=False,
    switches=(),
    frozen=False,
    approvers=(),
    rejected="",
    cancelled="",
    returned="",
    expires_us=EXPIRES_US,
)


def decided(policy: dict[str, Any] | None = None, **facts: Any) -> Decision:
    """What is decided about a small withdrawal that nothing stands against, but for these facts."""
    changed = msgspec.structs.replace(POLICY, **(policy or {}))
    return decide(msgspec.structs.replace(CALM, **{"policy": changed} | facts))


def codes(decision: Decision) -> list[str]:
    assert isinstance(decision, Wait)
    return [reason.code for reason in decision.reasons]


def test_small_withdrawal_that_nothing_stands_against_is_approved_by_the_mandate() -> None:
    assert decided() == Approve("small")
    assert decided(amount=100 * UNIT) == Approve("small")


# --- refused ---------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"cancelled": "by the user"}, "CANCELLED"),
    ({"rejected": "fraud"}, "REJECTED"),
    ({"now_us": EXPIRES_US}, "EXPIRED"),
    ({"expires_us": 0}, "EXPIRED"),
    ({"lists": Lists(deny=frozenset({"@bob"}))}, "ADDRESS_DENIED"),
    ({"lists": Lists(allow=(frozenset({"@bob", "@carol"}), frozenset({"@carol"})))}, "ADDRESS_NOT_ALLOWED"),
    ({"screening": Screening(Verdict.DENIED, "sanctioned")}, "SCREENING_DENIED"),
    ({"policy": None}, "NO_POLICY"),
    ({"policy": msgspec.structs.replace(POLICY, enabled=False)}, "WITHDRAWALS_DISABLED"),
    ({"book_since_us": None}, "ADDRESS_NOT_IN_BOOK"),
    ({"amount": 1000 * UNIT + 1}, "ABOVE_MAXIMUM"),
]


@pytest.mark.parametrize(("facts", "code"), REFUSED)
@pytest.mark.parametrize("screening", [Screening(), CLEAR, Screening(Verdict.REVIEW), Screening(Verdict.UNANSWERED)])
def test_refusal_is_overridden_by_no_approval(facts: dict[str, Any], code: str, screening: Screening) -> None:
    people = {"approvers": ("ann", "ben", "carl")}
    for more in ({}, people, people | {"switches": ("all is halted",), "frozen": True, "over_all": True}):
        decision = decide(msgspec.structs.replace(CALM, **{"screening": screening, **more, **facts}))
        assert isinstance(decision, Refuse)
        assert decision.code == code


def test_lists_that_have_the_address_allow_it() -> None:
    assert decided(lists=Lists(allow=(frozenset({"@bob"}), frozenset({"@bob", "@carol"})))) == Approve("small")


def test_list_that_can_not_be_read_stops_what_people_have_approved() -> None:
    waits = decided(unreadable="it has '0x12'", approvers=("ann", "ben"))
    assert isinstance(waits, Wait) and [reason.code for reason in waits.reasons] == [Code.POLICY_UNUSABLE]
    assert waits.needed == 0 and "0x12" not in waits.reasons[0].words and "0x12" in waits.reasons[0].detail


def test_user_is_not_told_what_is_suspected() -> None:
    """The reason of the screening, of a rejection and of a list is for operators."""
    denied = decided(screening=Screening(Verdict.DENIED, "sanctioned"))
    listed = decided(lists=Lists(deny=frozenset({"@bob"})))
    assert isinstance(denied, Refuse)
    assert isinstance(listed, Refuse)
    assert denied.why == listed.why == "this address can't be paid"
    assert denied.detail == "sanctioned"
    waits = decided(screening=Screening(Verdict.REVIEW, "mixer"), returned="signer: over cap", switches=("rail x",))
    assert isinstance(waits, Wait)
    assert not any(secret in reason.words for reason in waits.reasons for secret in ("mixer", "signer", "rail"))
    assert [reason.detail for reason in waits.reasons] == ["rail x", "mixer", "signer: over cap", ""]


# --- screening -------------------------------------------------------------------------------------------------------


def test_screening_is_asked_first_where_the_policy_wants_it() -> None:
    assert decided(screening=Screening()) == Screen()
    assert decided(screening=Screening(), amount=900 * UNIT, frozen=True, approvers=("ann", "ben")) == Screen()
    assert decided({"screening": False}, screening=Screening()) == Approve("small")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [(Verdict.REVIEW, "SCREENING_REVIEW"), (Verdict.UNANSWERED, "SCREENING_UNANSWERED")],
)
@pytest.mark.parametrize("wanted", [True, False])
def test_screening_that_does_not_clear_is_left_to_people(verdict: Verdict, code: str, wanted: bool) -> None:
    policy = {"screening": wanted}  # what it has once said counts also where the policy no longer asks
    decision = decided(policy, screening=Screening(verdict))
    assert codes(decision) == [code, "APPROVAL_NEEDED"]
    assert decided(policy, screening=Screening(verdict), approvers=("ann",)) == Approve("")


# --- people ----------------------------------------------------------------------------------------------------------

NEEDS_PEOPLE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"amount": 100 * UNIT + 1}, "ABOVE_AUTO_APPROVAL"),
    ({}, {"amount": 0}, "ABOVE_AUTO_APPROVAL"),
    ({}, {"amount": -UNIT}, "ABOVE_AUTO_APPROVAL"),
    ({"mandate": ""}, {}, "ABOVE_AUTO_APPROVAL"),
    ({"auto_approve_max": "0"}, {"amount": 1}, "ABOVE_AUTO_APPROVAL"),
    ({}, {"over_all": True}, "LIMIT_FOR_ALL"),
    ({}, {"screening": Screening(Verdict.REVIEW)}, "SCREENING_REVIEW"),
    ({}, {"screening": Screening(Verdict.UNANSWERED)}, "SCREENING_UNANSWERED"),
    ({"address_book": AddressBookRule.AUTO_ONLY}, {"book_since_us": None}, "ADDRESS_UNKNOWN"),
    ({"address_book": AddressBookRule.AUTO_ONLY}, {"book_since_us": NOW_US - HOUR_US + 1}, "ADDRESS_COOLING"),
    ({"address_book": AddressBookRule.AUTO_ONLY}, {"book_since_us": NOW_US + HOUR_US}, "ADDRESS_COOLING"),
    ({}, {"returned": "the signer refused the mandate"}, "RETURNED"),
]


@pytest.mark.parametrize(("policy", "facts", "code"), NEEDS_PEOPLE)
def test_one_person_approves_what_is_not_approved_automatically(
    policy: dict[str, Any], facts: dict[str, Any], code: str
) -> None:
    decision = decided(policy, **facts)
    assert codes(decision) == [code, "APPROVAL_NEEDED"]
    assert isinstance(decision, Wait)
    assert decision.needed == 1
    assert decision.reasons[-1].words == "it needs approval by one person"
    assert decided(policy, **facts, approvers=("ann",)) == Approve("")


@pytest.mark.parametrize(("policy", "facts", "code"), NEEDS_PEOPLE)
def test_two_people_approve_what_is_above_the_dual_limit(
    policy: dict[str, Any], facts: dict[str, Any], code: str
) -> None:
    large = facts | {"amount": 500 * UNIT + 1}
    for approvers, needed in (((), 2), (("ann",), 1), (("ann", "ANN", "ann+ops"), 1), (("ann", "user-42"), 1)):
        decision = decided(policy, **large, approvers=approvers)
        assert isinstance(decision, Wait)
        assert decision.needed == needed
        assert code in codes(decision)
    assert decided(policy, **large, approvers=("ann", "ben")) == Approve("")
    assert decided(policy, **(facts | {"amount": 500 * UNIT}), approvers=("ann",)) == Approve("")
    assert decided(policy, **(facts | {"amount": 1000 * UNIT}), approvers=("ann", "ben")) == Approve("")


def test_words_say_how_many_people_are_missing() -> None:
    none, one = decided(amount=501 * UNIT), decided(amount=501 * UNIT, approvers=("ann",))
    assert isinstance(none, Wait)
    assert isinstance(one, Wait)
    assert none.reasons[-1].words == "it needs approval by two people"
    assert one.reasons[-1].words == "it needs approval by two people; one has approved"


@pytest.mark.parametrize("name", ["user-42", "USER-42", "user42", "user.42", "user-42+x"])
def test_requester_does_not_approve_under_any_name(name: str) -> None:
    decision = decided(amount=200 * UNIT, approvers=(name,))
    assert isinstance(decision, Wait)
    assert decision.needed == 1
    assert people_counted((name, "ann"), "user-42") == ("ann",)


# --- time and switches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "code"), [({"switches": ("flow payouts is paused",)}, "PAUSED"), ({"frozen": True}, "ACCOUNT_FROZEN")]
)
def test_switch_holds_what_people_have_approved_too(facts: dict[str, Any], code: str) -> None:
    small, large = decided(**facts), decided(**facts, amount=900 * UNIT, approvers=("ann", "ben"))
    for decision in (small, large):
        assert codes(decision) == [code]
        assert isinstance(decision, Wait)
        assert (decision.needed, decision.until_us) == (0, EXPIRES_US)
    assert codes(decided(**facts, amount=900 * UNIT)) == [code, "ABOVE_AUTO_APPROVAL", "APPROVAL_NEEDED"]


def test_new_address_waits_until_it_is_old_enough_and_people_do_not_shorten_it() -> None:
    since_us = NOW_US - HOUR_US + 90 * SECOND_US
    for people in ((), ("ann", "ben")):
        decision = decided(book_since_us=since_us, approvers=people)
        assert codes(decision) == ["ADDRESS_COOLING"]
        assert isinstance(decision, Wait)
        assert (decision.needed, decision.until_us) == (0, since_us + HOUR_US)
        assert decision.reasons[0].words == (
            "the address was added at 2026-03-01 11:01 UTC; it can be used from 2026-03-01 12:02 UTC"
        )
    assert decided(book_since_us=since_us, now_us=since_us + HOUR_US - 1) != Approve("small")
    assert decided(book_since_us=since_us, now_us=since_us + HOUR_US) == Approve("small")


def test_new_address_is_used_automatically_once_it_is_old_enough() -> None:
    policy = {"address_book": AddressBookRule.AUTO_ONLY}
    waits = decided(policy, book_since_us=NOW_US)
    assert isinstance(waits, Wait)
    assert (waits.needed, waits.until_us) == (1, NOW_US + HOUR_US)
    assert decided(policy, book_since_us=NOW_US, now_us=NOW_US + HOUR_US) == Approve("small")


def test_wait_never_lasts_past_the_expiry() -> None:
    soon_us = NOW_US + SECOND_US
    decision = decided(book_since_us=NOW_US, expires_us=soon_us)
    assert isinstance(decision, Wait)
    assert decision.until_us == soon_us


def test_address_book_that_is_off_is_not_looked_at() -> None:
    policy = {"address_book": AddressBookRule.OFF, "cooling_s": 0}
    assert decided(policy, book_since_us=None) == Approve("small")
    assert decided(policy, book_since_us=NOW_US) == Approve("small")


@pytest.mark.parametrize("field", ["maximum", "auto_approve_max", "dual_above"])
def test_policy_that_the_asset_can_not_express_lets_nothing_through(field: str) -> None:
    decision = decided({field: "100.0000001"}, approvers=("ann", "ben"))
    assert codes(decision) == ["POLICY_UNUSABLE"]
    assert isinstance(decision, Wait)
    assert (decision.needed, decision.until_us) == (0, EXPIRES_US)
    assert "100.0000001" in decision.reasons[0].detail


# --- everything at once ----------------------------------------------------------------------------------------------

policies = st.builds(
    lambda rule, auto, dual, cooling, screening: msgspec.structs.replace(
        POLICY,
        address_book=rule,
        auto_approve_max=str(auto),
        dual_above=str(auto + dual),
        mandate="small" if auto else "",
        cooling_s=cooling,
        screening=screening,
    ),
    st.sampled_from(AddressBookRule),
    st.sampled_from([0, 100]),
    st.sampled_from([0, 400]),
    st.sampled_from([0, 3_600]),
    st.booleans(),
)
people = st.lists(st.sampled_from(["ann", "Ann", "ben", "user-42", "user42"]), max_size=4).map(tuple)
standing = st.builds(
    msgspec.structs.replace,
    st.just(CALM),
    policy=policies,
    amount=st.sampled_from([1, 100 * UNIT, 100 * UNIT + 1, 500 * UNIT, 500 * UNIT + 1, 1000 * UNIT]),
    book_since_us=st.sampled_from([0, NOW_US - HOUR_US, NOW_US - HOUR_US + 1, None]),
    screening=st.sampled_from([CLEAR, CLEAR, CLEAR, *(Screening(verdict) for verdict in Verdict)]),
    over_all=st.sampled_from([False, False, True]),
    switches=st.sampled_from([(), (), (), ("flow withdrawals is paused",)]),
    frozen=st.sampled_from([False, False, False, True]),
    approvers=people,
    returned=st.sampled_from(["", "", "", "the mandate is used up"]),
)
everything = st.builds(
    lambda facts, refused: msgspec.structs.replace(facts, **refused),
    standing,
    st.sampled_from([*({} for _ in range(40)), *(facts for facts, _ in REFUSED)]),
)


@settings(max_examples=1_000)
@given(everything)
def test_nothing_is_approved_without_enough_people_unless_it_is_small_and_clear(facts: Facts) -> None:
    decision = decide(facts)
    policy, since_us = facts.policy, facts.book_since_us
    if isinstance(decision, Wait):
        assert decision.reasons
        assert facts.now_us < decision.until_us <= facts.expires_us
    if not isinstance(decision, Approve):
        return
    assert policy is not None
    assert not (facts.cancelled or facts.rejected or facts.switches or facts.frozen)
    assert facts.expires_us > facts.now_us
    assert facts.lists == Lists()
    assert facts.screening.verdict != Verdict.DENIED
    assert not (policy.screening and facts.screening.verdict == Verdict.NOT_ASKED)
    is_old = since_us is not None and since_us + policy.cooling_s * SECOND_US <= facts.now_us
    assert is_old or policy.address_book != AddressBookRule.REQUIRED
    if decision.mandate:
        assert facts.amount <= USDT.minor(policy.auto_approve_max)
        assert facts.screening.verdict == (Verdict.CLEAR if policy.screening else facts.screening.verdict)
        assert facts.screening.verdict in (Verdict.CLEAR, Verdict.NOT_ASKED)
        assert is_old or policy.address_book == AddressBookRule.OFF
        assert not facts.over_all
        assert not facts.returned
    else:
        others = [name for name in facts.approvers if not same_person(name, facts.requester)]
        assert others
        if facts.amount > USDT.minor(policy.dual_above):
            assert any(not same_person(one, other) for one in others for other in others)


@settings(max_examples=500)
@given(everything, st.sampled_from(["ann", "ben", "carl"]))
def test_one_more_approval_never_makes_it_worse(facts: Facts, name: str) -> None:
    before, after = decide(facts), decide(msgspec.structs.replace(facts, approvers=(*facts.approvers, name)))
    if isinstance(before, Wait):
        assert isinstance(after, Approve) or (isinstance(after, Wait) and after.needed <= before.needed)
    else:
        assert after == before


# --- limits ----------------------------------------------------------------------------------------------------------

LIMITED = msgspec.structs.replace(POLICY, hourly_user="10", daily_user="20", hourly_all="30", daily_all="40")


def test_limits_count_in_hours_and_days_of_utc_the_user_first() -> None:
    at_us = NOW_US + HOUR_US - 1
    hour, day = NOW_US // HOUR_US, NOW_US // DAY_US
    found = limits(LIMITED, USDT, "42", 5 * UNIT, at_us)
    assert [(limit.key, limit.amount_max, limit.until_us, limit.code) for limit in found] == [
        (f"withdrawals:usdt:bsc:u:42:h:{hour}", 10 * UNIT, NOW_US + HOUR_US, "HOURLY_LIMIT_EXCEEDED"),
        (f"withdrawals:usdt:bsc:u:42:d:{day}", 20 * UNIT, NOW_US + 12 * HOUR_US, "DAILY_LIMIT_EXCEEDED"),
        (f"withdrawals:usdt:bsc:all:h:{hour}", 30 * UNIT, NOW_US + HOUR_US, "LIMIT_FOR_ALL"),
        (f"withdrawals:usdt:bsc:all:d:{day}", 40 * UNIT, NOW_US + 12 * HOUR_US, "LIMIT_FOR_ALL"),
    ]
    assert all((limit.amount, limit.count) == (5 * UNIT, 1) for limit in found)
    assert all(limit.count_max > 10**15 for limit in found), "amounts are limited, not how many there are"
    later = limits(LIMITED, USDT, "42", 5 * UNIT, at_us + 1)
    assert [limit.key for limit in later][1] == found[1].key
    assert later[0].key != found[0].key


def test_users_and_assets_are_limited_apart_and_only_where_the_policy_says_so() -> None:
    eth = msgspec.structs.replace(LIMITED, chain="eth")
    keys = [
        {limit.key for limit in limits(policy, USDT, user, 1, NOW_US)}
        for policy, user in ((LIMITED, "42"), (LIMITED, "43"), (eth, "42"))
    ]
    assert len(keys[0] & keys[1]) == 2  # those for all
    assert not keys[0] & keys[2]
    assert limits(POLICY, USDT, "42", UNIT, NOW_US) == ()
    daily = msgspec.structs.replace(POLICY, daily_all="40")
    assert [limit.code for limit in limits(daily, USDT, "42", UNIT, NOW_US)] == ["LIMIT_FOR_ALL"]
    with pytest.raises(PrecisionOverflow):
        limits(msgspec.structs.replace(POLICY, daily_all="0.0000001"), USDT, "42", UNIT, NOW_US)
