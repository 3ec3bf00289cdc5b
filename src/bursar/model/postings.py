"""Postings: immutable signed amounts, each owned by one account, each spent at most once.

A posting's number says where it came from: the number of its envelope shifted left by 16 bits, plus its place in it.
Lifecycle: live → (reserved → live) → spent. *Live* is a row in a disposable table; *spent* is a row that names the
spender. Reservations exist only where the store can't do several statements in one transaction (split mode).
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

INDEX_BITS = 16
POSTINGS_MAX = 2**INDEX_BITS - 1  # postings that one envelope may consume, and may create
SEQ_MAX = 2 ** (63 - INDEX_BITS) - 1


class PostingState(StrEnum):
    """Where a posting is in its lifecycle."""

    LIVE = "live"
    RESERVED = "reserved"
    SPENT = "spent"


class Posting(msgspec.Struct, frozen=True, gc=False):
    """A signed amount of one asset owned by one account. `account` and `asset` are row numbers."""

    id: int
    account: int
    asset: int
    amount: int

    @property
    def envelope(self) -> int:
        """Number of the envelope that created it."""
        return self.id >> INDEX_BITS


def posting_id(seq: int, index: int) -> int:
    """Number of the posting at a place in an envelope."""
    return seq << INDEX_BITS | index
