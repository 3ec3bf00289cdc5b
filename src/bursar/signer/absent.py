"""The signer of a process that has none: every question is unanswered, so nothing is signed and nothing is given back.

Operators' commands that need only the database use it: they read payouts and write signals down, and the process that
has the signer acts on them.
"""

from __future__ import annotations

from typing import NoReturn

from bursar.model.authorizations import Authorization, Payment
from bursar.signer.protocol import (
    KnownAttempt,
    LogEntry,
    Never,
    Preview,
    Signature,
    SignerStatus,
    SignerUnavailable,
    SignRequest,
)


class AbsentSigner:
    """Implements `protocol.Signer`, and answers nothing."""

    name = "none"

    def _no_answer(self) -> NoReturn:
        raise SignerUnavailable(self.name, "no signer is configured in this process")

    async def preview(self, payment: Payment, authorization: Authorization, wallet: str) -> Preview:
        self._no_answer()

    async def sign(self, request: SignRequest) -> Signature | Never:
        self._no_answer()

    async def cancel(self, payout: str, attempt: int) -> Signature | Never:
        self._no_answer()

    async def attempts(self, payout: str) -> tuple[KnownAttempt, ...]:
        self._no_answer()

    async def log(self, after: int, limit: int = 1_000) -> tuple[LogEntry, ...]:
        self._no_answer()

    async def status(self) -> SignerStatus:
        self._no_answer()
