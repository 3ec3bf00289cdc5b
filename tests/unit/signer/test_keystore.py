"""The keystore: keys come back from the right passphrase alone, and from a file that is whole and private."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path

import pytest
from eth_account import Account
from eth_account.hdaccount import key_from_seed
from eth_account.hdaccount.mnemonic import Mnemonic
from tests.signing import payment
from tests.unit.rails.desk import memory_files

from bursar.ports import SystemPorts
from bursar.signer import approvals, keystore, vault
from bursar.signer.curve import evm_address, public_key, sign_digest
from bursar.signer.errors import KeystoreRefused
from bursar.signer.keys import KeystoreKeys
from bursar.signer.keystore import Keystore, derive, list_keys, new_mnemonic, open_keystore, rotate
from bursar.signer.wallets import Wallet

WEAK = 2  # scrypt in no time: these tests are not about its cost
PASSPHRASE, OTHER = bytearray(b"correct horse battery"), bytearray(b"another passphrase")
WORDS = b"abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon about"
FILES = SystemPorts().files()
TOKEN = SystemPorts().token


@pytest.fixture
def file(tmp_path: Path) -> str:
    return f"{tmp_path}/keys/keystore.json"


def made(file: str) -> Keystore:
    store = Keystore(file, {}, {})
    store.add("main", bytearray(WORDS), ("m/44'/60'/0'/0/0", "m/44'/60'/0'/0/1"))
    store.add("raw", bytearray(b"0x" + b"11" * 32), ())
    store.save(FILES, PASSPHRASE, TOKEN, scrypt_n=WEAK)
    return store


def test_keys_survive_in_the_file_and_in_nothing_else(file: str) -> None:
    made(file)
    text = Path(file).read_text()
    assert "abandon" not in text
    assert "11" * 32 not in text
    assert Path(file).stat().st_mode & 0o777 == 0o600
    assert Path(file).parent.stat().st_mode & 0o777 == 0o700
    again = open_keystore(FILES, file, PASSPHRASE, scrypt_n=WEAK)
    assert again.private_key("raw", "") == bytearray(b"\x11" * 32)
    assert again.private_key("main", "m/44'/60'/0'/0/1") == derive(bytearray(WORDS), "m/44'/60'/0'/0/1")


def test_the_list_needs_no_passphrase_and_has_no_secret(file: str) -> None:
    made(file)
    main, raw = list_keys(FILES, file)
    # The published address of these twelve words.
    assert main.addresses["m/44'/60'/0'/0/0"] == "0x9858EfFD232B4033E47d90003D41EC34EcaEda94"
    assert list(main.addresses) == ["m/44'/60'/0'/0/0", "m/44'/60'/0'/0/1"]
    assert list(raw.addresses) == [""]


@pytest.mark.parametrize("change", ["cut", "flip", "header", "empty", "other"])
def test_a_damaged_file_opens_nothing(file: str, change: str) -> None:
    """Truncated anywhere, a flipped bit anywhere that counts, a changed header: refused, with no word of a secret."""
    made(file)
    data = Path(file).read_bytes()
    found = json.loads(data)
    match change:
        case "cut":
            variants = [data[:n] for n in range(1, len(data) - 2, 37)]
        case "flip":
            sealed = bytes.fromhex(found["sealed"])
            flips = [bytes(b ^ (i == at) for i, b in enumerate(sealed)) for at in range(0, len(sealed), 11)]
            variants = [json.dumps(found | {"sealed": flip.hex()}).encode() for flip in flips]
        case "header":
            found["header"]["keys"][0]["addresses"]["m/44'/60'/0'/0/0"] = "0x" + "00" * 20
            variants = [json.dumps(found).encode()]
        case "empty":
            variants = [b"", b"{}", b"[]", b"null"]
        case _:
            variants = [json.dumps(found | {"header": found["header"] | {"purpose": "bursar approver key"}}).encode()]
    for variant in variants:
        Path(file).write_bytes(variant)
        with pytest.raises(KeystoreRefused) as refused:
            open_keystore(FILES, file, PASSPHRASE, scrypt_n=WEAK)
        assert "abandon" not in str(refused.value)


def test_a_wrong_passphrase_opens_nothing(file: str) -> None:
    made(file)
    with pytest.raises(KeystoreRefused, match="passphrase is wrong"):
        open_keystore(FILES, file, OTHER, scrypt_n=WEAK)


@pytest.mark.parametrize(("where", "mode"), [("file", 0o640), ("file", 0o604), ("folder", 0o750), ("folder", 0o705)])
def test_a_file_that_others_may_read_is_refused(file: str, where: str, mode: int) -> None:
    made(file)
    (Path(file) if where == "file" else Path(file).parent).chmod(mode)
    with pytest.raises(KeystoreRefused, match="chmod"):
        open_keystore(FILES, file, PASSPHRASE, scrypt_n=WEAK)


def test_rotation_leaves_the_keys_and_changes_the_passphrase(file: str) -> None:
    made(file)
    rotate(FILES, file, PASSPHRASE, OTHER, TOKEN, scrypt_n=WEAK)
    with pytest.raises(KeystoreRefused):
        open_keystore(FILES, file, PASSPHRASE, scrypt_n=WEAK)
    assert open_keystore(FILES, file, OTHER, scrypt_n=WEAK).private_key("raw", "") == bytearray(b"\x11" * 32)


def test_a_crash_while_rotating_leaves_the_old_file_or_the_new_one() -> None:
    """Power cut before every file operation of a rotation: one of the two passphrases opens all keys."""
    both = set()
    for cut_at in range(1, 7):
        files = memory_files()
        state = files._state
        numbers = count(1)
        token = lambda: f"{next(numbers):032x}"  # noqa: E731, B023
        store = Keystore("/keys/keystore.json", {}, {})
        store.add("raw", bytearray(b"11" * 32), ())
        store.save(files, PASSPHRASE, token, scrypt_n=WEAK)
        done = state.operations
        fail = PowerCut(state, done + cut_at)
        try:
            fail.arm(files)
            rotate(files, store.file, PASSPHRASE, OTHER, token, scrypt_n=WEAK)
        except OSError:
            pass
        fail.disarm(files)
        state.power_cut()
        opened = []
        for passphrase in (PASSPHRASE, OTHER):
            try:
                opened.append(open_keystore(files, store.file, passphrase, scrypt_n=WEAK))
            except KeystoreRefused:
                continue
        assert len(opened) == 1
        assert opened[0].private_key("raw", "") == bytearray(b"\x11" * 32)
        both.add(cut_at)
    assert len(both) == 6


class PowerCut:
    """Fails the n-th operation of a disk in memory, and all after it."""

    def __init__(self, state: object, at: int) -> None:
        self.at = at
        self.state = state

    def arm(self, files: object) -> None:
        def dies() -> bool:
            self.state.operations += 1  # type: ignore[attr-defined]
            if self.state.operations >= self.at:  # type: ignore[attr-defined]
                raise OSError("the power is gone")
            return False

        self.state.cuts_now = dies  # type: ignore[attr-defined]

    def disarm(self, files: object) -> None:
        del self.state.cuts_now  # type: ignore[attr-defined]


def test_cheap_passphrases_are_refused(file: str) -> None:
    """By default scrypt costs 128 MiB; a file that costs less is refused, as is a short passphrase."""
    made(file)
    with pytest.raises(KeystoreRefused, match="too cheap"):
        open_keystore(FILES, file, PASSPHRASE)
    with pytest.raises(KeystoreRefused, match="at least 12"):
        Keystore(file, {}, {}).save(FILES, bytearray(b"short"), TOKEN, scrypt_n=WEAK)
    assert vault.SCRYPT_N >= 2**17


def test_the_default_cost_works(file: str) -> None:
    store = Keystore(file, {}, {})
    store.add("raw", bytearray(b"11" * 32), ())
    store.save(FILES, PASSPHRASE, TOKEN)
    assert open_keystore(FILES, file, PASSPHRASE).private_key("raw", "") == bytearray(b"\x11" * 32)


@pytest.mark.parametrize(
    ("name", "secret", "said"),
    [
        ("main", WORDS, "already"),
        ("Main", WORDS, "no name"),
        ("new", WORDS.replace(b"about", b"abandon"), "neither"),
        ("new", b"one two three", "neither"),
        ("new", b"00" * 32, "no private key"),
        ("new", b"ff" * 32, "no private key"),
    ],
)
def test_what_is_no_key_is_refused(file: str, name: str, secret: bytes, said: str) -> None:
    store = made(file)
    with pytest.raises(KeystoreRefused, match=said):
        store.add(name, bytearray(secret), ())
    assert set(store.listed) == {"main", "raw"}


def test_no_secret_is_in_a_repr(file: str) -> None:
    store = made(file)
    assert "abandon" not in repr(store) + repr(KeystoreKeys(store)) + repr(vars(store)["listed"])
    assert "11" * 16 not in repr(KeystoreKeys(store))


def test_wiping_leaves_nothing(file: str) -> None:
    store = made(file)
    keys = KeystoreKeys(store)
    wallet = Wallet(name="w", chain="bsc", address="", key="raw", path="")
    keys.address(wallet)
    kept = keys._private["raw", ""]
    keys.wipe()
    assert kept == bytearray(32)
    with pytest.raises(KeystoreRefused):
        store.private_key("raw", "")


# --- vectors of the standards


@pytest.mark.parametrize(
    ("entropy", "words", "seed"),
    [
        (
            "00" * 16,
            "abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon abandon about",
            "c55257c360c07c72029aebc1b53c05ed0362ada38ead3e3e9efa3708e53495531f09a6987599d18264c1e1c92f2cf141630c7a3c4a"
            "b7c81b2f001698e7463b04",
        ),
        (
            "7f" * 16,
            "legal winner thank year wave sausage worth useful legal winner thank yellow",
            "2e8905819b8723fe2c1d161860e5ee1830318dbf49a83bd451cfb8440c28bd6fa457fe1296106559a3c80937a1c1069be3a3a5bd38"
            "1ee6260e8d9739fce1f607",
        ),
    ],
)
def test_the_vectors_of_bip39(entropy: str, words: str, seed: str) -> None:
    """The published vectors use the passphrase TREZOR; our own keys use none."""
    assert Mnemonic().to_mnemonic(bytes.fromhex(entropy)) == words
    assert Mnemonic.to_seed(words, "TREZOR").hex() == seed
    assert keystore.is_mnemonic(words)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("m/0'", "edb2e14f9ee77d26dd93b4ecede8d16ed408ce149b6cd80b0715a2d911a0afea"),
        ("m/0'/1", "3c6cb8d0f6a264c91ea8b5030fadaa8e538b020f0a387421a12de9319dc93368"),
        ("m/0'/1/2'", "cbce0d719ecf7431d88e6a89fa1483e02e35092af60c042b1df2ff59fa424dca"),
        ("m/0'/1/2'/2", "0f479245fb19a38a1954c5c7c0ebab2f9bdfd96a17563ef28a6a4b1a2a764ef4"),
        ("m/0'/1/2'/2/1000000000", "471b76e389e528d6de6d816857e012c5455051cad6660850e58372a6c3e6e7c8"),
    ],
)
def test_the_first_vector_of_bip32(path: str, key: str) -> None:
    seed = bytes.fromhex("000102030405060708090a0b0c0d0e0f")
    assert key_from_seed(seed, path).hex() == key


SEED_2 = (
    "fffcf9f6f3f0edeae7e4e1dedbd8d5d2cfccc9c6c3c0bdbab7b4b1aeaba8a5a29f9c999693908d8a8784817e7b7875726f6c696663605d5a575451"
    "4e4b484542"
)


@pytest.mark.parametrize(
    ("seed", "path", "public"),
    [
        (
            "000102030405060708090a0b0c0d0e0f",
            "m/0'",
            "xpub68Gmy5EdvgibQVfPdqkBBCHxA5htiqg55crXYuXoQRKfDBFA1WEjWgP6LHhwBZeNK1VTsfTFUHCdrfp1bgwQ9xv5ski8PX9rL2dZXvgGDnw",
        ),
        (
            "000102030405060708090a0b0c0d0e0f",
            "m/0'/1/2'",
            "xpub6D4BDPcP2GT577Vvch3R8wDkScZWzQzMMUm3PWbmWvVJrZwQY4VUNgqFJPMM3No2dFDFGTsxxpG5uJh7n7epu4trkrX7x7DogT5Uv6fcLW5",
        ),
        (
            SEED_2,
            "m/0/2147483647'",
            "xpub6ASAVgeehLbnwdqV6UKMHVzgqAG8Gr6riv3Fxxpj8ksbH9ebxaEyBLZ85ySDhKiLDBrQSARLq1uNRts8RuJiHjaDMBU4Zn9h8LZNnBC5y4a",
        ),
        (
            SEED_2,
            "m/0/2147483647'/1/2147483646'",
            "xpub6ERApfZwUNrhLCkDtcHTcxd75RbzS1ed54G1LkBUHQVHQKqhMkhgbmJbZRkrgZw4koxb5JaHWkY4ALHY2grBGRjaDMzQLcgJvLJuZZvRcEL",
        ),
    ],
)
def test_extended_public_keys_are_those_of_bip32(
    monkeypatch: pytest.MonkeyPatch, seed: str, path: str, public: str
) -> None:
    """With depth, place and the parent's fingerprint: two programs must write one key in one way."""
    monkeypatch.setattr(Mnemonic, "to_seed", lambda *_: bytes.fromhex(seed))
    assert keystore.extended_key(bytearray(WORDS), path).text == public


