"""The oracle: looks at the ledger's rows behind its back and knows what must be true of them.

Incremental after every commit (the envelope that has just been announced: its hash, its conservation, its postings),
complete at every crash and at the end (I1, I2, I3, I8 over everything, and the disposable tables). It reads the
simulated disk directly, not through the store's reading code, so that both can't be wrong in the same way; only the
canonical encoding is shared, because that is what I8 is about.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterable

from bursar.model.accounts import Account
from bursar.model.entries import Kind
from bursar.model.envelope import Receipt, decode_ids, decode_legs, decode_pins
from bursar.model.money import Asset
from bursar.model.postings import Posting
from bursar.model.records import StoredEnvelope
from bursar.store.rows import Row, account_of, asset_of, book_of, envelope_of, rebuild
from bursar.store.sqlite.calls import amount_out

EVENT_COMMITTED = 1
UNSPENT = "SELECT id, account, asset, amount FROM postings WHERE id NOT IN (SELECT posting FROM spends)"
POSTINGS = (
    "SELECT p.id, p.account, p.asset, p.amount, s.envelope, l.posting FROM postings p "
    "LEFT JOIN spends s ON s.posting = p.id LEFT JOIN live_postings l ON l.posting = p.id"
)


def _posting(row: Row) -> Posting:
    return Posting(row[0], row[1], row[2], amount_out(row[3]))


class Violation(AssertionError):
    """An invariant does not hold."""


class Oracle:
    """Judges one database."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection
        self.checks = 0
        self._seen = 0  # last event judged
        self._changes = -1  # rows written by then
        self._versions: dict[tuple[int, int], Account] = {}
        self.assets: dict[int, Asset] = {r[0]: asset_of(r) for r in self.db.execute("SELECT * FROM assets")}
        self.books = {r[0]: book_of(r) for r in self.db.execute("SELECT id, name, assets, accounts FROM books")}

    # --- after every commit ------------------------------------------------------------------------------------

    def look(self) -> None:
        """Judge every envelope announced since the last look."""
        if self.db.total_changes == self._changes:
            return
        self._changes = self.db.total_changes
        news = self.db.execute(
            "SELECT v.seq, v.kind, v.subject, e.seq, e.id, e.scope, e.key, e.book, e.kind, e.reverses, e.legs, e.pins, "
            "e.consumes, e.metadata, e.at FROM events v LEFT JOIN envelopes e ON e.seq = v.subject AND v.kind = 1 "
            "WHERE v.seq > ? ORDER BY v.seq",
            (self._seen,),
        )
        announced = []
        for row in news.fetchall():
            self._seen = row[0]
            if row[1] == EVENT_COMMITTED:
                if row[3] is None:
                    raise Violation(f"I8: event of envelope {row[2]}, but no such envelope")
                announced.append(envelope_of(row[3:]))
        if announced:
            self._envelopes(announced)

    def _envelopes(self, announced: list[StoredEnvelope]) -> None:
        listed = {e.seq: decode_ids(e.consumes) for e in announced}
        wanted = str([number for ids in listed.values() for number in ids])
        found = {
            r[0]: r for r in self.db.execute(f"{POSTINGS} WHERE p.id IN (SELECT value FROM json_each(?))", (wanted,))
        }
        span = (min(listed) << 16, (max(listed) + 1) << 16)
        created: dict[int, list[Row]] = {}
        for row in self.db.execute(f"{POSTINGS} WHERE p.id >= ? AND p.id < ? ORDER BY p.id", span):
            created.setdefault(row[0] >> 16, []).append(row)
        for stored in announced:
            if any(number not in found for number in listed[stored.seq]):
                raise Violation(f"I2: envelope {stored.seq} spends postings that were never created")
            self._envelope(stored, [found[i] for i in listed[stored.seq]], created.get(stored.seq, []))

    def _envelope(self, stored: StoredEnvelope, consumed: list[Row], created: list[Row]) -> None:
        self.checks += 1
        seq = stored.seq
        consumes, creates = [_posting(r) for r in consumed], [_posting(r) for r in created]
        if len({p.id for p in consumes}) != len(consumes):
            raise Violation(f"I2: envelope {seq} lists a posting twice")
        accounts = {pin[0]: self._version(pin) for pin in decode_pins(stored.pins)}
        hashed = rebuild(stored, accounts, self.assets, self.books, tuple(consumes), tuple(creates)).id()
        if hashed != stored.id:
            raise Violation(f"I8: envelope {seq} hashes to {hashed.hex()}, not {stored.id.hex()}")
        self._conserves(seq, consumes, creates)
        for number, _, _, _, spender, live in consumed:
            if spender != seq:
                raise Violation(f"I2: envelope {seq} lists posting {number}, spent by {spender}")
            if live is not None:
                raise Violation(f"I3: posting {number} is spent by {seq} and live")
        for number, _, _, _, spender, live in created:
            if spender is None and live is None:
                raise Violation(f"I3: posting {number} is neither live nor spent")

    def _conserves(self, seq: int, consumes: Iterable[Posting], creates: Iterable[Posting]) -> None:
        sums: dict[int, int] = {}
        for p in consumes:
            sums[p.asset] = sums.get(p.asset, 0) - p.amount
        for p in creates:
            sums[p.asset] = sums.get(p.asset, 0) + p.amount
        if any(sums.values()):
            raise Violation(f"I1: envelope {seq} makes or destroys value: {sums}")

    def _version(self, pin: tuple[int, int]) -> Account:
        if pin not in self._versions:
            sql = "SELECT id, path, version, policy, status, book FROM accounts WHERE id = ? AND version = ?"
            row = self.db.execute(sql, pin).fetchone()
            if row is None:
                raise Violation(f"I8: an envelope was validated against account version {pin}, which does not exist")
            self._versions[pin] = account_of(row)
        return self._versions[pin]

    # --- at every crash and at the end -----------------------------------------------------------------------------

    def everything(self) -> None:
        """I1, I2, I3, I8 over all rows. Only when no commit is half done."""
        self.look()
        spends = dict(self.db.execute("SELECT posting, envelope FROM spends").fetchall())
        live = {r[0]: r for r in self.db.execute("SELECT posting, account, asset, amount FROM live_postings")}
        sums: Counter[int] = Counter()
        for r in live.values():
            sums[r[2]] += amount_out(r[3])
        if any(sums.values()):
            raise Violation(f"I1: live postings sum to {dict(sums)}")
        unspent = {r[0]: r for r in self.db.execute(UNSPENT)}
        if unspent != live:
            raise Violation("I3: live is not postings - spends")
        listed: dict[int, int] = {}
        for seq, consumes in self.db.execute("SELECT seq, consumes FROM envelopes"):
            for i in decode_ids(consumes):
                if i in listed:
                    raise Violation(f"I2: posting {i} is listed by {listed[i]} and {seq}")
                listed[i] = seq
        if listed != spends:
            raise Violation("I2: what envelopes list is not what was spent")
        announced = self.db.execute("SELECT count(*) FROM events WHERE kind = 1").fetchone()[0]
        committed = self.db.execute("SELECT count(*) FROM envelopes").fetchone()[0]
        if announced != committed:
            raise Violation(f"{committed} envelopes, {announced} events")
        if self.db.execute("SELECT 1 FROM postings WHERE id >> 16 NOT IN (SELECT seq FROM envelopes)").fetchone():
            raise Violation("I8: postings without their envelope")
        self._disposable(live)

    def _disposable(self, live: dict[int, tuple[int, int, int, bytes]]) -> None:
        """Guarded and cached balances, floors and holds agree with the postings."""
        sums: Counter[tuple[int, int]] = Counter()
        for _, account, asset, amount in live.values():
            sums[account, asset] += amount_out(amount)
        heads = {
            r[0]: account_of(r)
            for r in self.db.execute("SELECT id, path, max(version), policy, status, book FROM accounts GROUP BY id")
        }
        for (account, asset), balance in sums.items():
            head = heads[account]
            floor = head.floor(self.assets[asset]) if head.may_owe(self.assets[asset]) else 0
            if floor is not None and balance < floor:
                raise Violation(f"L1: {head.path} stands at {balance}, below {floor}")
        for account, asset, guarded in self.db.execute("SELECT account, asset, balance FROM account_heads"):
            if sums[account, asset] != int(guarded):
                raise Violation(
                    f"the guarded balance of {heads[account].path} is {guarded}, not {sums[account, asset]}"
                )
        cached: Counter[tuple[int, int]] = Counter()
        for account, asset, amount in self.db.execute("SELECT account, asset, amount FROM balance_cache"):
            if asset:
                cached[account, asset] += int(amount)
        for (account, asset), kept in cached.items():
            if sums[account, asset] != kept:
                raise Violation(f"the cached balance of {heads[account].path} is {kept}, not {sums[account, asset]}")
        for (account, asset), balance in sums.items():
            if not heads[account].selects and cached[account, asset] != balance:
                raise Violation(f"the cached balance of {heads[account].path} is missing {balance}")
        held: Counter[int] = Counter()
        for hold, asset, remaining, posting in self.db.execute(
            "SELECT id, asset, remaining, posting FROM holds WHERE state = 'open'"
        ):
            held[asset] += amount_out(remaining)
            row = live.get(posting)
            if row is None or row[3] != remaining:
                raise Violation(f"hold {hold} is open but its posting {posting} is not there")
        account = next(i for i, head in heads.items() if head.path == "held")
        if any(held[asset] != sums[account, asset] for asset in self.assets):
            raise Violation(f"held is {dict(sums)}, holds say {dict(held)}")

    # --- what happened ---------------------------------------------------------------------------------------------

    def keys(self) -> dict[tuple[str, str], tuple[int, str]]:
        """(scope, key) → (envelope, id), of all that was committed."""
        rows = self.db.execute("SELECT scope, key, seq, id FROM envelopes")
        return {(scope, key): (seq, id_.hex()) for scope, key, seq, id_ in rows}

    def receipt(self, seq: int, key: str) -> Receipt:
        """What a caller would be told of an envelope."""
        row = self.db.execute("SELECT id FROM envelopes WHERE seq = ?", (seq,)).fetchone()
        return Receipt(envelope=seq, id=row[0].hex(), key=key)

    def moved(self) -> Counter[tuple[int, int]]:
        """What the movements of all envelopes add up to, per (account, asset)."""
        sums: Counter[tuple[int, int]] = Counter()
        for legs, kind in self.db.execute("SELECT legs, kind FROM envelopes"):
            if kind == Kind.COMPACT and decode_legs(legs):
                raise Violation("an envelope that merges postings moves value")
            for leg in decode_legs(legs):
                sums[leg.source, leg.asset] -= leg.minor
                sums[leg.target, leg.asset] += leg.minor
        return sums

    def balances(self) -> Counter[tuple[int, int]]:
        """What is live, per (account, asset)."""
        sums: Counter[tuple[int, int]] = Counter()
        for account, asset, amount in self.db.execute("SELECT account, asset, amount FROM live_postings"):
            sums[account, asset] += amount_out(amount)
        return sums
