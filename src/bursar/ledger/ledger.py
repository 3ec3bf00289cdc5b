"""The ledger: what callers use. Entries, reversal, holds, upkeep; reads and rules are its other halves.

Every entry has a key before its first attempt (made for the caller if none was given), so that whatever breaks on the
way, trying again can only find what is already there (L18).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import msgspec

from bursar.ledger.reads import Reads
from bursar.model.accounts import HELD, MAIN_BOOK, TRANSIT, Account, check_open_path, check_path
from bursar.model.entries import (
    USER_SCOPE,
    Entry,
    HoldChange,
    HoldState,
    Intent,
    Kind,
    Leg,
    check_key,
    check_text,
    encode_metadata,
    intend,
)
from bursar.model.envelope import Receipt, decode_legs, decode_pins
from bursar.model.errors import (
    AccountFrozen,
    BursarError,
    Conflict,
    HoldClosed,
    HoldTooSmall,
    InvalidAmount,
    InvalidName,
    KeyReused,
    PostingNotLive,
    Refusal,
    StalePin,
    UnknownAsset,
    UnknownEnvelope,
    UnknownHold,
)
from bursar.model.money import Amount, Asset
from bursar.model.plan import check_active
from bursar.model.postings import SEQ_MAX, PostingState
from bursar.model.records import Hold, HoldRow
from bursar.model.views import EnvelopeView
from bursar.store import Store
from bursar.store.value import FOREVER_US
from bursar.writer import Change, Writer

REVERSIBLE = (USER_SCOPE, "reverse", "sequence")  # scopes of entries that are whole in themselves
COMPACT_MAX = 1_000  # postings merged by one envelope
MANY_MAX = 10_000  # entries of commit_many that wait at once
TRIES = 12
REAP = 100


class Ledger(Reads):
    """A posting ledger on a store."""

    def __init__(self, store: Store, writer: Writer | None = None) -> None:
        super().__init__(store)
        self.writer = Writer(store) if writer is None else writer

    # --- entries -----------------------------------------------------------------------------------------------

    async def commit(self, entry: Entry, *, connection: Any = None) -> Receipt:
        """Commit an entry, once. With `connection`, inside the transaction that the caller has open on it.

        Same key and same movements: the first receipt again. Raises a `Refusal` if it can't be, `Conflict` if others
        were faster too often, `OutcomeUnknown` if the database went away at the wrong moment.
        """
        change = Change((await self._intend(entry),))
        if connection is not None:
            return (await self.writer.apply_in(connection, change)).receipts[0]
        return (await self.writer.apply(change)).receipts[0]

    async def commit_many(self, entries: Iterable[Entry], *, atomic: bool = False) -> list[Receipt | BursarError]:
        """Commit many entries. Each by itself: an error takes its place in the list and the others go on.

        With `atomic`, all or none: the first refusal is raised and nothing is written.
        """
        if atomic:
            intents = tuple([await self._intend(entry) for entry in entries])
            return list((await self.writer.apply(Change(intents))).receipts) if intents else []
        results: list[Receipt | BursarError] = []
        waiting: list[Entry] = []
        for entry in entries:
            waiting.append(entry)
            if len(waiting) == MANY_MAX:
                results += await self._many(waiting)
                waiting = []
        return results + await self._many(waiting)

    async def _many(self, entries: list[Entry]) -> list[Receipt | BursarError]:
        return list(await asyncio.gather(*[self._one(entry) for entry in entries]))

    async def _one(self, entry: Entry) -> Receipt | BursarError:
        try:
            return await self.commit(entry)
        except BursarError as error:
            return error

    async def _intend(self, entry: Entry, scope: str = USER_SCOPE) -> Intent:
        try:
            return intend(entry, self._assets, scope=scope, token=self.store.ports.token)
        except UnknownAsset:  # it may be new
            return intend(entry, await self.known_assets(""), scope=scope, token=self.store.ports.token)

    # --- reversal ----------------------------------------------------------------------------------------------

    async def reverse(self, envelope: int | str, *, metadata: dict[str, Any] | None = None) -> Receipt:
        """Undo an envelope by another one. Again: the same receipt.

        The very postings it created are consumed where they are still live; what has been spent since is taken by
        value, under the account's policy (L22).
        """
        seq = await self._seq(envelope)
        rows = await self.store.read.envelopes.get([seq])
        if not rows:
            raise UnknownEnvelope(str(envelope))
        row = rows[0]
        if row.kind is Kind.COMPACT:
            raise InvalidName("envelope to reverse", str(seq), "it only merged postings; nothing moved")
        heads = await self.store.read.accounts.heads_by_id([account for account, _ in decode_pins(row.pins)])
        moved = decode_legs(row.legs)
        assets = await self._numbered([leg.asset for leg in moved])
        book = await self._book_name(row.book)
        legs = tuple(
            Leg(heads[leg.target].path, heads[leg.source].path, assets[leg.asset].code, leg.minor)
            for leg in reversed(moved)
        )
        if any(HELD in (leg.source, leg.target) for leg in legs):
            raise InvalidName("envelope to reverse", str(seq), "it belongs to a hold; use confirm or void")
        if row.scope not in REVERSIBLE:  # its other side is elsewhere: the money would be in both places
            raise InvalidName(
                "envelope to reverse", str(seq), f"it is one side of what {row.scope} does; undo it there"
            )
        for _ in range(TRIES):
            created = await self.store.read.postings.of_envelopes(seq, seq)
            intent = Intent(
                scope="reverse",
                key=str(seq),
                legs=legs,
                book=book,
                metadata=encode_metadata(metadata or {}),
                kind=Kind.RETURN,
                reverses=seq,
                consume=tuple(p.posting.id for p in created if p.state is PostingState.LIVE),
            )
            try:
                return (await self.writer.apply(Change((intent,)))).receipts[0]
            except PostingNotLive:
                continue  # spent since we looked: look again
        raise Conflict(f"the postings of envelope {seq} keep moving", TRIES)

    # --- holds -------------------------------------------------------------------------------------------------

    async def authorize(
        self,
        account: str,
        asset: str,
        amount: Amount,
        *,
        key: str | None = None,
        expires_in: timedelta | None = None,
        owner: str = "",
        metadata: dict[str, Any] | None = None,
    ) -> Hold:
        """Set money aside. A hold with an owner never expires by itself: whoever owns it ends it (L21)."""
        account = check_open_path(account)
        kind = await self._known_asset(asset)
        minor = kind.minor(amount)
        if minor <= 0:
            raise InvalidAmount(str(amount), "a hold needs an amount above zero")
        if owner != "":
            owner = check_text("owner of a hold", owner)
        if owner and expires_in is not None:
            raise InvalidName("hold", owner, "one that is owned by a record can't expire by itself")
        expires_us = None
        if expires_in is not None:
            if not isinstance(expires_in, timedelta) or expires_in <= timedelta(0):
                raise InvalidName("expiry", str(expires_in), "a hold must last longer than nothing")
            expires_us = await self.store.read.holds.clock_us() + expires_in // timedelta(microseconds=1)
            if expires_us >= FOREVER_US:
                raise InvalidName("expiry", str(expires_in), "for a hold that lasts for ever, give none")
        head = await self.account(account)
        intent = Intent(
            scope=USER_SCOPE,
            key=self.store.ports.token() if key is None else check_key(key),
            book=head.book or MAIN_BOOK,
            legs=(Leg(account, HELD, kind.code, minor),),
            metadata=encode_metadata(metadata or {}),
            hold=HoldChange(
                account=account,
                asset=kind.code,
                amount=minor,
                remaining=minor,
                state=HoldState.OPEN,
                owner=owner,
                expires_us=expires_us,
            ),
        )
        receipt = (await self.writer.apply(Change((intent,)))).receipts[0]
        if receipt.replayed:  # much may have happened to it since
            return await self.hold(receipt.envelope)
        held = kind.of_minor(minor)
        return Hold(
            id=receipt.envelope,
            account=account,
            amount=held,
            remaining=held,
            state=HoldState.OPEN,
            owner=owner,
            expires_us=expires_us,
        )

    async def confirm(
        self,
        hold: int,
        target: str,
        amount: Amount | None = None,
        *,
        key: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> Receipt:
        """Pay from a hold: all that remains, or a part, leaving the rest held.

        Not while its account is frozen, unless a record owns it: that one tells of what has happened outside (T35).
        """
        target = check_open_path(target)
        key = self.store.ports.token() if key is None else check_key(key)
        note = encode_metadata(metadata or {})
        for _ in range(TRIES):
            row, head, asset = await self._hold_row(hold)
            code = asset.code
            minor = row.remaining if amount is None else asset.minor(amount)
            if amount is not None and minor <= 0:
                raise InvalidAmount(str(amount), "a confirmation needs an amount above zero")
            wanted = None if amount is None else minor
            try:
                await self._check_open(row)
                if minor > row.remaining:
                    raise HoldTooSmall(hold, str(asset.of_minor(row.remaining)), str(asset.of_minor(minor)))
                if not row.owner:
                    check_active(head)
            except (HoldClosed, HoldTooSmall, AccountFrozen):  # this very confirmation may be why, or was long before
                replayed = await self._replayed(hold, key, target, code, wanted)
                if replayed is not None:
                    return replayed
                await self._only_if_unasked(key)
                raise
            rest = row.remaining - minor
            state = HoldState.OPEN if rest else HoldState.CONFIRMED
            legs = (Leg(HELD, target, code, minor),)
            intent = self._settle(row, head, code, legs, rest, state, USER_SCOPE, key, Kind.ENTRY, note)
            if not row.owner:  # it takes no part in the entry, and yet a freeze of it must stop this one
                intent = msgspec.structs.replace(intent, pins=((head.path, head.snapshot),))
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
        """Give back what remains of holds whose time is up. Call it from time to time."""
        receipts = []
        for row in await self.store.read.holds.due(limit):
            try:
                receipts.append(await self._give_back(row.id, HoldState.EXPIRED))
            except HoldClosed:
                continue  # somebody was faster; that ends it too
        return receipts

    async def _give_back(self, hold: int, state: HoldState) -> Receipt:
        for _ in range(TRIES):
            row, head, asset = await self._hold_row(hold)
            if row.state is not HoldState.OPEN:
                taken = await self.store.read.envelopes.taken([("void", str(hold))])
                if row.state is state and taken:
                    found = taken["void", str(hold)]
                    return Receipt(envelope=found.seq, id=found.id.hex(), key=str(hold), replayed=True)
                raise HoldClosed(hold, row.state.value)
            legs = (Leg(HELD, head.path, asset.code, row.remaining),)
            intent = self._settle(row, head, asset.code, legs, 0, state, "void", str(hold), Kind.RETURN, "{}")
            try:
                return (await self.writer.apply(Change((intent,)))).receipts[0]
            except (PostingNotLive, KeyReused):
                continue  # confirmed in part or given back since we looked: the same key, for another amount
        raise Conflict(f"hold {hold} keeps moving", TRIES)

    def _settle(
        self,
        row: HoldRow,
        head: Account,
        code: str,
        legs: tuple[Leg, ...],
        rest: int,
        state: HoldState,
        scope: str,
        key: str,
        kind: Kind,
        metadata: str,
    ) -> Intent:
        return Intent(
            scope=scope,
            key=key,
            book=head.book or MAIN_BOOK,
            legs=legs,
            kind=kind,
            metadata=metadata,
            consume=(row.posting,),  # the compare-and-set: whoever spends it has decided about the hold
            hold=HoldChange(
                id=row.id,
                account=head.path,
                asset=code,
                amount=row.amount,
                remaining=rest,
                state=state,
                owner=row.owner,
                expires_us=row.expires_us,
                posting=row.posting,
            ),
        )

    async def _replayed(self, hold: int, key: str, target: str, code: str, minor: int | None) -> Receipt | None:
        """The receipt of a confirmation of this hold that has happened already under this key."""
        taken = (await self.store.read.envelopes.taken([(USER_SCOPE, key)])).get((USER_SCOPE, key))
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
        """A hold that looks closed to us may be so because an earlier try of ours is being finished by recovery."""
        if not self.store.split:
            return
        sagas = await self.store.read.sagas.list()
        if any((saga.scope, saga.key) == (USER_SCOPE, key) for saga in sagas) or await self.store.read.envelopes.taken(
            [(USER_SCOPE, key)]
        ):
            raise Conflict(f"key {key!r} is being committed by somebody else", 1)

    async def _check_open(self, row: HoldRow) -> None:
        if row.state is not HoldState.OPEN:
            raise HoldClosed(row.id, row.state.value)
        if row.expires_us is not None and row.expires_us <= await self.store.read.holds.clock_us():
            raise HoldClosed(row.id, HoldState.EXPIRED.value)

    async def _hold_row(self, hold: int) -> tuple[HoldRow, Account, Asset]:
        found = await self.store.read.holds.get([hold]) if type(hold) is int and 0 < hold <= SEQ_MAX else []
        if not found:
            raise UnknownHold(hold)
        row, head = found[0]
        return row, head, (await self._numbered([row.asset]))[row.asset]

    async def hold(self, hold: int) -> Hold:
        """One hold as it stands."""
        row, head, asset = await self._hold_row(hold)
        return self._hold(row, head.path, asset)

    def _hold(self, row: HoldRow, account: str, asset: Asset) -> Hold:
        return Hold(
            id=row.id,
            account=account,
            amount=asset.of_minor(row.amount),
            remaining=asset.of_minor(row.remaining),
            state=row.state,
            owner=row.owner,
            expires_us=row.expires_us,
        )

    async def holds(self, account: str) -> list[Hold]:
        """Open holds of an account."""
        head = await self.account(account)
        rows = await self.store.read.holds.open_of(head.id)
        assets = await self._numbered([row.asset for row in rows])
        return [self._hold(row, head.path, assets[row.asset]) for row in rows]

    # --- upkeep ------------------------------------------------------------------------------------------------

    async def compact(self, account: str, *, most: int = 1_000_000) -> int:
        """Merge the postings of an account, so that it can pay large amounts. Returns how many were merged."""
        head = await self.account(account)
        if head.path == HELD or head.path.partition(":")[0] == TRANSIT:
            raise InvalidName("account to compact", account, "its postings are consumed by number (T36)")
        merged = 0
        for asset, (_, count) in (await self.store.read.balances.of(head.id)).items():
            left = min(count, most - merged)
            while left > 1:
                done = await self._merge(head, asset, min(left, COMPACT_MAX))
                merged += done
                left -= max(done - 1, COMPACT_MAX - 1)
        return merged

    async def _merge(self, head: Account, asset: int, count: int) -> int:
        found: Sequence[Any] = await self.store.read.postings.candidates("smallest", head.id, asset, count)
        if len(found) < 2:
            return 0
        intent = Intent(
            scope="compact",
            key=self.store.ports.token(),
            legs=(),
            kind=Kind.COMPACT,
            book=head.book or MAIN_BOOK,
            consume=tuple(sorted(p.id for p in found)),
            merge=head.path,
        )
        try:
            await self.writer.apply(Change((intent,)))
        except PostingNotLive:
            return 0  # somebody is paying with them; they will be merged another time
        except Refusal:
            return 0
        return len(found)

    async def close(self, path: str) -> Account:
        """Close an account for good. It must be empty, after its positive and negative postings are netted (L7)."""
        path = check_path(path)
        if path == HELD or path.partition(":")[0] == TRANSIT:
            raise InvalidName("account to close", path, "it belongs to holds or flows")
        if any((await self.store.read.balances.of((await self.account(path)).id)).values()):
            await self.compact(path)
        return await self.close_empty(path)

    async def recover(self) -> dict[str, int]:
        """Finish or cleanly abandon what a crash left half done. Safe at any time; a second call does nothing."""
        return await self.writer.recover()

    async def rebuild(self) -> int:
        """Make the disposable tables anew from the value tables. Returns how many postings are live."""
        async with self.store.unit(unhurried=True) as unit:
            await unit.rules.bump()
            if await unit.sagas.count():
                raise Conflict("commits are under way; run `bursar recover` first", 1)
            wide = await unit.balances.wide()
            live = await unit.postings.rebuild()
            await unit.balances.clear_cache()
            await unit.balances.clear_heads()
            sums = await unit.postings.sums()
            heads = await unit.accounts.heads_by_id(sorted({account for account, _, _, _ in sums} | wide))
            assets = {a.id: a for a in (await unit.rules.assets()).values()}
            guarded = [(a, s, v) for a, s, v, _ in sums if heads[a].floor(assets[s]) is not None]
            await unit.balances.put_heads(guarded)
            cached = [(a, s, 0, v) for a, s, v, _ in sums if not heads[a].selects or a in wide]
            await unit.balances.add_cache([(a, 0, 0, 0) for a in sorted(wide)] + cached)
        return live
