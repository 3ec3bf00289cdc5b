"""Addresses for deposits: BIP-32's own vectors, and every address against a private derivation by another library."""

from __future__ import annotations

import dataclasses
import hmac
import re

import pytest
from coincurve import PrivateKey
from eth_account import Account
from eth_account.hdaccount import key_from_seed
from eth_account.hdaccount.deterministic import HDPath, derive_child_key
from hypothesis import given, settings
from hypothesis import strategies as st

from bursar.flows.transfers.checks import USER_MAX as LEDGER_USER_MAX
from bursar.rails.base58 import payload_of, text_of
from bursar.rails.derivation import (
    HARDENED,
    USER_MAX,
    VERSION,
    ExtendedKey,
    deposit_address,
    fingerprint,
    user_path,
)
from bursar.rails.tron.addresses import bytes_of

SEED = b"\x5a" * 64
BASE = "m/44'/60'/1'"
MASTER = (
    "xpub661MyMwAqRbcFW31YEwpkMuc5THy2PSt5bDMsktWQcFF8syAmRUapSCGu8ED9W6oDMSgv6Zz8idoc4a6mr8BDzTJY47LJhkJ8UB7WEGuduB"
)

# Parent, place and child of every step of BIP-32's test vectors that needs no private key.
STEPS = [
    (
        "xpub68Gmy5EdvgibQVfPdqkBBCHxA5htiqg55crXYuXoQRKfDBFA1WEjWgP6LHhwBZeNK1VTsfTFUHCdrfp1bgwQ9xv5ski8PX9rL2dZXvgGDnw",
        1,
        "xpub6ASuArnXKPbfEwhqN6e3mwBcDTgzisQN1wXN9BJcM47sSikHjJf3UFHKkNAWbWMiGj7Wf5uMash7SyYq527Hqck2AxYysAA7xmALppuCkwQ",
    ),
    (
        "xpub6D4BDPcP2GT577Vvch3R8wDkScZWzQzMMUm3PWbmWvVJrZwQY4VUNgqFJPMM3No2dFDFGTsxxpG5uJh7n7epu4trkrX7x7DogT5Uv6fcLW5",
        2,
        "xpub6FHa3pjLCk84BayeJxFW2SP4XRrFd1JYnxeLeU8EqN3vDfZmbqBqaGJAyiLjTAwm6ZLRQUMv1ZACTj37sR62cfN7fe5JnJ7dh8zL4fiyLHV",
    ),
    (
        "xpub6FHa3pjLCk84BayeJxFW2SP4XRrFd1JYnxeLeU8EqN3vDfZmbqBqaGJAyiLjTAwm6ZLRQUMv1ZACTj37sR62cfN7fe5JnJ7dh8zL4fiyLHV",
        1_000_000_000,
        "xpub6H1LXWLaKsWFhvm6RVpEL9P4KfRZSW7abD2ttkWP3SSQvnyA8FSVqNTEcYFgJS2UaFcxupHiYkro49S8yGasTvXEYBVPamhGW6cFJodrTHy",
    ),
    (
        MASTER,
        0,
        "xpub69H7F5d8KSRgmmdJg2KhpAK8SR3DjMwAdkxj3ZuxV27CprR9LgpeyGmXUbC6wb7ERfvrnKZjXoUmmDznezpbZb7ap6r1D3tgFxHmwMkQTPH",
    ),
    (
        "xpub6ASAVgeehLbnwdqV6UKMHVzgqAG8Gr6riv3Fxxpj8ksbH9ebxaEyBLZ85ySDhKiLDBrQSARLq1uNRts8RuJiHjaDMBU4Zn9h8LZNnBC5y4a",
        1,
        "xpub6DF8uhdarytz3FWdA8TvFSvvAh8dP3283MY7p2V4SeE2wyWmG5mg5EwVvmdMVCQcoNJxGoWaU9DCWh89LojfZ537wTfunKau47EL2dhHKon",
    ),
    (
        "xpub6ERApfZwUNrhLCkDtcHTcxd75RbzS1ed54G1LkBUHQVHQKqhMkhgbmJbZRkrgZw4koxb5JaHWkY4ALHY2grBGRjaDMzQLcgJvLJuZZvRcEL",
        2,
        "xpub6FnCn6nSzZAw5Tw7cgR9bi15UV96gLZhjDstkXXxvCLsUXBGXPdSnLFbdpq8p9HmGsApME5hQTZ3emM2rnY5agb9rXpVGyy3bdW6EEgAtqt",
    ),
]
# Others of its vectors, with leading zeros in keys.
KEYS = [
    "xpub661MyMwAqRbcEZVB4dScxMAdx6d4nFc9nvyvH3v4gJL378CSRZiYmhRoP7mBy6gSPSCYk6SzXPTf3ND1cZAceL7SfJ1Z3GC8vBgp2epUt13",
    "xpub68NZiKmJWnxxS6aaHmn81bvJeTESw724CRDs6HbuccFQN9Ku14VQrADWgqbhhTHBaohPX4CjNLf9fq9MYo6oDaPPLPxSb7gwQN3ih19Zm4Y",
]
# Its test vector 5: what is no key.
INVALID = {
    "pubkey version, private key": (
        "xpub661MyMwAqRbcEYS8w7XLSVeEsBXy79zSzH1J8vCdxAZningWLdN3zgtU6LBpB85b3D2yc8sfvZU521AAwdZafEz7mnzBBsz4wKY5fTtTQBm",
        "no point of the curve",
    ),
    "prefix 04": (
        "xpub661MyMwAqRbcEYS8w7XLSVeEsBXy79zSzH1J8vCdxAZningWLdN3zgtU6Txnt3siSujt9RCVYsx4qHZGc62TG4McvMGcAUjeuwZdduYEvFn",
        "no point of the curve",
    ),
    "prefix 01": (
        "xpub661MyMwAqRbcEYS8w7XLSVeEsBXy79zSzH1J8vCdxAZningWLdN3zgtU6N8ZMMXctdiCjxTNq964yKkwrkBJJwpzZS4HS2fxvyYUA4q2Xe4",
        "no point of the curve",
    ),
    "not on the curve": (
        "xpub661MyMwAqRbcEYS8w7XLSVeEsBXy79zSzH1J8vCdxAZningWLdN3zgtU6Q5JXayek4PRsn35jii4veMimro1xefsM58PgBMrvdYre8QyULY",
        "no point of the curve",
    ),
    "depth 0 with a parent": (
        "xpub661no6RGEX3uJkY4bNnPcw4URcQTrSibUZ4NqJEw5eBkv7ovTwgiT91XX27VbEXGENhYRCf7hyEbWrR3FewATdCEebj6znwMfQkhRYHRLpJ",
        "has a parent",
    ),
    "depth 0 with a number": (
        "xpub661MyMwAuDcm6CRQ5N4qiHKrJ39Xe1R1NyfouMKTTWcguwVcfrZJaNvhpebzGerh7gucBvzEQWRugZDuDXjNDRmXzSZe4c7mnTK97pTvGS8",
        "has a parent",
    ),
    "unknown version": (
        "DMwo58pR1QLEFihHiXPVykYB6fJmsTeHvyTp7hRThAtCX8CvYzgPcn8XnmdfHGMQzT7ayAmfo4z3gY5KfbrZWZ6St24UVf2Qgo6oujFktLHdHY4",
        "begin with xpub",
    ),
    "mistyped": (MASTER[:-1] + "C", "checksum"),
    "a character that base58 lacks": (MASTER[:-1] + "0", "'0' is no character of base58"),
    "too short": (MASTER[:-1], "checksum"),
    "too long": (MASTER + "1", "more than 82 bytes"),
    "far too long": (MASTER * 1_000, "more than 82 bytes"),
    "another size with a right checksum": (text_of(VERSION + bytes(73)), "checksum|begin with xpub"),
    "nothing": ("", "begin with xpub"),
    "a line break behind it": (MASTER + "\n", "no character of base58"),
    "the public key of a test network": (
        text_of(bytes.fromhex("043587CF") + payload_of(MASTER, 78)[4:]),
        "begin with xpub",
    ),
}


