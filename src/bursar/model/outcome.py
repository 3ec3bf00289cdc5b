"""Outcomes: how a call to another system can end, and what each outcome allows.

Two outcomes are definite, four are unknown. An unknown is never a refusal: the other side may have moved the money and
the reply been lost, so giving it back would pay twice (specification 000 §2.3, T1).

Not here: which reply of which rail is which outcome (rails/), and when to call again (retry).
"""

from __future__ import annotations

from enum import StrEnum
from typing import assert_never


class Outcome(StrEnum):
    """How a call ended. Every exception from an adapter is `UNKNOWN`."""

    SUCCESS = "SUCCESS"  # it happened, durably
    # It did not and never will: a refusal on the rail's written list, or proof of death.
    EXPLICIT_FAIL = "EXPLICIT_FAIL"
    TIMEOUT = "TIMEOUT"  # no reply in time
    PENDING = "PENDING"  # the other side is still working on it
    NETWORK_ERROR = "NETWORK_ERROR"  # the connection broke, before or after the effect
    UNKNOWN = "UNKNOWN"  # anything else at all

    @property
    def is_known(self) -> bool:
        """Whether a record may leave its state on this. On every other outcome it stays and the call is made again."""
        match self:
            case Outcome.SUCCESS | Outcome.EXPLICIT_FAIL:
                return True
            case Outcome.TIMEOUT | Outcome.PENDING | Outcome.NETWORK_ERROR | Outcome.UNKNOWN:
                return False  # money could be lost or doubled here by answering True
            case _:
                assert_never(self)

    @property
    def may_give_back(self) -> bool:
        """Whether this may lead towards giving money back. Only proof that it did not happen does."""
        return self is Outcome.EXPLICIT_FAIL


UNKNOWNS: tuple[Outcome, ...] = tuple(outcome for outcome in Outcome if not outcome.is_known)