def test_bip44_addresses_are_those_of_other_wallets() -> None:
    """The same words in another implementation give the same address and key."""
    Account.enable_unaudited_hdwallet_features()
    for index in range(3):
        path = f"m/44'/60'/0'/0/{index}"
        other = Account.from_mnemonic(WORDS.decode(), account_path=path)
        key = derive(bytearray(WORDS), path)
        assert bytes(key) == bytes(other.key)
        assert evm_address(public_key(key)) == other.address


@pytest.mark.parametrize("path", ["", "m", "44/60", "m/x", "m/0//1", "m/-1", "m/0h", "m/99999999999", "m/2147483648"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(KeystoreRefused):
        derive(bytearray(WORDS), path)


def test_new_words_are_words_and_never_the_same() -> None:
    one, other = new_mnemonic(TOKEN).decode(), new_mnemonic(TOKEN).decode()
    assert one != other
    assert len(one.split()) == 24
    assert keystore.is_mnemonic(one)


def test_signatures_are_deterministic_and_low() -> None:
    """RFC 6979: the same digest gives the same signature. s in the lower half: no twin exists."""
    key, half = bytearray(b"\x11" * 32), 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141 // 2
    for digest in (bytes([n]) * 32 for n in range(20)):
        signature = sign_digest(key, digest)
        assert sign_digest(key, digest) == signature
        assert len(signature) == 65
        assert int.from_bytes(signature[32:64], "big") <= half
        assert signature[64] in (0, 1)


# --- approvers' keys


def test_an_approver_signs_with_a_key_of_his_own(tmp_path: Path) -> None:
    file = f"{tmp_path}/ann/ann.key"
    public = approvals.create_key(FILES, file, "Ann", PASSPHRASE, TOKEN, scrypt_n=WEAK)
    asked = payment()
    signed = approvals.approve(FILES, file, PASSPHRASE, asked, scrypt_n=WEAK)
    assert signed.approver == "ann"
    assert approvals.people_who_approve({"ann": public}, [signed], asked.canonical()) == ["ann"]
    assert approvals.people_who_approve({"ann": public}, [signed], payment("p2").canonical()) == []
    with pytest.raises(KeystoreRefused, match="never replaced"):
        approvals.create_key(FILES, file, "ann", PASSPHRASE, TOKEN, scrypt_n=WEAK)
    with pytest.raises(KeystoreRefused, match="passphrase is wrong"):
        approvals.approve(FILES, file, OTHER, asked, scrypt_n=WEAK)
    assert public in Path(file).read_text()
