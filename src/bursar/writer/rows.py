"""Deciding rows of a flow's own (model/flow_rows) in a batch: staged with their change, kept if it is accepted. Pure.

The rows that an operation depends on are always read first. A batch may write one row several times, as when many
records take a number of one sequence: then only its last state is written, against the version that was read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from bursar.model import flow_rows
from bursar.model.flow_rows import FlowRow, RowKey
from bursar.writer.change import Change, Move


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
