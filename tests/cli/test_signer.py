"""`bursar signer` as a person runs it: keys, approvals, and a look at a log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from eth_account import Account
from tests import signing
from tests.cli.conftest import Shell
from tests.signing import FakeKeys, codecs, payment, request

from bursar.model.authorizations import Approval
from bursar.ports import SystemPorts
from bursar.rails.derivation import HARDENED, ExtendedKey, deposit_address
from bursar.signer import approvals, keystore, vault
from bursar.signer.approvals import people_who_approve
from bursar.signer.service import Service

WORDS = "abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon about"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for keys. The cost of scrypt is another test's (tests/unit/signer/test_keystore.py)."""
    for function in (
        vault.seal,
        vault.unseal,
        keystore.open_keystore,
        keystore.rotate,
        keystore.Keystore.save,
        approvals.create_key,
        approvals.approve,
    ):
        defaults = function.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "scrypt_n", 2)
    made = tmp_path / "keys"
    made.mkdir(mode=0o700)
    for name, text in (("phrase", "correct horse battery"), ("other", "another passphrase"), ("words", WORDS)):
        (made / name).write_text(text)
        (made / name).chmod(0o600)
    return made


def filled(folder: Path) -> str:
    """A log with a signature, a tombstone and a halt."""

    async def fill() -> None:
        service = await Service.open(SystemPorts(), f"{folder}/data", signing.policy(), FakeKeys(), codecs, new=True)
        running = asyncio.create_task(service.run())
        await service.sign("payouts", request("p1"))
        await service.cancel("payouts", "p2", 0)
        service.stop()
        await running
        service.close()

    asyncio.run(fill())
    return f"{folder}/data"


def test_keys_are_made_imported_listed_and_rotated(empty: Shell, folder: Path) -> None:
    store = f"{folder}/keystore.json"
    phrase = ("--keystore", store, "--passphrase-file", f"{folder}/phrase")
    made = empty("signer", "create", *phrase, "--name", "main")
    assert made.code == 0, made.err
    paths = ("--path", "m/44'/60'/0'/0/0", "--path", "m/44'/60'/0'/0/1")
    empty.ok("signer", "import", *phrase, "--name", "old", "--secret-file", f"{folder}/words", *paths)
    empty.ok("signer", "create", *phrase, "--name", "raw", "--kind", "key")
    listed = empty.json("signer", "list", "--keystore", store)
    assert [(key["name"], key["kind"], len(key["addresses"])) for key in listed] == [
        ("main", "mnemonic", 1),
        ("old", "mnemonic", 2),
        ("raw", "key", 1),
    ]
    assert listed[1]["addresses"]["m/44'/60'/0'/0/0"] == "0x9858EfFD232B4033E47d90003D41EC34EcaEda94"
    empty.ok("signer", "rotate", *phrase, "--new-passphrase-file", f"{folder}/other")
    wrong = empty("signer", "create", *phrase, "--name", "more")
    assert (wrong.code, "passphrase is wrong" in wrong.err) == (1, True)
    everything = made.out + made.err + wrong.err + Path(store).read_text()
    assert "abandon" not in everything


def test_new_words_are_shown_only_if_asked_for(empty: Shell, folder: Path) -> None:
    phrase = ("--keystore", f"{folder}/k.json", "--passphrase-file", f"{folder}/phrase")
    assert "Write this down" not in empty("signer", "create", *phrase, "--name", "a").err
    assert "Write this down" in empty("signer", "create", *phrase, "--name", "b", "--show-words").err


def test_an_extended_public_key_is_printed_for_a_server(empty: Shell, folder: Path) -> None:
    """It derives the addresses that another wallet derives from the words, and none of the words' keys is shown."""
    phrase = ("--keystore", f"{folder}/k.json", "--passphrase-file", f"{folder}/phrase")
    empty.ok("signer", "import", *phrase, "--name", "main", "--secret-file", f"{folder}/words")
    found = empty.json("signer", "xpub", "main", "--path", "m/44'/60'/1'", *phrase)
    key = ExtendedKey.parse(found["xpub"])
    assert (key.depth, key.number) == (3, HARDENED + 1)
    assert found["evm"] == deposit_address("evm", key, 1)
    assert found["tron"] == deposit_address("tron", key, 1)
    Account.enable_unaudited_hdwallet_features()
    for user in (1, 1001):
        other = Account.from_mnemonic(WORDS, account_path=f"m/44'/60'/1'/0/{user}")
        assert deposit_address("evm", key, user) == other.address
    shown = empty.ok("signer", "xpub", "main", "--path", "m/44'/60'/1'", *phrase)
    assert shown.splitlines()[0] == found["xpub"]
    assert found["evm"] in shown
    assert found["tron"] in shown
    assert "abandon" not in shown
    assert "xprv" not in shown


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("m/44'/60'/1", "must be hardened (write m/44'/60'/1')"),
        ("m/44'/60'/1'/0", "must be hardened"),
        ("m", "no derivation path"),
        ("m/44'/60'/x'", "no derivation path"),
        ("m/2147483648'", "no derivation path"),
        ("m" + "/0'" * 9, "more than 8 parts"),
    ],
)
def test_an_extended_key_whose_leak_would_cost_more_is_not_printed(
    empty: Shell, folder: Path, path: str, said: str
) -> None:
    ran = empty("signer", "xpub", "main", "--path", path, "--keystore", f"{folder}/k.json")
    assert (ran.code, ran.out) == (2, "")
    assert said in " ".join(ran.err.split())


