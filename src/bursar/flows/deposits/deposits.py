"""Deposits: how money from outside gets into a funding account, which the first one makes.

Every deposit has a reference, given by the sender of the money, and is booked once under it, however often it is
asked for. Above a configured amount it is written down first and booked when a second person, who is not the one who
asked and who says again what is to be booked, confirms it: otherwise one operator could mint money (L25). Both ways
remember the first request under its reference and book under the same key, so that one reference is one deposit
whichever way it came. Where it is booked if its account is frozen or closed: `flows/transfers/incoming`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Mapping

import msgspec

from bursar.engine import Answer, Booking, Engine, Flow, FlowRecord
from bursar.flows.transfers import Transfers
from bursar.flows.transfers.checks import USER_MAX
from bursar.flows.transfers.incoming import (
    CREATE,
    DEPOSITS,
    Deposit,
    asked_of,
    book,
    book_somewhere,
    used_before,
)
from bursar.flows.transfers.request import funding_account
from bursar.model.actors import check_actor, same_person
from bursar.model.errors import (
    AssetSuspended,
    Conflict,
    IdempotencyKeyReused,
    InvalidAmount,
    InvalidName,
    InvalidState,
    RecordMoved,
    UnknownAsset,
)
from bursar.model.machine import Arrow, Kind, Machine, State
from bursar.model.money import Asset, AssetStatus
from bursar.model.records import Record
from bursar.model.retry import Alarm

WAITS_S = 3_600.0  # for a second person, before an alert is raised
# By one who did not ask for it and repeats what is to be booked, or one operator could mint money (L25).
CONFIRMED_BY = (
    "it is confirmed by POST /api/v1/deposits/REFERENCE/confirm, where a second person repeats what is booked"
)
log = logging.getLogger("bursar.deposits")
_REFERENCE = re.compile(r"[A-Za-z0-9._:-]{1,100}")

# Of deposits that wait for a second person. Nothing is called: a person confirms, and it is booked.
ASKED, BOOKED, REJECTED = "ASKED", "BOOKED", "REJECTED"
CONFIRM, REJECT = "CONFIRM", "REJECT"
MACHINE = Machine(
    name="deposits",
    initial=ASKED,
    events=(CONFIRM, REJECT),
    states=(
        State(ASKED, Kind.WAIT, awaits="a second person"),
        State(BOOKED, Kind.TERMINAL),
        State(REJECTED, Kind.TERMINAL),
    ),
    arrows=(Arrow(ASKED, CONFIRM, BOOKED), Arrow(ASKED, REJECT, REJECTED)),
)


class DepositView(msgspec.Struct, frozen=True, kw_only=True):
    """A deposit as operators see it."""

    reference: str
    user_id: int
    asset: str
    amount: str  # in units of the asset
    state: str
    asked_by: str
    account: str  # where it is booked; "" if it is not


class Deposits:
    """External deposits."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        confirm_above: Mapping[str, int],
        waits_s: float = WAITS_S,
        engine: Engine | None = None,
    ) -> None:
        """`engine`: the one of the process, which drives other flows too; without it deposits get one of their own."""
        self.ledger = transfers.ledger
        self.confirm_above = confirm_above  # asset → smallest units
        self.flow: Flow[Deposit] = Flow(
            machine=MACHINE,
            body=Deposit,
            actions={},
            book=_book,
            next_body=_next_body,
            reserved_events={CONFIRM: CONFIRMED_BY},
            alarms=(Alarm(reason="waiting", state=ASKED, seconds=waits_s),),
        )
        store, writer = self.ledger.store, self.ledger.writer
        self.engine = (engine or Engine(store, writer, (), worker=transfers.engine.worker)).register(self.flow)

    async def ask(self, user: int, asset: str, amount: str, *, reference: str, actor: str) -> DepositView:
        """Book it; or, where it is large, write it down until a second person has confirmed it."""
        actor = check_actor(actor)
        kind, wanted = await self._checked(user, asset, amount, reference, actor)
        if (known := await self._known(wanted)) is not None:
            return _view(*known, kind)
        if kind.status is not AssetStatus.ACTIVE:
            raise AssetSuspended(asset)
        try:
            return _view(*await self._begin(wanted, actor), kind)
        except (RecordMoved, Conflict):  # the same reference was asked for just now, the other way: see what that was
            known = await self._known(wanted)
            if known is None:
                raise
            return _view(*known, kind)

    async def _begin(self, wanted: Deposit, actor: str) -> tuple[Deposit, str]:
        """Book a small one; write a large one down."""
        if int(wanted.amount) <= self.confirm_above.get(wanted.asset, int(wanted.amount)):
            return await book(self.engine, self.ledger, wanted), BOOKED
        remember, name, owner = wanted.operation(), wanted.reference, str(wanted.user)
        started = await self.engine.start(self.flow.name, wanted, id=name, owner=owner, operation=remember, actor=actor)
        return self.flow.item(started.record).body, started.record.state

    async def confirm(self, user: int, asset: str, amount: str, *, reference: str, actor: str) -> DepositView:
        """The second person says what is to be booked, and it is, in one transaction with this."""
        actor = check_actor(actor)
        kind, wanted = await self._checked(user, asset, amount, reference, actor)
        record, body = await self._found(wanted)
        if record.state == BOOKED:
            return _view(body, BOOKED, kind)
        if same_person(actor, body.asked_by):
            raise InvalidState("deposits", reference, record.state, "the person who asked for it can't confirm it")

        def write(account: str) -> Awaitable[Record]:
            return self._signal(record, CONFIRM, actor, {"account": account})

        after = await book_somewhere(self.engine, self.ledger, body, record, write)
        return _view(self.flow.item(after).body, after.state, kind)

    async def reject(self, reference: str, *, actor: str) -> DepositView:
        """It is not booked, and never will be under this reference by this way."""
        actor = check_actor(actor)
        record = await self.engine.record(self.flow.name, _named(reference))
        body = self.flow.item(record).body
        after = await self._signal(record, REJECT, actor, {})
        return _view(body, after.state, (await self.ledger.known_assets(body.asset))[body.asset])

    async def waiting(self, limit: int = 100) -> list[DepositView]:
        """Those that wait for a second person, newest first. One that can't be read is left out: it hides no other."""
        bodies = []
        for record in await self.ledger.store.read.records.list(self.flow.name, states=(ASKED,), limit=limit):
            try:
                bodies.append(self.flow.item(record).body)
            except (msgspec.MsgspecError, UnicodeError) as error:
                log.error("deposit %s can't be read: %s", record.id, error)
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

    async def _known(self, wanted: Deposit) -> tuple[Deposit, str] | None:
        """The deposit that this reference stands for already, and its state; a refusal if that is another one."""
        remembered = await self.ledger.store.read.operations.get(DEPOSITS, wanted.reference, CREATE)
        if remembered is None:
            return None
        first = asked_of(remembered)
        if first.record:
            record, body = await self._found(wanted)
            return body, record.state
        if remembered.fingerprint != wanted.fingerprint:
            raise used_before(wanted.reference)
        return first.of(wanted), BOOKED

    async def _found(self, wanted: Deposit) -> tuple[Record, Deposit]:
        """The record under its reference, if it is of the same deposit."""
        record = await self.engine.record(self.flow.name, wanted.reference)
        body = self.flow.item(record).body
        if (body.reference, body.fingerprint) != (wanted.reference, wanted.fingerprint):
            raise IdempotencyKeyReused("deposits", wanted.reference, "deposit")
        return record, body

    async def _signal(self, record: Record, event: str, actor: str, evidence: dict[str, str]) -> Record:
        try:
            return await self.engine.signal(record, event, actor, evidence)
        except InvalidState:
            raise InvalidState("deposits", record.id, record.state, "it is decided already") from None


def _book(item: FlowRecord[Deposit], event: str, answer: Answer) -> Booking:
    """The deposit itself, in the transaction in which it is confirmed. Pure."""
    if event != CONFIRM:
        return Booking()
    return Booking((item.body.intent(_account(item.body, answer)),))


def _next_body(item: FlowRecord[Deposit], event: str, answer: Answer) -> Deposit | None:
    """Where it is booked. Pure."""
    return msgspec.structs.replace(item.body, account=_account(item.body, answer)) if event == CONFIRM else None


def _account(body: Deposit, answer: Answer) -> str:
    return str(answer.evidence.get("account", funding_account(body.user)))


def _named(reference: str) -> str:
    if not _REFERENCE.fullmatch(reference):
        raise InvalidName("reference", reference[:100], "1 to 100 letters, digits, '.', '_', ':' or '-'")
    return reference


def _view(body: Deposit, state: str, asset: Asset) -> DepositView:
    return DepositView(
        reference=body.reference,
        user_id=body.user,
        asset=body.asset,
        amount=str(asset.of_minor(int(body.amount))),
        state=state,
        asked_by=body.asked_by,
        account=body.account or (funding_account(body.user) if state == BOOKED else ""),
    )
