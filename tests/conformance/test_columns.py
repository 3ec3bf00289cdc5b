"""One list of columns per kind of row: statements and arguments are made from it, and the functions agree with it."""

from __future__ import annotations

import asyncio

import asyncpg
import pytest

from bursar import Bursar
from bursar.model.errors import DatabaseCorrupt
from bursar.model.flow_rows import FlowRow, RowState
from bursar.store import columns
from bursar.store.columns import ROWS
from bursar.store.postgres.arrays import SQL, arguments, array_of, expand

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


def test_sqlite_numbers_a_rows_values_in_the_order_of_the_list() -> None:
    insert = columns.expand("sqlite", "INSERT INTO transitions (@transitions, at) VALUES (:transitions, :now)")
    assert insert == (
        "INSERT INTO transitions (record, version, source, event, target, attempt, actor, evidence, at) "
        "VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)"
    )
    rows = "INSERT INTO flow_rows (@flow_rows, created_at) VALUES (:flow_rows, :now)"
    assert columns.expand("sqlite", rows) == (  # what the row must have been is no column
        "INSERT INTO flow_rows (flow, kind, key, record, state, amount, version, permanent, body, created_at) "
        "VALUES (?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)"
    )


def test_sqlite_updates_what_does_not_say_which_row_is_meant() -> None:
    update = "UPDATE records SET @moves.changes WHERE number = :moves.number AND version = :moves.expected_version"
    assert columns.expand("sqlite", update) == (
        "UPDATE records SET state = ?3, version = ?4, attempt = ?5, transit = ?6, "
        "due = CASE WHEN ?7 IS -1 THEN due ELSE ?13 + ?7 END, worker = ?8, body = coalesce(?9, body), error = ?10, "
        "timer = CASE WHEN ?11 IS NULL THEN timer ELSE CASE WHEN ?11 > 0 THEN ?11 WHEN ?11 < 0 THEN ?13 - ?11 END END, "
        "inbox = inbox + ?12 "
        "WHERE number = ?1 AND version = ?2"
    )


@pytest.mark.parametrize(
    ("engine", "sql"),
    [
        ("sqlite", "SELECT c.path, c.token, now_us() - c.at FROM closings c"),
        ("postgres", "SELECT c.path, c.token, (extract(epoch FROM now() - c.at) * 1000000)::bigint FROM closings c"),
    ],
)
def test_what_is_read_is_selected_in_the_order_of_the_struct(engine: str, sql: str) -> None:
    assert columns.expand(engine, "SELECT @c.closing FROM closings c") == sql


def test_a_row_is_read_into_its_struct() -> None:
    read = columns.reader("flow_row", FlowRow)
    row = ("orders", "nonce", "k", 7, "held", "340282366920938463463374607431768211455", 2, 1, "{}")

    found = read(row)

    assert (found.state, found.amount, found.permanent) == (RowState.HELD, 2**128 - 1, True)
    with pytest.raises(DatabaseCorrupt, match="flow_row orders"):
        read((*row[:4], "no such state", *row[5:]))
    with pytest.raises(DatabaseCorrupt):
        read(row[:-1])


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
