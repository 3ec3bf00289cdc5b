"""What the invariants mean for payouts, checked in the database alone: I4 (what is held) and I7 (one effect each).

`bursar audit` brings these to the audit of the database, so that all is judged over one moment. Payouts are read page
by page, and what belongs to a page is read at once, so the number of queries grows with pages and not with rows. Not
here: what the wallets have on their chains (coverage).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec

from bursar.audit import UNREADABLE, Check, said
from bursar.engine import FORCED_BY, FlowRecord
from bursar.engine.holds import number_of as hold_number
from bursar.flows.payouts.documents import WALLET, WalletDocument
from bursar.flows.payouts.machine import CHAINS, CONFIRMED, FAILED, MACHINE, OPEN, PAID, REPLACEMENTS
from bursar.flows.payouts.payout import (
    ATTEMPT,
    HASH,
    NONCE,
    RESERVED,
    SPENT,
    UNCONFIRMED,
    Attempt,
    Payout,
    attempt_key,
    held,
)
from bursar.flows.payouts.wallets import nonce_key
from bursar.model.entries import HoldState
from bursar.model.flow_rows import FlowRow, RowState, numbered
from bursar.model.records import Record, Transition, owner_name
from bursar.rails.chain import Shape
from bursar.store.records import NEWEST
from bursar.store.tables import Tables

PAGE: Final = 500  # payouts read at once: each brings its attempts with their bytes
NUMBERS_MAX: Final = 1_000  # attempts of one payout that are looked for: beyond that its body is damaged


async def read_wallets(tables: Tables) -> dict[str, WalletDocument]:
    """Every wallet that there ever was, by name. The address of one never changes."""
    found: dict[str, WalletDocument] = {}
    after = ""
    while page := await tables.documents.list(WALLET.name, after=after):
        after = page[-1].name
        found |= {each.name: msgspec.json.decode(each.body, type=WalletDocument) for each in page}
    return found


class PayoutHolds(Check):
    """I4: what is held in the ledger for a payout that is open is what the payout says, of the account that it says."""

    invariant = "I4"

    async def finish(self) -> None:
        before = NEWEST
        tables = self.scene.tables
        while page := await tables.records.list(MACHINE.name, states=OPEN, before=before, limit=PAGE):
            before = page[-1].number
            items = [item for item in readable(page, self) if not item.body.parent]  # else its parent has the hold
            numbers = [hold_number(item) for item in items if item.record.in_flight_posting]
            holds = {hold.id: (hold, account.path) for hold, account in await tables.holds.get(numbers)}
            for item in items:
                self.checked += 1
                wanted = held(item)
                expected = (wanted.account, wanted.asset, wanted.amount, owner_name(MACHINE.name, item.id))
                hold, path = holds.get(hold_number(item), (None, ""))
                if hold is None or hold.state is not HoldState.OPEN:
                    self.evidence.add(f"payout {item.id} is {item.record.state}, and no open hold is its own")
                elif (path, self._code(hold.asset), hold.remaining, hold.owner) != expected:
                    there = f"{self.scene.money(hold.asset, hold.remaining)} of {path} for {hold.owner}"
                    says = f"{wanted.amount} smallest units of {wanted.asset} of {wanted.account}"
                    self.evidence.add(f"payout {item.id} holds {says}, hold {hold.id} is {there}")

    def _code(self, asset: int) -> str:
        known = self.scene.assets.get(asset)
        return "" if known is None else known.code


class PayoutEffects(Check):
    """I7: at most one attempt of a payout is in effect.

    A hash and a nonce are one payout's. A payout that was confirmed has one attempt, a payment, that its result names.
    What took a nonce on the chain is an attempt of the payout that has the nonce. What is reserved of a wallet for a
    payout that is open is what it needs, and nothing is reserved for one that has ended.
    """

    invariant = "I7"

    async def finish(self) -> None:
        tables = self.scene.tables
        wallets = await read_wallets(tables)
        addresses = {name: wallet.address for name, wallet in wallets.items()}
        adopted: dict[str, str] = {}  # nonces that only the signer's log knew (W33): they have no row
        for states in (OPEN, (CONFIRMED,), (FAILED,)):  # each along its index
            before = NEWEST
            while page := await tables.records.list(MACHINE.name, states=states, before=before, limit=PAGE):
                before = page[-1].number
                await self._page(readable(page, self), addresses, adopted)
        await self._spent()

    async def _page(self, items: list[FlowRecord[Payout]], addresses: dict[str, str], adopted: dict[str, str]) -> None:
        rows = self.scene.tables.flow_rows
        own: dict[int, list[FlowRow]] = {item.record.number: [] for item in items}
        for row in await rows.of_records(list(own)):
            own[row.record].append(row)
        keys = {attempt_key(item.id, number): item.id for item in items for number in _numbers(item.body)}
        replaced: dict[str, list[FlowRow]] = {item.id: [] for item in items}
        for key, row in (await rows.by_keys(REPLACEMENTS.name, ATTEMPT.name, keys)).items():
            replaced[keys[key]].append(row)
        found = {item.id: self._attempts(item, own[item.record.number], replaced[item.id]) for item in items}
        hashes = await self._hashes(items, found)
        taken = await self._taken(items, found, addresses)
        for item in items:
            self.checked += 1
            attempts, mine = found[item.id], own[item.record.number]
            self._judge_hashes(item, attempts, hashes)
            await self._judge_result(item, attempts)
            self._judge_nonces(item, attempts, mine, taken, addresses, adopted)
            self._judge_reserved(item, mine)

    def _attempts(
        self, item: FlowRecord[Payout], own: Iterable[FlowRow], replaced: Iterable[FlowRow]
    ) -> list[tuple[FlowRow, Attempt]]:
        """The attempts of a payout with their rows; those of its replacements too."""
        found: list[tuple[FlowRow, Attempt]] = []
        for row in (*(row for row in own if row.kind == ATTEMPT.name), *replaced):
            try:
                attempt = msgspec.json.decode(row.body, type=Attempt)
            except UNREADABLE as error:
                self.evidence.add(f"attempt {row.key} can't be read ({said(error)})")
                continue
            if row.key != attempt_key(item.id, attempt.number):
                self.evidence.add(
                    f"attempt {row.key} belongs to payout {item.id}, and says that it is {attempt.number}"
                )
            found.append((row, attempt))
        numbers = [attempt.number for _, attempt in found]
        if len(set(numbers)) != len(numbers):
            self.evidence.add(f"payout {item.id} has two attempts of one number")
        return found

    async def _hashes(
        self, items: list[FlowRecord[Payout]], found: dict[str, list[tuple[FlowRow, Attempt]]]
    ) -> dict[str, FlowRow]:
        keys = [_hash_key(item, attempt) for item in items for _, attempt in found[item.id] if attempt.hash]
        return await known_hashes(self.scene.tables, keys)

    async def _taken(
        self,
        items: list[FlowRecord[Payout]],
        found: dict[str, list[tuple[FlowRow, Attempt]]],
        addresses: dict[str, str],
    ) -> dict[str, FlowRow]:
        keys = [_nonce_row(item, attempt, addresses) for item in items for _, attempt in found[item.id]]
        return await self.scene.tables.flow_rows.by_keys(MACHINE.name, NONCE.name, [key for key in keys if key])

    def _judge_hashes(
        self, item: FlowRecord[Payout], attempts: list[tuple[FlowRow, Attempt]], hashes: dict[str, FlowRow]
    ) -> None:
        for row, attempt in attempts:
            if not attempt.hash:
                continue
            known = hashes.get(_hash_key(item, attempt))
            if known is None:
                self.evidence.add(f"attempt {row.key} was signed as {attempt.hash}, and no payout has that hash")
                continue
            # After a restore a cancellation may be made once more with the same bytes: one transaction, two attempts.
            same = [
                (one.record, {"payout": item.id, "attempt": a.number}) for one, a in attempts if a.hash == attempt.hash
            ]
            if (known.record, _said(known)) not in same:
                self.evidence.add(f"attempt {row.key} was signed as {attempt.hash}, which belongs to {known.body}")

    async def _judge_result(self, item: FlowRecord[Payout], attempts: list[tuple[FlowRow, Attempt]]) -> None:
        if item.record.state != CONFIRMED:
            return
        result = item.body.result.hash
        winners = [attempt for _, attempt in attempts if result and attempt.hash == result]
        if len(winners) != 1 and decided_by_people(await self.scene.tables.records.history(item.record.number)):
            return  # they may know of a transaction that is none of its attempts, or of none by its hash
        if len(winners) != 1:
            self.evidence.add(f"payout {item.id} was confirmed by {result!r}, which {len(winners)} of its attempts are")
        elif winners[0].shape is not Shape.PAY:
            self.evidence.add(f"payout {item.id} was confirmed by {result}, which only cancels")

    def _judge_nonces(
        self,
        item: FlowRecord[Payout],
        attempts: list[tuple[FlowRow, Attempt]],
        mine: list[FlowRow],
        taken: dict[str, FlowRow],
        addresses: dict[str, str],
        adopted: dict[str, str],
    ) -> None:
        for row in mine:
            if row.kind == NONCE.name and _said(row).get("payout") != item.id:
                self.evidence.add(f"nonce {row.key} belongs to payout {item.id}, and says {row.body}")
        for row, attempt in attempts:
            key = _nonce_row(item, attempt, addresses)
            if not key:
                continue
            nonce = taken.get(key)
            if nonce is None:
                # An attempt that this database has built took its nonce here before. One that came whole, from the
                # signer's log, has none; two of those must not share one.
                if row.flow == MACHINE.name and row.version > 1:
                    self.evidence.add(f"attempt {row.key} has the nonce {key}, which no payout has taken")
                elif adopted.setdefault(key, item.id) != item.id:
                    self.evidence.add(f"attempt {row.key} has the nonce {key}, as {adopted[key]} has")
            elif nonce.record != item.record.number:
                self.evidence.add(f"attempt {row.key} has the nonce {key}, which belongs to record {nonce.record}")

    def _judge_reserved(self, item: FlowRecord[Payout], mine: list[FlowRow]) -> None:
        kinds = (RESERVED.name, UNCONFIRMED.name)
        found = {
            (row.kind, row.key.removesuffix(f"/{item.id}")): row.amount
            for row in mine
            if row.kind in kinds and row.state is RowState.HELD
        }
        wanted = _needs(item.body) if item.record.state in OPEN else {}
        for kind, key in sorted(found.keys() | wanted.keys()):
            there, says = found.get((kind, key), 0), wanted.get((kind, key), 0)
            if there != says:
                text = f"payout {item.id} is {item.record.state} and needs {says} of {kind} {key!r}"
                self.evidence.add(f"{text}, and has {there}")

    async def _spent(self) -> None:
        """What took each nonce on its chain, as the watchers have written down."""
        rows, after = self.scene.tables.flow_rows, ""
        while page := await rows.by_prefix(CHAINS.name, SPENT.name, after=after, limit=PAGE):
            after = page[-1].key
            spent = [(row, *_spent_keys(row)) for row in page]
            nonces = await rows.by_keys(MACHINE.name, NONCE.name, [nonce for _, nonce, _ in spent])
            hashes = await known_hashes(self.scene.tables, [key for _, _, key in spent])
            for row, nonce, key in spent:
                self.checked += 1
                known, owner = hashes.get(key), nonces.get(nonce)
                if known is None:
                    self.evidence.add(f"nonce {row.key} was taken by {row.body}, which is no attempt of a payout")
                elif owner is not None and _said(owner).get("payout") != _said(known).get("payout"):
                    text = f"nonce {row.key} belongs to {_said(owner).get('payout')}"
                    self.evidence.add(f"{text}, and an attempt of {_said(known).get('payout')} took it")


CHECKS: Final[tuple[type[Check], ...]] = (PayoutHolds, PayoutEffects)


def decided_by_people(history: Sequence[Transition]) -> bool:
    """Whether two people have said that a payout was paid, where the chain could not say so (W17, W36). Pure."""
    for transition in reversed(history):
        if transition.target == CONFIRMED != transition.source:
            return transition.event == PAID or FORCED_BY in msgspec.json.decode(transition.evidence)
    return False


def readable(page: Sequence[Record], check: Check) -> list[FlowRecord[Payout]]:
    """Payouts of a page; one that can't be read is evidence, and the others are judged."""
    found = []
    for record in page:
        try:
            found.append(FlowRecord(record, msgspec.json.decode(record.body, type=Payout)))
        except UNREADABLE as error:
            check.evidence.add(f"payout {record.id} can't be read ({said(error)})")
    return found


