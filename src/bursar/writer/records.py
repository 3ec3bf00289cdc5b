"""Deciding the records' part of a group: moves, operations to remember, limits. Pure.

At first it hopes: that every record is where its mover saw it, that no operation was answered before, that limits are
not used up. Usually so, and then nothing has to be read. The write checks all of it and fails whole if not; the group
is then decided again with everything looked up (`RecordsKnown`), and those who were too late are told so, alone. What
is never written can't be checked by the write: a refusal that an earlier answer would overrule is looked up first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import msgspec

from bursar.model.errors import LimitExceeded, OperationAnswered, OtherRequest, RecordMoved, Refusal
from bursar.model.outcome import Outcome
from bursar.model.records import Remembered
from bursar.store.group import RecordAsk, RecordRows, RecordsKnown
from bursar.writer.change import Change, Limit, Move, Remember

Operation = tuple[str, str, str]


def look(changes: Iterable[Change]) -> RecordAsk:
    """All that these changes hope for."""
    ask = RecordAsk(versions=[], made=[], operations=[], counters=[])
    for change in changes:
        for move in change.moves:
            if move.version:
                ask.versions.append(move.number)
            else:
                ask.made.append((move.flow, move.id))
        if change.remember is not None:
            ask.operations.append((change.remember.scope, change.remember.id, change.remember.op))
        ask.operations += [(done.scope, done.id, done.op) for done in change.operations]
        ask.counters += [limit.key for limit in change.limits]
    return ask


class RecordDecision:
    """Where records, operations and limits stand, as far as the group has come."""

    def __init__(self, found: RecordsKnown | None) -> None:
        self._versions: dict[int, int] = {} if found is None else dict(found.versions)
        self._made: set[tuple[str, str]] = set() if found is None else set(found.made)
        self._answered: dict[Operation, Remembered] = {} if found is None else dict(found.operations)
        self._used: dict[str, tuple[int, int]] = {} if found is None else dict(found.counters)
        self.knows = found is not None
        # What this group adds, and how much may have been used before it, so that each of its changes is allowed.
        self._counters: dict[str, list[int]] = {}
        self._high_water: dict[tuple[str, str], int] = {}
        self._rows = RecordRows(outcomes=[], counters=[], new=[], moves=[], passages=[])

    def answered(self, remember: Remember) -> Remembered | None:
        """The answer that the operation got before; a refusal if that was to another request."""
        before = self._answered.get((remember.scope, remember.id, remember.op))
        if before is None:
            return None
        if before.fingerprint != remember.fingerprint:
            raise OtherRequest(remember.scope, remember.id, remember.op)
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
                possible = (move.flow, move.id) not in self._made
            else:
                # Not known: hope. Known, but not there: the record is gone, which never happens.
                expected = None if self.knows else move.version
                possible = self._versions.get(move.number, expected) == move.version
            if not possible:
                raise RecordMoved(move.flow, move.id, move.version)
        for done in change.operations:
            if (done.scope, done.id, done.op) in self._answered:
                raise OperationAnswered(done.scope, done.id, done.op)

    def refuse(self, remember: Remember, refusal: Refusal) -> Remembered | None:
        """Remember a refusal, if it is one that counts as an answer."""
        if refusal.code not in remember.refusals:
            return None
        detail = msgspec.json.encode({"message": str(refusal), **refusal.facts}).decode()
        return self._answer(
            remember,
            Remembered(
                fingerprint=remember.fingerprint, outcome=Outcome.EXPLICIT_FAIL, code=refusal.code, detail=detail
            ),
        )

    def answer(self, remember: Remember, posting: int) -> Remembered:
        """Remember what it says."""
        detail = remember.detail
        if posting:
            detail = msgspec.json.encode({**msgspec.json.decode(detail), "posting": posting}).decode()
        return self._answer(
            remember,
            Remembered(fingerprint=remember.fingerprint, outcome=remember.outcome, code=remember.code, detail=detail),
        )

    def _answer(self, remember: Remember, answer: Remembered) -> Remembered:
        key = (remember.scope, remember.id, remember.op)
        self._answered[key] = answer
        row = (*key, remember.fingerprint, answer.outcome.value, answer.code, answer.detail)
        self._rows.outcomes.append(row)
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

    def move(self, move: Move, numbers: Iterator[int], transit: int) -> int:
        """Write a move down; returns the record's number."""
        version = move.version + len(move.passages)
        state = move.passages[-1].target
        due = (transit, move.delay_us, move.worker)
        if move.version == 0:
            number = next(numbers)
            self._made.add((move.flow, move.id))
            made = (number, move.flow, move.id, move.owner, state, version, *due, move.body or "{}", move.error)
            self._rows.new.append(made)
        else:
            number = move.number
            self._rows.moves.append((number, move.version, state, version, move.attempt, *due, move.body, move.error))
        self._versions[number] = version
        for place, p in enumerate(move.passages, move.version + 1):
            self._rows.passages.append(
                (number, place, p.source, p.event, p.target, move.attempt, move.actor, p.evidence)
            )
        return number

    def relies_on(self, rail: str, worker: str, sequence: int) -> None:
        """What is accepted rests on a rail's log up to a sequence: one row for the whole group."""
        key = (rail, worker)
        self._high_water[key] = max(sequence, self._high_water.get(key, 0))

    def rows(self) -> RecordRows | None:
        """What all that was accepted writes; None if that is nothing. Sorted: locks are taken in this order."""
        rows = self._rows
        rows.counters = [
            (key, count, amount, count + count_left, amount + amount_left, until)
            for key, (count, amount, count_left, amount_left, until) in sorted(self._counters.items())
        ]
        if not (rows.outcomes or rows.counters or rows.new or rows.moves):
            return None
        rows.high_water = [(*key, sequence) for key, sequence in sorted(self._high_water.items())]
        rows.outcomes.sort()
        rows.new.sort()
        rows.moves.sort()
        return rows
