"""The keystore: one encrypted file that holds the secrets of a signer's wallets, each under a name.

A secret is a BIP-39 mnemonic, from which any number of keys come by BIP-32 paths, or one private key. Names,
addresses and derivation paths are public and stand in the header: they can be listed without the passphrase. All
secrets share one passphrase, so that `rotate` is one rename, and no crash leaves half of them under the old one.

Not here: encryption (`vault`), what a key may sign (`rules`).
"""

from __future__ import annotations

import hmac
import json
import re
from typing import Any, Final

import msgspec
from eth_account.hdaccount import key_from_seed
from eth_account.hdaccount.deterministic import Node, derive_child_key
from eth_account.hdaccount.mnemonic import Mnemonic

from bursar.ports import Files
from bursar.rails.derivation import ExtendedKey, fingerprint
from bursar.signer import vault
from bursar.signer.curve import compressed_key, evm_address, public_key, tron_address
from bursar.signer.errors import KeystoreRefused

PURPOSE: Final = "bursar keystore"
DEFAULT_PATH: Final = "m/44'/60'/0'/0/0"  # BIP-44: coin 60, first account, first address
TRON_PATHS: Final = "m/44'/195'/"  # how the paths of TRON begin: their addresses are listed as TRON writes them
PATHS_MAX: Final = 256
INDEX_MAX: Final = 2**31 - 1  # BIP-32: those above are the hardened ones, written with '
NAME: Final = re.compile(r"[a-z0-9](?:[a-z0-9_-]{0,62}[a-z0-9])?")
PATH: Final = re.compile(r"m(?:/[0-9]{1,10}'?){1,10}")
_KEY: Final = re.compile(r"(?:0x)?[0-9a-fA-F]{64}")


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """What is public about one secret."""

    name: str
    kind: str  # mnemonic or key
    addresses: dict[str, str]  # derivation path → address; a private key has the path ""


class Keystore:
    """An opened keystore. Its secrets are in memory until `wipe`."""

    def __init__(self, file: str, secrets: dict[str, bytearray], listed: dict[str, Listed]) -> None:
        self.file = file
        self.listed = listed
        self._secrets = secrets

    def __repr__(self) -> str:
        return f"Keystore({self.file!r}, {sorted(self.listed)})"

    def private_key(self, name: str, path: str) -> bytearray:
        """The private key of a secret at a derivation path; the caller wipes it."""
        secret = self._secret(name, path)
        return derive(secret, path) if path else bytearray.fromhex(secret.decode())

    def extended_key(self, name: str, path: str) -> ExtendedKey:
        """The extended public key of a mnemonic at a derivation path."""
        return extended_key(self._secret(name, path), path)

    def _secret(self, name: str, path: str) -> bytearray:
        if name not in self._secrets:
            raise KeystoreRefused(self.file, f"it has no key {name!r}")
        kind = self.listed[name].kind
        if (kind == "key") != (path == ""):
            raise KeystoreRefused(self.file, f"{name!r} is a {kind}: only a mnemonic has derivation paths")
        return self._secrets[name]

    def wipe(self) -> None:
        """Overwrite all secrets."""
        for secret in self._secrets.values():
            vault.wipe(secret)
        self._secrets.clear()

    def add(self, name: str, secret: bytearray, paths: tuple[str, ...]) -> Listed:
        """One more secret: a mnemonic or a private key, whichever it is. Nothing is written yet."""
        if not NAME.fullmatch(name):
            raise KeystoreRefused(self.file, f"{name!r} is no name: lower-case letters, digits, - and _, at most 64")
        if name in self._secrets:
            raise KeystoreRefused(self.file, f"it has a key {name!r} already; a key is never replaced")
        text = " ".join(secret.decode().split())
        kind = "key" if _KEY.fullmatch(text) else "mnemonic"
        if kind == "mnemonic" and not is_mnemonic(text):
            raise KeystoreRefused(self.file, "that is neither a BIP-39 mnemonic nor a private key of 64 digits")
        self._secrets[name] = bytearray((text.removeprefix("0x") if kind == "key" else text).encode())
        self.listed[name] = Listed(name=name, kind=kind, addresses={})
        try:
            for path in ("",) if kind == "key" else paths or (DEFAULT_PATH,):
                self._show(name, path)
        except BaseException:  # taken back whole
            vault.wipe(self._secrets.pop(name))
            del self.listed[name]
            raise
        return self.listed[name]

    def _show(self, name: str, path: str) -> None:
        """List the address of a path."""

        listed = self.listed[name]
        if len(listed.addresses) >= PATHS_MAX:
            raise KeystoreRefused(self.file, f"{name!r} lists {PATHS_MAX} addresses already")
        secret = self.private_key(name, path)
        try:
            written = tron_address if path.startswith(TRON_PATHS) else evm_address
            listed.addresses[path] = written(public_key(secret))
        except ValueError:
            raise KeystoreRefused(self.file, "that number is no private key of the curve") from None
        finally:
            vault.wipe(secret)

    def save(self, files: Files, passphrase: bytearray, token: vault.Token, *, scrypt_n: int = vault.SCRYPT_N) -> None:
        """Write it under this passphrase, crash-safe: the old file or the new one."""
        vault.check_passphrase(self.file, passphrase)
        public = {"purpose": PURPOSE, "keys": [msgspec.to_builtins(listed) for listed in self.listed.values()]}
        secret = bytearray(json.dumps({name: text.decode() for name, text in self._secrets.items()}).encode())
        try:
            vault.write(files, self.file, vault.seal(public, secret, passphrase, token, scrypt_n=scrypt_n))
        finally:
            vault.wipe(secret)


