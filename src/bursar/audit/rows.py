"""What audit asks about rows of flows' own (model/flow_rows): part of I7.

A row belongs to a record of its own flow. The next number of a sequence is above every number that was taken, so none
is taken twice. What is reserved under a key is the sum of what its records have reserved.
"""

from __future__ import annotations

from bursar.audit.finding import Evidence
from bursar.audit.walk import PAGE_MAX
from bursar.model.flow_rows import FlowRow, RowKey, RowState, number_of
from bursar.store.tables import Tables

Place = tuple[str, str, str]  # flow, kind, the key above


class RowsFound:
    """What was seen of all rows: one number per sequence and per total, so that it fits into memory."""

    def __init__(self, evidence: Evidence) -> None:
        self.checked = 0
        self._evidence = evidence
        self._next: dict[Place, int] = {}
        self._highest: dict[Place, int] = {}
        self._totals: dict[Place, int] = {}
        self._reserved: dict[Place, int] = {}

    async def read(self, tables: Tables) -> None:
        """Look at every row."""
        after: RowKey = ("", "", "")
        while page := await tables.flow_rows.all(after, PAGE_MAX):
            after = page[-1][0].row_key
            for row, flow in page:
                self.checked += 1
                self._see(row, flow)
        for place, highest in sorted(self._highest.items()):
            if place in self._next and self._next[place] <= highest:
                self._evidence.add(f"{_told(place)} would give the number {self._next[place]}, and {highest} is taken")
        for place, total in sorted(self._totals.items()):
            if total != (found := self._reserved.get(place, 0)):
                self._evidence.add(f"{_told(place)} says that {total} is reserved, and its records have {found}")

    def _see(self, row: FlowRow, flow: str | None) -> None:
        above: Place = (row.flow, row.kind, row.key.rpartition("/")[0])
        if row.record and flow != row.flow:
            owner = "does not exist" if flow is None else f"is one of {flow}"
            self._evidence.add(f"{_told(row.row_key)} belongs to record {row.record}, which {owner}")
        if row.state is RowState.SEQUENCE:
            self._next[row.row_key] = row.amount
        elif row.state is RowState.TOTAL:
            self._totals[row.row_key] = row.amount
        elif row.state is RowState.HELD:
            self._reserved[above] = self._reserved.get(above, 0) + row.amount
            if row.permanent and row.key.rpartition("/")[2].isdigit():
                self._highest[above] = max(number_of(row), self._highest.get(above, 0))


def _told(place: Place) -> str:
    flow, kind, key = place
    return f"{kind} {key!r} of {flow}"
