"""What a client's calls return: an outcome that says what may be done, and the facts behind it.

`outcome` alone decides about money. It is SUCCESS or EXPLICIT_FAIL only if the core has said so about something that is
on its disk; every kind of trouble on the way is one of the unknowns, also where it seems certain that nothing was sent.
"""

from __future__ import annotations

from typing import Any, Final, TypeVar

import msgspec

from bursar.model.outcome import Outcome
from bursar.rails.trading import protocol
from bursar.rails.trading.rules import Op, Status, code_name, outcome_of

# What the client itself answers where the core has not. None of these is ever EXPLICIT_FAIL.
NOT_CONNECTED: Final = "NOT_CONNECTED"  # it was not sent
CONNECTION_LOST: Final = "CONNECTION_LOST"  # it was sent, and may have happened
NO_REPLY: Final = "NO_REPLY"  # it was sent, and may still happen
NOT_SENT_IN_TIME: Final = "NOT_SENT_IN_TIME"
CORE_BEHIND: Final = "CORE_BEHIND"  # the core has forgotten what it acknowledged (T33): an operator must look
CORE_REFUSED: Final = "CORE_REFUSED"  # wrong secret, wrong core, or not a core
OTHER_CORE: Final = "OTHER_CORE"  # not the core that this ledger is bound to
OTHER_LEDGER: Final = "OTHER_LEDGER"  # the core is bound to another ledger
LINK_FAILED: Final = "LINK_FAILED"  # what the ledger knows of this core could not be read or written: not sent
MALFORMED: Final = "MALFORMED"  # it cannot be put on the wire
CLOSED: Final = "CLOSED"  # this client is closed


# Where trying again is of no use until a person has looked: the wrong core, or one that has forgotten.
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


class BalancesReply(Reply, frozen=True):
    """A user's balances, after everything up to `sequence`."""

    status: Status = Status.ACTIVE
    balances: dict[str, Balance] = {}


class TotalsReply(Reply, frozen=True):
    """Per asset, available and frozen of all users, after everything up to `sequence`."""

    totals: dict[str, int] = {}


class LookupReply(Reply, frozen=True):
    """One reply per pair that was asked for, in that order; none if the question itself was not answered."""

    replies: list[Reply] = []


class QueryReply(Reply, frozen=True):
    """Everything on record about one operation. For operators; a record is driven by asking again (T24)."""

    user: int = 0
    asset: str = ""
    amount: int = 0
    other: int = 0


class OperationRow(msgspec.Struct, frozen=True):
    """A deposit, withdraw or refund that the core remembers."""

    sequence: int
    op: Op
    id: int
    user: int
    asset: str
    amount: int
    code: str  # `OK`, or the refusal


class OperationsReply(Reply, frozen=True):
    """Some of what the core remembers, in order; nothing up to `complete_to` is left out. `sequence` is on its disk."""

    items: list[OperationRow] = []
    complete_to: int = 0


class DescribeReply(Reply, frozen=True):
    """Who the core is, and how much it holds."""

    core: str = ""  # its identity
    ledger: str = ""  # to which it is bound; "": to none
    floors: Floors = Floors()
    highest_id: int = 0  # of a deposit or withdraw there ever was
    remembered: int = 0
    accounts: int = 0


# --- what the core's messages mean

R = TypeVar("R", bound=Reply)


def reply_of(code: int, sequence: int) -> Reply:
    """What a byte from the core means."""
    return Reply(outcome_of(code), code_name(code), sequence)


def trouble_of(answer: Any, shape: type[R]) -> R:
    """A reply that is trouble, in the shape that the caller waits for. An answer of the wrong kind is trouble, too."""
    if isinstance(answer, Reply):
        return shape(answer.outcome, answer.code, detail=answer.detail)
    return shape(Outcome.UNKNOWN, CORE_REFUSED, detail=f"an answer of the wrong kind: {type(answer).__name__}")


def pruned_of(answer: Any) -> tuple[Reply, Floors | None]:
    """What became of a request to raise the floors, and where they are if the core has said so."""
    if isinstance(answer, protocol.Pruned):
        return reply_of(answer.code, answer.sequence), Floors(answer.room, answer.forget)
    return trouble_of(answer, Reply), None


def meaning_of(answer: Any, shape: type[R]) -> R:
    """An answer in the shape that the caller waits for; one that has another shape is trouble."""
    found: Reply | None = None
    ok = (Outcome.SUCCESS, "OK")
    match answer:
        case (int(sequence), (status, held)):  # of one user, out of protocol.Held
            balances = {asset: Balance(available, frozen) for asset, available, frozen in held}
            found = BalancesReply(*ok, sequence, status=Status(status), balances=balances)
        case protocol.Noted(sequence=sequence):
            found = Reply(*ok, sequence)
        case protocol.Found(operation=(sequence, user, asset, amount, other, code)):
            found = QueryReply(outcome_of(code), code_name(code), sequence, "", user, asset, amount, other)
        case protocol.Found():
            found = QueryReply(Outcome.UNKNOWN, "NOT_FOUND", detail="nothing is on record; it may be on its way")
        case protocol.Summed(sequence=sequence, totals=totals):
            found = TotalsReply(*ok, sequence, totals={asset: int(total) for asset, total in totals})
        case protocol.Listed(sequence=sequence, complete_to=complete_to, operations=operations):
            items = [
                OperationRow(at, Op(op), id_, user, asset, amount, code_name(code))
                for at, op, id_, user, asset, amount, code in operations
            ]
            found = OperationsReply(*ok, sequence, items=items, complete_to=complete_to)
        case protocol.Described(_, sequence, core, ledger, room, forget, highest, remembered, accounts):
            floors = Floors(room, forget)
            found = DescribeReply(*ok, sequence, "", core, ledger, floors, highest, remembered, accounts)
    return found if type(found) is shape else trouble_of(answer, shape)
