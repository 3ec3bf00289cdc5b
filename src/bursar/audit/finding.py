"""What an audit says: the invariants by number, and one finding for each that was checked.

Numbers are those of the design (§12); I5, I6 and I9 speak of cores, withdrawals and chains and are checked where those
are known.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

EVIDENCE_MAX = 10  # pieces of evidence kept per invariant; one is enough to act on

INVARIANTS: dict[str, str] = {
    "I1": "per asset, all live postings sum to zero",
    "I2": "every posting is spent at most once, by an envelope that lists it",
    "I3": "live = postings - spends; every kept balance is a sum of these",
    "I4": "what is in transit belongs to an open record, and what records own in transit is there",
    "I7": "an operation has one effect if it was answered with success, and none if it was refused",
    "I8": "envelopes and documents hash to their ids, and each envelope conserves every asset",
}

# Checked by those who know the other side, and reported alike.
ELSEWHERE: dict[str, str] = {
    "I5": "a core's total is what the ledger has booked there, and what is about to be",
    "I6": "what withdrawals have requested is what they paid, with our fees, gave back, and still hold",
    "I9": "every wallet has on its chain what the ledger says that it has",
}

Progress = Callable[[str, int, int], None]  # what is being looked at, how much of it is done, of how much (0: unknown)


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One invariant, and whether it holds."""

    invariant: str
    ok: bool  # nothing broken was found
    checked: int  # how many rows were looked at
    broken: list[str]  # the first pieces of evidence, each one line
    seconds: float
    judged: bool = True  # False: it can't be judged now, or not of all rows; `note` says why, and what to do first
    not_judged: int = 0  # how many rows can't be read, and are not judged
    note: str = ""

    @property
    def meaning(self) -> str:
        """What the invariant says."""
        return (INVARIANTS | ELSEWHERE)[self.invariant]


class Evidence:
    """Collects what is broken, up to as much as an operator will read."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.count = 0

    def add(self, text: str) -> None:
        """Something is not as it should be."""
        self.count += 1
        if len(self.found) < EVIDENCE_MAX:
            self.found.append(text)

    @property
    def note(self) -> str:
        """Says that there is more, if there is."""
        return f"the first {EVIDENCE_MAX} are shown; there are more" if self.count > EVIDENCE_MAX else ""