def private_derivation(path: str) -> ExtendedKey:
    """The extended public key of a path, made of private keys by eth_account alone."""
    made = hmac.digest(b"Bitcoin seed", SEED, "sha512")
    key, code, parent, number = made[:32], made[32:], bytes(4), 0
    nodes = HDPath(path)._path
    for node in nodes:
        parent = fingerprint(PrivateKey(key).public_key.format())
        key, code = derive_child_key(key, code, node)
        number = int.from_bytes(node.serialize(), "big")
    return ExtendedKey(len(nodes), parent, number, code, PrivateKey(key).public_key.format())


ACCOUNT = private_derivation(BASE)


@pytest.mark.parametrize(("parent", "place", "child"), STEPS)
def test_children_are_those_of_bip32(parent: str, place: int, child: str) -> None:
    found = ExtendedKey.parse(parent).child(place)
    assert found.text == child
    assert found == ExtendedKey.parse(child)


@pytest.mark.parametrize("text", [*KEYS, *(key for parent, _, child in STEPS for key in (parent, child))])
def test_a_key_is_written_as_it_was_read(text: str) -> None:
    assert ExtendedKey.parse(text).text == text


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_key_is_refused_with_the_reason(name: str) -> None:
    text, why = INVALID[name]
    with pytest.raises(ValueError, match=why):
        ExtendedKey.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "xprv9s21ZrQH143K3QTDL4LXw2F7HEK3wJUD2nW2nRk4stbPy6cq3jPPqjiChkVvvNKmPGJxWUtg6LnF5kejMRNNU3TGtRBeJgk33yuGBxrMPHi",
        " xprv9s21ZrQH143K3QTDL4LXw2F7HEK3wJUD2nW2nRk4stbPy6cq3jPPqjiChkVvvNKm",  # in part: it is as bad
        "tprv8ZgxMBicQKsPf2qfrEygW6fdYseJDDrVnDv26PH5BHdvSuG6ecCbHqLVof9yZcMoM31z9ur3tTYbSnr1WBqbGX97CbXcmp5H6qeMpyvx35B",
    ],
)
def test_a_private_key_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="never give one") as refused:
        ExtendedKey.parse(text)
    assert not re.search("[1-9A-HJ-NP-Za-km-z]{12}", str(refused.value))


