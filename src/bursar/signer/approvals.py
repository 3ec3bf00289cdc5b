"""Approvals: people sign what they approve with keys of their own, and the signer verifies it (W32).

An approver's key is Ed25519. Its private half is made on the approver's own machine and stays there, in an encrypted
file; the signer's policy has the public half. What is signed is the canonical bytes of a `Payment`, a `Release` or an
`Unhalt` (model/authorizations), which begin with a label of their kind.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from bursar.model.actors import check_actor, same_person
from bursar.model.authorizations import Approval, Payment, Release, Unhalt
from bursar.ports import Files
from bursar.signer import vault
from bursar.signer.errors import KeystoreRefused

PURPOSE: Final = "bursar approver key"

Approvable = Payment | Release | Unhalt


def create_key(
    files: Files,
    file: str,
    approver: str,
    passphrase: bytearray,
    token: vault.Token,
    *,
    scrypt_n: int = vault.SCRYPT_N,
) -> str:
    """Make an approver's key in an encrypted file; returns its public half, for the signer's policy."""
    name = check_actor(approver)
    vault.check_passphrase(file, passphrase)
    if vault.exists(files, file):
        raise KeystoreRefused(file, "there is such a file already; a key is never replaced")
    seed = bytearray.fromhex(token() + token())
    public = _public_half(seed)
    try:
        header = {"purpose": PURPOSE, "approver": name, "public_key": public}
        vault.write(files, file, vault.seal(header, seed, passphrase, token, scrypt_n=scrypt_n))
    finally:
        vault.wipe(seed)
    return public


def approve(
    files: Files, file: str, passphrase: bytearray, what: Approvable, *, scrypt_n: int = vault.SCRYPT_N
) -> Approval:
    """Sign with the key in a file."""
    header, sealed = vault.read_header(files, file, PURPOSE)
    seed = vault.unseal(file, header, sealed, passphrase, scrypt_n=scrypt_n)
    try:
        signature = Ed25519PrivateKey.from_private_bytes(bytes(seed)).sign(what.canonical())
    finally:
        vault.wipe(seed)
    return Approval(approver=header["approver"], signature=signature.hex())


def verify(public_key: str, message: bytes, signature: str) -> bool:
    """Whether the signature is over this message, by this key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


def people_who_approve(approvers: Mapping[str, str], approvals: Iterable[Approval], message: bytes) -> list[str]:
    """Distinct people (by `same_person`) whose signature over these bytes is right. Others do not count."""
    found: list[str] = []
    for approval in approvals:
        public_key = approvers.get(approval.approver)
        if public_key is None or any(same_person(approval.approver, name) for name in found):
            continue
        if verify(public_key, message, approval.signature):
            found.append(approval.approver)
    return found


def is_public_key(text: str) -> bool:
    """Whether this is the public half of an approver's key."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))
    except ValueError:
        return False
    return True


def _public_half(seed: bytearray) -> str:
    return Ed25519PrivateKey.from_private_bytes(bytes(seed)).public_key().public_bytes_raw().hex()
