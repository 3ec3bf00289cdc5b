"""Deciding the changes of a batch, one after the other: pure. Which are right, and which rows that makes.

Each change is resolved and validated on the state as its predecessors have left it (L17). A refused change leaves no
trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import msgspec

from bursar.model.accounts import HELD, check_active
from bursar.model.entries import HoldChange, Intent
from bursar.model.envelope import Plan, Receipt, encode_legs
from bursar.model.errors import HoldOwned, InvalidEntry, KeyReused, Refusal
from bursar.model.flow_rows import FlowRow, RowKey
from bursar.model.ledger_state import MINUS, PLUS, LedgerState
from bursar.model.plan import validate_and_plan
from bursar.model.postings import Posting
from bursar.model.records import ExistingEntry, HoldRow, owner_name
from bursar.model.resolve import booked_legs, resolve
from bursar.model.selection import PoolKey
from bursar.store.batch import LoadedState, WriteSet
from bursar.store.rows import envelope_row
from bursar.writer.change import Change, ChangeResult, Move
from bursar.writer.records import RecordDecision

Result = ChangeResult | Refusal


class Step(msgspec.Struct, frozen=True, gc=False):
    """One accepted intent."""

    plan: Plan
    row: tuple[Any, ...]
    hold: HoldRow | None

    def existing(self) -> ExistingEntry:
        """What its key stands for from now on."""
        envelope = self.plan.envelope
        return ExistingEntry(envelope.seq, self.plan.id, envelope.book.id, self.row[7])


class Effects(msgspec.Struct, frozen=True):
    """What a batch does to the ledger's state: known when it is decided, true when it is written.

    The next batch may be decided while this one is still being written. Whatever it reads, before this one's commit or
    after it, becomes the state after it by the same steps: remove what was spent, add what was created, and let its
    keys and guarded balances count. Numbers are never reused, so applying that twice changes nothing.
    """

    spent: frozenset[int]
    created: dict[PoolKey, list[Posting]]  # those still live when the batch ends
    existing: dict[tuple[str, str], ExistingEntry]
    guarded: dict[tuple[int, int], tuple[int, int]]  # → balance, version
    rows: dict[RowKey, FlowRow]

    def apply(self, loaded: LoadedState, named: Sequence[int]) -> LoadedState:
        """What was read, as it is once this batch is written."""
        pools = {}
        for key, postings in loaded.pools.items():
            left = [p for p in postings if p.id not in self.spent]
            fresh = self.created.get(key)
            if fresh:
                seen = {p.id for p in left}
                left += [p for p in fresh if p.id not in seen]
            pools[key] = left
        found = [p for p in loaded.named if p.id not in self.spent]
        if named:
            wanted = set(named).difference(p.id for p in found)
            found += [p for fresh in self.created.values() for p in fresh if p.id in wanted]
        return msgspec.structs.replace(
            loaded,
            existing=loaded.existing | self.existing,
            pools=pools,
            named=found,
            guarded=loaded.guarded | self.guarded,
            rows=loaded.rows | self.rows,
        )


class Decision:
    """The state, and what has been accepted on it so far."""

    def __init__(self, state: LedgerState, loaded: LoadedState) -> None:
        self.state = state
        self.loaded = loaded
        self.existing = loaded.existing
        self.fresh: dict[tuple[str, str], Step] = {}
        self._numbers = iter(loaded.numbers)
        self._taken: list[int] = []  # numbers of the change under way
        self._spare: list[int] = []  # numbers that a change has given back, the last one first
        self.steps: list[Step] = []
        self.records = RecordDecision(loaded.records, loaded.rows)
        self._mark = 0  # where the steps of the change under way begin
        self.unsure = False  # whether a refusal depends on records that were not read
        self.refused = False  # whether any change was, also where the refusal is the operation's answer
        self.checks_rules = False  # whether a record relies on accounts being active

    def change(self, change: Change) -> Result:
        """All of a change, or a refusal and no trace; but an operation's refusal may itself be what it remembers."""
        mark = self._mark = len(self.steps)
        self._taken = []
        operation = change.operation
        try:
            if change.plain:
                return ChangeResult(tuple([self.intent(intent) for intent in change.intents]))
            if operation is not None and (answer := self.records.answered(operation)) is not None:
                return ChangeResult(operation=answer)
            self.records.check(change)
            for path in change.active:
                check_active(self.state.account(path))
            receipts = tuple([self.intent(intent, change.moves) for intent in change.intents])
            self._check_atomicity(change, receipts, mark)
        except Refusal as refusal:
            self.undo(mark)
            self.refused = True
            answer = None if operation is None else self.records.refuse(operation, refusal)
            if answer is not None:
                return ChangeResult(operation=answer)
            # Nothing is written, so nothing would notice that the operation was answered long ago, or the record moved.
            self.unsure |= not change.plain and not self.records.is_loaded
            return refusal
        return self._accept(change, receipts, mark)

    def _check_atomicity(self, change: Change, receipts: tuple[Receipt, ...], mark: int) -> None:
        """A record moves with its entries, or neither happens."""
        if not change.moves:
            return
        ours = {step.plan.envelope.seq for step in self.steps[mark:]}
        for receipt, intent in zip(receipts, change.intents, strict=True):
            if receipt.replayed:  # the record has not moved, so that entry was not this one: money would be lost
                raise KeyReused(intent.scope, intent.key, 0 if receipt.envelope in ours else receipt.envelope)
            if intent.hold is None and any(HELD in (leg.source, leg.target) for leg in intent.legs):
                raise InvalidEntry("it moves held money, and does not say what becomes of the hold")
        if len(change.moves) > 1:
            kept = [move.in_flight_account for move in change.moves if move.in_flight_account]
            if len(set(kept)) < len(kept):  # which of the new postings there is whose could not be said
                raise InvalidEntry(f"two records of one change would keep a posting in {kept[0]}")
        for move in change.moves:
            if move.in_flight_account and not self._made_in(move.in_flight_account, mark):
                raise InvalidEntry(f"it makes no posting in {move.in_flight_account} for {move.flow} {move.id} to keep")

    def again(self) -> None:
        """The change under way will be decided again: undo what it did, and give its numbers back."""
        self.undo(self._mark)
        self._spare += reversed(self._taken)

    def _number(self) -> int:
        number = self._spare.pop() if self._spare else next(self._numbers)
        self._taken.append(number)
        return number

    def undo(self, mark: int) -> None:
        """Undo all steps from a mark on."""
        for step in reversed(self.steps[mark:]):
            self.state.undo(step.plan)
            del self.fresh[step.plan.envelope.scope, step.plan.envelope.key]
        del self.steps[mark:]

    def _accept(self, change: Change, receipts: tuple[Receipt, ...], mark: int) -> ChangeResult:
        """Its entries are in: now what goes with them, of which nothing can be refused any more."""
        records = self.records
        operation = change.operation
        self.checks_rules |= bool(change.active)
        records.use(change.limits)
        for mark_ in change.high_water:
            records.relies_on(*mark_)
        numbers, postings = [], []
        for move in change.moves:
            posting = self._made_in(move.in_flight_account, mark) if move.in_flight_account else move.in_flight_posting
            numbers.append(records.move(move, self._number, posting))
            postings.append(posting)
        records.rows.accept(numbers)
        for inline in change.inline_operations:
            records.answer(inline, self._made_in(inline.in_flight_account, mark))
        answer = (
            None if operation is None else records.answer(operation, self._made_in(operation.in_flight_account, mark))
        )
        return ChangeResult(receipts, tuple(numbers), tuple(postings), answer)

    def _made_in(self, path: str, mark: int) -> int:
        """The posting that an entry of this change has made in an account; 0 if none, or if no account is named.

        For an operation that may be so: the entry was made long ago, and so was the operation's row.
        """
        account = self.state.accounts.get(path)
        if account is None:
            return 0
        created = (p for step in self.steps[mark:] for p in step.plan.envelope.creates)
        return next((p.id for p in created if p.account == account.id), 0)

    def intent(self, intent: Intent, moves: Sequence[Move] = ()) -> Receipt:
        """One intent: replayed, or resolved, validated and applied to the state."""
        key = (intent.scope, intent.key)
        state = self.state
        if key in self.existing:
            return replay(intent, self.existing[key], state)
        if key in self.fresh:
            return self._again(intent, self.fresh[key])
        envelope = resolve(intent, state, self._number())
        plan = validate_and_plan(envelope, state, intent.pins, no_overdraft=intent.no_overdraft, outside=intent.outside)
        hold = None if intent.hold is None else hold_row(intent.hold, plan, state, moves)
        state.apply(plan)
        step = self.fresh[key] = Step(plan, envelope_row(envelope, plan.id), hold)
        self.steps.append(step)
        return Receipt(envelope=envelope.seq, id=plan.id.hex(), key=intent.key)

    def _again(self, intent: Intent, first: Step) -> Receipt:
        """The same key as of an entry before it in this batch; or in this very change, which then is refused whole."""
        try:
            return replay(intent, first.existing(), self.state)
        except KeyReused as refusal:
            if all(step is not first for step in self.steps[self._mark :]):
                raise
            raise KeyReused(refusal.scope, refusal.key, 0) from None

    def write_set(self, cached_accounts: set[int]) -> WriteSet:
        """What all that was accepted writes."""
        writes = WriteSet(envelopes=[], spends=[], spent_live=[], account_history=[])
        envelopes, spends, spent_live = writes.envelopes, writes.spends, writes.spent_live
        created: list[Posting] = []
        made: set[int] = set()  # in this batch, and still live
        cache: dict[tuple[int, int], list[int]] = {}
        holds: dict[int, HoldRow] = {}
        touched: set[tuple[int, int]] = set()
        for step in self.steps:
            plan, hold = step.plan, step.hold
            envelope = plan.envelope
            seq = envelope.seq
            envelopes.append(step.row)
            for p in envelope.consumes:
                spends.append((p.id, seq))
                if p.id in made:
                    made.remove(p.id)
                else:
                    spent_live.append(p.id)
            for p in envelope.creates:
                made.add(p.id)
                created.append(p)
            cached = False
            for account in envelope.accounts:
                writes.account_history.append((account.id, seq))
                cached |= not account.pays_from_postings or account.id in cached_accounts
            for (a, s), change in cache_changes(plan, cached_accounts).items() if cached else ():
                part = cache.setdefault((a, s), [0, 0])
                part[0] += change
                part[1] = seq
            if plan.floors:
                touched.update((a, s) for a, s, _, _ in plan.floors)
            if hold is not None:
                holds[hold.id] = hold
        writes.postings = [(p, p.id in made) for p in created]
        writes.envelopes.sort(key=itemgetter(2, 3))  # lock order: two batches with the same keys must not deadlock
        writes.spends.sort()
        writes.spent_live.sort()
        writes.guarded = [(*k, self.loaded.guarded.get(k, (0, 0))[1], self.state.balances[k]) for k in sorted(touched)]
        writes.cached_balances = [(a, s, part, amount) for (a, s), (amount, part) in cache.items()]
        writes.holds = [holds[i] for i in sorted(holds)]
        writes.records = self.records.write_set()
        writes.checks_rules = self.checks_rules
        return writes

    def effects(self, writes: WriteSet) -> Effects:
        """What the batch after this one has to take into account."""
        created: dict[PoolKey, list[Posting]] = {}
        for p, live in writes.postings:
            if live:
                created.setdefault((p.account, p.asset, PLUS if p.amount > 0 else MINUS), []).append(p)
        return Effects(
            spent=frozenset(writes.spent_live),
            created=created,
            existing={key: step.existing() for key, step in self.fresh.items()},
            guarded={(a, s): (balance, version + 1) for a, s, version, balance in writes.guarded},
            rows={} if writes.records is None else {row.row_key: row for _, row in writes.records.rows},
        )


