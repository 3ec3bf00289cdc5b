"""Errors: everything a caller may get, with its facts in fields.

Three families, because callers do three different things with them:

- `Refusal`: a definite no. Nothing was written; the same request will be refused again until something changes.
- `Conflict`: other transactions were faster, too often. Nothing was written; the same request may be tried again.
- `StoreError`: the database is newer, older, read-only, locked, gone or full; `OutcomeUnknown` names the key to ask by.

`code` is stable and machine-readable; `str(error)` is one line a person can act on; `facts` is what `--json` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, ClassVar, dataclass_transform


@dataclass_transform(eq_default=False)
@dataclass(eq=False, repr=False)
class BursarError(Exception):
    """The root of all errors that Bursar raises on purpose. Every subclass is a dataclass: its fields are the facts."""

    code: ClassVar[str] = "ERROR"
    text: ClassVar[str] = "something went wrong"

    def __init_subclass__(cls) -> None:
        # One __repr__ serves all. Making one for each was a fifteenth of the time that every command takes to start.
        dataclass(eq=False, repr=False)(cls)

    def __repr__(self) -> str:
        return f"{type(self).__qualname__}({', '.join(f'{f.name}={getattr(self, f.name)!r}' for f in fields(self))})"

    def __str__(self) -> str:
        said = self.text.format(**{f.name: getattr(self, f.name) for f in fields(self)})
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in said)  # or no log could print it

    @property
    def facts(self) -> dict[str, Any]:
        """The error as plain values, for programs."""
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | bool | None) else str(value)


class Refusal(BursarError):
    """A definite no; nothing was written."""


# --- what the caller wrote -------------------------------------------------------------------------------------


class InvalidAmount(Refusal):
    """The amount is not a plain decimal number, or not of a kind that is unambiguous."""

    value: str
    why: str
    code = "INVALID_AMOUNT"
    text = "{value!r} is not an amount: {why}"


class PrecisionOverflow(Refusal):
    """More decimals than the asset has. Never truncated."""

    value: str
    asset: str
    precision: int
    code = "PRECISION_OVERFLOW"
    text = "{value} has more decimals than {asset} allows ({precision})"


class AmountTooLarge(Refusal):
    """Outside ±2^127 smallest units."""

    value: str
    asset: str
    code = "AMOUNT_TOO_LARGE"
    text = "{value} {asset} does not fit: amounts stay below 2^127 smallest units"


class InvalidName(Refusal):
    """An account path, asset code, book name, key or scope is malformed."""

    what: str
    value: str
    why: str
    code = "INVALID_NAME"
    text = "{value!r} is not a valid {what}: {why}"


class InvalidEntry(Refusal):
    """The entry itself makes no sense, whatever the state of the ledger."""

    why: str
    code = "INVALID_ENTRY"
    text = "the entry is refused: {why}"


class SelfMovement(Refusal):
    """From and to are the same account: nothing would move."""

    account: str
    code = "SAME_ACCOUNT"
    text = "a movement from {account} to itself moves nothing"


class TooManyPostings(Refusal):
    """One envelope can't list that many postings."""

    account: str
    count: int
    limit: int
    code = "TOO_MANY_POSTINGS"
    text = "at most {limit} postings, not {count} or more: `bursar account compact {account}`, or pay in smaller parts"


class KeyReused(Refusal):
    """The idempotency key already stands for another intent."""

    scope: str
    key: str
    envelope: int  # 0: none was written, the key is used twice in what is refused here
    code = "DUPLICATE_REQUEST"
    text = "key {key!r} was used for a different entry (envelope {envelope}); use a new key for a new intent"

    def __str__(self) -> str:
        if self.envelope:
            return super().__str__()
        return f"key {self.key!r} is used for two different entries of one request; nothing was written"


# --- what is not there, or there already --------------------------------------------------------------------


class UnknownAsset(Refusal):
    """No such asset."""

    asset: str
    code = "INVALID_ASSET"
    text = "asset {asset} does not exist; create it with `bursar asset create {asset} --precision N`"


