"""External deposits: money that arrives from outside, by a unique reference; large ones by two people (L25)."""

from bursar.flows.deposits.deposits import Deposit, Deposits, DepositView
from bursar.flows.deposits.machine import MACHINE

__all__ = ["MACHINE", "Deposit", "DepositView", "Deposits"]
