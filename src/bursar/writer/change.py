"""A change: what one caller wants to happen, all of it or nothing.

The ledger brings entries. The engine brings moves of records, with the entries that accompany them; rails that live in
this database bring an operation to be remembered; whoever starts a record brings the limits it counts against.
"""

from __future__ import annotations

import msgspec

from bursar.model.entries import Intent
from bursar.model.envelope import Receipt
from bursar.model.outcome import Outcome
from bursar.model.records import Remembered

KEEP_DUE = -1  # as a move's delay: due when it was


class Passage(msgspec.Struct, frozen=True, gc=False):
    """One arrow taken, or a call whose answer is not known: one row of a record's history."""

    source: str  # "" for the first
    event: str
    target: str
    evidence: str = "{}"  # JSON


class Move(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A record's compare-and-set with its passages. Version 0 makes the record."""

    flow: str
    id: str
    number: int = 0  # of an existing record
    version: int  # passages so far, as the mover has seen it
    passages: tuple[Passage, ...]
    actor: str
    attempt: int = 0
    delay_us: int | None  # from now until somebody should look at it; None: not before somebody speaks
    worker: str = ""  # who drives it until then
    body: str | None = None  # JSON; None: as it was
    error: str = ""
    owner: str = ""  # of a new record
    transit: int = 0  # the posting in transit that belongs to it from now on
    keeps: str = ""  # instead: the account in which an entry of this change makes that posting


class Remember(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """An operation that is answered once and for all.

    If its entries are refused for a reason on its list, that refusal is the answer and is remembered too; any other
    trouble is not an answer, and nothing is remembered.
    """

    scope: str
    id: str
    op: str
    fingerprint: str  # of the request
    refusals: frozenset[str] = frozenset()
    outcome: Outcome = Outcome.SUCCESS  # remembered if nothing is refused; a tombstone says EXPLICIT_FAIL (T34)
    code: str = ""  # of a tombstone
    detail: str = "{}"  # JSON, remembered with that
    keeps: str = ""  # the account whose new posting is remembered with that, as `posting`


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
    remember: Remember | None = None
    limits: tuple[Limit, ...] = ()
    operations: tuple[Remember, ...] = ()  # that happen with it; refused if one of them was answered before
    active: tuple[str, ...] = ()  # accounts that must be there and active, although nothing of theirs moves
    high_water: tuple[str, str, int] | None = None  # rail, worker, sequence of the rail's log that it relies on (T33)

    @property
    def plain(self) -> bool:
        """Whether it is the ledger's alone."""
        return not (self.moves or self.limits or self.operations) and self.remember is None


class Done(msgspec.Struct, frozen=True, gc=False):
    """What became of a change that was not refused."""

    receipts: tuple[Receipt, ...] = ()
    records: tuple[int, ...] = ()  # numbers of the records moved or made
    postings: tuple[int, ...] = ()  # the postings in transit that those own now, 0 for none
    remembered: Remembered | None = None  # the answer to its operation, now or long ago
