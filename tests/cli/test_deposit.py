"""`bursar deposit` as people use it: rules by two people, an address, what arrives, what is held, scans and sweeps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.api.office import ALICE
from tests.cli.test_payout import ACCOUNT, ANNA, BEN, Counter, counter
from tests.evm_town import DEPOSIT_RULES, HOT, USDT, XPUB

from bursar.rails.derivation import ExtendedKey, deposit_address
from bursar.runtime import Runtime

_ = counter  # the fixture
USER = ("--user", str(ALICE))
FIRST = deposit_address("evm", ExtendedKey.parse(XPUB), 1)
OTHER_XPUB = ExtendedKey.parse(XPUB).child(7).text


def take_deposits(c: Counter, folder: Path, **changes: Any) -> None:
    """Chain and rules, by two people; then a process that begins to scan."""
    c.furnish(folder)
    file = folder / "deposits.json"
    file.write_text(json.dumps(DEPOSIT_RULES | changes))
    made = c.json("deposit", "rules", "put", "sim", str(file), *ANNA)
    assert made["address_of_user_1"] == FIRST
    c.ok("deposit", "rules", "approve", "sim", made["hash"], "--address", FIRST.lower(), *BEN)

    async def begun(runtime: Runtime) -> bool:
        scan = await runtime.engine.get("deposit_scans", "sim")
        return scan is not None and json.loads(scan.body).get("block", -1) >= 0

    c.run(begun)


def address(c: Counter) -> str:
    return str(c.json("deposit", "address", "sim", *USER)["address"])


def arrive(c: Counter, amount: int, state: str, **more: Any) -> dict[str, Any]:
    """Something arrives at the user's address, and comes into this state."""
    hash_ = c.town.pay_in(address(c), amount, **more)
    id_ = f"sim:{hash_}:0"
    until_state(c, id_, state)
    found: dict[str, Any] = c.json("deposit", "show", id_)
    return found


def until_state(c: Counter, id_: str, state: str) -> None:
    async def there(runtime: Runtime) -> bool:
        record = await runtime.engine.get("arrivals", id_)
        return record is not None and record.state == state

    c.run(there)


def test_from_the_rules_to_a_deposit_that_is_credited(counter: Counter, tmp_path: Path) -> None:
    take_deposits(counter, tmp_path)
    made = counter.json("deposit", "address", "sim", *USER)
    assert made["address"] == deposit_address("evm", ExtendedKey.parse(XPUB), ALICE)
    shown = counter.ok("deposit", "address", "sim", *USER)
    assert made["address"] in shown and "USDT, from 1 on" in shown and "internal transfer" in shown
    assert made["address"] in counter.ok("deposit", "addresses", *USER)
    found = arrive(counter, 5 * USDT, "credited")
    assert (found["status"], found["amount"], found["asset"], found["account"]) == (
        "credited",
        "5.000000",
        "USDT",
        ACCOUNT,
    )
    assert "105.000000" in counter.ok("ledger", "balance", ACCOUNT)
    for words in ((), USER, ("--chain", "sim"), ("--state", "credited")):
        assert found["id"] in counter.ok("deposit", "list", *words)
    assert counter.ok("deposit", "list", "--state", "held").strip() == "no deposits"
    assert "dep-1001" in counter.ok("deposit", "show", found["id"])
    assert counter.json("deposit", "scans")[0]["chain"] == "sim"
    again = counter.ok("deposit", "rescan", "sim", "0", *ANNA)
    assert "sim is read again from block 0 on" in again
    arrive(counter, 1 * USDT, "credited")
    assert "106.000000" in counter.ok("ledger", "balance", ACCOUNT)
    entries = counter.json("flow", "show", "arrivals", found["id"])["entries"]
    assert len(entries) == 1


