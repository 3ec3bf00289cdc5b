"""Rows of a flow's own: what must be unique, counted, reserved or listed beside a record, in the record's transaction.

A flow returns operations (`Claim`, `Release`, `Next`, `Reserve`, `GiveBack`, `Put`) with an arrow, and the engine
writes their rows with the record's move: both happen, or neither. All rows live in one table under
`(flow, kind, key)`, so a flow needs no migration and no SQL.

    NONCE = RowKind("nonce", Form.SEQUENCE)         # a nonce that was taken is never free again
    Next(NONCE, "bsc/0xabc", body={"payout": id})   # takes 17: makes the row "bsc/0xabc/00000000000000000017"

`apply` decides what an operation does to the rows, with plain values. Not here: which rows are read and written
(writer/records), how a record's rows are found (store/flow_rows).
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from bursar.model.entries import check_text
from bursar.model.errors import InvalidEntry, Refusal
from bursar.model.money import MINOR_MAX

NUMBER_DIGITS = 20  # of a number in a key: padded, so that keys sort as their numbers do
NUMBER_MAX = 10**18
KEY_LENGTH_MAX = 256  # room for a wallet and a record, or for a transaction's hash
BODY_LENGTH_MAX = 65_536

RowKey = tuple[str, str, str]  # flow, kind, key


class RowRefusal(Refusal):
    """What an operation wants of a row can't be."""

    flow: str
    kind: str
    key: str


class RowTaken(RowRefusal):
    """Another record has this value, or had it and the kind is permanent."""

    record: int  # number of the record that has it
    code = "ROW_TAKEN"
    text = "{kind} {key!r} of {flow} belongs to record {record} already"


class RowMoved(RowRefusal):
    """The row is not at the version that the change was based on."""

    expected: int
    found: int
    code = "ROW_MOVED"
    text = "{kind} {key!r} of {flow} is at version {found}, not {expected}; read it again"


class RowNotOwned(RowRefusal):
    """The row is not one that this record may change."""

    why: str
    code = "ROW_NOT_OWNED"
    text = "{kind} {key!r} of {flow} can't be changed: {why}"


class BoundExceeded(RowRefusal):
    """So much can't be reserved."""

    reserved: int
    amount: int
    bound: int
    code = "BOUND_EXCEEDED"
    text = "{amount} more of {kind} {key!r} of {flow} is over its bound of {bound}: {reserved} are reserved"


class Form(StrEnum):
    """What the rows of a kind are for. One form per kind, so that no two operations mean different rows by one key."""

    UNIQUE = "unique"  # values, each of one record: `Claim`, `Release`
    SEQUENCE = "sequence"  # numbers, each of one record: `Next`
    AMOUNT = "amount"  # amounts reserved under a bound: `Reserve`, `GiveBack`
    VALUE = "value"  # cursors, and lists per record: `Put`


class RowKind(msgspec.Struct, frozen=True):
    """A kind of row, declared by its flow.

    A unique value of a permanent kind is never another record's, also after its record has ended. Numbers are always
    permanent, reserved amounts never are.
    """

    name: str
    form: Form
    releasable: bool = False

    @property
    def permanent(self) -> bool:
        """Whether what a record has of it stays that record's."""
        return self.form is Form.SEQUENCE or (self.form is Form.UNIQUE and not self.releasable)


class RowState(StrEnum):
    """What a row is."""

    HELD = "held"  # a value, a number or a reserved amount that a record has
    RELEASED = "released"  # one that no record has any more, and another may claim
    VALUE = "value"  # a cursor, or an item of a record's list
    SEQUENCE = "sequence"  # the next number to be taken is its amount
    TOTAL = "total"  # the sum of the reserved amounts under its key


class FlowRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row."""

    flow: str
    kind: str
    key: str
    record: int  # number of the record that has it; 0: the flow's own
    state: RowState
    amount: int
    version: int  # counts from 1
    permanent: bool
    body: str  # JSON

    @property
    def row_key(self) -> RowKey:
        """What makes it unique."""
        return self.flow, self.kind, self.key


class Claim(msgspec.Struct, frozen=True):
    """Take a unique value: refused with `RowTaken` if a record has it, or if the kind is permanent and one had it."""

    kind: RowKind
    key: str
    body: dict[str, Any] = {}


class Release(msgspec.Struct, frozen=True):
    """Give up a value that this record has claimed, of a kind that is releasable."""

    kind: RowKind
    key: str


class Next(msgspec.Struct, frozen=True):
    """Take the next number of a sequence: the row `numbered(key, number)` is this record's from now on.

    The first number is `at_least`, and later ones are not below it either: a number that was used elsewhere is skipped.
    `exact`: that number and no other, refused with `RowMoved` if it is not the next one.
    """

    kind: RowKind
    key: str
    at_least: int = 0
    body: dict[str, Any] = {}
    exact: bool = False


class Reserve(msgspec.Struct, frozen=True):
    """Reserve an amount under a key, as long as all that is reserved there stays within a bound. Once per record."""

    kind: RowKind
    key: str
    amount: int
    bound: int


class GiveBack(msgspec.Struct, frozen=True):
    """Give back all that this record has reserved under a key."""

    kind: RowKind
    key: str


class Put(msgspec.Struct, frozen=True):
    """Write a cursor or an item of a list, by compare-and-set: version 0 makes it.

    An item is its record's alone. What is `shared` belongs to the flow, and any of its records may move it on.
    """

    kind: RowKind
    key: str
    version: int
    body: dict[str, Any] = {}
    amount: int = 0
    shared: bool = False


RowOperation = Claim | Release | Next | Reserve | GiveBack | Put
FORMS: dict[type[RowOperation], Form] = {
    Claim: Form.UNIQUE,
    Release: Form.UNIQUE,
    Next: Form.SEQUENCE,
    Reserve: Form.AMOUNT,
    GiveBack: Form.AMOUNT,
    Put: Form.VALUE,
}
# What the row at an operation's own key begins as.
FIRST_STATES: dict[Form, RowState] = {
    Form.UNIQUE: RowState.HELD,
    Form.SEQUENCE: RowState.SEQUENCE,
    Form.AMOUNT: RowState.TOTAL,
    Form.VALUE: RowState.VALUE,
}
Find = Callable[[RowKey], "FlowRow | None"]


def numbered(key: str, number: int) -> str:
    """The key of one number of a sequence."""
    return f"{key}/{number:0{NUMBER_DIGITS}}"


def number_of(row: FlowRow) -> int:
    """The number that a row of a sequence stands for."""
    return int(row.key.rpartition("/")[2])


def keys_read(flow: str, id_: str, operation: RowOperation) -> list[RowKey]:
    """The rows that decide what an operation does, as far as they are known before: those of new numbers are not."""
    base = (flow, operation.kind.name, operation.key)
    if isinstance(operation, Reserve | GiveBack):
        return [base, (*base[:2], f"{operation.key}/{id_}")]
    return [base]


def apply(flow: str, id_: str, record: int, operation: RowOperation, find: Find) -> list[FlowRow]:
    """The rows as an operation of this record leaves them. Raises why not, and then nothing changes."""
    kind = operation.kind
    if kind.form is not FORMS[type(operation)]:
        raise InvalidEntry(f"{type(operation).__name__} is not for {kind.name} of {flow}, which is a {kind.form}")
    _check_key(operation.key)
    name = (flow, kind.name, operation.key)
    row = find(name)

    def written(old: FlowRow | None, **fields: Any) -> FlowRow:
        """The next version of a row that is there, or its first: the flow's own, unless `fields` say whose."""
        if old is not None:
            return msgspec.structs.replace(old, version=old.version + 1, **fields)
        first = {"flow": flow, "kind": kind.name, "key": operation.key, "record": 0, "state": FIRST_STATES[kind.form]}
        return FlowRow(**{**first, "amount": 0, "version": 1, "permanent": kind.permanent, "body": "{}", **fields})

    match operation:
        case Claim(body=body):
            if row is not None and row.state is not RowState.RELEASED:
                raise RowTaken(*name, row.record)
            return [written(row, state=RowState.HELD, record=record, body=_text(body))]
        case Release():
            return [written(_own(row, name, record), state=RowState.RELEASED)]
        case Next(at_least=at_least, body=body, exact=exact):
            if not 0 <= at_least <= NUMBER_MAX:
                raise InvalidEntry(f"a sequence can't go on at {at_least}")
            number = at_least if row is None else max(at_least, row.amount)
            if exact and number != at_least:
                raise RowMoved(*name, at_least, number)
            key = _check_key(numbered(operation.key, number))
            taken = written(None, state=RowState.HELD, record=record, key=key, amount=number, body=_text(body))
            return [written(row, amount=number + 1), taken]
        case Reserve(amount=amount, bound=bound):
            if not 0 < amount <= MINOR_MAX:
                raise InvalidEntry(f"{amount} can't be reserved")
            key = _check_key(f"{operation.key}/{id_}")
            own = find((flow, kind.name, key))
            if own is not None and own.state is not RowState.RELEASED:
                raise RowTaken(flow, kind.name, key, own.record)
            reserved = 0 if row is None else row.amount
            if reserved + amount > bound:
                raise BoundExceeded(*name, reserved, amount, bound)
            total = written(row, amount=_amount(reserved + amount))
            return [total, written(own, state=RowState.HELD, record=record, key=key, amount=amount)]
        case GiveBack():
            held = _own(find((flow, kind.name, f"{operation.key}/{id_}")), name, record)
            if row is None or row.amount < held.amount:
                raise RowNotOwned(*name, f"less than {held.amount} is reserved there")
            total = written(row, amount=row.amount - held.amount)
            return [total, written(held, state=RowState.RELEASED, amount=0)]
        case Put(version=version, body=body, amount=amount, shared=shared):
            found = 0 if row is None else row.version
            if found != version:
                raise RowMoved(*name, version, found)
            owner = 0 if shared else record
            if row is not None and row.record != owner:
                raise RowNotOwned(*name, f"it belongs to record {row.record}")
            return [written(row, record=owner, amount=_amount(amount), body=_text(body))]


def _own(row: FlowRow | None, name: RowKey, record: int) -> FlowRow:
    """The row, if it is this record's to give up; `name` is what a refusal says."""
    if row is None or row.state is not RowState.HELD:
        raise RowNotOwned(*name, "no record has it")
    if row.record != record:
        raise RowNotOwned(*name, f"it belongs to record {row.record}")
    if row.permanent:
        raise RowNotOwned(*name, "its kind is permanent")
    return row


def _amount(amount: int) -> int:
    if not -MINOR_MAX <= amount <= MINOR_MAX:
        raise InvalidEntry(f"{amount} does not fit a row: amounts stay below 2^127")
    return amount


def _check_key(key: str) -> str:
    return check_text("key of a row", key, KEY_LENGTH_MAX)


def _text(body: dict[str, Any]) -> str:
    try:
        text = msgspec.json.encode(body).decode()
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidEntry(f"the body of a row can't be written as JSON: {error}") from None
    if len(text) > BODY_LENGTH_MAX or "\\u0000" in text:
        raise InvalidEntry(f"the body of a row is longer than {BODY_LENGTH_MAX}, or has a NUL in a text")
    return text