def test_a_private_key_has_no_extended_key(empty: Shell, folder: Path) -> None:
    phrase = ("--keystore", f"{folder}/k.json", "--passphrase-file", f"{folder}/phrase")
    empty.ok("signer", "create", *phrase, "--name", "raw", "--kind", "key")
    for name, said in (("raw", "only a mnemonic"), ("main", "has no key 'main'")):
        ran = empty("signer", "xpub", name, "--path", "m/44'/60'/1'", *phrase)
        assert (ran.code, said in ran.err) == (1, True)


def test_no_passphrase_comes_from_elsewhere(empty: Shell, folder: Path) -> None:
    """No terminal and no file: refused, with what to do. A file that others read is refused too."""
    ran = empty("signer", "create", "--keystore", f"{folder}/k.json", "--name", "a")
    assert (ran.code, "--passphrase-file" in ran.err) == (2, True)
    (folder / "phrase").chmod(0o604)
    ran = empty(
        "signer", "create", "--keystore", f"{folder}/k.json", "--name", "a", "--passphrase-file", f"{folder}/phrase"
    )
    assert (ran.code, "chmod 600" in ran.err) == (2, True)


def test_an_approver_approves(empty: Shell, folder: Path) -> None:
    """The approver sees every detail, and the approval counts for this payment."""
    key, phrase = f"{folder}/ann.key", ("--passphrase-file", f"{folder}/phrase")
    public = empty.json("signer", "approver-key", "--file", key, "--name", "Ann", *phrase)
    assert public["approver"] == "ann"
    asked = payment()
    file = folder / "payment.json"
    file.write_bytes(msgspec.json.encode(asked))
    unasked = empty("signer", "approve", "--key", key, str(file), *phrase)
    assert (unasked.code, unasked.out) == (2, "")
    ran = empty("signer", "approve", "--key", key, str(file), "--yes", *phrase)
    assert asked.to in ran.err
    assert asked.digest() in ran.err
    approval = msgspec.json.decode(ran.out, type=Approval)
    assert people_who_approve({"ann": public["public_key"]}, [approval], asked.canonical()) == ["ann"]
    file.write_text(json.dumps(msgspec.to_builtins(asked) | {"extra": 1}))
    assert empty("signer", "approve", "--key", key, str(file), "--yes", *phrase).code == 2


def test_the_log_is_shown_and_verified(empty: Shell, folder: Path) -> None:
    data = filled(folder)
    found = empty.json("signer", "verify", "--data", data)
    assert (found["name"], found["sequence"], found["incomplete_end"]) == ("hot", 2, "")
    kinds = [entry["what"]["type"] for entry in empty.json("signer", "log", "--data", data)]
    assert kinds == ["created", "started", "signed", "tombstone"]
    shown = empty.ok("signer", "log", "--data", data, "--payout", "p1")
    assert "500 USDT to" in shown
    assert "tombstone" not in shown
    log = Path(data) / "log"
    whole = log.read_bytes()
    log.write_bytes(whole[:-3])
    assert "incomplete" in empty.json("signer", "verify", "--data", data)["incomplete_end"]
    log.write_bytes(whole.replace(b'"p2"', b'"p3"', 1).replace(b"payouts", b"payoutz", 1))
    bad = empty.json("signer", "verify", "--data", data)
    assert bad["sequence"] < 2


def test_a_signer_that_does_not_run_is_halted(empty: Shell, folder: Path) -> None:
    data = filled(folder)
    empty.ok("signer", "halt", "--data", data, "--reason", "a drill")
    empty.ok("signer", "halt", "--data", data, "--reason", "again")
    assert empty.json("signer", "verify", "--data", data)["halted"] == "a drill"
    for words in (("status",), ("unhalt", "--by", "ann", "--by", "ben")):
        ran = empty("signer", words[0], "--data", data, *words[1:])
        assert ran.code == 4, ran.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("status",), "name the signer"),
        (("halt", "--reason", "x", "--at", "unix:/s"), "name the signer"),
        (("verify", "--data", "/nowhere"), "no signer's log"),
        (("halt", "--data", "/nowhere", "--reason", "x"), "no signer's log"),
        (("list", "--keystore", "/nowhere/k"), "can't be read"),
        (("run", "--data", "d", "--keystore", "k", "--policy", "p", "--listen", "http://x"), "unix:PATH"),
    ],
)
def test_mistakes_are_explained(empty: Shell, words: tuple[Any, ...], said: str) -> None:
    ran = empty("signer", *words)
    assert ran.code in (1, 2, 4)
    assert said in ran.err


def test_every_command_has_an_example(empty: Shell) -> None:
    keys = ("create", "import", "list", "rotate", "approver-key", "approve")
    for command in (*keys, "run", "halt", "unhalt", "release", "log", "verify", "status"):
        assert f"bursar signer {command}" in empty.ok("signer", command, "--help")
