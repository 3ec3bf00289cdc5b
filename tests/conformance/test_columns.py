"""One list of columns per kind of row: statements and arguments are made from it, and the functions agree with it."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from bursar import Bursar
from bursar.store.postgres.arrays import SQL
from bursar.store.postgres.columns import ROWS, arguments, array_of, expand

LEDGER = ("envelopes", "postings", "spends", "spent_live", "account_history", "guarded", "cached_balances")
RECORDS = ("operations", "counters", "new_records", "moves", "transitions")


def test_every_column_gets_a_parameter_in_the_order_of_the_list() -> None:
    statement = expand("SELECT f(@limit:bigint, @spends), g(@high_water), @limit:bigint")

    assert statement.sql == (
        "SELECT f($1::bigint, $2::text::bigint[], $3::text::bigint[]), "
        "g((string_to_array($4::text, E'\\x1f'))[2:], (string_to_array($5::text, E'\\x1f'))[2:], "
        "$6::text::bigint[]), $1::bigint"
    )
    values = {"limit": 7, "spends": [(1, 2), (3, 4)], "high_water": [("spot", "w", 5)]}
    assert arguments(statement, values) == [7, "{1,3}", "{2,4}", "\x1fspot", "\x1fw", "{5}"]


def test_rows_of_the_wrong_width_are_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        arguments(expand("SELECT f(@spends)"), {"spends": [(1, 2, 3)]})


def test_no_statement_numbers_more_parameters_by_hand_than_a_reader_can_count() -> None:
    by_hand = {name for name, sql in SQL.items() if "$20" in sql}
    assert by_hand == {"batch_write", "batch_write_entries", "batch_write_records"}, "made from the lists of columns"


@pytest.mark.parametrize(
    ("function", "before", "kinds"),
    [
        ("write_group_1", ["bigint", "integer"], LEDGER),
        ("write_records_2", [], RECORDS),
        ("write_holds_1", [], ("holds",)),
        ("raise_high_water_1", [], ("high_water",)),
        ("write_flow_rows_1", [], ("flow_rows",)),
        ("write_signals_1", [], ("signals",)),
    ],
)
def test_functions_have_the_columns_of_the_lists(
    fresh_postgres: str, function: str, before: list[str], kinds: tuple[str, ...]
) -> None:
    async def parameters() -> list[str]:
        async with Bursar(fresh_postgres):
            pass
        connection = await asyncpg.connect(fresh_postgres)
        try:
            found = await connection.fetch(
                "SELECT format_type(t, NULL) FROM pg_proc, unnest(proargtypes) WITH ORDINALITY AS a (t, place) "
                "WHERE proname = $1 ORDER BY place",
                function,
            )
        finally:
            await connection.close()
        return [row[0] for row in found]

    wanted = before + [array_of(kind) for name in kinds for kind in ROWS[name].values()]
    assert asyncio.run(parameters())[: len(wanted)] == wanted
