"""Bursar moves money between systems that cannot share a transaction, and never loses or duplicates any.

    async with bursar.open("sqlite:///funds.db") as b:
        await b.ledger.create_asset("USDT", precision=6)
        ...

This package is the ledger: immutable signed postings, whose sum is the balance and whose every commit conserves every
asset. `bursar.sync.open` is the same for programs without an event loop.
"""

from bursar.instance import Bursar, open
from bursar.model import errors
from bursar.model.accounts import (
    Account,
    AccountStatus,
    Book,
    CappedOverdraft,
    ExternalAccount,
    NoOverdraft,
    SystemAccount,
    UncappedOverdraft,
)
from bursar.model.entries import Entry, Movement, deposit, pay, withdraw
from bursar.model.envelope import Receipt
from bursar.model.errors import BursarError, Conflict, InsufficientFunds, OutcomeUnknown, Refusal, StoreError
from bursar.model.money import Asset, AssetStatus, Money
from bursar.model.records import Event, EventKind
from bursar.model.views import Hold

__version__ = "0.1.0"
__all__ = [
    "Account",
    "AccountStatus",
    "Asset",
    "AssetStatus",
    "Book",
    "Bursar",
    "BursarError",
    "CappedOverdraft",
    "Conflict",
    "Entry",
    "Event",
    "EventKind",
    "ExternalAccount",
    "Hold",
    "InsufficientFunds",
    "Money",
    "Movement",
    "NoOverdraft",
    "OutcomeUnknown",
    "Receipt",
    "Refusal",
    "StoreError",
    "SystemAccount",
    "UncappedOverdraft",
    "deposit",
    "errors",
    "open",
    "pay",
    "withdraw",
]
