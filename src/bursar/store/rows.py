"""Rows and records: how each table's rows read and are written, the same for both dialects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from bursar.model.accounts import Account, Book
from bursar.model.envelope import Envelope, decode_legs, decode_pins, encode_ids, encode_legs, encode_pins
from bursar.model.errors import InvalidName
from bursar.model.money import Asset
from bursar.model.outcome import Outcome
from bursar.model.postings import Posting
from bursar.model.records import HoldRow, OperationResult, Record, StoredEnvelope, Transition
from bursar.store.columns import Row, reader

asset_of = reader("asset", Asset)
book_of = reader("book", Book)
_account_of = reader("account", Account)
envelope_of = reader("envelope", StoredEnvelope)
record_of = reader("record", Record)
transition_of = reader("transition", Transition)


def account_of(row: Row) -> Account:
    """A row that begins with the columns of an account."""
    return _account(*row[:6])


# A version of an account never changes: what was worked out of it once (its hash, its bytes) is good for all readers.
@lru_cache(maxsize=16_384)
def _account(*row: Any) -> Account:
    return _account_of(row)


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
