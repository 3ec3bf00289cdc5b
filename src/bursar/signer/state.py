"""What a signer remembers: every attempt, who has which slot, how much was signed in the last hours. Pure.

It is what the log says, entry by entry (`apply`), and nothing else. Rebuilt when the signer starts.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

import msgspec

from bursar.model.authorizations import Payment
from bursar.rails.chain import Shape
from bursar.signer import entries
from bursar.signer.entries import NO_HASH, Entry
from bursar.signer.protocol import Never, Signature, SignRequest

HOUR_US: Final = 3_600_000_000
DAY_US: Final = 24 * HOUR_US
TOMBSTONES: Final = "tombstones"  # the scope in which they are counted


@dataclass(slots=True)
class Attempt:
    """One attempt of a payout: signed, or a tombstone (no bytes)."""

    number: int
    sequence: int
    raw: bytes = b""
    hash: str = ""
    asked: bytes = b""  # digest of what was asked for
    shape: Shape = Shape.PAY
    chain: str = ""
    sender: str = ""
    slot: str = ""
    nonce: int | None = None
    dead: bool = False  # people or the signer's own nodes have said so

    @property
    def answer(self) -> Signature | Never:
        """What is said about it, now and for ever."""
        if not self.raw:
            return Never(sequence=self.sequence)
        return Signature(raw=self.raw, hash=self.hash, sequence=self.sequence)

    @property
    def pays(self) -> bool:
        """Whether it may still move the money."""
        return bool(self.raw) and self.shape is Shape.PAY and not self.dead


@dataclass(slots=True)
class Payout:
    """All attempts of one payout."""

    attempts: dict[int, Attempt] = field(default_factory=dict)
    payment: bytes = b""  # digest of what it pays, whenever its approval expires; empty: nothing was signed
    scopes: set[str] = field(default_factory=set)  # in which its amount was counted
    witnessed: int = 0  # how often the signer's own nodes have shown attempts of it dead


class Usage:
    """How much was signed in one scope, and when. Times never go back here: a clock that does counts for longer."""

    __slots__ = ("_sums", "_times")

    def __init__(self) -> None:
        self._times: list[int] = []
        self._sums: list[int] = [0]

    def add(self, at_us: int, amount: int) -> None:
        """So much more."""
        self._times.append(max(at_us, self._times[-1]) if self._times else at_us)
        self._sums.append(self._sums[-1] + amount)

    def since(self, at_us: int) -> int:
        """How much, after that moment."""
        return self._sums[-1] - self._sums[bisect_right(self._times, at_us)]


@dataclass
class State:
    """A signer's memory."""

    name: str = ""
    identity: str = ""
    number: int = 0  # of the last entry
    sequence: int = 0  # promises to callers so far
    last_hash: str = NO_HASH
    halted: str = ""  # why; "": it signs
    halted_at: int = 0  # number of that entry
    behind: int = 0  # the sequence that a caller has seen and this log does not have
    payouts: dict[str, Payout] = field(default_factory=dict)
    slots: dict[str, str] = field(default_factory=dict)  # slot → the one payout that has it, for ever
    nonces: dict[str, int] = field(default_factory=dict)  # chain id and sender → the highest nonce signed
    usage: dict[str, Usage] = field(default_factory=dict)

    def attempt(self, payout: str, number: int) -> Attempt | None:
        """What is on record for an attempt."""
        found = self.payouts.get(payout)
        return None if found is None else found.attempts.get(number)

    def used(self, scope: str, since_us: int) -> int:
        """How much was signed in a scope after a moment."""
        usage = self.usage.get(scope)
        return 0 if usage is None else usage.since(since_us)

    def nonce_floor(self, chain_id: int, sender: str) -> int:
        """One above the highest nonce that was signed for a wallet."""
        return self.nonces.get(f"{chain_id}:{sender}", -1) + 1

    def apply(self, entry: Entry, hash_: str) -> None:
        """The next entry. Whether it follows the one before has been checked."""
        self.number, self.sequence, self.last_hash = entry.number, entry.sequence, hash_
        match entry.what:
            case entries.Created(name=name, identity=identity):
                self.name, self.identity = name, identity
            case entries.Signed():
                self._sign(entry.sequence, entry.at_us, entry.what)
            case entries.Tombstone(payout=payout, attempt=number):
                record = self.payouts.setdefault(payout, Payout())
                record.attempts[number] = Attempt(number, entry.sequence)
                self.usage.setdefault(TOMBSTONES, Usage()).add(entry.at_us, 1)
            case entries.DeclaredDead(release=release, approvals=approvals):
                record = self.payouts[release.payout]
                record.witnessed += not approvals
                for dead in release.dead:
                    record.attempts[dead.attempt].dead = True
            case entries.Halted(reason=reason):
                self.halted, self.halted_at = reason, entry.number
            case entries.Behind(seen=seen):
                self.behind, self.halted_at = seen, entry.number
            case entries.Unhalted():
                self.halted, self.behind = "", 0

    def _sign(self, sequence: int, at_us: int, signed: entries.Signed) -> None:
        request = signed.request
        record = self.payouts.setdefault(request.payout, Payout())
        record.attempts[request.attempt] = Attempt(
            request.attempt,
            sequence,
            signed.raw,
            signed.hash,
            asked_for(request),
            request.shape,
            request.chain,
            request.sender,
            signed.slot,
            signed.nonce,
        )
        if request.shape is Shape.PAY and not record.payment:
            record.payment = payment_digest(request.payment)
        self.slots[signed.slot] = request.payout
        if signed.nonce is not None:
            wallet = f"{signed.chain_id}:{request.sender}"
            self.nonces[wallet] = max(signed.nonce, self.nonces.get(wallet, -1))
        for counted in signed.counted:
            self.usage.setdefault(counted.scope, Usage()).add(at_us, int(counted.amount))
            record.scopes.add(counted.scope)


def asked_for(request: SignRequest) -> bytes:
    """What makes a request the same request: the bytes, and for whom they are signed."""
    parts = (request.shape.value, request.chain, request.wallet, request.sender, request.unsigned)
    return hashlib.sha256(msgspec.msgpack.encode(parts)).digest()


def payment_digest(payment: Payment) -> bytes:
    """What makes a payment the same payment, also when its approval was renewed."""
    return hashlib.sha256(msgspec.msgpack.encode(msgspec.structs.replace(payment, expires_us=0))).digest()
