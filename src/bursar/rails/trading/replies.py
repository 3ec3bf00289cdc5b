"""What a client's calls return: an outcome that says what may be done, and the facts behind it.

`outcome` alone decides about money. It is SUCCESS or EXPLICIT_FAIL only if the core has said so about something that is
on its disk; every kind of trouble on the way is one of the unknowns, also where it seems certain that nothing was sent.
"""

from __future__ import annotations

from typing import Final

import msgspec

from bursar.model.outcome import Outcome
from bursar.rails.trading.rules import Op, Status, code_name, outcome_of

# What the client itself answers where the core has not. None of these is ever EXPLICIT_FAIL.
NOT_CONNECTED: Final = "NOT_CONNECTED"  # it was not sent
CONNECTION_LOST: Final = "CONNECTION_LOST"  # it was sent, and may have happened
NO_REPLY: Final = "NO_REPLY"  # it was sent, and may still happen
NOT_SENT_IN_TIME: Final = "NOT_SENT_IN_TIME"
CORE_BEHIND: Final = "CORE_BEHIND"  # the core has forgotten what it acknowledged (T33): somebody must look
CORE_REFUSED: Final = "CORE_REFUSED"  # wrong secret, wrong core, or not a core
OTHER_CORE: Final = "OTHER_CORE"  # not the core that this ledger is bound to
OTHER_LEDGER: Final = "OTHER_LEDGER"  # the core is bound to another ledger
LINK_FAILED: Final = "LINK_FAILED"  # what the ledger knows of this core could not be read or written: not sent
MALFORMED: Final = "MALFORMED"  # it cannot be put on the wire
CLOSED: Final = "CLOSED"  # this client is closed


# Where trying again helps nobody until a person has looked: the wrong core, or one that has forgotten.
NEEDS_A_PERSON: Final = frozenset({CORE_BEHIND, CORE_REFUSED, OTHER_CORE, OTHER_LEDGER})


class Floors(msgspec.Struct, frozen=True):
    """Ids that never sink: below `room` a withdraw reserves no room for its refund, below `forget` all is forgotten."""

    room: int = 1
    forget: int = 1


class Reply(msgspec.Struct, frozen=True):
    """What the core said about one operation, or why it said nothing."""

    outcome: Outcome
    code: str
    sequence: int = 0  # where in the core's log it stands; 0 if it stands nowhere
    detail: str = ""


class Balance(msgspec.Struct, frozen=True):
    """One asset of one user, in smallest units."""

    available: int
    frozen: int


class BalancesReply(msgspec.Struct, frozen=True):
    """A user's balances, after everything up to `sequence`."""

    outcome: Outcome
    code: str
    sequence: int = 0
    status: Status = Status.ACTIVE
    balances: dict[str, Balance] = {}
    detail: str = ""


class TotalsReply(msgspec.Struct, frozen=True):
    """Per asset, available and frozen of all users, after everything up to `sequence`."""

    outcome: Outcome
    code: str
    sequence: int = 0
    totals: dict[str, int] = {}
    detail: str = ""


class LookupReply(msgspec.Struct, frozen=True):
    """One reply per pair that was asked for, in that order; none if the question itself was not answered."""

    outcome: Outcome
    code: str
    sequence: int = 0
    replies: list[Reply] = []
    detail: str = ""


class QueryReply(msgspec.Struct, frozen=True):
    """Everything on record about one operation. For people; a record is driven by asking again (T24)."""

    outcome: Outcome
    code: str
    sequence: int = 0
    user: int = 0
    asset: str = ""
    amount: int = 0
    other: int = 0
    detail: str = ""


class OperationRow(msgspec.Struct, frozen=True):
    """A deposit, withdraw or refund that the core remembers."""

    sequence: int
    op: Op
    id: int
    user: int
    asset: str
    amount: int
    code: str  # `OK`, or the refusal


class OperationsReply(msgspec.Struct, frozen=True):
    """Some of what the core remembers, in order; nothing up to `complete_to` is left out."""

    outcome: Outcome
    code: str
    sequence: int = 0  # that is on the core's disk
    items: list[OperationRow] = []
    complete_to: int = 0
    detail: str = ""


class DescribeReply(msgspec.Struct, frozen=True):
    """Who the core is, and how much it holds."""

    outcome: Outcome
    code: str
    sequence: int = 0
    core: str = ""  # its identity
    ledger: str = ""  # to which it is bound; "": to none
    floors: Floors = Floors()
    highest_id: int = 0  # of a deposit or withdraw there ever was
    remembered: int = 0
    accounts: int = 0
    detail: str = ""


def reply_of(code: int, sequence: int) -> Reply:
    """What a byte from the core means."""
    return Reply(outcome_of(code), code_name(code), sequence)
