"""Each command's happy path, as text and as JSON."""

from __future__ import annotations

import re
from pathlib import Path

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
    "torture",
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
    assert shell.json("recover") == {"finished": 0, "abandoned": 0, "broken": 0, "alive": 0}
    assert shell.json("recover", "--restored") == {"epoch": 2}
    assert shell.json("asset", "create", "EUR", "--precision", "2")["code"] == "EUR"
    assert [f["ok"] for f in shell.json("audit")] == [True] * 6


def test_assets(shell: Shell) -> None:
    made = shell.json("asset", "create", "EUR", "--precision", "2", "--min-transfer", "0.01", "--max-transfer", "50")
    assert made == {
        "code": "EUR",
        "precision": 2,
        "status": "active",
        "min_transfer": "0.01",
        "max_transfer": "50.00",
        "internal_transfer_enabled": True,
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
    assert [f["invariant"] for f in findings] == ["I1", "I2", "I3", "I4", "I7", "I8"]
    assert set(findings[0]) == {"invariant", "meaning", "ok", "judged", "checked", "broken", "note", "seconds"}
    assert [f["invariant"] for f in shell.json("audit", "--only", "I1", "--only", "I8")] == ["I1", "I8"]
    assert "ok" in shell.ok("audit")
    assert shell.json("recover") == {"finished": 0, "abandoned": 0, "broken": 0, "alive": 0}
    assert shell.json("rebuild") == {"live_postings": 2}
    assert "abandoned" in shell.ok("recover")
    assert shell.json("recover", "--restored") == {"epoch": 1}


def test_json_may_also_follow_the_command(shell: Shell) -> None:
    assert shell.ok("asset", "list", "--json") == shell.ok("--json", "asset", "list")
