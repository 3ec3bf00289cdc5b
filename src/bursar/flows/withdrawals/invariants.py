"""I6: what withdrawals have requested is what they paid, with our fees, gave back, and still hold.

Checked in the database alone. Per asset the sums are compared: requested is what the records say, the rest is what the
ledger has booked in their names and what open holds still have. And per withdrawal: one that is open has exactly its
hold, one that was completed has a payout that was confirmed and entries that paid exactly amount and fee, one that
ended otherwise has given back all of it.

`CHECKS` are all checks of what leaves: those of payouts, and this. It reads page by page, and what belongs to a page at
once. `stop_if_unbalanced` looks at what is open and at what has ended lately, which is cheap enough to be done often.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Final

import msgspec

from bursar.audit import UNREADABLE, Check, Finding, audit, said
from bursar.engine import FlowRecord, set_pause
from bursar.engine.holds import number_of as hold_number
from bursar.flows.payouts.invariants import CHECKS as PAYOUT_CHECKS
from bursar.flows.payouts.machine import CONFIRMED, FAILED
from bursar.flows.payouts.machine import MACHINE as PAYOUTS
from bursar.flows.payouts.machine import OPEN as PAYOUT_OPEN
from bursar.flows.payouts.measures import WINDOW_S
from bursar.flows.payouts.payout import FEES, SOURCE, Payout, wallet_account
from bursar.flows.withdrawals.machine import COMPLETED, MACHINE, OPEN, QUEUED
from bursar.flows.withdrawals.withdrawal import RESULTS, Withdrawal, held
from bursar.flows.withdrawals.withdrawals import Withdrawals
from bursar.model.accounts import HELD
from bursar.model.actors import REASON_LENGTH_MAX
from bursar.model.entries import HoldState
from bursar.model.envelope import decode_legs
from bursar.model.flow_rows import RowState
from bursar.model.records import Record, owner_name
from bursar.store.columns import reader
from bursar.store.records import NEWEST
from bursar.store.session import Table
from bursar.store.sql import bring

PAGE: Final = 500  # withdrawals read at once
OWNED_MAX: Final = 1_000  # holds read at once
ENDED_MAX: Final = 1_000  # withdrawals that are looked at often, of those that have ended
HOLD_ENTRY, PAID_ENTRY, BACK_ENTRY = "hold", "confirm", "void"  # engine/holds: the keys of a record's entries
WHOLE: Final = f"{MACHINE.name}/"  # how the owners of holds, and the parents of payouts, begin

bring("bursar.flows.withdrawals")

_record = reader("record", Record)
Item = FlowRecord[Withdrawal]
Ordered = FlowRecord[Payout]
Leg = tuple[str, str, str, int]  # from, to, asset, smallest units


class OfWithdrawals(Table):
    """The statements of this check."""

    async def ended(self, since_us: int, limit: int) -> list[Record]:
        """Withdrawals that have ended within so many microseconds; no more than so many, the newest."""
        return await self._all(_record, "withdrawals_ended_lately", since_us, limit)

    async def by_id(self, flow: str, ids: Iterable[str]) -> dict[str, Record]:
        """Several records; those that are not there are missing."""
        wanted = sorted(set(ids))
        found = await self._all(_record, "records_by_id", flow, wanted) if wanted else []
        return {record.id: record for record in found}


class Page(msgspec.Struct):
    """What belongs to some withdrawals."""

    entries: dict[tuple[str, str], tuple[Leg, ...]]  # withdrawal and kind of entry → its movements
    holds: dict[int, tuple[str, str, int, str, bool]]  # account, asset, what remains, owner, whether it is open
    payouts: dict[str, list[Ordered]]  # by withdrawal, those that name it as parent


class WithdrawalSums(Check):
    """I6."""

    invariant = "I6"
    payout_states: tuple[tuple[str, ...], ...] = (PAYOUT_OPEN, (CONFIRMED,), (FAILED,))  # each along its index

    async def finish(self) -> None:
        self._requested: defaultdict[str, int] = defaultdict(int)
        self._accounted: defaultdict[str, int] = defaultdict(int)
        self._records = OfWithdrawals(self.scene.tables.session)
        await self._each(OPEN)
        await self._ended()
        await self._in_flight()
        for asset in sorted(self._requested.keys() | self._accounted.keys()):
            requested, accounted = self._requested[asset], self._accounted[asset]
            if requested != accounted:
                text = f"withdrawals have requested {requested} smallest units of {asset}"
                self.evidence.add(f"{text}, and {accounted} were paid, kept as fees, given back or are held")
        await self._parents()

    async def _each(self, states: tuple[str, ...]) -> None:
        """Withdrawals in these states, along their index."""
        async for page in self._pages(MACHINE.name, states):
            await self._page(self._readable(page))

    async def _pages(self, flow: str, states: tuple[str, ...]) -> AsyncIterator[Sequence[Record]]:
        before = NEWEST
        while page := await self.scene.tables.records.list(flow, states=states, before=before, limit=PAGE):
            before = page[-1].number
            yield page

    async def _ended(self) -> None:
        """Those that have ended, whenever that was."""
        for state in RESULTS:
            await self._each((state,))

    def _readable(self, page: Sequence[Record]) -> list[Item]:
        found = []
        for record in page:
            try:
                found.append(FlowRecord(record, msgspec.json.decode(record.body, type=Withdrawal)))
            except UNREADABLE as error:
                self.evidence.add(f"withdrawal {record.id} can't be read ({said(error)})")
        return found

    # --- what belongs to a page ------------------------------------------------------------------------------------

    async def _page(self, items: list[Item]) -> None:
        page = Page(await self._entries(items), await self._holds(items), await self._payouts(items))
        for item in items:
            self.checked += 1
            wanted = held(item)
            self._requested[wanted.asset] += wanted.amount
            for kind in (PAID_ENTRY, BACK_ENTRY):
                self._accounted[wanted.asset] += sum(
                    amount
                    for source, _, asset, amount in page.entries.get((item.id, kind), ())
                    if (source, asset) == (HELD, wanted.asset)
                )
            self._judge_money(item, page)
            self._judge_payouts(item, page.payouts[item.id])

    async def _entries(self, items: list[Item]) -> dict[tuple[str, str], tuple[Leg, ...]]:
        kinds = (HOLD_ENTRY, PAID_ENTRY, BACK_ENTRY)
        keys = [(MACHINE.name, f"{item.id}:{kind}") for item in items for kind in kinds]
        stored = await self.scene.tables.envelopes.existing(keys)
        booked = {}
        for (_, key), entry in stored.items():
            id_, _, kind = key.rpartition(":")
            booked[id_, kind] = decode_legs(entry.legs)
        accounts = {account for legs in booked.values() for leg in legs for account in (leg.source, leg.target)}
        heads = await self.scene.tables.accounts.heads_by_id(sorted(accounts))
        paths = {number: head.path for number, head in heads.items()}
        return {
            key: tuple(
                (paths.get(leg.source, ""), paths.get(leg.target, ""), self._code(leg.asset), leg.minor) for leg in legs
            )
            for key, legs in booked.items()
        }

    async def _holds(self, items: list[Item]) -> dict[int, tuple[str, str, int, str, bool]]:
        numbers = [hold_number(item) for item in items if item.record.in_flight_posting]
        return {
            hold.id: (account.path, self._code(hold.asset), hold.remaining, hold.owner, hold.state is HoldState.OPEN)
            for hold, account in await self.scene.tables.holds.get(numbers)
        }

    async def _payouts(self, items: list[Item]) -> dict[str, list[Ordered]]:
        """The payouts that a withdrawal knows, and the one that has it as its source: those that name it as parent."""
        tables = self.scene.tables
        records = await self._records.by_id(PAYOUTS.name, [id_ for item in items for id_ in item.body.payouts])
        rows = await tables.flow_rows.by_keys(PAYOUTS.name, SOURCE.name, [item.id for item in items])
        known = {record.number for record in records.values()}
        more = sorted({row.record for row in rows.values() if row.state is RowState.HELD} - known)
        records |= {record.id: record for record in await tables.records.by_numbers(more)} if more else {}
        found: dict[str, list[Ordered]] = {item.id: [] for item in items}
        for record in records.values():
            payout = self._payout(record)
            if payout is not None and payout.body.parent.removeprefix(WHOLE) in found:
                found[payout.body.parent.removeprefix(WHOLE)].append(payout)
        return found

    def _payout(self, record: Record) -> Ordered | None:
        try:
            return FlowRecord(record, msgspec.json.decode(record.body, type=Payout))
        except UNREADABLE:
            return None  # the checks of payouts say so

    def _code(self, asset: int) -> str:
        known = self.scene.assets.get(asset)
        return "" if known is None else known.code

    # --- judging ---------------------------------------------------------------------------------------------------

    def _judge_money(self, item: Item, page: Page) -> None:
        wanted, payment = held(item), item.body.payment
        account, asset, amount = wanted.account, wanted.asset, wanted.amount
        there = {kind: page.entries.get((item.id, kind), ()) for kind in (HOLD_ENTRY, PAID_ENTRY, BACK_ENTRY)}
        what = f"withdrawal {item.id} is {item.record.state}"
        if (account, HELD, asset, amount) not in there[HOLD_ENTRY]:
            self.evidence.add(f"{what}, and {amount} smallest units of {asset} of {account} were never set aside")
        paid: tuple[Leg, ...] = ()
        back: tuple[Leg, ...] = ()
        if item.record.state in OPEN:
            owner = owner_name(MACHINE.name, item.id)
            hold = page.holds.get(hold_number(item)) if item.record.in_flight_posting else None
            if hold is None or not hold[4]:
                self.evidence.add(f"{what}, and no open hold is its own")
            elif hold[:4] != (account, asset, amount, owner):
                says = f"{amount} smallest units of {asset} of {account}"
                found = f"{hold[2]} of {hold[1]} of {hold[0]} for {hold[3]}"
                self.evidence.add(f"{what} and holds {says}, its hold is {found}")
        elif item.record.state == COMPLETED:
            wallet = next((w for w in map(_wallet, page.payouts[item.id]) if w), "")
            paid = ((HELD, wallet, asset, int(payment.amount)),)
            paid += ((HELD, FEES, asset, int(payment.fee)),) if int(payment.fee) else ()
        else:
            back = ((HELD, account, asset, amount),)
        for kind, right in ((PAID_ENTRY, paid), (BACK_ENTRY, back)):
            if sorted(there[kind]) != sorted(right):
                done = "has paid" if kind == PAID_ENTRY else "has given back"
                self.evidence.add(f"{what}, and {done} {_told(there[kind])}, not {_told(right)}")

    def _judge_payouts(self, item: Item, payouts: list[Ordered]) -> None:
        body, state, what = item.body, item.record.state, f"withdrawal {item.id} is {item.record.state}"
        for unknown in {payout.id for payout in payouts} - set(body.payouts):
            self.evidence.add(f"{what}, and does not know payout {unknown}, which names it")
        confirmed = [payout for payout in payouts if payout.record.state == CONFIRMED]
        open_ = [p for p in payouts if p.record.state in PAYOUT_OPEN and not p.body.detached]  # that one is given up
        if state == COMPLETED:
            hashes = {payout.body.result.hash for payout in confirmed}
            if len(confirmed) != 1 or open_:
                self.evidence.add(f"{what}, and {len(confirmed)} of its payouts were confirmed, {len(open_)} are open")
            elif body.tx_hash and hashes != {body.tx_hash}:
                self.evidence.add(f"{what} by {body.tx_hash}, and its payout by {', '.join(hashes)}")
        elif state == QUEUED:
            # The word of a payout that has ended may be in the inbox, for the next look.
            if len(open_) != 1 and not item.record.inbox:
                self.evidence.add(f"{what}, and {len(open_)} of its payouts are open")
        # One that the signer knew is taken up by a withdrawal that does not wait for it yet (W33).
        elif (confirmed or open_) and not (state in OPEN and body.adopted):
            names = ", ".join(payout.id for payout in (*confirmed, *open_))
            self.evidence.add(f"{what}, and its payouts were confirmed or are open: {names}")

    # --- the other sides -------------------------------------------------------------------------------------------

    async def _in_flight(self) -> None:
        """What open holds have for withdrawals, also those that no record knows."""
        after = 0
        while page := await self.scene.tables.checks.owned_holds(after, OWNED_MAX):
            after = page[-1][0]
            for _, asset, remaining, _, owner in page:
                if owner.startswith(WHOLE):
                    self._accounted[self._code(asset)] += remaining

    async def _parents(self) -> None:
        """Every payout that was ordered by a withdrawal has one that knows it."""
        for states in self.payout_states:
            async for page in self._pages(PAYOUTS.name, states):
                payouts = [payout for record in page if (payout := self._payout(record)) is not None]
                ordered = {p.id: p.body.parent.removeprefix(WHOLE) for p in payouts if p.body.parent.startswith(WHOLE)}
                parents = await self._records.by_id(MACHINE.name, ordered.values())
                for id_, parent in ordered.items():
                    record = parents.get(parent)
                    if record is None:
                        self.evidence.add(f"payout {id_} was ordered by withdrawal {parent}, which does not exist")
                    elif id_ not in _known(record):
                        self.evidence.add(f"payout {id_} was ordered by withdrawal {parent}, which does not know it")


class WithdrawalsLately(WithdrawalSums):
    """The same of what is open, and of what has ended within the last hour."""

    payout_states = (PAYOUT_OPEN,)

    async def _ended(self) -> None:
        await self._page(self._readable(await self._records.ended(WINDOW_S * 10**6, ENDED_MAX)))


CHECKS: Final[tuple[type[Check], ...]] = (*PAYOUT_CHECKS, WithdrawalSums)


async def stop_if_unbalanced(withdrawals: Withdrawals) -> Finding:
    """I6 once, of what is open and of what has ended lately: if it is broken, no payout is ordered before two people
    have looked."""
    store = withdrawals.engine.store
    (finding,) = await audit(store, only=("I6",), more=(WithdrawalsLately,))
    if not finding.ok:
        reason = f"I6 is broken: {'; '.join(finding.broken)}"[:REASON_LENGTH_MAX]
        await set_pause(store, "flow", MACHINE.name, actor="audit", reason=reason, two_people=True)
        await withdrawals.engine.alert(None, "withdrawals and ledger disagree", "critical", reason)
    return finding


async def watch_withdrawals(withdrawals: Withdrawals, interval_s: float) -> None:
    """Until cancelled: compare withdrawals with the ledger from time to time. 0 seconds: never."""
    while interval_s:
        await withdrawals.engine.ports.sleep(interval_s)
        await stop_if_unbalanced(withdrawals)


def _wallet(payout: Ordered) -> str:
    """The account of the wallet that a payout was paid from; "" if it was not."""
    return wallet_account(payout.body.payment.chain, payout.body.wallet) if payout.record.state == CONFIRMED else ""


def _known(record: Record) -> Sequence[str]:
    try:
        return msgspec.json.decode(record.body, type=Withdrawal).payouts
    except UNREADABLE:
        return ()


def _told(legs: Sequence[Leg]) -> str:
    return ", ".join(f"{amount} {asset} to {target}" for _, target, asset, amount in legs) or "nothing"
