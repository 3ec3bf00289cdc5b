"""The heart of the core: balances, remembered answers, and the one place that decides an operation. No IO.

`execute` decides operations in order, each on what its predecessors left, and collects journal records of what has to
be on disk before the answers leave. The core takes those records (`drain`), writes them, and only then answers;
`replay` applies such records without deciding anything again. A record that cannot be written ends the process, so no
caller ever sees a decision that is not on disk, and the order that a caller could observe is decide, append, apply,
answer.

Everything is checked again here, also what was checked before: this is the last line (specification 000 §1.5).

The same (id, operation) again gives the first answer again, refusals too (T7, T8). With other parameters it gives
`MISMATCH` and nothing happens: a refusal would be false for the first caller and could give money back that is well
spent, an `OK` would be false for this caller, so it is neither, and an operator looks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Final

from bursar.rails.trading.accounts import AVAILABLE, COMMITTED, FROZEN, Accounts
from bursar.rails.trading.floors import CoreFloors
from bursar.rails.trading.history import Block, History, Item, Row, blocks_of
from bursar.rails.trading.journal import Bound, FloorsRaised, JournalRecord, NewAsset, OperationBlocks, StatusChange
from bursar.rails.trading.rules import (
    ASSETS_MAX,
    CANCELLABLE,
    STATUS_REFUSALS,
    U64_MAX,
    UNSURE,
    Code,
    Op,
    Status,
    amount_refusal,
    is_asset,
)

# Operations come off the wire as `history.Item`: operation, id, user, asset, amount, other. The asset is a place in the
# frame's own list of names. `other` is the payee of a settlement, or the operation that a cancel is about. All integers
# are unsigned and fit 64 bits, and the asset's is below ASSETS_IN_FRAME_MAX: the decoder sees to it.
ASSETS_IN_FRAME_MAX: Final = 256

OK: Final = int(Code.OK)
DEPOSIT: Final = int(Op.DEPOSIT)
WITHDRAW: Final = int(Op.WITHDRAW)
NO_ACCOUNTS: Final[list[dict[int, list[int]]]] = [{}] * ASSETS_IN_FRAME_MAX  # there are no accounts in what is no asset
NO_METAS: Final = [0] * ASSETS_IN_FRAME_MAX


class CoreState:
    """All that the core knows."""

    def __init__(self) -> None:
        self.sequence = 0  # of the last journal record
        self.ledger = ""  # whom this core works for; "": not bound yet
        self.floors = CoreFloors()
        self.highest = 0  # id of a deposit or withdraw, executed or refused, forgotten or not
        self.history = History()
        self.assets: dict[str, Accounts] = {}
        self.statuses: dict[int, int] = {}  # of users who are not active
        self._by_number: list[Accounts] = [Accounts("", 0)]  # number 0 stands for what is no asset
        self._fresh: list[Item] = []  # operations that the next journal record will hold,
        self._metas: list[int] = []  # and what became of each
        self._records: list[JournalRecord] = []
        self.freed_bytes = 0  # of blocks that were forgotten; it decides when the next snapshot is due

    # --- deciding

    def execute(self, names: Sequence[str], items: Sequence[Item]) -> tuple[bytes, list[int]]:
        """Decide operations in order. Returns an answer and a sequence for each; 0 where nothing is on record.

        Two things are done for speed. Deposits and withdraws of users who have an account are decided in this loop,
        and all else elsewhere. And nothing is kept per operation but its meta: operations that go on record for the
        first time come in runs, which are taken whole when something else comes between (`_Frame`).
        """
        frame = _Frame(self, names, items)
        by_asset, statuses, floor, room = frame.by_asset, self.statuses, self.floors.forget, self.floors.room
        where, metas = self.history.where, self._metas
        deposits, withdraws = where[DEPOSIT], where[WITHDRAW]
        deposited, withdrawn = frame.metas[DEPOSIT], frame.metas[WITHDRAW]
        number, most = frame.number, U64_MAX
        record, free = metas.append, not statuses
        for op, id_, user, asset, amount, other in items:
            try:
                if op == DEPOSIT:
                    if id_ not in deposits:
                        account = by_asset[asset][user]
                        committed = account[2] + amount
                        if (
                            amount
                            and id_ >= floor
                            and committed <= most
                            and not other
                            and (free or user not in statuses)
                        ):
                            account[2] = committed
                            account[0] += amount
                            deposits[id_] = number
                            number += 1
                            record(deposited[asset])
                            continue
                elif op == WITHDRAW and id_ not in withdraws:
                    account = by_asset[asset][user]
                    left = account[0] - amount
                    if amount and id_ >= room and left >= 0 and not other and (free or user not in statuses):
                        account[0] = left
                        withdraws[id_] = number
                        number += 1
                        record(withdrawn[asset])
                        continue
            except KeyError:
                pass  # the user has no account yet
            number = frame.decide(number, op, id_, user, asset, amount, other)
        return frame.finish(number)

    def _decide(self, op: int, id_: int, user: int, accounts: Accounts, amount: int, other: int) -> int:
        """Decide an operation that is not on record, and do it if the answer is OK."""
        if op == Op.REFUND:
            return self._refund(id_, user, accounts, amount, other)
        if other and op != Op.SETTLE:
            return Code.BAD_OPERATION
        if (refusal := amount_refusal(amount)) is not None:
            return refusal
        if not self._may_be_asset(accounts):
            return Code.INVALID_ASSET
        if op in (Op.DEPOSIT, Op.WITHDRAW, Op.LOCK) and user in self.statuses:
            return STATUS_REFUSALS[Status(self.statuses[user])]
        if op == Op.DEPOSIT:
            account = accounts.open(user)
            if account[COMMITTED] + amount > U64_MAX:
                return Code.OVERFLOW
            account[COMMITTED] += amount
            account[AVAILABLE] += amount
            return Code.OK
        found = accounts.by_user.get(user)
        if op in (Op.WITHDRAW, Op.LOCK):
            if found is None or amount > found[AVAILABLE]:
                return Code.INSUFFICIENT_BALANCE
            found[AVAILABLE] -= amount
            if op == Op.LOCK:
                found[FROZEN] += amount
            elif not self.floors.reserves(id_):
                found[COMMITTED] -= amount
            return Code.OK
        # Releasing what is frozen, and paying for a trade that has taken place, are facts: no status stops them (T35).
        if found is None or amount > found[FROZEN]:
            return Code.INSUFFICIENT_FROZEN
        if op == Op.UNLOCK:
            found[FROZEN] -= amount
            found[AVAILABLE] += amount
            return Code.OK
        return self._settle(found, accounts, user, amount, other)

    @staticmethod
    def _settle(payer: list[int], accounts: Accounts, user: int, amount: int, other: int) -> int:
        if other == user:
            return Code.SAME_ACCOUNT
        payee = accounts.open(other)
        if payee[COMMITTED] + amount > U64_MAX:
            return Code.OVERFLOW
        payer[FROZEN] -= amount
        payer[COMMITTED] -= amount
        payee[AVAILABLE] += amount
        payee[COMMITTED] += amount
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
        account = accounts.by_user[user]
        if not self.floors.reserves(id_):
            # Its room was given away when no caller was expected to ask for it any more. A restored database may
            # ask all the same: that is never refused for good, only until there is room (T31).
            if account[COMMITTED] + amount > U64_MAX:
                return Code.NO_ROOM
            account[COMMITTED] += amount
        account[AVAILABLE] += amount
        return Code.OK

    def _again(self, number: int, user: int, accounts: Accounts, amount: int, other: int) -> tuple[int, int]:
        """The answer that was given, if this is what was asked."""
        row = self._row(number)
        if row.code == Code.CANCELLED:
            return row.code, row.sequence  # whatever it would have been
        if (row.user, row.asset, row.amount, row.other) != (user, accounts.number, amount, other):
            return Code.MISMATCH, 0
        return row.code, row.sequence

    def _cancel(self, id_: int, target: int) -> tuple[int, int]:
        """What that operation answers from now on: what it did answer, or a refusal that stands from this moment."""
        if target not in CANCELLABLE:
            return Code.BAD_OPERATION, 0
        seen = self.history.where[target]
        if (number := seen.get(id_)) is not None:
            return self._answer(number)
        if id_ < self.floors.forget:
            return Code.PRUNED, 0
        seen[id_] = self.history.end + len(self._fresh)
        self._fresh.append((target, id_, 0, 0, 0, 0))
        self._metas.append(target << 8 | Code.CANCELLED)
        self.sequence += 1
        return Code.CANCELLED, self.sequence

    def _answer(self, number: int) -> tuple[int, int]:
        """What was answered to a remembered operation, and its sequence."""
        recent = number - self.history.end
        if recent < 0:
            return self.history.answer(number)
        return self._metas[recent] & 0xFF, self.sequence - len(self._fresh) + recent + 1

    def _row(self, number: int) -> Row:
        """A remembered operation, also one that has been decided a moment ago."""
        recent = number - self.history.end
        if recent < 0:
            return self.history[number]
        _, id_, user, _, amount, other = self._fresh[recent]
        return Row(self.sequence - len(self._fresh) + recent + 1, id_, user, amount, other, self._metas[recent])

    def _may_be_asset(self, accounts: Accounts) -> bool:
        return accounts.number > 0 or (is_asset(accounts.code) and len(self._by_number) <= ASSETS_MAX)

    def _new_asset(self, accounts: Accounts) -> None:
        accounts.number = len(self._by_number)
        self.assets[accounts.code] = accounts
        self._by_number.append(accounts)

    # --- what operators do

    def set_status(self, user: int, status: Status) -> int:
        """Freeze, disable or free an account; returns the sequence."""
        self._decided(StatusChange(self.sequence + 1, user, int(status)))
        return self.sequence

    def bind(self, ledger: str) -> str:
        """Work for this ledger for ever, unless bound to another already; returns whom the core works for."""
        if not self.ledger:
            self._decided(Bound(self.sequence + 1, ledger))
        return self.ledger

    def floor_steps(self, room: int, forget: int) -> tuple[Code, list[tuple[int, int]]]:
        """Whether the floors may be raised to these; floors on the way up, the last included, each a short piece of
        work for `raise_floors`."""
        self._close_rows()
        code = self.floors.check(room, forget, self.highest)
        return code, self.floors.steps(self.history, room, forget) if code == Code.OK else []

    def raise_floors(self, room: int, forget: int, keep: Collection[int]) -> int:
        """Raise the floors (they never sink): release room and forget, but for `keep`; returns the sequence."""
        record = self.floors.record(self.sequence + 1, room, forget, keep)
        if record is not None:
            self._decided(record)
        return self.sequence

    def _decided(self, record: StatusChange | Bound | FloorsRaised) -> None:
        """Put a record into the journal, and apply it as replaying the journal will."""
        self._close_rows()
        self._records.append(record)
        self.replay([record])

    # --- looking

    def lookup(self, pairs: Iterable[tuple[int, int]]) -> tuple[bytes, list[int]]:
        """The answers on record for (id, operation) pairs, with their sequences."""
        codes, sequences = bytearray(), list[int]()
        for id_, op in pairs:
            number = self.history.where.get(op, {}).get(id_)
            code, at = self._answer(number) if number is not None else (Code.NOT_FOUND, 0)
            codes.append(Code.PRUNED if number is None and id_ < self.floors.forget else code)
            sequences.append(at)
        return bytes(codes), sequences

    def operation(self, id_: int, op: int) -> Row | None:
        """Everything on record about one operation."""
        number = self.history.where.get(op, {}).get(id_)
        return None if number is None else self._row(number)

    def transfers(self, after: int, limit: int) -> tuple[list[Row], int]:
        """Deposits, withdraws and refunds on record behind a sequence, and up to where these are all."""
        return self.history.transfers(after, limit, self.sequence - len(self._fresh))

    def balances(self, user: int) -> list[tuple[str, int, int]]:
        """What a user holds: asset, available, frozen."""
        return [
            (code, account[AVAILABLE], account[FROZEN])
            for code, accounts in self.assets.items()
            if (account := accounts.by_user.get(user)) is not None
        ]

    def status(self, user: int) -> Status:
        """A user's account's status; one that does not exist yet is active."""
        return Status(self.statuses.get(user, Status.ACTIVE))

    @property
    def accounts(self) -> int:
        """How many accounts there are: one per user and asset."""
        return sum(len(accounts.by_user) for accounts in self.assets.values())

    def totals(self) -> list[tuple[str, int]]:
        """Per asset, all that is held."""
        return [(code, accounts.total()) for code, accounts in self.assets.items()]

    def asset_code(self, number: int) -> str:
        """An asset by its number."""
        return self._by_number[number].code

    # --- the journal

    @property
    def pending(self) -> int:
        """How many rows are recorded and not yet taken."""
        return len(self._fresh)

    def drain(self) -> list[JournalRecord]:
        """Take the journal records since the last time: they must be on disk before any answer since then may leave."""
        self._close_rows()
        records, self._records = self._records, []
        return records

    def _close_rows(self) -> None:
        if self._fresh:
            # What was recorded in the meantime has a sequence of its own, so the last of these is the state's last.
            blocks = blocks_of(self.sequence - len(self._fresh) + 1, self._fresh, self._metas)
            self._fresh, self._metas = [], []
            self.history.extend(blocks)
            self.highest = max(self.highest, *(block.moved_high for block in blocks))
            self._records.append(OperationBlocks(blocks))

    def replay(self, records: Iterable[JournalRecord]) -> None:
        """Apply journal records. They were decided once; here they are only checked for whether they fit."""
        for record in records:
            match record:
                case NewAsset(number, code):
                    if number != len(self._by_number) or code in self.assets:
                        raise ValueError(f"asset {code} comes as number {number}, out of order")
                    self._new_asset(Accounts(code, 0))
                case OperationBlocks(blocks):
                    for block in blocks:
                        self.history.append(block)
                        self.highest = max(self.highest, block.moved_high)
                        self._effects(block)
                case StatusChange(sequence, user, status):
                    self.sequence = sequence
                    if status == Status.ACTIVE:
                        self.statuses.pop(user, None)
                    else:
                        self.statuses[user] = status
                case FloorsRaised(sequence):
                    self.sequence = sequence
                    free, forgotten = self.floors.apply(record, self.history)
                    for row in free:
                        self._by_number[row.asset].by_user[row.user][COMMITTED] -= row.amount
                    self.freed_bytes += forgotten
                case Bound(sequence, ledger):
                    if self.ledger not in ("", ledger):
                        raise ValueError(f"bound to ledger {ledger!r} after {self.ledger!r}")
                    self.sequence, self.ledger = sequence, ledger

    def _effects(self, block: Block) -> None:
        """Move balances as rows say."""
        by_number = self._by_number
        for _, id_, user, amount, other, meta in block.rows():
            if meta & 0xFF:
                continue
            accounts, op = by_number[meta >> 16], meta >> 8 & 0xFF
            account = accounts.by_user.get(user)
            if account is None:
                account = accounts.open(user)
            if op == DEPOSIT:
                account[COMMITTED] += amount
                account[AVAILABLE] += amount
            elif op == WITHDRAW:
                account[AVAILABLE] -= amount
                account[COMMITTED] -= 0 if self.floors.reserves(id_) else amount
            elif op == Op.REFUND:
                account[AVAILABLE] += amount
                account[COMMITTED] += 0 if self.floors.reserves(id_) else amount
            elif op == Op.LOCK:
                account[AVAILABLE] -= amount
                account[FROZEN] += amount
            elif op == Op.UNLOCK:
                account[FROZEN] -= amount
                account[AVAILABLE] += amount
            elif self._settle(account, accounts, user, amount, other):
                raise ValueError("a settlement on record does not fit")
        self.sequence = block.sequence + block.count - 1


class _Frame:
    """A frame while it is being decided: which assets it names, and which of its operations go on record.

    Operations that go on record for the first time come in runs; a run is taken whole, when something else comes
    between, so that the usual operation costs next to nothing here.
    """

    def __init__(self, state: CoreState, names: Sequence[str], items: Sequence[Item]) -> None:
        self._state = state
        self._items = items
        # An asset that nothing on record is about has no number yet, and gets one only if something goes on record:
        # a number that no frame tells of would be given twice.
        strangers = {name: Accounts(name, 0) for name in names if name not in state.assets}
        self._accounts = [state.assets.get(name) or strangers[name] for name in names]
        # By asset: the accounts, and what a row says about an operation that succeeded. Filled up with nothing, so that
        # a place in the list that has no name needs no check.
        self.by_asset = [accounts.by_user for accounts in self._accounts] + NO_ACCOUNTS
        self.metas = {op: self._metas_of(op) for op in (DEPOSIT, WITHDRAW)}
        self.number = state.history.end + len(state._fresh)  # of the next row
        self._run, self._run_number = 0, self.number  # where the run began that is not taken yet
        self._codes = bytearray(len(items))
        self._sequences: list[int] = []

    def _metas_of(self, op: int) -> list[int]:
        return [accounts.number << 16 | op << 8 for accounts in self._accounts] + NO_METAS

    def decide(self, number: int, op: int, id_: int, user: int, asset: int, amount: int, other: int) -> int:
        """Decide one that is not on the short way; returns the number of the next row."""
        self._take(number)
        state, place = self._state, self._run
        accounts = self._accounts[asset] if asset < len(self._accounts) else state._by_number[0]
        seen = state.history.where.get(op)
        at = 0
        if seen is None:
            code, at = state._cancel(id_, other) if op == Op.CANCEL else (int(Code.BAD_OPERATION), 0)
        elif (remembered := seen.get(id_)) is not None:
            code, at = state._again(remembered, user, accounts, amount, other)
        elif state.floors.forgets(state.history, op, id_):
            code = int(Code.PRUNED)
        else:
            code = state._decide(op, id_, user, accounts, amount, other)
            if code < UNSURE:
                seen[id_] = number
                self._codes[place] = code
                state._metas.append(self._number(accounts) << 16 | op << 8 | code)
                return number + 1
        self._codes[place] = code
        self._sequences.append(at)
        self._run, self._run_number = place + 1, state.history.end + len(state._fresh)
        return self._run_number

    def _number(self, accounts: Accounts) -> int:
        """The number of an asset that is on record from now on; 0 if it can't be an asset."""
        state = self._state
        if not accounts.number and state._may_be_asset(accounts):
            state._records.append(NewAsset(len(state._by_number), accounts.code))
            state._new_asset(accounts)
            for op, metas in self.metas.items():
                metas[:] = self._metas_of(op)
        return accounts.number

    def _take(self, number: int) -> None:
        """Put the run so far on the list of what goes on record."""
        state, count = self._state, number - self._run_number
        if count:
            state._fresh.extend(self._items[self._run : self._run + count])
            self._sequences.extend(range(state.sequence + 1, state.sequence + count + 1))
            state.sequence += count
            self._run += count
            self._run_number = number

    def finish(self, number: int) -> tuple[bytes, list[int]]:
        """The answers."""
        self._take(number)
        return bytes(self._codes), self._sequences
