"""Bursar moves money between systems that cannot share a transaction, and never loses or duplicates any.

    async with bursar.open("sqlite:///funds.db", flows=[orders]) as b:
        await b.ledger.create_asset("USDT", precision=6)
        order = await b.start(orders, Order("Dune", 999), key="order-7")

`b.ledger` is the ledger: immutable signed postings, whose sum is the balance and whose every commit conserves every
asset. `flow`, `call`, `done`, `pending` and `Refused` make flows of your own: durable state machines that call other
systems. `bursar.sync.open` is the same for programs without an event loop; `bursar.testing` crashes a flow everywhere.
"""

from bursar.engine import Answer, Booking, Flow, FlowRecord
from bursar.engine.decorators import Body, Refused, automatic, call, done, flow, pending, wait
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
    "Answer",
    "Asset",
    "AssetStatus",
    "Body",
    "Book",
    "Booking",
    "Bursar",
    "BursarError",
    "CappedOverdraft",
    "Conflict",
    "Entry",
    "Event",
    "EventKind",
    "ExternalAccount",
    "Flow",
    "FlowRecord",
    "Hold",
    "InsufficientFunds",
    "Money",
    "Movement",
    "NoOverdraft",
    "OutcomeUnknown",
    "Receipt",
    "Refusal",
    "Refused",
    "StoreError",
    "SystemAccount",
    "UncappedOverdraft",
    "automatic",
    "call",
    "deposit",
    "done",
    "errors",
    "flow",
    "open",
    "pay",
    "pending",
    "wait",
    "withdraw",
]
