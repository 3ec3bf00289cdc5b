"""What is asked for, and what a transfer's record carries."""

from __future__ import annotations

import re
from enum import StrEnum

import msgspec

_PLAIN = re.compile(r"(0|[1-9][0-9]*)(?:\.([0-9]+))?")


class AccountType(StrEnum):
    """Where a user's money can be (000 §8.1). `FUNDING` is the ledger; each other is a trading core."""

    FUNDING = "FUNDING"
    SPOT = "SPOT"
    FUTURE = "FUTURE"
    MARGIN = "MARGIN"

    @property
    def number(self) -> int:
        """As `source_type` and `target_type` of `transfers_tb` have it: 1 = funding, 2 = trading, and so on."""
        return list(AccountType).index(self) + 1


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A user's wish, as it came in: nothing of it is checked yet."""

    user: int
    source: str
    target: str
    asset: str
    amount: str  # in units of the asset, as text
    client_order_id: str = ""

    @property
    def fingerprint(self) -> str:
        """Two requests with one `client_order_id` are the same if these are (T11): amounts count as values (T43)."""
        return _fingerprint([self.source, self.target, self.asset, self.amount])


def same_request(stored: str, fingerprint: str) -> bool:
    """Whether a stored fingerprint stands for the same request; older ones hold the amount as it was written."""
    return stored == fingerprint or _fingerprint(msgspec.json.decode(stored, type=list[str])) == fingerprint


def _fingerprint(parts: list[str]) -> str:
    *rest, amount = parts
    return msgspec.json.encode([*rest, _value(amount)]).decode()


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


def funding_account(user: int) -> str:
    """A user's funding account in the ledger."""
    return f"user:{user}:funding"


def core_account(kind: AccountType) -> str:
    """The ledger's side of a trading core: all that users have there."""
    return f"trading:{kind.value.lower()}"


NEW_TRANSFERS = ("flow", "new transfers")  # as a pause: none are started, those under way go on
TRANSIT = "transit:transfers"  # money that has left one side and not arrived at the other
SUSPENSE = "suspense:transfers"  # what a core did and nobody decided: below zero, users have it twice; above, we owe it
SUSPENSE_DEPOSITS = "suspense:deposits"  # what has arrived for an account that is closed (T44)
EXTERNAL = "external:deposits"  # where deposits come from
