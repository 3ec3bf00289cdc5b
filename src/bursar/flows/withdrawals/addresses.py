"""The address book: where a user's withdrawals may go, and since when.

Each entry is a record of a flow of its own, `active` until it is removed. An address is in a user's book once, which a
row keeps. A policy counts its cooling period from `added_us`, by the database's clock. An address that is removed and
added again is new.

Not here: what an address that is new or not in the book means for a withdrawal (`risk`), who may act for a user (API).
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import msgspec

from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord
from bursar.flows.payouts.documents import ADDRESS_LENGTH_MAX, PART_LENGTH_MAX
from bursar.model.errors import Conflict, RecordMoved, Refusal, UnknownRecord
from bursar.model.flow_rows import (
    KEY_LENGTH_MAX,
    BoundExceeded,
    Claim,
    Form,
    GiveBack,
    Release,
    Reserve,
    RowKind,
    RowNotOwned,
    RowState,
    RowTaken,
)
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.records import Record
from bursar.rails.chain import Chain

PREFIX: Final = "ab-"
ACTIVE, REMOVED = "active", "removed"
REMOVE: Final = "REMOVE"
MACHINE: Final = Machine(
    name="withdrawal_addresses",
    initial=ACTIVE,
    events=(REMOVE,),
    states=(State(ACTIVE, Kind.WAIT, awaits="its user"), State(REMOVED, Kind.TERMINAL)),
    arrows=(Arrow(ACTIVE, REMOVE, REMOVED),),
)
ADDRESS: Final = RowKind("address", Form.UNIQUE, releasable=True)  # "user/chain/address": in the book once
COUNT: Final = RowKind("count", Form.AMOUNT)  # "user": how many addresses are in the book

ENTRIES_MAX = 200  # of a user
LABEL_LENGTH_MAX = 100
USER_LENGTH_MAX = KEY_LENGTH_MAX - PART_LENGTH_MAX - ADDRESS_LENGTH_MAX - 2
TRIES = 8  # to add an address that is being added or removed at the same moment


class AddressCode(StrEnum):
    """Why an entry of the address book is refused."""

    UNKNOWN_CHAIN = "UNKNOWN_CHAIN"
    INVALID_USER = "INVALID_USER"
    INVALID_LABEL = "INVALID_LABEL"
    ADDRESS_EXISTS = "ADDRESS_EXISTS"
    TOO_MANY_ADDRESSES = "TOO_MANY_ADDRESSES"


@dataclass(eq=False)
class AddressRefused(Refusal):
    """An entry of an address book is refused; nothing was written. `reason` is the code that an API answers with."""

    reason: AddressCode
    why: str
    code = "ADDRESS_REFUSED"
    text = "{reason}: {why}"


class Address(msgspec.Struct, frozen=True, kw_only=True):
    """The body of an entry's record."""

    user: str
    chain: str
    address: str  # as the chain's codec writes it
    label: str
    added_us: int


class AddressView(msgspec.Struct, frozen=True, kw_only=True):
    """An entry as its user sees it."""

    id: str
    user: str
    chain: str
    address: str
    label: str
    state: str
    added_us: int


