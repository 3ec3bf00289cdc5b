"""`bursar withdrawal` as people use it: rules, an address book, a withdrawal from request to the end, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE
from tests.cli.test_payout import ACCOUNT, ANNA, BEN, Counter, counter
from tests.evm_town import HOT, POLICY_OF_WITHDRAWALS, SHOP, TOKEN, USDT
from tests.signing import APPROVERS

from bursar.ports import SystemPorts
from bursar.signer import approvals, vault

_ = counter  # the fixture
USER = ("--user", str(ALICE))
WANTED = (*USER, "--chain", "sim", "--to", SHOP)
ACTOR = ("--actor", "anna")


def asked(amount: str, *more: str, key: str = "k1") -> tuple[str, ...]:
    return ("withdrawal", "request", "USDT", amount, *WANTED, "--key", key, *ACTOR, *more)


def open_window(c: Counter, folder: Path, **changes: Any) -> None:
    """Chain, policy and approvers, by two people."""
    c.furnish(folder)
    policy = folder / "policy.json"
    policy.write_text(json.dumps(POLICY_OF_WITHDRAWALS | changes))
    puts = [("policy", "usdt:sim", str(policy))]
    puts += [("approver", name, f"--set=public_key={public_half(name)}") for name in ("ann", "ben")]
    for group, *put in puts:
        made = c.json("withdrawal", group, "put", *put, *ANNA)
        assert "version 1" in c.ok("withdrawal", group, "approve", put[0], made["hash"], *BEN)


def public_half(name: str) -> str:
    return APPROVERS[name].public_key().public_bytes_raw().hex()


def key_file(folder: Path, name: str) -> Path:
    """The key that the signer's policy knows, in a file as `bursar signer approver-key` makes it."""
    ports, file = SystemPorts(), folder / f"{name}.key"
    header = {"purpose": approvals.PURPOSE, "approver": name, "public_key": public_half(name)}
    phrase, seed = bytearray(b"correct horse battery staple"), bytearray(APPROVERS[name].private_bytes_raw())
    vault.write(ports.files(), str(file), vault.seal(header, seed, phrase, ports.token))
    secret = folder / f"{name}.pass"
    secret.write_text("correct horse battery staple")
    secret.chmod(0o600)
    return file


def approve(id_: str, key: Path, *more: str) -> tuple[str, ...]:
    words = ("withdrawal", "approve", id_, "--key", str(key), "--passphrase-file", str(key.with_suffix(".pass")))
    return (*words, *more)


def drive(c: Counter, id_: str, status: str) -> None:
    """Run a worker until a withdrawal has a status."""
    c.drive(id_, status, flow="withdrawals")


