"""I6 for deposits from chains: what was booked for an arrival is exactly what the arrival says, once, and else nothing.

Checked in the database alone, page by page. An arrival that was credited, or is in suspense, has one entry: from the
account of the wallet that received it, over the amount that it says, to the account that it says. One that is held,
rejected or our own has none. And its address is one that was issued to its user. What lies on the chain is I9.

`CHECKS` are all checks of what leaves and of what arrives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from bursar.audit import UNREADABLE, Check, said
from bursar.engine import FlowRecord
from bursar.flows.deposits.arrivals import ARRIVALS, CREDITED, SUSPENSE, Arrived
from bursar.flows.payouts.derived import ADDRESS, ADDRESSES, Owned, address_key
from bursar.flows.payouts.payout import wallet_account
from bursar.flows.transfers.incoming import DEPOSITS
from bursar.flows.transfers.request import SUSPENSE_DEPOSITS, funding_account
from bursar.flows.withdrawals.invariants import CHECKS as LEAVING
from bursar.model.envelope import decode_legs
from bursar.model.records import Record
from bursar.store.records import NEWEST

PAGE: Final = 500  # arrivals read at once
Item = FlowRecord[Arrived]
Legs = list[tuple[str, str, str, int]]  # from, to, asset, smallest units


class ArrivalsBooked(Check):
    """I6."""

    invariant = "I6"

    async def finish(self) -> None:
        before = NEWEST
        while page := await self.scene.tables.records.list(ARRIVALS.name, before=before, limit=PAGE):
            before = page[-1].number
            items = self._readable(page)
            entries, owners = await self._entries(items), await self._owners(items)
            for item in items:
                self.checked += 1
                self._judge(item, entries.get(item.id), owners.get(address_key(item.body.chain, item.body.to)))

    def _readable(self, page: Sequence[Record]) -> list[Item]:
        found = []
        for record in page:
            try:
                found.append(FlowRecord(record, msgspec.json.decode(record.body, type=Arrived)))
            except UNREADABLE as error:
                self.evidence.add(f"arrival {record.id} can't be read ({said(error)})")
        return found

    async def _entries(self, items: Sequence[Item]) -> dict[str, Legs]:
        """What was booked under the name of each arrival."""
        stored = await self.scene.tables.envelopes.existing([(DEPOSITS, item.id) for item in items])
        booked = {key: decode_legs(entry.legs) for (_, key), entry in stored.items()}
        accounts = {account for legs in booked.values() for leg in legs for account in (leg.source, leg.target)}
        heads = await self.scene.tables.accounts.heads_by_id(sorted(accounts))
        paths = {number: head.path for number, head in heads.items()}
        codes = {number: asset.code for number, asset in self.scene.assets.items()}
        return {
            key: [(paths.get(x.source, ""), paths.get(x.target, ""), codes.get(x.asset, ""), x.minor) for x in legs]
            for key, legs in booked.items()
        }

    async def _owners(self, items: Sequence[Item]) -> dict[str, Owned]:
        keys = {address_key(item.body.chain, item.body.to) for item in items}
        rows = await self.scene.tables.flow_rows.by_keys(ADDRESSES.name, ADDRESS.name, keys)
        return {key: msgspec.json.decode(row.body, type=Owned) for key, row in rows.items()}

    def _judge(self, item: Item, booked: Legs | None, owner: Owned | None) -> None:
        body, what = item.body, f"arrival {item.id} is {item.record.state}"
        if owner is None or (owner.wallet, owner.user) != (body.wallet, body.user):
            self.evidence.add(f"{what} for user {body.user}, to whom {body.to} was not issued")
        if item.record.state not in (CREDITED, SUSPENSE):
            if booked is not None:
                self.evidence.add(f"{what}, and something was booked for it")
            return
        account = SUSPENSE_DEPOSITS if item.record.state == SUSPENSE else funding_account(body.user)
        right = [(wallet_account(body.chain, body.wallet), account, body.asset, int(body.minor))]
        if booked != right:
            self.evidence.add(f"{what}, and {booked or 'nothing'} was booked for it, not {right}")


CHECKS: Final[tuple[type[Check], ...]] = (*LEAVING, ArrivalsBooked)
