"""The two floors: ids that never sink, below which a core promises less, so that it need not grow for ever.

Below `room` a withdraw no longer reserves room for its refund. Without it, room would be used up for ever by what is
only moved in and out. Below `forget`, which is never above `room`, nothing is remembered and nothing is executed (T32).
What is kept by its id is exempt from both.

Whether a withdraw reserves room depends on its id and the floors alone, never on when it was executed, so that
replaying the log gives the same balances. A floor that rises by much rises in steps: the core serves others in between.
"""

from __future__ import annotations

from collections.abc import Collection

from bursar.rails.trading.history import History, Row
from bursar.rails.trading.journal import FloorsRaised
from bursar.rails.trading.rules import Code, Op


class CoreFloors:
    """Where they stand."""

    __slots__ = ("forget", "kept", "room")

    def __init__(self, room: int = 1, forget: int = 1, kept: Collection[int] = ()) -> None:
        self.room = room
        self.forget = forget
        self.kept = frozenset(kept)  # ids below `room` whose withdraws reserve room all the same

    def reserves(self, id_: int) -> bool:
        """Whether the withdraw of this id reserves room for its refund."""
        return id_ >= self.room or id_ in self.kept

    def check(self, room: int, forget: int, highest: int) -> Code:
        """Whether these may be asked for, where `highest` is the highest id of a transfer there ever was."""
        if room < forget:
            return Code.BAD_OPERATION
        # A floor above every id would make each open and each new transfer unanswerable, for ever (T32).
        if room > max(self.room, highest + 1) or forget > max(self.forget, highest + 1):
            return Code.FLOOR_TOO_HIGH
        return Code.OK

    def steps(self, history: History, room: int, forget: int) -> list[tuple[int, int]]:
        """Pairs of floors on the way up to these, the last included, each a short piece of work."""
        room, forget = max(self.room, room), max(self.forget, forget)
        steps = [(room, self.forget)]
        if room > self.room:
            steps = [(h, self.forget) for h in history.steps(lambda block: block.moved_low, self.room, room)]
        if forget > self.forget:
            steps += [(room, h) for h in history.steps(lambda block: block.low, self.forget, forget)]
        return steps

    def record(self, sequence: int, room: int, forget: int, keep: Collection[int]) -> FloorsRaised | None:
        """What raising them to these would put on record; None if nothing would change."""
        room, forget = max(self.room, room), max(self.forget, forget)
        kept = {id_ for id_ in keep if id_ < room}
        if (room, forget) == (self.room, self.forget) and self.kept <= kept:
            return None
        return FloorsRaised(sequence, room, forget, tuple(sorted(kept)))

    def apply(self, record: FloorsRaised, history: History) -> tuple[list[Row], int]:
        """Raise them; returns the withdraws whose room is free now, and how many bytes were forgotten."""
        keep = frozenset(record.keep)
        free = [row for row in history.withdrawn(self.room, record.room) if row.id not in keep]
        free += [row for id_ in sorted(self.kept - keep) if (row := history.withdrawn_as(id_)) is not None]
        # What was released before it was asked to be kept stays released.
        self.kept = frozenset(id_ for id_ in keep if id_ < record.room and self.reserves(id_))
        self.room = record.room
        if record.forget <= self.forget:
            return free, 0
        self.forget = record.forget
        return free, history.forget(record.forget, keep)

    def forgets(self, history: History, op: int, id_: int) -> bool:
        """Whether an operation that is not remembered must not be executed.

        The refund of a withdraw that was kept may: it is on record from then on, and kept as that is.
        """
        return id_ < self.forget and not (op == Op.REFUND and id_ in history.where[Op.WITHDRAW])