def test_what_is_held_is_confirmed_by_two_people_or_rejected(
    counter: Counter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take_deposits(counter, tmp_path)
    found = arrive(counter, 7 * USDT, "held", sender=HOT.lower())
    with monkeypatch.context() as patched:
        patched.setattr("bursar.cli.output.PIPE_WIDTH", 100)
        for words in (("list",), ("show", found["id"]), ("scans",), ("sweeps",), ("rules", "list")):
            narrow = counter.ok("deposit", *words)
            assert max(map(len, narrow.splitlines())) <= 100, words
            assert found["id"] in narrow or words[0] not in ("list", "show"), "an id is never broken"
    listed = counter.ok("deposit", "list", "--state", "held")
    assert "hot has sent it" in listed and "7.000000" in listed
    assert "reviewed by people" in counter.ok("deposit", "show", found["id"])
    assert "judged anew by the worker" in counter.ok("deposit", "confirm", found["id"], *ANNA)
    until_state(counter, found["id"], "held")
    alone = counter("deposit", "confirm", found["id"], *ANNA)
    assert (alone.code, "another person" in alone.err) == (1, True), alone.err
    counter.ok("deposit", "confirm", found["id"], *BEN)
    until_state(counter, found["id"], "credited")
    assert counter.json("deposit", "show", found["id"])["confirmed_by"] == ["anna", "ben"]
    second = arrive(counter, 3 * USDT, "held", sender=HOT.lower())
    assert "is rejected" in counter.ok("deposit", "reject", second["id"], *ANNA)
    late = counter("deposit", "reject", second["id"], *BEN)
    assert (late.code, "only what is held" in late.err) == (1, True)


def test_rules_show_the_address_that_is_compared_with_the_signers(counter: Counter, tmp_path: Path) -> None:
    take_deposits(counter, tmp_path)
    shown = counter.ok("deposit", "rules", "show", "sim")
    assert FIRST in shown and "bursar signer xpub" in shown
    wanted = ("--set", "wallets=other", "--set", f"xpub={OTHER_XPUB}")
    proposed = counter.ok("deposit", "rules", "put", "sim", *wanted, *ANNA)
    other = deposit_address("evm", ExtendedKey.parse(OTHER_XPUB), 1)
    assert other in proposed and "bursar deposit rules approve sim" in proposed
    hash_ = counter.json("deposit", "rules", "list")[0]["proposal"]
    both = counter.ok("deposit", "rules", "show", "sim")
    assert FIRST in both and other in both and hash_ in both
    wrong = counter("deposit", "rules", "approve", "sim", hash_, "--address", FIRST, *BEN)
    assert (wrong.code, f"is {other}" in wrong.err, "nothing was approved" in wrong.err) == (4, True, True)
    assert counter.json("deposit", "rules", "list")[0]["version"] == 1
    assert other in counter.ok("deposit", "rules", "approve", "sim", hash_, "--address", other, *BEN)
    history = counter.json("deposit", "rules", "history", "sim")
    assert [(one["version"], one["approved_by"]) for one in history] == [(2, "ben"), (1, "ben")]
    assert "ticket 17" in counter.ok("deposit", "rules", "history", "sim")


def test_a_sweep_says_what_it_waits_for(counter: Counter, tmp_path: Path) -> None:
    swept = {"USDT": {"sweep_at": "1"}}
    take_deposits(counter, tmp_path, assets=swept, sweep_to="hot", sweep_mandate="sweep")
    assert counter.ok("deposit", "sweeps").strip() == "no sweeps"
    found = arrive(counter, 5 * USDT, "credited")

    async def waits(runtime: Runtime) -> bool:
        record = await runtime.engine.get("sweeps", found["id"])
        return record is not None and bool(record.error)

    counter.run(waits)
    shown = counter.ok("deposit", "sweeps")
    assert "dep-1001" in shown and "NO_GAS" in shown
    assert counter.json("deposit", "sweeps", "--wallet", "dep-1001", "--state", "")[0]["id"] == found["id"]
    assert counter.ok("deposit", "sweeps", "--chain", "nowhere").strip() == "no sweeps"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("deposit", "address", "nowhere", *USER), 1, "there are no deposits from 'nowhere'"),
        (("deposit", "address", "sim"), 2, "--user"),
        (("deposit", "address", "sim", "--user", "0"), 2, "--user"),
        (("deposit", "show", "sim:0x0:0"), 1, "RECORD_NOT_FOUND"),
        (("deposit", "confirm", "sim:0x0:0", *ANNA), 1, "RECORD_NOT_FOUND"),
        (("deposit", "confirm", "sim:0x0:0", "--actor", "anna"), 2, "--reason"),
        (("deposit", "list", "--state", "odd"), 2, "under_review"),
        (("deposit", "sweeps", "--state", "odd"), 2, "sweeping"),
        (("deposit", "rescan", "nowhere", "1", *ANNA), 1, "RECORD_NOT_FOUND"),
        (("deposit", "rescan", "sim", "-1", *ANNA), 2, "-1"),
        (("deposit", "rules", "put", "nowhere", "--set", "wallets=x", *ANNA), 1, "DOCUMENT_NOT_FOUND"),
        (
            ("deposit", "rules", "put", "sim", "--set", f"xpub={OTHER_XPUB}", *ANNA),
            1,
            "another xpub needs another name",
        ),
        (("deposit", "rules", "put", "sim", "--set", "xpub=xprvA", *ANNA), 1, "PRIVATE"),
        (("deposit", "rules", "put", "sim", *ANNA), 2, "--set"),
        (("deposit", "rules", "approve", "sim", "odd", *BEN), 2, "hash"),
    ],
)
def test_mistakes_are_named(counter: Counter, tmp_path: Path, words: tuple[str, ...], code: int, said: str) -> None:
    take_deposits(counter, tmp_path)
    ran = counter(*words)
    assert (ran.code, said in ran.err) == (code, True), ran.err + ran.out


def test_without_a_signer_one_can_look_and_is_told_what_is_missing(
    counter: Counter, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in counter.town.environ:
        monkeypatch.delenv(name)
    assert counter.ok("deposit", "list").strip() == "no deposits"
    assert counter.ok("deposit", "rules", "list").strip() == "none yet"
    ran = counter("deposit", "address", "sim", *USER)
    assert (ran.code, "signer" in ran.err) == (1, True), ran.err
