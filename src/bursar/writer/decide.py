"""Deciding a group: pure. Which changes of many callers are right, one after the other, and which rows that makes.

The outcome of each change is what it would have been alone, in that order (L17): it is resolved and validated on the
ground as its predecessors have left it. A refused change leaves no trace. If the engine later loses a race, the whole
decision is thrown away, refusals included, and made again on new ground.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from bursar.model.accounts import HELD, check_active
from bursar.model.entries import HoldChange, Intent
from bursar.model.envelope import Receipt, encode_legs
from bursar.model.errors import HoldOwned, InvalidEntry, KeyReused, Refusal
from bursar.model.ground import MINUS, PLUS, Ground
from bursar.model.plan import validate_and_plan
from bursar.model.plan_types import Plan
from bursar.model.postings import Posting
from bursar.model.records import HoldRow, Taken, owner_name
from bursar.model.resolve import booked_legs, resolve
from bursar.model.selection import Short
from bursar.store.group import FIRST_READ, READ_MAX, Ask, Heads, Known, Lost, PoolKey, Rows
from bursar.store.rows import envelope_row
from bursar.writer.change import Change, Done, Move
from bursar.writer.records import RecordDecision, look

KEEPS_MAX = 16  # changes of a group that keeps postings: of a larger one, a round trip is a small part

Outcome = Done | Refusal


class Step(msgspec.Struct, frozen=True, gc=False):
    """One accepted intent."""

    plan: Plan
    row: tuple[Any, ...]
    hold: HoldRow | None

    def taken(self) -> Taken:
        """What its key stands for from now on."""
        envelope = self.plan.envelope
        return Taken(envelope.seq, self.plan.id, envelope.book.id, self.row[7])


class Delta(msgspec.Struct, frozen=True):
    """What a group does to the ground: known when it is decided, true when it is written.

    The next group may be decided while this one is still being written. Whatever it reads, before this one's commit or
    after it, becomes the state after it by the same steps: take away what was spent, add what was created, and let its
    keys and guarded balances count. Numbers are never reused, so doing that twice changes nothing.
    """

    spent: frozenset[int]
    created: dict[PoolKey, list[Posting]]  # those still live when the group ends
    taken: dict[tuple[str, str], Taken]
    floors: dict[tuple[int, int], tuple[int, int]]  # → balance, turn

    def after(self, known: Known, named: Sequence[int]) -> Known:
        """What was read, as it is once this group is written."""
        pools = {}
        for key, postings in known.pools.items():
            left = [p for p in postings if p.id not in self.spent]
            fresh = self.created.get(key)
            if fresh:
                seen = {p.id for p in left}
                left += [p for p in fresh if p.id not in seen]
            pools[key] = left
        found = [p for p in known.named if p.id not in self.spent]
        if named:
            seen = {p.id for p in found}
            wanted = set(named) - seen
            found += [p for fresh in self.created.values() for p in fresh if p.id in wanted]
        return Known(known.numbers, known.taken | self.taken, pools, found, known.floors | self.floors)


class GroupJob:
    """A group of changes on its way through an engine; `after` is what the group before it is just writing."""

    def __init__(
        self, heads: Heads, changes: Sequence[Change], after: Delta | None = None, *, aside: bool = False
    ) -> None:
        self.heads = heads
        self.changes = changes
        self.after = after
        self.aside = aside
        self.first_read = FIRST_READ
        self.keeps = after is None and len(changes) <= KEEPS_MAX
        self._decision: Decision | None = None
        self._rows = Rows()
        self.outcomes: list[Outcome] = []
        self._limits: dict[PoolKey, int] = {}
        self._ask = Ask()
        self._doubts = False  # whether a refusal depends on what was not looked up

    def ask(self) -> Ask:
        """Accounts that are not known, keys, pools of those who pay (or owe), named postings and guarded balances."""
        ask = Ask(missing=set(), intents=0, keys=[], pools={}, named=[], floors=[])
        floors: set[tuple[int, int]] = set()
        for change in self.changes:
            if change.active:
                ask.missing.update(path for path in change.active if path not in self.heads.accounts)
            for intent in change.intents:
                ask.intents += 1
                ask.keys.append((intent.scope, intent.key))
                ask.named += intent.consume
                self._ask_pools(intent, ask, floors)
            for move in change.moves:
                ask.intents += not move.version
        ask.floors = sorted(floors)
        heads = self.heads
        ask.hopeful = (
            not (heads.wary or self._doubts or floors)
            and (ask.pools.keys() <= heads.pools.keys() if self.keeps else not ask.pools)
            and all(number in heads.live for number in ask.named)
        )
        if (
            self.after is None
            and (self.heads.wary or self._doubts)
            and not all(change.plain for change in self.changes)
        ):
            ask.look = look(self.changes)
        self._ask = ask
        return ask

    def _ask_pools(self, intent: Intent, ask: Ask, floors: set[tuple[int, int]]) -> None:
        accounts, assets = self.heads.accounts, self.heads.assets
        if len(intent.legs) == 1 and not intent.consume:
            leg = intent.legs[0]
            source, target, asset = accounts.get(leg.source), accounts.get(leg.target), assets.get(leg.asset)
            plain = not intent.pins and intent.hold is None
            if plain and source and target and asset and source.never_owes and target.never_owes:
                key = (source.id, asset.id, PLUS)
                ask.pools[key] = self._limits.get(key, self.first_read)  # most entries; the same as below
                return
        ask.missing |= names(intent).difference(accounts)
        for (path, code), delta in intent.deltas().items():
            account, asset = accounts.get(path), assets.get(code)
            if account is None or asset is None:
                continue  # refused by name when it is decided
            if account.selects:
                owes = account.may_owe(asset)
                if delta < 0 or intent.consume:
                    self._want(ask, (account.id, asset.id, PLUS))
                if owes and (delta > 0 or intent.consume):
                    self._want(ask, (account.id, asset.id, MINUS))
                if owes and account.floor(asset) is not None:
                    floors.add((account.id, asset.id))

    def _want(self, ask: Ask, key: PoolKey) -> None:
        ask.pools[key] = self._limits.get(key, self.first_read)

    def fill(self, ground: Ground, known: Known, read: Mapping[PoolKey, int] | None = None) -> Ground:
        """What was asked for, on the ground to decide on. `read` says how many postings of each pool the store had."""
        for key, postings in known.pools.items():
            most = self._ask.pools[key]
            count = len(postings) if read is None else read[key]
            ground.learn(postings, key=key, complete=count < most or most >= READ_MAX)
        ground.learn(known.named, key=None)
        for floor in self._ask.floors:
            ground.balances[floor] = known.floors.get(floor, (0, 0))[0]
        return ground

    def deepen(self, ground: Ground, short: Short) -> None:
        """A pool was too shallow: ask for more of it next time."""
        key = next(key for key, pool in ground.pools.items() if pool is short.pool)
        self._limits[key] = min(READ_MAX, self._ask.pools[key] * 8)
        del ground.pools[key]  # or it would be taken as it is

    def _read_on(self, decision: Decision, short: Short, more: Callable[[PoolKey, int], list[Posting]]) -> None:
        """A pool was too shallow, and the store can be asked in between: only this change is decided again."""
        ground = decision.ground
        key = next(key for key, pool in ground.pools.items() if pool is short.pool)
        most = self._ask.pools[key] = min(READ_MAX, self._ask.pools[key] * 8)
        found = more(key, most)
        known = {-minus for _, minus in short.pool.items}
        known.update(p.id for step in decision.steps for p in step.plan.envelope.consumes)
        fresh = [p for p in found if p.id not in known]
        ground.deepen(key, fresh, complete=len(found) < most or most >= READ_MAX)

    def decide(self, known: Known) -> Rows | None:
        """Decide every change in order; None if a pool turned out too shallow, or a refusal needs a closer look."""
        try:
            return self._decide(known)
        except BaseException:  # whatever it is: what was done so far to the postings in mind will not happen
            self.heads.forget()
            raise

    def _decide(self, known: Known) -> Rows | None:
        if self._decision is not None:  # that was not good enough
            self._decision.undo(0)
            self._decision = None
        hoped = known.hoped
        read = {key: len(postings) for key, postings in known.pools.items()}
        if self.after is not None:
            known = self.after.after(known, self._ask.named)
        heads = self.heads
        ground = Ground(heads.accounts, heads.assets, heads.books)
        if self.keeps:
            ground.live, ground.pools = heads.live, heads.pools
        else:
            heads.pools = {}  # they will not be what they were
        self.fill(ground, known, read)
        decision = Decision(ground, known)
        self.outcomes = []
        while len(self.outcomes) < len(self.changes):
            mark = len(decision.steps)
            try:
                for change in self.changes[len(self.outcomes) :]:
                    mark = len(decision.steps)
                    self.outcomes.append(decision.change(change))
            except Short as short:
                if known.more is None:
                    decision.undo(0)
                    self.deepen(ground, short)
                    return None
                decision.undo(mark)
                self._read_on(decision, short, known.more)
        if decision.doubts and self.after is not None:  # what is being written beside it can't be looked up: wait
            raise Lost("a refusal rests on what another group is just writing")
        if decision.doubts or (hoped and decision.refused):
            self.heads.forget()
            self._doubts = True
            return None
        self._decision = decision
        self._rows = decision.rows(self.heads.wide)
        return self._rows

    @property
    def delta(self) -> Delta | None:
        """What a group that is decided after this one has to take into account; None before this one is decided."""
        return None if self._decision is None else self._decision.delta(self._rows)

    def doubtful(self) -> list[tuple[str, str]]:
        """Keys of what was refused. Had an earlier try gone through, that would be the answer instead."""
        pairs = zip(self.changes, self.outcomes, strict=True)
        return [(i.scope, i.key) for change, outcome in pairs if isinstance(outcome, Refusal) for i in change.intents]


class Decision:
    """The ground, and what has been accepted on it so far."""

    def __init__(self, ground: Ground, known: Known) -> None:
        self.ground = ground
        self.known = known
        self.taken = known.taken
        self.fresh: dict[tuple[str, str], Step] = {}
        self.numbers = iter(known.numbers)
        self.steps: list[Step] = []
        self.records = RecordDecision(known.found)
        self._mark = 0  # where the steps of the change under way begin
        self.doubts = False
        self.refused = False  # anybody, also where that is an answer
        self.under_rules = False  # whether a record rests on accounts being active

    def change(self, change: Change) -> Outcome:
        """All of a change, or a refusal and no trace; but an operation's refusal may itself be what it remembers."""
        mark = self._mark = len(self.steps)
        remember = change.remember
        try:
            if change.plain:
                return Done(tuple([self.intent(intent) for intent in change.intents]))
            if remember is not None and (answer := self.records.answered(remember)) is not None:
                return Done(remembered=answer)
            self.records.check(change)
            for path in change.active:
                check_active(self.ground.account(path))
            receipts = tuple([self.intent(intent, change.moves) for intent in change.intents])
            self._goes_together(change, receipts, mark)
        except Refusal as refusal:
            self.undo(mark)
            self.refused = True
            answer = None if remember is None else self.records.refuse(remember, refusal)
            if answer is not None:
                return Done(remembered=answer)
            # Nothing is written, so nothing would notice that the operation was answered long ago, or the record moved.
            self.doubts |= not change.plain and not self.records.knows
            return refusal
        return self._accept(change, receipts, mark)

    def _goes_together(self, change: Change, receipts: tuple[Receipt, ...], mark: int) -> None:
        """A record moves with its entries, or neither happens."""
        if not change.moves:
            return
        ours = {step.plan.envelope.seq for step in self.steps[mark:]}
        for receipt, intent in zip(receipts, change.intents, strict=True):
            if receipt.replayed:  # the record has not moved, so that entry was not this one: money would be lost
                raise KeyReused(intent.scope, intent.key, 0 if receipt.envelope in ours else receipt.envelope)
            if intent.hold is None and any(HELD in (leg.source, leg.target) for leg in intent.legs):
                raise InvalidEntry("it moves held money, and does not say what becomes of the hold")
        for move in change.moves:
            if move.keeps and not self._made_in(move.keeps, mark):
                raise InvalidEntry(f"it makes no posting in {move.keeps} for {move.flow} {move.id} to keep")

    def undo(self, mark: int) -> None:
        """Take back what the change under way has done so far."""
        for step in reversed(self.steps[mark:]):
            self.ground.undo(step.plan)
            del self.fresh[step.plan.envelope.scope, step.plan.envelope.key]
        del self.steps[mark:]

    def _accept(self, change: Change, receipts: tuple[Receipt, ...], mark: int) -> Done:
        """Its entries are in: now what goes with them, of which nothing can be refused any more."""
        records = self.records
        remember = change.remember
        self.under_rules |= bool(change.active)
        records.use(change.limits)
        if change.high_water is not None:
            records.relies_on(*change.high_water)
        numbers, postings = [], []
        for move in change.moves:
            posting = self._made_in(move.keeps, mark) if move.keeps else move.transit
            numbers.append(records.move(move, self.numbers, posting))
            postings.append(posting)
        for done in change.operations:
            records.answer(done, self._made_in(done.keeps, mark) if done.keeps else 0)
        answer = None
        if remember is not None:
            answer = records.answer(remember, self._made_in(remember.keeps, mark) if remember.keeps else 0)
        return Done(receipts, tuple(numbers), tuple(postings), answer)

    def _made_in(self, path: str, mark: int) -> int:
        """The posting that an entry of this change has made in an account; 0 if none.

        For an operation to remember that may be so: the entry was made long ago, and so was the operation's row.
        """
        account = self.ground.accounts.get(path)
        made = (
            p.id
            for step in self.steps[mark:]
            for p in step.plan.envelope.creates
            if account and p.account == account.id
        )
        return next(made, 0)

    def intent(self, intent: Intent, moves: Sequence[Move] = ()) -> Receipt:
        """One intent: replayed, or resolved, validated and applied to the ground."""
        key = (intent.scope, intent.key)
        ground = self.ground
        if key in self.taken:
            return replay(intent, self.taken[key], ground)
        if key in self.fresh:
            return self._again(intent, self.fresh[key])
        envelope = resolve(intent, ground, next(self.numbers))
        plan = validate_and_plan(
            envelope, ground, intent.pins, no_overdraft=intent.no_overdraft, outside=intent.outside
        )
        hold = None if intent.hold is None else hold_row(intent.hold, plan, ground, moves)
        ground.apply(plan)
        step = self.fresh[key] = Step(plan, envelope_row(envelope, plan.id), hold)
        self.steps.append(step)
        return Receipt(envelope=envelope.seq, id=plan.id.hex(), key=intent.key)

    def _again(self, intent: Intent, first: Step) -> Receipt:
        """The same key as of an entry before it in this group; or in this very change, which then is refused whole."""
        try:
            return replay(intent, first.taken(), self.ground)
        except KeyReused as refusal:
            if all(step is not first for step in self.steps[self._mark :]):
                raise
            raise KeyReused(refusal.scope, refusal.key, 0) from None

    def rows(self, wide: set[int]) -> Rows:
        """What all that was accepted writes."""
        rows = Rows(envelopes=[], postings=[], spends=[], dead=[], involved=[], floors=[], cache=[], holds=[])
        envelopes, spends, dead, involved = rows.envelopes, rows.spends, rows.dead, rows.involved
        created: list[Posting] = []
        made: set[int] = set()  # in this group, and still there
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
                    dead.append(p.id)
            for p in envelope.creates:
                made.add(p.id)
                created.append(p)
            cached = False
            for account in envelope.accounts:
                involved.append((account.id, seq))
                cached |= not account.selects or account.id in wide
            for (a, s), change in cache_changes(plan, wide).items() if cached else ():
                part = cache.setdefault((a, s), [0, 0])
                part[0] += change
                part[1] = seq
            if plan.floors:
                touched.update((a, s) for a, s, _, _ in plan.floors)
            if hold is not None:
                holds[hold.id] = hold
        rows.postings = [(p, p.id in made) for p in created]
        rows.envelopes.sort(key=_scope_key)  # lock order: two groups with the same keys must not deadlock
        rows.spends.sort()
        rows.dead.sort()
        rows.floors = [(*k, self.known.floors.get(k, (0, 0))[1], self.ground.balances[k]) for k in sorted(touched)]
        rows.cache = [(a, s, part, amount) for (a, s), (amount, part) in cache.items()]
        rows.holds = [holds[i] for i in sorted(holds)]
        rows.records = self.records.rows()
        rows.under_rules = self.under_rules
        return rows

    def delta(self, rows: Rows) -> Delta:
        """What the group after this one has to take into account."""
        created: dict[PoolKey, list[Posting]] = {}
        for p, live in rows.postings:
            if live:
                created.setdefault((p.account, p.asset, PLUS if p.amount > 0 else MINUS), []).append(p)
        return Delta(
            spent=frozenset(rows.dead),
            created=created,
            taken={key: step.taken() for key, step in self.fresh.items()},
            floors={(a, s): (balance, turn + 1) for a, s, turn, balance in rows.floors},
        )


