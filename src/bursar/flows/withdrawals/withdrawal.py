"""A withdrawal in its shapes: what is asked for, what its record carries, what its owner sees; and its entries.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final

import msgspec

from bursar.engine import Answer, Booking, FlowRecord, NewRecord, holds
from bursar.engine.holds import Held
from bursar.flows.payouts.machine import MACHINE as PAYOUTS
from bursar.flows.payouts.payout import (
    FEES,
    PAYOUT_ADOPTED,
    PAYOUT_PAID,
    PAYOUT_RETURNED,
    Imported,
    Payout,
)
from bursar.flows.withdrawals.machine import (
    APPROVE,
    APPROVED,
    CANCEL,
    CANCELLED,
    COMPLETED,
    FAILED,
    MACHINE,
    QUEUED,
    REJECT,
    REJECTED,
    STATUS,
)
from bursar.flows.withdrawals.risk import Code, Reason, Screening
from bursar.model.authorizations import Approval, Authorization, Payment
from bursar.model.entries import Leg
from bursar.model.errors import Refusal
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.model.records import Priority, Record
from bursar.rails.chain import Shape, Try
from bursar.writer import Operation

SCOPE: Final = "withdrawals"
PREFIX: Final = "wd-"
ALL: Final = "all"  # as an amount: everything that is available, less the fee
ID_BYTES: Final = 12
OPENING: Final = "external:opening"  # where balances come from that another system has kept before
RESULTS: Final = (COMPLETED, FAILED, REJECTED, CANCELLED)


class WithdrawalCode(StrEnum):
    """Why a request for a withdrawal, or a request about one, is refused; beside the codes of `risk`."""

    NOT_OFFERED = "WITHDRAWAL_NOT_OFFERED"
    INVALID_REQUEST = "INVALID_REQUEST"
    BELOW_MINIMUM = "BELOW_MINIMUM"
    FEE_CHANGED = "FEE_CHANGED"
    NOTHING_TO_SEND = "NOTHING_TO_SEND"
    HOURLY_LIMIT_EXCEEDED = "HOURLY_LIMIT_EXCEEDED"
    DAILY_LIMIT_EXCEEDED = "DAILY_LIMIT_EXCEEDED"
    NOT_FOUND = "WITHDRAWAL_NOT_FOUND"
    TOO_LATE = "TOO_LATE"
    INVALID_STATE = "INVALID_STATE"
    UNKNOWN_APPROVER = "UNKNOWN_APPROVER"
    OWN_REQUEST = "OWN_REQUEST"
    WRONG_SIGNATURE = "WRONG_SIGNATURE"
    ALREADY_ORDERED = "ALREADY_ORDERED"


@dataclass(eq=False)
class WithdrawalRefused(Refusal):
    """A request is refused, and nothing was written. `reason` is the code that an API answers with."""

    reason: WithdrawalCode | Code
    why: str
    code = "WITHDRAWAL_REFUSED"
    text = "{reason}: {why}"


class WithdrawalRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a user asks for. A quote is remembered by the fee that it named: `max_fee` (W42)."""

    user: int
    asset: str
    chain: str
    to: str
    amount: str  # in units of the asset; "all": what is available, less the fee
    max_fee: str = ""  # in units of the asset; "": whatever it is now
    memo: str = ""


class Quote(msgspec.Struct, frozen=True, kw_only=True):
    """What a withdrawal would cost and how long it would take, as things stand."""

    asset: str
    chain: str
    to: str
    amount: str  # that arrives
    fee: str
    total: str  # that leaves the account
    seconds: int  # from its approval until it is final, about
    reasons: tuple[Reason, ...]  # why it would wait, as far as can be said now


