"""The heart of the core: balances, remembered answers, and the one place that decides an operation. No IO.

`execute` decides operations in order, each on what its predecessors left, and notes what has to be on disk before
anybody hears of it. Whoever owns the book takes those notes (`seal`), writes them, and only then lets the answers go;
`replay` does to a book what such notes say, without deciding anything again. A note that cannot be written ends the
process, so nobody ever sees a decision that is not on disk, and the order in which one person could observe things is
decide, append, apply, answer.

Everything is checked again here, whoever checked it before: this is the last line (specification 000 §1.5).

The same (id, operation) again gives the first answer again, refusals too (T7, T8). With other parameters it gives
`MISMATCH` and nothing happens: a refusal would be false for whoever asked first and could give money back that is
well spent, an `OK` would be false for whoever asks now, so it is neither, and a person looks.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from bursar.rails.trading.accounts import Accounts
from bursar.rails.trading.history import History, Packed, Row, packed
from bursar.rails.trading.words import ASSETS_MAX, CANCELLABLE, Code, Op, Status, is_asset

# Operation, id, user, asset, amount, other: as it comes off the wire. `other` is the payee of a settlement, and the
# operation that a cancel is about; 0 otherwise. All integers are unsigned and fit 64 bits: the decoder sees to it.
Item = tuple[int, int, int, str, int, int]

OK: Final = int(Code.OK)
DEPOSIT: Final = int(Op.DEPOSIT)
WITHDRAW: Final = int(Op.WITHDRAW)
DEPOSITED: Final = DEPOSIT << 8
WITHDRAWN: Final = WITHDRAW << 8
INVALID_AMOUNT: Final = int(Code.INVALID_AMOUNT)
INSUFFICIENT_BALANCE: Final = int(Code.INSUFFICIENT_BALANCE)
OVERFLOW: Final = int(Code.OVERFLOW)
BELOW_FLOOR: Final = int(Code.BELOW_FLOOR)

STATUS_REFUSAL: Final = {Status.FROZEN: int(Code.ACCOUNT_FROZEN), Status.DISABLED: int(Code.ACCOUNT_DISABLED)}


class NewAsset(NamedTuple):
    """A note: from now on this number stands for this asset. Has no sequence of its own."""

    number: int
    code: str


class Rows(NamedTuple):
    """A note: operations, executed or refused, as six integers each."""

    values: array[int]


class StatusChange(NamedTuple):
    """A note: an account is active, frozen or disabled."""

    sequence: int
    user: int
    status: int


class FloorRaised(NamedTuple):
    """A note: below this id, but for those kept, everything is forgotten, and nothing will be executed (T32)."""

    sequence: int
    floor: int
    keep: tuple[int, ...]


Note = NewAsset | Rows | StatusChange | FloorRaised


class Book:
    """All that the core knows."""

    def __init__(self) -> None:
        self.sequence = 0  # of the last note
        self.floor = 1
        self.history = History()
        self.assets: dict[str, Accounts] = {}
        self.statuses: dict[int, int] = {}  # of users who are not active
        self._by_number: list[Accounts] = [Accounts("", 0)]  # number 0 stands for what is no asset
        self._rows: list[Packed] = []
        self._notes: list[Note] = []

    # --- deciding

    def execute(self, items: Sequence[Item]) -> tuple[bytes, list[int]]:
        """Decide operations in order. Returns an answer and a sequence for each; 0 where nothing is on record."""
        codes, sequences = bytearray(), list[int]()
        history, assets, statuses, floor = self.history, self.assets, self.statuses, self.floor
        where, rows, sequence, first = history.where, self._rows, self.sequence, history.count
        for op, id_, user, name, amount, other in items:
            seen = where.get(op)
            if seen is None:
                self.sequence = sequence
                code, at = self._cancel(op, id_, other)
                sequence = self.sequence
            elif (number := seen.get(id_)) is not None:
                code, at = self._again(number, user, name, amount, other)
            elif id_ < floor:
                code, at = BELOW_FLOOR, 0
            else:
                accounts = assets.get(name)
                if accounts is None:
                    accounts = self._asset(op, name, other)
                if op == DEPOSIT:
                    if not amount or not accounts.number or user in statuses or other:
                        code = self._unfit(amount, accounts, user, other)
                    else:
                        place = accounts.index.get(user)
                        if place is None:
                            place = accounts.open(user)
                        room = accounts.room
                        if amount > room[place]:
                            code = OVERFLOW
                        else:
                            room[place] -= amount
                            accounts.available[place] += amount
                            code = OK
                elif op == WITHDRAW:
                    if not amount or not accounts.number or user in statuses or other:
                        code = self._unfit(amount, accounts, user, other)
                    else:
                        place = accounts.index.get(user)
                        if place is None or amount > accounts.available[place]:
                            code = INSUFFICIENT_BALANCE
                        else:
                            accounts.available[place] -= amount
                            code = OK
                else:
                    code = self._rarer(op, id_, user, accounts, amount, other)
                if code < 128:
                    sequence += 1
                    seen[id_] = first + len(rows)
                    rows.append((sequence, id_, user, amount, other, accounts.base | op << 8 | code))
                    at = sequence
                else:
                    at = 0
            codes.append(code)
            sequences.append(at)
        self.sequence = sequence
        return bytes(codes), sequences

    def _rarer(self, op: int, id_: int, user: int, accounts: Accounts, amount: int, other: int) -> int:
        """Refund, lock, unlock, settle: decided, and done if the answer is OK."""
        if op == Op.REFUND:
            return self._refund(id_, user, accounts, amount, other)
        if other and op != Op.SETTLE:
            return Code.BAD_OPERATION
        if not amount:
            return Code.INVALID_AMOUNT
        if not accounts.number:
            return Code.INVALID_ASSET
        place = accounts.index.get(user)
        if op == Op.LOCK:
            if user in self.statuses:
                return self._unfit(amount, accounts, user, other)
            if place is None or amount > accounts.available[place]:
                return Code.INSUFFICIENT_BALANCE
            accounts.available[place] -= amount
            accounts.frozen[place] += amount
            return Code.OK
        # Releasing what is frozen, and paying for a trade that has taken place, are facts: no status stops them (T35).
        if place is None or amount > accounts.frozen[place]:
            return Code.INSUFFICIENT_FROZEN
        if op == Op.UNLOCK:
            accounts.frozen[place] -= amount
            accounts.available[place] += amount
            return Code.OK
        if other == user:
            return Code.SAME_ACCOUNT
        payee = accounts.index.get(other)
        if payee is None:
            payee = accounts.open(other)
        if amount > accounts.room[payee]:
            return Code.OVERFLOW
        accounts.frozen[place] -= amount
        accounts.room[place] += amount
        accounts.available[payee] += amount
        accounts.room[payee] -= amount
        return Code.OK

    def _refund(self, id_: int, user: int, accounts: Accounts, amount: int, other: int) -> int:
        """Give a withdraw back, whole, whatever the account's status. Only success is remembered (T29, T31)."""
        number = self.history.where[WITHDRAW].get(id_)
        if number is None:
            return Code.WITHDRAW_NOT_FOUND
        withdrawn = self._row(number)
        if withdrawn.code != OK:
            return Code.WITHDRAW_NOT_FOUND
        if (withdrawn.user, withdrawn.asset, withdrawn.amount, 0) != (user, accounts.number, amount, other):
            return Code.MISMATCH
        accounts.available[accounts.index[user]] += amount  # its room was never given away: it fits
        return Code.OK

    def _unfit(self, amount: int, accounts: Accounts, user: int, other: int) -> int:
        """Which of the checks that deposits, withdraws and locks share has failed."""
        if other:
            return Code.BAD_OPERATION
        if not amount:
            return Code.INVALID_AMOUNT
        if not accounts.number:
            return Code.INVALID_ASSET
        return STATUS_REFUSAL[Status(self.statuses[user])]

    def _again(self, number: int, user: int, name: str, amount: int, other: int) -> tuple[int, int]:
        """The answer that was given, if this is what was asked."""
        row = self._row(number)
        if row.code == Code.CANCELLED:
            return row.code, row.sequence  # whatever it would have been
        accounts = self.assets.get(name)
        asset = 0 if accounts is None else accounts.number
        if (row.user, row.asset, row.amount, row.other) != (user, asset, amount, other):
            return Code.MISMATCH, 0
        return row.code, row.sequence

    def _cancel(self, op: int, id_: int, target: int) -> tuple[int, int]:
        """What that operation answers from now on: what it did answer, or a refusal that stands from this moment."""
        if op != Op.CANCEL or target not in CANCELLABLE:
            return Code.BAD_OPERATION, 0
        seen = self.history.where[target]
        if (number := seen.get(id_)) is not None:
            row = self._row(number)
            return row.code, row.sequence
        if id_ < self.floor:
            return Code.BELOW_FLOOR, 0
        self.sequence += 1
        seen[id_] = self.history.count + len(self._rows)
        self._rows.append((self.sequence, id_, 0, 0, 0, target << 8 | Code.CANCELLED))
        return Code.CANCELLED, self.sequence

    def _row(self, number: int) -> Row:
        """A remembered operation, also one that has been decided a moment ago."""
        recent = number - self.history.count
        return Row(*self._rows[recent]) if recent >= 0 else self.history[number]

    def _asset(self, op: int, code: str, other: int) -> Accounts:
        """The accounts of an asset that nobody has named before; those of no asset, if it cannot be one.

        Nor if the operation will not go on record: a number that no frame tells of would be given twice.
        """
        if not is_asset(code) or len(self._by_number) > ASSETS_MAX or op == Op.REFUND or (other and op != Op.SETTLE):
            return self._by_number[0]
        self._notes.append(NewAsset(len(self._by_number), code))
        return self._new_asset(code)

    def _new_asset(self, code: str) -> Accounts:
        accounts = self.assets[code] = Accounts(code, len(self._by_number))
        self._by_number.append(accounts)
        return accounts

    # --- what operators do

    def set_status(self, user: int, status: Status) -> int:
        """Freeze, disable or free an account; returns the sequence."""
        self._close_rows()
        self.sequence += 1
        self._notes.append(StatusChange(self.sequence, user, int(status)))
        self._apply_status(user, int(status))
        return self.sequence

    def prune(self, floor: int, keep: Iterable[int]) -> int:
        """Raise the floor (it never sinks) and forget what lies below it, but for `keep`; returns the sequence."""
        if floor <= self.floor:
            return self.sequence
        self._close_rows()
        self.sequence += 1
        note = FloorRaised(self.sequence, floor, tuple(sorted(set(keep))))
        self._notes.append(note)
        self._apply_floor(note)
        return self.sequence

    def _apply_status(self, user: int, status: int) -> None:
        if status == Status.ACTIVE:
            self.statuses.pop(user, None)
        else:
            self.statuses[user] = status

    def _apply_floor(self, note: FloorRaised) -> None:
        self.floor = note.floor
        for row in self.history.prune(note.floor, frozenset(note.keep)):
            accounts = self._by_number[row.asset]
            accounts.room[accounts.index[row.user]] += row.amount

    # --- looking

    def lookup(self, pairs: Iterable[tuple[int, int]]) -> tuple[bytes, list[int]]:
        """The answers on record for (id, operation) pairs, with their sequences."""
        codes, sequences = bytearray(), list[int]()
        for id_, op in pairs:
            number = self.history.where.get(op, {}).get(id_)
            if number is None:
                codes.append(Code.BELOW_FLOOR if id_ < self.floor else Code.NOT_FOUND)
                sequences.append(0)
            else:
                row = self._row(number)
                codes.append(row.code)
                sequences.append(row.sequence)
        return bytes(codes), sequences

    def operation(self, id_: int, op: int) -> Row | None:
        """Everything on record about one operation."""
        number = self.history.where.get(op, {}).get(id_)
        return None if number is None else self._row(number)

    def balances(self, user: int) -> list[tuple[str, int, int]]:
        """What a user holds: asset, available, frozen."""
        return [
            (code, accounts.available[place], accounts.frozen[place])
            for code, accounts in self.assets.items()
            if (place := accounts.index.get(user)) is not None
        ]

    def status(self, user: int) -> Status:
        """A user's account's status; one that does not exist yet is active."""
        return Status(self.statuses.get(user, Status.ACTIVE))

    def totals(self) -> list[tuple[str, int]]:
        """Per asset, all that is held."""
        return [(code, accounts.total()) for code, accounts in self.assets.items()]

    def asset_code(self, number: int) -> str:
        """An asset by its number."""
        return self._by_number[number].code

    # --- notes

    @property
    def pending(self) -> int:
        """How many rows are noted and not yet taken."""
        return len(self._rows)

    def seal(self) -> list[Note]:
        """Take the notes since the last time: what must be on disk before any answer given since then may leave."""
        self._close_rows()
        notes, self._notes = self._notes, []
        return notes

    def _close_rows(self) -> None:
        if self._rows:
            values = packed(self._rows)
            self._rows = []
            self.history.extend(values)
            self._notes.append(Rows(values))

    def replay(self, notes: Iterable[Note]) -> None:
        """Do what notes say. They were decided once; here they are only believed if they fit."""
        for note in notes:
            match note:
                case NewAsset(number, code):
                    if number != len(self._by_number) or code in self.assets:
                        raise ValueError(f"asset {code} comes as number {number}, out of order")
                    self._new_asset(code)
                case Rows(values):
                    self.history.index(values, self.history.count)
                    self.history.extend(values)
                    self._effects(values)
                case StatusChange(sequence, user, status):
                    self.sequence = sequence
                    self._apply_status(user, status)
                case FloorRaised(sequence):
                    self.sequence = sequence
                    self._apply_floor(note)

    def _effects(self, values: array[int]) -> None:
        """Move balances as rows say."""
        by_number = self._by_number
        columns = iter(values)
        for _, _, user, amount, other, meta in zip(*[columns] * 6, strict=True):
            if meta & 0xFF:
                continue
            accounts, op = by_number[meta >> 16], meta >> 8 & 0xFF
            place = accounts.index.get(user)
            if place is None:
                place = accounts.open(user)
            if op == DEPOSIT:
                accounts.room[place] -= amount
                accounts.available[place] += amount
            elif op == WITHDRAW:
                accounts.available[place] -= amount
            elif op == Op.REFUND:
                accounts.available[place] += amount
            elif op == Op.LOCK:
                accounts.available[place] -= amount
                accounts.frozen[place] += amount
            elif op == Op.UNLOCK:
                accounts.frozen[place] -= amount
                accounts.available[place] += amount
            else:
                payee = accounts.index.get(other)
                if payee is None:
                    payee = accounts.open(other)
                accounts.frozen[place] -= amount
                accounts.room[place] += amount
                accounts.available[payee] += amount
                accounts.room[payee] -= amount
        self.sequence = values[-6]
