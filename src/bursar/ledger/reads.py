"""Reads: balances now, at a moment and by prefix; history, envelopes, postings, events. Nothing here writes value."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import datetime
from typing import Any

import msgspec

from bursar.ledger.rules import RuleBook, check_limit, find_asset
from bursar.model.accounts import Account, check_path, plain_text
from bursar.model.envelope import decode_ids, decode_legs, decode_pins
from bursar.model.errors import BursarError, InvalidName, UnknownBook, UnknownEnvelope
from bursar.model.money import Asset, Money
from bursar.model.postings import SEQ_MAX
from bursar.model.records import Event, StoredEnvelope, StoredPosting
from bursar.model.views import EnvelopeView, HistoryLine, MovementView, PostingView, microseconds, moment
from bursar.store.envelopes import FIRST_PLACE, FOREVER_US, LAST_PLACE, Place
from bursar.store.rows import parse_cursor

REVERSE = "reverse"  # the scope of reversals
WIDE = 1_000  # live postings of one asset from which an account's balance is kept in the cache
PAGE = 500
POLL_S = 0.2  # how often a follower looks for events of other processes


class Reads(RuleBook):
    """The reading half of the ledger."""

    async def balance(
        self, account: str | None = None, asset: str = "", *, prefix: str | None = None, at: datetime | None = None
    ) -> Money:
        """What an account has of an asset; with `prefix`, an account and all below it; with `at`, what it had then."""
        if asset == "":
            raise InvalidName("asset code", "", "say of which asset; `balances` has all of them")
        kind = await self.asset(asset)
        return kind.of_minor((await self._asked(account, prefix, at)).get(kind.id, 0))

    async def balances(
        self, account: str | None = None, *, prefix: str | None = None, at: datetime | None = None
    ) -> dict[str, Money]:
        """The same of all assets, by code; those of which there are no postings (any more) are missing."""
        sums = await self._asked(account, prefix, at)
        assets = {a.id: a for a in (await self.assets()).values()}
        return {assets[i].code: assets[i].of_minor(minor) for i, minor in sorted(sums.items())}

    async def _asked(self, account: str | None, prefix: str | None, at: datetime | None) -> dict[int, int]:
        """asset → sum: of an account or of all below a prefix, now or then."""
        at_us = None if at is None else microseconds(at)
        if account is not None and prefix is None:
            head = await self.account(account)
            return await self._sums(head) if at_us is None else await self.store.read.balances.at([head.id], at_us)
        if prefix is None or account is not None:
            raise InvalidName("question", f"{account}, {prefix}", "give either an account or a prefix")
        if at_us is None:
            return await self.store.read.balances.by_prefix(check_path(prefix))
        total: Counter[int] = Counter()
        after = ""
        while page := await self.accounts(check_path(prefix), after=after, limit=PAGE):
            for asset, minor in (await self.store.read.balances.at([head.id for head in page], at_us)).items():
                total[asset] += minor
            after = page[-1].path
        return dict(total)

    async def _sums(self, head: Account) -> dict[int, int]:
        """From the cache where there is one, else from the live postings."""
        if not head.pays_from_postings or head.id in await self.store.read.balances.cached_accounts():
            return await self.store.read.balances.cached(head.id)
        found = await self.store.read.balances.of(head.id)
        if any(count > WIDE for _, count in found.values()):
            with contextlib.suppress(BursarError):  # a cache that can't be made is only slow
                await self.widen(head, soon=True)  # a reader must not wait for another transaction
        return {asset: amount for asset, (amount, _) in found.items()}

    async def history(
        self,
        account: str,
        *,
        before: int | None = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
    ) -> list[HistoryLine]:
        """Envelopes an account took part in, newest first; `before` is the last envelope of the page before.

        The order is that of the events, so it never changes. While a transaction is open elsewhere, what it will add
        can still come below lines that are here already: to see every entry once, follow `envelopes` or `events`.
        """
        head = await self.account(account)
        rows = await self.store.read.envelopes.of_account(
            head.id,
            before=SEQ_MAX if before is None else _number(before),
            place=LAST_PLACE if before is None else await self._place(before),
            since_us=0 if since is None else microseconds(since),
            until_us=FOREVER_US if until is None else microseconds(until),
            limit=check_limit(limit),
        )
        names = await self._names(rows)
        undone = await self._reversals(rows)
        return [names.line(row, head.id, undone.get(row.seq)) for row in rows]

    async def envelope(self, envelope: int | str) -> EnvelopeView:
        """One envelope whole: by number, or by content hash (which looks at all of them)."""
        row = await self._stored(envelope)
        names = await self._names([row])
        consumes = await self.store.read.postings.get(decode_ids(row.consumes))
        creates = await self.store.read.postings.of_envelopes(row.seq, row.seq)
        return names.envelope(row, consumes, creates, (await self._reversals([row])).get(row.seq))

    async def envelope_by_key(self, key: str, *, scope: str = "user") -> EnvelopeView:
        """The envelope that a key stands for."""
        taken = await self.store.read.envelopes.existing([(plain_text("scope", scope), plain_text("key", key))])
        if not taken:
            raise UnknownEnvelope(f"with key {key!r}")
        return await self.envelope(taken[scope, key].seq)

    async def envelopes(self, *, after: int = 0, book: str | None = None, limit: int = 100) -> list[EnvelopeView]:
        """Envelopes in the order of events; of one book if given. Going on `after` the last one seen skips none.

        An envelope is here once no transaction that is still open can come before it (decision 5).
        """
        books = await self.books()
        if book is not None and (not isinstance(book, str) or book not in books):
            raise UnknownBook(str(book))
        number = 0 if book is None else books[book].id
        place = await self._place(after) if _number(after) else FIRST_PLACE
        rows = await self.store.read.envelopes.after_place(place, book=number, limit=check_limit(limit))
        return [await self.envelope(row.seq) for row in rows]

    async def _reversals(self, rows: Sequence[StoredEnvelope]) -> dict[int, int]:
        """Which of them were reversed, and by which: a reversal has the number of what it reverses for its key."""
        found = await self.store.read.envelopes.existing([(REVERSE, str(row.seq)) for row in rows])
        return {int(key): taken.seq for (_, key), taken in found.items()}

    async def _place(self, envelope: int) -> Place:
        """Where an envelope stands in the order of events. One that is not there has no place to go on from."""
        place = await self.store.read.envelopes.place(_number(envelope))
        if place is None:
            raise UnknownEnvelope(str(envelope))
        return place

    async def _stored(self, envelope: int | str) -> StoredEnvelope:
        """An envelope's row, by its number or its content hash."""
        seq: int | None = envelope if type(envelope) is int and 0 < envelope <= SEQ_MAX else None
        if isinstance(envelope, str):
            try:
                data = bytes.fromhex(envelope)
            except ValueError:
                data = b""
            seq = await self.store.read.envelopes.by_hash(data) if len(data) == 32 else None
        rows = [] if seq is None else await self.store.read.envelopes.get([seq])
        if not rows:
            raise UnknownEnvelope(str(envelope))
        return rows[0]

    async def postings(
        self, account: str, asset: str | None = None, *, live_only: bool = True, after: int = 0, limit: int = 100
    ) -> list[PostingView]:
        """Postings of an account by number; spent ones too if asked for."""
        head = await self.account(account)
        kinds = await self.assets()
        rows = await self.store.read.postings.of_account(
            head.id,
            asset=0 if asset is None else find_asset(kinds, asset).id,
            live_only=live_only,
            after=_number(after),
            limit=check_limit(limit),
        )
        names = Names({head.id: head}, {a.id: a for a in kinds.values()}, {})
        return [names.posting(row) for row in rows]

    async def events(self, after: str = "", *, limit: int = 100) -> list[Event]:
        """Events after a cursor, in order. An event is never skipped, however late its commit."""
        parse_cursor(after)
        return await self.store.read.events.since(after, check_limit(limit))

    async def follow(self, after: str = "") -> AsyncIterator[Event]:
        """All events after a cursor, and then those to come: `async for event in ledger.follow(cursor)`."""
        while True:
            page = await self.events(after, limit=PAGE)
            for event in page:
                yield event
                after = event.cursor
            if not page:
                await self.store.ports.sleep(POLL_S)

    async def _names(self, rows: Sequence[StoredEnvelope]) -> Names:
        ids = {account for row in rows for account, _ in decode_pins(row.pins)}
        heads, assets, books = await asyncio.gather(
            self.store.read.accounts.heads_by_id(sorted(ids)), self.assets(), self.books()
        )
        return Names(heads, {a.id: a for a in assets.values()}, {b.id: b.name for b in books.values()})


