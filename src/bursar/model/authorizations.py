"""What may be paid: the exact payment that people approve, or that a mandate allows. Pure.

An approval is a signature over the canonical bytes of a `Payment`, made with a key that no server holds. A mandate is a
name: the signer has what it allows, with its own limits, in its own policy. Both travel with the payout; the signer
verifies them, and nothing else does (W20, W32). People sign two more things with the same keys: the release of a payout
whose attempts are dead, and the end of a halt. Each kind of bytes begins with a label of its own, so that no signature
can be used for another kind. Signing and verifying is in `signer/approvals`.
"""

from __future__ import annotations

import hashlib

import msgspec

from bursar.model.documents import canonical_json

LABEL = "bursar payout approval 1"
RELEASE_LABEL = "bursar payout release 1"
UNHALT_LABEL = "bursar signer unhalt 1"


class Payment(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A payment, in every detail that could make it another one. Amounts are text, exact."""

    payout: str  # id of the payout: one payment, once
    source: str = ""  # what it is for: the request that people see
    requester: str = ""  # who asked for it: no approval of the same person counts
    account: str  # whose money it is, in the ledger
    asset: str
    amount: str  # in the ledger's smallest units
    fee: str = "0"  # charged to the account beside it, in the same units
    chain: str
    chain_id: int
    contract: str  # "": the chain's own coin
    decimals: int
    amount_raw: str  # in the chain's smallest units
    to: str
    memo: str = ""
    expires_us: int = 0  # after which no new signature is made for it; 0: never

    def canonical(self) -> bytes:
        """The bytes that are approved."""
        return f"{LABEL}\n{canonical_json(msgspec.to_builtins(self))}".encode()

    def digest(self) -> str:
        """Their SHA-256 in hexadecimal digits: what an approver compares."""
        return hashlib.sha256(self.canonical()).hexdigest()


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """One person's signature over a payment."""

    approver: str
    signature: str  # Ed25519, hexadecimal


class Authorization(msgspec.Struct, frozen=True, kw_only=True):
    """Why a payment may be made: the name of a mandate, or the approvals of people."""

    mandate: str = ""
    approvals: tuple[Approval, ...] = ()


class DeadAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """An attempt that can never pay, by its number and the hash of its transaction."""

    attempt: int
    hash: str


class Release(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two people declare attempts of a payout dead, so that the signer may sign it in another slot (W31)."""

    payout: str
    dead: tuple[DeadAttempt, ...]

    def canonical(self) -> bytes:
        """The bytes that are approved."""
        return f"{RELEASE_LABEL}\n{canonical_json(msgspec.to_builtins(self))}".encode()


class Unhalt(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two people let a signer sign again after a halt. Of this halt alone: the next one has another number."""

    signer: str  # identity of its log
    halted_at: int  # number of the entry that halted it

    def canonical(self) -> bytes:
        """The bytes that are approved."""
        return f"{UNHALT_LABEL}\n{canonical_json(msgspec.to_builtins(self))}".encode()
