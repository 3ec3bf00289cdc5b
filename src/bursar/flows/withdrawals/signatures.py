"""Whose signatures over a payment are right. The one place of withdrawals that needs `bursar[signer]` (Ed25519).

The library is loaded when the first approval is looked at: a program that takes no approvals does without it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bursar.model.authorizations import Approval, Payment


def people_who_approve(keys: Mapping[str, str], approvals: Iterable[Approval], payment: Payment) -> tuple[str, ...]:
    """Distinct people, of those who have these public keys, who have signed exactly this payment."""
    from bursar.signer.approvals import people_who_approve as verified  # noqa: PLC0415 (an extra, as said above)

    return tuple(verified(keys, approvals, payment.canonical()))
