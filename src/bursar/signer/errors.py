"""What keeps a signer from starting or from going on, each with what a person can do about it.

None of these is an answer to a caller: those are in `protocol`. No message ever contains a secret.
"""

from __future__ import annotations

from dataclasses import dataclass

from bursar.model.errors import Refusal, StoreError


@dataclass(eq=False)
class SignerInUse(StoreError):
    """Another signer works in this folder."""

    folder: str
    code = "SIGNER_IN_USE"
    text = "another signer works in {folder}; stop it first: two signers must never share one log"


@dataclass(eq=False)
class SignerDamaged(StoreError):
    """The log is not what a signer leaves behind, crash or not. Nothing was changed."""

    file: str
    where: int
    why: str
    code = "SIGNER_DAMAGED"
    text = (
        "{file} is damaged at byte {where}: {why}. Nothing was changed. Put the newest whole copy of the file in its "
        "place; a shorter one makes the signer forget signatures, and callers that have seen more refuse it (W33)"
    )


@dataclass(eq=False)
class SignerStopped(StoreError):
    """The disk failed while the log was written. What was asked and not answered may have been signed or not."""

    why: str
    code = "SIGNER_STOPPED"
    text = (
        "the disk failed ({why}) and the signer has ended without answering; mend the disk or make room, then start it "
        "again: callers without an answer ask again for the same bytes"
    )


@dataclass(eq=False)
class NoLog(StoreError):
    """There is no log in the folder, or there is one already."""

    folder: str
    why: str
    code = "NO_SIGNER_LOG"
    text = "{folder}: {why}"


@dataclass(eq=False)
class PolicyRefused(Refusal):
    """The policy file is wrong; every problem is named."""

    file: str
    problems: str
    code = "POLICY_REFUSED"
    text = "the policy {file} is refused: {problems}"


@dataclass(eq=False)
class KeystoreRefused(Refusal):
    """The keystore or an approver's key can't be opened or changed."""

    file: str
    why: str
    code = "KEYSTORE_REFUSED"
    text = "{file}: {why}"


@dataclass(eq=False)
class KeyUnavailable(StoreError):
    """The device or service that holds a key does not sign now."""

    wallet: str
    why: str
    code = "KEY_UNAVAILABLE"
    text = "the key of wallet {wallet} can't be used now: {why}"
