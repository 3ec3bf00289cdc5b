"""Money that arrives from outside: by an operator's reference, large sums by two people (L25); or from chains, seen at
users' own addresses."""

from bursar.flows.deposits.arrivals import ARRIVALS
from bursar.flows.deposits.deposits import MACHINE, Deposits, DepositView
from bursar.flows.deposits.from_chains import ChainDeposits, DepositCode, DepositRefused
from bursar.flows.deposits.rules import DEPOSITS, KINDS, DepositRules
from bursar.flows.transfers.incoming import Deposit

__all__ = [
    "ARRIVALS",
    "DEPOSITS",
    "KINDS",
    "MACHINE",
    "ChainDeposits",
    "Deposit",
    "DepositCode",
    "DepositRefused",
    "DepositRules",
    "DepositView",
    "Deposits",
]