async def known_hashes(tables: Tables, keys: Sequence[str]) -> dict[str, FlowRow]:
    """The rows of hashes that payouts, or their replacements, have signed."""
    own = await tables.flow_rows.by_keys(MACHINE.name, HASH.name, keys)
    return own | await tables.flow_rows.by_keys(REPLACEMENTS.name, HASH.name, keys)


def _numbers(body: Payout) -> range:
    return range(1, min(body.attempts, NUMBERS_MAX) + 1)


def _hash_key(item: FlowRecord[Payout], attempt: Attempt) -> str:
    return f"{item.body.payment.chain}/{attempt.hash}"


def _nonce_row(item: FlowRecord[Payout], attempt: Attempt, addresses: dict[str, str]) -> str:
    """The key of the row that an attempt's nonce has; "" if it has none, or its wallet is not known."""
    if attempt.nonce is None or attempt.wallet not in addresses:
        return ""
    return numbered(nonce_key(item.body.payment.chain, addresses[attempt.wallet]), attempt.nonce)


def _spent_keys(row: FlowRow) -> tuple[str, str]:
    """The keys of the nonce that was taken and of the hash that took it."""
    place, _, nonce = row.key.rpartition("/")
    chain = place.partition("/")[0]
    return numbered(place, int(nonce)), f"{chain}/{_said(row).get('hash', '')}"


def _said(row: FlowRow) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(row.body)
    return found


def _needs(body: Payout) -> dict[tuple[str, str], int]:
    """What is reserved for a payout that is open: the payment, the worst fee of its attempt, and one transaction."""
    if not body.reserved or body.fee is None:
        return {}
    needs = {(RESERVED.name, f"{body.wallet}/{body.payment.asset}"): body.order_amount}
    gas = (RESERVED.name, f"{body.wallet}/{body.native}")
    needs[gas] = needs.get(gas, 0) + body.fee.worst
    return needs | {(UNCONFIRMED.name, body.wallet): 1}
