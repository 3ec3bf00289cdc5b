"""Committing by saga.

    save saga (key and envelope, phase reserving) → reserve → re-validate → phase finalizing, the point of no return
    → spend → bury → insert → enliven → floors → publish (envelope, history, hold, event) → delete saga

Every step is idempotent, so a crash anywhere is mended by doing the rest again: before the point of no return the saga
is tried anew and may still be refused; after it, it is only ever rolled forward. Each saga has a lease and a fencing
number: recovery takes over by raising the number, after which the old owner's steps change nothing (L5, L20).
"""

from __future__ import annotations

import msgspec

from bursar.model.entries import HoldState, Intent
from bursar.model.envelope import Plan, Receipt, decode_ids, decode_pins
from bursar.model.errors import (
    Conflict,
    DatabaseCorrupt,
    InsufficientFunds,
    InvalidEntry,
    InvalidState,
    KeyReused,
    Refusal,
    StalePin,
    UnknownRecord,
)
from bursar.model.ledger_state import LedgerState
from bursar.model.plan import validate_and_plan
from bursar.model.postings import Posting
from bursar.model.records import ExistingEntry, HoldRow, StoredEnvelope
from bursar.model.resolve import resolve
from bursar.model.selection import NeedMorePostings, PoolKey
from bursar.sim.split.tables import Saga, SplitTables
from bursar.store import Store
from bursar.store.batch import READ_MAX, RuleSet, WriteConflict, WriterCache
from bursar.store.rows import envelope_of, envelope_row, rebuild
from bursar.writer.batch import READ_MORE, Batch
from bursar.writer.change import Change, ChangeResult
from bursar.writer.decision import accounts_of, cache_changes, hold_row, replay

LEASE_US = 10_000_000
BROKEN = "broken"
UNREADABLE = (msgspec.MsgspecError, ValueError, KeyError, OverflowError)  # what a damaged row may raise
PAUSE_S = 0.005
NUMBERS = 16

WidePosting = tuple[int, int, int, str]  # amounts as text: MessagePack ends at 64 bits
WideHold = tuple[int, int, int, str, str, int, str, str, int | None, int | None]


class SagaData(msgspec.Struct, array_like=True):
    """What it takes to finish a commit, in any process."""

    envelope: StoredEnvelope
    creates: list[WidePosting]
    consumes: list[WidePosting]
    floors: list[tuple[int, int, str]]
    cache: list[tuple[int, int, str]]
    hold: WideHold | None


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(SagaData).decode


