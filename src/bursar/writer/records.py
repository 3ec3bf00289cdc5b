"""Deciding the records' part of a group: moves, operations, limits, and rows of flows. Pure.

It is optimistic: it assumes that every record is where its mover saw it, that no operation was answered before, that
limits are not used up. Usually so, and then nothing has to be read. The write checks all of it and fails as a whole if
not; the batch is then decided again with everything read (`LoadedRecords`), and only the changes that were too late are
refused. What is never written can't be checked by the write: before a refusal is final, an earlier answer is read.

Rows of a flow's own (model/flow_rows) are staged with their change, and kept if it is accepted. Those that an operation
depends on are always read first. A batch may write one row several times, as when many records take a number of one
sequence: then only its last state is written, against the version that was read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from bursar.model import flow_rows
from bursar.model.errors import IdempotencyKeyReused, LimitExceeded, OperationAnswered, RecordMoved, Refusal
from bursar.model.flow_rows import FlowRow, RowKey
from bursar.model.outcome import Outcome
from bursar.model.records import OperationResult
from bursar.store.batch import LoadedRecords, RecordReadSet, RecordWrites
from bursar.writer.change import Change, Limit, Move, Operation

OperationKey = tuple[str, str, str]


def records_to_read(changes: Iterable[Change]) -> RecordReadSet:
    """All that these changes assume."""
    read = RecordReadSet(versions=[], ids=[], operations=[], counters=[])
    for change in changes:
        for move in change.moves:
            if move.version:
                read.versions.append(move.number)
            else:
                read.ids.append((move.flow, move.id))
        if change.operation is not None:
            read.operations.append(change.operation.key)
        read.operations += [done.key for done in change.inline_operations]
        read.counters += [limit.key for limit in change.limits]
    return read


def rows_to_read(changes: Iterable[Change]) -> list[RowKey]:
    """The rows that these changes depend on, sorted."""
    return sorted(
        {
            key
            for change in changes
            for move in change.moves
            for operation in move.rows
            for key in flow_rows.keys_read(move.flow, move.id, operation)
        }
    )


class RowDecision:
    """The rows as far as the batch is decided."""

    def __init__(self, loaded: Mapping[RowKey, FlowRow]) -> None:
        self._rows = dict(loaded)
        self._expected: dict[RowKey, int] = {}  # versions before the batch, of the rows that it writes
        self._staged: dict[RowKey, FlowRow] = {}

    def stage(self, moves: Sequence[Move]) -> None:
        """What the moves of one change do to rows; raises why not. A record that is being made has no number yet."""
        self._staged = {}
        for place, move in enumerate(moves, 1):
            for operation in move.rows:
                for row in flow_rows.apply(move.flow, move.id, move.number or -place, operation, self._find):
                    self._staged[row.row_key] = row

    def _find(self, key: RowKey) -> FlowRow | None:
        return self._staged.get(key) or self._rows.get(key)

    def accept(self, numbers: Sequence[int]) -> None:
        """The change is accepted, and its records have these numbers."""
        for key, row in self._staged.items():
            before = self._rows.get(key)
            self._expected.setdefault(key, 0 if before is None else before.version)
            owned = row if row.record >= 0 else msgspec.structs.replace(row, record=numbers[-row.record - 1])
            self._rows[key] = owned
        self._staged = {}

    @property
    def written(self) -> list[tuple[int, FlowRow]]:
        """Every row that the batch changes, with the version that it must have had; 0: none. In lock order."""
        return [(expected, self._rows[key]) for key, expected in sorted(self._expected.items())]


class RecordDecision:
    """Where records, operations and limits stand, as far as the batch is decided."""

    def __init__(self, loaded: LoadedRecords | None, rows: Mapping[RowKey, FlowRow] | None = None) -> None:
        self.rows = RowDecision(rows or {})
        self._versions: dict[int, int] = {} if loaded is None else dict(loaded.versions)
        self._ids: set[tuple[str, str]] = set() if loaded is None else set(loaded.ids)
        self._answered: dict[OperationKey, OperationResult] = {} if loaded is None else dict(loaded.operations)
        self._used: dict[str, tuple[int, int]] = {} if loaded is None else dict(loaded.counters)
        self.is_loaded = loaded is not None
        # What this batch adds, and how much may have been used before it, so that each of its changes is allowed.
        self._counters: dict[str, list[int]] = {}
        self._high_water: dict[tuple[str, str], int] = {}
        self._writes = RecordWrites(operations=[], new=[], moves=[], transitions=[], signals=[])

    def answered(self, operation: Operation) -> OperationResult | None:
        """The answer that the operation got before; a refusal if that was to another request."""
        before = self._answered.get(operation.key)
        if before is None:
            return None
        if before.fingerprint != operation.fingerprint:
            raise IdempotencyKeyReused(operation.scope, operation.id, operation.op)
        return msgspec.structs.replace(before, replayed=True)

    def check(self, change: Change) -> None:
        """Whether limits, moves and operations are possible; changes nothing."""
        used: dict[str, tuple[int, int]] = {}  # by this change: it may name a limit more than once
        for limit in change.limits:
            count, amount = used.get(limit.key) or self._used.get(limit.key, (0, 0))
            count, amount = used[limit.key] = count + limit.count, amount + limit.amount
            if count > limit.count_max or amount > limit.amount_max:
                raise LimitExceeded(limit.key, limit.code)
        for move in change.moves:
            if move.version == 0:
                possible = (move.flow, move.id) not in self._ids
            else:
                # Not loaded: assume. Loaded, but not there: the record is gone, which never happens.
                expected = None if self.is_loaded else move.version
                possible = self._versions.get(move.number, expected) == move.version
            if not possible:
                raise RecordMoved(move.flow, move.id, move.version)
        for done in change.inline_operations:
            if done.key in self._answered:
                raise OperationAnswered(done.scope, done.id, done.op)
        self.rows.stage(change.moves)  # last: that a record has moved says more than that its rows have

    def refuse(self, operation: Operation, refusal: Refusal) -> OperationResult | None:
        """Store a refusal, if it is one that counts as an answer."""
        if refusal.code not in operation.refusals:
            return None
        detail = msgspec.json.encode({"message": str(refusal), **refusal.facts}).decode()
        return self._answer(operation, Outcome.EXPLICIT_FAIL, refusal.code, detail)

    def answer(self, operation: Operation, posting: int) -> OperationResult:
        """Store its answer."""
        detail = operation.detail
        if posting:
            detail = msgspec.json.encode({**msgspec.json.decode(detail), "posting": posting}).decode()
        return self._answer(operation, operation.outcome, operation.code, detail)

    def _answer(self, operation: Operation, outcome: Outcome, code: str, detail: str) -> OperationResult:
        same = operation.fingerprint
        self._writes.operations.append((*operation.key, same, outcome.value, code, detail))
        answer = OperationResult(fingerprint=same, outcome=outcome, code=code, detail=detail)
        self._answered[operation.key] = answer
        return answer

    def use(self, limits: Sequence[Limit]) -> None:
        """Count against the limits."""
        for limit in limits:
            count, amount = self._used.get(limit.key, (0, 0))
            self._used[limit.key] = (count + limit.count, amount + limit.amount)
            added = self._counters.setdefault(limit.key, [0, 0, limit.count_max, limit.amount_max, limit.until_us])
            added[0] += limit.count
            added[1] += limit.amount
            added[2] = min(added[2], limit.count_max - added[0])
            added[3] = min(added[3], limit.amount_max - added[1])

    def move(self, move: Move, take_number: Callable[[], int], posting: int) -> int:
        """Write a move down; returns the record's number."""
        version = move.version + len(move.transitions)
        state = move.transitions[-1].target
        due = (posting, move.delay_us, move.worker)
        if move.version == 0:
            number = take_number()
            self._ids.add((move.flow, move.id))
            made = (number, move.flow, move.id, move.owner, state, version, *due, move.body or "{}", move.error)
            self._writes.new.append((*made, move.timer, int(move.priority)))
        else:
            number = move.number
            moved = (number, move.version, state, version, move.attempt, *due, move.body, move.error)
            self._writes.moves.append((*moved, move.timer, move.inbox))
            if (signal := move.signal) is not None:
                sent = (number, signal.sender, signal.event, signal.actor, signal.evidence)
                self._writes.signals.append((*sent, signal.arrived, signal.consumed))
        self._versions[number] = version
        for place, p in enumerate(move.transitions, move.version + 1):
            self._writes.transitions.append(
                (number, place, p.source, p.event, p.target, move.attempt, move.actor, p.evidence)
            )
        return number

    def relies_on(self, peer: str, writer: str, sequence: int) -> None:
        """What is accepted relies on a peer's log up to a sequence: one row for the whole batch."""
        key = (peer, writer)
        self._high_water[key] = max(sequence, self._high_water.get(key, 0))

    def write_set(self) -> RecordWrites | None:
        """What all that was accepted writes; None if that is nothing. Sorted: locks are taken in this order."""
        writes = self._writes
        writes.counters = [
            (key, count, amount, count + count_left, amount + amount_left, until)
            for key, (count, amount, count_left, amount_left, until) in sorted(self._counters.items())
        ]
        if not (writes.operations or writes.counters or writes.new or writes.moves):
            return None
        writes.high_water = [(*key, sequence) for key, sequence in sorted(self._high_water.items())]
        writes.rows = self.rows.written
        writes.operations.sort()
        writes.new.sort()
        writes.moves.sort()
        writes.signals.sort()
        return writes