class AddressBook:
    """The address books of all users, on one engine."""

    def __init__(self, engine: Engine, chains: Mapping[str, Chain]) -> None:
        """`chains`: by name. One that is added while this runs counts from then on."""
        self.engine = engine
        self.chains = chains
        flow: Flow[Address] = Flow(
            machine=MACHINE,
            body=Address,
            actions={},
            book=_book,
            book_start=_book_start,
            row_kinds=(ADDRESS, COUNT),
            alarms=(),  # an entry may wait for years
            prefix=PREFIX,
        )
        engine.register(flow)

    async def add(self, user: str, chain: str, address: str, label: str = "", *, actor: str = "") -> AddressView:
        """Put an address into a user's book. One that is there with this label already is answered as it is."""
        if len(label) > LABEL_LENGTH_MAX or not label.isprintable():
            raise AddressRefused(
                AddressCode.INVALID_LABEL, f"a label has at most {LABEL_LENGTH_MAX} printable characters"
            )
        canonical = self._canonical(user, chain, address)
        for _ in range(TRIES):
            there = await self._live(user, chain, canonical)
            if there is not None:
                return _same(there, label)
            added_us = await self.engine.store.now_us()
            body = Address(user=user, chain=chain, address=canonical, label=label, added_us=added_us)
            try:
                started = await self.engine.start(MACHINE.name, body, owner=user, actor=actor)
            except RowTaken:  # another request was faster: its entry is the answer
                continue
            except BoundExceeded:
                why = f"an address book has at most {ENTRIES_MAX} addresses: remove one first"
                raise AddressRefused(AddressCode.TOO_MANY_ADDRESSES, why) from None
            return _view(self._item(started.record))
        raise Conflict(f"{canonical} on {chain} is being added and removed", TRIES)

    async def remove(self, user: str, id_: str, *, actor: str = "") -> AddressView:
        """Take an entry out of a user's book. One that is out already is answered as it is."""
        record = await self._of(user, id_)
        if record.state == ACTIVE:
            try:
                record = await self.engine.signal(record, REMOVE, actor, {})
            except (RecordMoved, RowNotOwned) as error:  # another request has removed it
                record = await self._of(user, id_)
                if record.state == ACTIVE:
                    raise Conflict(f"{id_} is being removed", 1) from error
        return _view(self._item(record))

    async def get(self, user: str, id_: str) -> AddressView:
        """One entry of a user's book, also if it was removed. Another user's does not exist."""
        return _view(self._item(await self._of(user, id_)))

    async def list(self, user: str, chain: str = "") -> builtins.list[AddressView]:
        """What is in a user's book, newest first; of one chain, or of all."""
        found = await self.engine.store.read.records.list(
            MACHINE.name, owner=_checked(user), states=(ACTIVE,), limit=ENTRIES_MAX
        )
        views = [_view(self._item(record)) for record in found]
        return [view for view in views if chain in ("", view.chain)]

    async def since(self, user: str, chain: str, address: str) -> int | None:
        """When an address came into a user's book, in microseconds; None: it is not there."""
        entry = await self._live(user, chain, self._canonical(user, chain, address))
        return None if entry is None else entry.added_us

    def _canonical(self, user: str, chain: str, address: str) -> str:
        """The address as it is compared, once the names beside it can't be mistaken for parts of it."""
        _checked(user)
        rail = self.chains.get(chain)
        if rail is None:
            raise AddressRefused(AddressCode.UNKNOWN_CHAIN, f"there is no chain {chain!r} here; `bursar chain list`")
        return rail.codec.check_address(chain, address)

    async def _live(self, user: str, chain: str, address: str) -> AddressView | None:
        """The entry that has this address now, from its row alone: nothing can change between two reads."""
        key = _key(user, chain, address)
        row = await self.engine.store.read.flow_rows.get(MACHINE.name, ADDRESS.name, key)
        return (
            None if row is None or row.state is not RowState.HELD else msgspec.json.decode(row.body, type=AddressView)
        )

    async def _of(self, user: str, id_: str) -> Record:
        """An entry of this user. Another user's is reported as one that does not exist."""
        record = await self.engine.get(MACHINE.name, id_)
        if record is None or record.owner != user:
            raise UnknownRecord(MACHINE.name, id_)
        return record

    def _item(self, record: Record) -> FlowRecord[Address]:
        return FlowRecord(record, msgspec.json.decode(record.body, type=Address))


def _checked(user: str) -> str:
    if not 0 < len(user) <= USER_LENGTH_MAX or not (user.isascii() and user.isprintable()) or "/" in user:
        why = f"a user is 1 to {USER_LENGTH_MAX} printable ASCII characters without '/'"
        raise AddressRefused(AddressCode.INVALID_USER, why)
    return user


def _key(user: str, chain: str, address: str) -> str:
    """Of the row that keeps it unique."""
    return f"{user}/{chain}/{address}"


def _same(there: AddressView, label: str) -> AddressView:
    """The entry that is there, if that is what is wanted: a label that is changed silently would deceive its user."""
    if there.label != label:
        why = f"{there.address} is in the address book as {there.label!r}: remove it first"
        raise AddressRefused(AddressCode.ADDRESS_EXISTS, why)
    return there


def _book_start(item: FlowRecord[Address]) -> Booking:
    """Claim the address for this entry, and a place among the entries of its user. Pure."""
    body = item.body
    claim = Claim(ADDRESS, _key(body.user, body.chain, body.address), msgspec.to_builtins(_view(item)))
    return Booking(rows=(claim, Reserve(COUNT, body.user, 1, ENTRIES_MAX)))


def _book(item: FlowRecord[Address], _event: str, _answer: Answer) -> Booking:
    """Removed: give up both. Pure."""
    body = item.body
    return Booking(rows=(Release(ADDRESS, _key(body.user, body.chain, body.address)), GiveBack(COUNT, body.user)))


def _view(item: FlowRecord[Address]) -> AddressView:
    body = item.body
    return AddressView(
        id=item.id,
        user=body.user,
        chain=body.chain,
        address=body.address,
        label=body.label,
        state=item.state,
        added_us=body.added_us,
    )
