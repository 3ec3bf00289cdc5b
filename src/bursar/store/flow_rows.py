"""Reading rows of flows' own (model/flow_rows): by key, by record, by prefix. They are written with their records."""

from __future__ import annotations

from collections.abc import Sequence

from bursar.model.errors import DatabaseCorrupt
from bursar.model.flow_rows import FlowRow, RowKey, RowState
from bursar.store.rows import Row
from bursar.store.session import Table

LAST = "\U0010ffff"  # sorts after every character of a key: none is printable


def flow_row_of(row: Row) -> FlowRow:
    """A row of flow_rows."""
    try:
        return FlowRow(
            flow=row[0],
            kind=row[1],
            key=row[2],
            record=row[3],
            state=RowState(row[4]),
            amount=int(row[5]),
            version=row[6],
            permanent=bool(row[7]),
            body=row[8],
        )
    except ValueError as error:
        raise DatabaseCorrupt(f"row {row[2]!r} of {row[0]}", str(error)) from error


def flow_row_values(expected: int, row: FlowRow) -> tuple[int, str, str, str, int, str, str, int, bool, str]:
    """A row as it is written, after the version that it must have had."""
    values = (row.flow, row.kind, row.key, row.record, row.state.value, str(row.amount))
    return (expected, *values, row.version, row.permanent, row.body)


class FlowRows(Table):
    """Rows of flows' own."""

    async def get(self, flow: str, kind: str, key: str) -> FlowRow | None:
        """One row by its key."""
        rows = await self._s.rows("flow_row", flow, kind, key)
        return flow_row_of(rows[0]) if rows else None

    async def of_record(self, record: int, kind: str = "") -> list[FlowRow]:
        """The rows that a record has, of one kind or of all, by key."""
        return [flow_row_of(row) for row in await self._s.rows("flow_rows_of_record", record, kind)]

    async def by_prefix(
        self, flow: str, kind: str, prefix: str = "", *, after: str = "", limit: int = 100
    ) -> list[FlowRow]:
        """A page of rows of a kind whose keys begin so, by key; the next page begins after the last one's."""
        rows = await self._s.rows("flow_rows_by_prefix", flow, kind, prefix, prefix + LAST, after, limit)
        return [flow_row_of(row) for row in rows]

    async def all(self, after: RowKey, limit: int) -> Sequence[tuple[FlowRow, str | None]]:
        """A page of all rows, each with the flow of the record that has it; None if there is no such record."""
        return [(flow_row_of(row), row[9]) for row in await self._s.rows("all_flow_rows", *after, limit)]