class SagaCommit:
    """Commits by saga, and recovers them."""

    def __init__(self, store: Store, tries: int) -> None:
        self.store = store
        self.ports = store.ports
        self.tries = tries
        self.cache = WriterCache()
        self._numbers: list[int] = []

    async def apply(self, change: Change) -> ChangeResult:
        """Commit a change of one intent; without transactions, several can't be all or nothing."""
        if len(change.intents) != 1:
            raise InvalidEntry("several entries can't be committed together in split mode")
        last = ""
        for attempt in range(self.tries):
            try:
                return ChangeResult((await self._commit(change.intents[0]),))
            except WriteConflict as lost:
                last = str(lost)
                await self.ports.sleep(PAUSE_S * (attempt + 1) * (0.5 + self.ports.random()))
        raise Conflict(last, self.tries)

    async def _commit(self, intent: Intent) -> Receipt:
        tables = SplitTables(self.store.single())
        cache = await self._learn_rules(tables, accounts_of(intent))
        batch = Batch(cache, [Change((intent,))], first_read=self.store.first_read)
        state, existing = await self._state(tables, batch)
        try:
            data = await self._decide(tables, batch, state, existing, intent)
        except KeyReused:
            raise
        except Refusal as refusal:
            await self._only_if_unasked(tables, intent, refusal)
            raise
        if isinstance(data, Receipt):
            return data
        saga = Saga(
            id=self.ports.token(),
            kind="commit",
            scope=intent.scope,
            key=intent.key,
            phase="reserving",
            fence=1,
            lease_us=self.ports.now_us() + LEASE_US,
            data=_encode(data),
        )
        if not await tables.steps.save(saga):
            await self._help(tables, intent)
            raise WriteConflict(f"key {intent.key!r} is being committed by another process")
        return await self._drive(tables, saga.id, 1, data, cache)

    async def _decide(
        self, tables: SplitTables, batch: Batch, state: LedgerState, existing: ExistingEntry | None, intent: Intent
    ) -> SagaData | Receipt:
        """Read-only: what would be written, or the receipt if it was written before."""
        if existing is not None:
            return replay(intent, existing, state)
        number, read = await self._number(tables), batch.read_set().pools
        while True:
            try:
                envelope, covered = resolve(intent, state, number), intent.no_overdraft
                plan = validate_and_plan(envelope, state, intent.pins, no_overdraft=covered, outside=intent.outside)
                hold = None if intent.hold is None else hold_row(intent.hold, plan, state)
                return saga_data(plan, hold, batch.cache.cached_accounts)
            except NeedMorePostings as need:
                key = next(key for key, pool in state.pools.items() if pool is need.pool)
                read[key] = min(READ_MAX, read[key] * READ_MORE)
                postings = await self._pool(tables, key, read[key])
                state.add_postings(postings, key=key, complete=len(postings) < read[key] or read[key] >= READ_MAX)
            except InsufficientFunds as refusal:
                await self._only_if_free(tables, refusal, batch.cache)
                raise

    async def _learn_rules(self, tables: SplitTables, paths: set[str]) -> WriterCache:
        """A cache of the current generation, which is read first: what is read after it may be newer, never older.

        A new generation gets a new object, so that what another task has just read can't land under the wrong one.
        """
        generation = await tables.rules.generation()
        cache = self.cache
        if cache.generation != generation:
            cache = WriterCache()
            assets, books = await tables.rules.assets(), await tables.rules.books()
            cache.reset(RuleSet(generation, assets, books, await tables.balances.cached_accounts()))
            self.cache = cache
        cache.trim()
        missing = paths.difference(cache.accounts)
        if missing:
            cache.accounts.update(await tables.accounts.heads(sorted(missing)))
        return cache

    async def _state(self, tables: SplitTables, batch: Batch) -> tuple[LedgerState, ExistingEntry | None]:
        """What one intent is decided on, and the entry that has its key already."""
        cache, read = batch.cache, batch.read_set()
        state = LedgerState(cache.accounts, cache.assets, cache.books)
        for key, most in read.pools.items():
            postings = await self._pool(tables, key, most)
            state.add_postings(postings, key=key, complete=len(postings) < most)
        if read.named:
            state.add_postings([*await tables.steps.live(read.named)], key=None)
        guarded = await tables.steps.guarded(read.guarded) if read.guarded else {}
        for at in read.guarded:
            state.balances[at] = guarded.get(at, 0)
        return state, (await tables.envelopes.existing(read.keys)).get(read.keys[0])

    async def _pool(self, tables: SplitTables, key: PoolKey, most: int) -> list[Posting]:
        return await tables.postings.candidates("largest" if key[2] > 0 else "most_negative", key[0], key[1], most)

    async def _number(self, tables: SplitTables) -> int:
        """An envelope number, from a handful taken ahead; what a crash leaves over is never used."""
        if not self._numbers:
            last = await tables.steps.take_numbers(NUMBERS)
            self._numbers = list(range(last, last - NUMBERS, -1))
        return self._numbers.pop()

    async def _only_if_free(self, tables: SplitTables, refusal: InsufficientFunds, cache: WriterCache) -> None:
        """A shortage caused by another saga's reservations is no refusal: it may pass (L18)."""
        account, asset = cache.accounts[refusal.account], cache.assets[refusal.asset]
        claimed, finalizing, free = await tables.steps.shortage(account.id, asset.id)
        if claimed or finalizing or free >= asset.minor(refusal.needed):
            raise WriteConflict(f"postings of {refusal.account} are reserved")

    async def _only_if_unasked(self, tables: SplitTables, intent: Intent, refusal: Refusal) -> None:
        """A refusal holds only if no earlier try of the same key is being finished by another process, or just was."""
        key = (intent.scope, intent.key)
        under_way = any((saga.scope, saga.key) == key for saga in await tables.steps.list())
        # In this order: a saga that is gone by the first look has left its envelope for the second.
        if under_way:
            await self._help(tables, intent)
        if under_way or await tables.envelopes.existing([key]):
            raise WriteConflict(f"key {intent.key!r} is being committed by another process") from refusal

    async def _help(self, tables: SplitTables, intent: Intent) -> None:
        """Somebody is committing the same key; if they died, finish it for them."""
        for saga in await tables.steps.list():
            if (saga.scope, saga.key) == (intent.scope, intent.key):
                await self._recover_one(tables, saga)

    async def _drive(
        self, tables: SplitTables, saga: str, fence: int, data: SagaData, cache: WriterCache | None = None
    ) -> Receipt:
        """Reserve, re-validate, pass the point of no return, roll forward.

        With `cache`, the envelope was decided on them a moment ago, and what it rests on is held by the steps here: its
        postings by the reservation, the rules by the generation that `finalize` compares. Only a guarded balance can
        have moved before it was reserved; then, and for a saga found by recovery, everything is validated again.
        """
        ids = list(decode_ids(data.envelope.consumes))
        guarded = [(a, s) for a, s, _ in data.floors]
        claimed = await tables.steps.reserve(ids, saga, fence) if ids else 0
        claimed_heads = await tables.steps.reserve_guarded(guarded, saga, fence) if guarded else 0
        if claimed != len(ids) or claimed_heads != len(guarded):
            await self._abandon(tables, saga, fence, ids)
            raise WriteConflict("a posting was taken")
        if cache is None or guarded:
            try:
                plan, cache = await self._revalidate(tables, data)
            except Refusal as refusal:
                if not await self._abandon(tables, saga, fence, ids):
                    # What refuses us may be our own envelope, finished by the process that has the saga now.
                    raise WriteConflict("another process has taken the saga over") from refusal
                if isinstance(refusal, StalePin):
                    raise WriteConflict("an account has changed") from refusal
                raise
            data.floors = [(a, s, str(after)) for a, s, _, after in plan.floors]
        if not await tables.steps.finalize(saga, fence, _encode(data), cache.generation):
            await self._abandon(tables, saga, fence, ids)
            raise WriteConflict("the rules have changed, or another process has taken the saga over")
        return await self._roll_forward(tables, saga, fence, data)

    async def _abandon(self, tables: SplitTables, saga: str, fence: int, ids: list[int]) -> int:
        """Let go of everything; 0 if the saga was no longer ours to abandon."""
        if ids:
            await tables.steps.release(ids, saga, fence)
        await tables.steps.release_guarded(saga, fence)
        return await tables.steps.delete(saga, fence)

    async def _revalidate(self, tables: SplitTables, data: SagaData) -> tuple[Plan, WriterCache]:
        """The same checks again, on what is there now: floors, freezes and pins are judged here, as late as can be."""
        pins = decode_pins(data.envelope.pins)
        versions = {(a.id, a.version): a for a in self.cache.accounts.values()}
        if any(pin not in versions for pin in pins):
            versions = await tables.accounts.versions(pins)
        accounts = {pin[0]: versions[pin] for pin in pins}
        cache = await self._learn_rules(tables, {a.path for a in accounts.values()})
        state = LedgerState(cache.accounts, cache.assets, cache.books)
        if data.consumes:
            stored = await tables.postings.get([p[0] for p in data.consumes])
            state.add_postings([s.posting for s in stored if s.spender is None], key=None)
        guarded = [(a, s) for a, s, _ in data.floors]
        if guarded:
            state.balances.update(await tables.steps.guarded(guarded))
        consumes, creates = (tuple(_narrow(p) for p in ps) for ps in (data.consumes, data.creates))
        books = {b.id: b for b in cache.books.values()}
        envelope = rebuild(data.envelope, accounts, state.assets_by_id, books, consumes, creates)
        return validate_and_plan(envelope, state), cache

    async def _roll_forward(self, tables: SplitTables, saga: str, fence: int, data: SagaData) -> Receipt:
        """Do all that is left. Every step may have been done before."""
        stored = data.envelope
        ids = [p[0] for p in data.consumes]
        if ids:
            spent = await tables.steps.spend(ids, saga, fence, stored.seq)
            spenders = {} if spent == len(ids) else await tables.postings.spenders(ids)
            if spent != len(ids) and any(spenders.get(i) != stored.seq for i in ids):
                if not await tables.steps.has_fence(saga, fence):
                    raise WriteConflict("another process has taken the saga over")
                # With our fence, past the point of no return, our reservation can't be lost. Stop, create nothing (L4).
                raise DatabaseCorrupt(f"saga {saga}", "its postings were spent by another commit")
            await tables.steps.bury(ids, saga)
        creates = [_narrow(p) for p in data.creates]
        await tables.steps.insert(creates)
        await tables.steps.enliven(creates)
        if data.floors:
            await tables.steps.settle_guarded([(a, s, int(b)) for a, s, b in data.floors], saga)
        accounts = [account for account, _ in decode_pins(stored.pins)]
        cache = [(a, s, int(v)) for a, s, v in data.cache]
        hold = None if data.hold is None else _hold(data.hold)
        if not await tables.steps.publish(stored, accounts, cache, hold, saga, fence):
            taken = (await tables.envelopes.existing([(stored.scope, stored.key)])).get((stored.scope, stored.key))
            if taken is None or taken.seq != stored.seq:
                raise WriteConflict("another process has taken the saga over")
        await tables.steps.delete(saga, fence)
        return Receipt(envelope=stored.seq, id=stored.id.hex(), key=stored.key)

    async def recover(self) -> dict[str, int]:
        """Finish or cleanly abandon every saga whose owner is gone. A second call finds nothing to do."""
        found = {"finished": 0, "abandoned": 0, "broken": 0, "alive": 0}
        tables = SplitTables(self.store.single())
        for saga in await tables.steps.list():
            if saga.phase == BROKEN:
                found["broken"] += 1
            else:
                found[await self._recover_one(tables, saga)] += 1
        return found

    async def _recover_one(self, tables: SplitTables, saga: Saga) -> str:
        now = self.ports.now_us()
        # A clock that jumped back must not leave a saga leased for ever (L24).
        deadline = now if saga.lease_us <= now + 2 * LEASE_US else saga.lease_us
        if not await tables.steps.take(saga, now + LEASE_US, deadline):
            return "alive"
        fence = saga.fence + 1
        try:
            data = _decode(saga.data)
        except UNREADABLE as error:
            return await self._set_aside(tables, saga, f"it can't be read: {error}")
        try:
            if saga.phase == "finalizing":
                await self._roll_forward(tables, saga.id, fence, data)
            else:
                await self._drive(tables, saga.id, fence, data)
        except (WriteConflict, Refusal):
            return "abandoned"
        except (DatabaseCorrupt, *UNREADABLE) as error:  # it says what is not there, or makes no sense
            return await self._set_aside(tables, saga, f"{type(error).__name__}: {error}")
        return "finished"

    async def _set_aside(self, tables: SplitTables, saga: Saga, why: str) -> str:
        """Leave it for an operator, after an alert: a crash in between raises it again rather than never (L12)."""
        message = f"commit {saga.id} of key {saga.key!r} can't be finished and is set aside: {why}. What it has claimed"
        message += " can't be spent, and its key can't be used, until it is released"
        clean = message.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()
        await tables.alerts.raise_once(0, f"commit {saga.id} set aside", "critical", clean)
        await tables.steps.set_aside(saga.id)
        return "broken"

    async def release(self, id_: str, *, actor: str, reason: str) -> int:
        """Give up a commit that was set aside, if nothing of it was written; returns how many postings are free again.

        No caller has had a receipt: it is given after the last step. What must not happen is that
        half of it stays, so the value tables are looked at, not the row that can't be read.
        """
        async with self.store.transaction() as tables:
            unit = SplitTables(tables)
            saga = next((one for one in await unit.steps.list() if one.id == id_ and one.phase == BROKEN), None)
            if saga is None:
                raise UnknownRecord("set-aside commit", id_)
            if await unit.steps.count():
                raise Conflict("commits are under way; recover them first", 1)
            done = bool(await unit.envelopes.existing([(saga.scope, saga.key)]))
            halves = await unit.checks.ids("stray_spends", 1) or await unit.checks.ids("stray_postings", 1)
            if halves and not done:
                why = "some of it is written: its spends or postings have no envelope; restore from a backup"
                raise InvalidState("commit", id_, "set aside", why)
            freed = await unit.steps.release_claims(id_)
            await unit.steps.release_guarded(id_, saga.fence)
            await unit.steps.delete(id_, saga.fence)
            await unit.actions.note("released", "commit", id_, actor=actor, reason=reason)
            await unit.alerts.acknowledge(0, f"commit {id_} set aside", actor)
        return freed