class UnknownAccount(Refusal):
    """No such account."""

    account: str
    code = "ACCOUNT_NOT_FOUND"
    text = "account {account} does not exist; create it with `bursar account create {account}`"


class UnknownBook(Refusal):
    """No such book."""

    book: str
    code = "BOOK_NOT_FOUND"
    text = "book {book} does not exist"


class UnknownEnvelope(Refusal):
    """No such envelope."""

    envelope: str
    code = "ENVELOPE_NOT_FOUND"
    text = "envelope {envelope} does not exist"


class UnknownHold(Refusal):
    """No such hold."""

    hold: int
    code = "HOLD_NOT_FOUND"
    text = "hold {hold} does not exist"


class AlreadyExists(Refusal):
    """Something of that name exists with other properties."""

    what: str
    name: str
    why: str  # what is different, and what to do instead
    code = "ALREADY_EXISTS"
    text = "{what} {name} already exists with other properties: {why}"


# --- what the rules forbid -----------------------------------------------------------------------------------


class AssetSuspended(Refusal):
    """The asset is suspended; only returns move it."""

    asset: str
    code = "ASSET_SUSPENDED"
    text = "asset {asset} is suspended"


class AccountFrozen(Refusal):
    """A frozen account neither pays nor is paid."""

    account: str
    code = "ACCOUNT_FROZEN"
    text = "account {account} is frozen; unfreeze it with `bursar account unfreeze {account}`"


class AccountClosed(Refusal):
    """A closed account never moves again."""

    account: str
    code = "ACCOUNT_CLOSED"
    text = "account {account} is closed"


class AccountNotEmpty(Refusal):
    """Only an account without value, holds or unfinished entries can close (or lose its overdraft)."""

    account: str
    why: str
    code = "ACCOUNT_NOT_EMPTY"
    text = "account {account} can't do that: {why}"


class BookRefuses(Refusal):
    """The book does not admit the asset or the account."""

    book: str
    what: str
    name: str
    code = "BOOK_REFUSES"
    text = "book {book} does not admit {what} {name}"


class StalePin(Refusal):
    """The account changed since the caller looked (AccountVersionMismatch in specification 004)."""

    account: str
    code = "ACCOUNT_VERSION_MISMATCH"
    text = "account {account} has changed since it was pinned; read it again"


class PostingNotLive(Refusal):
    """A posting named by id is spent, reserved or was never there."""

    posting: int
    code = "POSTING_NOT_LIVE"
    text = "posting {posting} can't be spent: it is not live"


class DuplicateConsume(Refusal):
    """The same posting is listed twice."""

    posting: int
    code = "DUPLICATE_CONSUME"
    text = "posting {posting} is listed twice"


class NegativePosting(Refusal):
    """Only overdraft, system and external accounts may own a negative posting."""

    account: str
    code = "NEGATIVE_POSTING"
    text = "account {account} may not go negative"


class ConservationBroken(Refusal):
    """What is consumed is not what is created. Never the caller's fault: the plan is wrong and is refused."""

    asset: str
    consumed: int
    created: int
    code = "CONSERVATION_BROKEN"
    text = "{asset}: consumed {consumed} but created {created} smallest units"


class InsufficientFunds(Refusal):
    """Not enough to pay."""

    account: str
    asset: str
    needed: str
    available: str
    code = "INSUFFICIENT_BALANCE"
    text = "{account} has {available} {asset} available, {needed} needed"


class BalanceNotGuarded(Refusal):
    """An account whose overdraft has no limit can't pay what must be covered by its balance: nothing guards that."""

    account: str
    code = "BALANCE_NOT_GUARDED"
    text = "nothing guards the balance of {account}: its overdraft has no limit; give it a policy with a floor, or none"


class FloorExceeded(Refusal):
    """The overdraft would go below its floor."""

    account: str
    asset: str
    floor: str
    balance: str
    needed: str
    code = "OVERDRAFT_FLOOR"
    text = "{account} stands at {balance} {asset} and may not go below {floor}; {needed} needed"


