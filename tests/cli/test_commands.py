"""Each command's happy path, as text and as JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Shell

STORES = Path(__file__).parents[2] / "src" / "bursar" / "store"
MIGRATIONS = sorted(path.stem for path in (STORES / "sqlite" / "migrations").glob("*.sql"))

COMMANDS = [
    "asset create",
    "asset list",
    "asset suspend",
    "asset resume",
    "book create",
    "book list",
    "account create",
    "account list",
    "account show",
    "account freeze",
    "account unfreeze",
    "account close",
    "account policy",
    "account compact",
    "ledger deposit",
    "ledger pay",
    "ledger withdraw",
    "ledger reverse",
    "ledger balance",
    "ledger history",
    "ledger show",
    "ledger postings",
    "ledger events",
    "ledger hold void",
    "hold authorize",
    "hold confirm",
    "hold void",
    "hold list",
    "hold expire",
    "audit",
    "recover",
    "rebuild",
    "migrate",
    "chaos",
    "demo",
    "bench",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself_with_an_example(empty: Shell, command: str) -> None:
    out = empty.ok(*command.split(), "--help")
    assert "Examples:\n    bursar " in out.replace("Examples:\n  bursar", "Examples:\n    bursar")
    assert "--json" in out


def test_help_names_every_command_the_default_and_the_exit_codes(empty: Shell) -> None:
    out = empty.ok("--help")
    for word in ("migrate", "account", "audit", "sim", "bench", "demo", "sqlite:///bursar.db", "BURSAR_DATABASE"):
        assert word in out
    assert re.search(r"5 +the outcome is unknown", out)


def test_version(empty: Shell) -> None:
    assert re.fullmatch(r"bursar \d+\.\d+\.\d+\n", empty.ok("--version"))


def test_migrate_says_what_it_did_and_doing_it_twice_is_doing_it_once(empty: Shell) -> None:
    assert empty.json("migrate") == {"version": len(MIGRATIONS), "applied": MIGRATIONS}
    assert "nothing to do" in empty.ok("migrate")


def test_migrate_prints_a_script_for_a_dba_and_touches_nothing(empty: Shell) -> None:
    out = empty.ok("migrate", "--sql")
    assert "CREATE TABLE bursar.postings" in out
    assert not Path(empty.url.removeprefix("sqlite:///")).exists()


def test_migrate_on_postgresql(empty: Shell, fresh_postgres: str) -> None:
    shell = empty.on(fresh_postgres)
    assert shell.json("migrate") == {"version": len(MIGRATIONS), "applied": MIGRATIONS}
    assert shell.json("migrate")["applied"] == []
    assert shell.json("recover", "--restored") == {"epoch": 2, "paused": False, "cores": []}
    assert shell.json("asset", "create", "EUR", "--precision", "2")["code"] == "EUR"
    assert [f["ok"] for f in shell.json("audit")] == [True] * 7


def test_assets(shell: Shell) -> None:
    made = shell.json("asset", "create", "EUR", "--precision", "2", "--min-transfer", "0.01", "--max-transfer", "50")
    assert made == {
        "code": "EUR",
        "precision": 2,
        "status": "active",
        "min_transfer": "0.01",
        "max_transfer": "50.00",
        "internal_transfer_enabled": True,
        "core_max": "184467440737095516.15",
    }
    assert [a["code"] for a in shell.json("asset", "list")] == ["EUR", "USDT"]
    assert "EUR" in shell.ok("asset", "list")
    assert "suspended" in shell.ok("asset", "suspend", "USDT")
    assert shell("ledger", "deposit", "external:bank", "user:1", "USDT", "1").code == 1
    assert shell.json("asset", "resume", "USDT")["status"] == "active"


def test_books(shell: Shell) -> None:
    made = shell.json("book", "create", "retail", "--asset", "USDT", "--account", "user", "--account", "external:bank")
    assert made == {"name": "retail", "assets": ["USDT"], "accounts": ["user", "external:bank"]}
    assert [b["name"] for b in shell.json("book", "list")] == ["main", "retail"]
    assert "retail" in shell.ok("book", "list")
    assert shell("ledger", "pay", "user:1", "shop", "USDT", "1", "--book", "retail").code == 1


def test_accounts_are_listed_by_prefix_and_in_pages(shell: Shell) -> None:
    for n in range(2, 7):
        shell.ok("account", "create", f"user:{n}")
    first = shell.json("account", "list", "user", "--limit", "4")
    assert [a["path"] for a in first] == ["user:1", "user:2", "user:3", "user:4"]
    assert "--after user:4" in shell.ok("account", "list", "user", "--limit", "4")
    assert [a["path"] for a in shell.json("account", "list", "user", "--after", "user:4")] == ["user:5", "user:6"]
    assert "no accounts" in shell.ok("account", "list", "nobody")


def test_an_account_is_shown_with_versions_balances_and_holds(shell: Shell) -> None:
    shell.ok("hold", "authorize", "user:1", "USDT", "30", "--expires-in", "2h")
    shell.ok("account", "freeze", "user:1")
    found = shell.json("account", "show", "user:1")
    assert (found["path"], found["version"], found["status"], found["policy"]) == (
        "user:1",
        2,
        "frozen",
        "no_overdraft",
    )
    assert [v["status"] for v in found["versions"]] == ["active", "frozen"]
    assert all(re.fullmatch(r"\d{4}-\d\d-\d\dT[\d:.]+Z", v["at"]) for v in found["versions"])
    assert found["balances"] == [{"asset": "USDT", "amount": "70.000000"}]
    assert found["holds"][0]["remaining"] == {"asset": "USDT", "amount": "30.000000"}
    text = shell.ok("account", "show", "user:1")
    for word in ("frozen", "70.000000", "30.000000", "Versions", "Open holds"):
        assert word in text


def test_freeze_unfreeze_policy_and_close(shell: Shell) -> None:
    assert shell.json("account", "freeze", "user:1")["status"] == "frozen"
    assert shell.json("account", "unfreeze", "user:1")["status"] == "active"
    changed = shell.json("account", "policy", "user:1", "capped", "--floor", "-10", "--asset", "USDT")
    assert (changed["policy"], changed["floor"], changed["asset"]) == ("capped_overdraft", "-10", "USDT")
    assert shell("account", "close", "user:1").code == 1
    shell.ok("ledger", "withdraw", "user:1", "external:bank", "USDT", "100")
    assert shell.json("account", "close", "user:1")["status"] == "closed"


def test_compact_merges_dust(shell: Shell) -> None:
    for _ in range(4):
        shell.ok("ledger", "deposit", "external:bank", "user:1", "USDT", "0.01")
    assert shell.json("account", "compact", "user:1") == {"account": "user:1", "merged": 5}
    (posting,) = shell.json("ledger", "postings", "user:1")
    assert posting["amount"] == {"asset": "USDT", "amount": "100.040000"}
    assert "0 postings" in shell.ok("account", "compact", "user:1")


def test_an_entry_gives_a_receipt_and_again_the_same_one(shell: Shell) -> None:
    first = shell.json("ledger", "pay", "user:1", "shop", "USDT", "12.5", "--key", "o7", "--meta", "order=7")
    again = shell.json("ledger", "pay", "user:1", "shop", "USDT", "12.50", "--key", "o7")
    assert first == {"envelope": first["envelope"], "id": first["id"], "key": "o7", "replayed": False}
    assert again == first | {"replayed": True}
    assert "was there already" in shell.ok("ledger", "pay", "user:1", "shop", "USDT", "12.50", "--key", "o7")
    assert shell.json("ledger", "balance", "shop", "USDT")[0]["amount"] == "12.500000"


def test_reversal(shell: Shell) -> None:
    paid = shell.json("ledger", "pay", "user:1", "shop", "USDT", "12.5")
    number = str(paid["envelope"])
    back = shell.json("ledger", "reverse", number, "--meta", "why=mistake")
    assert shell.json("ledger", "reverse", number)["envelope"] == back["envelope"]
    shown = shell.json("ledger", "show", str(back["envelope"]))
    assert (shown["reverses"], shown["metadata"]) == (paid["envelope"], {"why": "mistake"})
    assert shell.json("ledger", "balance", "user:1")[0]["amount"] == "100.000000"


def test_balances_now_then_and_below_a_prefix(shell: Shell) -> None:
    shell.ok("account", "create", "user:1:savings")
    shell.ok("ledger", "pay", "user:1", "user:1:savings", "USDT", "40")
    assert shell.json("ledger", "balance", "user:1") == [{"account": "user:1", "asset": "USDT", "amount": "60.000000"}]
    assert shell.json("ledger", "balance", "user:1", "--prefix")[0]["amount"] == "100.000000"
    assert shell.json("ledger", "balance", "user:1", "USDT", "--at", "2020-01-01")[0]["amount"] == "0.000000"
    assert shell.json("ledger", "balance", "user:1", "--at", "2020-01-01T00:00:00+02:00") == []
    assert shell.json("ledger", "balance", "user:1", "--at", "2999-01-01Z"[:-1])[0]["amount"] == "60.000000"
    assert "no balance" in shell.ok("ledger", "balance", "shop")


def test_history_is_newest_first_and_in_pages(shell: Shell) -> None:
    for n in range(3):
        shell.ok("ledger", "pay", "user:1", "shop", "USDT", f"{n + 1}", "--key", f"p{n}")
    lines = shell.json("ledger", "history", "user:1")
    assert [line["key"] for line in lines] == ["p2", "p1", "p0", "dep-1"]
    assert lines[0]["changes"] == [{"asset": "USDT", "amount": "-3.000000"}]
    page = shell.json("ledger", "history", "user:1", "--limit", "2", "--before", str(lines[1]["envelope"]))
    assert [line["key"] for line in page] == ["p0", "dep-1"]
    text = shell.ok("ledger", "history", "user:1", "--limit", "2")
    assert "-3.000000" in text
    assert f"--before {lines[1]['envelope']}" in text
    assert shell.json("ledger", "history", "user:1", "--until", "2020-01-01") == []


def test_an_envelope_is_drawn_with_where_value_came_from_and_went(shell: Shell) -> None:
    paid = shell.json("ledger", "pay", "user:1", "shop", "USDT", "30", "--key", "o7")
    next_one = shell.json("ledger", "pay", "user:1", "shop", "USDT", "1")
    text = shell.ok("ledger", "show", str(paid["envelope"]))
    assert re.search(r"from 1 +user:1 +100\.000000 USDT +#65537 +──┐", text)
    assert f"( {paid['envelope']} )" in text
    assert re.search(rf"user:1 +70\.000000 USDT +#\d+ ◀─. spent by {next_one['envelope']}\n", text)
    assert re.search(r"shop +30\.000000 USDT +#\d+ ◀─┘ live\n", text)
    by_key, by_hash = shell.json("ledger", "show", "--key", "o7"), shell.json("ledger", "show", paid["id"])
    assert by_key == by_hash
    assert [p["created_by"] for p in by_key["consumes"]] == [1]
    assert [p["state"] for p in by_key["creates"]] == ["spent", "live"]


def test_postings_live_and_all(shell: Shell) -> None:
    shell.ok("ledger", "pay", "user:1", "shop", "USDT", "30")
    assert [p["state"] for p in shell.json("ledger", "postings", "user:1")] == ["live"]
    everything = shell.json("ledger", "postings", "user:1", "USDT", "--all")
    assert [p["state"] for p in everything] == ["spent", "live"]
    after = str(everything[0]["id"])
    assert len(shell.json("ledger", "postings", "user:1", "--all", "--after", after)) == 1
    assert f"--after {after}" in shell.ok("ledger", "postings", "user:1", "--all", "--limit", "1")


def test_events_by_cursor(shell: Shell) -> None:
    events = shell.json("ledger", "events")
    assert [e["kind"] for e in events] == ["asset_created", *["account_created"] * 3, "committed"]
    after = shell.json("ledger", "events", "--after", events[3]["cursor"])
    assert after == events[4:]
    text = shell.ok("ledger", "events")
    for word in ("asset USDT", "account user:1 version 1", "envelope 1"):
        assert word in text


def test_holds(shell: Shell) -> None:
    hold = shell.json("hold", "authorize", "user:1", "USDT", "30", "--key", "h1", "--expires-in", "30m")
    assert (hold["account"], hold["state"], hold["remaining"]["amount"]) == ("user:1", "open", "30.000000")
    number = str(hold["id"])
    again = ("hold", "authorize", "user:1", "USDT", "30", "--key", "h1")
    assert shell.json(*again, "--expires-in", "30m")["id"] == hold["id"]
    assert shell(*again).code == 1  # for ever is another request
    shell.ok("hold", "confirm", number, "shop", "10", "--key", "c1")
    assert shell.json("hold", "list", "user:1")[0]["remaining"]["amount"] == "20.000000"
    assert "20.000000" in shell.ok("hold", "list", "user:1")
    assert shell.json("ledger", "hold", "void", number)["replayed"] is False
    assert shell("hold", "confirm", number, "shop").code == 1
    assert shell.json("hold", "expire") == []
    assert "no open holds" in shell.ok("hold", "list", "user:1")
    assert shell.json("ledger", "balance", "user:1")[0]["amount"] == "90.000000"


def test_audit_recover_and_rebuild(shell: Shell) -> None:
    findings = shell.json("audit")
    assert [f["invariant"] for f in findings] == ["I1", "I2", "I3", "I4", "I6", "I7", "I8"]
    assert set(findings[0]) == {
        "invariant",
        "meaning",
        "ok",
        "judged",
        "not_judged",
        "checked",
        "broken",
        "note",
        "seconds",
    }
    assert [f["invariant"] for f in shell.json("audit", "--only", "I1", "--only", "I8")] == ["I1", "I8"]
    assert "ok" in shell.ok("audit")
    assert shell.json("rebuild") == {"live_postings": 2}
    assert shell.json("recover", "--restored") == {"epoch": 1, "paused": False, "cores": []}


def test_json_may_also_follow_the_command(shell: Shell) -> None:
    assert shell.ok("asset", "list", "--json") == shell.ok("--json", "asset", "list")


def test_an_asset_says_what_fits_into_a_core(shell: Shell) -> None:
    out = shell.ok("asset", "create", "ETH", "--precision", "18")
    assert "at most 18.446744073709551615 ETH" in out


def test_an_asset_is_changed_later_and_not_by_creating_it_again(shell: Shell) -> None:
    create = ("asset", "create", "EUR", "--precision", "2")
    shell.ok(*create, "--max-transfer", "50", "--no-transfers")
    again = shell(*create, "--max-transfer", "60")
    assert (again.code, "bursar asset change EUR" in again.err) == (1, True)
    changed = shell.json("asset", "change", "EUR", "--min-transfer", "1", "--max-transfer", "60", "--transfers")
    assert (changed["min_transfer"], changed["max_transfer"]) == ("1.00", "60.00")
    assert changed["internal_transfer_enabled"] is True
    assert shell.json("asset", "change", "EUR", "--max-transfer", "none")["max_transfer"] is None
    assert "users can't transfer it" in shell.ok("asset", "change", "EUR", "--no-transfers")
    assert "no" in shell.ok("asset", "list")
    assert shell("asset", "change", "EUR", "--min-transfer", "0").code == 1
    assert shell("asset", "change", "EUR").code == 2
    assert shell("asset", "change", "NONE", "--transfers").code == 1
    assert "asset EUR" in shell.ok("ledger", "events", "--limit", "100")


ORDER: dict[str, Any] = {
    "key": "order-7",
    "metadata": {"order": 7},
    "movements": [
        {"source": "user:1", "target": "shop", "asset": "USDT", "amount": "10"},
        {"source": "shop", "target": "user:2", "asset": "USDT", "amount": "1.5"},
    ],
}


def test_an_entry_of_several_movements_is_committed_from_a_file(shell: Shell, tmp_path: Path) -> None:
    shell.ok("account", "create", "user:2")
    file = tmp_path / "order.json"
    file.write_text(json.dumps(ORDER))
    receipt = shell.json("ledger", "commit", "--file", str(file))
    assert (receipt["key"], receipt["replayed"]) == ("order-7", False)
    assert "was there already" in shell.ok("ledger", "commit", "--file", str(file))
    shown = shell.json("ledger", "show", str(receipt["envelope"]))
    assert shown["metadata"] == {"order": 7}
    assert [(m["source"], m["target"], m["amount"]["amount"]) for m in shown["movements"]] == [
        ("user:1", "shop", "10.000000"),
        ("shop", "user:2", "1.500000"),
    ]
    assert shell.json("ledger", "balance", "user:2", "USDT")[0]["amount"] == "1.500000"


def test_entries_of_a_file_are_committed_together_or_not_at_all(shell: Shell, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    more = {"movements": [{"source": "user:1", "target": "shop", "asset": "USDT", "amount": "1000000"}]}
    small = {"key": "small", "movements": [{"source": "user:1", "target": "shop", "asset": "USDT", "amount": "1"}]}
    before = shell.json("ledger", "balance", "user:1")
    file.write_text(json.dumps([small, more]))
    refused = shell("--json", "ledger", "commit", "--file", str(file))
    assert (refused.code, refused.json["code"]) == (1, "INSUFFICIENT_BALANCE")
    assert shell.json("ledger", "balance", "user:1") == before
    file.write_text(json.dumps([small, small | {"key": "other"}]))
    assert [r["key"] for r in shell.json("ledger", "commit", "--file", str(file))] == ["small", "other"]
    file.write_text("[]")
    assert shell.json("ledger", "commit", "--file", str(file)) == []


WRONG_FILES: dict[str, tuple[str | bytes, str]] = {
    "nothing": ("", "is not JSON"),
    "half": ('{"movements": [', "is not JSON"),
    "not text": (b"\xff\xfe", "is not JSON"),
    "a number": ("5", "Expected `object`, got `int`"),
    "no movements": ('{"key": "k"}', "missing required field `movements`"),
    "a name misspelt": (json.dumps(ORDER | {"Key": "k"}), "unknown field `Key`"),
    "an amount that is a number": (
        json.dumps({"movements": [ORDER["movements"][0] | {"amount": 10}]}),
        "Expected `str`, got `int` - at `$.movements[0].amount`",
    ),
    "a movement without its target": (
        '{"movements": [{"source": "user:1", "asset": "USDT", "amount": "1"}]}',
        "missing required field `target` - at `$.movements[0]`",
    ),
    "an amount given twice": (
        json.dumps(ORDER).replace('"amount"', '"amount": "1", "amount"', 1),
        "the field 'amount' is given twice",
    ),
    "too deep": (
        json.dumps(ORDER)[:-1] + ', "metadata": {"a": ' + "[" * 9_999 + "]" * 9_999 + "}}",
        "nested too deeply",
    ),
    "the second of a list": (json.dumps([ORDER, {"movements": 5}]), "at `$[1].movements`"),
}


@pytest.mark.parametrize("what", WRONG_FILES)
def test_a_file_that_is_no_entry_says_where(shell: Shell, tmp_path: Path, what: str) -> None:
    content, said = WRONG_FILES[what]
    file = tmp_path / "entry.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    ran = shell("ledger", "commit", "--file", str(file))
    assert ran.code == 2
    assert said in " ".join(ran.err.split())
    assert shell("ledger", "show", "--key", "order-7").code == 1


def test_a_file_that_is_not_there(shell: Shell) -> None:
    assert shell("ledger", "commit", "--file", "/nowhere/entry.json").code == 2
