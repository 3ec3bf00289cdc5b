"""Withdrawals: what users want to have paid out, and who allowed it. `Withdrawals` is the way in."""

from bursar.flows.withdrawals.machine import MACHINE
from bursar.flows.withdrawals.policy import KINDS
from bursar.flows.withdrawals.withdrawal import (
    Quote,
    WithdrawalCode,
    WithdrawalRefused,
    WithdrawalRequest,
    WithdrawalView,
)
from bursar.flows.withdrawals.withdrawals import Withdrawals

__all__ = [
    "KINDS",
    "MACHINE",
    "Quote",
    "WithdrawalCode",
    "WithdrawalRefused",
    "WithdrawalRequest",
    "WithdrawalView",
    "Withdrawals",
]