@settings(max_examples=40, deadline=None)
@given(st.one_of(st.integers(1, USER_MAX), st.integers(1, 10_000)))
def test_every_address_is_that_of_the_key_which_the_signer_derives(user: int) -> None:
    """Another implementation derives the private key from the seed, and says which address it has."""
    private = key_from_seed(SEED, f"{BASE}/{user_path(user)}")
    address = Account.from_key(private).address
    assert deposit_address("evm", ACCOUNT, user) == address
    assert bytes_of(deposit_address("tron", ACCOUNT, user))[1:].hex() == address[2:].lower()
    assert ACCOUNT.of_user(user) == private_derivation(f"{BASE}/{user_path(user)}")
    assert ACCOUNT.of_user(user).public_key == PrivateKey(private).public_key.format(compressed=False)


def test_addresses_never_change() -> None:
    """Money waits at them: not even a new version may give a user another address."""
    key = ExtendedKey.parse(MASTER)
    assert deposit_address("evm", key, 1001) == "0x463F41b3503af88d17C535eecBb27Db8F6A25865"
    assert deposit_address("tron", key, 1001) == "TGNe5dpikSioVnkoV4gkMZXaJ8sTkuvLar"


@pytest.mark.parametrize(
    ("user", "path"),
    [
        (1, "0/1"),
        (1001, "0/1001"),
        (HARDENED - 1, "0/2147483647"),
        (HARDENED, "1/0"),
        (HARDENED + 1, "1/1"),
        (USER_MAX, "2147483647/2147483647"),
    ],
)
def test_the_path_of_a_user(user: int, path: str) -> None:
    assert user_path(user) == path


@pytest.mark.parametrize("user", [0, -1, USER_MAX + 1, LEDGER_USER_MAX, True])
def test_a_number_that_no_user_has_is_refused(user: int) -> None:
    """The ledger lets numbers through of which 62 bits are no more enough: they have no address."""
    for ask in (lambda: user_path(user), lambda: ACCOUNT.of_user(user), lambda: deposit_address("evm", ACCOUNT, user)):
        with pytest.raises(ValueError, match="is no user"):
            ask()


@pytest.mark.parametrize("index", [-1, HARDENED, 2**32])
def test_a_public_key_derives_no_hardened_child(index: int) -> None:
    with pytest.raises(ValueError, match="no place below a public key"):
        ACCOUNT.child(index)


def test_there_are_255_levels() -> None:
    deepest = dataclasses.replace(ACCOUNT, depth=255)
    with pytest.raises(ValueError, match="255 levels"):
        deepest.child(0)


@pytest.mark.parametrize("tweak", [b"\xff" * 32, None])
def test_a_place_without_a_key_is_refused(monkeypatch: pytest.MonkeyPatch, tweak: bytes | None) -> None:
    """One in 2^127: the number is above the curve's order, or the sum is no point. The next place is not taken."""
    order = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141
    minus_one = dataclasses.replace(ACCOUNT, point=PrivateKey((order - 1).to_bytes(32, "big")).public_key.format())
    made = (tweak or (1).to_bytes(32, "big")) + bytes(32)  # 1 added to -1: infinity
    monkeypatch.setattr("bursar.rails.derivation.hmac.digest", lambda *_: made)
    with pytest.raises(ValueError, match="no key at place 7"):
        minus_one.child(7)


def test_a_kind_of_chain_that_is_not_known_is_refused_unless_its_writer_is_given() -> None:
    with pytest.raises(ValueError, match="kind 'expiry': known are evm, tron"):
        deposit_address("expiry", ACCOUNT, 7)
    assert deposit_address("expiry", ACCOUNT, 7, lambda key: key.hex()) == ACCOUNT.of_user(7).public_key.hex()