def accounts_of(intent: Intent) -> set[str]:
    """Every account that it names."""
    found = {path for path, _ in intent.pins}
    for leg in intent.legs:
        found.update((leg.source, leg.target))
    if intent.merge:
        found.add(intent.merge)
    if intent.hold is not None:
        found.add(intent.hold.account)
    return found


def replay(intent: Intent, existing: ExistingEntry, state: LedgerState) -> Receipt:
    """The first receipt again, if it is the same intent."""
    same = state.book(intent.book).id == existing.book and encode_legs(booked_legs(intent, state)) == existing.legs
    if not same:
        raise KeyReused(intent.scope, intent.key, existing.seq)
    return Receipt(envelope=existing.seq, id=existing.id.hex(), key=intent.key, replayed=True)


def cache_changes(plan: Plan, cached_accounts: set[int]) -> dict[tuple[int, int], int]:
    """What an envelope changes in cached balances: system and external accounts, and those whose balance is cached."""
    cached = [a.id for a in plan.envelope.accounts if not a.pays_from_postings or a.id in cached_accounts]
    if not cached:
        return {}
    changes: dict[tuple[int, int], int] = {}
    for sign, postings in ((-1, plan.envelope.consumes), (1, plan.envelope.creates)):
        for p in postings:
            if p.account in cached:
                changes[p.account, p.asset] = changes.get((p.account, p.asset), 0) + sign * p.amount
    return changes


def hold_row(hold: HoldChange, plan: Plan, state: LedgerState, moves: Sequence[Move] = ()) -> HoldRow:
    """The hold as this envelope leaves it: its posting is the one created in the account of held money.

    One that a record owns is made and settled with a move of that record, or not at all (W34): otherwise a hold could
    be given back by hand while its record pays the same money outside.
    """
    if hold.owner and all(owner_name(move.flow, move.id) != hold.owner for move in moves):
        raise HoldOwned(hold.id, hold.owner)
    held = state.account(HELD).id
    posting = next((p.id for p in plan.envelope.creates if p.account == held), hold.posting)
    return HoldRow(
        id=hold.id or plan.envelope.seq,
        account=state.account(hold.account).id,
        asset=state.asset(hold.asset).id,
        amount=hold.amount,
        remaining=hold.remaining,
        posting=posting,
        state=hold.state,
        owner=hold.owner,
        expires_us=hold.expires_us,
        lasts_us=hold.lasts_us,
    )
