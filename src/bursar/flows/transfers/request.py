"""What is asked for, and what a transfer's record carries."""

from __future__ import annotations

from enum import StrEnum

import msgspec


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
        """Two requests with one `client_order_id` are the same if these are (T11)."""
        return msgspec.json.encode([self.source, self.target, self.asset, self.amount]).decode()


class Transfer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a transfer's record: what was asked, checked and in smallest units. That never changes."""

    user: int
    source: AccountType
    target: AccountType
    asset: str
    asset_id: int
    amount: str  # smallest units, as text: JSON numbers end at 2^53 for many readers
    client_order_id: str = ""
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
EXTERNAL = "external:deposits"  # where deposits come from
