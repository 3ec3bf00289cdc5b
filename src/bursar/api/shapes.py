"""What goes over the wire: requests, which know no fields but these, and answers, in the specifications' words."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated

import msgspec
from msgspec import Meta, field

from bursar.flows.deposits import DepositView
from bursar.flows.transfers import View
from bursar.model.money import Asset, format_minor

REASONS = {
    "INSUFFICIENT_BALANCE": "there was not enough in the account",
    "ACCOUNT_NOT_FOUND": "there is no such account",
    "ACCOUNT_FROZEN": "the account is frozen",
    "ACCOUNT_CLOSED": "the account is closed",
    "ACCOUNT_DISABLED": "the account is closed",
    "ASSET_SUSPENDED": "the asset is suspended",
    "OVERFLOW": "the amount does not fit there",
    "CANCELLED": "it was cancelled by an operator",
    "GIVEN_BACK": "it was taken and given back",
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UserNumber = Annotated[int, Meta(ge=1, le=2**63 - 1, description="A user's number.")]
OwnNumber = Annotated[int, Meta(ge=1, le=2**63 - 1, description="The token's user; anything else is FORBIDDEN.")]
AmountText = Annotated[str, Meta(description="In units of the asset, as plain digits: `100.00`.")]


class In(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request."""


class Out(msgspec.Struct, frozen=True, kw_only=True):
    """An answer."""


# --- transfers, in the words of specification 000 ----------------------------------------------------------------


class CreateTransfer(In, frozen=True):
    """A wish to move one's own money."""

    source: Annotated[str, Meta(description="`FUNDING`, `SPOT`, `FUTURE` or `MARGIN`.")] = field(name="from")
    target: Annotated[str, Meta(description="As `from`.")] = field(name="to")
    asset: str
    amount: AmountText
    client_order_id: (
        Annotated[str, Meta(min_length=1, description="Chosen by the caller: repeating it repeats nothing.")] | None
    ) = None
    user_id: OwnNumber | None = None


class TransferAnswer(Out, frozen=True):
    """How a transfer stands (000 §8.1)."""

    transfer_id: int
    req_id: str
    source: str = field(name="from")
    target: str = field(name="to")
    state: Annotated[str, Meta(description="COMMITTED, FAILED or ROLLED_BACK; PENDING until then.")]
    fsm_state: Annotated[str, Meta(description="The exact state (000 §2.1).")]
    message: str


class TransferDetails(TransferAnswer, frozen=True):
    """A transfer, whole (000 §8.2)."""

    asset: str
    amount: str
    created_at: datetime
    updated_at: datetime


class TransferPage(Out, frozen=True):
    """Some transfers, newest first."""

    transfers: list[TransferDetails]
    next_cursor: Annotated[str, Meta(description="Give it back as `cursor` to go on.")] | None


def message_of(view: View) -> str:
    """In words, how it stands."""
    match view.state:
        case "COMMITTED":
            return "Transfer successful"
        case "PENDING":
            return "Transfer is being processed"
        case "FAILED":
            return f"Transfer failed, nothing was moved: {reason_of(view)}".rstrip(": ")
        case _:
            return f"Transfer was refused by the target and has been refunded: {reason_of(view)}".rstrip(": ")


def reason_of(view: View) -> str:
    """Why it failed or went back: the code, and what it means to its owner. Nothing of our inside."""
    code = view.reason.partition(":")[0]
    words = REASONS.get(code)
    return code if words is None else f"{code} ({words})"


def answer_of(view: View) -> TransferAnswer:
    """A transfer as the answer to its creation."""
    return TransferAnswer(
        transfer_id=view.transfer_id,
        req_id=view.req_id,
        source=view.source.value,
        target=view.target.value,
        state=view.state,
        fsm_state=view.fsm_state,
        message=message_of(view),
    )


def details_of(view: View) -> TransferDetails:
    """A transfer, whole."""
    return TransferDetails(
        transfer_id=view.transfer_id,
        req_id=view.req_id,
        source=view.source.value,
        target=view.target.value,
        state=view.state,
        fsm_state=view.fsm_state,
        message=message_of(view),
        asset=view.asset,
        amount=view.amount,
        created_at=EPOCH + timedelta(microseconds=view.created_us),
        updated_at=EPOCH + timedelta(microseconds=view.updated_us),
    )


