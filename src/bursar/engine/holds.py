"""Holds that a record owns: money set aside in its first transaction, and settled by its own moves alone (W34). Pure.

    book_start=lambda item: authorize(item, held(item))
    book=lambda item, event, answer: confirm(item, held(item), ("external:bank", net), ("fees", fee))

Each returns a `Booking` for the arrow that is being taken. The record keeps the number of the posting that is held, as
it keeps one in transit, so a move that lost its compare-and-set settles nothing; and every other caller gets
`HoldOwned`. Such a hold never expires, and a freeze of its account does not stop it: its record tells of what has
happened outside already (L21, T35).
"""

from __future__ import annotations

from typing import Any

import msgspec

from bursar.engine.flow import Booking, FlowRecord
from bursar.model.accounts import HELD, MAIN_BOOK
from bursar.model.entries import EntryKind, HoldChange, HoldState, Intent, Leg
from bursar.model.errors import InvalidEntry
from bursar.model.postings import INDEX_BITS
from bursar.model.records import owner_name


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """A hold as its flow knows it from the record's body."""

    account: str
    asset: str
    amount: int  # smallest units, all that was set aside
    remaining: int | None = None  # None: all of it still
    number: int = 0  # of the hold; 0: no part of it was paid yet, so the posting tells
    book: str = MAIN_BOOK  # the account's


def authorize(item: FlowRecord[Any], held: Held) -> Booking:
    """Set the money aside: what a record starts with, or an arrow that leads to where it is needed."""
    legs = (Leg(held.account, HELD, held.asset, held.amount),)
    return Booking(
        (_intent(item, held, "hold", legs, EntryKind.ENTRY, held.amount, HoldState.OPEN),), in_flight_account=HELD
    )


def confirm(item: FlowRecord[Any], held: Held, *paid: tuple[str, int], op: str = "confirm") -> Booking:
    """Pay from it, to one or several accounts. What is not paid stays held; `op` names each part of several."""
    legs = tuple([Leg(HELD, target, held.asset, amount) for target, amount in paid])
    rest = _remaining(held) - sum(amount for _, amount in paid)
    if rest < 0:
        raise InvalidEntry(f"it pays more than the {_remaining(held)} smallest units that {item.id} holds")
    state = HoldState.OPEN if rest else HoldState.CONFIRMED
    intents = (_intent(item, held, op, legs, EntryKind.ENTRY, rest, state),)
    return Booking(intents, in_flight_account=HELD) if rest else Booking(intents, clears_in_flight=True)


def void(item: FlowRecord[Any], held: Held) -> Booking:
    """Give back what remains of it."""
    legs = (Leg(HELD, held.account, held.asset, _remaining(held)),)
    return Booking((_intent(item, held, "void", legs, EntryKind.RETURN, 0, HoldState.VOIDED),), clears_in_flight=True)


def number_of(item: FlowRecord[Any]) -> int:
    """The number of the hold, as long as no part of it was paid: a flow that pays in parts keeps it in its body."""
    return item.record.in_flight_posting >> INDEX_BITS


def _remaining(held: Held) -> int:
    return held.amount if held.remaining is None else held.remaining


def _intent(
    item: FlowRecord[Any], held: Held, op: str, legs: tuple[Leg, ...], kind: EntryKind, rest: int, state: HoldState
) -> Intent:
    record = item.record
    is_new = op == "hold"
    return Intent(
        scope=record.flow,
        key=f"{record.id}:{op}",
        legs=legs,
        kind=kind,
        book=held.book,
        consume=() if is_new else (record.in_flight_posting,),
        outside=not is_new,  # what it pays, or gives back, has happened outside already (T35)
        hold=HoldChange(
            id=0 if is_new else held.number or number_of(item),
            account=held.account,
            asset=held.asset,
            amount=held.amount,
            remaining=rest,
            state=state,
            owner=owner_name(record.flow, record.id),
            posting=record.in_flight_posting,
        ),
    )