def names(intent: Intent) -> set[str]:
    """Every account that it names."""
    found = {path for path, _ in intent.pins}
    for leg in intent.legs:
        found.add(leg.source)
        found.add(leg.target)
    if intent.merge:
        found.add(intent.merge)
    if intent.hold is not None:
        found.add(intent.hold.account)
    return found


def _scope_key(row: tuple[Any, ...]) -> tuple[str, str]:
    return row[2], row[3]


def replay(intent: Intent, taken: Taken, ground: Ground) -> Receipt:
    """The first receipt again, if it is the same intent."""
    same = ground.book(intent.book).id == taken.book and encode_legs(booked_legs(intent, ground)) == taken.legs
    if not same:
        raise KeyReused(intent.scope, intent.key, taken.seq)
    return Receipt(envelope=taken.seq, id=taken.id.hex(), key=intent.key, replayed=True)


def cache_changes(plan: Plan, wide: set[int]) -> dict[tuple[int, int], int]:
    """What an envelope changes in cached balances: system and external accounts, and those made wide."""
    cached = [a.id for a in plan.envelope.accounts if not a.selects or a.id in wide]
    if not cached:
        return {}
    changes: dict[tuple[int, int], int] = {}
    for sign, postings in ((-1, plan.envelope.consumes), (1, plan.envelope.creates)):
        for p in postings:
            if p.account in cached:
                changes[p.account, p.asset] = changes.get((p.account, p.asset), 0) + sign * p.amount
    return changes


def hold_row(hold: HoldChange, plan: Plan, ground: Ground, moves: Sequence[Move] = ()) -> HoldRow:
    """The hold as this envelope leaves it: its posting is the one created in the account of held money.

    One that a record owns is made and settled with a move of that record, or not at all (W34): otherwise a hold could
    be given back by hand while its record pays the same money outside.
    """
    if hold.owner and all(owner_name(move.flow, move.id) != hold.owner for move in moves):
        raise HoldOwned(hold.id, hold.owner)
    held = ground.account(HELD).id
    posting = next((p.id for p in plan.envelope.creates if p.account == held), hold.posting)
    return HoldRow(
        id=hold.id or plan.envelope.seq,
        account=ground.account(hold.account).id,
        asset=ground.asset(hold.asset).id,
        amount=hold.amount,
        remaining=hold.remaining,
        posting=posting,
        state=hold.state,
        owner=hold.owner,
        expires_us=hold.expires_us,
        lasts_us=hold.lasts_us,
    )
