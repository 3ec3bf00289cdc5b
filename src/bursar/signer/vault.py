"""Encrypted files: a passphrase, a public header, and a secret that is worth nothing without both.

The key comes from the passphrase by scrypt, which costs an attacker memory for each guess. The secret is encrypted with
AES-256-GCM, and the header (its parameters and all that is public) is authenticated with it: a changed header opens
nothing. A file is written aside, synced and renamed, so that a crash leaves the old one or the new one. It is for its
owner alone: one that others may read is refused, because it must be assumed to have been copied.

Keys in memory are kept in bytearrays and overwritten after use where Python allows it. Libraries make copies that can't
be reached, so this shortens the time, and is no promise.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from bursar.ports import Files
from bursar.signer.errors import KeystoreRefused

SCRYPT_N: Final = 2**17  # 128 MiB with r = 8
SCRYPT_N_MAX: Final = 2**21  # or a forged file could make the process run out of memory
SCRYPT_R, SCRYPT_P = 8, 1
PASSPHRASE_BYTES_MIN: Final = 12
FILE_BYTES_MAX: Final = 1024 * 1024
OTHERS: Final = 0o077  # what a group and other users may do
ASIDE: Final = ".new"

Token = Callable[[], str]  # 32 unguessable hexadecimal digits: Ports.token


def wipe(secret: bytearray) -> None:
    """Overwrite it."""
    for index in range(len(secret)):
        secret[index] = 0


def check_passphrase(file: str, passphrase: bytearray) -> None:
    """Refuse one that can be guessed."""
    if len(passphrase) < PASSPHRASE_BYTES_MIN:
        raise KeystoreRefused(file, f"a passphrase needs at least {PASSPHRASE_BYTES_MIN} bytes")


def seal(
    public: dict[str, Any], secret: bytearray, passphrase: bytearray, token: Token, *, scrypt_n: int = SCRYPT_N
) -> bytes:
    """The contents of a file. `scrypt_n` is lower in tests alone."""
    header = {
        **public,
        "version": 1,
        "kdf": {"name": "scrypt", "n": scrypt_n, "r": SCRYPT_R, "p": SCRYPT_P, "salt": token() + token()},
        "cipher": {"name": "aes-256-gcm", "nonce": token()[:24]},
    }
    key = _derive(header["kdf"], passphrase)
    try:
        sealed = AESGCM(key).encrypt(bytes.fromhex(header["cipher"]["nonce"]), secret, _canonical(header))
    finally:
        wipe(key)
    return json.dumps({"header": header, "sealed": sealed.hex()}, indent=1).encode() + b"\n"


def read_header(files: Files, file: str, purpose: str) -> tuple[dict[str, Any], bytes]:
    """What is public in a file, and what is sealed. KeystoreRefused if it is not ours, or others may read it."""
    folder = file.rpartition("/")[0] or "."
    try:
        if files.mode(file) & OTHERS:
            raise KeystoreRefused(file, f"other users may read or change it: chmod 600 {file}")
        _check_folder(files, file, folder)
        if files.size(file) > FILE_BYTES_MAX:
            raise KeystoreRefused(file, "it is too large to be a keystore")
        read = files.read(file)
    except OSError as error:
        raise KeystoreRefused(file, f"it can't be read: {error.strerror or error}") from None
    try:
        found = json.loads(read)
        header, sealed = found["header"], bytes.fromhex(found["sealed"])
        known = header["version"] == 1 and header["purpose"] == purpose and header["kdf"]["name"] == "scrypt"
        _check_parameters(header["kdf"])
    except (ValueError, KeyError, TypeError) as error:
        raise KeystoreRefused(file, f"it is damaged, or no {purpose} of ours ({type(error).__name__})") from None
    if not known:
        raise KeystoreRefused(file, f"it is no {purpose} of version 1")
    return header, sealed


def unseal(
    file: str, header: dict[str, Any], sealed: bytes, passphrase: bytearray, *, scrypt_n: int = SCRYPT_N
) -> bytearray:
    """The secret. KeystoreRefused if the passphrase is wrong or the file was changed: nothing tells them apart."""
    if header["kdf"]["n"] < scrypt_n:
        raise KeystoreRefused(file, f"its passphrase is too cheap to guess: n is below {scrypt_n}")
    key = _derive(header["kdf"], passphrase)
    try:
        return bytearray(AESGCM(key).decrypt(bytes.fromhex(header["cipher"]["nonce"]), sealed, _canonical(header)))
    except (InvalidTag, ValueError, KeyError, TypeError):
        raise KeystoreRefused(file, "the passphrase is wrong, or the file was changed") from None
    finally:
        wipe(key)


def write(files: Files, file: str, contents: bytes) -> None:
    """Put a file in its place: a crash leaves the old one or the new one, never a part."""
    folder = file.rpartition("/")[0] or "."
    files.make_folder(folder)
    _check_folder(files, file, folder)
    made = files.create(file + ASIDE)
    try:
        made.write(contents)
        made.sync()
    finally:
        made.close()
    files.rename(file + ASIDE, file)
    files.sync_folder(folder)


def exists(files: Files, file: str) -> bool:
    """Whether there is such a file."""
    try:
        files.size(file)
    except FileNotFoundError:
        return False
    return True


def _check_folder(files: Files, file: str, folder: str) -> None:
    if files.mode(folder) & OTHERS:
        raise KeystoreRefused(file, f"other users may look into its folder: chmod 700 {folder}, or use one of its own")


def _check_parameters(kdf: dict[str, Any]) -> None:
    n, r, p = kdf["n"], kdf["r"], kdf["p"]
    if not (isinstance(n, int) and 1 < n <= SCRYPT_N_MAX and n & (n - 1) == 0 and (r, p) == (SCRYPT_R, SCRYPT_P)):
        raise ValueError("parameters of scrypt that we never write")


def _derive(kdf: dict[str, Any], passphrase: bytearray) -> bytearray:
    made = Scrypt(salt=bytes.fromhex(kdf["salt"]), length=32, n=kdf["n"], r=kdf["r"], p=kdf["p"])
    return bytearray(made.derive(bytes(passphrase)))


def _canonical(header: dict[str, Any]) -> bytes:
    return json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