class UnknownFlow(Refusal):
    """There is no such flow here."""

    flow: str
    known: str
    code = "FLOW_NOT_FOUND"
    text = "there is no flow {flow}; known here: {known}"


class UnknownRecord(Refusal):
    """There is no such record."""

    flow: str
    id: str
    code = "RECORD_NOT_FOUND"
    text = "{flow} has no record {id}"


class InvalidState(Refusal):
    """The state of the record, or of what is paused, does not allow that."""

    flow: str
    id: str
    state: str
    why: str
    code = "INVALID_STATE"
    text = "{flow} {id} is {state}: {why}"


class RecordMoved(Refusal):
    """Another transaction has moved the record, or made it."""

    flow: str
    id: str
    version: int
    code = "RECORD_MOVED"
    text = "record {id} of {flow} is no longer at version {version}; read it again"


class IdempotencyKeyReused(Refusal):
    """The operation was asked for before, with other parameters."""

    scope: str
    id: str
    op: str
    code = "IDEMPOTENCY_KEY_REUSED"
    text = "{op} of {id} was asked for before with other parameters"


class OperationAnswered(Refusal):
    """The operation was answered before, so it can't be part of a new change: ask for it by itself."""

    scope: str
    id: str
    op: str
    code = "OPERATION_ANSWERED"
    text = "{op} of {id} was answered before"


class LimitExceeded(Refusal):
    """A limit would be exceeded."""

    limit: str
    name: str  # its code, such as RATE_LIMITED
    code = "LIMIT_EXCEEDED"
    text = "limit {limit} is used up"


class HoldClosed(Refusal):
    """The hold was confirmed, voided or expired already."""

    hold: int
    state: str
    code = "HOLD_CLOSED"
    text = "hold {hold} is {state}"


class HoldOwned(Refusal):
    """The hold belongs to a record, and only that record's own moves confirm or void it."""

    hold: int
    owner: str
    code = "HOLD_OWNED"
    text = "hold {hold} belongs to {owner}, and only that record's own moves settle it; act on the record instead"


class HoldTooSmall(Refusal):
    """More was confirmed than is held."""

    hold: int
    remaining: str
    needed: str
    code = "HOLD_TOO_SMALL"
    text = "hold {hold} has {remaining} left, {needed} needed"


# --- contention and the store -----------------------------------------------------------------------------------


class Conflict(BursarError):
    """Other transactions were faster, too often. Nothing was written; try again with the same key."""

    what: str
    tries: int
    code = "CONFLICT"
    text = "gave up after {tries} tries: {what}; nothing was written, try again with the same key"


class StoreError(BursarError):
    """The database can't do what was asked."""


class DatabaseNewer(StoreError):
    """A newer program has migrated this database past what we can read."""

    have: int
    need: int
    code = "DATABASE_NEWER"
    text = "the database is at schema {have}, this program knows {need}: upgrade bursar"


class DatabaseOlder(StoreError):
    """The database lacks migrations."""

    have: int
    need: int
    code = "DATABASE_OLDER"
    text = "the database is at schema {have}, this program needs {need}: run `bursar migrate`"


class DatabaseUnavailable(StoreError):
    """Gone, locked, read-only, full, or not ours to touch; `why` says which."""

    why: str
    code = "DATABASE_UNAVAILABLE"
    text = "the database can't be used: {why}"


class DatabaseReadOnly(DatabaseUnavailable):
    """It answers, and takes no writes: a replica, or set so; for SQLite, a file that we may not write."""

    code = "DATABASE_READ_ONLY"


class OutcomeUnknown(StoreError):
    """The connection broke while committing, and stayed broken. The key tells, later, what happened."""

    keys: str
    why: str
    code = "OUTCOME_UNKNOWN"
    text = "the database went away while committing ({why}); repeat with the same key to learn the outcome: {keys}"


class DatabaseCorrupt(StoreError):
    """A row can't be what we wrote."""

    what: str
    why: str
    code = "DATABASE_CORRUPT"
    text = "{what} can't be read ({why}); run `bursar audit` and restore from a backup if it confirms"
