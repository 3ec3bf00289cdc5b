"""Holds: money set aside first, and then paid in part or whole, given back, or expired.

A hold is one posting in the account of held money. The commit that spends it decides about the hold, so confirm,
void and expiry are one compare-and-set (L21). Here are the holds of callers; those that belong to a record of a flow
are made and settled by that record's own moves (engine/holds), and other callers are refused (W34).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from bursar.ledger.reads import Reads
from bursar.ledger.rules import check_limit, find_asset
from bursar.model.accounts import HELD, MAIN_BOOK, Account, check_active, check_open_path
from bursar.model.entries import USER_SCOPE, EntryKind, HoldChange, HoldState, Intent, Leg, check_key, encode_metadata
from bursar.model.envelope import Receipt
from bursar.model.errors import (
    AccountFrozen,
    Conflict,
    HoldClosed,
    HoldOwned,
    HoldTooSmall,
    InvalidAmount,
    InvalidName,
    KeyReused,
    PostingNotLive,
    Refusal,
    StalePin,
    UnknownHold,
)
from bursar.model.money import Amount, Asset
from bursar.model.postings import SEQ_MAX
from bursar.model.records import HoldRow
from bursar.model.views import EnvelopeView, Hold, moment
from bursar.store import Store
from bursar.store.envelopes import FOREVER_US
from bursar.writer import Change, Writer

TRIES = 12
REAP = 100  # holds that are given back by one call, unless it says otherwise


class Holds(Reads):
    """The half of the ledger that sets money aside."""

    def __init__(self, store: Store, writer: Writer | None = None) -> None:
        super().__init__(store)
        self.writer = Writer(store) if writer is None else writer

    async def authorize(
        self,
        account: str,
        asset: str,
        amount: Amount,
        *,
        key: str | None = None,
        expires_in: timedelta | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Hold:
        """Set money aside. Again with the same key: the same hold, as it is by now.

        The same key for another account, amount or duration is refused.
        """
        account = check_open_path(account)
        kind = find_asset(await self.known_assets(str(asset)), asset)
        minor = kind.minor(amount)
        if minor <= 0:
            raise InvalidAmount(str(amount), "a hold needs an amount above zero")
        lasts_us = None if expires_in is None else _microseconds(expires_in)
        expires_us = None if lasts_us is None else await self.store.read.holds.clock_us() + lasts_us
        if expires_us is not None and expires_us >= FOREVER_US:
            raise InvalidName("expiry", str(expires_in), "for a hold that lasts for ever, give none")
        head = await self.account(account)
        hold = HoldChange(
            account=account,
            asset=kind.code,
            amount=minor,
            remaining=minor,
            state=HoldState.OPEN,
            expires_us=expires_us,
            lasts_us=lasts_us,
        )
        intent = Intent(
            scope=USER_SCOPE,
            key=self.store.ports.token() if key is None else check_key(key),
            book=head.book or MAIN_BOOK,
            legs=(Leg(account, HELD, kind.code, minor),),
            metadata=encode_metadata(metadata or {}),
            hold=hold,
        )
        receipt = (await self.writer.apply(Change((intent,)))).receipts[0]
        if receipt.replayed:  # much may have happened to it since
            return await self._authorized(receipt, lasts_us)
        return _view(receipt.envelope, hold, account, kind)

    async def _authorized(self, receipt: Receipt, lasts_us: int | None) -> Hold:
        """The hold that a key stands for, if it was asked for in the same way."""
        row, head, asset = await self._hold_row(receipt.envelope)
        kept = row.lasts_us is not None or row.expires_us is None  # of those that expire, older ones have not kept it
        if row.owner or (kept and row.lasts_us != lasts_us):
            raise KeyReused(USER_SCOPE, receipt.key, receipt.envelope)
        return _view(row.id, row, head.path, asset)

    async def confirm(
        self,
        hold: int,
        target: str,
        amount: Amount | None = None,
        *,
        key: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Receipt:
        """Pay from a hold: all that remains, or a part, leaving the rest held. Not while its account is frozen."""
        target = check_open_path(target)
        key = self.store.ports.token() if key is None else check_key(key)
        note = encode_metadata(metadata or {})
        for _ in range(TRIES):
            row, head, asset = await self._settleable(hold)
            code = asset.code
            minor = row.remaining if amount is None else asset.minor(amount)
            if amount is not None and minor <= 0:
                raise InvalidAmount(str(amount), "a confirmation needs an amount above zero")
            wanted = None if amount is None else minor
            try:
                await self._check_open(row)
                if minor > row.remaining:
                    raise HoldTooSmall(hold, str(asset.of_minor(row.remaining)), str(asset.of_minor(minor)))
                check_active(head)
            except (HoldClosed, HoldTooSmall, AccountFrozen):  # this very confirmation may be why, or was long before
                replayed = await self._replayed(hold, key, target, code, wanted)
                if replayed is not None:
                    return replayed
                await self._only_if_unasked(key)
                raise
            state = HoldState.OPEN if minor < row.remaining else HoldState.CONFIRMED
            # The account takes no part in the entry, and yet a freeze of it must stop this one.
            pins = ((head.path, head.snapshot),)
            leg = Leg(HELD, target, code, minor)
            intent = _settlement(row, head, leg, state, scope=USER_SCOPE, key=key, metadata=note, pins=pins)
            try:
                receipt = (await self.writer.apply(Change((intent,)))).receipts[0]
            except (PostingNotLive, StalePin):
                continue  # confirmed, voided or expired since we looked; or its account was changed
            except KeyReused:  # for another amount: of what remained then?
                replayed = await self._replayed(hold, key, target, code, wanted)
                if replayed is None:
                    raise
                return replayed
            if receipt.replayed:  # is it this hold's?
                await self._replayed(hold, key, target, code, wanted)
            return receipt
        raise Conflict(f"hold {hold} keeps moving", TRIES)

    async def void(self, hold: int) -> Receipt:
        """Give back what remains of a hold. Again: the same receipt."""
        return await self._give_back(hold, HoldState.VOIDED)

    async def expire_holds(self, limit: int = REAP) -> list[Receipt]:
        """Give back what remains of holds whose time is up. `serve`, `worker` and `open(flows=…)` do it, too."""
        receipts: list[Receipt] = []
        refused: Refusal | None = None
        for row in await self.store.read.holds.due(check_limit(limit)):
            try:
                receipts.append(await self._give_back(row.id, HoldState.EXPIRED))
            except (HoldClosed, Conflict):
                continue  # another caller was faster, which ends it too; or the next call sees to it
            except Refusal as refusal:  # it must not stand in the way of the others
                refused = refused or refusal
        if refused is not None:
            raise refused
        return receipts

    async def _give_back(self, hold: int, state: HoldState) -> Receipt:
        for _ in range(TRIES):
            row, head, asset = await self._settleable(hold)
            if row.state is not HoldState.OPEN:
                taken = await self.store.read.envelopes.existing([("void", str(hold))])
                if row.state is state and taken:
                    found = taken["void", str(hold)]
                    return Receipt(envelope=found.seq, id=found.id.hex(), key=str(hold), replayed=True)
                raise HoldClosed(hold, row.state.value)
            leg = Leg(HELD, head.path, asset.code, row.remaining)
            intent = _settlement(row, head, leg, state, scope="void", key=str(hold), kind=EntryKind.RETURN)
            try:
                return (await self.writer.apply(Change((intent,)))).receipts[0]
            except (PostingNotLive, KeyReused):
                continue  # confirmed in part or given back since we looked: the same key, for another amount
        raise Conflict(f"hold {hold} keeps moving", TRIES)

    async def _replayed(self, hold: int, key: str, target: str, code: str, minor: int | None) -> Receipt | None:
        """The receipt of a confirmation of this hold that has happened already under this key."""
        taken = (await self.store.read.envelopes.existing([(USER_SCOPE, key)])).get((USER_SCOPE, key))
        if taken is None:
            return None
        view = await self.envelope(taken.seq)
        same = [(m.source, m.target, m.amount.asset) for m in view.movements] == [(HELD, target, code)]
        same = same and minor in (None, view.movements[0].amount.minor)
        if not same or await self._held_by(view) != hold:
            raise KeyReused(USER_SCOPE, key, taken.seq)
        return Receipt(envelope=taken.seq, id=taken.id.hex(), key=key, replayed=True)

    async def _held_by(self, view: EnvelopeView) -> int:
        """The hold that a confirmation paid from: back from part to part, to the envelope that authorized it."""
        while any(m.source == HELD for m in view.movements):
            view = await self.envelope(view.consumes[0].created_by)
        return view.envelope

    async def _only_if_unasked(self, key: str) -> None:
        """Raise if an earlier attempt under this key is half done: never, where a commit is one transaction."""

    async def _check_open(self, row: HoldRow) -> None:
        if row.state is not HoldState.OPEN:
            raise HoldClosed(row.id, row.state.value)
        if row.expires_us is not None and row.expires_us <= await self.store.read.holds.clock_us():
            raise HoldClosed(row.id, HoldState.EXPIRED.value)

    async def _settleable(self, hold: int) -> tuple[HoldRow, Account, Asset]:
        """A hold that callers may settle. The writer refuses those of records too; here also what would be a replay."""
        found = await self._hold_row(hold)
        if found[0].owner:
            raise HoldOwned(hold, found[0].owner)
        return found

    async def _hold_row(self, hold: int) -> tuple[HoldRow, Account, Asset]:
        found = await self.store.read.holds.get([hold]) if type(hold) is int and 0 < hold <= SEQ_MAX else []
        if not found:
            raise UnknownHold(hold)
        row, head = found[0]
        return row, head, (await self._numbered([row.asset]))[row.asset]

    async def hold(self, hold: int) -> Hold:
        """One hold as it stands."""
        row, head, asset = await self._hold_row(hold)
        return _view(row.id, row, head.path, asset)

    async def holds(self, account: str) -> list[Hold]:
        """Open holds of an account."""
        head = await self.account(account)
        rows = await self.store.read.holds.open_of(head.id)
        assets = await self._numbered([row.asset for row in rows])
        return [_view(row.id, row, head.path, assets[row.asset]) for row in rows]


def _settlement(row: HoldRow, head: Account, leg: Leg, state: HoldState, **more: Any) -> Intent:
    """The entry that pays so much of a hold and leaves the rest held; `more` is the rest of the intent."""
    return Intent(
        book=head.book or MAIN_BOOK,
        legs=(leg,),
        consume=(row.posting,),  # the compare-and-set: the commit that spends it decides about the hold
        hold=HoldChange(
            id=row.id,
            account=head.path,
            asset=leg.asset,
            amount=row.amount,
            remaining=row.remaining - leg.amount,
            state=state,
            owner=row.owner,
            expires_us=row.expires_us,
            lasts_us=row.lasts_us,
            posting=row.posting,
        ),
        **more,
    )


def _view(id: int, hold: HoldRow | HoldChange, account: str, asset: Asset) -> Hold:
    return Hold(
        id=id,
        account=account,
        amount=asset.of_minor(hold.amount),
        remaining=asset.of_minor(hold.remaining),
        state=hold.state,
        owner=hold.owner,
        expires=None if hold.expires_us is None else moment(hold.expires_us),
    )


def _microseconds(expires_in: timedelta) -> int:
    if not isinstance(expires_in, timedelta) or expires_in <= timedelta(0):
        raise InvalidName("expiry", str(expires_in), "a hold must last longer than nothing")
    return expires_in // timedelta(microseconds=1)


async def keep_expiring_holds(ledger: Holds, interval_s: float) -> None:
    """Until cancelled: give back what remains of holds whose time is up."""
    while True:
        await ledger.store.ports.sleep(interval_s)
        while len(await ledger.expire_holds()) == REAP:
            continue  # there may be more