# --- transfers, in the words of specification 001 (T39) ------------------------------------------------------------


class CreateTransfer1(In, frozen=True):
    """A wish to move one's own money, as 001 writes it."""

    source: Annotated[str, Meta(description="`funding` or `trading`.")] = field(name="from")
    target: Annotated[str, Meta(description="As `from`.")] = field(name="to")
    asset: str
    amount: AmountText
    user_id: OwnNumber | None = None


class TransferAnswer1(Out, frozen=True):
    """How it stands (001 §12)."""

    req_id: str
    status: Annotated[str, Meta(description="`committed`, `pending` or `failed`.")]
    message: str


class TransferDetails1(Out, frozen=True):
    """A transfer (001 §12)."""

    req_id: str
    state: Annotated[str, Meta(description="The exact state, in lower case.")]
    created_at: Annotated[int, Meta(description="Milliseconds since 1970.")]


def answer1_of(view: View) -> TransferAnswer1:
    """As the answer to its creation."""
    status = {"COMMITTED": "committed", "PENDING": "pending"}.get(view.state, "failed")
    return TransferAnswer1(req_id=view.req_id, status=status, message=message_of(view))


def details1_of(view: View) -> TransferDetails1:
    """A transfer."""
    return TransferDetails1(req_id=view.req_id, state=view.fsm_state.lower(), created_at=view.created_us // 1000)


# --- money ---------------------------------------------------------------------------------------------------------


class AssetAnswer(Out, frozen=True):
    """An asset, and what bounds its transfers."""

    asset: str
    precision: int
    status: str
    internal_transfer_enabled: bool
    min_transfer: str
    max_transfer: str


def asset_of(asset: Asset) -> AssetAnswer:
    """An asset."""
    return AssetAnswer(
        asset=asset.code,
        precision=asset.precision,
        status=asset.status.name,
        internal_transfer_enabled=asset.internal_transfer_enabled,
        min_transfer=format_minor(asset.min_transfer, asset.precision),
        max_transfer=format_minor(asset.max_transfer, asset.precision),
    )


class AssetBalance(Out, frozen=True):
    """One asset in one account."""

    asset: str
    available: str
    frozen: Annotated[str, Meta(description="Held for withdrawals or orders.")]
    in_flight: Annotated[str, Meta(description="Has left this account by a transfer that has not ended yet.")]


class AccountBalances(Out, frozen=True):
    """One account."""

    account: str
    status: Annotated[str, Meta(description="ACTIVE, FROZEN or DISABLED; UNAVAILABLE if it can't be asked just now.")]
    balances: list[AssetBalance]


class BalancesAnswer(Out, frozen=True):
    """All that a user has."""

    user_id: int
    accounts: list[AccountBalances]


class ConfirmDeposit(In, frozen=True):
    """What is to be booked, said again by the second person."""

    user_id: UserNumber
    asset: str
    amount: AmountText


class CreateDeposit(ConfirmDeposit, frozen=True):
    """Money that has arrived from outside."""

    reference: Annotated[
        str, Meta(description="What whoever sent it calls it: unique, letters, digits and `._:-`, at most 100.")
    ]


class DepositAnswer(Out, frozen=True):
    """How a deposit stands."""

    reference: str
    user_id: int
    asset: str
    amount: str
    state: Annotated[str, Meta(description="BOOKED; ASKED while it waits for a second person; REJECTED.")]
    asked_by: Annotated[str, Meta(description="Who asked for it first.")]
    account: Annotated[
        str,
        Meta(
            description="Where it is booked: `suspense:deposits` if the user's account is closed. Empty if it is not."
        ),
    ]


def deposit_of(view: DepositView) -> DepositAnswer:
    """A deposit."""
    return DepositAnswer(
        reference=view.reference,
        user_id=view.user,
        asset=view.asset,
        amount=view.amount,
        state=view.state,
        asked_by=view.asked_by,
        account=view.account,
    )


# --- health --------------------------------------------------------------------------------------------------------


class Health(Out, frozen=True):
    """Whether it lives."""

    status: str


class Readiness(Out, frozen=True):
    """Whether it can work, and what is missing."""

    ready: bool
    database: str
    cores: dict[str, str]
