"""What the rules say about one withdrawal: refuse it, ask the screening hook, wait, or approve it. Pure.

`decide` gets everything that is known, as plain values, and is asked again whenever one of them has changed and right
before each attempt (W37). What is not known counts against the withdrawal: a screening that did not answer, a
policy that can't be read, and an address without an age all wait.

| what | may people's approval override it? |
|---|---|
| cancelled, rejected, expired, denied by a list or by screening, above the maximum, disabled | no: refused |
| an address that is not in the book, where the policy requires it | no: refused |
| a pause, a frozen account | no: it waits until that is lifted |
| an address that is too new, where the policy requires the book | no: it protects a stolen account |
| an address that is too new or unknown, where the book is for automatic approval only | yes |
| above the automatic limit, over the limit for all, unclear or silent screening, returned from execution | yes |

Two approvers are needed above `dual_above`, else one. The requester never counts, under no name that looks like his.

`Reason.words` and `Refuse.why` are for the user. `detail` is for operators: it may say why a person is suspected.

Not here: what a request must look like (checks), whose signature is right (`signer`), what is written down (`machine`).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final, assert_never

import msgspec

from bursar.flows.payouts.documents import asset_name
from bursar.flows.withdrawals.policy import AddressBookRule, Lists, WithdrawalPolicy
from bursar.model.actors import same_person
from bursar.model.errors import Refusal
from bursar.model.money import Asset
from bursar.model.views import moment
from bursar.writer import Limit

SECOND_US = 1_000_000
MINUTE_US = 60 * SECOND_US
HOUR_US = 60 * MINUTE_US
DAY_US = 24 * HOUR_US
COUNT_MAX = 2**62  # amounts are limited, not how many withdrawals there are

HOURLY_LIMIT: Final = "HOURLY_LIMIT_EXCEEDED"
DAILY_LIMIT: Final = "DAILY_LIMIT_EXCEEDED"
LIMIT_FOR_ALL: Final = "LIMIT_FOR_ALL"


class Verdict(StrEnum):
    """What the screening hook has said."""

    NOT_ASKED = ""
    CLEAR = "clear"
    REVIEW = "review"  # a person has to look
    DENIED = "denied"
    UNANSWERED = "unanswered"  # it was asked, and gave no answer that can be believed


class Screening(msgspec.Struct, frozen=True):
    """The hook's verdict, and its reason for operators."""

    verdict: Verdict = Verdict.NOT_ASKED
    reason: str = ""


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that decides. Nothing has a default: what is forgotten would count in favour of the withdrawal."""

    asset: Asset
    amount: int  # in the asset's smallest units
    now_us: int
    requester: str
    policy: WithdrawalPolicy | None  # None: there is none, or it is retired
    lists: Lists
    unreadable: str  # why one of the lists can't be read; "": all can
    to: str  # as the chain's codec writes it
    book_since_us: int | None  # when the address came into the user's book; None: it is not there
    screening: Screening
    over_all: bool  # the limit for all users together is used up (W44)
    switches: tuple[str, ...]  # pauses and halts in force, for operators
    frozen: bool  # the user's account
    approvers: tuple[str, ...]  # people whose signature over exactly this payment is right, and who may approve it
    rejected: str  # why a person has rejected it; "": none has
    cancelled: str  # why it was cancelled; "": it was not
    returned: str  # why it came back from execution; "": it did not
    expires_us: int


class Code(StrEnum):
    """Why a withdrawal is refused, or waits."""

    CANCELLED = "CANCELLED"
    REJECTED = "REJECTED"
    EXPIRED = "EXPIRED"
    NO_POLICY = "NO_POLICY"
    WITHDRAWALS_DISABLED = "WITHDRAWALS_DISABLED"
    ADDRESS_DENIED = "ADDRESS_DENIED"
    ADDRESS_NOT_ALLOWED = "ADDRESS_NOT_ALLOWED"
    ADDRESS_NOT_IN_BOOK = "ADDRESS_NOT_IN_BOOK"
    SCREENING_DENIED = "SCREENING_DENIED"
    ABOVE_MAXIMUM = "ABOVE_MAXIMUM"

    POLICY_UNUSABLE = "POLICY_UNUSABLE"
    PAUSED = "PAUSED"
    ACCOUNT_FROZEN = "ACCOUNT_FROZEN"
    ADDRESS_COOLING = "ADDRESS_COOLING"

    ABOVE_AUTO_APPROVAL = "ABOVE_AUTO_APPROVAL"
    LIMIT_FOR_ALL = "LIMIT_FOR_ALL"
    SCREENING_REVIEW = "SCREENING_REVIEW"
    SCREENING_UNANSWERED = "SCREENING_UNANSWERED"
    ADDRESS_UNKNOWN = "ADDRESS_UNKNOWN"
    RETURNED = "RETURNED"
    APPROVAL_NEEDED = "APPROVAL_NEEDED"


class Reason(msgspec.Struct, frozen=True):
    """Why a withdrawal waits."""

    code: Code
    words: str
    detail: str = ""


class Refuse(msgspec.Struct, frozen=True):
    """It is not paid, and never will be."""

    code: Code
    why: str
    detail: str = ""


class Screen(msgspec.Struct, frozen=True):
    """The screening hook has to be asked first."""


class Wait(msgspec.Struct, frozen=True):
    """Not now."""

    reasons: tuple[Reason, ...]
    needed: int  # approvals that are still missing; 0: time has to pass, or a switch to be lifted
    until_us: int  # when it is decided anew without any event: an address has cooled, or the request expires


class Approve(msgspec.Struct, frozen=True):
    """It may be paid."""

    mandate: str  # under which the signer signs; "": people have approved it


Decision = Refuse | Screen | Wait | Approve


class _Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """What the policy says, in smallest units."""

    maximum: int
    auto_approve_max: int
    dual_above: int


# --- one withdrawal --------------------------------------------------------------------------------------------------


def decide(facts: Facts) -> Decision:
    """What happens to a withdrawal as things are now."""
    if (refusal := _refusal(facts)) is not None:
        return refusal
    policy = facts.policy
    if policy is None:
        return Refuse(Code.NO_POLICY, "withdrawals of this asset on this chain are not offered")
    if not policy.enabled:
        return Refuse(Code.WITHDRAWALS_DISABLED, "withdrawals of this asset on this chain are switched off")
    try:
        bounds = _bounds(policy, facts.asset)
    except Refusal as error:
        return _being_set_up(facts, str(error))
    if facts.unreadable:  # its entries can't be compared: a denied address would be paid
        return _being_set_up(facts, facts.unreadable)
    if facts.amount > bounds.maximum:
        return Refuse(Code.ABOVE_MAXIMUM, f"at most {policy.maximum} {policy.asset} can be withdrawn at once")
    if policy.address_book is AddressBookRule.REQUIRED and facts.book_since_us is None:
        return Refuse(Code.ADDRESS_NOT_IN_BOOK, "the address is not in the address book: add it there first")
    if policy.screening and facts.screening.verdict is Verdict.NOT_ASKED:
        return Screen()
    return _judged(facts, policy, bounds)


def _being_set_up(facts: Facts, why: str) -> Wait:
    words = "withdrawals of this asset on this chain are being set up"
    return Wait((Reason(Code.POLICY_UNUSABLE, words, why),), 0, facts.expires_us)


def _refusal(facts: Facts) -> Refuse | None:
    """What no policy and no person overrides."""
    if facts.cancelled:
        return Refuse(Code.CANCELLED, "it was cancelled", facts.cancelled)
    if facts.rejected:
        return Refuse(Code.REJECTED, "it was rejected", facts.rejected)
    if facts.now_us >= facts.expires_us:
        return Refuse(Code.EXPIRED, "it was not approved and signed in time: ask again")
    if facts.to in facts.lists.deny:
        return Refuse(Code.ADDRESS_DENIED, "this address can't be paid", "it is on a list of denied addresses")
    if any(facts.to not in allowed for allowed in facts.lists.allow):
        return Refuse(Code.ADDRESS_NOT_ALLOWED, "this address can't be paid", "a list of allowed addresses lacks it")
    if facts.screening.verdict is Verdict.DENIED:
        return Refuse(Code.SCREENING_DENIED, "this address can't be paid", facts.screening.reason)
    return None


def _judged(facts: Facts, policy: WithdrawalPolicy, bounds: _Bounds) -> Decision:
    """What waits for people, and what for time or a switch; approved if nothing is left."""
    cooled_us = _cooled_us(facts, policy)
    holds, causes = _holds(facts, policy, cooled_us), _causes(facts, policy, bounds, cooled_us)
    people = (2 if facts.amount > bounds.dual_above else 1) if causes else 0
    given = len(people_counted(facts.approvers, facts.requester))
    missing = max(0, people - given)
    if missing:
        holds = (*holds, *causes, Reason(Code.APPROVAL_NEEDED, _approval_words(people, given)))
    if not holds:
        return Approve("" if causes else policy.mandate)
    until_us = min(facts.expires_us, cooled_us) if cooled_us > facts.now_us else facts.expires_us
    return Wait(holds, missing, until_us)


def people_counted(approvers: tuple[str, ...], requester: str) -> tuple[str, ...]:
    """Distinct people among the approvers, without the requester."""
    found: list[str] = []
    for name in approvers:
        if not any(same_person(name, other) for other in (requester, *found)):
            found.append(name)
    return tuple(found)


def _bounds(policy: WithdrawalPolicy, asset: Asset) -> _Bounds:
    return _Bounds(
        maximum=asset.minor(policy.maximum),
        auto_approve_max=asset.minor(policy.auto_approve_max),
        dual_above=asset.minor(policy.dual_above),
    )


def _cooled_us(facts: Facts, policy: WithdrawalPolicy) -> int:
    """When the address is old enough; 0: the book says nothing about it."""
    if policy.address_book is AddressBookRule.OFF or facts.book_since_us is None:
        return 0
    return facts.book_since_us + policy.cooling_s * SECOND_US


def _holds(facts: Facts, policy: WithdrawalPolicy, cooled_us: int) -> tuple[Reason, ...]:
    """What it waits for, whatever people say."""
    found = []
    if facts.switches:
        found.append(Reason(Code.PAUSED, "withdrawals are paused at the moment", ", ".join(facts.switches)))
    if facts.frozen:
        found.append(Reason(Code.ACCOUNT_FROZEN, "the account is frozen"))
    if policy.address_book is AddressBookRule.REQUIRED and cooled_us > facts.now_us:
        words = f"the address was added at {_time(facts.book_since_us)}; it can be used from {_from(cooled_us)}"
        found.append(Reason(Code.ADDRESS_COOLING, words))
    return tuple(found)


def _causes(facts: Facts, policy: WithdrawalPolicy, bounds: _Bounds, cooled_us: int) -> tuple[Reason, ...]:
    """Why people have to approve it; none: the mandate is enough."""
    found = []
    if not 0 < facts.amount <= bounds.auto_approve_max or not policy.mandate:
        found.append(Reason(Code.ABOVE_AUTO_APPROVAL, "it is above the amount that is approved automatically"))
    if facts.over_all:
        words = "more is being withdrawn at the moment than is approved automatically"
        found.append(Reason(Code.LIMIT_FOR_ALL, words))
    found += _of_screening(facts.screening)
    if policy.address_book is AddressBookRule.AUTO_ONLY:
        if facts.book_since_us is None:
            found.append(Reason(Code.ADDRESS_UNKNOWN, "the address is not in the address book"))
        elif cooled_us > facts.now_us:
            words = f"the address was added at {_time(facts.book_since_us)}; until {_from(cooled_us)} it needs approval"
            found.append(Reason(Code.ADDRESS_COOLING, words))
    if facts.returned:
        found.append(Reason(Code.RETURNED, "it could not be carried out and is being looked at", facts.returned))
    return tuple(found)


def _of_screening(screening: Screening) -> tuple[Reason, ...]:
    match screening.verdict:
        case Verdict.NOT_ASKED | Verdict.CLEAR:  # not asked: the policy does not want it, or it would be asked first
            return ()
        case Verdict.REVIEW | Verdict.DENIED:  # denied has been refused before
            return (Reason(Code.SCREENING_REVIEW, "it is being reviewed", screening.reason),)
        case Verdict.UNANSWERED:
            return (Reason(Code.SCREENING_UNANSWERED, "it is being reviewed", screening.reason),)
        case _:
            assert_never(screening.verdict)


def _approval_words(people: int, given: int) -> str:
    if people == 1:
        return "it needs approval by one person"
    return "it needs approval by two people" + ("; one has approved" if given else "")


def _time(us: int | None) -> str:
    """The minute in which it was."""
    return "" if us is None else f"{moment(us):%Y-%m-%d %H:%M} UTC"


def _from(us: int) -> str:
    """The minute that begins next: nothing is promised before its time."""
    return _time(-(-us // MINUTE_US) * MINUTE_US)


# --- limits ----------------------------------------------------------------------------------------------------------


def limits(policy: WithdrawalPolicy, asset: Asset, user: str, minor: int, now_us: int) -> tuple[Limit, ...]:
    """What a withdrawal uses up in this hour and this day (UTC). It is not given back if nothing is paid (W44).

    The user's own come first, so that a refusal for all is never reported to a user who is over his own. One whose code
    is `LIMIT_FOR_ALL` is left out when the withdrawal is started again to wait for people.
    """
    hour, day = now_us // HOUR_US, now_us // DAY_US
    next_hour_us, tomorrow_us = (hour + 1) * HOUR_US, (day + 1) * DAY_US
    buckets = (
        (f"u:{user}:h:{hour}", policy.hourly_user, next_hour_us, HOURLY_LIMIT),
        (f"u:{user}:d:{day}", policy.daily_user, tomorrow_us, DAILY_LIMIT),
        (f"all:h:{hour}", policy.hourly_all, next_hour_us, LIMIT_FOR_ALL),
        (f"all:d:{day}", policy.daily_all, tomorrow_us, LIMIT_FOR_ALL),
    )
    of = f"withdrawals:{asset_name(policy.asset, policy.chain)}"
    return tuple(
        Limit(
            key=f"{of}:{key}",
            count_max=COUNT_MAX,
            amount_max=asset.minor(most),
            amount=minor,
            until_us=until_us,
            code=code,
        )
        for key, most, until_us, code in buckets
        if most
    )
