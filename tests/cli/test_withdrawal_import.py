"""`bursar withdrawal import` as people use it: a dry run, the import, the same file again, and problems."""

from __future__ import annotations

from pathlib import Path

from tests.api.office import ALICE
from tests.cli.test_payout import ACCOUNT, ANNA, BEN, Counter, counter
from tests.cli.test_withdrawal import drive, open_window
from tests.evm_town import SHOP

_ = counter  # the fixture
COLUMNS = "request_id,user,asset,chain,to,amount,fee,status,wallet,tx_hash,memo,created_at,debited"
AT = "2026-01-31T12:00:00Z"


def test_import_takes_over_what_is_under_way_and_says_what_becomes_of_it(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    file = tmp_path / "running.csv"
    rows = [
        f"old-1,{ALICE},USDT,sim,{SHOP},5,1,processing,hot,,,{AT},no",
        f"old-2,{ALICE},USDT,sim,{SHOP},5,1,pending,,,,{AT},yes",
    ]
    file.write_text("\n".join((COLUMNS, *rows)))
    words = ("withdrawal", "import", str(file), "--actor", "anna")
    assert "would be written" in counter.ok(*words, "--dry-run")
    assert counter.json("withdrawal", "list") == []
    done = counter.json(*words)
    assert ([line["becomes"] for line in done["lines"]], done["written"]) == (["two people", "decided here"], 2)
    assert "there already" in counter.ok(*words) and counter.json(*words)["written"] == 0
    assert counter.json("ledger", "balance", ACCOUNT)[0]["amount"] == "94.000000"
    drive(counter, "old-2", "completed")
    payout = counter.json("withdrawal", "show", "old-1")["payout"]
    for person in (ANNA, BEN):
        counter.ok("payout", "resolve", payout, "--not-paid", *person)
    assert counter.json("withdrawal", "show", "old-1")["status"] == "failed"
    assert counter.json("ledger", "balance", ACCOUNT)[0]["amount"] == "100.000000"


def test_problems_are_named_with_their_lines_and_nothing_is_written(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    file = tmp_path / "running.csv"
    good = f"old-1,{ALICE},USDT,sim,{SHOP},5,1,pending,,,,{AT},no"
    file.write_text("\n".join((COLUMNS, good, good.replace("old-1", "old-2").replace("pending", "completed"))))
    ran = counter("withdrawal", "import", str(file), "--actor", "anna")
    assert ran.code == 1 and "3" in ran.out and "what has ended is not imported" in ran.out.replace("\n", " ")
    assert counter.json("withdrawal", "list") == []
    file.write_bytes(b"\xff\xfe")
    assert "no text in UTF-8" in counter("withdrawal", "import", str(file), "--actor", "anna").err
    assert counter("withdrawal", "import", str(tmp_path / "none.csv"), "--actor", "anna").code == 2
