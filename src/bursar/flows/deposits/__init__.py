"""External deposits: money that arrives from outside, by a unique reference; large ones by two operators (L25)."""

from bursar.flows.deposits.deposits import MACHINE, Deposits, DepositView
from bursar.flows.transfers.incoming import Deposit

__all__ = ["MACHINE", "Deposit", "DepositView", "Deposits"]
