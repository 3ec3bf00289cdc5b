"""The oracle: looks at the ledger's rows behind its back and knows what must be true of them.

It keeps a picture of its own: every envelope that was announced, the postings it made, who spent which, what that adds
up to. After every commit it reads the rows of the envelopes announced since (hash, conservation, postings, spends,
live rows) and puts them into the picture; at every crash and at the end it reads all rows of all tables and compares
them with the picture (I1, I2, I3, I8, and the disposable tables). It reads the simulated disk directly, not through
the store's reading code, so that both can't be wrong in the same way; only the canonical encoding is shared, because
that is what I8 is about.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping
from itertools import chain

import msgspec

from bursar.model.accounts import Account
from bursar.model.entries import EntryKind
from bursar.model.envelope import Envelope, decode_ids, decode_legs, decode_pins
from bursar.model.money import Asset
from bursar.model.postings import INDEX_BITS, Posting
from bursar.store.columns import Row
from bursar.store.rows import account_of, asset_of, book_of
from bursar.store.sqlite.calls import amount_out

EVENT_COMMITTED = 1
ENVELOPE = "seq, id, scope, key, book, kind, reverses, legs, pins, consumes, metadata"
NEWS = (
    "SELECT v.seq, v.kind, v.subject, e.seq, e.id, e.scope, e.key, e.book, e.kind, e.reverses, e.legs, e.pins, "
    "e.consumes, e.metadata FROM events v LEFT JOIN envelopes e ON e.seq = v.subject AND v.kind = 1 "
    "WHERE v.seq > ? ORDER BY v.seq"
)
# What a range of envelopes created, and what they consumed, each with its spender and whether it is live.
_POSTINGS = (
    "SELECT p.id, p.account, p.asset, p.amount, s.envelope, l.posting FROM postings p "
    "LEFT JOIN spends s ON s.posting = p.id LEFT JOIN live_postings l ON l.posting = p.id WHERE p.id"
)
CREATED = f"{_POSTINGS} BETWEEN ? AND ?"
CREATED_AND_CONSUMED = f"{CREATED} UNION ALL {_POSTINGS} IN (SELECT value FROM json_each(?))"


_numbers = msgspec.json.Decoder(set[int]).decode


class Violation(AssertionError):
    """An invariant does not hold."""


class Oracle:
    """Judges one database."""

    def __init__(self, connection: sqlite3.Connection, past: Oracle | None = None) -> None:
        """Judge what is there; or, with the oracle of what it is a copy of, only what is new since.

        What is not new is still compared row by row at every crash and at the end.
        """
        self.db = connection
        self.checks = 0
        self._seen = 0  # last event judged
        self._changes = -1  # rows written by then
        self.envelopes: dict[int, Row] = {}  # by number: the row as it was announced
        self.postings: dict[int, Row] = {}  # by number: (number, account, asset, amount)
        self.spent: dict[int, int] = {}  # posting → the envelope that lists it
        self.unspent: dict[int, Row] = {}  # the other postings
        self.balances: Counter[tuple[int, int]] = Counter()  # of what is not spent, per (account, asset)
        self.moved: Counter[tuple[int, int]] = Counter()  # what the movements add up to, per (account, asset)
        self._values: dict[int, Posting] = {}  # the same postings, decoded
        self._hashed: dict[int, bytes] = {}  # envelopes, by number: the hash of what was announced
        self._versions: dict[tuple[int, int], Account] = {}
        self._pinned: dict[bytes, tuple[Account, ...]] = {}  # the versions that pins name; most entries name the same
        self._heads: dict[int, Account] = {}  # newest versions
        self._heads_of = 0  # when there were so many
        self.assets: dict[int, Asset] = {r[0]: asset_of(r) for r in self.db.execute("SELECT * FROM assets")}
        self._all_assets = tuple(self.assets.values())
        self.books = {r[0]: book_of(r) for r in self.db.execute("SELECT id, name, assets, accounts FROM books")}
        if past is not None:
            self._seen = past._seen
            self.envelopes |= past.envelopes
            self.postings |= past.postings
            self.spent |= past.spent
            self.unspent |= past.unspent
            self._hashed |= past._hashed
            self.balances.update(past.balances)
            self.moved.update(past.moved)
            self._values |= past._values

    # --- after every commit ------------------------------------------------------------------------------------

    def look(self, *, others: bool = False) -> None:
        """Judge every envelope announced since the last look. `others`: also if only other connections have written."""
        db = self.db
        # Inside a transaction there may be events that are rolled back, whose numbers others then get.
        if (db.total_changes == self._changes and not others) or db.in_transaction:
            return
        self._changes = db.total_changes
        announced = []
        for row in db.execute(NEWS, (self._seen,)).fetchall():
            self._seen = row[0]
            if row[1] == EVENT_COMMITTED:
                if row[3] is None:
                    raise Violation(f"I8: event of envelope {row[2]}, but no such envelope")
                announced.append(row[3:])
        if announced:
            self._envelopes(announced)

    def _envelopes(self, announced: list[Row]) -> None:
        numbers = [row[0] for row in announced]
        listed = [decode_ids(row[9]) for row in announced]
        consumed = list(chain.from_iterable(listed))
        span = (min(numbers) << INDEX_BITS, ((max(numbers) + 1) << INDEX_BITS) - 1)
        if consumed:
            rows = self.db.execute(CREATED_AND_CONSUMED, (*span, str(consumed))).fetchall()
        else:
            rows = self.db.execute(CREATED, span).fetchall()
        found: dict[int, Row] = {}
        created: dict[int, list[Row]] = {}
        for row in rows:
            number = row[0]
            if number not in found:  # one that the range holds and a later envelope consumes comes twice
                found[number] = row
                created.setdefault(number >> INDEX_BITS, []).append(row)
        for row, ids in zip(announced, listed, strict=True):
            self._envelope(row, ids, found, created.get(row[0], []))

    def _envelope(self, row: Row, ids: tuple[int, ...], found: dict[int, Row], created: list[Row]) -> None:
        self.checks += 1
        seq = row[0]
        consumes = []
        for number in ids:
            posting = found.get(number)
            if posting is None:
                raise Violation(f"I2: envelope {seq} spends postings that were never created")
            if posting[4] != seq:
                raise Violation(f"I2: envelope {seq} lists posting {number}, spent by {posting[4]}")
            if posting[5] is not None:
                raise Violation(f"I3: posting {number} is spent by {seq} and live")
            consumes.append(self._value(posting))
        if len(set(ids)) != len(ids):
            raise Violation(f"I2: envelope {seq} lists a posting twice")
        for posting in created:
            if posting[4] is None and posting[5] is None:
                raise Violation(f"I3: posting {posting[0]} is neither live nor spent")
        creates = sorted([self._value(posting) for posting in created], key=_by_number)
        self._hashes(row, tuple(consumes), tuple(creates))
        self._conserves(seq, consumes, creates)
        self.envelopes[seq] = row
        self._hashed[seq] = row[1]
        for number in ids:
            if number in self.spent:
                raise Violation(f"I2: posting {number} is listed by {self.spent[number]} and {seq}")
            self.spent[number] = seq
            del self.unspent[number]

    def _value(self, row: Row) -> Posting:
        """A posting from its row, which must be the row that it was when it was first seen."""
        number = row[0]
        known = self._values.get(number)
        if known is None:
            self.postings[number] = self.unspent[number] = row[:4]
            known = self._values[number] = Posting(number, row[1], row[2], amount_out(row[3]))
        elif self.postings[number] != row[:4]:
            raise Violation(f"I8: posting {number} is {row[:4]}, and was {self.postings[number]}")
        return known

    def _hashes(self, row: Row, consumes: tuple[Posting, ...], creates: tuple[Posting, ...]) -> None:
        seq, id_, scope, key, book, kind, reverses, legs, pins, _, metadata = row
        movements = decode_legs(legs)
        accounts = self._pinned.get(pins)
        if accounts is None:
            accounts = self._pinned[pins] = tuple([self._version(pin) for pin in decode_pins(pins)])
        envelope = Envelope(
            seq=seq,
            scope=scope,
            key=key,
            book=self.books[book],
            kind=kind,
            reverses=reverses,
            legs=movements,
            accounts=accounts,
            assets=self._all_assets,
            consumes=consumes,
            creates=creates,
            metadata=metadata,
        )
        try:
            hashed = envelope.id()
        except KeyError as missing:
            why = f"account {missing}, which it does not name, or of an asset that is not there"
            raise Violation(f"I8: envelope {seq} has a posting of {why}") from None
        if hashed != id_:
            raise Violation(f"I8: envelope {seq} hashes to {hashed.hex()}, not {id_.hex()}")
        if kind == EntryKind.COMPACT and movements:
            raise Violation(f"envelope {seq} merges postings and moves value")
        moved = self.moved
        for leg in movements:
            moved[leg.source, leg.asset] -= leg.minor
            moved[leg.target, leg.asset] += leg.minor

    def _conserves(self, seq: int, consumes: list[Posting], creates: list[Posting]) -> None:
        sums: dict[int, int] = {}
        balances = self.balances
        for p in consumes:
            sums[p.asset] = sums.get(p.asset, 0) - p.amount
            balances[p.account, p.asset] -= p.amount
        for p in creates:
            sums[p.asset] = sums.get(p.asset, 0) + p.amount
            balances[p.account, p.asset] += p.amount
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

    def everything(self, *, every_column: bool = False) -> None:
        """I1, I2, I3, I8 over all rows. Only when no commit is half done.

        Rows of insert-only tables were compared in full when they were announced, and can't be changed and changed
        back: until the end, when every column is asked for, it is enough that they are there, under their hash.
        """
        self.look(others=True)
        read = self.db.execute
        spends = dict(read("SELECT posting, envelope FROM spends").fetchall())
        if spends != self.spent:
            raise Violation(f"I2: what envelopes list is not what was spent: {_differ(spends, self.spent)}")
        live = {r[0]: r for r in read("SELECT posting, account, asset, amount FROM live_postings").fetchall()}
        if live != self.unspent:
            sums: Counter[int] = Counter()
            for r in live.values():
                sums[r[2]] += amount_out(r[3])
            if any(sums.values()):
                raise Violation(f"I1: live postings sum to {dict(sums)}")
            raise Violation(f"I3: live is not postings - spends: {_differ(live, self.unspent)}")
        if every_column:
            self._every_column()
        else:
            (listed,) = read("SELECT group_concat(id) FROM postings").fetchone()  # a row for each takes twice as long
            made = _numbers(f"[{listed or ''}]")
            if made != self.postings.keys():
                raise Violation(f"I8: postings without their envelope: {sorted(made ^ self.postings.keys())[:5]}")
            if dict(read("SELECT seq, id FROM envelopes").fetchall()) != self._hashed:
                raise Violation("I8: envelopes are not what was announced")
        (announced,) = read("SELECT count(*) FROM events WHERE kind = 1").fetchone()
        if announced != len(self.envelopes):
            raise Violation(f"{len(self.envelopes)} envelopes, {announced} events")
        self._disposable(live)

    def _every_column(self) -> None:
        """Envelopes and postings are, to the byte, what they were when they were hashed."""
        read = self.db.execute
        postings = {r[0]: r for r in read("SELECT id, account, asset, amount FROM postings").fetchall()}
        if postings != self.postings:
            raise Violation(f"I8: postings are not what envelopes made: {_differ(postings, self.postings)}")
        envelopes = {r[0]: r for r in read(f"SELECT {ENVELOPE} FROM envelopes").fetchall()}
        if envelopes != self.envelopes:
            raise Violation(f"I8: envelopes are not what was announced: {_differ(envelopes, self.envelopes)}")

    def _disposable(self, live: dict[int, Row]) -> None:
        """Guarded and cached balances, floors and holds agree with the postings."""
        sums, heads = self.balances, self._newest()
        for (account, asset), balance in sums.items():
            if balance < 0:
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
            if not heads[account].pays_from_postings and cached[account, asset] != balance:
                raise Violation(f"the cached balance of {heads[account].path} is missing {balance}")
        self._holds(live, next(i for i, head in heads.items() if head.path == "held"))

    def _newest(self) -> dict[int, Account]:
        """The newest version of every account; read again when there are more versions, since none ever changes."""
        (versions,) = self.db.execute("SELECT count(*) FROM accounts").fetchone()
        if versions != self._heads_of:
            sql = "SELECT id, path, max(version), policy, status, book FROM accounts GROUP BY id"
            self._heads = {row[0]: account_of(row) for row in self.db.execute(sql)}
            self._heads_of = versions
        return self._heads

    def _holds(self, live: dict[int, Row], account: int) -> None:
        """Every open hold has its posting, and nothing else is held."""
        held: Counter[int] = Counter()
        for hold, asset, remaining, posting in self.db.execute(
            "SELECT id, asset, remaining, posting FROM holds WHERE state = 'open'"
        ):
            held[asset] += amount_out(remaining)
            row = live.get(posting)
            if row is None or row[3] != remaining:
                raise Violation(f"hold {hold} is open but its posting {posting} is not there")
        for asset in self.assets:
            if held[asset] != self.balances[account, asset]:
                raise Violation(f"{self.balances[account, asset]} of {asset} are held, holds say {held[asset]}")

    # --- what happened ---------------------------------------------------------------------------------------------

    def keys(self) -> dict[tuple[str, str], tuple[int, str]]:
        """(scope, key) → (envelope, id), of all that was announced; `everything` says that this is all there is."""
        return {(row[2], row[3]): (row[0], row[1].hex()) for row in self.envelopes.values()}

    def unbalanced(self) -> dict[tuple[int, int], tuple[int, int]]:
        """(account, asset) → (what movements add up to, what is live), where the two differ."""
        moved, live = self.moved, self.balances
        return {key: (moved[key], live[key]) for key in moved.keys() | live.keys() if moved[key] != live[key]}


def _by_number(posting: Posting) -> int:
    return posting.id


def _differ(found: Mapping[int, object], expected: Mapping[int, object]) -> list[int]:
    """The numbers of the first rows that are not alike."""
    return sorted(n for n in found.keys() | expected.keys() if found.get(n) != expected.get(n))[:5]
