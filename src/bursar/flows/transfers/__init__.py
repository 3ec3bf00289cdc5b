"""Internal transfers: between funding accounts in the ledger and trading cores (specifications 000 and 001)."""

from bursar.flows.transfers.checks import Code, CommitUnknown, Limits, TransferRefused
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, Filter, Request, Transfer, View
from bursar.flows.transfers.transfers import Transfers

__all__ = [
    "MACHINE",
    "AccountType",
    "Code",
    "CommitUnknown",
    "Filter",
    "Limits",
    "Request",
    "Transfer",
    "TransferRefused",
    "Transfers",
    "View",
]
