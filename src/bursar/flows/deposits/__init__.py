"""Money that arrives from outside: by an operator's reference, large sums by two people (L25); or from chains, seen at
users' own addresses."""

from bursar.flows.deposits.arrivals import ARRIVALS
from bursar.flows.deposits.deposits import MACHINE, Deposits, DepositView
from bursar.flows.deposits.from_chains import ChainDeposits
from bursar.flows.deposits.rules import KINDS
from bursar.flows.transfers.incoming import Deposit

__all__ = ["ARRIVALS", "KINDS", "MACHINE", "ChainDeposits", "Deposit", "DepositView", "Deposits"]
