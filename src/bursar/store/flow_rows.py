"""Reading rows of flows' own (model/flow_rows): by key, by record, by prefix. They are written with their records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bursar.model.flow_rows import FlowRow, RowKey
from bursar.store.columns import reader
from bursar.store.session import Table

LAST = "\U0010ffff"  # sorts after every character of a key: none is printable


flow_row_of = reader("flow_row", FlowRow)


def flow_row_values(expected: int, row: FlowRow) -> tuple[int, str, str, str, int, str, str, int, bool, str]:
    """A row as it is written, after the version that it must have had."""
    values = (row.flow, row.kind, row.key, row.record, row.state.value, str(row.amount))
    return (expected, *values, row.version, row.permanent, row.body)


class FlowRows(Table):
    """Rows of flows' own."""

    async def get(self, flow: str, kind: str, key: str) -> FlowRow | None:
        """One row by its key."""
        return await self._first(flow_row_of, "flow_row", flow, kind, key)

    async def of_record(self, record: int, kind: str = "") -> list[FlowRow]:
        """The rows that a record has, of one kind or of all, by key."""
        return await self._all(flow_row_of, "flow_rows_of_record", record, kind)

    async def of_records(self, records: Sequence[int]) -> list[FlowRow]:
        """The rows that several records have."""
        return await self._all(flow_row_of, "flow_rows_of_records", list(records))

    async def by_keys(self, flow: str, kind: str, keys: Iterable[str]) -> dict[str, FlowRow]:
        """Several rows of a kind, by key; those that are not there are missing."""
        wanted = sorted(set(keys))
        found = await self._all(flow_row_of, "flow_rows_by_keys", flow, kind, wanted) if wanted else []
        return {row.key: row for row in found}

    async def by_prefix(
        self, flow: str, kind: str, prefix: str = "", *, after: str = "", limit: int = 100
    ) -> list[FlowRow]:
        """A page of rows of a kind whose keys begin so, by key; the next page begins after the last one's."""
        return await self._all(flow_row_of, "flow_rows_by_prefix", flow, kind, prefix, prefix + LAST, after, limit)

    async def all(self, after: RowKey, limit: int) -> Sequence[tuple[FlowRow, str | None]]:
        """A page of all rows, each with the flow of the record that has it; None if there is no such record."""
        return [(flow_row_of(row[:-1]), row[-1]) for row in await self._s.rows("all_flow_rows", *after, limit)]