def test_from_the_rules_to_a_withdrawal_that_two_people_approve(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    keys = {name: key_file(tmp_path, name) for name in ("ann", "ben")}
    quoted = counter.json("withdrawal", "quote", "USDT", "60", *WANTED)
    assert (quoted["fee"], quoted["total"]) == ("1.000000", "61.000000")
    assert "it needs approval by two people" in counter.ok("withdrawal", "quote", "USDT", "60", *WANTED)
    made = counter.json(*asked("60", "--max-fee", "1"))
    assert counter.json(*asked("60.0", "--max-fee", "1.0"))["id"] == made["id"]
    drive(counter, made["id"], "waiting")
    assert made["id"] in counter.ok("withdrawal", "waiting")
    payment = counter.ok("withdrawal", "payment", made["id"])
    for shown in ("60.000000 USDT", SHOP, "sim (chain id 77)", ACCOUNT, made["id"], made["digest"]):
        assert shown in payment
    done = counter(*approve(made["id"], keys["ann"], "--yes", "--digest", made["digest"]))
    assert (done.code, "approved by ann" in done.out) == (0, True), done.err
    for shown in ("60.000000 USDT", SHOP, "sim (chain id 77)", ACCOUNT, made["id"], "anna", made["digest"]):
        assert shown in done.err
    assert counter.json("withdrawal", "show", made["id"])["approvals"] == ["ann"]
    counter.ok(*approve(made["id"], keys["ben"], "--yes"))
    drive(counter, made["id"], "completed")
    assert counter.town.has(SHOP, TOKEN) == 60 * USDT
    shown = counter.json("withdrawal", "show", made["id"])
    assert (shown["approvals"], shown["requester"], shown["payout_status"]) == (["ann", "ben"], "anna", "confirmed")
    assert shown["tx_hash"] in counter.ok("withdrawal", "show", made["id"])
    assert made["id"] in counter.ok("withdrawal", "list", "--status", "completed", *USER, "--asset", "USDT")
    assert counter.ok("withdrawal", "list", "--status", "failed").strip() == "no withdrawals"
    entries = counter.json("flow", "show", made["id"])["entries"]
    legs = [(leg["source"], leg["amount"]["amount"]) for entry in entries for leg in entry["movements"]]
    assert legs[0] == (ACCOUNT, "61.000000")
    assert "withdrawals" in counter.ok("flow", "list", "--all")


def test_nothing_is_signed_that_was_not_seen_or_is_not_this_payment(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    keys = {"ann": key_file(tmp_path, "ann")}
    made = counter.json(*asked("20"))
    other = counter(*approve(made["id"], keys["ann"], "--yes", "--digest", "0" * 64))
    assert (other.code, "nothing was signed" in other.err) == (4, True)
    assert "say --yes" in counter(*approve(made["id"], keys["ann"])).err
    assert counter.json("withdrawal", "show", made["id"])["approvals"] == []
    own = counter.json("withdrawal", "request", "USDT", "20", *WANTED, "--key", "k2", "--actor", "a.nn")
    refused = counter(*approve(own["id"], keys["ann"], "--yes"))
    assert (refused.code, "OWN_REQUEST" in refused.err) == (1, True)
    printed = json.loads(counter.ok("--json", "withdrawal", "payment", made["id"]))
    file = tmp_path / "payment.json"
    file.write_text(json.dumps(printed))
    phrase = ("--passphrase-file", str(tmp_path / "ann.pass"))
    signed = counter.json("signer", "approve", "--key", str(keys["ann"]), "--yes", str(file), *phrase)
    assert signed["approver"] == "ann", "on a machine of the approver's, without the database"


def test_rejected_and_cancelled_give_the_money_back(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    first, second = (counter.json(*asked("20", key=key))["id"] for key in ("k1", "k2"))
    drive(counter, first, "waiting")
    assert "by the worker that runs" in counter.ok("withdrawal", "reject", first, *ANNA)
    assert "by the worker that runs" in counter.ok("withdrawal", "cancel", second, *ANNA)
    drive(counter, first, "rejected")
    drive(counter, second, "cancelled")
    assert "100.000000" in counter.ok("ledger", "balance", ACCOUNT)
    assert "ticket 17" in counter.ok("withdrawal", "show", first)
    late = counter("withdrawal", "reject", second, *ANNA)
    assert (late.code, "INVALID_STATE" in late.err) == (1, True)


def test_address_book_and_switches(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path, address_book="required")
    assert counter.ok("withdrawal", "address", "list", *USER).strip() == "no addresses"
    refused = counter(*asked("5"))
    assert (refused.code, "ADDRESS_NOT_IN_BOOK" in refused.err) == (1, True)
    add = ("withdrawal", "address", "add", "sim", SHOP, *USER, "--label", "shop", *ACTOR)
    entry = counter.json(*add)
    assert counter.json(*add)["id"] == entry["id"]
    assert SHOP in counter.ok("withdrawal", "address", "list", *USER)
    assert "is switched off" in counter.ok("withdrawal", "switches")
    assert "paused" in counter.ok("withdrawal", "pause", "--asset", "USDT", *ANNA)
    assert "withdrawals of USDT" in counter.ok("withdrawal", "switches")
    made = counter.json(*asked("5"))
    drive(counter, made["id"], "approved")
    assert "withdrawals are paused at the moment" in counter.ok("withdrawal", "list")
    assert "go on" in counter.ok("withdrawal", "resume", "--asset", "USDT", *ANNA)
    assert "was not paused" in counter.ok("withdrawal", "resume", "--asset", "USDT", *ANNA)
    counter.ok("withdrawal", "cancel", made["id"], *ANNA)
    drive(counter, made["id"], "cancelled")
    counter.ok("withdrawal", "address", "remove", entry["id"], *USER, *ACTOR)
    assert counter.json("withdrawal", "address", "list", *USER) == []


def test_rules_are_listed_shown_and_changed_by_two_people(counter: Counter, tmp_path: Path) -> None:
    open_window(counter, tmp_path)
    made = counter.json("withdrawal", "policy", "put", "usdt:sim", "--set", 'fee_flat="2"', *ANNA)
    alone = counter("withdrawal", "policy", "approve", "usdt:sim", made["hash"], *ANNA)
    assert (alone.code, "SECOND_PERSON_NEEDED" in alone.err) == (1, True)
    listed = counter.ok("withdrawal", "policy", "list")
    assert made["hash"] in listed and "by anna" in listed
    assert made["hash"] in counter.ok("withdrawal", "policy", "show", "usdt:sim")
    assert "version 2" in counter.ok("withdrawal", "policy", "approve", "usdt:sim", made["hash"], *BEN)
    mistyped = SHOP.swapcase().replace("0X", "0x")
    words = ("withdrawal", "address-list", "put", "usdt:sim", "--set", f"deny={json.dumps([mistyped])}", *ANNA)
    unread = counter(*words)
    assert (unread.code, f"deny: '{mistyped}' is not an address on sim: its checksum is wrong" in unread.err) == (
        1,
        True,
    )
    denied = counter.json("withdrawal", "address-list", "put", "sim", "--set", f"deny={json.dumps([SHOP])}", *ANNA)
    assert counter.json("withdrawal", "address-list", "list")[0]["state"] == "proposed"
    counter.ok("withdrawal", "address-list", "approve", "sim", denied["hash"], *BEN)
    refused = counter(*asked("5"))
    assert (refused.code, "ADDRESS_DENIED" in refused.err) == (1, True)
    assert public_half("ann") in counter.ok("withdrawal", "approver", "show", "ann")
    gone = counter.json("withdrawal", "approver", "put", "ann", "--set", "active=false", *ANNA)
    counter.ok("withdrawal", "approver", "approve", "ann", gone["hash"], *BEN)
    assert [one["version"] for one in counter.json("withdrawal", "approver", "list")] == [2, 1]


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (asked("0.5"), 1, "BELOW_MINIMUM"),
        (asked("91"), 1, "ABOVE_MAXIMUM"),
        (asked("5", "--max-fee", "0.5"), 1, "FEE_CHANGED"),
        (asked("5")[:-2], 2, "--actor"),
        (("withdrawal", "request", "USDT", "5", *WANTED, *ACTOR), 2, "--key"),
        (("withdrawal", "quote", "USDT", "5", *USER, "--chain", "sim", "--to", HOT), 1, "OWN_ADDRESS"),
        (("withdrawal", "show", "wd-1"), 1, "WITHDRAWAL_NOT_FOUND"),
        (("withdrawal", "list", "--status", "odd"), 2, "--status"),
        (("withdrawal", "pause", *ANNA), 2, "--all"),
        (("withdrawal", "pause", "--all", "--asset", "USDT", *ANNA), 2, "--all"),
        (("withdrawal", "pause", "--asset", "USTD", *ANNA), 1, "INVALID_ASSET"),
        (("withdrawal", "pause", "--chain", "smi", *ANNA), 1, "DOCUMENT_NOT_FOUND"),
        (("withdrawal", "address", "add", "sim", "0x12", *USER, *ACTOR), 1, "INVALID_ADDRESS"),
        (("withdrawal", "address", "remove", "ab-1", *USER, *ACTOR), 1, "RECORD_NOT_FOUND"),
        (("withdrawal", "policy", "put", "usdt:sim", "--set", "maximum=5", *ANNA), 1, "INVALID_DOCUMENT"),
        (("withdrawal", "policy", "put", "usdt:sim", "--set", 'maximum="0"', *ANNA), 1, "allows nothing"),
    ],
)
def test_mistakes_are_named(counter: Counter, tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    open_window(counter, tmp_path)
    ran = counter(*words)
    assert (ran.code, said in ran.err) == (code, True), ran.err + ran.out


def test_without_a_signer_one_can_look_and_is_told_what_is_missing(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in counter.town.environ:
        monkeypatch.delenv(name)
    assert counter.ok("withdrawal", "list").strip() == "no withdrawals"
    ran = counter(*asked("5"))
    assert (ran.code, "signer" in ran.err) == (1, True), ran.err
