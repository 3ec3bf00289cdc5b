"""Rows and records: how each table's rows read and are written, the same for both engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import msgspec

from bursar.model.accounts import Account, AccountStatus, Book, decode_policy
from bursar.model.entries import Kind
from bursar.model.envelope import Envelope, decode_legs, decode_pins, encode_ids, encode_legs, encode_pins
from bursar.model.errors import DatabaseCorrupt, InvalidName
from bursar.model.money import Asset, AssetStatus
from bursar.model.outcome import Outcome
from bursar.model.postings import Posting
from bursar.model.records import HoldRow, OperationResult, Priority, Record, StoredEnvelope, Transition

Row = Sequence[Any]

_KINDS = frozenset(int(kind) for kind in Kind)
_names = msgspec.json.Decoder(tuple[str, ...])


def asset_of(row: Row) -> Asset:
    """A row of assets."""
    try:
        return Asset(
            id=row[0],
            code=row[1],
            precision=row[2],
            min_transfer=int(row[3]),
            max_transfer=int(row[4]),
            status=AssetStatus(row[5]),
            internal_transfer_enabled=bool(row[6]),
        )
    except (ValueError, TypeError) as error:
        raise DatabaseCorrupt(f"asset {row[1]}", str(error)) from error


def book_of(row: Row) -> Book:
    """A row of books."""
    try:
        return Book(id=row[0], name=row[1], assets=_names.decode(row[2]), accounts=_names.decode(row[3]))
    except msgspec.MsgspecError as error:
        raise DatabaseCorrupt(f"book {row[1]}", str(error)) from error


def account_of(row: Row) -> Account:
    """id, path, version, policy, status, book → Account."""
    return _account(*row[:6])


# A version of an account never changes: what was worked out of it once (its hash, its bytes) is good for all readers.
@lru_cache(maxsize=16_384)
def _account(id_: int, path: str, version: int, policy: str, status: str, book: str) -> Account:
    try:
        return Account(
            id=id_, path=path, version=version, policy=decode_policy(policy), status=AccountStatus(status), book=book
        )
    except (ValueError, msgspec.MsgspecError) as error:
        raise DatabaseCorrupt(f"account {path}, version {version},", str(error)) from error


def envelope_of(row: Row) -> StoredEnvelope:
    """A whole row of envelopes."""
    seq, id_, scope, key, book, kind, reverses, legs, pins, consumes, metadata, at_us = row
    if kind not in _KINDS:
        raise DatabaseCorrupt(f"envelope {seq}", f"its kind is {kind}")
    return StoredEnvelope(
        seq=seq,
        id=id_,
        scope=scope,
        key=key,
        book=book,
        kind=Kind(kind),
        reverses=reverses,
        legs=legs,
        pins=pins,
        consumes=consumes,
        metadata=metadata,
        at_us=at_us,
    )


def envelope_row(envelope: Envelope, id_: bytes) -> tuple[Any, ...]:
    """An envelope as it is written."""
    return (
        envelope.seq,
        id_,
        envelope.scope,
        envelope.key,
        envelope.book.id,
        int(envelope.kind),
        envelope.reverses,
        encode_legs(envelope.legs),
        encode_pins(envelope.accounts),
        encode_ids(envelope.consumes),
        envelope.metadata,
    )


def record_of(row: Row) -> Record:
    """A whole row of records."""
    number, flow, id_, owner, state, version, attempt, transit, due, worker, body, error, *more = row
    since, created, updated, timer, priority, inbox = more
    return Record(
        number=number,
        flow=text_of(flow),
        id=text_of(id_),
        owner=text_of(owner),
        state=text_of(state),
        version=version,
        attempt=attempt,
        in_flight_posting=transit,
        due_us=due,
        worker=text_of(worker),
        body=text_of(body),
        error=text_of(error),
        since_us=since,
        created_us=created,
        updated_us=updated,
        timer_us=timer,
        priority=Priority(priority),
        inbox=inbox,
    )


def text_of(stored: str | bytes) -> str:
    """Text that may have been broken behind our back: whoever reads on finds out, alone."""
    return stored if isinstance(stored, str) else stored.decode("utf-8", "replace")


def transition_of(row: Row) -> Transition:
    """A whole row of transitions."""
    record, version, source, event, target, attempt, actor, evidence, at_us = row
    return Transition(
        record=record,
        version=version,
        source=source,
        event=event,
        target=target,
        attempt=attempt,
        actor=actor,
        evidence=evidence,
        at_us=at_us,
    )


def operation_result_of(row: Row) -> OperationResult:
    """fingerprint, outcome, code, detail → OperationResult."""
    return OperationResult(fingerprint=row[0], outcome=Outcome(row[1]), code=row[2], detail=row[3])


def parse_cursor(cursor: str) -> tuple[int, int, int]:
    """A cursor's three numbers; "" is the beginning."""
    if cursor == "":
        return 0, 0, 0
    parts = cursor.split(".") if isinstance(cursor, str) else []
    if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 20 for p in parts):
        raise InvalidName("cursor", str(cursor), "use one that an event carried, or '' for the beginning")
    epoch, xid, seq = map(int, parts)
    if epoch >= 2**31 or max(xid, seq) >= 2**63:
        raise InvalidName("cursor", cursor, "its numbers are too large")
    return epoch, xid, seq


def hold_values(h: HoldRow, amount: Callable[[int], Any]) -> tuple[Any, ...]:
    """A hold as it is written."""
    amounts = (amount(h.amount), amount(h.remaining))
    return (h.id, h.account, h.asset, *amounts, h.posting, h.state.value, h.owner, h.expires_us, h.lasts_us)


def rebuild(
    stored: StoredEnvelope,
    accounts: Mapping[int, Account],
    assets: Mapping[int, Asset],
    books: Mapping[int, Book],
    consumes: tuple[Posting, ...],
    creates: tuple[Posting, ...],
) -> Envelope:
    """An envelope again from its row, the account versions it names, and its postings: what I8 hashes."""
    legs = decode_legs(stored.legs)
    used = dict.fromkeys([leg.asset for leg in legs] + [p.asset for p in (*consumes, *creates)])
    return Envelope(
        seq=stored.seq,
        scope=stored.scope,
        key=stored.key,
        book=books[stored.book],
        kind=stored.kind,
        reverses=stored.reverses,
        legs=legs,
        accounts=tuple(accounts[account] for account, _ in decode_pins(stored.pins)),
        assets=tuple(assets[asset] for asset in used),
        consumes=consumes,
        creates=creates,
        metadata=stored.metadata,
    )