def saga_data(plan: Plan, hold: HoldRow | None, cached_accounts: set[int]) -> SagaData:
    """A plan as it is written ahead."""
    envelope = plan.envelope
    return SagaData(
        envelope=envelope_of((*envelope_row(envelope, plan.id), 0)),
        creates=[_wide(p) for p in envelope.creates],
        consumes=[_wide(p) for p in envelope.consumes],
        floors=[(a, s, str(after)) for a, s, _, after in plan.floors],
        cache=[(a, s, str(v)) for (a, s), v in cache_changes(plan, cached_accounts).items()],
        hold=None
        if hold is None
        else (
            hold.id,
            hold.account,
            hold.asset,
            str(hold.amount),
            str(hold.remaining),
            hold.posting,
            hold.state.value,
            hold.owner,
            hold.expires_us,
            hold.lasts_us,
        ),
    )


def _wide(p: Posting) -> WidePosting:
    return (p.id, p.account, p.asset, str(p.amount))


def _narrow(p: WidePosting) -> Posting:
    return Posting(p[0], p[1], p[2], int(p[3]))


def _hold(h: WideHold) -> HoldRow:
    return HoldRow(
        id=h[0],
        account=h[1],
        asset=h[2],
        amount=int(h[3]),
        remaining=int(h[4]),
        posting=h[5],
        state=HoldState(h[6]),
        owner=h[7],
        expires_us=h[8],
        lasts_us=h[9],
    )
