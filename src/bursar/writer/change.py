"""A change: what one caller wants to happen, all of it or nothing.

The ledger brings entries. The engine brings moves of records, with the entries that accompany them; rails that live in
this database bring an operation; the start of a record brings the limits it counts against.
"""

from __future__ import annotations

import msgspec

from bursar.model.entries import Intent
from bursar.model.envelope import Receipt
from bursar.model.flow_rows import RowOperation
from bursar.model.outcome import Outcome
from bursar.model.records import OperationResult, Priority, Signal

KEEP_DUE = -1  # as a move's delay: due when it was
NO_TIMER = 0  # as a move's timer


class NewTransition(msgspec.Struct, frozen=True, gc=False):
    """One arrow taken, or a call whose answer is not known: one new row of a record's history."""

    source: str  # "" for the first
    event: str
    target: str
    evidence: str = "{}"  # JSON


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record's compare-and-set with its transitions. Version 0 makes the record."""

    flow: str
    id: str
    number: int = 0  # of an existing record
    version: int  # transitions so far, as the mover has seen it
    transitions: tuple[NewTransition, ...]
    actor: str
    attempt: int = 0
    delay_us: int | None  # from now until it is due; None: not before it gets a signal
    worker: str = ""  # which drives it until then
    body: str | None = None  # JSON; None: as it was
    error: str = ""
    owner: str = ""  # of a new record
    in_flight_posting: int = 0  # the posting in transit that belongs to it from now on
    in_flight_account: str = ""  # instead: the account in which an entry of this change makes that posting
    rows: tuple[RowOperation, ...] = ()  # of the flow's own, written with it
    timer: int | None = None  # microseconds since 1970; negative: so many from now; 0: none; None: as it was
    priority: Priority = Priority.NORMAL  # of a new record
    inbox: int = 0  # by how much the number of signals changes that wait in its inbox
    signal: Signal | None = None  # that arrives with it, or that it consumes


class Operation(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An operation that is answered once and for all: its idempotency record.

    If its entries are refused for a reason on its list, that refusal is the answer and is stored too; any other error
    is not an answer, and nothing is stored.
    """

    scope: str
    id: str
    op: str
    fingerprint: str  # of the request
    refusals: frozenset[str] = frozenset()
    outcome: Outcome = Outcome.SUCCESS  # stored if nothing is refused; a tombstone says EXPLICIT_FAIL (T34)
    code: str = ""  # of a tombstone
    detail: str = "{}"  # JSON, stored with that
    in_flight_account: str = ""  # the account whose new posting is stored with that, as `posting`

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it unique."""
        return self.scope, self.id, self.op


class Limit(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """So much of a limit is used up by this change."""

    key: str  # what is limited, for whom, in which bucket of time
    count_max: int
    amount_max: int
    count: int = 1
    amount: int = 0
    until_us: int  # when the bucket ends
    code: str  # what a refusal is called


class Change(msgspec.Struct, frozen=True, gc=False):
    """All or nothing, for one caller."""

    intents: tuple[Intent, ...] = ()
    moves: tuple[Move, ...] = ()
    operation: Operation | None = None  # whose answer is the result, if it has one already
    limits: tuple[Limit, ...] = ()
    inline_operations: tuple[Operation, ...] = ()  # that happen with it; refused if one of them was answered before
    active: tuple[str, ...] = ()  # accounts that must be there and active, although nothing of theirs moves
    high_water: tuple[tuple[str, str, int], ...] = ()  # peer, writer, sequence of the peer's log it relies on (T33)

    @property
    def plain(self) -> bool:
        """Whether it is the ledger's alone."""
        return not (self.moves or self.limits or self.inline_operations) and self.operation is None


class ChangeResult(msgspec.Struct, frozen=True, gc=False):
    """The result of a change that was not refused."""

    receipts: tuple[Receipt, ...] = ()
    records: tuple[int, ...] = ()  # numbers of the records moved or made
    postings: tuple[int, ...] = ()  # the postings in transit that those own now, 0 for none
    operation: OperationResult | None = None  # the answer to its operation, now or long ago
