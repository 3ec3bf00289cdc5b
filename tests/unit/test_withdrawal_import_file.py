"""The file of an import: columns in any order, every row in its own words, and what is wrong with which line."""

from __future__ import annotations

import pytest

from bursar.flows.withdrawals.importing import COLUMNS, ROWS_MAX, Row, read_rows

HEADER = ",".join(COLUMNS)
GOOD = "old-1,1,USDT,bsc,0xabc,5,1,confirming,,0xdef,,2026-01-31T12:00:00Z,yes"


def whys(text: str) -> list[tuple[int, str]]:
    return [(problem.line, problem.why) for problem in read_rows(text)[1]]


def test_row_is_read_by_the_names_of_its_columns() -> None:
    (row,), problems = read_rows(f"{HEADER}\n{GOOD}\n")
    assert problems == [] and row == Row(
        line=2,
        id="old-1",
        user=1,
        asset="USDT",
        chain="bsc",
        to="0xabc",
        amount="5",
        fee="1",
        status="confirming",
        wallet="",
        tx_hash="0xdef",
        memo="",
        created_us=1769860800 * 10**6,
        debited=True,
    )
    turned = [",".join(reversed(line.split(","))) for line in (HEADER, GOOD)]
    assert read_rows("\n".join(turned))[0] == [row]
    quoted = GOOD.replace(",,2026", ',"a, b ",2026')
    assert read_rows(f"{HEADER}\r\n{quoted}\r\n")[0][0].memo == "a, b"


@pytest.mark.parametrize("header", ["", "request_id,user", HEADER.replace("memo", "note"), HEADER + ",memo"])
def test_other_columns_are_refused(header: str) -> None:
    ((line, why),) = whys(f"{header}\n{GOOD}\n")
    assert line == 1 and "the first line names the columns" in why


def test_every_wrong_row_is_named_and_the_others_are_read() -> None:
    bad = [
        GOOD + ",more",
        GOOD.removesuffix(",yes"),
        GOOD.replace(",1,USDT", ",0,USDT"),
        GOOD.replace(",1,USDT", ",²,USDT"),
        GOOD.replace(",1,USDT", f",{'9' * 5_000},USDT"),
        GOOD.replace(",1,USDT", f",{2**63},USDT"),
        GOOD.replace("2026-01-31T12:00:00Z", "0001-01-01T00:00:00+14:00"),
        GOOD.replace("confirming", "failed"),
        GOOD.replace("confirming", "approved"),
        GOOD.replace("yes", "Yes"),
        GOOD.replace("12:00:00Z", "12:00:00"),
    ]
    rows, problems = read_rows("\n".join((HEADER, GOOD, *bad, GOOD)))
    assert [row.line for row in rows] == [2, 14]
    assert [problem.line for problem in problems] == list(range(3, 14))


def test_what_is_no_csv_and_what_is_empty_is_said() -> None:
    assert "this is not CSV" in whys(f'{HEADER}\n"old-1"x,\n')[0][1]
    assert whys(f"{HEADER}\n") == [(1, "there are no rows")]


def test_more_rows_than_can_be_checked_at_once_are_refused() -> None:
    rows, problems = read_rows("\n".join((HEADER, *[GOOD] * (ROWS_MAX + 1))))
    assert (len(rows), len(problems)) == (ROWS_MAX, 1) and "several files" in problems[0].why
