"""What callers know of the signer: the questions, the answers, and what each answer promises.

Every answer carries the sequence of the signer's log at which it is true. The caller stores it with what it did
(W33). Anything but these answers (a lost connection, a timeout) says nothing: the signer may have signed, and the
caller asks again for exactly the same bytes (W30).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import msgspec

from bursar.model.authorizations import Authorization, Payment
from bursar.model.errors import BursarError, Refusal
from bursar.rails.chain import Shape

SECOND_SLOT: Final = "SECOND_SLOT"  # an earlier attempt may still pay, as far as the signer knows (W31)
NOTHING_TO_CANCEL: Final = "NOTHING_TO_CANCEL"  # it knows no attempt of the payout; a tombstone is one


@dataclass(eq=False)
class SignerRefused(Refusal):
    """The signer says no, and has not signed these bytes. It may say yes later, unless `denied`.

    A refusal is no tombstone: only `cancel` makes sure that the attempt will never be signed. OTHER_BYTES: the signer
    has signed other bytes for this attempt, and `cancel` says which.
    """

    reason: str  # a code: see rules.Reason
    why: str
    denied: bool  # True: this very payment will not be signed unless the policy changes
    sequence: int
    code = "SIGNER_REFUSED"
    text = "the signer refuses ({reason}): {why}"


@dataclass(eq=False)
class SignerUnavailable(BursarError):
    """No answer from the signer, or not from the right one. It says nothing about what was signed."""

    signer: str
    why: str
    code = "SIGNER_UNAVAILABLE"
    text = "signer {signer}: {why}"


class SignRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sign these bytes. Repeated with other bytes for the same (payout, attempt), it is refused."""

    payout: str
    attempt: int
    shape: Shape
    chain: str
    wallet: str  # name of the key
    sender: str  # its address, as the caller knows it
    unsigned: bytes
    payment: Payment
    authorization: Authorization


class Signature(msgspec.Struct, frozen=True, kw_only=True):
    """The attempt is signed, now or long ago. These are the only bytes there are for it."""

    raw: bytes
    hash: str
    sequence: int


class Never(msgspec.Struct, frozen=True, kw_only=True):
    """A tombstone: the attempt was never signed, and never will be (W30)."""

    sequence: int


class LogEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One signature or tombstone of the signer's log; of a signature, all that is needed to rebuild the attempt."""

    sequence: int
    at_us: int
    payout: str
    attempt: int
    request: SignRequest | None = None  # None: a tombstone, for which nothing need ever have been asked
    raw: bytes = b""  # empty: a tombstone
    hash: str = ""


class Preview(msgspec.Struct, frozen=True, kw_only=True):
    """The signer would sign this payment now. `nonce_floor`: one above the wallet's highest nonce signed."""

    nonce_floor: int
    sequence: int


class KnownAttempt(msgspec.Struct, frozen=True, kw_only=True):
    """What the signer has on record of one attempt of a payout."""

    attempt: int
    shape: Shape
    sender: str
    raw: bytes  # empty: a tombstone
    hash: str
    sequence: int


class SignerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The signer as operators see it."""

    name: str
    identity: str  # made once with its log, for ever
    sequence: int
    halted: str  # the reason; "": it signs


class Signer(Protocol):
    """The signer as callers use it. `SignerRefused` is a definite no; `SignerUnavailable` is no answer."""

    @property
    def name(self) -> str:
        """How marks and operators name it."""
        ...

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        """Would it sign this payment now? Asked before a nonce is taken; promises nothing."""
        ...

    async def sign(self, request: SignRequest) -> Signature | Never:
        """Sign, or say again what was signed; `Never` if the attempt was cancelled before."""
        ...

    async def cancel(self, payout: str, attempt: int) -> Signature | Never:
        """Make it definite: the bytes that were signed, or a tombstone."""
        ...

    async def attempts(self, payout: str) -> tuple[KnownAttempt, ...]:
        """All that it has signed or tombstoned for a payout. None: nothing of it was ever signed."""
        ...

    async def log(self, after: int, limit: int = 1_000) -> tuple[LogEntry, ...]:
        """Signatures and tombstones behind a sequence, in order."""
        ...

    async def status(self) -> SignerStatus:
        """Who it is, how far its log goes, and whether it signs."""
        ...