def open_keystore(files: Files, file: str, passphrase: bytearray, *, scrypt_n: int = vault.SCRYPT_N) -> Keystore:
    """Decrypt a keystore. KeystoreRefused if it can't be."""
    header, sealed = vault.read_header(files, file, PURPOSE)
    secret = vault.unseal(file, header, sealed, passphrase, scrypt_n=scrypt_n)
    try:
        secrets = {name: bytearray(text.encode()) for name, text in json.loads(secret.decode()).items()}
    finally:
        vault.wipe(secret)
    return Keystore(file, secrets, {listed.name: listed for listed in _listed(file, header)})


def list_keys(files: Files, file: str) -> list[Listed]:
    """Names, addresses and paths; needs no passphrase, and is not authenticated without one."""
    return _listed(file, vault.read_header(files, file, PURPOSE)[0])


def rotate(
    files: Files,
    file: str,
    old: bytearray,
    new: bytearray,
    token: vault.Token,
    *,
    scrypt_n: int = vault.SCRYPT_N,
) -> None:
    """Encrypt a keystore under another passphrase."""
    keystore = open_keystore(files, file, old, scrypt_n=scrypt_n)
    try:
        keystore.save(files, new, token, scrypt_n=scrypt_n)
    finally:
        keystore.wipe()


def new_mnemonic(token: vault.Token) -> bytearray:
    """24 words, of 256 bits."""
    return bytearray(Mnemonic().to_mnemonic(bytes.fromhex(token() + token())).encode())


def new_private_key(token: vault.Token) -> bytearray:
    """A private key of the curve; all but one in 2^128 numbers are."""
    return bytearray((token() + token()).encode())


def is_mnemonic(text: str) -> bool:
    """Whether these are words of BIP-39 with a right checksum."""
    return len(text.split()) in (12, 15, 18, 21, 24) and bool(Mnemonic().is_mnemonic_valid(text))


def derive(mnemonic: bytearray, path: str) -> bytearray:
    """The private key of a mnemonic (without a BIP-39 passphrase) at a BIP-32 path."""
    _check_path(path)
    return bytearray(key_from_seed(Mnemonic.to_seed(mnemonic.decode(), ""), path))


def extended_key(mnemonic: bytearray, path: str) -> ExtendedKey:
    """The extended public key of a mnemonic at a BIP-32 path: its private key, and the one above, are made for that."""
    _check_path(path)
    made = hmac.digest(b"Bitcoin seed", Mnemonic.to_seed(mnemonic.decode(), ""), "sha512")
    key, chain_code, above, number, parts = made[:32], made[32:], b"", 0, path.split("/")[1:]
    for node in map(Node.decode, parts):
        above, number = key, int.from_bytes(node.serialize(), "big")
        key, chain_code = derive_child_key(key, chain_code, node)
    parent, point = (compressed_key(bytearray(each)) for each in (above, key))
    return ExtendedKey(len(parts), fingerprint(parent), number, chain_code, point)


def _check_path(path: str) -> None:
    indexes = [int(part.rstrip("'")) for part in path.split("/")[1:]] if PATH.fullmatch(path) else [INDEX_MAX + 1]
    if max(indexes) > INDEX_MAX:
        raise KeystoreRefused(path, f"that is no derivation path; write {DEFAULT_PATH}")


def _listed(file: str, header: dict[str, Any]) -> list[Listed]:
    try:
        return msgspec.convert(header["keys"], list[Listed])
    except (msgspec.ValidationError, KeyError) as error:
        raise KeystoreRefused(file, f"its list of keys is damaged ({type(error).__name__})") from None
