"""What callers read: names instead of row numbers, Money instead of integers, and times as `datetime` in UTC."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from bursar.model.accounts import Account
from bursar.model.entries import EntryKind, HoldState
from bursar.model.errors import InvalidName
from bursar.model.money import Money
from bursar.model.postings import PostingState

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def moment(us: int) -> datetime:
    """Microseconds since 1970 as a time in UTC."""
    return EPOCH + timedelta(microseconds=us)


def microseconds(at: datetime) -> int:
    """A time as microseconds since 1970; a time without a zone is refused as ambiguous."""
    if not isinstance(at, datetime) or at.tzinfo is None:
        raise InvalidName("moment", str(at), "it has no time zone; say which, for example datetime(..., tzinfo=UTC)")
    return (at - EPOCH) // timedelta(microseconds=1)


class MovementView(msgspec.Struct, frozen=True, kw_only=True):
    """One movement of an envelope."""

    source: str
    target: str
    amount: Money


class PostingView(msgspec.Struct, frozen=True, kw_only=True):
    """One posting, and its place in the lifecycle."""

    id: int
    account: str
    amount: Money
    state: PostingState
    created_by: int
    spent_by: int | None


class EntryView(msgspec.Struct, frozen=True, kw_only=True):
    """What is shown of an envelope in any case."""

    envelope: int
    key: str
    kind: EntryKind
    reverses: int | None
    reversed_by: int | None
    at: datetime
    metadata: dict[str, Any]
    movements: tuple[MovementView, ...]


class EnvelopeView(EntryView, frozen=True, kw_only=True):
    """One envelope, whole."""

    id: str
    scope: str
    book: str
    consumes: tuple[PostingView, ...]
    creates: tuple[PostingView, ...]


class AccountVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One version of an account, and since when it counts."""

    account: Account
    at: datetime


class Hold(msgspec.Struct, frozen=True, kw_only=True):
    """Money set aside: authorized, not yet spent."""

    id: int
    account: str
    amount: Money
    remaining: Money
    state: HoldState
    owner: str  # the record that it belongs to, as flow/id; "": no record's
    expires: datetime | None


class HistoryLine(EntryView, frozen=True, kw_only=True):
    """One envelope as one account sees it."""

    changes: tuple[Money, ...]  # per asset: what the account gained or lost
