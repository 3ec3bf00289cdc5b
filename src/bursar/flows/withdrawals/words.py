"""What a user may be told about why a withdrawal waits. Pure.

Words for users are made where the decision is (`risk`). Its codes name what stands behind them, and a code such as
SCREENING_REVIEW would tell a person who is suspected. So users get codes of their own for these.
"""

from __future__ import annotations

from typing import Final

from bursar.flows.withdrawals.risk import Code

UNDER_REVIEW: Final = "UNDER_REVIEW"
_TOLD: Final = dict.fromkeys((Code.SCREENING_REVIEW, Code.SCREENING_UNANSWERED, Code.RETURNED), UNDER_REVIEW)


def code_for_user(code: Code) -> str:
    """The code of a reason, as its user reads it."""
    return _TOLD.get(code, code.value)
