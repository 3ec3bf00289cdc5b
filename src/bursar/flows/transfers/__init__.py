"""Internal transfers: between funding accounts in the ledger and trading cores (specifications 000 and 001)."""

from bursar.flows.transfers.checks import Code, TransferRefused
from bursar.flows.transfers.machine import MACHINE
from bursar.flows.transfers.request import AccountType, Request, Transfer
from bursar.flows.transfers.transfers import Filter, Limits, Transfers, View

__all__ = [
    "MACHINE",
    "AccountType",
    "Code",
    "Filter",
    "Limits",
    "Request",
    "Transfer",
    "TransferRefused",
    "Transfers",
    "View",
]
