"""A worker's queue: records that it has claimed, each until there is a place for it. Pure.

Each flow has a line of its own per priority, so that a flow without a free place holds up no other one. Of those that
have one, the highest priority goes first; but every eighth turn is for the record that has waited longest.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from bursar.model.records import Record

BY_AGE_EVERY = 8  # turns

Line = OrderedDict[int, tuple[int, Record]]  # by number → when it was added, and the last claimed version


class Queue:
    """Claimed records, each once."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[int, Line]] = {}  # flow → priority → line
        self._added = 0
        self._turn = 0

    def __len__(self) -> int:
        return sum(self.of(flow) for flow in self._lines)

    def of(self, flow: str) -> int:
        """How many records of a flow wait."""
        return sum(len(line) for line in self._lines.get(flow, {}).values())

    def add(self, records: Iterable[Record]) -> None:
        """One that waits already keeps its place."""
        for record in records:
            self._added += 1
            line = self._lines.setdefault(record.flow, {}).setdefault(record.priority, OrderedDict())
            line[record.number] = (line.get(record.number, (self._added,))[0], record)

    def take(self, has_place: Callable[[str], bool]) -> Record | None:
        """The next record of a flow that has a place; None if there is none."""
        heads = [
            (0 if (self._turn + 1) % BY_AGE_EVERY == 0 else priority, next(iter(line.values()))[0], priority, flow)
            for flow, lines in self._lines.items()
            if has_place(flow)
            for priority, line in lines.items()
            if line
        ]
        if not heads:
            return None
        self._turn += 1
        _, _, priority, flow = min(heads)
        return self._lines[flow][priority].popitem(last=False)[1][1]
