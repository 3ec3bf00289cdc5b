"""A payment in plain words: what an approver reads before signing it. Pure.

Every field that the signature covers is there, and nothing else. Whatever shows a payment to an approver uses this, so
that no two of them show different things.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Final

from bursar.model.authorizations import Payment
from bursar.model.money import Asset
from bursar.model.views import moment

DECIMALS_MAX: Final = 77  # of a 256-bit amount


def on_chain(payment: Payment) -> str:
    """What the chain is told to move, in units of the asset: exact, and known from the payment alone."""
    if not (payment.amount_raw.isascii() and payment.amount_raw.isdigit() and 0 <= payment.decimals <= DECIMALS_MAX):
        raise ValueError(f"{payment.amount_raw!a} with {payment.decimals} decimals is no amount")
    whole = Decimal((0, tuple(map(int, payment.amount_raw)), -payment.decimals))
    return f"{whole:f}"


def covered(payment: Payment, asset: Asset) -> list[tuple[str, str]]:
    """What the signature covers: names and values, in the order in which a person reads them."""
    return [
        ("pays", f"{asset.of_minor(int(payment.amount))} {payment.asset}"),
        ("to", payment.to),
        ("on", f"{payment.chain} (chain id {payment.chain_id})"),
        ("from the account", payment.account),
        ("for", payment.source),
        ("requested by", payment.requester or "not said"),
        ("fee to us", f"{asset.of_minor(int(payment.fee))} {payment.asset}"),
        ("on the chain", f"{payment.amount_raw} with {payment.decimals} decimals"),
        ("contract", payment.contract or "none: the chain's own coin"),
        ("memo", payment.memo or "none"),
        ("expires", f"{moment(payment.expires_us):%Y-%m-%d %H:%M:%S} UTC" if payment.expires_us else "never"),
        ("payout", payment.payout),
    ]