class Import(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is known of a withdrawal that another system took (W38)."""

    created_us: int  # when its user asked there
    debited: bool  # whether the other system has taken the money from the user already
    content: str  # SHA-256 of what was imported: the same id with other content is refused
    wallet: str = ""  # that has paid it, or would have
    sender: str = ""  # its address
    sent: Imported | None = None  # None: nothing was sent there, and it is decided here


class Withdrawal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a withdrawal's record. The payment never changes, but for the id of its payout (W37)."""

    user: int
    payment: Payment  # exactly what is approved
    native: str  # asset that the chain's fees are paid in
    priority: Priority = Priority.NORMAL
    over_all: bool = False  # the limit for all users together was used up when it was asked for (W44)
    screening: Screening = Screening()
    approvals: tuple[Approval, ...] = ()
    mandate: str = ""  # under which it was ordered; "": people approved it
    reasons: tuple[Reason, ...] = ()  # why it waits
    needed: int = 0  # approvals that are missing, of distinct people
    until_us: int = 0  # when it is looked at again by itself; 0: not before people say something
    cancelled: str = ""  # why; "": it is not
    cancelled_by: str = ""
    rejected: str = ""
    rejected_by: str = ""
    returned: str = ""  # why it came back to people after it was ordered
    payouts: tuple[str, ...] = ()  # that were ordered for it; the last one is the one in effect
    adopted: str = ""  # a payout that was not ordered here: the signer knew it (W33), or it was imported (W38)
    imported: Import | None = None
    approved_us: int = 0
    queued_us: int = 0
    tx_hash: str = ""  # of the final transaction
    failure: str = ""  # code and words of why its payout failed

    @property
    def amount(self) -> int:
        """What arrives, in the ledger's smallest units."""
        return int(self.payment.amount)


class WithdrawalView(msgspec.Struct, frozen=True, kw_only=True):
    """A withdrawal as its owner and operators see it."""

    id: str
    status: str  # the specification's
    state: str  # exactly
    user: int
    asset: str
    chain: str
    to: str
    memo: str
    amount: str  # in units of the asset
    fee: str
    reasons: tuple[Reason, ...]  # why it waits, in words for its user
    until_us: int  # when it is looked at again by itself, or expires; 0: never
    approvals_missing: int  # of distinct people
    approvals: tuple[str, ...]
    requester: str
    digest: str  # of the payment: what approvers compare
    payout: str  # "": none was ordered yet
    payout_status: str = ""  # of one that is looked at by itself
    tx_hash: str
    reason: str  # why it ended without being paid, for operators
    message: str  # the same in words for its user
    created_us: int
    updated_us: int
    queued_us: int
    replayed: bool = False


def withdrawal_id(operation: Operation, amount: int, fee: int) -> str:
    """The id of a request: it follows from who asks for what, under which key. Pure.

    So a request that is repeated after a restore, which has forgotten it, is the same withdrawal: the payout that the
    signer has signed for it names it as its source, and no second one is paid for that.
    """
    said = "\n".join((operation.scope, operation.id, operation.fingerprint, str(amount), str(fee)))
    return f"{PREFIX}{int.from_bytes(sha256(said.encode()).digest()[:ID_BYTES])}"


def held(item: FlowRecord[Withdrawal]) -> Held:
    """What is set aside for it: the amount and our fee."""
    payment = item.body.payment
    return Held(account=payment.account, asset=payment.asset, amount=int(payment.amount) + int(payment.fee))


def book_start(item: FlowRecord[Withdrawal]) -> Booking:
    """Set the money aside in the transaction that writes the request. No overdraft pays it (T42).

    What another system has debited comes from the opening account first, so that a failure gives it back to its user.
    What it has sent is watched from the same transaction on.
    """
    booking, came, hold = holds.authorize(item, held(item)), item.body.imported, held(item)
    (intent,) = booking.intents
    if came is None:
        return msgspec.structs.replace(booking, intents=(msgspec.structs.replace(intent, no_overdraft=True),))
    legs = (Leg(OPENING, hold.account, hold.asset, hold.amount), *intent.legs) if came.debited else intent.legs
    intent = msgspec.structs.replace(
        intent, legs=legs, no_overdraft=not came.debited, outside=came.sent is not None or came.debited
    )
    starts = () if came.sent is None else (_imported_payout(item.id, item.body, came, came.sent),)
    return msgspec.structs.replace(booking, intents=(intent,), starts=starts)


def _imported_payout(id_: str, body: Withdrawal, came: Import, sent: Imported) -> NewRecord:
    payout = Payout(
        payment=body.payment,
        authorization=Authorization(),  # nothing is ever signed for it here
        native=body.native,
        parent=f"{MACHINE.name}/{id_}",
        imported=sent,
        wallet=came.wallet,
        sender=came.sender,
    )
    if sent.slot is not None:
        attempted = Try(hash=sent.hash, shape=Shape.PAY, slot=sent.slot)
        payout = msgspec.structs.replace(
            payout, attempts=1, current=1, tries=(attempted,), first_sent_us=body.queued_us
        )
    return NewRecord(flow=PAYOUTS.name, id=body.payment.payout, body=payout, owner=body.payment.account)


def book(item: FlowRecord[Withdrawal], event: str, answer: Answer) -> Booking:
    """What accompanies an arrow: the payout that is ordered, or the end of the hold. Pure."""
    state, body = item.record.state, item.body
    target = MACHINE.next(state, event).name
    if (state, event) == (APPROVED, Outcome.SUCCESS):
        after = answer.body if isinstance(answer.body, Withdrawal) else body
        return Booking(starts=(_payout(item.id, after),))
    if target == COMPLETED:
        paid = [(str(answer.evidence["account"]), body.amount)]
        if int(body.payment.fee):
            paid.append((FEES, int(body.payment.fee)))
        return holds.confirm(item, held(item), *paid)
    return holds.void(item, held(item)) if target in (FAILED, REJECTED, CANCELLED) else Booking()


def _payout(id_: str, body: Withdrawal) -> NewRecord:
    authorization = Authorization(mandate=body.mandate) if body.mandate else Authorization(approvals=body.approvals)
    payout = Payout(
        payment=body.payment,
        authorization=authorization,
        native=body.native,
        priority=body.priority,
        parent=f"{MACHINE.name}/{id_}",
    )
    return NewRecord(flow=PAYOUTS.name, id=body.payment.payout, body=payout, owner=body.payment.account)


def heard(body: Withdrawal, event: str, evidence: Mapping[str, Any]) -> Withdrawal:
    """The body once a person, or its payout, has said something. The same words twice change nothing. Pure."""
    replace = msgspec.structs.replace
    match event:
        case "APPROVE":
            given = msgspec.convert(evidence["approval"], Approval)
            others = tuple(one for one in body.approvals if one.approver != given.approver)
            return replace(body, approvals=(*others, given))
        case "REJECT" if not body.rejected:
            return replace(body, rejected=str(evidence["reason"]), rejected_by=str(evidence["by"]))
        case "CANCEL" if not body.cancelled:
            return replace(body, cancelled=str(evidence["reason"]), cancelled_by=str(evidence["by"]))
        case "PAYOUT_ADOPTED":
            payouts = (*body.payouts, str(evidence["payout"]))
            return replace(body, adopted=str(evidence["payout"]), payouts=tuple(dict.fromkeys(payouts)))
        case "PAYOUT_PAID":
            return replace(body, tx_hash=str(evidence["hash"]))
        case "PAYOUT_RETURNED":
            return replace(body, returned=str(evidence["why"]), approvals=(), mandate="")
        case "PAYOUT_FAILED" | "PAYOUT_CANCELLED":
            return replace(body, failure=f"{evidence['code']}: {evidence['why']}")
        case _:
            return body


def next_body(item: FlowRecord[Withdrawal], event: str, answer: Answer) -> Withdrawal | None:
    """The body from an arrow on that a signal takes. Pure."""
    after = heard(item.body, event, answer.evidence)
    return None if after is item.body else after


def on_signal(item: FlowRecord[Withdrawal], event: str, evidence: dict[str, Any]) -> Withdrawal | None:
    """The body once a signal has come that moves nothing: the call that is under way sees it. Pure."""
    after = heard(item.body, event, evidence) if event in (APPROVE, REJECT, CANCEL, PAYOUT_ADOPTED) else item.body
    return None if after is item.body else after


def view_of(record: Record, body: Withdrawal, asset: Asset) -> WithdrawalView:
    """The view of a record. Pure."""
    payment, state = body.payment, record.state
    is_open = state not in RESULTS
    waits = is_open and state != QUEUED
    reason = body.cancelled or body.rejected or body.failure or record.error
    return WithdrawalView(
        id=record.id,
        status=STATUS[state],
        state=state,
        user=body.user,
        asset=payment.asset,
        chain=payment.chain,
        to=payment.to,
        memo=payment.memo,
        amount=str(asset.of_minor(int(payment.amount))),
        fee=str(asset.of_minor(int(payment.fee))),
        reasons=body.reasons if waits else (),
        until_us=(body.until_us or payment.expires_us) if waits else 0,
        approvals_missing=body.needed if waits else 0,
        approvals=tuple(approval.approver for approval in body.approvals),
        requester=payment.requester,
        digest=payment.digest(),
        payout=body.payouts[-1] if body.payouts else "",
        tx_hash=body.tx_hash,
        reason="" if is_open or state == COMPLETED else reason,
        message=_message(state, body, record.error),
        created_us=record.created_us if body.imported is None else body.imported.created_us,
        updated_us=record.updated_us,
        queued_us=body.queued_us,
    )


def _message(state: str, body: Withdrawal, error: str) -> str:
    """Why it ended without being paid, without what only operators may know. Pure."""
    match state:
        case "cancelled":
            return "it was cancelled; the money is back in the account"
        case "failed":
            return "it could not be paid; the money is back in the account"
        case "rejected":
            why = "" if body.rejected else error.partition(": ")[2]
            return f"{why or 'it was rejected'}; the money is back in the account"
        case _:
            return ""


__all__ = [
    "ALL",
    "PAYOUT_PAID",
    "PAYOUT_RETURNED",
    "PREFIX",
    "SCOPE",
    "Quote",
    "Withdrawal",
    "WithdrawalCode",
    "WithdrawalRefused",
    "WithdrawalRequest",
    "WithdrawalView",
    "book",
    "book_start",
    "held",
    "next_body",
    "on_signal",
    "view_of",
    "withdrawal_id",
]
