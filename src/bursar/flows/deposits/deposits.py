"""Deposits: how money from outside gets into a funding account, which the first one makes.

Every deposit has a reference that whoever sent the money gave it, and is booked once under it, however often it is
asked for. Above a configured amount it is written down first and booked when a second person, who is not the one who
asked and who says again what is to be booked, confirms it: otherwise one operator could mint money (L25). Both ways
book under the same key, so that one reference is one deposit whichever way it came.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import msgspec

from bursar.engine import Answer, Booking, Engine, Flow, Item
from bursar.flows.deposits.machine import ASKED, BOOKED, CONFIRM, MACHINE, REJECT
from bursar.flows.transfers import Transfers
from bursar.flows.transfers.request import EXTERNAL, funding_account
from bursar.model.actors import check_actor, same_person
from bursar.model.entries import USER_SCOPE, Intent, Leg, deposit
from bursar.model.errors import (
    AlreadyExists,
    InvalidAmount,
    InvalidName,
    NotPossible,
    OtherRequest,
    RecordMoved,
    UnknownAsset,
    UnknownRecord,
)
from bursar.model.machine import ImpossibleEvent
from bursar.model.money import Asset
from bursar.model.records import Record
from bursar.model.retry import Alarm

USER_MAX = 2**63 - 1
WAITS_S = 3_600.0  # for a second person, before people are told
_REFERENCE = re.compile(r"[A-Za-z0-9._:-]{1,100}")


class Deposit(msgspec.Struct, frozen=True, kw_only=True):
    """The body of a deposit's record. It never changes."""

    user: int
    asset: str
    amount: str  # smallest units
    reference: str
    asked_by: str


class DepositView(msgspec.Struct, frozen=True, kw_only=True):
    """A deposit as operators see it."""

    reference: str
    user: int
    asset: str
    amount: str  # in units of the asset
    state: str
    asked_by: str


class Deposits:
    """External deposits."""

    def __init__(self, transfers: Transfers, *, confirm_above: Mapping[str, int], waits_s: float = WAITS_S) -> None:
        self.ledger = transfers.ledger
        self.confirm_above = confirm_above  # asset → smallest units
        alarm = Alarm(reason="waiting", state=ASKED, seconds=waits_s)
        self.flow: Flow[Deposit] = Flow(machine=MACHINE, body=Deposit, actions={}, book=_book, alarms=(alarm,))
        self.engine = Engine(self.ledger.store, self.ledger.writer, [self.flow], worker=transfers.engine.worker)

    async def ask(self, user: int, asset: str, amount: str, *, reference: str, actor: str) -> DepositView:
        """Book it; or, where it is large, write it down until a second person has confirmed it."""
        actor = check_actor(actor)
        kind, wanted = await self._checked(user, asset, amount, reference, actor)
        found = await self.engine.get(self.flow.name, reference)
        if found is None and int(wanted.amount) <= self.confirm_above.get(asset, int(wanted.amount)):
            await self._open_account(user)
            metadata = {"reference": reference, "actor": actor}
            entry = deposit(EXTERNAL, funding_account(user), asset, amount, key=_key(reference), metadata=metadata)
            await self.ledger.commit(entry)
            return _view(wanted, BOOKED, kind)
        if found is None:
            with contextlib.suppress(RecordMoved):  # somebody asked for the same just now: see what he asked for
                await self.engine.start(self.flow.name, wanted, id=reference, owner=str(user), actor=actor)
            found = await self._record(reference)
        body = self.flow.item(found).body
        _same(body, wanted)
        return _view(body, found.state, kind)

    async def confirm(self, user: int, asset: str, amount: str, *, reference: str, actor: str) -> DepositView:
        """The second person says what is to be booked, and it is."""
        actor = check_actor(actor)
        kind, wanted = await self._checked(user, asset, amount, reference, actor)
        record = await self._record(reference)
        body = self.flow.item(record).body
        _same(body, wanted)
        if record.state == BOOKED:
            return _view(body, BOOKED, kind)
        if same_person(actor, body.asked_by):
            raise NotPossible("deposits", reference, record.state, "whoever asked for it can't confirm it")
        await self._open_account(user)
        after = await self._hear(record, CONFIRM, actor)
        return _view(body, after.state, kind)

    async def reject(self, reference: str, *, actor: str) -> DepositView:
        """It is not booked, and never will be under this reference by this way."""
        actor = check_actor(actor)
        record = await self._record(_named(reference))
        body = self.flow.item(record).body
        after = await self._hear(record, REJECT, actor)
        return _view(body, after.state, (await self.ledger.known_assets(body.asset))[body.asset])

    async def waiting(self, limit: int = 100) -> list[DepositView]:
        """Those that wait for a second person, newest first."""
        found = await self.ledger.store.read.records.list(self.flow.name, states=(ASKED,), limit=limit)
        bodies = [self.flow.item(record).body for record in found]
        assets = await self.ledger.assets()
        return [_view(body, ASKED, assets[body.asset]) for body in bodies]

    async def _checked(self, user: int, asset: str, amount: str, reference: str, actor: str) -> tuple[Asset, Deposit]:
        if not 0 < user <= USER_MAX:
            raise InvalidName("user", str(user), f"a whole number from 1 to {USER_MAX}")
        kind = (await self.ledger.assets()).get(asset)
        if kind is None:
            raise UnknownAsset(asset[:32])
        minor = kind.minor(amount)
        if minor <= 0:
            raise InvalidAmount(amount, "an amount above zero is needed")
        name = _named(reference)
        return kind, Deposit(user=user, asset=asset, amount=str(minor), reference=name, asked_by=actor)

    async def _open_account(self, user: int) -> None:
        with contextlib.suppress(AlreadyExists):
            await self.ledger.create_account(funding_account(user))

    async def _record(self, reference: str) -> Record:
        found = await self.engine.get(self.flow.name, reference)
        if found is None:
            raise UnknownRecord(self.flow.name, reference)
        return found

    async def _hear(self, record: Record, event: str, actor: str) -> Record:
        try:
            return await self.engine.hear(record, event, actor, {})
        except ImpossibleEvent:
            raise NotPossible("deposits", record.id, record.state, "it is decided already") from None


def _book(item: Item[Deposit], event: str, _answer: Answer) -> Booking:
    """The deposit itself, in the unit in which it is confirmed. Pure."""
    if event != CONFIRM:
        return Booking()
    body = item.body
    leg = Leg(EXTERNAL, funding_account(body.user), body.asset, int(body.amount))
    return Booking((Intent(scope=USER_SCOPE, key=_key(body.reference), legs=(leg,)),))


def _same(found: Deposit, wanted: Deposit) -> None:
    if (found.user, found.asset, found.amount) != (wanted.user, wanted.asset, wanted.amount):
        raise OtherRequest("deposits", wanted.reference, "deposit")


def _named(reference: str) -> str:
    if not _REFERENCE.fullmatch(reference):
        raise InvalidName("reference", reference[:100], "1 to 100 letters, digits, '.', '_', ':' or '-'")
    return reference


def _key(reference: str) -> str:
    return f"deposit:{reference}"


def _view(body: Deposit, state: str, asset: Asset) -> DepositView:
    return DepositView(
        reference=body.reference,
        user=body.user,
        asset=body.asset,
        amount=str(asset.of_minor(int(body.amount))),
        state=state,
        asked_by=body.asked_by,
    )
