"""A transfer in its shapes: what is asked for (`Request`), what its record carries (`Transfer`), what its owner sees
(`View`); and the names of its accounts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum

import msgspec

from bursar.flows.transfers.machine import MACHINE
from bursar.model.machine import Kind
from bursar.model.money import Asset
from bursar.model.records import Record
from bursar.model.views import moment
from bursar.store.records import Wanted

NEWEST = 2**63 - 1
PENDING = "PENDING"
OPEN = tuple(state.name for state in MACHINE.states if state.kind is not Kind.TERMINAL)
TERMINAL = {state.name for state in MACHINE.states if state.kind is Kind.TERMINAL}
# What a code of a rail means to the owner of a transfer.
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

_PLAIN = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]+))?")


class AccountType(StrEnum):
    """Where a user's money can be (000 §8.1). `FUNDING` is the ledger; each other is a trading core."""

    FUNDING = "FUNDING"
    SPOT = "SPOT"
    FUTURE = "FUTURE"
    MARGIN = "MARGIN"


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What a user asks for, as it came in: nothing of it is checked yet."""

    user: int
    source: str
    target: str
    asset: str
    amount: str  # in units of the asset, as text
    client_order_id: str = ""

    @property
    def fingerprint(self) -> str:
        """Two requests with one `client_order_id` are the same if these are (T11): amounts count as values (T43)."""
        return msgspec.json.encode([self.source, self.target, self.asset, _value(self.amount)]).decode()


def _value(amount: str) -> str:
    """An amount in its shortest form: `20` and `20.00` are the same. What is no plain number stays as it is."""
    match = _PLAIN.fullmatch(amount)
    if match is None:
        return amount
    whole, decimals = match[1], (match[2] or "").rstrip("0")
    return f"{whole}.{decimals}" if decimals else whole


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a transfer's record: what was asked, checked and in smallest units. That never changes; what became
    of it is added."""

    user: int
    source: AccountType
    target: AccountType
    asset: str
    asset_id: int
    amount: str  # smallest units, as text: JSON numbers end at 2^53 for many readers
    client_order_id: str = ""
    reason: str = ""  # why the target refused it, and the money went back
    disputed: tuple[str, ...] = ()  # states whose call ended otherwise than was decided; booked in suspense (T34)

    @property
    def minor(self) -> int:
        """The amount in smallest units."""
        return int(self.amount)


class View(msgspec.Struct, frozen=True, kw_only=True):
    """A transfer as its owner sees it."""

    transfer_id: int
    req_id: str
    user: int
    source: AccountType
    target: AccountType
    asset: str
    amount: str  # in units of the asset
    fsm_state: str
    error: str  # what the last call said
    reason: str  # why it failed, or went back
    created_us: int
    updated_us: int
    client_order_id: str = ""
    replayed: bool = False

    @property
    def state(self) -> str:
        """The state where it is an end, else PENDING (T18)."""
        return self.fsm_state if self.fsm_state in TERMINAL else PENDING

    @property
    def message(self) -> str:
        """For the owner: how it stands, and why it failed or went back. It names the code and nothing of our inside."""
        code = self.reason.partition(":")[0]
        why = f"{code} ({REASONS[code]})" if code in REASONS else code
        match self.state:
            case "COMMITTED":
                return "Transfer successful"
            case "PENDING":
                return "Transfer is being processed"
            case "FAILED":
                return f"Transfer failed, nothing was moved: {why}".rstrip(": ")
            case _:
                return f"Transfer was refused by the target and has been refunded: {why}".rstrip(": ")

    @property
    def created_at(self) -> datetime:
        """When it was written down."""
        return moment(self.created_us)

    @property
    def updated_at(self) -> datetime:
        """When it last moved."""
        return moment(self.updated_us)


class Filter(msgspec.Struct, frozen=True, kw_only=True):
    """Which transfers are to be listed. Nothing said: all."""

    state: str = ""  # PENDING, or an exact one
    asset: str = ""
    source: AccountType | None = None
    target: AccountType | None = None
    since_us: int = 0  # created then or later
    until_us: int = NEWEST  # created before

    def of(self, owner: str) -> Wanted:
        """As the store asks for it."""
        said = {"asset": self.asset, "source": self.source, "target": self.target}
        return Wanted(
            owner=owner,
            states=OPEN if self.state == PENDING else (self.state,) if self.state else (),
            facts={name: str(value) for name, value in said.items() if value},
            since_us=self.since_us,
            until_us=self.until_us,
        )


def view_of(record: Record, transfer: Transfer, assets: Mapping[str, Asset], replayed: bool = False) -> View:
    """The view of a record."""
    return View(
        transfer_id=record.number,
        req_id=record.id,
        user=transfer.user,
        source=transfer.source,
        target=transfer.target,
        asset=transfer.asset,
        amount=str(assets[transfer.asset].of_minor(transfer.minor)),
        fsm_state=record.state,
        error=record.error,
        reason=transfer.reason or (record.error if record.state in TERMINAL else ""),
        created_us=record.created_us,
        updated_us=record.updated_us,
        client_order_id=transfer.client_order_id,
        replayed=replayed,
    )


def funding_account(user: int) -> str:
    """A user's funding account in the ledger."""
    return f"user:{user}:funding"


def core_account(kind: AccountType) -> str:
    """The ledger's side of a trading core: all that users have there."""
    return f"trading:{kind.value.lower()}"


SCOPE = "transfers"  # of keys and remembered requests
NEW_TRANSFERS = ("flow", "new transfers")  # as a pause: none are started, those under way go on
TRANSIT = "transit:transfers"  # money that has left one side and not arrived at the other
# What a core did without a decision here: below zero, users have it twice; above, we owe it.
SUSPENSE = "suspense:transfers"
SUSPENSE_DEPOSITS = "suspense:deposits"  # what has arrived for an account that is closed (T44)
EXTERNAL = "external:deposits"  # where deposits come from
