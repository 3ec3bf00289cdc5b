"""What the store returns: rows as plain records, decoded but not judged."""

from __future__ import annotations

from enum import IntEnum

import msgspec

from bursar.model.accounts import Account
from bursar.model.entries import EntryKind, HoldState
from bursar.model.outcome import Outcome
from bursar.model.postings import Posting, PostingState


class EventKind(IntEnum):
    """What happened."""

    COMMITTED = 1  # subject: envelope
    ACCOUNT_CREATED = 2  # subject: account
    ACCOUNT_CHANGED = 3  # subject: account, with its new version
    ASSET_CREATED = 4  # subject: asset
    ASSET_CHANGED = 5  # subject: asset; version is the rules' generation
    BOOK_CREATED = 6  # subject: book


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One row of the outbox. Feed `cursor` back to go on after it."""

    cursor: str
    kind: EventKind
    subject: int
    version: int
    name: str = ""  # of the account, asset or book; an envelope has none but its number


class StoredEnvelope(msgspec.Struct, frozen=True, kw_only=True):
    """An envelope as its row says, legs and pins still encoded."""

    seq: int
    id: bytes
    scope: str
    key: str
    book: int
    kind: EntryKind
    reverses: int
    legs: bytes
    pins: bytes
    consumes: bytes
    metadata: str
    at_us: int


class ExistingEntry(msgspec.Struct, frozen=True, gc=False):
    """What a key already stands for."""

    seq: int
    id: bytes
    book: int
    legs: bytes


class StoredPosting(msgspec.Struct, frozen=True, kw_only=True):
    """A posting with its place in the lifecycle."""

    posting: Posting
    state: PostingState
    reservation: str | None = None
    spender: int | None = None  # the envelope that spent it


class StoredVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an account and when it was written."""

    account: Account
    at_us: int


class HoldRow(msgspec.Struct, frozen=True, kw_only=True):
    """A hold by row numbers."""

    id: int
    account: int
    asset: int
    amount: int
    remaining: int
    posting: int
    state: HoldState
    owner: str = ""
    expires_us: int | None = None
    lasts_us: int | None = None


class OperationResult(msgspec.Struct, frozen=True, kw_only=True):
    """The stored answer to an operation (an idempotency record)."""

    fingerprint: str
    outcome: Outcome
    code: str = ""  # of a refusal
    detail: str = "{}"  # JSON
    replayed: bool = False  # True: it was answered before, nothing happened now


def owner_name(flow: str, id: str) -> str:
    """How a hold names the record that it belongs to."""
    return f"{flow}/{id}"


class Priority(IntEnum):
    """Which of the records that are due is taken first. Stored as its number."""

    HIGH = 0
    NORMAL = 1
    LOW = 2


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A row that a flow drives. `body` is the flow's own, as JSON."""

    number: int
    flow: str
    id: str
    owner: str
    state: str
    version: int
    attempt: int
    in_flight_posting: int
    due_us: int | None
    worker: str
    body: str
    error: str
    since_us: int  # when it came into its state
    created_us: int
    updated_us: int
    timer_us: int | None = None  # when it leaves its waiting state by itself
    priority: Priority = Priority.NORMAL
    inbox: int = 0  # signals that no transition has consumed


class Signal(msgspec.Struct, frozen=True):
    """An event that a record was sent. `sender` is the sender's id of it: sent again, it is the same signal."""

    record: int
    sender: str
    event: str
    actor: str
    evidence: str  # JSON
    arrived: int  # the record's version with which it arrived
    consumed: int | None = None  # the version of the transition that consumed it
    at_us: int = 0


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One row of a record's history."""

    record: int
    version: int
    source: str
    event: str
    target: str
    attempt: int
    actor: str
    evidence: str  # JSON
    at_us: int


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """An alert for operators."""

    record: int  # 0: the system as a whole
    reason: str
    severity: str
    message: str
    raised_us: int
    delivered_us: int | None
    acknowledged_us: int | None
    acknowledged_by: str


class Pause(msgspec.Struct, frozen=True, kw_only=True):
    """A flow or a rail that is switched off."""

    kind: str
    name: str
    actor: str
    reason: str
    at_us: int
    two_people: bool = False  # whether two people are needed to lift it (T47)
    proposed_by: str = ""  # the first of them; "": no proposal yet
    proposed_reason: str = ""
    age_us: int = 0  # since it was set, by the database's clock


class OperatorAction(msgspec.Struct, frozen=True, kw_only=True):
    """One action of an operator."""

    number: int
    action: str
    kind: str
    name: str
    actor: str
    reason: str
    proposed_by: str  # the first of two people, where two were needed
    at_us: int


class ForcedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A call whose outcome two operators forced; its rail is queried until it says what happened (T34)."""

    record: int
    version: int  # of the record while it was calling
    state: str
    attempt: int
    said: str
