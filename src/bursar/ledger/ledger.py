"""The ledger: what callers use. Entries, reversal, upkeep; holds, reads and rules are its other parts.

Every entry has a key before its first attempt (made for the caller if none was given), so that whatever breaks on the
way, trying again can only find what is already there (L18).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from bursar.ledger.holds import TRIES, Holds
from bursar.ledger.reads import REVERSE
from bursar.model.accounts import HELD, MAIN_BOOK, Account, Policy, by_number, check_path, check_policy
from bursar.model.entries import USER_SCOPE, Entry, EntryKind, Intent, Leg, encode_metadata, intend
from bursar.model.envelope import Receipt, decode_legs, decode_pins
from bursar.model.errors import (
    BursarError,
    Conflict,
    InvalidName,
    PostingNotLive,
    Refusal,
    UnknownAsset,
)
from bursar.model.postings import PostingState
from bursar.writer import Change

REVERSIBLE = (USER_SCOPE, REVERSE, "sequence", "deposits")  # scopes of entries that are whole in themselves
COMPACT_MAX = 1_000  # postings merged by one envelope
MANY_MAX = 10_000  # entries of commit_many that wait at once


class Ledger(Holds):
    """A posting ledger on a store."""

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
        left = iter(entries)
        while waiting := list(islice(left, MANY_MAX)):
            results += await asyncio.gather(*[self._one(entry) for entry in waiting])
        return results

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
        value, under the account's policy (L22). What was paid from a hold goes back to the account that it was held
        for; the hold itself stays as it is.
        """
        row = await self._stored(envelope)
        seq = row.seq
        if row.kind is EntryKind.COMPACT:
            raise InvalidName("envelope to reverse", str(seq), "it only merged postings; nothing moved")
        if row.scope == "void":
            raise InvalidName("envelope to reverse", str(seq), "it gave back what was held; authorize it again")
        if row.scope not in REVERSIBLE:  # its other side is elsewhere: the money would be in both places
            raise InvalidName(
                "envelope to reverse", str(seq), f"it is one side of what {row.scope} does; undo it there"
            )
        heads = await self.store.read.accounts.heads_by_id([account for account, _ in decode_pins(row.pins)])
        moved = decode_legs(row.legs)
        assets = await self._numbered([leg.asset for leg in moved])
        book = await self._book_name(row.book)
        payer = {number: head.path for number, head in heads.items()}
        held = next((number for number, path in payer.items() if path == HELD), 0)
        if held:
            payer[held] = await self._held_from(seq)
        legs = tuple(
            Leg(heads[leg.target].path, payer[leg.source], assets[leg.asset].code, leg.minor) for leg in reversed(moved)
        )
        for _ in range(TRIES):
            created = await self.store.read.postings.of_envelopes(seq, seq)
            intent = Intent(
                scope=REVERSE,
                key=str(seq),
                legs=legs,
                book=book,
                metadata=encode_metadata(metadata or {}),
                kind=EntryKind.RETURN,
                reverses=seq,
                consume=tuple(
                    p.posting.id
                    for p in created
                    if p.state is PostingState.LIVE and p.posting.account != held  # what is held still, stays so
                ),
            )
            try:
                return (await self.writer.apply(Change((intent,)))).receipts[0]
            except PostingNotLive:
                continue  # spent since we looked: look again
        raise Conflict(f"the postings of envelope {seq} keep moving", TRIES)

    async def _held_from(self, seq: int) -> str:
        """Whose money a confirmation has paid: reversed, it goes back there, and not into the hold."""
        view = await self.envelope(seq)
        hold = await self._held_by(view)
        if hold == seq:
            raise InvalidName("envelope to reverse", str(seq), f"it set money aside; void hold {seq} to give it back")
        account = (await self._hold_row(hold))[1].path
        if any(movement.target == account for movement in view.movements):
            raise InvalidName("envelope to reverse", str(seq), f"it paid what was held back to {account} itself")
        return account

    # --- upkeep ------------------------------------------------------------------------------------------------

    async def compact(self, account: str, *, most: int = 1_000_000) -> int:
        """Merge the postings of an account, so that it can pay large amounts. Returns how many were merged."""
        head = await self.account(account)
        if by_number(head.path):
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
            kind=EntryKind.COMPACT,
            book=head.book or MAIN_BOOK,
            consume=tuple(sorted(p.id for p in found)),
            merge=head.path,
        )
        try:
            await self.writer.apply(Change((intent,)))
        except Refusal:
            return 0  # another commit pays with them, say; they will be merged another time
        return len(found)

    async def close(self, path: str) -> Account:
        """Close an account for good. It must be empty, after its positive and negative postings are netted (L7), and no
        end of a transfer that is under way; where trading cores hold money, `Transfers.close_account` asks them."""
        path = check_path(path)
        if by_number(path):
            raise InvalidName("account to close", path, "it belongs to holds or flows")
        if any((await self.store.read.balances.of((await self.account(path)).id)).values()):
            await self.compact(path)
        return await self.close_empty(path)

    async def change_policy(self, path: str, policy: Policy) -> Account:
        """A new policy. One that forbids owing is refused while the account owes."""
        if await self._owes_nothing(await self.account(path), policy):
            await self.compact(path)  # its negative postings are covered by others: what counts is their sum (L7)
        return await super().change_policy(path, policy)

    async def _owes_nothing(self, head: Account, policy: Policy) -> bool:
        """Whether it has negative postings which the policy forbids, but no balance below zero."""
        new = Account(id=head.id, path=head.path, policy=check_policy(policy))
        read = self.store.read
        sums = await read.balances.of(head.id)
        kinds = (await self.assets()).values()
        forbidden = [asset.id for asset in kinds if asset.id in sums and not new.may_owe(asset)]
        if by_number(head.path) or any(sums[asset][0] < 0 for asset in forbidden):
            return False
        return any([await read.postings.candidates("most_negative", head.id, asset, 1) for asset in forbidden])

    async def rebuild(self) -> int:
        """Make the disposable tables anew from the value tables. Returns how many postings are live."""
        async with self.store.transaction(unhurried=True) as unit:
            await unit.rules.bump()
            await self._check_settled(unit)
            wide = await unit.balances.cached_accounts()
            live = await unit.postings.rebuild()
            await unit.balances.clear_cache()
            await unit.balances.clear_guarded()
            sums = await unit.postings.sums()
            heads = await unit.accounts.heads_by_id(sorted({account for account, _, _, _ in sums} | wide))
            assets = {a.id: a for a in (await unit.rules.assets()).values()}
            guarded = [(a, s, v) for a, s, v, _ in sums if heads[a].floor(assets[s]) is not None]
            await unit.balances.put_guarded(guarded)
            cached = [(a, s, 0, v) for a, s, v, _ in sums if not heads[a].pays_from_postings or a in wide]
            await unit.balances.add_cache([(a, 0, 0, 0) for a in sorted(wide)] + cached)
        return live