def _number(number: int) -> int:
    """The same number of a row, or a refusal."""
    if type(number) is not int or not 0 <= number < 2**63:
        raise InvalidName("number", str(number), "a whole number is expected")
    return number


class Names:
    """Turns row numbers into names."""

    def __init__(self, accounts: dict[int, Account], assets: dict[int, Asset], books: dict[int, str]) -> None:
        self.accounts = accounts
        self.assets = assets
        self.books = books

    def _entry(self, row: StoredEnvelope, reversed_by: int | None) -> dict[str, Any]:
        """The fields of an `EntryView`."""
        movements = tuple(
            MovementView(
                source=self.accounts[leg.source].path,
                target=self.accounts[leg.target].path,
                amount=self.assets[leg.asset].of_minor(leg.minor),
            )
            for leg in decode_legs(row.legs)
        )
        return {
            "envelope": row.seq,
            "key": row.key,
            "kind": row.kind,
            "reverses": row.reverses or None,
            "reversed_by": reversed_by,
            "at": moment(row.at_us),
            "metadata": msgspec.json.decode(row.metadata, type=dict[str, Any]),
            "movements": movements,
        }

    def line(self, row: StoredEnvelope, account: int, reversed_by: int | None) -> HistoryLine:
        """An envelope as one account sees it."""
        net: dict[int, int] = {}
        for leg in decode_legs(row.legs):
            for who, sign in ((leg.source, -1), (leg.target, 1)):
                if who == account:
                    net[leg.asset] = net.get(leg.asset, 0) + sign * leg.minor
        changes = tuple(self.assets[asset].of_minor(minor) for asset, minor in sorted(net.items()))
        return HistoryLine(changes=changes, **self._entry(row, reversed_by))

    def posting(self, stored: StoredPosting) -> PostingView:
        """A posting with names."""
        p = stored.posting
        return PostingView(
            id=p.id,
            account=self.accounts[p.account].path,
            amount=self.assets[p.asset].of_minor(p.amount),
            state=stored.state,
            created_by=p.envelope,
            spent_by=stored.spender,
        )

    def envelope(
        self,
        row: StoredEnvelope,
        consumes: Iterable[StoredPosting],
        creates: Iterable[StoredPosting],
        reversed_by: int | None,
    ) -> EnvelopeView:
        """An envelope whole."""
        return EnvelopeView(
            **self._entry(row, reversed_by),
            id=row.id.hex(),
            scope=row.scope,
            book=self.books[row.book],
            consumes=tuple(self.posting(p) for p in consumes),
            creates=tuple(self.posting(p) for p in creates),
        )
